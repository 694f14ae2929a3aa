"""Configuration of a DSpark drafter: the flat keys of the official checkpoints, checked on construction.

A drafter is described by its parallel backbone (a few Qwen3 or Gemma-4 layers), the target layers it reads
(`target_layer_ids`), its block (γ = `block_size` slots, the first holding the anchor, the others `mask_token_id`), its
sequential head (`markov_rank`, `markov_head_type`) and its confidence head.
"""

from typing import Any

from transformers import PreTrainedConfig


BACKBONES = {"qwen3": "Qwen3DSparkModel", "gemma4_text": "Gemma4DSparkModel"}
MARKOV_HEADS = ("vanilla", "gated", "rnn")
_DRAFT_KEYS = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank",
               "enable_confidence_head")  # fmt: skip
_SHAPE_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
               "num_key_value_heads", "head_dim", "rope_parameters")  # fmt: skip
# Frequencies of these types depend on the length seen so far; cached context keys would be rotated by the wrong ones.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class DSparkConfig(PreTrainedConfig):
    r"""
    Args:
        backbone_type: `"qwen3"` or `"gemma4_text"`, the layer form of the parallel backbone.
        block_size: γ ≥ 1, tokens proposed per round.
        mask_token_id: token whose embedding fills slots 1..γ−1, in `0..vocab_size-1`.
        target_layer_ids: strictly increasing decoder layers of the target, 0-based, whose outputs are read; −1 is the
            embedding output, the last layer (`num_target_layers - 1`) is not allowed.
        num_target_layers: decoder layers of the target.
        markov_rank: rank r of the sequential head, 0 for none.
        markov_head_type: `"vanilla"`, `"gated"` or `"rnn"`; needed when `markov_rank > 0`.
        enable_confidence_head: whether survival probabilities are predicted.
        confidence_head_with_markov: whether the confidence head also reads W1[x_{k−1}]; needed with the head.
        num_anchors: blocks drawn per text in training.
        draft_vocab_size: size of a reduced draft vocabulary, or None for the target's whole one.
        has_embed_tokens, has_lm_head: False when the checkpoint leaves that module to the target.

    The other keys are those of `Qwen3Config` and `Gemma4TextConfig`. Nothing that shapes the model has a default: a key
    missing from a checkpoint raises `ValueError`.
    """

    model_type = "dspark"
    keys_to_ignore_at_inference = ["cache", "hidden_states"]

    backbone_type: str = "qwen3"
    # the block and what it reads
    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    num_anchors: int = 512
    # heads
    markov_rank: int | None = None
    markov_head_type: str | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
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
    def num_draft_logits(self) -> int:
        """Rows of the head that is drafted with: `draft_vocab_size`, or the whole vocabulary."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def rope(self) -> dict:
        """RoPE parameters of full attention, whether the file nests them by layer type or not."""
        return self.rope_parameters.get("full_attention", self.rope_parameters)

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> "DSparkConfig":
        """A Qwen3-form configuration fitting `target_config` (sizes, RoPE, special tokens).

        `overrides` must hold the draft keys: `block_size`, `mask_token_id`, `target_layer_ids`, `num_hidden_layers`,
        `markov_rank`, `enable_confidence_head` and what these require.
        """
        text = target_config.get_text_config()
        heads = text.num_attention_heads
        keys = {
            key: getattr(text, key)
            for key in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "max_position_embeddings",
                        "pad_token_id", "bos_token_id", "eos_token_id")
        }  # fmt: skip
        rope = text.rope_parameters
        keys |= {
            "num_target_layers": text.num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "rope_parameters": dict(rope.get("full_attention", rope)),
            "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
        }
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
        """Translates the official layout, which names the backbone by `model_type`; ours passes through."""
        kind = config_dict.get("model_type", cls.model_type)
        if kind == cls.model_type:
            return config_dict
        architectures = config_dict.get("architectures") or []
        if kind not in BACKBONES or BACKBONES[kind] not in architectures:
            expected = ", ".join(f"{kind!r} with {name!r}" for kind, name in BACKBONES.items())
            raise ValueError(
                f"not a DSpark checkpoint: model_type {kind!r} with architectures {architectures}; "
                f"expected {cls.model_type!r}, or {expected}"
            )
        own = {"model_type": cls.model_type, "backbone_type": kind, "architectures": ["DSparkDrafterModel"]}
        return config_dict | own

    def _check(self, extra: dict[str, Any]) -> None:
        """Raises `ValueError` for every value that would give a wrong model."""
        if self.backbone_type not in BACKBONES:
            raise ValueError(f"backbone_type is {self.backbone_type!r}, expected one of {sorted(BACKBONES)}")
        required = list(_SHAPE_KEYS + _DRAFT_KEYS)
        if self.backbone_type == "gemma4_text":
            required += ["global_head_dim"] + ["num_global_key_value_heads"] * self.attention_k_eq_v
        if self.markov_rank:
            required.append("markov_head_type")
        if self.enable_confidence_head:
            required.append("confidence_head_with_markov")
        missing = [key for key in required if getattr(self, key) is None]
        if missing:
            raise ValueError(f"the drafter's configuration lacks {missing}; these cannot be guessed")

        for key in ("block_size", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                    "num_target_layers", "num_anchors"):  # fmt: skip
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}, expected at least 1")
        queries, keys, head_dim = self.head_shape
        if keys < 1 or queries % keys:
            raise ValueError(f"{queries} attention heads cannot share {keys} key/value heads; expected a divisor")
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"the head dimension is {head_dim}, expected a positive even number")
        self._check_draft_keys()
        self._check_backbone(extra)

    def _check_draft_keys(self) -> None:
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}, expected 0..{self.vocab_size - 1} (vocab_size)")
        ids, last = list(self.target_layer_ids), self.num_target_layers - 1
        if not ids or any(not -1 <= i < last for i in ids):
            raise ValueError(
                f"target_layer_ids are {ids}, expected values in -1..{last - 1}: the target has {last + 1} layers, and "
                "the last one's output is only to be had after the final norm"
            )
        if any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
            raise ValueError(f"target_layer_ids are {ids}, expected strictly increasing values")
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank is {self.markov_rank}, expected 0 (no sequential head) or more")
        if self.markov_rank and self.markov_head_type not in MARKOV_HEADS:
            raise ValueError(f"markov_head_type is {self.markov_head_type!r}, expected one of {MARKOV_HEADS}")
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError("confidence_head_with_markov is True with markov_rank 0, expected a rank above 0")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}, expected 1..{self.vocab_size} (vocab_size)")

    def _check_backbone(self, extra: dict[str, Any]) -> None:
        kinds = self.layer_types
        if kinds is not None and (len(kinds) != self.num_hidden_layers or set(kinds) != {"full_attention"}):
            raise ValueError(f"layer_types are {kinds}, expected {self.num_hidden_layers} times 'full_attention'")
        if self.rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            raise ValueError(f"rope_type is {self.rope['rope_type']!r}, expected one that does not vary with length")
        for key in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers"):
            if extra.get(key):
                raise ValueError(f"{key} is {extra[key]}; the drafter's layers have no such part")


DSparkConfig.register_for_auto_class()
