"""Acceptance by position in the draft as a module of `evaluate`:

evaluate.load("…/metrics/conditional_acceptance").compute(
    predictions=stats.accepted_lengths, references=stats.proposal_lengths
)
"""

import datasets
import evaluate

from dspark_hf.telemetry_dspark import SpeculationStats

_DESCRIPTION = "Acceptance of drafted tokens by their position in the block, and of all that were verified."
_INPUTS = """
Args:
    predictions: of every round the drafted tokens that the target kept.
    references: of every round the drafted tokens that the target checked.

Returns:
    conditional_acceptance: for each position the share of the rounds keeping all before it that kept it too; NaN where
        no round came so far.
    acceptance_by_position: for each position the share of the rounds proposing it that kept it.
    verify_rate: tokens kept over tokens checked; NaN where none was.
"""


class ConditionalAcceptance(evaluate.Metric):
    def _info(self):
        features = datasets.Features({name: datasets.Value("int64") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions, references):
        stats = SpeculationStats(proposal_lengths=list(references), accepted_lengths=list(predictions))
        return {
            "conditional_acceptance": stats.conditional_acceptance,
            "acceptance_by_position": stats.acceptance_by_position,
            "verify_rate": sum(predictions) / sum(references) if sum(references) else float("nan"),
        }
