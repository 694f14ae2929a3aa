"""Verify policies: lengths, refused settings, and that no decision depends on what lies beyond it."""

import pytest
import torch

from dspark_hf import ConfidenceThreshold, FixedLength
from dspark_hf.scheduling_dspark import VerifyPolicy

CONFIDENCE = torch.tensor([[0.9, 0.8, 0.2, 0.95], [0.1, 0.9, 0.9, 0.9], [0.6, 0.6, 0.6, 0.6], [1.0, 0.5, 0.5, 0.0]])


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
    ],
    ids=str,
)
def test_lengths(policy, lengths):
    assert policy.verify_lengths(CONFIDENCE).tolist() == lengths
    assert policy.verify_lengths(CONFIDENCE).dtype == torch.long
    assert policy.verify_lengths(torch.empty(2, 0)).tolist() == [0, 0]


@pytest.mark.parametrize("policy", [FixedLength(), FixedLength(2), ConfidenceThreshold(0.3), ConfidenceThreshold(0.6)])
def test_decisions_are_causal(policy):
    """Whether slot k is verified is settled by the confidences up to k: nothing beyond changes it, and the drafting
    loop, which sees them one by one and stops at the first unwanted slot, cuts at the same place."""
    confidence = torch.rand(200, 7)
    lengths = policy.verify_lengths(confidence)
    assert len(lengths.unique()) > 1 or isinstance(policy, FixedLength)
    for k in range(7):
        changed = confidence.clone()
        changed[:, k + 1 :] = torch.rand(200, 6 - k)
        assert torch.equal(policy.verify_lengths(changed) > k, lengths > k)
    for row, length in zip(confidence, lengths, strict=True):
        k = 0
        while k < policy.draft_limit(7):
            wanted = policy.wants(row[k : k + 1])
            if wanted is not None and not wanted.item():
                break
            k += 1
        assert k == length


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLength(-1), "length is -1, expected 0 or more"),
        (lambda: ConfidenceThreshold(-0.1), "threshold is -0.1, expected a probability"),
        (lambda: ConfidenceThreshold(1.5), "threshold is 1.5, expected a probability"),
        (lambda: ConfidenceThreshold(float("nan")), "threshold is nan, expected a probability"),
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
    with pytest.raises(NotImplementedError):
        VerifyPolicy().verify_lengths(CONFIDENCE)
