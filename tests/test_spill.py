"""SpillFile: records come back bit for bit, or not at all."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_samples import bits, make_page, make_spec, not_writable

from pagedkv import CorruptPageError, StoreError, StoreFullError, StoreTimeoutError, files
from pagedkv.spill import SpillFile

SPEC = make_spec(num_layers=3)


class Budget:
    """Counts what is reserved, and refuses beyond a bound."""

    def __init__(self, max_nbytes: float = float("inf")) -> None:
        self.max_nbytes = max_nbytes
        self.used = 0

    def __call__(self, nbytes: int) -> None:
        if self.used + nbytes > self.max_nbytes:
            raise StoreFullError(f"no room for {nbytes}")
        self.used += nbytes


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[SpillFile]:
    spill = SpillFile(SPEC, tmp_path, Budget())
    yield spill
    spill.close()


def read(spill: SpillFile, record: int) -> bytes:
    out = np.full(SPEC.page_shape, 7, SPEC.np_dtype)
    spill.read_page(record, out)
    return bits(out)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_all_bits_come_back(tmp_path: Path, dtype: str) -> None:
    spec = make_spec(dtype=dtype)
    spill = SpillFile(spec, tmp_path, Budget())
    raw = np.random.default_rng(0).bytes(spec.page_nbytes)  # NaN and infinity among them
    page = np.frombuffer(raw, spec.np_dtype).reshape(spec.page_shape)
    (record,) = spill.allocate(1)
    spill.write_page(record, page)
    out = np.empty_like(page)
    spill.read_page(record, out)
    assert bits(out) == raw
    spill.close()


def test_strided_pages_are_written_and_read(spill: SpillFile) -> None:
    pool = np.zeros((3, 2, 5, 4, 1, 2), np.float32)
    pool[:, :, 3] = make_page(SPEC, 1)
    (record,) = spill.allocate(1)
    spill.write_page(record, pool[:, :, 3])
    spill.read_page(record, pool[:, :, 1])
    assert bits(pool[:, :, 1]) == bits(make_page(SPEC, 1))
    assert not pool[:, :, [0, 2, 4]].any()


def test_layers_that_were_never_written_read_as_zeros(spill: SpillFile) -> None:
    (record,) = spill.allocate(1)
    spill.write_layer(record, 1, make_page(SPEC, 1)[1])
    out = np.full(SPEC.page_shape, 7, np.float32)
    spill.read_page(record, out)
    assert not out[[0, 2]].any()
    assert bits(out[1]) == bits(make_page(SPEC, 1)[1])


def test_a_reused_record_shows_nothing_of_its_last_page(spill: SpillFile) -> None:
    (record,) = spill.allocate(1)
    spill.write_page(record, make_page(SPEC, 1))
    spill.free(record)
    assert spill.allocate(1) == [record]
    assert not any(read(spill, record))
    assert spill.nbytes == SPEC.page_nbytes


def test_the_file_has_no_name_and_is_private(tmp_path: Path) -> None:
    spill = SpillFile(SPEC, tmp_path, Budget())
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(spill._fd).st_mode & 0o077 == 0
    spill.close()


def test_growth_is_reserved_and_reuse_is_not(tmp_path: Path) -> None:
    budget = Budget()
    spill = SpillFile(SPEC, tmp_path, budget)
    records = spill.allocate(3)
    assert budget.used == spill.nbytes == 3 * SPEC.page_nbytes
    for record in records:
        spill.free(record)
    spill.allocate(2)
    assert budget.used == 3 * SPEC.page_nbytes
    spill.allocate(2)
    assert budget.used == spill.nbytes == 4 * SPEC.page_nbytes
    spill.close()


def test_a_bound_that_has_no_room_changes_nothing(tmp_path: Path) -> None:
    spill = SpillFile(SPEC, tmp_path, Budget(2 * SPEC.page_nbytes))
    (record,) = spill.allocate(1)
    with pytest.raises(StoreFullError):
        spill.allocate(2)
    assert (spill.num_used, spill.nbytes) == (1, SPEC.page_nbytes)
    assert len({record, *spill.allocate(1)}) == 2
    spill.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:10] + bytes([data[10] ^ 1]) + data[11:],
        lambda data: bytes(len(data)),
    ],
)
def test_damaged_bytes_are_refused_and_named(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    spill = SpillFile(SPEC, tmp_path, Budget())
    (record,) = spill.allocate(1)
    spill.write_page(record, make_page(SPEC, 1))
    fd = spill._fd
    data = damage(os.pread(fd, SPEC.page_nbytes, 0))
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
    with pytest.raises(CorruptPageError, match=str(tmp_path)):
        read(spill, record)
    spill.close()


def test_records_that_change_places_are_refused(tmp_path: Path) -> None:
    spill = SpillFile(SPEC, tmp_path, Budget())
    for record in spill.allocate(2):
        spill.write_page(record, make_page(SPEC, record))
    fd, size = spill._fd, SPEC.page_nbytes
    first, second = os.pread(fd, size, 0), os.pread(fd, size, size)
    os.pwrite(fd, second + first, 0)
    with pytest.raises(CorruptPageError):
        read(spill, 0)
    spill.close()


def test_a_failing_write_is_a_store_error_that_names_the_folder(
    spill: SpillFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (record,) = spill.allocate(1)
    spill.write_page(record, make_page(SPEC, 1))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "pwrite_all", full)
        with pytest.raises(StoreError, match=rf"{tmp_path}.*No space left"):
            spill.write_layer(record, 0, make_page(SPEC, 2)[0])
    assert read(spill, record) == bits(make_page(SPEC, 1))


def test_a_folder_that_cannot_be_written_is_named(public_folder: Path) -> None:
    with (
        not_writable(public_folder),
        pytest.raises(StoreError, match=rf"{public_folder}.*Permission denied"),
    ):
        SpillFile(SPEC, public_folder, Budget())


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="missing"):
        SpillFile(SPEC, tmp_path / "missing", Budget())


class SpillMachine(RuleBasedStateMachine):
    """Records against a dictionary of arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.spill = SpillFile(SPEC, Path("/tmp"), Budget())
        self.model: dict[int, np.ndarray] = {}
        self.next_number = 1

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        for record in self.spill.allocate(count):
            assert record not in self.model
            self.model[record] = np.zeros(SPEC.page_shape, np.float32)

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 9), layer=st.integers(0, 2))
    def write_layer(self, pick: int, layer: int) -> None:
        record = sorted(self.model)[pick % len(self.model)]
        values = make_page(SPEC, self.next_number)[layer]
        self.next_number += 1
        self.spill.write_layer(record, layer, values)
        self.model[record][layer] = values

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 9))
    def free(self, pick: int) -> None:
        record = sorted(self.model)[pick % len(self.model)]
        self.spill.free(record)
        del self.model[record]

    @invariant()
    def all_records_are_right(self) -> None:
        assert self.spill.num_used == len(self.model)
        for record, page in self.model.items():
            assert read(self.spill, record) == bits(page)

    def teardown(self) -> None:
        self.spill.close()


TestSpill = SpillMachine.TestCase


@pytest.fixture(params=["kernel", "disk threads", "no preadv2"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How records are read: at once, or by threads, which a kernel helps or not."""
    if request.param == "disk threads":
        monkeypatch.setattr(files, "NOW_FLAGS", 1 << 30)  # which the system does not know
    elif request.param == "no preadv2":
        monkeypatch.setattr(files, "preadv2_address", lambda: 0)
    return str(request.param)


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.usefixtures("way")
def test_a_layer_of_many_records_is_read_in_one_go(spill: SpillFile, *, is_strided: bool) -> None:
    records = spill.allocate(300)
    for record in records:
        spill.write_page(record, make_page(SPEC, record))
    chosen = np.random.default_rng(0).permutation(300)[:200]
    out = np.zeros((250, *SPEC.layer_shape), np.float32)
    if is_strided:  # the kinds of a page apart
        out = np.zeros((SPEC.num_kinds, 250, *SPEC.layer_shape[1:]), np.float32).swapaxes(0, 1)
    at = np.random.default_rng(1).permutation(250)[:200]
    spill.read_layers([records[n] for n in chosen], 1, out, at)
    for number, place in zip(chosen.tolist(), at.tolist(), strict=True):
        assert bits(out[place]) == bits(make_page(SPEC, records[number])[1])
    assert not out[np.setdiff1d(np.arange(250), at)].any()


@pytest.mark.usefixtures("way")
def test_one_damaged_record_among_many_is_refused(spill: SpillFile) -> None:
    records = spill.allocate(100)
    for record in records:
        spill.write_page(record, make_page(SPEC, record))
    os.pwrite(spill._fd, b"x", 70 * SPEC.page_nbytes + SPEC.layer_nbytes + 3)
    out = np.zeros((100, *SPEC.layer_shape), np.float32)
    spill.read_layers(records, 0, out)
    with pytest.raises(CorruptPageError, match="layer 1"):
        spill.read_layers(records, 1, out)


def test_a_read_that_hangs_is_given_up_and_writes_nothing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill = SpillFile(SPEC, tmp_path, Budget(), deadline=0.2)
    (record,) = spill.allocate(1)
    spill.write_page(record, make_page(SPEC, 1))
    go_on, has_ended = threading.Event(), threading.Event()
    read = files.pread_into

    def hang(*arguments: Any) -> int:
        assert go_on.wait(60)
        count = read(*arguments)
        has_ended.set()
        return count

    monkeypatch.setattr(files, "preadv2_address", lambda: 0)
    monkeypatch.setattr(files, "pread_into", hang)
    out = np.zeros((1, *SPEC.layer_shape), np.float32)
    with pytest.raises(StoreTimeoutError, match="spill file"):
        spill.read_layers([record], 0, out)
    go_on.set()
    assert has_ended.wait(60)
    assert not out.any()
    spill.read_layers([record], 0, out)
    assert bits(out[0]) == bits(make_page(SPEC, 1)[0])
    spill.close()


def test_a_held_record_is_free_when_it_is_let_go(spill: SpillFile) -> None:
    first, second = spill.allocate(2)
    spill.write_page(first, make_page(SPEC, 1))
    spill.hold([first, second])
    spill.hold([first])
    spill.free(first)
    assert spill.allocate(1) != [first]
    assert read(spill, first) == bits(make_page(SPEC, 1))
    spill.let_go([first, second])
    assert spill.allocate(1) != [first]
    spill.let_go([first])
    assert spill.allocate(1) == [first]
    assert not any(read(spill, first))
