"""The history of rounds: averages, mean yield, counters of the bypass, rows that leave, late arrival."""

import math

import pytest
import torch

from dspark_hf import rounds_dspark
from dspark_hf.rounds_dspark import INITIAL_CONFIDENCE, KEPT_ROUNDS, RoundHistory


def observe(history, confidence, lengths, yielded, anchor_confidence=None):
    history.observe(confidence, torch.tensor(lengths), torch.tensor(yielded), anchor_confidence)


def observe_plain(history, rounds=1):
    for _ in range(rounds):
        observe(history, None, [0], [1])


def test_averages():
    """Weights fall by 0.9 per round; the start value counts as one row; positions not drafted stay as they were."""
    history = RoundHistory(3)
    assert history.averages == [INITIAL_CONFIDENCE] * 3
    first, second = torch.tensor([[0.2, 0.4], [0.6, 0.0]]), torch.tensor([[0.5]])
    observe(history, first, [1, 2], [1, 1])
    observe(history, second, [1], [1])
    start, weight = INITIAL_CONFIDENCE, 0.9
    position_1 = (start * weight**2 + (0.2 + 0.6) * weight + 0.5) / (weight**2 + 2 * weight + 1)
    position_2 = (start * weight + 0.4 + 0.0) / (weight + 2)
    assert history.averages == pytest.approx([position_1, position_2, start])


def test_mean_tokens_and_yield():
    """The promises of the verified tokens, corrected by what was kept of them, against the sums written out."""
    history, d = RoundHistory(2), 0.97
    assert history.mean_tokens is None and history.mean_yield is None and history.weight == 0
    observe(history, torch.tensor([[0.5, 0.4], [0.8, 0.9]]), [1, 2], [2, 1])  # promised 0.5 + (0.8 + 0.72), kept 1 + 0
    assert history.mean_tokens == pytest.approx(2.5)
    assert history.mean_yield == pytest.approx(1 + 2.02 / 2 * (d * 2 + 1) / (d * 2 + 2.02))
    observe(history, torch.tensor([[0.6, 0.1]]), [0], [1])
    assert history.weight == pytest.approx(d + 1)
    assert history.mean_tokens == pytest.approx((d * 2.5 + 1) / (d + 1))
    promise = (d * 2.02 / 2 + 0) / (d + 1)
    assert history.mean_yield == pytest.approx(1 + promise * (d * 2 + 1) / (d * 2 + 2.02))


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
def test_mean_yield_follows_what_is_kept(acceptance):
    """Confidences of 0.6 throughout, whatever is kept."""
    history, generator = RoundHistory(4), torch.Generator().manual_seed(0)
    estimates = []
    for _ in range(300):
        kept = (torch.rand(4, generator=generator) < acceptance).long().cumprod(0).sum().item()
        observe(history, torch.full((1, 4), 0.6), [4], [kept + 1])
        estimates.append(history.mean_yield)
    true = sum(acceptance**k for k in range(5))
    assert sum(estimates[100:]) / 200 == pytest.approx(true, rel=0.1)


def test_counters():
    history = RoundHistory(2)
    confidence = torch.tensor([[0.5, 0.5]])
    observe_plain(history)
    assert (history.plain_rounds, history.failed_probes) == (1, 0)  # nothing was tried
    for failures in (1, 2, 3):
        observe(history, confidence, [2], [1])
        assert (history.plain_rounds, history.weight) == (0, 1.0)  # the means begin anew
        observe(history, confidence[:, :1], [0], [1])
        assert history.mean_tokens == pytest.approx((0.97 * 3 + 1) / 1.97)
        observe_plain(history, 5)
        assert (history.plain_rounds, history.failed_probes) == (5, failures)
    for _ in range(11):
        observe(history, confidence, [2], [3])
    assert history.failed_probes == 3
    observe(history, confidence, [2], [3])
    assert history.failed_probes == 0


def test_what_blocks_add_to_the_first_confidence():
    """A difference of logits, of the last 16 rounds of a single row whose anchor was judged; finite for 0 and 1."""
    history = RoundHistory(2)
    observe(history, torch.tensor([[0.9, 0.3]]), [1], [1], 0.25)
    observe(history, torch.tensor([[0.9, 0.3]]), [1], [1])
    observe_plain(history)
    assert list(history.block_logits) == pytest.approx([math.log(27)], rel=1e-5)
    observe(history, torch.tensor([[1.0]]), [1], [1], 0.0)
    assert history.block_logits[-1] == pytest.approx(2 * math.log(1e6), rel=1e-5)
    for k in range(20):
        observe(history, torch.tensor([[0.5]]), [1], [1], (k + 1) / 22)
    assert list(history.block_logits) == pytest.approx([math.log(22 / k - 1) for k in range(5, 21)], abs=1e-6)


def test_skipped_rounds_say_nothing_of_drafting():
    history = RoundHistory(2)
    observe(history, torch.tensor([[0.9, 0.3]]), [1], [1])
    before = (list(history.averages), history.mean_yield, history.weight, history.plain_rounds)
    history.skip()
    history.skip()
    assert history.skipped_blocks == 2
    assert (list(history.averages), history.mean_yield, history.weight, history.plain_rounds) == before
    observe(history, torch.tensor([[0.9]]), [1], [1])
    assert history.skipped_blocks == 0 and history.weight == 1.97  # no new beginning, as after a bypass


def test_nothing_drafted_is_a_plain_round():
    history = RoundHistory(2)
    observe(history, torch.empty(3, 0), [0, 0, 0], [1, 1, 1])
    assert history.plain_rounds == 1 and history.recent_confidence(1) is None


def test_recent_confidences_and_rows_that_leave():
    history = RoundHistory(2)
    rounds = [torch.rand(4, 2), torch.rand(4, 2), torch.rand(2, 2)]
    observe(history, rounds[0], [2] * 4, [1] * 4)
    assert history.recent_confidence(2) is None
    observe(history, rounds[1], [2] * 4, [1] * 4)
    history.keep(torch.tensor([1, 3]))
    assert torch.equal(history.recent_confidence(1), rounds[1][[1, 3]])
    observe(history, rounds[2], [2] * 2, [1] * 2)
    observe_plain(history)  # not counted
    assert torch.equal(history.recent_confidence(1), rounds[2])
    history.keep(torch.tensor([1]))
    assert torch.equal(history.recent_confidence(1), rounds[2][[1]])
    assert torch.equal(history.recent_confidence(3), rounds[0][[3]])
    kept = rounds[2][1:].clone()
    rounds[2].zero_()  # the history has a copy
    assert torch.equal(history.recent_confidence(1), kept)
    for _ in range(KEPT_ROUNDS):
        observe(history, torch.rand(1, 2), [2], [1])
    assert history.recent_confidence(KEPT_ROUNDS + 1) is None


def test_figures_from_a_device_are_read_two_rounds_later(monkeypatch):
    """A round's copies hold nothing before their event has passed, and nobody waits for it in the next round."""

    class Event:
        def __init__(self, copies, tensors):
            self.copies, self.tensors, self.waits = copies, tensors, 0

        def synchronize(self):
            self.waits += 1
            for copy, tensor in zip(self.copies, self.tensors, strict=True):
                copy.copy_(tensor)

    events = []

    def copy_later(*tensors):
        copies = [torch.full_like(t, math.nan if t.is_floating_point() else -99) for t in tensors]
        events.append(Event(copies, tensors))
        return copies, [events[-1]]

    late, direct = RoundHistory(2), RoundHistory(2)
    figures = [(torch.rand(1, 2), [2], [k % 3 + 1]) for k in range(4)]
    for k, item in enumerate(figures):
        with monkeypatch.context() as patch:
            patch.setattr(rounds_dspark, "_to_host", copy_later)
            observe(late, *item)
        if k > 0:
            observe(direct, *figures[k - 1])
        assert [event.waits > 0 for event in events] == [True] * k + [False]
        assert (late.averages, late.mean_yield, late.weight) == (direct.averages, direct.mean_yield, direct.weight)
        if k > 0:
            assert torch.equal(late.recent_confidence(2), figures[k - 1][0]) and not events[-1].waits
    observe_plain(late)
    assert late.plain_rounds == 1 and late.weight == 0.97**3 + 0.97**2 + 0.97 + 1  # in their order


def test_refused():
    with pytest.raises(ValueError, match="block_size is 0, expected 1 or more"):
        RoundHistory(0)
    with pytest.raises(ValueError, match="confidence has 3 columns, expected at most 2"):
        observe(RoundHistory(2), torch.rand(1, 3), [3], [1])
