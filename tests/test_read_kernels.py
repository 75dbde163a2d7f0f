"""Records read from files by kernels: equal to what was written, whatever the system answers."""

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_samples import Array, as_arrays, empty_like, make_smooth_pages, make_spec, same_bits

from pagedkv import files, read_kernels
from pagedkv.codec import FiledRecords, FixedCodec, Int8, Raw
from pagedkv.file_ranges import read_ranges
from pagedkv.format import Geometry
from pagedkv.memory import PageArrays
from pagedkv.segment import SegmentFormat
from pagedkv.spec import KVSpec

NUM_PAGES = 6
SPECS = {
    "small": make_spec(),
    "tiny": make_spec(num_layers=1, num_kinds=1, page_tokens=1, num_kv_heads=1, head_dim=15),
    "long": make_spec(num_layers=5, page_tokens=16, head_dim=64),
    "half": make_spec(dtype="float16", head_dim=40),
    "brain": make_spec(dtype="bfloat16", page_tokens=16, head_dim=64),
}
CODECS = [Raw(), Int8(), Int8(key_scales="token", value_scales="channel")]

PREADV2 = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_int
)
FLAGS = 77  # so that a test sees them


class IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Sample:
    """Two segment files, and a system that reads from them as it is told."""

    def __init__(self, folder: Path, spec: KVSpec, codec: FixedCodec) -> None:
        self.form = SegmentFormat(spec, codec, Geometry.of(spec, codec, rows=NUM_PAGES))
        self.codec = codec
        self.pages: list[Array] = []
        self.fds: list[int] = []
        self.crcs = []
        for number in range(2):
            pages = make_smooth_pages(spec, NUM_PAGES, seed=number)
            fd = os.open(folder / str(number), os.O_RDWR | os.O_CREAT)
            self.crcs.append(self.form.write(fd, as_arrays(spec, pages), 0, NUM_PAGES).crcs)
            self.fds.append(fd)
            self.pages += pages
        self.asked: list[tuple[int, int, int]] = []
        self.answer: Callable[[int, int], int] = lambda nbytes, number: nbytes
        self._function = PREADV2(self._preadv2)

    def _preadv2(self, fd: int, vector: int, count: int, offset: int, flags: int) -> int:
        target = IoVec.from_address(vector)
        assert (count, flags) == (1, FLAGS)
        self.asked.append((fd, offset, target.nbytes))
        nbytes = self.answer(target.nbytes, len(self.asked) - 1)
        if nbytes > 0:
            memory = (ctypes.c_char * nbytes).from_address(target.base)
            return os.preadv(fd, [memory], offset)
        return nbytes

    def read(
        self,
        numbers: list[int],
        *,
        layer: int | None = None,
        max_misses: int = 4,
        buffer_nbytes: int = 2**16,
        address: int | None = None,
        flags: int = FLAGS,
    ) -> tuple[list[Array], list[bool], list[bool], int]:
        """Read pages; what came, whether each was read, and is good, and the misses."""
        form = self.form
        out = empty_like([self.pages[n] if layer is None else self.pages[n][0] for n in numbers])
        shape = form.page_shape if layer is None else form.layer_shape
        memory = PageArrays(out, None, shape, form.dtype, "out").memory
        files_of, rows = np.divmod(np.array(numbers, np.int64), NUM_PAGES)
        if address is None:
            address = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        source = FiledRecords(
            function=address,
            flags=flags,
            fds=np.array(self.fds, np.int64)[files_of],
            offsets=rows * form.page_nbytes,
            max_misses=max_misses,
            buffer=np.zeros(max(buffer_nbytes, form.chunk_nbytes) + 4096, np.uint8),
            chunk_nbytes=form.chunk_nbytes,
        )
        crcs = np.stack([self.crcs[f][r] for f, r in zip(files_of, rows, strict=True)])
        good, was_read = np.ones(len(numbers), np.bool_), np.zeros(len(numbers), np.bool_)
        misses = form.read_now(source, layer, memory, crcs, good, was_read)
        return out, was_read.tolist(), good.tolist(), misses

    def expected(self, numbers: list[int], layer: int | None = None) -> list[Array]:
        """What was written, decoded again."""
        pages = empty_like([self.pages[n] for n in numbers])
        codec, spec = self.codec, self.form.spec
        payload = np.empty(codec.layer_nbytes(spec), np.uint8)
        for page, number in zip(pages, numbers, strict=True):
            for out, numbers_of_layer in zip(page, self.pages[number], strict=True):
                codec.encode(spec, numbers_of_layer, payload)
                codec.decode(spec, payload, out)
        return pages if layer is None else [page[layer] for page in pages]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str, Any], Sample]]:
    made: list[Sample] = []

    def make_sample(name: str, codec: Any) -> Sample:
        made.append(Sample(tmp_path, SPECS[name], codec))
        return made[-1]

    yield make_sample
    for sample in made:
        sample.close()


Make = Callable[[str, Any], Sample]


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("buffer_nbytes", [1, 1000, 2**17])
def test_pages_and_layers_are_read_as_they_were_written(
    make: Make, name: str, codec: Any, buffer_nbytes: int
) -> None:
    sample = make(name, codec)
    last = SPECS[name].held_layers - 1
    for numbers in ([3], [0, 1, 2, 3, 4, 5], [0, 2, 3, 7, 11], [9, 9, 1], list(range(12))):
        for layer in (None, 0, last):
            found = sample.read(numbers, layer=layer, buffer_nbytes=buffer_nbytes)
            count = len(numbers)
            assert found[1:] == ([True] * count, [True] * count, 0)
            assert same_bits(found[0], sample.expected(numbers, layer))


def test_neighbours_are_read_together_as_far_as_there_is_memory(make: Make) -> None:
    sample = make("small", Raw())
    nbytes, (first, second) = sample.form.page_nbytes, sample.fds
    sample.read([0, 1, 3, 6, 7], buffer_nbytes=10 * nbytes)
    assert sample.asked == [(first, 0, 4 * nbytes), (second, 0, 2 * nbytes)]
    sample.asked.clear()
    sample.read([0, 1, 3], buffer_nbytes=2 * nbytes)
    assert sample.asked == [(first, 0, 2 * nbytes), (first, 3 * nbytes, nbytes)]
    sample.asked.clear()
    sample.read([0], buffer_nbytes=nbytes - 1)  # two of three layers, and then the third
    chunk = sample.form.chunk_nbytes
    assert sample.asked == [(first, 0, 2 * chunk), (first, 2 * chunk, chunk)]


@pytest.mark.parametrize("codec", CODECS[:2], ids=str)
@pytest.mark.parametrize(
    "answer", [lambda n: -1, lambda n: 0, lambda n: n - 1], ids=["error", "nothing", "short"]
)
def test_what_the_system_does_not_give_at_once_was_not_read(
    make: Make, codec: Any, answer: Callable[[int], int]
) -> None:
    sample = make("small", codec)
    sample.answer = lambda nbytes, number: answer(nbytes) if number == 1 else nbytes
    out, was_read, good, misses = sample.read([0, 6, 7, 1])
    assert was_read == [True, False, False, True]
    assert misses == 1
    assert same_bits([out[0], out[3]], sample.expected([0, 1]))
    assert good[0]
    assert good[3]


def test_a_page_of_which_only_the_beginning_came_was_not_read(make: Make) -> None:
    sample = make("small", Raw())
    sample.answer = lambda nbytes, number: nbytes if number != 1 else -1
    _, was_read, _, misses = sample.read([0, 8], buffer_nbytes=1)
    assert (was_read, misses) == ([False, True], 1)


def test_after_some_misses_no_more_is_tried(make: Make) -> None:
    sample = make("small", Raw())
    sample.answer = lambda nbytes, number: -1 if number in (1, 2) else nbytes
    numbers = [0, 6, 1, 7, 2]
    _, was_read, _, misses = sample.read(numbers, max_misses=2)
    assert (was_read, misses) == ([True, False, False, False, False], 2)
    assert len(sample.asked) == 3
    sample.asked.clear()
    assert sample.read(numbers, max_misses=0)[1] == [False] * 5
    assert sample.asked == []


@pytest.mark.parametrize("codec", CODECS[:2], ids=str)
@pytest.mark.parametrize("layer", [None, 2])
def test_damaged_pages_are_told_and_no_others(make: Make, codec: Any, layer: int | None) -> None:
    sample = make("small", codec)
    place = 4 * sample.form.page_nbytes + 2 * sample.form.chunk_nbytes + 5
    byte = os.pread(sample.fds[0], 1, place)[0]
    os.pwrite(sample.fds[0], bytes([byte ^ 16]), place)
    numbers = [3, 4, 5, 10]
    out, was_read, good, _ = sample.read(numbers, layer=layer)
    assert was_read == [True] * 4
    assert good == [True, False, True, True]
    del out[1], numbers[1]
    assert same_bits(out, sample.expected(numbers, layer))


@pytest.mark.skipif(not files.preadv2_address(), reason="this system has no such function")
def test_the_system_s_own_function_does_the_same(make: Make) -> None:
    sample = make("long", Int8())
    numbers = list(range(12))
    out, was_read, good, misses = sample.read(numbers, address=files.preadv2_address(), flags=0)
    assert (all(was_read), all(good), misses) == (True, True, 0)
    assert same_bits(out, sample.expected(numbers))
    os.ftruncate(sample.fds[0], 5 * sample.form.page_nbytes + 1)
    address = files.preadv2_address()
    assert not sample.read([5], address=address, flags=0)[1][0]


@pytest.mark.parametrize("advise", [False, True])
def test_parts_of_a_file_are_read_until_one_is_not_whole(tmp_path: Path, *, advise: bool) -> None:
    path = tmp_path / "file"
    content = np.random.default_rng(0).bytes(10_000)
    path.write_bytes(content)
    starts = np.array([5000, 0, 9000, 9500, 10], np.int64)
    lengths = np.array([100, 4096, 1000, 600, 7], np.int64)  # the fourth goes beyond the end
    targets = np.array([4200, 50, 5000, 6100, 8000], np.int64)
    memory, num_read = np.zeros(9000, np.uint8), np.zeros(5, np.int64)
    with path.open("rb") as file:
        done = read_kernels.read_ranges(
            files.preadv2_address(),
            files.fadvise_address() if advise else 0,
            file.fileno(),
            starts,
            lengths,
            memory,
            targets,
            num_read,
        )
        assert done == 3
        assert num_read.tolist() == [100, 4096, 1000, 0, 0]
        for start, length, target in zip(starts[:3], lengths[:3], targets[:3], strict=True):
            assert memory[target : target + length].tobytes() == content[start : start + length]
        assert not memory[8000:].any()
        read_ranges(file.fileno(), starts, lengths, memory, targets, num_read)
    assert num_read.tolist() == [100, 4096, 1000, 500, 7]
    assert memory[6100:6600].tobytes() == content[9500:]
    assert memory[8000:8007].tobytes() == content[10:17]
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_ranges(-1, starts, lengths, memory, targets, num_read)
