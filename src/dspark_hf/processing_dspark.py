"""Logits processors over a block: position by position, and for rows whose texts differ in length.

Most processors look at the text so far, so that a token's logits are processed with its own prefix, and those of a
token that comes after a refused one are never needed. n rows, V vocabulary.
"""

from collections.abc import Callable

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
)
from transformers.utils import ModelOutput

_BY_PROMPT = (EncoderNoRepeatNGramLogitsProcessor, EncoderRepetitionPenaltyLogitsProcessor)


class RowProcessors:
    """The processors of one `generate()` call, for one block behind each row's text.

    A block may run past an end token or the maximum length. What it holds there is never used, and never shown to the
    processors, which plain `generate()` spares it too: a plan of tokens by position has run out there, and a constraint
    has no successor to its last word.

    Args:
        text: (n, T), right-padded.
        lengths: (n,), of each row's text; T by default.
        places: (n,), each row's index in the batch of the call; 0..n−1 by default.
        batch_size: B of the call; n by default.
    """

    def __init__(
        self,
        processors: LogitsProcessorList | None,
        config: GenerationConfig,
        text: torch.Tensor,
        lengths: list[int] | None = None,
        places: list[int] | None = None,
        batch_size: int | None = None,
    ):
        self.processors, self.config, self.text = processors or LogitsProcessorList(), config, text
        self.lengths = [text.shape[1]] * len(text) if lengths is None else lengths
        self.places = list(range(len(text))) if places is None else places
        self.batch_size = batch_size or len(text)

    def __bool__(self) -> bool:
        return len(self.processors) > 0

    def __call__(self, rows: list[int], drafted: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (m, V) of the token behind `drafted` (m, k), which follows the texts of `rows` (m,)."""
        groups: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault(self.lengths[row], []).append(i)
        if len(groups) == 1:
            return self._process(rows, drafted, scores)
        result = torch.empty_like(scores)
        for members in groups.values():
            result[members] = self._process([rows[i] for i in members], drafted[members], scores[members])
        return result

    def _process(self, rows: list[int], drafted: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As `__call__`, for rows of one length."""
        length = self.lengths[rows[0]]
        ended = ends_text(drafted, self.config).any(dim=-1)
        if length + drafted.shape[1] >= self.config.max_length or ended.all():
            return scores
        ids = torch.cat([self.text[rows, :length], drafted], dim=1)
        if not ended.any():
            return self._called(rows, ids, scores)
        going = (~ended).nonzero()[:, 0]
        processed = self._called([rows[i] for i in going.tolist()], ids[going], scores[going])
        return scores.index_copy(0, going, processed)

    def _called(self, rows: list[int], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        places = [self.places[row] for row in rows]
        for processor in self.processors:
            if isinstance(processor, PrefixConstrainedLogitsProcessor):
                scores = _with_places(processor, places)(ids, scores)
            elif isinstance(processor, _BY_PROMPT) or torch.is_tensor(_ignored_prompt(processor)):
                scores = self._among_all(processor, places, ids, scores)
            else:
                scores = processor(ids, scores)
        return scores

    def _among_all(self, processor, places: list[int], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Calls a processor that holds all prompts of the batch: rows in their places, others filled with the first."""
        all_ids = ids[:1].repeat(self.batch_size, 1)
        all_scores = scores[:1].repeat(self.batch_size, 1)
        all_ids[places], all_scores[places] = ids, scores
        return processor(all_ids, all_scores)[places]


def _ignored_prompt(processor) -> torch.Tensor | int | None:
    """The repetition penalty's number of tokens to overlook, (B,) where the prompts were padded."""
    return getattr(processor, "prompt_ignore_length", None)


def _with_places(processor: PrefixConstrainedLogitsProcessor, places: list[int]) -> PrefixConstrainedLogitsProcessor:
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda index, prefix: allowed(places[index], prefix), 1)


def ends_text(token_ids: torch.Tensor, config: GenerationConfig) -> torch.Tensor:
    """Which tokens are end tokens, of the same shape."""
    ends = config._eos_token_tensor
    return torch.zeros_like(token_ids, dtype=torch.bool) if ends is None else torch.isin(token_ids, ends.to(token_ids))


class PositionLogits:
    """The target's logits after one pass over an anchor and candidates, processed as they are asked for.

    Args:
        outputs: with logits (n, at least q + 1, V).
        processors: of the rows.
        candidates: (n, q).
    """

    def __init__(self, outputs: ModelOutput, processors: RowProcessors, candidates: torch.Tensor):
        self.candidates, self.processors = candidates, processors
        self.raw = outputs.logits[:, -candidates.shape[1] - 1 :]
        self.processed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, position: int, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Processed logits of the token at `position` 0..q of the rows asked for, (m, V) float32."""
        rows = torch.arange(len(self.raw), device=self.candidates.device) if rows is None else rows
        scores = self.raw_logits(position, rows)
        if self.processors:
            scores = self.processors(rows.tolist(), self.candidates[rows, :position], scores)
        self.processed[position] = (rows, scores)
        return scores

    def processed_row(self, position: int, row: int) -> torch.Tensor:
        """The processed logits of one row where it was asked for, (1, V)."""
        rows, scores = self.processed[position]
        return scores[rows == row]

    def raw_logits(self, position: int, rows: torch.Tensor) -> torch.Tensor:
        """Unprocessed logits, as `__call__` gives the processed: (m, V) float32, a copy."""
        return self.raw[rows.to(self.raw.device), position].to(self.candidates.device, torch.float32)


def stacked(slots: list[torch.Tensor], none: torch.Tensor) -> torch.Tensor:
    """(B, ...) of each slot → (B, n, ...)."""
    return torch.stack(slots, dim=1) if slots else none


def drawn_token(
    logits: torch.Tensor,
    drafted: list[torch.Tensor],
    do_sample: bool,
    logits_processor: Callable | None,
    input_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of a draft (B,), and the logits (B, V), float32, of the distribution that it was drawn from or
    is the mode of.

    Args:
        logits: (B, V), of the drafter.
        drafted: tokens before it in the block, (B,) each.
        logits_processor, input_ids: as in `draft()`.
    """
    logits = logits.float()
    if logits_processor:
        prefix = torch.cat([input_ids, *(token[:, None] for token in drafted)], dim=1)
        logits = _processed_draft(logits_processor, prefix, logits)
    token = torch.multinomial(logits.softmax(dim=-1), 1)[:, 0] if do_sample else logits.argmax(dim=-1)
    return token, logits


def _processed_draft(logits_processor: Callable, prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Draft logits (B, V) after the processors. Where these allow only tokens that cannot be drafted, every token they
    allow is as good as another."""
    processed = logits_processor(prefix, logits.clone())
    stuck = ~processed.isfinite().any(dim=-1, keepdim=True)
    if not stuck.any():
        return processed
    return torch.where(stuck, logits_processor(prefix, torch.zeros_like(logits)), processed)
