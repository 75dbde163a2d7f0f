"""The kernels against numpy and google_crc32c: what they write must be equal to the bit."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import google_crc32c
import llvmlite.binding
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import REPOSITORY, Array, make_spec, run_python, same_bits

from pagedkv import records, vectors
from pagedkv.checksum import BLOCK_NBYTES, crc32c
from pagedkv.codec import FixedCodec, Int8, Raw
from pagedkv.kernel_cache import SOURCES
from pagedkv.memory import PageMemory
from pagedkv.spec import KVSpec

CODECS: list[FixedCodec] = [
    Raw(),
    *(
        Int8(key_scales=k, value_scales=v)
        for k in ("channel", "token")
        for v in ("channel", "token")
    ),
]
DTYPES = ("float32", "float16", "bfloat16")
SHAPES = [  # (kinds, tokens, heads, channels)
    (2, 4, 2, 8),
    (1, 1, 1, 15),  # the tiny page
    (1, 3, 2, 17),
    (2, 16, 2, 64),  # a block of 4 KiB of halves
    (2, 5, 3, 40),
    (1, 16, 4, 96),  # three blocks of the checksum and a rest
]
INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}


@pytest.fixture(params=["kernels", "portable"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which pages are packed; the second is for processors that lack instructions."""
    if request.param == "portable":
        monkeypatch.setattr(records, "compiled", lambda: None)
    return str(request.param)


def spec_of(shape: tuple[int, ...], dtype: str, num_layers: int = 2) -> KVSpec:
    kinds, tokens, heads, channels = shape
    return make_spec(
        num_layers=num_layers,
        num_kinds=kinds,
        page_tokens=tokens,
        num_kv_heads=heads,
        head_dim=channels,
        dtype=dtype,
    )


class Pool:
    """Slots of pages, layer-first, that start ``shift`` bytes after a multiple of 64."""

    def __init__(self, spec: KVSpec, slots: int, shift: int = 0) -> None:
        nbytes = slots * spec.page_nbytes
        self.buffer = np.zeros(nbytes + 64 + shift, np.uint8)
        start = -self.buffer.ctypes.data % 64 + shift
        kinds, *rest = spec.layer_shape
        shape = (spec.held_layers, kinds, slots, *rest)
        self.array = self.buffer[start : start + nbytes].view(spec.np_dtype).reshape(shape)

    def fill(self, seed: int) -> "Pool":
        """Finite numbers of all magnitudes: any bits but those of NaN and infinity."""
        rng = np.random.default_rng(seed)
        bits = self.array.view(records.INTEGERS[self.array.itemsize])
        sign = 1 << (8 * bits.itemsize - 1)
        bits[...] = rng.integers(0, INFINITY[self.array.dtype.name], bits.shape, bits.dtype)
        bits |= rng.integers(0, 2, bits.shape, bits.dtype) * bits.dtype.type(sign)
        # Magnitudes of one group are mostly alike.
        plain = rng.standard_normal(self.array[1:].shape, np.float32)
        self.array[1:] = plain.astype(self.array.dtype)
        return self

    def memory(self, slots: list[int]) -> PageMemory:
        layer, kind, slot = self.array.strides[:3]
        addresses = self.array.ctypes.data + np.array(slots, np.int64) * slot
        return PageMemory(addresses, layer, kind)


def record_nbytes(codec: FixedCodec, spec: KVSpec) -> int:
    return spec.held_layers * (codec.layer_nbytes(spec) + 4)


def pack(codec: FixedCodec, spec: KVSpec, pages: PageMemory, shift: int = 0) -> tuple[Array, Array]:
    """Records, ``shift`` bytes after an aligned address, and their checksums."""
    count = len(pages.addresses)
    out = np.full(count * record_nbytes(codec, spec) + shift, 0xAA, np.uint8)[shift:]
    crcs = np.zeros((count, spec.held_layers), np.uint32)
    codec.pack(spec, pages, out, crcs)
    return out, crcs


def expected_records(codec: FixedCodec, spec: KVSpec, pool: Pool, slots: list[int]) -> bytes:
    parts = []
    for slot in slots:
        for layer in pool.array[:, :, slot]:
            payload = np.empty(codec.layer_nbytes(spec), np.uint8)
            codec.encode(spec, layer, payload)
            crc = int(google_crc32c.value(payload))
            parts.append(payload.tobytes() + crc.to_bytes(4, "little"))
    return b"".join(parts)


@pytest.mark.parametrize("shift", [0, 1, 4, 7])
def test_checksum_is_crc32c_at_every_length_and_alignment(shift: int) -> None:
    data = np.random.default_rng(shift).integers(0, 256, 3 * BLOCK_NBYTES, np.uint8)
    for nbytes in (*range(800), *range(BLOCK_NBYTES - 9, BLOCK_NBYTES + 9), len(data) - shift):
        part = data[shift : shift + nbytes]
        assert crc32c(data.ctypes.data + shift, nbytes) == google_crc32c.value(part.tobytes())


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_and_unpack_agree_with_encode_and_decode(
    dtype: str, shape: tuple[int, ...], codec: FixedCodec, way: str
) -> None:
    spec = spec_of(shape, dtype)
    pool = Pool(spec, 5).fill(seed=sum(shape))
    slots = [3, 0, 4]
    stored, crcs = pack(codec, spec, pool.memory(slots), shift=len(shape) - 1)
    assert stored.tobytes() == expected_records(codec, spec, pool, slots)
    trailers = stored.reshape(*crcs.shape, -1)[:, :, -4:].copy().view("<u4")
    assert np.array_equal(trailers[:, :, 0], crcs)

    for shift in (0, 32, spec.np_dtype.itemsize):  # streamed, streamed, and not
        back = Pool(spec, 5, shift)
        good = np.ones(3, np.bool_)
        offsets = np.array([2, 0, 1], np.int64) * record_nbytes(codec, spec)
        rows = back.memory([1, 4, 2])
        codec.unpack(spec, stored, offsets, spec.held_layers, rows, crcs[[2, 0, 1]], good)
        assert good.all()
        wanted = np.zeros_like(back.array)
        for record, slot in zip(stored.reshape(*crcs.shape, -1)[[2, 0, 1]], [1, 4, 2], strict=True):
            for chunk, layer in zip(record, wanted[:, :, slot], strict=True):
                codec.decode(spec, chunk[:-4], layer)
        assert same_bits([back.array], [wanted])


@settings(max_examples=200)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    codec=st.sampled_from(CODECS),
    shape=st.tuples(*(st.integers(1, n) for n in (2, 5, 3, 37))),
)
def test_kernels_are_equal_to_numpy_for_any_finite_bits(
    data: st.DataObject, dtype: str, codec: FixedCodec, shape: tuple[int, ...]
) -> None:
    spec = spec_of(shape, dtype, num_layers=1)
    pool = Pool(spec, 1, shift=spec.np_dtype.itemsize)
    bits = pool.array.view(records.INTEGERS[spec.np_dtype.itemsize]).reshape(-1)
    infinity, sign = INFINITY[dtype], 1 << (8 * bits.itemsize - 1)
    magnitudes = st.one_of(
        st.integers(0, infinity - 1),
        st.sampled_from([0, 1, 2, infinity - 1, infinity - 2]),  # zero, subnormal, largest
        st.integers(infinity // 2, infinity // 2 + 300),
    )
    few = data.draw(st.lists(magnitudes, min_size=1, max_size=8), label="magnitudes")
    rng = np.random.default_rng(data.draw(st.integers(0, 99), label="seed"))
    bits[...] = rng.choice(np.array(few, bits.dtype), bits.shape)
    bits |= rng.integers(0, 2, bits.shape, bits.dtype) * bits.dtype.type(sign)

    stored, crcs = pack(codec, spec, pool.memory([0]), shift=1)
    assert stored.tobytes() == expected_records(codec, spec, pool, [0])
    back = Pool(spec, 1)
    good = np.ones(1, np.bool_)
    codec.unpack(spec, stored, np.zeros(1, np.int64), 1, back.memory([0]), crcs, good)
    wanted = np.zeros(spec.layer_shape, spec.np_dtype)
    codec.decode(spec, stored[:-4], wanted)
    assert good.all()
    assert same_bits([back.array], [wanted])
    assert np.isfinite(back.array).all()


def test_memory_of_any_strides_is_packed(way: str) -> None:
    spec = spec_of((2, 4, 2, 8), "float16", num_layers=3)
    pages = np.random.default_rng(5).standard_normal((4, *spec.page_shape)).astype(np.float16)
    turned = pages[::-1, ::-1, ::-1]
    page, layer, kind = turned.strides[:3]
    first = turned.__array_interface__["data"][0]
    memory = PageMemory(first + np.arange(4, dtype=np.int64) * page, layer, kind)
    for codec in CODECS:
        stored, crcs = pack(codec, spec, memory)
        copies = Pool(spec, 4)
        copies.array[...] = np.moveaxis(turned, 0, 2)
        assert stored.tobytes() == expected_records(codec, spec, copies, [0, 1, 2, 3])
        out = np.zeros_like(pages)
        good = np.ones(4, np.bool_)
        start = out[::-1, ::-1, ::-1].__array_interface__["data"][0]
        target = PageMemory(start + np.arange(4, dtype=np.int64) * page, layer, kind)
        offsets = np.arange(4, dtype=np.int64) * record_nbytes(codec, spec)
        codec.unpack(spec, stored, offsets, 3, target, crcs, good)
        assert good.all()
        if codec.lossless:
            assert same_bits([out], [pages])


@pytest.mark.parametrize("codec", CODECS[:2], ids=str)
def test_a_part_of_the_layers_is_unpacked_alone(codec: FixedCodec, way: str) -> None:
    spec = spec_of((2, 4, 2, 8), "float32", num_layers=4)
    pool = Pool(spec, 2).fill(seed=1)
    stored, crcs = pack(codec, spec, pool.memory([0, 1]))
    whole, part = Pool(spec, 2), Pool(spec, 2)
    good = np.ones(2, np.bool_)
    size = record_nbytes(codec, spec)
    offsets = np.array([0, size], np.int64)
    codec.unpack(spec, stored, offsets, 4, whole.memory([0, 1]), crcs, good)
    memory = part.memory([0, 1])
    memory = memory._replace(addresses=memory.addresses + 2 * memory.layer_stride)
    codec.unpack(spec, stored, offsets + size // 2, 2, memory, crcs[:, 2:], good)
    assert good.all()
    assert same_bits([part.array[2:]], [whole.array[2:]])
    assert not part.array[:2].any()


@pytest.mark.parametrize("codec", CODECS[:2], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 15), (2, 16, 2, 64), (1, 16, 4, 96)], ids=str)
def test_every_damage_is_found_and_only_there(
    codec: FixedCodec, shape: tuple[int, ...], way: str
) -> None:
    spec = spec_of(shape, "float32", num_layers=3)
    pool = Pool(spec, 4).fill(seed=2)
    clean, crcs = pack(codec, spec, pool.memory([0, 1, 2, 3]))
    size = record_nbytes(codec, spec)
    offsets = np.arange(4, dtype=np.int64) * size
    for place in (0, size // 3 - 1, size // 3, size // 2, size - 5, size - 4, size - 1):
        stored = clean.copy()
        stored[2 * size + place] ^= 0x10
        back, good = Pool(spec, 4), np.ones(4, np.bool_)
        codec.unpack(spec, stored, offsets, 3, back.memory([0, 1, 2, 3]), crcs, good)
        assert good.tolist() == [True, True, False, True]
        last = back.array[:, :, 2][place // (size // 3) + 1 :]
        assert not last.any()  # no layer behind the damage was written
    other = crcs.copy()
    other[1, 2] ^= 1  # sound bytes, but not those that the catalogue means
    back, good = Pool(spec, 4), np.ones(4, np.bool_)
    codec.unpack(spec, clean, offsets, 3, back.memory([0, 1, 2, 3]), other, good)
    assert good.tolist() == [True, False, True, True]


@pytest.mark.parametrize("codec", CODECS[:2], ids=str)
def test_records_that_are_not_all_there_are_damaged(codec: FixedCodec, way: str) -> None:
    spec = spec_of((2, 4, 2, 8), "float32")
    pool = Pool(spec, 2).fill(seed=3)
    stored, crcs = pack(codec, spec, pool.memory([0, 1]))
    size = record_nbytes(codec, spec)
    back = Pool(spec, 2)
    for offset in (-1, -size, size + 1, 2 * size, 2**62):
        good = np.ones(2, np.bool_)
        offsets = np.array([offset, size], np.int64)
        codec.unpack(spec, stored, offsets, 2, back.memory([0, 1]), crcs, good)
        assert good.tolist() == [False, True]
    good = np.ones(2, np.bool_)
    offsets = np.array([0, size], np.int64)
    codec.unpack(spec, stored[:-1], offsets, 2, back.memory([0, 1]), crcs, good)
    assert good.tolist() == [True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", CODECS[1:], ids=str)
def test_int8_names_the_first_number_that_is_not_finite(
    codec: FixedCodec, bad: float, dtype: str, way: str
) -> None:
    spec = spec_of((2, 3, 2, 21), dtype, num_layers=3)
    pool = Pool(spec, 4)
    pool.array[2, 1, 2, 1, 0, 20] = bad
    pool.array[2, 0, 3, 0, 0, 0] = bad
    message = rf"has {bad} at \(1, 2, 1, 1, 0, 20\)"
    with pytest.raises(ValueError, match=message):
        pack(codec, spec, pool.memory([0, 2, 3]))


def test_threads_pack_and_unpack_at_once() -> None:
    spec = spec_of((2, 16, 2, 64), "float16")
    pool = Pool(spec, 8).fill(seed=6)
    for codec in CODECS[:2]:
        wanted = expected_records(codec, spec, pool, list(range(8)))
        with ThreadPoolExecutor(4) as threads:
            results = threads.map(
                lambda _, codec=codec: pack(codec, spec, pool.memory(list(range(8)))), range(16)
            )
        assert {stored.tobytes() for stored, _ in results} == {wanted}


def test_read_only_checksums_are_taken(way: str) -> None:
    spec = spec_of((1, 1, 1, 15), "float32")
    pool = Pool(spec, 1).fill(seed=4)
    stored, crcs = pack(Raw(), spec, pool.memory([0]))
    crcs.flags.writeable = False
    good = np.ones(1, np.bool_)
    back = Pool(spec, 1)
    Raw().unpack(spec, stored, np.zeros(1, np.int64), 2, back.memory([0]), crcs, good)
    assert good.all()
    assert same_bits([back.array], [pool.array])


@pytest.mark.parametrize("missing", ["sse4.2", "f16c", "crc"])
def test_a_processor_that_lacks_an_instruction_is_not_given_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = dict.fromkeys(["sse4.2", "f16c", "crc"], True) | {missing: False}
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", lambda: features)
    for architecture, needed in vectors._NEEDED.items():
        monkeypatch.setattr(vectors, "_ARCHITECTURE", architecture)
        assert vectors.is_supported() == (missing not in needed)
    monkeypatch.setattr(vectors, "_ARCHITECTURE", "riscv64")
    assert not vectors.is_supported()
    records.compiled.cache_clear()
    assert records.compiled() is None
    monkeypatch.undo()
    records.compiled.cache_clear()
    assert isinstance(records.compiled(), ModuleType) == vectors.is_supported()


def test_importing_the_codecs_does_not_import_what_compiles_or_compresses() -> None:
    run_python("""
import sys
import pagedkv.codec
assert not {"numba", "llvmlite", "numcodecs"} & set(sys.modules)
""")


class TestCache:
    """Compiled kernels are kept: a second process does not wait for them."""

    CODE = """
import numpy as np
from pagedkv import kernels
from pagedkv.codec import Raw
from pagedkv.memory import PageMemory
from pagedkv.spec import KVSpec
spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, page_tokens=1, dtype="float32", model="m")
page = np.ones(spec.page_shape, np.float32)
memory = PageMemory(np.array([page.ctypes.data], np.int64), page.strides[0], page.strides[1])
out = np.empty(spec.page_nbytes + 4, np.uint8)
Raw().pack(spec, memory, out, np.empty((1, 1), np.uint32))
assert out[:-4].tobytes() == page.tobytes()
# All that is called from Python; of the reading and attending kernels those for float32.
import tempfile
import pagedkv as pk
with tempfile.TemporaryDirectory() as folder:
    for codec in ("raw", "int8"):
        store = pk.PageStore.open(folder + "/" + codec, spec, codec=codec)
        with pk.PagedKVCache(spec, 2, store) as cache:
            sequence = cache.open_sequence()
            sequence.append(*np.ones((2, 1, 40, 1, 8), np.float32), np.arange(40))
            cache.flush()
            cache.get([key for _, entry in store.entries() for key in [entry.key]])
            for count in (1, 20):
                sequence.attend(0, np.ones((count, 2, 8), np.float32))
print(sum(kernels.pack_raw.stats.cache_hits.values()))
"""

    def run(self, package: Path, home: Path) -> str:
        names = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        result = subprocess.run(
            [sys.executable, "-B", "-W", "error", "-c", self.CODE],
            cwd=package.parent,
            env={**environment, "PYTHONPATH": str(package.parent), "HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    @pytest.fixture
    def package(self, tmp_path: Path) -> Path:
        """A copy of the package, without what Python and numba have compiled."""
        target = tmp_path / "site" / "pagedkv"
        ignored = shutil.ignore_patterns("__pycache__")
        return Path(shutil.copytree(REPOSITORY / "pagedkv", target, ignore=ignored))

    def test_a_second_process_finds_them_beside_the_package(
        self, package: Path, tmp_path: Path
    ) -> None:
        assert self.run(package, tmp_path) == "0"
        compiled = sorted(package.glob("__pycache__/*.nb?"))
        assert any(path.name.startswith("read_kernels.read_records") for path in compiled)
        assert self.run(package, tmp_path) == "1"
        assert sorted(package.glob("__pycache__/*.nb?")) == compiled  # nothing was compiled anew

    def test_in_the_user_s_folder_if_the_package_is_read_only(
        self, package: Path, tmp_path: Path
    ) -> None:
        (package / "__pycache__").touch()  # root, too, cannot write into it
        assert self.run(package, tmp_path) == "0"
        assert self.run(package, tmp_path) == "1"

    def test_nowhere_if_that_is_read_only_too(self, package: Path, tmp_path: Path) -> None:
        (package / "__pycache__").touch()
        (tmp_path / "home").touch()
        assert self.run(package, tmp_path / "home") == "0"
        assert self.run(package, tmp_path / "home") == "0"

    def test_they_are_compiled_anew_when_any_part_of_them_has_changed(
        self, package: Path, tmp_path: Path
    ) -> None:
        """numba alone looks only at the file in which the kernel itself stands."""
        assert self.run(package, tmp_path) == "0"
        with (package / "vectors.py").open("a") as file:
            file.write("# something else\n")
        assert self.run(package, tmp_path) == "0"
        assert self.run(package, tmp_path) == "1"

    def test_every_part_of_a_kernel_counts(self) -> None:
        package = REPOSITORY / "pagedkv"
        found = {
            path.relative_to(package).as_posix()
            for path in package.rglob("*.py")
            if re.search(r"^from (numba|llvmlite)|import .*\bkernel\b", path.read_text(), re.M)
        }
        assert found == set(SOURCES)
