"""The cache of target states: what comes back, what a killed build leaves, what is refused."""

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import stat
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from generation_helpers import character_tokenizer
from helpers import VOCABULARY, expected_greedy, load_target, restricted
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from dspark_hf.training import cache as cache_module
from dspark_hf.training.cache import CachedStates, build_cache, verify_cache
from dspark_hf.training.compression import decode, encode, from_fp8, from_int8, supervised_positions, to_fp8, to_int8
from dspark_hf.training.data import collate, sample_id
from dspark_hf.training.features import OnlineStates
from dspark_hf.training.manifest import CacheSource, Manifest, human_size
from dspark_hf.vocabulary_dspark import softcapped

LAYERS = [0, 2, 4]
TRACES = expected_greedy("qwen3_vanilla")["threshold_0.0"]
KEYS = ("target_hidden_states", "target_last_hidden_states", "target_logsumexp")
SHARD = 300_000  # bytes: two or three of the texts, exact in float32


def texts() -> list[dict]:
    """Six texts of 104 to 139 tokens."""
    samples = []
    for trace in TRACES:
        ids = torch.tensor(trace["output_ids"])
        mask = torch.arange(len(ids)) >= len(trace["prompt_ids"])
        samples.append({"input_ids": ids, "loss_mask": mask, "id": sample_id(ids, mask)})
    return samples


def source(model, **changes) -> CacheSource:
    return replace(CacheSource.of(model, character_tokenizer(), LAYERS, "tiny"), **changes)


def online(target) -> OnlineStates:
    return OnlineStates(target, LAYERS, True, getattr(target.config.get_text_config(), "final_logit_softcapping", None))


def build(folder, target, samples=None, features=None, shard_bytes=SHARD, **options) -> Manifest:
    features = features or online(target).features
    samples = texts() if samples is None else samples
    return build_cache(samples, features, folder, source(target), shard_bytes=shard_bytes, **options)


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module", autouse=True)
def no_fsync():
    """A busy disk would make the tests slow, and a killed process loses nothing of what it wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def built(target, tmp_path_factory):
    """An exact cache of three shards; not to be changed."""
    folder = tmp_path_factory.mktemp("cache") / "exact"
    manifest = build(folder, target())
    assert [len(shard.samples) for shard in manifest.shards] == [2, 2, 2]
    return folder


@pytest.fixture
def copy(built, tmp_path):
    return shutil.copytree(built, tmp_path / "copy")


# ---------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_exact_states_come_back_bit_for_bit(tmp_path, name, dtype):
    target = load_target(name, dtype=dtype)
    build(tmp_path / "cache", target, shard_bytes=SHARD // 2)
    cached, states = CachedStates(tmp_path / "cache"), online(target)
    for sample in reversed(texts()):
        wanted, found = states.features(sample), cached.features(sample)
        assert found.keys() == wanted.keys() and found["id"] == sample["id"]
        for key in KEYS:
            assert found[key].dtype == wanted[key].dtype == (torch.float32 if key == "target_logsumexp" else dtype)
            assert torch.equal(found[key], wanted[key])
        found["target_hidden_states"].zero_()  # the reader's own copy
        assert torch.equal(cached.features(sample)["target_hidden_states"], wanted["target_hidden_states"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "bound"), [("qwen3", 0.004), ("gemma4", 0.003)])
def test_compressed_teacher_is_close(tmp_path, name, bound, dtype):
    """Mean total variation of the teacher under `bound`, context states within fp8's half step; zeros elsewhere."""
    target = load_target(name, dtype=dtype)
    manifest = build(tmp_path / "cache", target, format="compressed")
    assert manifest.size < 0.3 * Manifest(source(target, dtype="float32"), "exact", []).num_bytes(
        manifest.num_tokens, 0
    )
    cached, states = CachedStates(tmp_path / "cache"), online(target)
    distances = []
    for sample in texts():
        wanted, found = states.features(sample), cached.features(sample)
        assert all(found[key].dtype == torch.float32 and found[key].shape == wanted[key].shape for key in KEYS)
        teaches = torch.zeros_like(sample["loss_mask"])
        teaches[:-1] = sample["loss_mask"][1:]
        assert torch.equal(found["target_logsumexp"][teaches], wanted["target_logsumexp"][teaches])
        for key in KEYS[1:]:
            assert found[key][teaches].any() and not found[key][~teaches].any()
        states_in, states_out = wanted[KEYS[0]].float(), found[KEYS[0]]
        assert ((states_out - states_in).norm(dim=-1) < 0.035 * states_in.norm(dim=-1)).all()
        p, q = (probabilities(target, f["target_last_hidden_states"][teaches]) for f in (wanted, found))
        distances.append(0.5 * (p - q).abs().sum(dim=-1))
    distances = torch.cat(distances)
    assert 0 < distances.mean() < bound and distances.max() < 0.025


def probabilities(target, states):
    """Teacher distributions, the head in float32."""
    weight = target.get_output_embeddings().weight.float()
    cap = getattr(target.config.get_text_config(), "final_logit_softcapping", None)
    return softcapped(states.float() @ weight.T, cap).softmax(dim=-1)


@pytest.mark.parametrize("hidden", [64, 100, 20])
def test_quantisers_err_by_half_a_step(hidden):
    """Also with an outlier a thousand times the rest, rows of zeros, and tiny values."""
    states = torch.randn(12, 3 * hidden)
    states[3, 5], states[4], states[5] = 3000.0, 0.0, 1e-30 * states[5]
    values, scales = to_fp8(states, 3)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (12, 3)
    error = (from_fp8(values, scales) - states).abs()
    smallest = scales.repeat_interleave(hidden, dim=1) * 2**-10  # half of the least step, below 2^-6
    assert (error <= torch.maximum(states.abs() * 2**-4, smallest) * 1.001).all()

    states = states[:, :hidden]
    values, scales = to_int8(states)
    assert values.dtype == torch.int8 and values.shape == states.shape and scales.shape == (12, -(-hidden // 64))
    error = (from_int8(values, scales) - states).abs()
    for group in range(scales.shape[1]):
        part = slice(64 * group, 64 * group + 64)
        largest = states[:, part].abs().amax(dim=1, keepdim=True)
        assert (error[:, part] <= largest / 127 * 0.505 + 1e-38).all()
    assert not from_int8(*to_int8(torch.zeros(0, hidden))).numel()


def test_compression_skips_the_text_whose_next_token_is_not_learnt():
    mask = torch.tensor([True, False, False, True, True, False])
    assert supervised_positions(mask).tolist() == [2, 3]
    nothing = supervised_positions(torch.zeros(6) > 0)
    stored = encode("compressed", torch.randn(6, 20), torch.randn(6, 10), torch.randn(6), nothing)
    _, last, logsumexp = decode("compressed", stored, nothing)
    assert not last.any() and last.shape == (6, 10) and not logsumexp.any()


def test_texts_without_supervision_take_no_rows(tmp_path, target):
    samples = texts()[:2]
    samples[0]["loss_mask"] = torch.zeros_like(samples[0]["loss_mask"])
    build(tmp_path / "cache", target(), samples, format="compressed")
    cached = CachedStates(tmp_path / "cache", samples)
    assert not cached[0]["target_last_hidden_states"].any()
    assert cached[1]["target_last_hidden_states"].any()
    verify_cache(tmp_path / "cache")


@pytest.mark.parametrize("reduced", [False, True])
def test_training_takes_cached_states_as_computed_ones(built, target, drafter, reduced):
    """The same loss to the last bit, and the whole normaliser where the draft vocabulary is a part."""
    model = restricted(drafter(), own_head=False) if reduced else drafter()
    model.attach_target(target())
    assert model.config.target_layer_ids == LAYERS and len(VOCABULARY) < model.config.vocab_size
    anchors = {"anchor_positions": torch.tensor([[50, 60, 90], [60, 70, 100]])}
    losses = []
    for states in (online(target()), CachedStates(built)):
        batch = collate([states.features(texts()[i]) for i in (0, 5)]) | anchors
        losses.append(model(**batch))
    for key in ("loss", "ce_loss", "l1_loss", "confidence_loss"):
        assert torch.equal(losses[0][key], losses[1][key])
    bare = collate([texts()[0], texts()[5]]) | anchors
    torch.testing.assert_close(model(**bare).loss, losses[1].loss)


def test_readers_in_other_processes(built, target):
    """Workers of a loader, forked from a process that has read, and pickled copies."""
    cached = CachedStates(built, texts())
    wanted = [online(target()).features(sample) for sample in texts()]
    assert torch.equal(cached[3][KEYS[0]], wanted[3][KEYS[0]])  # opens a file in this process
    loader = DataLoader(cached, batch_size=2, num_workers=2, multiprocessing_context="fork", collate_fn=collate)
    for found, pair in zip(loader, (wanted[0:2], wanted[2:4], wanted[4:6]), strict=True):
        for key in KEYS:
            assert torch.equal(found[key], collate(pair)[key])
    assert torch.equal(cached[3][KEYS[0]], wanted[3][KEYS[0]])
    copied = pickle.loads(pickle.dumps(cached))
    assert len(copied) == 6 and torch.equal(copied[3][KEYS[0]], wanted[3][KEYS[0]])


# -------------------------------------------------------------------------------------------------------------- builds


def test_manifest_tells_what_is_stored(built, target):
    content = json.loads((built / "manifest.json").read_text())
    told = content["source"]
    assert (told["target"], told["layer_ids"], told["hidden_size"]) == ("tiny", LAYERS, 64)
    assert (told["dtype"], told["revision"], content["format"]) == ("float32", None, "exact")
    assert content["num_samples"] == 6 and content["num_tokens"] == sum(len(t["output_ids"]) for t in TRACES)
    assert content["size"] == sum(path.stat().st_size for path in built.glob("*.safetensors"))
    stored = [sample for shard in content["shards"] for sample in shard["samples"]]
    supervised = [len(t["output_ids"]) - len(t["prompt_ids"]) for t in TRACES]
    lengths = [len(t["output_ids"]) for t in TRACES]
    assert stored == [list(row) for row in zip((s["id"] for s in texts()), lengths, supervised, strict=True)]


def test_estimate_comes_before_anything_is_written(tmp_path, target):
    """Its size is that of the files but for their headers, and nothing is computed twice."""
    computed, seen = [], []

    def features(sample):
        computed.append(sample["id"])
        return online(target()).features(sample)

    def announce(estimate):
        seen.append((estimate, list(computed), (tmp_path / "cache").exists()))

    manifest = build(tmp_path / "cache", target(), features=features, announce=announce)
    ((estimate, timed, existed),) = seen
    assert not existed and 0 < len(timed) < 6 and computed == [sample["id"] for sample in texts()]
    assert estimate.samples == 6 and estimate.tokens == manifest.num_tokens and estimate.seconds > 0
    assert 0 < manifest.size - estimate.size < 1024 * len(manifest.shards)
    assert f"6 texts of {estimate.tokens} tokens: {human_size(estimate.size)}" in str(estimate)


def test_build_is_refused_where_it_does_not_fit(tmp_path, target, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 500_000, 500_000))
    with pytest.raises(ValueError, match=r"6 texts take 7\d\d\.\d kB and 500\.0 kB are free"):
        build(tmp_path / "cache", target())
    assert not (tmp_path / "cache").exists()
    build(tmp_path / "cache", target(), format="compressed")


def test_shards_fill_to_their_size(tmp_path, target):
    sizes = [Manifest(source(target()), "exact", []).num_bytes(len(s["input_ids"]), 0) for s in texts()]
    for shard_bytes, wanted in ((1, [1] * 6), (sum(sizes[:3]), None), (10**9, [6])):
        manifest = build(tmp_path / str(shard_bytes), target(), shard_bytes=shard_bytes)
        lengths = [len(shard.samples) for shard in manifest.shards]
        assert sum(lengths) == 6 and lengths == (wanted or lengths) and (wanted or lengths[0] == 3)
        CachedStates(tmp_path / str(shard_bytes), texts())


def test_more_texts_are_added_and_each_is_stored_once(tmp_path, target):
    build(tmp_path / "cache", target(), texts()[:3] * 2)
    before = contents(tmp_path / "cache")
    manifest = build(tmp_path / "cache", target(), texts()[1:])
    assert manifest.num_samples == 6 and len(CachedStates(tmp_path / "cache", texts())) == 6
    after = contents(tmp_path / "cache")
    assert all(after[name] == before[name] for name in before if name.endswith(".safetensors"))
    build(tmp_path / "cache", target(), features=None, samples=texts()[:1])
    assert contents(tmp_path / "cache") == after


# The places where a build may be killed: in the n-th text, or around the n-th renaming (shards and manifest in turn).
KILLS = [
    ("text", 0),
    ("text", 3),
    ("before", 0),
    ("after", 0),
    ("before", 1),
    ("after", 1),
    ("after", 2),
    ("before", 5),
]


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill[0]}-{kill[1]}")
def test_a_killed_build_goes_on(tmp_path, target, built, kill):
    """SIGKILL, then the same build again: whole shards are kept, and the folder is the one of a build in one go."""
    folder, (place, number) = tmp_path / "cache", kill
    states, rename, counts = online(target()), os.replace, {"text": 0, "rename": 0}

    def die(here, count):
        if (here, count) == (place, number):
            os.kill(os.getpid(), signal.SIGKILL)

    def features(sample):
        die("text", counts["text"])
        counts["text"] += 1
        return states.features(sample)

    def dying_replace(*paths):
        die("before", counts["rename"])
        rename(*paths)
        die("after", counts["rename"])
        counts["rename"] += 1

    def child():
        os.replace = dying_replace
        build(folder, target(), features=features)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    left = folder / "manifest.json"
    kept = Manifest.load(folder).num_samples if left.exists() else 0
    if kept:
        cached = CachedStates(folder, texts()[:kept])  # what there is can be read
        assert torch.equal(cached[0][KEYS[0]], states.features(texts()[0])[KEYS[0]])
        with pytest.raises(ValueError, match=texts()[5]["id"]):
            cached.features(texts()[5])
    place = None
    build(folder, target(), features=features)
    assert counts["text"] == 6 - kept
    assert contents(folder) == contents(built)


def test_files_are_on_the_disk_before_they_are_named(tmp_path, target, monkeypatch):
    """Each file is synced whole, then renamed, then its folder synced; shards before the manifest that names them."""
    events, rename = [], os.replace

    def fsync(descriptor):
        state = os.fstat(descriptor)
        events.append(("sync", state.st_ino, state.st_size if stat.S_ISREG(state.st_mode) else None))

    def recorded_replace(old, new):
        events.append(("name", os.path.basename(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    build(tmp_path / "cache", target(), shard_bytes=10**9)
    wanted = []
    for name in ("shard-00000.safetensors", "manifest.json"):
        state = (tmp_path / "cache" / name).stat()
        wanted += [("sync", state.st_ino, state.st_size), ("name", name)]
        wanted += [("sync", (tmp_path / "cache").stat().st_ino, None)]
    assert events == wanted


def test_damaged_shards_are_made_anew(copy, target, built):
    (copy / "shard-00000.safetensors").unlink()
    os.truncate(copy / "shard-00002.safetensors", 1000)
    (copy / "shard-00003.safetensors.tmp").write_bytes(b"left by a kill")
    with pytest.raises(ValueError, match="shard-00000.safetensors is missing; .*2 of its 2 texts are missing"):
        build(copy, target(), texts()[2:])
    build(copy, target())
    assert contents(copy) == contents(built)


def test_one_build_at_a_time(copy, target):
    with cache_module._sole_builder(copy), pytest.raises(ValueError, match="another build writes to .*copy"):
        build(copy, target(), texts()[:1])


# ------------------------------------------------------------------------------------------------------------- refusals


def test_another_source_is_refused(copy, target):
    before = contents(copy)
    for changes, words in (
        ({"weights": "0" * 16, "target": "other"}, r"target 'tiny' .*expected 'other' \(weights 0000"),
        ({"layer_ids": (0, 3)}, r"layer_ids \(0, 2, 4\), expected \(0, 3\)"),
        ({"dtype": "bfloat16"}, "dtype float32, expected bfloat16"),
        ({"tokenizer": "abc"}, "tokenizer .*, expected abc"),
        ({"chat_template": "abc"}, "chat template .*, expected abc"),
    ):
        with pytest.raises(ValueError, match=words):
            build_cache(texts(), online(target()).features, copy, source(target(), **changes))
    with pytest.raises(ValueError, match="format 'exact', expected 'compressed'"):
        build(copy, target(), format="compressed")
    assert contents(copy) == before
    moved = source(target(), target="elsewhere/tiny", revision="abc")
    build_cache(texts(), online(target()).features, copy, moved)


def test_sources_differ_by_what_matters(target):
    first, tokenizer = source(target()), character_tokenizer()
    assert first == source(load_target())
    assert source(load_target(dtype=torch.bfloat16)) == replace(first, dtype="bfloat16")
    changed = load_target()
    changed.get_decoder().layers[3].mlp.up_proj.weight.data[0, 0] += 0.5
    assert source(changed).weights != first.weights
    tokenizer.chat_template = "{{ messages }}"
    other = CacheSource.of(target(), tokenizer, LAYERS, "tiny")
    assert other == replace(first, chat_template=other.chat_template) != first
    tokenizer.add_tokens(["<more>"])
    assert CacheSource.of(target(), tokenizer, LAYERS, "tiny").tokenizer != first.tokenizer
    for layer_ids in ([], [0, 5], [-2]):
        with pytest.raises(ValueError, match=r"expected values in -1\.\.4"):
            CacheSource.of(target(), tokenizer, layer_ids, "tiny")


def test_bad_shards_are_named(copy):
    """Torn and missing ones on opening, all of them by verify_cache, which finds nothing in a good cache."""
    assert verify_cache(copy).num_samples == 6
    original = contents(copy)

    def restore():
        for path in copy.iterdir():
            path.unlink()
        for name, content in original.items():
            (copy / name).write_bytes(content)

    os.truncate(copy / "shard-00001.safetensors", len(original["shard-00001.safetensors"]) - 1)
    (copy / "shard-00002.safetensors").unlink()
    for read in (CachedStates, verify_cache):
        with pytest.raises(ValueError, match="shard-00001.safetensors is torn: it has"):
            read(copy)
    with pytest.raises(ValueError, match="shard-00002.safetensors is missing"):
        verify_cache(copy)

    restore()
    altered = bytearray(original["shard-00001.safetensors"])
    altered[-7] ^= 1
    (copy / "shard-00001.safetensors").write_bytes(altered)
    CachedStates(copy)  # contents are not read
    with pytest.raises(ValueError, match="shard-00001.safetensors is altered") as refused:
        verify_cache(copy)
    assert "shard-00000" not in str(refused.value)

    restore()
    shutil.copy(copy / "shard-00001.safetensors", copy / "shard-00009.safetensors")
    with pytest.raises(ValueError, match="shard-00009.safetensors is foreign"):
        verify_cache(copy)

    restore()
    tensors = load_file(copy / "shard-00000.safetensors")
    tensors["hidden_states"] = tensors["hidden_states"].half()
    save_file(tensors, copy / "shard-00000.safetensors")
    content = json.loads(original["manifest.json"])
    content["shards"][0]["size"] = (copy / "shard-00000.safetensors").stat().st_size
    content["shards"][0]["sha256"] = cache_module.file_hash(copy / "shard-00000.safetensors")
    (copy / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="shard-00000.safetensors holds .*float16.*expected .*float32"):
        verify_cache(copy)


@pytest.mark.parametrize("content", ["", "[]", '{"version": 1, "sou', '{"version": 1, "source": {}}', '{"version": 2}'])
def test_bad_manifests_are_named(copy, content):
    (copy / "manifest.json").write_text(content)
    for read in (CachedStates, verify_cache, Manifest.load):
        with pytest.raises(ValueError, match=r"manifest\.json is .*expected"):
            read(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(ValueError, match="there is no .*manifest.json, expected a folder made by `dspark cache build`"):
        CachedStates(copy)


def test_unknown_samples_are_named(built):
    sample = texts()[0]
    cut = {key: value[:50] for key, value in sample.items() if key != "id"}
    with pytest.raises(ValueError, match=f"no states of sample {sample_id(**cut)} in .* 6 texts; .*maximal length"):
        CachedStates(built).features(cut)
    with pytest.raises(ValueError, match="no states of sample 0123456789abcdef"):
        CachedStates(built, [*texts(), sample | {"id": "0123456789abcdef"}])
    with pytest.raises(ValueError, match=f"sample {sample['id']} has .*50"):
        CachedStates(built).features(cut | {"id": sample["id"]})


def test_builds_that_make_no_sense_are_refused(tmp_path, target):
    states = online(target())
    for broken, words in (
        ({"target_logsumexp": None}, r"target_logsumexp of sample \w+ is missing"),
        ({"target_hidden_states": torch.zeros(104, 64)}, r"target_hidden_states .* is \(104, 64\)"),
        ({"target_logsumexp": torch.zeros(104).half()}, "target_logsumexp .* in torch.float16, expected"),
        ({"target_last_hidden_states": torch.full((104, 64), torch.inf)}, "target_last_hidden_states .* infinite"),
    ):
        sample = texts()[0]
        assert len(sample["input_ids"]) == 104
        with pytest.raises(ValueError, match=words):
            build(tmp_path / "a", target(), [sample], lambda s, broken=broken: states.features(s) | broken)
    for options, words in (
        ({"shard_bytes": 0}, "shard_bytes is 0"),
        ({"format": "zip"}, "format is 'zip', expected one of exact, compressed"),
        ({"samples": []}, "no texts"),
    ):
        with pytest.raises(ValueError, match=words):
            build(tmp_path / "b", target(), **options)
    assert not (tmp_path / "b").exists()
    (tmp_path / "model").mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ValueError, match="holds model.safetensors, expected a cache or an empty folder"):
        build(tmp_path / "model", target())
