"""Re-answers prompts with the target: a drafter learns what *this* target says, so its texts must be the target's own.

One JSON line per prompt is appended as answers come. Its `key` is a hash of the prompt's messages and of all that the
answer depends on, so that a killed run goes on where it stopped, whatever order the lines are in. The answer itself is
a function of the key too: sampling draws numbers seeded by it, and prompts are batched before the finished ones are
left out, so that rounding, which depends on a batch's shape, is the same in a run that was interrupted.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .chat import chat_ids, check_messages
from .data import end_token_ids, read_rows


@dataclass(frozen=True)
class AnswerSettings:
    """How answers are generated.

    Args:
        max_new_tokens: of an answer.
        temperature: 0 for greedy decoding.
        top_p, top_k: 1 and 0 keep every token.
        seed: of the draws.
        thinking: the template's `enable_thinking`; None leaves it to the template.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    thinking: bool | None = None

    def __post_init__(self):
        if self.max_new_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(f"{self}: expected max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1, top_k >= 0")
        for name in ("temperature", "top_p"):  # 0 and 0.0 are the same setting, but not the same text in a key
            object.__setattr__(self, name, float(getattr(self, name)))


@dataclass(frozen=True)
class Prompt:
    """System and user messages; each user message is to be answered, with what precedes it as history.

    Args:
        source: name of the file.
        index: its row there, from 0.
    """

    source: str
    index: int
    messages: list[dict[str, Any]]

    def rounds(self) -> list[list[dict[str, Any]]]:
        """The messages in groups that end with a user message."""
        groups = [[]]
        for message in self.messages:
            groups[-1].append(message)
            if message["role"] == "user":
                groups.append([])
        return groups[:-1]


@dataclass(frozen=True)
class Answer:
    """The fields of a prompt's line, and the tokens generated for it."""

    key: str
    fields: dict[str, Any]
    tokens: int


class Answerer(Protocol):
    """What answers prompts: `TargetAnswerer` here, `EndpointAnswerer`."""

    record: dict[str, Any]
    """All that answers depend on beside the prompt, for keys and the settings file."""

    def batches(self, prompts: dict[str, Prompt]) -> list[list[str]]:
        """The keys of prompts that are answered together, a function of all of `prompts`."""

    def answers(self, prompts: dict[str, Prompt], batches: list[list[str]]) -> Iterator[Answer]:
        """Answers to all prompts of the `batches`, in any order."""


@dataclass(frozen=True)
class Regenerated:
    """What a run did: prompts answered, prompts that had their line before, tokens generated, seconds taken."""

    answered: int
    present: int
    tokens: int
    seconds: float


# ------------------------------------------------------------------------------------------------------------- prompts


def read_prompts(sources: Iterable[str | Path], limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of JSONL files or datasets ("org/name:split"). Rows hold `turns`, the user's texts in
    order, or `messages`, whose assistant messages are to be replaced.

    Raises:
        ValueError: for rows of another form, and for conversations with tools, whose results only the caller of the
            tools has, naming file and line.
    """
    prompts = []
    for source in sources:
        name = Path(source).name if Path(source).is_file() else str(source)
        for index, (place, row) in enumerate(read_rows(source)):
            if len(prompts) == limit:
                return prompts
            try:
                prompts.append(Prompt(name, index, _prompt_messages(row)))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
    return prompts


def _prompt_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = row.get("turns", row.get("messages"))
    if isinstance(messages, list):
        messages = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    check_messages(messages)
    roles = {message["role"] for message in messages}
    if row.get("tools") or not roles <= {"system", "developer", "user", "assistant"}:
        raise ValueError(f"tools or messages of {sorted(roles)}, expected system, user and assistant messages alone")
    asked = [message for message in messages if message["role"] != "assistant"]
    if not asked or asked[-1]["role"] != "user":
        raise ValueError(f"the last message of {str(asked)[:80]} is no user message, expected one to answer")
    return asked


def prompt_key(prompt: Prompt, record: dict[str, Any]) -> str:
    """16 hex digits that name the answer to `prompt` under the settings `record`."""
    return hashlib.sha256(json.dumps([prompt.messages, record], sort_keys=True).encode()).hexdigest()[:16]


def round_seed(key: str, number: int) -> int:
    """Of the draws for a prompt's answer `number`; below 2³¹, which every endpoint takes."""
    return int.from_bytes(hashlib.sha256(f"{key} {number}".encode()).digest()[:4], "big") >> 1


# ----------------------------------------------------------------------------------------------------------------- run


def regenerate_answers(prompts: Iterable[Prompt], output: str | Path, answerer: Answerer) -> Regenerated:
    """Appends a line per prompt that has none yet to `output`: `key`, `source`, `index`, `messages` with the answers,
    and, of the target's own answers to one turn, `prompt_ids` and `response_ids`. A prompt given twice has one line.

    `<output>.settings.json` beside it records what the answers depend on.

    Raises:
        ValueError: `output` holds answers of other settings, or none that this function wrote.
    """
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    _claim(output, answerer.record)
    done = _finished_keys(output)
    keyed: dict[str, Prompt] = {}
    for prompt in prompts:
        keyed.setdefault(prompt_key(prompt, answerer.record), prompt)
    todo = [batch for batch in answerer.batches(keyed) if not done.issuperset(batch)]

    start, answered, tokens, present = time.perf_counter(), 0, 0, len(done & keyed.keys())
    with (
        open(output, "a", encoding="utf-8") as out,
        tqdm(total=len(keyed), initial=present, unit="prompt", disable=None) as bar,
    ):
        for answer in answerer.answers(keyed, todo):
            tokens += answer.tokens
            if answer.key not in done:
                prompt = keyed[answer.key]
                line = {"key": answer.key, "source": prompt.source, "index": prompt.index} | answer.fields
                out.write(json.dumps(line) + "\n")
                out.flush()
                answered += 1
                bar.update()
    return Regenerated(answered, present, tokens, time.perf_counter() - start)


def _claim(output: Path, record: dict[str, Any]) -> None:
    """Writes the settings file, or compares with the one there."""
    path = output.with_name(f"{output.name}.settings.json")
    if path.exists():
        there = json.loads(path.read_text(encoding="utf-8"))
        keys = [key for key in {**there, **record} if there.get(key) != record.get(key)]
        if keys:
            differences = ", ".join(f"{key} {there.get(key)!r} there and {record.get(key)!r} now" for key in keys)
            raise ValueError(
                f"{output} holds answers of other settings: {differences}; expected the same or a new file"
            )
    elif output.exists() and output.stat().st_size:
        raise ValueError(f"{output} holds lines, but {path.name} is not there: expected an output of this command")
    else:
        # Renamed into place: a kill leaves the whole of it or nothing.
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)


def _finished_keys(path: Path) -> set[str]:
    """The keys of whole lines; a torn last line, left by a kill, is cut off."""
    keys, whole = set(), 0
    if not path.exists():
        return keys
    with open(path, "rb+") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                lines.truncate(whole)
                break
            try:
                keys.add(json.loads(line)["key"])
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}, expected an answer with its key") from error
            whole += len(line)
    return keys


# -------------------------------------------------------------------------------------------------------------- target


class TargetAnswerer:
    """Answers of a target in this process, in batches.

    Args:
        target: a causal model in eval mode.
        tokenizer: its own, with the chat template.
        name: the target's, for the record.
        settings: of the answers.
        batch_size: prompts answered together; changes answers by rounding at most.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        settings: AnswerSettings,
        batch_size: int = 8,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        self.target, self.tokenizer, self.settings, self.batch_size = target, tokenizer, settings, batch_size
        self.ends = end_token_ids(target)
        template = hashlib.sha256(tokenizer.get_chat_template().encode()).hexdigest()[:16]
        self.record = {"backend": "transformers", "target": name, "template_sha256": template, **asdict(settings)}

    def batches(self, prompts: dict[str, Prompt]) -> list[list[str]]:
        """Prompts of as many turns and like length together, longest first: what does not fit in memory shows early."""
        rounds = {key: prompt.rounds() for key, prompt in prompts.items()}
        size = {key: (len(groups), len(self._prompt_ids(groups[0]))) for key, groups in rounds.items()}
        keys = sorted(prompts, key=size.get, reverse=True)
        return [keys[i : i + self.batch_size] for i in range(0, len(keys), self.batch_size)]

    def answers(self, prompts: dict[str, Prompt], batches: list[list[str]]) -> Iterator[Answer]:
        for keys in batches:
            rounds = [prompts[key].rounds() for key in keys]
            chats, fields, tokens = [[] for _ in keys], [{} for _ in keys], [0] * len(keys)
            for number in range(max(map(len, rounds))):
                rows = [row for row, groups in enumerate(rounds) if number < len(groups)]
                for row in rows:
                    chats[row] += rounds[row][number]
                asked = [self._prompt_ids(chats[row]) for row in rows]
                seeds = [round_seed(keys[row], number) for row in rows]
                for row, prompt, response in zip(rows, asked, self._generate(asked, seeds), strict=True):
                    tokens[row] += len(response)
                    text = self.tokenizer.decode(
                        response[:-1] if response[-1] in self.ends else response, skip_special_tokens=True
                    )
                    chats[row].append({"role": "assistant", "content": text})
                    if len(rounds[row]) == 1:
                        fields[row] = {"prompt_ids": prompt, "response_ids": response}
            for key, chat, more, count in zip(keys, chats, fields, tokens, strict=True):
                yield Answer(key, {"messages": chat} | more, count)

    def _prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        thinking = {} if self.settings.thinking is None else {"enable_thinking": self.settings.thinking}
        return chat_ids(self.tokenizer, messages, add_generation_prompt=True, **thinking)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        """The answers' tokens, each through the first that ends it."""
        rows = [torch.tensor(ids) for ids in prompts]
        pad = self.tokenizer.pad_token_id or 0  # never read: masked in prompts, cut off behind answers
        ids = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left").to(self.target.device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        draws = [SeededDraws(seeds, ids.shape[1], self.settings)] if self.settings.temperature > 0 else []
        output = self.target.generate(
            ids,
            attention_mask=mask.to(ids.device),
            do_sample=False,
            max_new_tokens=self.settings.max_new_tokens,
            pad_token_id=pad,
            logits_processor=LogitsProcessorList(draws),
        )
        texts = output[:, ids.shape[1] :].tolist()
        ends = [next((n for n, token in enumerate(text, 1) if token in self.ends), len(text)) for text in texts]
        return [text[:end] for text, end in zip(texts, ends, strict=True)]


class SeededDraws(LogitsProcessor):
    """Leaves one token of each row's distribution, drawn by inverse transform with numbers of the row's own seed, so
    that a text does not depend on the rows beside it, which share one generator in `do_sample=True`.

    Args:
        seeds: one a row.
        prompt_length: tokens before the first draw.
    """

    def __init__(self, seeds: list[int], prompt_length: int, settings: AnswerSettings):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        count = settings.max_new_tokens
        self.numbers = torch.stack([torch.rand(count, generator=g, dtype=torch.float64) for g in generators])
        self.prompt_length = prompt_length
        self.warpers = LogitsProcessorList([TemperatureLogitsWarper(float(settings.temperature))])
        if settings.top_k:
            self.warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            self.warpers.append(TopPLogitsWarper(settings.top_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) → zero at the token drawn, −∞ elsewhere."""
        step = input_ids.shape[1] - self.prompt_length
        cumulative = self.warpers(input_ids, scores).double().softmax(dim=-1).cumsum(dim=-1)
        numbers = self.numbers[:, step : step + 1].to(scores.device) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, numbers, right=True)  # the first above: never one of probability 0
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)
