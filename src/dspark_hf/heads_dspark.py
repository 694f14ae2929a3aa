"""The sequential (Markov) heads and the confidence head of DSpark (paper, section 3.1).

The backbone gives hidden states h_k and base logits U_k for all γ slots at once. A sequential head repairs the
dependence between neighbours, p_k ∝ exp(U_k + B_k), from the token x_{k−1} before slot k's own:

    vanilla   B_k = W2 W1[x_{k−1}]
    gated     B_k = W2 (σ(G [h_k ; W1[x_{k−1}]]) ⊙ W1[x_{k−1}])
    rnn       [g ; c ; o] = J [s_{k−1} ; W1[x_{k−1}] ; h_k],  s_k = σ(g) s_{k−1} + (1 − σ(g)) tanh(c),  B_k = W2 tanh(o)

The confidence head predicts how likely slot k's token is to be accepted, c_k = σ(w · [h_k ; W1[x_{k−1}]] + b), before
that token is drawn. Shapes: `...` leading dimensions, H hidden size, r rank, D draft vocabulary.
"""

import torch
from torch import nn


class VanillaMarkovHead(nn.Module):
    """Memoryless first-order head; `latent` → `project` is the interface that all heads share."""

    def __init__(self, config):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.num_draft_logits, bias=False)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """W1[x], (...) → (..., r)."""
        return self.markov_w1(token_ids)

    def latent(self, embedding, hidden, state=None):
        """One slot: W1[x_{k−1}] (..., r), h_k (..., H), s_{k−1} or None at slot 0 → (latent (..., r), s_k or None)."""
        return embedding, None

    def block_latents(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """All slots of a block whose tokens are known (training): (..., γ, r), (..., γ, H) → latents (..., γ, r)."""
        return self.latent(embeddings, hidden)[0]

    def project(self, latent: torch.Tensor) -> torch.Tensor:
        """The bias B_k added to the base logits, (..., r) → (..., D)."""
        return self.markov_w2(latent)


class GatedMarkovHead(VanillaMarkovHead):
    """The hidden state decides how much of each direction of W1[x_{k−1}] passes."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def latent(self, embedding, hidden, state=None):
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1)))
        return gate * embedding, None


class RNNMarkovHead(VanillaMarkovHead):
    """A gated recurrence, so that slot k sees the whole drafted prefix x_{<k} of its block."""

    def __init__(self, config):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def latent(self, embedding, hidden, state=None):
        state = torch.zeros_like(embedding) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, embedding, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1.0 - gate) * torch.tanh(candidate)

    def block_latents(self, embeddings, hidden):
        latents, state = [], None
        for k in range(embeddings.shape[-2]):
            latent, state = self.latent(embeddings[..., k, :], hidden[..., k, :], state)
            latents.append(latent)
        return torch.stack(latents, dim=-2)


MARKOV_HEAD_CLASSES = {"vanilla": VanillaMarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}


class ConfidenceHead(nn.Module):
    """Acceptance logit of a slot from its hidden state, with or without W1[x_{k−1}]; computed in float32."""

    def __init__(self, config):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + config.markov_rank * self.with_markov, 1)

    def forward(self, hidden: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        """h_k (..., H) and W1[x_{k−1}] (..., r) → logits (...), float32."""
        features = torch.cat([hidden, embedding.to(hidden.dtype)], dim=-1) if self.with_markov else hidden
        with torch.autocast(features.device.type, enabled=False):
            if self.proj.weight.dtype == torch.float32:
                return self.proj(features.float()).squeeze(-1)
            weight, bias = self.proj.weight.float(), self.proj.bias.float()
            return nn.functional.linear(features.float(), weight, bias).squeeze(-1)
