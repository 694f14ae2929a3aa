"""`dspark calibrate` on the recorded Qwen3 pair: what decoding tells, what is fitted, what is stored and where."""

import json
import math
import re
import shutil
import sys

import pytest
import torch
from generation_helpers import PROMPTS, character_tokenizer
from helpers import FIXTURES, load_target
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import dspark_hf.cli
from dspark_hf import ConfidenceThreshold, DSparkConfig, DSparkDrafterModel
from dspark_hf.calibration import expected_calibration_error, roc_auc
from dspark_hf.evaluation import calibrate as calibration
from dspark_hf.evaluation.calibrate import (
    JudgedRounds,
    calibrate,
    collect_rounds,
    load_temperatures,
    mean_figures,
    position_figures,
    save_temperatures,
    store_temperatures,
)
from dspark_hf.telemetry_dspark import SpeculationStats

DRAFTER = FIXTURES / "drafter_qwen3_vanilla"
SEVEN = [1.5, 0.5, 2.0, 1.25, 1.0, 1.0, 3.0]
NAN = float("nan")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """The recorded target with a tokenizer whose chat template is the bare text."""
    folder = tmp_path_factory.mktemp("target")
    load_target().save_pretrained(folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    """10 prompts: the recorded ones, and these with their ends cut off."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["".join(map(chr, ids[0].tolist())) for ids in PROMPTS]
    rows = [{"turns": [text[: len(text) - cut]]} for cut in range(2) for text in texts][:10]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def sharp_drafter(tmp_path):
    """A copy of the recorded drafter, in the official layout, whose confidence logits are three times as large."""
    folder = tmp_path / "sharp"
    shutil.copytree(DRAFTER, folder)
    weights = load_file(folder / "model.safetensors")
    for key in ("confidence_head.proj.weight", "confidence_head.proj.bias"):
        weights[key] *= 3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(target_folder, drafter, prompt_file, *options):
    arguments = ["--target", target_folder, "--drafter", str(drafter), "--prompts", prompt_file, *map(str, options)]
    return CliRunner().invoke(dspark_hf.cli.app, ["calibrate", *arguments, "--threads", "1"], catch_exceptions=False)


def synthetic(rounds: int, temperature: float, seed: int = 0, slots: int = 7) -> JudgedRounds:
    """Rounds whose chances of acceptance are σ(z / temperature)."""
    torch.manual_seed(seed)
    logits = torch.randn(rounds, slots, dtype=torch.float64) * 3 + 2
    accepted = (torch.rand(logits.shape) < (logits / temperature).sigmoid()).double().cumprod(dim=1)
    return JudgedRounds(logits, {"hard": accepted})


def test_rounds_of_a_record():
    stats = SpeculationStats(wants_expected=True)
    stats.add_round(3, 1, 2, [0.1, 0.2, 0.3], [0.9, 0.8, 0.7], 0)
    stats.add_round(3, 2, 2, [1.1, 1.2, 1.3], [0.6, 0.5, 0.4], 0)  # ended the text
    stats.add_round(1, 1, 2, [2.1], [0.3], 1)  # one token was proposed, and kept
    stats.add_round(0, 0, 1, [], [], 1)
    rounds = JudgedRounds.of(stats, 3)
    logits = [[0.1, 0.2, 0.3], [1.1, 1.2, 1.3], [2.1, NAN, NAN], [NAN, NAN, NAN]]
    hard = [[1, 0, 0], [1, 1, NAN], [1, NAN, NAN], [NAN, NAN, NAN]]
    soft = [[0.9, 0.8, 0], [0.6, 0.5, NAN], [0.3, NAN, NAN], [NAN, NAN, NAN]]
    for values, wanted in (
        (rounds.confidence_logits, logits),
        (rounds.labels["hard"], hard),
        (rounds.labels["expected"], soft),
    ):
        torch.testing.assert_close(values, torch.tensor(wanted, dtype=torch.float64), equal_nan=True)
    stats.wants_expected = False
    assert JudgedRounds.of(stats, 3).labels.keys() == {"hard"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_takes_whole_blocks_and_leaves_the_drafter_as_it_was(target, drafter, temperature):
    drafter = drafter()
    drafter.verify_policy, drafter.acceptance_rule = ConfidenceThreshold(0.9), "block"
    try:
        rounds = collect_rounds(target(), drafter, [ids[0] for ids in PROMPTS[:2]], 12, temperature)
        assert drafter.verify_policy == ConfidenceThreshold(0.9) and drafter.acceptance_rule == "block"
        with pytest.raises(TypeError):
            collect_rounds(target(), drafter, [None], 12, temperature)
        assert drafter.verify_policy == ConfidenceThreshold(0.9) and drafter.acceptance_rule == "block"
    finally:
        drafter.acceptance_rule = "token"
    assert rounds.confidence_logits.shape[1] == 7 and rounds.confidence_logits.isfinite().all()
    hard = rounds.labels["hard"]
    assert (hard == 1).any() and (hard == 0).any()
    if temperature:
        soft = rounds.labels["expected"]
        assert torch.equal(soft.isnan(), hard.isnan())
        first, reached = soft[:, 0], hard[:, :-1] == 1
        assert (first > 0).all() and (first <= 1 + 1e-6).all() and ((first > 0.01) & (first < 0.99)).any()
        assert (soft[:, 1:][hard[:, :-1] == 0] == 0).all() and (soft[:, 1:][reached].nan_to_num(1) > 0).all()
    else:
        assert rounds.labels.keys() == {"hard"}


def test_confidence_logits_are_those_before_scaling(target, drafter):
    """A drafter that has temperatures is calibrated anew, not on top of them."""
    drafter, prompts = drafter(), [PROMPTS[0][0]]
    plain = collect_rounds(target(), drafter, prompts, 12, 0.0)
    drafter.config.sts_temperatures = SEVEN
    try:
        scaled = collect_rounds(target(), drafter, prompts, 12, 0.0)
        assert drafter.config.sts_temperatures == SEVEN
    finally:
        drafter.config.sts_temperatures = None
    assert torch.equal(plain.confidence_logits, scaled.confidence_logits)


def test_a_drafter_without_confidences_is_refused(target, drafter):
    with pytest.raises(ValueError, match="no confidence head, expected one"):
        collect_rounds(target(), drafter("qwen3_dflash"), [PROMPTS[0][0]])


def test_figures_are_of_prefix_survival():
    part = synthetic(400, 2.0)
    part.labels["hard"][:50, 3:] = NAN
    temperatures = torch.tensor(SEVEN)
    rows = position_figures(part.confidence_logits, part.labels["hard"], temperatures)
    assert [row["position"] for row in rows] == [1, 2, 3, 4, 5, 6, 7] and rows[0]["temperature"] == 1.5
    assert [row["rounds"] for row in rows] == [400] * 3 + [350] * 4
    confidences = {
        "before": part.confidence_logits.sigmoid(),
        "after": (part.confidence_logits / temperatures).sigmoid(),
    }
    for when, c in confidences.items():
        survival, outcome = c[50:, 0] * c[50:, 1] * c[50:, 2] * c[50:, 3], part.labels["hard"][50:, 3]
        figures = rows[3][when]
        assert figures["ece"] == pytest.approx(expected_calibration_error(survival, outcome))
        assert figures["brier"] == pytest.approx(float((survival - outcome).square().mean()))
        assert figures["auc"] == pytest.approx(roc_auc(survival, outcome))
        bins = figures["bins"]
        assert sum(bins["rounds"]) == 350
        total = sum(n * (outcome or 0) for n, outcome in zip(bins["rounds"], bins["outcome"], strict=True))
        assert total == pytest.approx(float(outcome.sum()))
    assert mean_figures(rows, "after")["ece"] == pytest.approx(sum(row["after"]["ece"] for row in rows) / 7)
    soft = position_figures(part.confidence_logits, part.labels["hard"] * 0.9, temperatures)
    assert soft[0]["before"]["auc"] is None and soft[0]["before"]["brier"] < 1
    json.dumps([rows, soft], allow_nan=False)


def test_figures_without_rounds_are_none():
    rows = position_figures(torch.full((2, 1), NAN), torch.full((2, 1), NAN), torch.ones(1))
    assert rows[0]["rounds"] == 0 and rows[0]["before"]["ece"] is None and rows[0]["after"]["auc"] is None


def test_calibration_is_judged_on_held_out_rounds():
    good = calibrate(synthetic(1500, 3.0), synthetic(800, 3.0, seed=1))
    assert good["helps"] and good["labels"] == "hard" and good["rounds"] == {"fit": 1500, "held_out": 800}
    assert 2.5 < good["temperatures"][0] < 3.5
    bad = calibrate(synthetic(1500, 3.0), synthetic(800, 0.5, seed=1))
    assert not bad["helps"] and bad["temperatures"] == good["temperatures"]
    nothing = calibrate(synthetic(5, 1.0), synthetic(5, 1.0))
    assert nothing["temperatures"] != [1.0] * 7 or not nothing["helps"]


def test_labels_that_were_not_recorded():
    part = synthetic(5, 1.0)
    with pytest.raises(ValueError, match=r"labels is 'expected', expected one of \['hard'\]"):
        calibrate(part, part, "expected")
    with pytest.raises(ValueError, match=r"'held_out': 0\} rounds, expected some in both parts"):
        calibrate(part, synthetic(0, 1.0))


def test_temperature_files(tmp_path):
    path = tmp_path / "new" / "sts.json"
    save_temperatures(path, SEVEN, {"prompts": 3})
    assert json.loads(path.read_text()) == {"temperatures": SEVEN, "details": {"prompts": 3}}
    assert load_temperatures(path) == SEVEN
    path.write_text(json.dumps({"sts_temperatures": [1, 2.5]}))
    assert load_temperatures(path) == [1.0, 2.5]


@pytest.mark.parametrize(
    "values", [[], "11", 1.0, [1.0, 0.0], [1.0, -2.0], [1.0, NAN], [math.inf], [True], ["1"], None]
)
def test_bad_temperatures(tmp_path, values):
    path = tmp_path / "sts.json"
    with pytest.raises(ValueError, match="expected a list of finite numbers above 0"):
        save_temperatures(path, values)
    assert not path.exists()
    path.write_text(json.dumps({"temperatures": values}))
    with pytest.raises(ValueError, match="expected a list of finite numbers above 0"):
        load_temperatures(path)


def test_files_without_temperatures(tmp_path):
    for content in ({"other": 1}, [1.0]):
        (tmp_path / "sts.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="has no temperatures, expected the key"):
            load_temperatures(tmp_path / "sts.json")


@pytest.mark.parametrize(
    "values", [SEVEN[:6], [*SEVEN, 1.0], [*SEVEN[:6], 0.0], [*SEVEN[:6], NAN], [*SEVEN[:6], math.inf], "1234567", 2.0,
               [*SEVEN[:6], True]]
)  # fmt: skip
def test_configurations_check_temperatures(values):
    config = json.loads((DRAFTER / "config.json").read_text())
    with pytest.raises(ValueError, match=r"sts_temperatures is .*, expected None or block_size = 7 numbers above 0"):
        DSparkConfig.from_dict(config | {"sts_temperatures": values})


def test_stored_temperatures_travel_with_the_drafter(tmp_path):
    copy = store_temperatures(DRAFTER, SEVEN, tmp_path / "copy")
    assert copy == tmp_path / "copy"
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (DRAFTER, copy))
    assert "sts_temperatures" not in before and after == before | {"sts_temperatures": SEVEN}
    assert (copy / "model.safetensors").read_bytes() == (DRAFTER / "model.safetensors").read_bytes()
    drafter = DSparkDrafterModel.from_pretrained(copy)
    drafter.save_pretrained(tmp_path / "again")
    assert DSparkDrafterModel.from_pretrained(tmp_path / "again").config.sts_temperatures == SEVEN
    assert DSparkConfig.from_pretrained(DRAFTER).sts_temperatures is None
    store_temperatures(copy, [1.0] * 7)
    assert DSparkConfig.from_pretrained(copy).sts_temperatures == [1.0] * 7
    with pytest.raises(ValueError, match="is there already, expected a new folder"):
        store_temperatures(DRAFTER, SEVEN, copy)
    with pytest.raises(ValueError, match="has no config.json, expected the folder of a drafter"):
        store_temperatures(tmp_path, SEVEN)


def test_command_mends_a_drafter_that_is_too_sure(target_folder, prompt_file, sharp_drafter, tmp_path):
    output, engines, copy = tmp_path / "out" / "calibration.json", tmp_path / "sts.json", tmp_path / "copy"
    options = ["--max-new-tokens", 24, "--output", output, "--temperatures-output", engines, "--save-to", copy]
    result = run(target_folder, sharp_drafter, prompt_file, *options)
    assert result.exit_code == 0, result.output
    data = json.loads(output.read_text())
    assert data["settings"]["fit_prompts"] == 7 and data["settings"]["held_out_prompts"] == 3
    assert data["labels"] == "expected" and data["held_out"].keys() == data["fit"].keys() == {"hard", "expected"}
    temperatures = data["temperatures"]
    assert 1.8 < temperatures[0] < 4.5
    for part in ("fit", "held_out"):
        before, after = (mean_figures(data[part]["expected"], when) for when in ("before", "after"))
        assert after["ece"] < 0.8 * before["ece"] and after["brier"] < before["brier"]
    assert "temperature scaling helps on the held-out prompts" in result.output and "expected outcomes" in result.output
    assert f"{temperatures[0]:.3f}" in result.output
    assert load_temperatures(engines) == DSparkConfig.from_pretrained(copy).sts_temperatures == temperatures
    assert DSparkConfig.from_pretrained(sharp_drafter).sts_temperatures is None


@pytest.fixture
def made_rounds(monkeypatch):
    """Makes the command see these rounds in place of decoding."""

    def use(fitted_on: JudgedRounds, held_out: JudgedRounds):
        parts = iter((fitted_on, held_out))
        monkeypatch.setattr(calibration, "collect_rounds", lambda *_: next(parts))

    return use


@pytest.mark.parametrize("force", [False, True])
def test_command_stores_nothing_that_does_not_help(
    target_folder, prompt_file, sharp_drafter, tmp_path, made_rounds, force
):
    made_rounds(synthetic(600, 3.0), synthetic(400, 0.5))
    engines, output = tmp_path / "sts.json", tmp_path / "calibration.json"
    options = ["--in-place", "--output", output, "--temperatures-output", engines, *["--force"] * force]
    before = (sharp_drafter / "config.json").read_bytes()
    result = run(target_folder, sharp_drafter, prompt_file, *options)
    assert "temperature scaling does not help on the held-out prompts" in result.output
    data = json.loads(output.read_text())
    assert not data["helps"]
    stored = DSparkConfig.from_pretrained(sharp_drafter).sts_temperatures
    if force:
        assert stored == load_temperatures(engines) == data["temperatures"] and "nothing is stored" not in result.output
    else:
        assert (sharp_drafter / "config.json").read_bytes() == before and not engines.exists()
        assert "nothing is stored" in result.output


def test_command_without_storing(target_folder, prompt_file, tmp_path):
    """Greedy, few tokens: nothing is asked to be stored, and nothing said about it."""
    options = ["--temperature", 0, "--limit", 3, "--max-new-tokens", 6, "--output", tmp_path / "out.json"]
    result = run(target_folder, DRAFTER, prompt_file, *options)
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["labels"] == "hard" and data["held_out"].keys() == {"hard"}
    assert data["settings"]["fit_prompts"] == 2 and "stored" not in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--labels", "soft"], "labels is 'soft', expected one of"),
        (["--labels", "expected", "--temperature", "0"], "labels is 'expected', expected .* hard at temperature 0"),
        (["--temperature", "-1"], "temperature is -1.0, expected 0 or more"),
        (["--holdout", "1"], "holdout is 1.0 of 10 prompts, expected 0..1 with some prompts in both parts"),
        (["--holdout", "0"], "holdout is 0.0 of 10 prompts"),
        (["--limit", "1"], "of 1 prompts, expected"),
        (["--in-place", "--save-to", "x"], "save-to is x, expected none with --in-place"),
        (["--save-to", str(FIXTURES)], "is there already, expected a new folder"),
    ],
)
def test_command_refuses_before_decoding(target_folder, prompt_file, options, message, monkeypatch, capsys):
    command = sys.modules["dspark_hf.cli.calibrate"]  # the package's attribute of that name is the function
    monkeypatch.setattr(command, "load_pair", lambda *_: pytest.fail("models were loaded"))
    arguments = ["--target", target_folder, "--drafter", str(DRAFTER), "--prompts", prompt_file, *options]
    monkeypatch.setattr(sys, "argv", ["dspark", "calibrate", *arguments])
    with pytest.raises(SystemExit) as stopped:
        dspark_hf.cli.main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert re.search(message, error), error
