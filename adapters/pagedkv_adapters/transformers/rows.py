"""``Rows``: the rows of a batch, of which equal ones are one sequence."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from pagedkv_adapters.transformers.forward_input import ForwardInput
from pagedkv_adapters.transformers.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The rows of a batch at some time.

    Args:
        rows: All of them.
        sizes: Of each sequence its row, pads and tokens.
    """

    rows: tuple[Row, ...]
    sizes: tuple[tuple[Row, int, int], ...]


class Rows:
    """The rows of a batch. One that occurs more than once is one sequence, until its copies differ.

    Args:
        rows: At least one; they are the batch's from then on.
    """

    def __init__(self, rows: Seq[Row]) -> None:
        self._set(rows)

    def _set(self, rows: Seq[Row]) -> None:
        self.all = tuple(rows)
        numbers: dict[int, int] = {}
        self.firsts = tuple(numbers.setdefault(id(row), at) for at, row in enumerate(rows))
        """For each row the number of the first that is the same."""
        self.numbered = tuple((at, rows[at]) for at in numbers.values())
        """Each sequence once, with the number of its first row."""
        self.distinct = tuple(row for _, row in self.numbered)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def is_plain(self) -> bool:
        """Whether it is one row without pads."""
        return len(self.all) == 1 and not self.all[0].num_pads

    @property
    def num_columns(self) -> int:
        """Columns that all rows hold."""
        return min(row.num_columns for row in self.distinct)

    def check(self, given: ForwardInput) -> None:
        """``ValueError`` unless a forward pass goes on with these rows; there may be more of each.

        Args:
            given: What the pass is given.
        """
        for at, row in enumerate(self._spread(given)):
            row.require_pads(int(given.num_pads[at]), given.num_columns)
            if given.ids is not None:
                row.require_ids(given.ids[at], given.past)

    def part(self, given: ForwardInput) -> None:
        """Become the rows of a forward pass; those that go on in different ways are forked."""
        rows = self._spread(given)
        ways = [(id(row), *_way_on(given, at)) for at, row in enumerate(rows)]
        parted: dict[tuple[int, int, bytes], Row] = {}
        forks: list[Row] = []
        taken: set[int] = set()
        try:
            for row, way in zip(rows, ways, strict=True):
                if way in parted:
                    continue
                if id(row) in taken:
                    forks.append(row.fork())
                parted[way] = forks[-1] if id(row) in taken else row
                taken.add(id(row))
        except BaseException:
            for fork in forks:
                fork.close()
            raise
        self._set([parted[way] for way in ways])

    def snapshot(self) -> "Snapshot":
        """What ``restore`` goes back to."""
        return Snapshot(
            rows=self.all,
            sizes=tuple((row, row.num_pads, row.num_tokens) for row in self.distinct),
        )

    def restore(self, before: "Snapshot", num_columns: int = 0) -> None:
        """Become the rows of a snapshot again, with what they held then.

        Args:
            before: The snapshot.
            num_columns: So many may they hold at least, if they do by now.
        """
        kept = {id(row) for row in before.rows}
        forks = [row for row in self.distinct if id(row) not in kept]
        self._set(before.rows)
        for fork in forks:
            fork.close()
        for row, num_pads, num_tokens in before.sizes:
            num_left = max(num_tokens, num_columns - row.num_pads)
            row.truncate(min(num_left, row.num_tokens))
            if not row.num_tokens:
                row.num_pads = num_pads

    def select(self, numbers: torch.Tensor) -> None:
        """Go on with these rows, and close those that are left over."""
        rows = [self.all[number] for number in numbers.tolist()]
        if not rows:
            raise ValueError("no row is selected: a PagedCache holds at least one")
        kept = {id(row) for row in rows}
        left_over = [row for row in self.distinct if id(row) not in kept]
        self._set(rows)
        for row in left_over:
            row.close()

    def repeat(self, repeats: int) -> None:
        """Go on with every row so many times, one beside the other."""
        self._set([row for row in self.all for _ in range(repeats)])

    def _spread(self, given: ForwardInput) -> list[Row]:
        """The row of each row of the input, of which there may be several for each of the batch."""
        repeats, left_over = divmod(given.num_rows, len(self.all))
        if left_over or not repeats:
            raise ValueError(
                f"the forward pass has {given.num_rows} rows, but the cache holds "
                f"{len(self.all)}: select some with batch_select_indices, or make another "
                "PagedCache"
            )
        return [row for row in self.all for _ in range(repeats)]


def _way_on(given: ForwardInput, row: int) -> tuple[int, bytes]:
    """What tells apart how rows go on; rows of embeddings are all different."""
    if given.ids is None:
        return row, b""
    return int(given.num_pads[row]), given.ids[row].tobytes()
