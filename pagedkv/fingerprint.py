"""The identity of a model's weights: one text for the same files, whichever engine loads them."""

import contextlib
import hashlib
import json
import logging
import os
import struct
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pagedkv.errors import PagedKVError
from pagedkv.model_config import read_config

logger = logging.getLogger(__name__)
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_NUM_READERS = 4
_FRAME = struct.Struct("<Q")
_CACHE_VERSION = 1
_SETTLED_NS = 2_000_000_000
"""A file younger than this may change again within one tick of its time stamp."""


class _Identity(NamedTuple):
    """What tells, without reading a file, that it is still the one that was hashed."""

    nbytes: int
    mtime_ns: int
    inode: int


def fingerprint_files(directory: str | os.PathLike[str]) -> str:
    """The fingerprint of the model in ``directory``: ``"sha256:"`` and 64 hexadecimal digits.

    SHA-256 over the length-framed canonical config and, for each weight file directly in the folder
    in the order of names, its name and the SHA-256 of its content. Of ``config.json``, keys that
    say where the model came from or what wrote it (``transformers_version``, all that begin with an
    underscore) do not count, nor do order and white space. Weight files end in ``.safetensors``,
    ``.bin`` or ``.gguf``; a folder with GGUF files, which hold their own config, may do without
    ``config.json``.

    Reads all weights once; afterwards the hash of a file comes from the user's cache folder
    (``$XDG_CACHE_HOME/pagedkv``) as long as its path, size, modification time and inode stay.

    Raises:
        ValueError: The folder holds no config or no weights; the message names it.
        PagedKVError: A weight file changed while it was read.
    """
    folder = Path(directory)
    config = _canonical_config(folder)
    files = sorted(
        (path for path in folder.iterdir() if path.suffix in _WEIGHTS and path.is_file()),
        key=lambda path: path.name,
    )
    if not files:
        raise ValueError(f"{folder} has no weights: no file there ends in {', '.join(_WEIGHTS)}")
    total = hashlib.sha256(b"pagedkv.model.v1\0")
    for field in (config, *_names_and_digests(files)):
        total.update(_FRAME.pack(len(field)) + field)
    return f"sha256:{total.hexdigest()}"


def _canonical_config(folder: Path) -> bytes:
    if folder.is_dir() and not (folder / "config.json").exists() and any(folder.glob("*.gguf")):
        return b""
    config = _without_volatile(read_config(folder))
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_volatile(item)
            for key, item in value.items()
            if not key.startswith("_") and key != "transformers_version"
        }
    if isinstance(value, list):
        return [_without_volatile(item) for item in value]
    return value


def _names_and_digests(files: list[Path]) -> Iterable[bytes]:
    known = _HashCache.read(_cache_path())
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        digests = list(readers.map(known.digest, files))
    known.write()
    for path, digest in zip(files, digests, strict=True):
        yield path.name.encode()
        yield digest


def _cache_path() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "pagedkv" / "fingerprints.json"


class _HashCache:
    """The hashes of files that were read before, kept in a JSON file.

    It only saves time: a file that is missing, damaged or not writable costs reading the weights.
    """

    def __init__(self, path: Path, entries: dict[str, tuple[_Identity, bytes]]) -> None:
        self._path = path
        self._entries = entries
        self._changed = False

    @classmethod
    def read(cls, path: Path) -> "_HashCache":
        try:
            entries = _parse_entries(json.loads(path.read_bytes()))
        except FileNotFoundError:
            entries = {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("ignoring %s, which cannot be read: %s", path, error)
            entries = {}
        return cls(path, entries)

    def digest(self, file: Path) -> bytes:
        """SHA-256 of ``file``'s content."""
        name = str(file.resolve())
        found = self._entries.get(name)
        with file.open("rb") as stream:
            before = _identity(stream.fileno())
            if found is not None and found[0] == before:
                return found[1]
            digest = hashlib.file_digest(stream, "sha256").digest()
            if _identity(stream.fileno()) != before:
                raise PagedKVError(f"{file} changed while it was read: wait until it is complete")
        if time.time_ns() - before.mtime_ns > _SETTLED_NS:
            self._entries[name] = (before, digest)
            self._changed = True
        return digest

    def write(self) -> None:
        """Replace the file atomically, if anything new was hashed; forgets files that are gone."""
        if not self._changed:
            return
        files = {
            name: {**identity._asdict(), "sha256": digest.hex()}
            for name, (identity, digest) in self._entries.items()
            if Path(name).exists()
        }
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=".fingerprints-", dir=self._path.parent)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                    json.dump({"version": _CACHE_VERSION, "files": files}, stream, indent=1)
                Path(temporary).replace(self._path)
            except BaseException:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
                raise
        except OSError as error:
            logger.warning("hashes of weights are not kept: %s", error)


def _parse_entries(values: Mapping[str, Any]) -> dict[str, tuple[_Identity, bytes]]:
    if values["version"] != _CACHE_VERSION:
        raise ValueError(f"version {values['version']!r} is not {_CACHE_VERSION}")
    entries = {}
    for name, value in values["files"].items():
        identity = _Identity(*(int(value[field]) for field in _Identity._fields))
        digest = bytes.fromhex(value["sha256"])
        if len(digest) != hashlib.sha256().digest_size:
            raise ValueError(f"the hash of {name} has {len(digest)} bytes")
        entries[name] = (identity, digest)
    return entries


def _identity(descriptor: int) -> _Identity:
    status = os.fstat(descriptor)
    return _Identity(nbytes=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)
