"""Acceptance of a drafter in real speculative decoding, and how far its confidence can be trusted."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from ..calibration import brier_score, confidence_pairs, expected_calibration_error, roc_auc
from ..telemetry_dspark import SpeculationStats, record_speculation


@torch.no_grad()
def decode_prompts(
    target: PreTrainedModel,
    drafter: Any,
    prompts: Iterable[torch.Tensor],
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[Iterable], Iterable] = iter,
    batch_size: int = 1,
    expected: bool = False,
) -> SpeculationStats:
    """Decodes prompts (T,) and returns what speculation did. The global random state is left as it was.

    Args:
        temperature: 0 for greedy decoding.
        seed: of each batch's draws.
        batch_size: prompts decoded together, which changes no prompt's acceptance.
        expected: also compute the expected acceptance of every token.
    """
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}  # the target's whole distribution
    devices = [target.device] if target.device.type == "cuda" else []
    prompts = list(prompts)
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    with torch.random.fork_rng(devices), record_speculation(expected) as stats:
        for batch in progress(batches):
            torch.manual_seed(seed)
            inputs = {key: value.to(target.device) for key, value in left_padded(batch).items()}
            target.generate(**inputs, assistant_model=drafter, max_new_tokens=max_new_tokens, **options)
    return stats


def left_padded(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` (B, T) of texts (T_i,)."""
    width = max(len(text) for text in texts)
    pad = torch.nn.functional.pad
    ids = torch.stack([pad(text, (width - len(text), 0)) for text in texts])
    mask = torch.stack([pad(torch.ones_like(text), (width - len(text), 0)) for text in texts])
    return {"input_ids": ids, "attention_mask": mask}


def acceptance_metrics(stats: SpeculationStats) -> dict[str, float]:
    """Flat figures of a run: τ, acceptance by position (prefix and conditional), ECE, Brier and AUC of the confidence
    where there is one. Positions count from 1."""
    metrics = {"acceptance_length": stats.acceptance_length, "rounds": float(len(stats.acceptance_lengths))}
    for k, (prefix, conditional) in enumerate(
        zip(stats.acceptance_by_position, stats.conditional_acceptance, strict=True), 1
    ):
        metrics[f"acceptance_at_{k}"] = prefix
        metrics[f"conditional_acceptance_at_{k}"] = conditional
    probabilities, outcomes = confidence_pairs(
        stats.confidence_logits, stats.accepted_lengths, stats.acceptance_lengths
    )
    if len(probabilities):
        metrics["confidence_ece"] = expected_calibration_error(probabilities, outcomes)
        metrics["confidence_brier"] = brier_score(probabilities, outcomes)
        metrics["confidence_auc"] = roc_auc(probabilities, outcomes)
    return metrics
