"""EAGLE-3: the official implementation's numbers and traces, drafting against training, batches, layouts, refusals."""

import json
from functools import cache

import pytest
import torch
from generation_helpers import IDS, NEW, same_text
from helpers import FIXTURES, VOCABULARY, expected, expected_greedy, gradients, load_target
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from test_batch import BATCH, PROMPTS, alone, same_rows, unpadded
from torch.nn import functional as F
from transformers import AutoModel, GenerationConfig, TopKLogitsWarper

from dspark_hf import ConfidenceThreshold, Objective, record_speculation
from dspark_hf.baselines import Eagle3Config, Eagle3DrafterModel

FOLDER = FIXTURES / "drafter_qwen3_eagle3"
LAYERS = {"num_target_layers": 6}  # which SpecForge's files do not say


def load_eagle() -> Eagle3DrafterModel:
    return Eagle3DrafterModel.from_pretrained(FOLDER).eval()


@cache
def shared_eagle():
    return load_eagle()


@pytest.fixture
def eagle():
    yield shared_eagle()
    shared_eagle().zero_grad(set_to_none=True)


@pytest.fixture(scope="module")
def target():
    return load_target()


def training_batch() -> dict[str, torch.Tensor]:
    """The inputs of the recorded training pass: 2 texts of 64 tokens, the second padded."""
    recorded = expected("qwen3_eagle3", "train.")
    return {key: value for key, value in recorded.items() if not key.startswith("grad.") and key != "loss"}


def text_and_states(count: int = 20) -> dict[str, torch.Tensor]:
    """A recorded text up to an anchor and the states before it, as arguments of `draft()`."""
    batch = training_batch()
    ids = batch["input_ids"][:1, : count + 1]
    context = batch["target_hidden_states"][:1, :count]
    return {"context_hidden_states": context, "anchor_ids": ids[:, -1], "input_ids": ids}


def assert_same_draft(actual, wanted):
    assert torch.equal(actual.token_ids, wanted.token_ids)
    for key in ("logits", "hidden_states", "base_logits"):
        torch.testing.assert_close(actual[key], wanted[key], rtol=0, atol=1e-5)


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
            hidden = eagle._unrolled(text, F.pad(states[:, :count], (0, 0, 0, 8)))[:, count - 1]
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
    logits = eagle.lm_head(eagle._unrolled(batch["input_ids"], batch["target_hidden_states"]))
    losses = F.cross_entropy(logits.transpose(1, 3).transpose(2, 3), output.target_ids, reduction="none")
    wanted = (losses * output.loss_mask * 0.8 ** torch.arange(7)).sum() / 128
    torch.testing.assert_close(output.loss, wanted)
    with pytest.raises(ValueError, match="target_last_hidden_states is missing"):
        eagle(**batch, objective=Objective())


def test_acceptance_is_reported_per_step(eagle):
    batch = training_batch()
    output = eagle(**batch)
    draft = eagle.lm_head(eagle._unrolled(batch["input_ids"], batch["target_hidden_states"])).softmax(dim=-1)
    teacher = eagle.lm_head(batch["target_last_hidden_states"]).softmax(dim=-1)
    t, s = 25, 3
    overlap = torch.minimum(draft[0, t, s], teacher[0, t + s + 1]).sum()
    assert output.loss_mask[0, t, s] and output.acceptance.shape == (2, 64, 7)
    torch.testing.assert_close(output.acceptance[0, t, s], overlap)
    assert output.target_ids[0, t, s] == batch["input_ids"][0, t + s + 2]


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


# --------------------------------------------------------------------------------------------------- layouts and saving


def specforge(folder, size: int | None = None, **changes):
    """The recorded drafter written as SpecForge does, without norms of queries and keys, with a draft vocabulary."""
    tensors = load_file(FOLDER / "model.safetensors")
    ids = VOCABULARY if size is None else torch.arange(size)
    file = {
        key.replace("layers.0.", "midlayer."): value
        for key, value in tensors.items()
        if key != "embed_tokens.weight" and "_norm.weight" not in key.replace("hidden_norm", "hidden")
    }
    file["lm_head.weight"] = tensors["lm_head.weight"][ids].clone()
    file |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(128, dtype=torch.bool).index_fill(0, ids, True)}
    drop = {key for key, value in changes.items() if value is ...}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3, 4], "use_aux_hidden_state": True},
        "draft_vocab_size": len(ids),
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    } | {key: value for key, value in changes.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in drop}))
    save_file(file, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def plain_logits(tensors: dict[str, torch.Tensor], embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The first step's logits (n, D) by the file's tensors: one head and position at a time. 4 heads of 16, 2 keys."""

    def norm(x, name=None):
        weight = 1.0 if name is None else tensors.get(name)
        return x if weight is None else x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight

    def turned(x, position):  # dimension j and j + 8 are a plane
        angles = position * 10000.0 ** -(torch.arange(8) / 8)
        a, b = x[:8], x[8:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    layer = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    hidden = states @ tensors["fc.weight"].T
    pairs = [norm(embeds, f"{layer}input_layernorm.weight"), norm(hidden, f"{layer}hidden_norm.weight")]
    pairs = torch.cat(pairs, dim=-1)
    q, k, v = ((pairs @ tensors[f"{layer}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 16)) for name in "qkv")
    q, k = norm(q, f"{layer}self_attn.q_norm.weight"), norm(k, f"{layer}self_attn.k_norm.weight")
    out = []
    for t in range(len(pairs)):
        heads = []
        for head in range(4):
            query = turned(q[t, head], t)
            scores = torch.stack([query @ turned(k[i, head // 2], i) for i in range(t + 1)]) / 4
            heads.append(scores.softmax(0) @ v[: t + 1, head // 2])
        out.append(torch.cat(heads))
    hidden = hidden + torch.stack(out) @ tensors[f"{layer}self_attn.o_proj.weight"].T
    x = norm(hidden, f"{layer}post_attention_layernorm.weight")
    gate, up, down = (tensors[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return norm(hidden + (F.silu(x @ gate) * (x @ up)) @ down, "norm.weight") @ tensors["lm_head.weight"].T


def test_deepspec_layout_by_a_slow_oracle(eagle):
    arguments, tensors = text_and_states(6), load_file(FOLDER / "model.safetensors")
    embeds = tensors["embed_tokens.weight"][arguments["input_ids"][0, 1:]]
    wanted = plain_logits(tensors, embeds, arguments["context_hidden_states"][0])[-1]
    torch.testing.assert_close(eagle.draft(**arguments).logits[0, 0], wanted, rtol=0, atol=1e-5)


def test_specforge_layout(tmp_path, target):
    folder = specforge(tmp_path)
    model = Eagle3DrafterModel.from_pretrained(folder, **LAYERS).eval()
    assert model.config.block_size == 7 and not model.config.has_embed_tokens and not model.config.qk_norm
    arguments, tensors = text_and_states(6), load_file(folder / "model.safetensors")
    embeds = target.get_input_embeddings()(arguments["input_ids"][0, 1:])
    wanted = plain_logits(tensors, embeds, arguments["context_hidden_states"][0])[-1]
    draft = model.draft(**arguments, target=target)
    torch.testing.assert_close(draft.logits[0, 0, VOCABULARY], wanted, rtol=0, atol=1e-5)
    assert draft.logits[0].isfinite().sum(dim=-1).tolist() == [46] * 7
    assert torch.equal(target.generate(IDS, assistant_model=model, **NEW), target.generate(IDS, **NEW))

    model.save_pretrained(tmp_path / "saved")
    again = Eagle3DrafterModel.from_pretrained(tmp_path / "saved").eval()
    assert again.config.draft_vocab_size == 46
    assert_same_draft(again.draft(**arguments, target=target), draft)


def test_training_in_a_reduced_vocabulary(tmp_path, target):
    """Sums over the draft vocabulary at the target's own chances; with every token in it, the whole vocabulary's."""
    batch = training_batch()
    model = Eagle3DrafterModel.from_pretrained(specforge(tmp_path), **LAYERS).attach_target(target)
    output = model(**batch)
    hidden = model._unrolled(batch["input_ids"], batch["target_hidden_states"])
    log_draft = model.lm_head(hidden).log_softmax(dim=-1)
    teacher = target.lm_head(batch["target_last_hidden_states"]).softmax(dim=-1)[..., VOCABULARY]
    total = 0.0
    for s in range(7):
        wanted = -(F.pad(teacher, (0, 0, 0, 8))[:, s + 1 : s + 65] * log_draft[:, :, s]).sum(dim=-1)
        total = total + 0.8**s * (wanted * output.loss_mask[..., s]).sum() / 128
    torch.testing.assert_close(output.loss, total)

    whole = Eagle3DrafterModel.from_pretrained(specforge(tmp_path, 128), **LAYERS).attach_target(target)
    plain = Eagle3Config.from_dict(whole.config.to_dict() | {"draft_vocab_size": None})
    plain = Eagle3DrafterModel(plain).attach_target(target)
    plain.load_state_dict({key: value for key, value in whole.state_dict().items() if key not in ("d2t", "t2d")})
    torch.testing.assert_close(whole(**batch).loss, plain(**batch).loss)


@pytest.mark.parametrize("loader", [Eagle3DrafterModel, AutoModel])
def test_saved_and_loaded_again(tmp_path, eagle, loader):
    eagle.save_pretrained(tmp_path)
    again = loader.from_pretrained(tmp_path).eval()
    assert type(again) is Eagle3DrafterModel
    assert again.config.to_dict() | {"_name_or_path": ""} == eagle.config.to_dict() | {"_name_or_path": ""}
    state = again.state_dict()
    assert all(torch.equal(state[key], value) for key, value in eagle.state_dict().items())
    assert_same_draft(again.draft(**text_and_states()), eagle.draft(**text_and_states()))
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_attention_implementations_agree(eagle):
    eager = Eagle3DrafterModel.from_pretrained(FOLDER, attn_implementation="eager").eval()
    assert_same_draft(eager.draft(**text_and_states()), eagle.draft(**text_and_states()))
    torch.testing.assert_close(eager(**training_batch()).loss, eagle(**training_batch()).loss)


def test_for_a_target(target):
    """A new drafter for a target, as a recipe makes one: it trains and drafts."""
    config = Eagle3Config.for_target(target.config, block_size=3, target_layer_ids=[0, 2, 4])
    model = Eagle3DrafterModel(config).eval().attach_target(target)
    batch = training_batch()
    loss = model(batch["input_ids"], batch["loss_mask"], attention_mask=batch["attention_mask"]).loss
    assert loss.isfinite() and loss > 0
    assert torch.equal(target.generate(IDS, assistant_model=model, **NEW), target.generate(IDS, **NEW))


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        ("fc.weight", (), r"missing tensors \['fc.weight'\], unknown tensors \[\]"),
        ("layers.0.self_attn.q_norm.weight", (), r"missing tensors \['layers.0.self_attn.q_norm.weight'\]"),
        (None, ("d2t",), r"missing tensors \[\], unknown tensors \['d2t'\]"),
        ("layers.0.hidden_norm.weight", ("hidden_norm.weight",), r"missing .*layers.0.hidden.*unknown .*'hidden_norm"),
    ],
)
def test_missing_and_unknown_tensors_are_refused(tmp_path, drop, add, message):
    tensors = {key: value for key, value in load_file(FOLDER / "model.safetensors").items() if key != drop}
    save_file(tensors | {key: torch.ones(2) for key in add}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        Eagle3DrafterModel.from_pretrained(tmp_path)


def test_lent_embedding_and_head(tmp_path, target, eagle):
    tensors = load_file(FOLDER / "model.safetensors")
    lent = {"embed_tokens.weight": target.get_input_embeddings().weight, "lm_head.weight": target.lm_head.weight}
    assert all(torch.equal(tensors[key], value) for key, value in lent.items())
    file = {key: value for key, value in tensors.items() if key not in lent}
    save_file(file, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    model = Eagle3DrafterModel.from_pretrained(tmp_path).eval()
    with pytest.raises(ValueError, match="no embedding or head of its own"):
        model.draft(**text_and_states())
    assert_same_draft(model.draft(**text_and_states(), target=target), eagle.draft(**text_and_states()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttt_length": None}, r"lacks \['block_size'\]"),
        ({"ttt_length": 0}, r"block_size is 0, expected an integer of at least 1"),
        ({"target_layer_ids": [0, 2, 5]}, r"target_layer_ids is \[0, 2, 5\], expected .* -1\.\.4"),
        ({"num_target_layers": None}, r"lacks \['num_target_layers'\]"),
        ({"draft_num_hidden_layers": 2}, r"draft_num_hidden_layers is 2, expected 1"),
        ({"num_hidden_layers": 2, "layer_types": None}, r"num_hidden_layers is 2, expected 1"),
        ({"step_loss_decay": 1.0}, r"step_loss_decay is 1\.0, expected a number in \(0, 1\)"),
        ({"step_loss_decay": "0.8"}, r"step_loss_decay is '0\.8', expected a number"),
        ({"markov_rank": 4}, r"markov_rank is 4, expected 0"),
        ({"enable_confidence_head": True}, r"enable_confidence_head is True, expected False"),
        ({"use_sliding_window": True}, r"use_sliding_window is True, expected none"),
        ({"architectures": ["Qwen3DSparkModel"]}, r"not an EAGLE-3 checkpoint: .*Qwen3DSparkModel.*expected 'eagle3'"),
        ({"architectures": None}, r"not an EAGLE-3 checkpoint"),
    ],
)
def test_refused_configurations(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(json.loads((FOLDER / "config.json").read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        Eagle3Config.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {}, r"num_target_layers is missing, as in all files of SpecForge: pass it to from_pretrained"),
        ({"norm_before_residual": True}, LAYERS, r"norm_before_residual is True, expected False"),
        ({"target_hidden_size": 128}, LAYERS, r"target_hidden_size is 128, expected 64"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, LAYERS, r"use_aux_hidden_state is False, expected True"),
        ({"draft_vocab_size": 129}, LAYERS, r"draft_vocab_size is 129, expected None or 1\.\.128"),
        ({"vocab_size": ...}, LAYERS, r"lacks \['vocab_size'\]"),
        ({"hidden_size": ...}, LAYERS, r"lacks \['hidden_size', 'head_dim'\]"),
    ],
)
def test_refused_specforge_configurations(tmp_path, changes, options, message):
    with pytest.raises(ValueError, match=message):
        Eagle3Config.from_pretrained(specforge(tmp_path, **changes), **options)


def test_default_layers_of_specforge(tmp_path):
    folder = specforge(tmp_path, eagle_config=...)
    config = Eagle3Config.from_pretrained(folder, num_target_layers=36)
    assert (config.target_layer_ids, config.num_target_layers) == ([1, 17, 32], 36)


def test_a_target_of_another_size_is_refused(tmp_path, target):
    model = Eagle3DrafterModel.from_pretrained(specforge(tmp_path), num_target_layers=7)
    with pytest.raises(ValueError, match="made for a target with num_target_layers 7, 'qwen3' has 6"):
        target.generate(IDS, assistant_model=model, **NEW)
