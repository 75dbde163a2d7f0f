"""Token ids from files: what is read, and what is refused with its place."""

import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv.token_file import read_tokens


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 2147483647]",
        "1 2 2147483647",
        "1,2,2147483647\n",
        "\ufeff1\n2\n\n+2147483647",
        "1, 2 ,\t2147483647,",
    ],
)
def test_texts_that_name_tokens(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokens").write_text(text, "utf-8")
    assert read_tokens(tmp_path / "tokens").tolist() == [1, 2, 2**31 - 1]
    assert read_tokens(tmp_path / "tokens").dtype == np.int32


@pytest.mark.parametrize("dtype", ["<i8", "<u2", ">i4"])
def test_an_array_file(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "tokens.npy", np.array([3, 1, 40000], dtype))
    assert read_tokens(tmp_path / "tokens.npy").tolist() == [3, 1, 40000]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"[4, 5]")))
    assert read_tokens("-").tolist() == [4, 5]


def npy(array: "np.typing.NDArray[np.generic]") -> bytes:
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"[]", "is empty"),
        (npy(np.zeros(0, np.int32)), "is empty"),
        (b"1 2\n3 four", "line 2: four is no token id"),
        (b"1 2\n3 -4", "line 2: -4 is no token id"),
        (b"2147483648", "line 1: 2147483648 is no token id"),
        (b"9" * 10_000, "line 1: 9999"),
        (b"1.5", "line 1: 1.5 is no token id"),
        ("\u0663".encode(), "line 1: \u0663 is no token id"),
        (b"[1, -2]", "entry 1: -2 is no token id"),
        (b"[1, 2147483648]", "entry 1: 2147483648 is no token id"),
        (b"[1, 2.0]", "entry 1: 2.0 is no token id"),
        (b"[1, true]", "entry 1: true is no token id"),
        (b"[1, [2]]", "entry 1: \\[2\\] is no token id"),
        (b'{"tokens": [1]}', "holds a JSON dict"),
        (b"[1,\n2", "line 2, is no JSON list"),
        (b"[" * 100_000, "is no JSON list"),
        (b"[" + b"9" * 10_000 + b"]", "no JSON list|no token id"),
        (b"\xff\xfe1", "neither text nor .npy"),
        (npy(np.array([1.0])), "float64 of shape \\(1,\\)"),
        (npy(np.array([[1]])), "int64 of shape \\(1, 1\\)"),
        (npy(np.array([1, -7])), "entry 1: -7 is no token id"),
        (npy(np.array([2**40])), "entry 0: 1099511627776 is no token id"),
        (npy(np.array([1, 2]))[:-3], "damaged .npy"),
        (npy(np.array([None])), "damaged .npy"),
    ],
)
def test_what_names_no_tokens_is_refused_with_its_place(
    tmp_path: Path, data: bytes, message: str
) -> None:
    (tmp_path / "tokens").write_bytes(data)
    with pytest.raises(ValueError, match=message) as info:
        read_tokens(tmp_path / "tokens")
    assert str(tmp_path / "tokens") in str(info.value)
    assert len(str(info.value)) < 400


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: No such file"):
        read_tokens(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="Is a directory"):
        read_tokens(tmp_path)
