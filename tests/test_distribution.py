"""Sampling with a drafter has the target's own distribution, to chi-square tests that fail when it has not.

Two levels, as a `generate()` call costs milliseconds. `one_round` runs the drafting and verifying half of the loop (the
candidate generator, the logits processors, `verify_block`) on tens of thousands of rows at once, against the exact
distribution of texts found by enumeration. `generate()` itself is then run for 20,000 tokens in all, between models
that are tables, each token placed in its exact conditional distribution under the target alone: these places are
uniform. Texts that a criterion ends inside a block are compared with the exact ones too.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from generation_helpers import chi_square, tiny_drafter, tiny_target
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedConfig,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.utils import ModelOutput

from dspark_hf import ConfidenceThreshold, FixedLength, record_speculation, verification_dspark
from dspark_hf.generation_dspark import DSparkCandidateGenerator, check_generation, speculative_decode
from dspark_hf.processing_dspark import PositionLogits, RowProcessors
from dspark_hf.profile_dspark import SPSProfile
from dspark_hf.rounds_dspark import RoundHistory
from dspark_hf.rows_dspark import RowCache
from dspark_hf.scheduling_dspark import LookaheadScheduler, PrefixScheduler, StalePrefixScheduler, VerifyPolicy
from dspark_hf.target_dspark import CACHE_NAME
from dspark_hf.verification_dspark import sample_token

V, ROWS, BLOCK, TEXT = 7, 20_000, 4, 3
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def target():
    config = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return tiny_target(LlamaConfig, **config, num_attention_heads=2, num_key_value_heads=1)


def make_drafter(target, **overrides):
    model = tiny_drafter(target, **{"block_size": BLOCK, "target_layer_ids": [-1, 0]} | overrides)
    if model.confidence_head is not None:
        weight = model.confidence_head.proj.weight
        weight[:, model.config.hidden_size :].mul_(20.0)  # confidences that hang on the tokens drawn
    return model


@pytest.fixture(scope="module")
def drafter(target):
    return make_drafter(target)


class Law:
    """The target's logits behind the prompt and every text of up to TEXT or BLOCK + 1 tokens, and what sampling with
    `processors` makes of them."""

    def __init__(self, target, processors):
        self.processors = processors
        depth = max(TEXT, BLOCK + 2)
        self.raw, self.processed = [], []
        for n in range(depth):
            texts = torch.tensor(list(itertools.product(range(V), repeat=n)), dtype=torch.long).reshape(V**n, n)
            ids = torch.cat([PROMPT.expand(len(texts), -1), texts], dim=1)
            self.raw.append(target(ids).logits[:, -1].float())
            self.processed.append(processors(ids, self.raw[-1].clone()) if processors else self.raw[-1])

    @staticmethod
    def place(tokens: torch.Tensor) -> torch.Tensor:
        """Texts (B, n) → their rows in the tables (B,)."""
        result = torch.zeros(len(tokens), dtype=torch.long)
        for column in tokens.T:
            result = result * V + column
        return result

    def logits(self, tokens: torch.Tensor, raw: bool = False) -> torch.Tensor:
        return (self.raw if raw else self.processed)[tokens.shape[1]][self.place(tokens)]

    def sample(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(self.logits(tokens).softmax(-1), 1)

    def texts(self) -> dict[int, float]:
        """Probability of every text of TEXT tokens, by its place."""
        probability = torch.ones(1, dtype=torch.double)
        for n in range(TEXT):
            probability = (probability[:, None] * self.processed[n].double().softmax(-1)).flatten()
        return dict(enumerate(probability.tolist()))


def one_round(target, drafter, law: Law, spoil=lambda logits: logits, rule="token") -> tuple[torch.Tensor, float]:
    """ROWS texts (ROWS, TEXT): a first token, one round of drafting and verifying behind it, and where that falls short
    tokens drawn from the target. Also the mean number of accepted tokens. `spoil` changes q before verification."""
    config = GenerationConfig(do_sample=True, max_length=100)
    config._eos_token_tensor = None
    cache = DynamicCache(config=target.config)
    outputs = target(PROMPT, output_hidden_states=True, use_cache=True, **{CACHE_NAME: cache})
    first = law.sample(torch.empty(ROWS, 0, dtype=torch.long))
    text = torch.cat([PROMPT.expand(ROWS, -1), first], dim=1)
    states = tuple(h.expand(ROWS, -1, -1) for h in outputs.hidden_states)
    outputs = ModelOutput(hidden_states=states, **{CACHE_NAME: cache})
    generator = DSparkCandidateGenerator(drafter, target, config, law.processors)
    draft, lengths = generator.propose(text, outputs, torch.full((ROWS,), PROMPT.shape[1]))

    width = int(lengths.max())
    candidates = draft.token_ids[:, :width]
    tokens = torch.cat([first, candidates], dim=1)
    raw = torch.stack([law.logits(tokens[:, : i + 1], raw=True) for i in range(width + 1)], dim=1)
    logits = PositionLogits(ModelOutput(logits=raw), RowProcessors(law.processors, config, text), candidates)
    accepted, following = verification_dspark.ACCEPTANCE_RULES[rule](
        candidates, spoil(draft.logits[:, :width]), lengths, logits
    )
    result = torch.cat([tokens, tokens.new_zeros(ROWS, max(0, TEXT - 1 - width) + 1)], dim=1)
    result.scatter_(1, accepted[:, None] + 1, following[:, None])
    for n in range(2, TEXT):
        missing = accepted + 2 <= n
        result[missing, n] = law.sample(result[missing, :n])[:, 0]
    return result[:, :TEXT], accepted.float().mean().item()


def fit(target, drafter, processors=(), **kwargs) -> float:
    """p-value of the texts of `one_round` against the exact law."""
    with torch.no_grad():
        law = Law(target, LogitsProcessorList(processors))
        texts, accepted = one_round(target, drafter, law, **kwargs)
    assert 0.1 < accepted < drafter.config.block_size - 0.1  # neither all nor nothing, else there is nothing to see
    return chi_square(Law.place(texts).tolist(), law.texts())


SAMPLING = {
    "plain": [],
    "temperature, top-k": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(4)],
    "hot": [TemperatureLogitsWarper(1.6)],
    "top-p": [TopPLogitsWarper(0.8)],
    "min-p": [MinPLogitsWarper(0.2)],
    "typical": [TypicalLogitsWarper(0.7)],
    "repetition": [RepetitionPenaltyLogitsProcessor(1.5), TopPLogitsWarper(0.9)],
}
# A token is worth its place in a pass over ROWS texts where its survival is above about one half.
CURVE = SPSProfile([ROWS, ROWS * (BLOCK + 1)], [1.0, 0.35])
POLICIES = {
    "all": FixedLength(),
    "two": FixedLength(2),
    "threshold": ConfidenceThreshold(0.5),
    "prefix": PrefixScheduler(CURVE),
    "stale": StalePrefixScheduler(CURVE),
    "lookahead": LookaheadScheduler(CURVE),
}


@pytest.mark.parametrize(
    ("name", "policy"), [("plain", "two")] + [(name, policy) for name in SAMPLING for policy in ("all", "threshold")]
)
def test_texts(target, drafter, name, policy, monkeypatch):
    monkeypatch.setattr(drafter, "verify_policy", POLICIES[policy])
    assert fit(target, drafter, SAMPLING[name]) > 1e-4


@pytest.mark.parametrize("policy", ["prefix", "lookahead"])
def test_schedulers_over_many_rows(target, drafter, policy, monkeypatch):
    """What the other rows' confidences do to a row's length leaves its text alone."""
    monkeypatch.setattr(drafter, "verify_policy", POLICIES[policy])
    assert fit(target, drafter) > 1e-4


@pytest.mark.parametrize("policy", ["all", "threshold", "prefix"])
@pytest.mark.parametrize("name", ["plain", "temperature, top-k"])
def test_block_verification(target, drafter, name, policy, monkeypatch):
    monkeypatch.setattr(drafter, "verify_policy", POLICIES[policy])
    assert fit(target, drafter, SAMPLING[name], rule="block") > 1e-4


@pytest.mark.parametrize(
    "overrides",
    [
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        {"markov_rank": 0, "confidence_head_with_markov": False},
        {"draft_vocab_size": 4},
        {"block_size": 1},
    ],
    ids=str,
)
def test_drafters(target, overrides):
    """A reduced draft vocabulary too: what cannot be drafted comes from the residual."""
    drafter = make_drafter(target, **overrides)
    assert fit(target, drafter, SAMPLING["temperature, top-k"]) > 1e-4
    if drafter.config.markov_rank:
        drafter.verify_policy = ConfidenceThreshold(0.5)
        assert fit(target, drafter) > 1e-4


def test_a_wrong_residual_is_found(target, drafter, monkeypatch):
    monkeypatch.setattr(verification_dspark, "residual_distribution", lambda p, q: p)
    for name in ("plain", "temperature, top-k", "repetition"):
        assert fit(target, drafter, SAMPLING[name]) < 1e-6, name


def test_a_wrong_q_is_found(target, drafter):
    """q must be what was drawn from: before temperature or top-k it is not."""
    temperature = [TemperatureLogitsWarper(0.5)]
    assert fit(target, drafter, temperature) > 1e-4
    assert fit(target, drafter, temperature, spoil=lambda logits: logits * 0.5) < 1e-6


class Peeking(VerifyPolicy):
    """Not causal: keeps a token only where the next one, which hangs on it, looks good."""

    needs_confidence = True

    def verify_lengths(self, confidence, history=None):
        return (confidence[:, 1:] >= 0.5).long().cumprod(dim=-1).sum(dim=-1)


def test_a_policy_that_looks_ahead_is_found(target, drafter, monkeypatch):
    """Confidences matter here: cutting by them after the token is drawn biases the text (paper, appendix A)."""
    monkeypatch.setattr(drafter, "verify_policy", Peeking())
    assert fit(target, drafter) < 1e-6


# ----------------------------------------------------------------------------------------------------- whole generate()


class TableModel(PreTrainedModel, GenerationMixin):
    """A target that costs next to nothing: logits from a table of the last two tokens, kept in a real cache."""

    config_class = PreTrainedConfig
    main_input_name = "input_ids"

    def __init__(self):
        sizes = {"vocab_size": V, "hidden_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1}
        super().__init__(PreTrainedConfig(**sizes, eos_token_id=None, bos_token_id=None))
        self.config._attn_implementation = "eager"
        self.table = torch.nn.Parameter(torch.randn(V, V) + 0.7 * torch.randn(V, V, V), requires_grad=False)

    def forward(self, input_ids, position_ids=None, output_hidden_states=None, **kwargs):
        ids, cache = input_ids[:, None, :, None].float(), kwargs[CACHE_NAME]
        seen = cache.get_seq_length()
        text = cache.update(ids, ids, 0)[0][:, 0, :, 0].long()
        if position_ids is None:
            position_ids = torch.arange(seen, seen + input_ids.shape[1])[None]
        before = torch.nn.functional.pad(text, (1, 0)).gather(1, position_ids.expand_as(input_ids))
        states = (ids[:, 0],) * 2
        return ModelOutput(logits=self.table[before, input_ids], hidden_states=states, **{CACHE_NAME: cache})


class TableDrafter:
    """A drafter with the interface that the decoding loop needs, and no more: q and confidence from the last token."""

    device = torch.device("cpu")

    def __init__(self, target):
        sizes = {"vocab_size": V, "hidden_size": 1, "num_target_layers": 1, "block_size": BLOCK}
        self.config = PreTrainedConfig(
            **sizes, target_layer_ids=[-1], enable_confidence_head=True, sts_temperatures=None
        )
        self.table = target.table.mean(0) + 0.7 * torch.randn(V, V)
        self.confidence = torch.randn(V) + 1.0
        self.verify_policy, self.acceptance_rule = FixedLength(), "token"

    def check_generation(self, target, config):
        check_generation(target, self, config)

    def speculative_decode(self, target, *args, **kwargs):
        return speculative_decode(self, target, *args, **kwargs)

    def new_cache(self, start):
        return RowCache(start)

    def anchor_confidence_logits(self, anchor_ids):
        return self.confidence[anchor_ids]

    def draft(
        self, context, anchor_ids, cache, num_tokens, do_sample, logits_processor, input_ids, context_lengths, stop, **_
    ):
        rows, counts = len(anchor_ids), context.shape[1] if context_lengths is None else context_lengths
        positions = cache.ends(rows, self.device) + counts
        cache.advance(counts)
        assert (input_ids.gather(1, positions[:, None])[:, 0] == anchor_ids).all()
        newest = context[torch.arange(rows), torch.as_tensor(counts).expand(rows) - 1, 0]
        assert (newest == input_ids.gather(1, positions[:, None] - 1)[:, 0]).all()
        tokens, logits, confidence = [anchor_ids], [], []
        for _ in range(num_tokens):
            confidence.append(self.confidence[tokens[-1]])
            if stop is not None and stop(torch.stack(confidence, dim=1)):
                confidence.pop()
                break
            logits.append(self.table[tokens[-1]])
            if logits_processor is not None:
                prefix = torch.cat([input_ids, *(t[:, None] for t in tokens[1:])], dim=1)
                logits[-1] = logits_processor(prefix, logits[-1].clone())
            tokens.append(sample_token(logits[-1], do_sample))
        stack = lambda items, *shape: torch.stack(items, 1) if items else torch.empty(rows, 0, *shape)  # noqa: E731
        return ModelOutput(
            token_ids=stack(tokens[1:]).long(),
            logits=stack(logits, V),
            confidence_logits=stack(confidence),
            cache=cache,
        )


@pytest.fixture(scope="module")
def tables():
    torch.manual_seed(3)
    model = TableModel().eval()
    return model, TableDrafter(model)


def places(target, drafter, ids: torch.Tensor, processors) -> list[int]:
    """For each new token the bin of 20 in which it falls when its conditional distribution, from one pass of the target
    over the text, is laid out on [0, 1), those tokens first that the drafter favours most over the target: uniform for
    texts drawn from the target, and sensitive to any trace that the draft leaves."""
    start, count = PROMPT.shape[1], ids.shape[1] - PROMPT.shape[1]
    logits = target(ids, **{CACHE_NAME: DynamicCache()}).logits[0, start - 1 : -1].float()
    order = (logits - drafter.table[ids[0, start - 1 : -1]]).argsort(-1)
    # Row t holds the text before token t, the rest filled up with a token that it has anyway.
    prefixes = torch.where(torch.arange(start + count) < start + torch.arange(count)[:, None], ids, ids[:, :1])
    p = processors(prefixes, logits.clone()).double().softmax(-1).gather(-1, order)
    at = (order == ids[0, start:, None]).nonzero()[:, 1:]
    own, below = p.gather(-1, at)[:, 0], (p.cumsum(-1) - p).gather(-1, at)[:, 0]
    assert (own > 0).all()
    return ((below + torch.rand(count) * own) * 20).long().clamp(max=19).tolist()


GENERATE = {
    "plain": {"top_k": 0},
    "temperature, top-k": {"temperature": 0.7, "top_k": 4},
    "top-p": {"top_p": 0.8, "top_k": 0},
    "min-p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.2, "temperature": 1.3},
}


def sample_places(target, drafter, name, rows=1, calls=None, tokens=320):
    calls = calls or (24 if name == "plain" else 2)  # processors take most of the time
    arguments = {"do_sample": True, "max_new_tokens": tokens // rows, "num_return_sequences": rows} | GENERATE[name]
    processors = target._get_logits_processor(GenerationConfig(**({"top_k": 50} | arguments)), device="cpu")
    bins = []
    with record_speculation() as stats:
        for _ in range(calls):
            ids = target.generate(PROMPT, assistant_model=drafter, **arguments)
            assert ids.shape == (rows, PROMPT.shape[1] + tokens // rows)
            for text in ids:
                bins += places(target, drafter, text[None], processors)
    assert 0.3 < sum(stats.accepted_lengths) / len(stats.accepted_lengths) < drafter.config.block_size - 0.3
    return bins


# Schedulers for one row or eight; plain decoding too slow for the bypass.
SCHEDULE = SPSProfile(list(range(1, 41)), [1.0 / (1.0 + 0.3 * n) for n in range(40)], plain_steps_per_second=0.1)
SCHEDULERS = {
    "prefix": PrefixScheduler(SCHEDULE),
    "stale": StalePrefixScheduler(SCHEDULE),
    "lookahead": LookaheadScheduler(SCHEDULE),
}
# A step of plain decoding is fast enough for some anchors, and not for others.
SKIPPING = LookaheadScheduler(replace(SCHEDULE, plain_steps_per_second=1.5))


@pytest.mark.parametrize(
    ("name", "policy", "rows"),
    [(name, policy, 1) for name in GENERATE for policy in ("all", "threshold")]
    + [("plain", policy, rows) for policy in SCHEDULERS for rows in (1, 8)]
    + [(name, "threshold", 8) for name in GENERATE],
)
def test_generate(tables, name, policy, rows, monkeypatch):
    """Some 50,000 tokens in all, most of them without processors."""
    monkeypatch.setattr(tables[1], "verify_policy", (POLICIES | SCHEDULERS)[policy])
    calls = 8 if policy in SCHEDULERS else None
    assert chi_square(sample_places(*tables, name, rows, calls), dict.fromkeys(range(20), 1 / 20)) > 1e-4


def test_generate_with_skipped_blocks(tables, monkeypatch):
    """Without the bypass, which would leave few rounds to skip."""
    skipped = []
    monkeypatch.setattr(LookaheadScheduler, "draft_limit", VerifyPolicy.draft_limit)
    monkeypatch.setattr(RoundHistory, "skip", lambda self: skipped.append(1))
    monkeypatch.setattr(tables[1], "verify_policy", SKIPPING)
    with record_speculation() as stats:
        bins = sample_places(*tables, "plain", 1, 16)
    assert 0.1 < len(skipped) / len(stats.rows) < 0.9
    assert chi_square(bins, dict.fromkeys(range(20), 1 / 20)) > 1e-4


@pytest.mark.parametrize("policy", ["all", "prefix"])
@pytest.mark.parametrize("rows", [1, 8])
def test_generate_by_block_verification(tables, policy, rows, monkeypatch):
    monkeypatch.setattr(tables[1], "acceptance_rule", "block")
    monkeypatch.setattr(tables[1], "verify_policy", (POLICIES | SCHEDULERS)[policy])
    assert chi_square(sample_places(*tables, "plain", rows, 8), dict.fromkeys(range(20), 1 / 20)) > 1e-4


def test_generate_with_a_wrong_residual_is_found(tables, monkeypatch):
    monkeypatch.setattr(verification_dspark, "residual_distribution", lambda p, q: p)
    assert chi_square(sample_places(*tables, "plain"), dict.fromkeys(range(20), 1 / 20)) < 1e-6


class Enough(StoppingCriteria):
    """Fires inside blocks: when the new tokens add up to 9."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, PROMPT.shape[1] :].sum(dim=-1) >= 9


def test_texts_that_a_criterion_ends(tables):
    """They, and so their lengths, are those of plain sampling that stops at the same place; an end token besides."""
    (target, drafter), end, limit = tables, 2, 5
    exact, going_on = {}, {(): 1.0}
    for n in range(limit):
        longer = {}
        for text, probability in going_on.items():
            ids = torch.cat([PROMPT, torch.tensor([text], dtype=torch.long)], dim=1)
            p = target(ids, **{CACHE_NAME: DynamicCache()}).logits[0, -1].double().softmax(-1)
            longer |= {(*text, x): probability * p[x].item() for x in range(V)}
        done = {text for text in longer if sum(text) >= 9 or text[-1] == end or n == limit - 1}
        exact |= {text: longer[text] for text in done}
        going_on = {text: probability for text, probability in longer.items() if text not in done}
    assert sum(exact.values()) == pytest.approx(1.0)

    texts, criteria = [], StoppingCriteriaList([Enough()])
    arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": limit, "eos_token_id": end}
    with record_speculation() as stats:
        for _ in range(1_000):
            ids = target.generate(PROMPT, assistant_model=drafter, stopping_criteria=criteria, **arguments)
            texts.append(tuple(ids[0, PROMPT.shape[1] :].tolist()))
    assert chi_square(texts, exact) > 1e-4
    lengths = {n: sum(p for text, p in exact.items() if len(text) == n) for n in range(1, limit + 1)}
    assert chi_square([len(text) for text in texts], lengths) > 1e-4
    assert stats.acceptance_length > 1.3
