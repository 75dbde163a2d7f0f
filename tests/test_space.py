import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import make_spec, python

from pagedkv import files, lane_document, root
from pagedkv.codec import Raw
from pagedkv.errors import StoreError, StoreFullError
from pagedkv.header import StoreHeader
from pagedkv.space import MARGIN_NBYTES, MOST_AHEAD_NBYTES, Space

MAX_NBYTES = 1_000_000
AHEAD = MAX_NBYTES // 256


def make_header(max_nbytes: int | None) -> StoreHeader:
    return StoreHeader.new((make_spec(),), Raw(), max_nbytes, store_tokens=True)


HEADER = make_header(MAX_NBYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store without lanes."""
    root.create(tmp_path / "x.zarr", HEADER)
    return tmp_path / "x.zarr"


@contextmanager
def owned(path: Path, lane: int = 0, header: StoreHeader = HEADER):
    """The space of a writer that holds its lane's lock."""
    folder = path / f"lane-{lane:04d}"
    files.make_dir(folder)
    fd = files.open_folder(folder)
    assert files.try_lock(fd)
    try:
        yield Space.open(path, header, lane, {"last_writer": {"pid": os.getpid()}})
    finally:
        os.close(fd)


def write(path: Path, space: Space, name: str, nbytes: int, lane: int = 0) -> None:
    space.reserve(nbytes)
    with (path / f"lane-{lane:04d}" / name).open("wb") as file:
        file.truncate(nbytes)
    space.release(nbytes, written=nbytes)


def disk_nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def claim_of(path: Path, lane: int = 0) -> int:
    claim = lane_document.read(path, lane).claimed_nbytes
    assert claim is not None
    return claim


def test_opening_writes_the_claim_the_header_and_what_the_writer_says(path: Path) -> None:
    with owned(path) as space:
        attributes = json.loads((path / "lane-0000" / "zarr.json").read_bytes())["attributes"]
        assert attributes["pagedkv"]["header"] == HEADER.to_dict()
        assert attributes["pagedkv"]["last_writer"] == {"pid": os.getpid()}
        assert claim_of(path) >= (path / "lane-0000" / "zarr.json").stat().st_size
        assert space.nbytes == disk_nbytes(path)
        assert space.own_nbytes == (path / "lane-0000" / "zarr.json").stat().st_size
        space.check_invariants()


def test_the_copy_of_the_header_is_that_of_the_root(path: Path) -> None:
    with owned(path, header=replace(HEADER, store_tokens=False)):
        assert lane_document.read(path, 0).attributes["header"] == HEADER.to_dict()


def test_everything_counts_against_the_bound(path: Path) -> None:
    with owned(path) as space:
        write(path, space, "file", 400_000)
        space.grow_scratch(200_000)
        space.reserve(300_000)
        room = space.room()
        assert room is not None
        assert 90_000 < room < 100_000
        with pytest.raises(
            StoreFullError, match=rf"x\.zarr has .*\({MAX_NBYTES - room}\) of .*\(1000000\) .*more"
        ):
            space.reserve(room + 1)
        assert space.nbytes == disk_nbytes(path) + 200_000
        assert space.scratch_nbytes == 200_000
        space.reserve(room)
        assert space.room() == 0
        space.check_invariants()


def test_what_has_no_room_changes_nothing(path: Path) -> None:
    with owned(path) as space:
        room, before = space.room(), (path / "lane-0000" / "zarr.json").read_bytes()
        assert room is not None
        for method in (space.reserve, space.grow_scratch):
            with pytest.raises(StoreFullError):
                method(room + 1)
        assert space.room() == room
        assert (path / "lane-0000" / "zarr.json").read_bytes() == before
        space.reserve(room)


def test_a_reservation_ends_as_bytes_or_as_room(path: Path) -> None:
    with owned(path) as space:
        room = space.room()
        space.reserve(600_000)
        assert space.room() < 400_000
        space.release(600_000)
        assert room - 30 < space.room() <= room + 30  # the claim has more digits
        write(path, space, "file", 600_000)
        with pytest.raises(StoreFullError):
            space.reserve(400_000)
        (path / "lane-0000" / "file").unlink()
        space.free(600_000)
        space.reserve(600_000)
        space.check_invariants()


def test_scratch_that_is_gone_is_room(path: Path) -> None:
    with owned(path) as space:
        space.grow_scratch(600_000)
        space.shrink_scratch(500_000)
        space.grow_scratch(500_000)
        assert space.scratch_nbytes == 600_000
        space.check_invariants()


def test_without_a_bound_there_is_always_room(tmp_path: Path) -> None:
    path, header = tmp_path / "y.zarr", make_header(None)
    root.create(path, header)
    with owned(path, header=header) as space:
        assert space.room() is None
        space.reserve(2**60)
        space.grow_scratch(2**60)
        space.release(2**60)
        assert space.nbytes == disk_nbytes(path) + 2**60
        write(path, space, "file", 100)
        assert claim_of(path) <= space.own_nbytes + 2 * MOST_AHEAD_NBYTES + MARGIN_NBYTES


def test_a_store_over_its_bound_opens_takes_nothing_but_is_not_at_fault_for_nothing(
    path: Path,
) -> None:
    with owned(path) as space:
        write(path, space, "file", 900_000)
    root.set_max_nbytes(path, 500_000)
    with owned(path) as space:
        assert space.max_nbytes == 500_000
        assert space.room() == 0
        space.reserve(0)
        with pytest.raises(StoreFullError):
            space.reserve(1)
        (path / "lane-0000" / "file").unlink()
        space.free(900_000)
        space.reserve(400_000)


def test_a_new_lane_without_room_for_its_document_is_refused(path: Path) -> None:
    with owned(path) as space:
        space.reserve(space.room() or 0)
        with pytest.raises(StoreFullError), owned(path, 1):
            pass
        assert os.listdir(path / "lane-0001") == []


def test_two_writers_share_the_bound(path: Path) -> None:
    with owned(path) as first, owned(path, 1) as second:
        write(path, first, "file", 600_000)
        with pytest.raises(StoreFullError):
            second.reserve(400_000)
        write(path, second, "file", 380_000, lane=1)
        assert second.nbytes <= MAX_NBYTES
        assert disk_nbytes(path) <= second.nbytes + AHEAD
        (path / "lane-0000" / "file").unlink()
        first.free(600_000)
        write(path, second, "more", 500_000, lane=1)
        with pytest.raises(StoreFullError):
            first.reserve(200_000)
        first.check_invariants()
        second.check_invariants()


def test_most_reservations_touch_no_document(path: Path) -> None:
    with owned(path) as space:
        documents = set()
        for number in range(200):
            write(path, space, f"file-{number}", AHEAD // 20)
            documents.add((path / "lane-0000" / "zarr.json").read_bytes())
        assert len(documents) <= 200 // 20 + 2
        assert space.nbytes == disk_nbytes(path)


def test_what_was_claimed_ahead_is_given_back_on_closing(path: Path) -> None:
    with owned(path) as space:
        write(path, space, "file", 10_000)
        space.grow_scratch(5_000)
        assert claim_of(path) > space.own_nbytes + MARGIN_NBYTES
        space.close()
        lane_nbytes = disk_nbytes(path / "lane-0000")
        assert lane_nbytes <= claim_of(path) <= lane_nbytes + 2 * MARGIN_NBYTES


def test_a_bound_set_by_another_is_noticed_by_running_writers(path: Path) -> None:
    with owned(path) as space:
        space.reserve(AHEAD // 2)  # more is claimed ahead
        root.set_max_nbytes(path, 8_000)
        with pytest.raises(StoreFullError, match=r"\(8000\)"):
            space.reserve(1)
        with pytest.raises(StoreFullError):
            space.reserve(1)
        root.set_max_nbytes(path, 2 * MAX_NBYTES)
        space.reserve(MAX_NBYTES)
        assert space.max_nbytes == 2 * MAX_NBYTES


def test_a_bound_set_on_a_running_unbounded_store_counts_its_writers(tmp_path: Path) -> None:
    path, header, bound = tmp_path / "y.zarr", make_header(None), 100_000_000
    root.create(path, header)
    with owned(path, header=header) as first:
        write(path, first, "file", 30_000_000)
        root.set_max_nbytes(path, bound)
        with owned(path, 1, replace(header, max_nbytes=bound)) as second:
            with pytest.raises(StoreFullError):
                second.reserve(60_000_000)
            write(path, first, "more", 1)  # sees the bound: less is claimed ahead
            write(path, second, "file", 60_000_000, lane=1)
            with pytest.raises(StoreFullError):
                first.reserve(10_000_000)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{}")])
def test_while_the_root_is_damaged_its_last_bound_counts(
    path: Path, damage: Callable[[Path], None]
) -> None:
    with owned(path) as space:
        damage(path / "zarr.json")
        space.reserve(100_000)
        with pytest.raises(StoreFullError):
            space.reserve(950_000)


def test_the_claim_of_a_killed_writer_is_corrected_by_whoever_is_short(path: Path) -> None:
    with owned(path) as space:
        write(path, space, "file", 100_000)
        space.grow_scratch(300_000)
        space.reserve(400_000)
    assert claim_of(path) > 800_000
    with owned(path, 1) as other:
        assert (other.room() or 0) > 850_000
        assert other.nbytes == disk_nbytes(path)
        other.reserve(850_000)
    assert claim_of(path) == disk_nbytes(path / "lane-0000") + MARGIN_NBYTES


def test_a_claim_gone_stale_meanwhile_is_corrected_too(path: Path) -> None:
    with owned(path, 1) as other:
        with owned(path) as space:
            space.reserve(800_000)
            with pytest.raises(StoreFullError):
                other.reserve(500_000)
        other.reserve(500_000)


def test_a_claim_that_says_too_little_is_corrected_on_opening(path: Path) -> None:
    with owned(path) as space:
        write(path, space, "file", 500_000)
    lane_document.update(path, 0, {"claimed_nbytes": 0}, sync=False)
    with owned(path, 1) as other:
        with pytest.raises(StoreFullError):
            other.reserve(600_000)


@pytest.mark.parametrize("is_owned", [False, True])
def test_a_lane_without_a_claim_is_measured(path: Path, is_owned: bool) -> None:
    with owned(path) as first:
        write(path, first, "file", 500_000)
        (path / "lane-0000" / "zarr.json").unlink()
        with owned(path, 1) as other:
            with pytest.raises(StoreFullError):
                other.reserve(600_000)
            other.reserve(400_000)
            assert not (path / "lane-0000" / "zarr.json").exists()


def test_all_that_lies_in_the_root_counts(path: Path) -> None:
    (path / "notes").mkdir()
    (path / "notes" / "file").write_bytes(bytes(300_000))
    (path / "file").write_bytes(bytes(300_000))
    (path / "link").symlink_to("lane-0000")
    with owned(path) as space:
        assert space.nbytes == disk_nbytes(path)
        with pytest.raises(StoreFullError):
            space.reserve(400_000)


def test_what_a_killed_writer_left_of_a_document_is_removed(path: Path) -> None:
    with owned(path) as space:
        (path / ".tmp-zarr.json-1a2b").write_bytes(bytes(900_000))
        space.reserve(500_000)
        assert sorted(os.listdir(path)) == ["lane-0000", "zarr.json"]


def test_space_taken_back_in_a_lane_without_an_owner_is_room(path: Path) -> None:
    with owned(path) as space:
        write(path, space, "file", 600_000)
        space.close()
    with owned(path, 1) as other:
        with pytest.raises(StoreFullError):
            other.reserve(500_000)
        fd = files.open_folder(path / "lane-0000")
        assert files.try_lock(fd)
        (path / "lane-0000" / "file").unlink()
        other.free(600_000, lane=0)
        other.reserve(500_000)
        os.close(fd)


def test_measuring_finds_what_nobody_counted(path: Path) -> None:
    with owned(path) as space:
        space.reserve(600_000)
        (path / "lane-0000" / "file").write_bytes(bytes(500_000))
        space.measure(600_000)
        assert space.nbytes == disk_nbytes(path)
        assert claim_of(path) > 500_000
        space.check_invariants()
        (path / "lane-0000" / "more").write_bytes(bytes(10_000))
        space.measure()
        assert space.nbytes == disk_nbytes(path)
        space.reserve(450_000)


def test_a_reader_counts_what_is_there(path: Path) -> None:
    with owned(path) as space:
        write(path, space, "file", 5_000)
    reader = Space.reading(path, HEADER)
    assert (reader.nbytes, reader.max_nbytes) == (disk_nbytes(path), MAX_NBYTES)
    reader.close()


def test_a_claim_that_cannot_be_written_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with owned(path) as space:
        before, room = lane_document.read(path, 0), space.room()
        with monkeypatch.context() as patch:
            patch.setattr(files, "overwrite", fail)
            with pytest.raises(StoreError, match=r"cannot reserve space in the store .*x\.zarr"):
                space.reserve(500_000)
        assert lane_document.read(path, 0) == before
        assert space.room() == room
        space.reserve(500_000)
        with monkeypatch.context() as patch:
            patch.setattr(files, "overwrite", fail)
            space.release(500_000)  # the claim stays, which is safe
        space.check_invariants()
        space.reserve(900_000)


def test_threads_share_a_space(path: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(60):
                nbytes = rng.randrange(1, 120_000)
                try:
                    space.reserve(nbytes)
                except StoreFullError:
                    continue
                if rng.random() < 0.5:
                    space.release(nbytes)
                else:
                    space.release(nbytes, written=nbytes // 2)
                    space.free(nbytes // 2)
        except BaseException as error:  # noqa: BLE001 - the test's thread tells it
            errors.append(error)

    with owned(path) as space:
        room = space.room()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        space.check_invariants()
        assert space.nbytes == disk_nbytes(path)
        assert abs((space.room() or 0) - (room or 0)) < 100


WRITER = """
import os, random, sys
from pathlib import Path
from pagedkv import files, root
from pagedkv.errors import StoreFullError
from pagedkv.space import Space

path, seed = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(seed)
for lane in range(100):
    folder = path / f"lane-{lane:04d}"
    files.make_dir(folder)
    fd = files.open_folder(folder)
    if files.try_lock(fd):
        break
    os.close(fd)
space = Space.open(path, root.read_header(path), lane, {"last_writer": {"pid": os.getpid()}})
files.remove_temps(folder)
space.measure()
sizes = {name: size for name, size in files.file_sizes(folder).items() if name != "zarr.json"}
scratch = files.scratch_file(folder)
print("ready", flush=True)
number, written = 0, 0
while not os.path.exists(sys.argv[3]):
    nbytes = rng.choice([rng.randrange(500), rng.randrange(40_000), rng.randrange(150_000)])
    try:
        if rng.random() < 0.2:
            space.grow_scratch(nbytes)
            os.truncate(scratch, space.scratch_nbytes)
            if rng.random() < 0.5:
                os.truncate(scratch, 0)
                space.shrink_scratch(space.scratch_nbytes)
            continue
        space.reserve(nbytes)
    except StoreFullError:
        os.truncate(scratch, 0)
        space.shrink_scratch(space.scratch_nbytes)
        for name in rng.sample(sorted(sizes), len(sizes) // 2):
            files.remove(folder / name)
            space.free(sizes.pop(name))
        continue
    kept = rng.randrange(nbytes + 1)
    with files.new_file(folder / "x") as (file, temp):
        files.write_all(file, bytes(nbytes))
        os.ftruncate(file, kept)
        number += 1
        name = f"{os.getpid()}-{number}"
        os.replace(temp, folder / name)
    sizes[name] = kept
    written += kept
    space.release(nbytes, written=kept)
space.check_invariants()
assert space.own_nbytes - space.scratch_nbytes == files.tree_nbytes(folder)
os.close(scratch)
space.close()
print(written, flush=True)
"""


def stopped_nbytes(path: Path, pids: list[int]) -> int:
    """Bytes on disk at one moment: no process goes on while they are summed."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZ":
                time.sleep(0.0002)
        return disk_nbytes(path)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="tells by /proc who has stopped")
def test_the_bound_holds_at_every_moment_whoever_is_killed(path: Path) -> None:
    """Three writers fill and empty a store; now and then one is killed and replaced."""
    rng = random.Random(7)
    stop = path.parent / "stop"
    writers = [python(WRITER, path, seed, stop) for seed in range(3)]
    largest = 0
    try:
        for seed in range(3, 9):
            for writer in writers[-3 if seed == 3 else -1 :]:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "ready\n", writer.communicate()[1]
            for _ in range(60):
                nbytes = stopped_nbytes(path, [writer.pid for writer in writers])
                assert nbytes <= MAX_NBYTES
                largest = max(largest, nbytes)
                time.sleep(rng.random() / 100)
            victim = writers.pop(rng.randrange(3))
            victim.kill()
            victim.communicate()
            writers.append(python(WRITER, path, seed, stop))
        stop.touch()
        for writer in writers:
            output, errors = writer.communicate(timeout=60)
            assert writer.returncode == 0, errors
            assert int(output.split()[-1]) >= 0
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert largest > MAX_NBYTES / 2
    lanes = len(list(path.glob("lane-*")))
    with owned(path) as space:
        assert space.nbytes == disk_nbytes(path)
        assert MAX_NBYTES - disk_nbytes(path) - (space.room() or 0) < 5000 + lanes * MARGIN_NBYTES
