"""The one layer of EAGLE-3: attention over pairs of a token and the state before it.

    pair_t = [input_layernorm(embed(x_{t+1})) ; hidden_norm(h_t)]      (2H wide)
    a_t = h_t + attention(pair)_t,   o_t = a_t + mlp(post_attention_layernorm(a_t))

The residual stream carries h_t itself, without a norm. H hidden size.
"""

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

from ..backbone_dspark import RMS_NORMS, DSparkAttention, DSparkDecoderLayer, rotate
from .configuration_eagle3 import Eagle3Config


class Eagle3Attention(DSparkAttention):
    """Attention of pairs, twice as wide as the residual stream."""

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(self, name).out_features
            setattr(self, name, nn.Linear(2 * config.hidden_size, width, bias=config.attention_bias))
        if not config.qk_norm:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, pairs, key, value, cos, sin, attention_mask=None):
        """Pairs (B, Q, 2H), all keys and values (B, key/value heads, C, dim) → (B, Q, H); cos, sin of the pairs'
        positions (B, Q, dim); mask over C columns."""
        query = self.q_norm(self.q_proj(pairs).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, _ = attend(
            self,
            rotate(query, cos, sin),
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=dropout,
            is_causal=False,
        )
        return self.o_proj(output.flatten(2))


class Eagle3DecoderLayer(DSparkDecoderLayer):
    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        self.self_attn = Eagle3Attention(config)
        self.hidden_norm = RMS_NORMS[config.backbone_type](config.hidden_size, eps=config.rms_norm_eps)

    def pairs(self, embeds: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Embeddings and states (B, n, H) each → (B, n, 2H)."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden_states)], dim=-1)

    def forward(self, hidden_states, *attention_arguments):
        """(B, Q, H) → o (B, Q, H); arguments as in `Eagle3Attention.forward`."""
        hidden_states = hidden_states + self.self_attn(*attention_arguments)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
