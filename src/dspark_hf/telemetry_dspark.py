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
    """

    proposal_lengths: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    confidence_logits: list[list[float]] = field(default_factory=list)

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

    def add_round(self, proposed: int, accepted: int, emitted: int, confidence_logits: list[float]) -> None:
        self.proposal_lengths.append(proposed)
        self.accepted_lengths.append(accepted)
        self.confidence_logits.append(confidence_logits)
        self.acceptance_lengths.append(emitted)


def _recorders() -> list[tuple[int, SpeculationStats]]:
    """(thread, stats) of the open recorders. Kept on `GenerationMixin`, which the copies of this file that come with
    drafters loaded as remote code share."""
    if not hasattr(GenerationMixin, "_dspark_recorders"):
        GenerationMixin._dspark_recorders = []
    return GenerationMixin._dspark_recorders


@contextmanager
def record_speculation() -> Iterator[SpeculationStats]:
    """Records the rounds of every `generate()` call inside: those of this thread, and those of threads that have no
    recorder of their own (a text is often streamed from a second thread)."""
    entry = (threading.get_ident(), SpeculationStats())
    _recorders().append(entry)
    try:
        yield entry[1]
    finally:
        _recorders().remove(entry)  # in one step, as other threads open and close theirs


def report_round(proposed: int, accepted: int, emitted: int, confidence_logits: torch.Tensor | None = None) -> None:
    """Tells the open recorders of one row's round, with the confidence logits (n,) of its proposed tokens."""
    entries = list(_recorders())
    own = [stats for thread, stats in entries if thread == threading.get_ident()]
    recorders = own or [stats for _, stats in entries]
    # Read off the device only where somebody listens.
    logits = confidence_logits[:proposed].tolist() if recorders and confidence_logits is not None else []
    for stats in recorders:
        stats.add_round(proposed, accepted, emitted, logits)
