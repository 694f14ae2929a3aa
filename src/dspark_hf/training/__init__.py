"""Training drafters: answers of the target, its states computed on the fly, batches for `transformers.Trainer`."""

from .data import collate, count_draft_vocabulary, load_answers, set_draft_vocabulary, write_answers
from .features import ReplayStream


__all__ = ["ReplayStream", "collate", "count_draft_vocabulary", "load_answers", "set_draft_vocabulary", "write_answers"]
