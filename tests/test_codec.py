import ml_dtypes
import numpy as np
import pytest
from store_samples import Array, make_pages, make_spec, same_bits

from pagedkv.codec import (
    Codec,
    Int8,
    Lossless,
    Raw,
    check_finite,
    codec_from_dict,
    get_codec,
)
from pagedkv.spec import KVSpec

INT8 = [
    Int8(key_scales=k, value_scales=v) for k in ("channel", "token") for v in ("channel", "token")
]
CODECS: list[Codec] = [Raw(), *INT8, Lossless()]
SPECS = [
    make_spec(dtype=dtype, num_kinds=kinds)
    for dtype in ("float32", "float16", "bfloat16")
    for kinds in (1, 2)
]
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def encode(codec: Codec, spec: KVSpec, layer: Array) -> Array:
    if isinstance(codec, Lossless):
        return codec.encode_layer(spec, layer)
    assert isinstance(codec, Raw | Int8)
    payload = np.full(codec.layer_nbytes(spec), 0xAA, np.uint8)
    codec.encode(spec, layer, payload)
    return payload


def decode(codec: Codec, spec: KVSpec, payload: Array) -> Array:
    out = np.full(spec.layer_shape, 7, spec.np_dtype)
    codec.decode(spec, payload, out)
    return out


def scale_shape(covers: str, layer: Array) -> tuple[int, int]:
    _, tokens, heads, channels = layer.shape
    return (heads, channels) if covers == "channel" else (tokens, heads)


class TestEveryCodec:
    """What the store relies on, for every codec, dtype and number of kinds."""

    @pytest.fixture(params=CODECS, ids=str)
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return request.param

    @pytest.fixture(params=SPECS, ids=lambda spec: f"{spec.dtype}-{spec.num_kinds}")
    def spec(self, request: pytest.FixtureRequest) -> KVSpec:
        return request.param

    def test_every_byte_of_the_payload_is_written(self, codec: Codec, spec: KVSpec) -> None:
        layer = make_pages(spec, 1)[0][0]
        payload = encode(codec, spec, layer)
        if isinstance(codec, Raw | Int8):
            first = np.zeros(codec.layer_nbytes(spec), np.uint8)
            codec.encode(spec, layer, first)
            assert same_bits([first], [payload])

    def test_a_payload_is_as_long_as_the_codec_says(self, codec: Codec, spec: KVSpec) -> None:
        rng = np.random.default_rng(3)
        noise = rng.integers(0, 2**14, spec.layer_shape, np.uint16).astype(np.float32)
        for layer in (noise.astype(spec.np_dtype), np.zeros(spec.layer_shape, spec.np_dtype)):
            payload = encode(codec, spec, layer)
            assert len(payload) <= codec.layer_nbytes(spec)
            if codec.fixed_size:
                assert len(payload) == codec.layer_nbytes(spec)

    def test_strided_views_encode_and_decode_as_copies_do(self, codec: Codec, spec: KVSpec) -> None:
        kinds, tokens, heads, channels = spec.layer_shape
        pool = np.zeros((kinds, 5, tokens, heads, 2 * channels), spec.np_dtype)
        view = pool[:, 3, :, ::-1, ::2]
        view[...] = make_pages(spec, 1)[0][0]
        payload = encode(codec, spec, view)
        assert same_bits([payload], [encode(codec, spec, view.copy())])
        out = np.zeros_like(pool)
        codec.decode(spec, payload, out[:, 1, :, ::-1, ::2])
        assert same_bits([out[:, 1, :, ::-1, ::2]], [decode(codec, spec, payload)])
        out[:, 1, :, ::-1, ::2] = 0
        assert not out.any()

    def test_payloads_need_no_alignment(self, codec: Codec, spec: KVSpec) -> None:
        layer = make_pages(spec, 1)[0][0]
        payload = encode(codec, spec, layer)
        buffer = np.zeros(len(payload) + 1, np.uint8)
        buffer[1:] = payload
        if isinstance(codec, Raw | Int8):
            codec.encode(spec, layer, buffer[1:])
            assert same_bits([buffer[1:]], [payload])
        assert same_bits([decode(codec, spec, buffer[1:])], [decode(codec, spec, payload)])

    def test_encoding_what_was_decoded_changes_no_number(self, codec: Codec, spec: KVSpec) -> None:
        once = decode(codec, spec, encode(codec, spec, make_pages(spec, 1)[0][0]))
        twice = decode(codec, spec, encode(codec, spec, once))
        tolerance = 0 if codec.lossless else 2 * EPSILON[spec.dtype]
        np.testing.assert_allclose(
            twice.astype(np.float32), once.astype(np.float32), rtol=tolerance, atol=0
        )

    def test_the_description_names_an_equal_codec(self, codec: Codec) -> None:
        assert codec_from_dict(codec.to_dict()) == codec
        assert codec.to_dict()["name"] == codec.name
        assert hash(codec) == hash(codec_from_dict(codec.to_dict()))


@pytest.mark.parametrize("codec", [Raw(), Lossless()], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dtype}-{spec.num_kinds}")
def test_lossless_codecs_give_back_the_very_bits(codec: Codec, spec: KVSpec) -> None:
    rng = np.random.default_rng(1)
    noise = rng.integers(0, 256, spec.layer_nbytes, dtype=np.uint8)
    layer = noise.view(spec.np_dtype).reshape(spec.layer_shape)  # NaNs with payloads and all
    payload = encode(codec, spec, layer)
    assert codec.lossless
    assert same_bits([decode(codec, spec, payload)], [layer])


def test_raw_is_the_numbers_in_c_order() -> None:
    spec = make_spec(dtype="bfloat16")
    layer = make_pages(spec, 1)[0][0]
    assert encode(Raw(), spec, layer).tobytes() == layer.tobytes()


def test_lossless_shrinks_numbers_of_like_magnitude() -> None:
    spec = make_spec(page_tokens=16, head_dim=64, dtype="bfloat16")
    layer = make_pages(spec, 1)[0][0]
    assert len(encode(Lossless(), spec, layer)) < 0.85 * spec.layer_nbytes


def test_lossless_refuses_what_is_no_layer() -> None:
    spec = make_spec()
    payload = encode(Lossless(), spec, make_pages(spec, 1)[0][0])
    for part in (payload[:-5], payload[:9], payload[:0]):
        with pytest.raises(ValueError, match=f"a payload of {len(part)} bytes says"):
            decode(Lossless(), spec, part)
    smaller = encode(Lossless(), spec, np.zeros((2, 4, 1, 8), np.float32))
    with pytest.raises(ValueError, match="holds 256: a layer has 512"):
        decode(Lossless(), spec, smaller)
    payload = payload.copy()
    payload[0] = 77  # a version of Blosc that there is not
    with pytest.raises(ValueError, match="Blosc cannot read a payload"):
        decode(Lossless(), spec, payload)


@pytest.mark.parametrize("codec", INT8, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dtype}-{spec.num_kinds}")
def test_int8_comes_back_within_half_a_scale_and_a_rounding(codec: Int8, spec: KVSpec) -> None:
    layer = make_pages(spec, 1, seed=2)[0][0]
    layer[0, :, :, 3] *= 50  # a channel of outliers
    out = decode(codec, spec, encode(codec, spec, layer)).astype(np.float64)
    for kind in range(spec.num_kinds):
        covers = codec.key_scales if kind == 0 else codec.value_scales
        numbers = layer[kind].astype(np.float64)
        axis = 0 if covers == "channel" else 2
        scales = np.abs(numbers).max(axis=axis, keepdims=True) / 127 * (1 + 2.0**-8)
        bound = scales / 2 * (1 + 1e-5) + np.abs(numbers) * EPSILON[spec.dtype]
        assert (np.abs(out[kind] - numbers) <= bound).all()
        assert (out[kind] != numbers).any()


@pytest.mark.parametrize("codec", INT8, ids=str)
def test_int8_payload_is_scales_then_integers_in_c_order(codec: Int8) -> None:
    spec = make_spec()
    layer = make_pages(spec, 1)[0][0]
    payload = encode(codec, spec, layer).tobytes()
    start = 0
    for kind, covers in enumerate([codec.key_scales, codec.value_scales]):
        axis = 0 if covers == "channel" else 2
        exact = np.abs(layer[kind]).max(axis=axis) / np.float32(127)
        bits = np.frombuffer(payload, "<u2", exact.size, start).reshape(exact.shape)
        scales = (bits.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(scales, exact.astype(ml_dtypes.bfloat16))
        start += bits.nbytes
        at = len(payload) - layer.size + kind * layer[kind].size
        integers = np.frombuffer(payload, np.int8, layer[kind].size, at).reshape(layer[kind].shape)
        assert np.array_equal(integers, np.rint(layer[kind] / np.expand_dims(scales, axis)))
        assert (np.abs(integers).max(axis=axis) == 127).all()
    assert start + layer.size == len(payload)


def test_int8_of_zeros_is_zeros() -> None:
    spec = make_spec()
    payload = encode(Int8(), spec, np.zeros(spec.layer_shape, np.float32))
    assert not payload.any()
    assert not decode(Int8(), spec, payload).any()


@pytest.mark.parametrize("codec", INT8, ids=str)
@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        ("float32", np.finfo(np.float32).max),
        ("float16", np.finfo(np.float16).max),
        ("bfloat16", ml_dtypes.finfo(ml_dtypes.bfloat16).max),
        ("float32", np.finfo(np.float32).smallest_subnormal),
        ("float32", np.float32(1.5e-43)),
        ("float32", np.float32(2.6e-43)),
        ("float16", np.finfo(np.float16).smallest_subnormal),
    ],
)
def test_int8_keeps_the_largest_and_smallest_numbers_finite_and_close(
    codec: Int8, dtype: str, largest: float
) -> None:
    spec = make_spec(dtype=dtype)
    layer = np.zeros(spec.layer_shape, spec.np_dtype)
    layer[:, 0, :, ::2] = largest
    layer[:, 1, :, ::3] = -layer[:, 0, :, :1]
    out = decode(codec, spec, encode(codec, spec, layer)).astype(np.float64)
    assert np.isfinite(out).all()
    slack = 2.0**-127  # half of the smallest scale
    assert (np.abs(out - layer.astype(np.float64)) <= float(largest) * 0.0042 + slack).all()


@pytest.mark.parametrize("codec", INT8, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_int8_encodes_what_came_back_to_the_same_payload(codec: Int8, dtype: str) -> None:
    spec = make_spec(dtype=dtype, page_tokens=16, head_dim=40)
    rng = np.random.default_rng(4)
    numbers = rng.standard_normal(spec.layer_shape) * np.exp(rng.standard_normal((2, 1, 2, 40)))
    payload = encode(codec, spec, numbers.astype(spec.np_dtype))
    assert same_bits([encode(codec, spec, decode(codec, spec, payload))], [payload])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_int8_stays_finite_and_close_for_every_magnitude_near_the_largest(dtype: str) -> None:
    spec = make_spec(dtype=dtype, page_tokens=1, head_dim=1, num_kv_heads=2048, num_kinds=1)
    integer = np.dtype({2: np.uint16, 4: np.uint32}[spec.np_dtype.itemsize])
    top = {"float16": 0x7BFF, "bfloat16": 0x7F7F, "float32": 0x7F7FFFFF}[dtype]
    step = 1 if dtype != "float32" else 2**13
    bits = top - step * np.arange(2048).reshape(spec.layer_shape)
    layer = bits.astype(integer).view(spec.np_dtype)
    out = decode(Int8(), spec, encode(Int8(), spec, layer)).astype(np.float64)
    numbers = layer.astype(np.float64)
    assert np.isfinite(out).all()
    bound = numbers / 127 / 2 * (1 + 6 / 128) + numbers * EPSILON[dtype] / 2
    assert (np.abs(out - numbers) <= bound).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_int8_refuses_what_is_not_finite_and_names_the_place(bad: float, dtype: str) -> None:
    spec = make_spec(dtype=dtype)
    layer = make_pages(spec, 1)[0][0]
    layer[1, 2, 0, 5] = bad
    with pytest.raises(ValueError, match=rf"{bad} at \(1, 2, 0, 5\)"):
        encode(Int8(), spec, layer)


def test_check_finite_names_what_it_checked() -> None:
    check_finite(np.ones(3, np.float16), "the keys")
    with pytest.raises(ValueError, match=r"the keys has nan at \(1,\)"):
        check_finite(np.array([1, np.nan], np.float16), "the keys")


def test_int8_is_a_quarter_of_float32_and_its_scales() -> None:
    spec = make_spec(num_layers=1, num_kv_heads=2, head_dim=8, page_tokens=4)
    assert Int8().layer_nbytes(spec) == 2 * 2 * 8 + 2 * 4 * 2 + 2 * 4 * 2 * 8
    assert Raw().layer_nbytes(spec) == spec.layer_nbytes


def test_codecs_are_found_by_name() -> None:
    assert get_codec(None) == Raw()
    assert get_codec("raw") == Raw()
    assert get_codec("int8") == Int8()
    assert get_codec("lossless") == Lossless()
    assert get_codec(Int8(key_scales="token")) == Int8(key_scales="token")


def test_codecs_of_other_scales_differ() -> None:
    assert Int8() != Int8(key_scales="token")
    assert Raw() != Int8()


@pytest.mark.parametrize("values", [{"name": "zip"}, {}, {"name": "int8", "key_scales": "page"}])
def test_unknown_codecs_are_refused(values: dict) -> None:
    with pytest.raises(ValueError, match=r"there is no codec|key_scales is 'page'"):
        codec_from_dict(values)


def test_unknown_options_of_a_codec_are_refused() -> None:
    with pytest.raises(TypeError):
        codec_from_dict({"name": "raw", "level": 3})
