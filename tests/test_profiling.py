"""Measuring SPS curves: what is timed, in which order, what becomes of it, and that nothing is left behind."""

import gc
import statistics
import weakref
from itertools import count

import pytest
import torch
from generation_helpers import IDS, NEW, tiny_drafter, tiny_target
from helpers import load_drafter, load_target
from test_generate_targets import tiny_mamba, uncroppable_cache
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig

import dspark_hf.profiling_dspark as profiling
from dspark_hf import record_speculation
from dspark_hf.packing import pack_linears
from dspark_hf.profile_dspark import SPSProfile
from dspark_hf.profiling_dspark import is_loaded, machine, measure_profile, quick_profile
from dspark_hf.target_dspark import CACHE_NAME, cache_length, states_argument

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
QUICK = {"context": 8, "widths": (1, 4), "repeats": 1, "warmup": 0}


def pair(dtype=torch.float32, **overrides):
    """A tiny target and drafter, with γ = 5."""
    target = tiny_target(LlamaConfig, **TINY)
    return target.to(dtype), tiny_drafter(target, **overrides).to(dtype)


class Watch:
    """A clock that only the models' passes move on, and a record of those: (kind, rows, width, tokens cached).

        with Watch(monkeypatch, target, drafter, cost) as watch: ...

    Args:
        cost: called as (kind, width, which pass of this kind and width) → seconds.
    """

    def __init__(self, monkeypatch, target, drafter=None, cost=lambda kind, width, index: 1.0):
        self.now, self.passes, self.caches, self.cost, self.drafter = 0.0, [], [], cost, drafter
        monkeypatch.setattr(profiling, "clock", lambda: self.now)
        target.register_forward_pre_hook(self._target_pass, with_kwargs=True)
        if drafter is not None:
            self.draft = drafter.draft
            monkeypatch.setattr(drafter, "draft", self._draft_pass)

    def _target_pass(self, module, args, kwargs):
        rows, width = kwargs["input_ids"].shape
        self.states = kwargs.get("output_hidden_states")
        self.tokens = kwargs["input_ids"]
        self.caches.append(weakref.ref(kwargs[CACHE_NAME]))
        self._note("plain" if self.states is None else "verify", rows, width, cache_length(kwargs[CACHE_NAME]))

    def _draft_pass(self, context, anchor_ids, cache, **kwargs):
        held = 0 if cache.lengths is None else int(cache.lengths.max())
        if held:  # else it takes in the context
            self._note("draft", len(anchor_ids), context.shape[1], held)
        return self.draft(context, anchor_ids, cache=cache, **kwargs)

    def _note(self, kind, rows, width, cached):
        index = sum(seen[0] == kind and seen[2] == width for seen in self.passes)
        self.passes.append((kind, rows, width, cached))
        self.now += self.cost(kind, width, index)


def test_passes_take_turns_and_medians_are_summed(monkeypatch):
    """Every repetition has a delay of its own, the first, which does not count, the longest."""
    target, drafter = load_target(), load_drafter()
    delay = [1000.0, 5.0, 0.0, 1.0]
    base = {"plain": 20.0, "draft": 3.0, "verify": 30.0}
    watch = Watch(
        monkeypatch, target, drafter, lambda kind, width, i: base[kind] + delay[i] + (kind == "verify") * width
    )
    profile = measure_profile(target, drafter, rows=(2,), widths=(4, 1, 8), context=8, repeats=3)
    turn = [("plain", 2, 1, 8), ("draft", 2, 4, 8), *(("verify", 2, width, 8) for width in (1, 4, 8))]
    assert watch.passes == turn * 4
    assert len(watch.tokens.unique()) > 8  # of the last pass, over 16 tokens: experts are chosen by the token
    assert watch.states == states_argument(drafter.config.target_layer_ids)
    assert profile.tokens == [2, 8, 16] and profile.batches == {}
    draft, seconds = 3.0 + 1.0, [31.0 + 1.0, 34.0 + 1.0, 38.0 + 1.0]
    assert profile.steps_per_second == pytest.approx([1 / (draft + verify) for verify in seconds])
    assert profile.plain_steps_per_second == pytest.approx(1 / 21.0)
    assert profile.details["draft_seconds"] == draft and profile.details["verify_seconds"] == seconds
    (raw,) = profile.details["passes"]
    assert raw["plain_seconds"] == [25.0, 20.0, 21.0] and raw["draft_seconds"] == [8.0, 3.0, 4.0]
    assert raw["verify_seconds"] == [[32.0 + width - 1 + d for d in (4.0, -1.0, 0.0)] for width in (1, 4, 8)]


def test_without_a_drafter_a_round_is_the_verify_pass(monkeypatch):
    target = load_target()
    watch = Watch(monkeypatch, target, cost=lambda kind, width, index: 2.0 * width)
    profile = measure_profile(target, context=8, repeats=1, warmup=0)
    assert watch.passes == [("plain", 1, width, 8) for width in (1, *range(1, 9))]
    assert profile.tokens == list(range(1, 9))
    assert profile.steps_per_second == pytest.approx([1 / (2.0 * width) for width in range(1, 9)])
    assert profile.plain_steps_per_second == pytest.approx(0.5) and profile.batches == {}


def test_the_middle_context_gives_the_curves(monkeypatch):
    (target, drafter), cached = pair(), []
    watch = Watch(monkeypatch, target, drafter, lambda kind, width, index: float(watch.passes[-1][3]))
    profile = measure_profile(
        target,
        drafter,
        rows=(3, 1),
        widths=(1, 2),
        context=[24, 8, 16],
        repeats=2,
        progress=lambda x: cached.append(x) or x,
    )
    assert [(raw["rows"], raw["context"]) for raw in profile.details["passes"]] == [
        (rows, context) for rows in (1, 3) for context in (8, 16, 24)
    ]
    assert all(raw["verify_seconds"] == [[raw["context"]] * 2] * 2 for raw in profile.details["passes"])
    assert {rows: curve.tokens for rows, curve in profile.batches.items()} == {1: [1, 2], 3: [3, 6]}
    for curve in (profile, *profile.batches.values()):
        assert curve.steps_per_second == pytest.approx([1 / 32.0] * 2) and curve.details["context"] == 16
    assert len(cached[0]) == 2 * 3 * 3  # what a progress bar counts


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "packed"])
def test_real_seconds(kind, tmp_path):
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    target, drafter = pair(dtype)
    if kind == "packed":
        target, drafter = pack_linears(target), pack_linears(drafter)
    profile = SPSProfile.measure(target, drafter, rows=(1, 2), context=16, repeats=1)
    assert profile.tokens == list(range(1, 7)) and profile.batches[2].tokens == list(range(2, 13, 2))
    for raw in profile.details["passes"]:
        seconds = [*raw["plain_seconds"], *raw["draft_seconds"], *sum(raw["verify_seconds"], [])]
        assert len(seconds) == 8 and min(seconds) > 0
        curve = profile.batches[raw["rows"]]
        total = statistics.median(raw["draft_seconds"]) + statistics.median(raw["verify_seconds"][3])
        assert curve.steps_per_second[3] == pytest.approx(1 / total)
    assert profile.details["settings"]["dtype"] == str(dtype)
    profile.save(tmp_path / "profile.json")
    loaded = SPSProfile.load(tmp_path / "profile.json")
    assert loaded == profile and loaded.details == profile.details


def test_models_and_random_state_are_left_as_they_were(monkeypatch):
    target, drafter = load_target(), load_drafter()

    def run():
        with record_speculation() as stats:
            text = target.generate(IDS, assistant_model=drafter, **NEW)
        return text.tolist(), stats.accepted_lengths

    before, attributes, state = run(), (set(vars(target)), set(vars(drafter))), torch.get_rng_state()
    with record_speculation() as stats:
        measure_profile(target, drafter, **QUICK)
    assert stats.proposal_lengths == []
    assert (set(vars(target)), set(vars(drafter))) == attributes and torch.equal(torch.get_rng_state(), state)
    assert run() == before
    watch = Watch(monkeypatch, target, drafter)
    measure_profile(target, drafter, **QUICK)
    gc.collect()
    assert watch.caches and not any(cache() for cache in watch.caches)


@pytest.mark.parametrize("context", [4, 24])
@pytest.mark.parametrize("config", [MistralConfig, Gemma3TextConfig])
def test_sliding_windows(monkeypatch, config, context):
    """Every pass finds the context in the cache: as long as it was, and the window's keys where there were any."""
    more = {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    target = tiny_target(config, sliding_window=8, **(more if config is Gemma3TextConfig else {}))
    drafter, keys = tiny_drafter(target), []
    watch = Watch(monkeypatch, target, drafter)

    def note_keys(module, args, kwargs):
        keys.append([layer.keys[..., -min(context, 7) :, :].clone() for layer in kwargs[CACHE_NAME].layers])

    target.register_forward_pre_hook(note_keys, with_kwargs=True)
    measure_profile(target, drafter, rows=(2,), widths=(1, 5), context=context, repeats=2)
    assert len(watch.passes) == 3 * 4 and all(seen[3] == context for seen in watch.passes)
    for seen in keys[1:]:
        assert all(torch.equal(one, other) for one, other in zip(seen, keys[0], strict=True))


def test_quick_profile_is_measured_once(monkeypatch):
    target, drafter = pair()
    watch = Watch(monkeypatch, target, drafter)
    monkeypatch.setattr(profiling, "clock", count().__next__)
    profile = quick_profile(target, drafter, rows=2, context=8)
    assert profile.tokens == [2, 4, 8, 12] and profile.details["context"] == 8
    assert len(watch.passes) == 6 * 6
    assert quick_profile(target, pair()[1], rows=2, context=16) is profile and len(watch.passes) == 6 * 6
    others = [
        quick_profile(target, drafter, rows=1, context=8),
        quick_profile(target, None, rows=2, context=8),
        quick_profile(target, pair(markov_head_type="gated")[1], rows=2, context=8),
        quick_profile(pair()[0], drafter, rows=2, context=8),
    ]
    assert len({id(p) for p in (profile, *others)}) == 5
    assert others[1].tokens == [2, 4, 8, 16]
    monkeypatch.setattr(profiling, "QUICK_CONTEXT", 4)
    assert quick_profile(target, drafter, rows=3, context=8).details["context"] == 4
    kept = weakref.ref(profile)
    del target, watch, profile, others
    monkeypatch.undo()
    gc.collect()
    assert kept() is None  # it went with its target


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rows": ()}, r"rows is \[\], expected one or more"),
        ({"rows": (1, 0)}, r"rows is \[0, 1\], expected .* at least 1"),
        ({"rows": (2, 4)}, r"rows is \[2, 4\], expected 1 among several"),
        ({"widths": (-1, 2)}, r"widths is \[-1, 2\]"),
        ({"context": 0}, r"context is \[0\]"),
        ({"repeats": 0}, "repeats is 0 and warmup 1"),
        ({"warmup": -1}, "repeats is 5 and warmup -1"),
    ],
)
def test_settings_that_make_no_sense(target, settings, message):
    with pytest.raises(ValueError, match=message):
        measure_profile(target(), **settings)


def test_models_that_cannot_be_measured(monkeypatch, target):
    with pytest.raises(ValueError, match="made for a target with"):
        measure_profile(target(), pair()[1])
    with pytest.raises(ValueError, match="'mamba' has recurrent layers"):
        measure_profile(tiny_mamba(), **QUICK)
    monkeypatch.setattr(profiling, "cache_of", lambda outputs: uncroppable_cache())
    with pytest.raises(ValueError, match="cannot take back refused tokens"):
        measure_profile(target(), **QUICK)


def test_machine(monkeypatch):
    assert machine().keys() == {"torch", "transformers", "python", "processor", "threads"}
    assert machine()["threads"] == torch.get_num_threads()
    for load, busy in ((0.5, False), (torch.get_num_threads() + 1.5, True)):
        monkeypatch.setattr(profiling.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert is_loaded() is busy
    monkeypatch.delattr(profiling.os, "getloadavg")
    assert is_loaded() is None
