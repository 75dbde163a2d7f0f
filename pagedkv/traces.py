"""``read_trace``: traces out of files, in any of the formats that docs/traces.md describes."""

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from pagedkv.errors import TraceError
from pagedkv.trace import Trace
from pagedkv.trace_builder import TraceBuilder
from pagedkv.trace_lines import Progress, check_header, json_object, read_lines

MOONCAKE_PAGE_TOKENS = 512
CSV_PAGE_TOKENS = 16

_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
_JSON_SUFFIXES = {".json", ".jsonl", ".ndjson"}

Lines = Iterator[tuple[int, str]]


def read_trace(
    path: str | Path,
    *,
    page_tokens: int | None = None,
    page_nbytes: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Read a trace; what is in the file tells its format, and whether it is gzip.

    Args:
        path: The file.
        page_tokens: Tokens of a page, where the file does not say or says otherwise.
        page_nbytes: Bytes of a page, likewise.
        progress: Is told how many bytes of the file have been read.

    Raises:
        TraceError: The file cannot be read, or a line of it is wrong: the message names the line.
        ValueError: ``page_tokens`` or ``page_nbytes`` is not positive.
    """
    path = Path(path)
    for name, value in (("page_tokens", page_tokens), ("page_nbytes", page_nbytes)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    lines = read_lines(path, progress)
    first = next(lines, None)
    if first is None:
        raise TraceError(f"{path} is empty: it holds no request")
    line, text = first
    if text[0] not in "{[" and _JSON_SUFFIXES.isdisjoint(path.suffixes):
        builder = TraceBuilder(
            path,
            "csv",
            page_tokens=page_tokens or CSV_PAGE_TOKENS,
            page_nbytes=page_nbytes,
            is_chained=False,
        )
        _add_csv(builder, chain([first], lines))
        return builder.build()
    header = json_object(path, line, text)
    if "format" in header:
        builder = _from_header(path, line, header, page_tokens, page_nbytes)
        for number, other in lines:
            _add_event(builder, number, json_object(path, number, other))
        return builder.build()
    if not any(name in header for name in _MOONCAKE):
        has = ", ".join(sorted(header)[:8]) or "nothing"
        raise TraceError(
            f"{path}, line {line}: neither a request of Mooncake's, with {', '.join(_MOONCAKE)},"
            f' nor a header with "format": "pagedkv-trace" (it has {has}): begin the file as'
            " docs/traces.md says"
        )
    builder = TraceBuilder(
        path,
        "mooncake",
        page_tokens=page_tokens or MOONCAKE_PAGE_TOKENS,
        page_nbytes=page_nbytes,
    )
    _add_mooncake(builder, line, header)
    for number, other in lines:
        _add_mooncake(builder, number, json_object(path, number, other))
    return builder.build()


def _add_mooncake(builder: TraceBuilder, line: int, request: dict[str, Any]) -> None:
    time = builder.seconds(line, "timestamp", _field(builder, line, request, "timestamp"))
    prompt = builder.tokens(line, "input_length", _field(builder, line, request, "input_length"))
    output = builder.tokens(line, "output_length", _field(builder, line, request, "output_length"))
    ids = _field(builder, line, request, "hash_ids")
    builder.add(
        line,
        builder.ids(line, "hash_ids", ids, allow_text=False),
        time=time / 1000,
        prompt_tokens=prompt,
        output_tokens=output,
    )


def _from_header(
    path: Path,
    line: int,
    header: dict[str, Any],
    page_tokens: int | None,
    page_nbytes: int | None,
) -> TraceBuilder:
    required = () if page_tokens else ("page_tokens",)
    check_header(path, line, header, required=required)
    chained = header.get("chained", True)
    if type(chained) is not bool:
        raise TraceError(f"{path}, line {line}: chained is {chained!r}; it must be true or false")
    return TraceBuilder(
        path,
        "pagedkv",
        page_tokens=page_tokens or header["page_tokens"],
        page_nbytes=page_nbytes or header.get("page_nbytes"),
        is_chained=chained,
    )


def _add_event(builder: TraceBuilder, line: int, event: dict[str, Any]) -> None:
    if "op" in event:
        raise builder.error(
            line,
            f"op is {event['op']!r}, but line 1 has no num_slots, as a recorded trace has; a trace"
            " of requests has no operations",
        )
    time = builder.seconds(line, "time", _field(builder, line, event, "time"))
    keys = builder.ids(line, "keys", _field(builder, line, event, "keys"), allow_text=True)
    prompt = event.get("tokens", len(keys) * builder.page_tokens)
    builder.add(
        line,
        keys,
        time=time,
        prompt_tokens=builder.tokens(line, "tokens", prompt),
        output_tokens=builder.tokens(line, "output_tokens", event.get("output_tokens", 0)),
    )


def _add_csv(builder: TraceBuilder, lines: Lines) -> None:
    line, text = next(lines)
    row = _row(builder, line, text)
    if len(row) > 2:
        raise builder.error(line, f"{len(row)} columns; a CSV trace has one, key, or two: time,key")
    timed = len(row) == 2
    is_header = not _is_number(row[0]) if timed else row[0].lower() in {"key", "keys"}
    for number, other in lines if is_header else chain([(line, text)], lines):
        row = _row(builder, number, other)
        if len(row) != 1 + timed:
            raise builder.error(
                number, f"{len(row)} columns, where line {line} has {1 + timed}; make them equal"
            )
        if not row[-1]:
            raise builder.error(number, "its key is empty; give each page one")
        time = 0.0
        if timed:
            if not _is_number(row[0]):
                raise builder.error(number, f"its time is {row[0]!r}; it must be a number")
            time = builder.seconds(number, "its time", float(row[0]))
        tokens = builder.page_tokens
        builder.add(number, row[1:] or row, time=time, prompt_tokens=tokens, output_tokens=0)


def _row(builder: TraceBuilder, line: int, text: str) -> list[str]:
    if '"' not in text:
        return [value.strip() for value in text.split(",")]
    try:
        (row,) = csv.reader([text], strict=True, skipinitialspace=True)
    except csv.Error as error:
        raise builder.error(line, f"no CSV: {error}") from error
    return row


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _field(builder: TraceBuilder, line: int, values: dict[str, Any], name: str) -> object:
    try:
        return values[name]
    except KeyError:
        has = ", ".join(sorted(values)[:8]) or "nothing"
        raise builder.error(line, f"has no {name!r} (it has {has}); add it") from None
