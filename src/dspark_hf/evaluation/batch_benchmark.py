"""Throughput of batches: plain `generate()` against drafting under every policy, side by side in one process, and what
scheduling itself costs.

All arms decode greedily. A row counts with the tokens it gets, padding left out. Compared are texts too: every arm
against the first, row by row.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..profile_dspark import SPSProfile
from ..profiling_dspark import is_loaded, machine
from ..scheduling_dspark import PrefixScheduler
from ..telemetry_dspark import record_speculation
from .acceptance import left_padded
from .benchmark import Arm
from .comparison import first_difference
from .loading import chat_inputs


def run_batch_benchmark(
    arms: Sequence[Arm],
    tokenizer: Any,
    prompts: Sequence[str],
    batch_sizes: Iterable[int] = (1, 2, 4, 8, 16),
    max_new_tokens: int = 64,
    repeats: int = 1,
    progress: Callable[[list], Any] = iter,
) -> dict[str, Any]:
    """Decodes the prompts in batches of every size, arms in an order that rotates from batch to batch.

    Args:
        prompts: each size takes as many as fill its batches, the first 8 at least.

    Returns:
        `machine`, `settings`, `calls` (per batch size, batch and arm: tokens, seconds, rounds), and `summary` (per arm
        and batch size: tokens/s as total tokens over total time, its ratio to the first arm, acceptance length,
        verified tokens per request and round, texts that differ).
    """
    sizes = list(batch_sizes)
    work = []
    for size in sizes:
        count = max(size, 8 // size * size)
        if count > len(prompts):
            raise ValueError(f"{len(prompts)} prompts were given, expected {count} for a batch of {size}")
        work += [(size, list(prompts[i : i + size])) for i in range(0, count, size)] * repeats
    for arm in arms:
        _generate(arm, _inputs(tokenizer, prompts[:1], arm.target.device), 8)
    busy = is_loaded()
    calls = []
    for index, (size, batch) in enumerate(progress(work)):
        shift = index % len(arms)
        inputs = _inputs(tokenizer, batch, arms[0].target.device)
        results, texts = {}, {}
        for arm in [*arms[shift:], *arms[:shift]]:
            texts[arm.name], results[arm.name] = _generate(arm, inputs, max_new_tokens)
        for arm in arms[1:]:
            results[arm.name]["differences"] = _differences(
                arms[0].target, inputs, texts[arms[0].name], texts[arm.name]
            )
        calls.append({"batch_size": size, "arms": results})
    return {
        "machine": machine() | {"loaded": busy},
        "settings": {"max_new_tokens": max_new_tokens, "batch_sizes": sizes, "arms": [arm.name for arm in arms]},
        "summary": {arm.name: {size: _summary(calls, arm.name, arms[0].name, size) for size in sizes} for arm in arms},
        "calls": calls,
    }


def scheduling_cost(rows: int = 256, block_size: int = 7, repeats: int = 200) -> float:
    """Median seconds of Algorithm 1 for so many requests, on random confidences."""
    curve = SPSProfile([1, rows * (block_size + 1)], [1.0, 0.2])
    policy, generator = PrefixScheduler(curve), torch.Generator().manual_seed(0)
    seconds = []
    for _ in range(repeats):
        confidence = torch.rand(rows, block_size, generator=generator).sqrt()
        start = time.perf_counter()
        policy.verify_lengths(confidence)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _inputs(tokenizer: Any, prompts: Sequence[str], device: torch.device) -> dict[str, torch.Tensor]:
    texts = [chat_inputs(tokenizer, prompt, "cpu")["input_ids"][0] for prompt in prompts]
    return {key: value.to(device) for key, value in left_padded(texts).items()}


def _generate(arm: Arm, inputs: dict[str, torch.Tensor], max_new_tokens: int) -> tuple[list[torch.Tensor], dict]:
    if arm.policy is not None:
        arm.options["assistant_model"].verify_policy = arm.policy
    with record_speculation() as stats:
        start = time.perf_counter()
        output = arm.target.generate(**inputs, **arm.options, max_new_tokens=max_new_tokens, do_sample=False)
        seconds = time.perf_counter() - start
    texts = [_until_end(row, arm.target) for row in output[:, inputs["input_ids"].shape[1] :]]
    return texts, {
        "tokens": sum(map(len, texts)),
        "seconds": seconds,
        "acceptance_lengths": stats.acceptance_lengths,
        "proposal_lengths": stats.proposal_lengths,
    }


def _until_end(text: torch.Tensor, target: Any) -> torch.Tensor:
    """The text up to and including its end token."""
    ends = target.generation_config.eos_token_id
    found = torch.isin(text, torch.tensor(ends if ends is not None else [], device=text.device)).nonzero()
    return text[: int(found[0]) + 1] if len(found) else text


def _differences(target: Any, inputs: dict, texts: list[torch.Tensor], others: list[torch.Tensor]) -> list[dict]:
    found = []
    for row, mask, text, other in zip(inputs["input_ids"], inputs["attention_mask"], texts, others, strict=True):
        difference = first_difference(target, row[mask.bool()], text, other)
        if difference is not None:
            found.append(asdict(difference))
    return found


def _summary(calls: list[dict], name: str, baseline: str, size: int) -> dict[str, Any]:
    """One arm at one batch size."""
    own = [call["arms"][name] for call in calls if call["batch_size"] == size]
    plain = [call["arms"][baseline] for call in calls if call["batch_size"] == size]
    speed, reference = (sum(c["tokens"] for c in arm) / sum(c["seconds"] for c in arm) for arm in (own, plain))
    yields = [n for call in own for n in call["acceptance_lengths"]]
    verified = [n for call in own for n in call["proposal_lengths"]]
    differences = [difference for call in own for difference in call.get("differences", [])]
    return {
        "tokens_per_second": speed,
        "ratio": speed / reference,
        "acceptance_length": statistics.mean(yields) if yields else None,
        "verified_tokens": statistics.mean(verified) if verified else None,
        "texts_that_differ": len(differences),
        "of_these_near_ties": sum(difference["near_tie"] for difference in differences),
    }
