"""Verify policies: how many of a block's drafted tokens the target checks (paper, section 3.2).

    survival           a_{r,k} = Π_{i≤k} c_{r,i}, the chance that token k of row r is kept
    expected tokens    R + Σ a_{r,k} over the tokens verified, R bonus tokens included
    throughput         Θ = expected tokens × SPS(tokens in the pass), in tokens per second

A policy may look at the confidence of a token only to decide about that token and later ones, never about earlier ones:
choosing a length by what lies beyond it would tie the choice to the sample and bias the output (appendix A). What is
known before the block may be used freely: the SPS profile, and the history of earlier rounds.

Policies are pure; R rows, γ slots.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import exp
from operator import mul

import numpy as np
import torch

from .profile_dspark import SPSProfile
from .rounds_dspark import KEPT_ROUNDS, RoundHistory, log_odds

# Plain decoding steps that drafting may lose before it is given up, at first and in a later try, and rounds of plain
# decoding before it is tried again, doubled at every failure. With a first stake of 1 a request that gains a third was
# given up in more than half of its answers, by a few refused blocks in a row; with these, hopeless ones lose 2 to 3 %
# in 256 tokens.
_FIRST_STAKE, _STAKE = 2.0, 0.5
_FIRST_WAIT, _LONGEST_WAIT = 8, 128
# Drafting rounds before anchors are judged by, and the most rounds in a row that may be skipped: one block is drafted
# then, so that what is known of the blocks does not grow old.
_FEWEST_BLOCKS, _MOST_SKIPPED = 4, 16
# The block that a lookahead without a history reckons with: later positions are out of reach of the start values.
_UNKNOWN_BLOCK = 16


class VerifyPolicy:
    """Interface of all policies.

    needs_confidence: reads the confidences, so that the drafter needs a confidence head.
    cuts_draft: a row's length may be settled before its block is complete. Once no row of
        `verify_lengths(confidence[:, : k + 1])` exceeds k, none will, and drafting can stop at slot k.
    reads_anchor: has a `skips_block` that may be true.
    sps: the profile that schedulers decide by; None for one still to be given by `with_profile`.
    """

    needs_confidence = False
    cuts_draft = False
    reads_anchor = False
    sps: SPSProfile | None = None

    def verify_lengths(self, confidence: torch.Tensor, history: RoundHistory | None = None) -> torch.Tensor:
        """Confidences (R, n) in [0, 1] of the tokens drafted so far → lengths (R,) in 0..n."""
        raise NotImplementedError

    def draft_limit(self, block_size: int, rows: int = 1, history: RoundHistory | None = None) -> int:
        """The most tokens worth drafting, 0..γ, known before the block; 0 for a round of plain decoding."""
        return block_size

    def skips_block(self, anchor_confidence: float, history: RoundHistory) -> bool:
        """Whether a single row is better decoded plainly this time, by its anchor: σ of the part of the first
        confidence logit that the anchor alone gives, before anything is drafted."""
        return False


@dataclass(frozen=True)
class FixedLength(VerifyPolicy):
    """Verifies the same number of tokens in every round, γ by default."""

    length: int | None = None

    def __post_init__(self):
        if self.length is not None and self.length < 0:
            raise ValueError(f"length is {self.length}, expected 0 or more")

    def verify_lengths(self, confidence, history=None):
        rows, slots = confidence.shape
        return torch.full((rows,), self.draft_limit(slots), device=confidence.device)

    def draft_limit(self, block_size, rows=1, history=None):
        return block_size if self.length is None else min(self.length, block_size)


@dataclass(frozen=True)
class ConfidenceThreshold(VerifyPolicy):
    """Verifies up to the first token whose confidence is below the threshold."""

    threshold: float
    needs_confidence = True
    cuts_draft = True

    def __post_init__(self):
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold is {self.threshold}, expected a probability in 0..1")

    def verify_lengths(self, confidence, history=None):
        return (confidence >= self.threshold).long().cumprod(dim=-1).sum(dim=-1)


@dataclass(frozen=True)
class _Scheduler(VerifyPolicy):
    """A policy that decides by an SPS profile: its envelope, for the number of rows at hand."""

    sps: SPSProfile | None = None
    needs_confidence = True

    def with_profile(self, profile: SPSProfile):
        """The same policy with another profile."""
        return replace(self, sps=profile)

    def _profile(self) -> SPSProfile:
        if self.sps is None:
            raise ValueError(f"{type(self).__name__} has sps None, expected an SPSProfile")
        return self.sps


@dataclass(frozen=True)
class PrefixScheduler(_Scheduler):
    """Algorithm 1: takes the tokens of all rows by falling survival as long as Θ does not fall.

        Θ_n = (R + Σ of the n highest a_{r,k}) · SPS(R + n);   stops at the first n with Θ_n < Θ_{n−1}

    Among equal survivals the lower position comes first, so that what is taken of a row is a prefix. Stopping early,
    and not at the best n of all, is what keeps a token's confidence from deciding about those before it. With several
    rows a token may be taken or left because of other rows' later tokens, which say nothing about it.
    """

    cuts_draft = True

    def verify_lengths(self, confidence, history=None):
        survival = _survival(confidence).numpy(force=True)
        ranked, throughput = _throughput(survival, _steps_table(self._profile(), *survival.shape))
        falls = throughput[1:] < throughput[:-1]
        count = int(falls.argmax()) if falls.any() else len(ranked)
        if count == 0:
            return torch.zeros(len(survival), dtype=torch.long, device=confidence.device)
        # On the host this is several times as fast as `_take_best`.
        lowest = ranked[count - 1]
        lengths = (survival >= lowest).sum(axis=1)
        if surplus := lengths.sum() - count:
            _, rows_of_equal = (survival == lowest).T.nonzero()
            lengths -= np.bincount(rows_of_equal[-surplus:], minlength=len(lengths))
        return torch.from_numpy(lengths).to(confidence.device)


@dataclass(frozen=True)
class StalePrefixScheduler(_Scheduler):
    """Capacity from the past, ranking from the present (paper, section 5.2).

    K = argmax_n Θ_n over the confidences of `delay` rounds ago, unconstrained; then the K tokens with the highest
    survival of this round are taken. K was fixed before the block, so that looking for it beyond a fall of Θ is
    harmless: steps of the SPS curve are crossed. Until there are old confidences everything is verified.

    On a CUDA device nothing is read back for it: K comes from figures already on the host, the ranking stays there. The
    whole block is always drafted, as the capacity is later looked for in all of it.
    """

    delay: int = 2

    def __post_init__(self):
        if not 1 <= self.delay <= KEPT_ROUNDS:
            raise ValueError(f"delay is {self.delay}, expected 1 to {KEPT_ROUNDS} rounds")

    def verify_lengths(self, confidence, history=None):
        profile = self._profile()
        stale = None if history is None else _recent_confidence(history, self.delay, len(confidence))
        if stale is None:
            return torch.full((len(confidence),), confidence.shape[1], device=confidence.device)
        survival = _survival(stale).numpy()
        _, throughput = _throughput(survival, _steps_table(profile, *survival.shape))
        count = min(int(throughput.argmax()), confidence.numel())
        return _take_best(_survival(confidence), count)


@dataclass(frozen=True)
class LookaheadScheduler(_Scheduler):
    """Goes on past a position for what later ones promise, not for that position alone.

    c̄_j is the mean confidence at position j over earlier rounds. A single row goes on to position k if

        max_{ℓ≥k} (1 + Σ_{i≤k} a_i + a_k · Σ_{i=k+1..ℓ} Π_{k<j≤i} c̄_j) · SPS(ℓ + 1)  >  (1 + Σ_{i<k} a_i) · SPS(k)

    so that a pass over two tokens that costs much more than one does not keep it from a third and fourth that come
    almost free. Only c_1..c_k enter, beside what was known before the block: the rule is lossless.

    Of several rows each decides alone, against a price in expected tokens per verified token: row r goes on to k if
    a_{r,k} exceeds it. (With one price for every token, looking ahead adds nothing, as survival only falls.) The price
    is the survival at which the best Θ of recent rounds is reached, anywhere on the curve; where T is smooth, that is Θ
    times the slope of T. Positions that those rounds did not draft count with the averages.

    Without a history it decides as at the start of a call.

    Skipping, for a single row: the first confidence logit is the sum of a part that the anchor alone gives, known
    before the block, and one that the backbone's state adds, known of recent rounds. If drafting behind this anchor,
    with what those rounds added, would on average have won less than plain decoding in the same time, the target goes
    one step by itself and nothing is drafted; after 16 such rounds one block is, to see how things are.

    Bypass: once drafting has taken longer than plain decoding would have for the same tokens, by some steps,
    `draft_limit` is 0 for 8 rounds, then drafting is tried again; the rounds are doubled at every failure, up to 128.
    Needs a profile with `plain_steps_per_second`.
    """

    cuts_draft = True
    reads_anchor = True

    def verify_lengths(self, confidence, history=None):
        profile, history = self._profile(), history or RoundHistory(_UNKNOWN_BLOCK)
        if len(confidence) == 1:
            length = self._single_length(confidence[0].tolist(), history.averages)
            return torch.full((1,), length, device=confidence.device)
        key = profile, len(confidence)
        if key not in history.prices:
            history.prices[key] = _price(*key, history)
        return (_survival(confidence) > history.prices[key]).sum(dim=1)

    def draft_limit(self, block_size, rows=1, history=None):
        plain = _plain_steps(self._profile(), rows)
        if history is None or plain is None:
            return block_size
        if history.plain_rounds:
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** max(history.failed_probes - 1, 0))
            return 0 if history.plain_rounds < wait else block_size
        if not history.weight:
            return block_size
        steps = _steps_table(self.sps, rows, history.block_size)
        seconds = np.interp(rows * (history.mean_tokens - 1), np.arange(len(steps)), 1 / steps)
        lost = history.weight * (seconds * plain - history.mean_yield)
        return 0 if lost > (_STAKE if history.failed_probes else _FIRST_STAKE) else block_size

    def skips_block(self, anchor_confidence, history):
        plain, past = _plain_steps(self._profile(), 1), history.block_logits
        if plain is None or len(past) < _FEWEST_BLOCKS or history.skipped_blocks >= _MOST_SKIPPED:
            return False
        behind = accumulate(accumulate([1.0, *history.averages[1:]], mul))  # Σ_{i≤ℓ} Π_{1<j≤i} c̄_j for ℓ = 1..γ
        took = [plain / steps for steps in _steps_table(self.sps, 1, history.block_size).tolist()]
        lengths, anchor, gain = list(zip([0.0, *behind], took, strict=True)), log_odds(anchor_confidence), 0.0
        for added in past:
            first = 1 / (1 + exp(-added - anchor))  # c_1 as it would have been
            gain += max(1 + first * later - seconds for later, seconds in lengths)
        return gain < 0

    def _single_length(self, confidence: list[float], averages: list[float]) -> int:
        slots = len(confidence)
        steps = _steps_table(self.sps, 1, max(slots, len(averages))).tolist()
        tokens, survival = 1.0, 1.0
        for k in range(slots):  # k tokens are taken, position k + 1 is being decided
            gain = survival * confidence[k]
            expected = tokens + gain
            best = expected * steps[k + 1]
            for later in range(k + 1, len(averages)):
                gain *= averages[later]
                expected += gain
                best = max(best, expected * steps[later + 1])
            if best <= tokens * steps[k]:
                return k
            survival *= confidence[k]
            tokens += survival
        return slots


_plain_steps = lru_cache(maxsize=256)(SPSProfile.plain_steps)


@lru_cache(maxsize=256)
def _steps_table(sps: SPSProfile, rows: int, slots: int) -> np.ndarray:
    """SPS(R + n) for n = 0..R·γ drafted tokens, (R·γ + 1,)."""
    return sps.envelope().at(rows).steps(torch.arange(rows, rows * (slots + 1) + 1)).numpy()


def _recent_confidence(history: RoundHistory, delay: int, rows: int) -> torch.Tensor | None:
    confidence = history.recent_confidence(delay)
    if confidence is not None and len(confidence) != rows:
        raise ValueError(f"the history has {len(confidence)} rows, expected {rows} as in this round")
    return confidence


def _survival(confidence: torch.Tensor) -> torch.Tensor:
    """In float32 at least; float64 is not to be had on every device."""
    return confidence.cumprod(dim=1, dtype=torch.promote_types(confidence.dtype, torch.float32))


def _throughput(survival: np.ndarray, steps: np.ndarray, rounds: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Survivals (m·R, γ) of m rounds → in falling order (m·R·γ,), and m·Θ_n of their mean for n = 0..R·γ."""
    ranked = np.sort(survival, axis=None)[::-1]
    expected = np.concatenate(([len(survival)], ranked)).cumsum()
    return ranked, expected[::rounds] * steps


def _take_best(survival: torch.Tensor, count: int) -> torch.Tensor:
    """How many of each row are among the `count` highest survivals (R, γ) → (R,), on its device. Among equal ones the
    lower position comes first, then the lower row."""
    if count == 0:
        return torch.zeros(len(survival), dtype=torch.long, device=survival.device)
    lowest = survival.flatten().topk(count).values[-1]
    above, equal = survival > lowest, survival == lowest
    order = equal.T.flatten().cumsum(dim=0).view(equal.T.shape).T
    return (above | (equal & (order <= count - above.sum()))).sum(dim=1)


def _price(sps: SPSProfile, rows: int, history: RoundHistory) -> float:
    """The survival halfway between the last token within the best capacity of recent rounds and the next one."""
    averages = torch.tensor(history.averages, dtype=torch.float64)
    # From two rounds ago, which have arrived on the host.
    past = [_recent_confidence(history, delay, rows) for delay in range(2, KEPT_ROUNDS + 1)]
    past = [c.double() for c in past if c is not None] or [averages.new_empty(rows, 0)]
    blocks = [torch.cat([c, averages[c.shape[1] :].expand(rows, -1)], dim=1) for c in past]
    steps = _steps_table(sps, rows, len(averages))
    ranked, throughput = _throughput(_survival(torch.cat(blocks)).numpy(), steps, len(blocks))
    count = int(throughput.argmax())
    if count == 0:  # beyond a cliff, perhaps: what a single token must promise to pay for its pass, Θ_1 > Θ_0
        return rows * float(steps[0] / steps[1] - 1)
    return float(np.append(ranked, 0.0)[count * len(blocks) - 1 :][:2].mean())
