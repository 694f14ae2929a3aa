"""DSparkDrafterModel: `draft()` proposes a block, `forward()` is the training pass.

    target hidden states ──fc──hidden_norm──► context  ─┐
    [anchor, MASK × γ−1]  ──embed──►  parallel backbone (one pass)  ─► h_1..h_γ, U_1..U_γ
                             sequential head, left to right:  p_k ∝ exp(U_k + B(x_{k−1}))  ─► x_k
                             confidence head:  c_k = σ(w·[h_k ; W1 x_{k−1}])   (known before x_k is drawn)

Slot k of a block predicts the token at anchor + k + 1. With `sample_from_anchor=False` (mask-filling, as in DFlash) the
block is [anchor, MASK × γ], what the anchor's input gives is dropped, and slot k is the mask at the very position that
it predicts. Shapes: B rows, γ slots, H hidden size, L target layers read, V vocabulary, D draft vocabulary.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from .backbone_dspark import RMS_NORMS, DSparkDecoderLayer, DSparkRotaryEmbedding
from .configuration_dspark import DSparkConfig
from .drafter_dspark import DrafterModel, DSparkDraftOutput, DSparkOutput
from .heads_dspark import MARKOV_HEAD_CLASSES, ConfidenceHead
from .objective_dspark import (
    Objective,
    block_attention_mask,
    block_labels,
    drafter_loss,
    sample_anchors,
    text_positions,
)
from .processing_dspark import stacked
from .rows_dspark import RowCache


class DSparkDrafterModel(DrafterModel):
    """A DSpark drafter. Loads this package's layout and the official checkpoints as they are.

    Where the checkpoint holds no embedding or head (`has_embed_tokens`, `has_lm_head`), the target's own modules are
    used without a copy: pass `target=` to `draft()`, call `attach_target()` before training, or let `generate()` do it.
    """

    config_class = DSparkConfig
    _no_split_modules = ["DSparkDecoderLayer"]
    _supports_flex_attn = True

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        norm = RMS_NORMS[config.backbone_type]
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = norm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DSparkDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = norm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = DSparkRotaryEmbedding(config)
        self.markov_head = MARKOV_HEAD_CLASSES[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self._init_vocabulary(config)
        self.post_init()

    # ------------------------------------------------------------------------------------------------------ drafting

    @torch.no_grad()
    def draft(
        self,
        context_hidden_states: torch.Tensor,
        anchor_ids: torch.Tensor,
        cache: RowCache | None = None,
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
            context_hidden_states: (B, n, L·H), the target's states of the tokens committed since the last round, in the
                order of `target_layer_ids`; all tokens before the anchor in the first round.
            anchor_ids: (B,), the newest token, not yet seen by the target.
            cache: as returned by the last round.
            num_tokens: propose this many, 0..γ, instead of γ.
            do_sample: draw from the distribution instead of taking its mode.
            logits_processor: called as `(prefix ids, logits (B, V)) -> logits` before each token; needs `input_ids`.
            input_ids: (B, T), each row's text up to and including the anchor.
            context_lengths: (B,), how many of the n new context rows each row really has; all by default.
            stop: called before token k with the confidence logits of tokens 0..k (B, k + 1); true ends the block there.
            target: lends its embedding and head where the drafter has none.

        Raises:
            ValueError: for shapes or counts that do not fit, before anything is computed.
        """
        cache = RowCache() if cache is None else cache
        self._check_draft(context_hidden_states, anchor_ids, cache, num_tokens, logits_processor, input_ids)
        self.check_lender(target)
        batch_size = len(anchor_ids)
        ids = anchor_ids.new_full((batch_size, self.config.num_block_inputs), self.config.mask_token_id)
        ids[:, 0] = anchor_ids
        hidden = self._draft_backbone(self.embed(ids, target), context_hidden_states, context_lengths, cache)
        hidden = hidden[:, -self.config.block_size :]

        limit = self.config.block_size if num_tokens is None else num_tokens
        tokens, logits, confidences, base_logits = [], [], [], None
        previous, state, has_confidence = anchor_ids, None, self.confidence_head is not None
        for k in range(limit):
            embedding = self.markov_head.embed(previous) if self.markov_head is not None else None
            if has_confidence:
                confidences.append(self.confidence_head(hidden[:, k], embedding))
                if stop is not None and stop(torch.stack(confidences, dim=1)):
                    confidences.pop()
                    break
            if base_logits is None:  # not before, as the policy may want no token at all
                base_logits = self.base_logits(hidden, target)
            step_logits = base_logits[:, k]
            if self.markov_head is not None:
                latent, state = self.markov_head.latent(embedding, hidden[:, k], state)
                step_logits = step_logits + self.markov_head.project(latent)
            previous, step_logits = self._draw(step_logits, tokens, do_sample, logits_processor, input_ids)
            tokens.append(previous)
            logits.append(step_logits)

        whole, options = self.config.vocab_size, {"dtype": torch.float32, "device": hidden.device}
        return DSparkDraftOutput(
            token_ids=stacked(tokens, anchor_ids.new_empty(batch_size, 0)),
            logits=self.to_target_vocabulary(stacked(logits, torch.empty(batch_size, 0, whole, **options))),
            confidence_logits=stacked(confidences, torch.empty(batch_size, 0, **options)) if has_confidence else None,
            hidden_states=hidden,
            base_logits=None if base_logits is None else self.to_target_vocabulary(base_logits),
            cache=cache,
        )

    def _draft_backbone(self, embeds, context_hidden_states, context_lengths, cache: RowCache) -> torch.Tensor:
        """One pass over the block, (B, inputs, H) → h of each; the new context rows enter `cache`."""
        batch_size, count = context_hidden_states.shape[:2]
        device, dtype, num_inputs = embeds.device, embeds.dtype, embeds.shape[1]
        context = self.hidden_norm(self.fc(context_hidden_states.to(device, dtype)))
        ends = cache.ends(batch_size, device)
        counts = count if context_lengths is None else context_lengths.to(device)
        context_cos_sin = self.rotary_emb(ends[:, None] + torch.arange(count, device=device), dtype)
        cos, sin = self.rotary_emb((ends + counts)[:, None] + torch.arange(num_inputs, device=device), dtype)

        key_values = []
        for i, layer in enumerate(self.layers):
            key_values.append(cache.write(i, *layer.self_attn.key_value(context, *context_cos_sin)))
        cache.advance(counts)
        mask = None
        if batch_size > 1 or context_lengths is not None:
            width = key_values[0][0].shape[2]
            seen = torch.arange(width, device=device) < cache.lengths[:, None]
            seen = nn.functional.pad(seen, (0, num_inputs), value=True)[:, None, None]
            mask = self._attention_mask(seen.expand(-1, 1, num_inputs, -1), dtype)
        for layer, key_value in zip(self.layers, key_values, strict=True):
            embeds = layer(embeds, *key_value, cos, sin, mask)
        return self.norm(embeds)

    # ------------------------------------------------------------------------------------------------------ training

    def forward(
        self,
        input_ids: torch.LongTensor,
        loss_mask: torch.Tensor | None = None,
        target_hidden_states: torch.Tensor | None = None,
        target_last_hidden_states: torch.Tensor | None = None,
        anchor_positions: torch.LongTensor | None = None,
        anchor_mask: torch.BoolTensor | None = None,
        output_logits: bool = False,
        attention_mask: torch.Tensor | None = None,
        target_logsumexp: torch.Tensor | None = None,
        document_ids: torch.LongTensor | None = None,
        objective: Objective | None = None,
        total_weight: torch.Tensor | None = None,
        return_loss: bool = True,
    ) -> DSparkOutput:
        """The training pass over blocks anchored in known text.

        Args:
            input_ids: (B, T), right-padded.
            loss_mask: (B, T), true on the tokens to be learnt (the response); all of `attention_mask` by default.
            target_hidden_states: (B, T, L·H), states of `target_layer_ids`; computed by the attached target if absent.
            target_last_hidden_states: (B, T, H), states after the target's final norm; without them only CE is learnt.
            anchor_positions, anchor_mask: (B, A), drawn from `loss_mask` if absent.
            output_logits: return the draft logits too, (B, A, γ, V), at the price of their memory.
            attention_mask: (B, T), false on padding; needed only where the attached target computes the states.
            target_logsumexp: (B, T), the target's normaliser, for a reduced draft vocabulary; computed if absent.
            document_ids: (B, T), which document of its row a token belongs to, where several were packed into a row.
            objective: weights of the loss terms; the paper's by default, CE alone for a drafter without heads (DFlash).
            total_weight: the divisor of the loss, that of the whole optimisation step where this batch is a part of
                it (`objective_dspark.total_weight`); of this batch by default.
            return_loss: read by `Trainer`, which evaluates the loss only where this parameter is.
        """
        self.check_lender()
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, expected (B, T)")
        if loss_mask is None:
            loss_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if target_hidden_states is None and document_ids is not None:
            raise ValueError("target_hidden_states is missing, expected with document_ids: each document has its own")
        if target_hidden_states is None:
            target_hidden_states, target_last_hidden_states = self._attached_target_states(input_ids, attention_mask)
        if anchor_positions is None:
            anchor_positions, anchor_mask = sample_anchors(
                loss_mask, self.config.num_anchors, document_ids=document_ids
            )
        elif anchor_mask is None:
            anchor_mask = torch.ones_like(anchor_positions, dtype=torch.bool)
        objective = objective or self.default_objective(target_last_hidden_states is not None)
        if objective.needs_teacher and target_last_hidden_states is None:
            raise ValueError(f"target_last_hidden_states is missing, expected with {objective}")

        hidden = self._block_states(input_ids, target_hidden_states, anchor_positions, anchor_mask, document_ids)
        labels, slot_mask = block_labels(
            input_ids, loss_mask, anchor_positions, anchor_mask, self.config.block_size, document_ids
        )
        anchors = input_ids.gather(1, anchor_positions)
        previous = torch.cat([anchors[..., None], labels[..., :-1]], dim=-1)
        embeddings, latents = None, None
        if self.markov_head is not None:
            embeddings = self.markov_head.embed(previous)
            latents = self.markov_head.block_latents(embeddings, hidden)
        confidence_logits = None
        if self.confidence_head is not None:
            features = (hidden, embeddings)
            if objective.detach_confidence:
                features = (feature if feature is None else feature.detach() for feature in features)
            confidence_logits = self.confidence_head(*features)

        draft_labels = self.to_draft_labels(labels)
        losses = self._slot_losses(
            hidden,
            latents,
            draft_labels,
            slot_mask,
            anchor_positions,
            target_last_hidden_states,
            target_logsumexp,
            objective,
        )
        has_teacher, unreachable = target_last_hidden_states is not None, draft_labels < 0
        return DSparkOutput(
            **drafter_loss(losses, has_teacher, unreachable, confidence_logits, slot_mask, objective, total_weight),
            logits=self.to_target_vocabulary(self._draft_logits(hidden, latents)) if output_logits else None,
            confidence_logits=confidence_logits,
            target_ids=labels,
            loss_mask=slot_mask,
        )

    def default_objective(self, has_teacher: bool) -> Objective:
        """The paper's weights; CE alone without a teacher, or without any head (DFlash)."""
        headless = self.markov_head is None and self.confidence_head is None
        return Objective() if has_teacher and not headless else Objective(1.0, 0.0, 0.0)

    def _block_states(self, input_ids, target_hidden_states, positions, anchor_mask, document_ids) -> torch.Tensor:
        """h of all blocks in one pass, (B, A, γ, H)."""
        batch_size, length = input_ids.shape
        num_inputs, dtype = self.config.num_block_inputs, self.fc.weight.dtype
        blocks = input_ids.new_full((*positions.shape, num_inputs), self.config.mask_token_id)
        blocks[..., 0] = torch.where(anchor_mask, input_ids.gather(1, positions), self.config.mask_token_id)
        hidden = self.embed(blocks.flatten(1))
        context = self.hidden_norm(self.fc(target_hidden_states.to(dtype)))

        if document_ids is None:
            text = torch.arange(length, device=input_ids.device).expand(batch_size, -1)
        else:
            text = text_positions(document_ids)
        anchors = text.gather(1, positions)
        slots = (anchors[..., None] + torch.arange(num_inputs, device=input_ids.device)).flatten(1)
        context_cos_sin, (cos, sin) = self.rotary_emb(text, dtype), self.rotary_emb(slots, dtype)
        mask = block_attention_mask(positions, anchor_mask, num_inputs, length, document_ids)
        mask = self._attention_mask(mask, hidden.dtype)
        for layer in self.layers:
            key, value = layer.self_attn.key_value(context, *context_cos_sin)
            hidden = layer(hidden, key, value, cos, sin, mask)
        return self.norm(hidden).unflatten(1, (-1, num_inputs))[:, :, -self.config.block_size :]


DSparkDrafterModel.register_for_auto_class("AutoModel")
