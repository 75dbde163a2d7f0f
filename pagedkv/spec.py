"""``KVSpec``: what the KV of one model looks like, and how it is cut into pages."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from typing import Any, NewType

import ml_dtypes
import numpy as np

from pagedkv.errors import SpecMismatchError

PageKey = NewType("PageKey", bytes)
"""The 32-byte content address of a page."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

_GROUP = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_COUNTS = ("num_layers", "num_kv_heads", "head_dim", "page_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """The identity and geometry of one layer group's KV.

    Everything here is hashed into the root of every page key, so that pages of another model,
    dtype, geometry, rank or group can never match.

    Args:
        num_layers: Layers of this group in the whole model.
        num_kv_heads: KV heads of each of these layers in the whole model.
        head_dim: Channels of a head.
        page_tokens: Tokens of a page.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``.
        model: Fingerprint of the weights (``pagedkv.fingerprint_files``), not a name.
        layer_range: Half-open range of the layers that are held here; all by default.
        head_range: Half-open range of the KV heads that are held here (tensor parallelism).
        num_kinds: 2 for key and value, 1 for a single array a token (latent attention).
        group: Name of the layer group among those of the model.

    Raises:
        ValueError: A value is out of range; the message names it.
        TypeError: A value has the wrong type.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: str
    model: str
    layer_range: tuple[int, int] | None = None
    head_range: tuple[int, int] | None = None
    num_kinds: int = 2
    group: str = "0"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        if type(self.num_kinds) is not int or self.num_kinds not in (1, 2):
            raise ValueError(f"num_kinds is {self.num_kinds!r}: it must be 1 or 2 (key and value)")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: it must be one of {', '.join(DTYPES)}")
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model is {self.model!r}: it must be the fingerprint of the weights")
        if not isinstance(self.group, str) or not _GROUP.fullmatch(self.group):
            raise ValueError(
                f"group is {self.group!r}: it must be 1 to 64 letters, digits, '_', '.' or '-'"
            )
        layers = _check_range("layer_range", self.layer_range, self.num_layers)
        heads = _check_range("head_range", self.head_range, self.num_kv_heads)
        object.__setattr__(self, "layer_range", layers)
        object.__setattr__(self, "head_range", heads)

    @property
    def held_layers(self) -> int:
        """Layers that a page holds: the length of ``layer_range``."""
        assert self.layer_range is not None
        return self.layer_range[1] - self.layer_range[0]

    @property
    def held_heads(self) -> int:
        """KV heads that a page holds: the length of ``head_range``."""
        assert self.head_range is not None
        return self.head_range[1] - self.head_range[0]

    @property
    def np_dtype(self) -> np.dtype[Any]:
        """The numpy type of one number (``ml_dtypes.bfloat16`` for bfloat16)."""
        return DTYPES[self.dtype]

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """Shape of one layer of a page: ``(kind, token, head, channel)``."""
        return (self.num_kinds, self.page_tokens, self.held_heads, self.head_dim)

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of a page: ``(layer, kind, token, head, channel)``."""
        return (self.held_layers, *self.layer_shape)

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of a page, uncompressed."""
        return math.prod(self.layer_shape) * self.np_dtype.itemsize

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page in the pool."""
        return self.held_layers * self.layer_nbytes

    def root_key(self) -> PageKey:
        """The parent of every first page: SHA-256 over all fields, as canonical JSON."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return PageKey(hashlib.sha256(b"pagedkv.root.v1\0" + text.encode()).digest())

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-serialisable values; ``from_dict`` is the inverse."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "KVSpec":
        """The spec that ``to_dict`` described; ``ValueError`` or ``TypeError`` if it is none."""
        ranges = {k: tuple(values[k]) for k in ("layer_range", "head_range") if values.get(k)}
        return cls(**{**values, **ranges})

    def require_equal(self, other: "KVSpec", what: str) -> None:
        """Raise ``SpecMismatchError`` naming each field in which the spec of ``what`` differs."""
        parts = [
            f"{f.name} is {getattr(other, f.name)!r} there and {getattr(self, f.name)!r} here"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
        if parts:
            raise SpecMismatchError(f"{what} holds the KV of another spec: {'; '.join(parts)}")


def parse_nbytes(value: int | str) -> int:
    """Read a byte size: ``4096``, ``"64MiB"``, ``"20 GB"``.

    Raises:
        ValueError: It is none, or not positive.
        TypeError: It is neither an integer nor a text.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{value!r} is no byte size: give an integer, or a text such as '20GiB'")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kKMGT])(i?))?B?\s*", value)
        if not match:
            raise ValueError(f"{value!r} is no byte size: write it as '4096', '64MiB' or '20GB'")
        power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
        value = int(Decimal(match[1]) * (1024 if match[3] else 1000) ** power)
    if value <= 0:
        raise ValueError(f"a byte size must be positive, not {value}")
    return value


def format_nbytes(nbytes: float) -> str:
    """``nbytes`` for people: ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(nbytes) < 1024 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: it must be an integer")
    if value <= 0:
        raise ValueError(f"{name} is {value}: it must be at least 1")


def _check_range(name: str, value: tuple[int, int] | None, total: int) -> tuple[int, int]:
    if value is None:
        return (0, total)
    if (
        not isinstance(value, tuple)
        or len(value) != 2
        or not all(isinstance(bound, int) for bound in value)
    ):
        raise TypeError(f"{name} is {value!r}: it must be a pair (start, stop)")
    if not 0 <= value[0] < value[1] <= total:
        raise ValueError(f"{name} is {value!r}: it must be a non-empty part of 0..{total}")
    return value
