"""Figures, each from the JSON of a command: readable without the paper, one palette."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, no display needed
from matplotlib import pyplot as plt  # noqa: E402

PALETTE = ("#4c4c4c", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31")
MARKERS = "osD^vPX*"


def plot_batches(result: dict[str, Any], path: str | Path) -> None:
    """Throughput and verified tokens per request by batch size, from `run_batch_benchmark` (paper, figure 8)."""
    figure, (speed, verified) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    sizes = result["settings"]["batch_sizes"]
    for i, (name, rows) in enumerate(result["summary"].items()):
        style = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)], "label": name}
        rows = {int(size): row for size, row in rows.items()}  # JSON has strings for keys
        speed.plot(sizes, [rows[size]["tokens_per_second"] for size in sizes], **style)
        lengths = [rows[size]["verified_tokens"] for size in sizes]
        if all(length is not None for length in lengths):
            verified.plot(sizes, lengths, **style)
    speed.set_title("Throughput")
    speed.set_ylabel("tokens per second, all requests")
    verified.set_title("Draft tokens verified")
    verified.set_ylabel("per request and round")
    for axes in (speed, verified):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("requests decoded together")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    speed.legend(frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
