"""All figures that a folder of results allows, each from the JSON of a command: readable without the paper."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .plots_acceptance import (
    acceptance_by_depth,
    at_temperature,
    conditional_acceptance,
    reliability,
    threshold_sweep,
)
from .plots_speed import load_adaptive_budgets, policy_points, proposal_length, throughput_frontier
from .plots_style import save

KINDS = {
    "evaluate": {"results", "drafter"},
    "calibrate": {"held_out", "temperatures", "labels"},
    "bench": {"summary", "prompts"},
    "bench batch": {"summary", "calls"},
}
"""Keys by which the JSON of a command is known."""


def find_results(paths: Iterable[str | Path]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """The results in JSON files and in folders, however deep, by kind (see `KINDS`): the file's name, in a folder its
    whole path below that with dashes, and the data.

    Raises:
        ValueError: for a path that is not there, and if no file is a result.
    """
    files: dict[Path, str] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"no file or folder {str(path)!r}, expected results")
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            below = file.relative_to(path if path.is_dir() else path.parent)
            files.setdefault(file, "-".join(below.with_suffix("").parts))
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for file, name in files.items():
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError):
            continue  # not ours
        for kind, keys in KINDS.items():
            if isinstance(data, dict) and keys <= data.keys():
                found[kind].append((name, data))
    if not any(found.values()):
        raise ValueError(f"{len(files)} JSON files hold no results, expected some of `dspark` {', '.join(KINDS)}")
    return found


def figures_of(found: dict[str, list[tuple[str, dict[str, Any]]]]) -> dict[str, Figure]:
    """Every figure that results (of `find_results`) allow, by name."""
    figures: dict[str, Figure] = {}
    evaluations = [data for _, data in found["evaluate"]]
    for temperature in sorted({part["temperature"] for data in evaluations for part in data["results"]}):
        here = [data for data in evaluations if at_temperature(data, temperature)]
        whole = [data for data in here if data["settings"]["policy"] == "fixed"] or here
        figures[f"conditional_acceptance_T{temperature:g}"] = conditional_acceptance(whole, temperature)
        if len({data["drafter"]["layers"] for data in whole}) > 1:
            figures[f"depth_T{temperature:g}"] = acceptance_by_depth(whole, temperature)
        for label, points in evaluated_thresholds(here, temperature).items():
            figures[f"threshold_sweep_{label}_T{temperature:g}"] = threshold_sweep(points)
    for name, data in found["bench"]:
        fixed, thresholds = policy_points("fixed", data), policy_points("threshold", data)
        if len(fixed) > 1 and all(point["round_cost"] is not None for point in fixed):
            figures[f"proposal_length_{name}"] = proposal_length(fixed)
        if len(thresholds) > 1:
            figures[f"threshold_sweep_{name}"] = threshold_sweep(thresholds)
    for name, data in found["calibrate"]:
        figures[f"reliability_{name}"] = reliability(data)
    for name, data in found["bench batch"]:
        figures[f"throughput_{name}"] = throughput_frontier(data)
        figures[f"budgets_{name}"] = load_adaptive_budgets(data)
    return figures


def evaluated_thresholds(evaluations: list[dict[str, Any]], temperature: float) -> dict[str, list[dict[str, Any]]]:
    """The points of a threshold sweep by drafter, from the macro averages of evaluations of several thresholds."""
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for data in evaluations:
        kind, _, value = data["settings"]["policy"].partition(":")
        if kind == "threshold":
            macro = at_temperature(data, temperature)["macro"]
            sweeps.setdefault(data["drafter"]["name"], []).append(macro | {"value": float(value)})
    return {name: points for name, points in sweeps.items() if len(points) > 1}


def plot_results(paths: Iterable[str | Path], output: str | Path) -> list[Path]:
    """Writes the figures of all results in `paths` as PNG files into the folder `output`."""
    return [save(figure, Path(output) / f"{name}.png") for name, figure in figures_of(find_results(paths)).items()]


def plot_batches(result: dict[str, Any], path: str | Path) -> None:
    """Throughput and verified tokens per request by batch size, from `run_batch_benchmark`."""
    save(load_adaptive_budgets(result), path)
