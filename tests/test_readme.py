"""Every snippet and command of the README runs as it stands there, and its figures are those of the measured JSON."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from dspark_hf.demo_target import HUB_ID, demo_target_path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = [line.strip() for line in re.findall(r"^    (?=\S)(.*)$", README, re.M)]
CARD = ROOT / "model_cards" / "dspark-smollm2-135m-instruct"


@pytest.mark.real
def test_snippets(monkeypatch):
    monkeypatch.chdir(ROOT)
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for snippet in SNIPPETS:
            exec(snippet.replace(HUB_ID, str(demo_target_path())), names)
    assert "56" in printed.getvalue() or "<|im_start|>assistant" in printed.getvalue()
    assert names["stats"].acceptance_length >= 1


@pytest.mark.real
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("dspark")])
def test_dspark_commands(command, monkeypatch, tmp_path):
    from typer.testing import CliRunner

    from dspark_hf.cli import app

    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command.replace(HUB_ID, str(demo_target_path())))[1:]
    if arguments[0] == "bench":
        arguments += ["--output", str(tmp_path / "bench.json")]
    else:
        arguments += ["--max-new-tokens", "16"]
    result = CliRunner().invoke(app, [*arguments, "--threads", str(torch.get_num_threads())], catch_exceptions=False)
    assert result.exit_code == 0
    assert "plain" in result.output and "τ" in result.output


def test_other_commands_exist():
    """The set-up commands are what runs this test, training is run by test_training.py: here, that the names are right."""
    makefile = (ROOT / "Makefile").read_text()
    for command in COMMANDS:
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile
        elif words[0] == "python":
            assert (ROOT / words[1]).exists() and (ROOT / words[2]).exists()
        else:
            assert words[0] == "dspark"


def test_card_figures_are_measured():
    """The card's table repeats the summary of the benchmark beside it."""
    summary = json.loads((CARD / "bench.json").read_text())["summary"]
    card = (CARD / "README.md").read_text(encoding="utf-8")
    for name, arm in summary.items():
        row = next(line for line in card.splitlines() if line.startswith(f"| {name} |"))
        assert f"| {arm['tokens_per_second']:.1f} | {arm['speed_up']:.2f} |" in row
        if arm["acceptance_length"] is not None:
            assert f"| {arm['acceptance_length']:.2f} |" in row
