"""generate() with a drafter and its surroundings: what it returns, what it is given, dtypes, adapters, threads; always
against plain generate()."""

import copy
import threading

import pytest
import torch
from generation_helpers import HAS_STATIC, IDS, NEW, PROMPTS, Rig, character_tokenizer, same_text, sequences
from helpers import load_drafter, load_target
from transformers import DynamicCache, GenerationConfig, pipeline

from dspark_hf import record_speculation
from dspark_hf.target_dspark import CACHE_NAME

static = pytest.mark.skipif(not HAS_STATIC, reason="static caches in assisted decoding came with transformers 5.24")


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


def assert_outputs_equal(target, drafter, ids=IDS, **kwargs):
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
        pytest.param({"cache_implementation": "static"}, marks=static),
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
    plain = same_text(model, drafter(), ids, **{CACHE_NAME: lambda: copy.deepcopy(cache)})
    assert plain.tolist() == model.generate(ids, **NEW).tolist()


def test_second_turn_with_the_new_tokens_only(target, drafter):
    model = target("qwen3")
    text, cache = first_turn(model)
    whole = torch.cat([text, MORE], dim=1)
    ids = torch.cat([text[:, -1:], MORE], dim=1)
    plain = same_text(
        model,
        drafter(),
        ids,
        context_text=lambda output: torch.cat([text[:, :-1], output], dim=1),
        attention_mask=torch.ones_like(whole),
        **{CACHE_NAME: lambda: copy.deepcopy(cache)},
    )
    assert plain[0, ids.shape[1] :].tolist() == model.generate(whole, **NEW)[0, whole.shape[1] :].tolist()


def test_second_turn_with_embeddings(target, drafter):
    model = target("qwen3")
    text, cache = first_turn(model)
    whole = torch.cat([text, MORE], dim=1)
    plain = same_text(
        model,
        drafter(),
        None,
        context_text=lambda output: torch.cat([whole, output], dim=1),
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
    plain = same_text(model, drafter(), None, context_text=prompt, inputs_embeds=embeds)
    assert plain[0].tolist() == model.generate(IDS, **NEW)[0, IDS.shape[1] :].tolist()
    same_text(
        model, drafter(), None, context_text=prompt, inputs_embeds=embeds, repetition_penalty=1.4, max_new_tokens=9
    )
    same_text(model, drafter(), IDS, inputs_embeds=embeds)


@pytest.mark.parametrize("size", [1, 16, 39, 40, 64])
def test_prefill_in_chunks(target, drafter, size):
    same_text(target("qwen3"), drafter(), prefill_chunk_size=size)


@pytest.mark.parametrize("padding", [1, 5])
@pytest.mark.parametrize("more", [{}, {"prefill_chunk_size": 11}, {"return_dict_in_generate": True}], ids=str)
def test_left_padding(target, drafter, padding, more):
    ids = torch.cat([IDS.new_zeros(1, padding), IDS], dim=1)
    mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
    model = target("qwen3")
    plain = same_text(
        model, drafter(), ids, context_text=lambda output: output[:, padding:], attention_mask=mask, **more
    )
    assert sequences(plain)[0, padding:].tolist() == model.generate(IDS, **NEW)[0].tolist()


def test_left_padding_in_a_second_turn(target, drafter):
    model, padding = target("qwen3"), 3
    ids = torch.cat([IDS.new_zeros(1, padding), IDS], dim=1)
    mask = (torch.arange(200) >= padding).long()[None]
    first = model.generate(ids, attention_mask=mask[:, : ids.shape[1]], return_dict_in_generate=True, **NEW)
    whole = torch.cat([first.sequences, MORE], dim=1)
    arguments = {"attention_mask": mask[:, : whole.shape[1]], CACHE_NAME: lambda: copy.deepcopy(first[CACHE_NAME])}
    same_text(model, drafter(), whole, context_text=lambda output: output[:, padding:], **arguments)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
@static
def test_static_cache(target, drafter, count):
    """Its room ends with the longest text."""
    model, arguments = target("qwen3"), {"cache_implementation": "static", "max_new_tokens": count}
    same_text(model, drafter(), **arguments)
    embeds = model.get_input_embeddings()(IDS)
    prompt = lambda output: torch.cat([IDS, output], dim=1)  # noqa: E731
    same_text(model, drafter(), None, context_text=prompt, inputs_embeds=embeds, **arguments)


def test_prompt_of_one_token(target, drafter):
    same_text(target("qwen3"), drafter(), IDS[:, :1])


def test_pipeline(target, drafter):
    model, tokenizer = target("qwen3"), character_tokenizer()
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)("He bought ", **NEW)
    with record_speculation() as stats:
        drafted = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=drafter())
        assert drafted("He bought ", **NEW) == plain
    assert stats.acceptance_length > 1


def test_prompts_of_other_types(target, drafter):
    """int32 ids; none at all, where generate() starts with the beginning-of-text token."""
    same_text(target("qwen3"), drafter(), IDS.int())
    plain = same_text(target("qwen3"), drafter(), None)
    assert plain[0, 0] == 0 and plain.shape[1] > 2


def test_generation_config_object(target, drafter):
    config = GenerationConfig(max_new_tokens=15, do_sample=False, eos_token_id=[10, 44], repetition_penalty=1.1)
    before = copy.deepcopy(config).to_dict()
    same_text(target("qwen3"), drafter(), generation_config=config, max_new_tokens=None)
    assert config.to_dict() == before


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
