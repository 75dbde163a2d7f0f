"""The eviction policies, by name."""

from pagedkv.policies.fifo import FIFO
from pagedkv.policies.lru import LRU
from pagedkv.policy import EvictionPolicy

POLICY_NAMES: tuple[str, ...] = ("fifo", "lru")


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy of this name; ``ValueError`` if there is none."""
    for policy in (FIFO, LRU):
        if policy.name == name:
            return policy()
    raise ValueError(f"there is no policy {name!r}: take one of {', '.join(POLICY_NAMES)}")
