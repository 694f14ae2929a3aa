"""Training drafters: answers of the target, its states computed on the fly, batches for `transformers.Trainer`."""

from .chat import render_chat
from .data import collate, count_draft_vocabulary, end_token_ids, load_answers, load_conversations, sample_id
from .endpoint import EndpointAnswerer
from .features import OnlineStates
from .recipe import Recipe, run_recipe
from .regenerate import AnswerSettings, TargetAnswerer, read_prompts, regenerate_answers
from .replay import AnchoredTexts, ReplaySampler, collate_anchored
from .trainer import DSparkTrainer, DSparkTrainingArguments

__all__ = [
    "AnchoredTexts",
    "AnswerSettings",
    "DSparkTrainer",
    "DSparkTrainingArguments",
    "EndpointAnswerer",
    "OnlineStates",
    "Recipe",
    "ReplaySampler",
    "TargetAnswerer",
    "collate",
    "collate_anchored",
    "count_draft_vocabulary",
    "end_token_ids",
    "load_answers",
    "load_conversations",
    "read_prompts",
    "regenerate_answers",
    "render_chat",
    "run_recipe",
    "sample_id",
]
