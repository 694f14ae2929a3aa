"""The hook in transformers' generate(): idempotent, reversible, shared by copies, and out of everybody else's way."""

import importlib.util
import inspect
import sys

import pytest
import torch
from generation_helpers import tiny_target
from transformers import GenerationMixin, LlamaConfig

from dspark_hf import hook_dspark, install_hook, record_speculation, uninstall_hook

NAMES = tuple(hook_dspark._WRAPPERS)
IDS = torch.tensor([[84, 104, 101, 32, 115]])


def methods():
    return [getattr(GenerationMixin, name) for name in NAMES]


@pytest.fixture(autouse=True)
def installed():
    install_hook()
    yield
    install_hook()


@pytest.fixture
def copy():
    """A second copy of the module, as remote code brings it."""
    spec = importlib.util.spec_from_file_location("hook_copy", hook_dspark.__file__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def greedy(model, **kwargs):
    return model.generate(IDS, do_sample=False, max_new_tokens=12, eos_token_id=None, **kwargs).tolist()


def test_installs_once():
    before = methods()
    install_hook()
    assert methods() == before
    assert all(not hasattr(method._dspark_original, "_dspark_original") for method in before)


def test_uninstall_puts_the_very_originals_back(target, drafter):
    wrapped = methods()
    originals = [method._dspark_original for method in wrapped]
    uninstall_hook()
    assert methods() == originals
    assert all(method.__module__ == "transformers.generation.utils" for method in originals)
    uninstall_hook()
    assert methods() == originals
    # Without the hook transformers takes the drafter for an ordinary assistant, which it is not.
    with pytest.raises(Exception), record_speculation() as stats:  # noqa: B017
        greedy(target("qwen3"), assistant_model=drafter())
    assert stats.acceptance_lengths == []
    install_hook()
    with record_speculation() as stats:
        greedy(target("qwen3"), assistant_model=drafter())
    assert stats.acceptance_lengths


def test_copies_share_one_hook(copy):
    before = methods()
    copy.install_hook()
    assert methods() == before
    copy.uninstall_hook()
    assert not any(hasattr(method, "_dspark_original") for method in methods())
    copy.install_hook()
    theirs = methods()
    install_hook()
    assert methods() == theirs
    uninstall_hook()
    assert not any(hasattr(method, "_dspark_original") for method in methods())


def test_signatures_and_names_stay():
    """generate() looks at the signature of the decoding method to see what it wants."""
    for name, method in zip(NAMES, methods(), strict=True):
        assert inspect.signature(method) == inspect.signature(method._dspark_original)
        assert (method.__name__, method.__qualname__) == (name, f"GenerationMixin.{name}")
    assert "inputs_tensor" in inspect.signature(GenerationMixin._assisted_decoding).parameters


def test_every_call_without_our_drafter_is_as_before(target):
    """Plain, an ordinary assistant, prompt lookup, early exit: the same texts through the same loop, hook or not."""
    model = tiny_target(LlamaConfig, vocab_size=128)
    assistant = tiny_target(LlamaConfig, seed=1, vocab_size=128)
    calls = [{}, {"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}]
    with record_speculation() as stats:
        hooked = [greedy(model, **kwargs) for kwargs in calls]
        uninstall_hook()
        assert hooked == [greedy(model, **kwargs) for kwargs in calls]
    assert hooked[1] == hooked[0] == hooked[2]
    assert stats.acceptance_lengths == []


def test_prompt_lookup_wins_over_a_drafter(target, drafter):
    """`prompt_lookup_num_tokens` beside an assistant goes transformers' own way, as it does for any assistant."""
    plain = greedy(target("qwen3"))
    with record_speculation() as stats:
        assert greedy(target("qwen3"), assistant_model=drafter(), prompt_lookup_num_tokens=3) == plain
    assert stats.acceptance_lengths == []


def test_calls_are_passed_on_whatever_form_their_arguments_take(monkeypatch):
    """Others that call the wrapped methods may name arguments or not."""
    seen = []

    class Assistant:
        def check_generation(self, target, config):
            seen.append("check")

        def speculative_decode(self, target, *args, **kwargs):
            seen.append((args, kwargs))
            return "text"

        def candidate_generator(self, target, *args):
            seen.append(args)
            return "generator"

    model, assistant = tiny_target(LlamaConfig), Assistant()
    config = model.generation_config
    arguments = {"logits_processor": "p", "stopping_criteria": "s", "generation_config": config}
    common = {"inputs_tensor": 1, "tokenizer": 2, "streamer": None, "attention_mask": 3}
    named = model._assisted_decoding("ids", **arguments, assistant_model=assistant, **common)
    placed = model._assisted_decoding("ids", *arguments.values(), False, None, 1, assistant, attention_mask=3)
    by_name = model._assisted_decoding(input_ids="ids", **arguments, assistant_model=assistant, **common)
    assert named == placed == by_name == "text"
    wanted = {"input_ids": "ids", **arguments, "streamer": None, "attention_mask": 3}
    assert seen == [((), wanted), ((), wanted | {"synced_gpus": False}), ((), wanted)]

    seen.clear()
    rest = {"input_ids": 1, "inputs_tensor": 2, "logits_processor": "p", "model_kwargs": {}}
    assert model._get_candidate_generator(config, **rest, assistant_model=assistant) == "generator"
    assert model._get_candidate_generator(config, *rest.values(), assistant) == "generator"
    assert seen == [(config, "p", {})] * 2

    seen.clear()
    monkeypatch.setattr(model.config, "get_text_config", lambda *a, **k: model.config)
    assistant.config = model.config
    model._validate_generation_mode("sample", config, {"assistant_model": assistant})
    model._validate_generation_mode(
        generation_mode="sample", generation_config=config, generation_mode_kwargs={"assistant_model": assistant}
    )
    assert seen == ["check"] * 2
