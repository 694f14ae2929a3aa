"""`dspark calibrate`: temperatures that make a drafter's confidences true, fitted and judged on real decoding."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..evaluation import calibrate as calibration
from ..evaluation.benchmark import machine
from ..evaluation.loading import chat_inputs, load_pair, load_prompts

LABELS = ("hard", "expected")


def calibrate(
    target: Annotated[str, typer.Option(help="Folder or Hub id, or demo.")],
    drafter: Annotated[str, typer.Option(help="Folder of the drafter, or Hub id.")],
    prompts: Annotated[str, typer.Option(help="JSONL of {'turns': [...]}, or gsm8k_test, chat_test.")] = "gsm8k_test",
    limit: Annotated[int, typer.Option(help="Prompts to take.")] = 40,
    holdout: Annotated[float, typer.Option(help="Share of the prompts, the last ones, kept for judging.")] = 1 / 3,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 for greedy decoding.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 128,
    labels: Annotated[
        str | None, typer.Option(help="hard: what was accepted; expected: the exact chance, the default when sampling.")
    ] = None,
    bins: Annotated[int, typer.Option(help="Of the calibration error.")] = 10,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    save_to: Annotated[Path | None, typer.Option(help="New folder for a copy with the temperatures.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Store them in the drafter's own folder.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Store them even if they do not help.")] = False,
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("runs/calibration.json"),
    temperatures_output: Annotated[Path | None, typer.Option(help="JSON for serving engines.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    pack: Annotated[bool, typer.Option(help="Pack linear layers for the CPU.")] = True,
) -> None:
    """Fits a temperature per position (sequential temperature scaling) and tells whether they help on other prompts."""
    if threads:
        torch.set_num_threads(threads)
    check_options(drafter, labels, temperature, save_to, in_place)
    texts = load_prompts(prompts, limit)
    kept = split(len(texts), holdout)

    model, tokenizer, draft_model = load_pair(target, drafter, pack)
    ids = [chat_inputs(tokenizer, text, model.device)["input_ids"][0] for text in texts]
    settings = (max_new_tokens, temperature, seed, partial(track, description="batches"), batch_size)
    rounds = [calibration.collect_rounds(model, draft_model, part, *settings) for part in (ids[:kept], ids[kept:])]
    result = calibration.calibrate(*rounds, labels, bins)
    parts = {"prompts": prompts, "fit_prompts": kept, "held_out_prompts": len(ids) - kept}
    decoding = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed, "dtype": str(model.dtype)}
    settings = {"target": target, "drafter": drafter, "bins": bins} | parts | decoding
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"machine": machine(), "settings": settings} | result, indent=1))
    console = Console(highlight=False, soft_wrap=True)
    for kind in result["held_out"]:
        console.print(table(result, kind))
    console.print(verdict(result))

    if not (result["helps"] or force):
        if in_place or save_to is not None or temperatures_output is not None:
            console.print("nothing is stored; --force stores the temperatures all the same")
        return
    if temperatures_output is not None:
        calibration.save_temperatures(temperatures_output, result["temperatures"], settings)
        console.print(f"{temperatures_output}: temperatures")
    if in_place or save_to is not None:
        folder = calibration.store_temperatures(drafter, result["temperatures"], save_to)
        console.print(f"{folder}: sts_temperatures in config.json")


def check_options(drafter: str, labels: str | None, temperature: float, save_to: Path | None, in_place: bool) -> None:
    """Raises `ValueError` for what could not be done after the decoding."""
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}, expected 0 or more")
    if labels not in (None, *LABELS) or (labels == "expected" and temperature == 0):
        raise ValueError(f"labels is {labels!r}, expected one of {LABELS}, and hard at temperature 0")
    if in_place and save_to is not None:
        raise ValueError(f"save-to is {save_to}, expected none with --in-place")
    if in_place or save_to is not None:
        calibration.check_storable(drafter, save_to)


def split(prompts: int, holdout: float) -> int:
    """How many of the prompts, the first ones, are fitted on; at least one is kept for judging."""
    kept = min(prompts - 1, round(prompts * (1 - holdout)))
    if not 0 < holdout < 1 or kept < 1:
        raise ValueError(f"holdout is {holdout} of {prompts} prompts, expected 0..1 with some prompts in both parts")
    return kept


def table(result: dict[str, Any], kind: str) -> Table:
    """Held-out figures before and after scaling, one row a position; the ECE that chance alone makes beside."""
    rows = Table("k", "T", "rounds", "ECE", "after", "chance", "Brier", "after", "AUC", "after", box=None)
    rows.title, rows.title_justify = f"survival of the prefix, held-out prompts, {kind} outcomes", "left"
    for row in result["held_out"][kind]:
        before, after = row["before"], row["after"]
        figures = [before["ece"], after["ece"], after["chance_ece"], before["brier"], after["brier"],
                   before["auc"], after["auc"]]  # fmt: skip
        cells = ["–" if figure is None else f"{figure:.4f}" for figure in figures]
        rows.add_row(str(row["position"]), f"{row['temperature']:.3f}", str(row["rounds"]), *cells)
    return rows


def verdict(result: dict[str, Any]) -> str:
    """One sentence."""
    figures = result["held_out"][result["labels"]]
    before, after = (calibration.mean_figures(figures, when) for when in ("before", "after"))
    change = f"mean ECE {before['ece']:.4f} → {after['ece']:.4f}, Brier {before['brier']:.4f} → {after['brier']:.4f}"
    helps = "temperature scaling helps" if result["helps"] else "temperature scaling does not help"
    return f"{helps} on the held-out prompts: {change} ({result['labels']} outcomes)"
