"""What zarr-python gets from us: the data type ``bfloat16`` and the codec ``pagedkv.int8``."""

import re
import tomllib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from store_samples import REPOSITORY, make_pages, make_spec, run_python, same_bits
from zarr.codecs import Crc32cCodec
from zarr.core.dtype import data_type_registry
from zarr.core.dtype.common import DataTypeValidationError
from zarr.registry import get_codec_class

from pagedkv.codec import Codec, Int8, Lossless, Raw
from pagedkv.zarr_plugin import BFloat16, Int8ZarrCodec, register

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class TestBFloat16:
    def test_zarr_finds_it_by_name_and_by_native_type(self) -> None:
        assert data_type_registry.match_json("bfloat16", zarr_format=3) == BFloat16()
        assert data_type_registry.match_dtype(BFLOAT16) == BFloat16()
        assert BFloat16().to_json(3) == "bfloat16"
        assert BFloat16().to_native_dtype() == BFLOAT16
        assert BFloat16().item_size == 2

    @pytest.mark.parametrize("dtype", ["float16", "float32", "uint16", "V2"])
    def test_it_takes_no_other_native_type(self, dtype: str) -> None:
        with pytest.raises(DataTypeValidationError, match="is not bfloat16"):
            BFloat16.from_native_dtype(np.dtype(dtype))
        assert not isinstance(data_type_registry.match_dtype(np.dtype(dtype)), BFloat16)

    def test_it_is_of_zarr_v3_only(self) -> None:
        with pytest.raises(DataTypeValidationError, match="v3 only"):
            BFloat16.from_json({"name": "bfloat16", "object_codec_id": None}, zarr_format=2)
        with pytest.raises(ValueError, match="v3 only"):
            BFloat16().to_json(2)

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, 0.0), (1.5, 1.5), (np.inf, "Infinity"), (-np.inf, "-Infinity"), (np.nan, "NaN")],
    )
    def test_fill_values_are_written_and_read_as_floats(self, value: float, text: object) -> None:
        assert BFloat16().to_json_scalar(value, zarr_format=3) == text
        scalar = BFloat16().from_json_scalar(text, zarr_format=3)  # type: ignore[arg-type]
        assert scalar.dtype == BFLOAT16
        np.testing.assert_equal(float(scalar), value)

    def test_what_is_no_number_is_no_scalar(self) -> None:
        with pytest.raises(TypeError, match="cannot be a bfloat16"):
            BFloat16().cast_scalar([1])

    def test_an_array_keeps_every_bit_pattern(self, tmp_path: Path) -> None:
        numbers = np.arange(2**16, dtype=np.uint16).view(BFLOAT16).reshape(256, 256)
        array = zarr.create_array(
            tmp_path / "a.zarr",
            shape=numbers.shape,
            chunks=(64, 256),
            dtype=BFloat16(),
            config={"write_empty_chunks": True},  # no comparison of signalling NaNs
        )
        array[:] = numbers
        again = zarr.open_array(tmp_path / "a.zarr", mode="r")
        assert again.dtype == BFLOAT16
        assert same_bits([again[:]], [numbers])

    def test_missing_chunks_read_as_the_fill_value(self, tmp_path: Path) -> None:
        zarr.create_array(
            tmp_path / "a.zarr", shape=(4,), chunks=(2,), dtype=BFLOAT16, fill_value=2.5
        )
        values = zarr.open_array(tmp_path / "a.zarr", mode="r")[:]
        assert values.tolist() == [2.5] * 4


class TestInt8:
    def test_zarr_finds_it_by_name(self) -> None:
        assert get_codec_class("pagedkv.int8") is Int8ZarrCodec

    def test_registering_again_changes_nothing(self) -> None:
        register()
        register()
        assert get_codec_class("pagedkv.int8") is Int8ZarrCodec
        assert data_type_registry.match_dtype(BFLOAT16) == BFloat16()

    def test_its_description_survives_a_metadata_document(self) -> None:
        codec = Int8ZarrCodec(Int8(key_scales="token", value_scales="channel"))
        assert Int8ZarrCodec.from_dict(codec.to_dict()) == codec
        assert Int8ZarrCodec.from_dict(Int8().zarr_codec(make_spec())) == Int8ZarrCodec(Int8())

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("kinds", [1, 2])
    def test_zarr_writes_and_reads_what_the_codec_does(
        self, tmp_path: Path, dtype: str, kinds: int
    ) -> None:
        spec = make_spec(dtype=dtype, num_kinds=kinds)
        pages = np.stack(make_pages(spec, 2))
        array = zarr.create_array(
            tmp_path / "a.zarr",
            shape=pages.shape,
            shards=pages.shape,
            chunks=(1, 1, *spec.layer_shape),
            dtype=spec.np_dtype,
            serializer=Int8ZarrCodec(Int8()),
            compressors=[Crc32cCodec()],
            fill_value=0,
        )
        array[:] = pages
        expected = np.empty_like(pages)
        layers = pages.reshape(-1, *spec.layer_shape)
        outs = expected.reshape(-1, *spec.layer_shape)
        for layer, out in zip(layers, outs, strict=True):
            payload = np.empty(Int8().layer_nbytes(spec), np.uint8)
            Int8().encode(spec, layer, payload)
            Int8().decode(spec, payload, out)
        assert same_bits([zarr.open_array(tmp_path / "a.zarr", mode="r")[:]], [expected])

    @pytest.mark.parametrize("chunks", [(2, 1, 2, 4, 2, 8), (1, 3, 2, 4, 2, 8)])
    def test_chunks_of_more_than_one_layer_are_refused(
        self, tmp_path: Path, chunks: tuple[int, ...]
    ) -> None:
        array = zarr.create_array(
            tmp_path / "a.zarr",
            shape=(2, 3, 2, 4, 2, 8),
            chunks=chunks,
            dtype="float32",
            serializer=Int8ZarrCodec(Int8()),
            compressors=None,
        )
        message = f"a chunk of shape {re.escape(str(chunks))} is not one layer of one page"
        with pytest.raises(ValueError, match=message):
            array[:] = 1


class TestLossless:
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_zarr_writes_and_reads_what_the_codec_does(self, tmp_path: Path, dtype: str) -> None:
        spec = make_spec(dtype=dtype, page_tokens=16, head_dim=64)
        layer = make_pages(spec, 1)[0][0]
        codec = Lossless()
        array = zarr.create_array(
            tmp_path / "a.zarr",
            shape=spec.layer_shape,
            chunks=spec.layer_shape,
            dtype=spec.np_dtype,
            serializer=codec.zarr_codec(spec),
            compressors=codec.zarr_compressors(spec),
            fill_value=0,
        )
        array[:] = layer
        (chunk,) = (p for p in (tmp_path / "a.zarr" / "c").rglob("*") if p.is_file())
        theirs = np.frombuffer(chunk.read_bytes(), np.uint8)
        out = np.empty_like(layer)
        codec.decode(spec, theirs, out)
        assert same_bits([out], [layer])
        chunk.write_bytes(codec.encode_layer(spec, layer).tobytes())
        assert same_bits([zarr.open_array(tmp_path / "a.zarr", mode="r")[:]], [layer])

    @pytest.mark.parametrize("codec", [Raw(), Int8()], ids=str)
    def test_other_codecs_have_nothing_between_array_and_checksum(self, codec: Codec) -> None:
        assert codec.zarr_compressors(make_spec()) == []


class TestInstalled:
    """As zarr-python meets the package: through the entry points that pyproject.toml declares."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Path:
        """A folder on the path that announces the entry points, as an installation does."""
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
        lines = []
        for group in ("zarr.codecs", "zarr.data_type", "numcodecs.codecs"):
            entries = project["entry-points"][group].items()
            lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries)]
        info = tmp_path / "site" / "pagedkv-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pagedkv\nVersion: 0\n")
        (info / "entry_points.txt").write_text("\n".join(lines))
        return info.parent

    def test_the_codec_is_found_without_importing_anything_of_ours(self, site: Path) -> None:
        run_python(
            """
import sys
sys.path.insert(0, sys.argv[1])
from zarr.registry import get_codec_class
assert "pagedkv.zarr_plugin" not in sys.modules
assert get_codec_class("pagedkv.int8").__module__ == "pagedkv.zarr_plugin"
from pagedkv.zarr_plugin import Int8ZarrCodec, register
register()
assert get_codec_class("pagedkv.int8") is Int8ZarrCodec
""",
            site,
        )

    def test_numcodecs_finds_its_codec_too(self, site: Path) -> None:
        run_python(
            """
import sys
sys.path.insert(0, sys.argv[1])
import numcodecs
config = {"id": "pagedkv.int8", "shape": [1, 1, 1, 3], "dtype": "float32"}
codec = numcodecs.get_codec(config)
assert type(codec).__module__ == "pagedkv.numcodecs_plugin"
assert "zarr" not in sys.modules
""",
            site,
        )

    def test_the_data_type_s_entry_point_is_what_zarr_s_registry_loads(self, site: Path) -> None:
        run_python(
            """
import sys
sys.path.insert(0, sys.argv[1])
import zarr
from zarr.core.dtype import data_type_registry
(entry,) = [e for e in data_type_registry._lazy_load_list if e.value.startswith("pagedkv.")][:1]
assert entry.load()._zarr_v3_name == entry.name == "bfloat16"
assert data_type_registry.match_json("bfloat16", zarr_format=3) == entry.load()()
""",
            site,
        )
