"""Training texts: prompts answered by the target itself, one JSON object a line, `prompt_ids` and `response_ids`."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

PADDED = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states",
          "target_logsumexp")  # fmt: skip


def load_answers(paths: Iterable[str | Path], max_length: int) -> list[dict[str, torch.Tensor]]:
    """Answered prompts as `input_ids` and `loss_mask` (true on the response), (T,) each, cut to `max_length` tokens.
    Texts with fewer than two response tokens left, which have no place for an anchor, are dropped.

    Raises:
        ValueError: for a line without the two lists of ids, naming file and line.
    """
    samples = []
    for path in paths:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                prompt, response = _parse(line, f"{path}, line {number}")
                ids = torch.tensor((prompt + response)[:max_length])
                mask = torch.arange(len(ids)) >= len(prompt)
                if mask.sum() > 1:
                    samples.append({"input_ids": ids, "loss_mask": mask})
    return samples


def _parse(line: str, place: str) -> tuple[list[int], list[int]]:
    try:
        row = json.loads(line)
        lists = row["prompt_ids"], row["response_ids"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{place}: {error!r}, expected a JSON object with prompt_ids and response_ids") from error
    for ids in lists:
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise ValueError(f"{place}: prompt_ids or response_ids is {str(ids)[:80]}, expected a list of token ids")
    return lists


@torch.inference_mode()
def write_answers(
    target, tokenizer, prompts: Iterable[dict[str, Any]], path: Path, batch_size: int = 8, **generate_kwargs
) -> None:
    """Answers the first turn of each prompt with `target`, in batches, and appends a line each to `path`.

    Prompts that already have a line (by their `index`, the place among `prompts`) are left alone, so that a killed run
    goes on where it stopped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _finished(path)
    todo = [(i, prompt["turns"][0]) for i, prompt in enumerate(prompts) if i not in done]
    tokenizer.padding_side = "left"
    ends = set(end_token_ids(target))
    with open(path, "a", encoding="utf-8") as out:
        for chunk in (todo[i : i + batch_size] for i in range(0, len(todo), batch_size)):
            chats = [[{"role": "user", "content": text}] for _, text in chunk]
            inputs = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            ).to(target.device)
            texts = target.generate(**inputs, **generate_kwargs)[:, inputs["input_ids"].shape[1] :]
            for row, (index, _) in enumerate(chunk):
                prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
                response = list(_until_end(texts[row].tolist(), ends))
                out.write(json.dumps({"index": index, "prompt_ids": prompt, "response_ids": response}) + "\n")
            out.flush()


def end_token_ids(target) -> list[int]:
    """The tokens that end the target's answers; empty where it names none."""
    ends = target.generation_config.eos_token_id
    return [] if ends is None else torch.as_tensor(ends).reshape(-1).tolist()


def _finished(path: Path) -> set[int]:
    """Indices with a whole line; a torn last line, left by a kill, is cut off."""
    if not path.exists():
        return set()
    whole, _, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        path.write_bytes(whole + b"\n" if whole else b"")
    return {json.loads(line)["index"] for line in whole.splitlines()}


def _until_end(ids: Iterable[int], ends: set[int]) -> Iterator[int]:
    for token in ids:
        yield token
        if token in ends:
            return


def count_draft_vocabulary(
    samples: Iterable[dict[str, torch.Tensor]], size: int, always: Iterable[int]
) -> torch.Tensor:
    """The tokens of `always` and the most frequent ones of the responses: `size`, or as many as there are, sorted."""
    counts = Counter(dict.fromkeys(always, float("inf")))
    for sample in samples:
        counts.update(sample["input_ids"][sample["loss_mask"]].tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Right-pads samples of different lengths: (T, …) each → (B, T, …)."""
    samples = [{"attention_mask": torch.ones_like(s["loss_mask"]), **s} for s in samples]
    return {key: pad_sequence([s[key] for s in samples], batch_first=True) for key in PADDED if key in samples[0]}
