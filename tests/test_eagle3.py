"""EAGLE-3: the official implementation's numbers and traces, drafting against training, batches, refusals."""

import pytest
import torch
from eagle3_helpers import assert_same_draft, every_step, load_eagle, shared_eagle, text_and_states, training_batch
from generation_helpers import IDS, NEW, same_text
from helpers import expected, expected_greedy, gradients, load_drafter, load_target
from scipy.stats import chisquare
from test_batch import BATCH, PROMPTS, alone, same_rows, unpadded
from torch.nn import functional as F
from transformers import GenerationConfig, TopKLogitsWarper

from dspark_hf import ConfidenceThreshold, Objective, record_speculation


@pytest.fixture
def eagle():
    yield shared_eagle()
    shared_eagle().zero_grad(set_to_none=True)


@pytest.fixture(scope="module")
def target():
    return load_target()


# ----------------------------------------------------------------------------------------------------- recorded numbers


def test_training_pass(eagle):
    recorded = expected("qwen3_eagle3", "train.")
    output = eagle(**training_batch())
    torch.testing.assert_close(output.loss, recorded["loss"], rtol=0, atol=1e-5)
    output.loss.backward()
    for key in ("fc.weight", "layers.0.self_attn.k_proj.weight"):
        torch.testing.assert_close(eagle.get_parameter(key).grad, recorded[f"grad.{key}"], rtol=0, atol=1e-5)
    assert all(parameter.grad.abs().max() > 0 for parameter in eagle.parameters())


def test_greedy_traces(target, eagle):
    """The official implementation runs one further round when the text is already full."""
    traces = expected_greedy("qwen3_eagle3")["threshold_0.0"]
    assert len(traces) == 6
    for i, trace in enumerate(traces):
        ids, count = torch.tensor([trace["prompt_ids"]]), 40 if i == 0 else 12
        with record_speculation() as stats:
            output = target.generate(ids, assistant_model=eagle, max_new_tokens=count, do_sample=False)
        rounds = len(stats.acceptance_lengths)
        assert output[0].tolist() == trace["output_ids"][: ids.shape[1] + count]
        assert stats.acceptance_lengths == trace["acceptance_lengths"][:rounds]
        assert stats.proposal_lengths == trace["proposal_lengths"][:rounds]
        assert sum(stats.acceptance_lengths) >= count - 1


def test_first_blocks(target, eagle):
    """What the target verifies in the first two rounds of the first trace."""
    blocks = []
    draft = eagle.draft

    def seen(context, anchor_ids, **kwargs):
        output = draft(context, anchor_ids, **kwargs)
        blocks.append(torch.cat([anchor_ids[:, None], output.token_ids], dim=1))
        return output

    eagle.draft = seen
    try:
        target.generate(IDS, assistant_model=eagle, **NEW)
    finally:
        del eagle.draft
    for i in (0, 1):
        assert torch.equal(blocks[i], expected("qwen3_eagle3", f"draft{i}.")["verify_input_ids"])


# ------------------------------------------------------------------------------------------------------------- drafting


@pytest.mark.parametrize("do_sample", [False, True])
def test_drafting_is_what_training_unrolls(eagle, do_sample):
    """Position t of the unrolled pass, over a text that goes on with the drafted tokens, is the draft behind t + 1; in
    one round, and in three that share a cache."""
    batch, cache, start = training_batch(), None, 0
    for count in (20, 24, 25):
        ids, states = batch["input_ids"][:1, : count + 1], batch["target_hidden_states"][:1]
        context = states[:, start:count]
        draft = eagle.draft(context, ids[:, -1], cache=cache, input_ids=ids, do_sample=do_sample)
        cache, start = draft.cache, count
        assert (cache.max_length, cache.lengths.tolist()) == (count, [count])  # none of its own steps is kept
        text = torch.cat([ids, draft.token_ids], dim=1)
        with torch.no_grad():
            known = {"input_ids": text, "target_hidden_states": F.pad(states[:, :count], (0, 0, 0, 8))}
            hidden = every_step(eagle, known)[:, count - 1]
        torch.testing.assert_close(draft.hidden_states, hidden, rtol=0, atol=1e-5)
        torch.testing.assert_close(draft.logits, eagle.lm_head(hidden), rtol=0, atol=1e-5)
        if not do_sample:
            assert torch.equal(draft.token_ids, draft.logits.argmax(dim=-1))


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_fewer_tokens_are_a_prefix(eagle, count):
    whole, part = eagle.draft(**text_and_states()), eagle.draft(**text_and_states(), num_tokens=count)
    assert part.token_ids.shape == (1, count) and part.token_ids.dtype == torch.long
    assert torch.equal(part.token_ids, whole.token_ids[:, :count])
    assert torch.equal(part.logits, whole.logits[:, :count]) and part.logits.shape == (1, count, 128)
    assert part.confidence_logits is None and part.cache.max_length == 20


def test_rows_of_different_lengths_are_rows_alone(eagle):
    """Three rounds; texts left-padded at first, then each grows at its own pace; before the third a row leaves."""
    generator = torch.Generator().manual_seed(3)
    lengths = [[50, 5, 40], [4, 1, 30], [None, 8, 3]]  # the second outgrows the first buffer
    texts = torch.randint(1, 128, (3, 90), generator=generator)
    pads, done = [50 - first for first in lengths[0]], [0, 0, 0]
    rows, together, single = [0, 1, 2], None, [None] * 3
    for counts in lengths:
        if counts[0] is None:
            rows = [1, 2]
            together.keep(torch.tensor(rows))
        counts = [counts[i] for i in rows]
        states = torch.randn(len(rows), max(counts), 320, generator=generator)
        for i, count in zip(rows, counts, strict=True):
            done[i] += count
        ids = torch.zeros(len(rows), max(pads[i] + done[i] for i in rows) + 1, dtype=torch.long)
        for place, i in enumerate(rows):
            ids[place, pads[i] : pads[i] + done[i] + 1] = texts[i, : done[i] + 1]
        anchors = torch.stack([texts[i, done[i]] for i in rows])
        draft = eagle.draft(states, anchors, cache=together, input_ids=ids, context_lengths=torch.tensor(counts))
        together = draft.cache
        for place, (i, count) in enumerate(zip(rows, counts, strict=True)):
            # A row alone, with what is padding beside the others left out or, in the middle row, left to its length.
            length = torch.tensor([count]) if i == 1 else None
            row = states[place, None] if i == 1 else states[place, None, :count]
            text = texts[i, None, : done[i] + 1]
            wanted = eagle.draft(row, text[:, -1], cache=single[i], input_ids=text, context_lengths=length)
            single[i] = wanted.cache
            assert_same_draft(type(draft)(**{k: v[place, None] for k, v in draft.items() if k != "cache"}), wanted)


def test_context_without_text_is_left_out(eagle):
    """As when a prompt was given as embeddings: the text has the anchor and three tokens before it."""
    whole = text_and_states()
    draft = eagle.draft(**whole | {"input_ids": whole["input_ids"][:, -4:]})
    cut = whole | {"context_hidden_states": whole["context_hidden_states"][:, -4:]}
    wanted = eagle.draft(**cut, cache=eagle.new_cache(16))
    assert_same_draft(draft, wanted)
    assert draft.cache.ends(1, "cpu").tolist() == [20]
    # The next round finds the tokens in the longer text.
    more = {"context_hidden_states": torch.ones(1, 2, 320), "anchor_ids": torch.tensor([9])}
    tail = torch.tensor([[3, 9]])
    again = eagle.draft(**more, cache=draft.cache, input_ids=torch.cat([whole["input_ids"][:, -4:], tail], dim=1))
    ids = torch.cat([whole["input_ids"], tail], dim=1)
    assert_same_draft(again, eagle.draft(**more, cache=wanted.cache, input_ids=ids))


def test_draws_follow_the_reported_distribution(eagle):
    rows = 3000
    many = {key: value.expand(rows, *value.shape[1:]) for key, value in text_and_states(6).items()}
    torch.manual_seed(0)
    draft = eagle.draft(**many, do_sample=True, num_tokens=2)
    chances = draft.logits[0, 0].softmax(dim=-1)
    common = chances * rows >= 5
    seen = draft.token_ids[:, 0].bincount(minlength=128)[common].float()
    wanted = chances[common] * rows
    rest = (rows - seen.sum(), rows - wanted.sum())
    seen, wanted = torch.cat([seen, rest[0][None]]).double(), torch.cat([wanted, rest[1][None]]).double()
    assert chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-3
    assert len({tuple(row) for row in draft.token_ids.tolist()}) > 20


def test_processors_shape_the_draft(eagle):
    draft = eagle.draft(**text_and_states(), do_sample=True, logits_processor=TopKLogitsWarper(2))
    assert (draft.logits.isfinite().sum(dim=-1) == 2).all()
    assert draft.logits.gather(2, draft.token_ids[..., None]).isfinite().all()


def change(key, value):
    return lambda arguments: arguments | {key: value}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (change("input_ids", None), r"input_ids has shape None, expected \(1, T\)"),
        (change("input_ids", torch.zeros(2, 5).long()), r"input_ids has shape \(2, 5\), expected \(1, T\)"),
        (change("anchor_ids", torch.tensor([1])), r"input_ids do not have the anchors \[1\] in columns \[20\]"),
        (change("context_hidden_states", torch.zeros(1, 0, 320)), r"0 rows of new context were given, expected 1 or"),
        (change("context_lengths", torch.tensor([0])), r"\[0\] rows of new context were given, expected 1 or more"),
        (change("context_lengths", torch.tensor([21])), r"\[21\] rows of new context .* up to the 20 of"),
        (change("context_hidden_states", torch.zeros(1, 5, 64)), r"expected \(B, n, 320\): 5 layers of 64"),
        (change("num_tokens", 8), r"num_tokens is 8, expected 0\.\.7"),
    ],
)
def test_refused_drafts(eagle, changed, message):
    with pytest.raises(ValueError, match=message):
        eagle.draft(**changed(text_and_states()))


def test_a_text_that_lost_tokens_is_refused(eagle):
    first = eagle.draft(**text_and_states())
    arguments = {"context_hidden_states": torch.zeros(1, 2, 320), "anchor_ids": torch.tensor([5])}
    with pytest.raises(ValueError, match=r"anchors \[5\] in columns \[22\], expected the texts of the last round"):
        eagle.draft(**arguments, input_ids=torch.full((1, 22), 5), cache=first.cache)


# ----------------------------------------------------------------------------------------------------------- generate()

CASES = {
    "plain": {},
    "processors": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
    "end token": {"eos_token_id": 32},
    "chunked prefill": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("name", CASES)
def test_same_text_as_plain_generate(target, eagle, name):
    same_text(target, eagle, **CASES[name])


def test_embeddings_as_prompt(target, eagle):
    inputs = {"inputs_embeds": target.get_input_embeddings()(BATCH["input_ids"])}
    inputs["attention_mask"] = BATCH["attention_mask"]
    wanted = alone(target, PROMPTS, max_new_tokens=16, do_sample=False)
    ids = target.generate(**inputs, max_new_tokens=16, do_sample=False, assistant_model=eagle)
    assert unpadded(ids, 0, wanted) == wanted


def test_rows_of_a_batch_are_rows_alone(target, eagle):
    _, rig, stats = same_rows(target, eagle)
    assert len(set(stats.accepted_lengths)) >= 6 and len(set(rig.rounds)) > 1  # rows leave one by one
    options = {"max_new_tokens": 24, "do_sample": False, "assistant_model": eagle}
    with record_speculation() as together:
        target.generate(**BATCH, **options)
    for place, row in enumerate(PROMPTS):
        with record_speculation() as single:
            target.generate(torch.tensor([row]), **options)
        seen = [n for n, p in zip(together.acceptance_lengths, together.rows, strict=True) if p == place]
        assert seen == single.acceptance_lengths


def test_transformers_own_loop(target, eagle):
    """The candidate generator alone, as transformers calls it where our loop is not installed."""
    generator = eagle.candidate_generator(target, GenerationConfig(max_length=60, do_sample=False), None, {})
    outputs = target(IDS, output_hidden_states=True, use_cache=True)
    text = torch.cat([IDS, outputs.logits[:, -1:].argmax(dim=-1)], dim=1)
    candidates, logits = generator.get_candidates(text, model_outputs=outputs, n_last_matches=IDS.shape[1] - 1)
    recorded = expected("qwen3_eagle3", "draft0.")["verify_input_ids"]
    assert torch.equal(candidates[:, IDS.shape[1] :], recorded)
    assert torch.equal(logits.argmax(dim=-1), recorded[:, 1:])


def test_policies_that_need_confidence_are_refused(target):
    model = load_eagle()
    model.verify_policy = ConfidenceThreshold(0.5)
    with pytest.raises(ValueError, match="needs a confidence head, and this drafter has none"):
        target.generate(IDS, assistant_model=model, **NEW)


# ------------------------------------------------------------------------------------------------------------- training


def test_padding_and_the_divisor(eagle):
    """Padding counts in B·T alone; a step's loss is the sum over its micro-batches by their common divisor."""
    batch = training_batch()
    whole = eagle(**batch).loss
    parts = [{key: value[i, None] for key, value in batch.items()} for i in (0, 1)]
    parts[1] = {key: value[:, :56] for key, value in parts[1].items()}
    divisor = torch.tensor(128.0)
    torch.testing.assert_close(sum(eagle(**part, total_weight=divisor).loss for part in parts), whole)
    noisy = dict(batch)
    noisy["input_ids"] = torch.where(batch["attention_mask"] > 0, batch["input_ids"], 99)
    noisy["loss_mask"] = batch["attention_mask"]
    clean = noisy | {"input_ids": batch["input_ids"]}
    for key in ("target_hidden_states", "target_last_hidden_states"):
        noisy[key] = batch[key] + 9.0 * (batch["attention_mask"] == 0)[..., None]
    # The last real token's pair has a token of padding; nothing that counts reads it.
    torch.testing.assert_close(eagle(**noisy).loss, eagle(**clean).loss)


def test_states_from_the_attached_target(target):
    model = load_eagle().attach_target(target)
    batch = training_batch()
    keys = ("input_ids", "loss_mask", "attention_mask")
    torch.testing.assert_close(model(**{key: batch[key] for key in keys}).loss, model(**batch).loss, rtol=0, atol=1e-4)
    assert not any(key.startswith("_target") for key in model.state_dict())


def test_without_a_teacher_tokens_are_learnt(eagle):
    batch = {key: value for key, value in training_batch().items() if key != "target_last_hidden_states"}
    output = eagle(**batch)
    logits = eagle.lm_head(every_step(eagle, batch))
    losses = F.cross_entropy(logits.transpose(1, 3).transpose(2, 3), output.target_ids, reduction="none")
    wanted = (losses * output.loss_mask * 0.8 ** torch.arange(7)).sum() / 128
    torch.testing.assert_close(output.loss, wanted)
    with pytest.raises(ValueError, match="target_last_hidden_states is missing"):
        eagle(**batch, objective=Objective())


def test_acceptance_is_reported_per_step(eagle):
    batch = training_batch()
    output = eagle(**batch)
    draft = eagle.lm_head(every_step(eagle, batch)).softmax(dim=-1)
    teacher = eagle.lm_head(batch["target_last_hidden_states"]).softmax(dim=-1)
    t, s = 25, 3
    overlap = torch.minimum(draft[0, t, s], teacher[0, t + s + 1]).sum()
    assert output.loss_mask[0, t, s] and output.acceptance.shape == (2, 64, 7)
    torch.testing.assert_close(output.acceptance[0, t, s], overlap)
    assert output.target_ids[0, t, s] == batch["input_ids"][0, t + s + 2]


ANCHORS = torch.tensor([[9, 20, 26, 45], [12, 13, 30, 0]])
MASK = torch.tensor([[True] * 4, [True, True, True, False]])


def test_steps_from_anchors_are_those_at_every_position(eagle):
    """The block of anchor p is what position p − 1 unrolls; labels and slots are those of a DSpark drafter."""
    batch = training_batch()
    whole = eagle(**batch)
    output = eagle(**batch, anchor_positions=ANCHORS, anchor_mask=MASK)
    fewer = batch | {"target_hidden_states": batch["target_hidden_states"][..., :192]}  # it reads three layers
    dspark = load_drafter()(**fewer, anchor_positions=ANCHORS, anchor_mask=MASK)
    assert torch.equal(output.loss_mask, dspark.loss_mask) and output.loss_mask.sum() > 20
    assert torch.equal(output.target_ids[output.loss_mask], dspark.target_ids[output.loss_mask])
    rows = torch.arange(2)[:, None].expand_as(ANCHORS)
    same = whole.acceptance[rows, ANCHORS - 1][output.loss_mask & whole.loss_mask[rows, ANCHORS - 1]]
    known = output.acceptance[output.loss_mask & whole.loss_mask[rows, ANCHORS - 1]]
    assert len(known) > 20 and known.std() > 0.01
    torch.testing.assert_close(known, same, rtol=0, atol=1e-5)


def test_loss_of_anchors_is_the_mean_by_weight(eagle):
    batch = {key: value for key, value in training_batch().items() if key != "target_last_hidden_states"}
    output = eagle(**batch, anchor_positions=ANCHORS, anchor_mask=MASK)
    logits = eagle.lm_head(every_step(eagle, batch))[torch.arange(2)[:, None], (ANCHORS - 1).clamp(min=0)]
    losses = F.cross_entropy(logits.flatten(0, 2), output.target_ids.flatten(), reduction="none").view(2, 4, 7)
    weights = output.loss_mask * 0.8 ** torch.arange(7)
    torch.testing.assert_close(output.loss, (losses * weights).sum() / weights.sum())
    halves = [eagle(**batch, anchor_positions=ANCHORS, anchor_mask=MASK & part, total_weight=weights.sum()).loss
              for part in (torch.arange(4) < 2, torch.arange(4) >= 2)]  # fmt: skip
    torch.testing.assert_close(sum(halves), output.loss)


def test_packed_texts_do_not_meet(eagle):
    batch = training_batch()
    parts = [{key: value[i : i + 1, :length] for key, value in batch.items() if key != "attention_mask"}
             for i, length in ((0, 64), (1, 56))]  # fmt: skip
    packed = {key: torch.cat([part[key] for part in parts], dim=1) for key in parts[0]}
    packed["document_ids"] = (torch.arange(120) >= 64).long()[None]
    anchors = [ANCHORS[:1], ANCHORS[1:, :3]]
    alone = [eagle(**part, anchor_positions=where) for part, where in zip(parts, anchors, strict=True)]
    together = eagle(**packed, anchor_positions=torch.cat([anchors[0], anchors[1] + 64], dim=1))
    wanted = torch.cat([output.acceptance for output in alone], dim=1)
    torch.testing.assert_close(together.acceptance, wanted, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="document_ids were given, expected anchor_positions"):
        eagle(**packed)


def test_anchors_without_a_token_before_them_teach_nothing(eagle):
    batch = training_batch() | {"loss_mask": torch.ones(2, 64, dtype=torch.long)}
    output = eagle(**batch, anchor_positions=torch.tensor([[0, 20], [0, 20]]))
    assert output.loss_mask.any(dim=-1).tolist() == [[False, True], [False, True]]
    batch["document_ids"] = (torch.arange(64) >= 20).long().expand(2, -1)
    output = eagle(**batch, anchor_positions=torch.tensor([[21, 20], [21, 20]]))
    assert output.loss_mask.any(dim=-1).tolist() == [[True, False], [True, False]]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_gradient_checkpointing(eagle):
    wanted = gradients(eagle, **training_batch())
    model = load_eagle().train()
    model.gradient_checkpointing_enable()
    calls = []
    model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    actual = gradients(model, **training_batch())
    assert len(calls) == 14  # seven steps, each once more in the backward
    for key in wanted:
        torch.testing.assert_close(actual[key], wanted[key])
