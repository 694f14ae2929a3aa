"""How well confidences tell what is accepted: expected calibration error, Brier score, area under the ROC curve.

A round's tokens are known up to the first refused one: position k has an outcome only in rounds that kept all before
it, so that its confidence is judged as what it is, a probability given the prefix. Shapes: N pairs of a probability in
[0, 1] and an outcome, 0 or 1, or for all but the AUC its exact expectation in [0, 1].
"""

import math
from collections.abc import Sequence

import torch


def expected_calibration_error(probabilities: torch.Tensor, outcomes: torch.Tensor, bins: int = 10) -> float:
    """Σ_bins (n_bin / N) |mean probability − mean outcome| over bins of equal width; NaN without pairs."""
    if not len(probabilities):
        return float("nan")
    counts, confidence, accuracy = reliability(probabilities, outcomes, bins)
    return float((counts * (confidence - accuracy).abs()).nansum() / counts.sum())


def chance_calibration_error(probabilities: torch.Tensor, bins: int = 10) -> float:
    """The ECE that probabilities (N,) show by chance alone when all of them are right: outcomes are drawn, and a bin's
    mean scatters with variance Σ p (1 − p) / n_bin². So √(2/π) Σ_bins √(Σ p (1 − p)) / N for bins of many pairs; NaN
    without pairs."""
    if not len(probabilities):
        return float("nan")
    p = probabilities.double()
    variances = torch.zeros(bins, dtype=torch.float64).index_add(0, _bin_of(p, bins), p * (1 - p))
    return math.sqrt(2 / math.pi) * float(variances.sqrt().sum()) / len(p)


def reliability(
    probabilities: torch.Tensor, outcomes: torch.Tensor, bins: int = 10
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reliability diagram: pairs, mean probability and mean outcome per bin of equal width, (bins,) each float64;
    the means of an empty bin are NaN."""
    probabilities, outcomes = probabilities.double(), outcomes.double()
    index = _bin_of(probabilities, bins)
    zeros = torch.zeros(bins, dtype=torch.float64)
    counts = zeros.index_add(0, index, torch.ones_like(probabilities))
    return counts, zeros.index_add(0, index, probabilities) / counts, zeros.index_add(0, index, outcomes) / counts


def _bin_of(probabilities: torch.Tensor, bins: int) -> torch.Tensor:
    return (probabilities * bins).long().clamp(max=bins - 1)


def brier_score(probabilities: torch.Tensor, outcomes: torch.Tensor) -> float:
    """Mean squared distance of probability and outcome; NaN without pairs."""
    return float((probabilities.double() - outcomes.double()).square().mean())


def roc_auc(probabilities: torch.Tensor, outcomes: torch.Tensor) -> float:
    """The chance that a random accepted token has a higher probability than a random refused one, ties counted half
    (Mann–Whitney); NaN where only one kind is there."""
    values, ranks = probabilities.double().unique(return_inverse=True)
    counts = torch.bincount(ranks, minlength=len(values)).double()
    middle = counts.cumsum(0) - (counts - 1) / 2  # mean rank of each value, from 1
    accepted = outcomes.bool()
    positive, negative = int(accepted.sum()), int((~accepted).sum())
    if not positive or not negative:
        return float("nan")
    return float((middle[ranks][accepted].sum() - positive * (positive + 1) / 2) / (positive * negative))


def confidence_pairs(
    confidence_logits: Sequence[Sequence[float]],
    accepted_lengths: Sequence[int],
    acceptance_lengths: Sequence[int],
    position: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and outcomes (N,) of all tokens with a known outcome, or of those at one position of their blocks.

    Args:
        confidence_logits, accepted_lengths, acceptance_lengths: of every round, as `SpeculationStats` holds them. A
            round without a bonus token ended the text: what came after its last token was not judged.
    """
    logits, outcomes = [], []
    for row, accepted, emitted in zip(confidence_logits, accepted_lengths, acceptance_lengths, strict=True):
        judged = accepted + 1 if emitted > accepted else accepted
        for k, logit in enumerate(row[:judged]):
            if position is None or k == position:
                logits.append(logit)
                outcomes.append(float(k < accepted))
    return torch.tensor(logits, dtype=torch.float64).sigmoid(), torch.tensor(outcomes, dtype=torch.float64)
