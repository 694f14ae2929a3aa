"""Figures of speed, from the JSON of `dspark bench` and `dspark bench batch` (paper, figures 4, 7 and 8), and the
points of a sweep over policies. Each is a pure function of the data."""

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .plots_style import legend_below, line_style, panels


def policy_points(name: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The arms of a benchmark whose policy is `name`, `fixed` or `threshold`, with a number: `value`, that number (for
    `fixed` without one, the tokens verified), `acceptance_length`, `verified_tokens` and `accepted_tokens` per round,
    and `round_cost`, the seconds of a round over those of a step of plain decoding; None without a plain arm."""
    points = []
    for arm in result["summary"]:
        policy, _, value = arm.removeprefix("dspark ").partition(":")
        rounds = [row[arm] for row in result["prompts"]]
        lengths = {
            key: [n for row in rounds for n in row[f"{key}_lengths"]] for key in ("acceptance", "proposal", "accepted")
        }
        if policy != name or not lengths["acceptance"]:
            continue
        plain = [row["plain"] for row in result["prompts"] if "plain" in row]
        cost = None
        if plain:
            step = sum(row["seconds"] for row in plain) / sum(row["tokens"] for row in plain)
            cost = sum(row["seconds"] for row in rounds) / len(lengths["acceptance"]) / step
        points.append(
            {
                "value": float(value) if value else float(max(lengths["proposal"])),
                "acceptance_length": statistics.mean(lengths["acceptance"]),
                "verified_tokens": statistics.mean(lengths["proposal"]),
                "accepted_tokens": statistics.mean(lengths["accepted"]),
                "round_cost": cost,
            }
        )
    return sorted(points, key=lambda point: point["value"])


def proposal_length(points: Sequence[dict[str, Any]]) -> Figure:
    """What a round yields and what it costs, and the speed-up that their ratio is, by draft tokens proposed (figure 4).

    Args:
        points: of `policy_points("fixed", …)`.
    """
    figure, (rounds, speed) = panels(2)
    lengths = [point["value"] for point in points]
    yields = [point["acceptance_length"] for point in points]
    costs = [point["round_cost"] for point in points]
    rounds.plot(lengths, yields, **line_style(0, "yield: tokens, bonus included (τ)"))
    rounds.plot(lengths, costs, **line_style(1, "latency: steps of plain decoding"))
    rounds.set(title="A round", ylabel="tokens, or plain steps")
    rounds.legend(frameon=False)
    speed.plot(
        lengths, [tokens / cost for tokens, cost in zip(yields, costs, strict=True)], **line_style(2, "speed-up")
    )
    speed.axhline(1, color="#4c4c4c", linestyle=":")
    speed.set(title="Yield over latency", ylabel="speed-up over plain decoding")
    for panel in (rounds, speed):
        panel.set(xlabel="draft tokens proposed per round", xticks=lengths)
        panel.set_ylim(bottom=0)
    figure.suptitle("Proposal length: acceptance and latency")
    return figure


def throughput_frontier(result: dict[str, Any]) -> Figure:
    """Tokens per second of all requests against those of each, along the batch sizes: further up and to the right is
    better (figure 7)."""
    figure, (panel,) = panels(1)
    for index, (arm, rows) in enumerate(result["summary"].items()):
        points = [(int(size), row["tokens_per_second"]) for size, row in rows.items()]  # JSON has strings for keys
        points.sort()
        panel.plot([t / size for size, t in points], [t for _, t in points], **line_style(index, arm))
        if index == 0:
            for size, speed in points:
                panel.annotate(f"{size}", (speed / size, speed), (-13, -11), textcoords="offset points", fontsize=8)
    panel.set(xlabel="tokens per second and request", ylabel="tokens per second, all requests")
    panel.set_title("Throughput against speed per request\n(numbers: requests decoded together)")
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False, fontsize=9)
    return figure


def load_adaptive_budgets(result: dict[str, Any]) -> Figure:
    """Throughput and verified tokens per request by batch size: a scheduler verifies less as the load grows
    (figure 8)."""
    figure, (speed, verified) = panels(2)
    sizes = result["settings"]["batch_sizes"]
    for index, (arm, rows) in enumerate(result["summary"].items()):
        rows = {int(size): row for size, row in rows.items()}
        speed.plot(sizes, [rows[size]["tokens_per_second"] for size in sizes], **line_style(index, arm))
        lengths = [rows[size]["verified_tokens"] for size in sizes]
        if all(length is not None for length in lengths):
            verified.plot(sizes, lengths, **line_style(index, arm))
    speed.set(title="Throughput", ylabel="tokens per second, all requests")
    verified.set(title="Draft tokens verified", ylabel="per request and round")
    for panel in (speed, verified):
        _batch_axis(panel, sizes)
    figure.suptitle("Budgets by load")
    legend_below(figure, speed)
    return figure


def _batch_axis(panel: Axes, sizes: Sequence[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.set_xlabel("requests decoded together")
    panel.set_ylim(bottom=0)
