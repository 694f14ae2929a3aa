"""`DSparkTrainer`: sources of states, exact gradients however a step is cut, resuming, evaluation, LoRA, Muon."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import load_drafter, load_target
from safetensors.torch import load_file
from training_helpers import chat_tokenizer, new_drafter, texts, with_states

from dspark_hf import ConfidenceThreshold, DSparkDrafterModel, record_speculation
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments, OnlineStates
from dspark_hf.training.cache import CachedStates, build_cache
from dspark_hf.training.manifest import CacheSource
from dspark_hf.training.muon import Muon, orthogonalised
from dspark_hf.training.recipe import with_lora


def arguments(folder, **changes) -> DSparkTrainingArguments:
    options = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 0,
               "per_device_train_batch_size": 2, "lr_scheduler_type": "constant", "ring_size": 4, "reuse": 2,
               "eval_max_new_tokens": 24, "eval_prompts": 2}  # fmt: skip
    return DSparkTrainingArguments(str(folder), **options | changes)


def trainer(folder, model=None, samples=None, target=None, states=None, callbacks=None, **changes) -> DSparkTrainer:
    target = target or load_target()
    return DSparkTrainer(
        new_drafter(target) if model is None else model,
        arguments(folder, **changes),
        target,
        train_dataset=texts() if samples is None else samples,
        eval_dataset=texts(),
        states=states,
        callbacks=callbacks,
    )


def weights(model) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_same(got: dict, wanted: dict, **tolerance) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, **{"rtol": 0, "atol": 0} | tolerance)


# ------------------------------------------------------------------------------------------------------------- sources


def test_the_sources_of_states_train_alike(tmp_path):
    """With a bfloat16 target, whose states a cache keeps as they are."""
    target = load_target(dtype=torch.bfloat16)
    online = trainer(tmp_path, target=target, max_steps=4)
    supplied = list(with_states(target, texts()))
    layer_ids = online.drafter.config.target_layer_ids
    source = CacheSource.of(target, chat_tokenizer(), layer_ids, "tiny")
    build_cache(texts(), OnlineStates(target, layer_ids, with_logsumexp=True).features, tmp_path / "cache", source)
    cached = trainer(tmp_path, target=target, states=CachedStates(tmp_path / "cache"), max_steps=4)
    given = trainer(tmp_path, target=target, samples=supplied, max_steps=4)
    given.train_dataset.source = None  # would raise if asked
    start, losses = weights(online.model), []
    for run in (online, cached, given):
        run.train()
        losses.append(run.state.log_history[-1]["train_loss"])
        assert_same(weights(run.model), weights(online.model))
    assert losses[0] == losses[1] == losses[2]
    assert (start["fc.weight"] - online.model.fc.weight).abs().max() > 1e-5


def test_workers_change_nothing(tmp_path):
    runs = [trainer(tmp_path, max_steps=4, dataloader_num_workers=count) for count in (0, 2)]
    for run in runs:
        run.train()
    assert_same(weights(runs[1].model), weights(runs[0].model))


def test_refused_datasets(tmp_path):
    with pytest.raises(ValueError, match="the dataset is a generator, expected one with a length and indices"):
        trainer(tmp_path, samples=(text for text in texts()))
    with pytest.raises(ValueError, match="reuse is 0, expected 1 or more"):
        arguments(tmp_path, reuse=0)
    with pytest.raises(ValueError, match="decay is -1"):
        arguments(tmp_path, objective={"decay": -1})


# ----------------------------------------------------------------------------------------------------------- exactness

ONE_STEP = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1}
STEP_OF_EIGHT = """
import sys, torch
sys.path.insert(0, {tests!r})
from test_trainer import *
run = trainer({folder!r}, ddp_backend="gloo", **ONE_STEP, **{options!r})
if {empty!r} and run.accelerator.process_index == 1:
    run.train_dataset.num_anchors = 0
run.train()
if run.accelerator.process_index == 0:
    torch.save(weights(run.drafter), {folder!r} + "/weights.pt")
torch.distributed.destroy_process_group()
"""


def in_two_ranks(folder: Path, empty: bool = False, **options) -> dict[str, torch.Tensor]:
    script = folder / "step.py"
    values = {"tests": str(Path(__file__).parent), "folder": str(folder), "options": options, "empty": empty}
    script.write_text(STEP_OF_EIGHT.format(**values))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0",
               "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return torch.load(folder / "weights.pt")


@pytest.mark.parametrize("position_weights", ["decay", "dpace"])
def test_a_step_is_the_same_however_it_is_cut(tmp_path, position_weights):
    """Eight texts in one batch, one by one, packed, and four in each of two ranks: the same gradients."""
    options = {"objective": {"position_weights": position_weights}}
    ways = [
        {"per_device_train_batch_size": 8},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "row_length": 300},
    ]
    results = []
    for way in ways:
        run = trainer(tmp_path, **ONE_STEP, **options, **way)
        before = weights(run.model)
        run.train()
        results.append({key: before[key] - value for key, value in weights(run.model).items()})
    if position_weights == "decay":
        after = in_two_ranks(tmp_path, per_device_train_batch_size=4, **options)
        results.append({key: before[key] - value for key, value in after.items()})
    assert results[0]["fc.weight"].abs().max() > 1e-3
    for result in results[1:]:
        assert_same(result, results[0], rtol=1e-4, atol=1e-6)
    # Counting every micro-batch alike, as plain means would, is something else.
    plain = trainer(tmp_path, **ONE_STEP, **options, **ways[1])
    plain.get_batch_samples = lambda iterator, count, device: ([next(iterator) for _ in range(count)], None)
    plain.train()
    wrong = {key: before[key] - value for key, value in weights(plain.model).items()}
    assert max((wrong[key] - value).abs().max() for key, value in results[0].items()) > 1e-4


def test_a_rank_without_anchors_does_not_hang(tmp_path):
    run = trainer(tmp_path, **ONE_STEP)
    before = weights(run.model)
    after = in_two_ranks(tmp_path, empty=True, per_device_train_batch_size=2)
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert "fc.weight" in changed and all(value.isfinite().all() for value in after.values())


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    options = {"max_steps": 8, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 3,
               "matrix_learning_rate": 0.02, "gradient_accumulation_steps": 2}  # fmt: skip
    straight = trainer(tmp_path, **options)  # 12 draws an epoch, 4 a step: from the second epoch into the third
    straight.train()
    for step in (3, 6):
        resumed = trainer(tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.state.global_step == 8
        assert_same(weights(resumed.model), weights(straight.model))


def test_epochs_draw_other_anchors(tmp_path):
    run = trainer(tmp_path, num_train_epochs=2, reuse=1)
    seen = []
    run.compute_loss = lambda model, inputs, **kwargs: (
        seen.append(inputs["anchor_positions"].tolist()) or model.fc.weight.sum()
    )
    run.train()
    assert len(seen) == 6 and len({str(sorted(map(str, seen[i : i + 3]))) for i in (0, 3)}) == 2


# --------------------------------------------------------------------------------------------------------- overfitting


@pytest.mark.parametrize("body", ["qwen3", "gemma4_text"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None])
def test_a_text_learnt_by_heart_is_accepted_whole(tmp_path, head, body):
    """Training and drafting agree on slots, positions and layers: decoding the very text accepts nearly γ a round,
    after saving and loading."""
    target = load_target("gemma4" if body == "gemma4_text" else "qwen3")
    torch.manual_seed(1)
    prompt = torch.randint(97, 122, (1, 12))
    text = target.generate(prompt, max_new_tokens=36, do_sample=False, eos_token_id=None)[0]
    sample = {"input_ids": text, "loss_mask": torch.arange(len(text)) >= 12}
    layers = [0, 1] if body == "gemma4_text" else [0, 2, 4]
    heads = {"markov_rank": 8 if head else 0, "markov_head_type": head, "enable_confidence_head": head is not None}
    model = new_drafter(target, backbone_type=body, target_layer_ids=layers, num_anchors=36, **heads)
    run = trainer(tmp_path, model=model, target=target, samples=[sample] * 2, max_steps=80, learning_rate=4e-3,
                  matrix_learning_rate=0.02, reuse=1, logging_steps=60)  # fmt: skip
    run.train()
    run.save_model(str(tmp_path / "drafter"))
    drafter = DSparkDrafterModel.from_pretrained(tmp_path / "drafter").eval()
    with record_speculation() as stats:
        decoded = target.generate(
            prompt, assistant_model=drafter, max_new_tokens=36, do_sample=False, eos_token_id=None
        )
    assert torch.equal(decoded[0], text)
    assert stats.acceptance_length > 4.2, run.state.log_history  # 5 is γ + 1


# ---------------------------------------------------------------------------------------------------------- evaluation


def test_evaluation_decodes(tmp_path):
    """With a trained drafter: the figures are those of decoding by hand, and the policy is respected."""
    model = load_drafter()
    run = trainer(tmp_path, model=model, eval_temperatures=[0.0, 1.0])
    metrics = run.evaluate()
    assert metrics["eval_acceptance_length"] > 1.5
    assert 1 <= metrics["eval_t1_acceptance_length"] < 8 and metrics["eval_loss"] > 0
    for k in range(1, 8):
        assert 0 <= metrics[f"eval_acceptance_at_{k}"] <= 1
    assert metrics["eval_conditional_acceptance_at_1"] == metrics["eval_acceptance_at_1"]
    assert 0 <= metrics["eval_confidence_ece"] <= 1 and 0.4 < metrics["eval_confidence_auc"] <= 1
    again = run.evaluate()
    for key, value in metrics.items():
        if key.startswith(("eval_loss", "eval_accept", "eval_t1_accept", "eval_conf")):
            assert again[key] == value, key
    model.verify_policy = ConfidenceThreshold(0.999999)
    assert run.evaluate()["eval_acceptance_length"] < metrics["eval_acceptance_length"]


def test_the_best_model_by_acceptance_is_kept(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 3,
               "load_best_model_at_end": True, "metric_for_best_model": "acceptance_length",
               "greater_is_better": True, "learning_rate": 0.5, "eval_temperatures": [0.0]}  # fmt: skip
    run = trainer(tmp_path, model=load_drafter(), **options)  # every step makes it worse
    run.train()
    logged = [log["eval_acceptance_length"] for log in run.state.log_history if "eval_acceptance_length" in log]
    assert len(logged) == 3 and run.state.best_metric == max(logged)
    best = load_file(Path(run.state.best_model_checkpoint) / "model.safetensors")
    torch.testing.assert_close(run.model.fc.weight, best["fc.weight"], rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------------- LoRA


@pytest.mark.parametrize("train_fc", [False, True])
def test_lora(tmp_path, train_fc):
    """Adapters train, the rest stays; the wrapped and the merged drafter draft alike, and exactly."""
    base = load_drafter()
    before, target = weights(base), load_target()
    model = with_lora(base, r=4, train_fc=train_fc)
    run = trainer(tmp_path, model=model, target=target, max_steps=3, learning_rate=1e-2, eval_temperatures=[0.0])
    run.train()
    assert run.evaluate()["eval_acceptance_length"] >= 1
    run.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 0.5 * sum(
        value.numel() * 4 for value in before.values()
    )
    prompt = texts()[0]["input_ids"][None, :40]
    options = {"max_new_tokens": 40, "do_sample": False}
    plain = target.generate(prompt, **options)
    wrapped = target.generate(prompt, assistant_model=model.eval(), **options)
    merged = model.merge_and_unload()
    assert isinstance(merged, DSparkDrafterModel)
    assert torch.equal(wrapped, plain)
    assert torch.equal(target.generate(prompt, assistant_model=merged, **options), plain)
    after = weights(merged)
    assert not torch.equal(after["layers.0.self_attn.q_proj.weight"], before["layers.0.self_attn.q_proj.weight"])
    assert torch.equal(after["fc.weight"], before["fc.weight"]) != train_fc
    assert torch.equal(after["norm.weight"], before["norm.weight"])


# ---------------------------------------------------------------------------------------------------------------- Muon


@pytest.mark.parametrize("shape", [(8, 30), (30, 8), (16, 16)])
def test_orthogonalised(shape):
    matrix = torch.randn(shape)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    result = orthogonalised(matrix, steps=5)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6 and values.max() < 1.25
    assert ((left.T @ result @ right.T).diag() > 0.6).all()  # the same directions


def test_muon_steps():
    """Matrices move by their learning rate whatever the gradient's size; the rest as AdamW moves them."""
    matrix, vector, reference = (
        torch.nn.Parameter(torch.zeros(6, 9)),
        *(torch.nn.Parameter(torch.ones(5)) for _ in "ab"),
    )
    optimizer = Muon(
        [{"params": [matrix], "muon": True, "lr": 0.1}, {"params": [vector], "lr": 0.01}], weight_decay=0.0
    )
    adamw = torch.optim.AdamW([reference], lr=0.01, weight_decay=0.0)
    for scale in (1.0, 1e-4):
        matrix.data.zero_()
        matrix.grad, vector.grad, reference.grad = torch.randn(6, 9) * scale, *[torch.arange(5.0)] * 2
        optimizer.state.pop(matrix, None)
        optimizer.step()
        adamw.step()
        values = torch.linalg.svdvals(matrix.detach())
        assert values.min() > 0.05 and values.max() < 0.13
        torch.testing.assert_close(vector, reference)


def test_muon_learns_faster_here(tmp_path):
    losses = {}
    for rate in (None, 0.02):
        run = trainer(tmp_path, max_steps=30, learning_rate=2e-3, matrix_learning_rate=rate, eval_temperatures=[])
        run.train()
        losses[rate] = run.evaluate()["eval_loss"]
    assert losses[0.02] < losses[None]


def test_checkpoints_hold_a_drafter(tmp_path):
    run = trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    run.train()
    assert_same(weights(DSparkDrafterModel.from_pretrained(tmp_path / "checkpoint-2")), weights(run.model))
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
