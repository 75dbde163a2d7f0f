"""PagedKV in an engine of one's own: a whole generation loop in numpy, to read and to copy.

Read ``generation`` first: nothing else knows PagedKV. ``model`` is a small transformer with random
weights, which leaves it to its caller where keys and values are kept, and ``own_cache`` is the loop
that such an engine has without PagedKV. ``docs/adapters.md`` goes through the steps.
"""

from pagedkv_adapters.numpy_loop.generation import Answer, generate, spec_for
from pagedkv_adapters.numpy_loop.model import (
    Model,
    ModelConfig,
    fingerprint,
    forward,
    random_model,
)
from pagedkv_adapters.numpy_loop.own_cache import OwnCache, attention, generate_without_pages

__all__ = [
    "Answer",
    "Model",
    "ModelConfig",
    "OwnCache",
    "attention",
    "fingerprint",
    "forward",
    "generate",
    "generate_without_pages",
    "random_model",
    "spec_for",
]
