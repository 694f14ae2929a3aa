"""`dspark doctor`: does this pair fit, what does this machine's curve look like, which policy, what speed-up."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..evaluation.doctor import (
    advise,
    check_fit,
    decode_one_by_one,
    expected_speedups,
    plain_seconds_of,
    pooled,
)
from ..evaluation.loading import chat_inputs, load_pair, load_prompts
from ..profile_dspark import SPSProfile
from ..profiling_dspark import measure_profile
from .demo import BUNDLED_DRAFTER


def doctor(
    target: Annotated[str, typer.Option(help="Folder or Hub id of the target, or demo.")] = "demo",
    drafter: Annotated[str, typer.Option(help="Folder or Hub id of the drafter.")] = str(BUNDLED_DRAFTER),
    profile: Annotated[
        Path | None, typer.Option(help="JSON of `dspark profile` with this drafter; measured now by default.")
    ] = None,
    prompts: Annotated[str, typer.Option(help="JSONL of {'turns': [...]}, or gsm8k_test, chat_test.")] = "gsm8k_test",
    limit: Annotated[int, typer.Option(min=1, help="Prompts to take.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 64,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    pack: Annotated[bool, typer.Option(help="Pack linear layers for the CPU.")] = True,
) -> None:
    """Says whether DRAFTER fits TARGET, which policy to use on this machine, and the speed-up to expect."""
    if threads:
        torch.set_num_threads(threads)
    console = Console(highlight=False)
    curve = None if profile is None else SPSProfile.load(profile)
    model, tokenizer, draft_model = load_pair(target, drafter, pack)
    facts, reason = check_fit(model, draft_model)
    lines = Table("", "target", "drafter", "fits", box=None)
    for fact in facts:
        lines.add_row(fact.name, fact.target, fact.drafter, "yes" if fact.fits else "no")
    console.print(lines)
    if reason is not None:
        raise ValueError(f"this pair does not fit: {reason}")

    if curve is None:
        curve = measure_profile(model, draft_model, progress=lambda items: track(items, "profile", transient=True))
    texts = load_prompts(prompts, limit)
    ids = [chat_inputs(tokenizer, text, model.device)["input_ids"][0] for text in texts]
    runs = decode_one_by_one(
        model, draft_model, ids, max_new_tokens, lambda items: track(items, "prompts", transient=True)
    )
    if not runs:
        raise ValueError(f"no text of {prompts!r} was long enough to draft for, expected answers of a few tokens")
    stats = pooled(runs)
    speed_ups = expected_speedups(stats.acceptance_by_position, curve)
    advice = advise(
        speed_ups,
        [expected_speedups(run.acceptance_by_position, curve) for run in runs],
        draft_model.config.enable_confidence_head,
    )
    report = Table(box=None, show_header=False)
    report.add_row("machine", machine_line(curve))
    for name, figures in curve_lines(curve):
        report.add_row(name, figures)
    report.add_row("acceptance by position", two_decimals(stats.acceptance_by_position))
    report.add_row("τ (tokens per round)", f"{stats.acceptance_length:.2f} over {len(runs)} texts")
    report.add_row("speed-up by length", f"{two_decimals(speed_ups[1:])} for 1..{len(speed_ups) - 1} tokens")
    report.add_row("policy", advice.policy or "plain generation: drafting does not pay here")
    report.add_row("speed-up expected", f"{advice.speed_up:.2f}")
    console.print(report)


def machine_line(profile: SPSProfile) -> str:
    """Where the profile was measured, as far as it tells."""
    machine = profile.details.get("machine")
    if machine is None:
        return "not recorded in the profile"
    busy = ", busy with other work: figures are rough" if machine.get("loaded") else ""
    return f"{machine['processor']}, {machine['threads']} threads{busy}"


def curve_lines(profile: SPSProfile) -> list[tuple[str, str]]:
    """A plain step, and relative to it passes over 1, 2, 4 and 8 tokens and the draft, where that is known apart."""
    curve, plain = profile.at(1), plain_seconds_of(profile)
    draft = curve.details.get("draft_seconds")
    counts = [n for n in (1, 2, 4, 8) if n <= curve.tokens[-1]]
    costs = ((curve.seconds(torch.tensor(counts)) - (draft or 0.0)) / plain).tolist()
    return [
        ("plain decoding", f"{1e3 * plain:.1f} ms per token"),
        ("cost of a pass", f"{two_decimals(costs)} plain steps for {' '.join(map(str, counts))} tokens"),
        ("cost of the draft", "part of the above" if draft is None else f"{draft / plain:.2f}"),
    ]


def two_decimals(values: Iterable[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
