"""Keys and values of rows that differ in length, since rows of a batch accept different numbers of tokens.

`RowCache` holds left-aligned rows in one buffer per layer, with a length per row: new tokens are scattered to each
row's end, refused ones are dropped by not counting them. The drafter's context lives in one; `TargetRows` dresses one
up as the `Cache` that a target writes to, and makes the positions and masks that go with it. Slot s of a row holds its
s-th token, so that full and sliding attention are comparisons of slots. n rows, L layers.
"""

import inspect
import math
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.utils import ModelOutput

from .target_dspark import CACHE_NAME

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer)  # whose keys and values can be taken over as they are


class RowCache:
    """Keys and values of every layer, (n, key/value heads, capacity, head dimension) each, kept across rounds.

    What lies beyond a row's length is never attended and later overwritten.

    Args:
        start: absolute position of the first slot, (n,) or an int: above 0 when earlier tokens were dropped.
    """

    def __init__(self, start: int | torch.Tensor = 0):
        self.start = start
        self.lengths: torch.Tensor | None = None  # (n,) tokens held
        self.max_length = 0  # of the longest row, known on the host
        self.buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def ends(self, rows: int, device: torch.device) -> torch.Tensor:
        """Absolute position of the next token of each row, (n,)."""
        if self.lengths is None:
            self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        return self.lengths + self.start

    def write(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts new tokens (n, heads, q, dim) behind each row's end; returns the filled part of the layer's buffers."""
        end = self.max_length + key.shape[2]
        if layer_idx not in self.buffers:
            self.buffers[layer_idx] = (self._grown(key, end), self._grown(value, end))
        elif self.buffers[layer_idx][0].shape[2] < end:
            self.buffers[layer_idx] = tuple(self._grown(b, end, b) for b in self.buffers[layer_idx])
        device = key.device
        slots = self.lengths.to(device)[:, None] + torch.arange(key.shape[2], device=device)
        rows = torch.arange(key.shape[0], device=device)[:, None]
        for buffer, new in zip(self.buffers[layer_idx], (key, value), strict=True):
            buffer[rows, :, slots] = new.transpose(1, 2)
        return tuple(buffer[:, :, :end] for buffer in self.buffers[layer_idx])

    def advance(self, count: int | torch.Tensor, longest: int | None = None) -> None:
        """Counts tokens just written as held: the same number in every row, or (n,); the longest row then has
        `longest`, where that is known on the host."""
        self.lengths = self.lengths + count
        if isinstance(count, int):
            self.max_length += count
        else:
            self.max_length = int(self.lengths.max()) if longest is None else longest

    def keep(self, rows: torch.Tensor) -> None:
        """Drops all rows but these, (m,)."""
        if self.lengths is not None:
            self.lengths = self.lengths[rows.to(self.lengths.device)]
            self.max_length = int(self.lengths.max())
        if torch.is_tensor(self.start):
            self.start = self.start[rows.to(self.start.device)]
        for layer_idx, buffers in self.buffers.items():
            self.buffers[layer_idx] = tuple(buffer[rows.to(buffer.device)] for buffer in buffers)

    @staticmethod
    def _grown(like: torch.Tensor, end: int, old: torch.Tensor | None = None) -> torch.Tensor:
        capacity = max(64, 2 ** math.ceil(math.log2(max(end, 1))))
        buffer = like.new_zeros(*like.shape[:2], capacity, like.shape[3])
        if old is not None:
            buffer[:, :, : old.shape[2]] = old
        return buffer


def left_aligned(values: torch.Tensor, real: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """Moves the real entries of each row to its front, in their order.

    Args:
        values: (n, ...), whose dimension `dim` has T entries.
        real: (n, T) bool.

    Returns:
        `values`, cut to the most real entries a row has; what follows a row's real ones is arbitrary.
    """
    order = (~real).long().argsort(dim=1, stable=True)[:, : int(real.sum(dim=1).max())].to(values.device)
    shape = [1] * values.ndim
    shape[0], shape[dim] = order.shape
    index = order.view(shape).expand(*values.shape[:dim], order.shape[1], *values.shape[dim + 1 :])
    return values.gather(dim, index)


class _RowLayer(CacheLayerMixin):
    """One layer's face of a `RowCache`."""

    is_croppable = True  # by not counting

    def __init__(self, rows: RowCache, layer_idx: int):
        super().__init__()
        self.rows, self.layer_idx, self.is_initialized = rows, layer_idx, True

    def lazy_initialization(self, key_states, value_states) -> None: ...

    def update(self, key_states, value_states, *args, **kwargs):
        return self.rows.write(self.layer_idx, key_states, value_states)

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        return self.rows.max_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.rows.max_length

    def get_max_length(self) -> int:
        return -1


class TargetRows:
    """Verify passes of a batch: the target's keys and values after the prefill, taken over row by row.

    Args:
        target: the model that generates.
        cache: its cache after the prefill, T columns.
        real: (B, T) bool, false on padding.
        model_kwargs: arguments of the target's forward in the prefill.
    """

    def __init__(self, target: PreTrainedModel, cache: Cache, real: torch.Tensor, model_kwargs: dict[str, Any]):
        self.target = target
        self.rows = RowCache()
        self.rows.ends(len(real), real.device)
        self.held = real.sum(dim=1).tolist()
        self.rows.advance(real.sum(dim=1), max(self.held))
        layers, self.windows = [], {}
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, _LAYERS):
                self.rows.buffers[i] = tuple(self._taken(layer, states, real) for states in (layer.keys, layer.values))
                layers.append(_RowLayer(self.rows, i))
                self.windows[_layer_type(target, i)] = layer.sliding_window if layer.is_sliding else None
            else:
                layers.append(layer)  # reads another layer's keys
        self.cache = Cache(layers=layers)
        # Positions need not be slots: the caller may have given others.
        position_ids = model_kwargs.get("position_ids")
        last = real.sum(dim=1) - 1 if position_ids is None else position_ids[:, -1].to(real.device)
        self.offset = last + 1 - self.rows.lengths
        self.arguments = {
            name: value
            for name, value in model_kwargs.items()
            if name != CACHE_NAME and not torch.is_tensor(value) and value is not None
        }

    @staticmethod
    def _taken(layer: CacheLayerMixin, states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """(B, heads, columns, dim) → rows left-aligned. A window's layer holds the last columns only; what is missing
        before them lies outside of every window to come."""
        columns = real.shape[1]
        held = states[:, :, : min(columns, states.shape[2])]
        missing = columns - held.shape[2]
        return left_aligned(torch.nn.functional.pad(held, (0, 0, missing, 0)), real, dim=2)

    def verify(self, token_ids: torch.Tensor) -> ModelOutput:
        """One pass over each row's new tokens, (n, q): its anchor and candidates."""
        count = token_ids.shape[1]
        slots = self.rows.lengths[:, None] + torch.arange(count, device=self.rows.lengths.device)
        inputs = self.arguments | {
            "input_ids": token_ids,
            "position_ids": (slots + self.offset[:, None]).to(token_ids.device),
            "attention_mask": self._masks(slots.to(token_ids.device)),
            CACHE_NAME: self.cache,
        }
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count
        return self.target(**inputs, return_dict=True)

    def commit(self, counts: list[int]) -> None:
        """Keeps the first `counts` (n,) tokens of each row of the last pass."""
        self.held = [held + count for held, count in zip(self.held, counts, strict=True)]
        self.rows.advance(torch.tensor(counts, device=self.rows.lengths.device), max(self.held))

    def keep(self, rows: list[int]) -> None:
        """Drops all rows but these, (m,)."""
        self.held = [self.held[row] for row in rows]
        self.rows.keep(torch.tensor(rows))
        self.offset = self.offset[rows]

    def _masks(self, slots: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks (n, 1, q, slots), one per kind of layer where there are several."""
        held = torch.arange(self.rows.max_length + slots.shape[1], device=slots.device)
        distance = slots[:, None, :, None] - held
        masks = {}
        for kind, window in self.windows.items():
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            mask = torch.zeros(seen.shape, dtype=self.target.dtype, device=slots.device)
            masks[kind] = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def check_rows(target: PreTrainedModel, cache: Cache) -> None:
    """Raises `ValueError` where `target` cannot decode rows of different lengths over `cache`, before the prefill."""
    name, config = target.config.model_type, target.config.get_text_config()
    if config is not target.config:
        raise ValueError(f"the target {name!r} is multimodal and makes masks of its own, expected one row, not a batch")
    if "position_ids" not in inspect.signature(target.forward).parameters:
        raise ValueError(f"the target {name!r} takes no position_ids, expected one row, not a batch")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"attn_implementation is {config._attn_implementation!r}, expected 'sdpa' or 'eager' for a batch: rows of "
            "different lengths need a mask of their own"
        )
    if cache.get_seq_length():
        raise ValueError(f"the cache holds {cache.get_seq_length()} tokens, expected an empty one for a batch")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"the target {name!r} has layers {unknown}, expected full or sliding attention for a batch")
    kinds = {type(layer) for layer in cache.layers if isinstance(layer, CacheLayerMixin)} - set(_LAYERS)
    if kinds or cache.offloading:
        other = sorted(kind.__name__ for kind in kinds) or "offloaded layers"
        raise ValueError(f"the cache has {other}, expected a plain dynamic or static cache for a batch")


def _layer_type(target: PreTrainedModel, layer_idx: int) -> str:
    """The name under which a layer of mixed kinds looks its mask up."""
    layer_types = getattr(target.config, "layer_types", None)
    return layer_types[layer_idx] if layer_types else "all"
