"""The public face: its names, and what importing it needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dspark_hf

PACKAGE = Path(dspark_hf.__file__).parent
HUB_FILES = sorted(PACKAGE.glob("*_dspark.py"))
EXTRAS = ("peft", "accelerate", "datasets", "evaluate", "matplotlib", "rich", "typer", "gguf", "scipy", "pytest")
WITHOUT_EXTRAS = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS}))  # None: importing them raises ModuleNotFoundError
from dspark_hf import *
print(DSparkDrafterModel, record_speculation)
"""


@pytest.mark.parametrize("name", dspark_hf.__all__)
def test_public_names(name):
    value = getattr(dspark_hf, name)
    assert value.__doc__, f"{name} has no docstring"


def test_public_names_are_sorted_and_complete():
    names = {
        name for name, value in vars(dspark_hf).items() if getattr(value, "__module__", "").startswith("dspark_hf.")
    }
    assert dspark_hf.__all__ == sorted(dspark_hf.__all__) and set(dspark_hf.__all__) == names


def test_importing_needs_only_torch_and_transformers():
    result = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def imports(path: Path) -> list[tuple[int, str, list[str]]]:
    """(level, module, names) of every import statement, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", [alias.name for alias in node.names]))
    return found


@pytest.mark.parametrize("path", HUB_FILES, ids=lambda path: path.name)
def test_hub_files_are_flat(path):
    """A Hub repo ships them as siblings: `from .sibling import name` is all that transformers' loader follows."""
    siblings = {file.stem for file in HUB_FILES}
    allowed = {"torch", "transformers", "numpy", *sys.stdlib_module_names}  # transformers itself needs numpy
    assert len(HUB_FILES) > 8
    for level, module, names in imports(path):
        if level:
            assert level == 1 and module in siblings and "*" not in names, f"from {'.' * level}{module} import {names}"
        else:
            assert module.partition(".")[0] in allowed, module
