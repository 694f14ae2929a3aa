"""Verify policies inside `generate()`: profiles, the bypass, temperatures, expected acceptance."""

import pytest
import torch
from generation_helpers import IDS, PROMPTS, Rig
from helpers import load_drafter, load_target
from test_batch import BATCH, padded

from dspark_hf import ConfidenceThreshold, FixedLength, generation_dspark, record_speculation
from dspark_hf.profile_dspark import SPSProfile
from dspark_hf.scheduling_dspark import (
    LookaheadScheduler,
    PrefixScheduler,
    RoundHistory,
    StalePrefixScheduler,
    VerifyPolicy,
)

SCHEDULERS = [PrefixScheduler, StalePrefixScheduler, LookaheadScheduler]
FLAT = SPSProfile([1, 64], [1.0, 0.9], plain_steps_per_second=0.5)
STEEP = SPSProfile([1, 64], [1.0, 0.02], plain_steps_per_second=0.5)
HOPELESS = SPSProfile([1, 64], [1.0, 0.9], plain_steps_per_second=100.0)


@pytest.fixture(scope="module")
def target():
    return load_target()


@pytest.fixture
def drafter():
    return load_drafter()


def run(target, drafter, inputs=None, **options):
    inputs = {"input_ids": IDS} if inputs is None else inputs
    with record_speculation() as stats:
        ids = target.generate(
            **inputs, **{"max_new_tokens": 40, "do_sample": False, "assistant_model": drafter} | options
        )
    return ids, stats


@pytest.mark.parametrize("inputs", [None, BATCH], ids=["one", "batch"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_lengths_follow_the_curve(target, drafter, scheduler, inputs):
    """The text stays; the steeper curve verifies less."""
    wanted, whole = run(target, drafter, inputs)
    drafter.verify_policy = scheduler(FLAT)
    flat_text, flat = run(target, drafter, inputs)
    drafter.verify_policy = scheduler(STEEP)
    steep_text, steep = run(target, drafter, inputs)
    assert torch.equal(flat_text, wanted) and torch.equal(steep_text, wanted)
    mean = lambda stats: sum(stats.proposal_lengths) / len(stats.proposal_lengths)  # noqa: E731
    assert mean(steep) < mean(flat) - 0.5 and mean(flat) <= mean(whole)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_profile_is_measured_once(target, drafter, scheduler, monkeypatch):
    measured = []

    def profile(*arguments):
        measured.append(arguments)
        return FLAT

    monkeypatch.setattr(generation_dspark, "quick_profile", profile)
    drafter.verify_policy = policy = scheduler()
    run(target, drafter)
    assert measured == [(target, drafter, 1, IDS.shape[1] + 1)] and drafter.verify_policy is policy
    drafter.verify_policy = scheduler(FLAT)
    run(target, drafter)
    drafter.verify_policy = FixedLength(2)
    run(target, drafter)
    assert len(measured) == 1


def test_a_scheduler_without_a_profile_works(target, drafter):
    """With the real measurement, whatever it gives."""
    wanted, _ = run(target, drafter)
    drafter.verify_policy = LookaheadScheduler()
    assert torch.equal(run(target, drafter)[0], wanted)


@pytest.mark.parametrize("inputs", [None, BATCH], ids=["one", "batch"])
def test_bypass(target, drafter, inputs, monkeypatch):
    """Where drafting cannot pay it is tried rarely, and the drafter then reads all that was decoded meanwhile."""
    wanted, _ = run(target, drafter, inputs, max_new_tokens=60)
    drafter.verify_policy = LookaheadScheduler(HOPELESS)
    calls, draft = [], drafter.draft

    def counted(context, *arguments, **options):
        calls.append(context.shape[1])
        return draft(context, *arguments, **options)

    monkeypatch.setattr(drafter, "draft", counted)
    ids, stats = run(target, drafter, inputs, max_new_tokens=60)
    assert torch.equal(ids, wanted)
    assert 0 < len(calls) < 16 and max(calls[1:]) > 4
    assert stats.proposal_lengths.count(0) > len(stats.proposal_lengths) / 2


def test_context_after_a_bypass(target, drafter):
    """The rows that were kept back are the target's states, in order and without gaps."""
    plain = target.generate(IDS, max_new_tokens=40, do_sample=False, eos_token_id=None)

    class EveryThird(VerifyPolicy):
        rounds = 0

        def draft_limit(self, block_size, rows=1, history=None):
            self.rounds += 1
            return 3 if self.rounds % 3 == 0 else 0

        def verify_lengths(self, confidence, history=None):
            return torch.full((len(confidence),), confidence.shape[1])

    drafter.verify_policy = EveryThird()
    with Rig(drafter, plain) as rig:
        ids, stats = run(target, drafter, eos_token_id=None)
    assert torch.equal(ids, plain) and {0, 3} == set(stats.proposal_lengths)
    rig.check_context(target, plain)


@pytest.mark.parametrize("inputs", [None, BATCH], ids=["one", "batch"])
def test_history_is_told_of_the_token_that_ended_a_block(target, drafter, inputs, monkeypatch):
    """Of every confidence that was asked for: those of the tokens taken alone would promise too much."""
    rounds, observe = [], RoundHistory.observe

    def told(self, confidence, lengths, *arguments):
        rounds.append((confidence, int(lengths.max())))
        observe(self, confidence, lengths, *arguments)

    monkeypatch.setattr(RoundHistory, "observe", told)
    drafter.verify_policy = ConfidenceThreshold(0.35)
    run(target, drafter, inputs)
    assert len({length for _, length in rounds}) > 2
    for confidence, length in rounds:
        assert confidence.shape[1] == min(length + 1, drafter.config.block_size)
        assert drafter.verify_policy.verify_lengths(confidence).max() == length


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_skipped_blocks(target, drafter, temperature):
    """A policy is shown the confidence of each anchor by itself, and what the blocks before added to theirs; a skipped
    round decodes plainly, and the drafter reads its context later."""
    plain = target.generate(IDS, max_new_tokens=40, do_sample=False, eos_token_id=None)
    shown = []

    class EveryThird(VerifyPolicy):
        needs_confidence = reads_anchor = True

        def skips_block(self, anchor_confidence, history):
            shown.append((anchor_confidence, history.skipped_blocks, list(history.block_logits)))
            return len(shown) % 3 > 0

        def verify_lengths(self, confidence, history=None):
            return torch.full((len(confidence),), confidence.shape[1])

    drafter.verify_policy = EveryThird()
    drafter.config.sts_temperatures = [temperature] * drafter.config.block_size
    with Rig(drafter, plain) as rig:
        ids, stats = run(target, drafter, eos_token_id=None)
    assert torch.equal(ids, plain)
    rig.check_context(target, plain)
    assert stats.proposal_lengths == [0 if k % 3 else 7 for k in range(1, len(shown) + 1)]
    assert [skipped for _, skipped, _ in shown] == [k % 3 for k in range(len(shown))]

    places = IDS.shape[1] + torch.tensor([0, *stats.acceptance_lengths[:-1]]).cumsum(0)
    logits = drafter.anchor_confidence_logits(plain[0, places]) / temperature
    assert [confidence for confidence, *_ in shown] == pytest.approx(logits.sigmoid().tolist())
    first = torch.tensor([one[0] for one in stats.confidence_logits if one]) / temperature
    torch.testing.assert_close(torch.tensor(shown[-1][2]), (first - logits[2::3])[: len(shown[-1][2])])


def test_lookahead_skips_blocks(target, drafter, monkeypatch):
    """The text stays and less is drafted. The tiny drafter's confidences hardly differ by the anchor, so they are made
    to; without the bypass."""
    wanted, _ = run(target, drafter, max_new_tokens=60)
    monkeypatch.setattr(LookaheadScheduler, "draft_limit", VerifyPolicy.draft_limit)
    monkeypatch.setattr(drafter, "anchor_confidence_logits", lambda ids: torch.where(ids % 2 == 0, -9.0, 9.0))
    drafter.verify_policy = LookaheadScheduler(SPSProfile([1, 8], [1.0, 0.9], plain_steps_per_second=2.0))
    calls, draft = [], drafter.draft
    monkeypatch.setattr(drafter, "draft", lambda _, ids, **options: calls.append(ids) or draft(_, ids, **options))
    ids, stats = run(target, drafter, max_new_tokens=60)
    assert torch.equal(ids, wanted)
    assert 4 < len(calls) < 0.8 * len(stats.proposal_lengths)


def test_temperatures_are_applied_before_the_policy(target, drafter):
    """c = σ(z / T), whereas the raw logits are recorded."""
    drafter.verify_policy = ConfidenceThreshold(0.3)
    _, before = run(target, drafter)
    drafter.config.sts_temperatures = [0.25] * drafter.config.block_size
    _, after = run(target, drafter)
    assert sum(after.proposal_lengths) < sum(before.proposal_lengths)
    drafter.verify_policy = ConfidenceThreshold(torch.tensor(0.3).logit().mul(4).sigmoid().item())
    _, same = run(target, drafter)
    assert same.proposal_lengths == before.proposal_lengths
    for one, other in zip(same.confidence_logits, before.confidence_logits, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


@pytest.mark.parametrize(
    "inputs", [{"input_ids": PROMPTS[1]}, padded([p[0].tolist() for p in PROMPTS[:3]])], ids=["1", "3"]
)
def test_expected_acceptance(target, drafter, inputs):
    """Σ min(p, q) of every proposed token, behind refused ones too, from the distributions of one more pass."""
    captured, draft = [], drafter.draft

    def kept(context, anchor_ids, **options):
        output = draft(context, anchor_ids, **options)
        captured.append((options["input_ids"], output))
        return output

    drafter.draft = kept
    torch.manual_seed(0)
    with record_speculation(expected=True) as stats:
        options = {"do_sample": True, "temperature": 1.3, "top_k": 0, "max_new_tokens": 8}
        target.generate(**inputs, **options, assistant_model=drafter)
    assert [len(row) for row in stats.expected_acceptance] == stats.proposal_lengths
    text, output = captured[0]
    for i, row in enumerate(text):
        whole = torch.cat([row, output.token_ids[i]])
        mask = (whole != 0).long()
        p = (target(whole[mask.bool()][None]).logits[0, -8:-1] / 1.3).softmax(-1)
        wanted = torch.minimum(p, output.logits[i].softmax(-1)).sum(-1)
        torch.testing.assert_close(torch.tensor(stats.expected_acceptance[i]), wanted, rtol=1e-4, atol=1e-5)
    with record_speculation() as stats:
        target.generate(**inputs, **options, assistant_model=drafter)
    assert not any(stats.expected_acceptance)


def test_block_verification_is_opt_in(target, drafter):
    drafter.acceptance_rule = "blocks"
    with pytest.raises(ValueError, match="acceptance_rule is 'blocks', expected one of \\['token', 'block'\\]"):
        run(target, drafter)
    drafter.acceptance_rule = "block"
    wanted = target.generate(IDS, max_new_tokens=20, do_sample=False)
    assert torch.equal(run(target, drafter, max_new_tokens=20)[0], wanted)
    yields = {}
    for rule in ("token", "block"):
        drafter.acceptance_rule = rule
        torch.manual_seed(0)
        inputs = {"input_ids": IDS}
        _, stats = run(target, drafter, inputs, do_sample=True, num_return_sequences=64, eos_token_id=None, top_k=0)
        yields[rule] = stats.acceptance_length
    assert yields["block"] > yields["token"]
