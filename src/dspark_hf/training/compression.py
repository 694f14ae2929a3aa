"""How the target states of a text lie on disk: `exact`, as the target gave them, or `compressed`.

Compressed context states are fp8 (e4m3) with a scale per token t and layer l, last states int8 with a scale per token
and group g of 64 channels:

    x_{t,l} ≈ s_{t,l} q,  s_{t,l} = max |x_{t,l}| / 448           x_{t,g} ≈ s_{t,g} q,  s_{t,g} = max |x_{t,g}| / 127

A few channels of a layer's output are hundreds of times larger than the rest, which a floating grid bears and an
integer grid over a whole layer does not. After the final norm they are tamer, and int8 in small groups errs less than
fp8. The last states only make the teacher's distribution: those of other positions than the n that teach a slot are
left out.

Shapes: T tokens, L layers, H hidden size, G = ⌈H / 64⌉ groups.
"""

import torch
from torch.nn import functional as F

FORMATS = ("exact", "compressed")
GROUP_SIZE = 64
_FP8_MAX, _INT8_MAX = 448.0, 127.0


def supervised_positions(loss_mask: torch.Tensor) -> torch.Tensor:
    """Positions whose last state teaches a slot: those before a response token, (T,) bool → (n,) long."""
    return loss_mask[1:].nonzero()[:, 0]


def layout(
    format: str, tokens: int, supervised: int, num_layers: int, hidden_size: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each stored tensor, for T = `tokens`, n = `supervised` and states computed in `dtype`.

    Raises:
        ValueError: for an unknown format.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}, expected one of {', '.join(FORMATS)}")
    width = num_layers * hidden_size
    if format == "exact":
        return {
            "hidden_states": ((tokens, width), dtype),
            "last_hidden_states": ((tokens, hidden_size), dtype),
            "logsumexp": ((tokens,), torch.float32),
        }
    return {
        "hidden_states": ((tokens, width), torch.float8_e4m3fn),
        "hidden_scales": ((tokens, num_layers), torch.float32),
        "last_hidden_states": ((supervised, hidden_size), torch.int8),
        "last_scales": ((supervised, -(-hidden_size // GROUP_SIZE)), torch.bfloat16),
        "logsumexp": ((supervised,), torch.float32),
    }


def encode(
    format: str, hidden: torch.Tensor, last: torch.Tensor, logsumexp: torch.Tensor, positions: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The tensors of `layout` from a text's states.

    Args:
        hidden: (T, L·H), last: (T, H), logsumexp: (T,).
        positions: (n,), the supervised ones.
    """
    if format == "exact":
        return {"hidden_states": hidden, "last_hidden_states": last, "logsumexp": logsumexp}
    hidden, hidden_scales = to_fp8(hidden, hidden.shape[-1] // last.shape[-1])
    last, last_scales = to_int8(last[positions])
    return {
        "hidden_states": hidden,
        "hidden_scales": hidden_scales,
        "last_hidden_states": last,
        "last_scales": last_scales,
        "logsumexp": logsumexp[positions],
    }


def decode(
    format: str, stored: dict[str, torch.Tensor], positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `encode`: context states (T, L·H), last states (T, H) and logsumexp (T,). Compressed ones come
    back in float32, with zeros where nothing is supervised."""
    if format == "exact":
        return stored["hidden_states"], stored["last_hidden_states"], stored["logsumexp"]
    hidden = from_fp8(stored["hidden_states"], stored["hidden_scales"])
    taught = from_int8(stored["last_hidden_states"], stored["last_scales"])
    last = taught.new_zeros(len(hidden), taught.shape[-1])
    logsumexp = taught.new_zeros(len(hidden))
    last[positions], logsumexp[positions] = taught, stored["logsumexp"]
    return hidden, last, logsumexp


def to_fp8(states: torch.Tensor, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, L·H) → e4m3 values (T, L·H) and float32 scales (T, L)."""
    parts = states.float().unflatten(-1, (num_layers, -1))
    scales = _scales(parts, _FP8_MAX)
    # Clamped, because the division may round above the grid's end, which some conversions turn into NaN.
    values = (parts / scales[..., None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return values.flatten(-2), scales


def from_fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_fp8`, float32."""
    return (values.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def to_int8(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(n, H) → int8 values (n, H) and bfloat16 scales (n, G); the last group is short where 64 does not divide H."""
    groups = _grouped(states.float())
    # Divided by the scale as stored, so that its rounding costs no accuracy.
    scales = _scales(groups, _INT8_MAX).to(torch.bfloat16)
    values = (groups / scales.float()[..., None]).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return values.flatten(-2)[:, : states.shape[-1]].contiguous(), scales


def from_int8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_int8`, float32."""
    states = _grouped(values.float()) * scales.float()[..., None]
    return states.flatten(-2)[:, : values.shape[-1]]


def _grouped(states: torch.Tensor) -> torch.Tensor:
    """(n, H) → (n, G, 64), filled up with zeros."""
    return F.pad(states, (0, -states.shape[-1] % GROUP_SIZE)).unflatten(-1, (-1, GROUP_SIZE))


def _scales(parts: torch.Tensor, largest: float) -> torch.Tensor:
    """max |x| / `largest` over the last dimension, in float32 and never 0."""
    return (parts.abs().amax(dim=-1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
