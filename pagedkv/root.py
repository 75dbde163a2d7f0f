"""The root of a store: its folder, and the header in the attributes of its root group."""

import json
import logging
from dataclasses import replace
from pathlib import Path

from pagedkv import files, lane_document, metadata
from pagedkv.errors import FormatVersionError, StoreError
from pagedkv.format import ATTRIBUTE, METADATA
from pagedkv.header import StoreHeader
from pagedkv.lane_access import lanes_of

logger = logging.getLogger("pagedkv")


def read_header(root: Path) -> StoreHeader | None:
    """The header of the store at ``root``; None if nothing is there, or an empty folder.

    If the root's document is damaged or gone, the copy in the first lane that has one counts, and
    a warning is logged.

    Raises:
        StoreError: ``root`` is a file, or holds something that is no store of ours, or no header
            is left of it.
        FormatVersionError: The store has a later format.
    """
    with files.translated(root, "open the store"):
        if not files.exists(root):
            return None
        if not files.is_folder(root, follow=True):
            raise StoreError(f"{root} is a file: a store is a folder")
        try:
            document = _read_document(root)
            if document is not None:
                return StoreHeader.from_document(document, str(root))
            damage = f"{root / METADATA} is gone"
        except FormatVersionError:
            raise
        except StoreError as error:
            copy = _copied_header(root, str(error))
            if copy is None:
                raise
            return copy
        copy = _copied_header(root, damage)
        if copy is None:
            _require_empty(root)
        return copy


def create(root: Path, header: StoreHeader) -> StoreHeader:
    """Make a store at ``root``; the header, or that of another process that was faster.

    The root group's document is written last and at once, so that an interrupted creation leaves an
    empty folder, which the next one completes.

    Raises:
        StoreError: The system could not write, or ``root`` holds something else.
        FormatVersionError: Another process made a store of a later format there meanwhile.
    """
    document = metadata.root_document(header)
    with files.translated(root, "create the store"):
        files.make_dirs(root.parent)
        files.make_dir(root)
        files.restrict(root)
        with files.locked(root):
            existing = read_header(root)
            if existing is not None:
                return existing
            files.remove_temps(root)
            files.write_atomic(root / METADATA, [document])
        files.sync_dir(root.parent)
    return header  # the root's own names are made durable when a lane is ready


def mend(root: Path, header: StoreHeader) -> bool:
    """Write the root's document anew if it is damaged or gone; whether it was.

    Only for writers. ``header`` is what ``read_header`` found; a whole document keeps its own.

    Raises:
        StoreError: The system could not write it.
        FormatVersionError: It was replaced by that of a later format meanwhile.
    """
    with files.translated(root, "mend the store"), files.locked(root):
        if _whole_document(root) is not None:
            return False
        files.remove_temps(root)
        _replace_document(root, metadata.root_document(header))
    logger.warning("wrote %s anew", root / METADATA)
    return True


def set_max_nbytes(root: Path, max_nbytes: int) -> None:
    """Change the bound in the store's attributes, and in the lanes' copies of them.

    Raises:
        StoreError: The store is gone, or the system could not read or write.
        FormatVersionError: It was replaced by one of a later format meanwhile.
    """
    with files.translated(root, "change max_nbytes of"), files.locked(root):
        header = read_header(root)
        if header is None:
            raise StoreError(f"the store {root} is gone")
        header = replace(header, max_nbytes=max_nbytes)
        document = _whole_document(root)
        if document is None:
            document = metadata.root_document(header)
        else:
            node = json.loads(document)
            node["attributes"][ATTRIBUTE] = header.to_dict()
            document = json.dumps(node, indent=2).encode()
        _replace_document(root, document)
        for lane in lanes_of(root):
            if lane_document.HEADER in lane_document.read(root, lane).attributes:
                changes = {lane_document.HEADER: header.to_dict()}
                lane_document.update(root, lane, changes, sync=True)


def _read_document(root: Path) -> bytes | None:
    """The bytes of the root's document; None if it is gone, ``StoreError`` if it is no file."""
    try:
        return files.read_bytes(root / METADATA)
    except FileNotFoundError:
        return None
    except OSError as error:
        if files.is_vanished(error):
            raise StoreError(f"{root / METADATA} is no file: {error.strerror}") from error
        raise


def _whole_document(root: Path) -> bytes | None:
    """The bytes of the root's document if Zarr and we can read it."""
    try:
        document = _read_document(root)
        if document is None:
            return None
        StoreHeader.from_document(document, str(root))
    except FormatVersionError:
        raise
    except StoreError:
        return None
    node = json.loads(document)
    is_group = node.get("zarr_format") == 3 and node.get("node_type") == "group"
    return document if is_group else None


def _replace_document(root: Path, document: bytes) -> None:
    files.remove_empty_folder(root / METADATA)
    files.write_atomic(root / METADATA, [document])  # its name is made durable with the lane's


def _copied_header(root: Path, damage: str) -> StoreHeader | None:
    """The header of the first lane that has a valid copy; ``damage`` says why it is needed."""
    for lane in lanes_of(root):
        attributes = lane_document.read(root, lane).attributes
        try:
            header = StoreHeader.from_dict(attributes.get(lane_document.HEADER), str(root))
        except FormatVersionError:
            raise
        except StoreError:
            continue
        logger.warning(
            "%s: what lane %d says of %s counts; the next writer mends it",
            damage,
            lane,
            root / METADATA,
        )
        return header
    return None


def _require_empty(root: Path) -> None:
    foreign = [name for name in files.names(root) if not name.startswith(files.TEMP_PREFIX)]
    if foreign:
        raise StoreError(
            f"{root} is no store, but holds {foreign[0]!r}: it is left as it is; give another path"
        )
