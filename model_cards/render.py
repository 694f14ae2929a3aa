"""Writes a model card from what was measured: `python model_cards/render.py model_cards/<name>`.

The folder holds the drafter's `config.json` and `model.safetensors`, the result of `dspark bench` as `bench.json`, and
what is to be said of the training as `training.json`.
"""

import json
import sys
from pathlib import Path

from safetensors import safe_open


def render(folder: Path) -> str:
    """The card's text."""
    config, bench, training = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("config", "bench", "training")
    )
    settings, machine, summary = bench["settings"], bench["machine"], bench["summary"]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys() if name not in ("d2t", "t2d")]  # noqa: SIM118
    drafted = next(arm for arm in summary.values() if arm["acceptance_length"] is not None)
    return (
        (folder.parent / "template.md")
        .read_text(encoding="utf-8")
        .format(
            name=folder.name,
            base_model=training["base_model"],
            training=training["text"],
            layers=config["num_hidden_layers"],
            block_size=config["block_size"],
            head=config["markov_head_type"],
            rank=config["markov_rank"],
            parameters=sum(_size(shape) for shape in shapes) / 1e6,
            prompts=settings["prompts"],
            prompt_set=settings["prompt_set"],
            max_new_tokens=settings["max_new_tokens"],
            dtype=settings["dtype"].removeprefix("torch."),
            packed=" with packed linear layers" if settings["packed"] else "",
            processor=machine["processor"],
            threads=machine["threads"],
            table=_table(summary),
            positions=", ".join(f"{share:.2f}" for share in drafted["acceptance_by_position"]),
        )
    )


def _table(summary: dict) -> str:
    lines = ["| | tokens/s | speed-up | τ | texts that differ (near-ties) |", "|---|---|---|---|---|"]
    for name, arm in summary.items():
        length = "" if arm["acceptance_length"] is None else f"{arm['acceptance_length']:.2f}"
        differ = f"{arm['texts_that_differ']} ({arm['of_these_near_ties']})"
        lines.append(f"| {name} | {arm['tokens_per_second']:.1f} | {arm['speed_up']:.2f} | {length} | {differ} |")
    return "\n".join(lines)


def _size(shape: list[int]) -> int:
    size = 1
    for dimension in shape:
        size *= dimension
    return size


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "README.md").write_text(render(folder), encoding="utf-8")
