"""`dspark compare`: methods trained alike for one target, evaluated on the same prompts, as a table and figures."""

import importlib.util
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track

from ..baselines import METHODS
from ..evaluation.datasets import load_evaluation_prompts
from ..training.experiment import COMPARISON, comparison_table, run_experiment
from ..training.recipe import Recipe
from .evaluate import DATA_HELP


def compare(
    recipe: Annotated[Path, typer.Argument(help="YAML of a new DSpark drafter, as in training/configs.")],
    output: Annotated[Path, typer.Option(help="Folder of all runs; a rerun goes on where it stopped.")],
    method: Annotated[list[str] | None, typer.Option(help=f"{', '.join(METHODS)}; the first three by default.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="0 by default; may be given again.")] = None,
    target: Annotated[str | None, typer.Option(help="Folder or Hub id, or demo; in place of the recipe's.")] = None,
    answers: Annotated[str | None, typer.Option(help="JSONL of answers, in place of the recipe's.")] = None,
    cache: Annotated[str | None, typer.Option(help="Folder of target states, from `dspark cache build`.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="In place of the recipe's.")] = None,
    data: Annotated[list[str] | None, typer.Option(help=DATA_HELP)] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each data set; the paper's number by default.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="1 and 0 by default; may be given again.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together at temperature 0.")] = 1,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Trains drafters of several methods on the same data, and compares what they have accepted."""
    if threads:
        torch.set_num_threads(threads)
    training = {} if max_steps is None else {"max_steps": max_steps}
    run = Recipe.load(recipe, target=target, answers=answers, cache=cache, training=training)
    names = [name for names in data or ["gsm8k_test"] for name in names.split(",")]
    comparison = run_experiment(
        run,
        method or list(METHODS)[:3],
        seed or [0],
        load_evaluation_prompts(names, limit),
        output,
        temperature or (1.0, 0.0),
        max_new_tokens,
        batch_size,
        lambda batches: track(batches, "prompts" if batch_size == 1 else "batches"),
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(comparison_table(comparison))
    console.print(f"{output / COMPARISON}: all figures")
    if importlib.util.find_spec("matplotlib"):
        from ..evaluation.plots import plot_results

        for path in plot_results([output], output / "figures"):
            console.print(path)
