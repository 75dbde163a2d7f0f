"""The disk measurement: what it measures, and that it leaves nothing behind."""

from pathlib import Path

import pytest

from pagedkv import diskbench, files
from pagedkv.diskbench import CASES, CODECS, bench_disk, spec_of
from pagedkv.errors import StoreError

pytestmark = pytest.mark.usefixtures("no_fsync")


def test_every_case_is_measured_for_each_codec_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    steps: list[tuple[int, int]] = []
    results = bench_disk(
        tmp_path,
        size="1MiB",
        page="16KiB",
        num_rounds=2,
        progress=lambda *step: steps.append(step),
    )
    assert [result.case for result in results] == [
        f"{case}, {codec}" for case in CASES for codec in CODECS
    ]
    for result in results:
        assert (result.unit, result.peer_name) == ("GB/s", "plain file")
        assert min(result.ours, result.peer) > 0
        assert result.ratio == pytest.approx(result.ours / result.peer)
    assert steps == [(step, 6) for step in range(1, 7)]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_scratch_folder_is_removed_when_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_all", fail)
    with pytest.raises(StoreError, match="No space left on device"):
        bench_disk(tmp_path, size="1MiB", num_rounds=1)
    assert not list(tmp_path.iterdir())


def test_the_pages_are_more_than_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diskbench, "_POOL_NBYTES", 3 * 16 * 2**10)
    assert bench_disk(tmp_path, size="160KiB", page="16KiB", num_rounds=1)


@pytest.mark.parametrize(
    ("nbytes", "layers", "heads"),
    [(4096, 1, 1), (192 * 2**10, 16, 3), (192_000, 47, 1), (2 * 2**20, 64, 8)],
)
def test_a_page_has_about_the_bytes_that_were_asked_for(
    nbytes: int, layers: int, heads: int
) -> None:
    spec = spec_of(nbytes)
    assert (spec.num_layers, spec.num_kv_heads) == (layers, heads)
    assert spec.page_nbytes == pytest.approx(nbytes, rel=0.05)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too small: give at least 4KiB"):
        bench_disk(tmp_path, page="1KiB")
    with pytest.raises(ValueError, match="less than one page"):
        bench_disk(tmp_path, size="1KiB")
    with pytest.raises(ValueError, match="num_rounds is 0"):
        bench_disk(tmp_path, num_rounds=0)
    with pytest.raises(StoreError, match="is no folder"):
        bench_disk(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="give a smaller size"):
        bench_disk(tmp_path, size="900TB")
    assert not list(tmp_path.iterdir())
