"""Verification: which drafted tokens the target keeps, so that its output distribution stays exactly its own.

Drafted token x_i, drawn from q_i, is kept with probability min(1, p_i(x_i) / q_i(x_i)); the first one refused is drawn
anew from the residual (p_i − q_i)⁺, normalised, and when all are kept one more comes from p_{ℓ+1} (the bonus token).
Greedy decoding keeps x_i while it is the target's mode. q must be the very distribution that x_i was drawn from.

Block verification (Sun et al. 2024, arXiv:2403.10444) decides about whole prefixes, and keeps more on average. The
prefix x_1..x_i has the weight w_i = min(1, w_{i−1}·p_i(x_i) / q_i(x_i)), w_0 = 1. The longest with u_i < h_i is kept:

    h_i = S_i / (S_i + 1 − w_i),   S_i = Σ_x (w_i·p_{i+1}(x) − q_{i+1}(x))⁺   for i < ℓ,        h_ℓ = w_ℓ,

with independent uniform u_i. The token that follows comes from (w_i·p_{i+1} − q_{i+1})⁺, normalised, or from p_{ℓ+1}
for i = ℓ. Both rules are exact only if whether x_i is verified depends on nothing but the tokens before it.

Pure functions on tensors: B rows, ℓ drafted tokens (a row may have fewer), V vocabulary; float32 throughout.
"""

from collections.abc import Callable

import torch


def residual_distribution(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(p − q)⁺ normalised, (…, V); p itself where the two agree and rounding leaves nothing."""
    residual = (p - q).clamp(min=0.0)
    total = residual.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, residual / total, p)


def verify_token(
    token_ids: torch.Tensor, draft_logits: torch.Tensor, target_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling at one position.

    Args:
        token_ids: (B,) drafted tokens.
        draft_logits, target_logits: (B, V), after all processors.

    Returns:
        Which tokens are kept (B,), and for the others a draw from the residual (B,).
    """
    p, q = target_logits.float().softmax(dim=-1), draft_logits.float().softmax(dim=-1)
    p_token, q_token = (d.gather(-1, token_ids[:, None])[:, 0] for d in (p, q))
    kept = torch.rand_like(p_token) * q_token < p_token
    return kept, torch.multinomial(residual_distribution(p, q), 1)[:, 0]


def sample_token(logits: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """A draw from the distribution, or its mode: (B, V) → (B,)."""
    if do_sample:
        return torch.multinomial(logits.float().softmax(dim=-1), 1)[:, 0]
    return logits.argmax(dim=-1)


def verify_block(
    token_ids: torch.Tensor,
    draft_logits: torch.Tensor | None,
    lengths: torch.Tensor,
    target_logits: Callable[[int, torch.Tensor], torch.Tensor],
    do_sample: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verifies the first `lengths` tokens of each row, left to right, as far as they are kept.

    Args:
        token_ids: (B, ℓ) drafted tokens.
        draft_logits: (B, ℓ, V), the distributions they were drawn from; unused for greedy decoding.
        lengths: (B,) in 0..ℓ.
        target_logits: called as `(position i, rows (n,)) -> (n, V)`, the target's processed logits for the token at
            position i of those rows, whose earlier tokens have all been kept.
        do_sample: rejection sampling, or comparison with the mode.

    Returns:
        How many tokens each row keeps (B,), and the token that follows them (B,).
    """
    rows = torch.arange(len(lengths), device=lengths.device)
    if not token_ids.shape[1]:
        return torch.zeros_like(lengths), sample_token(target_logits(0, rows), do_sample)
    accepted, following = torch.zeros_like(lengths), torch.zeros_like(lengths)
    for i in range(token_ids.shape[1] + 1):
        logits, drafted = target_logits(i, rows), lengths[rows] > i
        if not do_sample:
            following[rows] = sample_token(logits, do_sample)
        elif not drafted.all():
            following[rows[~drafted]] = sample_token(logits[~drafted], do_sample)
            logits = logits[drafted]
        rows = rows[drafted]
        if not len(rows):
            break
        tokens = token_ids[rows, i]
        if do_sample:
            kept, following[rows] = verify_token(tokens, draft_logits[rows, i], logits)
        else:
            kept = tokens == following[rows]
        rows = rows[kept]
        accepted[rows] += 1
        if not len(rows):
            break
    return accepted, following


def expected_acceptance(
    draft_logits: torch.Tensor, lengths: torch.Tensor, target_logits: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Σ_x min(p_i(x), q_i(x)), the chance that a draw of q_i is kept when all tokens before it are, (B, ℓ); also behind
    tokens that were refused, and 0 beyond a row's length. Arguments as for `verify_block`."""
    chances = torch.zeros(draft_logits.shape[:2], device=draft_logits.device)
    for i in range(draft_logits.shape[1]):
        rows = (lengths > i).nonzero()[:, 0]
        if len(rows):
            p = target_logits(i, rows).float().softmax(dim=-1)
            chances[rows, i] = torch.minimum(p, draft_logits[rows, i].float().softmax(dim=-1)).sum(dim=-1)
    return chances


def prefix_acceptance(weights: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification at one position.

    Args:
        weights: (B,) w in 0..1 of the prefixes before it.
        p, q: (B, V), the distributions of the token at this position; q = 0 where none was drafted, which turns the
            formulas for i < ℓ into those for ℓ: h = w, and p itself.

    Returns:
        h (B,), the probability that a prefix is kept when no longer one is, and the distribution of the token that
        follows it then (B, V), up to a factor.
    """
    weighted = weights[:, None] * p
    excess = (weighted - q).clamp(min=0.0).sum(dim=-1)
    # For w = 1 the fraction is 1, or 0 / 0 where p = q: the next prefix has w = 1 again then, and will be kept instead.
    h = torch.where(weights < 1, excess / (excess + 1 - weights), 1.0)
    return h, residual_distribution(weighted, q)


def verify_block_jointly(
    token_ids: torch.Tensor,
    draft_logits: torch.Tensor,
    lengths: torch.Tensor,
    target_logits: Callable[[int, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification of the first `lengths` tokens of each row, for sampling only: in greedy decoding the longest
    prefix that the target would have chosen is kept anyway.

    Args:
        token_ids: (B, ℓ) drafted tokens.
        draft_logits: (B, ℓ, V), the distributions they were drawn from.
        lengths: (B,) in 0..ℓ.
        target_logits: called as `(position i, rows (n,)) -> (n, V)`, the target's processed logits for the token at
            position i of those rows, whose earlier tokens the target could have drawn; they may still be refused.

    Returns:
        How many tokens each row keeps (B,), and the token that follows them (B,).
    """
    accepted = torch.zeros_like(lengths)
    rows = torch.arange(len(lengths), device=lengths.device)
    behind = draft_logits.new_zeros(len(lengths), draft_logits.shape[-1], dtype=torch.float32)
    weights = behind.new_ones(len(lengths))
    for i in range(token_ids.shape[1] + 1):
        p = target_logits(i, rows).float().softmax(dim=-1)
        q = torch.zeros_like(p)
        drafted = (lengths[rows] > i).nonzero()[:, 0]
        if len(drafted):
            q[drafted] = draft_logits[rows[drafted], i].float().softmax(dim=-1)
        h, residual = prefix_acceptance(weights, p, q)
        kept = torch.rand_like(h) < h
        accepted[rows[kept]] = i
        behind[rows[kept]] = residual[kept]
        if not len(drafted):
            break
        rows = rows[drafted]
        tokens = token_ids[rows, i]
        ratio = p[drafted, tokens] / q[drafted, tokens]
        weights = (weights[drafted] * ratio).clamp(max=1.0)
        # Nothing is kept past a token that the target cannot draw (0 / 0 is NaN): its logits there are not asked for.
        possible = weights > 0
        rows, weights = rows[possible], weights[possible]
        if not len(rows):
            break
    return accepted, torch.multinomial(behind, 1)[:, 0]


# How sampling decides what to keep; all are called as `(token_ids, draft_logits, lengths, target_logits)`.
ACCEPTANCE_RULES = {"token": verify_block, "block": verify_block_jointly}
