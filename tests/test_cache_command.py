"""`dspark cache build | info | verify` on the recorded Qwen3 target."""

import json
import os

import pytest
import torch
import yaml
from generation_helpers import character_tokenizer
from helpers import FIXTURES, expected_greedy, load_target
from training_helpers import texts
from typer.testing import CliRunner

import dspark_hf.cli
from dspark_hf.cli.cache import parse_size
from dspark_hf.training.cache import CachedStates
from dspark_hf.training.features import OnlineStates
from dspark_hf.training.manifest import Manifest, human_size


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target's folder with a tokenizer, and answers."""
    folder = tmp_path_factory.mktemp("files")
    load_target().save_pretrained(folder / "target")
    character_tokenizer().save_pretrained(folder / "target")
    traces = expected_greedy("qwen3_vanilla")["threshold_0.0"]
    rows = [{"prompt_ids": t["prompt_ids"], "response_ids": t["output_ids"][len(t["prompt_ids"]) :]} for t in traces]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"drafter": {"target_layer_ids": [0, 2, 4]}}))
    return folder


def run(*arguments):
    return CliRunner().invoke(dspark_hf.cli.app, ["cache", *map(str, arguments)], catch_exceptions=False)


def test_command_builds_tells_and_verifies(files, tmp_path, target):
    arguments = ["--target", files / "target", "--answers", files / "answers.jsonl", "--threads", "1"]
    options = ["--shard-size", "0.3MB", "--max-length", "120"]
    result = run("build", *arguments, "--output", tmp_path / "a", "--layers", "0,2,4", *options, "--limit", "4")
    assert result.exit_code == 0 and "4 texts of" in result.output and "free on the disk" in result.output
    cut = [{"input_ids": s["input_ids"][:120], "loss_mask": s["loss_mask"][:120]} for s in texts()]
    cached = CachedStates(tmp_path / "a", cut[:4])
    for key in ("target_hidden_states", "target_last_hidden_states", "target_logsumexp"):
        assert torch.equal(cached[2][key], OnlineStates(target(), [0, 2, 4], with_logsumexp=True).features(cut[2])[key])
    result = run("build", *arguments, "--output", tmp_path / "a", "--recipe", files / "recipe.yaml", *options)
    assert result.exit_code == 0 and "2 texts of" in result.output and len(CachedStates(tmp_path / "a", cut)) == 6

    result = run("info", tmp_path / "a")
    size = human_size(Manifest.load(tmp_path / "a").size)
    for word in ("0, 2, 4", "exact, computed in float32", "shard-00000.safetensors", size):
        assert word in result.output
    assert "6 texts, all whole" in run("verify", tmp_path / "a").output
    os.truncate(tmp_path / "a" / "shard-00000.safetensors", 99)
    with pytest.raises(ValueError, match="shard-00000.safetensors is torn"):
        run("verify", tmp_path / "a")

    more = ["--drafter-config", FIXTURES / "drafter_qwen3_vanilla", "--format", "compressed", "--dtype", "bfloat16"]
    assert run("build", *arguments, "--output", tmp_path / "b", *more).exit_code == 0
    manifest = Manifest.load(tmp_path / "b")
    assert (manifest.format, manifest.source.dtype) == ("compressed", "bfloat16")
    assert manifest.source.layer_ids == (0, 2, 4) and manifest.source.target == str(files / "target")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "expected one of them"),
        (["--layers", "0", "--recipe", "recipe.yaml"], "expected one of them"),
        (["--layers", "0,x"], "'0,x', expected numbers"),
        (["--layers", "0,9"], r"\[0, 9\], expected values in -1..4"),
        (["--recipe", "bad.yaml"], "no list drafter.target_layer_ids"),
        (["--layers", "0", "--dtype", "int4"], "dtype is 'int4', expected one of auto"),
        (["--layers", "0", "--shard-size", "much"], "shard size is 'much'"),
        (["--layers", "0", "--max-length", "3"], "no texts with a response within 3 tokens"),
        (["--layers", "0", "--answers", "foreign.jsonl"], r"token 500, expected 0\.\.127"),
    ],
)
def test_command_refuses(files, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(files)
    (files / "bad.yaml").write_text("drafter: {}")
    (files / "foreign.jsonl").write_text('{"prompt_ids": [1], "response_ids": [500, 2, 3]}')
    with pytest.raises(ValueError, match=words):
        run("build", "--target", "target", "--answers", "answers.jsonl", "--output", tmp_path / "cache", *options)
    assert not (tmp_path / "cache").exists()


def test_sizes_by_name():
    assert [parse_size(text) for text in ("1GB", "1GiB", "500MB", "2.5kb", "7B")] == [10**9, 2**30, 5 * 10**8, 2500, 7]
    assert [human_size(n) for n in (7, 1500, 2.5e9, 3e15)] == ["7 B", "1.5 kB", "2.5 GB", "3000.0 TB"]
