"""generate() with a drafter on other targets, through transformers' own loop and through `custom_generate`; and what is
refused, before any forward pass."""

import json

import pytest
import torch
from generation_helpers import IDS, NEW, Rig, same_text, tiny_drafter, tiny_target
from helpers import load_drafter
from test_generate_inputs import assert_caches_equal, assert_outputs_equal
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    Cohere2Config,
    DeepseekV3Config,
    DynamicCache,
    Gemma3Config,
    Gemma3TextConfig,
    GenerationMixin,
    GPTNeoXConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LogitsProcessor,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from dspark_hf import ConfidenceThreshold, record_speculation
from dspark_hf.target_dspark import CACHE_NAME

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
TARGETS = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "mistral_1": (MistralConfig, {"sliding_window": 2}),
    "gemma3": (
        Gemma3TextConfig,
        {"sliding_window": 8, "head_dim": 8, "layer_types": MIXED, "final_logit_softcapping": 9.0},
    ),
    "qwen2": (Qwen2Config, {}),
    "qwen2_sliding": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "phi3": (Phi3Config, {}),
    "phi3_sliding": (Phi3Config, {"sliding_window": 8}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "olmo": (OlmoConfig, {}),
    "olmo2": (Olmo2Config, {}),
    "cohere2": (Cohere2Config, {"sliding_window": 8, "layer_types": MIXED}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "starcoder2": (Starcoder2Config, {"sliding_window": 8}),
    "mixtral": (MixtralConfig, EXPERTS),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "gpt_oss": (GptOssConfig, {"sliding_window": 8, "head_dim": 8, "layer_types": MIXED, **EXPERTS}),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "llama4": (
        Llama4TextConfig,
        {
            "attention_chunk_size": 8,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "no_rope_layers": [1, 0, 1],
            **EXPERTS,
        },
    ),
}
PROMPT = torch.tensor([[5, 9, 3, 17, 21, 8]])


def drafter_for(target):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return tiny_drafter(target, rms_norm_eps=1e-6, **rope)


@pytest.mark.parametrize("name", TARGETS)
def test_target_families(name):
    """Far past the sliding window, with blocks accepted up to every length, over the cache that the call makes."""
    config_class, overrides = TARGETS[name]
    target = tiny_target(config_class, **overrides)
    drafter = drafter_for(target)
    with record_speculation() as stats:
        plain = same_text(target, drafter, PROMPT, max_new_tokens=48)
    assert plain.shape[1] == PROMPT.shape[1] + 48 and len(plain[0].unique()) > 4
    # The rigged rounds give every length; the random drafter alone is refused almost always.
    assert set(stats.accepted_lengths) == set(range(drafter.config.block_size + 1))


def test_gemma4_target(target, drafter):
    model, ids = target("gemma4"), IDS[:, :30]
    plain = same_text(model, drafter("gemma4_vanilla"), ids, max_new_tokens=48)
    assert plain.shape[1] == 78


def test_multimodal_target():
    """A picture in the prompt is prefilled as ever; the drafter reads the states of its tokens like others."""
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "layer_types": MIXED, "vocab_size": 64}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"image_token_index": 60, "boi_token_index": 61, "eoi_token_index": 62, "tie_word_embeddings": False}
    config = Gemma3Config(
        text_config=text | {"eos_token_id": None, "bos_token_id": None, "tie_word_embeddings": False},
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        **special,
    )
    torch.manual_seed(0)
    target = AutoModelForImageTextToText.from_config(config).eval().requires_grad_(False)
    for parameter in target.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    drafter, ids = drafter_for(target), torch.tensor([[5, 6, 61, 60, 60, 60, 60, 62, 7, 8, 9]])
    picture = {"pixel_values": torch.randn(1, 3, 28, 28), "token_type_ids": (ids == 60).long()}
    arguments = {"max_new_tokens": 30, "do_sample": False}
    plain = target.generate(ids, **picture, **arguments)
    assert plain.tolist() != target.generate(ids, **arguments).tolist()
    with Rig(drafter, plain), record_speculation() as stats:
        assert torch.equal(target.generate(ids, assistant_model=drafter, **picture, **arguments), plain)
    assert stats.acceptance_length > 2
    same_text(target, drafter, ids[:, 7:], **arguments)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "cohere2"])
def test_outputs_of_sliding_windows(name):
    """Attentions too: each token shows as many keys as alone. The prompt ends before, at and after the window."""
    config_class, overrides = TARGETS[name]
    target = tiny_target(config_class, attn_implementation="eager", **overrides)
    drafter = drafter_for(target)
    for length in (3, 8, 13):
        ids = torch.randint(2, 32, (1, length))
        assert_outputs_equal(target, drafter, ids, max_new_tokens=20)
        assert_outputs_equal(target, drafter, ids, max_new_tokens=12, prefill_chunk_size=5)
        same_text(target, drafter, ids, prefill_chunk_size=5)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen2_sliding"])
def test_sliding_chat_over_one_cache(name):
    """Turn by turn over a cache of the caller's, drafted and plain turns mixed."""
    config_class, overrides = TARGETS[name]
    target = tiny_target(config_class, **overrides)
    drafter, results = drafter_for(target), []
    for turns in ([False] * 4, [True] * 4, [True, False, True, False]):
        cache, ids = DynamicCache(config=target.config), PROMPT
        for drafted in turns:
            more = {"assistant_model": drafter} if drafted else {}
            ids = target.generate(ids, max_new_tokens=7, do_sample=False, **{CACHE_NAME: cache}, **more)
            ids = torch.cat([ids, PROMPT[:, :3]], dim=1)
        results.append((ids, cache))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][0], results[2][0])
    assert_caches_equal(results[1][1], results[0][1])


# --------------------------------------------------------------------------------------------- other ways to a drafter


@pytest.fixture
def own_loop(monkeypatch):
    """transformers' assisted loop, with nothing of ours but the candidate generator."""
    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", GenerationMixin._assisted_decoding._dspark_original)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"eos_token_id": 116}, {"max_new_tokens": 1}, {"max_new_tokens": 2}, {"max_new_tokens": 5}]
    + [{"repetition_penalty": 1.4}, {"do_sample": True, "top_k": 1}],
    ids=str,
)
def test_own_loop_of_transformers(own_loop, target, drafter, arguments):
    with record_speculation() as stats:
        same_text(target("qwen3"), drafter(), **arguments)
        model = drafter()
        model.verify_policy = ConfidenceThreshold(0.5)
        same_text(target("qwen3"), model, **arguments)
    assert stats.acceptance_lengths == []  # our loop was not used


def test_own_loop_skips_blocks(own_loop, target, drafter):
    class EverySecond(ConfidenceThreshold):
        reads_anchor, skipped = True, []

        def skips_block(self, anchor_confidence, history):
            self.skipped.append(history.skipped_blocks)
            return len(self.skipped) % 2 == 0

    model = drafter()
    model.verify_policy = policy = EverySecond(0.0)
    same_text(target("qwen3"), model, max_new_tokens=20)
    assert policy.skipped[:5] == [0, 0, 1, 0, 1]


def test_own_loop_with_left_padding(own_loop, target, drafter):
    ids = torch.cat([IDS.new_zeros(1, 2), IDS], dim=1)
    mask = (torch.arange(ids.shape[1]) >= 2).long()[None]
    same_text(target("qwen3"), drafter(), ids, context_text=lambda text: text[:, 2:], attention_mask=mask)


def test_own_loop_shows_processors_nothing_beyond_the_end(own_loop, target, drafter):
    class Bounded(LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert input_ids.shape[1] < IDS.shape[1] + 9
            return scores

    same_text(target("qwen3"), drafter(), logits_processor=lambda: [Bounded()], max_new_tokens=9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved drafter; its name is part of the module names under which remote code is loaded."""
    path = tmp_path_factory.mktemp("drafter") / "dspark_generate_drafter"
    load_drafter().save_pretrained(path)
    return path


def test_custom_generate(target, drafter, folder):
    model = target("qwen3")
    plain = model.generate(IDS, **NEW)
    arguments = {"custom_generate": str(folder), "trust_remote_code": True, **NEW}
    with record_speculation() as stats:
        assert torch.equal(model.generate(IDS, assistant_model=drafter(), **arguments), plain)
        output = model.generate(IDS, assistant_model=drafter(), return_dict_in_generate=True, **arguments)
    assert torch.equal(output.sequences, plain) and stats.acceptance_length > 1
    with pytest.raises(ValueError, match="assistant_model is None"):
        model.generate(IDS, **arguments)


def test_remote_code_drafter(target, folder, tmp_path):
    """A drafter whose code comes from its folder has classes of its own; it drafts, and saves a folder like its own."""
    remote_class = get_class_from_dynamic_module("modeling_dspark.DSparkDrafterModel", str(folder))
    remote = remote_class.from_pretrained(folder)
    assert not isinstance(remote, type(load_drafter())) and "transformers_modules" in remote_class.__module__
    with record_speculation() as stats:
        text = target("qwen3").generate(IDS, assistant_model=remote, **NEW)
    assert torch.equal(text, target("qwen3").generate(IDS, **NEW)) and stats.acceptance_length > 1
    remote.save_pretrained(tmp_path / "again")
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    again = {str(p.relative_to(tmp_path / "again")) for p in (tmp_path / "again").rglob("*") if p.is_file()}
    assert names == again and "custom_generate/generate.py" in names
    for name in names:
        if name.endswith(".py"):
            assert (folder / name).read_text() == (tmp_path / "again" / name).read_text()
    assert json.loads((folder / "config.json").read_text())["auto_map"]


# ------------------------------------------------------------------------------------------------------------- refusals


def tiny_t5():
    config = AutoConfig.for_model("t5", vocab_size=32, d_model=16, d_ff=16, d_kv=4, num_layers=2, num_heads=2)
    config.decoder_start_token_id = 0
    return AutoModelForSeq2SeqLM.from_config(config)


def tiny_mamba():
    config = AutoConfig.for_model("mamba", vocab_size=32, hidden_size=32, state_size=4, num_hidden_layers=3)
    return AutoModelForCausalLM.from_config(config)


def tiny_qwen3_next():
    from transformers import Qwen3NextConfig

    more = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    }
    layers = ["linear_attention", "full_attention", "linear_attention"]
    return tiny_target(Qwen3NextConfig, head_dim=8, layer_types=layers, **more)


def tiny_lfm2():
    from transformers import Lfm2Config

    return tiny_target(Lfm2Config, layer_types=["conv", "full_attention", "conv"])


def llama(**overrides):
    return tiny_target(LlamaConfig, **{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 6} | overrides)


def drafter_without_confidence():
    target = llama()
    model = tiny_drafter(target, enable_confidence_head=False)
    model.verify_policy = ConfidenceThreshold(0.5)
    return model


REFUSALS = {
    "guidance_scale": (llama, {"guidance_scale": 1.5}, "guidance_scale is 1.5, expected 1"),
    "ensemble": (llama, {"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight is 0.5, expected None"),
    "no cache": (llama, {"use_cache": False}, "use_cache is False, expected True"),
    "beams": (llama, {"num_beams": 2}, r"mode is beam_search \(num_beams 2\), expected greedy search or sampling"),
    "beam sampling": (llama, {"num_beams": 2, "do_sample": True}, "mode is beam_sample"),
    "contrastive": (llama, {"penalty_alpha": 0.6, "top_k": 4}, "[Cc]ontrastive"),
    "dola": (llama, {"dola_layers": "high"}, "mode is dola_generation"),
    "synced": (llama, {"synced_gpus": True}, "synced_gpus is True, expected False"),
    "synthid": (llama, {"do_sample": True, "watermarking_config": "synthid"}, "SynthIDTextWatermark.* keeps a state"),
    "encoder-decoder": (tiny_t5, {}, "'t5' is an encoder-decoder, expected a decoder-only model"),
    "mamba": (tiny_mamba, {}, "'mamba' has recurrent layers.*, whose state cannot be rolled back"),
    "qwen3_next": (tiny_qwen3_next, {}, r"'qwen3_next' has recurrent layers \['linear_attention'\], whose state"),
    "lfm2": (tiny_lfm2, {}, r"'lfm2' has recurrent layers \['conv'\], whose state"),
    "vocabulary": (lambda: llama(vocab_size=96), {}, "target with vocab_size 128, 'llama' has 96"),
    "hidden size": (lambda: llama(hidden_size=32), {}, "target with hidden_size 64, 'llama' has 32"),
    "layers": (lambda: llama(num_hidden_layers=5), {}, "target with num_target_layers 6, 'llama' has 5"),
    "no confidence": (llama, {"drafter": drafter_without_confidence}, "ConfidenceThreshold.* needs a confidence head"),
    "quantized cache": (llama, {CACHE_NAME: "quantized"}, "cache .* cannot take back refused tokens"),
}


def uncroppable_cache():
    cache = DynamicCache()
    cache.layers = [
        type("Layer", (), {"is_croppable": False, "is_compileable": False, "get_seq_length": lambda s: 0})()
    ]
    return cache


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_by_name_before_any_forward(drafter, name):
    make_target, arguments, message = REFUSALS[name]
    target, arguments = make_target(), dict(arguments)
    assistant = arguments.pop("drafter", drafter)()
    ids = arguments.pop("ids", IDS[:, :8])
    ids = ids % target.config.vocab_size
    if "watermarking_config" in arguments:
        from transformers import SynthIDTextWatermarkingConfig

        arguments["watermarking_config"] = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
    if CACHE_NAME in arguments:
        arguments[CACHE_NAME] = uncroppable_cache()
    forwards = []
    for module in (target, assistant, *target.children(), *assistant.children()):
        module.register_forward_pre_hook(lambda module, _: forwards.append(type(module).__name__))
    with pytest.raises(ValueError, match=message):
        target.generate(ids, assistant_model=assistant, **(NEW | arguments))
    for module in (assistant, *assistant.children()):
        module._forward_pre_hooks.clear()
    assert forwards == []
