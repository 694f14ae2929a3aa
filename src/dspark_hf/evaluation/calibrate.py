"""Calibration of a drafter: confidence logits and outcomes from real decoding, temperatures fitted on one part of the
prompts and judged on the others, and stored where policies and serving engines read them."""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..calibration import brier_score, chance_calibration_error, expected_calibration_error, reliability, roc_auc
from ..scheduling_dspark import FixedLength
from ..telemetry_dspark import SpeculationStats
from ..temperature_scaling import SequentialTemperatureScaling, prefix_labels, survival_probabilities
from .acceptance import decode_prompts


@dataclass(frozen=True)
class JudgedRounds:
    """Rounds of decoding.

    confidence_logits: (N, γ) float64, NaN at positions that were not proposed.
    labels: prefix labels (N, γ), `"hard"` and where it was recorded `"expected"`; NaN where the outcome is not known.
    """

    confidence_logits: torch.Tensor
    labels: dict[str, torch.Tensor]

    @classmethod
    def of(cls, stats: SpeculationStats, block_size: int) -> "JudgedRounds":
        """A round without a bonus token ended the text: what came after its last token was not judged."""
        lengths = zip(stats.proposal_lengths, stats.accepted_lengths, stats.acceptance_lengths, strict=True)
        known = [proposed if emitted > accepted else accepted for proposed, accepted, emitted in lengths]
        logits = torch.full((len(known), block_size), math.nan, dtype=torch.float64)
        for row, values in zip(logits, stats.confidence_logits, strict=True):
            row[: len(values)] = torch.tensor(values, dtype=torch.float64)
        labels = {"hard": prefix_labels(stats.accepted_lengths, known, block_size)}
        if stats.wants_expected:
            labels["expected"] = prefix_labels(stats.accepted_lengths, known, block_size, stats.expected_acceptance)
        return cls(logits, labels)


def collect_rounds(
    target: PreTrainedModel,
    drafter: Any,
    prompts: Iterable[torch.Tensor],
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Callable[[Iterable], Iterable] = iter,
    batch_size: int = 1,
) -> JudgedRounds:
    """Decodes prompts (T,) with whole blocks judged token by token, whatever the drafter's policy and acceptance rule,
    which are put back afterwards. Above temperature 0 the exact expected acceptance is recorded too.

    Raises:
        ValueError: for a drafter without a confidence head.
    """
    if not drafter.config.enable_confidence_head:
        raise ValueError("the drafter has no confidence head, expected one: its confidences are what is calibrated")
    policy, rule = drafter.verify_policy, drafter.acceptance_rule
    drafter.verify_policy, drafter.acceptance_rule = FixedLength(), "token"
    try:
        stats = decode_prompts(
            target, drafter, prompts, max_new_tokens, temperature, seed, progress, batch_size, temperature > 0
        )
    finally:
        drafter.verify_policy, drafter.acceptance_rule = policy, rule
    return JudgedRounds.of(stats, drafter.config.block_size)


def calibrate(
    fitted_on: JudgedRounds, held_out: JudgedRounds, labels: str | None = None, bins: int = 10
) -> dict[str, Any]:
    """Fits temperatures on one set of rounds and judges them on both.

    Args:
        labels: `"hard"` or `"expected"`, what is fitted to and decided by; by default expected where it is there.

    Returns:
        `temperatures` [γ]; `helps`, whether on the held-out rounds the mean ECE over positions falls and the mean Brier
        score does not rise; `labels`; `rounds` of both sets; and `fit` and `held_out`, per kind of labels the list that
        `position_figures` gives.

    Raises:
        ValueError: for labels that were not recorded, or no rounds in one of the sets.
    """
    labels = labels or ("expected" if "expected" in fitted_on.labels else "hard")
    if labels not in fitted_on.labels:
        raise ValueError(f"labels is {labels!r}, expected one of {sorted(fitted_on.labels)}: expected acceptance is "
                         "known above temperature 0 only")  # fmt: skip
    counts = {"fit": len(fitted_on.confidence_logits), "held_out": len(held_out.confidence_logits)}
    if not all(counts.values()):
        raise ValueError(f"there are {counts} rounds, expected some in both parts; take more prompts")
    temperatures = SequentialTemperatureScaling.fit(fitted_on.confidence_logits, fitted_on.labels[labels], bins)
    parts = {
        name: {
            kind: position_figures(part.confidence_logits, outcomes, temperatures, bins)
            for kind, outcomes in part.labels.items()
        }
        for name, part in (("fit", fitted_on), ("held_out", held_out))
    }
    means = {when: mean_figures(parts["held_out"][labels], when) for when in ("before", "after")}
    helps = means["after"]["ece"] < means["before"]["ece"] and means["after"]["brier"] <= means["before"]["brier"]
    return {"temperatures": temperatures.tolist(), "helps": helps, "labels": labels, "rounds": counts} | parts


def position_figures(
    confidence_logits: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor, bins: int = 10
) -> list[dict[str, Any]]:
    """Figures of prefix survival per position, from 1, before and after scaling: ECE, what it would be by chance alone,
    Brier score, AUC (of hard labels only), and the bins of the reliability diagram. None where there is no value.

    Args:
        confidence_logits, labels: (N, γ); temperatures: (γ,).
    """
    survival = {
        "before": survival_probabilities(confidence_logits),
        "after": survival_probabilities(confidence_logits, temperatures),
    }
    figures = []
    for k in range(labels.shape[1]):
        known = ~labels[:, k].isnan()
        row: dict[str, Any] = {"position": k + 1, "rounds": int(known.sum()), "temperature": float(temperatures[k])}
        for when, values in survival.items():
            probabilities, outcomes = values[known, k], labels[known, k]
            hard = bool(((outcomes == 0) | (outcomes == 1)).all())
            counts, confidence, accuracy = reliability(probabilities, outcomes, bins)
            row[when] = {
                "ece": _number(expected_calibration_error(probabilities, outcomes, bins)),
                "chance_ece": _number(chance_calibration_error(probabilities, bins)),
                "brier": _number(brier_score(probabilities, outcomes)),
                "auc": _number(roc_auc(probabilities, outcomes)) if hard else None,
                "bins": {
                    "rounds": counts.long().tolist(),
                    "survival": [_number(value) for value in confidence.tolist()],
                    "outcome": [_number(value) for value in accuracy.tolist()],
                },
            }
        figures.append(row)
    return figures


def mean_figures(figures: list[dict[str, Any]], when: str) -> dict[str, float]:
    """ECE and Brier score `"before"` or `"after"`, means over the positions that have any rounds."""
    judged = [row[when] for row in figures if row["rounds"]]
    return {key: sum(values[key] for values in judged) / len(judged) for key in ("ece", "brier")}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def save_temperatures(path: str | Path, temperatures: Sequence[float], details: dict[str, Any] | None = None) -> None:
    """Writes the JSON that SGLang and TensorRT-LLM read, `{"temperatures": [γ floats]}`, with `details` beside.

    Raises:
        ValueError: for a temperature that is not a finite number above 0.
    """
    values = _checked(path, temperatures)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"temperatures": values} | ({"details": details} if details else {}), indent=1))


def load_temperatures(path: str | Path) -> list[float]:
    """Temperatures [γ] of a file by `save_temperatures`, or of an engine's with the key `sts_temperatures`.

    Raises:
        ValueError: for a file without either key, or with values that are no temperatures.
    """
    data = json.loads(Path(path).read_text(encoding="utf-8"))
    keys = [key for key in ("temperatures", "sts_temperatures") if isinstance(data, dict) and key in data]
    if not keys:
        raise ValueError(f"{path} has no temperatures, expected the key temperatures or sts_temperatures")
    return _checked(path, data[keys[0]])


def _checked(path: str | Path, temperatures: Any) -> list[float]:
    fits = isinstance(temperatures, (list, tuple)) and len(temperatures) > 0
    if not fits or not all(type(t) in (int, float) and 0 < t < math.inf for t in temperatures):
        raise ValueError(f"temperatures of {path} are {temperatures!r}, expected a list of finite numbers above 0")
    return [float(t) for t in temperatures]


def store_temperatures(folder: str | Path, temperatures: Sequence[float], save_to: str | Path | None = None) -> Path:
    """Writes `sts_temperatures` into the configuration of the drafter in `folder`, or of a copy of that folder in
    `save_to`. Nothing else of the drafter changes.

    Returns:
        The folder written to.

    Raises:
        ValueError: for a folder that holds no drafter, or a `save_to` that is there already.
    """
    folder = check_storable(folder, save_to)
    if save_to is not None:
        folder = Path(shutil.copytree(folder, save_to))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["sts_temperatures"] = _checked(folder, temperatures)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def check_storable(folder: str | Path, save_to: str | Path | None = None) -> Path:
    """The same checks, before the work is done."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, expected the folder of a drafter")
    if save_to is not None and Path(save_to).exists():
        raise ValueError(f"{save_to} is there already, expected a new folder; to change a drafter use --in-place")
    return Path(folder)
