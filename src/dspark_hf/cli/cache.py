"""`dspark cache build | info | verify`: a target's states of training texts, on disk."""

from pathlib import Path
from typing import Annotated

import torch
import typer
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..configuration_dspark import DSparkConfig
from ..demo_target import target_path
from ..training.cache import build_cache, verify_cache
from ..training.data import load_answers
from ..training.features import OnlineStates
from ..training.manifest import CacheSource, Manifest, human_size

cache = typer.Typer(no_args_is_help=True, help="Stores a target's states of training texts on disk.")
Folder = Annotated[Path, typer.Argument(help="The folder of a cache.")]

DTYPES = ("auto", "bfloat16", "float16", "float32")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@cache.command()
def build(
    target: Annotated[str, typer.Option(help="Folder or Hub id, or demo.")],
    answers: Annotated[list[Path], typer.Option(help="JSONL of prompt_ids and response_ids; may be given again.")],
    output: Annotated[Path, typer.Option(help="The cache's folder.")],
    layers: Annotated[str | None, typer.Option(help="Target layers that the drafter reads, as 1,8,14.")] = None,
    drafter_config: Annotated[str | None, typer.Option(help="Folder or Hub id of a drafter that names them.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML whose drafter.target_layer_ids names them.")] = None,
    format: Annotated[str, typer.Option(help="exact, or compressed to about half of bfloat16.")] = "exact",
    max_length: Annotated[int, typer.Option(help="Tokens that texts are cut to.")] = 512,
    dtype: Annotated[str, typer.Option(help=f"Of the target: {', '.join(DTYPES)}.")] = "auto",
    shard_size: Annotated[str, typer.Option(help="Of a file, which is also held in memory, as 500MB.")] = "1GiB",
    limit: Annotated[int | None, typer.Option(help="Texts to take.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Computes the states of all texts that the cache does not hold yet; a stopped build goes on."""
    if threads:
        torch.set_num_threads(threads)
    layer_ids, shard_bytes = chosen_layers(layers, drafter_config, recipe), parse_size(shard_size)
    samples = load_answers(answers, max_length)[:limit]
    if not samples:
        raise ValueError(f"{', '.join(map(str, answers))} has no texts with a response within {max_length} tokens")
    model, tokenizer = load_target(target, dtype)
    config = model.config.get_text_config()
    highest = max(int(sample["input_ids"].max()) for sample in samples)
    if highest >= config.vocab_size:
        raise ValueError(f"the answers hold the token {highest}, expected 0..{config.vocab_size - 1}: they are of "
                         "another target")  # fmt: skip
    states = OnlineStates(
        model, layer_ids, with_logsumexp=True, softcap=getattr(config, "final_logit_softcapping", None)
    )
    console = Console(highlight=False, soft_wrap=True)
    manifest = build_cache(
        samples,
        states.features,
        output,
        CacheSource.of(model, tokenizer, layer_ids, target),
        format=format,
        shard_bytes=shard_bytes,
        announce=lambda estimate: console.print(str(estimate)),
        progress=lambda texts: track(texts, "texts", console=console),
    )
    console.print(f"{output}: {manifest.num_samples} texts, {human_size(manifest.size)}")


@cache.command()
def info(folder: Folder) -> None:
    """Prints what a cache holds."""
    manifest = Manifest.load(folder)
    source, tokens = manifest.source, manifest.num_tokens
    rows = Table(box=None, show_header=False)
    rows.add_row("target", f"{source.target}, revision {source.revision or 'unknown'}, weights {source.weights}")
    rows.add_row("layers", ", ".join(map(str, source.layer_ids)))
    rows.add_row("hidden size", str(source.hidden_size))
    rows.add_row("format", f"{manifest.format}, computed in {source.dtype}")
    rows.add_row("tokenizer, chat template", f"{source.tokenizer}, {source.chat_template}")
    rows.add_row("texts", str(manifest.num_samples))
    rows.add_row("tokens", f"{tokens}, {sum(shard.supervised for shard in manifest.shards)} supervised")
    rows.add_row("size", f"{human_size(manifest.size)}, {human_size(manifest.size / max(tokens, 1))} a token")
    shards = Table("shard", "texts", "tokens", "size", "sha256", box=None)
    for shard in manifest.shards:
        shards.add_row(
            shard.file, str(len(shard.samples)), str(shard.tokens), human_size(shard.size), shard.sha256[:16]
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(rows)
    console.print(shards)


@cache.command()
def verify(folder: Folder) -> None:
    """Reads all of a cache, and names every shard that is missing, torn, altered or foreign."""
    manifest = verify_cache(folder, lambda shards: track(shards, "shards"))
    print(f"{folder}: {len(manifest.shards)} shards, {manifest.num_samples} texts, all whole")


def load_target(name: str, dtype: str):
    """The frozen target, on the GPU where there is one, and its tokenizer; `demo` is the one of `dspark demo`."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    path = target_path(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(path)


def chosen_layers(layers: str | None, drafter_config: str | None, recipe: Path | None) -> list[int]:
    """Layer ids from the one of the three options that was given."""
    if sum(option is not None for option in (layers, drafter_config, recipe)) != 1:
        raise ValueError(f"layers is {layers}, drafter-config {drafter_config}, recipe {recipe}; expected one of them")
    if drafter_config is not None:
        return DSparkConfig.from_pretrained(drafter_config).target_layer_ids
    if recipe is not None:
        try:
            return list(yaml.safe_load(recipe.read_text(encoding="utf-8"))["drafter"]["target_layer_ids"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{recipe} has no list drafter.target_layer_ids, expected one") from error
    try:
        return [int(part) for part in layers.split(",")]
    except ValueError as error:
        raise ValueError(f"layers is {layers!r}, expected numbers as 1,8,14") from error


def parse_size(text: str) -> int:
    """`"500MB"` or `"1GiB"` in bytes."""
    number = text.rstrip("BGKMbgikm")
    try:
        size = round(float(number) * UNITS[text[len(number) :].upper()])
    except (ValueError, KeyError) as error:
        raise ValueError(f"shard size is {text!r}, expected a number and one of {', '.join(UNITS)}") from error
    return size
