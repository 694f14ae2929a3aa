"""The hook that lets plain `target.generate(..., assistant_model=drafter)` reach a drafter's own decoding loop.

`generate()` has no place to register an assistant, so three methods of `GenerationMixin` are wrapped when a drafter's
module is imported. The wrappers look for a method on the assistant and otherwise step aside: any other assistant,
prompt lookup, early exit and MTP go transformers' own way. They keep no state, install once however many copies of this
file are loaded (drafters often come as remote code, each with its own), and can be taken out again.
"""

import copy
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, GenerationMixin

_MARK = "_dspark_original"
_DECODING_ARGUMENTS = (
    "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"
)  # fmt: skip


def install_hook() -> None:
    """Wraps `GenerationMixin`; does nothing where that has been done."""
    for name, wrap in _WRAPPERS.items():
        method = getattr(GenerationMixin, name)
        if not hasattr(method, _MARK):
            wrapper = functools.wraps(method)(wrap(method))
            setattr(wrapper, _MARK, method)
            setattr(GenerationMixin, name, wrapper)


def uninstall_hook() -> None:
    """Puts transformers' own methods back."""
    for name in _WRAPPERS:
        method = getattr(GenerationMixin, name)
        setattr(GenerationMixin, name, getattr(method, _MARK, method))


def _drafter(assistant_model: Any, generation_config: GenerationConfig) -> Any:
    """The assistant if it decodes by itself and nothing else was asked for, else None. Found by a method, not a class:
    remote code has its own classes, and PEFT and compiled models pass attributes on."""
    other = (
        generation_config.prompt_lookup_num_tokens is not None
        or generation_config.assistant_early_exit is not None
        or getattr(generation_config, "use_mtp", False)
    )
    return assistant_model if not other and hasattr(assistant_model, "speculative_decode") else None


def _wrap_validate(original: Callable) -> Callable:
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        drafter = _drafter(generation_mode_kwargs.get("assistant_model"), generation_config)
        if drafter is not None:
            drafter.check_generation(self, generation_config)
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1  # refused there, as several rows are by transformers' own loop
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _wrap_assisted_decoding(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def _assisted_decoding(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        drafter = _drafter(given.get("assistant_model"), given["generation_config"])
        if drafter is None:
            return original(self, *args, **kwargs)
        ours = {name: given[name] for name in _DECODING_ARGUMENTS if name in given}
        return drafter.speculative_decode(self, **ours, **given.get("model_kwargs", {}))

    return _assisted_decoding


def _wrap_candidate_generator(original: Callable) -> Callable:
    signature = inspect.signature(original)

    def _get_candidate_generator(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        drafter = _drafter(given.get("assistant_model"), given["generation_config"])
        if drafter is None:
            return original(self, *args, **kwargs)
        return drafter.candidate_generator(
            self, given["generation_config"], given["logits_processor"], given["model_kwargs"]
        )

    return _get_candidate_generator


_WRAPPERS = {
    "_validate_generation_mode": _wrap_validate,
    "_assisted_decoding": _wrap_assisted_decoding,
    "_get_candidate_generator": _wrap_candidate_generator,
}


def generate(model, assistant_model=None, **kwargs):
    """`model.generate(..., assistant_model=drafter, custom_generate="org/drafter", trust_remote_code=True)`: the same
    call, for those who name the recipe. The folder's `custom_generate/generate.py` is the text of this function."""
    if assistant_model is None:
        raise ValueError("assistant_model is None, expected the drafter that this folder holds")
    return model.generate(assistant_model=assistant_model, **kwargs)


def save_custom_generate(folder: str | os.PathLike) -> None:
    """Writes `custom_generate/generate.py` into a drafter's folder."""
    path = Path(folder) / "custom_generate" / "generate.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(inspect.getsource(generate))
