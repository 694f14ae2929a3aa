"""`dspark train`: a drafter for a target, from a YAML recipe."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..baselines import METHODS
from ..training.estimate import estimate_run
from ..training.recipe import Recipe, run_recipe


def train(
    recipe: Annotated[Path, typer.Argument(help="YAML, as in training/configs.")],
    target: Annotated[str | None, typer.Option(help="Folder or Hub id, or demo; in place of the recipe's.")] = None,
    prompts: Annotated[list[str] | None, typer.Option(help="JSONL of prompts to answer first; again for more.")] = None,
    answers: Annotated[str | None, typer.Option(help="JSONL of answers, in place of the recipe's.")] = None,
    output_dir: Annotated[str | None, typer.Option(help="In place of the recipe's.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="In place of the recipe's.")] = None,
    method: Annotated[str | None, typer.Option(help=f"Of a new drafter: {', '.join(METHODS)}.")] = None,
    init_from: Annotated[str | None, typer.Option(help="Drafter to go on from, in place of a new one.")] = None,
    lora_r: Annotated[int | None, typer.Option(help="Train low-rank updates of this rank only.")] = None,
    train_fc: Annotated[bool, typer.Option(help="With --lora-r, also train the projection of the states.")] = False,
    cache: Annotated[str | None, typer.Option(help="Folder of target states, from `dspark cache build`.")] = None,
    reuse: Annotated[int | None, typer.Option(help="Draws of anchors per target forward.")] = None,
    seed: Annotated[int | None, typer.Option(help="In place of the recipe's.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the training process.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in the output folder.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Print parameters, memory and time, and train nothing.")] = False,
) -> None:
    """Answers prompts with the target, trains a drafter on them, and saves it."""
    if threads:
        torch.set_num_threads(threads)
    changes = {"output_dir": output_dir, "max_steps": max_steps, "reuse": reuse, "seed": seed}
    lora = None if lora_r is None else {"r": lora_r, "lora_alpha": 2 * lora_r, "train_fc": train_fc}
    run = Recipe.load(
        recipe,
        target=target,
        prompts=prompts or None,
        answers=answers,
        method=method,
        init_from=init_from,
        lora=lora,
        cache=cache,
        training={key: value for key, value in changes.items() if value is not None},
    )
    console = Console(highlight=False, soft_wrap=True)
    if dry_run:
        console.print(str(estimate_run(run)))
    else:
        folder = run_recipe(run, resume)
        if torch.distributed.is_initialized():  # else a rank may abort at its exit, and the launcher stops the others
            torch.distributed.destroy_process_group()
        console.print(f"saved in {folder}")
