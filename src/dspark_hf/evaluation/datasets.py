"""Evaluation prompts by name: the paper's nine data sets in three domains, and local JSONL files.

A prompt is the first user turn. What is asked beside the question (to reason step by step, to write a program) is part
of the protocol, as it moves acceptance; names and counts follow the paper's table 1.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from .loading import PROMPTS, load_prompts

DOMAINS = ("math", "code", "chat")
OTHER = "other"
"""Domain of a file whose name tells none."""


@dataclass(frozen=True)
class EvaluationPrompt:
    """One question: its data set, the domain of that, and the text of the user's turn."""

    data: str
    domain: str
    text: str


@dataclass(frozen=True)
class DataSet:
    """Where a data set comes from.

    source: arguments of `datasets.load_dataset`.
    prompt: the user's turn of one of its rows.
    count: prompts that the paper's protocol takes, from the first.
    """

    domain: str
    source: dict[str, Any]
    prompt: Callable[[dict[str, Any]], str]
    count: int = 500


def _reasoned(row: dict[str, Any]) -> str:
    return f"{row['problem']}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def _completion(row: dict[str, Any]) -> str:
    return f"Write a solution to this problem and make sure that it passes the tests:\n```python\n{row['prompt']}\n```"


def _contest(row: dict[str, Any]) -> str:
    start = row.get("starter_code")
    form = f"Start from this code:\n```python\n{start}\n```" if start else "Read standard input, write standard output."
    return f"{row['question_content']}\n\nSolve this in Python. {form}"


def _instruction(row: dict[str, Any]) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]


_HUB = "hf://datasets"
_CONTESTS = [f"{_HUB}/livecodebench/code_generation_lite/test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6)]
_ARENA = f"{_HUB}/lmarena-ai/arena-hard-auto/data/arena-hard-v2.0/question.jsonl"

DATA_SETS = {
    "GSM8K": DataSet(
        "math", {"path": "openai/gsm8k", "name": "main", "split": "test"}, lambda row: row["question"]
    ),
    "MATH500": DataSet("math", {"path": "HuggingFaceH4/MATH-500", "split": "test"}, _reasoned),
    "AIME25": DataSet("math", {"path": "MathArena/aime_2025", "split": "train"}, _reasoned, 30),
    "MBPP": DataSet(
        "code",
        {"path": "google-research-datasets/mbpp", "name": "sanitized", "split": "test"},
        lambda row: row["prompt"],
        256,
    ),
    "HumanEval": DataSet("code", {"path": "openai/openai_humaneval", "split": "test"}, _completion, 164),
    "LiveCodeBench": DataSet("code", {"path": "json", "data_files": _CONTESTS, "split": "train"}, _contest),
    "MT-Bench": DataSet(
        "chat", {"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"}, lambda row: row["prompt"][0], 80
    ),
    "Alpaca": DataSet("chat", {"path": "tatsu-lab/alpaca", "split": "train"}, _instruction),
    "Arena-Hard": DataSet("chat", {"path": "json", "data_files": _ARENA, "split": "train"}, lambda row: row["prompt"]),
}  # fmt: skip


def load_evaluation_prompts(names: Iterable[str], limit: int | None = None) -> list[EvaluationPrompt]:
    """The prompts of data sets, one after the other; a text that a data set repeats is taken once.

    Args:
        names: of `DATA_SETS` in any case, of a prompt file that comes with the package, or paths of JSONL files of
            `{"turns": [...]}`. `DOMAIN=NAME` puts a file in a domain, which else is told by its name where that is a
            data set's (`mbpp_test.jsonl`).
        limit: prompts of each data set, from the first; by default the paper's number, and whole files.

    Raises:
        ValueError: for an unknown name or domain, a limit below 1, and for two data sets of one name.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, expected at least 1")
    found = [_locate(name) for name in names]
    labels = [label for label, _, _ in found]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"data sets are {labels}, expected one or more of different names")
    prompts: list[EvaluationPrompt] = []
    for label, domain, place in found:
        texts = load_prompts(place, limit) if place is not None else _download(DATA_SETS[label], limit)
        prompts += [EvaluationPrompt(label, domain, text) for text in dict.fromkeys(texts)]
    return prompts


def _locate(name: str) -> tuple[str, str, str | None]:
    """Label, domain, and for local prompts their file."""
    domain, given, place = name.rpartition("=")
    if given and domain not in DOMAINS:
        raise ValueError(f"the domain of {name!r} is {domain!r}, expected one of {DOMAINS}")
    if Path(place).is_file() or (PROMPTS / f"{place}.jsonl").is_file():
        label = Path(place).stem
        return label, domain or _domain_of(label), place
    known = {_plain(key): key for key in DATA_SETS}
    label = known.get(_plain(place))
    if label is None:
        files = sorted(path.stem for path in PROMPTS.glob("*.jsonl"))
        raise ValueError(f"no data set {place!r}; expected a JSONL file, one of {files} or one of {list(DATA_SETS)}")
    return label, domain or DATA_SETS[label].domain, None


def _domain_of(label: str) -> str:
    known = {_plain(key): value.domain for key, value in DATA_SETS.items()} | {"chat": "chat"}
    return known.get(_plain(label), OTHER)


def _plain(name: str) -> str:
    """`MT-Bench`, `mt_bench` and `mt_bench_test` are one name."""
    return name.lower().replace("-", "").replace("_", "").removesuffix("test")


def _download(data: DataSet, limit: int | None) -> list[str]:
    from datasets import load_dataset  # an optional dependency

    rows = load_dataset(**data.source, streaming=True)  # reads no more than what is taken
    return [data.prompt(row) for row in islice(rows, limit or data.count)]
