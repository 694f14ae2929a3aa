"""Acceptance length τ of speculative decoding as a module of `evaluate`:

evaluate.load("…/metrics/acceptance_length").compute(predictions=stats.acceptance_lengths)
"""

import datasets
import evaluate

from dspark_hf.telemetry_dspark import SpeculationStats

_DESCRIPTION = "Acceptance length τ: the mean number of tokens that a round of speculative decoding yields."
_INPUTS = """
Args:
    predictions: of every round the tokens that it yielded, the bonus token included.

Returns:
    acceptance_length: τ, their mean.
    rounds: how many there were.
"""


class AcceptanceLength(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64")})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions):
        stats = SpeculationStats(acceptance_lengths=list(predictions))
        return {"acceptance_length": stats.acceptance_length, "rounds": len(predictions)}
