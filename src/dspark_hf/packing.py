"""Linear layers with weights packed once for oneDNN, so that verifying γ+1 tokens on a CPU costs little more than one.

Speculation pays off when one forward over γ+1 tokens costs about as much as a forward over one. On CPUs that is up to
the kernel: `F.linear` switches from a matrix-vector to a matrix-matrix product at two tokens and nearly doubles its
time, while oneDNN, given the weight in its blocked layout, streams it once whatever the (small) number of tokens.
"""

import platform

import torch
from torch import nn

# The layout is chosen for this many rows per call, a verify pass, and is as fast as any at one row. A hint of 1 picks a
# matrix-vector layout instead, about 1.5 times slower from two rows on.
ROWS_HINT = 8


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on the CPU, holding only the packed copy of the weight.

    `weight` is that copy: an opaque tensor whose shape, dtype and device read as usual, with the values in
    `weight.to_dense()`. It follows no `.to()` and has no gradient; `state_dict()` holds dense values, so saving works.

    Args:
        linear: float32, or bfloat16 where the CPU supports it, on the CPU; left as it is.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        _check_packable(linear)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) in the weight's dtype -> (..., out_features)."""
        if x.dtype != self.weight.dtype or x.shape[-1] != self.in_features:
            expected = f"(..., {self.in_features}) in {self.weight.dtype}"
            raise ValueError(f"PackedLinear expects {expected}, got {tuple(x.shape)} in {x.dtype}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("PackedLinear computes no gradients: call it under torch.no_grad()")
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.to_dense()
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(model: nn.Module) -> nn.Module:
    """Replaces the `nn.Linear` layers of `model` in place by a `PackedLinear`, freezes the rest, and returns the model.

    A drafter that takes rows of its target's head packs these too. Each original weight is dropped as soon as its copy
    is made, unless another module holds it too: a head tied to the embedding costs one more copy. Subclasses of
    `nn.Linear` are left alone, since their forward may do something else, and so are layers with a single output, whose
    product takes three times as long when packed.

    Raises:
        ValueError: the model is in training mode, or a layer is not on the CPU or of a dtype this CPU cannot pack;
            nothing has been replaced then.
    """
    if model.training:
        raise ValueError("packed layers are for inference only: call model.eval() first")
    paths: dict[nn.Linear, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear and module.out_features > 1:
            paths.setdefault(module, []).append(path)
    for linear in paths:
        _check_packable(linear)
    model.requires_grad_(False)
    while paths:
        linear, places = paths.popitem()
        packed = PackedLinear(linear).eval()
        for path in places:
            model.set_submodule(path, packed)
    if hasattr(model, "head_layout"):
        model.head_layout = PackedLinear
    return model


def packed_where_possible(model: nn.Module, pack: bool = True) -> nn.Module:
    """The model packed in place if it is on the CPU and of a dtype that can be packed here, else as it is: not every
    build of torch has oneDNN. `pack` false leaves it as it is too."""
    return pack_linears(model) if pack and model.device.type == "cpu" and model.dtype in _packable_dtypes() else model


def is_packed(model: nn.Module) -> bool:
    """Whether any layer of the model is packed."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


def preferred_cpu_dtype() -> torch.dtype:
    """bfloat16 where this CPU multiplies it in hardware (half the memory traffic), else float32."""
    in_hardware = platform.machine().lower() in ("aarch64", "arm64") or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if in_hardware and torch.bfloat16 in _packable_dtypes() else torch.float32


def _packable_dtypes() -> tuple[torch.dtype, ...]:
    if not torch.backends.mkldnn.is_available():
        return ()
    return (torch.float32, torch.bfloat16) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else (torch.float32,)


def _check_packable(linear: nn.Linear) -> None:
    dtypes = _packable_dtypes()
    if linear.weight.device.type != "cpu" or linear.weight.dtype not in dtypes:
        raise ValueError(
            f"can pack linear layers on the CPU in {[str(d) for d in dtypes]} (none without oneDNN), "
            f"got {linear.weight.dtype} on {linear.weight.device}"
        )
