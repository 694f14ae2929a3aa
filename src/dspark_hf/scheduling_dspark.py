"""Verify policies: how many of a block's drafted tokens the target checks (paper, section 3.2).

A policy may look at the confidence of a token only to decide about that token and later ones, never about earlier ones:
choosing a length by what lies beyond it would tie the choice to the sample and bias the output (appendix A). Policies
are pure; R rows, γ slots.
"""

from dataclasses import dataclass

import torch


class VerifyPolicy:
    """Interface of all policies."""

    needs_confidence = False

    def verify_lengths(self, confidence: torch.Tensor) -> torch.Tensor:
        """Confidences (R, n) in [0, 1] of the tokens drafted so far → lengths (R,) in 0..n."""
        raise NotImplementedError

    def draft_limit(self, block_size: int) -> int:
        """The most tokens worth drafting, 0..γ, known before the block."""
        return block_size

    def wants(self, confidence: torch.Tensor) -> torch.Tensor | None:
        """Whether a row wants the token with this confidence (R,) → (R,) bool; None wants every token. Asked before the
        token is drawn, so that unwanted slots cost no sequential work."""
        return None


@dataclass(frozen=True)
class FixedLength(VerifyPolicy):
    """Verifies the same number of tokens in every round, γ by default."""

    length: int | None = None

    def __post_init__(self):
        if self.length is not None and self.length < 0:
            raise ValueError(f"length is {self.length}, expected 0 or more")

    def verify_lengths(self, confidence):
        rows, slots = confidence.shape
        return torch.full((rows,), self.draft_limit(slots), device=confidence.device)

    def draft_limit(self, block_size):
        return block_size if self.length is None else min(self.length, block_size)


@dataclass(frozen=True)
class ConfidenceThreshold(VerifyPolicy):
    """Verifies up to the first token whose confidence is below the threshold."""

    threshold: float
    needs_confidence = True

    def __post_init__(self):
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold is {self.threshold}, expected a probability in 0..1")

    def verify_lengths(self, confidence):
        return self.wants(confidence).long().cumprod(dim=-1).sum(dim=-1)

    def wants(self, confidence):
        return confidence >= self.threshold
