"""The training objective against plain versions of itself, and what a block may and may not depend on."""

import math
import weakref

import pytest
import torch
from helpers import DRAFTERS, VOCABULARY, gradients, load_drafter, restricted, training_batch
from scipy.stats import chisquare
from torch import nn

from dspark_hf import Objective, objective_dspark
from dspark_hf.objective_dspark import (
    block_attention_mask,
    block_labels,
    chunked_slot_losses,
    decay_weights,
    dpace_weights,
    sample_anchors,
    total_weight,
)

# ------------------------------------------------------------------------------------------------------------- anchors


def valid_positions(loss_mask: torch.Tensor) -> list[int]:
    return [p for p in range(len(loss_mask) - 1) if loss_mask[p] and loss_mask[p + 1]]


def test_anchors_are_valid_sorted_and_distinct():
    generator = torch.Generator().manual_seed(0)
    loss_mask = torch.rand(50, 40, generator=generator) < 0.6
    loss_mask[7], loss_mask[8], loss_mask[9] = False, True, torch.arange(40) % 2 == 0
    positions, mask = sample_anchors(loss_mask, 12, generator)
    assert positions.shape == mask.shape == (50, 12)
    for row in range(50):
        valid, chosen = valid_positions(loss_mask[row]), positions[row][mask[row]].tolist()
        assert len(chosen) == min(12, len(valid)) and chosen == sorted(set(chosen)) and set(chosen) <= set(valid)
        assert not positions[row][~mask[row]].any()
    assert mask.sum(1)[7] == 0 and mask.sum(1)[8] == 12 and mask.sum(1)[9] == 0


@pytest.mark.parametrize(("valid", "width"), [(0, 1), (3, 3)])
def test_no_more_anchors_than_there_are(valid, width):
    loss_mask = (torch.arange(10) < valid + 1)[None].long() if valid else torch.zeros(1, 10)
    positions, mask = sample_anchors(loss_mask, 512)
    assert positions.tolist() == [list(range(valid)) or [0]] and mask.sum() == valid and mask.shape == (1, width)


def test_anchors_are_uniform():
    loss_mask = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]).bool()
    positions, mask = sample_anchors(loss_mask.expand(8000, -1), 4, torch.Generator().manual_seed(1))
    assert mask.all()
    valid = valid_positions(loss_mask)
    counts = positions.flatten().bincount(minlength=17)
    assert counts[valid].sum() == 4 * 8000
    assert chisquare(counts[valid]).pvalue > 1e-3
    chosen = torch.zeros(8000, 17).scatter(1, positions, 1.0)[:, valid]
    pairs = (chosen.T @ chosen)[~torch.eye(len(valid), dtype=torch.bool)]
    assert (pairs - pairs.mean()).abs().max() < 5 * pairs.mean().sqrt()


# ---------------------------------------------------------------------------------------------------- labels and masks


def test_labels_and_masks_slot_by_slot():
    generator = torch.Generator().manual_seed(2)
    tokens, block, length = torch.randint(1, 99, (6, 15), generator=generator), 5, 15
    loss_mask = torch.rand(6, length, generator=generator) < 0.8
    loss_mask[0] = True
    positions, mask = sample_anchors(loss_mask, 20, generator)
    labels, slot_mask = block_labels(tokens, loss_mask, positions, mask, block)
    attended = block_attention_mask(positions, mask, block, length)
    anchors = positions.shape[1]
    assert attended.shape == (6, 1, anchors * block, length + anchors * block)
    weights = decay_weights(slot_mask, 4.0)
    assert not mask.all()
    for row in range(6):
        for a in range(anchors):
            p, counts = int(positions[row, a]), bool(mask[row, a])
            for k in range(block):
                at = p + k + 1
                counts = counts and at < length and bool(loss_mask[row, at])
                assert slot_mask[row, a, k] == counts
                assert weights[row, a, k] == pytest.approx(math.exp(-k / 4) if counts else 0.0)
                if counts:
                    assert labels[row, a, k] == tokens[row, at]
                sees = attended[row, 0, a * block + k]
                own = [length + a * block + j for j in range(block)]
                assert sees.nonzero()[:, 0].tolist() == (list(range(p)) if mask[row, a] else []) + own


# -------------------------------------------------------------------------------------------------------------- losses


def plain_losses(draft_logits, labels, teacher_logits) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, V) each, −inf for what cannot be drafted → CE, 0 where the label cannot be, and L1, by their definitions."""
    draft, teacher = draft_logits.softmax(-1), teacher_logits.softmax(-1)
    ce = [-draft[i, label].log() if draft[i, label] > 0 else draft.new_zeros(()) for i, label in enumerate(labels)]
    return torch.stack(ce), (draft - teacher).abs().sum(-1)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("with_latents", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 3, 8, 23, 999])
def test_chunked_losses_are_the_plain_ones(chunk_size, with_latents, reduced):
    slots, texts, hidden_size, rank, whole = 23, 9, 8, 4, 31
    kept = torch.arange(0, whole, 3) if reduced else torch.arange(whole)
    head, target_head = nn.Linear(hidden_size, whole, bias=False), nn.Linear(hidden_size, whole, bias=False)
    project = nn.Linear(rank, whole, bias=False)
    hidden = torch.randn(slots, hidden_size, requires_grad=True)
    latents = torch.randn(slots, rank, requires_grad=True) if with_latents else None
    states, rows = torch.randn(texts, hidden_size), torch.randint(texts, (slots,))
    labels = torch.randint(whole, (slots,))
    leaves = [hidden, head.weight] + ([latents, project.weight] if with_latents else [])

    def whole_draft_logits(hidden, latents):
        return head(hidden) if latents is None else head(hidden) + project(latents)

    outside = torch.ones(whole, dtype=torch.bool).index_fill(0, kept, False)
    restricted_logits = whole_draft_logits(hidden, latents).masked_fill(outside, float("-inf"))
    wanted = plain_losses(restricted_logits, labels, target_head(states)[rows])
    mix = torch.randn(2, slots)  # so that every slot's gradient counts, each its own way
    wanted_gradients = torch.autograd.grad((mix[0] * wanted[0] + mix[1] * wanted[1]).sum(), leaves)

    taught = []

    def teacher_head(states):
        taught.append(len(states))
        return target_head(states)[:, kept]

    draft_ids = torch.full((whole,), -100).index_copy(0, kept, torch.arange(len(kept)))
    actual = chunked_slot_losses(
        lambda hidden, latents: whole_draft_logits(hidden, latents)[:, kept],
        teacher_head,
        hidden,
        latents,
        draft_ids[labels],
        states,
        rows,
        target_head(states).logsumexp(-1).detach() if reduced else None,
        chunk_size,
    )
    for name, loss, plain in zip(("ce", "l1"), actual, wanted, strict=True):
        torch.testing.assert_close(loss, plain, msg=lambda text, name=name: name + text)
    actual_gradients = torch.autograd.grad((mix[0] * actual[0] + mix[1] * actual[1]).sum(), leaves)
    for gradient, plain in zip(actual_gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, plain)
    positions, groups = len(rows.unique()), -(-len(rows.unique()) // chunk_size)
    once = sum(taught[:groups])  # in the forward; in the backward again, but for what is still at hand
    assert once == positions and sum(taught) <= 2 * positions and max(taught) <= chunk_size
    if chunk_size >= slots:
        assert taught == [positions]


@pytest.mark.parametrize("teacher", ["none", "whole", "reduced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_size", [1, 4, 99])
def test_gradients_by_hand_are_those_of_autograd(monkeypatch, chunk_size, dtype, teacher):
    """CE, L1 and KL mixed with random weights, soft-capped logits, labels and mass that cannot be drafted."""
    slots, texts, vocabulary, cap = 26, 7, 19, 3.0
    monkeypatch.setattr(objective_dspark, "CACHED_LOGITS", 3 * vocabulary + 1)
    raw = (2 * torch.randn(slots, vocabulary)).requires_grad_()
    states, rows = 2 * torch.randn(texts, vocabulary), torch.randint(texts, (slots,))
    labels = torch.randint(vocabulary, (slots,)).masked_fill(torch.arange(slots) % 5 == 0, -100)
    normaliser = states.logsumexp(-1) + 0.5 if teacher == "reduced" else None
    with_kl = teacher != "none"

    def draft_head(hidden, latents):
        return ((hidden / cap).tanh() * cap).to(dtype)

    def wanted_losses() -> torch.Tensor:
        log_draft = draft_head(raw, None).float().log_softmax(-1)
        reachable = labels >= 0
        ce = torch.where(reachable, -log_draft[torch.arange(slots), labels * reachable], 0.0)
        if teacher == "none":
            return torch.stack([ce, torch.zeros(slots)])
        log_teacher = (states - (states.logsumexp(-1) if normaliser is None else normaliser)[:, None])[rows]
        outside = 1 - log_teacher.exp().sum(-1)
        kl = (log_teacher.exp() * (log_teacher - log_draft)).sum(-1)
        return torch.stack([ce, (log_draft.exp() - log_teacher.exp()).abs().sum(-1) + outside, kl])

    wanted = wanted_losses()
    taught = None if teacher == "none" else states
    actual = chunked_slot_losses(
        draft_head, lambda states: states, raw, None, labels, taught, rows, normaliser, chunk_size, with_kl
    )
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=2e-6)
    mix = torch.randn(3 if with_kl else 2, slots)
    (wanted_gradient,) = torch.autograd.grad((mix * wanted).sum(), raw)
    for _ in range(2):  # what is kept for the gradient is not used up by it
        (gradient,) = torch.autograd.grad((mix * actual).sum(), raw, retain_graph=True)
        rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (2e-2, 1e-4)  # gradients of bf16 logits are bf16
        torch.testing.assert_close(gradient, wanted_gradient, rtol=rtol, atol=atol)


def test_few_logits_are_alive_however_many_slots_there_are():
    """At any time while the head or the teacher runs, in the forward or in the backward."""
    chunk_size, vocabulary = 4, 11

    def most_alive(slots: int) -> int:
        made, most, raw = [], 0, torch.randn(slots, vocabulary, requires_grad=True)

        def watched(logits: torch.Tensor) -> torch.Tensor:
            nonlocal most
            made.append(weakref.ref(logits))
            most = max(most, sum(reference() is not None for reference in made))
            return logits

        class Teacher(torch.Tensor):
            """Logits whose distribution is watched, too."""

            def softmax(self, **arguments):
                return watched(self.as_subclass(torch.Tensor).softmax(**arguments))

        losses = chunked_slot_losses(
            lambda hidden, latents: watched(hidden * 2),
            lambda states: (states * 2).as_subclass(Teacher),
            raw,
            None,
            torch.zeros(slots, dtype=torch.long),
            raw.detach(),
            torch.arange(slots),
            None,
            chunk_size,
        )
        losses.sum().backward()
        return most

    assert most_alive(16 * chunk_size) == most_alive(48 * chunk_size) <= 14


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_training_with_a_reduced_vocabulary(drafter, target, own_head, given):
    """The losses of the whole model, from its logits and the target's, both over the whole vocabulary."""
    model, batch = restricted(drafter(), own_head).attach_target(target()), training_batch()
    teacher = target().get_output_embeddings()(batch["target_last_hidden_states"])
    if given:
        batch["target_logsumexp"] = teacher.logsumexp(-1)
    output = model(**batch, output_logits=True)
    slots = output.loss_mask.nonzero()
    rows = batch["anchor_positions"][slots[:, 0], slots[:, 1]] + slots[:, 2]
    labels = output.target_ids[output.loss_mask]
    assert not torch.isin(labels, VOCABULARY).all()
    ce, l1 = plain_losses(output.logits[output.loss_mask], labels, teacher[slots[:, 0], rows])
    acceptance, confidence = 1 - l1 / 2, output.confidence_logits[output.loss_mask].sigmoid()
    bce = -(acceptance * confidence.log() + (1 - acceptance) * (1 - confidence).log())
    weights = torch.exp(-slots[:, 2] / 4.0)
    terms = [(weights * term).sum() / weights.sum() for term in (ce, l1, bce)]
    torch.testing.assert_close([output.ce_loss, output.l1_loss, output.confidence_loss], terms)
    torch.testing.assert_close(output.loss, 0.1 * terms[0] + 0.9 * terms[1] + terms[2])
    torch.testing.assert_close(output.acceptance[output.loss_mask], acceptance)
    assert (output.logits[..., [1, 2]] == float("-inf")).all()


def test_the_teacher_is_the_attached_target(target):
    """Not the drafter's copy of the head, which may be trained."""
    wanted = load_drafter()(**training_batch(), output_logits=True)
    model = load_drafter().attach_target(target())
    with torch.no_grad():
        model.lm_head.weight.normal_()
    output = model(**training_batch(), output_logits=True)
    assert (output.logits - wanted.logits).abs().max() > 1
    first, slots = output.loss_mask.nonzero()[0], output.loss_mask
    position = training_batch()["anchor_positions"][first[0], first[1]] + first[2]
    teacher = target().get_output_embeddings()(training_batch()["target_last_hidden_states"][first[0], position])
    distance = (output.logits[slots][0].softmax(-1) - teacher.softmax(-1)).abs().sum()
    torch.testing.assert_close(output.acceptance[slots][0], 1 - distance / 2)


def test_logsumexp_needs_a_target(drafter):
    with pytest.raises(ValueError, match="target_logsumexp is missing and no target attached"):
        restricted(drafter(), own_head=True)(**training_batch())


@pytest.mark.parametrize("name", ["qwen3_vanilla", "qwen3_dflash"])
def test_without_last_states_only_ce_is_learnt(drafter, name):
    batch = training_batch(name)
    wanted = drafter(name)(**batch)
    del batch["target_last_hidden_states"]
    output = drafter(name)(**batch)
    torch.testing.assert_close(output.loss, wanted.ce_loss)
    assert (output.l1_loss, output.confidence_loss, output.acceptance) == (None, None, None)
    with pytest.raises(ValueError, match="target_last_hidden_states is missing, expected with Objective"):
        drafter(name)(**batch, objective=Objective())


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_batch_without_anchors_teaches_nothing(drafter, target, reduced, given):
    model = restricted(drafter(), own_head=False).attach_target(target()) if reduced else drafter()
    batch = training_batch() | {"loss_mask": torch.zeros(2, 64, dtype=torch.long)}
    if not given:
        del batch["anchor_positions"], batch["anchor_mask"]
    output = model(**batch)
    assert (output.loss, output.ce_loss, output.l1_loss, output.confidence_loss) == (0.0,) * 4
    assert not output.loss_mask.any()
    calculated = gradients(model, **batch)
    assert "fc.weight" in calculated and not any(gradient.any() for gradient in calculated.values())


def test_detached_confidence_trains_only_its_head(drafter):
    whole, detached = (
        gradients(drafter(), **training_batch(), objective=Objective(0.0, 0.0, 1.0, detach_confidence=flag))
        for flag in (False, True)
    )
    for key, gradient in whole.items():
        if key.startswith("confidence_head."):
            torch.testing.assert_close(detached[key], gradient)
        else:
            assert key not in detached or not detached[key].any()
    assert whole["fc.weight"].any() and whole["markov_head.markov_w1.weight"].any()


def teacher_rows(target, batch, output) -> torch.Tensor:
    """The target's distribution at every slot, (B, A, γ, V)."""
    teacher = target.get_output_embeddings()(batch["target_last_hidden_states"]).softmax(-1)
    rows = (batch["anchor_positions"][..., None] + torch.arange(output.loss_mask.shape[-1])).clamp(max=63)
    return torch.stack([teacher[text][rows[text]] for text in range(len(rows))])


@pytest.mark.parametrize("reduced", [False, True])
def test_kl_in_place_of_l1(drafter, target, reduced):
    """Over the tokens that can be drafted; with a small part of the slots at a time, too."""
    model = restricted(drafter(), own_head=False).attach_target(target()) if reduced else drafter()
    batch = training_batch()
    output = model(**batch, output_logits=True)
    draft, teacher = output.logits.log_softmax(-1), teacher_rows(target(), batch, output)
    terms = torch.where(draft.isfinite(), teacher * (teacher.log() - draft), 0.0).sum(-1)
    weights = decay_weights(output.loss_mask, 4.0)
    wanted = (terms * weights).sum() / weights.sum()
    for chunk_size in (5, 256):
        kl = Objective(0.0, 0.0, 0.0, kl_weight=2.0, chunk_size=chunk_size)
        torch.testing.assert_close(model(**batch, objective=kl).loss, 2 * wanted)


def test_expected_length(drafter, target):
    """1 − Π a_j summed over the slots: what is missing to a block accepted whole."""
    batch = training_batch()
    output = drafter()(**batch, output_logits=True)
    distance = (output.logits.softmax(-1) - teacher_rows(target(), batch, output)).abs().sum(-1)
    missed = 0.0
    for slots, chances in zip(output.loss_mask.flatten(0, 1), (1 - distance / 2).flatten(0, 1), strict=True):
        survival = 1.0
        for counts, chance in zip(slots, chances, strict=True):
            if counts:
                survival = survival * chance
                missed = missed + 1 - survival
    length = Objective(0.0, 0.0, 0.0, length_weight=1.0)
    wanted = missed / decay_weights(output.loss_mask, 4.0).sum()
    torch.testing.assert_close(drafter()(**batch, objective=length).loss, wanted)
    calculated = gradients(drafter(), **batch, objective=length)
    assert calculated["fc.weight"].any() and calculated["markov_head.markov_w2.weight"].any()


def test_dpace_weights_follow_the_paper():
    """w_j = Σ_{m≥j} Π_{i≤m} q̃_i, by hand for one block whose last slot does not count."""
    chance, alpha = torch.tensor([[[0.9, 0.2, 0.6, 0.5]]], requires_grad=True), 0.5
    smoothed = [0.95, 0.6, 0.8]
    products = [0.95, 0.95 * 0.6, 0.95 * 0.6 * 0.8]
    assert smoothed == pytest.approx([(1 - alpha) * q + alpha for q in chance[0, 0, :3].tolist()])
    weights = dpace_weights(torch.tensor([[[True, True, True, False]]]), chance, alpha)
    assert weights[0, 0].tolist() == pytest.approx([sum(products), sum(products[1:]), products[2], 0.0])
    assert not weights.requires_grad


@pytest.mark.parametrize("reduced", [False, True])
def test_dpace_loss(drafter, target, reduced):
    """Weights from the draft's own chances of the labels, nil for those that it cannot draft; divided by the slots."""
    model = restricted(drafter(), own_head=False).attach_target(target()) if reduced else drafter()
    batch, objective = training_batch(), Objective(1.0, 0.0, 0.0, position_weights="dpace", dpace_alpha=0.3)
    output = model(**batch, objective=objective, output_logits=True)
    chance = output.logits.softmax(-1).gather(-1, output.target_ids[..., None])[..., 0]
    weights = dpace_weights(output.loss_mask, chance, 0.3)
    ce = torch.where(chance > 0, -chance.log(), 0.0)
    torch.testing.assert_close(output.loss, (ce * weights).sum() / output.loss_mask.sum())
    assert total_weight(output.loss_mask, objective) == output.loss_mask.sum()


def test_a_given_divisor(drafter):
    batch = training_batch()
    alone = drafter()(**batch)
    weight = total_weight(alone.loss_mask, Objective())
    torch.testing.assert_close(drafter()(**batch, total_weight=3 * weight).loss, alone.loss / 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kl_weight": -1}, "kl_weight is -1, expected 0 or more"),
        ({"length_weight": -1}, "length_weight is -1, expected 0 or more"),
        ({"position_weights": "even"}, "position_weights is 'even', expected 'decay' or 'dpace'"),
        ({"dpace_alpha": 0.0}, r"dpace_alpha is 0.0, expected a value in \(0, 1\]"),
        ({"ce_weight": -0.1}, "ce_weight is -0.1, expected 0 or more"),
        ({"l1_weight": -1}, "l1_weight is -1, expected 0 or more"),
        ({"confidence_weight": -1}, "confidence_weight is -1, expected 0 or more"),
        ({"decay": 0.0}, "decay is 0.0, .* expected both above 0"),
        ({"chunk_size": 0}, "chunk_size 0; expected both above 0"),
    ],
)
def test_refused_objectives(values, message):
    with pytest.raises(ValueError, match=message):
        Objective(**values)


def test_refused_inputs(drafter, target):
    with pytest.raises(ValueError, match=r"input_ids has shape \(64,\), expected \(B, T\)"):
        drafter()(**training_batch() | {"input_ids": torch.ones(64, dtype=torch.long)})
    with pytest.raises(ValueError, match="target_hidden_states is missing and no target attached"):
        drafter()(torch.ones(1, 8, dtype=torch.long))


# --------------------------------------------------------------------------------------------- what a block depends on


def logits_of(model, **batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch, output_logits=True).logits


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_block_sees_no_target_state_at_or_after_its_anchor(drafter, name):
    batch = training_batch(name)
    states = batch["target_hidden_states"].requires_grad_()
    logits = drafter(name)(**batch, output_logits=True).logits
    for row, anchor in batch["anchor_mask"].nonzero().tolist():
        p = int(batch["anchor_positions"][row, anchor])
        reach = torch.autograd.grad(logits[row, anchor].square().sum(), states, retain_graph=True)[0].abs().sum(-1)
        assert not reach[1 - row].any() and not reach[row, p:].any()
        assert (reach[row, :p] > 0).all()


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_slot_sees_no_token_from_its_label_on(drafter, name):
    """Beside the anchor, slot k sees x_{p+k}, with a recurrent head all from the anchor to x_{p+k}; never its label."""
    model, batch = drafter(name), training_batch(name)
    wanted, row, anchor = logits_of(model, **batch), 0, 1
    p = int(batch["anchor_positions"][row, anchor])
    for at in range(p - 3, p + 9):
        tokens = batch["input_ids"].clone()
        tokens[row, at] = (tokens[row, at] + 1) % 100 + 4
        changed = (logits_of(model, **batch | {"input_ids": tokens}) - wanted)[row, anchor].abs().amax(-1) > 1e-6
        if name == "qwen3_dflash":
            seeing = [at == p for k in range(7)]
        elif name == "qwen3_rnn":
            seeing = [p <= at <= p + k for k in range(7)]
        else:
            seeing = [at in (p, p + k) for k in range(7)]
        assert changed.tolist() == [at == p or sees for sees in seeing], at


@pytest.mark.parametrize("name", DRAFTERS)
def test_blocks_do_not_see_each_other(drafter, name):
    model, batch = drafter(name), training_batch(name)
    wanted, kept = logits_of(model, **batch)[0, 2], batch["anchor_positions"].clone()
    for others in (kept + 1, kept.flip(1), kept * 0):
        positions = torch.where(torch.arange(6) == 2, kept, others)
        logits = logits_of(model, **batch | {"anchor_positions": positions})
        torch.testing.assert_close(logits[0, 2], wanted, rtol=0, atol=2e-5)
        assert (logits[0, 1] - logits[0, 2]).abs().max() > 1e-3
    alone = torch.arange(6)[None].expand(2, -1) == 2
    torch.testing.assert_close(logits_of(model, **batch | {"anchor_mask": alone})[0, 2], wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_training_pass_is_drafting_in_known_text(drafter, name):
    """A block anchored in front of the very tokens that `draft()` proposes there has the draft's logits."""
    model, batch = drafter(name), training_batch(name)
    p = 30
    states = batch["target_hidden_states"][:1]
    tokens = batch["input_ids"][:1].clone()
    draft = model.draft(states[:, :p], tokens[:, p])
    tokens[:, p + 1 : p + 8] = draft.token_ids
    with torch.no_grad():
        output = model(tokens, target_hidden_states=states, anchor_positions=torch.tensor([[p, 5]]), output_logits=True)
    assert torch.equal(output.target_ids[:, 0], draft.token_ids)
    torch.testing.assert_close(output.logits[:, 0], draft.logits, rtol=0, atol=2e-5)
    if draft.confidence_logits is not None:
        torch.testing.assert_close(output.confidence_logits[:, 0], draft.confidence_logits, rtol=0, atol=2e-5)
