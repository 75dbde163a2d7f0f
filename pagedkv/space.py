"""``Space``: how many bytes a store takes on disk, and how many its bound leaves.

All writers of a store share one bound. Each *claims* bytes before it writes: the claim stands in
the document of its lane, is changed under the lock of the store's root folder, and is never less
than what the lane's files and scratch files take. So the claims of all lanes and the files beside
them bound what is on disk, whoever is killed when. A writer claims somewhat more than it needs, so
that most reservations need no file. The claim of a lane without an owner may be out of date: it is
found out anew when a store is opened for writing, and by whoever is short of room.
"""

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagedkv import files, lane_document
from pagedkv.errors import StoreError, StoreFullError
from pagedkv.format import METADATA, lane_name, lane_number
from pagedkv.header import StoreHeader
from pagedkv.lane_document import CLAIM, HEADER, LaneDocument
from pagedkv.spec import format_nbytes

logger = logging.getLogger("pagedkv")

MOST_AHEAD_NBYTES = 16 * 2**20
"""How much more than it needs a writer claims at most; also what it claims without a bound."""
AHEAD_SHARE = 256
"""With a bound, it claims no more ahead than the bound divided by this."""
MARGIN_NBYTES = 4096
"""Room in each claim for the documents of the lane, whose numbers change: one at a time is written
anew without a reservation."""
DOCUMENT_MARGIN_NBYTES = 1024
"""How much larger than all there are the next document may be: holder and claim in a new one."""
TRUSTED_SECONDS = 30.0
"""How long the true claim of a lane without an owner is not looked at again: whoever takes space
back there may be killed between removing files and lowering the claim."""


class Space:
    """Counts the bytes of one open store against the bound that all its writers share.

    Thread-safe. A call that has to look at files holds the lock of the store's root folder
    meanwhile: the caller must not hold it.

    Args:
        root: The store's folder.
        header: What the store's root says.
        lane: The lane that this process writes, whose lock it holds; None if it only reads.
    """

    def __init__(self, root: Path, header: StoreHeader, lane: int | None) -> None:
        self._root = root
        self._lane = lane
        self._header = header
        self._root_document = b""
        self._stamp: tuple[int, int, int] | None = None
        self._lock = threading.Lock()  # guards the numbers
        self._claiming = threading.Lock()  # before the root's lock and _lock: one claim at a time
        self._written_nbytes = 0
        self._document_nbytes = 0
        self._reserved_nbytes = 0
        self._scratch_nbytes = 0
        self._claimed_nbytes = 0
        self._others_nbytes = 0
        self._documents: dict[int, tuple[bytes, LaneDocument]] = {}  # of other lanes
        self._measured: dict[int, tuple[bytes, float]] = {}  # documents with a true claim, and when

    @classmethod
    def open(cls, root: Path, header: StoreHeader, lane: int, about: Mapping[str, Any]) -> "Space":
        """The space of a store that this process starts to write.

        Corrects the claims of all lanes without an owner, claims what is in the own lane and writes
        its document durably: the claim, the header's copy, and the attributes ``about`` the lane.

        Raises:
            StoreFullError: The lane is new and the bound leaves no room even for its document.
            StoreError: The system could not read or write.
        """
        space = cls(root, header, lane)
        with space._root_locked("write to the store"):
            space._read_bound()
            changes = {**about, HEADER: space._header.to_dict()}
            space._correct_claims()
            space._count_own()
            is_new = not space.own_nbytes
            likely_nbytes = len(json.dumps(changes)) + DOCUMENT_MARGIN_NBYTES
            space._document_nbytes = max(space._document_nbytes, likely_nbytes)
            others = space._count_others()
            target = space._needed_nbytes()
            bound = space.max_nbytes
            if is_new and bound is not None and others + target > bound:
                raise space._full(target, others)
            document = lane_document.update(root, lane, {**changes, CLAIM: target}, sync=True)
            space._document_nbytes = document.nbytes
            space._claimed_nbytes = space._needed_nbytes()  # the rest would not be known to fit
        return space

    @classmethod
    def reading(cls, root: Path, header: StoreHeader) -> "Space":
        """The space of a store that this process only reads: what is there now."""
        space = cls(root, header, None)
        with files.translated(root, "open the store"):
            space._others_nbytes = files.tree_nbytes(root)
        return space

    @property
    def max_nbytes(self) -> int | None:
        """The bound, as of the last look at the store's attributes; None for none."""
        return self._header.max_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes on disk of the whole store with all scratch files.

        Of other writers what they claimed when this process last had to look; without a bound, what
        was there on opening.
        """
        return self._others_nbytes + self.own_nbytes

    @property
    def own_nbytes(self) -> int:
        """Bytes on disk of the own lane with this process's scratch files."""
        return self._written_nbytes + self._document_nbytes + self._scratch_nbytes

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of this process's scratch files."""
        return self._scratch_nbytes

    def reserve(self, nbytes: int) -> None:
        """Set ``nbytes`` apart for files in the own lane, temporary ones included.

        Raises:
            StoreFullError: The bound has no room for them. Nothing has changed.
            StoreError: The system could not write the claim. Nothing has changed.
        """
        if nbytes <= 0:
            return
        with files.translated(self._root, "reserve space in the store"):
            is_current = files.stamp(self._root / METADATA) == self._stamp
        if is_current and self._take_claimed(nbytes):
            return
        with self._root_locked("reserve space in the store"):
            self._read_bound()
            with self._lock:
                self._reserved_nbytes += nbytes
            try:
                self._claim(nbytes)
            except BaseException:
                with self._lock:
                    self._reserved_nbytes -= nbytes
                raise

    def release(self, nbytes: int, *, written: int = 0) -> None:
        """End a reservation of ``nbytes``, ``written`` of which are on disk to stay.

        ``written`` is negative if files became shorter, or fewer, than they were before.
        """
        assert written <= nbytes
        with self._lock:
            self._reserved_nbytes -= max(nbytes, 0)
            self._written_nbytes += written
        self._give_back()

    def grow_scratch(self, nbytes: int) -> None:
        """Count ``nbytes`` more of scratch files; raises as ``reserve`` does."""
        self.reserve(nbytes)
        with self._lock:
            self._reserved_nbytes -= max(nbytes, 0)
            self._scratch_nbytes += max(nbytes, 0)

    def shrink_scratch(self, nbytes: int) -> None:
        """Count ``nbytes`` of scratch files less: they have been cut off or closed."""
        with self._lock:
            self._scratch_nbytes -= nbytes
        self._give_back()

    def free(self, nbytes: int, lane: int | None = None) -> None:
        """Count ``nbytes`` of files less, which have been removed.

        Args:
            nbytes: How many bytes they had.
            lane: Where they were, if not in the own lane: a lane without an owner, whose lock the
                caller holds.
        """
        if lane is None or lane == self._lane:
            with self._lock:
                self._written_nbytes -= nbytes
            self._give_back()
            return
        with self._root_locked("give back space of the store"):
            claim = lane_document.read(self._root, lane).claimed_nbytes
            if claim is not None:
                lane_document.claim(self._root, lane, max(claim - nbytes, MARGIN_NBYTES))
                self._count_others()

    def room(self) -> int | None:
        """How many bytes could be reserved now; None without a bound, 0 if it is exceeded."""
        with self._root_locked("look at the space of the store"):
            self._read_bound()
            if self.max_nbytes is None:
                return None
            self._correct_claims()
            return max(self.max_nbytes - self._count_others() - self._needed_nbytes(), 0)

    def measure(self, reserved: int = 0) -> None:
        """End a reservation by counting the files of the own lane; only if there is no other.

        Args:
            reserved: The bytes of that reservation.
        """
        with self._root_locked("measure the store"):
            assert self._reserved_nbytes == reserved
            self._count_own()
            self._reserved_nbytes = 0
            if self._needed_nbytes() > self._claimed_nbytes:
                self._write_claim(self._needed_nbytes())

    def close(self) -> None:
        """Claim no more than there is. The scratch files are closed before, nothing is reserved."""
        if self._lane is None:
            return
        with self._root_locked("close the store"):
            self._scratch_nbytes = 0
            self._write_claim(self._needed_nbytes())

    def check_invariants(self) -> None:
        """Assert that no count is negative and that all is claimed."""
        counts = (
            self._written_nbytes,
            self._document_nbytes,
            self._reserved_nbytes,
            self._scratch_nbytes,
            self._others_nbytes,
        )
        assert min(counts) >= 0, counts
        assert self._lane is None or self.own_nbytes + self._reserved_nbytes <= self._claimed_nbytes

    @property
    def _own_lane(self) -> int:
        assert self._lane is not None, "a store that is only read claims nothing"
        return self._lane

    @contextmanager
    def _root_locked(self, action: str) -> Iterator[None]:
        with self._claiming, files.translated(self._root, action), files.locked(self._root):
            yield

    def _needed_nbytes(self) -> int:
        """What the claim must be at least."""
        return self.own_nbytes + self._reserved_nbytes + MARGIN_NBYTES

    def _ahead_nbytes(self) -> int:
        bound = self.max_nbytes
        return MOST_AHEAD_NBYTES if bound is None else min(bound // AHEAD_SHARE, MOST_AHEAD_NBYTES)

    def _take_claimed(self, nbytes: int) -> bool:
        """Reserve bytes that are claimed already; whether there are so many."""
        with self._lock:
            if self._needed_nbytes() + nbytes > self._claimed_nbytes:
                return False
            self._reserved_nbytes += nbytes
            return True

    def _claim(self, nbytes: int) -> None:
        """Claim what is needed, ``nbytes`` of it for a new reservation, and something ahead."""
        bound, others = self.max_nbytes, 0
        if bound is not None:
            others = self._count_others()
            if others + self._needed_nbytes() > bound and self._correct_claims():
                others = self._count_others()
        with self._lock:
            needed = self._needed_nbytes()
            target = needed + self._ahead_nbytes()
            if bound is not None:
                if others + needed > bound:
                    # The bound may have become lower: what was claimed ahead is no longer ours.
                    lowest = max(needed - nbytes, bound - others)
                    self._claimed_nbytes = min(self._claimed_nbytes, lowest)
                    raise self._full(nbytes, others)
                target = min(target, bound - others)
            self._claimed_nbytes = min(self._claimed_nbytes, target)
        self._write_claim(target)

    def _give_back(self) -> None:
        """Lower the claim if it is much more than is needed."""
        ahead = self._ahead_nbytes()
        if self._lane is None or self._claimed_nbytes - self._needed_nbytes() <= 2 * ahead:
            return
        try:
            with self._root_locked("give back space of the store"):
                with self._lock:
                    target = min(self._needed_nbytes() + ahead, self._claimed_nbytes)
                    self._claimed_nbytes = target
                self._write_claim(target)
        except StoreError as error:  # nothing is wrong but that others have less room
            logger.warning("%s", error)

    def _write_claim(self, target: int) -> None:
        document = lane_document.claim(self._root, self._own_lane, target)
        with self._lock:
            self._document_nbytes = document.nbytes
            self._claimed_nbytes = target

    def _read_bound(self) -> None:
        """Take the bound from the root's document, if it has changed and is not damaged."""
        path = self._root / METADATA
        self._stamp = files.stamp(path)
        try:
            document = files.read_bytes(path)
            if document != self._root_document:
                self._header = StoreHeader.from_document(document, str(self._root))
                self._root_document = document
        except StoreError as error:
            logger.warning("%s: its last bound counts", error)
        except OSError as error:
            if not files.is_vanished(error):
                raise
            logger.warning("%s: its last bound counts", error)

    def _count_own(self) -> None:
        document_nbytes = lane_document.read(self._root, self._own_lane).nbytes
        tree_nbytes = files.tree_nbytes(self._root / lane_name(self._own_lane))
        with self._lock:
            self._document_nbytes = document_nbytes
            self._written_nbytes = tree_nbytes - document_nbytes

    def _count_others(self) -> int:
        """What the bound must leave beside the own lane: claims, files, and room for a document."""
        sizes = files.file_sizes(self._root)
        for name in [name for name in sizes if name.startswith(files.TEMP_PREFIX)]:
            files.remove(self._root / name)  # of a writer that was killed: the lock is ours
            del sizes[name]
        nbytes = sum(sizes.values())
        largest = max(self._document_nbytes, sizes.get(METADATA, 0))
        margins = 0
        for name in files.subfolders(self._root):
            lane = lane_number(name)
            if lane is None:
                nbytes += files.tree_nbytes(self._root / name)
            elif lane != self._lane:
                document = self._document_of(lane)
                claim = document.claimed_nbytes
                if claim is None:
                    claim = files.tree_nbytes(self._root / name) + MARGIN_NBYTES
                nbytes += claim
                margins += min(MARGIN_NBYTES, claim)
                largest = max(largest, document.nbytes)
        self._others_nbytes = nbytes - margins
        return nbytes + largest + DOCUMENT_MARGIN_NBYTES

    def _document_of(self, lane: int) -> LaneDocument:
        """The document of another lane, parsed anew only if it has changed."""
        raw = lane_document.read_raw(self._root, lane)
        known = self._documents.get(lane)
        if known is None or known[0] != raw:
            known = self._documents[lane] = (raw, lane_document.parse(raw))
        return known[1]

    def _correct_claims(self) -> bool:
        """Find out what the lanes without an owner really take; whether a claim was wrong."""
        changed = False
        for name in files.subfolders(self._root):
            lane = lane_number(name)
            if lane is not None and lane != self._lane:
                changed |= self._correct_claim(lane)
        return changed

    def _correct_claim(self, lane: int) -> bool:
        claim = self._document_of(lane).claimed_nbytes
        raw, measured_at = self._measured.get(lane, (b"", 0.0))
        is_recent = time.monotonic() < measured_at + TRUSTED_SECONDS
        if claim is None or (is_recent and raw == self._documents[lane][0]):
            return False
        path = self._root / lane_name(lane)
        try:
            fd = files.open_folder(path)
        except OSError as error:
            if files.is_vanished(error):
                return False
            raise
        try:
            if not files.try_lock(fd):
                return False
            true_claim = files.tree_nbytes(path) + MARGIN_NBYTES
            if claim != true_claim:
                lane_document.claim(self._root, lane, true_claim)
            self._document_of(lane)
            self._measured[lane] = (self._documents[lane][0], time.monotonic())
            files.unlock(fd)
        finally:
            files.close_file(fd)
        return claim != true_claim

    def _full(self, nbytes: int, others_nbytes: int) -> StoreFullError:
        assert self.max_nbytes is not None
        used = others_nbytes + self._needed_nbytes() - nbytes
        return StoreFullError(
            f"the store {self._root} has {format_nbytes(used)} ({used}) of its max_nbytes"
            f" {format_nbytes(self.max_nbytes)} ({self.max_nbytes}) in use: no room for"
            f" {format_nbytes(nbytes)} ({nbytes}) more: raise max_nbytes (what live sequences hold"
            " beyond the pool takes room too), or close sequences"
        )
