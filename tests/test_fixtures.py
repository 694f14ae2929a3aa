"""The drafters compute what the official implementation computed, to 1e-5: drafts, training pass, losses, gradients."""

import pytest
import torch
from helpers import DRAFTERS, expected, training_batch


def assert_close(actual, wanted, name):
    torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-5, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("name", DRAFTERS)
def test_two_draft_rounds(drafter, name):
    model, cache = drafter(name), None
    for i in (0, 1):
        wanted = expected(name, f"draft{i}.")
        draft = model.draft(wanted["context_hidden"], wanted["anchor_id"], cache=cache)
        cache = draft.cache
        assert cache.max_length == wanted["start"]
        assert torch.equal(draft.token_ids, wanted["tokens"])
        assert_close(draft.hidden_states, wanted["block_hidden"], "hidden_states")
        assert ("confidence_logits" in wanted) == (draft.confidence_logits is not None)
        for key in {"base_logits", "logits", "confidence_logits"} & wanted.keys():
            assert_close(draft[key], wanted[key], key)


@pytest.mark.parametrize("name", DRAFTERS)
def test_training_pass(drafter, name):
    model, wanted = drafter(name), expected(name, "train.")
    real, supervised = wanted["block_keep_mask"], wanted["eval_mask"]
    assert not real.all() and not supervised[real].all()  # so that both masks are put to the test
    output = model(**training_batch(name), output_logits=True)
    assert torch.equal(output.loss_mask, supervised)
    assert torch.equal(output.target_ids, wanted["target_ids"])
    assert_close(output.logits[real], wanted["draft_logits"][real], "logits")
    assert ("confidence_logits" in wanted) == (output.confidence_logits is not None)
    if "confidence_logits" in wanted:
        assert_close(output.confidence_logits[real], wanted["confidence_logits"][real], "confidence_logits")
    if "accept_rate" in wanted:
        assert_close(output.acceptance[supervised], wanted["accept_rate"][supervised], "acceptance")
    for key in {"loss", "ce_loss", "l1_loss", "confidence_loss"} & wanted.keys():
        assert_close(output[key], wanted[key], key)

    output.loss.backward()
    gradients = {key.removeprefix("grad."): value for key, value in wanted.items() if key.startswith("grad.")}
    assert "fc.weight" in gradients
    for key, gradient in gradients.items():
        assert_close(model.get_parameter(key).grad, gradient, f"gradient of {key}")
