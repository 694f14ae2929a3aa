"""What a training step is made of: texts with target states and anchors, each text drawn several times.

A target's forward costs more than a draft step over its states, so each text's states serve R draws of anchors. A step
learns more from few anchors of many texts than from many of few: the R draws of a text are spread over a window of
texts. Order and anchors are functions of the seed, the epoch and the text alone, so that a resumed run goes on with the
very batches that an uninterrupted one would have seen.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from ..objective_dspark import sample_anchors
from .data import collate, sample_id

TOKEN_KEYS = ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states", "target_logsumexp")


class StateSource(Protocol):
    """Where target states come from: `OnlineStates`, `CachedStates`."""

    def features(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample with `target_hidden_states` (T, L·H), `target_last_hidden_states` (T, H) and, for a reduced draft
        vocabulary, `target_logsumexp` (T,)."""


def hashed_seed(*parts: Any) -> int:
    """A 63-bit seed from whatever names the draw."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class ReplaySampler(Sampler):
    """The order of an epoch: (text, draw) pairs, every text `reuse` times within `window` texts of its first turn.

    Args:
        num_samples: texts.
        reuse: R, draws of each text and epoch.
        window: texts that are in use at a time, about.
    """

    def __init__(self, num_samples: int, reuse: int, window: int, seed: int):
        if num_samples < 1 or reuse < 1 or window < 1:
            raise ValueError(f"{num_samples} texts, reuse {reuse}, window {window}; expected at least 1 each")
        self.num_samples, self.reuse, self.window, self.seed = num_samples, reuse, window, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples * self.reuse

    def __iter__(self) -> Iterator[tuple[int, int]]:
        generator = torch.Generator().manual_seed(hashed_seed(self.seed, self.epoch))
        order = torch.randperm(self.num_samples, generator=generator)
        spread = torch.arange(self.reuse) + torch.rand(self.num_samples, self.reuse, generator=generator)
        turns = torch.arange(self.num_samples)[:, None] + self.window * spread / self.reuse
        for entry in turns.flatten().argsort(stable=True).tolist():
            yield int(order[entry // self.reuse]), self.epoch * self.reuse + entry % self.reuse


class AnchoredTexts(Dataset):
    """Texts with target states and anchors; items are named (text, draw), or by the text alone for its draw 0.

    Args:
        samples: texts with `input_ids` and `loss_mask`, (T,) each; with the states too where there is no source.
        source: of the states.
        num_anchors: per draw.
        seed: of the anchors.
        kept: texts whose states are held in memory (in each worker of a data loader).
    """

    def __init__(
        self, samples: Sequence[dict[str, Any]], source: StateSource | None, num_anchors: int, seed: int, kept: int
    ):
        self.samples, self.source = samples, source
        self.num_anchors, self.seed, self.kept = num_anchors, seed, kept
        self._states: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, name: int | tuple[int, int]) -> dict[str, torch.Tensor]:
        index, draw = name if isinstance(name, tuple) else (name, 0)
        sample = self._features(index)
        generator = torch.Generator().manual_seed(hashed_seed(self.seed, sample["id"], draw))
        positions, mask = sample_anchors(sample["loss_mask"][None], self.num_anchors, generator)
        item = {key: sample[key] for key in TOKEN_KEYS if key in sample}
        return item | {"anchor_positions": positions[mask]}

    def _features(self, index: int) -> dict[str, Any]:
        if index in self._states:
            self._states.move_to_end(index)
            return self._states[index]
        sample = {key: torch.as_tensor(value) for key, value in self.samples[index].items() if key in TOKEN_KEYS}
        sample["id"] = self.samples[index].get("id") or sample_id(sample["input_ids"], sample["loss_mask"])
        if "target_hidden_states" not in sample and self.source is not None:
            sample = self.source.features(sample)
        self._states[index] = sample
        if len(self._states) > self.kept:
            self._states.popitem(last=False)
        return sample


def collate_anchored(samples: list[dict[str, torch.Tensor]], row_length: int | None = None) -> dict[str, torch.Tensor]:
    """Right-pads texts (T, …) and their anchors (A,) → (B, T, …), `anchor_positions` and `anchor_mask` (B, A).

    Args:
        row_length: pack several texts into a row as long as they fit, told apart by `document_ids` (B, T).
    """
    if row_length is not None:
        samples = [_joined(row) for row in packed_rows(samples, row_length)]
    batch = collate(samples)
    anchors = [sample["anchor_positions"] for sample in samples]
    batch["anchor_positions"] = pad_sequence(anchors, batch_first=True)
    if not batch["anchor_positions"].shape[1]:  # no text has a place for an anchor; one padding anchor teaches nothing
        batch["anchor_positions"] = torch.zeros(len(samples), 1, dtype=torch.long)
    counts = torch.tensor([len(positions) for positions in anchors])
    batch["anchor_mask"] = torch.arange(batch["anchor_positions"].shape[1]) < counts[:, None]
    return batch


def packed_rows(samples: list[dict], row_length: int) -> list[list[dict]]:
    """Texts in rows of at most `row_length` tokens: longest first, each into the first row that has room."""
    rows: list[list[dict]] = []
    for sample in sorted(samples, key=lambda sample: -len(sample["input_ids"])):
        for row in rows:
            if sum(len(other["input_ids"]) for other in row) + len(sample["input_ids"]) <= row_length:
                row.append(sample)
                break
        else:
            rows.append([sample])
    return rows


def _joined(row: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The texts of one row, one after the other."""
    lengths = torch.tensor([len(sample["input_ids"]) for sample in row])
    starts = lengths.cumsum(0) - lengths
    joined = {key: torch.cat([sample[key] for sample in row]) for key in TOKEN_KEYS if key in row[0]}
    joined["document_ids"] = torch.arange(len(row)).repeat_interleave(lengths)
    shifted = [sample["anchor_positions"] + start for sample, start in zip(row, starts, strict=True)]
    return joined | {"anchor_positions": torch.cat(shifted)}
