"""Training drafters: answers of the target, its states computed on the fly, batches for `transformers.Trainer`."""

from .data import collate, count_draft_vocabulary, end_token_ids, load_answers, write_answers
from .features import ReplayStream

__all__ = ["ReplayStream", "collate", "count_draft_vocabulary", "end_token_ids", "load_answers", "write_answers"]
