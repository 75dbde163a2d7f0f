"""KVSpec: geometry, identity, and what it refuses."""

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_samples import make_spec

from pagedkv import KVSpec, SpecMismatchError, format_nbytes, parse_nbytes

CHANGES = {
    "num_layers": 3,
    "num_kv_heads": 2,
    "head_dim": 4,
    "page_tokens": 8,
    "dtype": "float16",
    "model": "sha256:other",
    "layer_range": (0, 1),
    "num_kinds": 1,
    "group": "window",
}


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_sizes_follow_from_the_geometry(dtype: str, itemsize: int) -> None:
    spec = make_spec(
        num_layers=6, num_kv_heads=8, head_dim=16, page_tokens=4, dtype=dtype,
        layer_range=(2, 5), head_range=(4, 6),
    )  # fmt: skip
    assert (spec.held_layers, spec.held_heads) == (3, 2)
    assert spec.layer_shape == (2, 4, 2, 16)
    assert spec.page_shape == (3, 2, 4, 2, 16)
    assert spec.layer_nbytes == 2 * 4 * 2 * 16 * itemsize
    assert spec.page_nbytes == np.zeros(spec.page_shape, spec.np_dtype).nbytes
    assert spec.np_dtype.itemsize == itemsize


def test_bfloat16_is_that_of_ml_dtypes() -> None:
    assert make_spec(dtype="bfloat16").np_dtype == np.dtype(ml_dtypes.bfloat16)


def test_a_single_kind_halves_the_page() -> None:
    assert 2 * make_spec(num_kinds=1).page_nbytes == make_spec().page_nbytes


def test_ranges_cover_everything_by_default() -> None:
    spec = make_spec(num_layers=5, num_kv_heads=3)
    assert (spec.layer_range, spec.head_range) == ((0, 5), (0, 3))
    assert spec == make_spec(num_layers=5, num_kv_heads=3, layer_range=(0, 5), head_range=(0, 3))


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_changes_the_root_key(name: str) -> None:
    assert make_spec(**{name: CHANGES[name]}).root_key() != make_spec().root_key()


def test_the_root_key_of_a_head_range_differs() -> None:
    whole = make_spec(num_kv_heads=2)
    assert (
        replace(whole, head_range=(0, 1)).root_key() != replace(whole, head_range=(1, 2)).root_key()
    )


def test_the_root_key_never_changes_between_releases() -> None:
    spec = KVSpec(
        num_layers=30, num_kv_heads=3, head_dim=64, page_tokens=16, dtype="float32", model="m"
    )
    text = (
        '{"dtype":"float32","group":"0","head_dim":64,"head_range":[0,3],"layer_range":[0,30],'
        '"model":"m","num_kinds":2,"num_kv_heads":3,"num_layers":30,"page_tokens":16}'
    )
    assert json.dumps(spec.to_dict(), sort_keys=True, separators=(",", ":")) == text
    assert spec.root_key().hex() == (
        "73c588252562340a73e4aedcd53da29422ea04d8339d86d0d7d9de15ff01fbf9"
    )


@pytest.mark.parametrize("name", CHANGES)
def test_from_dict_is_the_inverse_of_to_dict(name: str) -> None:
    spec = make_spec(**{name: CHANGES[name]})
    assert KVSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"num_layers": 2}, TypeError),
        ({**make_spec().to_dict(), "colour": "red"}, TypeError),
        ({**make_spec().to_dict(), "dtype": "float8"}, ValueError),
        ({**make_spec().to_dict(), "layer_range": [0, 1, 2]}, TypeError),
    ],
)
def test_from_dict_refuses_what_is_no_spec(values: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        KVSpec.from_dict(values)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "page_tokens"])
@pytest.mark.parametrize("value", [0, -1, -(2**40)])
def test_counts_below_one_are_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}: it must be at least 1"):
        make_spec(**{name: value})


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "page_tokens"])
@pytest.mark.parametrize("value", [2.0, "2", None, True])
def test_counts_that_are_no_integers_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} is {value!r}"):
        make_spec(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_kinds", 0),
        ("num_kinds", 3),
        ("dtype", "int8"),
        ("dtype", np.float32),
        ("model", ""),
        ("model", None),
        ("group", ""),
        ("group", "a/b"),
        ("group", "x" * 65),
        ("group", "new\n"),
        ("group", 0),
        ("layer_range", (1, 1)),
        ("layer_range", (-1, 1)),
        ("layer_range", (0, 3)),
        ("layer_range", (2, 1)),
        ("head_range", (0, 2)),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is "):
        make_spec(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_kinds", 2.0),
        ("num_kinds", True),
        ("layer_range", [0, 1]),
        ("layer_range", (0, 1.0)),
        ("layer_range", (0,)),
        ("head_range", 1),
    ],
)
def test_values_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name} is "):
        make_spec(**{name: value})


def test_a_spec_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        make_spec().page_tokens = 5  # type: ignore[misc]


def test_require_equal_names_every_difference() -> None:
    here, there = make_spec(), make_spec(head_dim=4, model="sha256:other")
    here.require_equal(make_spec(), "the store")
    with pytest.raises(SpecMismatchError, match="the store holds the KV of another spec") as error:
        here.require_equal(there, "the store")
    assert "head_dim is 4 there and 2 here" in str(error.value)
    assert "model is 'sha256:other' there and 'sha256:test' here" in str(error.value)
    assert "page_tokens" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("64MiB", 64 * 2**20),
        ("64 MB", 64 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("20 G", 20 * 10**9),
        ("2T", 2 * 10**12),
        (" 7KiB ", 7 * 1024),
        ("7kB", 7000),
        ("3B", 3),
        (str(2**60 + 1), 2**60 + 1),
    ],
)
def test_parse_nbytes(text: int | str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-5", "1e3", "5 apples", "1.2.3M", "5iB", "0", 0, -1, "0.1B"]
)
def test_parse_nbytes_refuses_what_is_no_size(text: int | str) -> None:
    with pytest.raises(ValueError, match="byte size"):
        parse_nbytes(text)


@pytest.mark.parametrize("value", [1.5, None, True, b"5"])
def test_parse_nbytes_refuses_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match="byte size"):
        parse_nbytes(value)


@given(st.integers(1, 2**50))
def test_parse_nbytes_reads_what_format_nbytes_writes(nbytes: int) -> None:
    assert parse_nbytes(format_nbytes(nbytes)) == pytest.approx(nbytes, rel=0.05)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_format_nbytes(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text
