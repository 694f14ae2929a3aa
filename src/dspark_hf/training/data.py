"""Training texts from JSON lines or `datasets`: answers as token ids, conversations through the chat template."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from .chat import render_chat

PADDED = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states",
          "target_logsumexp", "document_ids")  # fmt: skip


def load_answers(paths: Iterable[str | Path], max_length: int) -> list[dict[str, Any]]:
    """Answered prompts as `input_ids` and `loss_mask` (true on the response), (T,) each, cut to `max_length` tokens,
    and their `id`. Texts with fewer than two response tokens left, which have no place for an anchor, are dropped.

    Raises:
        ValueError: for a line without the two lists of ids, naming file and line.
    """
    rows = (named_row for path in paths for named_row in _file_rows(Path(path)))
    return [sample for place, row in rows for sample in _cut(_answer(row, place), max_length)]


def load_conversations(
    source: str | Path | Iterable[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    end_ids: Iterable[int] = (),
    one_turn_per_sample: bool = False,
    **template_kwargs,
) -> list[dict[str, Any]]:
    """Conversations as `input_ids` and `loss_mask` (true on what the target generates), (T,) each, cut to `max_length`
    tokens, and their `id`. Those without two supervised tokens in a row, the place of an anchor, are dropped.

    Args:
        source: a JSONL file, a dataset's name and split as "org/name:train", or a `datasets.Dataset`. Its rows hold
            `messages` (or `turns`) of role and content, with `tools` where the template takes them, or `prompt_ids`
            and `response_ids`, which go before: they are what the target read and wrote, to the token.
        end_ids: tokens that end the target's answers (`end_token_ids(target)`), see `render_chat`.
        one_turn_per_sample: a sample for every assistant message with what precedes it, in which it alone is
            supervised: for templates that rewrite history.
        template_kwargs: for the chat template, as `enable_thinking`.

    Raises:
        ValueError: for a row of another form, for prompts without answers, and for what `render_chat` refuses, naming
            file and line.
    """
    samples = []
    for place, row in read_rows(source):
        if "response_ids" in row or "prompt_ids" in row:
            samples += _cut(_answer(row, place), max_length)
            continue
        messages = row.get("messages", row.get("turns"))
        if isinstance(messages, list) and all(isinstance(message, str) for message in messages):
            raise ValueError(
                f"{place}: {str(messages)[:80]} are prompts without answers, expected messages of role and content; "
                "answer the prompts with `dspark regenerate` first"
            )
        try:
            for chat in _prefixes(messages) if one_turn_per_sample else [messages]:
                rendered = render_chat(
                    tokenizer, chat, row.get("tools"), end_ids, last_turn_only=one_turn_per_sample, **template_kwargs
                )
                samples += _cut(rendered, max_length)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    return samples


def read_rows(source: str | Path | Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a source (see `load_conversations`), each with its place as errors should name it.

    Raises:
        ValueError: for a line or row that is no object, and for a name that is neither a file nor of a split.
    """
    if not isinstance(source, (str, Path)):
        yield from _dataset_rows(source, type(source).__name__)
    elif Path(source).is_file():
        yield from _file_rows(Path(source))
    else:
        name, _, split = str(source).partition(":")
        if not split:
            raise ValueError(f"no file {str(source)!r}, expected a JSONL file or a dataset as 'org/name:split'")
        from datasets import load_dataset  # an optional dependency

        yield from _dataset_rows(load_dataset(name, split=split), str(source))


def _file_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place}: {error}, expected a JSON object") from error
            yield place, _object(row, place)


def _dataset_rows(rows: Iterable[Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in enumerate(rows):
        place = f"{name}, row {number}"
        yield place, _without_none(_object(row, place))


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: {str(row)[:80]}, expected an object")
    return row


def _without_none(value: Any) -> Any:
    """Without the keys that Arrow fills in: all rows of a table have the keys of any, None where they had none."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _answer(row: dict[str, Any], place: str) -> dict[str, torch.Tensor]:
    for key in ("prompt_ids", "response_ids"):
        ids = row.get(key)
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise ValueError(f"{place}: {key} is {str(ids)[:80]}, expected a list of token ids")
    prompt, response = row["prompt_ids"], row["response_ids"]
    ids = torch.tensor(prompt + response, dtype=torch.long)
    return {"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= len(prompt)}


def _prefixes(messages: Any) -> list[Any]:
    """The conversation up to each assistant message; as it is, to be refused, where it has none or is no list."""
    if not isinstance(messages, list):
        return [messages]
    answers = [i for i, m in enumerate(messages, 1) if isinstance(m, dict) and m.get("role") == "assistant"]
    return [messages[:i] for i in answers] or [messages]


def _cut(sample: dict[str, torch.Tensor], max_length: int) -> list[dict[str, Any]]:
    """The sample of at most `max_length` tokens with its id, or none where no anchor has a place in it."""
    ids, mask = sample["input_ids"][:max_length], sample["loss_mask"][:max_length]
    if not (mask[1:] & mask[:-1]).any():
        return []
    return [{"input_ids": ids, "loss_mask": mask, "id": sample_id(ids, mask)}]


def sample_id(input_ids: torch.Tensor, loss_mask: torch.Tensor) -> str:
    """A name for a text by its content, (T,) each: 16 hex digits, the same on every machine."""
    content = json.dumps([input_ids.tolist(), loss_mask.int().tolist()])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def end_token_ids(target) -> list[int]:
    """The tokens that end the target's answers; empty where it names none."""
    ends = target.generation_config.eos_token_id
    return [] if ends is None else torch.as_tensor(ends).reshape(-1).tolist()


def count_draft_vocabulary(
    samples: Iterable[dict[str, torch.Tensor]], size: int, always: Iterable[int]
) -> torch.Tensor:
    """The tokens of `always` and the most frequent ones of the responses, sorted, (size,). Where the responses have too
    few, the lowest other ids: tokenizers number their merges from frequent to rare."""
    counts = Counter(dict.fromkeys(always, float("inf")))
    for sample in samples:
        counts.update(sample["input_ids"][sample["loss_mask"]].tolist())
    chosen = {token for token, _ in counts.most_common(size)}
    others = (token for token in range(size) if token not in chosen)
    return torch.tensor(sorted(chosen.union(islice(others, size - len(chosen)))))


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Right-pads samples of different lengths: (T, …) each → (B, T, …)."""
    samples = [{"attention_mask": torch.ones_like(s["loss_mask"]), **s} for s in samples]
    return {key: pad_sequence([s[key] for s in samples], batch_first=True) for key in PADDED if key in samples[0]}
