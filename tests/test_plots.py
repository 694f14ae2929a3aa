"""Figures of `dspark plot`: what they show, told by their axes; what a folder of results allows; files written."""

import json

import pytest
from typer.testing import CliRunner

import dspark_hf.cli

pytest.importorskip("matplotlib")

from dspark_hf.evaluation.plots import figures_of, find_results, plot_batches, plot_results  # noqa: E402
from dspark_hf.evaluation.plots_acceptance import (  # noqa: E402
    acceptance_by_depth,
    conditional_acceptance,
    labels_of,
    reliability,
    threshold_sweep,
)
from dspark_hf.evaluation.plots_speed import (  # noqa: E402
    load_adaptive_budgets,
    policy_points,
    proposal_length,
    throughput_frontier,
)


def evaluation(name="a", layers=2, tau=3.0, policy="fixed", temperatures=(1.0, 0.0), seed=0, method="DSpark"):
    """What `dspark evaluate` writes, as far as figures read it: math with three positions, chat with two."""
    domains = {
        "math": {"acceptance_length": tau, "conditional_acceptance": [0.9, 0.8, None], "rounds": 100,
                 "acceptance_by_position": [0.9, 0.72, 0.0]},
        "chat": {"acceptance_length": tau - 1, "conditional_acceptance": [0.6, 0.5], "rounds": 50,
                 "acceptance_by_position": [0.6, 0.3]},
    }  # fmt: skip
    macro = {"acceptance_length": tau - 0.5, "verified_tokens": 4.0, "accepted_tokens": tau - 1.5}
    return {
        "settings": {"policy": policy, "target": "t", "seed": seed, "max_new_tokens": 8},
        "drafter": {"name": name, "method": method, "layers": layers, "block_size": 3},
        "results": [{"temperature": t, "data": {}, "domains": domains, "macro": macro} for t in temperatures],
    }


def benchmark():
    """What `dspark bench` writes: one prompt, plain at 0.1 s a token."""
    arms = {
        "plain": arm(0, [], seconds=1.0) | {"tokens": 10},
        "dspark fixed:2": arm(2, [2, 0], seconds=0.3),
        "dspark fixed": arm(4, [4, 2], seconds=0.4),
        "dspark threshold:0.5": arm(2, [2, 1], seconds=0.3),
        "dspark threshold:0.25": arm(4, [3, 0], seconds=0.3),
    }  # fmt: skip
    return {"summary": dict.fromkeys(arms, {}), "prompts": [arms]}


def arm(proposed, accepted, seconds):
    emitted = [n + 1 for n in accepted]
    return {
        "tokens": sum(emitted),
        "seconds": seconds,
        "acceptance_lengths": emitted,
        "proposal_lengths": [proposed] * len(accepted),
        "accepted_lengths": accepted,
    }


def batches():
    """What `dspark bench batch` writes, read back: sizes 1 and 4."""
    speeds = {"plain": (10.0, 30.0, None), "dspark prefix": (20.0, 50.0, 3.0)}
    summary = {
        name: {
            "1": {"tokens_per_second": one, "verified_tokens": length},
            "4": {"tokens_per_second": four, "verified_tokens": length and length - 1},
        }
        for name, (one, four, length) in speeds.items()
    }
    return {"settings": {"batch_sizes": [1, 4]}, "summary": summary, "calls": []}


def calibration():
    def bins(shift):
        return {"rounds": [5, 0, 5], "survival": [0.2, None, 0.8], "outcome": [0.2 - shift, None, 0.8 - shift]}

    rows = [
        {
            "position": k,
            "rounds": 0 if k == 3 else 10,
            "before": {"ece": 0.1 * k, "bins": bins(0.1)},
            "after": {"ece": 0.01, "bins": bins(0)},
        }
        for k in (1, 2, 3)
    ]
    return {"labels": "hard", "temperatures": [1.0], "held_out": {"hard": rows}}


def lines(axes) -> dict[str, tuple[list[float], list[float]]]:
    """Points of the lines of a panel by label."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_conditional_acceptance():
    figure = conditional_acceptance([evaluation("a"), evaluation("b", temperatures=(0.0,))], 1.0)
    math, chat = figure.axes
    assert (math.get_title(), chat.get_title()) == ("math", "chat") and math.get_ylim() == (0, 1)
    x, y = lines(math)["a"]
    assert x == [1, 2, 3] and y[:2] == [0.9, 0.8] and y[2] != y[2]
    assert lines(chat)["a"] == ([1, 2], [0.6, 0.5]) and lines(chat)["b"] == ([], [])
    assert legend(figure) == ["a", "b"] and "temperature 1" in figure.get_suptitle()
    assert math.get_xlabel() == "position in the draft" and "all before" in math.get_ylabel()


def test_shares_of_few_rounds_are_left_out():
    few = evaluation()
    few["results"][0]["domains"]["chat"]["rounds"] = 33  # of which 19.8 reach the second position
    _, chat = conditional_acceptance([few], 1.0).axes
    x, y = lines(chat)["a"]
    assert y[0] == 0.6 and y[1] != y[1]


def test_lines_keep_their_look_in_every_panel():
    figure = conditional_acceptance([evaluation("a"), evaluation("b")], 0.0)
    looks = [[(line.get_color(), line.get_marker()) for line in axes.lines] for axes in figure.axes]
    assert looks[0] == looks[1] and len(set(looks[0])) == 2


def test_labels_tell_drafters_apart():
    assert labels_of([evaluation("a"), evaluation("b", seed=1)]) == ["a", "b"]
    assert labels_of([evaluation("a"), evaluation("a", seed=1)]) == ["a, seed 0", "a, seed 1"]
    assert labels_of([evaluation("a"), evaluation("a", policy="fixed:2")]) == ["a, policy fixed", "a, policy fixed:2"]


def test_acceptance_by_depth():
    results = [evaluation("b", 5, 4.0), evaluation("a", 2, 3.0), evaluation("c", 1, 2.5, method="Eagle3")]
    figure = acceptance_by_depth(results, 0.0)
    assert [axes.get_title() for axes in figure.axes] == ["math", "chat", "macro average"]
    assert lines(figure.axes[0]) == {"DSpark": ([2, 5], [3.0, 4.0]), "Eagle3": ([1], [2.5])}
    assert lines(figure.axes[2])["DSpark"] == ([2, 5], [2.5, 3.5])
    assert list(figure.axes[0].get_xticks()) == [1, 2, 5] and figure.axes[0].get_ylim()[0] == 1
    assert "tokens per round" in figure.axes[0].get_ylabel()


def test_points_of_a_sweep():
    two, four = policy_points("fixed", benchmark())
    assert (two["value"], two["acceptance_length"], two["verified_tokens"], two["accepted_tokens"]) == (2, 2, 2, 1)
    assert two["round_cost"] == pytest.approx(0.15 / 0.1) and four["value"] == 4  # the block, where no number is given
    assert [point["value"] for point in policy_points("threshold", benchmark())] == [0.25, 0.5]


def test_proposal_length():
    figure = proposal_length(policy_points("fixed", benchmark()))
    rounds, speed = figure.axes
    assert rounds.lines[0].get_ydata().tolist() == [2, 4]
    assert rounds.lines[1].get_ydata().tolist() == pytest.approx([1.5, 2])
    assert lines(speed)["speed-up"][1] == pytest.approx([2 / 1.5, 2])
    assert list(speed.get_xticks()) == [2, 4] and len(rounds.get_legend().get_texts()) == 2


def test_threshold_sweep():
    figure = threshold_sweep(policy_points("threshold", benchmark()))
    tokens, rate = figure.axes
    accepted, rejected = tokens.containers
    assert [bar.get_height() for bar in accepted] == [1.5, 1.5] and [bar.get_height() for bar in rejected] == [2.5, 0.5]
    assert [bar.get_y() for bar in rejected] == [1.5, 1.5]
    assert [label.get_text() for label in tokens.get_xticklabels()] == ["0.25", "0.5"]
    assert [text.get_text() for text in tokens.get_legend().get_texts()] == ["accepted", "rejected"]
    assert lines(rate)["threshold"] == (pytest.approx([1.5 / 4, 1.5 / 2]), [2.5, 2.5])


def test_reliability():
    figure = reliability(calibration())
    before, after = figure.axes
    assert (
        before.get_title() == "before scaling, mean ECE 15.0 %" and after.get_title() == "after scaling, mean ECE 1.0 %"
    )
    assert lines(before).keys() == {"perfect", "position 1", "position 2"}  # the third has no rounds
    assert lines(before)["position 1"] == ([0.2, 0.8], pytest.approx([0.1, 0.7]))
    assert lines(after)["position 2"] == ([0.2, 0.8], [0.2, 0.8])
    assert before.get_xlim() == before.get_ylim() == (0, 1) and len(legend(figure)) == 3


def test_throughput():
    (panel,) = throughput_frontier(batches()).axes
    assert lines(panel) == {"plain": ([10, 7.5], [10, 30]), "dspark prefix": ([20, 12.5], [20, 50])}
    assert [text.get_text() for text in panel.texts] == ["1", "4"] and panel.get_xlim()[0] == panel.get_ylim()[0] == 0
    assert len(panel.get_legend().get_texts()) == 2


def test_budgets(tmp_path):
    figure = load_adaptive_budgets(batches())
    speed, verified = figure.axes
    assert lines(speed)["plain"] == ([1, 4], [10, 30]) and lines(verified) == {"dspark prefix": ([1, 4], [3, 2])}
    assert verified.lines[0].get_color() == speed.lines[1].get_color() and legend(figure) == ["plain", "dspark prefix"]
    assert [label.get_text() for label in speed.get_xticklabels()] == ["1", "4"]
    plot_batches(batches(), tmp_path / "new" / "batch.png")
    assert (tmp_path / "new" / "batch.png").read_bytes()[1:4] == b"PNG"


# ------------------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def results(tmp_path):
    """One file of each kind, in folders, beside files that are none."""
    files = {
        "a/summary.json": evaluation("a"),
        "b/summary.json": evaluation("b", layers=5, temperatures=(0.0,)),
        "a-low/summary.json": evaluation("a", policy="threshold:0.2", temperatures=(0.0,)),
        "a-high/summary.json": evaluation("a", policy="threshold:0.8", temperatures=(0.0,)),
        "speed/bench.json": benchmark(),
        "speed/batch.json": batches(),
        "calibration.json": calibration(),
        "profile.json": {"sample_batch_tokens": [1]},
        "list.json": [1],
    }
    for name, data in files.items():
        path = tmp_path / "results" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data))
    (tmp_path / "results" / "broken.json").write_text('{"results": ')
    return tmp_path / "results"


def test_a_folder_gives_all_figures(results):
    assert figures_of(find_results([results])).keys() == {
        "conditional_acceptance_T0", "conditional_acceptance_T1", "depth_T0", "threshold_sweep_a_T0",
        "proposal_length_speed-bench", "threshold_sweep_speed-bench", "reliability_calibration",
        "throughput_speed-batch", "budgets_speed-batch",
    }  # fmt: skip


def test_command_writes_them(results, tmp_path):
    arguments = ["plot", str(results / "calibration.json"), str(results / "a-low"), "--output", str(tmp_path / "new")]
    result = CliRunner().invoke(dspark_hf.cli.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    written = {path.stem: path for path in (tmp_path / "new").iterdir()}
    assert written.keys() == {"reliability_calibration", "conditional_acceptance_T0"}
    for path in written.values():
        assert path.read_bytes()[1:4] == b"PNG" and path.name in result.output


def test_acceptance_is_compared_at_whole_blocks(results):
    """Drafters under a threshold are no further drafters; where there is nothing else they are shown."""
    figures = figures_of(find_results([results]))
    assert legend(figures["conditional_acceptance_T0"]) == ["a", "b"]
    figures = figures_of(find_results([results / "a-low", results / "a-high"]))
    assert legend(figures["conditional_acceptance_T0"]) == ["a, policy threshold:0.2", "a, policy threshold:0.8"]


def test_a_benchmark_without_plain_arm_has_no_latency():
    data = benchmark()
    del data["summary"]["plain"], data["prompts"][0]["plain"]
    assert figures_of({"evaluate": [], "calibrate": [], "bench batch": [], "bench": [("x", data)]}).keys() == {
        "threshold_sweep_x"
    }


def test_bad_paths(results, tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        plot_results([tmp_path / "nowhere"], tmp_path)
    with pytest.raises(ValueError, match="1 JSON files hold no results"):
        plot_results([results / "list.json"], tmp_path)
