"""Wall clock of several ways to generate, side by side: one process, arms interleaved prompt by prompt, medians.

Every arm decodes greedily and is compared with the first one token by token; acceptance length and time are reported
together. The result is plain data, from which tables and plots are made.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..profile_dspark import SPSProfile
from ..profiling_dspark import is_loaded, machine
from ..scheduling_dspark import (
    ConfidenceThreshold,
    FixedLength,
    LookaheadScheduler,
    PrefixScheduler,
    StalePrefixScheduler,
    VerifyPolicy,
)
from ..telemetry_dspark import record_speculation
from .comparison import first_difference
from .loading import chat_inputs


@dataclass(frozen=True)
class Arm:
    """One way to generate: a target, and what `generate()` gets besides the inputs."""

    name: str
    target: Any
    options: dict[str, Any]
    policy: VerifyPolicy | None = None


SCHEDULERS = {"prefix": PrefixScheduler, "stale": StalePrefixScheduler, "lookahead": LookaheadScheduler}


def parse_policy(text: str, profile: SPSProfile | None = None) -> VerifyPolicy:
    """`fixed`, `fixed:3`, `threshold:0.4`, or a scheduler over `profile`: `prefix`, `stale`, `lookahead`."""
    kind, _, value = text.partition(":")
    try:
        if kind == "fixed":
            return FixedLength(int(value) if value else None)
        if kind == "threshold":
            return ConfidenceThreshold(float(value))
        if kind in SCHEDULERS and not value:
            return SCHEDULERS[kind](profile)
    except ValueError as error:
        raise ValueError(f"policy {text!r}: {error}") from None
    raise ValueError(f"policy is {text!r}, expected fixed, fixed:N, threshold:T or one of {list(SCHEDULERS)}")


def run_benchmark(
    arms: list[Arm],
    tokenizer: Any,
    prompts: list[str],
    max_new_tokens: int = 128,
    progress: Callable[[list], Any] = iter,
) -> dict[str, Any]:
    """Runs every arm on every prompt, in an order that rotates from prompt to prompt.

    Returns:
        `machine`, `settings`, `prompts` (per prompt and arm: tokens, seconds, rounds, acceptance length, and how the
        text differs from the first arm's, if it does), and `summary` (per arm: median tokens/s, speed-up over the first
        arm as median of ratios and as ratio of total times, acceptance length τ over all rounds).
    """
    for arm in arms:
        _generate(arm, chat_inputs(tokenizer, prompts[0], arm.target.device), 8)
    busy = is_loaded()
    rows = []
    for index, prompt in enumerate(progress(prompts)):
        shift = index % len(arms)
        results, texts = {}, {}
        for arm in arms[shift:] + arms[:shift]:
            inputs = chat_inputs(tokenizer, prompt, arm.target.device)
            texts[arm.name], results[arm.name] = _generate(arm, inputs, max_new_tokens)
        for arm in arms[1:]:
            difference = first_difference(arms[0].target, inputs["input_ids"][0], texts[arms[0].name], texts[arm.name])
            results[arm.name]["difference"] = None if difference is None else asdict(difference)
        rows.append(results)
    return {
        "machine": machine() | {"loaded": busy},
        "settings": {"max_new_tokens": max_new_tokens, "arms": [arm.name for arm in arms], "prompts": len(prompts)},
        "summary": {arm.name: summarise(rows, arm.name, arms[0].name) for arm in arms},
        "prompts": rows,
    }


def _generate(arm: Arm, inputs: dict[str, torch.Tensor], max_new_tokens: int) -> tuple[torch.Tensor, dict[str, Any]]:
    drafter = arm.options.get("assistant_model")
    if arm.policy is not None:
        drafter.verify_policy = arm.policy
    with record_speculation() as stats:
        start = time.perf_counter()
        ids = arm.target.generate(**inputs, **arm.options, max_new_tokens=max_new_tokens, do_sample=False)
        seconds = time.perf_counter() - start
    text = ids[0, inputs["input_ids"].shape[1] :]
    return text, {
        "tokens": len(text),
        "seconds": seconds,
        "acceptance_lengths": stats.acceptance_lengths,
        "proposal_lengths": stats.proposal_lengths,
        "accepted_lengths": stats.accepted_lengths,
    }


def summarise(rows: list[dict[str, Any]], name: str, baseline: str) -> dict[str, Any]:
    """Figures of one arm over all prompts."""
    speeds = [row[name]["tokens"] / row[name]["seconds"] for row in rows]
    ratios = [s * row[baseline]["seconds"] / row[baseline]["tokens"] for s, row in zip(speeds, rows, strict=True)]
    lengths = [n for row in rows for n in row[name]["acceptance_lengths"]]
    total, reference = (sum(row[arm]["seconds"] for row in rows) for arm in (name, baseline))
    differences = [row[name]["difference"] for row in rows if row[name].get("difference")]
    accepted = [
        (proposed, kept)
        for row in rows
        for proposed, kept in zip(row[name]["proposal_lengths"], row[name]["accepted_lengths"], strict=True)
    ]
    positions = range(max((proposed for proposed, _ in accepted), default=0))
    return {
        "tokens_per_second": statistics.median(speeds),
        "speed_up": statistics.median(ratios),
        "speed_up_total": reference / total,
        "acceptance_length": statistics.mean(lengths) if lengths else None,
        "acceptance_by_position": [
            statistics.mean(kept > k for proposed, kept in accepted if proposed > k) for k in positions
        ],
        "texts_that_differ": len(differences),
        "of_these_near_ties": sum(difference["near_tie"] for difference in differences),
    }
