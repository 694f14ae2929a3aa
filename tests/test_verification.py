"""verify_block keeps the target's distribution: exact enumeration on a tiny vocabulary, corner cases, greedy."""

import itertools

import pytest
import torch
from generation_helpers import chi_square
from torch.nn.functional import one_hot

from dspark_hf.verification_dspark import residual_distribution, sample_token, verify_block, verify_token

ROWS, V, WIDTH = 40_000, 3, 2


def conditional(seed: int, sharpness: float = 1.0) -> dict[tuple, torch.Tensor]:
    """A random next-token distribution for every prefix of up to WIDTH tokens."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [p for n in range(WIDTH + 1) for p in itertools.product(range(V), repeat=n)]
    return {p: (sharpness * torch.randn(V, generator=generator)).softmax(-1) for p in prefixes}


def logits_after(table: dict[tuple, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the next token behind each row of `tokens` (B, n), (B, V)."""
    index = {prefix: i for i, prefix in enumerate(table)}
    return torch.stack(list(table.values())).log()[[index[tuple(row)] for row in tokens.tolist()]]


def draw(q: dict[tuple, torch.Tensor], rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts (B, width) and the distributions they were drawn from (B, width, V), before softmax."""
    tokens, logits = torch.empty(rows, 0, dtype=torch.long), []
    for _ in range(width):
        logits.append(logits_after(q, tokens))
        tokens = torch.cat([tokens, sample_token(logits[-1], True)[:, None]], dim=1)
    return tokens, torch.stack(logits, dim=1) if width else torch.empty(rows, 0, V)


def outcomes(p, q, length: int) -> dict[tuple, float]:
    """Exact probability of every (kept tokens, next token), by enumeration over drafts of `length` tokens."""
    result = {}

    def walk(prefix: tuple, probability: float):
        if len(prefix) == length:
            for x in range(V):
                result[prefix, x] = result.get((prefix, x), 0.0) + probability * p[prefix][x].item()
            return
        kept = torch.minimum(p[prefix], q[prefix])
        residual = (p[prefix] - q[prefix]).clamp(min=0)
        for x in range(V):
            if residual.sum() > 0:  # refused with probability 1 − Σ min(p, q) = Σ (p − q)⁺
                result[prefix, x] = result.get((prefix, x), 0.0) + probability * residual[x].item()
            walk((*prefix, x), probability * kept[x].item())

    walk((), 1.0)
    return result


def run(p, q, lengths: torch.Tensor):
    width = int(lengths.max())
    tokens, draft_logits = draw(q, len(lengths), width)
    accepted, following = verify_block(
        tokens, draft_logits, lengths, lambda i, rows: logits_after(p, tokens[rows, :i]), do_sample=True
    )
    return tokens, accepted, following


@pytest.mark.parametrize("lengths", [(2,), (1,), (0,), (0, 1, 2)], ids=str)
def test_accepted_and_next_token_follow_the_exact_distribution(lengths):
    p, q = conditional(1), conditional(2)
    lengths = torch.tensor(lengths).repeat(ROWS // len(lengths))
    tokens, accepted, following = run(p, q, lengths)
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero()[:, 0]
        exact = outcomes(p, q, length)
        assert sum(exact.values()) == pytest.approx(1.0, abs=1e-5)
        seen = [(tuple(tokens[r, : accepted[r]].tolist()), following[r].item()) for r in rows.tolist()]
        assert chi_square(seen, exact) > 1e-4


def test_text_follows_the_target(monkeypatch):
    """Marginally: the first token of every round has the target's distribution; not so with a wrong residual."""
    p, q = conditional(1), conditional(2, sharpness=3.0)
    exact = {x: p[()][x].item() for x in range(V)}

    def p_value():
        tokens, accepted, following = run(p, q, torch.full((ROWS,), 2))
        first = torch.where(accepted > 0, tokens[:, 0], following)
        return chi_square(first.tolist(), exact)

    assert p_value() > 1e-4
    monkeypatch.setattr("dspark_hf.verification_dspark.residual_distribution", lambda p, q: p)
    assert p_value() < 1e-6


def test_equal_distributions_keep_everything():
    p = conditional(1)
    _, accepted, following = run(p, p, torch.full((2_000,), 2))
    assert (accepted == 2).all()
    assert following.max() < V


def test_disjoint_supports_keep_nothing():
    tokens = torch.zeros(500, 1, dtype=torch.long)
    q, p = torch.tensor([0.0, -torch.inf, -torch.inf]), torch.tensor([-torch.inf, 0.0, 0.0])
    accepted, following = verify_block(
        tokens, q.expand(500, 1, V), torch.ones(500).long(), lambda i, rows: p.expand(len(rows), V), do_sample=True
    )
    assert (accepted == 0).all()
    assert set(following.tolist()) == {1, 2}


def test_zero_drafted():
    """Without a draft a round is plain sampling, or the mode."""
    p = torch.tensor([0.2, 0.5, 0.3])
    none = torch.zeros(ROWS, dtype=torch.long)
    target = lambda i, rows: p.log().expand(len(rows), V)  # noqa: E731
    for do_sample in (True, False):
        accepted, following = verify_block(none[:, None][:, :0], torch.empty(ROWS, 0, V), none, target, do_sample)
        assert (accepted == 0).all()
        if do_sample:
            assert chi_square(following.tolist(), dict(enumerate(p.tolist()))) > 1e-4
        else:
            assert (following == 1).all()


def test_greedy_keeps_the_common_prefix_of_ragged_rows():
    """Against a loop over rows; `draft_logits` are not needed."""
    width, vocabulary, rows = 4, 3, 300
    modes = torch.randint(vocabulary, (rows, width + 1))
    tokens, lengths = torch.randint(vocabulary, (rows, width)), torch.randint(width + 1, (rows,))
    asked = []

    def target(i, rows):
        asked.append((i, len(rows)))
        return one_hot(modes[rows, i], vocabulary).float()

    accepted, following = verify_block(tokens, None, lengths, target, do_sample=False)
    for row in range(rows):
        count = 0
        while count < lengths[row] and tokens[row, count] == modes[row, count]:
            count += 1
        assert (accepted[row], following[row]) == (count, modes[row, count])
    # A position is asked for once, and only for the rows that have kept everything before it.
    kept = [(accepted >= i).sum().item() for i in range(width + 1)]
    assert asked == [(i, n) for i, n in enumerate(kept) if n]


def test_logits_of_any_dtype_and_scale():
    """Half precision is lifted to float32 before the softmax; −inf (a processor's) stays impossible."""
    logits = torch.tensor([[1.0, -torch.inf, 3.0]], dtype=torch.bfloat16).expand(1_000, 3)
    drafted = torch.full((1_000,), 1)
    kept, redrawn = verify_token(drafted, torch.zeros(1_000, 3), logits)
    assert not kept.any() and not (redrawn == 1).any()
    assert not (sample_token(logits, True) == 1).any()


@pytest.mark.parametrize("shape", [(V,), (5, V), (2, 4, V)], ids=str)
def test_residual(shape):
    p, q = torch.rand(shape).softmax(-1), torch.rand(shape).softmax(-1)
    residual = residual_distribution(p, q)
    torch.testing.assert_close(residual.sum(-1), torch.ones(shape[:-1]))
    assert (residual[p <= q] == 0).all() and (residual[p > q] > 0).all()
    assert torch.equal(residual_distribution(p, p), p)
