"""SPS profiles: the curve between, before and beyond its points, its envelope, other numbers of rows, files."""

import json
import sys
import types

import pytest
import torch

from dspark_hf.profile_dspark import SPSProfile

CURVE = SPSProfile([1, 2, 4], [10.0, 5.0, 4.0], plain_steps_per_second=12.0)  # 0.1, 0.2, 0.25 s
FALLING = SPSProfile([1, 2, 3, 4], [4.0, 2.0, 5.0, 1.0])


@pytest.mark.parametrize(
    ("profile", "tokens", "seconds"),
    [
        (CURVE, [1, 2, 4], [0.1, 0.2, 0.25]),
        (CURVE, [1.5, 3.0], [0.15, 0.225]),
        (CURVE, [0, 0.5], [0.1, 0.1]),
        (CURVE, [6, 8.0], [0.30, 0.35]),
        (SPSProfile([1, 2], [4.0, 5.0]), [1.5, 2, 9], [0.225, 0.2, 0.2]),  # never faster than the last point
        (SPSProfile([3], [4.0]), [1, 3, 5], [0.25, 0.25, 0.25]),
    ],
)
def test_seconds(profile, tokens, seconds):
    tokens, seconds = torch.tensor(tokens), torch.tensor(seconds, dtype=torch.float64)
    torch.testing.assert_close(profile.seconds(tokens), seconds)
    torch.testing.assert_close(profile.steps(tokens[None, :, None]), 1 / seconds[None, :, None])


def test_envelope():
    """Points from which a larger pass runs faster take its time; the raw points stay as they were."""
    envelope = FALLING.envelope()
    assert envelope.steps_per_second == [5.0, 5.0, 5.0, 1.0] and envelope.tokens == FALLING.tokens
    assert FALLING.steps_per_second == [4.0, 2.0, 5.0, 1.0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rates = (torch.rand(6, generator=generator) + 0.1).tolist()
        profile = SPSProfile([1, 2, 5, 6, 9, 12], rates, 3.0, batches={2: SPSProfile([2, 4, 7, 8, 9, 10], rates[::-1])})
        steps = profile.envelope().steps(torch.arange(1, 20))
        assert (steps.diff() <= 1e-12).all() and (steps >= profile.steps(torch.arange(1, 20)) - 1e-12).all()
        assert profile.envelope().envelope() == profile.envelope()
        assert profile.envelope().plain_steps_per_second == 3.0
        assert profile.envelope().batches[2] == profile.batches[2].envelope()


BATCHED = SPSProfile(
    [1, 2, 3],
    [10.0, 8.0, 5.0],
    20.0,
    batches={5: SPSProfile([5, 10, 20], [5.0, 4.0, 2.0], 10.0), 9: SPSProfile([9, 18], [2.0, 1.0], 4.0)},
)


def test_other_numbers_of_rows():
    assert CURVE.at(7) is CURVE and BATCHED.at(1) is BATCHED
    assert BATCHED.at(5) is BATCHED.batches[5] and BATCHED.at(50) is BATCHED.batches[9]
    middle = BATCHED.at(3)  # half way from 1 to 5
    assert middle.tokens == [3, 6, 9, 12] and not middle.batches
    # At 1, 2 and 3 tokens per row: 0.1, 0.125 and 0.2 s for one row; 0.2, 0.25 and 0.375 s for five.
    torch.testing.assert_close(
        middle.seconds(torch.tensor([3, 6, 9])), torch.tensor([0.15, 0.1875, 0.2875], dtype=torch.float64)
    )
    assert middle.plain_steps_per_second == pytest.approx(1 / 0.075)
    assert SPSProfile([1], [1.0], batches={4: SPSProfile([4], [0.5], 2.0)}).at(2).plain_steps_per_second is None
    with pytest.raises(ValueError, match="rows is 0, expected 1 or more"):
        CURVE.at(0)


def test_plain_steps():
    assert [BATCHED.plain_steps(rows) for rows in (1, 5, 9)] == [20.0, 10.0, 4.0]
    assert BATCHED.plain_steps(3) == pytest.approx(1 / 0.075)
    # Beyond the rows measured plain decoding slows down as the curve does: 0.5 s per 9 tokens, 1 s per 18.
    assert BATCHED.plain_steps(18) == pytest.approx(2.0)
    assert CURVE.plain_steps(2) == pytest.approx(6.0)
    assert FALLING.plain_steps(1) is None and FALLING.plain_steps(3) is None


def test_file(tmp_path):
    profile = SPSProfile([1, 2, 3, 4], [4.0, 2.0, 5.0, 1.0], 7.0, BATCHED.batches, {"threads": 2})
    profile.save(tmp_path / "sps.json")
    loaded = SPSProfile.load(tmp_path / "sps.json")
    assert loaded == profile and loaded.details == {"threads": 2}
    assert list(loaded.batches) == [5, 9]
    data = json.loads((tmp_path / "sps.json").read_text())
    assert data["sample_batch_tokens"] == [1, 2, 3, 4] and data["sample_steps_per_sec"] == [4.0, 2.0, 5.0, 1.0]
    assert data["max_batch_tokens"] == 4 and data["monotone_steps_per_sec"] == [5.0, 5.0, 5.0, 1.0]
    assert data["plain_steps_per_sec"] == 7.0 and data["batches"]["5"]["sample_batch_tokens"] == [5, 10, 20]


def test_file_of_sglang(tmp_path):
    path = tmp_path / "sps.json"
    path.write_text('{"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [90.5, 60], "max_batch_tokens": 64}')
    assert SPSProfile.load(path) == SPSProfile([1, 8], [90.5, 60.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "expected an object with a list 'sample_batch_tokens'"),
        ('{"sample_batch_tokens": [1]}', "expected an object with a list 'sample_steps_per_sec'"),
        (
            '{"sample_batch_tokens": [1], "sample_steps_per_sec": ["3"]}',
            r"sample_steps_per_sec is \['3'\], expected num",
        ),
        ('{"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [1, 2]}', r"tokens is \[2, 1\], expected increasing"),
        ("no json", "Expecting value"),
    ],
)
def test_refused_files(tmp_path, text, message):
    path = tmp_path / "sps.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"sps.json is not an SPS profile: .*{message}"):
        SPSProfile.load(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], []), r"tokens is \[\], expected increasing whole numbers from 1 up"),
        (([0, 1], [1.0, 1.0]), r"tokens is \[0, 1\]"),
        (([1, 1], [1.0, 1.0]), r"tokens is \[1, 1\]"),
        (([1.0], [1.0]), r"tokens is \[1.0\]"),
        (([1, 2], [1.0]), "steps_per_second has 1 values, expected 2"),
        (([1], [0.0]), r"steps_per_second is \[0.0\], expected positive rates"),
        (([1], [float("nan")]), r"steps_per_second is \[nan\]"),
        (([1], [float("inf")]), r"steps_per_second is \[inf\]"),
        (([1], [1.0], -2.0), "plain_steps_per_second is -2.0, expected positive rates"),
        (([1], [1.0], None, {2: CURVE}), "batches holds for 2 rows a curve that starts at 1 tokens"),
        (([1], [1.0], None, {"2": BATCHED.batches[5]}), "batches holds for '2' rows"),
        (([1], [1.0], None, {1: BATCHED}), "no further curves inside"),
    ],
)
def test_refused_curves(arguments, message):
    with pytest.raises(ValueError, match=message):
        SPSProfile(*arguments)


def test_measure_hands_over(monkeypatch):
    module = types.ModuleType("dspark_hf.profiling_dspark")
    module.measure_profile = lambda target, drafter, **kwargs: (target, drafter, kwargs)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert SPSProfile.measure("target", repeats=3) == ("target", None, {"repeats": 3})
    assert SPSProfile.measure("target", "drafter") == ("target", "drafter", {})


def test_profiles_are_values():
    assert SPSProfile([1], [2.0], details={"a": 1}) == SPSProfile([1], [2.0]) != SPSProfile([1], [2.0], 3.0)
    assert hash(SPSProfile([1], [2.0])) == hash(SPSProfile([1], [2.0]))
    with pytest.raises(AttributeError):
        CURVE.tokens = [1]
