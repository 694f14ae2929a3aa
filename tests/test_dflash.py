"""DFlash: DeepSpec's layout against the recorded numbers, z-lab's against transformers' own DFlash, mask-filling in
drafting and training."""

import copy
import json
from contextlib import contextmanager

import pytest
import torch
import transformers
from generation_helpers import IDS, NEW, PROMPTS, TRACES, same_text, tiny_target
from helpers import FIXTURES, expected, expected_greedy, gradients, load_target, training_batch
from safetensors.torch import save_file
from transformers import AutoModel, LlamaConfig
from transformers.generation import candidate_generator

from dspark_hf import DSparkConfig, DSparkDrafterModel, record_speculation
from dspark_hf.baselines import DFlashDrafterModel
from dspark_hf.baselines.dflash import from_native, to_native
from dspark_hf.target_dspark import target_states

NAME = "qwen3_dflash"
LAYERS = [0, 2, 4]
MASK_FILLING = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "sample_from_anchor": False,
    "has_embed_tokens": False,
    "has_lm_head": False,
}
needs_native = pytest.mark.skipif(
    not hasattr(transformers, "MuseGlimmerAssistantModel"), reason="transformers has no DFlash assistant yet"
)


def mask_filling_config(target, **changes) -> DSparkConfig:
    keys = {
        "block_size": 5,
        "mask_token_id": 127,
        "target_layer_ids": LAYERS,
        "num_hidden_layers": 2,
        "num_anchors": 32,
    }
    return DSparkConfig.for_target(target.config, **keys | MASK_FILLING | changes)


@pytest.fixture(scope="module")
def zlab(tmp_path_factory):
    """A mask-filling drafter that has learnt one text of the recorded target by heart, from z-lab's layout. It starts
    from DeepSpec's, whose slots predict other positions."""
    target = load_target()
    torch.manual_seed(0)
    model = DFlashDrafterModel(mask_filling_config(target)).attach_target(target)
    start = DFlashDrafterModel.from_pretrained(FIXTURES / f"drafter_{NAME}").state_dict()
    model.load_state_dict({key: start[key] for key in model.state_dict()})
    ids = torch.tensor([TRACES[0]["output_ids"][:90]])
    states, _ = target_states(target, ids, None, LAYERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model(ids, target_hidden_states=states).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("zlab")
    return DFlashDrafterModel.from_pretrained(zlab_checkpoint(folder, model.state_dict())).eval()


def zlab_config(**changes) -> dict:
    """As z-lab writes it: 6 inputs for 5 proposals, ties that mean nothing, RoPE in the keys of transformers 4."""
    config = json.loads((FIXTURES / f"drafter_{NAME}" / "config.json").read_text())
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "rms_norm_eps", "num_target_layers", "hidden_act", "eos_token_id")  # fmt: skip
    return {key: config[key] for key in shape} | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 6,
        "dflash_config": {"mask_token_id": 127, "target_layer_ids": LAYERS},
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    } | changes  # fmt: skip


def zlab_checkpoint(folder, tensors, **changes):
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(zlab_config(**changes)))
    return folder


def zlab_names(native) -> dict[str, torch.Tensor]:
    names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    return {names.get(key, key): value.clone() for key, value in native.state_dict().items()}


# -------------------------------------------------------------------------------------------------- DeepSpec's layout


@pytest.fixture(scope="module")
def deepspec():
    return DFlashDrafterModel.from_pretrained(FIXTURES / f"drafter_{NAME}").eval()


def test_deepspec_drafts(deepspec):
    cache = None
    for i in (0, 1):
        wanted = expected(NAME, f"draft{i}.")
        draft = deepspec.draft(wanted["context_hidden"], wanted["anchor_id"], cache=cache)
        cache = draft.cache
        assert torch.equal(draft.token_ids, wanted["tokens"]) and draft.confidence_logits is None
        for key, name in (("hidden_states", "block_hidden"), ("base_logits", "base_logits"), ("logits", "logits")):
            torch.testing.assert_close(draft[key], wanted[name], rtol=0, atol=1e-5)


def test_deepspec_training_pass(deepspec):
    wanted = expected(NAME, "train.")
    torch.testing.assert_close(deepspec(**training_batch(NAME)).loss, wanted["loss"], rtol=0, atol=1e-5)
    found = gradients(deepspec, **training_batch(NAME))
    recorded = {key.removeprefix("grad."): value for key, value in wanted.items() if key.startswith("grad.")}
    assert "fc.weight" in recorded
    for key, value in recorded.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5)


def test_deepspec_greedy_traces(target, deepspec):
    for trace in expected_greedy(NAME)["threshold_0.0"][:2]:
        ids = torch.tensor([trace["prompt_ids"]])
        with record_speculation() as stats:
            output = target("qwen3").generate(ids, assistant_model=deepspec, max_new_tokens=24, do_sample=False)
        rounds = len(stats.acceptance_lengths)
        assert output[0].tolist() == trace["output_ids"][: ids.shape[1] + 24]
        assert stats.acceptance_lengths == trace["acceptance_lengths"][:rounds]
        assert stats.proposal_lengths == trace["proposal_lengths"][:rounds]


# ----------------------------------------------------------------------------------------------- z-lab's layout, native


@contextmanager
def drafted_blocks(owner, method: str, read):
    """The proposals of every round inside, as lists of ids."""
    blocks, original = [], getattr(owner, method)

    def recorded(*args, **kwargs):
        result = original(*args, **kwargs)
        blocks.append(read(result, *args, **kwargs))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, recorded)
        yield blocks


def native_rounds(target, assistant, ids, count):
    """Text and proposals of transformers' own loop, which does not draft where one token is left to generate."""

    def proposed(result, _, input_ids, *args, **kwargs):
        return result[0][0, input_ids.shape[1] :].tolist()

    generator = candidate_generator.DFlashTokenCandidateGenerator
    target.generation_config.speculation_type = "dflash"
    try:
        with drafted_blocks(generator, "get_candidates", proposed) as blocks:
            text = target.generate(ids, assistant_model=assistant, max_new_tokens=count, do_sample=False)
    finally:
        target.generation_config.speculation_type = None
    return text[0].tolist(), [block for block in blocks if block]


def our_rounds(target, drafter, ids, count):
    with drafted_blocks(drafter, "draft", lambda result, *args, **kwargs: result.token_ids[0].tolist()) as blocks:
        text = target.generate(ids, assistant_model=drafter, max_new_tokens=count, do_sample=False)
    return text[0].tolist(), blocks


def assert_same_rounds(ours, theirs):
    """Of `our_rounds` and `native_rounds`: the same blocks at the same places, so the same numbers accepted too."""
    assert ours[0] == theirs[0]
    assert ours[1][: len(theirs[1])] == theirs[1] and len(ours[1]) - len(theirs[1]) in (0, 1)


@needs_native
def test_native_loop_proposes_the_same_blocks(target, zlab):
    lender, accepted, native = target("qwen3"), [], to_native(zlab)
    for ids, count in ((PROMPTS[0], 60), (PROMPTS[1], 16)):
        with record_speculation() as stats:
            ours = our_rounds(lender, zlab, ids, count)
        assert_same_rounds(ours, native_rounds(lender, native, ids, count))
        assert {len(block) for block in ours[1]} == {5}
        accepted += stats.accepted_lengths
    assert {0, 1, 5} <= set(accepted)  # else the comparison would have seen few states of the caches


@needs_native
def test_native_weights_in_zlabs_layout(tmp_path, target):
    """A random assistant of transformers' own class, written as z-lab writes it."""
    torch.manual_seed(3)
    recent = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
    layers = [-1 if recent else 0, 1, 3]  # before, transformers' own path cannot read the embedding's output
    shape = {key: zlab_config()[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads",
                                                 "num_key_value_heads", "head_dim", "rms_norm_eps")}  # fmt: skip
    config = transformers.MuseGlimmerAssistantConfig(
        **shape,
        num_hidden_layers=2,
        layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        block_size=4,
        mask_token_id=127,
        target_layer_ids=layers,
        bos_token_id=None,
        eos_token_id=10,
        pad_token_id=None,
    )
    native = transformers.MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for parameter in native.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.2)
    keys = {"block_size": 4, "mask_token_id": 127, "target_layer_ids": layers, "causal": False}
    folder = zlab_checkpoint(tmp_path, zlab_names(native), dflash_config=keys)
    drafter = DFlashDrafterModel.from_pretrained(folder).eval()
    assert (drafter.config.block_size, drafter.config.num_block_inputs) == (3, 4)
    for ids in PROMPTS[:2]:
        ours = our_rounds(target("qwen3"), drafter, ids, 10)
        assert_same_rounds(ours, native_rounds(target("qwen3"), native, ids, 10))

    again = from_native(native, target("qwen3").config)
    assert all(torch.equal(value, drafter.state_dict()[key]) for key, value in again.state_dict().items())
    assert our_rounds(target("qwen3"), again, IDS, 10) == our_rounds(target("qwen3"), drafter, IDS, 10)


@needs_native
def test_native_and_back(target, zlab):
    native = to_native(copy.deepcopy(zlab).to(torch.bfloat16))
    assert native.dtype == torch.bfloat16 and native.rotary_emb.inv_freq.dtype == torch.float32
    native = to_native(zlab)
    again = from_native(native, target("qwen3").config)
    ignored = {"_name_or_path", "architectures", "dtype", "num_anchors"}
    ours, theirs = ({k: v for k, v in m.config.to_dict().items() if k not in ignored} for m in (zlab, again))
    assert theirs == ours
    for parameter in native.parameters():
        parameter.data.zero_()  # neither copy shares memory with it
    state, wanted = again.state_dict(), zlab.state_dict()
    assert state.keys() == wanted.keys() and all(torch.equal(state[key], wanted[key]) for key in wanted)
    assert wanted["fc.weight"].any()


@needs_native
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_from_anchor": True}, r"sample_from_anchor is True, expected False: transformers' DFlash"),
        ({"has_lm_head": True}, r"has_lm_head is True, expected False"),
        ({"attention_bias": True}, r"attention_bias is True, expected False"),
        ({"draft_vocab_size": 64}, r"draft_vocab_size is 64, expected None"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30\.0, expected None"),
        ({"markov_rank": 4, "markov_head_type": "vanilla"}, r"markov_rank is 4, expected 0"),
    ],
)
def test_what_the_native_form_cannot_hold(target, changes, message):
    drafter = DSparkDrafterModel(mask_filling_config(target("qwen3"), **changes))
    with pytest.raises(ValueError, match=message):
        to_native(drafter)


@needs_native
def test_native_layers_of_another_form(target, zlab):
    native = to_native(zlab)
    with pytest.raises(ValueError, match=r"the target has hidden_size 32, expected 64, the assistant's"):
        from_native(native, tiny_target(LlamaConfig).config)
    native.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match=r"layer_types is .*'sliding_attention'\], expected 2 times 'full_attention'"):
        from_native(native, target("qwen3").config)


# ------------------------------------------------------------------------------------------------------- mask-filling


def test_learnt_text_is_accepted(target, zlab):
    """Blocks of the learnt text are right to their ends: labels in training and slots in drafting are the same."""
    with record_speculation() as stats:
        target("qwen3").generate(IDS, assistant_model=zlab, max_new_tokens=48, do_sample=False)
    assert stats.acceptance_length > 4.5 and stats.accepted_lengths.count(5) > 4


def test_training_pass_against_drafts(target, zlab):
    """Every block of a training pass is what `draft()` proposes at that anchor with the states before it; labels are
    the tokens that follow the anchor, and the loss is that of the blocks one by one."""
    zlab.attach_target(target("qwen3"))
    ids = torch.tensor([trace["output_ids"][:40] for trace in TRACES[:2]])
    states, _ = target_states(target("qwen3"), ids, None, LAYERS)
    positions = torch.tensor([[4, 20, 37], [1, 9, 30]])
    loss_mask = torch.arange(40).expand(2, -1) >= 6
    output = zlab(ids, loss_mask, states, anchor_positions=positions, output_logits=True)
    zlab._target = ()
    losses, weights = [], []
    for row, anchors in enumerate(positions.tolist()):
        for column, p in enumerate(anchors):
            draft = zlab.draft(states[row, None, :p], ids[row, p, None], target=target("qwen3"))
            torch.testing.assert_close(output.logits[row, column], draft.logits[0], rtol=0, atol=1e-4)
            follow = ids[row, p + 1 : p + 6]
            assert output.target_ids[row, column, : len(follow)].tolist() == follow.tolist()
            supervised = 0  # none behind the first token that is not to be learnt, or behind the end
            while supervised < len(follow) and loss_mask[row, p + 1 + supervised]:
                supervised += 1
            assert output.loss_mask[row, column].tolist() == [k < supervised for k in range(5)]
            for k in range(supervised):
                losses.append(torch.nn.functional.cross_entropy(draft.logits[0, k], follow[k]))
                weights.append(torch.exp(torch.tensor(-k / 4.0)))
    losses, weights = torch.stack(losses), torch.stack(weights)
    torch.testing.assert_close(output.loss, (losses * weights).sum() / weights.sum(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kwargs", [{}, {"max_new_tokens": 3}, {"repetition_penalty": 1.3}])
def test_greedy_equals_plain(target, zlab, kwargs):
    same_text(target("qwen3"), zlab, **kwargs)


def test_batch_equals_rows(target, zlab):
    """Left-padded prompts of different lengths; rows accept different numbers of tokens."""
    prompts = [PROMPTS[0], PROMPTS[0][:, 5:], PROMPTS[1][:, 2:]]
    width = max(ids.shape[1] for ids in prompts)
    padded = torch.cat([torch.nn.functional.pad(ids, (width - ids.shape[1], 0)) for ids in prompts])
    mask = torch.cat([torch.arange(width)[None] >= width - ids.shape[1] for ids in prompts]).long()
    with record_speculation() as stats:
        batch = target("qwen3").generate(padded, attention_mask=mask, assistant_model=zlab, pad_token_id=0, **NEW)
    for row, ids in enumerate(prompts):
        with record_speculation() as alone:
            single = target("qwen3").generate(ids, assistant_model=zlab, **NEW)
        text = single[0, ids.shape[1] :].tolist()
        assert batch[row, width:][: len(text)].tolist() == text and not batch[row, width + len(text) :].any()
        lengths = [n for n, place in zip(stats.acceptance_lengths, stats.rows, strict=True) if place == row]
        assert lengths == alone.acceptance_lengths


def test_saved_as_a_drafter_without_heads(tmp_path, target, zlab):
    """The folder needs no code but DSpark's, and loads as either class."""
    zlab.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("dflash*")) and (tmp_path / "modeling_dspark.py").exists()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["auto_map"]["AutoModel"] == "modeling_dspark.DSparkDrafterModel"
    assert (written["block_size"], written["sample_from_anchor"]) == (5, False)
    wanted = our_rounds(target("qwen3"), zlab, IDS, 20)
    for kind in (AutoModel, DSparkDrafterModel, DFlashDrafterModel):
        again = kind.from_pretrained(tmp_path).eval()
        assert type(again) is (DFlashDrafterModel if kind is DFlashDrafterModel else DSparkDrafterModel)
        assert our_rounds(target("qwen3"), again, IDS, 20) == wanted


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 127}}, r"lacks \['target_layer_ids'\]; these cannot be guessed"),
        ({"dflash_config": {"target_layer_ids": LAYERS}}, r"lacks \['mask_token_id'\]"),
        ({"dflash_config": None}, r"lacks \['mask_token_id', 'target_layer_ids'\]"),
        ({"dflash_config": [0, 2]}, r"dflash_config is \[0, 2\], expected an object with"),
        (
            {"dflash_config": {"selector_rank": 8, "causal": True}},
            r"with is \['causal', 'selector_rank'\], expected none",
        ),
        ({"block_size": 1}, r"block_size is 1, expected an integer of at least 2, the anchor's input included"),
        ({"block_size": "6"}, r"block_size is '6', expected an integer of at least 2"),
        ({"block_size": None}, r"lacks \['block_size'\]"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types is \['sliding_attention'\], expected 2 times"),
        ({"architectures": ["DFlash2DraftModel"]}, r"\['DFlash2DraftModel'\]; .* or 'qwen3' with 'DFlashDraftModel'"),
    ],
)
def test_refused_zlab_files(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(zlab_config(**changes)))
    with pytest.raises(ValueError, match=message):
        DSparkConfig.from_pretrained(tmp_path)


def test_refused_flag(target):
    with pytest.raises(ValueError, match=r"sample_from_anchor is 0, expected True or False"):
        mask_filling_config(target("qwen3"), sample_from_anchor=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3_vanilla", r"markov_rank is \d+, expected 0: DFlash has no heads, see DSparkDrafterModel"),
        ("qwen3_vanilla_plainconf", r"markov_rank is \d+, expected 0"),
    ],
)
def test_refused_heads(name, message):
    with pytest.raises(ValueError, match=message):
        DFlashDrafterModel.from_pretrained(FIXTURES / f"drafter_{name}")


def test_needs_a_target(zlab):
    with pytest.raises(ValueError, match=r"no embedding or head of its own .*pass target="):
        zlab.draft(torch.zeros(1, 4, 3 * 64), torch.tensor([5]))
