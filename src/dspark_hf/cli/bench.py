"""`dspark bench`: plain and drafted generation side by side, as JSON and a table; `dspark bench batch`: the same for
batches, by policy; `dspark bench train`: what training costs."""

import importlib.util
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..baselines.dflash import to_native
from ..demo_target import demo_target_path
from ..evaluation.batch_benchmark import run_batch_benchmark, scheduling_cost
from ..evaluation.benchmark import SCHEDULERS, Arm, parse_policy, run_benchmark
from ..evaluation.evaluate import describe
from ..evaluation.loading import load_drafter, load_pair, load_prompts, load_target
from ..evaluation.training_benchmark import objective_benchmark, throughput_benchmark
from ..packing import is_packed, packed_where_possible
from ..profile_dspark import SPSProfile
from ..scheduling_dspark import FixedLength
from ..training.manifest import human_size
from ..training.recipe import Recipe
from .demo import BUNDLED_DRAFTER

# Repetitions of the profile that schedulers decide by, in a benchmark of single requests: with five, single points are
# off by 5 to 8 % where passes vary by 15.
_PROFILE_REPEATS = 15
POLICY_HELP = "fixed:N, threshold:T, prefix, stale or lookahead; may be given again."
bench = typer.Typer(invoke_without_command=True, help="Measures generation with and without the drafter.")


@bench.callback()
def decode(
    context: typer.Context,
    target: Annotated[str | None, typer.Option(help="Folder or Hub id; the demo's by default.")] = None,
    drafter: Annotated[str, typer.Option(help="Folder or Hub id.")] = str(BUNDLED_DRAFTER),
    prompts: Annotated[str, typer.Option(help="JSONL of {'turns': [...]}, or gsm8k_test, chat_test.")] = "gsm8k_test",
    limit: Annotated[int, typer.Option(help="Prompts to take.")] = 50,
    policy: Annotated[list[str] | None, typer.Option(help=POLICY_HELP)] = None,
    profile: Annotated[Path | None, typer.Option(help="SPS profile of `dspark profile`, for schedulers.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 128,
    mtp: Annotated[bool, typer.Option("--mtp", help="Also the target's own multi-token prediction.")] = False,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    pack: Annotated[bool, typer.Option(help="Pack linear layers for the CPU.")] = True,
    rivals: Annotated[bool, typer.Option(help="Also measure prompt lookup, and plain generation unpacked.")] = True,
    against: Annotated[
        list[str] | None, typer.Option(help="Another drafter: DSpark, DFlash or EAGLE-3; may be given again.")
    ] = None,
    assistant: Annotated[
        str | None, typer.Option(help="A small model for transformers' assisted generation: folder or Hub id.")
    ] = None,
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
    if rivals and is_packed(packed):
        arms.append(Arm("plain, not packed", load_target(name, pack=False)[0], {}))
    if rivals:
        arms.append(Arm("prompt lookup", packed, {"prompt_lookup_num_tokens": 7}))
    if mtp:
        arms.append(_own_mtp(packed))
    if assistant:
        arms.append(
            Arm(f"assistant {Path(assistant).name}", packed, {"assistant_model": load_target(assistant, pack)[0]})
        )
    drafted, curve = _drafted(policy or ["fixed"], packed, model, profile, repeats=_PROFILE_REPEATS)
    arms += drafted
    for other in against or []:
        arms += _rival(other, packed, pack)
    result = run_benchmark(
        arms, tokenizer, load_prompts(prompts, limit), max_new_tokens, lambda items: track(items, "prompts")
    )
    result["settings"] |= {"prompt_set": prompts, "dtype": str(packed.dtype), "packed": is_packed(packed)}
    result["profile"] = curve and curve.to_json()
    write(result, output)
    Console().print(table(result))


@bench.command()
def batch(
    target: Annotated[str | None, typer.Option(help="Folder or Hub id; the demo's by default.")] = None,
    drafter: Annotated[str, typer.Option(help="Folder or Hub id.")] = str(BUNDLED_DRAFTER),
    prompts: Annotated[str, typer.Option(help="JSONL of {'turns': [...]}, or gsm8k_test, chat_test.")] = "gsm8k_test",
    size: Annotated[list[int] | None, typer.Option(help="Rows of a batch; may be given again.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help=POLICY_HELP)] = None,
    profile: Annotated[Path | None, typer.Option(help="SPS profile of `dspark profile`, for schedulers.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 64,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    output: Annotated[Path, typer.Option(help="Where the JSON goes; the figure beside it.")] = Path("runs/batch.json"),
) -> None:
    """Measures batches: tokens/s of plain and drafted generation by size and policy, and the cost of scheduling."""
    if threads:
        torch.set_num_threads(threads)
    packed, tokenizer, model = load_pair(target or str(demo_target_path()), drafter)
    names = policy or ["fixed", "fixed:2", "threshold:0.4", "prefix", "stale", "lookahead"]
    sizes = size or [1, 2, 4, 8, 16]
    drafted, curve = _drafted(names, packed, model, profile, rows=sorted({1, *sizes}))
    arms = [Arm("plain", packed, {}), *drafted]
    result = run_batch_benchmark(
        arms, tokenizer, load_prompts(prompts, 100), sizes, max_new_tokens, progress=lambda work: track(work, "batches")
    )
    result["scheduling_seconds"] = {rows: scheduling_cost(rows) for rows in (1, 16, 256)}
    result["settings"] |= {"prompt_set": prompts, "dtype": str(packed.dtype)}
    result["profile"] = curve and curve.to_json()
    write(result, output)
    rows = Table("tokens/s", *map(str, sizes), box=None)
    for name, arm in result["summary"].items():
        rows.add_row(name, *(f"{arm[size]['tokens_per_second']:.1f} ({arm[size]['ratio']:.2f})" for size in sizes))
    console = Console()
    console.print(rows)
    for count, seconds in result["scheduling_seconds"].items():
        console.print(f"scheduling {count} requests takes {seconds * 1e6:.0f} µs")
    if importlib.util.find_spec("matplotlib"):
        from ..evaluation.plots import plot_batches

        plot_batches(result, output.with_suffix(".png"))


def _drafted(
    names: list[str], target, drafter, profile: Path | None, **measuring: Any
) -> tuple[list[Arm], SPSProfile | None]:
    """One arm per policy, and the profile that schedulers share, measured here unless one is given."""
    curve = None
    if any(name in SCHEDULERS for name in names):
        curve = SPSProfile.load(profile) if profile else SPSProfile.measure(target, drafter, **measuring)
    options = {"assistant_model": drafter}
    return [Arm(f"dspark {name}", target, options, parse_policy(name, curve)) for name in names], curve


def _own_mtp(target) -> Arm:
    """Multi-token prediction by the target's own layers for it, as transformers runs it."""
    layers = getattr(target.config.get_text_config(), "num_mtp_layers", None)
    if not layers:
        raise ValueError(f"num_mtp_layers of {target.config.name_or_path} is {layers}, expected 1 or more for --mtp")
    return Arm("MTP", target, {"use_mtp": True})


def _rival(name: str, target, pack: bool) -> list[Arm]:
    """Another drafter in our loop and, a DFlash that transformers can run by itself, natively too."""
    drafter = load_drafter(name, target.config, dtype=target.dtype).to(target.device).eval()
    label, models = f"{describe(drafter, name)['method']} {Path(name).name}", [drafter]
    if label.startswith("DFlash") and not drafter.config.sample_from_anchor:
        models.append(to_native(drafter))
    ours, *native = ({"assistant_model": packed_where_possible(model, pack)} for model in models)
    arms = [Arm(label, target, ours, FixedLength())]
    return arms + [Arm(f"{label}, native", target, options, speculation_type="dflash") for options in native]


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
    """The summary, one row an arm, in 80 columns; the JSON has more."""
    rows = Table("", "tokens/s", "speed-up", "τ", "forwards", "draft", "of η", "differ (ties)", box=None)
    rows.columns[0].no_wrap = True
    for name, arm in result["summary"].items():
        rows.add_row(
            name,
            f"{arm['tokens_per_second']:.1f}",
            f"{arm['speed_up']:.2f}",
            f"{arm['acceptance_length'] or arm['tokens_per_forward']:.2f}",
            str(arm["forwards"]),
            *("" if arm[key] is None else f"{arm[key]:.0%}" for key in ("draft_share", "attained")),
            f"{arm['texts_that_differ']} ({arm['of_these_near_ties']})",
        )
    rows.caption = "forwards of the target; draft: share of the time; η: what the parts of a round alone would allow"
    rows.caption_justify = "left"
    return rows
