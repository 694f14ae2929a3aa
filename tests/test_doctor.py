"""`dspark doctor` and `dspark profile`: the expected speed-up by hand, the fit of a pair, the commands on the recorded
Qwen3 pair."""

import json

import pytest
import torch
from generation_helpers import character_tokenizer, tiny_drafter, tiny_target
from helpers import load_drafter, load_target
from test_cli import DRAFTER, PROMPTS, run
from test_generate_targets import tiny_mamba, tiny_qwen3_next, tiny_t5, uncroppable_cache
from transformers import LlamaConfig

from dspark_hf import ConfidenceThreshold, FixedLength
from dspark_hf.cli.doctor import curve_lines, machine_line
from dspark_hf.evaluation.acceptance import decode_prompts
from dspark_hf.evaluation.doctor import (
    Advice,
    advise,
    check_fit,
    decode_one_by_one,
    expected_lengths,
    expected_speedups,
    pooled,
)
from dspark_hf.profile_dspark import SPSProfile

# Rounds of 125, 130, 140 and 200 ms over 1..4 tokens, 20 ms of each for the draft; a plain step of 100 ms.
SECONDS = [0.125, 0.130, 0.140, 0.200]
PROFILE = SPSProfile(
    tokens=[1, 2, 3, 4],
    steps_per_second=[1 / s for s in SECONDS],
    plain_steps_per_second=10.0,
    details={"draft_seconds": 0.020, "machine": {"processor": "Z80", "threads": 1, "loaded": True}},
)
BARE = SPSProfile(tokens=[1, 2, 3, 4], steps_per_second=[1 / s for s in SECONDS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The recorded target with a tokenizer whose chat template is the bare text, and a file of prompts."""
    folder = tmp_path_factory.mktemp("target")
    load_target().save_pretrained(folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in PROMPTS))
    return folder


def test_expected_lengths():
    assert expected_lengths([0.6, 0.3, 0.1]) == pytest.approx([1.0, 1.6, 1.9, 2.0])
    assert expected_lengths([]) == [1.0]


def test_expected_speedups():
    """τ(2) = 1.9 tokens in 140 ms against 100 ms each: 0.1 · 1.9 / 0.14 = 1.357."""
    assert expected_speedups([0.6, 0.3, 0.1], PROFILE) == pytest.approx([0.8, 16 / 13, 19 / 14, 1.0])
    assert expected_speedups([0.6, 0.3, 0.1], BARE) == pytest.approx([1.0, 20 / 13, 0.125 * 19 / 1.4, 1.25])
    many = SPSProfile(tokens=[8], steps_per_second=[1.0], plain_steps_per_second=1.0)
    batches = SPSProfile(many.tokens, many.steps_per_second, plain_steps_per_second=1.0, batches={1: PROFILE, 8: many})
    assert expected_speedups([0.6], batches) == pytest.approx([0.8, 16 / 13])


def test_advice():
    """Two prompts that gain 1.6 and lose to 0.8: with the bypass 2 / (1/1.6 + 1) = 1.23."""
    assert advise([0.8, 1.2, 1.4, 1.3], [[0.8, 1.2, 1.5, 1.4], [0.8, 1.2, 1.3, 1.2]], True) == Advice(
        "FixedLength(2)", 1.4
    )
    uneven = [0.8, 1.07], [[0.8, 1.6], [0.8, 0.8]]
    assert advise(*uneven, True) == Advice("LookaheadScheduler()", pytest.approx(2 / (1 / 1.6 + 1)))
    assert advise(*uneven, False) == Advice("FixedLength(1)", 1.07)  # it has no confidence to go by
    slightly = [0.8, 1.45], [[0.8, 2.0], [0.8, 0.98]]
    assert advise(*slightly, True).policy == "FixedLength(1)"
    assert advise([0.8, 0.9], [[0.8, 0.95], [0.8, 0.9]], True) == Advice(None, 1.0)
    assert advise([0.8, 0.95], [[0.8, 1.3], [0.8, 0.7]], True).policy == "LookaheadScheduler()"
    # ℓ = 0, a draft that nothing is verified of, is never the choice
    assert advise([1.5, 1.2], [[1.5, 1.2]], False) == Advice("FixedLength(1)", 1.2)


def test_lines_of_a_profile():
    assert curve_lines(PROFILE) == [
        ("plain decoding", "100.0 ms per token"),
        ("cost of a pass", "1.05 1.10 1.80 plain steps for 1 2 4 tokens"),
        ("cost of the draft", "0.20"),
    ]
    assert [figures for _, figures in curve_lines(BARE)] == [
        "125.0 ms per token",
        "1.00 1.04 1.60 plain steps for 1 2 4 tokens",
        "part of the above",
    ]
    assert machine_line(PROFILE) == "Z80, 1 threads, busy with other work: figures are rough"
    assert machine_line(BARE) == "not recorded in the profile"


def test_a_pair_that_fits(target, drafter):
    facts, reason = check_fit(target(), drafter())
    assert reason is None and all(fact.fits for fact in facts)
    assert [(fact.name, fact.target, fact.drafter) for fact in facts] == [
        ("vocabulary", "128", "128"),
        ("hidden size", "64", "64"),
        ("layers", "6", "6"),
        ("cache", "DynamicCache", "takes back tokens"),
    ]


def llama(**overrides):
    return tiny_target(LlamaConfig, **{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 6} | overrides)


@pytest.mark.parametrize(
    "make_target, unfit, message",
    [
        (lambda: llama(vocab_size=96), {"vocabulary"}, "with vocab_size 128, 'llama' has 96"),
        (lambda: llama(hidden_size=32, num_hidden_layers=5), {"hidden size", "layers"}, "with hidden_size 64, 'llama'"),
        (tiny_mamba, {"vocabulary", "hidden size", "layers", "cache"}, "'mamba' has recurrent layers"),
        (tiny_qwen3_next, {"vocabulary", "hidden size", "layers", "cache"}, "'qwen3_next' has recurrent layers"),
        (tiny_t5, {"vocabulary", "hidden size", "layers", "cache"}, "'t5' is an encoder-decoder"),
    ],
)
def test_a_pair_that_does_not_fit(drafter, make_target, unfit, message):
    facts, reason = check_fit(make_target(), drafter())
    assert {fact.name for fact in facts if not fact.fits} == unfit
    assert message in reason


def test_a_cache_that_takes_nothing_back(drafter, monkeypatch):
    target = load_target()
    monkeypatch.setattr("dspark_hf.evaluation.doctor.cache_of", lambda outputs: uncroppable_cache())
    facts, reason = check_fit(target, drafter())
    assert [fact.name for fact in facts if not fact.fits] == ["cache"] and "cannot take back refused tokens" in reason


def test_prompts_are_decoded_one_by_one(target, drafter):
    target, drafter = target(), drafter()
    drafter.verify_policy = ConfidenceThreshold(0.9)
    prompts = [torch.tensor([ord(c) for c in text]) for text in PROMPTS]
    runs = decode_one_by_one(target, drafter, prompts, max_new_tokens=16)
    assert drafter.verify_policy == ConfidenceThreshold(0.9)
    drafter.verify_policy = FixedLength()
    whole, total = decode_prompts(target, drafter, prompts, 16), pooled(runs)
    assert len(runs) == 3 and len(total.accepted_lengths) > 6
    for name in ("proposal_lengths", "accepted_lengths", "acceptance_lengths"):
        assert getattr(total, name) == getattr(whole, name)
    assert decode_one_by_one(target, drafter, prompts, max_new_tokens=1) == []  # the prefill gives that token


def test_profile_command(folder, tmp_path):
    output = tmp_path / "runs" / "profile.json"
    options = ["--rows", "1", "--rows", "2", "--context", "16", "--repeats", "2", "--output", str(output)]
    result = run("profile", "--target", str(folder), "--drafter", DRAFTER, *options)
    assert result.exit_code == 0
    profile = SPSProfile.load(output)
    assert profile.batches.keys() == {1, 2} and profile.tokens == list(range(1, 9))
    settings = profile.details["settings"]
    assert settings["packed"] is True and settings["contexts"] == [16] and settings["drafter"] == DRAFTER
    lines = [line.split() for line in result.output.splitlines()]
    steps, plain = profile.batches[2].steps_per_second[7], profile.batches[2].plain_steps_per_second
    assert ["2", "16", f"{1e3 / steps:.1f}", f"{steps:.1f}", f"{plain / steps:.2f}"] in lines
    assert ["1", "plain"] in [line[:2] for line in lines]


def test_profile_command_without_drafter(folder, tmp_path):
    output = tmp_path / "profile.json"
    options = ["--context", "8", "--repeats", "1", "--no-pack", "--output", str(output)]
    assert run("profile", "--target", str(folder), *options).exit_code == 0
    profile = SPSProfile.load(output)
    assert profile.details["settings"]["drafter"] is None and profile.details["draft_seconds"] == 0.0


def test_doctor_command_by_a_given_profile(folder, tmp_path):
    """All figures follow from the profile and the texts, so that they can be checked."""
    seconds = [0.010 + 0.001 * n for n in range(1, 9)]
    path = tmp_path / "profile.json"
    SPSProfile(list(range(1, 9)), [1 / s for s in seconds], plain_steps_per_second=1 / 0.010).save(path)
    options = ["--profile", str(path), "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "16"]
    result = run("doctor", "--target", str(folder), "--drafter", DRAFTER, "--no-pack", *options)
    assert result.exit_code == 0
    assert result.output.count(" yes") == 4
    assert "1.10 1.20 1.40 1.80 plain steps for 1 2 4 8 tokens" in result.output
    target, drafter = load_target(), load_drafter()
    prompts = [torch.tensor([ord(c) for c in text]) for text in PROMPTS]
    shares = decode_prompts(target, drafter, prompts, 16).acceptance_by_position
    speed_ups = [0.010 * (1 + sum(shares[:n])) / seconds[n] for n in range(1, 8)]
    assert max(speed_ups) > 1
    assert " ".join(f"{speed_up:.2f}" for speed_up in speed_ups) in result.output
    assert any(policy in result.output for policy in ("FixedLength(", "LookaheadScheduler()"))


def test_doctor_command_measures(folder):
    options = ["--prompts", str(folder / "prompts.jsonl"), "--limit", "1", "--max-new-tokens", "8"]
    result = run("doctor", "--target", str(folder), "--drafter", DRAFTER, *options)
    assert result.exit_code == 0
    for word in ("threads", "ms", "τ", "speed-up expected", "policy"):
        assert word in result.output


def test_doctor_command_refuses(folder, tmp_path):
    tiny_drafter(llama(vocab_size=96)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="this pair does not fit: the drafter was made for a target with vocab_size"):
        run("doctor", "--target", str(folder), "--drafter", str(tmp_path))
    with pytest.raises(ValueError, match="no text of .* was long enough"):
        options = ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "1"]
        run("doctor", "--target", str(folder), "--drafter", DRAFTER, *options)
