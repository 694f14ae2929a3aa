"""Figures of an evaluation, from the lines of its prompts: by data set, by domain, and their macro average.

    τ              tokens that a round yields, bonus included: the mean over all rounds of a data set
    verify rate    Σ drafted tokens kept / Σ drafted tokens verified
    domain, macro  means of the figures of data sets, each counting once

The figures of a data set are computed by the modules in `metrics/`, which `evaluate.load` takes by their path.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..calibration import confidence_pairs
from ..telemetry_dspark import SpeculationStats
from .datasets import EvaluationPrompt

METRICS = Path(__file__).parent / "metrics"
"""Folders of `acceptance_length`, `conditional_acceptance` and `confidence_calibration`, as `evaluate.load` takes."""
ROUNDS = ("proposal_lengths", "accepted_lengths", "acceptance_lengths", "confidence_logits")
"""What a line holds of `SpeculationStats`."""


def summarise(lines: Sequence[tuple[EvaluationPrompt, dict[str, Any]]]) -> dict[str, Any]:
    """Figures of prompts with their lines, all of one temperature: `data` by data set, `domains`, `macro`."""
    domains = {prompt.data: prompt.domain for prompt, _ in lines}
    data = {name: figures([line for prompt, line in lines if prompt.data == name]) for name in domains}
    return {
        "data": data,
        "domains": {
            domain: macro_average([data[name] for name in data if domains[name] == domain])
            for domain in dict.fromkeys(domains.values())
        },
        "macro": macro_average(list(data.values())),
    }


def figures(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one data set from the lines of its prompts; None where there is no value.

    Returns:
        `prompts`, `rounds`, `acceptance_length` (τ), per round `verified_tokens` and `accepted_tokens`, `verify_rate`,
        `acceptance_by_position`, `conditional_acceptance`, and with a confidence head `confidence_ece`,
        `confidence_brier`, `confidence_auc`.
    """
    rounds = SpeculationStats(**{name: [value for line in lines for value in line[name]] for name in ROUNDS})
    counts = {"prompts": len(lines), "rounds": len(rounds.acceptance_lengths)}
    if not counts["rounds"]:
        return counts | {"acceptance_length": None, "verify_rate": None, "acceptance_by_position": [],
                         "conditional_acceptance": []}  # fmt: skip
    proposed, accepted = rounds.proposal_lengths, rounds.accepted_lengths
    values = counts | _metric("acceptance_length", predictions=rounds.acceptance_lengths)
    values |= {"verified_tokens": statistics.mean(proposed), "accepted_tokens": statistics.mean(accepted)}
    values |= _metric("conditional_acceptance", predictions=accepted, references=proposed)
    confidence, outcomes = confidence_pairs(rounds.confidence_logits, accepted, rounds.acceptance_lengths)
    if len(confidence):
        judged = _metric("confidence_calibration", predictions=confidence.tolist(), references=outcomes.tolist())
        values |= {f"confidence_{name}": value for name, value in judged.items()}
    return {name: _without_nan(value) for name, value in values.items()}


def _metric(name: str, **inputs) -> dict[str, Any]:
    import evaluate  # an optional dependency

    return evaluate.load(str(METRICS / name), keep_in_memory=True).compute(**inputs)


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def macro_average(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of the figures of several data sets, over those that have a value; `prompts` and `rounds` are added up."""
    averages: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if part.get(name) is not None]
        if name in ("prompts", "rounds"):
            averages[name] = sum(values)
        elif any(isinstance(value, list) for value in values):
            width = max(map(len, values))
            averages[name] = [_mean([value[k] for value in values if k < len(value)]) for k in range(width)]
        else:
            averages[name] = _mean(values)
    return averages


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None
