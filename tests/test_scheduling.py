"""Verify policies: lengths, refused settings, schedulers against slow oracles, and that no decision depends on what
lies beyond it. Whole requests are in test_lookahead."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dspark_hf import ConfidenceThreshold, FixedLength
from dspark_hf.profile_dspark import SPSProfile
from dspark_hf.scheduling_dspark import (
    LookaheadScheduler,
    PrefixScheduler,
    RoundHistory,
    StalePrefixScheduler,
    VerifyPolicy,
)

CONFIDENCE = torch.tensor([[0.9, 0.8, 0.2, 0.95], [0.1, 0.9, 0.9, 0.9], [0.6, 0.6, 0.6, 0.6], [1.0, 0.5, 0.5, 0.0]])
# Seconds of a round of 1 to 8 tokens, drafting included, as measured for a small model on a CPU; plain decoding beside.
ROUND_SECONDS = [0.125 * relative for relative in (1, 1.06, 1.08, 1.10, 1.12, 1.14, 1.17, 1.20)]
PLAIN_SECONDS = 0.110
CPU = SPSProfile(list(range(1, 9)), [1 / t for t in ROUND_SECONDS], 1 / PLAIN_SECONDS)
JAGGED = SPSProfile(list(range(1, 31)), (torch.rand(30, generator=torch.Generator().manual_seed(5)) + 0.2).tolist())
WORKED = SPSProfile([1, 2, 3], [1.0, 0.95, 0.52])


def history_of(*rounds, block_size=None):
    """A history in which every row yielded what its confidences promise, to the next integer, all tokens verified."""
    history = RoundHistory(block_size or rounds[0].shape[1])
    for confidence in rounds:
        rows, slots = confidence.shape
        yielded = (1 + confidence.cumprod(dim=1).sum(dim=1)).round().long()
        history.observe(confidence, torch.full((rows,), slots), yielded)
    return history


@pytest.mark.parametrize(
    ("policy", "lengths"),
    [
        (FixedLength(), [4, 4, 4, 4]),
        (FixedLength(0), [0, 0, 0, 0]),
        (FixedLength(3), [3, 3, 3, 3]),
        (FixedLength(9), [4, 4, 4, 4]),
        (ConfidenceThreshold(0.0), [4, 4, 4, 4]),
        (ConfidenceThreshold(0.5), [2, 0, 4, 3]),  # a confidence equal to the threshold passes
        (ConfidenceThreshold(0.7), [2, 0, 0, 1]),
        (ConfidenceThreshold(1.0), [0, 0, 0, 1]),
        (PrefixScheduler(SPSProfile([4, 20], [1.0, 1.0])), [4, 4, 4, 4]),  # tokens are free
        (PrefixScheduler(SPSProfile([4, 5], [1.0, 0.1])), [0, 0, 0, 0]),
        # Seven tokens are as fast as four. 1.0, 0.9 and 0.72 come first, 0.6 is the seventh.
        (PrefixScheduler(SPSProfile([4, 7, 8], [1.0, 1.0, 0.1])), [2, 0, 0, 1]),
        (StalePrefixScheduler(WORKED), [4, 4, 4, 4]),  # nothing is known yet
    ],
    ids=lambda value: "" if isinstance(value, list) else type(value).__name__,
)
def test_lengths(policy, lengths):
    assert policy.verify_lengths(CONFIDENCE).tolist() == lengths
    assert policy.verify_lengths(CONFIDENCE).dtype == torch.long
    assert policy.verify_lengths(torch.empty(2, 0)).tolist() == [0, 0]


def test_worked_example():
    """Θ = 1.00, 1.71, 1.23: one token."""
    confidence = torch.tensor([[0.8, 0.7, 0.9, 0.9]])
    survival = torch.tensor([0.0, 0.8, 0.8 * 0.7], dtype=torch.float64)
    throughput = (1 + survival.cumsum(0)) * WORKED.steps(torch.arange(1, 4))
    torch.testing.assert_close(throughput, torch.tensor([1.0, 1.71, 1.2272], dtype=torch.float64))
    assert PrefixScheduler(WORKED).verify_lengths(confidence).tolist() == [1]


def greedy_path(confidence, steps, early_stop=True):
    """Algorithm 1 as written, one token at a time; without the early stop the best point of the whole path.
    `steps[n]` is SPS of n tokens."""
    rows, slots = len(confidence), len(confidence[0])
    lengths, survival = [0] * rows, [row[0] for row in confidence]
    expected, total = float(rows), rows
    path = [(expected * steps[total], list(lengths))]
    while any(length < slots for length in lengths):
        open_rows = [r for r in range(rows) if lengths[r] < slots]
        best = min(open_rows, key=lambda r: (-survival[r], lengths[r], r))
        expected, total = expected + survival[best], total + 1
        lengths[best] += 1
        if lengths[best] < slots:
            survival[best] *= confidence[best][lengths[best]]
        path.append((expected * steps[total], list(lengths)))
        if early_stop and path[-1][0] < path[-2][0]:
            return path[-2][1]
    return path[-1][1] if early_stop else max(path, key=lambda point: point[0])[1]


def random_curve(rng, most, kind):
    """Rates of 1..most tokens: falling, stepped, jagged or linear in seconds."""
    seconds = [
        np.cumsum(rng.random(most)),
        1 + np.cumsum(rng.random(most) < 0.2),
        0.2 + rng.random(most),
        1 + 0.05 * np.arange(most),
    ][kind]
    return (1 / seconds).tolist()


def test_prefix_scheduler_equals_brute_force():
    """Confidences with and without ties, ones and zeros among them."""
    rng, seen = np.random.default_rng(0), set()
    for case in range(120):
        rows, slots = (int(n) for n in rng.integers([1, 1], [5, 6]))
        rates = random_curve(rng, rows * (slots + 1), case % 4)
        policy = PrefixScheduler(SPSProfile(list(range(1, len(rates) + 1)), rates))
        # Profiles keep seconds: inverting twice rounds as they do, and exact ties of Θ fall the same way.
        steps = [0.0] + [1 / (1 / max(rates[n:])) for n in range(len(rates))]
        for ties in [False, True] * 10:
            confidence = rng.random((rows, slots)) ** rng.choice([0.2, 1.0])
            if ties:
                confidence = rng.choice([0.0, 0.25, 0.5, 1.0], (rows, slots), p=[0.1, 0.2, 0.3, 0.4])
            lengths = policy.verify_lengths(torch.from_numpy(confidence)).tolist()
            assert lengths == greedy_path(confidence.tolist(), steps)
            seen.add(sum(lengths) / (rows * slots))
    assert {0.0, 1.0} < seen and len(seen) > 20


def test_curve_of_the_number_of_rows():
    """Rows are looked up in `batches`; one row and two see different curves."""
    sps = SPSProfile([1, 2], [1.0, 0.1], batches={2: SPSProfile([2, 4], [1.0, 1.0])})
    confidence = torch.tensor([[0.5, 0.5]])
    assert PrefixScheduler(sps).verify_lengths(confidence).tolist() == [0]
    assert PrefixScheduler(sps).verify_lengths(confidence.expand(2, 2)).tolist() == [2, 2]


def test_stale_scheduler_takes_capacity_from_the_past_and_ranking_from_now():
    # Seconds 1, 1, 2, 2, 2 for 2 to 6 tokens. Survivals two rounds ago were 0.9, 0.81, 0.5 and 0.05: Θ is 2, 2.9, 1.86,
    # 2.11 and 2.13, so that K = 1; one round ago everything was certain: 2, 3, 2, 2.5 and 3.
    sps = SPSProfile([2, 3, 4, 5, 6], [1.0, 1.0, 0.5, 0.5, 0.5])
    old, last = torch.tensor([[0.9, 0.9], [0.5, 0.1]]), torch.ones(2, 2)
    now = torch.tensor([[0.3, 1.0], [0.7, 0.6]])
    policy = StalePrefixScheduler(sps)
    assert policy.verify_lengths(now, RoundHistory(2)).tolist() == [2, 2]
    assert policy.verify_lengths(now, history_of(last)).tolist() == [2, 2]  # only one round is known
    assert policy.verify_lengths(now, history_of(old, last)).tolist() == [0, 1]
    assert policy.verify_lengths(now.flip(0), history_of(old, last)).tolist() == [1, 0]
    assert StalePrefixScheduler(sps, delay=1).verify_lengths(now, history_of(last, old)).tolist() == [0, 1]
    # Crosses the fall of Θ at the second token to get to the higher value at the end, where Algorithm 1 stops.
    steps = SPSProfile([2, 3, 4, 5, 6], [1.0, 1.0, 0.7, 0.7, 0.7])
    assert StalePrefixScheduler(steps).verify_lengths(now, history_of(last, last)).tolist() == [2, 2]
    assert PrefixScheduler(steps).verify_lengths(last).tolist() == [1, 0]
    with pytest.raises(ValueError, match="the history has 2 rows, expected 1 as in this round"):
        policy.verify_lengths(now[:1], history_of(old, last))


def test_stale_scheduler_equals_brute_force():
    rng = np.random.default_rng(1)
    for _ in range(200):
        rows, slots = (int(n) for n in rng.integers([1, 1], [5, 6]))
        old, now = (torch.from_numpy(rng.choice([0.2, 0.5, 0.9, 1.0], (rows, slots))) for _ in range(2))
        rates = random_curve(rng, rows * (slots + 1), 1)
        policy = StalePrefixScheduler(SPSProfile(list(range(1, len(rates) + 1)), rates))
        capacity = sum(greedy_path(old.tolist(), [0.0, *rates], early_stop=False))
        ranked = sorted((-a, k, r) for r, row in enumerate(now.cumprod(dim=1).tolist()) for k, a in enumerate(row))
        expected = [0] * rows
        for _, _, r in ranked[:capacity]:
            expected[r] += 1
        assert policy.verify_lengths(now, history_of(old, now)).tolist() == expected


def lookahead_oracle(confidence, averages, steps):
    """The formula as it stands in the docstring, every sum and product written out."""
    a = np.cumprod(confidence)
    for k in range(1, len(confidence) + 1):
        options = [
            (1 + a[:k].sum() + a[k - 1] * sum(np.prod(averages[k:i]) for i in range(k + 1, length + 1))) * steps[length]
            for length in range(k, len(averages) + 1)
        ]
        if max(options) <= (1 + a[: k - 1].sum()) * steps[k - 1]:
            return k - 1
    return len(confidence)


def test_lookahead_of_one_row_equals_its_formula():
    rng, seen = np.random.default_rng(2), set()
    for _ in range(200):
        slots = int(rng.integers(1, 6))
        rates = np.sort(rng.random(slots + 1) + 0.3)[::-1]
        policy = LookaheadScheduler(SPSProfile(list(range(1, slots + 2)), rates.tolist()))
        confidence, history = rng.random(slots), history_of(torch.from_numpy(rng.random((3, slots)) ** 0.5))
        length = lookahead_oracle(confidence, history.averages, rates)
        confidence = torch.from_numpy(confidence)[None]
        assert policy.verify_lengths(confidence, history).tolist() == [length]
        assert torch.equal(policy.verify_lengths(confidence), policy.verify_lengths(confidence, RoundHistory(16)))
        seen.add((length - PrefixScheduler(policy.sps).verify_lengths(confidence).item() > 0, length))
    assert len(seen) > 6


def test_lookahead_crosses_the_cliff():
    """Two tokens cost 1.8 times as much as one, and eight no more than two: all or nothing."""
    cliff = SPSProfile([1, 2, 8], [1.0, 1 / 1.8, 1 / 1.8])
    confidence = torch.full((1, 7), 0.6)
    assert PrefixScheduler(cliff).verify_lengths(confidence).tolist() == [0]
    assert LookaheadScheduler(cliff).verify_lengths(confidence, RoundHistory(7)).tolist() == [7]
    poor = history_of(*[torch.full((1, 7), 0.1)] * 5)
    assert LookaheadScheduler(cliff).verify_lengths(confidence, poor).tolist() == [0]
    # Where Θ stays the same Algorithm 1 takes the token, and this one does not.
    even = SPSProfile([1, 2], [1.0, 0.5])
    assert PrefixScheduler(even).verify_lengths(torch.ones(1, 1)).tolist() == [1]
    assert LookaheadScheduler(even).verify_lengths(torch.ones(1, 1), RoundHistory(1)).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    """The decisions of float32, for confidences that all types hold exactly."""
    confidence = torch.tensor([[0.75, 0.5, 1.0], [0.5, 0.875, 0.25]])
    sps = SPSProfile([1, 2, 6, 8], [2.0, 1.0, 0.8, 0.6])
    for policy in (PrefixScheduler(sps), StalePrefixScheduler(sps), LookaheadScheduler(sps)):
        for rows in (1, 2):
            lengths = [
                policy.verify_lengths(c[:rows], history_of(c[:rows], c[:rows]))
                for c in (confidence, confidence.to(dtype))
            ]
            assert torch.equal(*lengths) and lengths[1].dtype == torch.long


@pytest.mark.parametrize("slope", [0.02, 0.2, 0.45, 2.0])
def test_batch_of_equal_rows_goes_as_far_as_one_row(slope):
    """Where T is linear, and rows and rounds are all alike."""
    alone = SPSProfile([1, 8], [1.0, 1 / (1 + 7 * slope)])
    batch = SPSProfile([5, 40], [1.0, 1 / (1 + 7 * slope)])
    confidence = torch.full((5, 7), 0.7)
    expected = LookaheadScheduler(alone).verify_lengths(confidence[:1], history_of(*[confidence[:1]] * 20)).item()
    lengths = LookaheadScheduler(batch).verify_lengths(confidence, history_of(*[confidence] * 4))
    assert lengths.tolist() == [expected] * 5


def test_price_by_hand():
    """Two rows, 1 s for up to 4 tokens, 1.5 s for 5 and 6."""
    sps = SPSProfile([2, 4, 5, 6], [1.0, 1.0, 1 / 1.5, 1 / 1.5])
    policy, history = LookaheadScheduler(sps), RoundHistory(2)
    # Before any round survivals are 0.8, 0.8, 0.64, 0.64 by the start values: Θ = 2, 2.8, 3.6, 2.83, 3.25.
    confidence = torch.tensor([[0.73, 0.1], [0.9, 0.8]])
    assert policy.verify_lengths(confidence, history).tolist() == [1, 1]  # 0.72 lies halfway from 0.8 to 0.64
    # The last round is not read yet, those before it together: 0.9, 0.9, 0.9, 0.5, 0.4, 0.4, 0.3, 0.2. A round of two
    # tokens has the best Θ of 2 + 3.2 / 2, and the price lies halfway from 0.5 to 0.4.
    for rounds in ([[0.9, 1.0], [0.2, 1.0]], [[0.9, 1 / 3], [0.5, 0.8]], [[1.0, 1.0], [1.0, 1.0]]):
        history.observe(torch.tensor(rounds), torch.tensor([2, 2]), torch.tensor([1, 1]))
    assert policy.verify_lengths(torch.tensor([[0.46, 0.9], [0.44, 1.0]]), history).tolist() == [1, 0]
    # Positions not drafted count with the averages.
    cut = RoundHistory(2)
    for _ in range(3):
        cut.observe(torch.tensor([[0.9], [0.9]]), torch.tensor([1, 1]), torch.tensor([1, 1]))
    assert policy.verify_lengths(torch.tensor([[0.82, 0.1], [0.80, 1.0]]), cut).tolist() == [1, 0]  # 0.9 to 0.72
    # Where nothing pays a token must pay alone for what it adds to the round: 2 · 0.3 here, more than 1 behind a cliff.
    none = history_of(*[torch.full((2, 2), 0.1)] * 3)
    steep = LookaheadScheduler(SPSProfile([2, 6], [1.0, 1 / 2.2]))
    assert steep.verify_lengths(torch.tensor([[0.61, 0.9], [0.59, 1.0]]), none).tolist() == [1, 0]
    cliff = LookaheadScheduler(SPSProfile([2, 3, 6], [1.0, 1 / 1.8, 1 / 1.8]))
    assert cliff.verify_lengths(torch.ones(2, 2), none).tolist() == [0, 0]


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("mean", [0.4, 0.8])
def test_batch_throughput(rows, mean):
    """Rows of different difficulty on a curve with a knee: within 3 % of the best fixed length, unknown to it."""
    sizes = np.arange(rows, 8 * rows + 1)
    sps = SPSProfile(sizes.tolist(), (1 / (0.1 + 0.02 / rows * np.maximum(sizes - 3 * rows, 0))).tolist())

    def throughput(policy):
        rng, history = np.random.default_rng(0), RoundHistory(7)
        tokens = seconds = 0
        for _ in range(40):
            acceptance = np.linspace(mean - 0.2, mean + 0.15, rows)[:, None].repeat(7, axis=1)
            confidence = torch.from_numpy(rng.beta(3 * acceptance, 3 * (1 - acceptance)))
            lengths = policy.verify_lengths(confidence, history)
            promised = (confidence.cumprod(dim=1) * (torch.arange(7) < lengths[:, None])).sum(dim=1)
            history.observe(confidence[:, : lengths.max() + 1], lengths, (1 + promised).round().long())
            tokens, seconds = tokens + rows + promised.sum().item(), seconds + sps.seconds(lengths.sum() + rows).item()
        return tokens / seconds

    assert throughput(LookaheadScheduler(sps)) > 0.97 * max(throughput(FixedLength(length)) for length in range(8))


SCHEDULERS = [PrefixScheduler(CPU), StalePrefixScheduler(JAGGED), LookaheadScheduler(CPU), LookaheadScheduler(JAGGED)]
POLICIES = [FixedLength(), FixedLength(2), ConfidenceThreshold(0.3), ConfidenceThreshold(0.85), *SCHEDULERS]


def some_confidences(rows, seed, ties=False):
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(rows, 7, generator=generator) ** 0.4
    return (confidence * 4).round() / 4 if ties else confidence


@pytest.mark.parametrize("policy", [*POLICIES, PrefixScheduler(JAGGED)], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("known", [False, True])
def test_decisions_are_causal(policy, known):
    """Nothing beyond a slot changes whether it is verified: missing slots do not, where there is one row or each row
    decides alone, and a row's own later confidences never do (those of other rows may: they say nothing about it)."""
    for seed in range(12):
        for rows in (1, 3):
            history = history_of(*[some_confidences(rows, seed + 100 + i) for i in range(3)]) if known else None
            confidence = some_confidences(rows, seed, ties=seed % 2 == 1)
            lengths = policy.verify_lengths(confidence, history)
            for k in range(8):
                part = policy.verify_lengths(confidence[:, :k], history)
                if rows == 1 or not isinstance(policy, PrefixScheduler | StalePrefixScheduler):
                    assert torch.equal(part, lengths.clamp(max=k))
                for r in range(rows):
                    changed = confidence.clone()
                    changed[r, k:] = some_confidences(1, seed + 200, ties=True)[0, k:]
                    assert (policy.verify_lengths(changed, history)[r] >= k) == (lengths[r] >= k)


@pytest.mark.parametrize("policy", [*POLICIES, PrefixScheduler(JAGGED)], ids=lambda policy: type(policy).__name__)
def test_drafting_can_stop(policy):
    """Once no row wants the slot, the lengths are those of the complete block; and some policies do stop."""
    stopped = 0
    for seed in range(60):
        rows = 1 + seed % 4
        history = history_of(*[some_confidences(rows, seed + 100 + i) for i in range(3)])
        confidence = some_confidences(rows, seed, ties=seed % 3 == 0)
        for k in range(7):
            lengths = policy.verify_lengths(confidence[:, : k + 1], history)
            if policy.cuts_draft and lengths.max() <= k:
                assert torch.equal(lengths, policy.verify_lengths(confidence, history))
                stopped += 1
                break
    assert policy.cuts_draft == (stopped > 0)


@dataclass(frozen=True)
class FreshArgmax(VerifyPolicy):
    """The best Θ of the whole path, over this round's own confidences: biased (appendix A)."""

    sps: SPSProfile

    def verify_lengths(self, confidence, history=None):
        steps = [0.0, *self.sps.steps(torch.arange(1, confidence.numel() + len(confidence) + 1)).tolist()]
        return torch.tensor(greedy_path(confidence.double().tolist(), steps, early_stop=False))


APPENDIX = {
    1: SPSProfile([1, 2, 3], [1.0, 0.5, 0.5]),
    2: SPSProfile([2, 3, 4, 5, 6], [1.0, 0.5, 0.5, 0.5, 0.5]),
}


def share_of_a(policy, history, rows):
    """P(A) of the first row's first token. p(A) = 0.7, q(A) = 0.5, so c_1 = 0.8; c_2 is 1 behind A and 0 behind B."""
    generator = torch.Generator().manual_seed(0)
    draws = 200_000
    drafts_a = torch.rand(rows, draws, generator=generator) < 0.5
    verified = torch.zeros(draws, dtype=torch.bool)
    for blocks in itertools.product([True, False], repeat=rows):
        confidence = torch.tensor([[0.8, 1.0 if a else 0.0] for a in blocks])
        wanted = policy.verify_lengths(confidence, history)[0] >= 1
        verified |= (drafts_a == torch.tensor(blocks)[:, None]).all(dim=0) & wanted
    # p/q is above 1 for A, 0.3 / 0.5 for B; the residual is all A; without a draft the token comes from p.
    kept = drafts_a[0] | (torch.rand(draws, generator=generator) < 0.3 / 0.5)
    plain = torch.rand(draws, generator=generator) < 0.7
    return torch.where(verified, drafts_a[0] | ~kept, plain).double().mean().item()


WITHOUT_HISTORY = [FixedLength(), FixedLength(0), FixedLength(1), ConfidenceThreshold(0.3), ConfidenceThreshold(0.85)]
WITH_HISTORY = [StalePrefixScheduler(), LookaheadScheduler()]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("policy", "known"),
    [
        *itertools.product([*WITHOUT_HISTORY, PrefixScheduler()], [None]),
        *itertools.product(WITH_HISTORY, [None, 0.1, 0.9]),
    ],
    ids=str,
)
def test_output_distribution_of_appendix_a(policy, known, rows):
    if hasattr(policy, "with_profile"):
        policy = policy.with_profile(APPENDIX[rows])
    history = None if known is None else history_of(*[torch.full((rows, 2), known)] * 3)
    assert share_of_a(policy, history, rows) == pytest.approx(0.70, abs=0.005)


def test_fresh_argmax_is_biased():
    assert share_of_a(FreshArgmax(APPENDIX[1]), None, 1) == pytest.approx(0.85, abs=0.005)
    assert share_of_a(FreshArgmax(APPENDIX[2]), None, 2) > 0.72


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLength(-1), "length is -1, expected 0 or more"),
        (lambda: ConfidenceThreshold(-0.1), "threshold is -0.1, expected a probability"),
        (lambda: ConfidenceThreshold(1.5), "threshold is 1.5, expected a probability"),
        (lambda: ConfidenceThreshold(float("nan")), "threshold is nan, expected a probability"),
        (lambda: StalePrefixScheduler(delay=0), "delay is 0, expected 1 to 4 rounds"),
        (lambda: StalePrefixScheduler(delay=5), "delay is 5, expected 1 to 4 rounds"),
        (lambda: PrefixScheduler().verify_lengths(CONFIDENCE), "PrefixScheduler has sps None, expected an SPSProfile"),
        (lambda: StalePrefixScheduler().verify_lengths(CONFIDENCE), "StalePrefixScheduler has sps None"),
        (lambda: LookaheadScheduler().verify_lengths(CONFIDENCE), "LookaheadScheduler has sps None"),
        (lambda: LookaheadScheduler().draft_limit(7), "LookaheadScheduler has sps None"),
        (lambda: LookaheadScheduler().skips_block(0.5, RoundHistory(7)), "LookaheadScheduler has sps None"),
    ],
)
def test_refused_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_policies_are_values():
    """Frozen, comparable, printable: they are logged with results."""
    assert ConfidenceThreshold(0.5) == ConfidenceThreshold(0.5) != ConfidenceThreshold(0.4)
    assert repr(FixedLength(2)) == "FixedLength(length=2)"
    with pytest.raises(AttributeError):
        FixedLength().length = 3
    assert FixedLength().needs_confidence is False and ConfidenceThreshold(0.5).needs_confidence is True
    assert all(policy.needs_confidence and type(policy)().sps is None for policy in SCHEDULERS)
    assert StalePrefixScheduler(delay=3).with_profile(CPU) == StalePrefixScheduler(CPU, 3)
    assert [FixedLength(3).draft_limit(7), StalePrefixScheduler(CPU).draft_limit(7, 4)] == [3, 7]
    with pytest.raises(NotImplementedError):
        VerifyPolicy().verify_lengths(CONFIDENCE)
