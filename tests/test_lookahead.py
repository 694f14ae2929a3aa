"""Whole requests under the lookahead: when it skips blocks and gives drafting up, and what either costs or wins."""

import itertools

import numpy as np
import pytest
import torch
from test_scheduling import CPU, PLAIN_SECONDS, ROUND_SECONDS, history_of

from dspark_hf import ConfidenceThreshold, FixedLength
from dspark_hf.profile_dspark import SPSProfile
from dspark_hf.scheduling_dspark import LookaheadScheduler, PrefixScheduler, RoundHistory, StalePrefixScheduler


def seconds_per_token(policy, mean, requests, spread=4.0, claimed=None, anchor_spread=0.0, skips=True):
    """Simulated requests of 256 tokens: conditional acceptances from a Beta distribution, which the confidences tell
    exactly, or claim to be `claimed`. With `anchor_spread` the first one depends on the anchor too, by a normal term of
    its logit that is known before the block."""
    seconds = tokens = 0
    for request in range(requests):
        rng, history, done = np.random.default_rng(request), RoundHistory(7), 0
        while done < 256:
            length, kept, confidence = 0, 0, None
            anchor = rng.normal() * anchor_spread
            chance = 1 / (1 + np.exp(-anchor)) if anchor_spread and skips else None
            limit = policy.draft_limit(7, 1, history)
            if limit and chance is not None and policy.skips_block(chance, history):
                history.skip()
                seconds, done = seconds + PLAIN_SECONDS, done + 1
                continue
            if limit:
                acceptance = rng.beta(mean * spread, (1 - mean) * spread, 7)
                acceptance[0] = 1 / (1 + np.exp(-anchor) * (1 / acceptance[0] - 1))
                confidence = torch.from_numpy(acceptance if claimed is None else np.full(7, claimed))[None]
                length = policy.verify_lengths(confidence, history).item()
                kept = int((rng.random(7) < acceptance)[:length].cumprod().sum())
                confidence = confidence[:, : length + 1]
            seconds += PLAIN_SECONDS if confidence is None else ROUND_SECONDS[length]
            history.observe(confidence, torch.tensor([length]), torch.tensor([kept + 1]), chance)
            done += kept + 1
        tokens += done
    return seconds / tokens


@pytest.mark.parametrize(("mean", "claimed"), [(0.01, None), (0.1, None), (0.03, 0.6)])
def test_hopeless_requests_cost_little(mean, claimed):
    """Within 3 % of plain decoding, also where the confidences promise far too much."""
    assert seconds_per_token(LookaheadScheduler(CPU), mean, 4, claimed=claimed) < 1.03 * PLAIN_SECONDS
    assert seconds_per_token(PrefixScheduler(CPU), mean, 1, claimed=claimed) > 1.04 * PLAIN_SECONDS


@pytest.mark.parametrize("mean", [0.3, 0.5, 0.8])
def test_good_requests_go_as_fast_as_the_best_fixed_length(mean):
    best = min(ROUND_SECONDS[length] / sum(mean**k for k in range(length + 1)) for length in range(8))
    assert best < 0.9 * PLAIN_SECONDS
    assert seconds_per_token(LookaheadScheduler(CPU), mean, 6) < 1.03 * best


def test_blocks_are_skipped_where_they_cannot_pay():
    """Against the mean over earlier rounds of what drafting wins at best over plain decoding, step by step."""
    rng, policy, decisions = np.random.default_rng(0), LookaheadScheduler(CPU), []
    for _ in range(40):
        history = RoundHistory(7)
        for _ in range(rng.integers(4, 20)):
            confidence = torch.from_numpy(rng.beta(1, 3, (1, 7)))
            history.observe(confidence, torch.tensor([7]), torch.tensor([1]), rng.uniform(0.05, 0.95))
        for anchor in rng.uniform(0.02, 0.98, 10):
            wins = []
            for added in history.block_logits:
                first = torch.tensor(anchor).logit().add(added).sigmoid().item()
                kept = np.cumprod([first, *history.averages[1:]])
                tokens = [1 + kept[:length].sum() for length in range(8)]
                wins.append(max(t - s / PLAIN_SECONDS for t, s in zip(tokens, ROUND_SECONDS, strict=True)))
            decisions.append(policy.skips_block(anchor, history))
            assert decisions[-1] == (sum(wins) < 0)
    assert 0.2 < sum(decisions) / len(decisions) < 0.8


def test_limits_of_skipping():
    """Not before four rounds, not more than 16 in a row, not without the time of plain decoding, nor by others."""
    policy, history = LookaheadScheduler(CPU), RoundHistory(7)
    skipped = []
    for _ in range(60):
        skipped.append(policy.skips_block(0.01, history))
        if skipped[-1]:
            history.skip()
        else:
            history.observe(torch.full((1, 1), 0.02), torch.tensor([0]), torch.tensor([1]), 0.1)
    assert [len(list(group)) for _, group in itertools.groupby(skipped)] == [4, 16, 1, 16, 1, 16, 1, 5]
    assert not policy.skips_block(0.99, history)  # a better anchor is tried at once
    assert not LookaheadScheduler(SPSProfile(CPU.tokens, CPU.steps_per_second)).skips_block(0.01, history)
    for other in (FixedLength(), ConfidenceThreshold(0.5), PrefixScheduler(CPU), StalePrefixScheduler(CPU)):
        assert not other.reads_anchor and not other.skips_block(0.01, history)


@pytest.mark.parametrize("mean", [0.05, 0.1, 0.2])
def test_skipping_pays(mean):
    """Where anchors tell much about the first token; never slower than plain decoding."""
    arguments = LookaheadScheduler(CPU), mean, 8
    skipping, not_skipping = (seconds_per_token(*arguments, anchor_spread=2.0, skips=s) for s in (True, False))
    assert skipping < 0.98 * not_skipping and skipping < 1.01 * PLAIN_SECONDS


def test_bypass():
    """Drafting that loses its stake is given up for 8, 16, 32, 64, 128, 128 rounds; what pays is never given up."""
    policy, history, rounds = LookaheadScheduler(CPU), RoundHistory(7), []
    for _ in range(420):
        limit = policy.draft_limit(7, 1, history)
        rounds.append(limit > 0)
        history.observe(torch.full((1, 1), 0.01) if limit else None, torch.tensor([0]), torch.tensor([1]))
    waits = [len(list(group)) for drafted, group in itertools.groupby(rounds) if not drafted]
    assert waits[:6] == [8, 16, 32, 64, 128, 128]
    tries = [len(list(group)) for drafted, group in itertools.groupby(rounds) if drafted]
    assert tries[:5] == [20, 4, 4, 4, 4]  # lose 0.136 steps each, older ones counting less
    good = history_of(*[torch.full((1, 7), 0.8)] * 20)
    assert policy.draft_limit(7, 1, good) == 7
    assert LookaheadScheduler(SPSProfile(CPU.tokens, CPU.steps_per_second)).draft_limit(7, 1, history) == 7
    assert policy.draft_limit(5) == 5
    # The time of plain decoding is that of so many rows.
    slow = LookaheadScheduler(SPSProfile([1, 8], [9.0, 9.0], 10.0, {2: SPSProfile([2, 16], [9.0, 9.0], 100.0)}))
    history = history_of(*[torch.full((2, 7), 0.8)] * 3)
    assert slow.draft_limit(7, 1, history) == 7 and slow.draft_limit(7, 2, history) == 0
