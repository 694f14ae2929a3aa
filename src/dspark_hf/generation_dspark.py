"""Speculative decoding: the candidate generator (drafting half) and the decoding loop, for every drafter.

A round: the drafter proposes ℓ ≤ γ tokens behind the newest one (the anchor), one target pass over anchor and proposal
gives the logits of ℓ + 1 positions, verification keeps a prefix and adds one token, the cache drops what was refused.
Tokens are then committed one by one, as plain `generate()` would: a stopping criterion that fires inside a block ends
the text there, streamers see each token, scores come per token.

The loop uses the target's public forward and the steps of `generate()` around it (`_prefill`,
`prepare_inputs_for_generation`, `_update_model_kwargs_for_generation`), so that prefilled caches, embeddings as prompt
and chunked prefill are handled as there. B rows, T tokens of text so far, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import CandidateGenerator, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from .target_dspark import (
    CACHE_NAME,
    cache_length,
    cache_of,
    check_croppable,
    check_pair,
    context_states,
    is_static,
    key_columns,
    states_argument,
)
from .telemetry_dspark import report_round
from .verification_dspark import sample_token, verify_block

# Processors with a state that advances with every call; drafting and verifying call them more than once per token.
_STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


def check_generation(target: PreTrainedModel, drafter: Any, generation_config: GenerationConfig) -> None:
    """Raises `ValueError` for what cannot be decoded exactly, before anything is computed."""
    check_pair(target, drafter)
    mode = generation_config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise ValueError(
            f"the generation mode is {mode} (num_beams {generation_config.num_beams}), expected greedy search or "
            "sampling: nothing else can be drafted for"
        )
    if generation_config.guidance_scale not in (None, 1, 1.0):
        raise ValueError(
            f"guidance_scale is {generation_config.guidance_scale}, expected 1: its processor keeps a state of its "
            "own, which drafting would advance"
        )
    if generation_config.assistant_ensemble_weight is not None:
        raise ValueError(
            f"assistant_ensemble_weight is {generation_config.assistant_ensemble_weight}, expected None: mixing target "
            "and drafter changes the output distribution"
        )
    if generation_config.use_cache is False:
        raise ValueError("use_cache is False, expected True: speculative decoding needs the target's cache")
    if drafter.verify_policy.needs_confidence and not drafter.config.enable_confidence_head:
        raise ValueError(f"{drafter.verify_policy} needs a confidence head, and this drafter has none")


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts for one `generate()` call and holds all of its state; works in our loop and in transformers' own.

    Args:
        drafter: a model with `draft()`, `verify_policy` and a configuration naming `target_layer_ids`.
        target: the model that generates.
        generation_config, logits_processor: those of the call; the draft is drawn as the target's tokens are.
        model_kwargs: arguments of the target's forward.
    """

    requires_model_outputs = True

    def __init__(self, drafter, target, generation_config, logits_processor=None, model_kwargs=None):
        self.drafter, self.target = drafter, target
        self.config, self.logits_processor = generation_config, logits_processor
        self.cache = None
        self.prompt_mask = (model_kwargs or {}).get("attention_mask")
        wants_all = generation_config.return_dict_in_generate and generation_config.output_hidden_states
        states = True if wants_all else states_argument(drafter.config.target_layer_ids)
        self.model_kwargs_overrides = {"output_hidden_states": states}

    def propose(self, input_ids: torch.Tensor, outputs: ModelOutput, counts: torch.Tensor):
        """Drafts behind the last token of each row.

        Args:
            input_ids: (B, T), the text up to the anchor.
            outputs: of the target's last pass, with hidden states (B, n, H).
            counts: (B,), the first of those n states that belong to committed tokens; all of them after the prefill.

        Returns:
            The draft, and how many of its tokens to verify (B,).
        """
        context = context_states(outputs.hidden_states, self.drafter.config.target_layer_ids)
        if self.cache is None:
            context, start = self._first_context(context, cache_length(cache_of(outputs)))
            self.cache = self.drafter.new_cache(start)
            counts = torch.full_like(counts, context.shape[1])
        context = context[:, : int(counts.max())]
        policy = self.drafter.verify_policy
        limit = policy.draft_limit(self.drafter.config.block_size)
        if is_static(cache_of(outputs)):  # its room ends with the longest text
            limit = max(0, min(limit, self.config.max_length - 1 - input_ids.shape[1]))
        draft = self.drafter.draft(
            context.to(self.drafter.device),
            input_ids[:, -1].to(self.drafter.device),
            cache=self.cache,
            num_tokens=limit,
            do_sample=self.config.do_sample,
            logits_processor=processors_of(self.logits_processor, self.config, input_ids.shape[1]),
            input_ids=input_ids.to(self.drafter.device),
            context_lengths=counts.to(self.drafter.device) if len(counts) > 1 else None,
            stop=self._stop(policy),
            target=self.target,
        )
        self.cache = draft.cache
        if draft.confidence_logits is not None:
            lengths = policy.verify_lengths(draft.confidence_logits.sigmoid())
        else:
            lengths = policy.verify_lengths(torch.ones(draft.token_ids.shape))
        return draft, lengths.clamp(max=draft.token_ids.shape[1]).to(input_ids.device)

    def get_candidates(
        self, input_ids, model_kwargs=None, model_outputs=None, is_first_iteration=False, n_last_matches=0, **kwargs
    ):
        """For transformers' own assisted loop: text (1, T) → text and candidates (1, T + ℓ), their logits (1, ℓ, V)."""
        if is_first_iteration:
            return input_ids, None
        room = self.config.max_length - input_ids.shape[1] - 1
        counts = input_ids.new_tensor([int(n_last_matches) + 1])
        draft, lengths = self.propose(input_ids, model_outputs, counts)
        count = min(int(lengths[0]), max(room, 0))
        tokens = draft.token_ids[:, :count].to(input_ids.device)
        return torch.cat([input_ids, tokens], dim=1), draft.logits[:, :count] if count else None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing to update: the verify length is the policy's."""

    def _first_context(self, context: torch.Tensor, past_length: int) -> tuple[torch.Tensor, int]:
        """The prompt's states without padding, and the position of the first: above 0 where the cache came filled."""
        if self.prompt_mask is not None:
            real = self.prompt_mask[0].bool()
            past_length -= int((~real).sum())
            context = context[:, real[-context.shape[1] :].to(context.device)]
        return context, past_length - context.shape[1]

    def _stop(self, policy):
        if policy.wants(torch.ones(1)) is None:
            return None
        return lambda confidence_logits: not bool(policy.wants(confidence_logits.sigmoid()).any())


@torch.no_grad()
def speculative_decode(
    drafter: Any,
    target: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.LongTensor:
    """The decoding loop behind `target.generate(..., assistant_model=drafter)`.

    Args:
        input_ids: (B, T), the prompt; empty where it was given as `inputs_embeds`.

    Returns:
        The texts (B, T'), or with `return_dict_in_generate` an output with scores, logits, hidden states and attentions
        per token as plain `generate()` gives them.
    """
    _check_call(input_ids, model_kwargs, logits_processor, synced_gpus)
    do_sample = generation_config.do_sample
    steps = StepRecord(generation_config)
    generator = DSparkCandidateGenerator(drafter, target, generation_config, logits_processor, model_kwargs)
    model_kwargs |= generator.model_kwargs_overrides

    outputs = target._prefill(input_ids, generation_config, model_kwargs)
    cache = cache_of(outputs)
    check_croppable(cache)  # again, as its layers may have been made just now
    cache.activate_past_recording()  # not before, so that sliding windows do not keep the whole prompt
    cache.crop(0)
    logits = PositionLogits(outputs, logits_processor, generation_config, input_ids, width=0)
    tokens = sample_token(logits(0), do_sample)[:, None]
    draft, width, finished = None, 0, False

    while True:
        # Commit the new tokens one by one, as far as no criterion ends the text.
        room = generation_config.max_length - input_ids.shape[1]
        text = torch.cat([input_ids, tokens], dim=1)
        for count in range(1, min(tokens.shape[1], room) + 1):
            steps.add_scores(logits, count - 1)
            finished = bool(stopping_criteria(text[:, : input_ids.shape[1] + count], steps.scores).all())
            if streamer is not None:
                streamer.put(tokens[:, count - 1].cpu())
            if finished:
                break
        steps.add_states(outputs, cache, width, count)
        if draft is not None:
            last = text[:, input_ids.shape[1] + count - 1]
            cut = finished and (count < room or bool(ends_text(last, generation_config).any()))
            emitted = count if cut else tokens.shape[1]
            confidence_logits = None if draft.confidence_logits is None else draft.confidence_logits[0]
            report_round(width, min(tokens.shape[1] - 1, emitted), emitted, confidence_logits)
            cache.crop(-(width + 1 - count))
        input_ids = text[:, : input_ids.shape[1] + count]
        if finished:
            break
        model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=count)

        # Draft, verify, keep a prefix and one token more.
        draft, lengths = generator.propose(input_ids, outputs, lengths_like(input_ids, count))
        width = int(lengths.max())
        candidates = draft.token_ids[:, :width].to(input_ids.device)
        text = torch.cat([input_ids, candidates], dim=1)
        outputs = verify_pass(target, text, width, outputs, model_kwargs)
        logits = PositionLogits(outputs, logits_processor, generation_config, text, width)
        draft_logits = draft.logits[:, :width].to(input_ids.device)
        accepted, following = verify_block(candidates, draft_logits, lengths, logits, do_sample)
        tokens = torch.cat([candidates[:, : int(accepted[0])], following[:, None]], dim=1)

    if streamer is not None:
        streamer.end()
    return steps.output(input_ids, cache) if generation_config.return_dict_in_generate else input_ids


def verify_pass(
    target: PreTrainedModel, text: torch.Tensor, width: int, outputs: ModelOutput, model_kwargs: dict[str, Any]
) -> ModelOutput:
    """One target pass over the anchor and `width` candidates, the last tokens of `text` (B, T + width)."""
    model_kwargs = dict(model_kwargs)
    if width:
        model_kwargs = target._update_model_kwargs_for_generation(outputs, model_kwargs, num_new_tokens=width)
    inputs = target.prepare_inputs_for_generation(text, next_sequence_length=width + 1, **model_kwargs)
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = width + 1
    return target(**inputs, return_dict=True)


def processors_of(
    logits_processor: LogitsProcessorList | None, config: GenerationConfig, length: int
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The call's processors, for one block behind a text of `length` tokens; None where there are none.

    A block may run past an end token or the maximum length. What it holds there is never used, and never shown to the
    processors, which plain `generate()` spares it too: a plan of tokens by position has run out there, and a constraint
    has no successor to its last word.
    """
    if not logits_processor:
        return None

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ended = ends_text(input_ids[:, length:], config).any(dim=-1)
        if input_ids.shape[1] >= config.max_length or ended.all():
            return scores
        if not ended.any():
            return logits_processor(input_ids, scores)
        return scores.index_put((~ended,), logits_processor(input_ids[~ended], scores[~ended]))

    return process


def ends_text(token_ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """Which tokens are end tokens, of the same shape."""
    ends = config._eos_token_tensor
    return torch.zeros_like(token_ids, dtype=torch.bool) if ends is None else torch.isin(token_ids, ends.to(token_ids))


class PositionLogits:
    """The target's logits after one pass, processed position by position: most processors look at the text so far, and
    those of a token that comes after a refused one are never needed.

    Args:
        text: (B, T + width), whose last `width` tokens are candidates.
    """

    def __init__(
        self,
        outputs: ModelOutput,
        logits_processor: LogitsProcessorList,
        config: GenerationConfig,
        text: torch.Tensor,
        width: int,
    ):
        self.raw = outputs.logits[:, -width - 1 :]
        self.text, self.length = text, text.shape[1] - width
        self.processor = processors_of(logits_processor, config, self.length)
        self.processed: dict[int, torch.Tensor] = {}

    def __call__(self, position: int, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Processed logits of the token at `position` 0..width of the rows asked for, (n, V) float32."""
        rows = torch.arange(len(self.text), device=self.text.device) if rows is None else rows
        scores = self.raw_logits(position)[rows]
        if self.processor is not None:
            scores = self.processor(self.text[rows, : self.length + position], scores)
        self.processed[position] = scores
        return scores

    def raw_logits(self, position: int) -> torch.Tensor:
        """(B, V) float32, a copy."""
        return self.raw[:, position].to(self.text.device, torch.float32, copy=True)


class StepRecord:
    """What `return_dict_in_generate` asks for, one entry per token."""

    def __init__(self, config: GenerationConfig):
        wanted = config.return_dict_in_generate
        self.scores = () if wanted and config.output_scores else None
        self.logits = () if wanted and config.output_logits else None
        self.hidden_states = () if wanted and config.output_hidden_states else None
        self.attentions = () if wanted and config.output_attentions else None

    def add_scores(self, logits: PositionLogits, position: int) -> None:
        if self.scores is not None:
            self.scores += (logits.processed[position],)
        if self.logits is not None:
            self.logits += (logits.raw_logits(position),)

    def add_states(self, outputs: ModelOutput, cache: Cache, width: int, count: int) -> None:
        """The states of a pass over width + 1 tokens, cut into those of its first `count` tokens: (B, 1, H) per layer,
        and attentions (B, heads, 1, keys that it could see). Those of the prefill and of a single token stay whole."""
        for name in ("hidden_states", "attentions"):
            if getattr(self, name) is None:
                continue
            layers, steps = getattr(outputs, name), ()
            for i in range(count):
                if width == 0:
                    steps += (layers,)
                elif name == "hidden_states":
                    steps += (tuple(layer[:, i : i + 1] for layer in layers),)
                else:
                    steps += (
                        tuple(
                            layer[:, :, i : i + 1, key_columns(cache, j, layer.shape[-1], width - i)]
                            for j, layer in enumerate(layers)
                        ),
                    )
            setattr(self, name, getattr(self, name) + steps)

    def output(self, sequences: torch.Tensor, cache) -> GenerateDecoderOnlyOutput:
        states = {name: getattr(self, name) for name in ("scores", "logits", "hidden_states", "attentions")}
        return GenerateDecoderOnlyOutput(sequences=sequences, **states, **{CACHE_NAME: cache})


def lengths_like(input_ids: torch.Tensor, count: int) -> torch.Tensor:
    """(B,) filled with `count`."""
    return input_ids.new_full((len(input_ids),), count)


def _check_call(input_ids, model_kwargs, logits_processor, synced_gpus) -> None:
    if len(input_ids) != 1:
        raise ValueError(f"the batch has {len(input_ids)} rows, expected 1")
    if synced_gpus:
        raise ValueError("synced_gpus is True, expected False: the ranks' rounds differ in number (FSDP, ZeRO-3)")
    if model_kwargs.get(CACHE_NAME) is None:
        raise ValueError("the target was called without a cache, which speculative decoding needs")
    check_croppable(model_kwargs[CACHE_NAME])
    for processor in logits_processor:
        if isinstance(processor, _STATEFUL_PROCESSORS):
            raise ValueError(f"{type(processor).__name__} keeps a state of its own, which drafting would advance")
