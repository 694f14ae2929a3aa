"""`dspark evaluate` on the recorded Qwen3 pair: recorded rounds, batches, kills, several processes, figures by hand."""

import dataclasses
import importlib
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from generation_helpers import PROMPTS, character_tokenizer
from helpers import FIXTURES, expected_greedy, load_drafter, load_target
from typer.testing import CliRunner

import dspark_hf.cli
from dspark_hf import ConfidenceThreshold
from dspark_hf.baselines import Eagle3DrafterModel
from dspark_hf.cli.evaluate import processes
from dspark_hf.evaluation.acceptance import acceptance_metrics, decode_prompts
from dspark_hf.evaluation.datasets import DATA_SETS, EvaluationPrompt, load_evaluation_prompts
from dspark_hf.evaluation.evaluate import (
    EvaluationSettings,
    content_digest,
    describe,
    evaluate_drafter,
    read_lines,
)
from dspark_hf.evaluation.summary import figures, macro_average, summarise
from dspark_hf.profile_dspark import SPSProfile

pytest.importorskip("evaluate")
module = importlib.import_module("dspark_hf.evaluation.evaluate")
DRAFTER = FIXTURES / "drafter_qwen3_vanilla"
TEXTS = ["".join(map(chr, ids[0].tolist())) for ids in PROMPTS]
SETTINGS = EvaluationSettings("target", "drafter", "0" * 16, "torch.float32", max_new_tokens=8)
MIXED = [EvaluationPrompt(("sums", "code")[i % 2], ("math", "code")[i % 2], text) for i, text in enumerate(TEXTS[:4])]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer


@pytest.fixture(scope="module")
def whole(tokenizer, tmp_path_factory):
    """Folder and summary of an uninterrupted run of one process, prompts one by one."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, evaluate_drafter(load_target(), tokenizer, load_drafter(), MIXED, folder, SETTINGS)


@pytest.fixture
def evaluated(target, drafter, tokenizer, tmp_path):
    """Runs an evaluation into a folder of `tmp_path`, and returns its summary."""

    def run(folder, prompts=MIXED, settings=SETTINGS, temperatures=(1.0, 0.0), **options):
        pair = target(), tokenizer, drafter()
        return evaluate_drafter(*pair, prompts, tmp_path / folder, settings, temperatures, **options)

    return run


def test_command(target, drafter, tokenizer, tmp_path):
    """Greedy rounds are the official implementation's; the figures are those of `acceptance_metrics`."""
    load_target().save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    for name, texts in (("gsm8k_test", TEXTS[:2]), ("mbpp_test", TEXTS[2:4])):
        lines = (json.dumps({"turns": [text]}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    options = {
        "--target": tmp_path / "target",
        "--drafter": DRAFTER,
        "--data": f"{tmp_path / 'gsm8k_test.jsonl'},{tmp_path / 'mbpp_test.jsonl'}",
        "--temperature": 0,
        "--max-new-tokens": 20,
        "--batch-size": 2,
        "--output": tmp_path / "out",
        "--threads": 1,
    }
    arguments = [str(word) for option in options.items() for word in option]
    result = CliRunner().invoke(dspark_hf.cli.app, ["evaluate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0 and "macro average" in result.output and "verify rate" in result.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["drafter"] == {
        "name": "drafter_qwen3_vanilla", "method": "DSpark (vanilla head)", "layers": 2, "block_size": 7
    }  # fmt: skip
    assert summary["settings"]["max_new_tokens"] == 20 and summary["machine"]["torch"] == torch.__version__
    traces = expected_greedy("qwen3_vanilla")["threshold_0.0"][:4]
    for line, trace in zip(read_lines(tmp_path / "out").values(), traces, strict=True):
        rounds = line["acceptance_lengths"]
        assert rounds == trace["acceptance_lengths"][: len(rounds)] and sum(rounds) >= 19
    (part,) = summary["results"]
    for name, prompts in (("gsm8k_test", PROMPTS[:2]), ("mbpp_test", PROMPTS[2:4])):
        stats = decode_prompts(target(), drafter(), [ids[0] for ids in prompts], 20)
        wanted, own = acceptance_metrics(stats), part["data"][name]
        for key in ("acceptance_length", "rounds", "confidence_ece", "confidence_brier", "confidence_auc"):
            assert own[key] == pytest.approx(wanted[key], rel=1e-4)
        for k in range(7):
            assert own["acceptance_by_position"][k] == pytest.approx(wanted[f"acceptance_at_{k + 1}"])
            conditional = wanted[f"conditional_acceptance_at_{k + 1}"]
            assert own["conditional_acceptance"][k] == (None if conditional != conditional else conditional)
        assert own["verify_rate"] == pytest.approx(sum(stats.accepted_lengths) / sum(stats.proposal_lengths))
    lengths = [part["data"][name]["acceptance_length"] for name in ("gsm8k_test", "mbpp_test")]
    assert part["macro"]["acceptance_length"] == pytest.approx(sum(lengths) / 2)
    assert part["domains"]["math"]["acceptance_length"] == lengths[0] != lengths[1]


def test_killed_and_resumed_equals_uninterrupted(evaluated, whole, tmp_path, monkeypatch):
    folder, summary = whole
    lines = (folder / "rounds-0.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 8
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "rounds-0.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][: len(lines[3]) // 2])
    decoded = []
    monkeypatch.setattr(module, "decode_prompts", lambda *a, **k: decoded.append(a) or decode_prompts(*a, **k))
    assert evaluated("killed") == summary and len(decoded) == 5
    assert read_lines(tmp_path / "killed") == read_lines(folder)
    assert json.loads((tmp_path / "killed" / "summary.json").read_text()) == summary
    evaluated("killed")
    assert len(decoded) == 5


def test_processes_share_the_prompts(evaluated, whole, tmp_path):
    assert evaluated("shared", rank=1, world_size=2) is None
    assert not (tmp_path / "shared" / "summary.json").exists() and len(read_lines(tmp_path / "shared")) == 4
    assert evaluated("shared", rank=0, world_size=2) == whole[1]
    files = sorted(path.name for path in (tmp_path / "shared").iterdir())
    assert files == ["rounds-0.jsonl", "rounds-1.jsonl", "summary.json"]
    assert evaluated("shared") == whole[1]  # one process goes on with what several left


def test_batches_change_nothing(evaluated, whole, tmp_path):
    evaluated("batch", temperatures=(0.0,), batch_size=3)
    single = {key: line for key, line in read_lines(whole[0]).items() if line["temperature"] == 0}
    batch = read_lines(tmp_path / "batch")
    assert single.keys() == batch.keys() and len(single) == 4
    for key, line in single.items():
        for name in ("proposal_lengths", "accepted_lengths", "acceptance_lengths"):
            assert batch[key][name] == line[name]
        for own, other in zip(line["confidence_logits"], batch[key]["confidence_logits"], strict=True):
            assert own == pytest.approx(other, abs=1e-3)


def test_draws_depend_on_seed_and_prompt_alone(evaluated, whole, tmp_path):
    evaluated("some", MIXED[2:], temperatures=(1.0,), batch_size=2)
    some, everything = read_lines(tmp_path / "some"), read_lines(whole[0])
    assert len(some) == 2 and some.items() <= everything.items()
    evaluated("seed", MIXED[2:], dataclasses.replace(SETTINGS, seed=1), temperatures=(1.0,))
    rounds = [[line["accepted_lengths"] for line in lines.values()] for lines in (some, read_lines(tmp_path / "seed"))]
    assert rounds[0] != rounds[1]


@pytest.mark.parametrize("change", [{"weights": "1" * 16}, {"policy": "threshold:0.5"}, {"max_new_tokens": 4}])
def test_lines_of_other_settings_are_not_taken(evaluated, tmp_path, change):
    evaluated("out", MIXED[:1], temperatures=(0.0,))
    evaluated("out", MIXED[:1], dataclasses.replace(SETTINGS, **change), temperatures=(0.0,))
    assert len(read_lines(tmp_path / "out")) == 2


def test_policy_is_applied_and_put_back(evaluated, drafter, tmp_path):
    drafter().verify_policy = ConfidenceThreshold(0.25)
    evaluated("out", MIXED[:1], dataclasses.replace(SETTINGS, policy="fixed:2"), temperatures=(0.0,))
    (line,) = read_lines(tmp_path / "out").values()
    assert set(line["proposal_lengths"]) == {2} and drafter().verify_policy == ConfidenceThreshold(0.25)


def test_a_scheduler_reads_the_given_profile(evaluated, tmp_path):
    """Where a drafted token costs a thousand steps, none is verified."""
    steep = SPSProfile([1, 2, 64], [1000.0, 1.0, 0.01], plain_steps_per_second=1000.0)
    settings = dataclasses.replace(SETTINGS, policy="prefix", profile="steep")
    evaluated("out", MIXED[:2], settings, (0.0,), batch_size=2, profile=steep)
    lines = read_lines(tmp_path / "out").values()
    assert len(lines) == 2 and not any(sum(line["proposal_lengths"]) for line in lines)


# ------------------------------------------------------------------------------------------------------------- figures


def line(proposed, accepted, emitted, logits=()):
    return {
        "proposal_lengths": proposed,
        "accepted_lengths": accepted,
        "acceptance_lengths": emitted,
        "confidence_logits": list(logits) or [[] for _ in proposed],
    }


def test_figures_by_hand():
    """Rounds: 2 of 3 kept, 0 of 3, and one that ended the text inside its single accepted token."""
    lines = [line([3, 3], [2, 0], [3, 1], [[9.0, 9.0, 9.0], [9.0, 0.0, 0.0]]), line([1], [1], [1], [[9.0]])]
    own = figures(lines)
    assert own["prompts"] == 2 and own["rounds"] == 3
    assert own["acceptance_length"] == pytest.approx(5 / 3)
    assert own["verified_tokens"] == pytest.approx(7 / 3) and own["accepted_tokens"] == 1
    assert own["verify_rate"] == pytest.approx(3 / 7)
    assert own["acceptance_by_position"] == pytest.approx([2 / 3, 1 / 2, 0])
    assert own["conditional_acceptance"] == pytest.approx([2 / 3, 1, 0])
    certain = float(torch.tensor(9.0, dtype=torch.float64).sigmoid())  # five judged tokens, three of them accepted
    assert own["confidence_ece"] == pytest.approx(certain - 3 / 5) and own["confidence_auc"] == 0.5


def test_figures_without_a_value():
    own = figures([line([2], [0], [1])])  # the second position was never reached, and there is no confidence head
    assert own["conditional_acceptance"] == [0, None] and "confidence_ece" not in own
    own = figures([line([0], [0], [1])])
    assert own["verify_rate"] is None and own["conditional_acceptance"] == []
    own = figures([line([], [], [])])
    assert own["rounds"] == 0 and own["acceptance_length"] is None
    json.dumps(macro_average([own, figures([line([2], [0], [1])])]), allow_nan=False)


def test_averages_count_each_data_set_once():
    prompts = [EvaluationPrompt("a", "math", ""), EvaluationPrompt("b", "math", ""), EvaluationPrompt("c", "chat", "")]
    lines = [line([2] * 3, [2] * 3, [3] * 3), line([2], [0], [1]), line([1], [1], [2])]
    own = summarise(list(zip(prompts, lines, strict=True)))
    assert [own["data"][name]["acceptance_length"] for name in "abc"] == [3, 1, 2]
    assert own["domains"]["math"]["acceptance_length"] == 2 and own["domains"]["math"]["rounds"] == 4
    assert own["macro"]["acceptance_length"] == 2 and own["macro"]["prompts"] == 3
    assert own["macro"]["conditional_acceptance"] == pytest.approx([2 / 3, 1])  # b has no value at position 2
    assert own["domains"]["chat"]["acceptance_by_position"] == [1]


def test_description_of_drafters(drafter):
    assert describe(drafter("qwen3_dflash"), "a/b")["method"] == "DFlash"
    assert describe(drafter("qwen3_gated"), "a/b")["method"] == "DSpark (gated head)"
    rival = Eagle3DrafterModel.from_pretrained(FIXTURES / "drafter_qwen3_eagle3")
    assert describe(rival, "org/eagle") == {"name": "eagle", "method": "EAGLE-3", "layers": 1, "block_size": 7}
    rival.config.block_size = 1
    assert describe(rival, "org/eagle")["method"] == "MTP-1"


# ------------------------------------------------------------------------------------------------------ data, bad input


def test_content_digest(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = content_digest(tmp_path)
    (tmp_path / "README.md").write_text("of no consequence")
    assert content_digest(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"trained")
    assert content_digest(tmp_path) != before
    assert content_digest("org/one") == content_digest("org/one") != content_digest("org/two")
    assert content_digest(tmp_path / "config.json") != before


ROWS = {
    "GSM8K": ({"question": "How many?"}, "How many?"),
    "MATH500": (
        {"problem": "Prove."},
        "Prove.\nPlease reason step by step, and put your final answer within \\boxed{}.",
    ),
    "AIME25": ({"problem": "Find n."}, "boxed{}"),
    "MBPP": ({"prompt": "Write a function."}, "Write a function."),
    "HumanEval": ({"prompt": "def f():"}, "```python\ndef f():\n```"),
    "LiveCodeBench": ({"question_content": "Sort.", "starter_code": "class S:"}, "```python\nclass S:\n```"),
    "MT-Bench": ({"prompt": ["First.", "Second."]}, "First."),
    "Alpaca": ({"instruction": "Sum up.", "input": "A text."}, "Sum up.\n\nA text."),
    "Arena-Hard": ({"prompt": "Write a plan."}, "Write a plan."),
}


def test_the_papers_data_sets(monkeypatch):
    """Loaded by `datasets`, here a stand-in that answers each source with rows in its form."""
    asked = []

    def load_dataset(**source):
        asked.append(source)
        name = next(name for name, data in DATA_SETS.items() if data.source.items() <= source.items())
        return (ROWS[name][0] for _ in range(1000))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert ROWS.keys() == DATA_SETS.keys()
    prompts = load_evaluation_prompts(DATA_SETS)
    assert [prompt.data for prompt in prompts] == list(DATA_SETS)  # equal rows are one prompt
    assert [prompt.domain for prompt in prompts] == ["math"] * 3 + ["code"] * 3 + ["chat"] * 3
    for prompt in prompts:
        assert ROWS[prompt.data][1] in prompt.text
    assert len(asked) == 9 and all(source["streaming"] for source in asked)
    assert load_evaluation_prompts(["mt_bench", "humaneval"])[0].data == "MT-Bench"


def test_local_prompts(tmp_path):
    path = tmp_path / "humaneval_test.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n{"turns": ["c"]}\n{"turns": ["a"]}\n')
    assert load_evaluation_prompts([str(path)]) == [EvaluationPrompt("humaneval_test", "code", text) for text in "ac"]
    assert load_evaluation_prompts([f"chat={path}"], 1) == [EvaluationPrompt("humaneval_test", "chat", "a")]
    prompts = load_evaluation_prompts(["gsm8k_test", "chat_test"], 3)
    assert [prompt.domain for prompt in prompts] == ["math"] * 3 + ["chat"] * 3
    other = path.rename(tmp_path / "own.jsonl")
    assert {prompt.domain for prompt in load_evaluation_prompts([str(other)])} == {"other"}


@pytest.mark.parametrize(
    "names, limit, message",
    [
        (["nowhere"], None, "nowhere.*GSM8K"),
        (["art=gsm8k_test"], None, "'art'"),
        (["gsm8k_test", "gsm8k_test"], None, "different names"),
        ([], None, "different names"),
        (["gsm8k_test"], 0, "limit is 0"),
    ],
)
def test_bad_names(names, limit, message):
    with pytest.raises(ValueError, match=message):
        load_evaluation_prompts(names, limit)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompts": []}, "0 prompts"),
        ({"temperatures": (0.0, 0)}, "different ones"),
        ({"temperatures": (-1.0,)}, "-1.0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2 of 2"),
        ({"settings": dataclasses.replace(SETTINGS, policy="fast")}, "fast"),
        ({"settings": dataclasses.replace(SETTINGS, policy="prefix")}, "SPS profile"),
    ],
)
def test_bad_options(evaluated, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        evaluated("out", **options)
    assert not (tmp_path / "out").exists()


def test_a_missing_package_is_told_first(evaluated, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="package evaluate"):
        evaluated("out")
    assert not (tmp_path / "out").exists()


def test_damaged_lines_are_named(evaluated, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rounds-3.jsonl").write_text('{"key": "a"}\n{"ke\n')
    with pytest.raises(ValueError, match=r"rounds-3.jsonl, line 2"):
        evaluated("out")
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        dataclasses.replace(SETTINGS, max_new_tokens=0)


def test_number_of_this_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert processes(None, None) == (0, 1) and processes(1, 4) == (1, 4)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert processes(None, None) == (2, 3) and processes(0, 1) == (0, 1)
    with pytest.raises(ValueError, match="expected both or none"):
        processes(1, None)
