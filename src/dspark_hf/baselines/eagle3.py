"""EAGLE-3 (arXiv 2503.01840) as a baseline: an autoregressive drafter of one layer over the target's fused states.

With h_t = fc(target states at t), a pair joins a state with the token after it, and its output predicts the next one:

    pair_t = [input_layernorm(embed(x_{t+1})) ; hidden_norm(h_t)]  ─►  one layer, causal, residual h_t  ─►  o_t
    p(x_{t+2}) = softmax(lm_head(norm(o_t)))

Where the target's states end, the drafter goes on with its own: h_{t+1} = o_t, with the token just drafted. Training
unrolls the same γ steps at every position. In step s = 0..γ−1 position t joins x_{t+s+1} with the output of step s − 1,
at RoPE position t + s, and attends to the pairs of step 0 up to t and to those of later steps at t only (a diagonal):

    L = Σ_s β^s Σ_t m_{t+s} · CE(target's distribution at t+s+1, draft) / (B·T),   m the response mask

With anchors, the sum is over t = p − 1 for each anchor p and over the slots of its block, and the divisor their weight.

Shapes: B rows, T tokens of text, γ steps, H hidden size, L target layers read, V vocabulary, D draft vocabulary.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from ..backbone_dspark import RMS_NORMS, DSparkRotaryEmbedding
from ..drafter_dspark import DrafterModel, DSparkDraftOutput, DSparkOutput
from ..objective_dspark import Objective, block_labels, drafter_loss, text_positions
from ..processing_dspark import stacked
from ..rows_dspark import RowCache, left_aligned
from .configuration_eagle3 import Eagle3Config
from .eagle3_backbone import Eagle3DecoderLayer
from .eagle3_objective import entropies, shifted, unrolled_slots, with_predecessor


class Eagle3Cache(RowCache):
    """Keys and values of the pairs of committed tokens, and `columns` (n,): the token of a row's slot s stands in
    column `columns + s` of its text."""

    def __init__(self, start: int | torch.Tensor = 0):
        super().__init__(start)
        self.columns: torch.Tensor | None = None

    def keep(self, rows: torch.Tensor) -> None:
        super().keep(rows)
        if self.columns is not None:
            self.columns = self.columns[rows.to(self.columns.device)]


class Eagle3DrafterModel(DrafterModel):
    """An EAGLE-3 drafter, used and trained as the DSpark one. Loads this package's layout and those of DeepSpec and
    SpecForge as they are (the latter with `num_target_layers=`, which its files lack)."""

    config_class = Eagle3Config
    _no_split_modules = ["Eagle3DecoderLayer"]

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3DecoderLayer(config)])
        self.norm = RMS_NORMS[config.backbone_type](hidden, eps=config.rms_norm_eps)
        self.rotary_emb = DSparkRotaryEmbedding(config)
        self._init_vocabulary(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """As for the DSpark drafter: a missing or unknown tensor raises `ValueError`."""
        names = {"key_mapping": {r"^midlayer\.": "layers.0."}}
        return super().from_pretrained(pretrained_model_name_or_path, *args, **names | kwargs)

    def new_cache(self, start: int | torch.Tensor = 0) -> Eagle3Cache:
        """An empty draft cache whose rows will start at absolute position `start`, an int or (B,)."""
        return Eagle3Cache(start)

    # ------------------------------------------------------------------------------------------------------ drafting

    @torch.no_grad()
    def draft(
        self,
        context_hidden_states: torch.Tensor,
        anchor_ids: torch.Tensor,
        cache: Eagle3Cache | None = None,
        num_tokens: int | None = None,
        do_sample: bool = False,
        logits_processor: Callable | None = None,
        input_ids: torch.Tensor | None = None,
        context_lengths: torch.Tensor | None = None,
        stop: Callable[[torch.Tensor], bool] | None = None,
        target: PreTrainedModel | None = None,
    ) -> DSparkDraftOutput:
        """Proposes the tokens that follow each row's anchor.

        Args:
            input_ids: (B, T), each row's text up to and including the anchor, always needed. In the first round all
                rows end in the last column (left-padded); later they keep their places and grow to the right. Context
                whose tokens are not in it (of a prompt given as embeddings) is left out.
            context_hidden_states, context_lengths: as for the DSpark drafter; at least one new row each.
            stop: never called, since it looks at confidences.

        The other arguments are those of `DSparkDrafterModel.draft`.

        Returns:
            As there, with hidden_states norm(o_k) and base_logits of the n ≤ γ steps that were run.

        Raises:
            ValueError: for shapes or counts that do not fit, before anything is computed.
        """
        cache = self.new_cache() if cache is None else cache
        self._check_draft(context_hidden_states, anchor_ids, cache, num_tokens, logits_processor, input_ids)
        self._check_text(context_hidden_states, context_lengths, input_ids)
        self.check_lender(target)
        context, tokens, counts = _aligned(context_hidden_states, context_lengths, input_ids, anchor_ids, cache)
        embeds = self.embed(tokens, target)
        hidden = self._read(embeds, self.fc(context.to(embeds.device, embeds.dtype)), counts, cache)
        held = cache.lengths, cache.max_length

        drafted, logits, states, bases = [], [], [], []
        for k in range(self.config.block_size if num_tokens is None else num_tokens):
            if k:
                hidden = self._read(self.embed(drafted[-1][:, None], target), hidden, 1, cache)
            states.append(self.norm(hidden[:, 0]))
            bases.append(self.base_logits(states[-1], target))
            token, step_logits = self._draw(bases[-1], drafted, do_sample, logits_processor, input_ids)
            drafted.append(token)
            logits.append(step_logits)
        cache.lengths, cache.max_length = held  # a pair made of the drafter's own state is never context

        rows, (hidden_size, whole) = len(anchor_ids), (self.config.hidden_size, self.config.vocab_size)
        return DSparkDraftOutput(
            token_ids=stacked(drafted, anchor_ids.new_empty(rows, 0)),
            logits=self.to_target_vocabulary(stacked(logits, hidden.new_empty(rows, 0, whole, dtype=torch.float32))),
            hidden_states=stacked(states, hidden.new_empty(rows, 0, hidden_size)),
            base_logits=self.to_target_vocabulary(stacked(bases, hidden.new_empty(rows, 0, whole))),
            cache=cache,
        )

    def _read(
        self, embeds: torch.Tensor, hidden: torch.Tensor, counts: int | torch.Tensor, cache: Eagle3Cache
    ) -> torch.Tensor:
        """Puts the pairs of (B, n, H) each into the cache, and gives o of each row's last one, (B, 1, H)."""
        layer, (rows, width), device = self.layers[0], embeds.shape[:2], embeds.device
        positions = cache.ends(rows, device)[:, None] + torch.arange(width, device=device)
        cos, sin = self.rotary_emb(positions, embeds.dtype)
        pairs = layer.pairs(embeds, hidden)
        key, value = cache.write(0, *layer.self_attn.key_value(pairs, cos, sin))
        cache.advance(counts)
        mask = None
        if rows > 1 or torch.is_tensor(counts):
            seen = torch.arange(key.shape[2], device=device) < cache.lengths[:, None]
            mask = self._attention_mask(seen[:, None, None], embeds.dtype)
        last = (torch.as_tensor(counts, device=device).expand(rows) - 1)[:, None, None]
        hidden, pairs, cos, sin = (
            part.gather(1, last.expand(rows, 1, part.shape[2])) for part in (hidden, pairs, cos, sin)
        )
        return layer(hidden, pairs, key, value, cos, sin, mask)

    def _check_text(self, context, context_lengths, input_ids) -> None:
        rows, width = context.shape[:2]
        if input_ids is None or input_ids.ndim != 2 or len(input_ids) != rows or not input_ids.shape[1]:
            shape = None if input_ids is None else tuple(input_ids.shape)
            raise ValueError(f"input_ids has shape {shape}, expected ({rows}, T), the texts up to the anchors")
        lengths = torch.tensor(width) if context_lengths is None else context_lengths
        if not width or bool(((lengths < 1) | (lengths > width)).any()):
            raise ValueError(
                f"{lengths.tolist()} rows of new context were given, expected 1 or more, up to the {width} of "
                "context_hidden_states: the draft goes on from the last one"
            )

    # ------------------------------------------------------------------------------------------------------ training

    def forward(
        self,
        input_ids: torch.LongTensor,
        loss_mask: torch.Tensor | None = None,
        target_hidden_states: torch.Tensor | None = None,
        target_last_hidden_states: torch.Tensor | None = None,
        anchor_positions: torch.LongTensor | None = None,
        anchor_mask: torch.BoolTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        target_logsumexp: torch.Tensor | None = None,
        document_ids: torch.LongTensor | None = None,
        objective: Objective | None = None,
        total_weight: torch.Tensor | None = None,
        return_loss: bool = True,
    ) -> DSparkOutput:
        """The training pass: γ unrolled steps at every position of known text, or at those before some anchors only.

        Args:
            input_ids, loss_mask, target_hidden_states, target_last_hidden_states, attention_mask, target_logsumexp: as
                for the DSpark drafter.
            anchor_positions, anchor_mask: (B, A), as for the DSpark drafter and with the same labels, so that both can
                be trained on the very same slots; the steps of anchor p start at t = p − 1. EAGLE-3's own training, at
                every position, by default.
            document_ids: (B, T), as for the DSpark drafter; with anchors only.
            objective: weights of the loss terms. By default soft cross-entropy, which is KL plus the entropy of the
                target: that entropy is added wherever `kl_weight` is above 0. In a reduced draft vocabulary both are
                sums over its tokens, at the target's own chances.
            total_weight: the divisor of the loss; by default B·T, or with anchors the weight of their slots.

        Returns:
            As for the DSpark drafter; without anchors every position counts as one (A = T): step s at position t is
            slot (t, s).
        """
        self.check_lender()
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, expected (B, T)")
        if document_ids is not None and (anchor_positions is None or target_hidden_states is None):
            raise ValueError("document_ids were given, expected anchor_positions and target_hidden_states with them")
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        loss_mask = real if loss_mask is None else loss_mask
        if target_hidden_states is None:
            target_hidden_states, target_last_hidden_states = self._attached_target_states(input_ids, attention_mask)
        objective = objective or self.default_objective(target_last_hidden_states is not None)
        if objective.needs_teacher and target_last_hidden_states is None:
            raise ValueError(f"target_last_hidden_states is missing, expected with {objective}")

        if anchor_positions is None:
            anchors = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device).expand_as(input_ids)
            slot_mask, labels = unrolled_slots(input_ids, loss_mask, real, self.config.block_size)
            if total_weight is None:
                total_weight = torch.tensor(float(input_ids.numel()), device=input_ids.device)
        else:
            anchors, mask = anchor_positions, with_predecessor(anchor_positions, anchor_mask, document_ids)
            labels, slot_mask = block_labels(input_ids, loss_mask, anchors, mask, self.config.block_size, document_ids)
        draft_labels = self.to_draft_labels(labels.clamp(min=0)).masked_fill(labels < 0, -100)
        hidden = self._unrolled(input_ids, target_hidden_states, (anchors - 1).clamp(min=0), document_ids)
        has_teacher = target_last_hidden_states is not None
        if has_teacher:
            rows = anchors[..., None] + torch.arange(slot_mask.shape[-1], device=input_ids.device)
            rows = (rows + input_ids.shape[1] * torch.arange(len(rows), device=rows.device)[:, None, None])[slot_mask]
            states = target_last_hidden_states.flatten(0, 1)
            target_logsumexp = self.teacher_logsumexp(states, rows, target_logsumexp)
        losses = self._slot_losses(
            hidden, None, draft_labels, slot_mask, anchors, target_last_hidden_states, target_logsumexp, objective
        )
        if objective.kl_weight:
            target_entropies = entropies(self.teacher_logits, states, rows, target_logsumexp, objective.chunk_size)
            losses[2, slot_mask] += target_entropies[rows]
        return DSparkOutput(
            **drafter_loss(losses, has_teacher, draft_labels < 0, None, slot_mask, objective, total_weight),
            target_ids=labels,
            loss_mask=slot_mask,
        )

    def default_objective(self, has_teacher: bool) -> Objective:
        """EAGLE-3's soft cross-entropy with weights β^s; the tokens' own without a teacher."""
        decay = -1.0 / math.log(self.config.step_loss_decay)
        return Objective(0.0 if has_teacher else 1.0, 0.0, 0.0, kl_weight=1.0 if has_teacher else 0.0, decay=decay)

    def _unrolled(
        self,
        input_ids: torch.Tensor,
        target_hidden_states: torch.Tensor,
        starts: torch.Tensor,
        document_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """norm(o) of every step from the positions t in `starts` (B, A) on, (B, A, γ, H). Step 0 is made for the whole
        text, since all pairs of it can be attended to; later steps for those positions alone."""
        layer, (_, length), device = self.layers[0], input_ids.shape, input_ids.device
        text = torch.arange(length, device=device).expand_as(input_ids)
        seen = text[:, None] <= starts[..., None]
        if document_ids is not None:
            text = text_positions(document_ids)
            seen = seen & (document_ids[:, None] == document_ids.gather(1, starts)[..., None])
        hidden = self.fc(target_hidden_states.to(self.fc.weight.dtype))
        pairs = layer.pairs(self.embed(shifted(input_ids, 1)), hidden)
        key, value = layer.self_attn.key_value(pairs, *self.rotary_emb(text, pairs.dtype))
        hidden, pairs = (part.gather(1, starts[..., None].expand(-1, -1, part.shape[2])) for part in (hidden, pairs))
        first = text.gather(1, starts)
        diagonal = torch.eye(starts.shape[1], dtype=torch.bool, device=device).expand(len(starts), -1, -1)
        keys, values, outputs = [key], [value], []
        for step in range(self.config.block_size):
            cos, sin = self.rotary_emb(first + step, pairs.dtype)
            if step:
                follows = (starts + step + 1).clamp(max=length - 1)  # beyond the text nothing counts
                pairs = layer.pairs(self.embed(input_ids.gather(1, follows)), hidden)
                key, value = layer.self_attn.key_value(pairs, cos, sin)
                keys, values = [*keys, key], [*values, value]
                seen = torch.cat([seen, diagonal], dim=-1)
            mask = self._attention_mask(seen[:, None], pairs.dtype)
            hidden = layer(hidden, pairs, torch.cat(keys, dim=2), torch.cat(values, dim=2), cos, sin, mask)
            outputs.append(hidden)
        return self.norm(torch.stack(outputs, dim=2))


def _aligned(context, context_lengths, input_ids, anchor_ids, cache: Eagle3Cache):
    """New context (B, n, L·H), the token that follows each of its rows (B, n), and how many of these are real, an int
    or (B,). Finds each row's place in the text the first time."""
    device, width = input_ids.device, context.shape[1]
    counts = width if context_lengths is None else context_lengths.to(device)
    columns, held = cache.columns, 0 if cache.lengths is None else cache.lengths.to(device)
    if columns is None:
        columns = torch.zeros_like(anchor_ids) + (input_ids.shape[1] - 1 - counts)
        unknown = (-1 - columns).clamp(min=0)
        if unknown.any():
            slots = torch.arange(width, device=device)
            real = (slots >= unknown[:, None]) & (slots < torch.as_tensor(counts, device=device).view(-1, 1))
            context, counts, columns = left_aligned(context, real), counts - unknown, columns + unknown
            cache.start = cache.start + unknown
    ends = columns + held + counts
    if (ends >= input_ids.shape[1]).any() or (input_ids.gather(1, ends[:, None])[:, 0] != anchor_ids).any():
        raise ValueError(
            f"input_ids do not have the anchors {anchor_ids.tolist()} in columns {ends.tolist()}, expected the texts "
            "of the last round and the tokens committed since"
        )
    cache.columns = columns
    follows = (columns + held)[:, None] + torch.arange(1, context.shape[1] + 1, device=device)
    return context, input_ids.gather(1, follows.clamp(max=input_ids.shape[1] - 1)), counts


AutoConfig.register(Eagle3Config.model_type, Eagle3Config)
AutoModel.register(Eagle3Config, Eagle3DrafterModel)
