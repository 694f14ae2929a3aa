"""Recipes: what they refuse, `dspark train` from prompts to drafter, killed and resumed runs, the shipped presets."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from helpers import load_target
from safetensors.torch import load_file
from training_helpers import DRAFTER, PROMPTS, chat_tokenizer, texts
from transformers import Gemma4TextConfig, LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from dspark_hf import DSparkDrafterModel
from dspark_hf.baselines import Eagle3DrafterModel, new_drafter
from dspark_hf.cli import app
from dspark_hf.evaluation.loading import load_drafter
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments, Recipe, run_recipe
from dspark_hf.training.estimate import estimate_run

CONFIGS = sorted((Path(__file__).parents[1] / "training" / "configs").glob("*.yaml"))
TRAINING = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "warmup_steps": 0, "logging_steps": 1,
            "per_device_train_batch_size": 2, "use_cpu": True, "lr_scheduler_type": "constant", "report_to": "none",
            "disable_tqdm": True, "ring_size": 4, "eval_max_new_tokens": 8}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target with its tokenizer, prompts, and answers to others."""
    folder = tmp_path_factory.mktemp("recipe")
    load_target().save_pretrained(folder / "target")
    chat_tokenizer().save_pretrained(folder / "target")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    rows = []
    for text in texts():
        mask = text["loss_mask"]
        rows.append({"prompt_ids": text["input_ids"][~mask].tolist(), "response_ids": text["input_ids"][mask].tolist()})
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe(folder: Path, output: Path, **changes) -> Recipe:
    values = {
        "target": str(folder / "target"),
        "training": TRAINING | {"output_dir": str(output)},
        "drafter": DRAFTER | {"draft_vocab_size": 20},
        "answers": str(folder / "answers.jsonl"),
        "max_length": 200,
    }
    return Recipe(**values | changes)


def write(path: Path, recipe: Recipe) -> Path:
    path.write_text(yaml.safe_dump(vars(recipe)))
    return path


# ---------------------------------------------------------------------------------------------------------------- files


def test_values_are_replaced(folder, tmp_path):
    path = write(tmp_path / "recipe.yaml", recipe(folder, tmp_path / "run"))
    changed = Recipe.load(path, target="other", answers=None, training={"max_steps": 9}, init_from="drafter")
    assert (changed.target, changed.answers) == ("other", str(folder / "answers.jsonl"))
    assert changed.training == TRAINING | {"output_dir": str(tmp_path / "run"), "max_steps": 9}
    assert changed.drafter is None and changed.init_from == "drafter"
    path = write(path, recipe(folder, tmp_path / "run", method="eagle3"))
    assert Recipe.load(path).method == "eagle3" and Recipe.load(path, init_from="drafter").method == "dspark"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": None}, "drafter is None, init_from None: expected one of them"),
        ({"init_from": "x"}, "init_from x: expected one of them"),
        ({"lora": {"r": 4}}, "lora is given without init_from"),
        ({"method": "medusa"}, r"method is 'medusa', expected one of \['dspark', 'dflash', 'eagle3', 'mtp1'\]"),
        ({"drafter": None, "init_from": "x", "method": "eagle3"}, "method is 'eagle3' beside init_from, expected none"),
        ({"target_bits": 3}, "target_bits is 3, expected 4 or 8"),
    ],
)
def test_refused_recipes(folder, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        recipe(folder, tmp_path, **changes)


def test_unknown_keys_and_too_few_texts_are_named(folder, tmp_path):
    (tmp_path / "recipe.yaml").write_text("{target: x, training: {}, drafters: {}}")
    with pytest.raises(ValueError, match=r"recipe.yaml has the keys \['drafters'\], expected \['target'"):
        Recipe.load(tmp_path / "recipe.yaml")
    with pytest.raises(ValueError, match="has 6 texts, expected more than eval_texts 6"):
        run_recipe(recipe(folder, tmp_path, eval_texts=6))


# ----------------------------------------------------------------------------------------------------------------- runs


def test_from_prompts_to_a_drafter(folder, tmp_path):
    """By the command line: answers, trains, evaluates, saves; the drafter is loadable and drafts for the target."""
    plan = recipe(folder, tmp_path / "run", answers=str(tmp_path / "answers.jsonl"), eval_texts=2,
                  regenerate={"max_new_tokens": 16, "batch_size": 2})  # fmt: skip
    path = write(
        tmp_path / "recipe.yaml", replace(plan, training=plan.training | {"eval_strategy": "steps", "eval_steps": 2})
    )
    arguments = ["train", str(path), "--prompts", str(folder / "prompts.jsonl"), "--threads", "1", "--reuse", "3"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and "saved in" in result.output
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 5
    model = DSparkDrafterModel.from_pretrained(tmp_path / "run" / "drafter").eval()
    assert model.t2d[10] and model.lm_head is None
    target = load_target()
    prompt = texts()[0]["input_ids"][None, :30]
    plain, drafted = (target.generate(prompt, assistant_model=a, max_new_tokens=30) for a in (None, model))
    assert torch.equal(plain, drafted)
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["max_steps"] == 4 and any("eval_acceptance_length" in log for log in state["log_history"])


def test_a_killed_run_goes_on_as_if_nothing_happened(folder, tmp_path):
    slow = "import time; from dspark_hf.training import OnlineStates as S; f = S.features\n" \
           "S.features = lambda self, sample: time.sleep(0.1) or f(self, sample)\n"  # fmt: skip
    plan = recipe(folder, tmp_path / "straight")
    run_recipe(plan)
    path = write(tmp_path / "r.yaml", replace(plan, training=plan.training | {"output_dir": str(tmp_path / "killed")}))
    script = f"{slow}from dspark_hf.cli import app; app(['train', {str(path)!r}])"
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not (tmp_path / "killed" / "checkpoint-2" / "trainer_state.json").exists() and time.time() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "drafter").exists()
    result = CliRunner().invoke(app, ["train", str(path), "--resume"], catch_exceptions=False)
    assert result.exit_code == 0
    straight, killed = (load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("straight", "killed"))
    assert all(torch.equal(straight[key], killed[key]) for key in straight) and straight.keys() == killed.keys()


@pytest.mark.parametrize("method", ["dspark", "eagle3"])
def test_warm_start_with_lora(folder, tmp_path, method):
    first = run_recipe(recipe(folder, tmp_path / "first", method=method))
    path = write(tmp_path / "recipe.yaml", recipe(folder, tmp_path / "second"))
    arguments = ["train", str(path), "--init-from", str(first), "--lora-r", "4", "--max-steps", "2"]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    before, after = (load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("first", "second"))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert before.keys() == after.keys() and "layers.0.mlp.up_proj.weight" in changed
    assert not {"fc.weight", "norm.weight", "d2t"} & changed
    assert (tmp_path / "second" / "adapter" / "adapter_config.json").exists()


METHODS = {"dflash": DSparkDrafterModel, "eagle3": Eagle3DrafterModel, "mtp1": Eagle3DrafterModel}


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_are_trained_by_the_same_recipe(folder, tmp_path, method):
    path = write(tmp_path / "recipe.yaml", recipe(folder, tmp_path / "run"))
    options = ["--method", method, "--max-steps", "2"]
    estimate = CliRunner().invoke(app, ["train", str(path), *options, "--dry-run"], catch_exceptions=False)
    assert CliRunner().invoke(app, ["train", str(path), *options], catch_exceptions=False).exit_code == 0
    target = load_target()
    drafter = load_drafter(str(tmp_path / "run" / "drafter"), target.config)
    count = sum(parameter.numel() for parameter in drafter.parameters()) / 1e6
    assert type(drafter) is METHODS[method] and f"{count:,.1f} M parameters" in estimate.output
    assert drafter.config.block_size == (1 if method == "mtp1" else 4) and drafter.markov_head is None
    ids = texts()[0]["input_ids"][None, :40]
    plain = target.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(target.generate(ids, assistant_model=drafter.eval(), max_new_tokens=8, do_sample=False), plain)
    again = recipe(folder, tmp_path / "again", drafter=None, init_from=str(tmp_path / "run" / "drafter"))
    assert type(again.load_drafter(target, [])) is METHODS[method]


@pytest.mark.parametrize("method", ["dflash", "eagle3"])
def test_other_methods_keep_their_objective(folder, tmp_path, method):
    """Settings of the recipe replace what they name, and nothing else."""
    torch.manual_seed(0)
    drafter = new_drafter(method, load_target().config, **DRAFTER)
    arguments = DSparkTrainingArguments(**TRAINING, output_dir=str(tmp_path), objective={"chunk_size": 9})
    trainer = DSparkTrainer(drafter, arguments, load_target(), train_dataset=texts())
    assert trainer.objective == replace(drafter.default_objective(True), chunk_size=9)
    assert (trainer.objective.l1_weight, trainer.objective.confidence_weight) == (0.0, 0.0)
    first = float(drafter(**next(iter(trainer.get_train_dataloader())), objective=trainer.objective).loss)
    trainer.train()
    assert trainer.state.log_history[-2]["loss"] < first


def test_a_cache_of_another_target_is_refused(folder, tmp_path):
    arguments = ["cache", "build", "--target", str(folder / "target"), "--answers", str(folder / "answers.jsonl"),
                 "--output", str(tmp_path / "cache"), "--layers", "0,2,4", "--max-length", "200"]  # fmt: skip
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    cached = run_recipe(recipe(folder, tmp_path / "cached", cache=str(tmp_path / "cache")))
    online = run_recipe(recipe(folder, tmp_path / "online"))
    one, two = (load_file(path / "model.safetensors") for path in (cached, online))
    assert all(torch.equal(one[key], two[key]) for key in two)
    layers = DRAFTER | {"target_layer_ids": [0, 1, 4]}
    with pytest.raises(ValueError, match=r"holds states of layer_ids \(0, 2, 4\), expected \(0, 1, 4\)"):
        run_recipe(recipe(folder, tmp_path / "run", cache=str(tmp_path / "cache"), drafter=layers))
    with pytest.raises(ValueError, match="no states of sample"):
        run_recipe(recipe(folder, tmp_path / "run", cache=str(tmp_path / "cache"), max_length=100))


# -------------------------------------------------------------------------------------------------------------- presets


def small_target(preset: dict):
    """A configuration of the preset's architecture with as many layers, and everything else tiny."""
    layers = preset["drafter"]["target_layer_ids"][-1] + 2
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    if "Qwen3" in preset["target"]:
        return Qwen3Config(**sizes, **heads, head_dim=16, eos_token_id=10)
    if "gemma-4" in preset["target"]:
        return Gemma4TextConfig(
            **sizes, **heads, head_dim=16, global_head_dim=32, attention_k_eq_v=True,
            num_global_key_value_heads=2, hidden_size_per_layer_input=0, eos_token_id=10,
            layer_types=(["sliding_attention", "full_attention"] * layers)[:layers - 1] + ["full_attention"],
        )  # fmt: skip
    return LlamaConfig(**sizes, **heads, eos_token_id=10)


def test_the_official_presets_are_there():
    names = {path.stem for path in CONFIGS}
    assert names == {"qwen3-4b", "qwen3-8b", "qwen3-14b", "gemma-4-12b", "smollm2-135m"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_presets_train_a_tiny_model_of_their_architecture(path, folder, tmp_path):
    from transformers import AutoModelForCausalLM

    preset = yaml.safe_load(path.read_text())
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(small_target(preset))
    target.save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    reduced = {"draft_vocab_size": 20} if "draft_vocab_size" in preset["drafter"] else {}
    small = {"mask_token_id": 4, "markov_rank": 4} | reduced
    changes = {"target": str(tmp_path / "target"), "answers": str(folder / "answers.jsonl"), "eval_texts": 2,
               "target_dtype": "float32", "max_length": 100, "drafter": small}  # fmt: skip
    fast = {key: TRAINING[key] for key in ("use_cpu", "report_to", "disable_tqdm", "per_device_train_batch_size")}
    fast |= {"bf16": False, "output_dir": str(tmp_path / "run"), "gradient_accumulation_steps": 1, "eval_prompts": 1,
             "dataloader_num_workers": 0, "eval_max_new_tokens": 4, "max_steps": 2}  # fmt: skip
    plan = Recipe.load(path, **changes, training=fast)
    estimate = estimate_run(plan)
    assert estimate.target_parameters == target.num_parameters()
    drafter = DSparkDrafterModel.from_pretrained(run_recipe(plan))
    assert sum(parameter.numel() for parameter in drafter.parameters()) == estimate.drafter_parameters


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_presets_have_the_official_settings(path):
    preset = yaml.safe_load(path.read_text())
    arguments = DSparkTrainingArguments(**preset["training"] | {"use_cpu": True, "bf16": False})
    drafter = preset["drafter"]
    layers = {"qwen3-4b": [1, 9, 17, 25, 33], "qwen3-8b": [1, 9, 17, 25, 33], "qwen3-14b": [1, 10, 19, 28, 37],
              "gemma-4-12b": [5, 17, 29, 41, 46], "smollm2-135m": [1, 8, 14, 20, 27]}  # fmt: skip
    assert drafter["target_layer_ids"] == layers[path.stem] and drafter["block_size"] == 7
    if path.stem != "smollm2-135m":
        assert drafter["num_hidden_layers"] == 5 and drafter["markov_rank"] == 256 and drafter["num_anchors"] == 512
        batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        assert (batch, preset["max_length"], arguments.learning_rate) == (512, 4096, 6e-4)
        assert (arguments.num_train_epochs, arguments.max_grad_norm, arguments.weight_decay) == (10, 1.0, 0.0)


def test_dry_run(folder, tmp_path):
    path = write(tmp_path / "recipe.yaml", recipe(folder, tmp_path / "run"))
    result = CliRunner().invoke(app, ["train", str(path), "--dry-run"], catch_exceptions=False)
    assert result.exit_code == 0 and not (tmp_path / "run").exists()
    for word in ("drafter", "target", "M parameters", "memory", "at most", "s a step", "4 steps"):
        assert word in result.output


def test_estimates_grow_with_the_work(folder, tmp_path):
    base = estimate_run(recipe(folder, tmp_path))
    longer = estimate_run(recipe(folder, tmp_path, max_length=400))
    cached = estimate_run(recipe(folder, tmp_path, cache="somewhere"))
    assert longer.step_flops > base.step_flops > cached.step_flops
    assert longer.memory["kept states"] == 2 * base.memory["kept states"]
    assert base.memory["drafter and optimizer"] == 16 * base.drafter_parameters
