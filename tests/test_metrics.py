"""The modules for `evaluate.load`: worked examples, and the package's functions on random rounds."""

import random

import pytest
import torch

from dspark_hf.calibration import brier_score, confidence_pairs, expected_calibration_error, roc_auc
from dspark_hf.evaluation.acceptance import acceptance_metrics
from dspark_hf.evaluation.summary import METRICS
from dspark_hf.telemetry_dspark import SpeculationStats

evaluate = pytest.importorskip("evaluate")


@pytest.fixture(scope="module")
def load():
    """A module by its local path, as a user loads it."""
    return lambda name: evaluate.load(str(METRICS / name), keep_in_memory=True)


@pytest.fixture(scope="module")
def stats():
    """50 rounds of up to 5 tokens, of which a few ended a text."""
    stats, rng = SpeculationStats(), random.Random(0)
    for _ in range(50):
        proposed = rng.randint(0, 5)
        accepted = rng.randint(0, proposed)
        bonus = 0 if accepted and rng.random() < 0.2 else 1
        stats.add_round(proposed, accepted, accepted + bonus, [rng.gauss(0, 2) for _ in range(proposed)], [], 0)
    return stats


def test_acceptance_length(load, stats):
    module = load("acceptance_length")
    assert module.compute(predictions=[3, 1, 1]) == {"acceptance_length": pytest.approx(5 / 3), "rounds": 3}
    own = module.compute(predictions=stats.acceptance_lengths)
    assert own["acceptance_length"] == pytest.approx(acceptance_metrics(stats)["acceptance_length"])


def test_conditional_acceptance(load, stats):
    module = load("conditional_acceptance")
    own = module.compute(predictions=[2, 0, 1], references=[3, 3, 1])
    assert own["acceptance_by_position"] == pytest.approx([2 / 3, 1 / 2, 0])
    assert own["conditional_acceptance"] == pytest.approx([2 / 3, 1, 0])
    assert own["verify_rate"] == pytest.approx(3 / 7)
    own = module.compute(predictions=stats.accepted_lengths, references=stats.proposal_lengths)
    assert own["conditional_acceptance"] == stats.conditional_acceptance
    assert own["acceptance_by_position"] == stats.acceptance_by_position
    nothing = module.compute(predictions=[0], references=[0])
    assert nothing["verify_rate"] != nothing["verify_rate"] and nothing["acceptance_by_position"] == []


def test_confidence_calibration(load, stats):
    module = load("confidence_calibration")
    own = module.compute(predictions=[0.75, 0.25, 0.25], references=[1, 0, 1], bins=2)
    assert own["ece"] == pytest.approx(1 / 3 * 0.25 + 2 / 3 * 0.25)  # bins of 1 and 2 pairs: |0.75 − 1|, |0.25 − 0.5|
    assert own["brier"] == pytest.approx((0.0625 + 0.0625 + 0.5625) / 3) and own["auc"] == 0.75
    pairs = confidence_pairs(stats.confidence_logits, stats.accepted_lengths, stats.acceptance_lengths)
    own = module.compute(predictions=pairs[0].tolist(), references=pairs[1].tolist())
    assert own == {"ece": expected_calibration_error(*pairs), "brier": brier_score(*pairs), "auc": roc_auc(*pairs)}
    assert len(pairs[0]) > 50 and own["ece"] == acceptance_metrics(stats)["confidence_ece"]


def test_batches_of_rounds_add_up(load):
    module = load("acceptance_length")
    module.add_batch(predictions=torch.tensor([3, 1]))
    module.add_batch(predictions=[1])
    assert module.compute()["rounds"] == 3
