"""Speculative decoding: the candidate generator (drafting half) and the decoding loop, for every drafter and batch.

A round: the drafter proposes ℓ ≤ γ tokens behind each row's newest one (the anchor), one target pass over anchors and
proposals gives the logits of ℓ + 1 positions, verification keeps a prefix and adds one token, the cache drops what was
refused. Rows that end leave the batch.

One row runs over the target's own cache, by the steps of `generate()` (`prepare_inputs_for_generation`,
`_update_model_kwargs_for_generation`), so that prefilled caches, embeddings as prompt and chunked prefill are handled
as there; several rows accept different numbers of tokens and run over `TargetRows`. B rows at first, n still decoding,
T tokens of text so far, V vocabulary.
"""

from functools import partial
from typing import Any

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import CandidateGenerator, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.logits_process import SynthIDTextWatermarkLogitsProcessor
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from .processing_dspark import PositionLogits, RowProcessors
from .profiling_dspark import quick_profile
from .rows_dspark import TargetRows, check_rows, left_aligned
from .scheduling_dspark import RoundHistory, VerifyPolicy
from .target_dspark import (
    CACHE_NAME,
    cache_length,
    cache_of,
    check_croppable,
    check_pair,
    context_states,
    is_static,
    states_argument,
)
from .telemetry_dspark import report_round, wants_expected_acceptance
from .texts_dspark import StepRecord, Texts
from .verification_dspark import ACCEPTANCE_RULES, expected_acceptance, sample_token, verify_block

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
    if drafter.acceptance_rule not in ACCEPTANCE_RULES:
        raise ValueError(f"acceptance_rule is {drafter.acceptance_rule!r}, expected one of {list(ACCEPTANCE_RULES)}")
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
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []  # context that no draft has read yet
        self.history = RoundHistory(drafter.config.block_size)
        self.prompt_mask = (model_kwargs or {}).get("attention_mask")
        self._policies: tuple[VerifyPolicy | None, VerifyPolicy | None] = (None, None)  # as set, and with a profile
        # Of the round at hand: all confidences that were asked for, the part of the first that its anchor gives, and
        # whether it is decoded plainly for the anchor's sake.
        self._confidence: torch.Tensor | None = None
        self._anchor_confidence: float | None = None
        self._skips = False
        self._proposed: torch.Tensor | None = None  # tokens of the last round, in transformers' own loop
        wants_all = generation_config.return_dict_in_generate and generation_config.output_hidden_states
        states = True if wants_all else states_argument(drafter.config.target_layer_ids)
        self.model_kwargs_overrides = {"output_hidden_states": states}

    def propose(
        self,
        text: torch.Tensor,
        outputs: ModelOutput,
        counts: torch.Tensor,
        processors: RowProcessors | None = None,
        anchor_ids: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ):
        """Drafts behind the last token of each row.

        Args:
            text: (n, T), right-padded.
            outputs: of the target's last pass, with hidden states (m, q, H).
            counts: (m,), the first of those q states that belong to committed tokens; all of them after the prefill.
            processors: of the rows, which know where each text ends; all at T by default.
            anchor_ids: (n,), the last token of each row; of `text` by default.
            rows: (n,), those of the m rows that are still decoding; all by default.

        Returns:
            The draft, None where none is worth making, and how many of its tokens to verify (n,).
        """
        self._read(outputs, counts, rows)
        policy = self._policy(len(text), text.shape[1])
        limit = policy.draft_limit(self.drafter.config.block_size, len(text), self.history)
        if is_static(cache_of(outputs)):  # its room ends with the longest text
            limit = max(0, min(limit, self.config.max_length - 1 - text.shape[1]))
        device = self.drafter.device
        anchor_ids = (text[:, -1] if anchor_ids is None else anchor_ids).to(device)
        self._confidence, self._anchor_confidence, self._skips = None, None, False
        if limit and policy.reads_anchor and len(text) == 1:
            self._judge_anchor(policy, anchor_ids)
        if not limit or self._skips:
            return None, text.new_zeros(len(text))
        if processors is None:
            processors = RowProcessors(self.logits_processor, self.config, text)
        context, context_lengths = self._context()
        draft = self.drafter.draft(
            context.to(device),
            anchor_ids,
            cache=self.cache,
            num_tokens=limit,
            do_sample=self.config.do_sample,
            logits_processor=self._drafting_processor(processors, text) if processors else None,
            input_ids=text.to(device),
            context_lengths=context_lengths.to(device) if len(text) > 1 else None,
            stop=self._stop(policy),
            target=self.target,
        )
        self.cache = draft.cache
        if draft.confidence_logits is None:
            return draft, policy.verify_lengths(torch.ones(draft.token_ids.shape, device=text.device), self.history)
        confidence = self._calibrated(draft.confidence_logits)
        if self._confidence is None:
            self._confidence = confidence
        return draft, policy.verify_lengths(confidence, self.history)

    def observe(self, lengths: torch.Tensor, yielded: torch.Tensor) -> None:
        """Tells the history how the last round went: tokens verified and tokens committed, (n,) each."""
        if self._skips:
            self.history.skip()
        else:
            self.history.observe(self._confidence, lengths, yielded, self._anchor_confidence)

    def keep(self, rows: torch.Tensor) -> None:
        """Drops all rows but these, (m,)."""
        if self.cache is not None:
            self.cache.keep(rows)
        self.pending = [(context[rows.to(context.device)], counts[rows]) for context, counts in self.pending]
        self.history.keep(rows)

    def get_candidates(
        self, input_ids, model_kwargs=None, model_outputs=None, is_first_iteration=False, n_last_matches=0, **kwargs
    ):
        """For transformers' own assisted loop: text (1, T) → text and candidates (1, T + ℓ), their logits (1, ℓ, V)."""
        if is_first_iteration:
            return input_ids, None
        room = self.config.max_length - input_ids.shape[1] - 1
        counts = input_ids.new_tensor([int(n_last_matches) + 1])
        if self._proposed is not None:
            self.observe(self._proposed, counts)
        draft, lengths = self.propose(input_ids, model_outputs, counts)
        count = min(int(lengths[0]), max(room, 0))
        self._proposed = counts.new_tensor([count])
        if not count:
            return input_ids, None
        return torch.cat([input_ids, draft.token_ids[:, :count].to(input_ids.device)], dim=1), draft.logits[:, :count]

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        """Nothing to update: the verify length is the policy's."""

    def _read(self, outputs: ModelOutput, counts: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Takes over the states of committed tokens; the first time those of the prompt, without padding."""
        context = context_states(outputs.hidden_states, self.drafter.config.target_layer_ids)
        if self.cache is None and not self.pending:
            real = prompt_columns(self.prompt_mask, len(context), cache_of(outputs)).to(context.device)
            seen, real = real.sum(dim=1), real[:, -context.shape[1] :]
            counts = real.sum(dim=1)
            context = left_aligned(context, real)
            start = seen - counts  # above 0 where the cache came filled
            self.cache = self.drafter.new_cache(start if rows is None else start[rows.to(start.device)])
        if rows is not None:
            context, counts = context[rows.to(context.device)], counts[rows.to(counts.device)]
        self.pending.append((context[:, : int(counts.max())], counts.to(context.device)))

    def _context(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What was read since the last draft, (n, longest, L·H), and how much of it belongs to each row (n,)."""
        (context, counts), *later = self.pending
        if later:
            parts = self.pending
            real = torch.cat([torch.arange(c.shape[1], device=c.device) < n[:, None] for c, n in parts], dim=1)
            context = left_aligned(torch.cat([c for c, _ in parts], dim=1), real)
            counts = real.sum(dim=1)
        self.pending = []
        return context, counts

    def _policy(self, rows: int, context: int) -> VerifyPolicy:
        """The drafter's policy, with a profile of this pair on this machine where it needs one and has none."""
        given = self.drafter.verify_policy
        if self._policies[0] is not given:
            policy = given
            if given.sps is None and hasattr(given, "with_profile"):
                policy = given.with_profile(quick_profile(self.target, self.drafter, rows, context))
            self._policies = (given, policy)
        return self._policies[1]

    def _judge_anchor(self, policy: VerifyPolicy, anchor_ids: torch.Tensor) -> None:
        """Whether to draft behind the anchor (1,) of a single row at all."""
        logits = self.drafter.anchor_confidence_logits(anchor_ids)
        if logits is not None:
            self._anchor_confidence = float(self._calibrated(logits[:, None]))
            self._skips = policy.skips_block(self._anchor_confidence, self.history)

    def _calibrated(self, confidence_logits: torch.Tensor) -> torch.Tensor:
        """Logits (n, k) → confidences, by the temperatures of sequential temperature scaling where there are any."""
        temperatures = self.drafter.config.sts_temperatures
        if temperatures is not None:
            confidence_logits = confidence_logits / confidence_logits.new_tensor(
                temperatures[: confidence_logits.shape[1]]
            )
        return confidence_logits.sigmoid()

    def _stop(self, policy):
        """Ends a block where no row wants its next token; such a decision does not depend on what follows. The history
        is told of that token's confidence too: without it those seen would be the higher ones."""
        if not policy.cuts_draft:
            return None

        def stop(confidence_logits: torch.Tensor) -> bool:
            self._confidence = self._calibrated(confidence_logits)
            lengths = policy.verify_lengths(self._confidence, self.history)
            return int(lengths.max()) < confidence_logits.shape[1]

        return stop

    def _drafting_processor(self, processors: RowProcessors, text: torch.Tensor):
        rows, length = list(range(len(text))), text.shape[1]
        return lambda prefix, scores: processors(rows, prefix[:, length:], scores)


class OwnCache:
    """Verify passes of one row over the target's own cache, by the steps of `generate()`."""

    def __init__(self, target: PreTrainedModel, outputs: ModelOutput, model_kwargs: dict[str, Any]):
        self.target, self.outputs, self.model_kwargs = target, outputs, model_kwargs
        self.cache, self.width = cache_of(outputs), 0
        check_croppable(self.cache)  # again, as its layers may have been made just now
        self.cache.activate_past_recording()  # not before, so that sliding windows do not keep the whole prompt
        self.cache.crop(0)

    def commit(self, count: int) -> None:
        """Keeps the first `count` tokens of the last pass."""
        self.cache.crop(-(self.width + 1 - count))
        update = self.target._update_model_kwargs_for_generation
        self.model_kwargs = update(self.outputs, self.model_kwargs, num_new_tokens=count)

    def verify(self, text: torch.Tensor, width: int) -> ModelOutput:
        """One pass over the anchor and `width` candidates, the last tokens of `text` (1, T + width)."""
        model_kwargs, self.width = dict(self.model_kwargs), width
        if width:
            update = self.target._update_model_kwargs_for_generation
            model_kwargs = update(self.outputs, model_kwargs, num_new_tokens=width)
        inputs = self.target.prepare_inputs_for_generation(text, next_sequence_length=width + 1, **model_kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width + 1
        self.outputs = self.target(**inputs, return_dict=True)
        return self.outputs


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
        input_ids: (B, P), the prompts, left-padded; empty where they were given as `inputs_embeds`.

    Returns:
        The texts (B, T'), right-padded, or with `return_dict_in_generate` an output with scores, logits, hidden states
        and attentions per token as plain `generate()` gives them, and for one row the cache.
    """
    _check_call(target, input_ids, generation_config, model_kwargs, logits_processor, synced_gpus)
    do_sample, batch_size = generation_config.do_sample, len(input_ids)
    verify = ACCEPTANCE_RULES[drafter.acceptance_rule] if do_sample else partial(verify_block, do_sample=False)
    steps = StepRecord(generation_config, batch_size)
    texts = Texts(input_ids, generation_config, stopping_criteria, streamer)
    generator = DSparkCandidateGenerator(drafter, target, generation_config, logits_processor, model_kwargs)
    model_kwargs |= generator.model_kwargs_overrides

    outputs = target._prefill(input_ids, generation_config, model_kwargs)
    own = OwnCache(target, outputs, model_kwargs) if batch_size == 1 else None
    cache = cache_of(outputs)
    real = prompt_columns(model_kwargs.get("attention_mask"), batch_size, cache)
    rows = None if own else TargetRows(target, cache, real, model_kwargs)
    logits = PositionLogits(
        outputs, RowProcessors(logits_processor, generation_config, input_ids), input_ids.new_empty(batch_size, 0)
    )
    tokens, yielded = sample_token(logits(0), do_sample)[:, None], [1] * batch_size
    draft, lengths, expected = None, None, None

    while True:
        # Commit the new tokens one by one, as far as no criterion ends a row's text.
        committed = texts.append(tokens, yielded, steps, logits)
        steps.add_states(outputs, cache, tokens.shape[1] - 1, committed, texts.places)
        if lengths is not None:
            _report(texts, draft, lengths, committed, yielded, expected)
        if own:
            own.commit(committed[0])
        elif lengths is not None:
            rows.commit(committed)
        going, kept = [i for i, ended in enumerate(texts.ended) if not ended], None
        if len(going) < len(texts.places):
            texts.keep(going)
            if not going:
                break
            kept = torch.tensor(going, device=input_ids.device)
            generator.keep(kept)
            if rows:
                rows.keep(going)

        # Draft, verify, keep a prefix and one token more.
        processors = RowProcessors(
            logits_processor, generation_config, texts.ids, texts.lengths, texts.places, batch_size
        )
        anchors = texts.newest()
        counts = torch.tensor(committed, device=input_ids.device)
        draft, lengths = generator.propose(texts.ids, outputs, counts, processors, anchors, kept)
        width = 0 if draft is None else draft.token_ids.shape[1]
        if draft is not None and lengths.device.type == "cpu":  # elsewhere, asking would wait for the drafter
            width = int(lengths.max())
        lengths = lengths.to(input_ids.device)
        candidates = input_ids.new_empty(len(anchors), 0)
        if draft is not None:
            candidates = draft.token_ids[:, :width].to(input_ids.device)
        if own:
            outputs = own.verify(texts.with_candidates(candidates), width)
        else:
            outputs = rows.verify(torch.cat([anchors[:, None], candidates], dim=1))
        draft_logits = outputs.logits[:, :0] if draft is None else draft.logits[:, :width]
        draft_logits = draft_logits.to(input_ids.device)
        logits = PositionLogits(outputs, processors, candidates)
        accepted, following = verify(candidates, draft_logits, lengths, logits)
        tokens = torch.cat([candidates, following[:, None]], dim=1)
        tokens = tokens.scatter(1, accepted[:, None], following[:, None])
        expect = do_sample and wants_expected_acceptance()
        expected = expected_acceptance(draft_logits, lengths, logits) if expect else None
        generator.observe(lengths, accepted + 1)
        yielded = (accepted + 1).tolist()

    if streamer is not None:
        streamer.end()
    if generation_config.return_dict_in_generate:
        return steps.output(texts.sequences(), cache if own else None)
    return texts.sequences()


def _report(texts: Texts, draft, lengths: torch.Tensor, committed: list[int], yielded: list[int], expected) -> None:
    """Tells open recorders of every row's round."""
    for i, (verified, count, whole) in enumerate(zip(lengths.tolist(), committed, yielded, strict=True)):
        emitted = count if texts.cut_short(i) else whole
        logits = None if draft is None or draft.confidence_logits is None else draft.confidence_logits[i]
        chances = None if expected is None else expected[i]
        report_round(verified, min(whole - 1, emitted), emitted, logits, chances, texts.places[i])


def prompt_columns(attention_mask: torch.Tensor | None, rows: int, cache: Cache) -> torch.Tensor:
    """Which columns of a cache hold a token of the prompt rather than padding, (rows, T) bool."""
    columns = cache_length(cache)
    if attention_mask is None:
        return torch.ones(rows, columns, dtype=torch.bool)
    return attention_mask[:, :columns].bool().expand(rows, -1)


def _check_call(target, input_ids, generation_config, model_kwargs, logits_processor, synced_gpus) -> None:
    if synced_gpus:
        raise ValueError("synced_gpus is True, expected False: the ranks' rounds differ in number (FSDP, ZeRO-3)")
    cache = model_kwargs.get(CACHE_NAME)
    if cache is None:
        raise ValueError("the target was called without a cache, which speculative decoding needs")
    check_croppable(cache)
    for processor in logits_processor:
        if isinstance(processor, _STATEFUL_PROCESSORS):
            raise ValueError(f"{type(processor).__name__} keeps a state of its own, which drafting would advance")
    if len(input_ids) > 1:
        check_rows(target, cache)
        if generation_config.return_dict_in_generate and generation_config.output_attentions:
            raise ValueError("output_attentions is True, expected False for a batch: its rows differ in length")
