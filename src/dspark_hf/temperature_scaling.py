"""Sequential temperature scaling (STS): confidences whose products can be trusted (paper, section 3.2.2).

Policies multiply the confidences of a block, and what they need calibrated is the product:

    a_k = Π_{i ≤ k} σ(z_i / T_i)   against   y_k = 1 where the target kept the first k drafted tokens

over all rounds: a round refused earlier counts as 0. The temperatures are fitted left to right. With T_1..T_{k−1}
fixed, T_k is the one of a grid, refined around the best, whose a_k has the least expected calibration error. That error
is jagged: which temperature is the best of many that differ by chance says little. So among those whose error is within
chance of the least, the Brier score decides, and T_k stays 1 where neither figure tells it from 1.

z: confidence logits (N, γ) of N rounds, γ positions. y: hard, or soft with a smaller variance: given that the target
kept x_{<k}, it keeps x_k ~ q with the known chance α_k = Σ_v min(p(v | x_{<k}), q(v | x_{<k})). An outcome that nobody
knows is NaN (a text that ended inside the block), and so are all after it.
"""

import math
from collections.abc import Sequence

import torch

from .calibration import brier_score, chance_calibration_error, expected_calibration_error

WIDEST = 8.0
"""Temperatures are looked for in 1/8..8."""
_COARSE, _FINE, _REFINEMENTS = 12, 6, 2  # steps to either side of the grids, the first of 19 %, the last of 0.5 %
_CHANCE = 2.0  # errors of calibrated confidences are rarely above twice their mean


class SequentialTemperatureScaling:
    """Fits the temperatures of a drafter's confidence head."""

    @staticmethod
    def fit(confidence_logits: torch.Tensor, accepted: torch.Tensor | Sequence[int], bins: int = 10) -> torch.Tensor:
        """
        Args:
            confidence_logits: (N, γ), as the drafter gives them.
            accepted: accepted lengths (N,) in 0..γ, or prefix labels (N, γ) in [0, 1] as `prefix_labels` makes them.
            bins: of equal width, in which the calibration error is taken.

        Returns:
            Temperatures (γ,) float64, 1 where nothing is known or nothing is gained.

        Raises:
            ValueError: for shapes, lengths or labels other than these, and for logits that are not finite where a label
                is known.
        """
        logits = torch.as_tensor(confidence_logits).double().cpu()
        labels = _checked_labels(logits, torch.as_tensor(accepted).cpu())
        if bins < 1:
            raise ValueError(f"bins is {bins}, expected 1 or more")
        temperatures = torch.ones(logits.shape[1], dtype=torch.float64)
        before = torch.ones(len(logits), dtype=torch.float64)
        for k in range(logits.shape[1]):
            known = ~labels[:, k].isnan()
            temperatures[k] = _best_temperature(before[known], logits[known, k], labels[known, k], bins)
            before = before * (logits[:, k] / temperatures[k]).sigmoid()
        return temperatures


def survival_probabilities(confidence_logits: torch.Tensor, temperatures: torch.Tensor | None = None) -> torch.Tensor:
    """a_k = Π_{i ≤ k} σ(z_i / T_i): logits (N, γ), temperatures (γ,) or None for 1 → (N, γ)."""
    scaled = confidence_logits if temperatures is None else confidence_logits / temperatures.to(confidence_logits)
    return scaled.sigmoid().cumprod(dim=-1)


def prefix_labels(
    accepted_lengths: Sequence[int],
    known_lengths: Sequence[int],
    block_size: int,
    expected_acceptance: Sequence[Sequence[float]] | None = None,
) -> torch.Tensor:
    """Whether the target kept the first k + 1 drafted tokens, for k in 0..γ−1 → (N, γ) float64.

    Args:
        accepted_lengths: (N,), of every round.
        known_lengths: (N,), how many positions of the round have a known outcome: the proposed ones, or the accepted
            ones where the text ended inside the block. The labels of the others are NaN.
        expected_acceptance: α_k of every round's proposed positions. With it a label is α_k where all tokens before
            were kept, of the same mean as the hard label and a smaller variance.

    Raises:
        ValueError: for a round with lengths that do not fit one another.
    """
    labels = torch.full((len(accepted_lengths), block_size), float("nan"), dtype=torch.float64)
    alphas = [None] * len(labels) if expected_acceptance is None else expected_acceptance
    for row, accepted, known, alpha in zip(labels, accepted_lengths, known_lengths, alphas, strict=True):
        if not 0 <= accepted <= known <= block_size:
            order = f"0 <= accepted <= known <= {block_size}"
            raise ValueError(f"a round has {accepted} accepted and {known} known tokens, expected {order}")
        if alpha is not None and len(alpha) < known:
            raise ValueError(f"a round has {len(alpha)} values of expected acceptance, expected {known} or more")
        row[:known] = 0.0
        row[:accepted] = 1.0
        if alpha is not None:
            reached = min(accepted + 1, known)
            row[:reached] = torch.tensor(alpha[:reached], dtype=torch.float64)
    return labels


def _best_temperature(before: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, bins: int) -> float:
    """T_k from the survival of the positions before it, its logits and labels, each (n,)."""
    if not len(labels):
        return 1.0

    def score(temperature: float) -> tuple[float, float, float]:
        """ECE, the ECE allowed to chance, Brier score."""
        survival = before * (logits / temperature).sigmoid()
        allowed = _CHANCE * chance_calibration_error(survival, bins)
        return expected_calibration_error(survival, labels, bins), allowed, brier_score(survival, labels)

    best, least, width, steps = 1.0, math.inf, math.log(WIDEST), _COARSE
    for _ in range(1 + _REFINEMENTS):
        grid = [best * math.exp(width * i / steps) for i in range(-steps, steps + 1)]
        grid = [temperature for temperature in grid if 1 / WIDEST <= temperature <= WIDEST]
        scores = [score(temperature) for temperature in grid]
        least = min(least, *(error for error, _, _ in scores))
        close = [
            (brier, abs(math.log(temperature)), temperature)
            for temperature, (error, allowed, brier) in zip(grid, scores, strict=True)
            if error <= least + allowed
        ]
        best = min(close)[2]
        width, steps = width / steps, _FINE

    error, _, brier = score(best)
    error_at_one, allowed, brier_at_one = score(1.0)
    at_one, shift = before * logits.sigmoid(), before * ((logits / best).sigmoid() - logits.sigmoid())
    # What the gain in Brier score scatters by were T = 1 right.
    scatter = 2 * float((shift.square() * at_one * (1 - at_one)).sum().sqrt()) / len(labels)
    told_apart = error_at_one > error + allowed or brier_at_one - brier > scatter
    return best if told_apart else 1.0


def _checked_labels(logits: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    if logits.ndim != 2:
        raise ValueError(f"confidence_logits has the shape {tuple(logits.shape)}, expected (N, γ)")
    count, slots = logits.shape
    if accepted.shape == (count,):
        lengths = accepted.double()
        if not bool(((lengths >= 0) & (lengths <= slots) & (lengths == lengths.round())).all()):
            raise ValueError(f"accepted is {accepted.tolist()}, expected lengths in 0..{slots}")
        labels = (torch.arange(slots) < lengths[:, None]).double()
    elif accepted.shape == (count, slots):
        labels = accepted.double()
    else:
        raise ValueError(f"accepted has the shape {tuple(accepted.shape)}, expected {(count,)} or {(count, slots)}")
    known = ~labels.isnan()
    if not bool(((labels >= 0) & (labels <= 1))[known].all()):
        raise ValueError(f"accepted holds {labels[known].min()}..{labels[known].max()}, expected labels in 0..1")
    if bool((known[:, 1:] & ~known[:, :-1]).any()):
        raise ValueError("accepted has a known label after an unknown one (NaN), expected all after it to be NaN")
    if not bool(logits[known].isfinite().all()):
        raise ValueError("confidence_logits is not finite where a label is known, expected finite logits there")
    return labels
