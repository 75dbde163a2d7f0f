"""The root of a store: its folder, and the header in the attributes of its root group."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedkv import files, metadata
from pagedkv.errors import StoreError
from pagedkv.format import ATTRIBUTE, METADATA
from pagedkv.header import StoreHeader


def read_header(root: Path) -> StoreHeader | None:
    """The header of the store at ``root``; None if nothing is there, or an empty folder.

    Raises:
        StoreError: ``root`` is a file, or holds something that is no store of ours.
        FormatVersionError: The store has a later format.
    """
    with files.translated(root, "open the store"):
        if not root.exists():
            return None
        if not root.is_dir():
            raise StoreError(f"{root} is a file: a store is a folder")
        try:
            document = files.read_bytes(root / METADATA)
        except FileNotFoundError:
            _require_empty(root)
            return None
    attributes = _attributes(document, root / METADATA)
    if ATTRIBUTE not in attributes:
        raise StoreError(
            f"{root} holds a Zarr node of something else (no attribute {ATTRIBUTE!r}): it is left"
            " as it is; give another path"
        )
    return StoreHeader.from_dict(attributes[ATTRIBUTE], str(root))


def create(root: Path, header: StoreHeader) -> StoreHeader:
    """Make a store at ``root``; the header, or that of another process that was faster.

    The root group's document is written last and at once, so that an interrupted creation leaves an
    empty folder, which the next one completes.
    """
    document = metadata.root_document(header)
    with files.translated(root, "create the store"):
        root.parent.mkdir(parents=True, exist_ok=True)
        files.make_dir(root)
        root.chmod(0o700)
        with files.locked(root):
            existing = read_header(root)
            if existing is not None:
                return existing
            files.remove_temps(root)
            files.write_atomic(root / METADATA, [document])
            files.sync_dir(root)
        files.sync_dir(root.parent)
    return header


def set_max_nbytes(root: Path, max_nbytes: int) -> None:
    """Change the bound in the store's attributes."""
    with (
        files.translated(root, "change max_nbytes of"),
        files.locked(root),
    ):
        header = read_header(root)
        if header is None:
            raise StoreError(f"the store {root} is gone")
        header = replace(header, max_nbytes=max_nbytes)
        document = json.loads(files.read_bytes(root / METADATA))
        document["attributes"][ATTRIBUTE] = header.to_dict()
        files.write_atomic(root / METADATA, [json.dumps(document, indent=2).encode()])
        files.sync_dir(root)


def _attributes(document: bytes, path: Path) -> dict[str, Any]:
    try:
        node = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: {error}") from error
    attributes = node.get("attributes") if isinstance(node, dict) else None
    return attributes if isinstance(attributes, dict) else {}


def _require_empty(root: Path) -> None:
    foreign = [
        name
        for name in sorted(entry.name for entry in root.iterdir())
        if not name.startswith(files.TEMP_PREFIX)
    ]
    if foreign:
        raise StoreError(
            f"{root} is no store, but holds {foreign[0]!r}: it is left as it is; give another path"
        )
