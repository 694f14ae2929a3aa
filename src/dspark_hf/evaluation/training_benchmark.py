"""Cost of training: the chunked objective against the plain one, online states against cached ones.

The plain objective is the formula itself on the logits of all slots at once, differentiated by autograd; both take a
teacher row once per text position. Every arm of the objective runs in a process of its own, since peak memory is a
property of a process.
"""

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ..objective_dspark import Objective, chunked_slot_losses
from ..training.cache import CachedStates, build_cache
from ..training.features import OnlineStates
from ..training.manifest import CacheSource
from ..training.recipe import Recipe
from ..training.replay import AnchoredTexts, ReplaySampler, collate_anchored
from ..training.trainer import DSparkTrainingArguments
from .benchmark import machine

STATUS = Path("/proc/self/status")


def objective_benchmark(
    anchors: int = 512,
    block_size: int = 7,
    vocabulary: int = 49152,
    hidden_size: int = 576,
    rank: int = 64,
    chunk_size: int = Objective.chunk_size,
    repeats: int = 3,
) -> dict[str, Any]:
    """Seconds of the objective's forward and backward, the best of `repeats`, and the peak memory that it adds, bytes,
    chunked and plain, on one text with `anchors` blocks of `block_size` slots; and the ratios plain / chunked."""
    arms = {}
    for name, size in (("plain", None), ("chunked", chunk_size)):
        arguments = (anchors, block_size, vocabulary, hidden_size, rank, size, repeats, torch.get_num_threads())
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            arms[name] = pool.submit(_objective_arm, *arguments).result()
    plain, chunked = arms["plain"], arms["chunked"]
    return {
        "settings": {"anchors": anchors, "block_size": block_size, "vocabulary": vocabulary, "chunk_size": chunk_size},
        "arms": arms,
        "memory_ratio": plain["peak_bytes"] / chunked["peak_bytes"],
        "time_ratio": plain["seconds"] / chunked["seconds"],
    }


def plain_slot_losses(draft_logits: torch.Tensor, labels: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """CE and L1 of each slot as the paper writes them, (2, N) float32, from logits (N, V) and labels (N,)."""
    log_draft = draft_logits.float().log_softmax(dim=-1)
    ce = F.nll_loss(log_draft, labels, reduction="none")
    return torch.stack([ce, (log_draft.exp() - teacher_logits.float().softmax(dim=-1)).abs().sum(dim=-1)])


def _objective_arm(anchors, block_size, vocabulary, hidden_size, rank, chunk_size, repeats, threads) -> dict[str, Any]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    head = nn.Linear(hidden_size, vocabulary, bias=False).requires_grad_(False)
    project = nn.Linear(rank, vocabulary, bias=False)
    slots = anchors * block_size
    hidden = torch.randn(slots, hidden_size, requires_grad=True)
    latents = torch.randn(slots, rank, requires_grad=True)
    states = torch.randn(anchors + block_size, hidden_size)
    rows = (torch.arange(anchors)[:, None] + torch.arange(block_size)).flatten()  # one text, a block at every token
    labels = torch.randint(vocabulary, (slots,))

    def draft_head(hidden, latents):
        return head(hidden) + project(latents)

    def losses() -> torch.Tensor:
        if chunk_size is None:
            return plain_slot_losses(draft_head(hidden, latents), labels, head(states)[rows])
        return chunked_slot_losses(draft_head, head, hidden, latents, labels, states, rows, None, chunk_size)

    project(latents[:8]).sum().backward()  # gradients exist before memory is counted
    base, seconds = _start_of_peak(), []
    for _ in range(repeats):
        start = time.perf_counter()
        ce, l1 = losses()
        (0.1 * ce + 0.9 * l1).mean().backward()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "all_seconds": seconds, "peak_bytes": _peak_bytes() - base}


def _start_of_peak() -> int:
    """Bytes in use, from which the peak is counted."""
    if STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far, that of the imports
        return _status("VmRSS")
    return _peak_bytes()


def _peak_bytes() -> int:
    """Largest number of bytes in use so far. Not `ru_maxrss` on Linux, which a child inherits from its parent."""
    return _status("VmHWM") if STATUS.exists() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def throughput_benchmark(
    recipe: Recipe,
    reuses: Iterable[int] = (1, 4),
    num_texts: int = 24,
    batch_size: int = 4,
    announce: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Anchors per second of whole training steps (AdamW), with states computed online for R draws each and read from a
    cache, over one epoch of the first `num_texts` texts of the recipe; one process, no loader workers."""
    target, tokenizer = recipe.load_target()
    texts = recipe.load_texts(target, tokenizer)[:num_texts]
    arguments = DSparkTrainingArguments(**recipe.training | {"report_to": "none"})
    arms = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        drafter = recipe.load_drafter(target, texts).attach_target(target)
        layer_ids = drafter.config.target_layer_ids
        online = OnlineStates(
            target, layer_ids, drafter.config.draft_vocab_size is not None, drafter.config.final_logit_softcapping
        )
        start = time.perf_counter()
        source = CacheSource.of(target, tokenizer, layer_ids, recipe.target)
        whole = OnlineStates(target, layer_ids, with_logsumexp=True, softcap=online.softcap)  # as a cache holds them
        build_cache(texts, whole.features, Path(folder) / "cache", source, announce=lambda text: None)
        built = time.perf_counter() - start
        cached = CachedStates(Path(folder) / "cache", texts)
        for name, states, reuse in [(f"online R={r}", online, r) for r in reuses] + [("cached", cached, 1)]:
            announce(name)
            items = AnchoredTexts(texts, states, drafter.config.num_anchors, arguments.seed, kept=num_texts)
            loader = DataLoader(
                items,
                batch_size=batch_size,
                sampler=ReplaySampler(num_texts, reuse, min(arguments.ring_size, num_texts), arguments.seed),
                collate_fn=collate_anchored,
            )
            arms[name] = _steps(drafter, loader)
    return {
        "machine": machine(),
        "settings": {"texts": num_texts, "batch_size": batch_size, "num_anchors": drafter.config.num_anchors},
        "cache_seconds": built,
        "arms": arms,
    }


def _steps(drafter, loader) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4)
    drafter.train()
    start, anchors = time.perf_counter(), 0
    for batch in loader:
        anchors += int(batch["anchor_mask"].sum())
        drafter(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    return {"anchors": anchors, "seconds": seconds, "anchors_per_second": anchors / seconds}
