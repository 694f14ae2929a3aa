"""What speculative decoding did: proposed and accepted lengths of every round.

with record_speculation() as stats:
    target.generate(**inputs, assistant_model=drafter)
stats.acceptance_length
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import GenerationMixin


@dataclass(eq=False)
class SpeculationStats:
    """Rounds of all rows, in the order they ended. The first token of a text, from the prefill, belongs to no round.

    proposal_lengths: drafted tokens that the target checked.
    accepted_lengths: drafted tokens that it kept.
    acceptance_lengths: tokens a round yielded, the bonus token included; a round that ends the text inside its accepted
        tokens (an end token, a stop string) has no bonus token. A cut by the maximum length is not counted.
    confidence_logits: of each round's proposed tokens; empty where the drafter has no confidence head.
    expected_acceptance: if asked for, and only in sampling, of each round's proposed tokens the chance that the target
        keeps a draw at that position behind the tokens drafted before it, Σ_v min(p, q).
    rows: the row of its batch that each round belongs to.
    """

    proposal_lengths: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    confidence_logits: list[list[float]] = field(default_factory=list)
    expected_acceptance: list[list[float]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    wants_expected: bool = False

    @property
    def acceptance_length(self) -> float:
        """τ, the mean number of tokens a round yields, bonus included; NaN before the first round."""
        return sum(self.acceptance_lengths) / len(self.acceptance_lengths) if self.acceptance_lengths else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position, the share of the rounds proposing it that kept it (and so all before it)."""
        rounds = list(zip(self.proposal_lengths, self.accepted_lengths, strict=True))
        result = []
        for k in range(max(self.proposal_lengths, default=0)):
            kept = [accepted > k for proposed, accepted in rounds if proposed > k]
            result.append(sum(kept) / len(kept))
        return result

    @property
    def conditional_acceptance(self) -> list[float]:
        """For each position, the share of the rounds keeping all before it that kept it too; NaN where none did."""
        rounds = list(zip(self.proposal_lengths, self.accepted_lengths, strict=True))
        result = []
        for k in range(max(self.proposal_lengths, default=0)):
            kept = [accepted > k for proposed, accepted in rounds if proposed > k and accepted >= k]
            result.append(sum(kept) / len(kept) if kept else float("nan"))
        return result

    def extend(self, other: "SpeculationStats") -> None:
        """Adds the rounds of another recording."""
        for name, values in vars(other).items():
            if isinstance(values, list):
                getattr(self, name).extend(values)

    def add_round(
        self,
        proposed: int,
        accepted: int,
        emitted: int,
        confidence_logits: list[float],
        expected_acceptance: list[float],
        row: int,
    ) -> None:
        self.proposal_lengths.append(proposed)
        self.accepted_lengths.append(accepted)
        self.acceptance_lengths.append(emitted)
        self.confidence_logits.append(confidence_logits)
        self.expected_acceptance.append(expected_acceptance)
        self.rows.append(row)


def _recorders() -> list[tuple[int, SpeculationStats]]:
    """(thread, stats) of the open recorders. Kept on `GenerationMixin`, which the copies of this file that come with
    drafters loaded as remote code share."""
    if not hasattr(GenerationMixin, "_dspark_recorders"):
        GenerationMixin._dspark_recorders = []
    return GenerationMixin._dspark_recorders


@contextmanager
def record_speculation(expected: bool = False) -> Iterator[SpeculationStats]:
    """Records the rounds of every `generate()` call inside: those of this thread, and those of threads that have no
    recorder of their own (a text is often streamed from a second thread).

    Args:
        expected: also compute `expected_acceptance`, at the price of a pass over the vocabulary per position.
    """
    entry = (threading.get_ident(), SpeculationStats(wants_expected=expected))
    _recorders().append(entry)
    try:
        yield entry[1]
    finally:
        _recorders().remove(entry)  # in one step, as other threads open and close theirs


def _listening() -> list[SpeculationStats]:
    entries = list(_recorders())
    own = [stats for thread, stats in entries if thread == threading.get_ident()]
    return own or [stats for _, stats in entries]


def wants_expected_acceptance() -> bool:
    """Whether an open recorder asks for `expected_acceptance`."""
    return any(stats.wants_expected for stats in _listening())


def report_round(
    proposed: int,
    accepted: int,
    emitted: int,
    confidence_logits: torch.Tensor | None = None,
    expected_acceptance: torch.Tensor | None = None,
    row: int = 0,
) -> None:
    """Tells the open recorders of one row's round, with the confidence logits (n,) and expected acceptance (n,) of its
    proposed tokens."""
    recorders = _listening()
    # Read off the device only where somebody listens.
    values = [
        tensor[:proposed].tolist() if recorders and tensor is not None else []
        for tensor in (confidence_logits, expected_acceptance)
    ]
    for stats in recorders:
        stats.add_round(proposed, accepted, emitted, *values, row)
