"""Calibration figures against their definitions and known values."""

import math

import pytest
import torch

from dspark_hf.calibration import (
    brier_score,
    chance_calibration_error,
    confidence_pairs,
    expected_calibration_error,
    reliability,
    roc_auc,
)


def test_perfect_and_constant_confidences():
    outcomes = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert expected_calibration_error(outcomes, outcomes) == brier_score(outcomes, outcomes) == 0.0
    assert roc_auc(outcomes, outcomes) == 1.0 and roc_auc(1 - outcomes, outcomes) == 0.0
    constant = torch.full((4,), 0.5)
    assert expected_calibration_error(constant, outcomes) == pytest.approx(0.25)
    assert brier_score(constant, outcomes) == 0.25 and roc_auc(constant, outcomes) == 0.5


def test_reliability_bins():
    probabilities = torch.tensor([0.05, 0.15, 0.11, 0.99, 1.0])
    counts, confidence, accuracy = reliability(probabilities, torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0]))
    assert counts.tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 0, 2]
    assert confidence[1].item() == pytest.approx(0.13) and accuracy[1].item() == 0.5
    assert math.isnan(confidence[4]) and accuracy[9].item() == 1.0


def test_calibrated_draws_have_a_small_error_and_wrong_ones_a_large():
    probabilities = torch.rand(20000)
    outcomes = (torch.rand(20000) < probabilities).float()
    assert expected_calibration_error(probabilities, outcomes) < 0.02
    assert expected_calibration_error(probabilities.sqrt(), outcomes) > 0.1


def test_error_by_chance_is_that_of_drawn_outcomes():
    probabilities = torch.rand(2000) ** 2
    drawn = [
        expected_calibration_error(probabilities, (torch.rand(2000) < probabilities).float(), bins=5)
        for _ in range(300)
    ]
    assert chance_calibration_error(probabilities, bins=5) == pytest.approx(sum(drawn) / 300, rel=0.08)
    assert chance_calibration_error(torch.tensor([0.0, 1.0])) == 0.0


def test_auc_is_the_share_of_ordered_pairs():
    probabilities = (torch.rand(80) * 10).round() / 10  # with ties
    outcomes = (torch.rand(80) < 0.4).float()
    accepted, refused = probabilities[outcomes == 1], probabilities[outcomes == 0]
    difference = accepted[:, None] - refused
    wanted = ((difference > 0).double() + 0.5 * (difference == 0)).mean().item()
    assert roc_auc(probabilities, outcomes) == pytest.approx(wanted)


def test_pairs_end_with_the_first_refused_token():
    logits = [[0.0, 1.0, 2.0], [3.0, 4.0], [5.0, 6.0, 7.0], []]
    probabilities, outcomes = confidence_pairs(logits, [1, 2, 1, 0], [2, 3, 1, 1])
    # The third round ended the text with its first token, and nobody knows about its second.
    assert torch.special.logit(probabilities).tolist() == pytest.approx([0.0, 1.0, 3.0, 4.0, 5.0])
    assert outcomes.tolist() == [1, 0, 1, 1, 1]
    _, second = confidence_pairs(logits, [1, 2, 1, 0], [2, 3, 1, 1], position=1)
    assert second.tolist() == [0, 1]


def test_nothing_to_judge():
    empty = confidence_pairs([[]], [0], [1])
    assert math.isnan(expected_calibration_error(*empty)) and math.isnan(brier_score(*empty))
    assert math.isnan(chance_calibration_error(empty[0]))
    assert math.isnan(roc_auc(*empty)) and math.isnan(roc_auc(torch.ones(3), torch.ones(3)))
