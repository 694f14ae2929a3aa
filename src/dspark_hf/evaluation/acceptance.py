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
) -> SpeculationStats:
    """Decodes prompts (T,) one by one and returns what speculation did. The global random state is left as it was.

    Args:
        temperature: 0 for greedy decoding.
        seed: of each prompt's draws.
    """
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}  # the target's whole distribution
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices), record_speculation() as stats:
        for prompt in progress(prompts):
            torch.manual_seed(seed)
            ids = prompt[None].to(target.device)
            mask = torch.ones_like(ids)
            target.generate(ids, attention_mask=mask, assistant_model=drafter, max_new_tokens=max_new_tokens, **options)
    return stats


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
