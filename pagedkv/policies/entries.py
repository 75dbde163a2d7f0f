"""``Entry`` and ``Queue``: what a policy knows of a page, and pages in line."""

from collections.abc import Iterator

from pagedkv.spec import PageKey


class Entry:
    """A page as a policy knows it; a member of at most one queue."""

    __slots__ = ("after", "before", "count", "is_held", "key", "parent", "queue", "uses")

    def __init__(self, key: PageKey, parent: PageKey | None) -> None:
        self.key = key
        self.parent = parent
        self.is_held = False
        self.count = 0
        """Of uses, as far as a policy counts them."""
        self.uses = (0, 0)
        """When it was used, the last but one time and the last, as far as a policy minds."""
        self.queue: Queue
        self.before: Entry | None = None
        self.after: Entry | None = None  # both are None where it is in no queue, or parked


class Queue:
    """Entries in line, the first to leave first: a doubly linked list, so that all takes O(1).

    A parked entry is a member that stands out of line: it is counted, but not met.
    """

    __slots__ = ("_ends", "_num_entries")

    def __init__(self) -> None:
        self._num_entries = 0
        ends = Entry(PageKey(b""), None)  # closes the ring
        ends.before = ends.after = ends
        self._ends = ends

    def __len__(self) -> int:
        """How many members there are, parked ones too."""
        return self._num_entries

    def __iter__(self) -> Iterator[Entry]:
        """Those in line; the queue must not change meanwhile."""
        entry = self._ends.after
        while entry is not None and entry is not self._ends:
            yield entry
            entry = entry.after

    def first(self) -> Entry | None:
        """The first in line."""
        entry = self._ends.after
        return None if entry is self._ends else entry

    def append(self, entry: Entry) -> None:
        """A new member is the last in line."""
        ends = self._ends
        last = ends.before
        assert last is not None
        entry.queue = self
        entry.before, entry.after = last, ends
        last.after = ends.before = entry
        self._num_entries += 1

    def prepend(self, entry: Entry) -> None:
        """A new member is the first in line."""
        ends = self._ends
        first = ends.after
        assert first is not None
        entry.queue = self
        entry.before, entry.after = ends, first
        first.before = ends.after = entry
        self._num_entries += 1

    def remove(self, entry: Entry) -> None:
        """A member, in line or parked, leaves."""
        if entry.after is not None:
            self._take_out_of_line(entry)
        self._num_entries -= 1

    def move_to_end(self, entry: Entry) -> None:
        """A member, in line or parked, becomes the last in line."""
        self.remove(entry)
        self.append(entry)

    def park(self, entry: Entry) -> None:
        """A member in line steps out of it."""
        self._take_out_of_line(entry)

    def unpark(self, entry: Entry) -> None:
        """A parked member is the first in line."""
        self._num_entries -= 1
        self.prepend(entry)

    @staticmethod
    def _take_out_of_line(entry: Entry) -> None:
        before, after = entry.before, entry.after
        assert before is not None
        assert after is not None
        before.after, after.before = after, before
        entry.before = entry.after = None
