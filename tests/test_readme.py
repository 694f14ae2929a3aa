"""Every snippet and command of the README runs as it stands there; the model card is made from the measured JSON."""

import contextlib
import importlib.util
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from dspark_hf.demo_target import HUB_ID, demo_target_path
from dspark_hf.training.experiment import comparison_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = [
    line.strip() for line in re.findall(r"^    (?=\S)(.*)$", re.sub(r"```.*?```", "", README, flags=re.S), re.M)
]
TRAINING = ("dspark train", "dspark regenerate", "dspark cache", "dspark compare")
EVALUATION = ("dspark evaluate", "dspark plot")
DECODING = [c for c in COMMANDS if c.startswith("dspark") and not c.startswith(TRAINING + EVALUATION)]
SAID = {
    "bench": "plain",
    "calibrate": "ECE",
    "demo": "τ",
    "doctor": "speed-up",
    "generate": "τ",
    "profile": "rounds/s",
}
CARD = ROOT / "model_cards" / "dspark-smollm2-135m-instruct"


@pytest.mark.real
def test_snippets(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the training snippet writes
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for snippet in SNIPPETS:
            exec(snippet.replace(HUB_ID, str(demo_target_path())), names)
    assert "56" in printed.getvalue() or "<|im_start|>assistant" in printed.getvalue()
    assert names["stats"].acceptance_length >= 1


@pytest.mark.real
@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.startswith("dspark") and not c.startswith(TRAINING + EVALUATION)]
)
def test_dspark_commands(command, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from dspark_hf.cli import app

    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command.replace(HUB_ID, str(demo_target_path())))[1:]
    verb = arguments[0]
    if verb in ("demo", "generate"):
        arguments += ["--max-new-tokens", "16"]
    elif verb == "doctor":
        arguments += ["--limit", "1", "--max-new-tokens", "8"]
    elif verb == "bench" and arguments[1] != "batch":
        arguments += ["--limit", "1", "--output", str(tmp_path / "figures.json")]
    else:
        arguments += ["--output", str(tmp_path / "figures.json")]
    result = CliRunner().invoke(app, [*arguments, "--threads", str(torch.get_num_threads())], catch_exceptions=False)
    assert result.exit_code == 0
    assert SAID[verb] in result.output


@pytest.mark.real
def test_evaluation_commands(monkeypatch, tmp_path):
    """In the order in which they stand there; the second draws what the first measured."""
    from typer.testing import CliRunner

    from dspark_hf.cli import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    for command in [c for c in COMMANDS if c.startswith(EVALUATION)]:
        result = CliRunner().invoke(app, shlex.split(command)[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert list((tmp_path / "runs" / "figures").glob("*.png"))


@pytest.mark.real
def test_training_commands(monkeypatch, tmp_path):
    """In the order in which they stand there, on two prompts; training itself is run by test_recipe.py."""
    from typer.testing import CliRunner

    from dspark_hf.cli import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "training").symlink_to(ROOT / "training")
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["What is 7 times 8?"]}\n{"turns": ["Name a colour."]}\n')
    commands, said = [c for c in COMMANDS if c.startswith(TRAINING)], []
    assert len(commands) == 6
    for command in commands:
        arguments = shlex.split(command)[1:]
        if arguments[0] == "regenerate":
            arguments += ["--max-new-tokens", "8"]
        elif arguments[0] == "train" and "--dry-run" not in arguments:
            arguments += ["--dry-run"]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        said.append(result.output)
    assert any("2 texts, all whole" in text for text in said) and "% over eagle3" in said[-1]


def test_other_commands_exist():
    """Set-up commands run this test: here, that the names are right."""
    makefile = (ROOT / "Makefile").read_text()
    for command in COMMANDS:
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile
        else:
            assert words[0] == "dspark"


def test_card_is_made_from_what_was_measured():
    spec = importlib.util.spec_from_file_location("render", CARD.parent / "render.py")
    render = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render)
    assert (CARD / "README.md").read_text(encoding="utf-8") == render.render(CARD)


def test_comparison_is_made_from_what_was_measured():
    folder = ROOT / "model_cards" / "comparison-smollm2-135m-instruct"
    comparison = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    assert comparison_table(comparison) in (folder / "README.md").read_text(encoding="utf-8")
    assert {(run["method"], run["seed"]) for run in comparison["runs"]} == {
        (method, seed) for method in ("dspark", "dflash", "eagle3") for seed in (0, 1)
    }
