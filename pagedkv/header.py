"""``StoreHeader``: what the attributes of a store's root group say.

They carry a checksum, and each lane has a copy: a store outlives the damage of its root document.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import google_crc32c

from pagedkv.codec import Codec, codec_from_dict
from pagedkv.errors import FormatVersionError, SpecMismatchError, StoreError
from pagedkv.format import (
    ATTRIBUTE,
    FORMAT_VERSION,
    GROUP_BITS,
    MAX_SEGMENT_ROWS,
    METADATA,
    Geometry,
)
from pagedkv.spec import KVSpec

CHECKSUM = "crc32c"
"""The field that holds the checksum of all others."""


def checksum(values: Mapping[str, Any]) -> str:
    """CRC32C over the canonical JSON of all fields but the checksum, as 8 hex digits."""
    fields = {name: value for name, value in values.items() if name != CHECKSUM}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return f"{google_crc32c.value(text.encode()):08x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeader:
    """Everything that is needed to read a store, and the store's own settings.

    Args:
        specs: The layer groups of the store; a page's group is an index into them.
        codec: How the pages' numbers became bytes.
        segment_rows: Rows of a segment of each spec.
        max_nbytes: Bound of the bytes on disk, if there is one.
        store_tokens: Whether token ids are kept in the catalogue.
    """

    specs: tuple[KVSpec, ...]
    codec: Codec
    segment_rows: tuple[int, ...]
    max_nbytes: int | None
    store_tokens: bool

    @classmethod
    def new(
        cls, specs: tuple[KVSpec, ...], codec: Codec, max_nbytes: int | None, *, store_tokens: bool
    ) -> "StoreHeader":
        """The header of a new store; ``ValueError`` if two specs have one group name."""
        groups = [spec.group for spec in specs]
        if len(groups) > 1 << GROUP_BITS:
            raise ValueError(f"{len(groups)} specs: a store has at most {1 << GROUP_BITS}")
        if len(set(groups)) != len(groups):
            raise ValueError(f"the specs' groups are {groups}: each needs a name of its own")
        return cls(
            specs=specs,
            codec=codec,
            segment_rows=tuple(
                Geometry.of(spec, codec, max_nbytes=max_nbytes).rows for spec in specs
            ),
            max_nbytes=max_nbytes,
            store_tokens=store_tokens,
        )

    def require_match(
        self, specs: tuple[KVSpec, ...] | None, codec: Codec | None, where: str
    ) -> None:
        """Raise ``SpecMismatchError`` if a caller wants other specs or another codec than these."""
        if specs is not None:
            if len(specs) != len(self.specs):
                raise SpecMismatchError(
                    f"{where} holds {len(self.specs)} layer groups, not {len(specs)}"
                )
            for wanted, stored in zip(specs, self.specs, strict=True):
                wanted.require_equal(stored, where)
        if codec is not None and codec != self.codec:
            raise SpecMismatchError(
                f"{where} has codec {self.codec}, not {codec}: open it with its own (codec=None),"
                " or give another path"
            )

    def to_dict(self) -> dict[str, Any]:
        """The attributes, as JSON-serialisable values with their checksum."""
        values = {
            "format_version": FORMAT_VERSION,
            "specs": [spec.to_dict() for spec in self.specs],
            "codec": self.codec.to_dict(),
            "segment_rows": list(self.segment_rows),
            "max_nbytes": self.max_nbytes,
            "store_tokens": self.store_tokens,
        }
        return {**values, CHECKSUM: checksum(values)}

    @classmethod
    def from_document(cls, document: bytes, where: str) -> "StoreHeader":
        """The header in the ``zarr.json`` of a store's root group.

        Raises:
            FormatVersionError: It was written by a later format.
            StoreError: There is none, or a damaged one; ``where`` names the store.
        """
        try:
            node = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{where}/{METADATA} is damaged: {error}") from error
        attributes = node.get("attributes") if isinstance(node, dict) else None
        if not isinstance(attributes, dict) or ATTRIBUTE not in attributes:
            raise StoreError(
                f"{where} holds a Zarr node of something else (no attribute {ATTRIBUTE!r}): it is"
                " left as it is; give another path"
            )
        return cls.from_dict(attributes[ATTRIBUTE], where)

    @classmethod
    def from_dict(cls, values: object, where: str) -> "StoreHeader":
        """The header that ``to_dict`` described.

        Raises:
            FormatVersionError: It was written by a later format.
            StoreError: It is no header, or damaged; ``where`` names the store.
        """
        if not _is_intact(values):
            raise StoreError(f"the attributes of {where} are damaged: their CRC32C is wrong")
        assert isinstance(values, dict)
        version = values.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise FormatVersionError(
                f"{where} has format version {version}; this release reads up to"
                f" {FORMAT_VERSION}: install a later release of pagedkv"
            )
        try:
            if version != FORMAT_VERSION:
                raise ValueError(f"format version {version!r}")
            header = cls(
                specs=tuple(KVSpec.from_dict(spec) for spec in values["specs"]),
                codec=codec_from_dict(values["codec"]),
                segment_rows=tuple(int(rows) for rows in values["segment_rows"]),
                max_nbytes=None if values["max_nbytes"] is None else int(values["max_nbytes"]),
                store_tokens=bool(values["store_tokens"]),
            )
            rows = header.segment_rows
            if not header.specs or len(header.specs) != len(rows):
                raise ValueError(f"{len(header.specs)} specs, {len(rows)} row counts")
            if not all(1 <= count <= MAX_SEGMENT_ROWS for count in rows):
                raise ValueError(f"segments of {rows} rows")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StoreError(f"the attributes of {where} are damaged: {error!r}") from error
        return header


def _is_intact(values: object) -> bool:
    try:
        return isinstance(values, dict) and values.get(CHECKSUM) == checksum(values)
    except RecursionError:
        return False
