"""generate() with a drafter says what plain generate() says, token for token in float32: what shapes and ends a text.

Each case runs plain, with a trained drafter, and with that drafter's blocks rigged to be right up to a random slot
(`generation_helpers.same_text`).
"""

import threading

import pytest
import torch
from generation_helpers import HAS_STATIC, IDS, NEW, TRACES, character_tokenizer, same_text
from helpers import QWEN3, expected_greedy
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from dspark_hf import ConfidenceThreshold, FixedLength, record_speculation

START, COUNT = IDS.shape[1], NEW["max_new_tokens"]


# ------------------------------------------------------------------------------------------------------ recorded traces


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in QWEN3 for key in expected_greedy(name)])
def test_greedy_traces(target, drafter, name, key):
    """Output ids, accepted and proposed lengths of the official implementation. It runs one further round when the text
    is already full. The first prompt to its end, the others as far as time allows."""
    traces, model = expected_greedy(name)[key], drafter(name)
    model.verify_policy = {"threshold_0.0": FixedLength(), "threshold_0.5": ConfidenceThreshold(0.5)}[key]
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
    "min_length": {"eos_token_id": 32, "min_length": 50},
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
    plain = same_text(target("qwen3"), drafter(), **SHAPING[name])
    assert plain[0].tolist() != TRACES[0]["output_ids"][: plain.shape[1]]


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
    plain = same_text(target("qwen3"), drafter(), logits_processor=lambda: list(processors))
    assert plain[0].tolist() != TRACES[0]["output_ids"][: plain.shape[1]]


def test_processors_never_see_what_plain_generate_would_not_show(target, drafter):
    """Neither a text that has ended nor one beyond the maximum length, which many cannot take: a plan of tokens by
    position runs out, a constraint has no successor for its last word."""
    text = [104, 101, 32, 99, 97, 116, 10]

    def allowed(row, ids):
        """The text above, where the second word may also be "dog"."""
        so_far = ids[START:].tolist()
        if so_far[:3] == [104, 101, 32] and so_far[3:4] == [100]:
            return [[111], [103], [10]][len(so_far) - 4]
        assert so_far == text[: len(so_far)]
        return [99, 100] if len(so_far) == 3 else [text[len(so_far)]]

    plain = same_text(target("qwen3"), drafter(), prefix_allowed_tokens_fn=allowed)
    assert plain[0, -1] == 10 and plain.shape[1] < START + COUNT

    class Plan(LogitsProcessor):
        plan = torch.randint(32, 127, (START + 11,))

        def __call__(self, input_ids, scores):
            scores[:, self.plan[input_ids.shape[1]]] += 4.0
            return scores

    same_text(target("qwen3"), drafter(), logits_processor=lambda: [Plan()], max_new_tokens=11)


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafts_are_processed_as_the_target_is(target, drafter, do_sample):
    """Where the processors leave little choice, drafts hit: they see the same ones, behind the same prefix."""
    plan = torch.randint(32, 127, (200,))
    arguments = {"prefix_allowed_tokens_fn": lambda row, ids: [plan[len(ids)].item()], "do_sample": do_sample}
    with record_speculation() as stats:
        text = target("qwen3").generate(IDS, assistant_model=drafter(), **(NEW | arguments))
    assert text[0, START:].tolist() == plan[START : START + COUNT].tolist()
    assert stats.acceptance_lengths[:-1] == [8] * (len(stats.acceptance_lengths) - 1)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_sampling_from_one_token_is_greedy(target, drafter, temperature):
    """The sampling path, in the case whose outcome is known."""
    plain = same_text(target("qwen3"), drafter(), do_sample=True, top_k=1, temperature=temperature)
    assert plain[0].tolist() == TRACES[0]["output_ids"][: plain.shape[1]]


# --------------------------------------------------------------------------------------------------- what ends the text


@pytest.mark.parametrize("count", range(1, 10))
def test_max_new_tokens(target, drafter, count):
    plain = same_text(target("qwen3"), drafter(), max_new_tokens=count, eos_token_id=None)
    assert plain.shape[1] == START + count


@pytest.mark.parametrize("arguments", [{"max_length": 50}, {"max_length": 41}, {"max_length": 90}])
def test_max_length(target, drafter, arguments):
    same_text(target("qwen3"), drafter(), max_new_tokens=None, **arguments)


def test_end_token_at_every_place(target, drafter):
    """Each token of the plain text in turn is an end token, alone and in a set."""
    tokens = list(dict.fromkeys(TRACES[0]["output_ids"][START : START + COUNT]))
    lengths = set()
    for token in tokens:
        plain = same_text(target("qwen3"), drafter(), eos_token_id=[token, 3, 10])
        lengths.add(plain.shape[1])
        assert plain[0, -1] == token or plain.shape[1] == START + COUNT
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
    plain = same_text(target("qwen3"), drafter(), stop_strings=strings, tokenizer=character_tokenizer())
    text = character_tokenizer().decode(plain[0, START:])
    assert plain.shape[1] < START + COUNT and text.endswith(tuple(strings))


class Recorder(StoppingCriteria):
    """Ends the text when `ends(text, scores)`; notes every call."""

    def __init__(self, ends):
        self.ends, self.calls = ends, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), None if scores is None else [s.argmax().item() for s in scores]))
        return torch.full((len(input_ids),), self.ends(input_ids, scores), device=input_ids.device)


ENDS = {
    "never": lambda text, scores: False,
    "length": lambda text, scores: text.shape[1] == START + 7,
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
    assert len(recorders) == 3
    assert all(recorder.calls == recorders[0].calls for recorder in recorders)
    if name != "never" and (with_scores or name != "scores"):
        assert len(recorders[0].calls) < COUNT


def test_max_time(target, drafter, monkeypatch):
    """A clock that ticks when it is looked at, as both look once per token."""
    from transformers.generation import stopping_criteria

    class Clock:
        now = 0.0

        def time(self):
            self.now += 1.0
            return self.now

    monkeypatch.setattr(stopping_criteria, "time", Clock())
    plain = same_text(target("qwen3"), drafter(), max_time=9.5)
    assert plain.shape[1] == START + 10


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

    plain = same_text(target("qwen3"), drafter(), streamer=fresh, tokenizer=character_tokenizer(), **arguments)
    assert len(tapes) == 3 and all(tape.calls == tapes[0].calls for tape in tapes)
    assert len(tapes[0].calls) == plain.shape[1] - START + 2


@pytest.mark.skipif(not HAS_STATIC, reason="before transformers 5.24 a token is streamed before criteria are asked")
def test_a_criterion_may_look_at_the_streamer(target, drafter):
    """A reader's "enough" takes effect at the same token: criteria and streamer are called in turn, as in plain."""
    tapes = []

    def fresh_streamer():
        tapes.append(Tape())
        return tapes[-1]

    enough = Recorder(lambda text, scores: len(tapes[-1].calls) == 8)
    arguments = {"streamer": fresh_streamer, "stopping_criteria": lambda: StoppingCriteriaList([enough])}
    plain = same_text(target("qwen3"), drafter(), **arguments)
    assert plain.shape[1] == START + 8


def test_text_streamers(target, drafter, capsys):
    tokenizer = character_tokenizer()
    same_text(target("qwen3"), drafter(), streamer=lambda: TextStreamer(tokenizer, skip_prompt=True))
    printed = capsys.readouterr().out
    assert len(printed) == 3 * (COUNT + 1) and printed == printed[: COUNT + 1] * 3

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {"assistant_model": drafter(), "streamer": streamer, **NEW}
    with record_speculation() as stats:
        thread = threading.Thread(target=target("qwen3").generate, args=(IDS,), kwargs=arguments)
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text + "\n" == printed[: COUNT + 1]
    assert stats.acceptance_length > 1


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
