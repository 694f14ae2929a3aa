"""Fixtures of all tests. `target(name)` and `drafter(name)` give models that are loaded once for the whole run; a test
that changes one takes a copy of its own with `helpers.load_target`, `helpers.load_drafter`."""

from functools import cache

import pytest
import torch
from helpers import load_drafter, load_target

from dspark_hf import FixedLength

_shared_target, _shared_drafter = cache(load_target), cache(load_drafter)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The models are tiny: threads cost more than they bring."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def target():
    """`target("qwen3")` or `target("gemma4")`; not to be changed."""
    return _shared_target


@pytest.fixture
def drafter():
    """`drafter("qwen3_vanilla")`, …; not to be changed, `verify_policy` and gradients aside, reset after each test."""
    used = []

    def load(name: str = "qwen3_vanilla"):
        used.append(_shared_drafter(name))
        return used[-1]

    yield load
    for model in used:
        model.verify_policy = FixedLength()
        model.zero_grad(set_to_none=True)
