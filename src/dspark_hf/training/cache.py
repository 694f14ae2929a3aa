"""Target states of training texts on disk: computed once, read by any number of processes.

A build may be killed at any moment: the next one goes on behind the shards that the manifest names. Shards are filled
in the order of the texts, up to a size known from their lengths alone, so that it makes the same files, byte for byte,
as one that was never killed.

A text is a sample with `input_ids` (T,) long, `loss_mask` (T,) bool and its `id`, a hash of both. Shapes: T tokens,
n supervised positions, L layers, H hidden size.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from huggingface_hub.utils import WeakFileLock
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset

from .compression import decode, encode, supervised_positions
from .data import sample_id
from .manifest import CacheSource, Manifest, Shard, damage_of, file_hash, human_size, publish, shard_files

Sample = dict[str, torch.Tensor | str]

_MEND = "run `dspark cache build` with the same texts again, which makes missing and torn shards anew"


# --------------------------------------------------------------------------------------------------------------- build


@dataclass(frozen=True)
class Estimate:
    """What a build will write: texts, tokens and bytes (exact for the tensors; a file's header takes under 1 KiB more),
    the seconds it will take, judged from the first few texts, and the bytes free on the disk."""

    samples: int
    tokens: int
    size: int
    seconds: float
    free: int

    def __str__(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return (
            f"{self.samples} texts of {self.tokens} tokens: {human_size(self.size)} to write, "
            f"{human_size(self.free)} free on the disk; about {hours} h {minutes:02} min {seconds:02} s"
        )


def build_cache(
    samples: Iterable[Sample],
    features: Callable[[Sample], Sample],
    folder: str | Path,
    source: CacheSource,
    format: str = "exact",
    shard_bytes: int = 2**30,
    announce: Callable[[Estimate], None] | None = None,
    progress: Callable[[Sequence[Sample]], Iterable[Sample]] = iter,
) -> Manifest:
    """Stores the states of those `samples` that `folder` does not hold yet, each text once. Goes on where a build was
    stopped, and makes missing and torn shards anew.

    Args:
        features: gives a sample its `target_hidden_states` (T, L·H), `target_last_hidden_states` (T, H), both in
            `source.dtype`, and `target_logsumexp` (T,) float32, right on the supervised positions.
        format: `"exact"` or `"compressed"`, see `compression`.
        shard_bytes: of tensors in a file, which a build also holds in memory; a larger text has a file of its own.
        announce: called once, before anything is written.
        progress: wraps the texts to be computed, like `tqdm`.

    Raises:
        ValueError: for a folder with states of another source or format, foreign files or another build running; for a
            disk that is too small; for features of other shapes or dtypes than `source` says, or not finite.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}, expected at least 1")
    folder = Path(folder)
    manifest = _manifest_for(folder, source, format)
    plan = _plan(samples, folder, manifest, shard_bytes)
    todo = [sample for _, part in plan for sample in part]
    if not todo and not manifest.shards:
        raise ValueError("there are no texts, expected at least one")
    counts = [_counts(sample) for sample in todo]
    tokens = sum(count for count, _ in counts)
    size, free = manifest.num_bytes(tokens, sum(count for _, count in counts)), _free_bytes(folder)
    if size > free:
        raise ValueError(f"{len(todo)} texts take {human_size(size)} and {human_size(free)} are free in {folder}, "
                         "expected room for all")  # fmt: skip
    started, seconds = _time(todo[:4], features)
    if announce is not None:
        announce(Estimate(len(todo), tokens, size, seconds * tokens, free))

    folder.mkdir(parents=True, exist_ok=True)
    with _sole_builder(folder):
        if _manifest_for(folder, source, format) != manifest:
            raise ValueError(f"another build has written to {folder} just now: run this one again")
        for left in folder.glob("*.tmp"):
            left.unlink()
        texts = iter(progress(todo))
        for index, part in plan:
            states = (
                (sample, started.pop(_id(sample), None) or features(sample)) for sample in islice(texts, len(part))
            )
            shard = _write_shard(folder / f"shard-{index:05}.safetensors", part, states, manifest)
            manifest.shards[index : index + 1] = [shard]
            manifest.save(folder)
        for _ in texts:  # lets the progress bar end
            pass
    return manifest


def _manifest_for(folder: Path, source: CacheSource, format: str) -> Manifest:
    """That of `folder`, checked, or an empty one."""
    wanted = Manifest(source, format, [])
    wanted.layout(0, 0)  # refuses unknown formats
    if not (folder / "manifest.json").exists():
        return wanted
    manifest = Manifest.load(folder)
    manifest.source.check(source, folder)
    if manifest.format != format:
        raise ValueError(f"{folder} holds states in the format {manifest.format!r}, expected {format!r}: use another "
                         "folder for these")  # fmt: skip
    return manifest


def _plan(
    samples: Iterable[Sample], folder: Path, manifest: Manifest, shard_bytes: int
) -> list[tuple[int, list[Sample]]]:
    """The shards to write, as number and texts: those that are damaged, then new ones."""
    by_id: dict[str, Sample] = {}
    for sample in samples:
        by_id.setdefault(_id(sample), sample)
    plan, known = [], set()
    for index, shard in enumerate(manifest.shards):
        ids = [sample[0] for sample in shard.samples]
        known.update(ids)
        damage = damage_of(folder, shard)
        if damage:
            absent = [id for id in ids if id not in by_id]
            if absent:
                raise ValueError(
                    f"{damage}; to make it anew, {len(absent)} of its {len(ids)} texts are missing, {absent[0]} for "
                    "one: expected the texts that the cache was built from"
                )
            plan.append((index, [by_id[id] for id in ids]))
    part, size, index = [], 0, len(manifest.shards)
    for id, sample in by_id.items():
        if id not in known:
            own = manifest.num_bytes(*_counts(sample))
            if part and size + own > shard_bytes:
                plan.append((index, part))
                part, size, index = [], 0, index + 1
            part.append(sample)
            size += own
    if part:
        plan.append((index, part))
    foreign = shard_files(folder) - {s.file for s in manifest.shards} - {f"shard-{i:05}.safetensors" for i, _ in plan}
    if foreign:
        raise ValueError(f"{folder} holds {', '.join(sorted(foreign))}, expected a cache or an empty folder")
    return plan


def _time(samples: list[Sample], features: Callable[[Sample], Sample]) -> tuple[dict[str, Sample], float]:
    """The features of a few texts, by id, and the seconds a token took; the first text, which warms up, left out."""
    results, seconds, tokens = {}, 0.0, 0
    for number, sample in enumerate(samples):
        start = time.perf_counter()
        results[_id(sample)] = features(sample)
        if number or len(samples) == 1:
            seconds += time.perf_counter() - start
            tokens += len(sample["input_ids"])
    return results, seconds / max(tokens, 1)


def _write_shard(
    path: Path, samples: list[Sample], states: Iterable[tuple[Sample, Sample]], manifest: Manifest
) -> Shard:
    """Writes the texts' states under a temporary name and renames it when it is on the disk."""
    rows = [(_id(sample), *_counts(sample)) for sample in samples]
    shapes = manifest.layout(sum(row[1] for row in rows), sum(row[2] for row in rows))
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    ends = dict.fromkeys(tensors, 0)
    for sample, result in states:
        for name, value in _encoded(sample, result, manifest).items():
            start, ends[name] = ends[name], ends[name] + len(value)
            tensors[name][start : ends[name]] = value
    temporary = path.with_name(path.name + ".tmp")
    save_file(tensors, temporary)
    size, digest = temporary.stat().st_size, file_hash(temporary)
    publish(temporary, path)
    return Shard(path.name, rows, size, digest)


def _encoded(sample: Sample, result: Sample, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors to store of a text, from its checked features."""
    source, tokens = manifest.source, len(sample["input_ids"])
    dtype = getattr(torch, source.dtype)
    wanted = {
        "target_hidden_states": ((tokens, len(source.layer_ids) * source.hidden_size), dtype),
        "target_last_hidden_states": ((tokens, source.hidden_size), dtype),
        "target_logsumexp": ((tokens,), torch.float32),
    }
    for name, (shape, dtype) in wanted.items():
        value, place = result.get(name), f"{name} of sample {_id(sample)}"
        if value is None:
            raise ValueError(f"{place} is missing, expected {shape} in {dtype}")
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise ValueError(f"{place} is {tuple(value.shape)} in {value.dtype}, expected {shape} in {dtype}")
        if not value.isfinite().all():
            raise ValueError(f"{place} has infinite or undefined values, expected finite ones: try another dtype")
    values = (result[name].cpu() for name in wanted)
    return encode(manifest.format, *values, supervised_positions(sample["loss_mask"]))


# ---------------------------------------------------------------------------------------------------------------- read


class CachedStates(Dataset):
    """The states in a cache, in the place of a target that computes them. May be pickled, copied to the workers of a
    loader and opened by any number of processes; the files are mapped into memory, once a process.

    As a dataset it yields the features of `samples`, in order.

    Args:
        folder: made by `build_cache`.
        samples: texts that must be in the cache.

    Raises:
        ValueError: for a missing or torn shard, by name, and for a sample that is not there. Contents are not read;
            `verify_cache` does.
    """

    def __init__(self, folder: str | Path, samples: Sequence[Sample] = ()):
        self.folder, self.samples, self.manifest = Path(folder), samples, Manifest.load(folder)
        self._places: dict[str, tuple[int, int, int, int, int]] = {}  # id -> shard, rows before: T, n; rows: T, n
        for index, shard in enumerate(self.manifest.shards):
            damage = damage_of(self.folder, shard)
            if damage:
                raise ValueError(f"{damage}: {_MEND}")
            before = [0, 0]
            for id, tokens, supervised in shard.samples:
                self._places[id] = (index, *before, tokens, supervised)
                before = [before[0] + tokens, before[1] + supervised]
        self._files, self._process = {}, None
        for sample in samples:
            self._place(sample)

    def __getstate__(self):
        return self.__dict__ | {"_files": {}, "_process": None}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.features(self.samples[index])

    def features(self, sample: Sample) -> Sample:
        """The sample with `target_hidden_states` (T, L·H), `target_last_hidden_states` (T, H) and `target_logsumexp`
        (T,) float32: from an exact cache as they were given, from a compressed one in float32, the last two with zeros
        on positions that teach nothing.

        Raises:
            ValueError: for a sample that is not in the cache.
        """
        index, tokens_before, supervised_before, tokens, supervised = self._place(sample)
        start = self.manifest.layout(tokens_before, supervised_before)
        end = self.manifest.layout(tokens_before + tokens, supervised_before + supervised)
        file = self._file(index)
        # Cloned: a slice is a view of the mapped file, which a reader might write to and which pickles as a whole.
        stored = {name: file.get_slice(name)[start[name][0][0] : end[name][0][0]].clone() for name in start}
        hidden, last, logsumexp = decode(self.manifest.format, stored, supervised_positions(sample["loss_mask"]))
        return dict(sample, target_hidden_states=hidden, target_last_hidden_states=last, target_logsumexp=logsumexp)

    def _place(self, sample: Sample) -> tuple[int, int, int, int, int]:
        id = _id(sample)
        if id not in self._places:
            raise ValueError(
                f"no states of sample {id} in {self.folder}, which holds {len(self._places)} texts; expected the same "
                "answers and maximal length as it was built with: run `dspark cache build` with these to add the text"
            )
        place = self._places[id]
        if place[3:] != _counts(sample):
            raise ValueError(f"sample {id} has (tokens, supervised) {_counts(sample)}, expected {place[3:]} as stored "
                             "under its id")  # fmt: skip
        return place

    def _file(self, index: int):
        if self._process != os.getpid():  # handles made before a fork belong to the parent
            self._files, self._process = {}, os.getpid()
        if index not in self._files:
            self._files[index] = safe_open(self.folder / self.manifest.shards[index].file, framework="pt")
        return self._files[index]


def verify_cache(folder: str | Path, progress: Callable[[Sequence[Shard]], Iterable[Shard]] = iter) -> Manifest:
    """Reads all of a cache.

    Raises:
        ValueError: naming every shard that is missing, torn, altered, of other shapes than the manifest says, or not in
            the manifest.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    problems = []
    for shard in progress(manifest.shards):
        path = folder / shard.file
        problem = damage_of(folder, shard)
        if problem is None and file_hash(path) != shard.sha256:
            problem = f"{path} is altered: its sha256 is not the manifest's; delete it"
        if problem is None:
            wanted = manifest.layout(shard.tokens, shard.supervised)
            with safe_open(path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                found = {name: (tuple(part.get_shape()), part[:0].dtype) for name, part in slices.items()}
            if found != wanted:
                problem = f"{path} holds {found}, expected {wanted}"
        if problem:
            problems.append(f"{problem}: {_MEND}")
    foreign = sorted(shard_files(folder) - {shard.file for shard in manifest.shards})
    problems += [f"{folder / file} is foreign: it is not in the manifest" for file in foreign]
    if problems:
        raise ValueError("\n".join(problems))
    return manifest


# ------------------------------------------------------------------------------------------------------------- helpers


def _id(sample: Sample) -> str:
    return sample["id"] if "id" in sample else sample_id(sample["input_ids"], sample["loss_mask"])


def _counts(sample: Sample) -> tuple[int, int]:
    """T and n."""
    return len(sample["input_ids"]), len(supervised_positions(sample["loss_mask"]))


def _free_bytes(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


@contextmanager
def _sole_builder(folder: Path) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(folder / "build.lock", timeout=1))
        except TimeoutError as error:
            raise ValueError(
                f"another build writes to {folder}, expected one at a time; if none runs, delete build.lock there"
            ) from error
        yield
