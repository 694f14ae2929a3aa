"""Sequential temperature scaling: known temperatures are found again; few rounds change little; labels."""

import math

import pytest
import torch

from dspark_hf.calibration import brier_score, chance_calibration_error, expected_calibration_error
from dspark_hf.temperature_scaling import SequentialTemperatureScaling, prefix_labels, survival_probabilities

fit = SequentialTemperatureScaling.fit
KNOWN = torch.tensor([1.5, 0.7, 2.0, 1.3, 0.8, 1.7, 1.1], dtype=torch.float64)
NAN = float("nan")


def draw(rounds: int, temperatures: torch.Tensor = KNOWN, seed: int = 1, mean: float = 3.0):
    """Logits (N, γ) of which `temperatures` make the chances of acceptance, and accepted lengths drawn by these."""
    torch.manual_seed(seed)
    logits = (torch.randn(rounds, len(temperatures), dtype=torch.float64) * 2 + mean) * temperatures
    accepted = torch.rand(logits.shape, dtype=torch.float64) < (logits / temperatures).sigmoid()
    return logits, accepted.long().cumprod(dim=1).sum(dim=1)


def soft_labels(logits: torch.Tensor, accepted: torch.Tensor, temperatures: torch.Tensor = KNOWN) -> torch.Tensor:
    slots = logits.shape[1]
    alphas = (logits / temperatures).sigmoid().tolist()
    return prefix_labels(accepted.tolist(), [slots] * len(logits), slots, alphas)


def errors(logits, accepted, temperatures=None) -> list[float]:
    """ECE of prefix survival per position, written out: no tensors."""
    result = []
    for k in range(logits.shape[1]):
        bins: dict[int, list[tuple[float, float]]] = {}
        for row, length in zip(logits.tolist(), accepted.tolist(), strict=True):
            survival = 1.0
            for i in range(k + 1):
                survival /= 1 + math.exp(-row[i] / (1.0 if temperatures is None else float(temperatures[i])))
            bins.setdefault(min(int(survival * 10), 9), []).append((survival, float(length > k)))
        gaps = [abs(sum(p - y for p, y in pairs)) for pairs in bins.values()]
        result.append(sum(gaps) / len(logits))
    return result


def test_known_temperatures_are_recovered_within_five_percent():
    logits, accepted = draw(40_000)
    assert torch.allclose(fit(logits, accepted), KNOWN, rtol=0.05, atol=0)


def test_soft_labels_need_fewer_rounds():
    logits, accepted = draw(6_000)
    soft, hard = fit(logits, soft_labels(logits, accepted)), fit(logits, accepted)
    assert torch.allclose(soft[:3], KNOWN[:3], rtol=0.05, atol=0)
    assert (soft / KNOWN).log().abs().mean() < (hard / KNOWN).log().abs().mean()


def test_error_falls_at_every_position():
    logits, accepted = draw(3_000, torch.full((4,), 2.5))
    before, after = errors(logits, accepted), errors(logits, accepted, fit(logits, accepted))
    assert all(new < old for new, old in zip(after, before, strict=True)) and max(after) < 0.02 < 0.05 < max(before)


def test_the_error_decides_and_the_brier_score_among_its_near_ties():
    """Logits that no temperature mends: 3,500 of 4 with 95 % accepted, 1,500 of −3 with 50 %."""
    logits = torch.cat([torch.full((3_500,), 4.0), torch.full((1_500,), -3.0)]).double()
    outcomes = (torch.arange(5_000) % 20 > 0).double()
    outcomes[3_500:] = (torch.arange(1_500) % 2).double()

    def figures(temperature):
        survival = (logits / temperature).sigmoid()
        error = expected_calibration_error(survival, outcomes)
        return error, brier_score(survival, outcomes), 2 * chance_calibration_error(survival)

    grid = [figures(2 ** (i / 20)) for i in range(-60, 61)]
    least, best_brier = min(grid), min(grid, key=lambda figure: figure[1])
    error, brier, chance = figures(float(fit(logits[:, None], outcomes[:, None])))
    bound = least[0] + chance + 0.002  # the least error of the coarse grid is a little larger
    assert least[0] < error <= bound < best_brier[0]
    assert best_brier[1] < brier < least[1]


def test_left_to_right():
    """A position's temperature rests on those before it, and on nothing behind it."""
    logits, accepted = draw(4_000)
    whole = fit(logits, accepted)
    assert torch.equal(fit(logits[:, :3], accepted.clamp(max=3)), whole[:3])
    changed = logits.clone()
    changed[:, 3:] = -changed[:, 3:]
    assert torch.equal(fit(changed, accepted)[:3], whole[:3])
    # Known outcomes at the first position only say that T_2 has to make up for what T_1 leaves wrong.
    changed = logits.clone()
    changed[:, 0] = 20.0  # sure of what is often refused
    assert fit(changed, accepted)[1] > 1.3 * whole[1]


def test_scaled_logits_have_scaled_temperatures():
    logits, accepted = draw(4_000, torch.full((3,), 1.4))
    assert torch.allclose(fit(2 * logits, accepted), 2 * fit(logits, accepted), rtol=0.02, atol=0)
    assert torch.equal(fit(logits.float(), accepted.tolist()), fit(logits.float(), accepted))
    extreme = torch.stack([fit(1000 * logits, accepted), fit(logits / 1000, accepted)])
    assert extreme[0, 0] == pytest.approx(8) and extreme[1, 0] == pytest.approx(1 / 8)


@pytest.mark.parametrize("rounds", [1, 20, 1_000])
def test_calibrated_or_few_rounds_keep_most_temperatures_at_one(rounds):
    ones = torch.ones(7, dtype=torch.float64)
    kept = [float((fit(*draw(rounds, ones, seed)) == 1).double().mean()) for seed in range(4)]
    assert sum(kept) / len(kept) > 0.75


def test_where_nothing_is_known_the_temperature_is_one():
    assert fit(torch.zeros(0, 3), torch.zeros(0)).tolist() == [1, 1, 1]
    unknown = torch.full((5, 2), NAN)
    assert fit(unknown, unknown).tolist() == [1, 1]
    # Behind a prefix that never survives, every temperature is as good as another.
    dead = torch.tensor([[-800.0, 1.0]] * 50)
    assert fit(dead, torch.zeros(50))[1] == 1


def test_unknown_outcomes_are_left_out():
    logits, accepted = draw(500)
    labels = (torch.arange(7) < accepted[:, None]).double()
    more_logits, more = torch.full((300, 7), -4.0), torch.full((300, 7), NAN)
    more_logits[:, 2:] = NAN
    both = torch.cat([logits, more_logits]), torch.cat([labels, more])
    assert torch.equal(fit(*both), fit(logits, accepted))
    more[:, 0] = 1.0
    assert fit(torch.cat([logits, more_logits]), torch.cat([labels, more]))[0] > fit(logits, accepted)[0]


def test_survival_is_the_product():
    logits = torch.tensor([[0.0, 2.0, -1.0]], dtype=torch.float64)
    wanted = [0.5, 0.5 / (1 + math.exp(-1)), 0.5 / (1 + math.exp(-1)) / (1 + math.exp(0.25))]
    scaled = survival_probabilities(logits, torch.tensor([3.0, 2.0, 4.0]))
    assert scaled[0].tolist() == pytest.approx(wanted)
    assert survival_probabilities(logits)[0, 1].item() == pytest.approx(0.5 / (1 + math.exp(-2)))


def test_labels():
    alphas = [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.3, 0.2, 0.1], [0.25]]
    # All kept; the second refused; the text ended with the first; only one was proposed, and it was kept.
    accepted, known = [3, 1, 1, 1], [3, 3, 1, 1]
    hard, soft = prefix_labels(accepted, known, 3), prefix_labels(accepted, known, 3, alphas)
    wanted = torch.tensor([[1, 1, 1], [1, 0, 0], [1, NAN, NAN], [1, NAN, NAN]], dtype=torch.float64)
    assert torch.equal(hard.nan_to_num(-1), wanted.nan_to_num(-1))
    wanted = torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.5, 0], [0.3, NAN, NAN], [0.25, NAN, NAN]], dtype=torch.float64)
    assert torch.equal(soft.nan_to_num(-1), wanted.nan_to_num(-1))


def test_soft_labels_have_the_mean_of_hard_ones_and_a_smaller_variance():
    """Acceptance at a position depends on the token drawn there, and so do the chances behind it."""
    torch.manual_seed(0)
    target, draft = (
        torch.rand(2, 3, 4, dtype=torch.float64).softmax(dim=-1),
        torch.rand(3, 4).double().mul(3).softmax(-1),
    )
    rounds, alphas, kept = 5_000, [], []
    state = torch.zeros(rounds, dtype=torch.long)  # of a two-state chain: whether the last token was token 0
    for k in range(3):
        p, q = target[state, k], draft[k].expand(rounds, 4)
        token = torch.multinomial(q, 1)[:, 0]
        ratio = (p / q).gather(1, token[:, None])[:, 0]
        alphas.append(torch.minimum(p, q).sum(dim=-1))
        kept.append(torch.rand(rounds) < ratio)
        state = (token == 0).long()
    accepted = torch.stack(kept, dim=1).long().cumprod(dim=1).sum(dim=1).tolist()
    hard = prefix_labels(accepted, [3] * rounds, 3)
    soft = prefix_labels(accepted, [3] * rounds, 3, torch.stack(alphas, dim=1).tolist())
    difference = soft - hard
    assert (difference.mean(0).abs() < 4 * difference.std(0) / rounds**0.5).all()
    assert (soft.var(dim=0) < 0.9 * hard.var(dim=0)).all() and difference.std(0).min() > 0.1


@pytest.mark.parametrize(
    ("logits", "accepted", "message"),
    [
        (torch.zeros(3), [0, 1, 2], r"shape \(3,\), expected \(N, γ\)"),
        (torch.zeros(3, 2), [0, 1], r"accepted has the shape \(2,\), expected \(3,\) or \(3, 2\)"),
        (torch.zeros(3, 2), [0, 1, 3], r"accepted is \[0, 1, 3\], expected lengths in 0\.\.2"),
        (torch.zeros(3, 2), [0, 1, -1], r"expected lengths in 0\.\.2"),
        (torch.zeros(2, 3), [0.5, 1.0], r"accepted is \[0\.5, 1\.0\], expected lengths"),
        (torch.zeros(1, 2), [[0.5, 1.5]], r"accepted holds 0\.5\.\.1\.5, expected labels in 0\.\.1"),
        (torch.zeros(1, 2), [[NAN, 0.5]], r"a known label after an unknown one"),
        (torch.tensor([[0.0, NAN]]), [1], r"confidence_logits is not finite where a label is known"),
        (torch.tensor([[float("inf"), 0.0]]), [1], r"confidence_logits is not finite"),
    ],
)
def test_bad_rounds(logits, accepted, message):
    with pytest.raises(ValueError, match=message):
        fit(logits, torch.tensor(accepted))


def test_bad_bins_and_lengths():
    with pytest.raises(ValueError, match="bins is 0, expected 1 or more"):
        fit(torch.zeros(1, 2), torch.tensor([1]), bins=0)
    for accepted, known in ((2, 1), (-1, 2), (1, 4)):
        with pytest.raises(ValueError, match=f"{accepted} accepted and {known} known tokens, expected 0 <= accepted"):
            prefix_labels([accepted], [known], 3)
    with pytest.raises(ValueError, match="1 values of expected acceptance, expected 2 or more"):
        prefix_labels([1], [2], 3, [[0.5]])
