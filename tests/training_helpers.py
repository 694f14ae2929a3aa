"""A small drafter to train, texts to train it on, a tokenizer with a chat template."""

import torch
from generation_helpers import character_tokenizer
from helpers import expected_greedy

from dspark_hf import DSparkConfig, DSparkDrafterModel
from dspark_hf.target_dspark import target_states

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


def chat_tokenizer():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %} A{% endif %}"
    )
    return tokenizer


PROMPTS = [{"turns": [text]} for text in ("Tom has 3 boxes.", "How many?", "A train goes 60 miles in", "Ann", "5 + 7")]
