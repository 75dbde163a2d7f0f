"""``explain_live``: why a prompt hits as far as it does in a cache that is in use."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pagedkv import files
from pagedkv.dropped import MAX_DROPPED
from pagedkv.evidence import StoreEvidence
from pagedkv.explain import Evidence, Prompt, explain_group
from pagedkv.explanation import Eviction, Explanation, Tier
from pagedkv.group import LayerGroup
from pagedkv.page import Page
from pagedkv.prefix import Tokens, chain_key
from pagedkv.spec import PageKey
from pagedkv.stored_pages import read_store


class PoolEvidence:
    """What the pool of one layer group tells of pages; takes the cache's lock for moments.

    Args:
        group: The layer group.
    """

    def __init__(self, group: LayerGroup) -> None:
        self._places = group.places
        self.notes: list[str] = []

    def evicted(self, key: PageKey) -> Eviction | None:
        """When the pool dropped the page last, as far as it remembers."""
        with self._places.lock:
            dropped = self._places.dropped
            time_ns = dropped.dropped_ns(key)
            is_full = dropped.is_full
        if time_ns is None:
            if is_full:
                self.notes.append(f"the pool remembers the last {MAX_DROPPED:,} that it dropped")
            return None
        return Eviction(tier=Tier.POOL, time_ns=time_ns, cause="capacity", policy=dropped.policy)

    def common_tokens(
        self, parent: PageKey, wanted: Tokens, salt: bytes, extra: bytes, apart: PageKey | None
    ) -> int:
        """As ``Evidence`` says; looks at the few pages that begin most like ``wanted``."""
        with self._places.lock:
            found = self._places.index.nearest(parent, wanted.tobytes(), salt, extra)
            for num_common, page in found:
                assert page.tokens is not None
                tokens = np.frombuffer(page.tokens, np.int32)
                is_right = chain_key(parent, tokens, salt, extra) == page.key
                if is_right and page.key != apart and not page.is_lost:
                    return num_common
        return 0


def explain_live(
    groups: Sequence[LayerGroup], prompts: Sequence[Prompt], store: Path | None
) -> Explanation:
    """Why a prompt hits as far as it does.

    Args:
        groups: The cache's layer groups.
        prompts: The prompt for each of them.
        store: Folder of the cache's store, if there is one. Its catalogues are read where the pool
            does not explain all.

    Raises:
        StoreError: The store cannot be read.
    """
    tiers = [_tiers(group, prompt) for group, prompt in zip(groups, prompts, strict=True)]
    evidences: list[StoreEvidence | None] = [None] * len(groups)
    is_in_pool = all(tier is Tier.POOL for one in tiers for tier in one)
    has_rest = len(prompts[0].tokens) % prompts[0].keys.spec.page_tokens > 0
    if store is not None and (has_rest or not is_in_pool):
        place, header, stored = read_store(store)
        evidences = [StoreEvidence(place, header, pages) for pages in stored]
    found = []
    for group, prompt, held, evidence in zip(groups, prompts, tiers, evidences, strict=True):
        told: list[Evidence] = [PoolEvidence(group)]
        if evidence is not None:
            told.append(evidence)
        with files.translated(store or "", "read the store"):
            found.append(explain_group(prompt, held, told, evidence, across=False))
    spec = prompts[0].keys.spec
    return Explanation.of(
        tuple(found),
        store=None if store is None else str(store),
        model=spec.model,
        stored_model=spec.model,
        page_tokens=spec.page_tokens,
        num_tokens=len(prompts[0].tokens),
    )


def _tiers(group: LayerGroup, prompt: Prompt) -> list[Tier | None]:
    """The highest tier that has each full page, as far as this process knows."""
    group.keyed.match(prompt.keys)  # looks what other processes have stored
    index = group.places.index
    with group.places.lock:
        rows = group.moves.find_rows(prompt.keys)
        return [
            _tier(index.get(key), is_stored=row >= 0)
            for key, row in zip(prompt.keys, rows.tolist(), strict=True)
        ]


def _tier(page: Page | None, *, is_stored: bool) -> Tier | None:
    if page is not None and page.slot is not None:
        return Tier.POOL
    if page is not None and page.spill is not None:
        return Tier.SPILL
    return Tier.STORE if is_stored else None
