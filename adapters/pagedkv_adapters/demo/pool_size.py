"""How large a pool is to be: a size such as ``"48MiB"``, or a share such as ``"10%"``."""

import re

import pagedkv as pk


def check_pool(pool: str) -> None:
    """Raise ``ValueError`` if ``pool`` is neither a size nor a share of up to 100 %."""
    share = _share(pool)
    if share is None:
        pk.parse_nbytes(pool)
    elif not 0 < share <= 1:
        raise ValueError(f"a pool of {pool} makes no sense: give more than 0% and at most 100%")


def pool_slots(pool: str, spec: pk.KVSpec, num_tokens: int) -> int:
    """Slots of a pool that was asked for as a size or as a share of the KV of ``num_tokens``.

    Raises:
        ValueError: ``pool`` is neither, or holds no page.
    """
    share = _share(pool)
    if share is None:
        num_slots = pk.parse_nbytes(pool) // spec.page_nbytes
    else:
        num_slots = int(share * num_tokens / spec.page_tokens)
    if num_slots < 1:
        raise ValueError(
            f"a pool of {pool} holds no page: a page of {spec.page_tokens} tokens takes "
            f"{pk.format_nbytes(spec.page_nbytes)}"
        )
    return num_slots


def _share(pool: str) -> float | None:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", pool)
    return float(found[1]) / 100 if found else None
