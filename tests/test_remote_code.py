"""A saved drafter brings its code: it loads and decodes where this package is not installed."""

import json
import os
import subprocess
import sys

import pytest
from helpers import FIXTURES, expected_greedy, load_drafter

# Runs in a clean process, where the package cannot be imported, however it is installed.
SCRIPT = """
import importlib, json, sys

sys.modules["dspark_hf"] = None
try:
    import dspark_hf.modeling_dspark
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("dspark_hf can be imported: the test would show nothing")

import torch
from transformers import AutoModel, AutoModelForCausalLM

torch.set_num_threads(1)
target_path, prompt, *drafter_paths = sys.argv[1:]
target = AutoModelForCausalLM.from_pretrained(target_path)
prompt = torch.tensor([json.loads(prompt)])
options = {"max_new_tokens": 48, "do_sample": False}
results = {"plain": target.generate(prompt, **options)[0].tolist(), "drafted": []}
for path in drafter_paths:
    drafter = AutoModel.from_pretrained(path, trust_remote_code=True).eval()
    package = type(drafter).__module__.rpartition(".")[0]
    telemetry = importlib.import_module(f"{package}.telemetry_dspark")
    with telemetry.record_speculation() as stats:
        text = target.generate(prompt, assistant_model=drafter, **options)[0].tolist()
    results["drafted"].append({
        "text": text,
        "acceptance_length": stats.acceptance_length,
        "rounds": len(stats.acceptance_lengths),
        "class": f"{type(drafter).__module__}.{type(drafter).__name__}",
        "config": type(drafter.config).__name__,
    })
assert not any(name.startswith("dspark_hf.") for name in sys.modules)
print("RESULTS", json.dumps(results))
"""
CODE = {"AutoConfig": "configuration_dspark.DSparkConfig", "AutoModel": "modeling_dspark.DSparkDrafterModel"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Three folders, used one after another in a process without the package: saved by this package; an official
    checkpoint with our code beside it and `auto_map`; saved without embedding and head."""

    root = tmp_path_factory.mktemp("remote")
    load_drafter("qwen3_rnn").save_pretrained(root / "ours")

    official = root / "official"
    official.mkdir()
    source = FIXTURES / "drafter_qwen3_vanilla"
    (official / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    config = json.loads((source / "config.json").read_text()) | {"auto_map": CODE}
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["Qwen3DSparkModel"])
    (official / "config.json").write_text(json.dumps(config))
    for file in (root / "ours").glob("*.py"):
        (official / file.name).write_bytes(file.read_bytes())

    lent = load_drafter("qwen3_gated")
    lent.embed_tokens = lent.lm_head = None
    lent.config.has_embed_tokens = lent.config.has_lm_head = False
    lent.save_pretrained(root / "lent")

    (root / "script.py").write_text(SCRIPT)
    prompt = json.dumps(expected_greedy("qwen3_vanilla")["threshold_0.0"][0]["prompt_ids"])
    paths = [str(root / name) for name in ("ours", "official", "lent")]
    environment = os.environ | {"HF_HOME": str(root / "hub"), "HF_MODULES_CACHE": str(root / "modules"),
                                "HF_HUB_OFFLINE": "1"}  # fmt: skip
    command = [sys.executable, "script.py", str(FIXTURES / "target_qwen3"), prompt, *paths]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.partition("RESULTS ")[2])


@pytest.mark.parametrize("place", [0, 1, 2], ids=["ours", "official", "lent"])
def test_the_text_is_the_targets_and_comes_faster(results, place):
    drafted = results["drafted"][place]
    assert drafted["text"] == results["plain"]
    assert drafted["class"].startswith("transformers_modules.") and drafted["class"].endswith(".DSparkDrafterModel")
    assert drafted["config"] == "DSparkConfig"
    assert drafted["rounds"] < 48 / 1.3
    assert drafted["acceptance_length"] > 1.3


def test_the_saved_config_maps_to_its_code(tmp_path, drafter):
    drafter().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == CODE
    code = {file.name for file in tmp_path.glob("*.py")}
    assert {"configuration_dspark.py", "modeling_dspark.py", "generation_dspark.py", "hook_dspark.py"} <= code
    assert all(name.endswith("_dspark.py") for name in code)
