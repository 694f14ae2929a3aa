"""Order, reuse and anchors of training texts; batches of them, packed or not; the online source of states."""

import pytest
import torch
from helpers import gradients
from training_helpers import DRAFTER, new_drafter, texts, with_states

from dspark_hf.objective_dspark import text_positions
from dspark_hf.training import AnchoredTexts, OnlineStates, ReplaySampler, collate_anchored
from dspark_hf.training.replay import packed_rows

# -------------------------------------------------------------------------------------------------------------- states


def test_states_are_those_of_a_direct_forward(target):
    source = OnlineStates(target(), [0, 2, 4], with_logsumexp=True)
    for text in texts()[:4]:
        sample = source.features(text)
        outputs = target()(text["input_ids"][None], output_hidden_states=True)
        states = torch.cat([outputs.hidden_states[i + 1][0] for i in (0, 2, 4)], dim=-1)
        torch.testing.assert_close(sample["target_hidden_states"], states)
        torch.testing.assert_close(sample["target_last_hidden_states"], outputs.hidden_states[-1][0])
        teaches = sample["loss_mask"].nonzero()[:, 0] - 1
        torch.testing.assert_close(sample["target_logsumexp"][teaches], outputs.logits[0, teaches].logsumexp(-1))


def test_the_normaliser_is_of_the_capped_logits(target):
    sample = OnlineStates(target(), [0], with_logsumexp=True, softcap=3.0).features(texts()[0])
    logits = target()(sample["input_ids"][None]).logits[0]
    normaliser = (3.0 * torch.tanh(logits / 3.0)).logsumexp(-1)
    teaches = sample["loss_mask"].nonzero()[:, 0] - 1
    torch.testing.assert_close(sample["target_logsumexp"][teaches], normaliser[teaches])


# --------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize(("reuse", "window"), [(1, 1), (1, 8), (4, 1), (4, 10), (3, 100)])
def test_every_text_is_drawn_reuse_times_within_the_window(reuse, window):
    sampler = ReplaySampler(60, reuse, window, seed=3)
    turns = list(sampler)
    assert len(turns) == len(sampler) == 60 * reuse
    assert sorted(turns) == [(text, draw) for text in range(60) for draw in range(reuse)]
    for text in range(60):
        places = [place for place, (other, _) in enumerate(turns) if other == text]
        assert [turns[place][1] for place in places] == list(range(reuse))
        # Between a text's first and last draw lie draws of texts that come at most a window before or after it.
        assert places[-1] - places[0] <= 2 * window * reuse
    assert list(sampler) == turns
    sampler.set_epoch(1)
    later = list(sampler)
    assert sorted(later) == [(text, reuse + draw) for text in range(60) for draw in range(reuse)]
    assert [text for text, _ in later] != [text for text, _ in turns]
    assert list(ReplaySampler(60, reuse, window, seed=4)) != turns


def test_a_window_mixes_texts():
    turns = [text for text, _ in ReplaySampler(200, 4, 50, seed=0)]
    repeats = sum(a == b for a, b in zip(turns, turns[1:], strict=False))
    assert repeats < 40  # 600 with every text drawn four times in a row


@pytest.mark.parametrize("values", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_refused_orders(values):
    with pytest.raises(ValueError, match="expected at least 1 each"):
        ReplaySampler(*values, seed=0)


# --------------------------------------------------------------------------------------------------------------- draws


class CountingStates:
    def __init__(self):
        self.asked = []

    def features(self, sample):
        self.asked.append(sample["id"])
        return sample | {"target_hidden_states": sample["input_ids"][:, None].float()}


def test_a_forward_serves_all_draws():
    source, samples = CountingStates(), texts()
    items = AnchoredTexts(samples, source, num_anchors=5, seed=0, kept=3)
    for text, draw in ReplaySampler(6, 4, 2, seed=1):
        items[text, draw]
    assert len(source.asked) == len(set(source.asked)) == 6
    items = AnchoredTexts(samples, source, num_anchors=5, seed=0, kept=1)
    for text in (0, 1, 0):
        items[text]
    assert source.asked[6:] == [source.asked[6], source.asked[7], source.asked[6]]


def test_anchors_are_a_function_of_seed_text_and_draw():
    samples = texts()
    items = AnchoredTexts(samples, None, num_anchors=5, seed=0, kept=3)
    drawn = {(i, d): items[i, d]["anchor_positions"].tolist() for i in range(6) for d in range(3)}
    assert len({tuple(positions) for positions in drawn.values()}) == 18
    for (i, _), positions in drawn.items():
        assert len(set(positions)) == 5 and all(samples[i]["loss_mask"][p] for p in positions)
    again = AnchoredTexts(samples[::-1], None, num_anchors=5, seed=0, kept=1)
    assert {(i, d): again[5 - i, d]["anchor_positions"].tolist() for i, d in reversed(drawn)} == drawn
    assert items[2]["anchor_positions"].tolist() == drawn[2, 0]
    other = AnchoredTexts(samples, None, num_anchors=5, seed=1, kept=3)
    assert other[0]["anchor_positions"].tolist() != drawn[0, 0]


def test_texts_of_plain_lists(target):
    """As rows of a `datasets.Dataset` are."""
    sample = next(iter(with_states(target(), texts())))
    plain = {key: value.tolist() for key, value in sample.items()}
    got, wanted = (AnchoredTexts([s], None, num_anchors=4, seed=0, kept=1)[0] for s in (plain, sample))
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value)


# ------------------------------------------------------------------------------------------------------------- batches


def anchored(target, num_anchors=6):
    source = OnlineStates(target(), DRAFTER["target_layer_ids"], with_logsumexp=True)
    return AnchoredTexts(texts(), source, num_anchors, seed=0, kept=8)


def test_a_padded_batch():
    long, short = AnchoredTexts(texts(), None, 4, 0, 1)[0], {"input_ids": torch.tensor([7, 8, 9])}
    short |= {"loss_mask": torch.tensor([False, True, True]), "anchor_positions": torch.tensor([1])}
    batch = collate_anchored([long, short])
    assert batch["input_ids"][1, :4].tolist() == [7, 8, 9, 0]
    assert batch["attention_mask"].sum(1).tolist() == [len(long["input_ids"]), 3]
    assert batch["anchor_positions"][1].tolist() == [1, 0, 0, 0]
    assert batch["anchor_mask"].tolist() == [[True] * 4, [True, False, False, False]]


def test_texts_without_a_place_for_an_anchor():
    nothing = {"input_ids": torch.tensor([7, 8]), "loss_mask": torch.tensor([False, True]),
               "anchor_positions": torch.tensor([], dtype=torch.long)}  # fmt: skip
    batch = collate_anchored([nothing, nothing])
    assert batch["anchor_positions"].shape == (2, 1) and not batch["anchor_mask"].any()


def test_rows_are_filled():
    samples = [{"input_ids": torch.zeros(length)} for length in (5, 3, 9, 2, 4, 12)]
    rows = [[len(sample["input_ids"]) for sample in row] for row in packed_rows(samples, 10)]
    assert rows == [[12], [9], [5, 4], [3, 2]]


def test_positions_in_documents():
    documents = torch.tensor([[0, 0, 0, 1, 2, 2], [3, 3, 0, 0, 0, 0]])
    assert text_positions(documents).tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3]]


@pytest.mark.parametrize("reduced", [False, True])
def test_packing_changes_no_gradient(target, reduced):
    """Three texts in one row, and beside another in a second one, teach what they teach in rows of their own."""
    items = [anchored(target)[i] for i in range(4)]
    model = new_drafter(target(), **({"draft_vocab_size": 60} if reduced else {}))
    if reduced:
        model.set_draft_vocabulary(torch.arange(40, 100))
    plain, packed = collate_anchored(items), collate_anchored(items, row_length=400)
    assert packed["input_ids"].shape[0] == 2 and packed["document_ids"].max() == 2
    wanted, got = gradients(model, **plain), gradients(model, **packed)
    assert wanted.keys() == got.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: key + text)
    # What documents keep apart, a batch that forgets them does not.
    del packed["document_ids"]
    forgotten = gradients(model, **packed)
    assert any((forgotten[key] - gradient).abs().max() > 1e-4 for key, gradient in wanted.items())


def test_no_block_crosses_documents(target):
    """Anchors drawn in the model, at the very ends of documents, supervise their own document only."""
    items = [anchored(target)[i] for i in range(3)]
    packed = collate_anchored(items, row_length=1000)
    ends = packed["document_ids"][0].bincount().cumsum(0)
    positions = torch.stack([ends[:2] - 2, ends[:2] - 3]).T.reshape(1, -1).sort().values
    packed |= {"anchor_positions": positions, "anchor_mask": torch.ones_like(positions, dtype=torch.bool)}
    output = new_drafter(target())(**packed)
    assert output.loss_mask.sum(-1).tolist() == [[2, 1, 2, 1]]
    model = new_drafter(target(), num_anchors=999)
    del packed["anchor_positions"], packed["anchor_mask"]
    valid = sum(int((text["loss_mask"][:-1] & text["loss_mask"][1:]).sum()) for text in texts()[:3])
    assert model(**packed).loss_mask[..., 0].sum() == valid


def test_packed_rows_need_states(target):
    batch = collate_anchored([AnchoredTexts(texts(), None, 4, 0, 1)[0]], row_length=400)
    with pytest.raises(ValueError, match="target_hidden_states is missing, expected with document_ids"):
        new_drafter(target())(**batch)
