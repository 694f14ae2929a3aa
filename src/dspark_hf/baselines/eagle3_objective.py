"""What EAGLE-3's training supervises: the steps of a text that count, and the entropy that soft cross-entropy adds.

Shapes: B rows, T tokens of text, A anchors, γ steps, H hidden size.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F


def unrolled_slots(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, real: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which steps count and their labels x_{t+s+2}, −100 beyond the text, both (B, T, γ), from ids, response mask and
    mask of real tokens (B, T)."""
    steps = range(block_size)
    # m is the reference's, at t + s; the target's distribution at t + s + 1 is that of x_{t+s+2}.
    counts = [shifted(loss_mask.bool(), s) & shifted(real.bool(), s + 1) for s in steps]
    labels = [shifted(input_ids, s + 2).masked_fill(~shifted(real.bool(), s + 2), -100) for s in steps]
    return torch.stack(counts, dim=-1), torch.stack(labels, dim=-1)


def with_predecessor(
    positions: torch.Tensor, mask: torch.Tensor | None, document_ids: torch.Tensor | None
) -> torch.Tensor:
    """Which of the anchors (B, A) have a token before them in their document: a draft starts from its state."""
    mask = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
    mask = mask & (positions > 0)
    if document_ids is not None:
        before = document_ids.gather(1, (positions - 1).clamp(min=0))
        mask = mask & (before == document_ids.gather(1, positions))
    return mask


def shifted(values: torch.Tensor, count: int) -> torch.Tensor:
    """Entry t + `count` at t, 0 beyond the end, (B, T)."""
    return F.pad(values[:, count:], (0, min(count, values.shape[1])))


@torch.no_grad()
def entropies(
    teacher_head: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    rows: torch.Tensor,
    logsumexp: torch.Tensor | None,
    chunk_size: int,
) -> torch.Tensor:
    """−Σ_v p_t log p_t of the target at the given rows of its last states (n, H), (n,) float32, 0 elsewhere; the logits
    of `chunk_size` rows exist at a time."""
    result = torch.zeros(len(states), dtype=torch.float32, device=states.device)
    for part in rows.unique().split(chunk_size):
        logits = teacher_head(states[part]).float()
        log_chances = logits - (logits.logsumexp(dim=-1) if logsumexp is None else logsumexp[part])[:, None]
        result[part] = -(log_chances.exp() * log_chances).sum(dim=-1)
    return result
