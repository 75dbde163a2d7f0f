"""The lines of a trace's file, one after another, gzip or not; and the header of our own format."""

import gzip
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pagedkv.errors import TraceError

FORMAT = "pagedkv-trace"
VERSION = 1
"""What the first line of a trace in our own format names."""

MAX_LINE_NBYTES = 64 << 20
"""No line of a trace is longer: a request of a million pages takes a quarter of it."""

Progress = Callable[[int, int], None]
"""Is told how much of how much has been done."""

_MAGIC = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
}
_EVERY = 4096


def read_lines(path: Path, progress: Progress | None = None) -> Iterator[tuple[int, str]]:
    """Line number, from 1, and text of each line that is not blank.

    A file that begins as gzip does is unpacked, whatever its name.

    Raises:
        TraceError: The file cannot be read, is damaged, or is no text, or a line is too long.
    """
    number = 0
    try:
        with ExitStack() as stack:
            raw = stack.enter_context(path.open("rb"))
            total = path.stat().st_size
            head = raw.peek(6)[:6]
            for magic, name in _MAGIC.items():
                if head.startswith(magic):
                    raise TraceError(f"{path} is a {name} file: unpack it (gzip is read as it is)")
            packed = head.startswith(b"\x1f\x8b")
            lines = stack.enter_context(gzip.open(raw)) if packed else raw
            while line := lines.readline(MAX_LINE_NBYTES + 1):
                number += 1
                if len(line) > MAX_LINE_NBYTES:
                    raise TraceError(
                        f"{path}, line {number}: longer than {MAX_LINE_NBYTES:,} bytes; a trace has"
                        " one request a line"
                    )
                if progress is not None and number % _EVERY == 0:
                    progress(min(raw.tell(), total), total)
                if text := _text(path, number, line):
                    yield number, text
            if progress is not None:
                progress(total, total)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}, behind line {number}: the gzip data is damaged or cut off ({error}): copy the"
            " file again"
        ) from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def json_object(path: Path, line: int, text: str) -> dict[str, Any]:
    """The JSON object that a line is.

    Raises:
        TraceError: It is something else; the message names the line.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{path}, line {line}: no JSON ({error.msg}, column {error.colno}); each line must be"
            " one JSON object"
        ) from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}, line {line}: JSON that cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TraceError(
            f"{path}, line {line}: a JSON {type(value).__name__}; each line must be one JSON object"
        )
    return value


def check_header(
    path: Path, line: int, header: Mapping[str, Any], *, required: Collection[str]
) -> None:
    """Check what the first line of a trace in our own format says of format, version and pages.

    Args:
        path: The file, for messages.
        line: The line, for messages.
        header: What stands there.
        required: Which of ``page_tokens`` and ``page_nbytes`` it must have.

    Raises:
        TraceError: It is of another format, of a later version, or a size is missing or wrong.
    """

    def fail(message: str) -> TraceError:
        return TraceError(f"{path}, line {line}: {message}")

    if header.get("format") != FORMAT:
        raise fail(f'format is {header.get("format")!r}; this reads "{FORMAT}"')
    version = header.get("version")
    if type(version) is not int or version < 1:
        raise fail(f"version is {version!r}; it must be an integer from 1")
    if version > VERSION:
        raise fail(f"version is {version}; this release reads up to {VERSION}: install a newer one")
    for name in ("page_tokens", "page_nbytes"):
        value = header.get(name)
        if value is None and name in required:
            raise fail(f"the header has no {name}; add it")
        if value is not None and (type(value) is not int or value < 1):
            raise fail(f"{name} is {value!r}; it must be an integer from 1")


def _text(path: Path, number: int, line: bytes) -> str:
    if b"\0" in line:
        raise TraceError(f"{path}, line {number}: has zero bytes; a trace is a text file")
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path}, line {number}: byte {line[error.start]:#04x} is no UTF-8; a trace is a text"
            " file"
        ) from error
    return text.strip()
