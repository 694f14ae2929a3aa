"""Muon (Jordan et al., 2024) for the weight matrices of a drafter, AdamW for everything else, as one optimizer.

An update of a matrix is its momentum with the singular values brought near 1 by a few Newton–Schulz steps, so that rare
directions are learnt as fast as frequent ones. `torch.optim.Muon` takes matrices only, where `Trainer` takes one
optimizer, and computes in bfloat16, which CPUs without it in hardware do many times slower than float32.
"""

import torch
from torch import nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a X + b X³ + c X⁵: steep at 0, near 1 from 0.3 on


def orthogonalised(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """(m, n) → the same with singular values near 1, in float32."""
    wide = matrix.float() if matrix.shape[0] <= matrix.shape[1] else matrix.float().T
    wide = wide / (wide.norm() + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


class Muon(torch.optim.AdamW):
    """AdamW whose parameter groups marked `muon` are updated by orthogonalised momentum instead.

    Args:
        groups: parameter groups; those with `"muon": True` hold matrices. Each has its own `lr`.
        momentum: of the matrices' gradients, Nesterov's.
        steps: Newton–Schulz steps.
    """

    def __init__(self, groups: list[dict], momentum: float = 0.95, steps: int = 4, **adamw):
        super().__init__([{"muon": False, **group} for group in groups], **adamw)
        self.momentum, self.steps = momentum, steps

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kept = self.param_groups
        for group in kept:
            if group["muon"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)
        self.param_groups = [group for group in kept if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = kept
        return loss

    def _update(self, parameter: nn.Parameter, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            state["step"] = torch.zeros(())  # AdamW looks for it in every state that it loads
        state["momentum"].mul_(self.momentum).add_(parameter.grad)
        update = orthogonalised(parameter.grad + self.momentum * state["momentum"], self.steps)
        scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * scale)
