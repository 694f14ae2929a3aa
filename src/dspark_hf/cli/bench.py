"""`dspark bench`: plain and drafted generation side by side, as JSON and a table; `dspark bench train`: what training
costs."""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..demo_target import demo_target_path
from ..evaluation.benchmark import Arm, parse_policy, run_benchmark
from ..evaluation.loading import load_pair, load_prompts, load_target
from ..evaluation.training_benchmark import objective_benchmark, throughput_benchmark
from ..training.manifest import human_size
from ..training.recipe import Recipe
from .demo import BUNDLED_DRAFTER

bench = typer.Typer(invoke_without_command=True, help="Measures generation with and without the drafter.")


@bench.callback()
def decode(
    context: typer.Context,
    target: Annotated[str | None, typer.Option(help="Folder or Hub id; the demo's by default.")] = None,
    drafter: Annotated[str, typer.Option(help="Folder or Hub id.")] = str(BUNDLED_DRAFTER),
    prompts: Annotated[str, typer.Option(help="JSONL of {'turns': [...]}, or gsm8k_test, chat_test.")] = "gsm8k_test",
    limit: Annotated[int, typer.Option(help="Prompts to take.")] = 50,
    policy: Annotated[list[str] | None, typer.Option(help="fixed:N or threshold:T; may be given again.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 128,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    pack: Annotated[bool, typer.Option(help="Pack linear layers for the CPU.")] = True,
    rivals: Annotated[bool, typer.Option(help="Also measure prompt lookup, and plain generation unpacked.")] = True,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("runs/bench.json"),
) -> None:
    """Measures generation with and without the drafter: tokens/s, speed-up, acceptance length."""
    if context.invoked_subcommand is not None:
        return
    if threads:
        torch.set_num_threads(threads)
    name = target or str(demo_target_path())
    packed, tokenizer, model = load_pair(name, drafter, pack)
    arms = [Arm("plain", packed, {})]
    if rivals and pack and packed.device.type == "cpu":
        arms.append(Arm("plain, not packed", load_target(name, pack=False)[0], {}))
    if rivals:
        arms.append(Arm("prompt lookup", packed, {"prompt_lookup_num_tokens": 7}))
    for text in policy or ["fixed"]:
        arms.append(Arm(f"dspark {text}", packed, {"assistant_model": model}, parse_policy(text)))
    result = run_benchmark(
        arms, tokenizer, load_prompts(prompts, limit), max_new_tokens, lambda items: track(items, "prompts")
    )
    result["settings"] |= {"prompt_set": prompts, "dtype": str(packed.dtype), "packed": pack}
    write(result, output)
    Console().print(table(result))


@bench.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="YAML whose states are measured, online and cached.")],
    answers: Annotated[str | None, typer.Option(help="JSONL of answers, in place of the recipe's.")] = None,
    target: Annotated[str | None, typer.Option(help="Folder or Hub id, or demo; in place of the recipe's.")] = None,
    texts: Annotated[int, typer.Option(help="Texts to train on in each arm.")] = 24,
    anchors: Annotated[int, typer.Option(help="Blocks of the objective.")] = 512,
    vocabulary: Annotated[int, typer.Option(help="Its vocabulary.")] = 49152,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("runs/bench-train.json"),
) -> None:
    """Measures the chunked objective against the plain one, and training with online states against cached ones."""
    if threads:
        torch.set_num_threads(threads)
    console = Console(highlight=False)
    objective = objective_benchmark(anchors, vocabulary=vocabulary)
    throughput = throughput_benchmark(Recipe.load(recipe, target=target, answers=answers), num_texts=texts)
    write({"objective": objective, "throughput": throughput}, output)
    rows = Table("objective", "seconds", "peak memory", box=None)
    for name, arm in objective["arms"].items():
        rows.add_row(name, f"{arm['seconds']:.2f}", human_size(arm["peak_bytes"]))
    console.print(rows)
    rows = Table("states", "anchors/s", box=None)
    for name, arm in throughput["arms"].items():
        rows.add_row(name, f"{arm['anchors_per_second']:.1f}")
    console.print(rows)


def write(result: dict, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1))


def table(result: dict) -> Table:
    """The summary, one row an arm."""
    rows = Table("", "tokens/s", "speed-up", "τ", "acceptance by position", "texts that differ (near-ties)", box=None)
    for name, arm in result["summary"].items():
        length = arm["acceptance_length"]
        rows.add_row(
            name,
            f"{arm['tokens_per_second']:.1f}",
            f"{arm['speed_up']:.2f}",
            "" if length is None else f"{length:.2f}",
            " ".join(f"{a:.2f}" for a in arm["acceptance_by_position"]),
            f"{arm['texts_that_differ']} ({arm['of_these_near_ties']})",
        )
    return rows
