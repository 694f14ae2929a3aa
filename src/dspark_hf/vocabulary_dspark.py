"""The vocabulary side of a drafter: embedding and head, its own or lent by the target, and a reduced draft vocabulary.

A reduced vocabulary, D of the target's V tokens, makes the heads of a small drafter cheap. `d2t` holds it in the
convention of the serving engines: draft id i is the target id i + d2t[i]. Tokens outside are never drafted; the target
yields them by itself. H hidden size.
"""

from collections.abc import Callable
from functools import partial
from weakref import ref

import torch
from torch import nn
from transformers import PreTrainedModel

from .target_dspark import check_pair


class ScaledEmbedding(nn.Embedding):
    """Gemma's embedding, scaled by √H as rounded to the weight's dtype."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * self.weight.new_tensor(self.embedding_dim**0.5)


EMBEDDINGS = {"qwen3": nn.Embedding, "gemma4_text": ScaledEmbedding}


class VocabularyMixin:
    """Embedding, head and draft vocabulary of a drafter model."""

    def _init_vocabulary(self, config) -> None:
        whole, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = EMBEDDINGS[config.backbone_type](whole, hidden) if config.has_embed_tokens else None
        self.lm_head = nn.Linear(hidden, config.num_draft_logits, bias=False) if config.has_lm_head else None
        if config.draft_vocab_size is not None:
            # t2d marks the target ids that can be drafted; serving engines read it, nothing here does.
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(whole) < config.draft_vocab_size)
        self._target: tuple[PreTrainedModel, ...] = ()  # not as a bare module, which would become a submodule
        self._head_rows: tuple = ()  # (reference to a target's head, its rows of the draft vocabulary)
        self.head_layout: Callable[[nn.Linear], nn.Module] = _as_it_is  # `pack_linears` puts those rows in its own

    def __getstate__(self):
        """For copying and pickling, which leave the target out."""
        return self.__dict__ | {"_target": (), "_head_rows": ()}

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head

    def attach_target(self, target: PreTrainedModel):
        """Makes `target` the one whose embedding and head are used where the drafter has none, and the teacher in
        training: its head gives the teacher's logits, and its states are computed where a batch brings none. It is not
        saved with the drafter. Freeze it (`requires_grad_(False)`), or its head gathers gradients."""
        check_pair(target, self)
        self._target = (target,)
        return self

    def set_draft_vocabulary(self, token_ids: torch.LongTensor) -> None:
        """Makes `token_ids`, (draft_vocab_size,) strictly increasing, the tokens that can be drafted."""
        size, whole, ids = self.config.draft_vocab_size, self.config.vocab_size, token_ids.to(self.device)
        if size is None or len(ids) != size:
            raise ValueError(f"{len(ids)} token ids were given, expected {size} (draft_vocab_size)")
        if (ids.diff() <= 0).any() or ids[0] < 0 or ids[-1] >= whole:
            raise ValueError(f"token ids are {ids.tolist()}, expected strictly increasing values in 0..{whole - 1}")
        self.d2t.copy_(ids - torch.arange(size, device=self.device))
        self.t2d.zero_()
        self.t2d[ids] = True
        self._head_rows = ()

    def draft_token_ids(self) -> torch.Tensor:
        """Target ids of a reduced draft vocabulary, (D,)."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def to_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """(..., D) → (..., V), −inf for tokens that cannot be drafted; the same tensor where it has V already."""
        if logits.shape[-1] == self.config.vocab_size:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        return whole.index_copy(-1, self.draft_token_ids(), logits)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids → target ids; the same tensor where D = V."""
        return draft_ids if self.config.draft_vocab_size is None else draft_ids + self.d2t[draft_ids]

    def to_draft_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Target ids → draft ids, −100 for tokens that cannot be drafted; the same tensor where D = V."""
        if self.config.draft_vocab_size is None:
            return labels
        draft_ids = labels.new_full((self.config.vocab_size,), -100)
        draft_ids[self.draft_token_ids()] = torch.arange(self.config.draft_vocab_size, device=labels.device)
        return draft_ids[labels]

    def check_lender(self, target: PreTrainedModel | None = None) -> None:
        """Raises `ValueError` where the drafter has no embedding or head and no target lends one."""
        if self._lender(target) is None and (self.embed_tokens is None or self.lm_head is None):
            raise ValueError(
                "this drafter has no embedding or head of its own (has_embed_tokens, has_lm_head): pass target=, or "
                "call attach_target(target)"
            )

    def embed(self, token_ids: torch.Tensor, target: PreTrainedModel | None = None) -> torch.Tensor:
        """(B, n) → (B, n, H) by the drafter's own embedding, else the target's; in the drafter's dtype."""
        if self.embed_tokens is not None:
            return self.embed_tokens(token_ids)
        target = self._lender(target)
        return _call_lent(target.get_input_embeddings(), target, token_ids).to(self.fc.weight.dtype)

    def base_logits(self, hidden: torch.Tensor, target: PreTrainedModel | None = None) -> torch.Tensor:
        """U (..., D) from h (..., H) by the drafter's own head, else the target's."""
        if self.lm_head is None:
            return self._target_logits(hidden, self._lender(target))
        return softcapped(self.lm_head(hidden), self.config.final_logit_softcapping)

    def teacher_logits(self, states: torch.Tensor) -> torch.Tensor:
        """The target's logits (n, D) from its last states (n, H): by its head, or without an attached target by the
        drafter's copy of it."""
        return self._target_logits(states, self._target[0]) if self._target else self.base_logits(states)

    def teacher_logsumexp(self, states: torch.Tensor, rows: torch.Tensor, given: torch.Tensor | None = None):
        """The normaliser of the target's whole distribution, (n,) float32, where the draft vocabulary is a part of it;
        else None. Of `given` (B, T) if that was computed before, or from the last states (n, H) at the given rows."""
        if self.config.draft_vocab_size is None:
            return None
        if given is not None:
            return given.flatten()
        if not self._target:
            raise ValueError("target_logsumexp is missing and no target attached: call attach_target(target)")
        return target_logsumexp(self._target[0], states, rows.unique(), self.config.final_logit_softcapping)

    def _lender(self, target: PreTrainedModel | None) -> PreTrainedModel | None:
        return target if target is not None or not self._target else self._target[0]

    def _target_logits(self, hidden: torch.Tensor, target: PreTrainedModel) -> torch.Tensor:
        """(..., H) → (..., D) by the target's head."""
        head = target.get_output_embeddings()
        call = partial(_call_lent, head, target)
        if self.config.draft_vocab_size is not None:
            call = self._rows_of(head, call)
        return softcapped(call(hidden), self.config.final_logit_softcapping)

    def _rows_of(self, head: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        """The rows of a target's head that can be drafted, taken once as long as head, dtype and device stay."""
        weight = self.fc.weight  # (H, L·H)
        if self._head_rows:
            known, rows = self._head_rows
            if known() is head and (rows.weight.dtype, rows.weight.device) == (weight.dtype, weight.device):
                return rows
        rows = self.head_layout(head_rows(call, self.draft_token_ids(), weight))
        self._head_rows = (ref(head), rows)
        return rows


def _as_it_is(layer: nn.Linear) -> nn.Module:
    return layer


def softcapped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Gemma's cap · tanh(logits / cap), where there is a cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def head_rows(head: Callable[[torch.Tensor], torch.Tensor], token_ids: torch.Tensor, like: torch.Tensor) -> nn.Linear:
    """The rows `token_ids` (D,) of a head (n, H) → (n, V) as a frozen layer, found by calling it on unit vectors.

    Args:
        like: (H, ...), whose first dimension, device and dtype the layer takes.
    """
    # Not inference tensors, even where the first call comes under `inference_mode`: training may use them later.
    with torch.inference_mode(False), torch.no_grad():
        units = torch.eye(len(like), device=like.device, dtype=like.dtype)
        bias = head(torch.zeros_like(units[:1]))[0, token_ids].to(like.dtype)
        columns = torch.cat([head(part)[:, token_ids].to(like.dtype) - bias for part in units.split(64)])
        has_bias = bool(bias.any())
        # Without initialisation, which would draw from the global generator and so change what is sampled afterwards.
        rows = nn.utils.skip_init(
            nn.Linear, len(like), len(token_ids), bias=has_bias, device=like.device, dtype=like.dtype
        )
        rows.requires_grad_(False).weight.copy_(columns.T)
        if has_bias:
            rows.bias.copy_(bias)
    return rows


@torch.no_grad()
def target_logsumexp(
    target: PreTrainedModel, states: torch.Tensor, rows: torch.Tensor, softcap: float | None, chunk_size: int = 64
) -> torch.Tensor:
    """The normaliser of the target's distribution at the given rows of its last states (n, H) → (n,) float32, 0
    elsewhere; the logits of `chunk_size` rows exist at a time."""
    result = torch.zeros(len(states), dtype=torch.float32, device=states.device)
    for part in rows.split(chunk_size):
        logits = _call_lent(target.get_output_embeddings(), target, states[part])
        result[part] = softcapped(logits.float(), softcap).logsumexp(dim=-1)
    return result


def _call_lent(module: nn.Module, target: PreTrainedModel, inputs: torch.Tensor) -> torch.Tensor:
    """Calls a module of `target` as its device and dtype want it, and brings the result back to the inputs' device. Its
    weight is never indexed: it may be quantised, packed or hooked."""
    moved = inputs.to(target.device, target.dtype) if inputs.is_floating_point() else inputs.to(target.device)
    return module(moved).to(inputs.device)
