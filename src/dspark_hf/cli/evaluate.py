"""`dspark evaluate`: acceptance of a drafter over data sets and temperatures, as JSON and a table; resumable, and
shared by several processes."""

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..evaluation import evaluate as evaluation
from ..evaluation.datasets import DATA_SETS, load_evaluation_prompts
from ..evaluation.loading import load_pair
from ..profile_dspark import SPSProfile

DATA_HELP = (
    f"JSONL of {{'turns': [...]}}, gsm8k_test, chat_test, or {', '.join(DATA_SETS)}; several with commas, or again."
)


def evaluate(
    target: Annotated[str, typer.Option(help="Folder or Hub id, or demo.")],
    drafter: Annotated[str, typer.Option(help="Folder of the drafter, or Hub id.")],
    output: Annotated[Path, typer.Option(help="Folder of the results; a rerun goes on where it stopped.")],
    data: Annotated[list[str] | None, typer.Option(help=DATA_HELP)] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="1 and 0 by default; may be given again.")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each data set; the paper's number by default.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together at temperature 0.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 2048,
    policy: Annotated[str, typer.Option(help="fixed:N, threshold:T, prefix, stale or lookahead.")] = "fixed",
    profile: Annotated[Path | None, typer.Option(help="SPS profile of `dspark profile`, for schedulers.")] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    rank: Annotated[int | None, typer.Option(help="This process's number; the launcher's by default, else 0.")] = None,
    world_size: Annotated[int | None, typer.Option(help="Processes that share the prompts; see --rank.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    pack: Annotated[bool, typer.Option(help="Pack linear layers for the CPU.")] = True,
) -> None:
    """Measures acceptance: τ, verify rate and acceptance by position, per data set, per domain and as macro average."""
    if threads:
        torch.set_num_threads(threads)
    rank, world_size = processes(rank, world_size)
    names = [name for names in data or ["gsm8k_test"] for name in names.split(",")]
    prompts = load_evaluation_prompts(names, limit)
    model, tokenizer, draft_model = load_pair(target, drafter, pack)
    settings = evaluation.EvaluationSettings(
        target,
        drafter,
        evaluation.content_digest(drafter),
        str(model.dtype),
        policy,
        None if profile is None else evaluation.content_digest(profile),
        max_new_tokens,
        seed,
    )
    result = evaluation.evaluate_drafter(
        model,
        tokenizer,
        draft_model,
        prompts,
        output,
        settings,
        temperature or (1.0, 0.0),
        batch_size,
        rank,
        world_size,
        None if profile is None else SPSProfile.load(profile),
        lambda batches: track(batches, "prompts" if batch_size == 1 else "batches"),
    )
    console = Console(highlight=False, soft_wrap=True)
    if result is None:
        console.print(f"process {rank} of {world_size} is through; the last one writes {evaluation.SUMMARY}")
        return
    for part in result["results"]:
        console.print(table(part))
    console.print(f"{output / evaluation.SUMMARY}: all figures")


def processes(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Number of this process and of all, by default from the variables that `accelerate launch` and `torchrun` set.
    Each process takes a GPU of its own where there are several."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank is {rank} and world-size {world_size}, expected both or none")
    local = rank
    if rank is None:
        rank, world_size = (int(os.environ.get(name, value)) for name, value in (("RANK", 0), ("WORLD_SIZE", 1)))
        local = int(os.environ.get("LOCAL_RANK", rank))
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
    return rank, world_size


def table(part: dict[str, Any]) -> Table:
    """One temperature: a row per data set, then domains and the macro average."""
    rows = Table("", "prompts", "τ", "verify rate", "conditional acceptance by position", box=None)
    rows.title, rows.title_justify = f"temperature {part['temperature']:g}", "left"
    for name, figures in [*part["data"].items(), *part["domains"].items(), ("macro average", part["macro"])]:
        by_position = " ".join(number(value, 2) for value in figures["conditional_acceptance"])
        rows.add_row(name, str(figures["prompts"]), number(figures["acceptance_length"], 2),
                     number(figures["verify_rate"], 3), by_position)  # fmt: skip
    return rows


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
