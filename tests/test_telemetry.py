"""record_speculation: values, nesting, threads, and copies of the module."""

import importlib.util
import math
import sys
import threading

import pytest
import torch

from dspark_hf import FixedLength, record_speculation, telemetry_dspark
from dspark_hf.telemetry_dspark import SpeculationStats, report_round


def test_values():
    stats = SpeculationStats()
    assert math.isnan(stats.acceptance_length) and stats.acceptance_by_position == []
    for proposed, accepted, emitted in [(3, 3, 4), (3, 0, 1), (1, 1, 2), (0, 0, 1), (2, 1, 2)]:
        stats.add_round(proposed, accepted, emitted, [], [], 0)
    assert stats.proposal_lengths == [3, 3, 1, 0, 2]
    assert stats.accepted_lengths == [3, 0, 1, 0, 1]
    assert stats.acceptance_lengths == [4, 1, 2, 1, 2]
    assert stats.acceptance_length == 2.0
    assert stats.acceptance_by_position == [3 / 4, 1 / 3, 1 / 2]


def test_every_generate_call_inside_is_recorded(target, drafter):
    target, drafter, ids = target("qwen3"), drafter(), torch.tensor([[72, 101, 32]])
    report_round(1, 1, 1)  # nobody listens: nothing happens
    with record_speculation() as stats:
        first = target.generate(ids, assistant_model=drafter, max_new_tokens=12, eos_token_id=None)
        rounds = len(stats.acceptance_lengths)
        target.generate(ids, max_new_tokens=4)  # a plain call has no rounds
        assert len(stats.acceptance_lengths) == rounds
        drafter.verify_policy = FixedLength(2)
        target.generate(ids, assistant_model=drafter, max_new_tokens=6, eos_token_id=None)
    # The first token is the prefill's; a round keeps what it was offered at most, and adds one token.
    assert first.shape[1] == 3 + 12 and sum(stats.acceptance_lengths[:rounds]) >= 11
    assert set(stats.proposal_lengths[:rounds]) == {7} and set(stats.proposal_lengths[rounds:]) == {2}
    assert [a + 1 for a in stats.accepted_lengths] == stats.acceptance_lengths
    assert all(a <= p for a, p in zip(stats.accepted_lengths, stats.proposal_lengths, strict=True))
    size = len(stats.acceptance_lengths)
    target.generate(ids, assistant_model=drafter, max_new_tokens=4)
    assert len(stats.acceptance_lengths) == size  # closed


def test_nested_recorders_all_hear():
    with record_speculation() as outer:
        report_round(4, 1, 2)
        with record_speculation() as inner:
            report_round(4, 2, 3)
        report_round(4, 3, 4)
    assert (outer.accepted_lengths, inner.accepted_lengths) == ([1, 2, 3], [2])


def test_recorders_close_by_identity():
    """Two recorders that hold equal values are still two."""
    with record_speculation() as outer:
        with record_speculation():
            pass
        report_round(4, 3, 4)
    assert outer.accepted_lengths == [3]
    with pytest.raises(RuntimeError), record_speculation() as broken:
        raise RuntimeError
    report_round(4, 3, 4)
    assert broken.accepted_lengths == []


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_threads_with_a_recorder_of_their_own_are_apart():
    own = []

    def work():
        with record_speculation() as stats:
            report_round(7, 5, 6)
        own.append(stats)

    with record_speculation() as stats:
        report_round(7, 1, 2)
        in_thread(work)
    assert stats.accepted_lengths == [1] and own[0].accepted_lengths == [5]


def test_a_thread_without_a_recorder_is_heard_by_the_others():
    """As with TextIteratorStreamer, where generate() runs beside the reader."""
    with record_speculation() as stats:
        in_thread(lambda: report_round(7, 2, 3))
    assert stats.accepted_lengths == [2]


def test_many_threads_open_and_close_recorders():
    seen, errors = [], []

    def work(number):
        try:
            for _ in range(4_000):
                with record_speculation() as stats:
                    report_round(7, number, 1)
                seen.append((number, stats.accepted_lengths))
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors and len(seen) == 24_000
    assert all(lengths == [number] for number, lengths in seen)
    with record_speculation() as stats:
        report_round(7, 1, 2)
    assert stats.accepted_lengths == [1]


def test_copies_of_the_module_share_recorders():
    """Drafters loaded as remote code bring a copy of this file each."""
    spec = importlib.util.spec_from_file_location("telemetry_copy", telemetry_dspark.__file__)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copy
    try:
        spec.loader.exec_module(copy)
        with record_speculation() as ours:
            copy.report_round(7, 3, 4)
        with copy.record_speculation() as theirs:
            report_round(7, 2, 3)
    finally:
        del sys.modules[spec.name]
    assert ours.accepted_lengths == [3] and theirs.accepted_lengths == [2]
