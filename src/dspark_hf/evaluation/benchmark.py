"""Wall clock of several ways to generate, side by side: one process, arms interleaved prompt by prompt, medians.

Every arm decodes greedily and is compared with the first one token by token; acceptance length and time are reported
together, and beside the speed-up what the parts of a round alone would allow:

    η = T_target / ((T_draft + T_verify) / τ)

The result is plain data, from which tables and plots are made.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """One way to generate: a target, what `generate()` gets besides the inputs, the drafter's policy, and the target's
    `speculation_type`, by which transformers' own ways are chosen."""

    name: str
    target: Any
    options: dict[str, Any]
    policy: VerifyPolicy | None = None
    speculation_type: str | None = None


SCHEDULERS = {"prefix": PrefixScheduler, "stale": StalePrefixScheduler, "lookahead": LookaheadScheduler}


def parse_policy(text: str, profile: SPSProfile | None = None) -> VerifyPolicy:
    """`fixed`, `fixed:3`, `threshold:0.4`, or a scheduler over `profile`: `prefix`, `stale`, `lookahead`."""
    kind, _, value = text.partition(":")
    expected = f"expected fixed, fixed:N, threshold:T or one of {list(SCHEDULERS)}"
    try:
        if kind == "fixed":
            return FixedLength(int(value) if value else None)
        if kind == "threshold":
            return ConfidenceThreshold(float(value))
    except ValueError as error:
        raise ValueError(f"policy is {text!r} ({error}), {expected}") from None
    if kind in SCHEDULERS and not value:
        return SCHEDULERS[kind](profile)
    raise ValueError(f"policy is {text!r}, {expected}")


def run_benchmark(
    arms: list[Arm],
    tokenizer: Any,
    prompts: list[str],
    max_new_tokens: int = 128,
    progress: Callable[[list], Any] = iter,
) -> dict[str, Any]:
    """Runs every arm on every prompt, in an order that rotates from prompt to prompt.

    Returns:
        `machine`, `settings`, `prompts` (per prompt and arm: tokens, seconds, forwards of the target, seconds of these
        behind the prefill and of drafting, rounds, acceptance length, and how the text differs from the first arm's, if
        it does), and `summary` (see `summarise`).
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
    given = getattr(arm.target.generation_config, "speculation_type", None)
    if arm.speculation_type is not None:
        arm.target.generation_config.speculation_type = arm.speculation_type
    try:
        with record_speculation() as stats, timed_parts(arm.target, drafter) as parts:
            start = time.perf_counter()
            ids = arm.target.generate(**inputs, **arm.options, max_new_tokens=max_new_tokens, do_sample=False)
            seconds = time.perf_counter() - start
    finally:
        if arm.speculation_type is not None:
            arm.target.generation_config.speculation_type = given
    text = ids[0, inputs["input_ids"].shape[1] :]
    on_cpu = arm.target.device.type == "cpu"  # elsewhere the parts return before they are done
    return text, {
        "tokens": len(text),
        "seconds": seconds,
        "forwards": len(parts["forward"]),
        "forward_seconds": sum(parts["forward"][1:]) if on_cpu else None,
        "draft_seconds": sum(parts["draft"]) if on_cpu else None,
        "acceptance_lengths": stats.acceptance_lengths,
        "proposal_lengths": stats.proposal_lengths,
        "accepted_lengths": stats.accepted_lengths,
    }


@contextmanager
def timed_parts(target: Any, drafter: Any | None) -> Iterator[dict[str, list[float]]]:
    """Seconds of every `forward` of the target and of everything the drafter does, `draft`. On a GPU they would be
    those of launching alone, and to wait for each part would change what is measured."""
    parts: dict[str, list[float]] = {"forward": [], "draft": []}
    starts: dict[str, float] = {}

    def begin(part: str) -> None:
        starts[part] = time.perf_counter()

    def end(part: str) -> None:
        parts[part].append(time.perf_counter() - starts[part])

    watched = [(target, "forward")]
    if drafter is not None and drafter is not target and not hasattr(drafter, "draft"):
        watched.append((drafter, "draft"))  # an assistant of transformers' own drafts by its forward
    hooks = []
    for module, part in watched:
        hooks.append(module.register_forward_pre_hook(lambda *_, part=part: begin(part)))
        hooks.append(module.register_forward_hook(lambda *_, part=part: end(part)))
    if hasattr(drafter, "draft"):
        draft = drafter.draft

        def timed(*args, **kwargs):
            begin("draft")
            output = draft(*args, **kwargs)
            end("draft")
            return output

        drafter.draft = timed
    try:
        yield parts
    finally:
        for hook in hooks:
            hook.remove()
        if hasattr(drafter, "draft"):
            del drafter.draft  # the class's own is seen again


def summarise(rows: list[dict[str, Any]], name: str, baseline: str) -> dict[str, Any]:
    """Figures of one arm over all prompts.

    tokens_per_second, its quartiles, and speed_up over the baseline: medians over prompts; speed_up_total: ratio of all
        times.
    acceptance_length: τ over all rounds, where the arm is ours.
    tokens_per_forward: of the target behind the prefill; it is τ where every round has one forward.
    draft_share: of the seconds; formula_speed_up: η of the forwards and drafts measured; attained: speed_up_total / η.
        None where the parts were not timed, on a GPU.
    """
    own, plain = ([row[arm] for row in rows] for arm in (name, baseline))
    speeds, plain_speeds = ([run["tokens"] / run["seconds"] for run in runs] for runs in (own, plain))
    ratios = [speed / plain_speed for speed, plain_speed in zip(speeds, plain_speeds, strict=True)]
    lengths = [n for run in own for n in run["acceptance_lengths"]]
    differences = [run["difference"] for run in own if run.get("difference")]
    accepted = [
        (proposed, kept)
        for run in own
        for proposed, kept in zip(run["proposal_lengths"], run["accepted_lengths"], strict=True)
    ]
    positions = range(max((proposed for proposed, _ in accepted), default=0))
    seconds = sum(run["seconds"] for run in own)
    speed_up_total, share, formula = sum(run["seconds"] for run in plain) / seconds, None, None
    if all(run["forward_seconds"] is not None for run in own + plain):
        share = sum(run["draft_seconds"] for run in own) / seconds
        per_token = sum(run["forward_seconds"] + run["draft_seconds"] for run in own) / _later(own, "tokens")
        formula = sum(run["forward_seconds"] for run in plain) / _later(plain, "tokens") / per_token
    return {
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_quartiles": _quartiles(speeds),
        "speed_up": statistics.median(ratios),
        "speed_up_total": speed_up_total,
        "acceptance_length": statistics.mean(lengths) if lengths else None,
        "acceptance_by_position": [
            statistics.mean(kept > k for proposed, kept in accepted if proposed > k) for k in positions
        ],
        "forwards": sum(run["forwards"] for run in own),
        "tokens_per_forward": _later(own, "tokens") / _later(own, "forwards"),
        "draft_share": share,
        "formula_speed_up": formula,
        "attained": None if formula is None else speed_up_total / formula,
        "texts_that_differ": len(differences),
        "of_these_near_ties": sum(difference["near_tie"] for difference in differences),
    }


def _later(runs: list[dict[str, Any]], what: str) -> int:
    """Tokens or forwards of all runs without the first of each, which the prefill makes."""
    return max(1, sum(run[what] - 1 for run in runs))


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]
