"""Traces: three formats are read, and whatever is wrong is named with its line."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv.errors import PagedKVError, TraceError
from pagedkv.trace import ROOT, Trace
from pagedkv.traces import read_trace

HEADER = '{"format": "pagedkv-trace", "version": 1, "page_tokens": 4, "page_nbytes": 64}'


def mooncake(timestamp: Any, ids: Any, tokens: Any = 700, output: Any = 5) -> str:
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": tokens,
            "output_length": output,
            "hash_ids": ids,
        }
    )


def write(folder: Path, *lines: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def message_of(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert isinstance(caught.value, PagedKVError)
    assert isinstance(caught.value, ValueError)
    assert str(path) in str(caught.value)
    return str(caught.value)


def runs_of(trace: Trace) -> list[list[int]]:
    return [
        trace.pages[start:stop].tolist()
        for start, stop in zip(trace.starts[:-1], trace.starts[1:], strict=True)
    ]


def test_mooncake_is_read(tmp_path: Path) -> None:
    trace = read_trace(
        write(tmp_path, mooncake(500, [9, 4]), mooncake(500, [9, 2**70]), "", mooncake(2000, []))
    )
    assert (trace.format, trace.page_tokens, trace.page_nbytes) == ("mooncake", 512, None)
    assert trace.is_chained
    assert trace.is_prefix_closed
    assert runs_of(trace) == [[0, 1], [0, 2], []]
    assert trace.parents.tolist() == [-1, 0, 0]
    assert trace.times.tolist() == [0, 0, 1.5]
    assert trace.prompt_tokens.tolist() == [700, 700, 700]
    assert trace.output_tokens.tolist() == [5, 5, 5]
    assert (trace.num_requests, trace.num_pages, trace.num_distinct) == (3, 4, 3)


def test_our_format_is_read(tmp_path: Path) -> None:
    trace = read_trace(
        write(
            tmp_path,
            HEADER,
            '{"time": 1.5, "keys": ["ab", 7, "7"], "tokens": 11, "output_tokens": 2}',
            '{"time": 2, "keys": ["ab"], "else": 1}',
            name="recorded",
        )
    )
    assert (trace.format, trace.page_tokens, trace.page_nbytes) == ("pagedkv", 4, 64)
    assert runs_of(trace) == [[0, 1, 2], [0]]
    assert trace.parents.tolist() == [-1, 0, 1]
    assert trace.prompt_tokens.tolist() == [11, 4]
    assert trace.output_tokens.tolist() == [2, 0]
    assert trace.times.tolist() == [0, 0.5]


def test_what_is_given_counts_more_than_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, '{"time": 0, "keys": [1]}')
    trace = read_trace(path, page_tokens=8, page_nbytes=3)
    assert (trace.page_tokens, trace.page_nbytes) == (8, 3)
    for wrong in ({"page_tokens": 0}, {"page_nbytes": -1}):
        with pytest.raises(ValueError, match="must be at least 1"):
            read_trace(path, **wrong)


def test_pages_of_a_trace_that_is_not_chained_have_no_parents(tmp_path: Path) -> None:
    header = HEADER.replace("}", ', "chained": false}')
    trace = read_trace(
        write(tmp_path, header, '{"time": 0, "keys": [1, 2]}', '{"time": 0, "keys": [2, 1]}')
    )
    assert not trace.is_chained
    assert not trace.is_prefix_closed
    assert not trace.warnings
    assert trace.parents.tolist() == [-1, -1]
    (batch,) = trace.requests(trace.keys())
    assert [parents for _, parents in batch] == [[None, None]] * 2


@pytest.mark.parametrize(
    ("lines", "times"),
    [
        (["a", "b", "a"], [0, 0, 0]),
        (["key", "a", "b", "a"], [0, 0, 0]),
        (["1.5,a", "2,b", "4,a"], [0, 0.5, 2.5]),
        (["time,key", "1,a", "1, b ", '2,"a"'], [0, 0, 1]),
    ],
)
def test_csv_is_read(tmp_path: Path, lines: list[str], times: list[float]) -> None:
    trace = read_trace(write(tmp_path, *lines, name="keys.csv"))
    assert (trace.format, trace.page_tokens, trace.is_chained) == ("csv", 16, False)
    assert runs_of(trace) == [[0], [1], [0]]
    assert trace.times.tolist() == times
    assert trace.prompt_tokens.tolist() == [16] * 3


def test_gzip_is_read_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(mooncake(0, [1, 2]).encode()))
    assert runs_of(read_trace(path)) == [[0, 1]]


def test_a_damaged_gzip_file_is_an_error(tmp_path: Path) -> None:
    lines = "".join(mooncake(0, list(range(n, n + 50))) + "\n" for n in range(5000))
    packed = gzip.compress(lines.encode())
    path = tmp_path / "trace.gz"
    for damaged in (packed[: len(packed) // 2], packed[:-6], packed[:12], packed[:-8] + b"\0" * 8):
        path.write_bytes(damaged)
        assert "the gzip data is damaged or cut off" in message_of(path)
    path.write_bytes(packed[:200] + b"\xff" * 200 + packed[400:])
    assert "gzip" in message_of(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input_length": 1, "output_length": 1, "hash_ids": [1]}', "has no 'timestamp'"),
        ('{"timestamp": 1, "output_length": 1, "hash_ids": [1]}', "has no 'input_length'"),
        ('{"timestamp": 1, "input_length": 1, "hash_ids": [1]}', "has no 'output_length'"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}', "has no 'hash_ids'"),
        ("{}", "has no 'timestamp' (it has nothing)"),
        (mooncake(4, [1]), "its time is 0.004 s, before the 0.005 s"),
        (mooncake(-1, [1]), "timestamp is -1"),
        (mooncake("5", [1]), "timestamp is '5'; it must be a number"),
        (mooncake(True, [1]), "timestamp is True"),
        (mooncake(None, [1]), "timestamp is None"),
        (mooncake(float("nan"), [1]), "timestamp is nan; it must be finite"),
        (mooncake(10**400, [1]), "timestamp is an integer of more than 30 digits"),
        (mooncake(5, [1], tokens=-1), "input_length is -1; it must not be negative"),
        (mooncake(5, [1], tokens=1.5), "input_length is 1.5; it must be an integer"),
        (mooncake(5, [1], tokens=10**15), "no prompt has so many tokens"),
        (mooncake(5, [1], output=-3), "output_length is -3; it must not be negative"),
        (mooncake(5, [1], output=False), "output_length is False; it must be an integer"),
        (mooncake(5, 1), "hash_ids is 1; it must be a list"),
        (mooncake(5, "12"), "hash_ids is '12'; it must be a list"),
        (mooncake(5, [1, "2"]), "hash_ids[1] is '2'; an id must be an integer"),
        (mooncake(5, [1, 2.0]), "hash_ids[1] is 2.0; an id must be an integer"),
        (mooncake(5, [True]), "hash_ids[0] is True; an id must be an integer"),
        (mooncake(5, [None]), "hash_ids[0] is None; an id must be an integer"),
        (mooncake(5, [[1]]), "hash_ids[0] is [1]; an id must be an integer"),
        (mooncake(5, [1, -2]), "hash_ids[1] is -2; ids must not be negative"),
        (mooncake(5, [1, 2, 1]), "1 comes twice in one request"),
        ('{"timestamp": 5', "no JSON (Expecting ',' delimiter, column 16)"),
        ("nonsense", "no JSON"),
        ("[1, 2]", "a JSON list; each line must be one JSON object"),
        ("7", "a JSON int"),
        ("[" * 100_000, "JSON that cannot be read"),
        ('{"timestamp": ' + "9" * 5000 + "}", "JSON that cannot be read"),
        ('{"a": "\0"}', "has zero bytes"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    text = message_of(write(tmp_path, mooncake(5, [1]), "", line, mooncake(9, [1])))
    assert f"{tmp_path / 'trace.jsonl'}, line 3: " in text
    assert message in text
    assert len(text) < 400


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"format": "other"}'], "line 1: format is 'other'"),
        (['{"time": 0, "keys": [1]}'], 'nor a header with "format": "pagedkv-trace" (it has keys,'),
        (['{"format": "pagedkv-trace"}'], "line 1: version is None"),
        (['{"format": "pagedkv-trace", "version": 2}'], "version is 2; this release reads up to 1"),
        (['{"format": "pagedkv-trace", "version": 1}'], "the header has no page_tokens"),
        ([HEADER.replace("4,", "0,")], "page_tokens is 0"),
        ([HEADER.replace("64", "true")], "page_nbytes is True"),
        ([HEADER.replace("}", ', "chained": 1}')], "chained is 1"),
        ([HEADER], "is empty: it holds no request"),
        ([HEADER, '{"keys": [1]}'], "line 2: has no 'time'"),
        ([HEADER, '{"time": 1}'], "line 2: has no 'keys'"),
        ([HEADER, '{"time": 1, "keys": [1.5]}'], "keys[0] is 1.5; an id must be an integer or a"),
        ([HEADER, '{"time": 1, "keys": [""]}'], "keys[0] is an empty text"),
        ([HEADER, '{"time": 1, "keys": [1], "tokens": -1}'], "line 2: tokens is -1"),
        ([HEADER, '{"time": 1, "keys": [1], "output_tokens": "x"}'], "output_tokens is 'x'"),
        ([HEADER, '{"time": 1, "keys": [1]}', '{"time": 0.5, "keys": [1]}'], "line 3: its time"),
        ([HEADER, '{"time": 1, "keys": []}'], "1 requests, none with a page"),
    ],
)
def test_our_format_is_checked(tmp_path: Path, lines: list[str], message: str) -> None:
    assert message in message_of(write(tmp_path, *lines))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1,a", "0.5,b"], "line 2: its time is 0.5 s, before the 1 s"),
        (["1,a", "x,b"], "line 2: its time is 'x'; it must be a number"),
        (["1,a", "nan,b"], "line 2: its time is nan; it must be finite"),
        (["-1,a"], "line 1: its time is -1.0"),
        (["1,a", "b"], "line 2: 1 columns, where line 1 has 2"),
        (["a", "b,1"], "line 2: 2 columns, where line 1 has 1"),
        (["a,b,c"], "line 1: 3 columns"),
        (["time,key", "1,"], "line 2: its key is empty"),
        (['"a', "b"], "line 1: no CSV"),
        (["key"], "is empty: it holds no request"),
    ],
)
def test_csv_is_checked(tmp_path: Path, lines: list[str], message: str) -> None:
    assert message in message_of(write(tmp_path, *lines, name="keys.csv"))


def test_a_json_file_is_never_taken_for_csv(tmp_path: Path) -> None:
    assert "line 1: no JSON" in message_of(write(tmp_path, "a", "b", name="trace.json"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\n \n\n", "is empty"),
        (gzip.compress(b""), "is empty"),
        (b"\x28\xb5\x2f\xfd\0\0\0", "is a zstd file: unpack it"),
        (b"a\nb\xff\n", "line 2: byte 0xff is no UTF-8"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "line 1: byte 0x89 is no UTF-8"),
        (b"a\n\0\n", "line 2: has zero bytes"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(data)
    assert message in message_of(path)


def test_a_giant_line_is_refused_before_it_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.trace_lines.MAX_LINE_NBYTES", 1000)
    path = write(tmp_path, mooncake(0, [1]), mooncake(0, list(range(500))))
    assert "line 2: longer than 1,000 bytes" in message_of(path)
    path.write_bytes(gzip.compress(b"a" * 10**6))
    assert "line 1: longer than 1,000 bytes" in message_of(path)


def test_a_file_that_is_not_there_and_a_folder_are_errors(tmp_path: Path) -> None:
    assert "No such file" in message_of(tmp_path / "nowhere")
    assert "Is a directory" in message_of(tmp_path)


def test_a_page_behind_two_others_is_a_warning(tmp_path: Path) -> None:
    trace = read_trace(
        write(tmp_path, mooncake(0, [1, 2, 3]), mooncake(0, [2, 3]), mooncake(0, [1, 3]))
    )
    (warning,) = trace.warnings
    assert "2 times a page comes behind another one" in warning
    assert "2 in line 2" in warning
    assert not trace.is_prefix_closed
    (batch,) = trace.requests(trace.keys())
    keys = trace.keys()
    assert batch[1] == ([keys[1], keys[2]], [keys[0], keys[1]])
    assert batch[2] == ([keys[0], keys[2]], [ROOT, keys[1]])


def test_a_part_is_a_trace_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, *(mooncake(n, [7, 20 + 2 * n, 21 + 2 * n]) for n in range(3000)))
    trace = read_trace(path)
    part = trace.part(1200, 3000)
    assert (part.num_requests, part.num_pages, part.num_distinct) == (1800, 5400, 3601)
    assert part.parents[:5].tolist() == [-1, 0, 1, 0, 3]
    assert part.times[0] == 0
    assert runs_of(part)[:2] == [[0, 1, 2], [0, 3, 4]]
    whole = trace.part(0, 3000)
    assert np.array_equal(whole.pages, trace.pages)
    assert np.array_equal(whole.parents, trace.parents)


def test_requests_come_in_batches_with_parents(tmp_path: Path) -> None:
    path = write(tmp_path, *(mooncake(n, [7, 20 + n]) for n in range(2500)), mooncake(3000, []))
    trace = read_trace(path)
    keys = trace.keys()
    assert len(set(keys)) == trace.num_distinct
    assert all(len(key) == 32 for key in keys)
    batches = list(trace.requests(keys))
    assert sum(len(batch) for batch in batches) == 2501
    assert batches[-1][-1] == ([], [])
    assert batches[1][0] == ([keys[0], keys[1025]], [ROOT, keys[0]])


def test_reading_tells_how_far_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, *(mooncake(n, [n]) for n in range(10_000)))
    told: list[tuple[int, int]] = []
    read_trace(path, progress=lambda done, total: told.append((done, total)))
    assert len(told) == 3
    assert told == sorted(told)
    assert told[-1] == (path.stat().st_size, path.stat().st_size)
