"""DFlash: the parallel backbone alone, the baseline that DSpark adds its heads to.

    [anchor, MASK, ...]  ──embed──►  parallel backbone over the target's states (one pass)  ─► p_k ∝ exp(U_k)

All slots are drawn independently of each other, and nothing predicts how many of them will be accepted. Two layouts:

- DeepSpec's is a DSpark drafter with `markov_rank` 0 and no confidence head: γ inputs and γ proposals, slot k predicts
  the token at anchor + k + 1.
- z-lab's (`DFlashDraftModel`) is *mask-filling*: each mask predicts the token at its own position, so n inputs make
  n − 1 proposals; embedding and head are the target's. It is what transformers runs by itself with
  `speculation_type="dflash"`, in modules named after the first such assistant, that of Muse Glimmer.

In this package γ = `block_size` counts proposals; in z-lab's and transformers' files `block_size` counts inputs.
"""

import os
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..modeling_dspark import DSparkDrafterModel

_NATIVE_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_NATIVE_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "head_dim", "hidden_act", "attention_dropout", "rms_norm_eps", "layer_types", "rope_parameters",
                "max_position_embeddings", "mask_token_id", "target_layer_ids", "bos_token_id", "eos_token_id",
                "pad_token_id")  # fmt: skip
_HEADLESS = {"markov_rank": 0, "enable_confidence_head": False}
# Mask-filling as z-lab and transformers do it: no modules of its own but the backbone.
_MASK_FILLING = _HEADLESS | {"sample_from_anchor": False, "has_embed_tokens": False, "has_lm_head": False}
# What transformers' modules have no place for.
_NATIVE_FORM = _MASK_FILLING | {"backbone_type": "qwen3", "draft_vocab_size": None, "attention_bias": False,
                                "final_logit_softcapping": None}  # fmt: skip


class DFlashDrafterModel(DSparkDrafterModel):
    """A DFlash drafter: a `DSparkDrafterModel` that has neither a sequential nor a confidence head, so that it drafts,
    decodes and trains as that does. `from_pretrained` takes DeepSpec's and z-lab's checkpoints as they are.

    Raises:
        ValueError: for a configuration with heads.
    """

    def __init__(self, config: DSparkConfig):
        _expect_form(config, _HEADLESS, "DFlash has no heads, see DSparkDrafterModel")
        super().__init__(config)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any):
        """Saves a `DSparkDrafterModel`, which a Hub folder with the code of DSpark alone can hold."""
        with torch.device("meta"):
            plain = DSparkDrafterModel(self.config)
        plain.load_state_dict(self.state_dict(), assign=True)
        plain.save_pretrained(save_directory, *args, **kwargs)


def to_native(drafter: DSparkDrafterModel) -> PreTrainedModel:
    """A copy of a mask-filling drafter as the assistant of transformers' own DFlash:

        target.generation_config.speculation_type = "dflash"
        target.generate(**inputs, assistant_model=to_native(drafter))

    Raises:
        ValueError: for a drafter that transformers' own form cannot express.
        ImportError: with transformers before 5.24.
    """
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel  # newer than the oldest supported

    config = drafter.config
    _expect_form(config, _NATIVE_FORM, "transformers' DFlash has no other form")
    keys = {key: getattr(config, key) for key in _NATIVE_KEYS}
    keys |= {"rope_parameters": {"rope_type": "default"} | config.rope, "block_size": config.num_block_inputs}
    state = {_NATIVE_NAMES.get(name, name): tensor.clone() for name, tensor in drafter.state_dict().items()}
    native = MuseGlimmerAssistantModel.from_pretrained(
        None, config=MuseGlimmerAssistantConfig(**keys), state_dict=state, dtype=drafter.dtype
    )
    return native.to(drafter.device).eval()


def from_native(native: PreTrainedModel, target_config: PreTrainedConfig) -> DFlashDrafterModel:
    """The inverse of `to_native`; `target_config` is of the target that the assistant was made for.

    Raises:
        ValueError: for layers of another form, such as sliding windows, and for a target that does not fit.
    """
    theirs, text = native.config, target_config.get_text_config()
    if theirs.hidden_size != text.hidden_size:
        raise ValueError(
            f"the target has hidden_size {text.hidden_size}, expected {theirs.hidden_size}, the assistant's"
        )
    keys = {key: getattr(theirs, key) for key in _NATIVE_KEYS}
    keys |= {"vocab_size": text.vocab_size, "num_target_layers": text.num_hidden_layers}
    config = DSparkConfig(**keys, **_MASK_FILLING, block_size=theirs.block_size - 1)
    ours = {name: key for key, name in _NATIVE_NAMES.items()}
    state = {ours.get(name, name): tensor.clone() for name, tensor in native.state_dict().items()}
    drafter = DFlashDrafterModel.from_pretrained(None, config=config, state_dict=state, dtype=native.dtype)
    return drafter.to(native.device).eval()


def _expect_form(config: DSparkConfig, form: dict[str, Any], reason: str) -> None:
    for key, expected in form.items():
        value = getattr(config, key)
        if value != expected:
            raise ValueError(f"{key} is {value!r}, expected {expected!r}: {reason}")
