"""``Explanation``: why a prompt hit as far as it did, as data and in words."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from pagedkv.spec import PageKey


class Tier(StrEnum):
    """Where a page is."""

    POOL = "pool"
    SPILL = "spill file"
    STORE = "store"


class StopReason(StrEnum):
    """Why no further page of a prompt is found."""

    COMPLETE = "complete"
    """All full pages are there."""
    TOO_SHORT = "too short"
    """The prompt has no full page."""
    NEVER_WRITTEN = "never written"
    """There is no trace of the page."""
    EVICTED = "evicted"
    """It was there, and left."""
    CORRUPT = "corrupt"
    """It is there, but its bytes or its record are damaged."""
    OTHER_MODEL = "other model"
    """The store holds pages of another model."""
    OTHER_SALT = "other salt"
    """These tokens are stored for another tenant."""
    OTHER_EXTRA = "other extra"
    """These tokens are stored for the same tenant, with another extra (LoRA, image)."""
    MISSING_IN_GROUP = "missing in a group"
    """Another layer group has the page; the group's own reason says why this one has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """When and why a page left.

    Args:
        tier: What it left: the pool (no store could take it) or the store.
        time_ns: When, in nanoseconds since 1970.
        cause: ``"capacity"``, ``"dead parent"``, ``"damaged"`` or ``"gc"`` (``EvictionReason``).
        policy: What ranked it, if a ranking chose it.
    """

    tier: Tier
    time_ns: int
    cause: str
    policy: str | None

    def __str__(self) -> str:
        time = datetime.fromtimestamp(self.time_ns / 1e9, UTC).isoformat(" ", "seconds")
        why = {
            "capacity": "its room was needed",
            "dead parent": "the page before it had gone",
            "damaged": "its bytes were damaged",
            "gc": "somebody asked for a smaller store",
        }[self.cause]
        policy = f" (policy {self.policy})" if self.policy else ""
        return f"left the {self.tier} at {time}: {why}{policy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupExplanation:
    """What one layer group has of a prompt.

    Args:
        group: Its name.
        num_pages: Leading full pages that it has, and that are good.
        num_pool_pages: Those of them that are in the pool.
        num_spill_pages: Those that are in the spill file only.
        num_store_pages: Those that are in the store only.
        reason: Why there are no more; never "missing in a group", which is of all groups together.
        detail: The same in words, with what is known beyond it; may be empty.
        key: Key of the first page that is missing; None if all full pages are there.
        parent: Key of the page before it, or the root key.
        eviction: When it left, if it did.
        common_tokens: Tokens that a stored page or tail after the same prefix shares with what
            comes next; a page that starts like it, though it is another.
        num_pages_behind: Pages of the prompt behind the stop that are there, out of reach.
        first_page_behind: Number of the first of them.
        num_pages_elsewhere: Leading full pages of these tokens that are stored under the other
            salt, extra or model.
        notes: What limits this explanation.
    """

    group: str
    num_pages: int
    num_pool_pages: int = 0
    num_spill_pages: int = 0
    num_store_pages: int = 0
    reason: StopReason
    detail: str = ""
    key: PageKey | None = None
    parent: PageKey
    eviction: Eviction | None = None
    common_tokens: int = 0
    num_pages_behind: int = 0
    first_page_behind: int | None = None
    num_pages_elsewhere: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a prompt hit as far as it did. ``str`` gives it in words.

    Args:
        store: Folder of the store, if there is one.
        model: The model's fingerprint that was asked for.
        stored_model: The fingerprint of the pages that are there.
        page_tokens: Tokens of a page.
        num_tokens: Tokens of the prompt.
        num_full_pages: Pages that they fill.
        num_pages: Leading pages that all layer groups have.
        reason: Why there are no more.
        stop_page: Number of the first page that is missing; None if all full pages are there.
        stop_token: Number of the token where that page, or the rest of the prompt, begins.
        stop_group: The layer group that ends the run; None if all full pages are there.
        groups: What each layer group has.
    """

    store: str | None
    model: str
    stored_model: str
    page_tokens: int
    num_tokens: int
    num_full_pages: int
    num_pages: int
    reason: StopReason
    stop_page: int | None
    stop_token: int
    stop_group: str | None
    groups: tuple[GroupExplanation, ...]

    @classmethod
    def of(
        cls,
        groups: tuple[GroupExplanation, ...],
        *,
        store: str | None,
        model: str,
        stored_model: str,
        page_tokens: int,
        num_tokens: int,
    ) -> "Explanation":
        """What the groups have together: a page counts if all have it."""
        first = min(groups, key=lambda group: group.num_pages)
        num_full_pages = num_tokens // page_tokens
        is_stopped = first.num_pages < num_full_pages
        has_more = any(group.num_pages > first.num_pages for group in groups)
        return cls(
            store=store,
            model=model,
            stored_model=stored_model,
            page_tokens=page_tokens,
            num_tokens=num_tokens,
            num_full_pages=num_full_pages,
            num_pages=first.num_pages,
            reason=StopReason.MISSING_IN_GROUP if has_more else first.reason,
            stop_page=first.num_pages if is_stopped else None,
            stop_token=first.num_pages * page_tokens,
            stop_group=first.group if is_stopped else None,
            groups=groups,
        )

    @property
    def num_found_tokens(self) -> int:
        """Tokens of the leading pages that all layer groups have."""
        return self.num_pages * self.page_tokens

    def __str__(self) -> str:
        return "\n".join(f"{title}: {text}" for title, text in self.lines())

    def lines(self) -> Iterator[tuple[str, str]]:
        """The explanation in words: titles and texts."""
        rest = self.num_tokens % self.page_tokens
        pages = f"{_count(self.num_full_pages, 'page')} of {self.page_tokens}"
        tail = f", and {rest:,} more" if rest else ""
        yield "prompt", f"{_count(self.num_tokens, 'token')}: {pages}{tail}"
        share = self.num_found_tokens / self.num_tokens if self.num_tokens else 0.0
        pages = _count(self.num_pages, "page")
        found = f"{pages}, {_count(self.num_found_tokens, 'token')} ({share:.0%})"
        is_alone = len(self.groups) == 1 and self.num_pages
        yield "found", f"{found}: {_tiers(self.groups[0])}" if is_alone else found
        if self.stop_page is not None:
            yield "stops at", f"page {self.stop_page:,}, token {self.stop_token:,}"
        last = next(group for group in self.groups if group.num_pages == self.num_pages)
        yield "because", self._because(last)
        if len(self.groups) > 1:
            for group in self.groups:
                held = _count(group.num_pages, "page")
                held = f"{held} ({_tiers(group)})" if group.num_pages else held
                yield f"group {group.group}", f"{held}; {_because(group)}"
        if last.key is not None:
            yield "missing key", last.key.hex()
        if last.num_pages_elsewhere:
            pages = _count(last.num_pages_elsewhere, "page")
            yield "elsewhere", f"the first {pages} of these tokens are stored there"
        if last.common_tokens:
            shared = _count(last.common_tokens, "token")
            yield "next tokens", f"a page that is there begins with the next {shared}"
        if last.num_pages_behind:
            pages = _count(last.num_pages_behind, "later page")
            yield "behind", f"{pages} are there, from page {last.first_page_behind} on, unreachable"
        for note in dict.fromkeys(note for group in self.groups for note in group.notes):
            yield "note", note

    def _because(self, last: GroupExplanation) -> str:
        if self.reason is not StopReason.MISSING_IN_GROUP:
            return _because(last)
        others = ", ".join(g.group for g in self.groups if g.num_pages > self.num_pages)
        return f"layer group {last.group} lacks a page that {others} has; {_because(last)}"


def _because(group: GroupExplanation) -> str:
    words = {
        StopReason.COMPLETE: "all full pages are there",
        StopReason.TOO_SHORT: "the prompt is shorter than a page",
        StopReason.NEVER_WRITTEN: "the page was never written: there is no trace of it",
        StopReason.EVICTED: "the page was evicted",
        StopReason.CORRUPT: "the page is damaged",
        StopReason.OTHER_MODEL: "the store is of another model",
        StopReason.OTHER_SALT: "these tokens are stored under another salt",
        StopReason.OTHER_EXTRA: "these tokens are stored with another extra",
    }[group.reason]
    if group.reason is StopReason.NEVER_WRITTEN and group.notes:
        words = f"as far as can be told (see the notes), {words}"
    return f"{words}; {group.detail}" if group.detail else words


def _tiers(group: GroupExplanation) -> str:
    counts = {
        Tier.POOL: group.num_pool_pages,
        Tier.SPILL: group.num_spill_pages,
        Tier.STORE: group.num_store_pages,
    }
    held = [f"{count:,} in the {tier}" for tier, count in counts.items() if count]
    return ", ".join(held)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
