"""Verification: which drafted tokens the target keeps, so that its output distribution stays exactly its own.

Drafted token x_i, drawn from q_i, is kept with probability min(1, p_i(x_i) / q_i(x_i)); the first one refused is drawn
anew from the residual (p_i − q_i)⁺, normalised, and when all are kept one more comes from p_{ℓ+1} (the bonus token).
Greedy decoding keeps x_i while it is the target's mode. q must be the very distribution that x_i was drawn from.

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
    do_sample: bool,
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
    accepted, following = torch.zeros_like(lengths), torch.zeros_like(lengths)
    rows = torch.arange(len(lengths), device=lengths.device)
    for i in range(token_ids.shape[1] + 1):
        logits = target_logits(i, rows)
        drafted = lengths[rows] > i
        if not drafted.all():
            following[rows[~drafted]] = sample_token(logits[~drafted], do_sample)
            rows, logits = rows[drafted], logits[drafted]
            if not len(rows):
                break
        tokens = token_ids[rows, i]
        if do_sample:
            kept, following[rows] = verify_token(tokens, draft_logits[rows, i], logits)
        else:
            following[rows] = sample_token(logits, do_sample)
            kept = tokens == following[rows]
        rows = rows[kept]
        accepted[rows] += 1
        if not len(rows):
            break
    return accepted, following
