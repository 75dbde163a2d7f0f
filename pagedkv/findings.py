"""What ``verify`` reports: what is damaged, where, and what it costs."""

from dataclasses import dataclass
from enum import StrEnum

from pagedkv.spec import PageKey


class Damage(StrEnum):
    """What is damaged."""

    HEADER = "header"
    DOCUMENT = "document"
    CATALOG = "catalogue chunk"
    RECORD = "record"
    SEGMENT = "segment"
    LAYER = "layer"
    INDEX = "shard index"
    COLUMN = "derived column"
    RING = "eviction ring"
    LEFTOVER = "leftover"
    UNREADABLE = "unreadable"


class Cost(StrEnum):
    """What a damage costs."""

    STORE = "the store does not open"
    PAGE = "page lost"
    HIDDEN = "pages not served until repaired"
    DERIVED = "derived only"
    NOTHING = "nothing lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One damage.

    Args:
        path: The file or folder, relative to the store's folder.
        damage: What is damaged.
        cost: What that costs. Each page that is lost has exactly one finding ``Cost.PAGE``.
        detail: What is wrong, in words.
        lane: Number of the lane.
        group: Index into the store's specs.
        segment: Number of the segment.
        row: Row of the page.
        key: Key of the page, where a good record tells it.
        layer: The first damaged layer of the page.
        repaired: Whether it has been put right: dropped, rebuilt or removed.
    """

    path: str
    damage: Damage
    cost: Cost
    detail: str
    lane: int | None = None
    group: int | None = None
    segment: int | None = None
    row: int | None = None
    key: PageKey | None = None
    layer: int | None = None
    repaired: bool = False

    @property
    def is_left(self) -> bool:
        """Whether a writer left it so that ended without closing the store; the next one mends it.

        That is an unfinished file, or columns that were not made yet.
        """
        is_usual = self.damage in (Damage.LEFTOVER, Damage.COLUMN)
        return is_usual and self.cost is Cost.NOTHING

    def __str__(self) -> str:
        parts = [self.path]
        parts += [
            f"{name} {value}"
            for name, value in (("row", self.row), ("layer", self.layer))
            if value is not None
        ]
        if self.key is not None:
            parts.append(f"page {self.key.hex()[:16]}")
        return f"{', '.join(parts)}: {self.damage} {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What ``verify_store`` read and found.

    Args:
        path: The store's folder.
        num_segments: Segments that a catalogue chunk names.
        num_pages: Pages that are stored: good ones and lost ones.
        num_good_pages: Pages of which every byte is right.
        nbytes_read: Bytes that were read and checked.
        findings: All damage.
        foreign: Names in the store's folders that are not the store's, relative to its folder.
            They are left alone and harm nothing.
        busy_lanes: Lanes that a writer held during the check; never repaired.
    """

    path: str
    num_segments: int
    num_pages: int
    num_good_pages: int
    nbytes_read: int
    findings: tuple[Finding, ...]
    foreign: tuple[str, ...]
    busy_lanes: tuple[int, ...]

    @property
    def is_clean(self) -> bool:
        """Whether nothing is damaged, or all of it has been repaired.

        What a writer leaves that ended without closing the store is no damage.
        """
        return all(finding.repaired or finding.is_left for finding in self.findings)

    @property
    def num_lost_pages(self) -> int:
        """Pages that are damaged or gone."""
        return self.num_pages - self.num_good_pages
