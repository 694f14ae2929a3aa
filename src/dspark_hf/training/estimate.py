"""What a training run will cost, before it starts: parameters, memory, time."""

import time
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..baselines import new_drafter
from ..demo_target import target_path
from ..evaluation.loading import drafter_class
from ..objective_dspark import Objective
from .manifest import human_size
from .recipe import Recipe
from .trainer import DSparkTrainingArguments

ADAM_BYTES = 16  # a parameter, its gradient and two moments, in float32
LIVE_LOGITS = 16  # tensors of the size of a chunk's logits that are alive at a time, at most


@dataclass(frozen=True)
class RunEstimate:
    """
    drafter_parameters, target_parameters: numbers of weights.
    memory: bytes by what takes them; an upper bound, with every text of the greatest length.
    step_flops: floating-point operations of an optimisation step on one rank, with texts of the greatest length.
    flops_per_second: of a large matrix product on this machine.
    steps: optimisation steps, or None where the number of texts decides.
    """

    drafter_parameters: int
    target_parameters: int
    memory: dict[str, int]
    step_flops: float
    flops_per_second: float
    steps: int | None

    @property
    def step_seconds(self) -> float:
        return self.step_flops / self.flops_per_second

    def __str__(self) -> str:
        lines = [
            f"drafter    {self.drafter_parameters / 1e6:,.1f} M parameters",
            f"target     {self.target_parameters / 1e6:,.1f} M parameters",
            f"memory     at most {human_size(sum(self.memory.values()))}: "
            + ", ".join(f"{name} {human_size(size)}" for name, size in self.memory.items()),
            f"time       about {self.step_seconds:.3g} s a step ({self.step_flops / 1e9:,.0f} GFLOP at "
            f"{self.flops_per_second / 1e9:,.0f} GFLOP/s), texts of full length assumed",
        ]
        if self.steps is not None:
            lines.append(f"           {self.steps} steps, {self.steps * self.step_seconds / 3600:.2g} hours")
        return "\n".join(lines)


def estimate_run(recipe: Recipe) -> RunEstimate:
    """The estimate from the configurations alone; no weight is loaded."""
    arguments = DSparkTrainingArguments(**recipe.training)
    target_config = AutoConfig.from_pretrained(target_path(recipe.target))
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(target_config)
        if recipe.drafter is not None:
            drafter = new_drafter(recipe.method, target_config, **recipe.drafter)
        else:
            model_class = drafter_class(recipe.init_from)
            drafter = model_class(model_class.config_class.from_pretrained(recipe.init_from))
    config = drafter.config
    objective = Objective(**arguments.objective)
    texts = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    target_bytes = {4: 0.5, 8: 1.0}.get(recipe.target_bits, _dtype_bytes(recipe.target_dtype, target_config))
    state_width = (len(config.target_layer_ids) + 1) * config.hidden_size * _dtype_bytes("auto", target_config)
    parameters, target_parameters = _count(drafter), _count(target)
    return RunEstimate(
        drafter_parameters=parameters,
        target_parameters=target_parameters,
        memory={
            "target": int(target_parameters * target_bytes),
            "drafter and optimizer": parameters * ADAM_BYTES,
            "kept states": int(arguments.ring_size * recipe.max_length * state_width),
            "logits": objective.chunk_size * config.num_draft_logits * 4 * LIVE_LOGITS,
        },
        step_flops=texts * _flops_per_text(config, drafter, target, recipe.max_length, arguments.reuse, recipe.cache),
        flops_per_second=measured_flops(),
        steps=arguments.max_steps if arguments.max_steps > 0 else None,
    )


def _flops_per_text(config, drafter, target, length: int, reuse: int, cache: str | None) -> float:
    """2 a weight and token forward, 6 forward and backward; attention, small beside it here, is left out."""
    keys = [getattr(layer.self_attn, name) for layer in drafter.layers for name in ("k_proj", "v_proj")]
    context = _count(drafter.fc) + sum(_count(module) for module in keys if module is not None)
    anchors = min(config.num_anchors, length)
    inputs, slots = anchors * config.num_block_inputs, anchors * config.block_size
    head = config.hidden_size * config.num_draft_logits
    draft = 6 * (context * length + _count(drafter.layers) * inputs + (_count(drafter.markov_head) + head) * slots)
    teacher = 2 * head * min(slots, length)
    return draft + teacher + (0 if cache else 2 * _count(target.get_decoder()) * length / reuse)


def measured_flops(size: int = 1024) -> float:
    """Of a float32 product on the CPU, or a bfloat16 one on the GPU, per second."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = torch.ones(size, size, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        product = matrix @ matrix
        product[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _dtype_bytes(dtype: str, config) -> int:
    return getattr(torch, dtype).itemsize if dtype != "auto" else (config.dtype or torch.float32).itemsize


def _count(module) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
