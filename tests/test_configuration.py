"""Configurations that would give a wrong drafter are refused, by name; official files load as they are."""

import json

import pytest
from helpers import DRAFTERS, FIXTURES
from transformers import AutoConfig, GPT2Config, LlamaConfig

from dspark_hf import DSparkConfig


def official(name: str = "qwen3_vanilla", **changes) -> dict:
    return json.loads((FIXTURES / f"drafter_{name}" / "config.json").read_text()) | changes


def without(config: dict, *keys: str) -> dict:
    return {key: value for key, value in config.items() if key not in keys}


def load(config: dict, folder) -> DSparkConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return DSparkConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": 0}, r"markov_rank is 0, expected above 0, since confidence_head_with_markov"),
        ({"markov_rank": -1}, r"markov_rank is -1, expected 0 \(no sequential head\) or more"),
        ({"markov_rank": 1.5}, r"markov_rank is 1\.5, expected 0"),
        ({"markov_head_type": "lstm"}, r"markov_head_type is 'lstm', expected one of \('vanilla', 'gated', 'rnn'\)"),
        ({"target_layer_ids": [0, 4, 2]}, r"target_layer_ids is \[0, 4, 2\], expected strictly increasing"),
        ({"target_layer_ids": [0, 2, 2]}, r"target_layer_ids is \[0, 2, 2\], expected strictly increasing"),
        ({"target_layer_ids": [0, 2, 5]}, r"target_layer_ids is \[0, 2, 5\], expected .* -1\.\.4: .*final norm"),
        ({"target_layer_ids": [0, 2, 6]}, r"target_layer_ids is \[0, 2, 6\], expected .* -1\.\.4"),
        ({"target_layer_ids": [-2, 2, 4]}, r"target_layer_ids is \[-2, 2, 4\], expected .* -1\.\.4"),
        ({"target_layer_ids": []}, r"target_layer_ids is \[\], expected a list"),
        ({"target_layer_ids": 3}, r"target_layer_ids is 3, expected a list"),
        ({"block_size": 0}, r"block_size is 0, expected an integer of at least 1"),
        ({"block_size": "7"}, r"block_size is '7', expected an integer"),
        ({"block_size": True}, r"block_size is True, expected an integer"),
        ({"mask_token_id": 128}, r"mask_token_id is 128, expected 0\.\.127"),
        ({"mask_token_id": -1}, r"mask_token_id is -1, expected 0\.\.127"),
        ({"draft_vocab_size": 129}, r"draft_vocab_size is 129, expected None or 1\.\.128"),
        ({"draft_vocab_size": 0}, r"draft_vocab_size is 0, expected None or 1\.\.128"),
        ({"num_anchors": 0}, r"num_anchors is 0, expected an integer of at least 1"),
        ({"num_hidden_layers": 0, "layer_types": []}, r"num_hidden_layers is 0, expected"),
        ({"num_attention_heads": 0}, r"num_attention_heads is 0, expected"),
        ({"num_key_value_heads": 3}, r"num_attention_heads is 4, expected a multiple of the 3 key/value heads"),
        ({"head_dim": 15}, r"head dimension is 15, expected an even number"),
        ({"hidden_act": "swoosh"}, r"hidden_act is 'swoosh', expected one of .*'silu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types is .*sliding.*, expected 2 times"),
        ({"layer_types": ["full_attention"]}, r"layer_types is .*, expected 2 times 'full_attention'"),
        ({"use_sliding_window": True}, r"use_sliding_window is True, expected none"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings is True, expected False"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
            r"rope_type is 'dynamic', exp",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}},
            r"rope_type is 'longrope', expected one of",
        ),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "spiral"}}, r"rope_type is 'spiral', expected one of"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, r"factor is 0\.5, expected 1\.0 with"),
        ({"rope_parameters": {"rope_type": "default"}}, r"lacks \['rope_theta \(in rope_parameters\)'\]"),
        ({"model_type": "llama"}, r"model_type 'llama' .*expected 'dspark', or 'qwen3' with 'Qwen3DSparkModel'"),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            r"architectures \['Qwen3ForCausalLM'\]; expected 'dspark', or 'qwen3'",
        ),
        ({"architectures": None}, r"architectures \[\]; expected 'dspark', or 'qwen3'"),
        (
            {"model_type": "gemma4_text"},
            r"model_type 'gemma4_text' with architectures \['Qwen3DSparkModel'\]; expected",
        ),
    ],
)
def test_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load(official(**changes), tmp_path)


@pytest.mark.parametrize("key", ["num_kv_shared_layers", "hidden_size_per_layer_input", "enable_moe_block"])
def test_refused_gemma_parts(tmp_path, key):
    with pytest.raises(ValueError, match=f"{key} is 1, expected none: the drafter's layers have no such part"):
        load(official("gemma4_vanilla", **{key: 1}), tmp_path)


@pytest.mark.parametrize(
    ("name", "key"),
    [("qwen3_vanilla", key) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                        "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters",
                                        "block_size", "mask_token_id", "target_layer_ids", "num_target_layers",
                                        "markov_rank", "markov_head_type", "enable_confidence_head",
                                        "confidence_head_with_markov")]
    + [("gemma4_vanilla", "global_head_dim"), ("gemma4_vanilla", "num_global_key_value_heads")],
)  # fmt: skip
def test_missing_keys_are_named(tmp_path, name, key):
    with pytest.raises(ValueError, match=rf"lacks \['{key}'\]; these cannot be guessed"):
        load(without(official(name), key), tmp_path)


def test_headless_needs_no_head_keys(tmp_path):
    config = without(official("qwen3_dflash"), "markov_head_type", "confidence_head_with_markov")
    assert load(config, tmp_path).markov_rank == 0


def test_unknown_backbone():
    with pytest.raises(ValueError, match=r"backbone_type is 'llama', expected one of \['gemma4_text', 'qwen3'\]"):
        DSparkConfig(backbone_type="llama")


@pytest.mark.parametrize("name", DRAFTERS)
def test_official_layout_round_trip(tmp_path, name):
    theirs = official(name)
    config = DSparkConfig.from_pretrained(FIXTURES / f"drafter_{name}")
    config.save_pretrained(tmp_path)
    ours = json.loads((tmp_path / "config.json").read_text())
    assert ours["model_type"] == "dspark" and ours["architectures"] == ["DSparkDrafterModel"]
    again = DSparkConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert type(AutoConfig.from_pretrained(tmp_path)) is DSparkConfig

    # Going over is three keys; `use_cache` belongs to generation, and Gemma has a name of its own for the activation.
    renamed = {"hidden_activation": "hidden_act"}
    gone = ("model_type", "architectures", "transformers_version", "use_cache")
    for key, value in without(theirs, *gone).items():
        assert ours[renamed.get(key, key)] == value, key
    back = ours | {key: theirs[key] for key in ("model_type", "architectures")}
    assert load(without(back, "backbone_type"), tmp_path).to_dict() == config.to_dict()


def test_flat_rope_keys_of_transformers_4(tmp_path):
    config = without(official(rope_theta=5e5, rope_scaling=None), "rope_parameters")
    assert load(config, tmp_path).rope == {"rope_theta": 5e5, "rope_type": "default"}


def draft_keys(**changes) -> dict:
    return {
        "num_hidden_layers": 2,
        "block_size": 4,
        "mask_token_id": 3,
        "target_layer_ids": [0, 2],
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    } | changes


def test_for_target_takes_the_targets_sizes():
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
    sizes = {"vocab_size": 50, "hidden_size": 48, "intermediate_size": 96, "rms_norm_eps": 1e-5, "eos_token_id": 7}
    heads = {"num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2}
    target = LlamaConfig(**sizes, **heads, rope_parameters=dict(rope))
    config = DSparkConfig.for_target(target, **draft_keys())
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.rms_norm_eps) == (50, 48, 96, 1e-5)
    assert config.head_shape == (6, 2, 8)
    assert (config.num_target_layers, config.num_hidden_layers, config.eos_token_id) == (6, 2, 7)
    assert config.rope == rope
    assert config.rope_parameters is not target.rope_parameters


def test_for_target_names_what_the_target_lacks():
    target = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=50)
    with pytest.raises(ValueError, match=r"lacks \['intermediate_size', 'rope_parameters'\]"):
        DSparkConfig.for_target(target, **draft_keys())
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = DSparkConfig.for_target(target, **draft_keys(intermediate_size=64, rope_parameters=rope))
    assert config.head_shape == (2, 2, 16)
