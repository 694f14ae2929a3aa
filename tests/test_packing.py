"""Packed layers compute what `nn.Linear` computes, and replace it wherever a model holds it."""

import weakref

import pytest
import torch
from helpers import restricted
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dspark_hf.demo_target import load_demo_target
from dspark_hf.packing import PackedLinear, is_packed, pack_linears, packed_where_possible, preferred_cpu_dtype

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN")


def tiny_llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=96, num_key_value_heads=2, pad_token_id=0, **sizes | changes)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (7, 24), (2, 3, 24), (2, 1, 5, 24), (0, 24), (2, 0, 24)])
@torch.no_grad()
def test_matches_linear(shape, bias):
    linear = nn.Linear(24, 33, bias=bias)
    x = torch.randn(shape)
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x))


@torch.no_grad()
def test_matches_linear_on_strided_input():
    linear = nn.Linear(24, 33)
    packed = PackedLinear(linear)
    for x in (torch.randn(24, 5).T, torch.randn(2, 9, 48)[:, 2:7, ::2], torch.randn(1, 1, 24).expand(3, 4, 24)):
        torch.testing.assert_close(packed(x), linear(x))


@torch.no_grad()
def test_preferred_dtype_can_be_packed():
    dtype = preferred_cpu_dtype()
    linear, x = nn.Linear(64, 32, dtype=dtype), torch.randn(3, 64, dtype=dtype)
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x))


def test_packed_where_possible(monkeypatch):
    """The tools run on a build of torch without oneDNN too, and in dtypes that cannot be packed."""
    assert is_packed(packed_where_possible(tiny_llama())) and not is_packed(packed_where_possible(tiny_llama(), False))
    assert not is_packed(packed_where_possible(tiny_llama().half()))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert preferred_cpu_dtype() == torch.float32
    assert not is_packed(packed_where_possible(tiny_llama()))


def test_weight_reads_like_a_weight():
    linear = nn.Linear(24, 33)
    packed = PackedLinear(linear)
    assert (packed.in_features, packed.out_features) == (24, 33)
    for attribute in ("dtype", "device", "shape"):
        assert getattr(packed.weight, attribute) == getattr(linear.weight, attribute)
    assert torch.equal(packed.weight.to_dense(), linear.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_packed_model_generates_the_same(tied):
    model = tiny_llama(tie_word_embeddings=tied)
    prompt = {"input_ids": torch.tensor([[5, 17, 42, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    options = {"do_sample": False, "max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**prompt, **options)
    embedding, before = model.get_input_embeddings().weight, {k: v.clone() for k, v in model.state_dict().items()}
    freed = weakref.ref(model.model.layers[0].mlp.up_proj.weight)

    assert pack_linears(model) is model

    assert not any(type(module) is nn.Linear for module in model.modules())
    assert isinstance(model.lm_head, PackedLinear) and model.get_input_embeddings().weight is embedding
    assert freed() is None
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    actual = model.generate(**prompt, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(actual.logits), torch.stack(expected.logits))


def test_packed_model_is_saved_as_before(tmp_path):
    model = tiny_llama()
    input_ids = torch.arange(10)[None]
    expected = model(input_ids).logits
    pack_linears(model).save_pretrained(tmp_path)
    torch.testing.assert_close(LlamaForCausalLM.from_pretrained(tmp_path)(input_ids).logits, expected)


def test_a_layer_with_one_output_is_left():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).eval()
    pack_linears(model)
    assert [type(layer) for layer in model] == [PackedLinear, nn.Linear] and not model[1].weight.requires_grad


def test_a_layer_held_twice_is_packed_once_and_subclasses_are_left():
    class Custom(nn.Linear):
        pass

    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU(), shared), "b": shared, "c": Custom(4, 4)}).eval()
    pack_linears(model)
    assert isinstance(model["b"], PackedLinear)
    assert model["a"][0] is model["b"] and model["a"][2] is model["b"]
    assert type(model["c"]) is Custom


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda model: model.train(), "model.eval()"),
        (lambda model: model.to("meta"), "meta"),
        (lambda model: model.append(nn.Linear(4, 4, dtype=torch.float64)).eval(), "float64"),
    ],
)
def test_refuses_what_it_cannot_pack_and_replaces_nothing(prepare, message):
    model = prepare(nn.Sequential(nn.Linear(4, 4)).eval())
    with pytest.raises(ValueError, match=message):
        pack_linears(model)
    assert type(model[0]) is nn.Linear and model[0].weight.requires_grad


def test_refuses_inputs_it_would_get_wrong():
    packed = PackedLinear(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="float64"):
        packed(torch.zeros(1, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"\(1, 5\)"):
        packed(torch.zeros(1, 5))
    with pytest.raises(ValueError, match="gradients"):
        packed(torch.zeros(1, 4, requires_grad=True))


def test_packs_the_rows_of_a_lent_head(target, drafter):
    """A packed drafter computes all of its draft in packed layers, and the same draft."""
    plain, packed = (restricted(drafter(), own_head=False) for _ in "ab")
    pack_linears(packed)
    context, anchor = torch.randn(1, 9, 192), torch.tensor([40])
    wanted, got = (model.draft(context, anchor, target=target()) for model in (plain, packed))
    assert isinstance(packed._head_rows[1], PackedLinear) and not isinstance(plain._head_rows[1], PackedLinear)
    assert torch.equal(got.token_ids, wanted.token_ids)
    allowed = wanted.logits.isfinite()
    torch.testing.assert_close(got.logits[allowed], wanted.logits[allowed], rtol=1e-4, atol=1e-4)


@pytest.mark.real
def test_real_model_generates_the_same():
    model, tokenizer = load_demo_target()
    prompt = tokenizer("The three primary colours are", return_tensors="pt")
    expected = model.generate(**prompt, do_sample=False, max_new_tokens=12)
    assert torch.equal(pack_linears(model).generate(**prompt, do_sample=False, max_new_tokens=12), expected)
