import logging
import os
import random
from pathlib import Path

import google_crc32c
import pytest
from store_samples import make_key

from pagedkv import files
from pagedkv.evictions import (
    EVICTED_NBYTES,
    EVICTED_SHAPE,
    NUM_ENTRIES,
    EvictedPage,
    EvictionReason,
    EvictionRing,
    decode,
    encode,
)

REASONS = list(EvictionReason)


def make_evicted(number: int) -> EvictedPage:
    return EvictedPage(
        key=make_key(number), time_ns=10**18 + number, reason=REASONS[number % len(REASONS)]
    )


def test_pages_survive_the_chunk() -> None:
    for count in (0, 1, 5, NUM_ENTRIES):
        pages = [make_evicted(number) for number in range(count)]
        chunk = encode(pages)
        assert len(chunk) == EVICTED_NBYTES == EVICTED_SHAPE[0] * EVICTED_SHAPE[1] == 49_152
        assert decode(chunk) == pages


def test_the_bytes_of_a_record() -> None:
    page = EvictedPage(key=make_key(3), time_ns=0x0102, reason=EvictionReason.DEAD_PARENT)
    record = encode([page])[:48]
    assert record[:44] == make_key(3) + bytes([2, 1, 0, 0, 0, 0, 0, 0]) + bytes([2, 0, 0, 0])
    assert record[44:] == google_crc32c.value(record[:44]).to_bytes(4, "little")


def test_the_oldest_fall_out_of_a_full_ring(tmp_path: Path) -> None:
    ring = EvictionRing(tmp_path)
    for start in range(0, 1500, 300):
        keys = [make_key(number) for number in range(start, start + 300)]
        ring.add(keys, EvictionReason.CAPACITY, start)
    wanted = [make_key(number) for number in reversed(range(1500 - NUM_ENTRIES, 1500))]
    assert [page.key for page in ring.entries()] == wanted
    assert ring.entries()[0] == EvictedPage(
        key=make_key(1499), time_ns=1200, reason=EvictionReason.CAPACITY
    )
    assert os.listdir(tmp_path) == ["c.0.0"]


def test_more_keys_than_the_ring_has_places_leave_the_last(tmp_path: Path) -> None:
    ring = EvictionRing(tmp_path)
    ring.add((make_key(number) for number in range(1100)), EvictionReason.GC, 5)
    assert [page.key for page in ring.entries()] == [make_key(n) for n in range(1099, 75, -1)]


def test_nothing_evicted_writes_nothing(tmp_path: Path) -> None:
    EvictionRing(tmp_path).add([], EvictionReason.GC, 5)
    assert os.listdir(tmp_path) == []
    assert EvictionRing(tmp_path).entries() == []
    assert EvictionRing(tmp_path / "missing").entries() == []


def test_random_damage_costs_only_the_records_it_hits() -> None:
    rng = random.Random(5)
    pages = [make_evicted(number) for number in range(NUM_ENTRIES)]
    chunk = encode(pages)
    for _ in range(100):
        damaged = bytearray(chunk)
        at, length = rng.randrange(len(chunk)), rng.randrange(1, 200)
        damaged[at : at + length] = rng.randbytes(min(length, len(chunk) - at))
        first, last = at // 48, min(at + length - 1, len(chunk) - 1) // 48
        found = decode(bytes(damaged))
        assert found[:first] == pages[:first]
        assert set(pages[:first] + pages[last + 1 :]) <= set(found) <= set(pages)


@pytest.mark.parametrize("length", [0, 1, 47, 48, 100, EVICTED_NBYTES + 100])
def test_a_chunk_of_a_wrong_length_gives_its_whole_records(length: int) -> None:
    pages = [make_evicted(number) for number in range(NUM_ENTRIES)]
    chunk = (encode(pages) + bytes(200))[:length]
    assert decode(chunk) == pages[: length // 48]


def test_an_unknown_reason_is_no_entry() -> None:
    record = bytearray(encode([make_evicted(0), make_evicted(1)]))
    record[40:44] = (9).to_bytes(4, "little")
    record[44:48] = google_crc32c.value(bytes(record[:44])).to_bytes(4, "little")
    assert decode(bytes(record)) == [make_evicted(1)]


def test_a_damaged_ring_is_written_anew(tmp_path: Path) -> None:
    ring = EvictionRing(tmp_path)
    (tmp_path / "c.0.0").symlink_to(tmp_path / "elsewhere")
    assert ring.entries() == []
    ring.add([make_key(1)], EvictionReason.DAMAGED, 5)
    assert [page.key for page in ring.entries()] == [make_key(1)]
    assert not (tmp_path / "elsewhere").exists()


def test_a_ring_that_cannot_be_written_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ring = EvictionRing(tmp_path)
    ring.add([make_key(1)], EvictionReason.GC, 5)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "pwrite_all", fail)
    with caplog.at_level(logging.WARNING, "pagedkv"):
        ring.add([make_key(2)], EvictionReason.GC, 6)
    assert "No space left" in caplog.text
    assert [page.key for page in ring.entries()] == [make_key(1)]
    assert os.listdir(tmp_path) == ["c.0.0"]
