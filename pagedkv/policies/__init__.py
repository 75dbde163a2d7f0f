"""The eviction policies, by name."""

from importlib import import_module

from pagedkv.policy import EvictionPolicy

# A module is imported when its policy is asked for: not all are needed, and some are heavy.
_POLICIES = {
    "fifo": ("fifo", "FIFO"),
    "lru": ("lru", "LRU"),
    "lfu": ("lfu", "LFU"),
    "clock": ("clock", "CLOCK"),
    "sieve": ("sieve", "SIEVE"),
    "s3-fifo": ("s3fifo", "S3FIFO"),
    "arc": ("arc", "ARC"),
    "2q": ("two_queue", "TwoQueue"),
    "lru-2": ("lru2", "LRU2"),
    "pagedkv": ("reuse_index", "ReuseIndex"),
}

POLICY_NAMES: tuple[str, ...] = tuple(_POLICIES)
"""The names that ``make_policy`` knows."""


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy of this name; ``ValueError`` lists those there are."""
    if name not in _POLICIES:
        raise ValueError(f"there is no policy {name!r}: take one of {', '.join(POLICY_NAMES)}")
    module, policy = _POLICIES[name]
    made: EvictionPolicy = getattr(import_module(f"pagedkv.policies.{module}"), policy)()
    return made
