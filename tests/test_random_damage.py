"""Random damage to any files of a store: never a wrong page, and the others are still served."""

import fcntl
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from store_samples import Array, bits, make_entries, make_pages, make_spec

from pagedkv import KVSpec, PageStore
from pagedkv import format as fmt
from pagedkv.errors import CorruptPageError, PagedKVError

NUM_PAGES = 22
FRESH = 21
"""Number of a page that is not in the stores, to be written after the damage."""
SEGMENT_ROWS = 4
ENTRIES = make_entries(make_spec(), NUM_PAGES)
KEYS = [entry.key for entry in ENTRIES]

KINDS = {
    "raw float32": ("raw", "float32", None),
    "raw bfloat16": ("raw", "bfloat16", None),
    "int8": ("int8", "float16", None),
    "lossless": ("lossless", "float32", None),
    "bounded": ("raw", "float32", 10_000_000),
}
DAMAGES_EACH, SOAK_DAMAGES_EACH = 120, 2000


class Sample:
    """A whole store, and which pages are in which of its files."""

    def __init__(self, path: Path, codec: str, dtype: str, max_nbytes: int | None) -> None:
        self.path = path
        self.spec: KVSpec = make_spec(dtype=dtype)
        written = make_pages(self.spec, NUM_PAGES)
        with PageStore.open(path, self.spec, codec=codec, max_nbytes=max_nbytes) as store:
            store.write(0, ENTRIES[:10], written[:10])
        fd = os.open(path / "lane-0000", os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)  # as if another process had it
        with PageStore.open(path, self.spec) as store:
            os.close(fd)
            store.write(0, ENTRIES[10:16], written[10:16])
            rows = store.write(0, ENTRIES[16:FRESH], written[16:FRESH])
            assert {row.lane for row in rows} == {1}
            found = [store.find(key) for key in KEYS[:FRESH]]
            self.pages = [np.empty_like(page) for page in written[:FRESH]]
            self.rows = [row for row in found if row is not None]
            store.read(self.rows, self.pages)
        self.pages.append(written[FRESH])
        self.files = sorted(
            str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()
        )

    def pages_in(self, name: str) -> set[int]:
        """Numbers of the pages that may be lost if this file or folder is damaged."""
        parts = name.split("/")
        lane = fmt.lane_number(parts[0])
        if lane is None:
            return set()
        in_lane = {n for n, row in enumerate(self.rows) if row.lane == lane}
        if len(parts) < 4:
            return set() if name.endswith(".json") else in_lane
        if parts[2] not in {"kv", "catalog"} or parts[3] == "zarr.json":
            return set()
        segment = int(parts[3].split(".")[1])
        return {n for n in in_lane if self.rows[n].row // SEGMENT_ROWS == segment}

    def served_by(self, store: PageStore) -> set[int]:
        """Numbers of the pages that the store gives back, each of them checked."""
        good = set()
        for number, key in enumerate(KEYS):
            out = np.full(self.spec.page_shape, 7, self.spec.np_dtype)
            while (row := store.find(key)) is not None:
                try:
                    store.read([row], [out])
                except CorruptPageError:
                    assert store.find(key) != row
                    continue
                assert self.is_right(number, out), f"page {number} is wrong"
                good.add(number)
                break
        return good

    def is_right(self, number: int, out: Array) -> bool:
        if number == FRESH and not np.array_equal(out, self.pages[number]):
            return (
                np.abs(out.astype(np.float32) - self.pages[number].astype(np.float32)).max() < 0.1
            )
        return bits(out) == bits(self.pages[number])


def remove(file: Path, rng: random.Random) -> None:
    file.unlink()


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size or 1))


def lengthen(file: Path, rng: random.Random) -> None:
    with file.open("ab") as stream:
        stream.write(rng.randbytes(rng.choice([1, 4, 100, 5000])))


def flip_bits(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 30])):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def zero_a_run(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    start = rng.randrange(len(data) or 1)
    stop = min(len(data), start + rng.choice([1, 4, 64, 600, 4096]))
    data[start:stop] = bytes(stop - start)
    file.write_bytes(data)


def tear(file: Path, rng: random.Random) -> None:
    """The end of a block-wise write never came: what was there before, or zeros."""
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data) or 1)
    data[at:] = rng.choice([bytes, rng.randbytes])(len(data) - at)
    file.write_bytes(data)


def swap_with_another(file: Path, rng: random.Random) -> None:
    others = sorted(p for p in file.parent.iterdir() if p.is_file())
    other = rng.choice(others)
    data = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(data)


def take_the_place_of_any(file: Path, rng: random.Random) -> None:
    """Copied over by another file of the store, from wherever."""
    root = next(p for p in file.parents if p.suffix == ".zarr")
    file.write_bytes(rng.choice(sorted(p for p in root.rglob("*") if p.is_file())).read_bytes())


def become_a_folder(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()
    if rng.random() < 0.5:
        (file / "something").write_bytes(b"else")


def become_a_link(file: Path, rng: random.Random) -> None:
    elsewhere = file.parents[0] / f"moved-{file.name}"
    file.rename(elsewhere)
    file.symlink_to(elsewhere if rng.random() < 0.5 else "nowhere")


def become_a_pipe(file: Path, rng: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def lose_the_folder(file: Path, rng: random.Random) -> None:
    shutil.rmtree(file.parent)
    if rng.random() < 0.5:
        file.parent.write_bytes(b"not a folder")


Damage = Callable[[Path, random.Random], None]
INTRUDERS = {"become_a_folder", "become_a_link", "become_a_pipe", "lose_the_folder"}
"""What a writer may refuse to mend, since it is not his."""
DAMAGES: list[Damage] = [
    remove,
    truncate,
    lengthen,
    flip_bits,
    zero_a_run,
    tear,
    swap_with_another,
    take_the_place_of_any,
    become_a_folder,
    become_a_link,
    become_a_pipe,
    lose_the_folder,
]


def harm(sample: Sample, copy: Path, rng: random.Random) -> tuple[list[str], set[int]]:
    """Damage one to three files; what was done, and which pages may be lost by it."""
    done, lost = [], set()
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        damage = rng.choice(DAMAGES)
        name = rng.choice(sample.files)
        # The header, and what a writer must mend, as often as all the others together.
        if rng.random() < 0.2:
            name = rng.choice([file for file in sample.files if file.count("/") < 2])
        file = copy / name
        if not file.is_file() or file.is_symlink():
            continue
        if damage is lose_the_folder:
            if "/" not in name:
                continue
            lost |= sample.pages_in(str(Path(name).parent))
        elif damage is swap_with_another:
            for sibling in file.parent.iterdir():
                lost |= sample.pages_in(str(sibling.relative_to(copy)))
        damage(file, rng)
        lost |= sample.pages_in(name)
        done.append(f"{damage.__name__} {name}")
    return done, lost


def has_header(done: list[str]) -> bool:
    """Whether the root's document or that of a lane is whole."""
    if any("lose_the_folder" in one for one in done):
        done = [*done, "lane-0000/zarr.json", "lane-0001/zarr.json"]
    whole = {"zarr.json", "lane-0000/zarr.json", "lane-0001/zarr.json"}
    return bool(whole - {one.split(" ")[-1] for one in done})


@pytest.mark.parametrize("kind", KINDS)
def test_random_damage_never_gives_a_wrong_page_and_the_others_are_served(
    memory_folder: Path, kind: str, soak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "MAX_SEGMENT_ROWS", SEGMENT_ROWS)
    try:
        sample = Sample(memory_folder / "whole.zarr", *KINDS[kind])
    except ValueError:
        pytest.skip("there is no such codec yet")
    rng = random.Random(kind)
    copy = memory_folder / "copy.zarr"
    num_lost = 0
    failures: list[str] = []
    for number in range(SOAK_DAMAGES_EACH if soak else DAMAGES_EACH):
        shutil.copytree(sample.path, copy)
        done, may_be_lost = harm(sample, copy, rng)
        for mode in ("r", "a") if number % 2 else ("r",):
            try:
                with PageStore.open(copy, rng.choice([sample.spec, None]), mode=mode) as store:
                    good = sample.served_by(store)
                    if mode == "a":
                        store.write(0, [ENTRIES[FRESH]], [sample.pages[FRESH]])
                        assert FRESH in sample.served_by(store), "the fresh page is not served"
                        store.check_invariants()
            except PagedKVError as error:
                refused = mode == "a" and any(one.split()[0] in INTRUDERS for one in done)
                if has_header(done) and not refused:
                    failures.append(f"mode {mode}: {done}: {error!r}")
                break
            except Exception as error:  # noqa: BLE001 - all of them are listed
                failures.append(f"mode {mode}: {done}: {error!r}")
                break
            missing = set(range(FRESH)) - good
            num_lost += len(missing)
            if missing - may_be_lost:
                failures.append(f"mode {mode}: {done}: lost {sorted(missing - may_be_lost)}")
        shutil.rmtree(copy)
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:40])
    assert num_lost
