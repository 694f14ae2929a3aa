"""What a cache of target states holds: its manifest, and how its files come to the disk and are told from others.

    folder/manifest.json               what the states are of, and which texts each shard holds
    folder/shard-00000.safetensors     the tensors of `compression.layout`, text after text
    folder/build.lock                  held while a build runs

A shard takes its name when it is whole and on the disk, and the manifest names it only then: whatever the manifest
names was whole once, wherever a build was killed.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .compression import layout

VERSION = 1


@dataclass(frozen=True)
class CacheSource:
    """What the states are of. All but `target` and `revision`, which are for the reader, must agree.

    Args:
        target: name of the target, and `revision` its commit on the Hub, if it is from there.
        weights: hash of the target's weights (of a few values of each), so that a name may change and a model not.
        layer_ids: decoder layers read, −1 for the embedding output.
        hidden_size: H.
        dtype: of the states, as `"bfloat16"`.
        tokenizer: hash of the vocabulary.
        chat_template: hash of the template.
    """

    target: str
    revision: str | None
    weights: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    tokenizer: str
    chat_template: str

    def __post_init__(self):
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        if not self.layer_ids:
            raise ValueError("layer_ids is empty, expected at least one layer")
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype is {self.dtype!r}, expected the name of a torch dtype, as 'bfloat16'")

    @classmethod
    def of(
        cls, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, layer_ids: Sequence[int], name: str
    ) -> "CacheSource":
        """That of a loaded target.

        Raises:
            ValueError: for layers that a drafter of this target cannot read.
        """
        config = target.config.get_text_config()
        last = config.num_hidden_layers - 1
        if not layer_ids or not all(-1 <= layer_id < last for layer_id in layer_ids):
            raise ValueError(f"layer_ids is {list(layer_ids)}, expected values in -1..{last - 1}")
        template = json.dumps(tokenizer.chat_template, sort_keys=True)
        return cls(
            target=name,
            revision=getattr(target.config, "_commit_hash", None),  # set by transformers where the Hub was asked
            weights=_weights_hash(target),
            layer_ids=tuple(layer_ids),
            hidden_size=config.hidden_size,
            dtype=str(target.dtype).removeprefix("torch."),
            tokenizer=_short_hash(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
            chat_template=_short_hash(template.encode()),
        )

    def check(self, wanted: "CacheSource", place: str | Path) -> None:
        """Raises `ValueError`, naming the differences, where `wanted` asks for other states than those in `place`."""
        names = {"weights": "target", "tokenizer": "tokenizer", "chat_template": "chat template"}
        different = []
        for key in ("weights", "layer_ids", "hidden_size", "dtype", "tokenizer", "chat_template"):
            there, here = getattr(self, key), getattr(wanted, key)
            if there != here:
                if key == "weights":
                    there, here = f"{self.target!r} (weights {there})", f"{wanted.target!r} (weights {here})"
                different.append(f"{names.get(key, key)} {there}, expected {here}")
        if different:
            raise ValueError(f"{place} holds states of {'; '.join(different)}: use another folder for these")


@dataclass(frozen=True)
class Shard:
    """A file of the cache: its texts as (id, T, n), its size in bytes and its sha256."""

    file: str
    samples: list[tuple[str, int, int]]
    size: int
    sha256: str

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.samples)

    @property
    def supervised(self) -> int:
        return sum(supervised for *_, supervised in self.samples)


@dataclass
class Manifest:
    """What a folder holds: `manifest.json`."""

    source: CacheSource
    format: str
    shards: list[Shard]

    @property
    def num_samples(self) -> int:
        return sum(len(shard.samples) for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def size(self) -> int:
        return sum(shard.size for shard in self.shards)

    def layout(self, tokens: int, supervised: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the tensors for so many tokens and supervised positions."""
        source = self.source
        dtype = getattr(torch, source.dtype)
        return layout(self.format, tokens, supervised, len(source.layer_ids), source.hidden_size, dtype)

    def num_bytes(self, tokens: int, supervised: int) -> int:
        """Size of these tensors."""
        shapes = self.layout(tokens, supervised).values()
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Reads the manifest of `folder`.

        Raises:
            ValueError: for a folder that is no cache, or whose manifest cannot be read.
        """
        path = Path(folder) / "manifest.json"
        if not path.exists():
            raise ValueError(f"there is no {path}, expected a folder made by `dspark cache build`")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["version"]
            if version == VERSION:
                shards = [
                    Shard(**shard | {"samples": [tuple(sample) for sample in shard["samples"]]})
                    for shard in content["shards"]
                ]
                return cls(CacheSource(**content["source"]), content["format"], shards)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}), expected the manifest of a cache") from error
        raise ValueError(f"{path} is of version {version}, expected {VERSION}")

    def save(self, folder: Path) -> None:
        """Replaces the manifest of `folder` at once."""
        totals = {"num_samples": self.num_samples, "num_tokens": self.num_tokens, "size": self.size}
        content = {"version": VERSION, "source": asdict(self.source), "format": self.format, **totals}
        temporary = folder / "manifest.json.tmp"
        temporary.write_text(json.dumps(content | {"shards": [asdict(s) for s in self.shards]}), encoding="utf-8")
        publish(temporary, folder / "manifest.json")


def damage_of(folder: Path, shard: Shard) -> str | None:
    """What is wrong with a shard as far as its size tells."""
    path = folder / shard.file
    if not path.exists():
        return f"{path} is missing"
    size = path.stat().st_size
    return None if size == shard.size else f"{path} is torn: it has {size} bytes, expected {shard.size}"


def shard_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}


def file_hash(path: Path) -> str:
    digest = sha256()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def publish(temporary: Path, path: Path) -> None:
    """Gives a file its name once its content is on the disk."""
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if hasattr(os, "O_DIRECTORY"):  # the rename itself, where folders can be opened
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def _weights_hash(target: PreTrainedModel) -> str:
    """Of the names, shapes and first values of all parameters."""
    digest = sha256()
    for name, parameter in target.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if parameter.device.type != "meta":  # else kept elsewhere until it is used
            values = parameter.detach().reshape(-1)[:64].bfloat16()  # the same in whatever dtype it was loaded
            digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _short_hash(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


def human_size(size: float) -> str:
    """A number of bytes in the largest decimal unit that fits: `"1.5 GB"`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
