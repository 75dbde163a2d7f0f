"""``verify_store``: reads every byte of a store, says what is damaged, and repairs it if asked to.

It needs no store that opens: it starts from whatever header can be found. Nothing is locked without
``repair``, and a lane that a writer holds is checked but never repaired.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pagedkv import files
from pagedkv.findings import Finding, VerifyReport
from pagedkv.format import CATALOG, METADATA, Geometry, group_name, lane_name, lane_number
from pagedkv.header import StoreHeader
from pagedkv.lane_access import is_in_use, lane_locked, lanes_of
from pagedkv.node_check import (
    GroupNodes,
    LaneNode,
    find_header,
    remove_root_leftovers,
    root_leftovers,
)
from pagedkv.repair import mend_segment
from pagedkv.root import mend
from pagedkv.segment_check import SegmentCheck, SegmentPlace, check_segment

Progress = Callable[[int, int], None]
"""Called now and then with the bytes that have been read, and those that there are."""

_RECHECKS = 3
_RECHECK_SECONDS = 0.1


def verify_store(
    path: str | os.PathLike[str], *, repair: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Read every byte of the store at ``path`` and report what is damaged.

    Args:
        path: The store's folder. It may be in use, and it need not open.
        repair: Drop exactly the pages that are damaged, and rebuild everything that can be derived.
            A lane that a writer holds is left alone.
        progress: Told how far the check is.

    Raises:
        StoreError: There is no store at ``path``, or the system could not read or write.
        FormatVersionError: The store has a later format.
    """
    root = Path(path).absolute()
    with files.translated(root, "verify the store"):
        header, findings = find_header(root)
        walk = _Walk(root, repair, progress)
        if header is not None:
            if repair and findings:
                mend(root, header)
                findings = [replace(finding, repaired=True) for finding in findings]
            walk.run(header)
        return VerifyReport(
            path=str(root),
            num_segments=walk.num_segments,
            num_pages=walk.num_pages,
            num_good_pages=walk.num_good_pages,
            nbytes_read=walk.nbytes,
            findings=(*findings, *walk.findings),
            foreign=tuple(sorted(walk.foreign)),
            busy_lanes=tuple(walk.busy_lanes),
        )


class _Walk:
    """Goes through all lanes of a store and sums up."""

    def __init__(self, root: Path, repair: bool, progress: Progress | None) -> None:
        self.root = root
        self.findings: list[Finding] = []
        self.foreign: list[str] = []
        self.busy_lanes: list[int] = []
        self.num_segments = self.num_pages = self.num_good_pages = self.nbytes = 0
        self._repair = repair
        self._progress = progress
        self._total_nbytes = 0

    def run(self, header: StoreHeader) -> None:
        lanes = lanes_of(self.root)
        self._total_nbytes = sum(
            nbytes
            for lane in map(self.root.joinpath, map(lane_name, lanes))
            for group in map(lane.joinpath, files.subfolders(lane))
            for array in map(group.joinpath, files.subfolders(group))
            for name, nbytes in files.file_sizes(array).items()
            if name.startswith("c.")
        )
        self._names(self.root, lambda name: lane_number(name) is not None, folders=True)
        self._settle(root_leftovers(self.root), True, lambda: remove_root_leftovers(self.root))
        for lane in lanes:
            self._lane(lane, header)

    def _lane(self, lane: int, header: StoreHeader) -> None:
        path = self.root / lane_name(lane)
        with lane_locked(path) if self._repair else contextlib.nullcontext(False) as locked:
            if not locked and is_in_use(path):
                self.busy_lanes.append(lane)
            groups = set(map(group_name, header.specs))
            self._names(path, groups.__contains__, folders=True)
            node = LaneNode(root=self.root, lane=lane, header=header)
            self._settle(self._stable(node.check, lane, locked), locked, node.mend)
            for group, (spec, rows) in enumerate(
                zip(header.specs, header.segment_rows, strict=True)
            ):
                nodes = GroupNodes(
                    root=self.root,
                    lane=lane,
                    group=group,
                    spec=spec,
                    codec=header.codec,
                    geometry=Geometry.of(spec, header.codec, rows),
                )
                if files.is_folder(nodes.path):
                    self._group(nodes, locked)

    def _group(self, nodes: GroupNodes, locked: bool) -> None:
        self._names(nodes.path, nodes.arrays.__contains__, folders=True)
        self._settle(self._stable(nodes.check, nodes.lane, locked), locked, nodes.mend)
        for array in nodes.arrays:
            is_chunk = functools.partial(nodes.is_chunk, array)
            self._names(nodes.path / array, is_chunk, folders=False)
        self._settle(self._stable(nodes.check_ring, nodes.lane, locked), locked, nodes.mend_ring)
        self._settle(self._leftovers(nodes, locked), locked, nodes.remove_leftovers)
        for number in sorted(nodes.chunks(CATALOG)):
            place = SegmentPlace(
                root=self.root,
                path=nodes.path,
                lane=nodes.lane,
                group=nodes.group,
                number=number,
                geometry=nodes.geometry,
            )
            check = self._segment(place, locked)
            if check is not None:
                self.num_segments += 1
                self.num_pages += check.num_pages
                self.num_good_pages += int(check.good.sum())
                mendable = locked and not check.is_unreadable
                self._settle(check.findings, mendable, functools.partial(mend_segment, check))

    def _segment(self, place: SegmentPlace, locked: bool) -> SegmentCheck | None:
        """Check a segment; what is found is looked at again, unless the lane is locked.

        Somebody may have been changing it: its pages may have been evicted meanwhile.
        """
        check = self._read(place, locked)
        for _ in range(_RECHECKS):
            if locked or not check.findings:
                break
            if is_in_use(place.path.parent):
                time.sleep(_RECHECK_SECONDS)
            if not files.exists(place.catalog):
                return None
            before, check = check, self._read(place, locked)
            if before.findings == check.findings and not is_in_use(place.path.parent):
                break
        return check

    def _read(self, place: SegmentPlace, locked: bool) -> SegmentCheck:
        check = check_segment(place)
        self._count(check.nbytes)
        is_written = check.findings and not locked and is_in_use(place.path.parent)
        return check.without_due() if is_written else check

    def _stable(self, check: Callable[[], list[Finding]], lane: int, locked: bool) -> list[Finding]:
        """What a check finds; it is repeated as in ``_segment``."""
        findings = check()
        for _ in range(_RECHECKS):
            if locked or not findings:
                break
            if is_in_use(self.root / lane_name(lane)):
                time.sleep(_RECHECK_SECONDS)
            before, findings = findings, check()
            if before == findings and not is_in_use(self.root / lane_name(lane)):
                break
        return findings

    def _leftovers(self, nodes: GroupNodes, locked: bool) -> list[Finding]:
        """What is left over; nothing in a lane whose writer may be at work on it."""
        findings = nodes.leftovers()
        if not locked and findings:
            time.sleep(_RECHECK_SECONDS)
            again = nodes.leftovers()
            findings = [finding for finding in findings if finding in again]
            if nodes.lane in self.busy_lanes or is_in_use(nodes.path.parent):
                return []
        return findings

    def _settle(
        self,
        findings: "tuple[Finding, ...] | list[Finding]",
        locked: bool,
        mend: Callable[[], None],
    ) -> None:
        """Take down findings, repaired if that is wanted and allowed."""
        if findings and self._repair and locked:
            try:
                mend()
            except OSError as error:
                failure = f"; the repair failed: {error.strerror or error}"
                findings = [replace(f, detail=f.detail + failure) for f in findings]
            else:
                findings = [replace(finding, repaired=True) for finding in findings]
        self.findings += findings

    def _names(self, folder: Path, is_known: Callable[[str], bool], *, folders: bool) -> None:
        """Take down what is in a folder and not the store's: that is files or folders."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in files.names(folder):
                is_ours = is_known(name) and files.is_folder(folder / name) == folders
                if not (is_ours or name == METADATA or name.startswith(files.TEMP_PREFIX)):
                    self.foreign.append(str((folder / name).relative_to(self.root)))

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self._progress is not None:
            self._progress(min(self.nbytes, self._total_nbytes), self._total_nbytes)
