"""`dspark plot`: all figures that a folder of results allows."""

from pathlib import Path
from typing import Annotated

import typer


def plot(
    results: Annotated[list[Path], typer.Argument(help="JSON of evaluate, calibrate, bench, bench batch, or folders.")],
    output: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path("runs/figures"),
) -> None:
    """Draws acceptance, calibration and speed from the JSON of the other commands."""
    from ..evaluation.plots import plot_results  # matplotlib is optional, and takes its time

    written = plot_results(results, output)
    for path in written:
        print(path)
    if not written:
        print("these results allow no figure: sweeps need several policies")
