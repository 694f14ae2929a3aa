"""generate() with a drafter says what plain generate() says: token for token in float32, whatever else is asked for.

`same_text` runs every case three times: plain, with a trained drafter, and with that drafter's blocks rigged to be right
up to a random slot, so that what ends a text does so at every place of a block.
"""

import copy
import threading

import pytest
import torch
from generation_helpers import Rig, character_tokenizer
from helpers import QWEN3, expected_greedy, load_drafter, load_target
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from dspark_hf import ConfidenceThreshold, FixedLength, record_speculation
from dspark_hf.target_dspark import CACHE_NAME

TRACES = expected_greedy("qwen3_vanilla")["threshold_0.0"]
PROMPTS = [torch.tensor([trace["prompt_ids"]]) for trace in TRACES]
IDS = PROMPTS[0]
NEW = {"max_new_tokens": 24, "do_sample": False}
HAS_STATIC = CACHE_NAME == "cache"  # assisted decoding over static caches came with transformers 5.24


def sequences(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def same_text(target, drafter, ids=IDS, text=None, check_context=True, **kwargs):
    """The plain and the drafted output, after asserting that their texts are equal. Arguments that must be fresh in
    each run are given as functions. `text` (1, T): what the context rows stand for, where it is not the output."""

    def run(**more):
        fresh = {key: value() if callable(value) and key in FRESH else value for key, value in kwargs.items()}
        inputs = {} if ids is None else {"input_ids": ids}
        return target.generate(**inputs, **(NEW | fresh | more))

    plain = run()
    drafted = run(assistant_model=drafter)
    assert sequences(drafted).tolist() == sequences(plain).tolist()
    for seed in (0, 1):
        with Rig(drafter, sequences(plain), seed) as rig:
            rigged = run(assistant_model=drafter)
        assert sequences(rigged).tolist() == sequences(plain).tolist()
        if check_context and rig.contexts:
            rig.check_context(target, sequences(plain) if text is None else text(sequences(plain)))
    return plain, drafted


FRESH = {"streamer", "stopping_criteria", "logits_processor", CACHE_NAME}


# ------------------------------------------------------------------------------------------------------ recorded traces


@pytest.mark.parametrize("policy", [FixedLength(), ConfidenceThreshold(0.5)], ids=["threshold_0.0", "threshold_0.5"])
@pytest.mark.parametrize("name", QWEN3)
def test_greedy_traces(target, drafter, name, policy):
    """Output ids, accepted and proposed lengths of the official implementation. It runs one further round when the text
    is already full. The first prompt to its end, the others as far as time allows."""
    key = "threshold_0.0" if policy == FixedLength() else "threshold_0.5"
    traces = expected_greedy(name).get(key)
    if traces is None:
        pytest.skip("not recorded: no confidence head")
    model = drafter(name)
    model.verify_policy = policy
    assert len(traces) == 6
    for i, trace in enumerate(traces):
        ids, count = torch.tensor([trace["prompt_ids"]]), 64 if i == 0 else 20
        with record_speculation() as stats:
            output = target("qwen3").generate(ids, assistant_model=model, max_new_tokens=count, do_sample=False)
        rounds = len(stats.acceptance_lengths)
        assert output[0].tolist() == trace["output_ids"][: ids.shape[1] + count]
        assert stats.acceptance_lengths == trace["acceptance_lengths"][:rounds]
        assert stats.proposal_lengths == trace["proposal_lengths"][:rounds]
        assert sum(stats.acceptance_lengths) >= output.shape[1] - ids.shape[1] - 1 > 0


def test_threshold_cut_saves_sequential_work(target, drafter):
    """Slots beyond the cut are not drafted: the head runs once per proposed token."""
    model = drafter()
    model.verify_policy = ConfidenceThreshold(0.5)
    calls = []
    handle = model.markov_head.markov_w2.register_forward_hook(lambda *_: calls.append(1))
    with record_speculation() as stats:
        target("qwen3").generate(IDS, assistant_model=model, **NEW)
    handle.remove()
    assert len(calls) == sum(stats.proposal_lengths) < 7 * len(stats.proposal_lengths)


# ------------------------------------------------------------------------------------------------- what shapes the text

SHAPING = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 0.5},
    "bad_words": {"bad_words_ids": [[101], [32, 116], [111, 110]]},
    "forced_eos": {"forced_eos_token_id": 63},
    "forced_eos_set": {"forced_eos_token_id": [63, 33], "max_new_tokens": 9},
    "suppress": {"suppress_tokens": [101, 32]},
    "begin_suppress": {"begin_suppress_tokens": [103, 104, 32]},
    "exponential_decay": {"exponential_decay_length_penalty": (6, 1.6)},
    "sequence_bias": {"sequence_bias": [[[101], -6.0], [[32, 116], -9.0], [[97], 2.0]]},
    "min_new_tokens": {"eos_token_id": 32, "min_new_tokens": 12},
    "min_length": {"eos_token_id": 32, "min_length": 52},
    "renormalize": {"repetition_penalty": 1.4, "renormalize_logits": True, "remove_invalid_values": True},
    "watermark": {"watermarking_config": {"bias": 4.0, "seeding_scheme": "selfhash"}},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [ids[-1].item() + 1, 32 + len(ids) % 64]},
    "all_at_once": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[101]],
        "min_new_tokens": 8,
        "eos_token_id": [10, 116],
    },
}


@pytest.mark.parametrize("name", SHAPING)
def test_logits_processors(target, drafter, name):
    """Each changes the text, so that leaving it out would be seen."""
    plain, _ = same_text(target("qwen3"), drafter(), **SHAPING[name])
    start = IDS.shape[1]
    without = target("qwen3").generate(IDS, **(NEW | {"max_new_tokens": 60}))
    assert plain[0, start:].tolist() != without[0, start : plain.shape[1]].tolist()


class NoTwice(LogitsProcessor):
    """Looks at the text so far, its length and nothing else."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids[0, -3:]] -= 5.0
        scores[:, 32 + input_ids.shape[1] % 90] += 3.0
        return scores


class InPlace(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[:, input_ids[0, -4:]] = -torch.inf
        return scores


@pytest.mark.parametrize(
    "processors", [[NoTwice()], [InPlace()], [NoTwice(), InPlace()]], ids=["clone", "inplace", "2"]
)
def test_custom_logits_processors(target, drafter, processors):
    plain, _ = same_text(target("qwen3"), drafter(), logits_processor=lambda: list(processors))
    assert plain[0].tolist() != TRACES[0]["output_ids"][: plain.shape[1]]


def test_processors_never_see_what_plain_generate_would_not_show(target, drafter):
    """Neither a text that has ended nor one beyond the maximum length, which many cannot take: a plan of tokens by
    position runs out, a constraint has no successor for its last word."""
    start, text = IDS.shape[1], [104, 101, 32, 99, 97, 116, 10]

    def allowed(row, ids):
        """The text above, where the second word may also be "dog"."""
        so_far = ids[start:].tolist()
        if so_far[:3] == [104, 101, 32] and so_far[3:4] == [100]:
            return [[111], [103], [10]][len(so_far) - 4]
        assert so_far == text[: len(so_far)]
        return [99, 100] if len(so_far) == 3 else [text[len(so_far)]]

    plain, _ = same_text(target("qwen3"), drafter(), prefix_allowed_tokens_fn=allowed)
    assert plain[0, -1] == 10 and plain.shape[1] < start + 24

    class Plan(LogitsProcessor):
        plan = torch.randint(32, 127, (start + 11,))

        def __call__(self, input_ids, scores):
            scores[:, self.plan[input_ids.shape[1]]] += 4.0
            return scores

    same_text(target("qwen3"), drafter(), logits_processor=lambda: [Plan()], max_new_tokens=11)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_sampling_from_one_token_is_greedy(target, drafter, temperature):
    """The sampling path, in the case whose outcome is known."""
    plain, _ = same_text(target("qwen3"), drafter(), do_sample=True, top_k=1, temperature=temperature)
    assert plain[0].tolist() == TRACES[0]["output_ids"][: plain.shape[1]]


# --------------------------------------------------------------------------------------------------- what ends the text


@pytest.mark.parametrize("count", range(1, 10))
def test_max_new_tokens(target, drafter, count):
    plain, _ = same_text(target("qwen3"), drafter(), max_new_tokens=count, eos_token_id=None)
    assert plain.shape[1] == IDS.shape[1] + count


@pytest.mark.parametrize("arguments", [{"max_length": 50}, {"max_length": 41, "min_length": 41}, {"max_length": 200}])
def test_max_length(target, drafter, arguments):
    same_text(target("qwen3"), drafter(), max_new_tokens=None, **arguments)


def test_end_token_at_every_place(target, drafter):
    """Each token of the plain text in turn is an end token, alone and in a set."""
    tokens = list(dict.fromkeys(TRACES[0]["output_ids"][IDS.shape[1] : IDS.shape[1] + 24]))
    lengths = set()
    for token in tokens:
        plain, _ = same_text(target("qwen3"), drafter(), eos_token_id=[token, 3, 10])
        lengths.add(plain.shape[1])
        assert plain[0, -1] == token or plain.shape[1] == IDS.shape[1] + 24
    assert len(lengths) > 8


@pytest.mark.parametrize("name", QWEN3)
def test_rounds_that_an_end_token_cuts(target, drafter, name):
    """No bonus token is counted for them; the telemetry adds up to the text."""
    text = expected_greedy(name)["threshold_0.0"][1]
    ids = torch.tensor([text["prompt_ids"]])
    for token in text["output_ids"][ids.shape[1] + 4 : ids.shape[1] + 9]:
        with record_speculation() as stats:
            output = target("qwen3").generate(ids, assistant_model=drafter(name), eos_token_id=token, **NEW)
        if output[0, -1] == token:
            assert sum(stats.acceptance_lengths) == output.shape[1] - ids.shape[1] - 1
        assert all(0 <= e - a <= 1 for a, e in zip(stats.accepted_lengths, stats.acceptance_lengths, strict=True))


@pytest.mark.parametrize("strings", ["e", "th", [" t", "zz"], "the s", ["nd c", "com"]], ids=str)
def test_stop_strings(target, drafter, strings):
    plain, _ = same_text(target("qwen3"), drafter(), stop_strings=strings, tokenizer=character_tokenizer())
    text = character_tokenizer().decode(plain[0, IDS.shape[1] :])
    assert plain.shape[1] < IDS.shape[1] + 24 and text.endswith(
        tuple([strings] if isinstance(strings, str) else strings)
    )


class Recorder(StoppingCriteria):
    """Ends the text when `ends(text, scores)`; notes every call."""

    def __init__(self, ends=lambda text, scores: False):
        self.ends, self.calls = ends, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), None if scores is None else [s.argmax().item() for s in scores]))
        return torch.full((len(input_ids),), self.ends(input_ids, scores), device=input_ids.device)


ENDS = {
    "never": lambda text, scores: False,
    "length": lambda text, scores: text.shape[1] == IDS.shape[1] + 7,
    "token": lambda text, scores: text[0, -1] == 116,
    "pair": lambda text, scores: text[0, -2:].tolist() == [101, 32],
    "sum": lambda text, scores: text[0].sum() % 7 == 3,
    "scores": lambda text, scores: scores is not None and len(scores) > 4 and scores[-1].softmax(-1).max() < 0.6,
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("with_scores", [False, True])
def test_stopping_criteria(target, drafter, name, with_scores):
    """A criterion that fires inside a block ends the text there, and is asked just what plain generate() asks: once per
    token, with the scores so far, which may have a state of its own."""
    recorders = []

    def fresh():
        recorders.append(Recorder(ENDS[name]))
        return StoppingCriteriaList([recorders[-1]])

    scores = {"return_dict_in_generate": True, "output_scores": True} if with_scores else {}
    same_text(target("qwen3"), drafter(), stopping_criteria=fresh, **scores)
    assert len(recorders) == 4
    assert all(recorder.calls == recorders[0].calls for recorder in recorders)
    if name != "never" and (with_scores or name != "scores"):
        assert len(recorders[0].calls) < 24


def test_max_time(target, drafter, monkeypatch):
    """A clock that ticks when it is looked at, as both look once per token."""
    from transformers.generation import stopping_criteria

    class Clock:
        now = 0.0

        def time(self):
            self.now += 1.0
            return self.now

    monkeypatch.setattr(stopping_criteria, "time", Clock())
    plain, _ = same_text(target("qwen3"), drafter(), max_time=9.5)
    assert plain.shape[1] == IDS.shape[1] + 10


# ------------------------------------------------------------------------------------------------------------ streaming


class Tape(BaseStreamer):
    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append((value.shape, value.device.type, value.tolist()))

    def end(self):
        self.calls.append("end")


@pytest.mark.parametrize(
    "arguments", [{}, {"eos_token_id": 116}, {"stop_strings": "the s"}], ids=["full", "eos", "stop"]
)
def test_streamer_sees_what_plain_generate_shows(target, drafter, arguments):
    tapes = []

    def fresh():
        tapes.append(Tape())
        return tapes[-1]

    plain, _ = same_text(target("qwen3"), drafter(), streamer=fresh, tokenizer=character_tokenizer(), **arguments)
    assert len(tapes) == 4 and all(tape.calls == tapes[0].calls for tape in tapes)
    assert len(tapes[0].calls) == plain.shape[1] - IDS.shape[1] + 2


def test_text_streamers(target, drafter, capsys):
    tokenizer = character_tokenizer()
    same_text(target("qwen3"), drafter(), streamer=lambda: TextStreamer(tokenizer, skip_prompt=True))
    printed = capsys.readouterr().out
    assert len(printed) == 4 * 25 and printed == printed[:25] * 4

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {"assistant_model": drafter(), "streamer": streamer, **NEW}
    with record_speculation() as stats:
        thread = threading.Thread(target=target("qwen3").generate, args=(IDS,), kwargs=arguments)
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text + "\n" == printed[:25]
    assert stats.acceptance_length > 1


# -------------------------------------------------------------------------------------------------------------- outputs


def assert_tuples_equal(ours, plain, name):
    """Per token, per layer."""
    assert len(ours) == len(plain), name
    for step, (a, b) in enumerate(zip(ours, plain, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda text, s=step: f"{name}, token {s}: {text}")


def assert_caches_equal(ours, plain):
    assert type(ours) is type(plain) and len(ours.layers) == len(plain.layers)
    assert int(ours.get_seq_length()) == int(plain.get_seq_length())
    for a, b in zip(ours.layers, plain.layers, strict=True):
        assert int(a.get_seq_length()) == int(b.get_seq_length())
        length = slice(None, int(a.get_seq_length()) if not a.is_sliding else None)
        torch.testing.assert_close(a.keys[:, :, length], b.keys[:, :, length], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.values[:, :, length], b.values[:, :, length], rtol=1e-4, atol=1e-4)


WANTED = ("scores", "logits", "hidden_states", "attentions")


def assert_outputs_equal(target, drafter, ids=IDS, rig_text=None, **kwargs):
    flags = {f"output_{name}": True for name in WANTED} | {"return_dict_in_generate": True}
    plain = target.generate(ids, **(NEW | flags | kwargs))
    with Rig(drafter, plain.sequences):
        ours = target.generate(ids, assistant_model=drafter, **(NEW | flags | kwargs))
    assert type(ours) is type(plain) and ours.keys() == plain.keys()
    assert torch.equal(ours.sequences, plain.sequences)
    for name in WANTED:
        assert_tuples_equal(ours[name], plain[name], name)
    assert_caches_equal(ours[CACHE_NAME], plain[CACHE_NAME])
    return plain


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"max_new_tokens": 1},
        {"repetition_penalty": 1.4, "min_new_tokens": 4, "eos_token_id": 116},
        {"stop_strings": "the s", "tokenizer": character_tokenizer()},
        {"prefill_chunk_size": 16},
        pytest.param({"cache_implementation": "static"}, marks=pytest.mark.skipif(not HAS_STATIC, reason="since 5.24")),
    ],
    ids=lambda arguments: ",".join(arguments),
)
def test_outputs(drafter, eager_target, arguments):
    """Scores, logits, hidden states, attentions and cache equal plain generate()'s, entry by entry."""
    plain = assert_outputs_equal(eager_target, drafter(), **arguments)
    assert len(plain.scores) == plain.sequences.shape[1] - IDS.shape[1]


@pytest.fixture(scope="module")
def eager_target():
    return load_target("qwen3", attn_implementation="eager")


@pytest.mark.parametrize("name", WANTED)
def test_each_output_alone(eager_target, drafter, name):
    flags = {f"output_{name}": True, "return_dict_in_generate": True, **NEW}
    plain = eager_target.generate(IDS, **flags)
    ours = eager_target.generate(IDS, assistant_model=drafter(), **flags)
    assert ours.keys() == plain.keys()
    assert_tuples_equal(ours[name], plain[name], name)
    assert isinstance(
        eager_target.generate(IDS, assistant_model=drafter(), **{f"output_{name}": True}, **NEW), torch.Tensor
    )


# --------------------------------------------------------------------------------------------------------------- inputs


def first_turn(target, **kwargs):
    """A first turn's text, whose last token is not in the cache yet, and that cache."""
    output = target.generate(IDS, return_dict_in_generate=True, **(NEW | {"max_new_tokens": 12} | kwargs))
    return output.sequences, output[CACHE_NAME]


MORE = torch.tensor([[32, 84, 104, 101]])


def test_second_turn_with_the_whole_text(target, drafter):
    model = target("qwen3")
    text, cache = first_turn(model)
    ids = torch.cat([text, MORE], dim=1)
    plain, _ = same_text(model, drafter(), ids, **{CACHE_NAME: lambda: copy.deepcopy(cache)})
    assert plain.tolist() == model.generate(ids, **NEW).tolist()


def test_second_turn_with_the_new_tokens_only(target, drafter):
    model = target("qwen3")
    text, cache = first_turn(model)
    whole = torch.cat([text, MORE], dim=1)
    ids = torch.cat([text[:, -1:], MORE], dim=1)
    plain, _ = same_text(
        model,
        drafter(),
        ids,
        text=lambda output: torch.cat([text[:, :-1], output], dim=1),
        attention_mask=torch.ones_like(whole),
        **{CACHE_NAME: lambda: copy.deepcopy(cache)},
    )
    assert plain[0, ids.shape[1] :].tolist() == model.generate(whole, **NEW)[0, whole.shape[1] :].tolist()


def test_second_turn_with_embeddings(target, drafter):
    model = target("qwen3")
    text, cache = first_turn(model)
    whole = torch.cat([text, MORE], dim=1)
    plain, _ = same_text(
        model,
        drafter(),
        None,
        text=lambda output: torch.cat([whole, output], dim=1),
        inputs_embeds=model.get_input_embeddings()(whole),
        **{CACHE_NAME: lambda: copy.deepcopy(cache)},
    )
    assert plain[0].tolist() == model.generate(whole, **NEW)[0, whole.shape[1] :].tolist()


def test_chat_over_one_cache(target, drafter):
    """Three turns, each drafted, over a cache of the caller's; it holds what plain turns leave in theirs, and plain
    generate() goes on from it."""
    model, caches = target("qwen3"), []
    for drafted in (False, True):
        cache, ids, texts = DynamicCache(config=model.config), IDS, []
        for _ in range(3):
            more = {"assistant_model": drafter()} if drafted else {}
            ids = model.generate(ids, **{CACHE_NAME: cache}, **more, **(NEW | {"max_new_tokens": 9}))
            texts.append(ids.tolist())
            ids = torch.cat([ids, MORE], dim=1)
        caches.append((texts, cache))
    assert caches[0][0] == caches[1][0]
    assert_caches_equal(caches[1][1], caches[0][1])
    assert caches[1][1].get_seq_length() == ids.shape[1] - MORE.shape[1] - 1
    plain = model.generate(ids, **NEW)
    assert torch.equal(plain, model.generate(ids, **{CACHE_NAME: caches[1][1]}, **NEW))


def test_embeddings_as_prompt(target, drafter):
    model = target("qwen3")
    embeds = model.get_input_embeddings()(IDS)
    prompt = lambda output: torch.cat([IDS, output], dim=1)  # noqa: E731
    plain, _ = same_text(model, drafter(), None, text=prompt, inputs_embeds=embeds)
    assert plain[0].tolist() == model.generate(IDS, **NEW)[0, IDS.shape[1] :].tolist()
    same_text(model, drafter(), None, text=prompt, inputs_embeds=embeds, repetition_penalty=1.4, max_new_tokens=9)
    same_text(model, drafter(), IDS, inputs_embeds=embeds)


@pytest.mark.parametrize("size", [1, 7, 16, 39, 40, 64])
def test_prefill_in_chunks(target, drafter, size):
    same_text(target("qwen3"), drafter(), prefill_chunk_size=size)


@pytest.mark.parametrize("padding", [1, 5])
@pytest.mark.parametrize("more", [{}, {"prefill_chunk_size": 11}, {"return_dict_in_generate": True}], ids=str)
def test_left_padding(target, drafter, padding, more):
    ids = torch.cat([IDS.new_zeros(1, padding), IDS], dim=1)
    mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
    model = target("qwen3")
    plain, _ = same_text(model, drafter(), ids, text=lambda output: output[:, padding:], attention_mask=mask, **more)
    assert sequences(plain)[0, padding:].tolist() == model.generate(IDS, **NEW)[0].tolist()


def test_left_padding_in_a_second_turn(target, drafter):
    model, padding = target("qwen3"), 3
    ids = torch.cat([IDS.new_zeros(1, padding), IDS], dim=1)
    mask = (torch.arange(200) >= padding).long()[None]
    first = model.generate(ids, attention_mask=mask[:, : ids.shape[1]], return_dict_in_generate=True, **NEW)
    whole = torch.cat([first.sequences, MORE], dim=1)
    arguments = {"attention_mask": mask[:, : whole.shape[1]], CACHE_NAME: lambda: copy.deepcopy(first[CACHE_NAME])}
    same_text(model, drafter(), whole, text=lambda output: output[:, padding:], **arguments)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 24])
@pytest.mark.skipif(not HAS_STATIC, reason="static caches under assisted decoding came with transformers 5.24")
def test_static_cache(target, drafter, count):
    """Its room ends with the longest text."""
    arguments = {"cache_implementation": "static", "max_new_tokens": count}
    same_text(target("qwen3"), drafter(), **arguments)
    same_text(
        target("qwen3"),
        drafter(),
        None,
        check_context=False,
        inputs_embeds=target("qwen3").get_input_embeddings()(IDS),
        **arguments,
    )


def test_prompt_of_one_token(target, drafter):
    same_text(target("qwen3"), drafter(), IDS[:, :1])


def test_generation_config_object(target, drafter):
    config = GenerationConfig(max_new_tokens=15, do_sample=False, eos_token_id=[10, 44], repetition_penalty=1.1)
    before = copy.deepcopy(config).to_dict()
    same_text(target("qwen3"), drafter(), generation_config=config, max_new_tokens=None)
    assert config.to_dict() == before


# ---------------------------------------------------------------------------------------------- policies, block lengths


@pytest.mark.parametrize(
    "policy",
    [FixedLength(0), FixedLength(1), FixedLength(3), ConfidenceThreshold(0.3), ConfidenceThreshold(1.0)],
    ids=str,
)
def test_policies(target, drafter, policy):
    model = drafter()
    model.verify_policy = policy
    with record_speculation() as stats:
        same_text(target("qwen3"), model)
    assert max(stats.proposal_lengths) <= (policy.length if isinstance(policy, FixedLength) else 7)


# ------------------------------------------------------------------------------------------- dtypes, adapters, threads


def assert_greedy_up_to_rounding(target, text, start, tolerance=0.05):
    """Half precision rounds differently in a block than alone: each token is the mode, or a near-tie with it."""
    logits = target(text).logits[0, start - 1 : -1].float()
    chosen = logits.gather(-1, text[0, start:, None])[:, 0]
    assert (logits.max(-1).values - chosen <= tolerance * logits.abs().max(-1).values).all()


@pytest.mark.parametrize(
    ("target_dtype", "drafter_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_mixed_dtypes(target_dtype, drafter_dtype):
    target, drafter = load_target("qwen3", dtype=target_dtype), load_drafter(dtype=drafter_dtype)
    if target_dtype == "float32":
        same_text(target, drafter)
    else:
        with record_speculation() as stats:
            text = target.generate(IDS, assistant_model=drafter, **NEW)
        assert_greedy_up_to_rounding(target, text, IDS.shape[1])
        assert stats.acceptance_length > 1.2
    # Sampling too: nothing mixes dtypes.
    target.generate(IDS, assistant_model=drafter, max_new_tokens=8, do_sample=True, top_p=0.9)


@pytest.mark.parametrize("wrapped", ["target", "drafter", "both"])
def test_peft(wrapped):
    peft = pytest.importorskip("peft")
    target, drafter = load_target("qwen3"), load_drafter()
    base = target.generate(IDS, **NEW)
    wrap = lambda model, names: peft.get_peft_model(  # noqa: E731
        model, peft.LoraConfig(target_modules=names, r=4, init_lora_weights=False)
    ).eval()
    generating, assistant = target, drafter
    if wrapped != "drafter":
        generating = wrap(target, ["q_proj", "v_proj", "down_proj"])
    if wrapped != "target":
        assistant = wrap(drafter, ["fc", "q_proj", "v_proj"])
    plain = generating.generate(input_ids=IDS, **NEW)
    with record_speculation() as stats:
        ours = generating.generate(input_ids=IDS, assistant_model=assistant, **NEW)
    assert torch.equal(ours, plain) and stats.acceptance_lengths
    assert torch.equal(plain, base) == (wrapped == "drafter")
    with Rig(drafter, plain) as rig:
        assert torch.equal(generating.generate(input_ids=IDS, assistant_model=assistant, **NEW), plain)
    rig.check_context(generating, plain)


def test_two_threads_share_a_drafter(target, drafter):
    model, assistant = target("qwen3"), drafter()
    alone, together = {}, {}

    def work(i, results):
        with record_speculation() as stats:
            text = model.generate(PROMPTS[i], assistant_model=assistant, max_new_tokens=20 + i, do_sample=False)
        results[i] = (text.tolist(), stats.acceptance_lengths)

    for i in range(3):
        work(i, alone)
    threads = [threading.Thread(target=work, args=(i, together)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_nothing_of_a_call_stays(target, drafter):
    """The run's state is the generator's: a second call is as the first, and neither model has changed."""
    model, assistant = target("qwen3"), drafter()
    before = [set(vars(m)) for m in (model, assistant)], model.generation_config.to_dict()
    texts = [model.generate(IDS, assistant_model=assistant, **NEW).tolist() for _ in range(2)]
    assert texts[0] == texts[1]
    assert before == ([set(vars(m)) for m in (model, assistant)], model.generation_config.to_dict())
