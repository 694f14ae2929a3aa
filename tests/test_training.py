"""Training with plain `transformers.Trainer`: states, texts, checkpoints."""

import json

import pytest
import torch
from helpers import load_target
from safetensors.torch import load_file
from training_helpers import new_drafter, texts, with_states
from transformers import Trainer, TrainingArguments

from dspark_hf import DSparkDrafterModel
from dspark_hf.training import collate, count_draft_vocabulary, end_token_ids, load_answers


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


def test_end_tokens():
    model = load_target()
    for value, wanted in ((None, []), (3, [3]), ([4, 5], [4, 5])):
        model.generation_config.eos_token_id = value
        assert end_token_ids(model) == wanted


def test_draft_vocabulary_is_the_most_frequent():
    ids = torch.tensor([9, 9, 9, 1, 1, 1, 2, 2, 3])
    samples = [{"input_ids": ids, "loss_mask": ids != 9}]
    assert count_draft_vocabulary(samples, 3, always=[7]).tolist() == [1, 2, 7]
    assert count_draft_vocabulary(samples, 6, always=[7]).tolist() == [0, 1, 2, 3, 4, 7]  # filled up from below


def test_collate_pads_on_the_right():
    samples = [{"input_ids": torch.tensor([5, 6, 7]), "loss_mask": torch.tensor([False, True, True])},
               {"input_ids": torch.tensor([8]), "loss_mask": torch.tensor([True])}]  # fmt: skip
    batch = collate([s | {"target_hidden_states": s["input_ids"][:, None].expand(-1, 2) + 0.5} for s in samples])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch["target_hidden_states"][1].tolist() == [[8.5, 8.5], [0, 0], [0, 0]]
    assert "target_logsumexp" not in batch
