"""The command line on the recorded Qwen3 pair: demo's comparison, the benchmark's figures, errors in one line."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from generation_helpers import character_tokenizer
from helpers import FIXTURES, expected_greedy, load_target
from safetensors.torch import load_file, save_file
from training_helpers import DRAFTER as DRAFTER_SETTINGS
from typer.testing import CliRunner

import dspark_hf.cli
from dspark_hf import ConfidenceThreshold, DSparkDrafterModel, FixedLength, record_speculation
from dspark_hf.baselines import Eagle3DrafterModel
from dspark_hf.cli.bench import _own_mtp, table
from dspark_hf.cli.generate import ACCEPTED, ColourStreamer
from dspark_hf.evaluation.benchmark import Arm, parse_policy, run_benchmark, summarise
from dspark_hf.evaluation.comparison import first_difference
from dspark_hf.evaluation.loading import load_pair, load_prompts
from dspark_hf.profile_dspark import SPSProfile

DRAFTER = str(FIXTURES / "drafter_qwen3_vanilla")
PROMPTS = ["He bought sports equipment. Coach A bou", "There are 24 students. 12 of them st", "She sold 3 cakes and"]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """The recorded target with a tokenizer whose chat template is the bare text."""
    folder = tmp_path_factory.mktemp("target")
    load_target().save_pretrained(folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(*arguments):
    return CliRunner().invoke(dspark_hf.cli.app, [*arguments, "--threads", "1"], catch_exceptions=False)


@pytest.mark.parametrize("options", [[], ["--no-pack"], ["--policy", "threshold:0.5"], ["--temperature", "0.7"]])
def test_generate_compares(target_folder, options):
    result = run(
        "generate", PROMPTS[0], "--target", target_folder, "--drafter", DRAFTER, "--max-new-tokens", "24", *options
    )
    assert result.exit_code == 0
    for word in ("plain", "drafted", "speed-up", "τ", "tokens/s"):
        assert word in result.output
    if "--temperature" not in options:
        assert "the same" in result.output
        assert result.output.count("ght the second com") == 2  # both texts were streamed


def test_accepted_draft_tokens_are_coloured(target, drafter):
    class Paper:
        printed = []

        def print(self, text="", **_):
            self.printed.append(text)

    target, prompt = target(), torch.tensor([[ord(c) for c in PROMPTS[0]]])
    with record_speculation() as stats:
        streamer = ColourStreamer(character_tokenizer(), Paper(), stats)
        text = target.generate(prompt, assistant_model=drafter(), streamer=streamer, max_new_tokens=24, do_sample=False)
    flags = [False]
    for accepted in stats.accepted_lengths:
        flags += [True] * accepted + [False]
    assert [part.style == ACCEPTED for part in Paper.printed[:-1]] == flags[:24]
    assert "".join(part.plain for part in Paper.printed[:-1]) == "".join(map(chr, text[0, len(PROMPTS[0]) :].tolist()))
    assert sum(flags[:24]) > 5


def test_bench_writes_what_it_measured(target_folder, tmp_path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out" / "bench.json"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in PROMPTS))
    options = ["--target", target_folder, "--drafter", DRAFTER, "--prompts", str(prompts), "--limit", "2"]
    policies = ["--policy", "fixed", "--policy", "threshold:0.5", "--policy", "lookahead", "--max-new-tokens", "16"]
    result = run("bench", *options, *policies, "--output", str(output))
    assert result.exit_code == 0
    data = json.loads(output.read_text())
    assert data["profile"]["sample_batch_tokens"] == list(range(1, 9))
    assert len(data["profile"]["details"]["passes"][0]["plain_seconds"]) == 15
    assert len(data["prompts"]) == 2 and data["settings"]["max_new_tokens"] == 16
    drafted = {"dspark fixed", "dspark threshold:0.5", "dspark lookahead"}
    assert data["summary"].keys() == {"plain", "plain, not packed", "prompt lookup"} | drafted
    drafted, plain = data["summary"]["dspark fixed"], data["summary"]["plain"]
    assert drafted["acceptance_length"] > 1.2 and drafted["texts_that_differ"] == 0
    assert plain["speed_up"] == 1.0 and plain["acceptance_length"] is None
    for row in data["prompts"]:
        lengths = row["dspark fixed"]["acceptance_lengths"]
        assert row["dspark fixed"]["tokens"] <= 1 + sum(lengths)


def test_bench_compares_drafters(target_folder, tmp_path):
    """A mask-filling DFlash runs in our loop and natively, with the same text and as many forwards; a small model
    assists in transformers' own way; what the parts of a round cost is measured."""
    zlab = DSparkDrafterModel.from_pretrained(FIXTURES / "drafter_qwen3_dflash")
    zlab.config.sample_from_anchor, zlab.config.block_size = False, 5
    zlab.embed_tokens = zlab.lm_head = None
    zlab.config.has_embed_tokens = zlab.config.has_lm_head = False
    zlab.save_pretrained(tmp_path / "zlab")
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "bench.json"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in PROMPTS[:2]))
    options = ["--target", target_folder, "--drafter", DRAFTER, "--prompts", str(prompts), "--no-rivals"]
    against = ["--against", str(tmp_path / "zlab"), "--against", str(FIXTURES / "drafter_qwen3_eagle3")]
    more = ["--assistant", target_folder, "--max-new-tokens", "16", "--output", str(output)]
    result = run("bench", *options, *against, *more)
    assert result.exit_code == 0, result.output
    summary = json.loads(output.read_text())["summary"]
    native = {"DFlash zlab, native"} if hasattr(transformers, "MuseGlimmerAssistantModel") else set()
    assert summary.keys() - native == {"plain", f"assistant {Path(target_folder).name}", "dspark fixed", "DFlash zlab",
                                       "EAGLE-3 drafter_qwen3_eagle3"}  # fmt: skip
    assert native <= summary.keys() and all(arm["texts_that_differ"] == 0 for arm in summary.values())
    assert all(arm["forwards"] == summary["DFlash zlab"]["forwards"] for name, arm in summary.items() if name in native)
    plain, drafted = summary["plain"], summary["dspark fixed"]
    assert (plain["forwards"], plain["draft_share"], plain["tokens_per_forward"]) == (32, 0.0, 1.0)
    assert plain["formula_speed_up"] == 1.0 == plain["attained"]
    assert 0 < drafted["draft_share"] < 1 and drafted["forwards"] < 32 and drafted["formula_speed_up"] > 0


MTP_CONFIG = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8,
              "num_hidden_layers": 46, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
              "n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 46, "n_group": 1,
              "topk_group": 1, "num_mtp_layers": 1}  # fmt: skip


def with_mtp(folder):
    """A GLM-4-MoE as its files are on the Hub: the layer behind the last one is that of multi-token prediction."""
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(0)
    model = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**MTP_CONFIG)).eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for key, value in MtpModel(model, 1).state_dict().items():
        name = "model.layers.46." + key.removeprefix("layers.0.").removeprefix("mtp_block.")
        if "mlp.experts.gate_up_proj" in name:
            for i, (gate, up) in enumerate(expert.chunk(2) for expert in value):
                tensors[name.replace("gate_up_proj", f"{i}.gate_proj.weight")] = gate.contiguous()
                tensors[name.replace("gate_up_proj", f"{i}.up_proj.weight")] = up.contiguous()
        elif "mlp.experts.down_proj" in name:
            for i, expert in enumerate(value):
                tensors[name.replace("down_proj", f"{i}.down_proj.weight")] = expert.contiguous()
        elif key.startswith("layers.0."):
            tensors[name.replace("post_norm", "shared_head.norm")] = value.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.skipif(not hasattr(transformers.GenerationConfig(), "use_mtp"), reason="transformers before 5.14")
def test_multi_token_prediction_of_the_target(tmp_path, target):
    model, tokenizer = with_mtp(tmp_path), character_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    arms = [Arm("plain", model, {}), _own_mtp(model)]
    summary = run_benchmark(arms, tokenizer, PROMPTS[:2], max_new_tokens=12)["summary"]
    assert summary["MTP"]["texts_that_differ"] == 0 and summary["MTP"]["forwards"] <= summary["plain"]["forwards"]
    with pytest.raises(ValueError, match="num_mtp_layers of .* is None, expected 1 or more"):
        _own_mtp(target())


def test_attained_speed_up_of_known_times():
    def call(tokens, seconds, forwards, forward_seconds, draft_seconds):
        rounds = {"acceptance_lengths": [], "proposal_lengths": [], "accepted_lengths": []}
        return rounds | {"tokens": tokens, "seconds": seconds, "forwards": forwards, "forward_seconds": forward_seconds,
                         "draft_seconds": draft_seconds}  # fmt: skip

    rows = [{"plain": call(21, 2.5, 21, 2.0, 0.0), "drafted": call(21, 1.25, 6, 0.6, 0.2)}]
    arm = summarise(rows, "drafted", "plain")
    assert arm["formula_speed_up"] == pytest.approx(2.5)  # τ = 20/5 = 4; 0.1 / ((0.04 + 0.12) / 4)
    assert arm["speed_up_total"] == 2.0 and arm["attained"] == pytest.approx(0.8)
    assert arm["tokens_per_forward"] == 4.0 and arm["draft_share"] == pytest.approx(0.16)
    rows[0]["drafted"]["forward_seconds"] = None  # as on a GPU
    arm = summarise(rows, "drafted", "plain")
    assert (arm["speed_up_total"], arm["draft_share"], arm["attained"]) == (2.0, None, None)
    assert table({"summary": {"drafted": arm}}).row_count == 1


def test_bench_train_writes_what_it_measured(target_folder, tmp_path):
    """A small objective, whose logits outweigh all else when all of them are held."""
    traces = expected_greedy("qwen3_vanilla")["threshold_0.0"]
    rows = [{"prompt_ids": t["prompt_ids"], "response_ids": t["output_ids"][len(t["prompt_ids"]) :]} for t in traces]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"target": target_folder, "answers": str(tmp_path / "answers.jsonl"), "drafter": DRAFTER_SETTINGS,
              "training": {"output_dir": str(tmp_path / "run"), "use_cpu": True}, "max_length": 150}  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    output = tmp_path / "bench.json"
    options = ["--texts", "4", "--anchors", "256", "--vocabulary", "20000", "--output", str(output)]
    result = run("bench", "train", str(tmp_path / "recipe.yaml"), *options)
    assert result.exit_code == 0, result.output
    data = json.loads(output.read_text())
    assert data["objective"]["memory_ratio"] > 1.3
    assert data["objective"]["arms"]["plain"]["peak_bytes"] > 256 * 7 * 20000 * 4
    arms = data["throughput"]["arms"]
    assert arms.keys() == {"online R=1", "online R=4", "cached"}
    assert arms["online R=4"]["anchors"] == 4 * arms["cached"]["anchors"] == 4 * arms["online R=1"]["anchors"]
    assert all(arm["anchors_per_second"] == arm["anchors"] / arm["seconds"] > 0 for arm in arms.values())


def test_summary_is_of_the_rounds_measured(target_folder):
    target, tokenizer, drafter = load_pair(target_folder, DRAFTER, pack=False)
    arms = [Arm("plain", target, {}), Arm("drafted", target, {"assistant_model": drafter}, FixedLength(2))]
    result = run_benchmark(arms, tokenizer, PROMPTS, max_new_tokens=12)
    lengths = [n for row in result["prompts"] for n in row["drafted"]["acceptance_lengths"]]
    assert result["summary"]["drafted"]["acceptance_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert all(n <= 3 for n in lengths) and len(result["summary"]["drafted"]["acceptance_by_position"]) == 2


def test_difference_is_found_and_weighed(target):
    target = target()
    prompt = torch.tensor([ord(c) for c in PROMPTS[0]])
    text = target.generate(prompt[None], max_new_tokens=8, do_sample=False)[0, len(prompt) :]
    assert first_difference(target, prompt, text, text) is None
    other = text.clone()
    other[3] = (other[3] + 1) % 128
    difference = first_difference(target, prompt, text, other)
    logits = target(torch.cat([prompt, text[:3]])[None]).logits[0, -1]
    assert difference.position == 3 and not difference.near_tie
    assert difference.margin == pytest.approx(float(logits[text[3]] - logits[other[3]]), abs=1e-4)
    assert first_difference(target, prompt, text, text[:5]).position == 5


def test_policies_by_name():
    assert parse_policy("fixed") == FixedLength() and parse_policy("fixed:3") == FixedLength(3)
    assert parse_policy("threshold:0.4") == ConfidenceThreshold(0.4)
    for text in ("fast", "fixed:x", "threshold", "threshold:2", "fixed:-1"):
        with pytest.raises(ValueError, match=f"policy is '{text}'.*expected fixed, fixed:N"):
            parse_policy(text)


def test_prompt_sets():
    assert len(load_prompts("gsm8k_test", 50)) == 50 and len(load_prompts("chat_test")) == 100
    with pytest.raises(ValueError, match="nowhere.*gsm8k_test"):
        load_prompts("nowhere")


def test_errors_take_one_line(monkeypatch, capsys, target_folder):
    arguments = ["generate", "Hi", "--target", target_folder, "--drafter", str(FIXTURES / "target_qwen3")]
    monkeypatch.setattr(sys, "argv", ["dspark", *arguments])
    with pytest.raises(SystemExit) as stopped:
        dspark_hf.cli.main()
    assert stopped.value.code == 2
    assert "not a DSpark checkpoint" in capsys.readouterr().err


def test_bench_batch(target_folder, tmp_path):
    """Every policy, sizes 1 and 3; figures by hand from the calls of one arm; a picture beside the JSON."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [PROMPTS[i % 3][i:]]}) + "\n" for i in range(9)))
    output = tmp_path / "batch.json"
    names = ["fixed", "fixed:2", "prefix", "stale", "lookahead"]
    options = [word for name in names for word in ("--policy", name)] + ["--size", "1", "--size", "3"]
    profile = tmp_path / "profile.json"
    SPSProfile([1, 64], [10.0, 5.0], plain_steps_per_second=9.0).save(profile)
    command = ["bench", "batch", "--target", target_folder, "--drafter", DRAFTER, "--prompts", str(prompts)]
    result = run(*command, "--max-new-tokens", "12", "--profile", str(profile), "--output", str(output), *options)
    assert result.exit_code == 0 and "lookahead" in result.output and "scheduling 256 requests takes" in result.output
    data = json.loads(output.read_text())
    assert list(data["summary"]) == ["plain", *(f"dspark {name}" for name in names)]
    assert [call["batch_size"] for call in data["calls"]] == [1] * 8 + [3] * 2
    for name, sizes in data["summary"].items():
        for size, row in sizes.items():
            calls = [c["arms"][name] for c in data["calls"] if c["batch_size"] == int(size)]
            tokens, seconds = sum(c["tokens"] for c in calls), sum(c["seconds"] for c in calls)
            assert row["tokens_per_second"] == pytest.approx(tokens / seconds)
            assert row["texts_that_differ"] == row["of_these_near_ties"]
    assert data["summary"]["plain"]["3"]["verified_tokens"] is None
    assert data["summary"]["dspark fixed:2"]["3"]["verified_tokens"] == 2
    assert data["summary"]["dspark fixed"]["1"]["acceptance_length"] > 1
    assert output.with_suffix(".png").read_bytes()[1:4] == b"PNG"
    with pytest.raises(ValueError, match="9 prompts were given, expected 16 for a batch of 16"):
        run(*command, "--size", "16", "--policy", "fixed", "--output", str(output))


@pytest.mark.parametrize("name", ["vanilla", "dflash", "eagle3"])
def test_any_drafter_is_loaded_and_profiled(target_folder, name):
    """The rivals by the same commands, from their own checkpoints."""
    target, tokenizer, drafter = load_pair(target_folder, str(FIXTURES / f"drafter_qwen3_{name}"), pack=False)
    assert isinstance(drafter, Eagle3DrafterModel) == (name == "eagle3")
    inputs = tokenizer(PROMPTS[2], return_tensors="pt", return_token_type_ids=False)
    plain = target.generate(**inputs, max_new_tokens=16, do_sample=False)
    drafter.verify_policy = FixedLength(3)
    with record_speculation() as stats:
        assert torch.equal(
            target.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=drafter), plain
        )
    assert set(stats.proposal_lengths) == {3}
    assert SPSProfile.measure(target, drafter, widths=(1, 2), context=20, repeats=1).tokens == [1, 2]
