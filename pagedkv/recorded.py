"""``Recorded``: the operations of a live cache, as ``cache.record`` wrote them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.admission import AdmitAll
from pagedkv.errors import TraceError
from pagedkv.trace_lines import Progress, check_header, json_object, read_lines

Operation = Mapping[str, Any]

_INTEGERS = {
    "put": ("group",),
    "get": ("group",),
    "match": ("group", "held"),
    "acquire": ("group", "use"),
    "release": ("use",),
    "held": ("group",),
    "open": ("sequence",),
    "append": ("sequence", "tokens"),
    "commit": ("sequence", "start"),
    "truncate": ("sequence", "tokens"),
    "drop": ("sequence", "tokens"),
    "fork": ("sequence", "child"),
    "save": ("sequence",),
    "close": ("sequence",),
    "flush": (),
    "begin": (),
}
"""What each operation names, beside pages: integers from 0."""
_WITH_PAGES = frozenset({"put", "get", "match", "acquire", "held", "open", "commit"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recorded trace.

    Args:
        source: The file, for messages.
        policy: Name of the policy that the cache had.
        page_tokens: Tokens of a page.
        page_nbytes: Bytes of a page, all layer groups together.
        num_slots: Slots of each layer group.
        has_store: Whether evicted pages went to a store.
        writes_through: Whether it took them as soon as they had keys.
        admission: Name of the admission policy that said which of them are worth it.
        operations: What was done, in turn; its fields are those of docs/traces.md.
    """

    source: str
    policy: str
    page_tokens: int
    page_nbytes: int
    num_slots: tuple[int, ...]
    has_store: bool
    writes_through: bool
    admission: str
    operations: tuple[Operation, ...]

    @property
    def uses_admission(self) -> bool:
        """Whether an admission policy had anything to say."""
        return self.has_store and not self.writes_through


def is_recorded(path: str | Path) -> bool:
    """Whether a trace is one of operations, not one of requests.

    Raises:
        TraceError: The file cannot be read.
    """
    for _, text in read_lines(Path(path)):
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return isinstance(header, dict) and "format" in header and "num_slots" in header
    return False


def read_recorded(path: str | Path, progress: Progress | None = None) -> Recorded:
    """Read a recorded trace.

    Raises:
        TraceError: The file cannot be read, or a line of it is wrong: the message names the line.
    """
    path = Path(path)
    lines = read_lines(path, progress)
    number, text = next(lines, (1, "{}"))
    header = json_object(path, number, text)
    check_header(path, number, header, required=("page_tokens", "page_nbytes"))
    slots = header.get("num_slots")
    if not isinstance(slots, list) or not slots or not all(_is_count(n) and n for n in slots):
        raise TraceError(
            f"{path}, line {number}: num_slots is {slots!r}; it must be a list of numbers from 1"
        )
    return Recorded(
        source=str(path),
        policy=str(header.get("policy", "lru")),
        page_tokens=header["page_tokens"],
        page_nbytes=header["page_nbytes"],
        num_slots=tuple(slots),
        has_store=header.get("has_store") is True,
        writes_through=header.get("write_policy") == "write-through",
        admission=str(header.get("admission", AdmitAll.name)),
        operations=tuple(_operations(path, lines, len(slots))),
    )


def _operations(
    path: Path, lines: Iterator[tuple[int, str]], num_groups: int
) -> Iterator[Operation]:
    is_open: set[int] = set()
    for number, text in lines:
        values = json_object(path, number, text)
        what = _mistake(values, num_groups, is_open)
        if what:
            raise TraceError(f"{path}, line {number}: {what}")
        if values["op"] in ("open", "fork"):
            is_open.add(values["child" if values["op"] == "fork" else "sequence"])
        elif values["op"] == "close":
            is_open.discard(values["sequence"])
        yield values


def _mistake(values: Operation, num_groups: int, is_open: set[int]) -> str:
    """What is wrong with an operation, if anything is."""
    op, pages, parent = values.get("op"), values.get("pages"), values.get("parent")
    if op not in _INTEGERS:
        return f"op is {op!r}; a recorded trace has {', '.join(_INTEGERS)}"
    for name in (*_INTEGERS[op], *({"group"} & values.keys())):
        if not _is_count(values.get(name)):
            return f"{name} of {op!r} is {values.get(name)!r}; it must be an integer from 0"
    if values.get("group", 0) >= num_groups:
        return f"group is {values['group']}; num_slots in line 1 names {num_groups}"
    if op in _WITH_PAGES and not (isinstance(pages, list) and all(map(_is_page, pages))):
        return f"pages of {op!r} are {pages!r}; they must be a list of integers from 0"
    if op in ("append", "truncate", "drop") and values["tokens"] >= 2**31:
        return f"tokens of {op!r} is {values['tokens']}; it must be less than {2**31}"
    if parent is not None and not _is_page(parent):
        return f"parent is {parent!r}; it must be null or an integer from 0"
    if op != "open" and "sequence" in _INTEGERS[op] and values["sequence"] not in is_open:
        return f"sequence {values['sequence']} is not open; its 'open' comes before"
    return ""


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_page(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31
