"""The bundled drafter on the real model: the same greedy text in float32, more than one token per verification."""

import pytest
import torch

from dspark_hf import ConfidenceThreshold, DSparkDrafterModel, FixedLength, record_speculation
from dspark_hf.cli.demo import BUNDLED_DRAFTER
from dspark_hf.demo_target import demo_target_path
from dspark_hf.evaluation.acceptance import left_padded
from dspark_hf.evaluation.comparison import first_difference
from dspark_hf.evaluation.loading import chat_inputs, load_prompts, load_target
from dspark_hf.packing import packed_where_possible

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def pair():
    target, tokenizer = load_target(str(demo_target_path()), pack=False)
    drafter = DSparkDrafterModel.from_pretrained(BUNDLED_DRAFTER, dtype=torch.float32).eval()
    return packed_where_possible(target.float()), tokenizer, packed_where_possible(drafter)


def test_greedy_text_is_the_targets_own(pair):
    target, tokenizer, drafter = pair
    with record_speculation() as stats:
        for prompt in load_prompts("gsm8k_test", 3):
            inputs = chat_inputs(tokenizer, prompt, "cpu")
            options = {"max_new_tokens": 24, "do_sample": False}
            length = inputs["input_ids"].shape[1]
            plain = target.generate(**inputs, **options)[0, length:]
            drafter.verify_policy = FixedLength()
            drafted = target.generate(**inputs, **options, assistant_model=drafter)[0, length:]
            difference = first_difference(target, inputs["input_ids"][0], plain, drafted)
            assert difference is None or difference.near_tie
    assert stats.acceptance_length > 1.5


def test_a_batch_of_sixteen_equals_sixteen_single_runs(pair):
    """Text and rounds; a text may part from its single run only at a near-tie."""
    target, tokenizer, drafter = pair
    drafter.verify_policy = FixedLength()
    prompts = [chat_inputs(tokenizer, prompt, "cpu")["input_ids"][0] for prompt in load_prompts("gsm8k_test", 16)]
    options = {"max_new_tokens": 6, "do_sample": False, "assistant_model": drafter, "pad_token_id": 0}
    batch = left_padded(prompts)
    with record_speculation() as together:
        rows = target.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    for place, prompt in enumerate(prompts):
        with record_speculation() as single:
            text = target.generate(prompt[None], **options)[0, len(prompt) :]
        difference = first_difference(target, prompt, text, rows[place][: len(text)])
        assert difference is None or difference.near_tie
        if difference is None:
            own = [n for n, row in zip(together.accepted_lengths, together.rows, strict=True) if row == place]
            assert own == single.accepted_lengths


def test_threshold_saves_verification(pair):
    """Of the tokens that the confidence head lets through, the target keeps a larger share."""
    target, tokenizer, drafter = pair
    inputs = chat_inputs(tokenizer, load_prompts("gsm8k_test", 1)[0], "cpu")
    shares = []
    for policy in (FixedLength(), ConfidenceThreshold(0.5)):
        drafter.verify_policy = policy
        with record_speculation() as stats:
            target.generate(**inputs, max_new_tokens=32, do_sample=False, assistant_model=drafter)
        shares.append(sum(stats.accepted_lengths) / sum(stats.proposal_lengths))
    assert 0 < shares[0] < shares[1]


def test_bundled_weights_are_small():
    size = (BUNDLED_DRAFTER / "model.safetensors").stat().st_size
    assert size <= 26e6
