"""Calibration of a drafter's confidence as a module of `evaluate`:

probabilities, outcomes = confidence_pairs(stats.confidence_logits, stats.accepted_lengths, stats.acceptance_lengths)
evaluate.load("…/metrics/confidence_calibration").compute(predictions=probabilities, references=outcomes)
"""

import datasets
import evaluate
import torch

from dspark_hf.calibration import brier_score, expected_calibration_error, roc_auc

_DESCRIPTION = (
    "How well confidences tell which drafted tokens are accepted: ECE, Brier score, area under the ROC curve."
)
_INPUTS = """
Args:
    predictions: confidence of every judged token, a probability.
    references: 1 for an accepted token, 0 for a refused one.
    bins: of equal width, for the calibration error; 10 by default.

Returns:
    ece: expected calibration error.
    brier: mean squared distance of confidence and outcome.
    auc: the chance that an accepted token has the higher confidence; NaN where only one kind is there.
"""


class ConfidenceCalibration(evaluate.Metric):
    def _info(self):
        features = datasets.Features({name: datasets.Value("float64") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions, references, bins=10):
        probabilities, outcomes = (torch.tensor(values, dtype=torch.float64) for values in (predictions, references))
        return {
            "ece": expected_calibration_error(probabilities, outcomes, bins),
            "brier": brier_score(probabilities, outcomes),
            "auc": roc_auc(probabilities, outcomes),
        }
