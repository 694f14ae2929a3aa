"""Where two greedy texts part, and by how little: speculative decoding is exact up to rounding, and passes of different
width round differently, so that two tokens of nearly equal logit can change places."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

NEAR_TIE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Margins, in logits, that rounding in a dtype can overturn."""


@dataclass(frozen=True)
class Difference:
    """The first token at which the texts differ, and by how many logits the target prefers the one to the other."""

    position: int
    margin: float
    near_tie: bool

    def __str__(self) -> str:
        kind = "a near-tie that rounding flipped" if self.near_tie else "NOT a near-tie"
        return f"differ from token {self.position} on: {kind}, margin {self.margin:.2g} logits"


@torch.no_grad()
def first_difference(
    target: PreTrainedModel, prompt_ids: torch.Tensor, text: torch.Tensor, other: torch.Tensor
) -> Difference | None:
    """Compares two continuations (T,) and (T',) of one prompt; None where they are the same."""
    length = min(len(text), len(other))
    different = (text[:length] != other[:length]).nonzero()
    if not len(different):
        return None if len(text) == len(other) else Difference(length, float("nan"), False)
    position = int(different[0])
    logits = target(torch.cat([prompt_ids, text[:position]])[None]).logits[0, -1].float()
    margin = abs(float(logits[text[position]] - logits[other[position]]))
    return Difference(position, margin, margin <= NEAR_TIE[target.dtype])
