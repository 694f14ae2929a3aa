"""`dspark profile`: rounds per second by tokens in the verify pass, as JSON and a table."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..evaluation.loading import load_pair, load_target
from ..packing import is_packed
from ..profile_dspark import SPSProfile
from ..profiling_dspark import measure_profile


def profile(
    target: Annotated[str, typer.Option(help="Folder or Hub id of the target, or demo.")] = "demo",
    drafter: Annotated[str | None, typer.Option(help="Folder or Hub id; its cost is part of a round.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Batch size, 1 by default; may be given again.")] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(help="Tokens in the cache, 256 by default; may be given again, the middle one gives the curve."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Passes of each kind, of which the median counts.")] = 5,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    pack: Annotated[bool, typer.Option(help="Pack linear layers for the CPU.")] = True,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("runs/profile.json"),
) -> None:
    """Measures rounds per second of TARGET by tokens in the verify pass, the draft included: what schedulers read."""
    if threads:
        torch.set_num_threads(threads)
    if drafter is None:
        model, draft_model = load_target(target, pack)[0], None
    else:
        model, _, draft_model = load_pair(target, drafter, pack)
    result = measure_profile(
        model,
        draft_model,
        rows=rows or (1,),
        context=context or 256,
        repeats=repeats,
        progress=lambda items: track(items, "passes", transient=True),
    )
    result.details["settings"] |= {"target": target, "drafter": drafter, "packed": is_packed(model)}
    output.parent.mkdir(parents=True, exist_ok=True)
    result.save(output)
    console = Console(highlight=False)
    console.print(table(result))
    if result.details["machine"]["loaded"]:
        console.print("The machine was busy with other work: measure again when it is quiet.")


def table(result: SPSProfile) -> Table:
    """The curves, one line per point; the cost is relative to a step of plain decoding."""
    lines = Table("rows", "tokens", "ms", "rounds/s", "cost", box=None)
    for curve in result.batches.values() or [result]:
        count, plain = curve.details["rows"], curve.plain_steps_per_second
        lines.add_row(str(count), "plain", f"{1e3 / plain:.1f}", f"{plain:.1f}", "1.00")
        for tokens, steps in zip(curve.tokens, curve.steps_per_second, strict=True):
            lines.add_row(str(count), str(tokens), f"{1e3 / steps:.1f}", f"{steps:.1f}", f"{plain / steps:.2f}")
    return lines
