"""``explain_prefix``: why a prompt hits as far as it does in a store on disk.

And what ``PagedKVCache.explain`` shares with it: from the places of a prompt's pages to the reason
why they end.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy.typing as npt

from pagedkv import files
from pagedkv.evidence import GONE, StoreEvidence
from pagedkv.explanation import Eviction, Explanation, GroupExplanation, StopReason, Tier
from pagedkv.prefix import (
    Extra,
    PageKeys,
    Tokens,
    as_tokens,
    extra_of,
    extra_per_page,
    page_keys,
)
from pagedkv.spec import KVSpec, PageKey
from pagedkv.stored_pages import read_store

_ONLY_OWNER = (
    "the store belongs to another user: whether these tokens are stored under another salt or"
    " extra is for its owner to see"
)
_FORGOTTEN = (
    "it is right on disk, but this process does not know it: it could not read it before, or has"
    " not looked since it was written"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """A prompt as one layer group sees it.

    Args:
        keys: Keys of its full pages.
        tokens: All its token ids.
        extras: For each full page, and the rest behind them, what its KV depends on beside tokens.
    """

    keys: PageKeys
    tokens: Tokens
    extras: Sequence[bytes]

    @classmethod
    def of(cls, spec: KVSpec, tokens: Tokens, salt: bytes, extra: Extra) -> "Prompt":
        """The prompt for ``spec``; ``extra`` is for all pages, or one value for each full page.

        Raises:
            ValueError: ``extra`` has too few values.
            TypeError: ``salt`` or a value is not bytes.
        """
        num_pages = len(tokens) // spec.page_tokens
        keys = page_keys(spec, tokens, salt, extra_per_page(extra, num_pages))
        extras = [extra_of(extra, number) for number in range(num_pages + 1)]
        return cls(keys=keys, tokens=tokens, extras=extras)

    def parent(self, number: int) -> PageKey:
        """Key of the page before page ``number``."""
        return self.keys[number - 1] if number else self.keys.spec.root_key()

    def page(self, number: int) -> Tokens:
        """Token ids of page ``number``; fewer than a page's if it is the rest."""
        page_tokens = self.keys.spec.page_tokens
        return self.tokens[number * page_tokens : (number + 1) * page_tokens]


class Evidence(Protocol):
    """What a tier tells of pages that it has not."""

    notes: list[str]
    """What could not be found out, in words."""

    def evicted(self, key: PageKey) -> Eviction | None:
        """When the page left the tier last, as far as that is remembered."""

    def common_tokens(
        self, parent: PageKey, wanted: Tokens, salt: bytes, extra: bytes, apart: PageKey | None
    ) -> int:
        """The most leading tokens of ``wanted`` that a page after ``parent`` shares.

        Only pages of this salt and extra count, and not the page with the key ``apart``.
        """


def explain_prefix(
    path: str | os.PathLike[str],
    tokens: npt.ArrayLike,
    *,
    salt: bytes = b"",
    extra: Extra = None,
    model: str | None = None,
    group: str | None = None,
) -> Explanation:
    """Why a prompt hits as far as it does in the store at ``path``, and no further.

    Reads the catalogues, and the bytes of the pages that are found; opens and locks nothing. Pages
    under another salt or extra are looked for only if the store belongs to the user as whom the
    process runs.

    Args:
        path: The store's folder.
        tokens: Ids of the prompt.
        salt: The tenant's.
        extra: What the KV depends on beside the tokens: one value for all pages, or one for each.
        model: Fingerprint of the model; that of the store by default.
        group: Name of the only layer group to look at.

    Raises:
        StoreError: There is no store, or it cannot be read.
        FormatVersionError: It has a later format.
        ValueError: An argument is out of range, or there is no such layer group.
    """
    ids = as_tokens(tokens)
    place, header, groups = read_store(path)
    names = [pages.spec.group for pages in groups]
    if group is not None and group not in names:
        raise ValueError(f"the store has no layer group {group!r}: it has {', '.join(names)}")
    chosen = [pages for pages in groups if group in (None, pages.spec.group)]
    specs = [pages.spec for pages in chosen]
    if len({spec.page_tokens for spec in specs}) > 1:
        raise ValueError(f"the layer groups {', '.join(names)} differ in page_tokens: choose one")
    with files.translated(place, "read the store"):
        is_own = files.is_own(place)
        found = []
        for pages in chosen:
            prompt = Prompt.of(pages.spec, ids, salt, extra)
            evidence = StoreEvidence(place, header, pages)
            if model is not None and model != pages.spec.model:
                found.append(_of_other_model(prompt, evidence, model))
                continue
            tiers = [Tier.STORE if key in evidence else None for key in prompt.keys]
            found.append(explain_group(prompt, tiers, [evidence], evidence, across=is_own))
    if not is_own:
        found = [
            replace(one, notes=(*one.notes, _ONLY_OWNER))
            if one.reason is StopReason.NEVER_WRITTEN
            else one
            for one in found
        ]
    return Explanation.of(
        tuple(found),
        store=str(place),
        model=specs[0].model if model is None else model,
        stored_model=specs[0].model,
        page_tokens=specs[0].page_tokens,
        num_tokens=len(ids),
    )


def explain_group(
    prompt: Prompt,
    tiers: Sequence[Tier | None],
    evidences: Sequence[Evidence],
    store: StoreEvidence | None,
    *,
    across: bool,
) -> GroupExplanation:
    """Why a prompt's pages end where they end, in one layer group.

    Args:
        prompt: The prompt.
        tiers: For each full page, the highest tier that claims to have it.
        evidences: What the tiers tell of pages that they have not.
        store: What the store on disk tells, if there is one; pages there are read and verified.
        across: Whether to look under other salts and extras: for the owner of the store alone.
    """
    salt, keys = prompt.keys.salt, prompt.keys
    num_pages = 0
    for one, tier in zip(keys, tiers, strict=True):
        if tier is None or (tier is Tier.STORE and store is not None and store.damage(one)):
            break
        num_pages += 1
    is_stopped = num_pages < len(keys)
    key = keys[num_pages] if is_stopped else None
    parent = prompt.parent(num_pages)
    behind = [n for n in range(num_pages + 1, len(keys)) if tiers[n] is not None]
    held = tiers[:num_pages]
    result = GroupExplanation(
        group=keys.spec.group,
        num_pages=num_pages,
        num_pool_pages=held.count(Tier.POOL),
        num_spill_pages=held.count(Tier.SPILL),
        num_store_pages=held.count(Tier.STORE),
        reason=StopReason.COMPLETE if len(keys) else StopReason.TOO_SHORT,
        key=key,
        parent=parent,
        common_tokens=max(
            evidence.common_tokens(
                parent, prompt.page(num_pages), salt, prompt.extras[num_pages], key
            )
            for evidence in evidences
        ),
        num_pages_behind=len(behind),
        first_page_behind=behind[0] if behind else None,
    )
    if key is not None:
        result = _with_reason(result, prompt, key, evidences, store, across=across)
    is_certain = result.reason in (StopReason.EVICTED, StopReason.CORRUPT)
    notes = () if is_certain else tuple(note for one in evidences for note in one.notes)
    return replace(result, notes=notes)


def _with_reason(
    result: GroupExplanation,
    prompt: Prompt,
    key: PageKey,
    evidences: Sequence[Evidence],
    store: StoreEvidence | None,
    *,
    across: bool,
) -> GroupExplanation:
    """The explanation with the reason why the page ``key`` is missing."""
    is_gone = False
    if store is not None:
        damage = store.torn(key)
        if key in store:
            damage = store.damage(key) or _FORGOTTEN
        is_gone = damage == GONE
        if damage and not is_gone:
            return replace(result, reason=StopReason.CORRUPT, detail=damage)
    evictions = [one for evidence in evidences if (one := evidence.evicted(key)) is not None]
    if evictions:
        last = max(evictions, key=lambda one: one.time_ns)
        is_damaged = last.cause == "damaged"
        reason = StopReason.CORRUPT if is_damaged else StopReason.EVICTED
        return replace(result, reason=reason, detail=f"it {last}", eviction=last)
    if is_gone:
        return replace(result, reason=StopReason.EVICTED, detail="it left just now")
    other = None
    if across and store is not None:
        other = store.elsewhere(prompt.keys.tokens, result.num_pages, prompt.keys.salt)
    if other is None:
        return replace(result, reason=StopReason.NEVER_WRITTEN)
    num_pages, reason = other
    return replace(result, reason=reason, num_pages_elsewhere=num_pages)


def _of_other_model(prompt: Prompt, evidence: StoreEvidence, model: str) -> GroupExplanation:
    """That the store is of another model than ``model``, and how far the prompt would hit in it.

    Args:
        prompt: The prompt for the store's own model.
        evidence: What the store tells.
        model: The fingerprint that was asked for.
    """
    stored = prompt.keys.spec
    asked = Prompt.of(replace(stored, model=model), prompt.tokens, prompt.keys.salt, prompt.extras)
    num_pages = 0
    while num_pages < len(prompt.keys) and prompt.keys[num_pages] in evidence:
        num_pages += 1
    return GroupExplanation(
        group=stored.group,
        num_pages=0,
        reason=StopReason.OTHER_MODEL,
        detail=f"the store has pages of {stored.model}, the prompt is for {model}",
        key=asked.keys[0] if len(asked.keys) else None,
        parent=asked.parent(0),
        num_pages_elsewhere=num_pages,
    )
