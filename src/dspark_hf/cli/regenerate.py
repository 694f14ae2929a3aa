"""`dspark regenerate`: prompts answered by the target itself, the texts that a drafter is trained on."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..evaluation.loading import load_target
from ..training.endpoint import EndpointAnswerer
from ..training.regenerate import AnswerSettings, TargetAnswerer, read_prompts, regenerate_answers


def regenerate(
    prompts: Annotated[list[str], typer.Argument(help="JSONL of {'turns': [...]} or {'messages': [...]}.")],
    output: Annotated[Path, typer.Option(help="JSONL; a rerun goes on where it stopped.")],
    target: Annotated[str | None, typer.Option(help="Folder or Hub id, to generate with here.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Address of an OpenAI-compatible server instead.")] = None,
    model: Annotated[str | None, typer.Option(help="The target's name on the server.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts to take, from the first.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts generated together, with --target.")] = 8,
    concurrency: Annotated[int, typer.Option(help="Requests under way, with --endpoint.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="1 for no cut.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 for no cut.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="The template's enable_thinking; not set if absent.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    pack: Annotated[bool, typer.Option(help="Pack linear layers for the CPU.")] = True,
) -> None:
    """Answers PROMPTS with a target, here or through a server, and appends the answers to a file."""
    if (target is None) == (endpoint is None) or (endpoint is None) != (model is None):
        raise ValueError(f"target {target}, endpoint {endpoint}, model {model}: expected --target, or --endpoint and "
                         "--model")  # fmt: skip
    if threads:
        torch.set_num_threads(threads)
    settings = AnswerSettings(max_new_tokens, temperature, top_p, top_k, seed, thinking)
    asked = read_prompts(prompts, limit)
    if target is not None:
        answerer = TargetAnswerer(*load_target(target, pack), target, settings, batch_size)
    else:
        answerer = EndpointAnswerer(endpoint, model, settings, concurrency)
    done = regenerate_answers(asked, output, answerer)
    print(
        f"{done.answered} prompts answered, {done.present} had their answers; {done.tokens} tokens in "
        f"{done.seconds:.1f} s, {done.tokens / done.seconds:.1f} tokens/s"
    )
