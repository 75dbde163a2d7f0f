"""What opening a store checks, finds or makes, and takes."""

from pathlib import Path

import pytest
from store_samples import make_spec

from pagedkv import opening
from pagedkv.codec import Raw
from pagedkv.errors import SpecMismatchError, StoreError, StoreLockedError
from pagedkv.header import StoreHeader
from pagedkv.lane_lock import LaneLock
from pagedkv.root import read_header
from pagedkv.spec import KVSpec
from pagedkv.store import PageStore

pytestmark = pytest.mark.usefixtures("no_fsync")

SPEC = make_spec()


def find(path: Path, spec: KVSpec | None = SPEC, *, make: bool = True) -> StoreHeader:
    return opening.find_header(path, spec, None, None, store_tokens=True, make=make)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.zarr"


def test_a_header_is_made_only_if_it_may(path: Path) -> None:
    with pytest.raises(StoreError, match=f"no store at {path}"):
        find(path, make=False)
    assert not path.exists()
    with pytest.raises(ValueError, match="give the spec"):
        find(path, None)
    assert not path.exists()
    header = find(path)
    assert (header.specs, header.codec) == ((SPEC,), Raw())
    assert find(path, None, make=False) == header == read_header(path)


def test_a_header_of_another_spec_is_refused(path: Path) -> None:
    find(path)
    with pytest.raises(SpecMismatchError):
        find(path, make_spec(head_dim=16))


def test_a_lane_is_kept_after_the_block_and_given_back_if_it_raises(path: Path) -> None:
    header = find(path)
    with pytest.raises(ZeroDivisionError), opening.lane_taken(path, header, None) as (_, lock):
        assert lock.lane == 0
        assert LaneLock.try_take(path, 0) is None
        raise ZeroDivisionError
    with opening.lane_taken(path, header, None) as (same, lock):
        assert (lock.lane, same) == (0, header)
    assert LaneLock.try_take(path, 0) is None
    lock.release()
    again = LaneLock.try_take(path, 0)
    assert again is not None
    again.release()


def test_a_new_bound_is_written_while_a_lane_is_taken(path: Path) -> None:
    with opening.lane_taken(path, find(path), 10**6) as (header, lock):
        assert header.max_nbytes == 10**6
        assert read_header(path) == header
    lock.release()


def test_a_process_that_writes_the_store_already_gets_no_other_lane(path: Path) -> None:
    with PageStore.open(path, SPEC) as store, pytest.raises(StoreLockedError):
        with opening.lane_taken(path, find(path), None):
            raise AssertionError
    assert store.is_closed
    assert not (path / "lane-0001").exists()
