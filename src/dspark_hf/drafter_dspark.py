"""What every drafter is, whatever it drafts with: its checkpoints, its place in `generate()`, its losses.

A drafter has `fc`, `layers` and `norm`, an embedding and a head of its own or the target's (`VocabularyMixin`), and
defines `draft()`, `forward()` and `default_objective()`. Shapes: B rows, A anchors, γ slots, H hidden size, L target
layers read, T tokens of text, V vocabulary.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .configuration_dspark import DSparkConfig
from .generation_dspark import DSparkCandidateGenerator, check_generation, speculative_decode
from .hook_dspark import install_hook, save_custom_generate
from .objective_dspark import chunked_slot_losses
from .processing_dspark import drawn_token
from .rows_dspark import RowCache
from .scheduling_dspark import FixedLength, VerifyPolicy
from .target_dspark import target_states
from .vocabulary_dspark import VocabularyMixin


@dataclass
class DSparkDraftOutput(ModelOutput):
    """
    token_ids (B, n): proposed tokens; n = γ, or less where `num_tokens` or `stop` cut the block.
    logits (B, n, V): the very distributions the tokens were drawn from, before softmax, float32.
    confidence_logits (B, n): logit of each token's chance of acceptance, float32, or None without the head.
    hidden_states (B, γ, H): h_k of the whole block.
    base_logits (B, γ, V): U_k of the whole block, before the sequential head; None where no token was drafted.
    cache: context keys and values, to be given back in the next round.
    """

    token_ids: torch.LongTensor | None = None
    logits: torch.FloatTensor | None = None
    confidence_logits: torch.FloatTensor | None = None
    hidden_states: torch.FloatTensor | None = None
    base_logits: torch.FloatTensor | None = None
    cache: RowCache | None = None


@dataclass
class DSparkOutput(ModelOutput):
    """
    loss, ce_loss, l1_loss, confidence_loss: scalars; the last two are None where the teacher or the head is missing.
    logits (B, A, γ, V): draft logits if asked for.
    confidence_logits (B, A, γ): float32, or None without the head.
    acceptance (B, A, γ): 1 − ½ L1, the chance that the target accepts a draw of the slot, or None without a teacher.
    target_ids (B, A, γ): labels.
    loss_mask (B, A, γ): m_k, the supervised slots.
    """

    loss: torch.FloatTensor | None = None
    ce_loss: torch.FloatTensor | None = None
    l1_loss: torch.FloatTensor | None = None
    confidence_loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    confidence_logits: torch.FloatTensor | None = None
    acceptance: torch.FloatTensor | None = None
    target_ids: torch.LongTensor | None = None
    loss_mask: torch.BoolTensor | None = None


class DrafterModel(VocabularyMixin, PreTrainedModel):
    """A drafter without the modules that it drafts with."""

    base_model_prefix = "model"
    main_input_name = "input_ids"
    input_modalities = ("text",)
    accepts_loss_kwargs = False  # the loss is a mean over supervised slots, not over labels
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = False  # training needs an arbitrary mask

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.markov_head = self.confidence_head = None
        self.verify_policy: VerifyPolicy = FixedLength()
        self.acceptance_rule = "token"  # or "block", see `verification_dspark`
        self.gradient_checkpointing = False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers, except that a missing or unknown tensor raises `ValueError`: a drafter with a random or
        ignored part would run, exact and slow. A missing embedding or head is left to the target."""
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing, unknown = set(info["missing_keys"]), set(info["unexpected_keys"])
        for name in ("embed_tokens", "lm_head"):
            if f"{name}.weight" in missing:
                missing.remove(f"{name}.weight")
                setattr(model, name, None)
                setattr(model.config, f"has_{name}", False)
        if missing or unknown:
            raise ValueError(
                f"{pretrained_model_name_or_path} does not hold the drafter that its configuration describes: "
                f"missing tensors {sorted(missing)}, unknown tensors {sorted(unknown)}"
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, is_main_process: bool = True, **kwargs):
        """As in transformers; the folder also serves `generate(..., custom_generate=folder)`."""
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            save_custom_generate(save_directory)

    # ---------------------------------------------------------------------------------------------------- generate()
    # What the hook in transformers' generate() calls on an assistant.

    def check_generation(self, target, generation_config) -> None:
        """Raises `ValueError` where this drafter cannot serve the call."""
        check_generation(target, self, generation_config)

    def speculative_decode(self, target, *args, **kwargs):
        """See `generation_dspark.speculative_decode`."""
        return speculative_decode(self, target, *args, **kwargs)

    def candidate_generator(self, target, generation_config, logits_processor, model_kwargs):
        """The drafting half alone, for transformers' own assisted loop."""
        return DSparkCandidateGenerator(self, target, generation_config, logits_processor, model_kwargs)

    def new_cache(self, start: int | torch.Tensor = 0) -> RowCache:
        """An empty draft cache whose rows will start at absolute position `start`, an int or (B,)."""
        return RowCache(start)

    # ------------------------------------------------------------------------------------------------------ drafting

    @torch.no_grad()
    def anchor_confidence_logits(self, anchor_ids: torch.Tensor) -> torch.Tensor | None:
        """What is known of the first tokens' confidence logits before a block is drafted, w · [0 ; W1[anchor]] + b:
        anchors (B,) → (B,) float32. None where the confidence head does not read W1[x]."""
        if self.confidence_head is None or not self.confidence_head.with_markov:
            return None
        embedding = self.markov_head.embed(anchor_ids)
        return self.confidence_head(embedding.new_zeros(*anchor_ids.shape, self.config.hidden_size), embedding)

    def _attention_mask(self, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Bool mask, true where attended, in the form that the attention implementation takes."""
        if self.config._attn_implementation == "sdpa":
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    def _check_draft(self, context, anchor_ids, cache, num_tokens, logits_processor, input_ids) -> None:
        width = len(self.config.target_layer_ids) * self.config.hidden_size
        if context.ndim != 3 or context.shape[-1] != width:
            raise ValueError(
                f"context_hidden_states has shape {tuple(context.shape)}, expected (B, n, {width}): "
                f"{len(self.config.target_layer_ids)} layers of {self.config.hidden_size}"
            )
        if anchor_ids.shape != context.shape[:1]:
            raise ValueError(f"anchor_ids has shape {tuple(anchor_ids.shape)}, expected ({context.shape[0]},)")
        if cache.lengths is not None and cache.lengths.shape != anchor_ids.shape:
            raise ValueError(f"the cache holds {len(cache.lengths)} rows, expected {len(anchor_ids)}")
        if num_tokens is not None and not 0 <= num_tokens <= self.config.block_size:
            raise ValueError(f"num_tokens is {num_tokens}, expected 0..{self.config.block_size} (block_size)")
        if logits_processor and input_ids is None:
            raise ValueError("logits_processor was given without input_ids, expected the text up to the anchor (B, T)")

    def _draw(self, logits, drafted, do_sample, logits_processor, input_ids) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of a draft (B,) from draft logits (B, D), and the logits of the distribution that it was drawn
        from: (B, V) where processors saw them, (B, D) without any, which is cheaper; arguments as for `drawn_token`."""
        if logits_processor:
            return drawn_token(self.to_target_vocabulary(logits), drafted, do_sample, logits_processor, input_ids)
        draft_ids, logits = drawn_token(logits, drafted, do_sample, None, None)
        return self.to_target_ids(draft_ids), logits

    # ------------------------------------------------------------------------------------------------------ training

    def _attached_target_states(self, input_ids, attention_mask):
        if not self._target:
            raise ValueError("target_hidden_states is missing and no target attached: call attach_target(target)")
        target, layer_ids = self._target[0], self.config.target_layer_ids
        mask = None if attention_mask is None else attention_mask.to(target.device)
        states = target_states(target, input_ids.to(target.device), mask, layer_ids)
        return tuple(state.to(input_ids.device) for state in states)

    def _draft_logits(self, hidden: torch.Tensor, latents: torch.Tensor | None) -> torch.Tensor:
        logits = self.base_logits(hidden)
        return logits if latents is None else logits + self.markov_head.project(latents)

    def _slot_losses(
        self, hidden, latents, draft_labels, slot_mask, positions, last_hidden_states, logsumexp, objective
    ) -> torch.Tensor:
        """CE, L1 and KL of every slot, (2 or 3, B, A, γ) float32, 0 where unsupervised."""
        text, anchor, slot = slot_mask.nonzero(as_tuple=True)
        rows = positions[text, anchor] + slot
        if last_hidden_states is not None:
            rows = rows + text * last_hidden_states.shape[1]
            last_hidden_states = last_hidden_states.flatten(0, 1)
            logsumexp = self.teacher_logsumexp(last_hidden_states, rows, logsumexp)
        losses = chunked_slot_losses(
            self._draft_logits,
            self.teacher_logits,
            hidden[slot_mask],
            None if latents is None else latents[slot_mask],
            draft_labels[slot_mask],
            last_hidden_states,
            rows,
            logsumexp if last_hidden_states is not None else None,
            objective.chunk_size,
            with_kl=objective.kl_weight > 0,
        )
        zeros = torch.zeros(len(losses), *slot_mask.shape, dtype=torch.float32, device=hidden.device)
        return zeros.masked_scatter(slot_mask, losses)


install_hook()
