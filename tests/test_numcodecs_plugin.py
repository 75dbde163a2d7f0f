import json

import numcodecs
import numpy as np
import pytest
from store_samples import make_pages, make_spec, same_bits

from pagedkv.codec import Int8
from pagedkv.numcodecs_plugin import Int8Numcodec


def make_codec(**changes: object) -> Int8Numcodec:
    spec = make_spec()
    options = {"shape": spec.layer_shape, "dtype": "float32", **changes}
    return Int8Numcodec(**options)  # type: ignore[arg-type]


def test_numcodecs_finds_it_by_its_configuration() -> None:
    codec = make_codec(key_scales="token", value_scales="channel")
    config = json.loads(json.dumps(codec.get_config()))
    again = numcodecs.get_codec(config)
    assert isinstance(again, Int8Numcodec)
    assert again == codec
    assert again.int8 == Int8(key_scales="token", value_scales="channel")
    assert again != make_codec()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_it_writes_and_reads_what_the_codec_does(dtype: str) -> None:
    spec = make_spec(dtype=dtype)
    layer = make_pages(spec, 1)[0][0]
    codec = make_codec(dtype=dtype)
    expected = np.empty(Int8().layer_nbytes(spec), np.uint8)
    Int8().encode(spec, layer, expected)
    numbers = np.empty_like(layer)
    Int8().decode(spec, expected, numbers)
    for buffer in (layer, layer.tobytes(), bytearray(layer.tobytes())):
        assert same_bits([codec.encode(buffer)], [expected])
    for payload in (expected, expected.tobytes()):
        assert same_bits([codec.decode(payload)], [numbers])
    out = np.empty_like(layer)
    assert codec.decode(expected, out=out) is out
    assert same_bits([out], [numbers])


def test_buffers_of_another_size_are_refused() -> None:
    codec = make_codec()
    with pytest.raises(ValueError, match=r"a buffer of 8 bytes is not one layer \(2, 4, 2, 8\)"):
        codec.encode(bytes(8))
    with pytest.raises(ValueError, match="a payload of 8 bytes is not one layer"):
        codec.decode(bytes(8))


def test_buffers_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="not C-contiguous"):
        make_codec().encode(np.zeros((2, 4, 2, 16), np.float32)[..., ::2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (4, 2, 8)}, "it must be \\(kind, token, head, channel\\)"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"key_scales": "page"}, "key_scales is 'page'"),
    ],
)
def test_configurations_that_mean_nothing_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_codec(**changes)
