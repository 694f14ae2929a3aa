"""Trains a drafter from a YAML recipe: answers the prompts with the target, trains, saves.

python training/train.py training/configs/smollm2-135m.yaml --prompts gsm8k_train.jsonl chat_train.jsonl
"""

import argparse
import json
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from dspark_hf import DSparkConfig, DSparkDrafterModel
from dspark_hf.demo_target import load_demo_target
from dspark_hf.training import (
    ReplayStream,
    collate,
    count_draft_vocabulary,
    end_token_ids,
    load_answers,
    write_answers,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="JSONL files of {'turns': [...]}")
    parser.add_argument("--answers", type=Path, help="JSONL of prompt_ids and response_ids, in place of the recipe's")
    parser.add_argument("--target", help="in place of the recipe's")
    parser.add_argument("--output-dir", help="in place of the recipe's")
    parser.add_argument("--max-steps", type=int, help="in place of the recipe's")
    parser.add_argument("--threads", type=int, help="CPU threads of the training process")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    options = parser.parse_args()
    recipe = yaml.safe_load(options.recipe.read_text())
    overrides = {"output_dir": options.output_dir, "max_steps": options.max_steps}
    arguments = TrainingArguments(**recipe["training"] | {k: v for k, v in overrides.items() if v is not None})
    if options.threads:
        torch.set_num_threads(options.threads)

    target, tokenizer = load_target(options.target or recipe["target"])
    answers = options.answers or Path(recipe["answers"])
    if options.prompts:
        prompts = [json.loads(line) for path in options.prompts for line in path.read_text().splitlines()]
        write_answers(target, tokenizer, prompts, answers, **recipe["regenerate"])
    samples = load_answers([answers], recipe["max_length"])

    torch.manual_seed(arguments.seed)
    drafter = DSparkDrafterModel(DSparkConfig.for_target(target.config, **recipe["drafter"]))
    vocabulary = drafter.config.draft_vocab_size
    if vocabulary is not None:
        drafter.set_draft_vocabulary(count_draft_vocabulary(samples, vocabulary, end_token_ids(target)))
    drafter.attach_target(target)
    stream = ReplayStream(
        samples,
        target,
        drafter.config.target_layer_ids,
        **recipe["stream"],
        seed=arguments.seed,
        with_logsumexp=vocabulary is not None,
        softcap=drafter.config.final_logit_softcapping,
    )
    trainer = Trainer(model=drafter, args=arguments, train_dataset=stream, data_collator=collate)
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(str(Path(arguments.output_dir) / "drafter"))


def load_target(name: str):
    if name == "demo":
        target, tokenizer = load_demo_target()
    else:
        target, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    return target.eval().requires_grad_(False), tokenizer


if __name__ == "__main__":
    main()
