"""Training with plain `transformers.Trainer`: states, texts, replay stream, checkpoints, and `training/train.py`."""

import itertools
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from generation_helpers import character_tokenizer
from helpers import expected_greedy, load_target
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import LlamaConfig, Trainer, TrainingArguments

from dspark_hf import DSparkConfig, DSparkDrafterModel
from dspark_hf.target_dspark import target_states
from dspark_hf.training import (
    ReplayStream,
    collate,
    count_draft_vocabulary,
    end_token_ids,
    load_answers,
    write_answers,
)

RECIPES = Path(__file__).parents[1] / "training"
DRAFTER = {
    "num_hidden_layers": 1,
    "block_size": 4,
    "mask_token_id": 127,
    "target_layer_ids": [0, 2, 4],
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "num_anchors": 8,
    "has_embed_tokens": False,
    "has_lm_head": False,
}


def new_drafter(target, **changes) -> DSparkDrafterModel:
    torch.manual_seed(0)
    return DSparkDrafterModel(DSparkConfig.for_target(target.config, **DRAFTER | changes)).attach_target(target)


def texts() -> list[dict[str, torch.Tensor]]:
    """Six texts of 104 to 139 tokens; the target's greedy answers are to be learnt."""
    traces = expected_greedy("qwen3_vanilla")["threshold_0.0"]
    samples = []
    for trace in traces:
        ids = torch.tensor(trace["output_ids"])
        samples.append({"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= len(trace["prompt_ids"])})
    return samples


def with_states(target, samples):
    for sample in samples:
        (states,), (last,) = target_states(target, sample["input_ids"][None], None, DRAFTER["target_layer_ids"])
        yield sample | {"target_hidden_states": states, "target_last_hidden_states": last}


def trainer(model, folder, train_dataset=None, data_collator=collate, **arguments) -> Trainer:
    options = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 0}
    options |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "lr_scheduler_type": "constant"}
    return Trainer(
        model=model,
        args=TrainingArguments(str(folder), **options | arguments),
        train_dataset=train_dataset,
        eval_dataset=texts(),
        data_collator=data_collator,
    )


def assert_same_weights(actual, wanted, **tolerance):
    wanted = wanted.state_dict()
    for key, value in actual.state_dict().items():
        torch.testing.assert_close(value, wanted[key], msg=lambda text, key=key: f"{key}: {text}", **tolerance)


# ------------------------------------------------------------------------------------------------------------- Trainer


def test_supplied_and_computed_states_give_the_same_loss(target):
    model = new_drafter(target())
    anchors = {"anchor_positions": torch.tensor([[50, 60, 90], [60, 70, 100]]), "anchor_mask": torch.ones(2, 3) > 0}
    anchors["anchor_mask"][0, 2] = False
    batch = collate([texts()[0], texts()[5]]) | anchors
    supplied = collate(list(with_states(target(), [texts()[0], texts()[5]]))) | anchors
    assert not batch["attention_mask"].all()
    losses = [model(**inputs, output_logits=True) for inputs in (batch, supplied)]
    for key in ("loss", "ce_loss", "l1_loss", "confidence_loss"):
        torch.testing.assert_close(losses[0][key], losses[1][key])


def test_trainer_learns_either_way(tmp_path, target):
    """Thirty steps take a quarter off the loss, by the same path whether the states come with the batch or not."""
    models = []
    for samples in (texts(), list(with_states(target(), texts()))):
        model = new_drafter(target())
        run = trainer(model, tmp_path, samples, max_steps=30, learning_rate=5e-3)
        torch.manual_seed(1)
        before = run.evaluate()["eval_loss"]
        run.train()
        assert run.evaluate()["eval_loss"] < 0.75 * before
        models.append(model)
    assert_same_weights(*models, rtol=0.01, atol=1e-3)
    assert not any(parameter.grad is not None for parameter in target().parameters())


def test_checkpoints_resume_on_the_same_path(tmp_path, target):
    options = {"max_steps": 6, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 3}
    straight = trainer(new_drafter(target()), tmp_path, texts(), **options)
    straight.train()
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert saved.keys() == straight.model.state_dict().keys()  # nothing of the target
    resumed = trainer(new_drafter(target()), tmp_path, texts(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert_same_weights(resumed.model, straight.model)
    loaded = DSparkDrafterModel.from_pretrained(tmp_path / "checkpoint-6")
    assert_same_weights(loaded, straight.model, rtol=0, atol=0)


def test_accumulation_does_not_scale_the_gradient(tmp_path, target):
    """One step over a text taken four times, in one batch or in four, is one step over the text."""
    anchors = torch.tensor([[50, 60, 90]])

    def collator(samples):
        return collate(samples) | {"anchor_positions": anchors.expand(len(samples), -1)}

    norms = []
    for size, steps in ((1, 1), (4, 1), (1, 4)):
        run = trainer(new_drafter(target()), tmp_path, texts()[:1] * 4, data_collator=collator, max_steps=1,
                      per_device_train_batch_size=size, gradient_accumulation_steps=steps, logging_steps=1)  # fmt: skip
        run.train()
        norms.append(run.state.log_history[0]["grad_norm"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_evaluation_with_metrics_gathers_outputs_of_different_widths(tmp_path, target):
    model = new_drafter(target(), num_anchors=100)
    run = trainer(model, tmp_path)
    run.compute_metrics = lambda prediction: {"outputs": len(prediction.predictions)}
    assert run.evaluate()["eval_outputs"] > 1


def test_autocast(target):
    batch = collate(texts()[:2]) | {"anchor_positions": torch.tensor([[50, 70], [60, 80]])}
    model = new_drafter(target(), initializer_range=0.2)
    wanted = model(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(**batch)
    assert output.confidence_logits.dtype == output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, wanted.loss, rtol=0.02, atol=0)
    assert output.loss != wanted.loss
    output.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# ------------------------------------------------------------------------------------------------------- replay stream


def test_stream_states_are_those_of_a_direct_forward(target):
    stream = ReplayStream(texts(), target(), [0, 2, 4], with_logsumexp=True)
    for sample in itertools.islice(stream, 4):
        outputs = target()(sample["input_ids"][None], output_hidden_states=True)
        states = torch.cat([outputs.hidden_states[i + 1][0] for i in (0, 2, 4)], dim=-1)
        torch.testing.assert_close(sample["target_hidden_states"], states)
        torch.testing.assert_close(sample["target_last_hidden_states"], outputs.hidden_states[-1][0])
        teaches = sample["loss_mask"].nonzero()[:, 0] - 1
        normaliser = outputs.logits[0, teaches].logsumexp(-1)
        torch.testing.assert_close(sample["target_logsumexp"][teaches], normaliser)


def test_stream_caps_the_logits(target):
    stream = ReplayStream(texts(), target(), [0], with_logsumexp=True, softcap=3.0)
    sample = next(iter(stream))
    logits = target()(sample["input_ids"][None]).logits[0]
    normaliser = (3.0 * torch.tanh(logits / 3.0)).logsumexp(-1)
    teaches = sample["loss_mask"].nonzero()[:, 0] - 1
    torch.testing.assert_close(sample["target_logsumexp"][teaches], normaliser[teaches])


def test_stream_reuses_and_forgets(target, monkeypatch):
    """Draw n costs ⌈n / reuse⌉ forwards, and comes from the last `ring_size` texts; every text has its turn."""
    stream, forwards = ReplayStream(texts(), target(), [0], reuse=3, ring_size=2, seed=5), []
    monkeypatch.setattr(stream, "features", lambda sample: forwards.append(len(sample["input_ids"])) or forwards[-1])
    for count, drawn in enumerate(itertools.islice(stream, 36), 1):
        assert len(forwards) == -(-count // 3)
        assert drawn in forwards[-2:]
    assert sorted(forwards[:6]) == sorted(forwards[6:]) == sorted(len(text["input_ids"]) for text in texts())
    again = [drawn for drawn in itertools.islice(stream, 36)]
    assert forwards[12:] == forwards[:12]  # a new pass draws as the first did
    stream.seed = 6
    assert [drawn for drawn in itertools.islice(stream, 36)] != again


def test_workers_of_the_loader_draw_differently(target):
    stream = ReplayStream(texts(), target(), [0], ring_size=2)
    loader = DataLoader(
        stream, batch_size=6, num_workers=2, collate_fn=lambda batch: [len(s["input_ids"]) for s in batch]
    )
    first, second = itertools.islice(loader, 2)
    assert first != second


@pytest.mark.parametrize("values", [{"reuse": 0}, {"ring_size": 0}, {"samples": []}])
def test_refused_streams(target, values):
    with pytest.raises(ValueError, match="expected at least 1 each"):
        ReplayStream(**{"samples": texts(), "target": target(), "layer_ids": [0]} | values)


# --------------------------------------------------------------------------------------------------------------- texts


def test_answers_are_cut_and_short_ones_dropped(tmp_path):
    rows = [([1, 2], [3, 4, 5]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3], [4, 5]), ([], [7, 8])]
    lines = [json.dumps({"prompt_ids": prompt, "response_ids": response}) for prompt, response in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:3]) + "\n")
    (tmp_path / "b.jsonl").write_text(lines[3])
    samples = load_answers([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], max_length=5)
    assert [sample["input_ids"].tolist() for sample in samples] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [7, 8]]
    assert [sample["loss_mask"].tolist() for sample in samples] == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [1, 1]]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt_ids": [1], "respo',
        '{"prompt_ids": [1]}',
        "[[1], [2]]",
        '{"prompt_ids": "text", "response_ids": [2, 3]}',
        '{"prompt_ids": [1], "response_ids": ["a", "b"]}',
        "",
    ],
)
def test_bad_lines_are_named(tmp_path, line):
    good = json.dumps({"prompt_ids": [1], "response_ids": [2, 3]})
    path = tmp_path / "answers.jsonl"
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 2: .*expected"):
        load_answers([path], 100)


def chat_tokenizer():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %} A{% endif %}"
    )
    return tokenizer


PROMPTS = [{"turns": [text]} for text in ("Tom has 3 boxes.", "How many?", "A train goes 60 miles in", "Ann", "5 + 7")]


def test_answers_are_the_targets_own(tmp_path, monkeypatch):
    """Each as if answered alone, cut behind the end token. A killed run leaves a torn line, and goes on from there."""
    path = tmp_path / "runs" / "answers.jsonl"
    options = {"max_new_tokens": 24, "do_sample": False, "batch_size": 2}
    model = load_target()
    model.generation_config.eos_token_id = [ord("e"), ord("?")]
    write_answers(model, chat_tokenizer(), PROMPTS, path, **options)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        ids = [ord(character) for character in prompt["turns"][0] + " A"]
        alone = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
        assert (row["prompt_ids"], row["response_ids"]) == (ids, alone)
    assert len({len(row["response_ids"]) for row in rows}) > 1
    assert any(row["response_ids"][-1] == ord("e") for row in rows)

    whole = path.read_text()
    asked, generate = [], model.generate

    def counted_generate(input_ids, **kwargs):
        asked.append(len(input_ids))
        return generate(input_ids, **kwargs)

    monkeypatch.setattr(model, "generate", counted_generate)
    for kept in (len(whole) - 9, whole.index("\n") + 1, whole.index("\n"), 0):
        path.write_text(whole[:kept])
        asked.clear()
        write_answers(model, chat_tokenizer(), PROMPTS, path, **options)
        assert path.read_text() == whole
        assert sum(asked) == 5 - whole[:kept].count("\n")


def test_end_tokens():
    model = load_target()
    for value, wanted in ((None, []), (3, [3]), ([4, 5], [4, 5])):
        model.generation_config.eos_token_id = value
        assert end_token_ids(model) == wanted


def test_draft_vocabulary_is_the_most_frequent():
    ids = torch.tensor([9, 9, 9, 1, 1, 1, 2, 2, 3])
    samples = [{"input_ids": ids, "loss_mask": ids != 9}]
    assert count_draft_vocabulary(samples, 3, always=[7]).tolist() == [1, 2, 7]
    assert count_draft_vocabulary(samples, 10, always=[7]).tolist() == [1, 2, 3, 7]


def test_collate_pads_on_the_right():
    samples = [{"input_ids": torch.tensor([5, 6, 7]), "loss_mask": torch.tensor([False, True, True])},
               {"input_ids": torch.tensor([8]), "loss_mask": torch.tensor([True])}]  # fmt: skip
    batch = collate([s | {"target_hidden_states": s["input_ids"][:, None].expand(-1, 2) + 0.5} for s in samples])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch["target_hidden_states"][1].tolist() == [[8.5, 8.5], [0, 0], [0, 0]]
    assert "target_logsumexp" not in batch


# ------------------------------------------------------------------------------------------------------------ train.py


def test_train_script(tmp_path, target, monkeypatch):
    """Answers, trains and saves with the shipped recipe, made small; another run goes on from the checkpoint."""
    recipe = yaml.safe_load((RECIPES / "configs" / "smollm2-135m.yaml").read_text())
    recipe["answers"] = str(tmp_path / "answers.jsonl")
    recipe["regenerate"] |= {"max_new_tokens": 16}
    recipe["drafter"] |= DRAFTER | {"draft_vocab_size": 12}
    recipe["training"] |= {"output_dir": str(tmp_path / "run"), "max_steps": 2, "save_steps": 2, "warmup_steps": 0,
                           "logging_steps": 1, "use_cpu": True, "lr_scheduler_type": "constant"}  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    load_target().save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    arguments = [
        str(path) for path in (RECIPES / "train.py", tmp_path / "recipe.yaml", "--target", tmp_path / "target")
    ]

    command = [sys.executable, *arguments, "--prompts", str(tmp_path / "prompts.jsonl"), "--threads", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 5
    model = DSparkDrafterModel.from_pretrained(tmp_path / "run" / "drafter").eval()
    assert model.config.draft_vocab_size == 12 and model.t2d[10] and model.lm_head is None
    draft = model.draft(torch.randn(1, 5, 192), torch.tensor([40]), target=target())
    assert model.t2d[draft.token_ids].all()
    assert json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2

    monkeypatch.setattr(sys, "argv", [*arguments, "--max-steps", "3", "--resume"])
    runpy.run_path(arguments[0], run_name="__main__")
    again = DSparkDrafterModel.from_pretrained(tmp_path / "run" / "drafter")
    assert torch.equal(again.d2t, model.d2t) and not torch.equal(again.fc.weight, model.fc.weight)


def test_recipes_fit_their_target():
    """The shipped recipe's keys make a configuration for SmolLM2-135M's sizes, and training arguments."""
    for path in (RECIPES / "configs").glob("*.yaml"):
        recipe = yaml.safe_load(path.read_text())
        target = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                             num_attention_heads=9, num_key_value_heads=3)  # fmt: skip
        DSparkConfig.for_target(target, **recipe["drafter"])
        TrainingArguments(**recipe["training"] | {"use_cpu": True})
