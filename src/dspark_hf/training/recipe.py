"""A training run described by a recipe: answers by the target, a drafter (new, from another, or LoRA on one), training.

A recipe is a YAML file whose keys are the fields of `Recipe`; `training/configs/` has those of the official drafters.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..baselines import METHODS, new_drafter
from ..demo_target import target_path
from ..drafter_dspark import DrafterModel
from ..evaluation.loading import load_drafter
from .cache import CachedStates
from .data import count_draft_vocabulary, end_token_ids, load_conversations
from .manifest import CacheSource, Manifest
from .regenerate import AnswerSettings, TargetAnswerer, read_prompts, regenerate_answers
from .trainer import DSparkTrainer, DSparkTrainingArguments

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Recipe:
    """
    Args:
        target: Hub id or folder; `demo` is the model of `dspark demo`.
        training: settings of `DSparkTrainingArguments`.
        drafter: settings of `DSparkConfig.for_target`, for a new drafter.
        method: of that drafter, one of `baselines.METHODS`; another than `dspark` leaves out what it has no place for.
        init_from: Hub id or folder of a drafter to go on from, in place of `drafter`.
        lora: train low-rank updates of that drafter only: settings of `peft.LoraConfig`, and `train_fc`, whether the
            projection of the target's states is trained too (false by default).
        answers: JSONL of the target's answers, or a dataset as "org/name:split"; written from `prompts` where these
            are given.
        prompts: JSONL files or datasets of prompts.
        regenerate: settings of `AnswerSettings`, and `batch_size`.
        max_length: tokens that texts are cut to.
        eval_texts: how many texts, the last ones of the answers, are kept from training for evaluation.
        cache: folder of target states (`dspark cache build`), in place of the target's forward.
        target_dtype: of the target's weights.
        target_bits: 4 or 8 to load the target quantised by bitsandbytes.
    """

    target: str
    training: dict[str, Any]
    drafter: dict[str, Any] | None = None
    method: str = "dspark"
    init_from: str | None = None
    lora: dict[str, Any] | None = None
    answers: str = "answers.jsonl"
    prompts: list[str] = field(default_factory=list)
    regenerate: dict[str, Any] = field(default_factory=dict)
    max_length: int = 4096
    eval_texts: int = 0
    cache: str | None = None
    target_dtype: str = "auto"
    target_bits: int | None = None

    def __post_init__(self):
        if (self.drafter is None) == (self.init_from is None):
            raise ValueError(f"drafter is {self.drafter}, init_from {self.init_from}: expected one of them")
        if self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}, expected one of {list(METHODS)}")
        if self.init_from is not None and self.method != "dspark":
            raise ValueError(f"method is {self.method!r} beside init_from, expected none: {self.init_from} has its own")
        if self.lora is not None and self.init_from is None:
            raise ValueError("lora is given without init_from, expected a trained drafter to adapt")
        if self.target_bits not in (None, 4, 8):
            raise ValueError(f"target_bits is {self.target_bits}, expected 4 or 8")

    @classmethod
    def load(cls, path: str | Path, **changes: Any) -> "Recipe":
        """The recipe in a YAML file; `changes` replace its values, those that are None aside. A dictionary replaces the
        keys it has.

        Raises:
            ValueError: for keys that no recipe has.
        """
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"{path} has the keys {unknown}, expected {[f.name for f in fields(cls)]}")
        for key, value in changes.items():
            if isinstance(value, dict):
                values[key] = (values.get(key) or {}) | value
            elif value is not None:
                values[key] = value
        if changes.get("init_from") is not None:
            values["drafter"] = None
            values["method"] = changes.get("method") or "dspark"  # the file's is of the drafter that it would make
        return cls(**values)

    def load_target(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The frozen target, on the GPU where there is one, and its tokenizer."""
        path = target_path(self.target)
        dtype = self.target_dtype if self.target_dtype == "auto" else getattr(torch, self.target_dtype)
        options: dict[str, Any] = {"dtype": dtype}
        if self.target_bits is not None:
            from transformers import BitsAndBytesConfig

            options["quantization_config"] = BitsAndBytesConfig(**{f"load_in_{self.target_bits}bit": True})
        target = AutoModelForCausalLM.from_pretrained(path, **options)
        if self.target_bits is None:
            target = target.to("cuda" if torch.cuda.is_available() else "cpu")
        return target.eval().requires_grad_(False), AutoTokenizer.from_pretrained(path)

    def load_texts(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
        """The training texts, answered by the target first where prompts are given."""
        if self.prompts:
            settings = dict(self.regenerate)
            batch_size = settings.pop("batch_size", 8)
            answerer = TargetAnswerer(target, tokenizer, self.target, AnswerSettings(**settings), batch_size)
            regenerate_answers(read_prompts(self.prompts), Path(self.answers), answerer)
        texts = load_conversations(self.answers, tokenizer, self.max_length, end_token_ids(target))
        if len(texts) <= self.eval_texts:
            raise ValueError(f"{self.answers} has {len(texts)} texts, expected more than eval_texts {self.eval_texts}")
        return texts

    def load_cache(self, target, tokenizer, layer_ids: list[int], texts: list[dict[str, Any]]) -> CachedStates | None:
        """The cached states, if any; raises `ValueError` where they are of another target, or of other texts."""
        if self.cache is None:
            return None
        Manifest.load(self.cache).source.check(CacheSource.of(target, tokenizer, layer_ids, self.target), self.cache)
        return CachedStates(self.cache, texts)

    def load_drafter(self, target: PreTrainedModel, texts: list[dict[str, Any]]) -> DrafterModel:
        """The drafter to train, in float32: a new one, or `init_from`; wrapped by PEFT where `lora` is given."""
        if self.init_from is not None:
            drafter = load_drafter(self.init_from, target.config, dtype=torch.float32)
        else:
            drafter = new_drafter(self.method, target.config, **self.drafter)
            vocabulary = drafter.config.draft_vocab_size
            if vocabulary is not None:
                drafter.set_draft_vocabulary(count_draft_vocabulary(texts, vocabulary, end_token_ids(target)))
        return drafter if self.lora is None else with_lora(drafter, **self.lora)


def with_lora(drafter: DrafterModel, train_fc: bool = False, **settings: Any):
    """A `PeftModel` that trains low-rank updates of the backbone, and the small heads whole; `fc` on request."""
    from peft import LoraConfig, get_peft_model  # an optional dependency

    whole = [name for name in ("markov_head", "confidence_head") if getattr(drafter, name) is not None]
    defaults = {"target_modules": LORA_TARGETS, "modules_to_save": whole + ["fc"] * train_fc}
    return get_peft_model(drafter, LoraConfig(**defaults | settings))


def run_recipe(recipe: Recipe, resume: bool = False) -> Path:
    """Trains, and saves the drafter (merged, with LoRA) under `drafter` in the output folder; returns that folder."""
    arguments = DSparkTrainingArguments(**recipe.training)
    target, tokenizer = recipe.load_target()
    texts = recipe.load_texts(target, tokenizer)
    torch.manual_seed(arguments.seed)
    model = recipe.load_drafter(target, texts)
    held_out = texts[len(texts) - recipe.eval_texts :]
    trainer = DSparkTrainer(
        model,
        arguments,
        target,
        train_dataset=texts[: len(texts) - recipe.eval_texts],
        eval_dataset=held_out or None,
        states=recipe.load_cache(target, tokenizer, model.config.target_layer_ids, texts),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_state()
    folder = Path(arguments.output_dir) / "drafter"
    if recipe.lora is not None:
        trainer.save_model(str(Path(arguments.output_dir) / "adapter"))
        model = trainer.model.merge_and_unload()
        if trainer.args.should_save:
            model.save_pretrained(folder)
    else:
        trainer.save_model(str(folder))
    return folder
