"""Prompts answered by the recorded Qwen3 target: whose answers, draws, resuming; the command."""

import itertools
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import load_target
from regenerate_helpers import DIALOGUES, TEMPLATE, TEXTS, Server, ids, prompts, rows, tokenizer
from typer.testing import CliRunner

import dspark_hf.cli
from dspark_hf.training import (
    AnswerSettings,
    EndpointAnswerer,
    TargetAnswerer,
    load_answers,
    load_conversations,
    read_prompts,
    regenerate_answers,
)
from dspark_hf.training.regenerate import SeededDraws


@pytest.fixture
def model():
    """The target, whose answers end at "e" and "?" too, so that they are of different lengths."""
    model = load_target()
    model.generation_config.eos_token_id = [ord("e"), ord("?"), ord("\n")]
    return model


def answerer(model, batch_size=2, **settings):
    return TargetAnswerer(model, tokenizer(), "tiny", AnswerSettings(**{"max_new_tokens": 24} | settings), batch_size)


def generated_alone(model, text: str) -> list[int]:
    return model.generate(torch.tensor([ids(text)]), max_new_tokens=24, do_sample=False)[0, len(text) :].tolist()


# -------------------------------------------------------------------------------------------------------------- target


def test_answers_are_the_targets_own(tmp_path, model):
    """Each as if answered alone, cut behind the end token; read for training as they are."""
    path = tmp_path / "runs" / "answers.jsonl"
    done = regenerate_answers(prompts(tmp_path), path, answerer(model))
    assert {row["index"] for row in rows(path)} == {0, 1, 2, 3, 4} and len({row["key"] for row in rows(path)}) == 5
    for row in rows(path):
        text = TEXTS[row["index"]]
        alone = generated_alone(model, text + " A")
        assert (row["source"], row["prompt_ids"], row["response_ids"]) == ("prompts.jsonl", ids(text + " A"), alone)
        said = "".join(map(chr, alone[:-1] if alone[-1] in ids("e?\n") else alone))
        assert row["messages"] == [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
    lengths = [len(row["response_ids"]) for row in rows(path)]
    assert len(set(lengths)) > 1 and any(row["response_ids"][-1] == ord("e") for row in rows(path))
    assert (done.answered, done.present, done.tokens) == (5, 0, sum(lengths))
    samples = load_answers([path], 100)
    assert [sample["id"] for sample in samples] == [s["id"] for s in load_conversations(path, tokenizer(), 100)]
    assert sum(int(sample["loss_mask"].sum()) for sample in samples) == sum(lengths)


def test_turns_are_answered_in_order(tmp_path, model):
    """Each with the target's own answers before it as history, in a batch of conversations of other lengths."""
    path = tmp_path / "answers.jsonl"
    regenerate_answers(prompts(tmp_path, *DIALOGUES), path, answerer(model, batch_size=8))
    found = {row["index"]: row for row in rows(path)}
    for index, asked in enumerate((TEXTS[:2] + ("Why?",), ("Ann",), ("Sum. 5 + 7", "Sure?"))):
        text, answers = "", [m["content"] for m in found[index]["messages"] if m["role"] == "assistant"]
        for turn, answer in zip(asked, answers, strict=True):
            text += turn + " A"
            alone = "".join(map(chr, generated_alone(model, text)))
            assert answer == (alone[:-1] if alone[-1] in "e?\n" else alone)
            text += answer
    assert [m["role"] for m in found[2]["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert "prompt_ids" in found[1] and "prompt_ids" not in found[0] and "prompt_ids" not in found[2]
    samples = load_conversations(path, tokenizer(), 500)
    assert sorted(int(s["loss_mask"].diff().sum()) for s in samples) == [1, 3, 5]  # places where the mask changes


def test_thinking_goes_to_the_template(tmp_path, model):
    for thinking, mark in ((None, " A"), (True, "+ A"), (False, "- A")):
        path = tmp_path / f"{thinking}.jsonl"
        regenerate_answers(prompts(tmp_path)[:1], path, answerer(model, thinking=thinking))
        assert rows(path)[0]["prompt_ids"] == ids(TEXTS[0] + mark)


def test_draws_follow_the_distribution():
    """Numbers spread evenly over [0, 1) give every token its share of the warped distribution."""
    logits, count = torch.cat([torch.tensor([-9.0]), torch.randn(11)]), 4000
    draws = SeededDraws(list(range(count)), 3, AnswerSettings(max_new_tokens=3, temperature=0.7, top_k=6, top_p=0.9))
    assert draws.numbers.shape == (count, 3) and draws.numbers.unique().numel() == 3 * count
    evenly = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    draws.numbers = torch.stack([evenly, torch.zeros_like(evenly), torch.full_like(evenly, 1 - 2**-53)], dim=1)
    drawn, lowest, highest = (
        draws(torch.zeros(count, 3 + step, dtype=torch.long), logits.expand(count, -1)) for step in range(3)
    )
    kept = (logits / 0.7).topk(6)
    probabilities = kept.values.softmax(-1)
    nucleus = probabilities.cumsum(-1) - probabilities < 0.9
    assert 1 < nucleus.sum() < 6
    shares = torch.zeros(12).scatter(0, kept.indices[nucleus], probabilities[nucleus] / probabilities[nucleus].sum())
    found = torch.bincount(drawn.argmax(-1), minlength=12) / count
    torch.testing.assert_close(found, shares, rtol=0, atol=3e-4)
    assert (drawn.isfinite().sum(-1) == 1).all()
    assert (lowest.argmax(-1) == kept.indices[nucleus].min()).all()  # not token 0, whose probability is 0
    assert (highest.argmax(-1) == kept.indices[nucleus].max()).all()


def test_sampled_answers_depend_on_prompt_and_settings_alone(tmp_path, model):
    """Not on the batch, the order or the other prompts; every turn has draws of its own."""
    given, texts, seeds = prompts(tmp_path, *DIALOGUES, {"turns": ["Bo", "Bo"]}, {"turns": [TEXTS[2]]}), {}, []
    for name, asked, size, seed in (("a", given, 1, 0), ("b", given[::-1], 3, 0), ("c", given[1:3], 8, 0),
                                    ("d", given, 3, 1)):  # fmt: skip
        sampler = answerer(model, size, max_new_tokens=12, temperature=1.0, top_p=0.95, seed=seed)
        generate = sampler._generate
        sampler._generate = lambda ids, own, generate=generate: seeds.extend(own) or generate(ids, own)
        regenerate_answers(asked, tmp_path / name, sampler)
        texts[name] = {row["index"]: row["messages"] for row in rows(tmp_path / name)}
        assert len(seeds) == len(set(seeds))
        seeds.clear()
    assert texts["a"] == texts["b"] and len(texts["a"]) == 5
    assert texts["c"] == {index: texts["a"][index] for index in (1, 2)}
    assert all(texts["a"][index] != texts["d"][index] for index in texts["a"])


# -------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_torn_file_is_completed(tmp_path, model, monkeypatch, temperature):
    """By what is not there, wherever it was; batches with a missing line are answered as they were, for the same
    rounding, and no others."""
    path, given = tmp_path / "answers.jsonl", prompts(tmp_path)
    regenerate_answers(given, path, answerer(model, temperature=temperature, max_new_tokens=8))
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    asked, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda x, **kwargs: asked.append(len(x)) or generate(x, **kwargs))
    cases = [
        (whole, []),
        (whole[:-9], [1]),
        (whole[:-1], [1]),
        ("".join(lines[:2]) + lines[2][:1], [2, 1]),
        (lines[0], [2, 2, 1]),
        ("", [2, 2, 1]),
        ("".join(lines[1:]), [2]),
        ("".join(lines[:2] + lines[4:1:-2]), [2]),
    ]
    for text, batches in cases:
        path.write_text(text)
        asked.clear()
        done = regenerate_answers(given, path, answerer(model, temperature=temperature, max_new_tokens=8))
        assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)
        assert asked == batches
        assert (done.present, done.answered) == (text.count("\n"), 5 - text.count("\n"))
        assert path.read_text().startswith(text[: text.rfind("\n") + 1])


def test_a_prompt_given_twice_has_one_line(tmp_path, model):
    given = prompts(tmp_path, {"turns": ["Ann"]}, {"turns": ["Bo"]}, {"messages": [{"role": "user", "content": "Ann"}]})
    assert regenerate_answers(given, tmp_path / "a", answerer(model)).answered == 2
    assert {row["index"] for row in rows(tmp_path / "a")} == {0, 1}


def test_killed_run_goes_on(tmp_path):
    """`kill -9` in the middle of `dspark regenerate`, sampling; the same command ends with the lines of a run that was
    let alone."""
    load_target().save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    texts = [f"{a} and {b} {'cakes' * a}" for a, b in itertools.product(range(3), range(5))]
    prompts(tmp_path, *({"turns": [text]} for text in texts))

    def command(output):
        paths = [str(tmp_path / "prompts.jsonl"), "--target", str(tmp_path / "target"), "--output", str(output)]
        options = ["--batch-size", "2", "--max-new-tokens", "24", "--temperature", "1", "--threads", "1"]
        return ["regenerate", *paths, *options]

    killed, straight = tmp_path / "killed.jsonl", tmp_path / "straight.jsonl"
    process = subprocess.Popen([sys.executable, "-c", "import dspark_hf.cli; dspark_hf.cli.main()", *command(killed)])
    deadline = time.monotonic() + 120
    while not (killed.exists() and killed.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    before = killed.read_text()
    assert 5 <= before.count("\n") < len(texts)
    for output in (killed, straight):
        result = CliRunner().invoke(dspark_hf.cli.app, command(output), catch_exceptions=False)
        assert result.exit_code == 0
    assert sorted(killed.read_text().splitlines()) == sorted(straight.read_text().splitlines())
    assert len(rows(killed)) == len(texts) and killed.read_text().startswith(before[: before.rfind("\n") + 1])


def test_other_settings_are_refused(tmp_path, model):
    path, given = tmp_path / "answers.jsonl", prompts(tmp_path)
    regenerate_answers(given, path, answerer(model, temperature=0))
    record = json.loads((tmp_path / "answers.jsonl.settings.json").read_text())
    assert record["target"] == "tiny" and record["temperature"] == 0.0 and record["max_new_tokens"] == 24
    text = path.read_text()
    for settings, named in (
        ({"temperature": 0.7}, "temperature 0.0 there and 0.7 now"),
        ({"max_new_tokens": 8, "seed": 2}, "max_new_tokens 24 there and 8 now, seed 0 there and 2 now"),
        ({"thinking": False}, "thinking None there and False now"),
    ):
        with pytest.raises(ValueError, match=named):
            regenerate_answers(given, path, answerer(model, **settings))
    other = TargetAnswerer(model, tokenizer(TEMPLATE + " "), "tiny", AnswerSettings(max_new_tokens=24))
    with pytest.raises(ValueError, match="template_sha256 '.*there"):
        regenerate_answers(given, path, other)
    with pytest.raises(ValueError, match="backend 'transformers' there and 'endpoint' now"):
        regenerate_answers(given, path, EndpointAnswerer("http://localhost", "tiny", AnswerSettings(max_new_tokens=24)))
    assert path.read_text() == text
    assert regenerate_answers(given, path, answerer(model, batch_size=5, temperature=0.0)).present == 5

    path.write_text(text + '{"index": 3}\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 6: KeyError\('key'\), expected"):
        regenerate_answers(given, path, answerer(model))
    (tmp_path / "answers.jsonl.settings.json").unlink()
    with pytest.raises(ValueError, match="holds lines, but answers.jsonl.settings.json is not there"):
        regenerate_answers(given, path, answerer(model))


@pytest.mark.parametrize(
    "values", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}]
)
def test_refused_settings(values):
    ((name, value),) = values.items()
    with pytest.raises(ValueError, match=f"{name}={value}.*expected"):
        AnswerSettings(**values)


# ------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "Ann"}, "messages is None, expected"),
        ({"turns": []}, "expected a list of at least one"),
        ({"turns": ["Ann", 3]}, "message 1 is 3, expected"),
        ({"messages": [{"role": "system", "content": "Sum."}]}, "no user message"),
        ({"messages": [{"role": "assistant", "content": "4"}]}, "no user message"),
        ({"messages": [{"role": "user", "content": "2?"}, {"role": "tool", "content": "4"}]}, "tools or .*'tool'"),
        ({"turns": ["Ann"], "tools": [{"type": "function"}]}, "tools or messages"),
    ],
)
def test_bad_prompts_are_named(tmp_path, row, problem):
    with pytest.raises(ValueError, match=rf"prompts\.jsonl, line 2: .*{problem}"):
        prompts(tmp_path, {"turns": ["Ann"]}, row)


def test_prompts_of_several_files_up_to_a_limit(tmp_path):
    prompts(tmp_path, {"turns": ["Ann"]}, {"turns": ["Bo"]}, name="a.jsonl")
    prompts(tmp_path, {"turns": ["Cy", "Di"]}, {"turns": ["Ed"]}, name="b.jsonl")
    found = read_prompts([tmp_path / "a.jsonl", str(tmp_path / "b.jsonl")], limit=3)
    assert [(p.source, p.index, [m["content"] for m in p.messages]) for p in found] == [
        ("a.jsonl", 0, ["Ann"]),
        ("a.jsonl", 1, ["Bo"]),
        ("b.jsonl", 0, ["Cy", "Di"]),
    ]


# -------------------------------------------------------------------------------------------------------- command line


def test_command(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    load_target().save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    prompts(tmp_path, *DIALOGUES)
    asked = ["regenerate", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "a.jsonl"), "--threads", "1"]

    def run(*options):
        return CliRunner().invoke(dspark_hf.cli.app, [*asked, *options], catch_exceptions=False)

    local = ["--target", str(tmp_path / "target"), "--max-new-tokens", "8", "--no-thinking", "--no-pack"]
    result = run(*local, "--limit", "2")
    assert result.exit_code == 0 and "2 prompts answered, 0 had" in result.output and "tokens/s" in result.output
    result = run(*local)
    assert "1 prompts answered, 2 had" in result.output
    (single,) = (row for row in rows(tmp_path / "a.jsonl") if "prompt_ids" in row)
    assert single["prompt_ids"] == ids("Ann- A") and len(single["response_ids"]) <= 8
    with Server() as server:
        served = ["--endpoint", server.url, "--model", "tiny", "--output", str(tmp_path / "b.jsonl")]
        assert "3 prompts answered" in run(*served).output
    (first,) = (row for row in rows(tmp_path / "b.jsonl") if row["index"] == 0)
    assert first["messages"][1]["content"] == DIALOGUES[0]["turns"][0][::-1]
    for wrong in (
        [],
        ["--target", "a", "--endpoint", "http://b"],
        ["--endpoint", "http://b"],
        [*local, "--model", "c"],
    ):
        with pytest.raises(ValueError, match="expected --target, or --endpoint and --model"):
            run(*wrong)
