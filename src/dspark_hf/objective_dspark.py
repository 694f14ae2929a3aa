"""The training objective of DSpark (paper, section 3.3): which slots are supervised, and the three-term loss.

For an anchor at position p and slots k = 0..γ−1 the label is x_{p+k+1} and the teacher the target's distribution at
p + k. A slot counts while every label up to it lies inside the text and in the response, m_k, with weight
W_k = m_k exp(−k/δ), δ = 4. With p_d the draft's and p_t the teacher's distribution,

    CE = −log p_d(x),   L1 = Σ_v |p_d(v) − p_t(v)|,   BCE of the confidence against 1 − ½ L1, the chance of acceptance

and L = 0.1 CE + 0.9 L1 + 1.0 BCE, each term ΣWℓ / ΣW. Beside the paper's there are, by choice, KL in place of L1, the
weights of D-PACE (arXiv 2605.18810), and the expected acceptance length itself, 1 + Σ_k Π_{j≤k} (1 − ½ L1_j).

Shapes: B texts of T tokens, A anchors, γ slots, N supervised slots in all, V vocabulary, D draft vocabulary. Several
documents may share a row of tokens; `document_ids` (B, T) then tells them apart, and no block or anchor crosses them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

KEPT_CHUNKS = 6  # whose logits wait for the backward, which takes them first; those of the others are made again
CACHED_LOGITS = 2**18  # float32 numbers, a few times as many of which fit into a CPU's cache


@dataclass(frozen=True)
class Objective:
    """Weights of the loss terms, and how they are computed.

    Args:
        kl_weight: of KL(p_t ‖ p_d), over the tokens that can be drafted.
        length_weight: of the expected number of slots that are not accepted, Σ_k m_k (1 − Π_{j≤k} (1 − ½ L1_j)); its
            divisor is that of the other terms.
        position_weights: "decay", W_k = m_k exp(−k/δ), or "dpace": what a slot adds to the accepted length by the
            draft's own chances q of the labels, W_k = m_k Σ_{m≥k} Π_{i≤m} q̃_i with q̃ = (1 − α) q + α.
        decay: δ, in slots.
        dpace_alpha: α.
        chunk_size: how many slots' logits are made at a time; memory holds those of ten to sixteen.
        detach_confidence: train the confidence head alone by its term, and not the backbone.
    """

    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    kl_weight: float = 0.0
    length_weight: float = 0.0
    position_weights: str = "decay"
    decay: float = 4.0
    dpace_alpha: float = 0.5
    chunk_size: int = 256
    detach_confidence: bool = False

    def __post_init__(self):
        for name in ("ce_weight", "l1_weight", "confidence_weight", "kl_weight", "length_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more")
        if self.decay <= 0 or self.chunk_size < 1:
            raise ValueError(f"decay is {self.decay}, chunk_size {self.chunk_size}; expected both above 0")
        if self.position_weights not in ("decay", "dpace"):
            raise ValueError(f"position_weights is {self.position_weights!r}, expected 'decay' or 'dpace'")
        if not 0.0 < self.dpace_alpha <= 1.0:
            raise ValueError(f"dpace_alpha is {self.dpace_alpha}, expected a value in (0, 1]")

    @property
    def needs_teacher(self) -> bool:
        return max(self.l1_weight, self.confidence_weight, self.kl_weight, self.length_weight) > 0


def sample_anchors(
    loss_mask: torch.Tensor,
    num_anchors: int,
    generator: torch.Generator | None = None,
    document_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws anchors uniformly without replacement among positions p with loss_mask[p] and loss_mask[p+1].

    Args:
        loss_mask: (B, T), true on response tokens.
        document_ids: (B, T), by default one document a row.

    Returns:
        Sorted positions (B, A) with 0 for padding, and which of them are real (B, A), A ≤ `num_anchors` the largest
        number that any row has.
    """
    response = loss_mask.bool()
    valid = response[:, :-1] & response[:, 1:]
    if document_ids is not None:
        valid = valid & (document_ids[:, :-1] == document_ids[:, 1:])
    valid = F.pad(valid, (0, 1))
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
    document_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels x_{p+k+1} and the mask m_k of every slot, both (B, A, γ). Labels of padding anchors are x_0."""
    index = positions[..., None] + torch.arange(1, block_size + 1, device=input_ids.device)
    inside = index < input_ids.shape[1]
    index = index.clamp(max=input_ids.shape[1] - 1) * anchor_mask[..., None]
    labels = input_ids[:, None].expand(-1, index.shape[1], -1).gather(2, index)
    response = loss_mask.bool()[:, None].expand(-1, index.shape[1], -1).gather(2, index)
    counts = inside & response & anchor_mask[..., None]
    if document_ids is not None:
        documents = document_ids[:, None].expand(-1, index.shape[1], -1).gather(2, index)
        counts = counts & (documents == document_ids.gather(1, positions)[..., None])
    return labels, counts.long().cumprod(dim=-1).bool()


def block_attention_mask(
    positions: torch.Tensor,
    anchor_mask: torch.Tensor,
    block_size: int,
    length: int,
    document_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Who sees whom in training: block slots see the document before their anchor and their own block.

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
    if document_ids is not None:
        context = context & (document_ids[:, None] == document_ids.gather(1, anchors)[..., None])
    own = (block[:, None] == block).expand(positions.shape[0], -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


def text_positions(document_ids: torch.Tensor) -> torch.Tensor:
    """Position of every token in its own document, (B, T); documents are runs of equal ids."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def decay_weights(slot_mask: torch.Tensor, decay: float) -> torch.Tensor:
    """W_k = m_k exp(−k/δ), (B, A, γ) float32."""
    slots = torch.arange(slot_mask.shape[-1], device=slot_mask.device)
    return slot_mask.float() * torch.exp(-slots / decay)


def dpace_weights(slot_mask: torch.Tensor, label_chance: torch.Tensor, alpha: float) -> torch.Tensor:
    """W_k = m_k Σ_{m≥k} Π_{i≤m} q̃_i from the draft's chances of the labels q (B, A, γ); slots that do not count end the
    products."""
    smoothed = ((1.0 - alpha) * label_chance.detach() + alpha) * slot_mask
    return smoothed.cumprod(dim=-1).flip(-1).cumsum(dim=-1).flip(-1) * slot_mask


def total_weight(slot_mask: torch.Tensor, objective: Objective) -> torch.Tensor:
    """The divisor of every loss term: ΣW with decaying weights; with those of D-PACE, which depend on the draft, the
    number of slots. It is known before the forward, so that it can be summed over micro-batches and ranks."""
    return (decay_weights(slot_mask, objective.decay) if objective.position_weights == "decay" else slot_mask).sum()


def slot_losses(
    draft_logits: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    with_kl: bool = False,
) -> torch.Tensor:
    """CE, L1 and, if asked for, KL of each slot, (2 or 3, N) float32; without a graph, see `slot_gradients`.

    Args:
        draft_logits: (N, D).
        labels: (N,), indices into the draft vocabulary; −100 where the label lies outside it, CE 0 there.
        teacher: (n, D) float32, the target's chances of the draft vocabulary; None leaves L1 at 0. What they lack of 1
            is out of the draft's reach: it counts in full in L1, and not in KL, where it would be infinite.
        rows: (N,), each slot's row of `teacher`.
    """
    losses = draft_logits.new_zeros(3 if with_kl else 2, len(labels), dtype=torch.float32)
    for part, draft, taught in _in_cache(draft_logits):
        torch.log_softmax(draft_logits[part], dim=-1, dtype=torch.float32, out=draft)
        losses[0, part] = F.nll_loss(draft, labels[part], reduction="none", ignore_index=-100)
        if teacher is not None:
            torch.index_select(teacher, 0, rows[part], out=taught)
            outside = (1.0 - taught.sum(dim=-1)).clamp(min=0.0)
            if with_kl:
                losses[2, part] = F.kl_div(draft, taught, reduction="none").sum(dim=-1)
            losses[1, part] = taught.sub_(draft.exp_()).abs_().sum(dim=-1) + outside
    return losses


def slot_gradients(
    weights: torch.Tensor,
    draft_logits: torch.Tensor,
    labels: torch.Tensor,
    teacher: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient (N, D) of Σ weights · `slot_losses`, weights (2 or 3, N), with respect to the draft logits z:

    ∂CE/∂z = p_d − 1_x,   ∂L1/∂z = p_d ∘ (s − Σ_v p_d s) with s = sign(p_d − p_t),   ∂KL/∂z = p_d Σ_v p_t − p_t
    """
    gradient = torch.empty_like(draft_logits)
    of_ce, of_l1, *of_kl = weights[..., None]
    of_ce = of_ce.masked_fill(labels[:, None] < 0, 0.0)
    index = labels[:, None].clamp(min=0)
    for part, draft, taught in _in_cache(draft_logits):
        torch.softmax(draft_logits[part], dim=-1, dtype=torch.float32, out=draft)
        of_draft = of_ce[part]
        if teacher is None:
            values = draft.mul_(of_draft)
        else:
            torch.index_select(teacher, 0, rows[part], out=taught)
            if of_kl:
                pull = of_kl[0][part] * taught
                of_draft = of_draft + pull.sum(dim=-1, keepdim=True)
            values = taught.sub_(draft).sign_().mul_(draft)  # −p_d ∘ s
            of_draft = of_draft + of_l1[part] * values.sum(dim=-1, keepdim=True)
            values.mul_(-of_l1[part]).addcmul_(draft, of_draft)
            if of_kl:
                values.sub_(pull)
        gradient[part] = values.scatter_add_(1, index[part], -of_ce[part])
    return gradient


def _in_cache(logits: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Runs of rows with two float32 buffers of their shape. On a CPU they are few enough for its cache: memory, new
    memory above all, and not arithmetic, is what the losses wait for there."""
    on_cpu = logits.device.type == "cpu"
    height = min(max(1, CACHED_LOGITS // logits.shape[1]), len(logits)) if on_cpu else len(logits)
    buffers = logits.new_empty(2, height, logits.shape[1], dtype=torch.float32)
    for start in range(0, len(logits), max(1, height)):
        part = slice(start, min(start + height, len(logits)))
        yield part, *buffers[:, : part.stop - start]


class _WithGradient(torch.autograd.Function):
    """Losses computed before, given the gradient of `slot_gradients`; of (N, D) the logits alone are kept for it."""

    @staticmethod
    def forward(ctx, draft_logits, losses, labels, teacher, rows):
        ctx.save_for_backward(draft_logits, labels, teacher, rows)
        return losses.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, weights):
        return slot_gradients(weights, *ctx.saved_tensors), None, None, None, None


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
    with_kl: bool = False,
) -> torch.Tensor:
    """`slot_losses` of slots whose logits are made `chunk_size` slots at a time, again in the backward.

    Slots are taken in the order of the text position they are taught by, since slots of overlapping blocks share one
    teacher row: the teacher runs once per position, `chunk_size` positions at a time, and once more in the backward.
    Peak memory is that of ten to sixteen chunks' logits (the less, the more blocks overlap), however many slots
    there are.

    Args:
        draft_head: hidden (n, H), latent (n, r) or None → draft logits (n, D).
        teacher_head: last hidden states (n, H) → teacher logits (n, D).
        hidden, latents, labels: (N, H), (N, r) or None, (N,).
        teacher_states: (B·T, H) states after the target's final norm, or None.
        teacher_rows: (N,), each slot's row of `teacher_states`.
        teacher_logsumexp: (B·T,), the target's normaliser where D is less than its vocabulary, else None.
    """
    order = teacher_rows.argsort(stable=True)
    positions, ranks = teacher_rows[order].unique_consecutive(return_inverse=True)

    @lru_cache(maxsize=1)  # the chunks of one group follow each other, forwards and backwards
    @torch.no_grad()
    def teacher(group: int) -> torch.Tensor | None:
        if teacher_states is None:
            return None
        rows = positions[group * chunk_size : (group + 1) * chunk_size]
        logits = teacher_head(teacher_states[rows])
        if teacher_logsumexp is None:
            return logits.softmax(dim=-1, dtype=torch.float32)
        return (logits.float() - teacher_logsumexp[rows, None]).exp_()

    def chunk_losses(hidden, latents, labels, group, rows, known):
        logits, taught = draft_head(hidden, latents), teacher(group)
        if not known:  # the second time, logits are made for the gradient only
            known.append(slot_losses(logits.detach(), labels, taught, rows, with_kl))
        return _WithGradient.apply(logits, known[0], labels, taught, rows)

    sizes = (ranks // chunk_size).bincount(minlength=1).tolist()
    chunks = []
    for group, members in enumerate(zip(order.split(sizes), (ranks % chunk_size).split(sizes), strict=True)):
        count = max(1, math.ceil(sizes[group] / chunk_size))
        chunks += [(group, *chunk) for chunk in zip(*(part.tensor_split(count) for part in members), strict=True)]
    losses = []
    for left, (group, slots, rows) in zip(range(len(chunks), 0, -1), chunks, strict=True):
        latent = None if latents is None else latents[slots]
        chunk = (hidden[slots], latent, labels[slots], group, rows, [])
        kept = left <= KEPT_CHUNKS
        losses.append(chunk_losses(*chunk) if kept else checkpoint(chunk_losses, *chunk, use_reentrant=False))
    return torch.cat(losses, dim=1)[:, order.argsort()]


def drafter_loss(
    losses: torch.Tensor,
    has_teacher: bool,
    unreachable: torch.Tensor,
    confidence_logits: torch.Tensor | None,
    slot_mask: torch.Tensor,
    objective: Objective,
    divisor: torch.Tensor | None = None,
) -> dict[str, torch.Tensor | None]:
    """L from the slots' losses; a term without its input is left out.

    Args:
        losses: (2 or 3, B, A, γ), CE, L1 and KL of every slot.
        unreachable: (B, A, γ), slots whose label cannot be drafted.
        confidence_logits, slot_mask: (B, A, γ).
        divisor: `total_weight` of the whole optimisation step, over its micro-batches and ranks; of these slots alone
            by default.

    Returns:
        `loss`; its terms `ce_loss`, `l1_loss`, `confidence_loss`, detached; and `acceptance`, 1 − ½ L1 (B, A, γ).
    """
    ce, l1 = losses[0], losses[1]
    if objective.position_weights == "decay":
        weights = decay_weights(slot_mask, objective.decay)
    else:
        weights = dpace_weights(slot_mask, torch.exp(-ce).masked_fill(unreachable, 0.0), objective.dpace_alpha)
    divisor = total_weight(slot_mask, objective) if divisor is None else divisor
    divisor = divisor.clamp(min=torch.finfo(torch.float32).tiny)  # 0, with a gradient of 0, where nothing is supervised

    def mean(values: torch.Tensor) -> torch.Tensor:
        return (values * weights).sum() / divisor

    terms, acceptance = {"ce": mean(ce)}, None
    if has_teacher:
        chance = (1.0 - 0.5 * l1).clamp(0.0, 1.0)
        acceptance = chance.detach()
        terms["l1"] = mean(l1)
        if objective.kl_weight:
            terms["kl"] = mean(losses[2])
        if objective.length_weight:
            missed = (1.0 - (chance * slot_mask).cumprod(dim=-1)) * slot_mask
            terms["length"] = missed.sum() / divisor
        if confidence_logits is not None:
            terms["confidence"] = mean(
                F.binary_cross_entropy_with_logits(confidence_logits, acceptance, reduction="none")
            )
    loss = sum(getattr(objective, f"{name}_weight") * term for name, term in terms.items())
    parts = {f"{name}_loss": terms[name].detach() if name in terms else None for name in ("ce", "l1", "confidence")}
    return {"loss": loss, **parts, "acceptance": acceptance}
