"""Acceptance of a drafter by the paper's protocol: over data sets, domains and temperatures (table 1).

The rounds of a prompt are one JSON line, appended as soon as they are known and named by a hash of the prompt and of
all that its rounds depend on. The summary is a function of the lines alone, so that a killed run goes on where it
stopped, and processes share the prompts by writing a file each.
"""

import hashlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..baselines import Eagle3Config
from ..profile_dspark import SPSProfile
from ..profiling_dspark import machine
from .acceptance import decode_prompts
from .benchmark import SCHEDULERS, parse_policy
from .datasets import EvaluationPrompt
from .loading import chat_inputs
from .summary import ROUNDS, summarise

SUMMARY = "summary.json"


@dataclass(frozen=True)
class EvaluationSettings:
    """All that the rounds of a prompt depend on, its temperature aside.

    target, drafter: names, for the record.
    weights: digest of the drafter, see `content_digest`: a drafter trained further under its old name is another one.
    policy: as `parse_policy` takes it; `profile` is the digest of the SPS profile that a scheduler reads.
    """

    target: str
    drafter: str
    weights: str
    dtype: str
    policy: str = "fixed"
    profile: str | None = None
    max_new_tokens: int = 2048
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")


@dataclass(frozen=True)
class _Job:
    """One prompt at one temperature: its token ids (T,) and the name of its line."""

    prompt: EvaluationPrompt
    temperature: float
    ids: torch.Tensor
    key: str


def content_digest(path: str | Path) -> str:
    """16 hex digits that name the content of a file, or of the configuration and weights in a folder; for what is not
    on this machine, of its name."""
    root = Path(path)
    files = [root] if root.is_file() else sorted([*root.glob("config.json"), *root.glob("*.safetensors")])
    digest = hashlib.sha256(b"" if files else str(path).encode())
    for file in files:
        with open(file, "rb") as content:
            while block := content.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()[:16]


def evaluate_drafter(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Any,
    prompts: Sequence[EvaluationPrompt],
    output: str | Path,
    settings: EvaluationSettings,
    temperatures: Sequence[float] = (1.0, 0.0),
    batch_size: int = 1,
    rank: int = 0,
    world_size: int = 1,
    profile: SPSProfile | None = None,
    progress: Callable[[list], Iterable] = iter,
) -> dict[str, Any] | None:
    """Decodes the prompts that have no line yet in the folder `output`, and writes `summary.json` there once all have.

    Args:
        batch_size: prompts decoded together, at temperature 0 and where no scheduler weighs rows against each other:
            elsewhere a prompt's rounds would depend on the others, and one by one they do on its own seed alone.
        rank, world_size: this process takes every `world_size`-th prompt from `rank` on. All write into one folder.
        profile: SPS profile, for a policy that is a scheduler.

    Returns:
        The summary, or None while prompts of other processes have no line: `machine`, `settings`, `drafter`, and
        `results`, per temperature the figures by data set and domain and their macro average.

    Raises:
        ValueError: for numbers out of range, a scheduler without a profile, no prompts, or damaged lines.
        ImportError: without the package `evaluate`, which computes the figures.
    """
    _check(prompts, temperatures, batch_size, rank, world_size, settings, profile)
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    jobs = _jobs(tokenizer, prompts, temperatures, settings)
    own_file = output / f"rounds-{rank}.jsonl"
    _cut_torn_line(own_file)
    done = read_lines(output)
    todo = [job for job in jobs[rank::world_size] if job.key not in done]
    scheduled = settings.policy in SCHEDULERS
    given, drafter.verify_policy = drafter.verify_policy, parse_policy(settings.policy, profile)
    try:
        with open(own_file, "a", encoding="utf-8") as lines:
            for batch in progress(_batches(todo, 1 if scheduled else batch_size)):
                for line in _decode(target, drafter, batch, settings):
                    lines.write(json.dumps(line) + "\n")
                lines.flush()
    finally:
        drafter.verify_policy = given
    done = read_lines(output)
    if any(job.key not in done for job in jobs):
        return None
    result = {
        "machine": machine(),
        "settings": asdict(settings),
        "drafter": describe(drafter, settings.drafter),
        "results": [
            {"temperature": float(t)} | summarise([(job.prompt, done[job.key]) for job in jobs if job.temperature == t])
            for t in temperatures
        ],
    }
    partial = output / f".{SUMMARY}.{rank}"  # renamed into place: a reader finds a whole file or none
    partial.write_text(json.dumps(result, indent=1), encoding="utf-8")
    os.replace(partial, output / SUMMARY)
    return result


def _check(
    prompts: Sequence[EvaluationPrompt],
    temperatures: Sequence[float],
    batch_size: int,
    rank: int,
    world_size: int,
    settings: EvaluationSettings,
    profile: SPSProfile | None,
) -> None:
    if not prompts or not temperatures:
        raise ValueError(f"there are {len(prompts)} prompts, temperatures {list(temperatures)}; expected some of both")
    if len(set(temperatures)) < len(temperatures) or not all(0 <= t < math.inf for t in temperatures):
        raise ValueError(f"temperatures are {list(temperatures)}, expected different ones of 0 or more")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, expected at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} of {world_size} processes, expected 0 ≤ rank < processes")
    if importlib.util.find_spec("evaluate") is None:  # said before hours of decoding, after which it is needed
        raise ImportError("the package evaluate is missing, expected `pip install 'dspark-hf[eval]'`")
    parse_policy(settings.policy, profile)
    if settings.policy in SCHEDULERS and profile is None:
        raise ValueError(
            f"policy {settings.policy!r} has no SPS profile, expected one: figures of a profile measured on the fly "
            "could not be repeated"
        )


def _jobs(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[EvaluationPrompt],
    temperatures: Sequence[float],
    settings: EvaluationSettings,
) -> list[_Job]:
    """Every prompt at every temperature. The key is of token ids, which the chat template has a part in."""
    texts = [(prompt, chat_inputs(tokenizer, prompt.text, "cpu")["input_ids"][0]) for prompt in prompts]
    return [
        _Job(prompt, t, ids, _digest([ids.tolist(), float(t), asdict(settings)]))
        for t in temperatures
        for prompt, ids in texts
    ]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _batches(jobs: list[_Job], batch_size: int) -> list[list[_Job]]:
    sampled = [[job] for job in jobs if job.temperature > 0]
    greedy = [job for job in jobs if job.temperature == 0]
    return sampled + [greedy[i : i + batch_size] for i in range(0, len(greedy), batch_size)]


def _decode(
    target: PreTrainedModel, drafter: Any, batch: list[_Job], settings: EvaluationSettings
) -> list[dict[str, Any]]:
    """The lines of prompts decoded together."""
    seed = int(_digest([settings.seed, batch[0].ids.tolist()])[:7], 16)  # matters for a sampled prompt, alone here
    ids, temperature = [job.ids for job in batch], batch[0].temperature
    stats = decode_prompts(target, drafter, ids, settings.max_new_tokens, temperature, seed, batch_size=len(ids))
    lines = []
    for row, job in enumerate(batch):
        own = [i for i, other in enumerate(stats.rows) if other == row]
        rounds = {name: [getattr(stats, name)[i] for i in own] for name in ROUNDS}
        lines.append({"key": job.key, "data": job.prompt.data, "temperature": job.temperature} | rounds)
    return lines


def read_lines(output: str | Path) -> dict[str, dict[str, Any]]:
    """The lines of all processes by key. An unfinished last line, left by a kill or being written, is left out.

    Raises:
        ValueError: for another line that cannot be read, naming file and line.
    """
    found = {}
    for path in sorted(Path(output).glob("rounds-*.jsonl")):
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            try:
                row = json.loads(line)
                found[row["key"]] = row
            except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}, expected the rounds of a prompt") from error
    return found


def _cut_torn_line(path: Path) -> None:
    """Lines are appended: what is left of one that a kill tore must not run into the next."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def describe(drafter: Any, name: str) -> dict[str, Any]:
    """What plots need to know of a drafter: `name`, `method`, `layers`, `block_size`."""
    config = drafter.config
    if isinstance(config, Eagle3Config):
        method = "EAGLE-3" if config.block_size > 1 else "MTP-1"
    elif config.markov_rank:
        method = f"DSpark ({config.markov_head_type} head)"
    else:
        method = "DSpark (no sequential head)" if config.enable_confidence_head else "DFlash"
    return {
        "name": Path(name).name,
        "method": method,
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
    }
