"""The ``zarr.json`` of a lane: who wrote there last, how many bytes it claims, a header's copy.

These are conveniences or can be found out anew, so a damaged document is as good as none. Whoever
changes one holds the lock of the store's root folder, where its new bytes lie until they are
complete: what an interrupted change leaves there can be told apart from a change in progress.
A claim changes often, and replacing a file can take milliseconds. So it has a place of fixed width
near the document's start, where it is overwritten.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv import files
from pagedkv.format import ATTRIBUTE, METADATA, lane_name

CLAIM = "claimed_nbytes"
HEADER = "header"
LAST_WRITER = "last_writer"

_CLAIM_WIDTH = 20
_CLAIM_PLACE = re.compile(b'"%s": ([0-9]+ *)' % CLAIM.encode())
_SECTOR_NBYTES = 512
"""A few bytes that lie within it are written as a whole, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneDocument:
    """What the document of a lane said when it was read.

    Args:
        nbytes: Size of the file; 0 if there is none.
        node: The whole document; a new one if there was none, or a damaged one.
        attributes: Those of this library.
    """

    nbytes: int
    node: dict[str, Any]
    attributes: dict[str, Any]

    @property
    def claimed_nbytes(self) -> int | None:
        """How many bytes the lane claims of the store's bound; None if that is not known."""
        claim = self.attributes.get(CLAIM)
        return claim if type(claim) is int and claim >= 0 else None

    @property
    def last_writer(self) -> str:
        """Who writes the lane, or wrote there last, in words."""
        try:
            writer = self.attributes[LAST_WRITER]
            return f"process {writer['pid']} on {writer['host']} since {writer['since']}"
        except (KeyError, TypeError):
            return "an unknown process"


def read(root: Path, lane: int) -> LaneDocument:
    """The document of a lane.

    Raises:
        OSError: The system could not read it; a missing or damaged one reads as empty.
    """
    return parse(read_raw(root, lane))


def read_raw(root: Path, lane: int) -> bytes:
    """The bytes of a lane's document; none if there is no such file. Raises as ``read`` does."""
    try:
        return files.read_bytes(_path(root, lane))
    except OSError as error:
        if files.is_vanished(error):
            return b""
        raise


def parse(raw: bytes) -> LaneDocument:
    """What the bytes of a lane's document say."""
    try:
        node = json.loads(raw)
    except (ValueError, RecursionError):
        node = None
    if not isinstance(node, dict) or (node.get("zarr_format"), node.get("node_type")) != (
        3,
        "group",
    ):
        node = {"attributes": {}, "zarr_format": 3, "node_type": "group"}
    attributes = node.get("attributes")
    own = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    return LaneDocument(nbytes=len(raw), node=node, attributes=own if isinstance(own, dict) else {})


def update(root: Path, lane: int, changes: Mapping[str, Any], *, sync: bool) -> LaneDocument:
    """Change attributes in the document of a lane and keep all others.

    The caller holds the lock of ``root``, and that of the lane unless its owner must not notice.

    Args:
        root: The store's folder.
        lane: Whose document.
        changes: New values by name.
        sync: Whether the bytes are on the disk before the name changes.

    Returns:
        The new document.
    """
    before = read(root, lane)
    attributes = {**before.attributes, **changes}
    if CLAIM in attributes:  # first, so that it is near the start
        attributes = {CLAIM: attributes[CLAIM], **attributes}
    others = before.node.get("attributes")
    node = {
        "attributes": {ATTRIBUTE: attributes},
        **{name: value for name, value in before.node.items() if name != "attributes"},
    }
    if isinstance(others, dict):
        node["attributes"] |= {name: value for name, value in others.items() if name != ATTRIBUTE}
    raw = _CLAIM_PLACE.sub(_padded, json.dumps(node).encode(), count=1)
    if not before.nbytes:
        files.remove_empty_folder(_path(root, lane))
    files.write_atomic(_path(root, lane), [raw], sync=sync, folder=root)
    return LaneDocument(nbytes=len(raw), node=node, attributes=attributes)


def claim(root: Path, lane: int, nbytes: int) -> LaneDocument:
    """Change how many bytes a lane claims, as ``update`` does, unsynced.

    Returns:
        The new document.
    """
    raw = read_raw(root, lane)
    place = _CLAIM_PLACE.search(raw)
    if place is None or place.end() > _SECTOR_NBYTES or len(place[1]) != _CLAIM_WIDTH:
        return update(root, lane, {CLAIM: nbytes}, sync=False)
    changed = raw[: place.start(1)] + b"%-*d" % (_CLAIM_WIDTH, nbytes) + raw[place.end() :]
    document = parse(changed)
    if len(changed) != len(raw) or document.claimed_nbytes != nbytes:
        return update(root, lane, {CLAIM: nbytes}, sync=False)
    files.overwrite(_path(root, lane), changed[slice(*place.span(1))], place.start(1))
    return document


@functools.lru_cache(maxsize=1024)
def _path(root: Path, lane: int) -> Path:
    return root / lane_name(lane) / METADATA


def _padded(place: "re.Match[bytes]") -> bytes:
    return place[0].ljust(len(place[0]) - len(place[1]) + _CLAIM_WIDTH)
