"""Rows by what their pages follow: searched, not compared one by one; gone ones are noticed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv import PageKey, child_rows
from pagedkv.catalog import Kinship
from pagedkv.child_rows import ChildRows
from pagedkv.token_order import num_common


def ids_of(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


class Table:
    """Rows and their ids in a dict; counts what is read. A row's key is made of its ids."""

    def __init__(self) -> None:
        self.ids: dict[int, bytes] = {}
        self.unreadable: set[int] = set()
        self.num_rows = 0
        self.num_read = 0

    def ids_of_rows(self, rows: np.ndarray) -> list[bytes | None]:
        self.num_read += len(rows)
        return [None if row in self.unreadable else self.ids.get(row) for row in rows.tolist()]

    def is_known(self, rows: np.ndarray) -> np.ndarray:
        return np.array([row in self.ids for row in rows.tolist()], np.bool_)

    def key_of(self, ids: bytes) -> PageKey | None:
        return PageKey(ids.ljust(32)) if ids in self.ids.values() else None


@pytest.fixture
def table() -> Table:
    return Table()


def add(
    children: ChildRows, table: Table, family: int, *rows_ids: bytes, nameless: bool = False
) -> int:
    """Add rows; the first of them."""
    first = table.num_rows  # rows are never used again
    table.num_rows += len(rows_ids)
    table.ids.update(zip(range(first, first + len(rows_ids)), rows_ids, strict=True))
    families = np.full(len(rows_ids), family, np.uint64)
    children.add_many(first, Kinship(families=families, has_nameless_tails=nameless))
    return first


def check(children: ChildRows, table: Table, family: int, wanted: bytes, count: int) -> None:
    found = children.find(family, wanted, table.key_of)
    assert (found.num_tokens if found else 0) == count
    if found:
        assert num_common(wanted, bytes(found.key)) >= count
    children.check_invariants()


def test_the_row_with_most_common_ids_is_found(table: Table) -> None:
    children = ChildRows(table)
    add(children, table, 5, ids_of(1, 2, 3), ids_of(1, 7), ids_of(4))
    add(children, table, 6, ids_of(1, 2, 9))
    check(children, table, 5, ids_of(1, 2, 9), 2)
    check(children, table, 6, ids_of(1, 2, 9), 3)
    check(children, table, 5, ids_of(9), 0)
    check(children, table, 7, ids_of(1), 0)


def test_a_search_among_many_reads_few(table: Table) -> None:
    children = ChildRows(table)
    add(children, table, 5, *(ids_of(1, 2, number) for number in range(20_000)))
    children.take_in()
    assert table.num_read == 0
    check(children, table, 5, ids_of(1, 2, 30_000), 2)
    assert table.num_read <= 20_000 + 25  # once for all of them
    table.num_read = 0
    for number in range(0, 20_000, 2000):
        check(children, table, 5, ids_of(1, 2, number), 3)
    assert table.num_read <= 10 * 20


def test_late_siblings_do_not_disturb_a_large_family(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_rows, "_MAX_RECENT", 50)
    children = ChildRows(table)
    add(children, table, 5, *(ids_of(1, number) for number in range(2000)))
    check(children, table, 5, ids_of(1, 5000), 1)
    table.num_read = 0
    for number in range(2000, 2100):
        add(children, table, 5, ids_of(1, number))
        check(children, table, 5, ids_of(1, number), 2)
    assert table.num_read <= 100 * 25  # never all of them again
    for number in range(2100, 2300):
        add(children, table, 5, ids_of(1, number))
    check(children, table, 5, ids_of(1, 2299), 2)
    check(children, table, 5, ids_of(1, 3), 2)


def test_rows_of_others_are_passed_over(table: Table) -> None:
    children = ChildRows(table)
    add(children, table, 5, *(ids_of(1, 2, number) for number in range(10)), ids_of(1, 8))
    refused = {ids_of(1, 2, number) for number in range(10)}
    found = children.find(
        5, ids_of(1, 2, 4), lambda ids: None if ids in refused else table.key_of(ids)
    )
    assert found is not None
    assert found.num_tokens == 1


def test_not_all_rows_of_others_are_tried(table: Table) -> None:
    children = ChildRows(table)
    add(children, table, 5, *(ids_of(1, 2, number) for number in range(1000)), ids_of(1, 8))
    asked = []
    assert children.find(5, ids_of(1, 2, 4), asked.append) is None
    assert len(asked) < 200


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_searched", [False, True])
def test_rows_that_have_gone_are_forgotten(
    table: Table, monkeypatch: pytest.MonkeyPatch, is_late: bool, is_searched: bool
) -> None:
    if not is_late:
        monkeypatch.setattr(child_rows, "_MAX_RECENT", 10)
    children = ChildRows(table)
    first = add(children, table, 5, *(ids_of(1, 2, number) for number in range(100)))
    kept = add(children, table, 5, ids_of(1, 3, 3), ids_of(1, 4, 4))
    if is_searched:
        check(children, table, 5, ids_of(1, 2, 3), 3)
    for row in range(first, kept):
        del table.ids[row]
    check(children, table, 5, ids_of(1, 2, 3), 1)
    check(children, table, 5, ids_of(1, 4, 3), 2)


def test_one_damaged_record_hides_no_other(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_rows, "_MAX_RECENT", 10)
    children = ChildRows(table)
    add(children, table, 5, *(ids_of(1, number) for number in range(100)))
    check(children, table, 5, ids_of(1, 10), 2)
    table.unreadable = {row for row, ids in table.ids.items() if ids == ids_of(1, 77)}
    check(children, table, 5, ids_of(1, 77), 1)
    check(children, table, 5, ids_of(1, 78), 2)


def test_when_many_have_gone_all_are_looked_through(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_rows, "_MAX_RECENT", 10)
    children = ChildRows(table)
    add(children, table, 5, *(ids_of(1, number) for number in range(100)))
    add(children, table, 6, *(ids_of(2, number) for number in range(100)))
    check(children, table, 6, ids_of(2, 1), 2)
    for row in range(100):
        del table.ids[row]
    children.note_dropped(100)
    check(children, table, 6, ids_of(2, 1), 2)
    assert len(children._rows) == 100


def test_it_takes_sixteen_bytes_a_row(table: Table) -> None:
    children = ChildRows(table)
    add(children, table, 5, *(ids_of(number) for number in range(10_000)))
    children.take_in()
    assert children._rows.nbytes + children._families.nbytes == 16 * 10_000


row_ids = st.lists(st.integers(0, 2), min_size=1, max_size=3)


@given(
    steps=st.lists(st.tuples(st.sampled_from("aaads"), st.integers(1, 2), row_ids), max_size=40),
    max_recent=st.sampled_from([0, 3, 100]),
)
def test_it_answers_like_a_table(steps: list[tuple[str, int, list[int]]], max_recent: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_rows, "_MAX_RECENT", max_recent)
        patch.setattr(child_rows, "_MAX_LATE", 2)
        table = Table()
        children = ChildRows(table)
        family_of: dict[int, int] = {}
        for what, family, ids in steps:
            wanted = ids_of(*ids)
            if what == "a":
                family_of[add(children, table, family, wanted)] = family
            elif what == "d" and table.ids:
                del table.ids[sorted(table.ids)[len(ids) % len(table.ids)]]
                children.note_dropped(1)
            rows = [row for row, one in family_of.items() if one == family and row in table.ids]
            live = {table.ids[row] for row in rows}
            found = children.find(
                family, wanted, lambda ids, live=live: PageKey(ids) if ids in live else None
            )
            best = max((num_common(ids, wanted) for ids in live), default=0)
            assert (found.num_tokens if found else 0) == best
            children.check_invariants()
