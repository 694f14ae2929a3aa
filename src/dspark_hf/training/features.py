"""Target states computed on the fly by a frozen target."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ..target_dspark import target_states
from ..vocabulary_dspark import target_logsumexp


class OnlineStates:
    """States of one text after the other, from the target's forward without its vocabulary projection.

    Args:
        target: a frozen model in eval mode.
        layer_ids: layers whose states the drafter reads.
        with_logsumexp: also compute the target's normaliser, needed with a reduced draft vocabulary.
        softcap: the target's cap on its logits, if any.
    """

    def __init__(
        self, target: PreTrainedModel, layer_ids: list[int], with_logsumexp: bool = False, softcap: float | None = None
    ):
        self.target, self.layer_ids = target, layer_ids
        self.with_logsumexp, self.softcap = with_logsumexp, softcap

    @torch.no_grad()
    def features(self, sample: dict[str, Any]) -> dict[str, Any]:
        """One text with its states, on the CPU: `target_hidden_states` (T, L·H), `target_last_hidden_states` (T, H)
        and, where asked for, `target_logsumexp` (T,)."""
        ids = sample["input_ids"][None].to(self.target.device)
        (context,), (last,) = target_states(self.target, ids, None, self.layer_ids)
        result = dict(sample, target_hidden_states=context.cpu(), target_last_hidden_states=last.cpu())
        if self.with_logsumexp:
            taught = sample["loss_mask"].roll(-1).nonzero()[:, 0]  # positions that teach: their next token is learnt
            normaliser = target_logsumexp(self.target, last, taught.to(last.device), self.softcap)
            result["target_logsumexp"] = normaliser.cpu()
        return result
