"""Loads a target, its tokenizer and a drafter for measuring, and turns prompts into model inputs."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..baselines import Eagle3Config, Eagle3DrafterModel
from ..demo_target import target_path
from ..drafter_dspark import DrafterModel
from ..modeling_dspark import DSparkDrafterModel
from ..packing import packed_where_possible, preferred_cpu_dtype

PROMPTS = Path(__file__).parent / "prompts"
"""The first 100 prompts of GSM8K's test split (MIT) and of a chat test set (CC0)."""


def load_target(name: str, pack: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target on the GPU in bfloat16 where there is one, else on the CPU in the dtype it multiplies fastest, with
    packed linear layers (`pack`) if this torch can pack them. `demo` is the model of `dspark demo`."""
    name = target_path(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else preferred_cpu_dtype()
    target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    return packed_where_possible(target, pack), AutoTokenizer.from_pretrained(name)


def load_pair(target_name: str, drafter_name: str, pack: bool = True):
    """Target, tokenizer and drafter, the latter as the target is loaded.

    Raises:
        ValueError: for a drafter that is not there, or does not fit the target.
    """
    target, tokenizer = load_target(target_name, pack)
    drafter = load_drafter(drafter_name, target.config, dtype=target.dtype).to(target.device).eval()
    return target, tokenizer, packed_where_possible(drafter, pack)


def load_drafter(name: str, target_config: PreTrainedConfig, **options: Any) -> DrafterModel:
    """DSpark, DFlash or EAGLE-3, as the checkpoint says.

    Args:
        target_config: of the target, for what an EAGLE-3 checkpoint may lack.
        options: of `from_pretrained`.
    """
    model_class = drafter_class(name)
    if model_class is Eagle3DrafterModel:
        keys, _ = PreTrainedConfig.get_config_dict(name)
        if "num_target_layers" not in keys:
            options["num_target_layers"] = target_config.get_text_config().num_hidden_layers
    return model_class.from_pretrained(name, **options)


def drafter_class(name: str) -> type[DrafterModel]:
    """The class that a checkpoint is of; a DFlash drafter is a `DSparkDrafterModel` without heads."""
    keys, _ = PreTrainedConfig.get_config_dict(name)
    eagle3 = keys.get("model_type") == Eagle3Config.model_type or any(
        "eagle3" in architecture.lower() for architecture in keys["architectures"]
    )
    return Eagle3DrafterModel if eagle3 else DSparkDrafterModel


def load_prompts(name: str, limit: int | None = None) -> list[str]:
    """First turns of a JSONL file of `{"turns": [...]}`, or of one that comes with the package, by name."""
    path = PROMPTS / f"{name}.jsonl" if (PROMPTS / f"{name}.jsonl").exists() else Path(name)
    if not path.exists():
        known = sorted(p.stem for p in PROMPTS.glob("*.jsonl"))
        raise ValueError(f"no prompt file {name!r}; expected a JSONL file or one of {known}")
    return [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines()[:limit]]


def chat_inputs(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device | str) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` (1, T) of one user turn in the model's chat template."""
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return {key: inputs[key].to(device) for key in ("input_ids", "attention_mask")}
