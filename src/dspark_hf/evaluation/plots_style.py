"""What all figures share: one palette, one size of panel, how a line looks, how a file is written.

Figures are made without pyplot, so that none is open anywhere and no display is needed.
"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#4c4c4c")
MARKERS = "osD^vPX*"


def panels(count: int, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels side by side, a light grid in each."""
    width = 4.6 if count < 3 else 3.4  # in print all figures are scaled to one width: more inches, smaller letters
    figure = Figure(figsize=(1.2 + width * count, 4.2), layout="constrained")
    axes = list(figure.subplots(1, count, sharey=share_y, squeeze=False)[0])
    for one in axes:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def line_style(index: int, label: str) -> dict[str, Any]:
    """Colour and marker of the line `index`, the same in every panel."""
    return {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index % len(MARKERS)], "label": label}


def legend_below(figure: Figure, axes: Axes, title: str | None = None) -> None:
    """One legend for all panels, of the lines in `axes`, under them, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = len(labels) if len(labels) <= 5 else 4
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, title=title)


def save(figure: Figure, path: str | Path) -> Path:
    """Writes the figure; the ending of the path tells the format."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return Path(path)
