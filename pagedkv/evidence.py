"""``StoreEvidence``: what a store on disk tells of single pages, without opening it.

Reads the catalogues, the eviction rings, and the bytes of the pages that are asked for. Nothing is
locked and nothing is changed: the store may be in use.
"""

import functools
import hashlib
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagedkv import files
from pagedkv.catalog import HAS_PARENT, HAS_TOKENS, IS_TAIL
from pagedkv.evictions import NUM_ENTRIES, STORE_POLICY, EvictedPage, EvictionReason, EvictionRing
from pagedkv.explanation import Eviction, StopReason, Tier
from pagedkv.format import (
    EVICTED,
    KV,
    KV_DIMENSIONS,
    Geometry,
    chunk_name,
    group_name,
    lane_name,
)
from pagedkv.header import StoreHeader
from pagedkv.lane_access import lanes_of
from pagedkv.prefix import Tokens, chain_key
from pagedkv.segment_check import SegmentPlace, check_records, chunk_damage, page_extents
from pagedkv.spec import PageKey
from pagedkv.stored_pages import StoredPages

GONE = "is gone"
"""What ``damage`` says of a page that left after the catalogue had been read."""

_CHOSEN = (EvictionReason.CAPACITY, EvictionReason.GC)
"""Reasons for which the ranking chooses what leaves."""


class StoreEvidence:
    """What one layer group of a store on disk tells of pages.

    Args:
        root: The store's folder.
        header: Its header.
        pages: What its catalogues say, from ``read_store``.

    Attributes:
        notes: What could not be found out, in words.
    """

    def __init__(self, root: Path, header: StoreHeader, pages: StoredPages) -> None:
        self._root = root
        self._pages = pages
        self._records = pages.records
        rows = header.segment_rows[pages.group]
        self._geometry = Geometry.of(pages.spec, header.codec, rows)
        self._positions: dict[bytes, list[int]] = {}
        for position, key in enumerate(pages.keys):
            self._positions.setdefault(key, []).append(position)
        self._has_tokens = header.store_tokens
        self.notes: list[str] = []

    def __contains__(self, key: object) -> bool:
        return key in self._positions

    def damage(self, key: PageKey) -> str:
        """What is wrong with a stored page, in words: empty if one of its copies is good.

        Reads the page. ``GONE`` says that it has left since the catalogue was read.
        """
        reasons = []
        for position in self._positions.get(key, ()):
            reason = self._damage_at(position)
            if not reason:
                return ""
            reasons.append(reason)
        return next((reason for reason in reasons if reason != GONE), GONE)

    def torn(self, key: PageKey) -> str:
        """Why the segment that has the page counts for nothing; empty if no such segment has it.

        Their records are searched one by one: each has a checksum of its own.
        """
        return self._torn.get(key, "")

    def evicted(self, key: PageKey) -> Eviction | None:
        """When the page left the store last, as far as the eviction rings remember."""
        found = self._evicted.get(key)
        if found is None:
            return None
        return Eviction(
            tier=Tier.STORE,
            time_ns=found.time_ns,
            cause=found.reason.name.lower().replace("_", " "),
            policy=STORE_POLICY if found.reason in _CHOSEN else None,
        )

    def common_tokens(
        self, parent: PageKey, wanted: Tokens, salt: bytes, extra: bytes, apart: PageKey | None
    ) -> int:
        """The most tokens of ``wanted`` with which a good page after ``parent`` begins.

        Args:
            parent: Key of the page before.
            wanted: The tokens that come next.
            salt: Only pages of this salt count,
            extra: and of this extra.
            apart: A page that does not count.
        """
        if len(wanted) and not self._has_tokens:
            self.notes.append(
                "the store keeps no token ids: which pages begin alike, or are stored under another"
                " salt or extra, cannot be told"
            )
        records = self._records
        named = records["flags"] & (HAS_PARENT | HAS_TOKENS) == HAS_PARENT | HAS_TOKENS
        named &= _equal(records["parent"], parent)
        named &= _equal(records["salt_sha256"], hashlib.sha256(salt).digest())
        at = np.flatnonzero(named)
        width = min(len(wanted), records["tokens"].shape[1])
        same = records["tokens"][at, :width] == wanted[:width]
        lengths = np.logical_and.accumulate(same, axis=1).sum(axis=1)
        lengths = np.minimum(lengths, records["num_tokens"][at])
        for n in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
            if not lengths[n]:
                break
            key = PageKey(self._pages.keys[at[n]])
            tokens = records["tokens"][at[n], : records["num_tokens"][at[n]]]
            is_right = key != apart and chain_key(parent, tokens, salt, extra) == key
            if is_right and not self.damage(key):
                return int(lengths[n])
        return 0

    def elsewhere(self, pages: Tokens, stop: int, salt: bytes) -> tuple[int, StopReason] | None:
        """Whether the tokens up to page ``stop`` are stored under another salt or extra.

        Only the owner of the store may be told.

        Args:
            pages: The prompt's full pages, ``(page, token)``.
            stop: The page that is missing under the salt and extra of the prompt.
            salt: That of the prompt.

        Returns:
            How many leading pages are stored so, and which of the two it is.
        """
        records, keys = self._records, self._pages.keys
        salt_sha256 = hashlib.sha256(salt).digest()
        before: set[bytes] = {self._pages.spec.root_key()}
        reason: StopReason | None = None
        number = 0
        for number, wanted in enumerate(pages):
            after = [n for key in before for n in self._children.get(key, ())]
            same = np.array(after, np.int64)
            same = same[(records["tokens"][same] == wanted).all(axis=1)]
            if not len(same):
                break
            if number == stop:
                is_own = _equal(records["salt_sha256"][same], salt_sha256)
                reason = StopReason.OTHER_EXTRA if is_own.any() else StopReason.OTHER_SALT
            before = {keys[n] for n in same.tolist()}
        else:
            number += 1
        return None if reason is None else (number, reason)

    @functools.cached_property
    def _children(self) -> dict[bytes, list[int]]:
        """Positions of the full pages with tokens, by their parent."""
        flags = self._records["flags"] & (HAS_PARENT | HAS_TOKENS | IS_TAIL)
        children: dict[bytes, list[int]] = {}
        for n in np.flatnonzero(flags == HAS_PARENT | HAS_TOKENS).tolist():
            parent = self._pages.parents[n]
            assert parent is not None
            children.setdefault(parent, []).append(n)
        return children

    @functools.cached_property
    def _torn(self) -> dict[bytes, str]:
        """The keys in records of segments that count for nothing, and why they do."""
        found: dict[bytes, str] = {}
        num_unknown = 0
        for lane, number in self._pages.torn:
            place = SegmentPlace(
                root=self._root,
                path=self._root / lane_name(lane) / group_name(self._pages.spec),
                lane=lane,
                group=self._pages.group,
                number=number,
                geometry=self._geometry,
            )
            check = check_records(place)
            reason = "its segment's catalogue is torn, though its own record is right"
            if not check.findings:
                reason = f"its segment {place.kv.relative_to(self._root)} is gone"
            num_unknown += not check.held.any() or bool(check.num_pages)
            for key in check.records["key"][check.held]:
                found.setdefault(key.tobytes(), reason)
        if num_unknown:
            self.notes.append(
                f"{num_unknown:,} segments have records that cannot be read: the page may have"
                " been among them; run pagedkv verify"
            )
        return found

    @functools.cached_property
    def _evicted(self) -> dict[bytes, EvictedPage]:
        """The last eviction of each key that a ring remembers."""
        newest: dict[bytes, EvictedPage] = {}
        for lane in lanes_of(self._root):
            path = self._root / lane_name(lane) / group_name(self._pages.spec) / EVICTED
            try:
                pages = EvictionRing(path).entries()
            except OSError as error:
                reason = error.strerror or error
                self.notes.append(f"which pages left lane {lane} cannot be read: {reason}")
                continue
            if len(pages) == NUM_ENTRIES:
                oldest = datetime.fromtimestamp(pages[-1].time_ns / 1e9, UTC)
                self.notes.append(
                    f"lane {lane} remembers its last {NUM_ENTRIES:,} evictions only, back to"
                    f" {oldest.isoformat(' ', 'seconds')}"
                )
            for page in pages:
                known = newest.get(page.key)
                if known is None or known.time_ns < page.time_ns:
                    newest[page.key] = page
        return newest

    def _damage_at(self, position: int) -> str:
        """What is wrong with the page of one record; empty if nothing is."""
        record = self._records[position : position + 1]
        segment, row = divmod(int(self._pages.rows[position]), self._geometry.rows)
        rows = np.array([row if self._geometry.fixed_size else 0])
        starts, sizes = page_extents(self._geometry, record, rows)
        if int(sizes.sum()) > self._geometry.page_nbytes:
            return "its record names more bytes than a page has"
        lane = int(self._pages.lanes[position])
        folder = self._root / lane_name(lane) / group_name(self._pages.spec) / KV
        path = folder / chunk_name(segment, len(KV_DIMENSIONS))
        start = int(starts[0, 0])
        page = np.empty(int(sizes.sum()), np.uint8)
        try:
            with files.reading(path) as fd:
                page = page[: files.pread_into(fd, page, start)]
        except OSError as error:
            if files.is_vanished(error):
                return GONE
            return f"cannot be read: {error.strerror or error}"
        for layer, (at, nbytes) in enumerate(
            zip((starts[0] - start).tolist(), sizes[0].tolist(), strict=True)
        ):
            crc = int(record["layer_crcs"][0, layer])
            reason = chunk_damage(page[at : at + nbytes], nbytes, crc)
            if reason:
                return f"layer {layer} of row {self._pages.rows[position]} in lane {lane} {reason}"
        return ""


def _equal(column: "npt.NDArray[np.uint8]", value: bytes) -> "npt.NDArray[np.bool_]":
    """Rows ``(row, byte)`` that have these bytes."""
    equal: npt.NDArray[np.bool_] = (column == np.frombuffer(value, np.uint8)).all(axis=1)
    return equal
