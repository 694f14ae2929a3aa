"""EAGLE-3's checkpoints: both layouts against a slow oracle, saving, a reduced vocabulary, refusals."""

import json

import pytest
import torch
from eagle3_helpers import FOLDER, LAYERS, assert_same_draft, every_step, shared_eagle, text_and_states, training_batch
from generation_helpers import IDS, NEW
from helpers import VOCABULARY, load_target
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModel

from dspark_hf.baselines import Eagle3Config, Eagle3DrafterModel


@pytest.fixture
def eagle():
    yield shared_eagle()
    shared_eagle().zero_grad(set_to_none=True)


@pytest.fixture(scope="module")
def target():
    return load_target()


def specforge(folder, size: int | None = None, **changes):
    """The recorded drafter written as SpecForge does, without norms of queries and keys, with a draft vocabulary."""
    tensors = load_file(FOLDER / "model.safetensors")
    ids = VOCABULARY if size is None else torch.arange(size)
    file = {
        key.replace("layers.0.", "midlayer."): value
        for key, value in tensors.items()
        if key != "embed_tokens.weight" and "_norm.weight" not in key.replace("hidden_norm", "hidden")
    }
    file["lm_head.weight"] = tensors["lm_head.weight"][ids].clone()
    file |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(128, dtype=torch.bool).index_fill(0, ids, True)}
    drop = {key for key, value in changes.items() if value is ...}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3, 4], "use_aux_hidden_state": True},
        "draft_vocab_size": len(ids),
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    } | {key: value for key, value in changes.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))
    save_file(file, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def plain_logits(tensors: dict[str, torch.Tensor], embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The first step's logits (n, D) by the file's tensors: one head and position at a time. 4 heads of 16, 2 keys."""

    def norm(x, name=None):
        weight = 1.0 if name is None else tensors.get(name)
        return x if weight is None else x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def turned(x, position):  # dimension j and j + 8 are a plane
        angles = position * 10000.0 ** -(torch.arange(8) / 8)
        a, b = x[:8], x[8:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    layer = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    hidden = states @ tensors["fc.weight"].T
    pairs = [norm(embeds, f"{layer}input_layernorm.weight"), norm(hidden, f"{layer}hidden_norm.weight")]
    pairs = torch.cat(pairs, dim=-1)
    q, k, v = ((pairs @ tensors[f"{layer}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 16)) for name in "qkv")
    q, k = norm(q, f"{layer}self_attn.q_norm.weight"), norm(k, f"{layer}self_attn.k_norm.weight")
    out = []
    for t in range(len(pairs)):
        heads = []
        for head in range(4):
            query = turned(q[t, head], t)
            scores = torch.stack([query @ turned(k[i, head // 2], i) for i in range(t + 1)]) / 4
            heads.append(scores.softmax(0) @ v[: t + 1, head // 2])
        out.append(torch.cat(heads))
    hidden = hidden + torch.stack(out) @ tensors[f"{layer}self_attn.o_proj.weight"].T
    x = norm(hidden, f"{layer}post_attention_layernorm.weight")
    gate, up, down = (tensors[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return norm(hidden + (F.silu(x @ gate) * (x @ up)) @ down, "norm.weight") @ tensors["lm_head.weight"].T


def test_deepspec_layout_by_a_slow_oracle(eagle):
    arguments, tensors = text_and_states(6), load_file(FOLDER / "model.safetensors")
    embeds = tensors["embed_tokens.weight"][arguments["input_ids"][0, 1:]]
    wanted = plain_logits(tensors, embeds, arguments["context_hidden_states"][0])[-1]
    torch.testing.assert_close(eagle.draft(**arguments).logits[0, 0], wanted, rtol=0, atol=1e-5)


def test_specforge_layout(tmp_path, target):
    folder = specforge(tmp_path)
    model = Eagle3DrafterModel.from_pretrained(folder, **LAYERS).eval()
    assert model.config.block_size == 7 and not model.config.has_embed_tokens and not model.config.qk_norm
    arguments, tensors = text_and_states(6), load_file(folder / "model.safetensors")
    embeds = target.get_input_embeddings()(arguments["input_ids"][0, 1:])
    wanted = plain_logits(tensors, embeds, arguments["context_hidden_states"][0])[-1]
    draft = model.draft(**arguments, target=target)
    torch.testing.assert_close(draft.logits[0, 0, VOCABULARY], wanted, rtol=0, atol=1e-5)
    assert draft.logits[0].isfinite().sum(dim=-1).tolist() == [46] * 7
    assert torch.equal(target.generate(IDS, assistant_model=model, **NEW), target.generate(IDS, **NEW))

    model.save_pretrained(tmp_path / "saved")
    again = Eagle3DrafterModel.from_pretrained(tmp_path / "saved").eval()
    assert again.config.draft_vocab_size == 46
    assert_same_draft(again.draft(**arguments, target=target), draft)


def test_training_in_a_reduced_vocabulary(tmp_path, target):
    """Sums over the draft vocabulary at the target's own chances; with every token in it, the whole vocabulary's."""
    batch = training_batch()
    model = Eagle3DrafterModel.from_pretrained(specforge(tmp_path), **LAYERS).attach_target(target)
    output = model(**batch)
    hidden = every_step(model, batch)
    log_draft = model.lm_head(hidden).log_softmax(dim=-1)
    teacher = target.lm_head(batch["target_last_hidden_states"]).softmax(dim=-1)[..., VOCABULARY]
    total = 0.0
    for s in range(7):
        wanted = -(F.pad(teacher, (0, 0, 0, 8))[:, s + 1 : s + 65] * log_draft[:, :, s]).sum(dim=-1)
        total = total + 0.8**s * (wanted * output.loss_mask[..., s]).sum() / 128
    torch.testing.assert_close(output.loss, total)

    whole = Eagle3DrafterModel.from_pretrained(specforge(tmp_path, 128), **LAYERS).attach_target(target)
    plain = Eagle3Config.from_dict(whole.config.to_dict() | {"draft_vocab_size": None})
    plain = Eagle3DrafterModel(plain).attach_target(target)
    plain.load_state_dict({key: value for key, value in whole.state_dict().items() if key not in ("d2t", "t2d")})
    torch.testing.assert_close(whole(**batch).loss, plain(**batch).loss)


@pytest.mark.parametrize("loader", [Eagle3DrafterModel, AutoModel])
def test_saved_and_loaded_again(tmp_path, eagle, loader):
    eagle.save_pretrained(tmp_path)
    again = loader.from_pretrained(tmp_path).eval()
    assert type(again) is Eagle3DrafterModel
    assert again.config.to_dict() | {"_name_or_path": ""} == eagle.config.to_dict() | {"_name_or_path": ""}
    state = again.state_dict()
    assert all(torch.equal(state[key], value) for key, value in eagle.state_dict().items())
    assert_same_draft(again.draft(**text_and_states()), eagle.draft(**text_and_states()))
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_attention_implementations_agree(eagle):
    eager = Eagle3DrafterModel.from_pretrained(FOLDER, attn_implementation="eager").eval()
    assert_same_draft(eager.draft(**text_and_states()), eagle.draft(**text_and_states()))
    torch.testing.assert_close(eager(**training_batch()).loss, eagle(**training_batch()).loss)


def test_for_a_target(target):
    """A new drafter for a target, as a recipe makes one: it trains and drafts."""
    config = Eagle3Config.for_target(target.config, block_size=3, target_layer_ids=[0, 2, 4])
    model = Eagle3DrafterModel(config).eval().attach_target(target)
    batch = training_batch()
    loss = model(batch["input_ids"], batch["loss_mask"], attention_mask=batch["attention_mask"]).loss
    assert loss.isfinite() and loss > 0
    assert torch.equal(target.generate(IDS, assistant_model=model, **NEW), target.generate(IDS, **NEW))


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        ("fc.weight", (), r"missing tensors \['fc.weight'\], unknown tensors \[\]"),
        ("layers.0.self_attn.q_norm.weight", (), r"missing tensors \['layers.0.self_attn.q_norm.weight'\]"),
        (None, ("d2t",), r"missing tensors \[\], unknown tensors \['d2t'\]"),
        ("layers.0.hidden_norm.weight", ("hidden_norm.weight",), r"missing .*layers.0.hidden.*unknown .*'hidden_norm"),
    ],
)
def test_missing_and_unknown_tensors_are_refused(tmp_path, drop, add, message):
    tensors = {key: value for key, value in load_file(FOLDER / "model.safetensors").items() if key != drop}
    save_file(tensors | {key: torch.ones(2) for key in add}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        Eagle3DrafterModel.from_pretrained(tmp_path)


def test_lent_embedding_and_head(tmp_path, target, eagle):
    tensors = load_file(FOLDER / "model.safetensors")
    lent = {"embed_tokens.weight": target.get_input_embeddings().weight, "lm_head.weight": target.lm_head.weight}
    assert all(torch.equal(tensors[key], value) for key, value in lent.items())
    file = {key: value for key, value in tensors.items() if key not in lent}
    save_file(file, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    model = Eagle3DrafterModel.from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match="no embedding or head of its own"):
        model.draft(**text_and_states())
    assert_same_draft(model.draft(**text_and_states(), target=target), eagle.draft(**text_and_states()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttt_length": None}, r"lacks \['block_size'\]"),
        ({"ttt_length": 0}, r"block_size is 0, expected an integer of at least 1"),
        ({"target_layer_ids": [0, 2, 5]}, r"target_layer_ids is \[0, 2, 5\], expected .* -1\.\.4"),
        ({"num_target_layers": None}, r"lacks \['num_target_layers'\]"),
        ({"draft_num_hidden_layers": 2}, r"draft_num_hidden_layers is 2, expected 1"),
        ({"num_hidden_layers": 2, "layer_types": None}, r"num_hidden_layers is 2, expected 1"),
        ({"step_loss_decay": 1.0}, r"step_loss_decay is 1\.0, expected a number in \(0, 1\)"),
        ({"step_loss_decay": "0.8"}, r"step_loss_decay is '0\.8', expected a number"),
        ({"markov_rank": 4}, r"markov_rank is 4, expected 0"),
        ({"enable_confidence_head": True}, r"enable_confidence_head is True, expected False"),
        ({"use_sliding_window": True}, r"use_sliding_window is True, expected none"),
        ({"architectures": ["Qwen3DSparkModel"]}, r"not an EAGLE-3 checkpoint: .*Qwen3DSparkModel.*expected 'eagle3'"),
        ({"architectures": None}, r"not an EAGLE-3 checkpoint"),
    ],
)
def test_refused_configurations(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(json.loads((FOLDER / "config.json").read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        Eagle3Config.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {}, r"num_target_layers is missing, as in all files of SpecForge: pass it to from_pretrained"),
        ({"norm_before_residual": True}, LAYERS, r"norm_before_residual is True, expected False"),
        ({"target_hidden_size": 128}, LAYERS, r"target_hidden_size is 128, expected 64"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, LAYERS, r"use_aux_hidden_state is False, expected True"),
        ({"draft_vocab_size": 129}, LAYERS, r"draft_vocab_size is 129, expected None or 1\.\.128"),
        ({"vocab_size": ...}, LAYERS, r"lacks \['vocab_size'\]"),
        ({"hidden_size": ...}, LAYERS, r"lacks \['hidden_size', 'head_dim'\]"),
    ],
)
def test_refused_specforge_configurations(tmp_path, changes, options, message):
    with pytest.raises(ValueError, match=message):
        Eagle3Config.from_pretrained(specforge(tmp_path, **changes), **options)


def test_default_layers_of_specforge(tmp_path):
    folder = specforge(tmp_path, eagle_config=...)
    config = Eagle3Config.from_pretrained(folder, num_target_layers=36)
    assert (config.target_layer_ids, config.num_target_layers) == ([1, 17, 32], 36)


def test_a_target_of_another_size_is_refused(tmp_path, target):
    model = Eagle3DrafterModel.from_pretrained(specforge(tmp_path), num_target_layers=7)
    with pytest.raises(ValueError, match="made for a target with num_target_layers 7, 'qwen3' has 6"):
        target.generate(IDS, assistant_model=model, **NEW)
