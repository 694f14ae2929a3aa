"""Several rows at once: each decodes as it would alone."""

import pytest
import torch
from generation_helpers import HAS_STATIC, Rig, character_tokenizer, tiny_target
from helpers import load_drafter, load_target
from test_generate_targets import TARGETS, drafter_for
from transformers import LogitsProcessor, StoppingCriteria

from dspark_hf import ConfidenceThreshold, FixedLength, record_speculation
from dspark_hf.target_dspark import CACHE_NAME

TEXTS = ["the cat sat on the mat and ", "a", "once upon a time there was", "the dog and the bird went to the old "]
PAD = 0


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Left-padded inputs."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


PROMPTS = [[ord(c) for c in text] for text in TEXTS]
BATCH = padded(PROMPTS)
WIDTH = BATCH["input_ids"].shape[1]


def alone(target, rows, **kwargs) -> list[list[int]]:
    """What plain `generate()` adds to each prompt by itself."""
    return [target.generate(torch.tensor([row]), **kwargs)[0, len(row) :].tolist() for row in rows]


def unpadded(ids: torch.Tensor, width: int, like: list[list[int]]) -> list[list[int]]:
    """The new tokens of each row, after asserting that what follows them is padding."""
    rows = [row[width:].tolist() for row in ids]
    assert len(rows) == len(like) and ids.shape[1] == width + max(map(len, like))
    assert all(set(row[len(text) :]) <= {PAD} for row, text in zip(rows, like, strict=True))
    return [row[: len(text)] for row, text in zip(rows, like, strict=True)]


class BatchRig(Rig):
    """Each row's blocks start with tokens of its own text, so many of them as chance has it for this row and round."""

    def __init__(self, drafter, prompts: torch.Tensor, texts: list[list[int]], seed: int = 0):
        super().__init__(drafter, None, seed)
        self.prompts, self.texts, self.rounds = prompts, texts, []

    def __enter__(self):
        draft = self.drafter.draft

        def rigged_draft(context, anchor_ids, input_ids=None, cache=None, context_lengths=None, **kwargs):
            counts = torch.full_like(anchor_ids, context.shape[1]) if context_lengths is None else context_lengths
            output = draft(
                context, anchor_ids, input_ids=input_ids, cache=cache, context_lengths=context_lengths, **kwargs
            )
            width = self.prompts.shape[1]
            for i, row in enumerate(input_ids):
                place = next(p for p, prompt in enumerate(self.prompts) if torch.equal(prompt, row[:width]))
                pads = int((self.prompts[place] == PAD).sum())
                done = int(output.cache.lengths[i]) + 1 - (width - pads)  # new tokens so far, the anchor included
                assert anchor_ids[i] == self.texts[place][done - 1] and counts[i] <= context.shape[1]
                known = self.texts[place][done:][: min(self.next_length(), output.token_ids.shape[1])]
                output.token_ids[i, : len(known)] = torch.tensor(known)
            self.rounds.append(len(input_ids))
            return output

        self.drafter.draft = rigged_draft
        return self

    def __exit__(self, *_):
        del self.drafter.draft


def same_rows(target, drafter, rows=PROMPTS, **kwargs):
    """Asserts that each row of a batch gets the tokens it gets alone, without and with rigged blocks. Arguments that
    each run needs anew are given as functions. Returns these tokens, and what the rig saw."""
    anew = {"streamer", "stopping_criteria", "logits_processor"}

    def fresh():
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD} | kwargs
        return {key: value() if key in anew else value for key, value in options.items()}

    wanted = [alone(target, [row], **fresh())[0] for row in rows]
    batch = padded(rows)
    width = batch["input_ids"].shape[1]
    assert unpadded(target.generate(**batch, **fresh(), assistant_model=drafter), width, wanted) == wanted
    with BatchRig(drafter, batch["input_ids"], wanted) as rig, record_speculation() as stats:
        assert unpadded(target.generate(**batch, **fresh(), assistant_model=drafter), width, wanted) == wanted
    return wanted, rig, stats


@pytest.fixture(scope="module")
def target():
    return load_target()


@pytest.fixture
def drafter():
    return load_drafter()


BATCHABLE = sorted(set(TARGETS) - {"llama4"})


@pytest.mark.parametrize("name", BATCHABLE)
def test_target_families(name):
    """Rows of different lengths, far past the sliding window; blocks accepted up to every length."""
    config_class, overrides = TARGETS[name]
    target = tiny_target(config_class, **overrides)
    rows = [[5, 9, 3, 17, 21, 8, 2, 30, 4, 7, 11], [3, 4], [8, 9, 10, 11, 12, 13], [25]]
    texts, _, stats = same_rows(target, drafter_for(target), rows, max_new_tokens=40)
    assert set(stats.accepted_lengths) >= set(range(6)) and len(set(map(tuple, texts))) == 4


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "vanilla_plainconf"])
def test_acceptance_of_a_row_does_not_depend_on_the_batch(target, name):
    drafter = load_drafter(f"qwen3_{name}")
    options = {"max_new_tokens": 32, "do_sample": False, "assistant_model": drafter}
    with record_speculation() as together:
        target.generate(**BATCH, **options)
    for place, row in enumerate(PROMPTS):
        with record_speculation() as single:
            target.generate(torch.tensor([row]), **options)
        for key in ("proposal_lengths", "accepted_lengths", "acceptance_lengths"):
            seen = [n for n, p in zip(getattr(together, key), together.rows, strict=True) if p == place]
            assert seen == getattr(single, key)


def test_gemma4_target():
    target, drafter = load_target("gemma4"), load_drafter("gemma4_vanilla")
    same_rows(target, drafter, max_new_tokens=16)


def test_finished_rows_leave_the_compute(target, drafter):
    texts, rig, _ = same_rows(target, drafter, eos_token_id=[ord("u"), ord("k")])
    assert len({len(text) for text in texts}) > 2
    assert rig.rounds == sorted(rig.rounds, reverse=True) and len(set(rig.rounds)) > 1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_new_tokens(target, drafter, count):
    same_rows(target, drafter, max_new_tokens=count)


@pytest.mark.parametrize("strings", [["e "], ["th", "and"], ["zz"]], ids=str)
def test_stop_strings(target, drafter, strings):
    same_rows(target, drafter, stop_strings=strings, tokenizer=character_tokenizer())


class Sum(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -6:].sum(dim=1) % 7 == 0


def test_custom_criteria(target, drafter):
    texts, _, _ = same_rows(target, drafter, stopping_criteria=lambda: [Sum()])
    assert len({len(text) for text in texts}) > 1


class NoTwice(LogitsProcessor):
    """Looks at the text so far and its length, row by row."""

    def __call__(self, input_ids, scores):
        return scores.scatter_add(1, input_ids[:, -3:], torch.full_like(input_ids[:, -3:], -5, dtype=scores.dtype))


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.3},
    "ngram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"eos_token_id": 32, "min_new_tokens": 9},
    "forced_eos": {"forced_eos_token_id": 63},
    "begin_suppress": {"begin_suppress_tokens": [103, 104, 32]},
    "custom": {"logits_processor": lambda: [NoTwice()]},
    "watermark": {"watermarking_config": {"bias": 4.0, "seeding_scheme": "selfhash"}},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_with_history(target, drafter, name):
    """Against rows alone, where the processors do not see padding; the target's padding is no token of any text."""
    texts, _, _ = same_rows(target, drafter, **PROCESSORS[name])
    assert texts != alone(target, PROMPTS, max_new_tokens=24, do_sample=False)


BY_ROW = {
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [97 + row, 101, 32 + len(ids) % 64]},
    "encoder_repetition": {"encoder_repetition_penalty": 0.5},
    "encoder_ngram": {"encoder_no_repeat_ngram_size": 2},
    "repetition of padding": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("name", BY_ROW)
def test_processors_that_know_their_row(target, drafter, name):
    """Against plain `generate()` of the same batch."""
    options = {"max_new_tokens": 24, "do_sample": False} | BY_ROW[name]
    plain = target.generate(**BATCH, **options)
    assert torch.equal(target.generate(**BATCH, **options, assistant_model=drafter), plain)
    with BatchRig(drafter, BATCH["input_ids"], [row[WIDTH:].tolist() for row in plain]) as rig:
        assert torch.equal(target.generate(**BATCH, **options, assistant_model=drafter), plain)
    assert rig.rounds


@pytest.mark.parametrize("policy", [FixedLength(0), FixedLength(3), ConfidenceThreshold(0.5)], ids=str)
@pytest.mark.parametrize("rows", [PROMPTS, PROMPTS[:2], PROMPTS * 2])
def test_policies(target, drafter, policy, rows):
    drafter.verify_policy = policy
    batch = padded(rows)
    wanted = alone(target, rows, max_new_tokens=16, do_sample=False)
    ids = target.generate(**batch, max_new_tokens=16, do_sample=False, assistant_model=drafter)
    assert unpadded(ids, batch["input_ids"].shape[1], wanted) == wanted


class Steps:
    """A streamer for batches."""

    def __init__(self):
        self.values, self.ended = [], False

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("end", [None, 32])
def test_streamer_sees_what_plain_generate_shows(target, drafter, end):
    seen = []
    for assistant in ({}, {"assistant_model": drafter}):
        streamer = Steps()
        target.generate(**BATCH, max_new_tokens=20, do_sample=False, eos_token_id=end, streamer=streamer, **assistant)
        assert streamer.ended
        seen.append(streamer.values)
    assert seen[0] == seen[1]


def test_outputs(target, drafter):
    """Scores, logits and hidden states are plain `generate()`'s wherever a row has not ended."""
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 32, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True, "output_hidden_states": True, "repetition_penalty": 1.1}
    plain = target.generate(**BATCH, **options)
    output = target.generate(**BATCH, **options, assistant_model=drafter)
    assert torch.equal(plain.sequences, output.sequences)
    assert set(plain) - {CACHE_NAME} == set(output) - {CACHE_NAME}
    lengths = [len(row) for row in alone(target, PROMPTS, max_new_tokens=20, do_sample=False, eos_token_id=32)]
    for name in ("scores", "logits"):
        assert len(plain[name]) == len(output[name])
        for step, (wanted, given) in enumerate(zip(plain[name], output[name], strict=True)):
            for row, length in enumerate(lengths):
                if step < length:
                    torch.testing.assert_close(given[row], wanted[row], rtol=1e-4, atol=1e-4)
                elif length < len(plain[name]):
                    assert not given[row].any()
    assert len(plain.hidden_states) == len(output.hidden_states)
    for step, (wanted, given) in enumerate(zip(plain.hidden_states, output.hidden_states, strict=True)):
        for row, length in enumerate(lengths):
            if step < length:
                real = int(BATCH["attention_mask"][row].sum()) if step == 0 else 1
                for a, b in zip(wanted, given, strict=True):
                    torch.testing.assert_close(b[row, -real:], a[row, -real:], rtol=1e-4, atol=1e-4)


def test_embeddings_as_prompt(target, drafter):
    embeds = target.get_input_embeddings()(BATCH["input_ids"])
    inputs = {"inputs_embeds": embeds, "attention_mask": BATCH["attention_mask"]}
    wanted = alone(target, PROMPTS, max_new_tokens=16, do_sample=False)
    ids = target.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=drafter)
    assert unpadded(ids, 0, wanted) == wanted


PREFILLS = [{"prefill_chunk_size": 5}] + [{"cache_implementation": "static"}] * HAS_STATIC


@pytest.mark.parametrize("more", PREFILLS, ids=str)
def test_prefill(target, drafter, more):
    wanted = alone(target, PROMPTS, max_new_tokens=16, do_sample=False)
    ids = target.generate(**BATCH, **more, max_new_tokens=16, do_sample=False, assistant_model=drafter)
    assert unpadded(ids, WIDTH, wanted) == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_dtypes(drafter, dtype):
    """The masks are made in the target's dtype; every row gets a text that plain decoding could have given."""
    target = load_target(dtype=dtype)
    ids = target.generate(**BATCH, max_new_tokens=8, do_sample=False, assistant_model=drafter)
    assert ids.shape == (4, WIDTH + 8)


def test_return_sequences(target, drafter):
    torch.manual_seed(0)
    options = {"do_sample": True, "num_return_sequences": 6, "max_new_tokens": 12, "temperature": 1.5}
    ids = target.generate(torch.tensor(PROMPTS[:1]), **options, assistant_model=drafter)
    assert ids.shape == (6, len(PROMPTS[0]) + 12) and len({tuple(row) for row in ids.tolist()}) > 1
    one = target.generate(torch.tensor(PROMPTS[:1]), **options | {"top_k": 1}, assistant_model=drafter)
    assert one[:, len(PROMPTS[0]) :].tolist() == alone(target, PROMPTS[:1], max_new_tokens=12, do_sample=False) * 6


REFUSED = {
    "chunked": ("llama4", {}, "has layers \\['chunked_attention'\\], expected full or sliding"),
    "attentions": ("llama", {"output_attentions": True, "return_dict_in_generate": True}, "output_attentions is True"),
    "flex": ("llama", {}, "attn_implementation is 'flex_attention', expected 'sdpa' or 'eager'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_before_any_forward(name):
    kind, options, message = REFUSED[name]
    target = tiny_target(TARGETS[kind][0], **TARGETS[kind][1])
    drafter = drafter_for(target)
    if name == "flex":
        target.config._attn_implementation = "flex_attention"
    target.register_forward_pre_hook(lambda *inputs: pytest.fail("a forward pass"))
    with pytest.raises(ValueError, match=message):
        target.generate(torch.tensor([[3, 4], [5, 6]]), assistant_model=drafter, max_new_tokens=4, **options)
