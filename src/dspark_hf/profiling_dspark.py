"""Measures how long a decoding round takes on this machine, by the number of tokens in the target's verify pass.

    seconds(R·w) = median T_verify(R rows, w tokens each) + median T_draft(R rows),        SPS = 1 / seconds

behind C cached tokens of random text in each row. Passes take turns, every width once per repetition, so that a machine
that slows down or speeds up meanwhile does so for all of them. Plain decoding is measured along: one token per row, no
hidden states, no draft. Symbols: R rows, C context length, w width (tokens per row, the anchor included), γ block size.
"""

import copy
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import PreTrainedModel

from .profile_dspark import SPSProfile
from .target_dspark import CACHE_NAME, cache_of, check_croppable, check_pair, context_states, states_argument

clock = time.perf_counter
WIDTHS_WITHOUT_DRAFTER = 8
QUICK_CONTEXT = 1024
_QUICK_PROFILES: WeakKeyDictionary[PreTrainedModel, dict[tuple, SPSProfile]] = WeakKeyDictionary()


@torch.no_grad()
def measure_profile(
    target: PreTrainedModel,
    drafter: Any = None,
    rows: Sequence[int] = (1,),
    widths: Sequence[int] | None = None,
    context: int | Sequence[int] = 256,
    repeats: int = 5,
    warmup: int = 1,
    progress: Callable[[list], Iterable] = iter,
) -> SPSProfile:
    """The SPS curve of a target, with the cost of drafting where a drafter is given.

    Args:
        target, drafter: in eval mode, as they will decode (device, dtype, packed layers); both are left as they were.
        rows: batch sizes R to measure, one curve each; with 1 among them where there are several.
        widths: tokens per row in a verify pass; 1..γ+1 by default, 1..8 without a drafter.
        context: tokens per row in the cache, C. Of several lengths, the middle one gives the curves.
        repeats, warmup: passes of each kind that count, and passes before them that do not.
        progress: wraps the list of repetitions, as `rich.progress.track` does.

    Returns:
        The curve of the smallest R, with all of them in `batches` where there are several. `details` has the machine,
        the settings and, under `passes`, the raw seconds for every R and C.

    Raises:
        ValueError: for settings that make no sense, a pair that does not fit, or a target that cannot take back tokens.
    """
    if widths is None:
        widths = range(1, WIDTHS_WITHOUT_DRAFTER + 1 if drafter is None else drafter.config.block_size + 2)
    rows, widths = _counts("rows", rows), _counts("widths", widths)
    contexts = _counts("context", [context] if isinstance(context, int) else context)
    if len(rows) > 1 and rows[0] != 1:
        raise ValueError(f"rows is {rows}, expected 1 among several: a profile is that of one row first")
    if repeats < 1 or warmup < 0:
        raise ValueError(f"repeats is {repeats} and warmup {warmup}, expected at least 1 and 0")
    if drafter is None:
        check_target(target)
    else:
        check_pair(target, drafter)

    settings = {"contexts": contexts, "repeats": repeats, "warmup": warmup, "dtype": str(target.dtype)}
    details = {"machine": machine() | {"loaded": is_loaded()}, "settings": settings, "passes": []}
    for count, length, repetition in progress(list(product(rows, contexts, range(warmup + repeats)))):
        if repetition == 0:
            bench = None  # frees the caches of the last setting first
            bench = _Bench(target, drafter, count, length)
            seconds: dict[str, list] = {
                "plain_seconds": [],
                "draft_seconds": [],
                "verify_seconds": [[] for _ in widths],
            }
            details["passes"].append({"rows": count, "context": length, "widths": widths} | seconds)
        plain, draft, verify = bench.plain(), bench.draft(), [bench.verify(width) for width in widths]
        if repetition >= warmup:
            seconds["plain_seconds"].append(plain)
            seconds["draft_seconds"].append(draft)
            for total, one in zip(seconds["verify_seconds"], verify, strict=True):
                total.append(one)

    middle = contexts[len(contexts) // 2]
    curves = {item["rows"]: _curve(item) for item in details["passes"] if item["context"] == middle}
    first = curves[rows[0]]
    return SPSProfile(
        tokens=first.tokens,
        steps_per_second=first.steps_per_second,
        plain_steps_per_second=first.plain_steps_per_second,
        batches=curves if len(rows) > 1 else {},
        details=first.details | details,
    )


def quick_profile(target: PreTrainedModel, drafter: Any = None, rows: int = 1, context: int = 256) -> SPSProfile:
    """A rough profile for one batch size: five repetitions, widths 1, 2, 4, … and γ+1. Measured at the first call for
    this target, kind of drafter, batch size, device, dtype and number of threads; later calls in this process get the
    same one, whatever the context.

    A target changed in place (packed, quantised) after its first call keeps the old profile. The context measured is
    at most `QUICK_CONTEXT`, since filling the cache takes a prefill of its own.
    """
    kind = None if drafter is None else (type(drafter).__qualname__, drafter.config.to_json_string())
    key = (kind, rows, target.device, target.dtype, torch.get_num_threads())
    profiles = _QUICK_PROFILES.setdefault(target, {})
    if key not in profiles:
        most = WIDTHS_WITHOUT_DRAFTER if drafter is None else drafter.config.block_size + 1
        widths = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
        settings = {"rows": (rows,), "widths": widths, "context": min(context, QUICK_CONTEXT)}
        profiles[key] = measure_profile(target, drafter, **settings)
    return profiles[key]


class _Bench:
    """Both models behind `context` cached tokens of random text in each of `rows` rows; every method runs one pass,
    returns its seconds and leaves the caches as they were."""

    def __init__(self, target: PreTrainedModel, drafter: Any, rows: int, context: int):
        self.target, self.drafter = target, drafter
        # A generator of its own: a profile measured inside generate() must not change what is sampled there.
        self.rows, self.generator = rows, torch.Generator().manual_seed(0)
        self.states = None if drafter is None else states_argument(drafter.config.target_layer_ids)
        options = {"use_cache": True} | ({} if self.states is None else {"output_hidden_states": self.states})
        text = self._tokens(context)
        outputs = target.get_decoder()(input_ids=text, **options)  # spares the logits of the whole context
        self.cache = cache_of(outputs)
        check_croppable(self.cache)
        self.cache.activate_past_recording()
        self.cache.crop(0)
        if drafter is not None:
            self.anchors = self._tokens(1)[:, 0]
            context_rows = context_states(outputs.hidden_states, drafter.config.target_layer_ids)
            self.text = torch.cat([text, self.anchors[:, None]], dim=1)
            self.draft_cache = self._draft(context_rows, drafter.new_cache()).cache
            # What a round hands over are the states of the tokens it yielded, between 1 and γ+1.
            yielded = (drafter.config.block_size + 2) // 2
            self.new_rows = context_rows[:, -1:].expand(-1, yielded, -1).contiguous()
            self.text = torch.cat([text, self._tokens(yielded), self.anchors[:, None]], dim=1)

    def plain(self) -> float:
        return self._target_pass(1, {})

    def verify(self, width: int) -> float:
        """No `logits_to_keep`: the logits of all `width` tokens are needed."""
        return self._target_pass(width, {} if self.states is None else {"output_hidden_states": self.states})

    def draft(self) -> float:
        if self.drafter is None:
            return 0.0
        cache = copy.deepcopy(self.draft_cache)
        return self._seconds(lambda: self._draft(self.new_rows, cache))

    def _tokens(self, width: int) -> torch.Tensor:
        """Random ones, (R, width): experts are chosen by the token."""
        vocabulary = self.target.config.get_text_config().vocab_size
        return torch.randint(vocabulary, (self.rows, width), generator=self.generator).to(self.target.device)

    def _target_pass(self, width: int, options: dict[str, Any]) -> float:
        arguments = {"input_ids": self._tokens(width), CACHE_NAME: self.cache, "use_cache": True} | options
        seconds = self._seconds(lambda: self.target(**arguments))
        self.cache.crop(-width)
        return seconds

    def _draft(self, context_rows: torch.Tensor, cache: Any) -> Any:
        device = self.drafter.device
        inputs = {"input_ids": self.text.to(device), "cache": cache, "target": self.target}
        return self.drafter.draft(context_rows.to(device), self.anchors.to(device), **inputs)

    def _seconds(self, run: Callable[[], Any]) -> float:
        self._wait()
        start = clock()
        run()
        self._wait()
        return clock() - start

    def _wait(self) -> None:
        """Until the accelerator has done what it was given."""
        if self.target.device.type != "cpu":
            torch.accelerator.synchronize(self.target.device)


def check_target(target: PreTrainedModel) -> None:
    """Raises `ValueError` where no drafter could serve `target`: what `check_pair` says to one that has its sizes."""
    config = target.config.get_text_config()
    sizes = {key: getattr(config, key) for key in ("vocab_size", "hidden_size")}
    check_pair(target, SimpleNamespace(config=SimpleNamespace(num_target_layers=config.num_hidden_layers, **sizes)))


def _curve(item: dict[str, Any]) -> SPSProfile:
    """The curve of one entry of `passes`."""
    draft = statistics.median(item["draft_seconds"])
    verify = [statistics.median(seconds) for seconds in item["verify_seconds"]]
    return SPSProfile(
        tokens=[item["rows"] * width for width in item["widths"]],
        steps_per_second=[1 / (seconds + draft) for seconds in verify],
        plain_steps_per_second=1 / statistics.median(item["plain_seconds"]),
        details={"rows": item["rows"], "context": item["context"], "draft_seconds": draft, "verify_seconds": verify},
    )


def _counts(name: str, values: Iterable[int]) -> list[int]:
    """Sorted, each once."""
    counts = sorted(set(values))
    if not counts or counts[0] < 1:
        raise ValueError(f"{name} is {counts}, expected one or more numbers of at least 1")
    return counts


def machine() -> dict[str, Any]:
    """Versions and hardware, as they bear on a figure."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "threads": torch.get_num_threads(),
    }


def is_loaded() -> bool | None:
    """Whether other work takes processor time beside this process's threads; None where the system does not tell."""
    return os.getloadavg()[0] > torch.get_num_threads() + 1 if hasattr(os, "getloadavg") else None


def _cpu_name() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.processor() or platform.machine()} ({capability}, {os.cpu_count()} cores)"
