"""Block verification keeps the target's distribution, and more tokens than the token-wise rule: exact enumeration over
all drafts and all outcomes of the uniform draws on a tiny vocabulary, then real draws, then corner cases."""

import itertools
import math

import pytest
import torch
from generation_helpers import chi_square
from test_verification import V, draw, logits_after

from dspark_hf.verification_dspark import (
    ACCEPTANCE_RULES,
    prefix_acceptance,
    residual_distribution,
    sample_token,
    verify_block,
    verify_block_jointly,
)

ROWS, LONGEST = 10_000, 3
PREFIXES = [x for n in range(LONGEST + 1) for x in itertools.product(range(V), repeat=n)]
DRAFTS = PREFIXES[-(V**LONGEST) :]


def conditional(seed: int, sharpness: float = 1.0, top_k: int = V) -> dict[tuple, torch.Tensor]:
    """A random next-token distribution (V,) float64 for every prefix; all but the `top_k` likeliest tokens have 0."""
    logits = torch.randn(len(PREFIXES), V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    logits[logits.argsort(-1).argsort(-1) < V - top_k] = -torch.inf
    return dict(zip(PREFIXES, (sharpness * logits).softmax(-1), strict=True))


def agreeing(p: dict, q: dict) -> dict:
    """q, but equal to p at the start and behind every 0."""
    return {x: p[x] if not x or x[-1] == 0 else q[x] for x in PREFIXES}


PAIRS = {
    "random": (conditional(0), conditional(1)),
    "random 2": (conditional(2), conditional(3)),
    "far apart": (conditional(106, sharpness=2.0), conditional(107, sharpness=2.0)),
    "sharp draft": (conditional(4), conditional(5, sharpness=3.0)),
    "sharp target": (conditional(6, sharpness=3.0), conditional(7)),
    "top-k": (conditional(8, top_k=2), conditional(9, top_k=2)),
    "top-k target": (conditional(10, top_k=1), conditional(11)),
    "partly equal": (conditional(12), agreeing(conditional(12), conditional(13))),
    "equal": (conditional(14), conditional(14)),
}


def causal(draft: tuple) -> int:
    """Token k is verified unless a token before it is a 1."""
    return draft.index(1) + 1 if 1 in draft else len(draft)


def peeking(draft: tuple) -> int:
    """Not causal: token k is verified unless it, or a token before it, is a 1."""
    return draft.index(1) if 1 in draft else len(draft)


def fixed(length: int):
    return lambda draft: length


LENGTHS = {"0": fixed(0), "1": fixed(1), "2": fixed(2), "3": fixed(3), "causal": causal}


def token_residual(weights, p, q):
    """Wrong: what follows is drawn as if tokens had been verified one by one."""
    return prefix_acceptance(weights, p, q)[0], residual_distribution(p, q)


def weight_alone(weights, p, q):
    """Wrong: h_i = w_i before the last token too."""
    return weights, prefix_acceptance(weights, p, q)[1]


def factors(table, text: tuple) -> list[float]:
    """Probability of every token of a text behind those before it."""
    return [table[text[:i]][x].item() for i, x in enumerate(text)]


def outcomes(p, q, length_of, step=prefix_acceptance) -> dict[tuple, float]:
    """Exact probability of every (kept tokens, next token) when the first `length_of(draft)` tokens are verified."""
    result = {}
    for draft in DRAFTS:
        p_x, q_x = factors(p, draft), factors(q, draft)
        nothing_longer = math.prod(q_x)
        if nothing_longer == 0:
            continue
        length, weights = length_of(draft), [1.0]
        for i in range(length):
            weights.append(min(1.0, weights[i] * p_x[i] / q_x[i]))
        p_next = torch.stack([p[draft[:i]] for i in range(length + 1)])
        q_next = torch.stack([q[draft[:i]] for i in range(length)] + [torch.zeros(V).double()])
        h, behind = step(torch.tensor(weights, dtype=torch.float64), p_next, q_next)
        h, behind = h.tolist(), (behind / behind.sum(dim=-1, keepdim=True)).tolist()
        for i in reversed(range(length + 1)):
            for x in range(V):
                outcome = draft[:i], x
                result[outcome] = result.get(outcome, 0.0) + nothing_longer * h[i] * behind[i][x]
            nothing_longer *= 1 - h[i]
    return {outcome: probability for outcome, probability in result.items() if probability > 0}


def error(p, exact: dict[tuple, float]) -> float:
    """Largest difference from the target in the probability of a text: a round, and tokens drawn from p behind it."""
    differences = []
    for text in itertools.product(range(V), repeat=LONGEST + 1):
        p_x = factors(p, text)
        got = sum(exact.get((text[:i], text[i]), 0.0) * math.prod(p_x[i + 1 :]) for i in range(LONGEST + 1))
        differences.append(abs(got - math.prod(p_x)))
    return max(differences)


def accepted_jointly(p, q, length_of) -> float:
    return sum(len(kept) * probability for (kept, _), probability in outcomes(p, q, length_of).items())


def accepted_by_token(p, q, length_of) -> float:
    """Σ_k P(x_1..x_k are kept), each with probability min(1, p / q)."""
    mean = 0.0
    for draft in DRAFTS:
        p_x, q_x = factors(p, draft), factors(q, draft)
        if math.prod(q_x):
            ratios = [min(1.0, p_x[i] / q_x[i]) for i in range(length_of(draft))]
            mean += math.prod(q_x) * sum(itertools.accumulate(ratios, lambda a, b: a * b))
    return mean


def run(p, q, lengths: torch.Tensor | None = None, length_of=None):
    """Real draws: drafts (ROWS, LONGEST), accepted and following (ROWS,)."""
    torch.manual_seed(0)
    tokens, draft_logits = draw(q, ROWS, LONGEST)
    if lengths is None:
        lengths = torch.tensor([length_of(tuple(row)) for row in tokens.tolist()])
    return tokens, *verify_block_jointly(
        tokens, draft_logits, lengths, lambda i, rows: logits_after(p, tokens[rows, :i])
    )


def zip_rows(*columns: torch.Tensor) -> list[tuple]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def seen(tokens, accepted, following, rows=slice(None)) -> list[tuple]:
    texts = zip_rows(tokens[rows], accepted[rows], following[rows])
    return [(tuple(draft[:count]), x) for draft, count, x in texts]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", PAIRS)
def test_text_has_exactly_the_target_distribution(name, lengths):
    p, q = PAIRS[name]
    exact = outcomes(p, q, LENGTHS[lengths])
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-12)
    assert error(p, exact) < 1e-12


WRONG = {
    "a length that depends on the token it stops at": (peeking, prefix_acceptance),
    "residual of the token-wise rule": (fixed(LONGEST), token_residual),
    "h = w before the last token": (fixed(LONGEST), weight_alone),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_not_exact(wrong):
    p, q = PAIRS["far apart"]
    assert error(p, outcomes(p, q, *WRONG[wrong])) > 5e-3


@pytest.mark.parametrize("lengths", LENGTHS)
def test_keeps_at_least_as_many_tokens_as_the_token_rule(lengths):
    gains = []
    for p, q in [*PAIRS.values(), *((conditional(s), conditional(s + 1, sharpness=2.0)) for s in range(20, 28, 2))]:
        gains.append(accepted_jointly(p, q, LENGTHS[lengths]) - accepted_by_token(p, q, LENGTHS[lengths]))
    assert min(gains) > -1e-12
    if lengths in "01":  # then the rules are the same
        assert max(gains) < 1e-12
    else:
        assert sum(gains) / len(gains) > 0.01


@pytest.mark.parametrize("name", ["far apart", "sharp draft", "top-k", "partly equal"])
@pytest.mark.parametrize("length_of", [fixed(LONGEST), causal], ids=["3", "causal"])
def test_draws_follow_the_exact_distribution(name, length_of):
    p, q = PAIRS[name]
    assert chi_square(seen(*run(p, q, length_of=length_of)), outcomes(p, q, length_of)) > 1e-4


def test_draws_of_ragged_rows():
    """Rows of every length in one call, each as in a call of its own."""
    p, q = PAIRS["sharp draft"]
    lengths = torch.arange(ROWS) % (LONGEST + 1)
    result = run(p, q, lengths)
    for length in range(LONGEST + 1):
        assert chi_square(seen(*result, rows=lengths == length), outcomes(p, q, fixed(length))) > 1e-4


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found_in_draws(monkeypatch, wrong):
    p, q = PAIRS["far apart"]
    exact = {x: math.prod(factors(p, x)) for x in itertools.product(range(V), repeat=LONGEST + 1)}

    def p_value(length_of):
        """Of the texts: a round, and tokens drawn from p behind it."""
        tokens, accepted, following = run(p, q, length_of=length_of)
        texts = torch.cat([tokens, following[:, None]], dim=1).scatter(1, accepted[:, None], following[:, None])
        for n in range(1, LONGEST + 1):
            missing = accepted < n
            texts[missing, n] = sample_token(logits_after(p, texts[missing, :n]), True)
        return chi_square(zip_rows(*texts.T), exact)

    assert p_value(fixed(LONGEST)) > 1e-4
    length_of, step = WRONG[wrong]
    monkeypatch.setattr("dspark_hf.verification_dspark.prefix_acceptance", step)
    assert p_value(length_of) < 1e-6


@pytest.mark.parametrize("shift", [0.0, 0.1, 12.3])
def test_equal_distributions_keep_everything(shift):
    """Also where p and q differ by rounding."""
    p = PAIRS["equal"][0]
    torch.manual_seed(0)
    tokens, draft_logits = draw(p, 2_000, LONGEST)
    lengths = torch.arange(2_000) % (LONGEST + 1)
    target = lambda i, rows: logits_after(p, tokens[rows, :i]).float() + shift  # noqa: E731
    accepted, following = verify_block_jointly(tokens, draft_logits, lengths, target)
    assert torch.equal(accepted, lengths)
    assert following.unique().tolist() == list(range(V))


def test_a_certain_target_keeps_what_greedy_decoding_keeps():
    """p has one token: only drafts of it can be kept, and no position is asked for behind another one."""
    torch.manual_seed(0)
    modes, lengths = torch.randint(V, (300, LONGEST + 1)), torch.randint(LONGEST + 1, (300,))
    draft_logits = torch.randn(300, LONGEST, V)
    tokens = torch.multinomial(draft_logits.flatten(0, 1).softmax(-1), 1).view(300, LONGEST)
    asked = []

    def target(i, rows):
        asked.append((i, len(rows)))
        return torch.full((len(rows), V), -torch.inf).scatter(1, modes[rows, i, None], 0.0)

    accepted, following = verify_block_jointly(tokens, draft_logits, lengths, target)
    assert asked == [(i, (accepted >= i).sum().item()) for i in range(LONGEST + 1)]
    wanted = verify_block(tokens, None, lengths, target, do_sample=False)
    assert torch.equal(accepted, wanted[0]) and torch.equal(following, wanted[1])


def test_disjoint_supports_keep_nothing():
    draft, target = torch.tensor([0.0, -torch.inf, -torch.inf]), torch.tensor([-torch.inf, 0.0, 0.0])
    accepted, following = verify_block_jointly(
        torch.zeros(500, 2).long(),
        draft.expand(500, 2, V),
        torch.full((500,), 2),
        lambda i, rows: target.repeat(500, 1),
    )
    assert (accepted == 0).all()
    assert following.unique().tolist() == [1, 2]


def test_a_token_without_probability_in_the_draft():
    """0 / 0 keeps nothing, p / 0 keeps: as the token-wise rule does."""
    draft = torch.tensor([-torch.inf, 0.0, -torch.inf]).expand(2, 1, V)
    target = torch.tensor([-torch.inf, 0.0, 0.0])
    accepted, _ = verify_block_jointly(
        torch.tensor([[0], [2]]), draft, torch.ones(2).long(), lambda i, rows: target.expand(len(rows), V)
    )
    assert accepted.tolist() == [0, 1]


def test_nothing_left_is_never_kept(monkeypatch):
    """h = 0 is not kept even with u = 0, whose residual could not be drawn from: w < 1 and q ≥ p everywhere."""
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    draft_logits = torch.stack([torch.tensor([[0.9, 0.05, 0.05]]).log(), logits], dim=1)
    monkeypatch.setattr(torch, "rand_like", lambda h: torch.where(h == 0.0, 0.0, 1 - 1e-7))
    tokens, lengths = torch.zeros(1, 2).long(), torch.tensor([2])
    accepted, following = verify_block_jointly(tokens, draft_logits, lengths, lambda i, rows: logits)
    assert accepted.item() == 0
    assert following.item() in (1, 2)


def test_float32_suffices():
    """h of a large vocabulary against float64, for weights up to 1 and distributions that nearly agree."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(5, 50_000).double()
    p, q = logits.softmax(-1), (logits + 0.01 * torch.randn_like(logits)).softmax(-1)
    weights = torch.tensor([1.0, 0.99, 0.9, 0.5, 0.01]).double()
    h, residual = prefix_acceptance(weights.float(), p.float(), q.float())
    exact_h, exact = prefix_acceptance(weights, p, q)
    torch.testing.assert_close(h.double(), exact_h, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(residual.sum(-1).double(), exact.sum(-1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ACCEPTANCE_RULES)
def test_rules_share_one_call(rule, dtype):
    """Half precision is lifted to float32; with one drafted token the rules are the same."""
    torch.manual_seed(0)
    draft_logits = torch.randn(1, 1, V).to(dtype).expand(ROWS, 1, V)
    logits = torch.randn(1, V).to(dtype)
    tokens = torch.multinomial(draft_logits[:, 0].float().softmax(-1), 1)
    target = lambda i, rows: logits.expand(len(rows), V)  # noqa: E731
    accepted, following = ACCEPTANCE_RULES[rule](tokens, draft_logits, torch.ones(ROWS).long(), target)
    p, q = logits[0].float().softmax(-1), draft_logits[0, 0].float().softmax(-1)
    kept = torch.minimum(p, q)
    exact = {(1, x, y): (kept[x] * p[y]).item() for x in range(V) for y in range(V)}
    exact |= {(0, -1, y): (p - kept)[y].item() for y in range(V)}
    drafted = torch.where(accepted == 1, tokens[:, 0], -1)
    assert chi_square(zip_rows(accepted, drafted, following), exact) > 1e-4
