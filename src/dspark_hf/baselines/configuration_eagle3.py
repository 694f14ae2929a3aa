"""Configuration of an EAGLE-3 drafter: what a DSpark drafter without heads has, and the layouts that it comes in.

Three layouts load: this package's, DeepSpec's (`Qwen3Eagle3Model`) and SpecForge's (`LlamaForCausalLMEagle3`: no norm
of queries and keys, often a reduced draft vocabulary, the target's embedding).
"""

from typing import Any

from ..configuration_dspark import DSparkConfig

_UNROLLED_STEPS = 7  # of both trainers; SpecForge's files do not say
_LAYOUTS = (("qwen3", "Qwen3Eagle3Model"), ("llama", "LlamaForCausalLMEagle3"))


class Eagle3Config(DSparkConfig):
    r"""
    Args:
        block_size: γ, tokens proposed per round and steps that training unrolls (DeepSpec's `ttt_length`).
        target_layer_ids: as in `DSparkConfig`; SpecForge's files that name none read layers 1, L/2 − 1 and L − 4 of L.
        num_target_layers: as in `DSparkConfig`. SpecForge's files do not have it: pass `num_target_layers=` to
            `from_pretrained`.
        qk_norm: whether queries and keys are normed, as in Qwen3 and not in Llama.
        step_loss_decay: β in (0, 1), what a step weighs in training relative to the one before.

    The other keys are those of `DSparkConfig`; there is one layer, in Qwen3 form, and neither a sequential nor a
    confidence head.
    """

    model_type = "eagle3"
    _auto_class = None  # a baseline is used with this package installed, not as remote code

    num_hidden_layers: int = 1
    markov_rank: int = 0
    enable_confidence_head: bool = False
    mask_token_id: int = 0  # of `DSparkConfig`; nothing is masked here
    qk_norm: bool = True
    step_loss_decay: float = 0.8

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        layers = kwargs.get("num_target_layers")
        config_dict, kwargs = super(DSparkConfig, cls).get_config_dict(pretrained_model_name_or_path, **kwargs)
        known = {} if layers is None else {"num_target_layers": layers}
        return cls._from_official(config_dict | known), kwargs

    @classmethod
    def _from_official(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
        kind = config_dict.get("model_type", cls.model_type)
        if kind == cls.model_type:
            return config_dict
        architectures = config_dict.get("architectures") or []
        if not any(kind == model_type and name in architectures for model_type, name in _LAYOUTS):
            expected = ", ".join(f"{model_type!r} with {name!r}" for model_type, name in _LAYOUTS)
            raise ValueError(
                f"not an EAGLE-3 checkpoint: model_type {kind!r} with architectures {architectures}; "
                f"expected {cls.model_type!r}, or {expected}"
            )
        keys = config_dict | {"model_type": cls.model_type, "architectures": ["Eagle3DrafterModel"]}
        if kind == "llama":
            return _from_specforge(keys)
        _refuse_other(keys, "draft_num_hidden_layers", 1)
        keys.pop("draft_num_hidden_layers", None)
        return keys | {"block_size": keys.pop("ttt_length", None)}

    def _check(self, extra: dict[str, Any]) -> None:
        for key, value in (
            ("backbone_type", "qwen3"),
            ("num_hidden_layers", 1),
            ("markov_rank", 0),
            ("enable_confidence_head", False),
            ("sts_temperatures", None),
        ):
            _refuse_other({key: getattr(self, key)}, key, value)
        super()._check(extra)
        beta = self.step_loss_decay
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 < beta < 1:
            raise ValueError(f"step_loss_decay is {beta!r}, expected a number in (0, 1)")


def _from_specforge(keys: dict[str, Any]) -> dict[str, Any]:
    """SpecForge's keys → ours."""
    eagle = keys.pop("eagle_config", None) or {}
    _refuse_other(eagle, "use_aux_hidden_state", True)
    _refuse_other(keys, "norm_before_residual", False)
    if "hidden_size" in keys:
        _refuse_other(keys, "target_hidden_size", keys["hidden_size"])
    layers = keys.get("num_target_layers")
    if layers is None:
        raise ValueError("num_target_layers is missing, as in all files of SpecForge: pass it to from_pretrained")
    ours = {
        "qk_norm": False,
        "block_size": keys.get("block_size", _UNROLLED_STEPS),
        "target_layer_ids": eagle.get("eagle_aux_hidden_state_layer_ids") or [1, layers // 2 - 1, layers - 4],
    }
    if keys.get("head_dim") is None and {"hidden_size", "num_attention_heads"} <= keys.keys():
        ours["head_dim"] = keys["hidden_size"] // keys["num_attention_heads"]
    return keys | ours


def _refuse_other(keys: dict[str, Any], name: str, expected: Any) -> None:
    if keys.get(name, expected) not in (expected, None):
        raise ValueError(f"{name} is {keys[name]!r}, expected {expected!r}: the EAGLE-3 drafter here has no other form")
