"""Figures of acceptance, from the JSON of `dspark evaluate`, `dspark bench` and `dspark calibrate` (paper, figures 2,
3, 5 and 6). Each is a pure function of the data."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from .plots_style import PALETTE, legend_below, line_style, panels

TAU = "acceptance length τ (tokens per round)"
FEWEST_ROUNDS = 20
"""A share of fewer rounds says nothing, and is not drawn."""


def at_temperature(result: dict[str, Any], temperature: float) -> dict[str, Any] | None:
    """The figures of an evaluation at one temperature."""
    return next((part for part in result["results"] if part["temperature"] == temperature), None)


def labels_of(results: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each evaluation: the drafter's, with what tells it from another of that name."""
    names = [result["drafter"]["name"] for result in results]
    for more in ("policy", "target", "seed", "max_new_tokens"):
        if len(set(names)) == len(names):
            break
        if len({result["settings"][more] for result in results}) > 1:
            names = [f"{name}, {more} {result['settings'][more]}" for name, result in zip(names, results, strict=True)]
    return names


def conditional_acceptance(results: Sequence[dict[str, Any]], temperature: float) -> Figure:
    """Acceptance at a position where all before it were accepted: a panel per domain, a line per drafter (figure 2)."""
    parts = [at_temperature(result, temperature) for result in results]
    domains = list(dict.fromkeys(domain for part in parts if part for domain in part["domains"]))
    figure, axes = panels(len(domains), share_y=True)
    longest = 1
    for index, (part, label) in enumerate(zip(parts, labels_of(results), strict=True)):
        for domain, panel in zip(domains, axes, strict=True):
            shown = _well_known((part or {"domains": {}})["domains"].get(domain))
            panel.plot(range(1, len(shown) + 1), shown, **line_style(index, label))
            longest = max([longest, *(position for position, value in enumerate(shown, 1) if value == value)])
    for domain, panel in zip(domains, axes, strict=True):
        panel.set(title=domain, xlabel="position in the draft", ylim=(0, 1), xticks=range(1, longest + 1))
    axes[0].set_ylabel("accepted, given that all before were")
    figure.suptitle(
        f"Conditional acceptance by position, temperature {temperature:g} (shares of {FEWEST_ROUNDS} rounds or more)"
    )
    legend_below(figure, axes[0])
    return figure


def _well_known(figures: dict[str, Any] | None) -> list[float]:
    """Conditional acceptance by position, NaN where it rests on fewer than `FEWEST_ROUNDS`."""
    if figures is None:
        return []
    reached = [figures["rounds"] * share for share in (1.0, *figures["acceptance_by_position"])]
    pairs = zip(figures["conditional_acceptance"], reached, strict=False)
    return [float("nan") if value is None or rounds < FEWEST_ROUNDS else value for value, rounds in pairs]


def acceptance_by_depth(results: Sequence[dict[str, Any]], temperature: float) -> Figure:
    """Acceptance length by the number of draft layers: a panel per domain and one for the macro average, a line per
    method (figure 3)."""
    parts = [(result["drafter"], at_temperature(result, temperature)) for result in results]
    known = [(drafter, part) for drafter, part in parts if part]
    domains = list(dict.fromkeys(domain for _, part in known for domain in part["domains"]))
    titles = [*domains, "macro average"] if len(domains) > 1 else domains
    figure, axes = panels(len(titles), share_y=True)
    for index, method in enumerate(dict.fromkeys(drafter["method"] for drafter, _ in known)):
        for title, panel in zip(titles, axes, strict=True):
            points = sorted(
                (drafter["layers"], figures["acceptance_length"])
                for drafter, part in known
                if drafter["method"] == method
                and (figures := part["domains"].get(title, part["macro"] if title == "macro average" else None))
                and figures["acceptance_length"] is not None
            )
            panel.plot(*zip(*points, strict=True), **line_style(index, method)) if points else None
    layers = sorted({drafter["layers"] for drafter, _ in known})
    for title, panel in zip(titles, axes, strict=True):
        panel.set(title=title, xlabel="draft layers", xticks=layers)
        panel.set_ylim(bottom=1)
    axes[0].set_ylabel(TAU)
    figure.suptitle(f"Acceptance by depth of the drafter, temperature {temperature:g}")
    legend_below(figure, axes[0])
    return figure


def threshold_sweep(points: Sequence[dict[str, Any]]) -> Figure:
    """What a confidence threshold keeps and spares: draft tokens accepted and rejected per round, and their share that
    is accepted (figure 5).

    Args:
        points: `value` (the threshold), `acceptance_length`, `verified_tokens`, `accepted_tokens`; see `policy_points`.
    """
    points = sorted(points, key=lambda point: point["value"])
    figure, (tokens, rate) = panels(2)
    thresholds = [point["value"] for point in points]
    accepted = [point["accepted_tokens"] for point in points]
    rejected = [point["verified_tokens"] - point["accepted_tokens"] for point in points]
    places = range(len(points))
    tokens.bar(places, accepted, color=PALETTE[2], label="accepted")
    tokens.bar(places, rejected, bottom=accepted, color=PALETTE[1], label="rejected")
    tokens.set_xticks(places, [f"{threshold:g}" for threshold in thresholds])
    tokens.set(title="Draft tokens verified", xlabel="confidence threshold", ylabel="tokens per round")
    tokens.grid(axis="x", visible=False)
    tokens.legend(frameon=False)
    shares = [
        kept / (kept + lost) if kept + lost else float("nan") for kept, lost in zip(accepted, rejected, strict=True)
    ]
    rate.plot(shares, [point["acceptance_length"] for point in points], **line_style(0, "threshold"))
    for share, point in zip(shares, points, strict=True):
        place = (share, point["acceptance_length"])
        rate.annotate(f"{point['value']:g}", place, (6, 4), textcoords="offset points", fontsize=9)
    rate.set(title="What a threshold trades (labelled)", xlabel="share of verified tokens accepted", ylabel=TAU)
    rate.margins(x=0.12, y=0.12)
    figure.suptitle("Sweep of the confidence threshold")
    return figure


def reliability(result: dict[str, Any]) -> Figure:
    """Predicted survival of the draft's prefix against what was observed on held-out prompts, before and after
    temperature scaling, a line per position (figure 6); from `dspark calibrate`."""
    rows = result["held_out"][result["labels"]]
    figure, axes = panels(2, share_y=True)
    for panel, when in zip(axes, ("before", "after"), strict=True):
        panel.plot([0, 1], [0, 1], color="#4c4c4c", linestyle=":", label="perfect")
        errors = []
        for index, row in enumerate(row for row in rows if row["rounds"]):
            bins = row[when]["bins"]
            seen = [
                (survival, outcome)
                for survival, outcome in zip(bins["survival"], bins["outcome"], strict=True)
                if survival is not None
            ]
            panel.plot(*zip(*seen, strict=True), **line_style(index, f"position {row['position']}"), markersize=4)
            errors.append(row[when]["ece"])
        error = f", mean ECE {100 * sum(errors) / len(errors):.1f} %" if errors else ""
        panel.set(title=f"{when} scaling{error}", xlabel="predicted survival of the prefix", xlim=(0, 1), ylim=(0, 1))
    axes[0].set_ylabel("share that survived")
    figure.suptitle("Reliability of the confidence, held-out prompts")
    legend_below(figure, axes[0])
    return figure
