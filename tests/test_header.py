import json
from typing import Any

import google_crc32c
import pytest
from store_samples import make_spec

from pagedkv.codec import Int8, Raw
from pagedkv.errors import FormatVersionError, SpecMismatchError, StoreError
from pagedkv.header import CHECKSUM, StoreHeader, checksum

SPECS = (make_spec(), make_spec(group="windowed", head_dim=16))
HEADER = StoreHeader.new(SPECS, Int8(), 10**6, store_tokens=False)

CANONICAL = b'{"a":[null,"\\u00fc"],"b":1}'


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, CHECKSUM: checksum(values)}


def test_a_header_survives_json() -> None:
    values = json.loads(json.dumps(HEADER.to_dict()))
    assert StoreHeader.from_dict(values, "x.zarr") == HEADER


def test_two_specs_of_one_group_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups are \['0', '0'\]"):
        StoreHeader.new((make_spec(), make_spec(head_dim=16)), Raw(), None, store_tokens=True)


def test_a_later_format_is_refused_naming_both() -> None:
    with pytest.raises(FormatVersionError, match=r"x\.zarr has format version 2.* up to 1"):
        StoreHeader.from_dict(sealed({**HEADER.to_dict(), "format_version": 2}), "x.zarr")


def test_the_checksum_is_crc32c_of_the_canonical_json_of_all_other_fields() -> None:
    assert checksum({"b": 1, "a": [None, "ü"]}) == checksum(
        {CHECKSUM: "x", "a": [None, "ü"], "b": 1}
    )
    assert checksum({"b": 1, "a": [None, "ü"]}) == f"{google_crc32c.value(CANONICAL):08x}"
    assert HEADER.to_dict()[CHECKSUM] == checksum(HEADER.to_dict())


@pytest.mark.parametrize(
    "values",
    [
        None,
        "text",
        {},
        {key: value for key, value in HEADER.to_dict().items() if key != CHECKSUM},
        {**HEADER.to_dict(), "max_nbytes": 10**6 + 1},
        {**HEADER.to_dict(), "format_version": 2},
        {**HEADER.to_dict(), "more": 1},
        {**HEADER.to_dict(), CHECKSUM: None},
    ],
)
def test_attributes_without_the_right_checksum_are_damaged(values: object) -> None:
    with pytest.raises(StoreError, match=r"attributes of x\.zarr are damaged: .*CRC32C") as caught:
        StoreHeader.from_dict(values, "x.zarr")
    assert type(caught.value) is StoreError


def test_what_a_release_of_the_same_format_adds_is_ignored() -> None:
    assert StoreHeader.from_dict(sealed({**HEADER.to_dict(), "more": 1}), "x.zarr") == HEADER


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": "1"},
        {"format_version": None},
        {"format_version": 0},
        {"specs": []},
        {"specs": [{"num_layers": 1}]},
        {"specs": 3},
        {"codec": {"name": "zip"}},
        {"codec": None},
        {"segment_rows": [1]},
        {"segment_rows": [0, 1]},
        {"segment_rows": [1, 10**9]},
        {"segment_rows": None},
        {"max_nbytes": "much"},
    ],
)
def test_damaged_attributes_are_refused_naming_the_store(changes: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match=r"attributes of x\.zarr are damaged"):
        StoreHeader.from_dict(sealed({**HEADER.to_dict(), **changes}), "x.zarr")


def test_missing_attributes_are_refused() -> None:
    values = HEADER.to_dict()
    del values["codec"]
    with pytest.raises(StoreError, match=r"attributes of x\.zarr are damaged: KeyError\('codec'\)"):
        StoreHeader.from_dict(sealed(values), "x.zarr")


def test_an_equal_spec_and_codec_match() -> None:
    HEADER.require_match(SPECS, Int8(), "x.zarr")
    HEADER.require_match(None, None, "x.zarr")


def test_another_spec_is_refused_naming_both_values() -> None:
    with pytest.raises(SpecMismatchError, match=r"x\.zarr .*head_dim is 16 there and 32 here"):
        wanted = (SPECS[0], make_spec(group="windowed", head_dim=32))
        HEADER.require_match(wanted, None, "x.zarr")


def test_another_number_of_groups_is_refused() -> None:
    with pytest.raises(SpecMismatchError, match=r"holds 2 layer groups, not 1"):
        HEADER.require_match(SPECS[:1], None, "x.zarr")


def test_another_codec_is_refused_naming_both() -> None:
    with pytest.raises(SpecMismatchError, match=r"has codec Int8\(.*not Raw\(\)"):
        HEADER.require_match(None, Raw(), "x.zarr")
