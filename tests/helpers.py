"""What several test files need: the recorded models and numbers in `fixtures/`, small random models."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkConfig, DSparkDrafterModel

FIXTURES = Path(__file__).parent / "fixtures"
QWEN3 = ("qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "qwen3_vanilla_plainconf", "qwen3_dflash")
DRAFTERS = (*QWEN3, "gemma4_vanilla")
VOCABULARY = torch.tensor([0, *range(7, 90, 2), 10, 32, 100]).sort().values  # 46 of 128 tokens


def load_target(name: str = "qwen3", **kwargs):
    """A new copy of the target `name`, frozen and in eval mode."""
    return AutoModelForCausalLM.from_pretrained(FIXTURES / f"target_{name}", **kwargs).eval().requires_grad_(False)


def load_drafter(name: str = "qwen3_vanilla", **kwargs) -> DSparkDrafterModel:
    """A new copy of the drafter `name`, in eval mode."""
    return DSparkDrafterModel.from_pretrained(FIXTURES / f"drafter_{name}", **kwargs).eval()


def expected(name: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """What the official implementation computed for the drafter `name`: its tensors under `prefix`."""
    tensors = load_file(FIXTURES / "expected" / f"{name}.safetensors")
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def training_batch(name: str = "qwen3_vanilla") -> dict[str, torch.Tensor]:
    """The inputs of its recorded training pass, as arguments of `forward()`: 2 texts of 64 tokens, 6 anchors."""
    recorded = expected(name, "train.")
    keys = ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states", "anchor_positions")
    return {key: recorded[key] for key in keys} | {"anchor_mask": recorded["block_keep_mask"]}


def expected_greedy(name: str):
    """Its recorded greedy traces."""
    return json.loads((FIXTURES / "expected" / f"{name}_greedy.json").read_text())


def restricted(full: DSparkDrafterModel, own_head: bool) -> DSparkDrafterModel:
    """`full` with a draft vocabulary of `VOCABULARY`, with its own rows of the head or none."""
    sizes = {"draft_vocab_size": len(VOCABULARY), "has_lm_head": own_head}
    model = DSparkDrafterModel(DSparkConfig.from_dict(full.config.to_dict() | sizes))
    state = full.state_dict()
    for key in ("lm_head.weight", "markov_head.markov_w2.weight"):
        state[key] = state[key][VOCABULARY]
    unused = model.load_state_dict(state, strict=False)
    assert set(unused.unexpected_keys) == (set() if own_head else {"lm_head.weight"})
    assert set(unused.missing_keys) == {"d2t", "t2d"}
    model.set_draft_vocabulary(VOCABULARY)
    return model.eval()


def gradients(model, **batch) -> dict[str, torch.Tensor]:
    """Of the training loss, by parameter name; those without one are left out."""
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
