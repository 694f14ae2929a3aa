"""The drafter model: loading and saving, drafting in all its forms, attention implementations, reduced vocabularies."""

import copy
import json
import pickle

import pytest
import torch
from helpers import (
    DRAFTERS,
    FIXTURES,
    VOCABULARY,
    expected,
    gradients,
    load_drafter,
    load_target,
    restricted,
    training_batch,
)
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from dspark_hf import DSparkDrafterModel, DSparkDraftOutput

LENT = {"embed_tokens.weight", "lm_head.weight"}


def first_round(name: str = "qwen3_vanilla") -> dict[str, torch.Tensor]:
    """The recorded first round: 50 tokens of context, as arguments of `draft()`."""
    recorded = expected(name, "draft0.")
    return {"context_hidden_states": recorded["context_hidden"], "anchor_ids": recorded["anchor_id"]}


def checkpoint(folder, name: str = "qwen3_vanilla", drop=(), add=()):
    """A copy of an official checkpoint with tensors dropped and added."""
    tensors = load_file(FIXTURES / f"drafter_{name}" / "model.safetensors")
    tensors = {key: value for key, value in tensors.items() if key not in drop} | {key: torch.ones(2) for key in add}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((FIXTURES / f"drafter_{name}" / "config.json").read_text())
    return folder


def assert_same_draft(actual, wanted, atol=1e-5):
    assert torch.equal(actual.token_ids, wanted.token_ids)
    assert actual.keys() == wanted.keys()
    for key in wanted.keys() - {"token_ids", "cache"}:
        torch.testing.assert_close(actual[key], wanted[key], rtol=0, atol=atol, msg=lambda text, key=key: key + text)


def row_of(draft: DSparkDraftOutput, row: int) -> DSparkDraftOutput:
    parts = {key: value[row, None] for key, value in draft.items() if key != "cache"}
    return DSparkDraftOutput(**parts, cache=draft.cache)


# ------------------------------------------------------------------------------------------------- loading and saving


@pytest.mark.parametrize("name", DRAFTERS)
def test_saved_and_loaded_again(tmp_path, drafter, name):
    model = drafter(name)
    model.save_pretrained(tmp_path)
    again = DSparkDrafterModel.from_pretrained(tmp_path).eval()
    assert (tmp_path / "model.safetensors").exists()
    assert again.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict() | {"_name_or_path": ""}
    state, wanted = again.state_dict(), model.state_dict()
    assert state.keys() == wanted.keys() and all(torch.equal(state[key], wanted[key]) for key in wanted)
    assert_same_draft(again.draft(**first_round(name)), model.draft(**first_round(name)))


@pytest.mark.parametrize("drop", [LENT, {"embed_tokens.weight"}, {"lm_head.weight"}])
@pytest.mark.parametrize("name", ["qwen3_rnn", "gemma4_vanilla"])
def test_target_lends_what_the_checkpoint_lacks(tmp_path, drafter, target, name, drop):
    lender = target(name.split("_")[0])
    model = DSparkDrafterModel.from_pretrained(checkpoint(tmp_path, name, drop)).eval()
    own = {key for key, _ in model.named_parameters()}
    assert not own & drop and own | drop == {key for key, _ in drafter(name).named_parameters()}
    with pytest.raises(ValueError, match=r"no embedding or head of its own .*pass target="):
        model.draft(**first_round(name))
    with pytest.raises(ValueError, match=r"no embedding or head of its own .*attach_target"):
        model(**training_batch(name))
    assert_same_draft(model.draft(**first_round(name), target=lender), drafter(name).draft(**first_round(name)))

    assert model.attach_target(lender) is model
    assert_same_draft(model.draft(**first_round(name)), drafter(name).draft(**first_round(name)))
    own_gradients, wanted = gradients(model, **training_batch(name)), gradients(drafter(name), **training_batch(name))
    assert wanted.keys() - own_gradients.keys() == drop
    for key, gradient in own_gradients.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=0, atol=1e-5)

    model.save_pretrained(tmp_path / "saved")
    assert not drop & load_file(tmp_path / "saved" / "model.safetensors").keys()
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["has_embed_tokens"], config["has_lm_head"]) == tuple(key not in drop for key in sorted(LENT))


def test_the_lent_modules_are_no_copies(tmp_path):
    lender = load_target()
    model = DSparkDrafterModel.from_pretrained(checkpoint(tmp_path, drop=LENT)).eval().attach_target(lender)
    assert all(parameter is not lent for parameter in model.parameters() for lent in lender.parameters())
    before = model.draft(**first_round()).base_logits
    lender.get_output_embeddings().weight.mul_(2.0)
    torch.testing.assert_close(model.draft(**first_round()).base_logits, 2.0 * before)
    lender.get_input_embeddings().weight.zero_()
    assert not torch.allclose(model.draft(**first_round()).base_logits, 2.0 * before, atol=0.1)


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        ({"fc.weight"}, (), r"missing tensors \['fc.weight'\], unknown tensors \[\]"),
        (
            {"confidence_head.proj.bias", "layers.1.mlp.up_proj.weight"},
            (),
            r"missing .*proj.bias', 'layers.1.mlp.up_proj",
        ),
        ((), ("markov_head.gate_proj.weight",), r"unknown tensors \['markov_head.gate_proj.weight'\]"),
        (LENT | {"norm.weight"}, ("d2t",), r"missing tensors \['norm.weight'\], unknown tensors \['d2t'\]"),
    ],
)
def test_missing_and_unknown_tensors_are_refused(tmp_path, drop, add, message):
    with pytest.raises(ValueError, match=message):
        DSparkDrafterModel.from_pretrained(checkpoint(tmp_path, drop=drop, add=add))


@pytest.mark.parametrize("options", [{"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {"low_cpu_mem_usage": True}])
def test_ways_of_loading(drafter, options):
    assert_same_draft(load_drafter(**options).draft(**first_round()), drafter().draft(**first_round()))


def test_built_on_meta(drafter):
    with torch.device("meta"):
        model = DSparkDrafterModel(drafter().config).eval()
    model.to_empty(device="cpu").load_state_dict(drafter().state_dict())
    assert_same_draft(model.draft(**first_round()), drafter().draft(**first_round()))


def test_copies_and_pickles_leave_the_target_out(tmp_path, target, drafter):
    model = DSparkDrafterModel.from_pretrained(checkpoint(tmp_path, drop=LENT)).eval().attach_target(target())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="attach_target"):
            twin.draft(**first_round())
        assert_same_draft(twin.draft(**first_round(), target=target()), drafter().draft(**first_round()))
    assert_same_draft(model.draft(**first_round()), drafter().draft(**first_round()))  # still attached


@pytest.mark.parametrize("name", ["qwen3_vanilla", "gemma4_vanilla"])
def test_rope_frequencies_stay_float32(name):
    model = load_drafter(name)
    positions = torch.tensor([[4096]])
    wanted = model.rotary_emb(positions, torch.float32)
    for cast in (model.to(torch.bfloat16), load_drafter(name, dtype=torch.bfloat16)):
        assert cast.fc.weight.dtype == torch.bfloat16
        for actual, exact in zip(cast.rotary_emb(positions, torch.float32), wanted, strict=True):
            torch.testing.assert_close(actual, exact, rtol=0, atol=0)


# ----------------------------------------------------------------------------------------- attention implementations


def uncompiled_flex(query, key, value, training=False, **kwargs):
    return torch.nn.attention.flex_attention.flex_attention(query, key, value, **kwargs)


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
@pytest.mark.parametrize("name", ["qwen3_vanilla", "gemma4_vanilla"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_implementations_agree(monkeypatch, drafter, name, implementation):
    # Compiling flex attention takes half a minute on a CPU; uncompiled it takes the same mask.
    monkeypatch.setattr("transformers.integrations.flex_attention.compile_friendly_flex_attention", uncompiled_flex)
    model = load_drafter(name, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation and drafter(name).config._attn_implementation == "sdpa"
    ragged = {"context_hidden_states": first_round(name)["context_hidden_states"].expand(3, -1, -1),
              "anchor_ids": torch.tensor([40, 50, 60]), "context_lengths": torch.tensor([50, 20, 3])}  # fmt: skip
    for arguments in (first_round(name), ragged):
        assert_same_draft(model.draft(**arguments), drafter(name).draft(**arguments))
    real = training_batch(name)["anchor_mask"]
    with torch.no_grad():
        actual, wanted = (m(**training_batch(name), output_logits=True) for m in (model, drafter(name)))
    torch.testing.assert_close(actual.logits[real], wanted.logits[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(actual.loss, wanted.loss)
    if implementation == "eager":  # flex attention has no backward on a CPU
        actual, wanted = (gradients(m, **training_batch(name)) for m in (model, drafter(name)))
        for key in wanted:
            torch.testing.assert_close(actual[key], wanted[key], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(drafter, use_reentrant):
    wanted = gradients(drafter(), **training_batch())
    model = load_drafter().train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    calls = []
    model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    actual = gradients(model, **training_batch())
    assert len(calls) == 2  # once more in the backward
    assert actual.keys() == wanted.keys()
    for key in wanted:
        torch.testing.assert_close(actual[key], wanted[key])


# ----------------------------------------------------------------------------------------------------------- drafting


@pytest.mark.parametrize("name", ["qwen3_rnn", "qwen3_dflash"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_fewer_tokens_are_a_prefix(drafter, name, do_sample):
    def draft(**options):
        torch.manual_seed(1)
        return drafter(name).draft(**first_round(name), do_sample=do_sample, **options)

    whole = draft()
    assert whole.token_ids.shape == (1, 7)
    for count in (0, 1, 4, 7):
        part = draft(num_tokens=count)
        assert torch.equal(part.token_ids, whole.token_ids[:, :count]) and part.token_ids.dtype == torch.long
        assert torch.equal(part.logits, whole.logits[:, :count]) and part.logits.shape == (1, count, 128)
        assert part.hidden_states.shape == (1, 7, 64)
        if whole.confidence_logits is not None:
            assert torch.equal(part.confidence_logits, whole.confidence_logits[:, :count])


@pytest.mark.parametrize("name", ["qwen3_vanilla", "qwen3_gated", "qwen3_rnn", "gemma4_vanilla"])
def test_confidence_of_an_anchor(drafter, name):
    """What it leaves of the first logit is the share of the block's state."""
    model, inputs = drafter(name), first_round(name)
    draft = model.draft(**inputs)
    weight = model.confidence_head.proj.weight[0, : model.config.hidden_size]
    added = draft.confidence_logits[:, 0] - model.anchor_confidence_logits(inputs["anchor_ids"])
    torch.testing.assert_close(added, draft.hidden_states[:, 0] @ weight, rtol=0, atol=1e-5)
    assert added.abs() > 1e-3


@pytest.mark.parametrize("name", ["qwen3_vanilla_plainconf", "qwen3_dflash"])
def test_no_confidence_of_an_anchor(drafter, name):
    """Where the head does not read the token before, or there is none."""
    assert drafter(name).anchor_confidence_logits(torch.tensor([1])) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 8}, r"num_tokens is 8, expected 0\.\.7 \(block_size\)"),
        ({"num_tokens": -1}, r"num_tokens is -1, expected 0\.\.7"),
        (
            {"context_hidden_states": torch.zeros(1, 5, 64)},
            r"shape \(1, 5, 64\), expected \(B, n, 192\): 3 layers of 64",
        ),
        ({"context_hidden_states": torch.zeros(5, 192)}, r"shape \(5, 192\), expected \(B, n, 192\)"),
        ({"anchor_ids": torch.zeros(2, dtype=torch.long)}, r"anchor_ids has shape \(2,\), expected \(1,\)"),
        ({"logits_processor": LogitsProcessorList([TopKLogitsWarper(2)])}, r"without input_ids"),
    ],
)
def test_refused_drafts(drafter, change, message):
    with pytest.raises(ValueError, match=message):
        drafter().draft(**first_round() | change)


def test_refused_cache(drafter):
    cache = drafter().draft(**first_round()).cache
    with pytest.raises(ValueError, match="cache holds 1 rows, expected 2"):
        drafter().draft(torch.zeros(2, 1, 192), torch.tensor([1, 2]), cache=cache)


@pytest.mark.parametrize("name", ["qwen3_rnn", "gemma4_vanilla"])
def test_rows_of_different_lengths_are_rows_alone(drafter, name):
    model, generator = drafter(name), torch.Generator().manual_seed(3)
    lengths = [[50, 5, 40], [4, 1, 30], [1, 8, 3]]  # of three rounds; the second outgrows the first buffer
    anchors = torch.randint(128, (3, 3), generator=generator)
    states = [torch.randn(3, max(counts), 192, generator=generator) for counts in lengths]
    together, alone = None, [None] * 3
    for context, anchor, counts in zip(states, anchors, lengths, strict=True):
        draft = model.draft(context, anchor, cache=together, context_lengths=torch.tensor(counts))
        together = draft.cache
        for row, count in enumerate(counts):
            # A row alone, with what is padding beside the others left out or, in the middle row, left to its length.
            cut, length = (
                (context[row, None, :count], None) if row != 1 else (context[row, None], torch.tensor([count]))
            )
            single = model.draft(cut, anchor[row, None], cache=alone[row], context_lengths=length)
            alone[row] = single.cache
            assert_same_draft(row_of(draft, row), single)


def test_no_new_context(drafter):
    first = drafter().draft(**first_round())
    again = drafter().draft(torch.zeros(1, 0, 192), first_round()["anchor_ids"], cache=first.cache)
    assert_same_draft(again, first)


def test_a_cache_that_starts_later_only_shifts_the_positions(drafter):
    """RoPE is relative, so the same rows at positions 1000.. give the same draft; other distances do not."""
    model, wanted = drafter(), drafter().draft(**first_round())
    torch.testing.assert_close(
        model.draft(**first_round(), cache=model.new_cache(1000)).logits, wanted.logits, atol=1e-3, rtol=0
    )
    cache = model.draft(**first_round(), num_tokens=0).cache
    cache.start = 7  # the rows keep their rotation, the anchor moves away
    moved = model.draft(torch.zeros(1, 0, 192), first_round()["anchor_ids"], cache=cache)
    assert (moved.logits - wanted.logits).abs().max() > 0.05


def test_a_block_sees_its_context_and_all_of_itself(drafter):
    """Hidden states change with the first and last context row; h_1 changes with the mask token of later slots."""
    model, arguments = load_drafter(), first_round()
    wanted = drafter().draft(**arguments).hidden_states
    for row in (0, 49):
        context = arguments["context_hidden_states"].clone()
        context[:, row] += 1.0
        assert (model.draft(context, arguments["anchor_ids"]).hidden_states - wanted).abs().amax(-1).min() > 1e-4
    with torch.no_grad():
        model.embed_tokens.weight[model.config.mask_token_id] += 1.0
    assert (model.draft(**arguments).hidden_states - wanted)[0, 0].abs().max() > 1e-4


# ----------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("name", ["qwen3_rnn", "gemma4_vanilla"])
def test_logits_are_what_tokens_were_drawn_from(drafter, name):
    """Counts of 6,000 draws against the sum of the distributions reported for them, by slot."""
    rows, arguments = 6000, first_round(name)
    processors = LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(12)])
    draft = drafter(name).draft(
        arguments["context_hidden_states"][:, :4].expand(rows, -1, -1),
        arguments["anchor_ids"].expand(rows),
        num_tokens=3,
        do_sample=True,
        logits_processor=processors,
        input_ids=arguments["anchor_ids"].expand(rows)[:, None],
    )
    assert draft.logits.dtype == torch.float32
    assert (draft.logits.isfinite().sum(-1) == 12).all()
    for k in range(3):
        counts = draft.token_ids[:, k].bincount(minlength=128).double()
        wanted = draft.logits[:, k].double().softmax(-1).sum(0)
        assert not counts[wanted == 0].any()
        likely = wanted > 10
        counts, wanted = (torch.cat([x[likely], x[~likely].sum()[None]]) for x in (counts, wanted))
        keep = wanted > 0
        assert likely.sum() > 5
        assert chisquare(counts[keep], wanted[keep] * counts.sum() / wanted.sum()).pvalue > 1e-3


@pytest.mark.parametrize("name", ["qwen3_vanilla", "qwen3_dflash"])
def test_processors_see_the_text_before_each_token(drafter, name):
    seen = []

    def processor(prefix, logits):
        seen.append(prefix.clone())
        logits[:, : len(seen)] = 50.0  # in place, as some do; forces token 0
        return logits

    text = torch.arange(51)[None]
    draft = drafter(name).draft(**first_round(name), logits_processor=processor, input_ids=text)
    torch.testing.assert_close(draft.base_logits, drafter(name).draft(**first_round(name)).base_logits)
    assert draft.token_ids.tolist() == [[0] * 7]
    for k, prefix in enumerate(seen):
        assert torch.equal(prefix, torch.cat([text, draft.token_ids[:, :k]], dim=1))
        assert (draft.logits[0, k, : k + 1] == 50.0).all()


@pytest.mark.parametrize("cut", [0, 2, 6])
def test_stop_cuts_before_drawing(drafter, cut):
    def draft(**options):
        torch.manual_seed(2)
        return drafter().draft(**first_round(), do_sample=True, **options), torch.get_rng_state()

    seen = []

    def stop(confidence):
        seen.append(confidence)
        return len(seen) > cut

    (short, state), (wanted, wanted_state), (whole, _) = draft(stop=stop), draft(num_tokens=cut), draft()
    assert torch.equal(short.token_ids, wanted.token_ids) and torch.equal(state, wanted_state)
    for k, confidences in enumerate(seen):  # of all tokens up to the one being decided
        assert torch.equal(confidences, whole.confidence_logits[:, : k + 1])
    assert len(seen) == cut + 1
    assert short.confidence_logits.shape == (1, cut)
    assert (short.base_logits is None) == (cut == 0)  # the head, a large part of a small drafter, is spared then


def test_bfloat16_drafter_on_a_float32_target(tmp_path, target, drafter):
    model = DSparkDrafterModel.from_pretrained(checkpoint(tmp_path, drop=LENT), dtype=torch.bfloat16).eval()
    draft, wanted = model.draft(**first_round(), target=target()), drafter().draft(**first_round())
    assert (draft.logits.dtype, draft.confidence_logits.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(draft.logits, wanted.logits, rtol=0.05, atol=0.3)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_a_lora_wrapped_drafter_drafts_and_learns(drafter):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(load_drafter(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "fc"])).eval()
    assert_same_draft(model.draft(**first_round()), drafter().draft(**first_round()))
    trained = gradients(model, **training_batch())
    assert trained and all("lora_" in key for key in trained)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_()
    assert (model.draft(**first_round()).logits - drafter().draft(**first_round()).logits).abs().max() > 0.1


# ------------------------------------------------------------------------------------------------ reduced vocabularies


@pytest.mark.parametrize("own_head", [True, False])
def test_a_reduced_vocabulary_restricts_the_logits(tmp_path, drafter, target, own_head):
    model = restricted(drafter(), own_head)
    assert torch.equal(model.t2d.nonzero()[:, 0], VOCABULARY)
    model.save_pretrained(tmp_path)
    lender = None if own_head else target()
    outside = torch.ones(128, dtype=torch.bool).index_fill(0, VOCABULARY, False)
    draft, wanted = model.draft(**first_round(), target=lender), drafter().draft(**first_round())
    again = DSparkDrafterModel.from_pretrained(tmp_path).eval().draft(**first_round(), target=lender)
    assert_same_draft(again, draft)
    torch.testing.assert_close(draft.hidden_states, wanted.hidden_states)
    for key in ("logits", "base_logits"):
        assert draft[key].shape == (1, 7, 128) and (draft[key][..., outside] == float("-inf")).all()
    torch.testing.assert_close(draft.base_logits[..., ~outside], wanted.base_logits[..., ~outside])
    # A token's logits depend on the one before, so only the first slot, and those after equal tokens, can be compared.
    assert draft.token_ids[0, 0] == wanted.logits[0, 0].masked_fill(outside, float("-inf")).argmax()
    same = torch.cat([torch.tensor([True]), (draft.token_ids == wanted.token_ids)[0, :-1].cumprod(0).bool()])
    torch.testing.assert_close(draft.logits[0, same][:, ~outside], wanted.logits[0, same][:, ~outside])


def test_rows_of_the_targets_head_follow_head_dtype_and_vocabulary(drafter):
    model, lender = restricted(drafter(), own_head=False), load_target()
    head = lender.get_output_embeddings()
    states = torch.randn(5, 64)
    torch.testing.assert_close(model.base_logits(states, lender), head(states)[:, VOCABULARY])

    other = load_target()
    other.get_output_embeddings().bias = torch.nn.Parameter(torch.randn(128))
    torch.testing.assert_close(model.base_logits(states, other), other.get_output_embeddings()(states)[:, VOCABULARY])

    model.to(torch.bfloat16)
    rows = model.base_logits(states.bfloat16(), other)
    assert rows.dtype == torch.bfloat16
    torch.testing.assert_close(rows.float(), other.get_output_embeddings()(states)[:, VOCABULARY], rtol=0.02, atol=0.05)

    torch.testing.assert_close(model.float().base_logits(states, lender), head(states)[:, VOCABULARY])
    model.set_draft_vocabulary(torch.arange(len(VOCABULARY)))
    torch.testing.assert_close(model.base_logits(states, lender), head(states)[:, : len(VOCABULARY)])


def test_rows_taken_in_inference_mode_serve_training(drafter, target):
    model = restricted(drafter(), own_head=False)
    with torch.inference_mode():
        model.draft(**first_round(), target=target())
    assert gradients(model.attach_target(target()), **training_batch())


@pytest.mark.parametrize("do_sample", [False, True])
def test_processors_that_allow_only_tokens_outside(drafter, do_sample):
    """Every allowed token is as good as another, and the reported distribution says so."""
    outside = [1, 2, 127]

    def processor(prefix, logits):
        allowed = torch.full_like(logits, float("-inf"))
        allowed[:, outside] = logits[:, outside]
        return allowed

    arguments = {key: value.expand(2, *value.shape[1:]) for key, value in first_round().items()}
    draft = restricted(drafter(), own_head=True).draft(
        **arguments, do_sample=do_sample, logits_processor=processor, input_ids=torch.ones(2, 51, dtype=torch.long)
    )
    assert set(draft.token_ids.flatten().tolist()) <= set(outside)
    assert torch.equal(draft.logits.softmax(-1).nonzero()[:, -1].unique(), torch.tensor(outside))
    torch.testing.assert_close(draft.logits.softmax(-1)[..., outside], torch.full((2, 7, 3), 1 / 3))


def test_processors_that_allow_some_draftable_tokens_keep_their_odds(drafter):
    def processor(prefix, logits):
        allowed = torch.full_like(logits, float("-inf"))
        allowed[:, [1, 32, 7]] = logits[:, [1, 32, 7]]
        return allowed

    model = restricted(drafter(), own_head=True)
    free = model.draft(**first_round(), num_tokens=1)
    draft = model.draft(**first_round(), num_tokens=1, logits_processor=processor, input_ids=torch.ones(1, 51).long())
    torch.testing.assert_close(draft.logits[..., [32, 7]], free.logits[..., [32, 7]])
    assert draft.logits[0, 0, 1] == float("-inf")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (VOCABULARY[1:], r"45 token ids were given, expected 46 \(draft_vocab_size\)"),
        (VOCABULARY.flip(0), "expected strictly increasing values in 0..127"),
        (VOCABULARY.clamp(max=80), "expected strictly increasing values in 0..127"),
        (VOCABULARY + 30, "expected strictly increasing values in 0..127"),
        (VOCABULARY - 1, "expected strictly increasing values in 0..127"),
    ],
)
def test_refused_vocabularies(drafter, ids, message):
    with pytest.raises(ValueError, match=message):
        restricted(drafter(), own_head=True).set_draft_vocabulary(ids)


def test_a_whole_vocabulary_cannot_be_set(drafter):
    with pytest.raises(ValueError, match=r"128 token ids were given, expected None \(draft_vocab_size\)"):
        drafter().set_draft_vocabulary(torch.arange(128))
