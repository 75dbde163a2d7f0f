"""``read_tokens``: token ids from a file."""

import io
import json
import sys
from pathlib import Path

import numpy as np

from pagedkv.prefix import Tokens

_NPY = b"\x93NUMPY"
_MAX_ID = 2**31 - 1


def read_tokens(path: str | Path) -> Tokens:
    """The token ids in a file: a JSON list, numbers apart by blanks or commas, or ``.npy``.

    Args:
        path: The file; ``-`` is standard input.

    Raises:
        ValueError: There is no such file, no id in it, or something else than an id: the message
            names it and its place.
    """
    where = "standard input" if str(path) == "-" else str(path)
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the tokens in {where}: {error.strerror}") from error
    if data.startswith(_NPY):
        ids = _from_npy(data, where)
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{where} is neither text nor .npy (byte {error.start} is no UTF-8): give a JSON"
                " list of token ids, numbers, or a .npy file"
            ) from error
        is_json = text.lstrip()[:1] in ("[", "{", '"')
        ids = _from_json(text, where) if is_json else _from_text(text, where)
    if not len(ids):
        raise ValueError(f"{where} is empty: it must name at least one token id")
    return ids


def _from_npy(data: bytes, where: str) -> Tokens:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{where} is a damaged .npy file: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{where} holds {array.dtype} of shape {array.shape}: give one row of integers"
        )
    wrong = np.flatnonzero((array < 0) | (array > _MAX_ID))
    if len(wrong):
        raise _not_an_id(where, f"entry {wrong[0]}", str(array[wrong[0]]))
    ids: Tokens = array.astype(np.int32)
    return ids


def _from_json(text: str, where: str) -> Tokens:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}, line {error.lineno}, is no JSON list of token ids: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or a deep nest
        raise ValueError(f"{where} is no JSON list of token ids: {error}") from error
    if not isinstance(values, list):
        raise ValueError(f"{where} holds a JSON {type(values).__name__}: give a list of token ids")
    for number, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= _MAX_ID:
            raise _not_an_id(where, f"entry {number}", json.dumps(value))
    return np.array(values, np.int32)


def _from_text(text: str, where: str) -> Tokens:
    ids: list[int] = []
    for number, line in enumerate(text.splitlines(), 1):
        for word in line.replace(",", " ").split():
            digits = word.removeprefix("+")
            if not (digits.isascii() and digits.isdigit()) or len(digits.lstrip("0")) > 10:
                raise _not_an_id(where, f"line {number}", word)
            if int(digits) > _MAX_ID:
                raise _not_an_id(where, f"line {number}", word)
            ids.append(int(digits))
    return np.array(ids, np.int32)


def _not_an_id(where: str, place: str, value: str) -> ValueError:
    shown = value if len(value) <= 40 else f"{value[:40]}…"
    return ValueError(f"{where}, {place}: {shown} is no token id: an integer in 0..{_MAX_ID}")
