"""What earlier rounds of a `generate()` call tell the verify policies: nothing of the block being decided.

Averages are over rounds, with weights that fall by a constant factor per round, and right from the first one on:

    w ← λ·w + n,   mean ← mean + (Σ x − n·mean) / w   for n new values x

What a round yields varies much more than what its confidences promise, Σ a_k over the tokens verified. So the mean
yield is taken from the promises, corrected by how many of the promised tokens were kept in the call so far:

    1 + (mean promise per row) · (m + tokens kept) / (m + tokens promised),   m and both sums fading by λ per round

The first confidence logit of a block is a part that the anchor alone gives and one that the block's state adds. Of a
single row, the latter is kept for some rounds: it tells what other anchors may expect (`LookaheadScheduler`).

On a CUDA device a round's figures are copied to the host without waiting, and read two rounds later, when they have
long arrived: no decision waits for the device. R rows, γ slots.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import torch

from .profile_dspark import SPSProfile

# Mean conditional confidence of a position not seen yet, typical of a trained drafter. Rather too high than too low: it
# makes the scheduler look there, which corrects it, while too low a value keeps it away.
INITIAL_CONFIDENCE = 0.8
# Drafting rounds in a row after which earlier failures are forgotten.
_SETTLED_ROUNDS = 12
# Drafting rounds whose confidences are kept.
KEPT_ROUNDS = 4
# λ of the mean confidences: about the last ten rounds count, a small part of a request of 100 to 300 tokens.
_DISCOUNT = 0.9
# λ of yields, which have to tell drafting from plain decoding where the two are close.
_YIELD_DISCOUNT = 0.97
# m, tokens: how long the confidences are trusted as they are.
_TRUST = 2.0
# Rounds whose added part of the first confidence logit is kept.
_KEPT_LOGITS = 16
# A round's figures are read when this many more have followed, unless they are on the host anyway.
_LATENESS = 1


@dataclass(eq=False)
class _Round:
    """A drafting round, on the host once all of `ready` have passed; `rows` are those still in the batch."""

    confidence: torch.Tensor
    lengths: torch.Tensor
    yielded: torch.Tensor
    ready: list[torch.cuda.Event]
    rows: torch.Tensor
    anchor_confidence: float | None

    def wait(self) -> "_Round":
        for event in self.ready:
            event.synchronize()
        return self


@dataclass(eq=False)
class RoundHistory:
    """Kept by the generator, one per `generate()` call.

    averages: γ mean conditional confidences c̄, by position.
    mean_tokens: tokens that a drafting round verifies per row, the anchor included; None before the first.
    mean_yield: tokens that a drafting round yields per row, the bonus token included; None before the first.
    weight: how many drafting rounds these two rest on. They begin anew when drafting is resumed after plain rounds.
    plain_rounds: plain rounds since the last drafting one.
    failed_probes: how often drafting was given up since it last went on for long.
    block_logits: of the last rounds, up to 16, what the block's state added to the first confidence logit.
    skipped_blocks: rounds decoded plainly for their anchors' sake since the last drafting one.
    prices: what a scheduler made of all this, by profile and number of rows, until the next change.
    """

    block_size: int
    averages: list[float] = field(init=False)
    mean_tokens: float | None = field(init=False, default=None)
    weight: float = field(init=False, default=0.0)
    plain_rounds: int = field(init=False, default=0)
    failed_probes: int = field(init=False, default=0)
    block_logits: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=_KEPT_LOGITS))
    skipped_blocks: int = field(init=False, default=0)
    prices: dict[tuple[SPSProfile, int], float] = field(init=False, default_factory=dict)

    def __post_init__(self):
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, expected 1 or more")
        self.averages = [INITIAL_CONFIDENCE] * self.block_size
        self._average_weights = [1.0] * self.block_size
        self._drafted_rounds = 0
        self._promise, self._kept, self._promised = 0.0, _TRUST, _TRUST
        self._pending: deque[_Round | None] = deque()  # None is a plain round
        self._recent: deque[_Round] = deque(maxlen=KEPT_ROUNDS)

    @property
    def mean_yield(self) -> float | None:
        return 1 + self._promise * self._kept / self._promised if self.weight else None

    def skip(self) -> None:
        """Counts a round that was decoded plainly for its anchor's sake. It says nothing of what drafting yields."""
        self.skipped_blocks += 1

    def observe(
        self,
        confidence: torch.Tensor | None,
        lengths: torch.Tensor,
        yielded: torch.Tensor,
        anchor_confidence: float | None = None,
    ) -> None:
        """Adds a round.

        Args:
            confidence: (R, n) in [0, 1] of the n ≤ γ tokens drafted; None, or n = 0, for a plain round.
            lengths: (R,), drafted tokens verified.
            yielded: (R,), tokens committed, the bonus token included.
            anchor_confidence: of a single row, σ of the first confidence logit's part that its anchor gives.
        """
        self.prices.clear()
        if confidence is None or confidence.shape[1] == 0:
            self._pending.append(None)
        else:
            if confidence.shape[1] > self.block_size:
                raise ValueError(f"confidence has {confidence.shape[1]} columns, expected at most {self.block_size}")
            copies, ready = _to_host(confidence, lengths, yielded)
            self._pending.append(_Round(*copies, ready, torch.arange(len(confidence)), anchor_confidence))
            self._recent.append(self._pending[-1])
        while self._pending:
            first = self._pending[0]
            if first is not None and first.ready and len(self._pending) <= _LATENESS:
                break
            self._absorb(self._pending.popleft())

    def keep(self, rows: torch.Tensor) -> None:
        """Keeps these rows (R',) of the batch, in this order; the others have left it. Waits for the device if `rows`
        is there."""
        for record in self._recent:
            record.rows = record.rows[rows.cpu()]

    def recent_confidence(self, delay: int) -> torch.Tensor | None:
        """Confidences (R, n) on the host of the last drafting round (delay 1) or an earlier one, of the rows still in
        the batch; None where there were not that many. `delay` is at most `KEPT_ROUNDS`; below 2 it may wait for the
        device."""
        if len(self._recent) < delay:
            return None
        record = self._recent[-delay].wait()
        return record.confidence[record.rows]

    def _absorb(self, record: _Round | None) -> None:
        if record is None:
            self.failed_probes += self._drafted_rounds > 0
            self.plain_rounds, self._drafted_rounds = self.plain_rounds + 1, 0
            return
        record.wait()
        if self.plain_rounds:
            self.mean_tokens, self.weight = None, 0.0
        self.plain_rounds, self._drafted_rounds, self.skipped_blocks = 0, self._drafted_rounds + 1, 0
        if self._drafted_rounds == _SETTLED_ROUNDS:
            self.failed_probes = 0
        confidence, rows = record.confidence.double(), len(record.lengths)
        for j, total in enumerate(confidence.sum(dim=0).tolist()):
            weight = _DISCOUNT * self._average_weights[j] + rows
            self.averages[j], self._average_weights[j] = _blend(self.averages[j], weight, total, rows), weight
        if record.anchor_confidence is not None:
            self.block_logits.append(log_odds(float(confidence[0, 0])) - log_odds(record.anchor_confidence))
        verified = torch.arange(confidence.shape[1]) < record.lengths[:, None]
        promised = float((confidence.cumprod(dim=1) * verified).sum())
        self._kept = _YIELD_DISCOUNT * self._kept + float(record.yielded.sum()) - rows
        self._promised = _YIELD_DISCOUNT * self._promised + promised
        self.weight = _YIELD_DISCOUNT * self.weight + 1
        self.mean_tokens = _blend(self.mean_tokens or 0.0, self.weight, 1 + float(record.lengths.sum()) / rows)
        self._promise = _blend(self._promise, self.weight, promised / rows)


def log_odds(chance: float) -> float:
    """The logit whose σ is `chance`, at most 14 in size: float32 has chances of exactly 0 and 1."""
    chance = min(max(chance, 1e-6), 1 - 1e-6)
    return math.log(chance / (1 - chance))


def _blend(mean: float, weight: float, total: float, count: int = 1) -> float:
    """The running mean after `count` more values that sum to `total`; `weight` has them counted in."""
    return mean + (total - count * mean) / weight


def _to_host(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.cuda.Event]]:
    """Copies on the host, and what to wait for before they are read: those from a CUDA device go to pinned memory
    behind what is running there."""
    copies = [tensor.detach().to("cpu", non_blocking=tensor.is_cuda, copy=True) for tensor in tensors]
    return copies, [torch.cuda.current_stream(t.device).record_event() for t in tensors if t.is_cuda]
