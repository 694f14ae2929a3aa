"""Methods trained alike for one target and compared: the same texts, anchors and steps, and the same prompts.

Every run has a folder, and what is there is not made again: a killed comparison goes on where it stopped.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from ..evaluation.datasets import EvaluationPrompt
from ..evaluation.evaluate import EvaluationSettings, content_digest, evaluate_drafter
from ..evaluation.loading import load_drafter, load_target
from ..packing import packed_where_possible
from ..profiling_dspark import machine
from .recipe import Recipe, run_recipe
from .trainer import DSparkTrainingArguments

COMPARISON = "comparison.json"


def run_experiment(
    recipe: Recipe,
    methods: Sequence[str],
    seeds: Sequence[int],
    prompts: Sequence[EvaluationPrompt],
    output: str | Path,
    temperatures: Sequence[float] = (1.0, 0.0),
    max_new_tokens: int = 2048,
    batch_size: int = 1,
    progress: Callable[[list], Iterable] = iter,
) -> dict[str, Any]:
    """Trains every method with every seed by `recipe`, evaluates each on the prompts, and writes `comparison.json` and
    `table.md` into the folder `output`.

    Args:
        recipe: of a new DSpark drafter; its method, seed and output folder are replaced, all its texts are trained on,
            and the weights after the last step are taken.
        temperatures, max_new_tokens, batch_size, progress: as in `evaluate_drafter`.

    Returns:
        `machine`, `settings`, and `runs`, of each its `method`, `seed`, `layers`, `parameters`, `steps`, `texts` seen,
        `train_seconds` and `results` (of `evaluate_drafter`).

    Raises:
        ValueError: for methods or seeds that are none or not distinct, and a recipe that does not train a new drafter.
    """
    for name, values in (("methods", methods), ("seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} are {list(values)}, expected some, each once")
    if recipe.drafter is None:
        raise ValueError(f"the recipe goes on from {recipe.init_from}, expected one of a new drafter")
    output = Path(output)
    fixed = {"eval_strategy": "no", "load_best_model_at_end": False}
    plans = [
        replace(
            recipe,
            method=method,
            eval_texts=0,
            training=recipe.training | fixed | {"seed": seed, "output_dir": str(output / f"{method}-seed{seed}")},
        )
        for seed in seeds
        for method in methods
    ]
    for plan in plans:
        folder = Path(plan.training["output_dir"])
        if not (folder / "drafter" / "model.safetensors").exists():
            run_recipe(plan, resume=folder.exists() and get_last_checkpoint(str(folder)) is not None)
    target, tokenizer = load_target(recipe.target)
    runs = []
    for plan in plans:
        folder = Path(plan.training["output_dir"])
        drafter = load_drafter(str(folder / "drafter"), target.config, dtype=target.dtype).to(target.device).eval()
        parameters = sum(parameter.numel() for parameter in drafter.parameters())
        drafter = packed_where_possible(drafter)
        settings = EvaluationSettings(
            recipe.target,
            folder.name,
            content_digest(folder / "drafter"),
            str(target.dtype),
            "fixed",
            None,
            max_new_tokens,
        )
        result = evaluate_drafter(
            target, tokenizer, drafter, prompts, folder / "evaluation", settings, temperatures, batch_size,
            progress=progress,
        )  # fmt: skip
        facts = {"layers": result["drafter"]["layers"], "parameters": parameters}
        facts |= training_facts(folder, plan.training) | {"results": result["results"]}
        runs.append({"method": plan.method, "seed": plan.training["seed"]} | facts)
    shared = {"target": recipe.target, "drafter": recipe.drafter, "training": recipe.training}
    comparison = {
        "machine": machine(),
        "settings": shared | {"max_new_tokens": max_new_tokens, "prompts": len(prompts)},
        "runs": runs,
    }
    (output / COMPARISON).write_text(json.dumps(comparison, indent=1), encoding="utf-8")
    (output / "table.md").write_text(comparison_table(comparison), encoding="utf-8")
    return comparison


def training_facts(folder: Path, training: dict[str, Any]) -> dict[str, Any]:
    """`steps`, `texts` seen and `train_seconds` of a finished run; where it was resumed, the seconds since."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    arguments = DSparkTrainingArguments(**training)
    texts = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    seconds = [entry["train_runtime"] for entry in state["log_history"] if "train_runtime" in entry]
    return {"steps": state["global_step"], "texts": state["global_step"] * texts, "train_seconds": seconds[-1]}


def comparison_table(comparison: dict[str, Any]) -> str:
    """Markdown: τ of every run by data set and as macro average, a table per temperature, and under it the lead of the
    first method over the others."""
    parts = []
    for index, first in enumerate(comparison["runs"][0]["results"]):
        names = [*first["data"], "macro average"]
        lines = [f"τ at temperature {first['temperature']:g}:", ""]
        lines += [f"| method | seed | layers | parameters | {' | '.join(names)} |", "|---" * (4 + len(names)) + "|"]
        macro: dict[str, list[float]] = {}
        for run in comparison["runs"]:
            result = run["results"][index]
            figures = [*result["data"].values(), result["macro"]]
            values = [figure["acceptance_length"] for figure in figures]
            macro.setdefault(run["method"], []).append(values[-1])
            cells = [run["method"], str(run["seed"]), str(run["layers"]), f"{run['parameters'] / 1e6:.1f} M"]
            lines.append(f"| {' | '.join(cells + [f'{value:.2f}' for value in values])} |")
        best, *others = ((method, statistics.mean(values)) for method, values in macro.items())
        leads = [f"{100 * (best[1] / value - 1):+.1f} % over {method}" for method, value in others]
        if leads:
            lines += ["", f"{best[0]} accepts {', '.join(leads)} (macro averages, means over seeds)."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
