"""What a drafter needs of its target: the fit of the pair, and the hidden states that it reads.

Only the target's public face is used (`config`, `get_input_embeddings`, `get_output_embeddings`, `get_decoder`), so
that any decoder-only model of transformers, wrapped by PEFT or quantised, can be one.
"""

import inspect

import torch
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.utils import output_capturing

# The name under which models take and return their cache: "cache" since transformers 5.24.
CACHE_NAME = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# Whether `output_hidden_states=[...]` selects indices of `hidden_states`, whose first entry is the embedding output, or
# (before transformers 5.24) decoder layers, without that entry.
_STATES_BY_INDEX = hasattr(output_capturing, "resolve_hidden_states_indices")

# Layers with a recurrent state, which cannot take back a rejected token.
_RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "hybrid")


def check_pair(target: PreTrainedModel, drafter: PreTrainedModel) -> None:
    """Raises `ValueError` where `drafter` cannot draft for `target`."""
    config, draft = target.config.get_text_config(), drafter.config
    name = target.config.model_type
    if target.config.is_encoder_decoder:
        raise ValueError(f"the target {name!r} is an encoder-decoder, expected a decoder-only model")
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = sorted(kind for kind in kinds if kind.startswith(_RECURRENT_LAYERS))
    if recurrent or target._is_stateful:
        raise ValueError(
            f"the target {name!r} has recurrent layers{f' {recurrent}' if recurrent else ''}, whose state cannot be "
            "rolled back when a drafted token is rejected; expected a model with attention layers only"
        )
    for key, theirs in (
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.hidden_size),
        ("num_target_layers", config.num_hidden_layers),
    ):
        if getattr(draft, key) != theirs:
            raise ValueError(
                f"the drafter was made for a target with {key} {getattr(draft, key)}, {name!r} has {theirs}"
            )


def check_croppable(cache: Cache) -> None:
    """Raises `ValueError` where `cache` cannot take back tokens."""
    if not cache.is_croppable:
        raise ValueError(f"the cache {type(cache).__name__} cannot take back refused tokens, expected one that can")


def cache_of(outputs) -> Cache:
    """The cache in a model's outputs."""
    return outputs[CACHE_NAME]


def cache_length(cache: Cache) -> int:
    """Tokens held."""
    return int(cache.get_seq_length())


def is_static(cache: Cache) -> bool:
    """Whether the cache has a fixed number of places."""
    return bool(cache.is_compileable)


def key_columns(cache: Cache, layer_idx: int, count: int, later: int) -> slice:
    """Which of a pass's `count` key columns `generate()` would show for a token that `later` others followed in the
    same pass: those up to the token, as far as the layer's window reaches. A static cache shows all of its places."""
    if is_static(cache):
        return slice(None)
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None  # layers that share keys have none
    window = layer.sliding_window if getattr(layer, "is_sliding", False) else count
    return slice(max(0, count - later - window), count - later)


def states_argument(layer_ids: list[int]) -> list[int] | bool:
    """The value of `output_hidden_states` that makes a model return what `context_states` reads, and no more."""
    if _STATES_BY_INDEX:
        return [layer_id + 1 for layer_id in layer_ids]
    return True if -1 in layer_ids else list(layer_ids)


def context_states(hidden_states: tuple[torch.Tensor | None, ...], layer_ids: list[int]) -> torch.Tensor:
    """The states a drafter reads, side by side: a model's `hidden_states`, (B, T, H) each → (B, T, L·H)."""
    # A selection by layers has no entry for the embedding output, and none of the last layer.
    offset = 1 if _STATES_BY_INDEX or all(states is not None for states in hidden_states) else 0
    states = [hidden_states[layer_id + offset] for layer_id in layer_ids]
    return torch.cat([state.to(states[-1].device) for state in states], dim=-1)


@torch.no_grad()
def target_states(
    target: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, layer_ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the target over known text, without its vocabulary projection.

    Args:
        input_ids, attention_mask: (B, T), right-padded.

    Returns:
        The context states (B, T, L·H) and the states after the final norm (B, T, H).
    """
    outputs = target.get_decoder()(
        input_ids=input_ids,
        attention_mask=attention_mask,
        output_hidden_states=states_argument(layer_ids),
        use_cache=False,
    )
    return context_states(outputs.hidden_states, layer_ids), outputs.last_hidden_state
