"""What the tests of generate() share: the comparison with plain generate(), small random models, a character
tokenizer, statistics."""

import random
from collections import Counter

import torch
from helpers import expected_greedy
from scipy import stats
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from dspark_hf import DSparkConfig, DSparkDrafterModel
from dspark_hf.target_dspark import CACHE_NAME

TRACES = expected_greedy("qwen3_vanilla")["threshold_0.0"]
PROMPTS = [torch.tensor([trace["prompt_ids"]]) for trace in TRACES]
IDS = PROMPTS[0]
NEW = {"max_new_tokens": 20, "do_sample": False}
HAS_STATIC = CACHE_NAME == "cache"  # assisted decoding over static caches came with transformers 5.24


def chi_square(seen, exact: dict) -> float:
    """p-value of the outcomes `seen` against their probabilities; rare ones share one bin, impossible ones give 0."""
    counts, total = Counter(seen), len(seen)
    if any(exact.get(outcome, 0.0) <= 0.0 for outcome in counts):
        return 0.0
    observed, wanted, rare = [], [], [0.0, 0.0]
    for outcome, probability in exact.items():
        if probability * total >= 5:
            observed.append(counts[outcome])
            wanted.append(probability * total)
        else:
            rare[0] += counts[outcome]
            rare[1] += probability * total
    if rare[1] >= 1e-6:
        observed.append(rare[0])
        wanted.append(rare[1])
    scale = total / sum(wanted)
    return float(stats.chisquare(observed, [w * scale for w in wanted]).pvalue) if len(observed) > 1 else 1.0


def tiny_target(config_class, seed: int = 0, scale: float = 1.0, **overrides):
    """A random causal model of a few narrow layers; `scale` sharpens its logits."""
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    config = config_class(**sizes | overrides)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.get_output_embeddings().weight.mul_(scale)
    return model


def tiny_drafter(target, seed: int = 1, **overrides) -> DSparkDrafterModel:
    """A random drafter of one layer that fits `target`."""
    keys = {
        "block_size": 5,
        "mask_token_id": 1,
        "target_layer_ids": [0, target.config.get_text_config().num_hidden_layers - 2],
        "num_hidden_layers": 1,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    return DSparkDrafterModel(DSparkConfig.for_target(target.config, **keys | overrides)).eval().requires_grad_(False)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Token id = ASCII code, as the recorded Qwen3 target reads text."""
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\n", pad_token="\0", unk_token="?")


class Rig:
    """Stands in for a drafter's own proposals, so that blocks are accepted up to every length, in random order: each
    starts with so many tokens of `text` and goes on with the drafter's own. All of drafting still runs; the context
    rows that it is given are kept, with the position of the first.

        with Rig(drafter, text) as rig:
            target.generate(ids, assistant_model=drafter)
        rig.check_context(target, ids)
    """

    def __init__(self, drafter, text: torch.Tensor, seed: int = 0):
        self.drafter, self.text, self.random = drafter, text, random.Random(seed)
        self.contexts, self.start, self.lengths = [], None, []

    def __enter__(self):
        draft, new_cache = self.drafter.draft, self.drafter.new_cache

        def rigged_draft(context, anchor_ids, input_ids=None, **kwargs):
            self.contexts.append(context)
            output = draft(context, anchor_ids, input_ids=input_ids, **kwargs)
            known = self.text[:, input_ids.shape[1] :][:, : min(self.next_length(), output.token_ids.shape[1])]
            output.token_ids = torch.cat([known.to(output.token_ids), output.token_ids[:, known.shape[1] :]], dim=1)
            return output

        def seen_new_cache(start=0):
            self.start, self.contexts = start, []
            return new_cache(start)

        self.drafter.draft, self.drafter.new_cache = rigged_draft, seen_new_cache
        return self

    def next_length(self) -> int:
        if not self.lengths:
            self.lengths = list(range(self.drafter.config.block_size + 1))
            self.random.shuffle(self.lengths)
        return self.lengths.pop()

    def __exit__(self, *_):
        del self.drafter.draft, self.drafter.new_cache

    def check_context(self, target, text: torch.Tensor, tolerance: float = 1e-4):
        """The rows given to the drafter are the target's states at the positions they stand for, without gaps."""
        rows = torch.cat(self.contexts, dim=1)
        ids = self.drafter.config.target_layer_ids
        states = target(text, output_hidden_states=True, use_cache=False).hidden_states
        wanted = torch.cat([states[i + 1] for i in ids], dim=-1)[:, self.start : self.start + rows.shape[1]]
        torch.testing.assert_close(rows.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def sequences(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def same_text(target, drafter, ids=IDS, context_text=lambda text: text, **kwargs):
    """The output of plain generate(), after asserting that drafting gives the same text: with the drafter as it is, and
    with its blocks rigged to be right up to a random slot, so that what ends a text does so at every place of a block.

    Arguments that each run needs anew (streamers, criteria, caches) are given as functions. `context_text` maps the
    output to the text (1, T) whose states the drafter should have read.
    """
    anew = {"streamer", "stopping_criteria", "logits_processor", CACHE_NAME}

    def run(**more):
        fresh = {key: value() if key in anew else value for key, value in kwargs.items()}
        inputs = {} if ids is None else {"input_ids": ids}
        return target.generate(**inputs, **(NEW | fresh | more))

    plain = run()
    text = sequences(plain)
    assert sequences(run(assistant_model=drafter)).tolist() == text.tolist()
    with Rig(drafter, text) as rig:
        assert sequences(run(assistant_model=drafter)).tolist() == text.tolist()
    if rig.contexts:
        rig.check_context(target, context_text(text))
    return plain
