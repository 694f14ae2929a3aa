"""The training objective of DSpark (paper, section 3.3): which slots are supervised, and the three-term loss.

For an anchor at position p and slots k = 0..γ−1 the label is x_{p+k+1} and the teacher the target's distribution at
p + k. A slot counts while every label up to it lies inside the text and in the response, m_k, with weight
W_k = m_k exp(−k/δ), δ = 4. With p_d the draft's and p_t the teacher's distribution,

    CE = −log p_d(x),   L1 = Σ_v |p_d(v) − p_t(v)|,   BCE of the confidence against 1 − ½ L1, the chance of acceptance

and L = 0.1 CE + 0.9 L1 + 1.0 BCE, each term ΣWℓ / ΣW. Shapes: B texts of T tokens, A anchors, γ slots, N supervised
slots in all, V vocabulary, D draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Objective:
    """Weights of the loss terms, and how they are computed.

    Args:
        decay: δ of the slot weights, in slots.
        chunk_size: how many slots' logits exist at a time.
        detach_confidence: train the confidence head alone by its term, and not the backbone.
    """

    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    decay: float = 4.0
    chunk_size: int = 256
    detach_confidence: bool = False

    def __post_init__(self):
        for name in ("ce_weight", "l1_weight", "confidence_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if self.decay <= 0 or self.chunk_size < 1:
            raise ValueError(f"decay is {self.decay}, chunk_size {self.chunk_size}; expected both above 0")

    @property
    def needs_teacher(self) -> bool:
        return self.l1_weight > 0 or self.confidence_weight > 0


def sample_anchors(
    loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws anchors uniformly without replacement among positions p with loss_mask[p] and loss_mask[p+1].

    Args:
        loss_mask: (B, T), true on response tokens.

    Returns:
        Sorted positions (B, A) with 0 for padding, and which of them are real (B, A), A ≤ `num_anchors` the largest
        number that any row has.
    """
    response = loss_mask.bool()
    valid = F.pad(response[:, :-1] & response[:, 1:], (0, 1))
    count = valid.sum(dim=1).clamp(max=num_anchors)
    width = max(int(count.max()), 1)
    scores = torch.rand(valid.shape, generator=generator, device=valid.device).masked_fill(~valid, 2.0)
    chosen = scores.argsort(dim=1)[:, :width]
    mask = torch.arange(width, device=valid.device) < count[:, None]
    positions = chosen.masked_fill(~mask, valid.shape[1]).sort(dim=1).values
    return positions.masked_fill(~mask, 0), mask


def block_labels(
    input_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    positions: torch.Tensor,
    anchor_mask: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels x_{p+k+1} and the mask m_k of every slot, both (B, A, γ). Labels of padding anchors are x_0."""
    index = positions[..., None] + torch.arange(1, block_size + 1, device=input_ids.device)
    inside = index < input_ids.shape[1]
    index = index.clamp(max=input_ids.shape[1] - 1) * anchor_mask[..., None]
    labels = input_ids[:, None].expand(-1, index.shape[1], -1).gather(2, index)
    response = loss_mask.bool()[:, None].expand(-1, index.shape[1], -1).gather(2, index)
    counts = inside & response & anchor_mask[..., None]
    return labels, counts.long().cumprod(dim=-1).bool()


def block_attention_mask(
    positions: torch.Tensor, anchor_mask: torch.Tensor, block_size: int, length: int
) -> torch.Tensor:
    """Who sees whom in training: block slots see the text before their anchor and their own block.

    Args:
        positions, anchor_mask: (B, A).

    Returns:
        Bool (B, 1, A·γ, T + A·γ), true where attended. Padding anchors see their own block only: a row that attends to
        nothing is NaN in some attention kernels.
    """
    anchors = positions.repeat_interleave(block_size, dim=1)
    real = anchor_mask.repeat_interleave(block_size, dim=1)
    block = torch.arange(positions.shape[1], device=positions.device).repeat_interleave(block_size)
    context = (torch.arange(length, device=positions.device) < anchors[..., None]) & real[..., None]
    own = (block[:, None] == block).expand(positions.shape[0], -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


def slot_weights(slot_mask: torch.Tensor, decay: float) -> torch.Tensor:
    """W_k = m_k exp(−k/δ), (B, A, γ) float32."""
    slots = torch.arange(slot_mask.shape[-1], device=slot_mask.device)
    return slot_mask.float() * torch.exp(-slots / decay)


def slot_losses(
    draft_logits: torch.Tensor,
    labels: torch.Tensor,
    teacher_logits: torch.Tensor | None = None,
    teacher_logsumexp: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CE and L1 of each slot, (N,) each, float32.

    Args:
        draft_logits: (N, D).
        labels: (N,), indices into the draft vocabulary; −100 where the label lies outside it, CE 0 there.
        teacher_logits: (N, D), the target's logits of the draft vocabulary; None leaves L1 at 0.
        teacher_logsumexp: (N,), the target's normaliser where D is less than its vocabulary; the mass outside is out of
            the draft's reach and counts in full.
    """
    log_draft = draft_logits.float().log_softmax(dim=-1)
    ce = F.nll_loss(log_draft, labels, reduction="none", ignore_index=-100)
    if teacher_logits is None:
        return ce, torch.zeros_like(ce)
    teacher_logits = teacher_logits.float()
    if teacher_logsumexp is None:
        teacher, outside = teacher_logits.softmax(dim=-1), 0.0
    else:
        teacher = (teacher_logits - teacher_logsumexp[:, None]).exp()
        outside = (1.0 - teacher.sum(dim=-1)).clamp(min=0.0)
    return ce, (log_draft.exp() - teacher).abs().sum(dim=-1) + outside


def chunked_slot_losses(
    draft_head: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    teacher_head: Callable[[torch.Tensor], torch.Tensor] | None,
    hidden: torch.Tensor,
    latents: torch.Tensor | None,
    labels: torch.Tensor,
    teacher_states: torch.Tensor | None,
    teacher_rows: torch.Tensor,
    teacher_logsumexp: torch.Tensor | None,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`slot_losses` with the logits of `chunk_size` slots alive at a time, recomputed in the backward.

    Slots are taken in the order of the text position they are taught by, so that the slots of overlapping blocks share
    one teacher row.

    Args:
        draft_head: hidden (n, H), latent (n, r) or None → draft logits (n, D).
        teacher_head: last hidden states (n, H) → teacher logits (n, D).
        hidden, latents, labels: (N, H), (N, r) or None, (N,).
        teacher_states: (B·T, H) states after the target's final norm, or None.
        teacher_rows: (N,), each slot's row of `teacher_states`.
        teacher_logsumexp: (B·T,) or None.
    """

    def chunk_losses(hidden, latents, labels, rows):
        teacher, normaliser = None, None
        if teacher_states is not None:
            with torch.no_grad():
                unique, inverse = rows.unique(return_inverse=True)
                teacher = teacher_head(teacher_states[unique])[inverse]
                normaliser = None if teacher_logsumexp is None else teacher_logsumexp[rows]
        return slot_losses(draft_head(hidden, latents), labels, teacher, normaliser)

    order = teacher_rows.argsort(stable=True)
    ce, l1 = [], []
    for picked in order.split(chunk_size):
        latent = None if latents is None else latents[picked]
        losses = checkpoint(
            chunk_losses, hidden[picked], latent, labels[picked], teacher_rows[picked], use_reentrant=False
        )
        ce.append(losses[0])
        l1.append(losses[1])
    back = order.argsort()
    return torch.cat(ce)[back], torch.cat(l1)[back]


def three_term_loss(
    ce: torch.Tensor,
    l1: torch.Tensor | None,
    confidence_logits: torch.Tensor | None,
    slot_mask: torch.Tensor,
    objective: Objective,
) -> dict[str, torch.Tensor | None]:
    """L from the slots' losses, (B, A, γ) each; a term without its input is left out.

    Returns:
        `loss`; its terms `ce_loss`, `l1_loss`, `confidence_loss`, detached; and `acceptance`, 1 − ½ L1 (B, A, γ).
    """
    weights = slot_weights(slot_mask, objective.decay)
    terms, acceptance = {"ce": weighted_mean(ce, weights)}, None
    if l1 is not None:
        acceptance = (1.0 - 0.5 * l1.detach()).clamp(0.0, 1.0)
        terms["l1"] = weighted_mean(l1, weights)
        if confidence_logits is not None:
            bce = F.binary_cross_entropy_with_logits(confidence_logits, acceptance, reduction="none")
            terms["confidence"] = weighted_mean(bce, weights)
    loss = sum(getattr(objective, f"{name}_weight") * term for name, term in terms.items())
    parts = {f"{name}_loss": terms[name].detach() if name in terms else None for name in ("ce", "l1", "confidence")}
    return {"loss": loss, **parts, "acceptance": acceptance}


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """ΣWℓ / ΣW, and 0 with a gradient of 0 where nothing is supervised."""
    return (values * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
