"""Configuration of a DSpark drafter: the flat keys of the official checkpoints, checked on construction.

A drafter is described by its parallel backbone (a few Qwen3 or Gemma-4 layers), the target layers it reads
(`target_layer_ids`), its block (γ = `block_size` slots, the first holding the anchor, the others `mask_token_id`), its
sequential head (`markov_rank`, `markov_head_type`) and its confidence head.
"""

from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

BACKBONES = {"qwen3": "Qwen3DSparkModel", "gemma4_text": "Gemma4DSparkModel"}
ZLAB_DFLASH = "DFlashDraftModel"
MARKOV_HEADS = ("vanilla", "gated", "rnn")
_DRAFT_KEYS = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank",
               "enable_confidence_head")  # fmt: skip
_SHAPE_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
               "num_key_value_heads", "head_dim", "rope_parameters")  # fmt: skip
_ZLAB_KEYS = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
# The others' frequencies depend on the length seen so far: cached context keys would be rotated by the wrong ones.
_ROPE_TYPES = {"qwen3": ("default", "linear", "llama3", "yarn"), "gemma4_text": ("default", "proportional")}


class DSparkConfig(PreTrainedConfig):
    r"""
    Args:
        backbone_type: `"qwen3"` or `"gemma4_text"`, the layer form of the parallel backbone.
        block_size: γ ≥ 1, tokens proposed per round.
        sample_from_anchor: whether the anchor's own slot proposes a token, so that a block has γ inputs. False is
            mask-filling (DFlash): γ + 1 inputs, of which the anchor's proposes nothing.
        mask_token_id: token whose embedding fills all slots but the anchor's, in `0..vocab_size-1`.
        target_layer_ids: strictly increasing decoder layers of the target, 0-based, whose outputs are read; −1 is the
            embedding output, the last layer (`num_target_layers - 1`) is not allowed.
        num_target_layers: decoder layers of the target.
        markov_rank: rank r of the sequential head, 0 for none.
        markov_head_type: `"vanilla"`, `"gated"` or `"rnn"`; needed when `markov_rank > 0`.
        enable_confidence_head: whether survival probabilities are predicted.
        confidence_head_with_markov: whether the confidence head also reads W1[x_{k−1}]; needed with the head.
        sts_temperatures: γ temperatures above 0 that divide the confidence logits of slots 0..γ−1 when verify lengths
            are decided (sequential temperature scaling), or None for the logits as they are.
        num_anchors: blocks drawn per text in training.
        draft_vocab_size: size of a reduced draft vocabulary, or None for the target's whole one.
        has_embed_tokens, has_lm_head: False when the checkpoint leaves that module to the target.

    The other keys are those of `Qwen3Config` and `Gemma4TextConfig`. Nothing that shapes the model has a default: a key
    missing from a checkpoint raises `ValueError`.
    """

    model_type = "dspark"
    keys_to_ignore_at_inference = ["cache", "hidden_states"]
    has_no_defaults_at_init = True  # transformers 5.18 would build a default configuration when it prints or saves one

    backbone_type: str = "qwen3"
    # the block and what it reads
    block_size: int | None = None
    sample_from_anchor: bool = True
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    num_anchors: int = 512
    # heads
    markov_rank: int | None = None
    markov_head_type: str | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    sts_temperatures: list[float] | None = None
    # embeddings and vocabulary
    vocab_size: int | None = None
    draft_vocab_size: int | None = None
    has_embed_tokens: bool = True
    has_lm_head: bool = True
    final_logit_softcapping: float | None = None
    # layers
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_global_key_value_heads: int | None = None
    global_head_dim: int | None = None
    attention_k_eq_v: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    hidden_act: str = "silu"
    layer_types: list[str] | None = None
    rope_parameters: dict | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any):
        # Gemma configurations say `hidden_activation`; inside there is one name.
        self.hidden_act = kwargs.pop("hidden_activation", None) or self.hidden_act
        if kwargs.get("rope_theta") is not None:  # the flat RoPE keys of transformers 4
            kwargs = self.convert_rope_params_to_dict(**kwargs)
        self._check(kwargs)
        self.target_layer_ids = list(self.target_layer_ids)
        self.layer_types = self.layer_types or ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)

    @property
    def head_shape(self) -> tuple[int, int, int]:
        """(query heads, key/value heads, head dimension) of the backbone's attention."""
        if self.backbone_type == "qwen3":
            return self.num_attention_heads, self.num_key_value_heads, self.head_dim
        kv_heads = self.num_global_key_value_heads if self.attention_k_eq_v else self.num_key_value_heads
        return self.num_attention_heads, kv_heads, self.global_head_dim

    @property
    def num_block_inputs(self) -> int:
        """Inputs of a block: the anchor and its masks."""
        return self.block_size if self.sample_from_anchor else self.block_size + 1

    @property
    def num_draft_logits(self) -> int:
        """Rows of the head that is drafted with: `draft_vocab_size`, or the whole vocabulary."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def rope(self) -> dict:
        """RoPE parameters of full attention, whether the file nests them by layer type or not."""
        return self.rope_parameters.get("full_attention", self.rope_parameters)

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> "DSparkConfig":
        """A configuration fitting `target_config` (sizes, RoPE, special tokens), in Qwen3 form, or for a Gemma-4 target
        in its own (`backbone_type="gemma4_text"`).

        `overrides` must hold the draft keys: `block_size`, `mask_token_id`, `target_layer_ids`, `num_hidden_layers`,
        `markov_rank`, `enable_confidence_head` and what these require; and what the target has no equal of.
        """
        text = target_config.get_text_config()
        copied = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                  "head_dim", "rms_norm_eps", "max_position_embeddings", "final_logit_softcapping", "pad_token_id",
                  "bos_token_id", "eos_token_id"]  # fmt: skip
        form = overrides.get("backbone_type", cls.backbone_type)
        # The plain values first: attributes that vary from layer to layer refuse to be read.
        plain = text.to_dict()
        keys = {key: plain[key] if key in plain else getattr(text, key, None) for key in copied}
        if form == "gemma4_text":
            # The sizes of full attention; since transformers 5.18 given per layer, where they differ from the others'.
            full = max((plain.get("per_layer_config") or {}).items(), default=("", {}))[1]
            keys["global_head_dim"] = plain.get("global_head_dim") or full.get("head_dim", plain["head_dim"])
            shared = plain.get("num_global_key_value_heads") or full.get("num_key_value_heads")
            keys["num_global_key_value_heads"] = shared or plain["num_key_value_heads"]
            keys |= {"attention_k_eq_v": plain["attention_k_eq_v"], "hidden_act": plain["hidden_activation"]}
        keys = {key: value for key, value in keys.items() if value is not None}
        heads = keys["num_attention_heads"]
        keys["num_target_layers"] = text.num_hidden_layers
        keys.setdefault("num_key_value_heads", heads)
        keys.setdefault("head_dim", keys["hidden_size"] // heads)
        rope = getattr(text, "rope_parameters", None)
        if rope is not None:
            rope = dict(rope.get("full_attention", rope))
            if form != "gemma4_text":
                rope.pop("partial_rotary_factor", None)  # all dimensions of the drafter's heads rotate
                if rope.get("rope_type") == "proportional":
                    rope["rope_type"] = "default"
            keys["rope_parameters"] = rope
        return cls(**keys | overrides)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return cls._from_official(config_dict), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        return super().from_dict(cls._from_official(config_dict), **kwargs)

    @classmethod
    def _from_official(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
        """Translates z-lab's and the official layout, which names the backbone by `model_type`; ours passes through."""
        kind = config_dict.get("model_type", cls.model_type)
        if kind == cls.model_type:
            return config_dict
        architectures = config_dict.get("architectures") or []
        if kind == "qwen3" and ZLAB_DFLASH in architectures:
            return cls._from_zlab(config_dict)
        if kind not in BACKBONES or BACKBONES[kind] not in architectures:
            expected = ", ".join(f"{kind!r} with {name!r}" for kind, name in BACKBONES.items())
            raise ValueError(
                f"not a DSpark checkpoint: model_type {kind!r} with architectures {architectures}; "
                f"expected {cls.model_type!r}, or {expected}, or 'qwen3' with {ZLAB_DFLASH!r}"
            )
        own = {"model_type": cls.model_type, "backbone_type": kind, "architectures": ["DSparkDrafterModel"]}
        return config_dict | own

    @classmethod
    def _from_zlab(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
        """Translates z-lab's DFlash: mask-filling, no heads, embedding and head lent by the target, the draft's keys in
        `dflash_config`. Its `block_size` counts inputs, of which the anchor's proposes nothing."""
        nested = config_dict.get("dflash_config") or {}
        _expect(isinstance(nested, dict), "dflash_config", nested, f"an object with {list(_ZLAB_KEYS)}")
        unknown = sorted(key for key, value in nested.items() if value and key not in _ZLAB_KEYS)
        _expect(not unknown, "dflash_config with", unknown, f"none but {list(_ZLAB_KEYS)}: there is no such part here")
        keys = {key: value for key, value in config_dict.items() if key not in ("dflash_config", "auto_map")}
        keys |= {key: nested[key] for key in _ZLAB_KEYS if key in nested}
        inputs = keys.get("block_size")
        if inputs is not None:
            _expect(_is_int(inputs, 2), "block_size", inputs, "an integer of at least 2, the anchor's input included")
            keys["block_size"] = inputs - 1
        lent = {"has_embed_tokens": False, "has_lm_head": False, "tie_word_embeddings": False}
        headless = {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}
        own = {"model_type": cls.model_type, "backbone_type": "qwen3", "architectures": ["DSparkDrafterModel"]}
        return keys | lent | headless | own

    def _check(self, extra: dict[str, Any]) -> None:
        """Raises `ValueError` for every value that would give a wrong model; `extra`: keys that are not fields."""
        _expect(self.backbone_type in BACKBONES, "backbone_type", self.backbone_type, f"one of {sorted(BACKBONES)}")
        gemma_sizes = []
        if self.backbone_type == "gemma4_text":
            gemma_sizes = ["global_head_dim"] + ["num_global_key_value_heads"] * self.attention_k_eq_v
        required = [*_SHAPE_KEYS, *_DRAFT_KEYS, *gemma_sizes]
        required += ["markov_head_type"] if self.markov_rank else []
        required += ["confidence_head_with_markov"] if self.enable_confidence_head else []
        missing = [key for key in required if getattr(self, key) is None]
        if "rope_parameters" not in missing and self.rope.get("rope_theta") is None:
            missing.append("rope_theta (in rope_parameters)")
        if missing:
            raise ValueError(f"the drafter's configuration lacks {missing}; these cannot be guessed")

        sizes = {*_SHAPE_KEYS, *gemma_sizes, "block_size", "num_target_layers", "num_anchors"} - {"rope_parameters"}
        for key in sorted(sizes):
            _expect(_is_int(getattr(self, key), 1), key, getattr(self, key), "an integer of at least 1")
        self._check_draft_keys()
        self._check_backbone(extra)

    def _check_draft_keys(self) -> None:
        from_anchor = self.sample_from_anchor
        _expect(isinstance(from_anchor, bool), "sample_from_anchor", from_anchor, "True or False")
        mask, reduced, whole = self.mask_token_id, self.draft_vocab_size, self.vocab_size
        _expect(_is_int(mask, 0, whole - 1), "mask_token_id", mask, f"0..{whole - 1} (vocab_size {whole})")
        fits = reduced is None or _is_int(reduced, 1, whole)
        _expect(fits, "draft_vocab_size", reduced, f"None or 1..{whole} (vocab_size)")
        ids, last = self.target_layer_ids, self.num_target_layers - 1
        fits = isinstance(ids, (list, tuple)) and ids and all(_is_int(i, -1, last - 1) for i in ids)
        layers = f"the target has {last + 1} layers, and the last one's output is only to be had after the final norm"
        _expect(fits, "target_layer_ids", ids, f"a list of values in -1..{last - 1}: {layers}")
        increasing = all(a < b for a, b in zip(ids, ids[1:], strict=False))
        _expect(increasing, "target_layer_ids", ids, "strictly increasing values")
        rank, head = self.markov_rank, self.markov_head_type
        _expect(_is_int(rank, 0), "markov_rank", rank, "0 (no sequential head) or more")
        _expect(not rank or head in MARKOV_HEADS, "markov_head_type", head, f"one of {MARKOV_HEADS}")
        if self.enable_confidence_head and self.confidence_head_with_markov:
            _expect(rank > 0, "markov_rank", rank, "above 0, since confidence_head_with_markov is True")
        scales, slots = self.sts_temperatures, self.block_size
        fits = isinstance(scales, (list, tuple)) and len(scales) == slots and all(map(_is_temperature, scales))
        _expect(scales is None or fits, "sts_temperatures", scales, f"None or block_size = {slots} numbers above 0")

    def _check_backbone(self, extra: dict[str, Any]) -> None:
        queries, keys, head_dim = self.head_shape
        _expect(queries % keys == 0, "num_attention_heads", queries, f"a multiple of the {keys} key/value heads")
        _expect(head_dim % 2 == 0, "the head dimension", head_dim, "an even number")
        kinds, layers = self.layer_types, self.num_hidden_layers
        full = kinds is None or list(kinds) == ["full_attention"] * layers
        _expect(full, "layer_types", kinds, f"{layers} times 'full_attention'")
        _expect(self.hidden_act in ACT2FN, "hidden_act", self.hidden_act, f"one of {sorted(ACT2FN)}")
        tied = self.tie_word_embeddings
        _expect(not tied, "tie_word_embeddings", tied, "False: a drafter's head is its own or the target's")
        kind, kinds = self.rope.get("rope_type", "default"), _ROPE_TYPES[self.backbone_type]
        _expect(kind in kinds, "rope_type", kind, f"one of {kinds}, whose frequencies do not vary with length")
        factor = self.rope.get("partial_rotary_factor", 1.0)
        whole = factor == 1.0 or kind == "proportional"
        _expect(whole, "partial_rotary_factor", factor, f"1.0 with rope_type {kind!r}")
        for key in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers", "use_sliding_window"):
            _expect(not extra.get(key), key, extra.get(key), "none: the drafter's layers have no such part")


def _is_int(value: Any, least: int, most: float = float("inf")) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_temperature(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _expect(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}, expected {expected}")


DSparkConfig.register_for_auto_class()
