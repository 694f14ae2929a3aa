"""What the tests of EAGLE-3 share: the recorded drafter and its recorded inputs."""

from functools import cache

import torch
from helpers import FIXTURES, expected

from dspark_hf.baselines import Eagle3DrafterModel

FOLDER = FIXTURES / "drafter_qwen3_eagle3"
LAYERS = {"num_target_layers": 6}  # which SpecForge's files do not say


def load_eagle() -> Eagle3DrafterModel:
    return Eagle3DrafterModel.from_pretrained(FOLDER).eval()


@cache
def shared_eagle():
    return load_eagle()


def training_batch() -> dict[str, torch.Tensor]:
    """The inputs of the recorded training pass: 2 texts of 64 tokens, the second padded."""
    recorded = expected("qwen3_eagle3", "train.")
    return {key: value for key, value in recorded.items() if not key.startswith("grad.") and key != "loss"}


def every_step(eagle: Eagle3DrafterModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """norm(o) of all steps at all positions, (B, T, γ, H)."""
    everywhere = torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
    return eagle._unrolled(batch["input_ids"], batch["target_hidden_states"], everywhere, None)


def text_and_states(count: int = 20) -> dict[str, torch.Tensor]:
    """A recorded text up to an anchor and the states before it, as arguments of `draft()`."""
    batch = training_batch()
    ids = batch["input_ids"][:1, : count + 1]
    context = batch["target_hidden_states"][:1, :count]
    return {"context_hidden_states": context, "anchor_ids": ids[:, -1], "input_ids": ids}


def assert_same_draft(actual, wanted):
    assert torch.equal(actual.token_ids, wanted.token_ids)
    for key in ("logits", "hidden_states", "base_logits"):
        torch.testing.assert_close(actual[key], wanted[key], rtol=0, atol=1e-5)
