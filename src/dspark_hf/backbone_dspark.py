"""The parallel backbone of DSpark (paper, section 3.1): a few decoder layers over [context ; block].

Keys and values of the context come from the target's hidden states, hidden_norm(fc(concat)), the same for every layer
and not normed again; queries only from the block [anchor, MASK × γ−1]. Inside a block attention is bidirectional, the
context lies strictly before the anchor. RoPE positions are absolute positions of the text.

Two layer forms, Qwen3 and Gemma-4 (sandwich norms, layer scalar, attention scale 1, value norm, K = V on request).
"""

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, eager_attention_forward, rotate_half

RMS_NORMS = {"qwen3": Qwen3RMSNorm, "gemma4_text": Gemma4RMSNorm}


class DSparkRotaryEmbedding(nn.Module):
    """cos and sin of absolute positions. Frequencies are a plain float32 attribute, neither parameter nor buffer:
    `.to(bfloat16)` does not round them (4.7 rad of phase at position 4096), and loading on meta does not lose them."""

    def __init__(self, config):
        super().__init__()
        with torch.device("cpu"):
            self._frequencies, self.scaling = _rope_frequencies(config)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, n) → cos, sin (B, n, head dimension)."""
        if self._frequencies.device != position_ids.device:
            self._frequencies = self._frequencies.to(position_ids.device)
        angles = position_ids[..., None].float() * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def _rope_frequencies(config) -> tuple[torch.Tensor, float]:
    rope, head_dim = config.rope, config.head_shape[2]
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "proportional"):
        nested = "full_attention" if "full_attention" in config.rope_parameters else None
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=nested)
    # "proportional" (Gemma-4) rotates the first part of the dimensions, at the frequencies the whole would have.
    rotated = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
    frequencies = rope["rope_theta"] ** -(torch.arange(0, 2 * rotated, 2, dtype=torch.float32) / head_dim)
    return nn.functional.pad(frequencies, (0, head_dim // 2 - rotated)), 1.0


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE: (B, heads, n, dim) by the angles of cos, sin (B, n, dim)."""
    return states * cos[:, None] + rotate_half(states) * sin[:, None]


class DSparkAttention(nn.Module):
    """Attention of block queries over [context ; block]. `key_value` makes both parts' keys and values."""

    def __init__(self, config):
        super().__init__()
        gemma = config.backbone_type == "gemma4_text"
        norm = RMS_NORMS[config.backbone_type]
        heads, kv_heads, self.head_dim = config.head_shape
        self.config = config
        self.num_key_value_groups = heads // kv_heads
        self.scaling = 1.0 if gemma else self.head_dim**-0.5
        self.is_causal = False
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        shares_value = gemma and config.attention_k_eq_v
        self.v_proj = None if shares_value else nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = norm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = norm(self.head_dim, eps=config.rms_norm_eps)
        self.v_norm = (
            Gemma4RMSNorm(self.head_dim, eps=config.rms_norm_eps, with_scale=False) if gemma else nn.Identity()
        )

    def key_value(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """(B, n, H) → rotated keys and values, each (B, key/value heads, n, head dimension)."""
        shape = (-1, self.head_dim)
        key = self.k_proj(states).unflatten(-1, shape)
        value = key if self.v_proj is None else self.v_proj(states).unflatten(-1, shape)
        key, value = self.k_norm(key).transpose(1, 2), self.v_norm(value).transpose(1, 2)
        return rotate(key, cos, sin), value

    def forward(self, hidden_states, context_key, context_value, cos, sin, attention_mask=None):
        """Block (B, Q, H), context keys and values (B, key/value heads, C, dim) → (B, Q, H); cos, sin of the block's
        positions (B, Q, dim); mask over C + Q columns."""
        query = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        query = rotate(self.q_norm(query).transpose(1, 2), cos, sin)
        key, value = self.key_value(hidden_states, cos, sin)
        key, value = torch.cat([context_key, key], dim=2), torch.cat([context_value, value], dim=2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, _ = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, is_causal=False
        )
        return self.o_proj(output.flatten(2))


class DSparkMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class DSparkDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config):
        super().__init__()
        norm = RMS_NORMS[config.backbone_type]
        self.self_attn = DSparkAttention(config)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.gemma = config.backbone_type == "gemma4_text"
        if self.gemma:
            self.pre_feedforward_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
            self.post_feedforward_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
            self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, hidden_states, *attention_arguments):
        """(B, Q, H) → (B, Q, H); arguments as in `DSparkAttention.forward`."""
        attended = self.self_attn(self.input_layernorm(hidden_states), *attention_arguments)
        if not self.gemma:
            hidden_states = hidden_states + attended
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return (hidden_states + self.post_feedforward_layernorm(fed)) * self.layer_scalar
