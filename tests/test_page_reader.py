import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_samples import (
    Array,
    as_arrays,
    make_smooth_pages,
    make_spec,
    same_bits,
    serve_nothing_now,
)

from pagedkv import disk_threads, files
from pagedkv import segment as segment_module
from pagedkv.codec import Codec, Lossless, Raw
from pagedkv.errors import ClosedError, StoreError, StoreTimeoutError
from pagedkv.files import Bytes
from pagedkv.format import Geometry
from pagedkv.lane import Segment
from pagedkv.memory import PageArrays
from pagedkv.page_reader import PageReader, SegmentRead
from pagedkv.segment import SegmentFormat

SPEC = make_spec()
NUM_PAGES = 8


class Sample:
    """Two segment files of eight pages each."""

    def __init__(self, folder: Path, codec: Codec) -> None:
        self.form = SegmentFormat(SPEC, codec, Geometry.of(SPEC, codec, rows=NUM_PAGES))
        self.pages: list[list[Array]] = []
        self.segments: list[Segment] = []
        self.maps = []
        for number in range(2):
            pages = make_smooth_pages(SPEC, NUM_PAGES, seed=number)
            path = folder / f"segment-{number}"
            with path.open("wb") as file:
                arrays = as_arrays(SPEC, pages)
                self.maps.append(self.form.write(file.fileno(), arrays, 0, NUM_PAGES))
            self.pages.append(pages)
            self.segments.append(Segment(number, path, (None,) * NUM_PAGES))

    def wanted(self, asked: list[list[int]], layer: int | None = None) -> list[SegmentRead]:
        """Rows of the two segments, in order; the pages' numbers count on."""
        reads, first = [], 0
        for number, rows in enumerate(asked):
            reads.append(
                SegmentRead(
                    form=self.form,
                    segment=self.segments[number],
                    segment_map=self.maps[number],
                    rows=np.array(rows, np.int64),
                    numbers=np.arange(first, first + len(rows)),
                    layer=layer,
                )
            )
            first += len(rows)
        return [read for read in reads if len(read.rows)]

    def read(
        self,
        reader: PageReader,
        asked: list[list[int]],
        layer: int | None = None,
        timeout: float | None = None,
    ) -> tuple[list[int], list[Array]]:
        out = self.out(asked, layer)
        pages = self.arrays(out, layer)
        return reader.read(self.wanted(asked, layer), pages, timeout), out

    def out(self, asked: list[list[int]], layer: int | None = None) -> list[Array]:
        shape = SPEC.page_shape if layer is None else SPEC.layer_shape
        return [np.full(shape, 7, np.float32) for rows in asked for _ in rows]

    def arrays(self, out: list[Array], layer: int | None = None) -> PageArrays:
        shape = SPEC.page_shape if layer is None else SPEC.layer_shape
        return PageArrays(out, None, shape, SPEC.np_dtype, "out")

    def expected(self, asked: list[list[int]], layer: int | None = None) -> list[Array]:
        pages = [self.pages[number][row] for number, rows in enumerate(asked) for row in rows]
        return pages if layer is None else [page[layer] for page in pages]


@pytest.fixture(params=[Raw(), Lossless()], ids=str)
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Sample:
    return Sample(tmp_path, request.param)


@pytest.fixture(params=["cached", "cold", "direct"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageReader]:
    if request.param == "cold":
        serve_nothing_now(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    reader = PageReader(num_threads=2, direct=request.param == "direct")
    yield reader
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


class Hanging:
    """A disk that does not answer until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.asked = threading.Event(), threading.Event()
        really_read = files.pread_into

        def pread_into(fd: int, out: Bytes, offset: int) -> int:
            self.asked.set()
            self.answers.wait()
            return really_read(fd, out, offset)

        serve_nothing_now(monkeypatch)
        monkeypatch.setattr(files, "pread_into", pread_into)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    hanging = Hanging(monkeypatch)
    yield hanging
    hanging.answers.set()


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


ASKED = [
    [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]],
    [[7], [0]],
    [[], [3]],
    [[0, 3, 7], [2, 2, 5]],
    [[1, 1], []],
]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("piece_nbytes", [500, 2000, 2**20])
def test_pages_of_several_segments_are_read(
    sample: Sample,
    reader: PageReader,
    monkeypatch: pytest.MonkeyPatch,
    asked: list[list[int]],
    piece_nbytes: int,
) -> None:
    monkeypatch.setattr(segment_module, "PIECE_NBYTES", piece_nbytes)
    monkeypatch.setattr(segment_module, "EXTENT_NBYTES", 4 * piece_nbytes)
    for layer in (None, 0, 2):
        damaged, out = sample.read(reader, asked, layer, timeout=30)
        assert damaged == []
        assert same_bits(out, sample.expected(asked, layer))


@pytest.mark.parametrize("piece_nbytes", [500, 1000])
def test_a_large_page_is_read_twice_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_nbytes: int
) -> None:
    sample = Sample(tmp_path, Raw())
    serve_nothing_now(monkeypatch)
    monkeypatch.setattr(segment_module, "PIECE_NBYTES", piece_nbytes)
    monkeypatch.setattr(segment_module, "EXTENT_NBYTES", 1200)
    reader = PageReader(num_threads=2, direct=False)
    damaged, out = sample.read(reader, [[1, 1, 4], []])
    reader.close()
    assert damaged == []
    assert same_bits(out, sample.expected([[1, 1, 4], []]))


def test_nothing_is_read_if_nothing_is_wanted(sample: Sample, reader: PageReader) -> None:
    assert sample.read(reader, [[], []]) == ([], [])


def test_damaged_pages_are_told_and_others_read(sample: Sample, reader: PageReader) -> None:
    start = int(sample.form.extents(sample.maps[1])[0][4])
    with sample.segments[1].path.open("r+b") as file:
        file.seek(start + 5)
        byte = file.read(1)
        file.seek(start + 5)
        file.write(bytes([byte[0] ^ 1]))
    asked = [[0, 4], [3, 4, 4, 5]]
    damaged, out = sample.read(reader, asked)
    assert damaged == [3, 4]
    expected = sample.expected(asked)
    assert same_bits(out[:3] + out[5:], expected[:3] + expected[5:])


def test_pages_beyond_the_end_of_a_file_are_damaged(sample: Sample, reader: PageReader) -> None:
    end = int(sample.form.extents(sample.maps[0])[1][4])
    os.truncate(sample.segments[0].path, end - 3)
    asked = [[3, 4, 5, 7], [0]]
    damaged, out = sample.read(reader, asked)
    assert damaged == [1, 2, 3]
    expected = sample.expected(asked)
    assert same_bits([out[0], out[4]], [expected[0], expected[4]])


def test_all_pages_of_an_empty_file_are_damaged(sample: Sample, reader: PageReader) -> None:
    os.truncate(sample.segments[0].path, 0)
    assert sample.read(reader, [[0, 7], [1]])[0] == [0, 1]


@pytest.mark.parametrize("instead", ["nothing", "link", "folder", "pipe"])
def test_pages_of_a_file_that_is_none_are_damaged(
    sample: Sample, reader: PageReader, instead: str, tmp_path: Path
) -> None:
    path = sample.segments[0].path
    path.rename(tmp_path / "moved")
    if instead == "link":
        path.symlink_to(tmp_path / "moved")
    elif instead == "folder":
        path.mkdir()
    elif instead == "pipe":
        os.mkfifo(path)
    asked = [[0, 1], [2]]
    damaged, out = sample.read(reader, asked)
    assert damaged == [0, 1]
    assert same_bits(out[2:], sample.expected(asked)[2:])


def test_a_file_that_was_removed_is_read_until_it_is_forgotten(
    sample: Sample, reader: PageReader
) -> None:
    asked = [[0], []]
    sample.read(reader, asked)
    sample.segments[0].path.unlink()
    damaged, out = sample.read(reader, asked)
    assert damaged == []
    assert same_bits(out, sample.expected(asked))
    reader.forget(sample.segments[0])
    assert sample.read(reader, asked)[0] == [0]


@pytest.mark.parametrize("name", ["open_file", "pread_into"])
def test_a_broken_disk_is_an_error_that_names_the_file(
    sample: Sample, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise OSError(5, "Input/output error")

    serve_nothing_now(monkeypatch)
    reader = PageReader(num_threads=2, direct=False)
    with monkeypatch.context() as patch:
        patch.setattr(files, name, fail)
        message = f"cannot read .*{sample.segments[0].path.name}: Input/output error"
        with pytest.raises(StoreError, match=message):
            sample.read(reader, [[0, 1], []])
    assert sample.read(reader, [[0, 1], []])[0] == []
    reader.close()


def test_a_disk_that_hangs_is_given_up_and_writes_nothing_later(
    sample: Sample, hanging: Hanging
) -> None:
    reader = PageReader(num_threads=2, direct=False)
    asked = [[0, 1], [2]]
    out = sample.out(asked)
    with pytest.raises(StoreTimeoutError):
        reader.read(sample.wanted(asked), sample.arrays(out), 0.02)
    hanging.asked.wait()
    wait_until(lambda: reader.num_hung > 0)
    hanging.answers.set()
    wait_until(lambda: reader.num_hung == 0)
    assert all((page == 7).all() for page in out)
    damaged, out = sample.read(reader, asked, timeout=30)
    assert damaged == []
    assert same_bits(out, sample.expected(asked))
    reader.close()


def test_too_many_hung_reads_fail_at_once_and_cached_ones_do_not(
    sample: Sample, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_threads, "MAX_HUNG", 2)
    reader = PageReader(num_threads=1, direct=False)
    for _ in range(2):
        hung = reader.num_hung
        with pytest.raises(StoreTimeoutError):
            sample.read(reader, [[0], []], timeout=0.02)
        wait_until(lambda hung=hung: reader.num_hung > hung)
    with pytest.raises(StoreTimeoutError, match="2 reads hang"):
        sample.read(reader, [[0], []], timeout=None)
    monkeypatch.setattr(files, "pread_now", lambda fd, out, at: os.preadv(fd, [out.data], at))
    assert sample.read(reader, [[0], []], timeout=None)[0] == []
    hanging.answers.set()
    reader.close()


def test_an_error_on_the_way_calls_off_what_is_queued(sample: Sample, hanging: Hanging) -> None:
    reader = PageReader(num_threads=1, direct=False)
    asked = [[0], [1]]
    out = sample.out(asked)

    def wanted() -> Iterator[SegmentRead]:
        yield from sample.wanted(asked)
        hanging.asked.wait()
        raise KeyError

    with pytest.raises(KeyError):
        reader.read(wanted(), sample.arrays(out), None)
    hanging.answers.set()
    wait_until(lambda: reader.num_hung == 0)
    assert sample.read(reader, [[2], []], timeout=30)[0] == []
    assert all((page == 7).all() for page in out)
    reader.close()


def test_after_closing_only_what_is_cached_might_be_read(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_nothing_now(monkeypatch)
    reader = PageReader(num_threads=1, direct=True)
    sample.read(reader, [[0], []])
    reader.close()
    with pytest.raises(ClosedError):
        sample.read(reader, [[0], []])


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def refuse_direct(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return really_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse_direct)
    reader = PageReader(num_threads=1, direct=True)
    damaged, out = sample.read(reader, [[0, 1], [7]])
    reader.close()
    assert damaged == []
    assert same_bits(out, sample.expected([[0, 1], [7]]))


def test_threads_read_at_once(sample: Sample, reader: PageReader) -> None:
    wrong: list[BaseException] = []

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(40):
                asked = [np.sort(rng.integers(0, 8, rng.integers(1, 6))).tolist() for _ in "ab"]
                damaged, out = sample.read(reader, asked, timeout=60)
                assert damaged == []
                assert same_bits(out, sample.expected(asked))
        except BaseException as error:  # noqa: BLE001 - told below
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
