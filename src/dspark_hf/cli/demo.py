"""`dspark demo`: the bundled drafter on a real model, plain and drafted side by side."""

from pathlib import Path
from typing import Annotated

import typer

from ..demo_target import demo_target_path
from .generate import compare

BUNDLED_DRAFTER = Path(__file__).parents[3] / "model_cards" / "dspark-smollm2-135m-instruct"
PROMPT = "A baker sells 12 cakes a day for 15 dollars each. How much money does she make in a week?"


def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = PROMPT,
    drafter: Annotated[str, typer.Option(help="Folder or Hub id of the drafter.")] = str(BUNDLED_DRAFTER),
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer.")] = 160,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
) -> None:
    """Answers a prompt with SmolLM2-135M-Instruct, plain and drafted, and compares the speed."""
    compare(str(demo_target_path()), drafter, prompt, max_new_tokens=max_new_tokens, threads=threads)
