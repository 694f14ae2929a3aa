"""Whether a drafter fits a target, which verify policy suits the pair on this machine, and what to expect of it.

    η(ℓ) = T_target / ((T_draft + T_verify(ℓ+1)) / τ(ℓ)),     τ(ℓ) = 1 + Σ_{k≤ℓ} a_k

is the speed-up over plain decoding (paper, section 2) when ℓ tokens are verified per round: T_target seconds per token
of plain decoding, T_verify(n) of a pass over n tokens, a_k the share of rounds that keep the k-th drafted token (and so
all before it), τ the tokens a round yields, bonus included. Batch 1 throughout.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..profile_dspark import SPSProfile
from ..profiling_dspark import check_target
from ..scheduling_dspark import FixedLength
from ..target_dspark import cache_of, check_croppable, check_pair
from ..telemetry_dspark import SpeculationStats
from .acceptance import decode_prompts

WORTH_IT = 1.03
"""The bypass has to promise this much more than doing the same everywhere: less is lost in the estimate's noise."""


@dataclass(frozen=True)
class Fact:
    """One thing that has to agree, as the target and the drafter have it."""

    name: str
    target: str
    drafter: str
    fits: bool


@torch.no_grad()
def check_fit(target: PreTrainedModel, drafter: Any) -> tuple[list[Fact], str | None]:
    """What has to agree, and the reason to refuse the pair, None where it fits. Runs the target on one token, unless
    its kind rules it out."""
    config, draft = target.config.get_text_config(), drafter.config
    facts = [
        Fact(name, str(theirs), str(getattr(draft, key)), theirs == getattr(draft, key))
        for name, key, theirs in (
            ("vocabulary", "vocab_size", config.vocab_size),
            ("hidden size", "hidden_size", config.hidden_size),
            ("layers", "num_target_layers", config.num_hidden_layers),
        )
    ]
    kind, refusal = target.config.model_type, _refusal(check_target, target)
    if refusal is None:
        cache = cache_of(target(input_ids=torch.zeros(1, 1, dtype=torch.long, device=target.device), use_cache=True))
        kind, refusal = type(cache).__name__, _refusal(check_croppable, cache)
    facts.append(Fact("cache", kind, "takes back tokens", refusal is None))
    return facts, refusal or _refusal(check_pair, target, drafter)


def _refusal(check: Callable, *arguments: Any) -> str | None:
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return None


def decode_one_by_one(
    target: PreTrainedModel,
    drafter: Any,
    prompts: Iterable[torch.Tensor],
    max_new_tokens: int = 64,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[SpeculationStats]:
    """Greedy decoding of prompts (T,), all of each block verified: the rounds of every prompt that had any. Leaves the
    drafter's policy as it was."""
    policy, drafter.verify_policy = drafter.verify_policy, FixedLength()
    try:
        runs = [decode_prompts(target, drafter, [prompt], max_new_tokens) for prompt in progress(prompts)]
    finally:
        drafter.verify_policy = policy
    return [stats for stats in runs if stats.acceptance_lengths]


def pooled(runs: Sequence[SpeculationStats]) -> SpeculationStats:
    """The lengths of all rounds of several runs."""
    names = ("proposal_lengths", "accepted_lengths", "acceptance_lengths")
    return SpeculationStats(**{name: [n for stats in runs for n in getattr(stats, name)] for name in names})


def expected_lengths(acceptance: Sequence[float]) -> list[float]:
    """τ(ℓ) for ℓ = 0..γ from a_1..a_γ."""
    lengths = [1.0]
    for share in acceptance:
        lengths.append(lengths[-1] + share)
    return lengths


def expected_speedups(acceptance: Sequence[float], profile: SPSProfile) -> list[float]:
    """η(ℓ) for ℓ = 0..γ from a_1..a_γ and a profile measured with the drafter. A profile without plain decoding (as
    SGLang writes) gives T_target as its round over one token."""
    lengths = expected_lengths(acceptance)
    seconds = profile.at(1).seconds(torch.arange(1, len(lengths) + 1)).tolist()
    plain_seconds = plain_seconds_of(profile)
    return [plain_seconds * length / duration for length, duration in zip(lengths, seconds, strict=True)]


def plain_seconds_of(profile: SPSProfile) -> float:
    """T_target, seconds per token."""
    steps = profile.plain_steps(1)
    return float(profile.at(1).seconds(torch.ones(1))) if steps is None else 1 / steps


@dataclass(frozen=True)
class Advice:
    """A policy, as one sets it on the drafter (None: plain generation), and the speed-up expected of it."""

    policy: str | None
    speed_up: float


def advise(speed_ups: Sequence[float], by_prompt: Sequence[Sequence[float]], has_confidence: bool) -> Advice:
    """Chooses a policy.

    The best fixed length ℓ ≥ 1 by η; where some prompts would be decoded faster plainly and others not, and this makes
    a difference, `LookaheadScheduler`, which leaves drafting to those that gain. Its estimate is the harmonic mean over
    prompts of max(1, η_i(ℓ)): each prompt an equal share of the tokens, with the better of both ways.

    Args:
        speed_ups: η(ℓ) of all rounds, ℓ = 0..γ.
        by_prompt: η(ℓ) of each prompt's rounds.
        has_confidence: whether the drafter has the head that `LookaheadScheduler` reads.
    """
    length = max(range(1, len(speed_ups)), key=lambda i: speed_ups[i])
    fixed = speed_ups[length]
    bypass = len(by_prompt) / sum(1 / max(1.0, prompt[length]) for prompt in by_prompt)
    if has_confidence and bypass > WORTH_IT * max(1.0, fixed):
        return Advice("LookaheadScheduler()", bypass)
    return Advice(f"FixedLength({length})", fixed) if fixed > 1 else Advice(None, 1.0)
