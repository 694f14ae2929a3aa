"""`dspark compare`: methods trained alike and compared, killed and resumed, its table."""

import json

import pytest
import yaml
from helpers import load_target
from test_recipe import TRAINING
from training_helpers import DRAFTER, PROMPTS, chat_tokenizer, texts
from typer.testing import CliRunner

from dspark_hf.cli import app
from dspark_hf.evaluation.datasets import EvaluationPrompt
from dspark_hf.training import Recipe, experiment

pytest.importorskip("evaluate")
ASKED = [EvaluationPrompt(name, domain, PROMPTS[i]["turns"][0])
         for i, (name, domain) in enumerate((("sums", "math"), ("talk", "chat")))]  # fmt: skip


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    load_target().save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    rows = [{"prompt_ids": text["input_ids"][~text["loss_mask"]].tolist(),
             "response_ids": text["input_ids"][text["loss_mask"]].tolist()} for text in texts()]  # fmt: skip
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {key: value for key, value in TRAINING.items() if key != "save_steps"} | {"output_dir": "unused"}
    return Recipe(str(tmp_path / "target"), training, DRAFTER, answers=str(tmp_path / "answers.jsonl"), max_length=200)


def test_command(recipe, tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(vars(recipe)))
    (tmp_path / "gsm8k_test.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:2]))
    output = tmp_path / "out"
    arguments = ["compare", str(tmp_path / "recipe.yaml"), "--output", str(output), "--max-steps", "2", "--temperature",
                 "0", "--data", str(tmp_path / "gsm8k_test.jsonl"), "--max-new-tokens", "8"]  # fmt: skip
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and "% over dflash" in result.output and "% over eagle3" in result.output
    comparison = json.loads((output / "comparison.json").read_text())
    assert [(run["method"], run["layers"], run["steps"]) for run in comparison["runs"]] == [
        ("dspark", 1, 2), ("dflash", 1, 2), ("eagle3", 1, 2)
    ]  # fmt: skip
    assert all(run["train_seconds"] > 0 and run["texts"] == 4 for run in comparison["runs"])
    assert (output / "figures" / "conditional_acceptance_T0.png").stat().st_size > 10_000
    assert len(comparison["runs"][0]["results"][0]["data"]["gsm8k_test"]["conditional_acceptance"]) == 4


def test_a_killed_comparison_goes_on(recipe, tmp_path, monkeypatch):
    """What was trained or decoded is not made again, and the end is that of an uninterrupted comparison."""

    def run(folder):
        return experiment.run_experiment(recipe, ["dspark", "eagle3"], [0, 1], ASKED, tmp_path / folder, (0.0,), 8)

    whole = run("whole")
    trained, train = [], experiment.run_recipe

    def killed(plan, resume):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((plan.method, plan.training["seed"]))
        return train(plan, resume)

    monkeypatch.setattr(experiment, "run_recipe", killed)
    with pytest.raises(KeyboardInterrupt):
        run("killed")
    monkeypatch.setattr(experiment, "run_recipe", lambda plan, resume: trained.append(plan) or train(plan, resume))
    resumed = run("killed")
    assert trained[:3] == [("dspark", 0), ("eagle3", 0), ("dspark", 1)] and len(trained) == 4
    for one, other in zip(whole["runs"], resumed["runs"], strict=True):
        assert one["results"] == other["results"] and one["parameters"] == other["parameters"]
    assert whole["runs"][0]["results"] != whole["runs"][2]["results"] or whole["runs"][0]["seed"] == 0


def test_table_of_known_figures():
    def run(method, seed, tau):
        figures = {"acceptance_length": tau}
        return {"method": method, "seed": seed, "layers": 2, "parameters": 9_000_000,
                "results": [{"temperature": 0.0, "data": {"sums": figures}, "macro": figures}]}  # fmt: skip

    table = experiment.comparison_table({"runs": [run("dspark", 0, 2.5), run("eagle3", 0, 2.0), run("dspark", 1, 2.7)]})
    assert "| dspark | 1 | 2 | 9.0 M | 2.70 | 2.70 |" in table.splitlines()
    assert "dspark accepts +30.0 % over eagle3 (macro averages, means over seeds)." in table


@pytest.mark.parametrize(
    ("methods", "seeds", "message"),
    [
        (["dspark", "dspark"], [0], r"methods are \['dspark', 'dspark'\], expected some, each once"),
        (["dspark"], [], r"seeds are \[\], expected"),
        (["dspark", "medusa"], [0], "method is 'medusa', expected one of"),
    ],
)
def test_refused_comparisons(recipe, tmp_path, methods, seeds, message):
    with pytest.raises(ValueError, match=message):
        experiment.run_experiment(recipe, methods, seeds, ASKED, tmp_path / "out")
    assert not (tmp_path / "out").exists()
