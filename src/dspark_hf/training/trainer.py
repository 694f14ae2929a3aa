"""`DSparkTrainer`: `transformers.Trainer` for drafters.

What it adds: target states from one of three sources with each text drawn several times (`replay`), a loss whose
gradient does not depend on how an optimisation step is cut into micro-batches and ranks, and an evaluation by real
speculative decoding. Everything else is Trainer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ..evaluation.acceptance import acceptance_metrics, decode_prompts
from ..objective_dspark import Objective, block_labels, total_weight
from ..telemetry_dspark import SpeculationStats
from .features import OnlineStates
from .muon import Muon
from .replay import AnchoredTexts, ReplaySampler, StateSource, collate_anchored


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` and:

    Args:
        objective: settings of `Objective`, by name, in place of those that the drafter's method has by default.
        reuse: R, draws of anchors per text and epoch, and so per forward of the target: an epoch is R draws of each.
        ring_size: texts over which the R draws of a text are spread, and whose states are held in memory.
        row_length: pack texts into rows of at most this many tokens.
        matrix_learning_rate: train the weight matrices of the backbone by Muon with this rate, the rest by AdamW with
            `learning_rate`; AdamW for all by default.
        eval_prompts: how many of the evaluation texts' prompts are decoded.
        eval_max_new_tokens: length of their answers.
        eval_temperatures: 0 for greedy decoding, whose figures are named `eval_acceptance_length` and so on; those at
            temperature 1 are named `eval_t1_acceptance_length` and so on.
    """

    objective: dict[str, Any] = field(default_factory=dict)
    reuse: int = 4
    ring_size: int = 64
    row_length: int | None = None
    matrix_learning_rate: float | None = None
    eval_prompts: int = 16
    eval_max_new_tokens: int = 128
    eval_temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    remove_unused_columns: bool = False

    def __post_init__(self):
        super().__post_init__()
        Objective(**self.objective)
        for name in ("reuse", "ring_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")


class DSparkTrainer(Trainer):
    """Trains a drafter, or one wrapped by PEFT, for `target`.

    Args:
        target: the model to draft for, frozen here; it lends embedding and head, teaches, and is what evaluation
            decodes with.
        train_dataset, eval_dataset: texts of `input_ids` and `loss_mask` (T,), `id` if known (`load_conversations`).
            Where they bring `target_hidden_states` and `target_last_hidden_states`, these are used.
        states: source of target states, `CachedStates` for instance; the target's forward by default.
        trainer_arguments: `Trainer`'s other arguments.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: DSparkTrainingArguments,
        target: PreTrainedModel,
        train_dataset: Sequence[dict[str, Any]] | None = None,
        eval_dataset: Sequence[dict[str, Any]] | None = None,
        states: StateSource | None = None,
        **trainer_arguments: Any,
    ):
        self.target = target.eval().requires_grad_(False)
        self.drafter = getattr(model, "get_base_model", lambda: model)()
        self.drafter.attach_target(self.target)
        config = self.drafter.config
        if states is None:
            states = OnlineStates(
                target,
                config.target_layer_ids,
                with_logsumexp=config.draft_vocab_size is not None,
                softcap=config.final_logit_softcapping,
            )
            if target.device.type != "cpu" and args.dataloader_num_workers:
                raise ValueError(
                    f"dataloader_num_workers is {args.dataloader_num_workers}, expected 0 with a target on "
                    f"{target.device}: worker processes cannot share it"
                )
        self.eval_texts = eval_dataset

        def anchored(samples: Sequence[dict[str, Any]] | None, kept: int) -> AnchoredTexts | None:
            if samples is None:
                return None
            if not hasattr(samples, "__getitem__"):
                raise ValueError(f"the dataset is a {type(samples).__name__}, expected one with a length and indices")
            return AnchoredTexts(samples, states, config.num_anchors, args.seed, kept)

        trainer_arguments.setdefault("data_collator", partial(collate_anchored, row_length=args.row_length))
        super().__init__(
            model=model,
            args=args,
            train_dataset=anchored(train_dataset, args.ring_size),
            eval_dataset=anchored(eval_dataset, 1),
            **trainer_arguments,
        )
        # The loss is divided by the whole step's weight, see `get_batch_samples`.
        self.model_accepts_loss_kwargs = True
        self.objective = replace(self.drafter.default_objective(True), **args.objective)

    def _get_train_sampler(self, train_dataset=None):
        texts = self.train_dataset if train_dataset is None else train_dataset
        return ReplaySampler(len(texts), self.args.reuse, self.args.ring_size, self.args.data_seed or self.args.seed)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro-batches of a step, and the divisor of its loss: the weight of all their slots on all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        weight = torch.zeros((), device=device)
        for batch in batches:
            keys = ("input_ids", "loss_mask", "anchor_positions", "anchor_mask")
            documents = batch.get("document_ids")
            _, slots = block_labels(*(batch[key] for key in keys), self.drafter.config.block_size, documents)
            weight += total_weight(slots, self.objective).to(device)
        return batches, self.accelerator.reduce(weight, "sum")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The step's loss; data parallel ranks average their gradients, which the factor makes a sum."""
        outputs = model(**inputs, objective=self.objective, total_weight=num_items_in_batch)
        loss = outputs["loss"]
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, *args, **kwargs):
        rate = self.args.matrix_learning_rate
        if rate is None or self.optimizer is not None:
            return super().create_optimizer(*args, **kwargs)
        matrices, others = [], []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                backbone = parameter.ndim == 2 and ("layers." in name or "fc." in name)
                (matrices if backbone else others).append(parameter)
        self.optimizer = Muon(
            [{"params": matrices, "muon": True, "lr": rate}, {"params": others, "lr": self.args.learning_rate}],
            betas=(self.args.adam_beta1, self.args.adam_beta2),
            eps=self.args.adam_epsilon,
            weight_decay=self.args.weight_decay,
        )
        return self.optimizer

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs) -> EvalLoopOutput:
        """The loss over the texts, and the figures of decoding the prompts of the first of them."""
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        for temperature in self.args.eval_temperatures:
            name = metric_key_prefix if temperature == 0 else f"{metric_key_prefix}_t{temperature:g}"
            metrics = acceptance_metrics(self.decode(temperature))
            output.metrics.update({f"{name}_{key}": value for key, value in metrics.items()})
        return output

    def decode(self, temperature: float) -> SpeculationStats:
        """Decodes the evaluation prompts with the drafter as it is, shared out among the ranks."""
        texts = [self.eval_texts[i] for i in range(min(self.args.eval_prompts, len(self.eval_texts)))]
        prompts = [prompt_of(text) for text in texts]
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        drafter = self.accelerator.unwrap_model(self.model)
        training = drafter.training
        drafter.eval()
        stats = decode_prompts(
            self.target, drafter, prompts[rank::ranks], self.args.eval_max_new_tokens, temperature, self.args.seed
        )
        drafter.train(training)
        merged = SpeculationStats()
        for part in gather_object([stats]):
            merged.extend(part)
        return merged


def prompt_of(text: dict[str, Any]) -> torch.Tensor:
    """The tokens before the first supervised one, (T,).

    Raises:
        ValueError: where there is none, as generation needs a prompt.
    """
    supervised = torch.as_tensor(text["loss_mask"]).nonzero()
    start = int(supervised[0]) if len(supervised) else 0
    if start == 0:
        raise ValueError("an evaluation text begins with a supervised token, expected a prompt before it")
    return torch.as_tensor(text["input_ids"])[:start]
