"""Training texts: prompts answered by the target itself, one JSON object a line, `prompt_ids` and `response_ids`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Iterable, Iterator

import torch
from torch.nn.utils.rnn import pad_sequence


PADDED = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states",
          "target_logsumexp")  # fmt: skip


def load_answers(paths: Iterable[str | Path], max_length: int) -> list[dict[str, torch.Tensor]]:
    """Answered prompts as `input_ids` and `loss_mask` (true on the response), (T,) each, cut to `max_length` tokens.

    Raises:
        ValueError: for a line without the two lists of ids, naming file and line.
    """
    samples = []
    for path in paths:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = json.loads(line)
                prompt, response = row.get("prompt_ids"), row.get("response_ids")
                if not isinstance(prompt, list) or not isinstance(response, list):
                    raise ValueError(f"{path}, line {number}: keys are {sorted(row)}, expected prompt_ids, response_ids")
                ids = torch.tensor((prompt + response)[:max_length])
                mask = torch.arange(len(ids)) >= len(prompt)
                if mask.sum() > 1:
                    samples.append({"input_ids": ids, "loss_mask": mask})
    return samples


@torch.inference_mode()
def write_answers(
    target, tokenizer, prompts: Iterable[dict[str, Any]], path: Path, batch_size: int = 8, **generate_kwargs
) -> None:
    """Answers the first turn of each prompt with `target`, in batches, and appends a line each to `path`.

    Prompts that already have a line (by their `index`) are left alone, so that a killed run goes on where it stopped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _finished(path)
    todo = [(i, prompt["turns"][0]) for i, prompt in enumerate(prompts) if i not in done]
    tokenizer.padding_side = "left"
    with open(path, "a", encoding="utf-8") as out:
        for chunk in (todo[i : i + batch_size] for i in range(0, len(todo), batch_size)):
            chats = [[{"role": "user", "content": text}] for _, text in chunk]
            inputs = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )
            texts = target.generate(**inputs, **generate_kwargs)[:, inputs["input_ids"].shape[1] :]
            ends = set(torch.as_tensor(target.generation_config.eos_token_id).reshape(-1).tolist())
            for row, (index, _) in enumerate(chunk):
                prompt = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
                response = list(_until_end(texts[row].tolist(), ends))
                out.write(json.dumps({"index": index, "prompt_ids": prompt, "response_ids": response}) + "\n")
            out.flush()


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


def count_draft_vocabulary(samples: Iterable[dict[str, torch.Tensor]], size: int, always: Iterable[int]) -> torch.Tensor:
    """The `size` most frequent response tokens, and those of `always`, sorted ids (D,)."""
    counts = Counter(dict.fromkeys(always, float("inf")))
    for sample in samples:
        counts.update(sample["input_ids"][sample["loss_mask"]].tolist())
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


def set_draft_vocabulary(drafter, token_ids: torch.Tensor) -> None:
    """Fills `d2t` and `t2d` of a drafter with a reduced vocabulary; `token_ids`: sorted, (draft_vocab_size,)."""
    if len(token_ids) != drafter.config.draft_vocab_size:
        raise ValueError(f"{len(token_ids)} token ids, expected {drafter.config.draft_vocab_size} (draft_vocab_size)")
    drafter.d2t.copy_(token_ids - torch.arange(len(token_ids)))
    drafter.t2d.zero_()
    drafter.t2d[token_ids] = True


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Right-pads samples of different lengths: (T, …) each → (B, T, …)."""
    samples = [{"attention_mask": torch.ones_like(s["loss_mask"]), **s} for s in samples]
    return {key: pad_sequence([s[key] for s in samples], batch_first=True) for key in PADDED if key in samples[0]}
