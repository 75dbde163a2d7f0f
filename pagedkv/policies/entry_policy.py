"""``EntryPolicy``: what policies share, so that each reads like its paper."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pagedkv.policies.entries import Entry, Queue
from pagedkv.spec import PageKey


class EntryPolicy(ABC):
    """Knows which pages are candidates, held, or parents of candidates; its heirs rank them.

    An heir keeps entries in queues of its own, and says by ``_next`` which one it would evict. That
    entry leaves its queue at once, as if it were gone, so that the next answer takes this into
    account. What was named in this way and not evicted goes back, first in line, as soon as
    anything else happens. The second chances that were given on the way stay given.

    Where an heir meets an entry that is held, or has a candidate as a child, it parks it: the entry
    still counts as a member of its queue, and is its first again when nothing hinders it any more.
    """

    def __init__(self) -> None:
        self._num_slots = 0
        self._entries: dict[PageKey, Entry] = {}
        self._num_children: dict[PageKey, int] = {}  # candidates by parent, where there are any
        self._num_held = 0
        self._named: list[Entry] = []  # by victims(), in this order

    def start(self, num_slots: int) -> None:
        """Let queues and history be of a size that fits the number of slots."""
        self._num_slots = num_slots

    def use(self, keys: Sequence[PageKey], parents: Sequence[PageKey | None]) -> None:
        """Count a use of each page, the deepest first."""
        self._take_back()
        entries, num_children = self._entries, self._num_children
        for key, parent in zip(reversed(keys), reversed(parents), strict=True):
            entry = entries.get(key)
            if entry is None:
                entries[key] = entry = Entry(key, parent)
                self._come(entry)
            else:
                if entry.is_held:
                    self._release(entry)
                    parent = entry.parent  # noqa: PLW2901
                else:
                    parent = None  # noqa: PLW2901
                self._touch(entry)
            if parent is not None:
                num_children[parent] = num_children.get(parent, 0) + 1
        self._end_request()

    def hold(self, keys: Sequence[PageKey]) -> None:
        """Let the pages keep their places, though they are no candidates."""
        self._take_back()
        for entry in self._candidates(keys):
            entry.is_held = True
            self._num_held += 1
            self._drop_child(entry.parent)

    def evict(self, keys: Sequence[PageKey]) -> None:
        """Let the pages go; what is remembered of them is said by each policy."""
        leaving = self._candidates(keys)
        named = self._named
        if leaving == named[: len(leaving)]:  # the usual case
            del named[: len(leaving)]
        else:
            self._take_back()
            for entry in leaving:
                self._take_out(entry)
                self._drop_child(entry.parent)
        for entry in leaving:
            del self._entries[entry.key]
            self._remember(entry)

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget the pages, and that they ever were here."""
        self._take_back()
        for key in keys:
            entry = self._entries.pop(key, None)
            if entry is None:
                self._forget(key)
                continue
            if entry.is_held:
                self._num_held -= 1
            else:
                self._drop_child(entry.parent)
            self._take_out(entry)

    def victims(self) -> Iterator[PageKey]:
        """The candidates, as the policy would evict them one by one."""
        named = self._named
        at = 0
        while True:
            if at == len(named):
                entry = self._next()
                if entry is None:
                    return
                self._drop_child(entry.parent)
                named.append(entry)
            yield named[at].key
            at += 1

    def upcoming(self) -> Iterator[PageKey]:
        """The candidates about as they would leave; some may get a second chance instead."""
        yield from [entry.key for entry in self._named]
        gone: dict[PageKey, int] = {}  # children that were yielded, by parent
        passed: set[PageKey] = set()  # met before their children
        for ranked in self._ranking():
            entry: Entry | None = ranked
            while entry is not None and not entry.is_held:
                key, parent = entry.key, entry.parent
                if self._num_children.get(key, 0) > gone.get(key, 0):
                    passed.add(key)
                    break
                yield key
                if parent is None:
                    break
                gone[parent] = gone.get(parent, 0) + 1
                entry = self._entries.get(parent)
                if entry is not None and parent not in passed and not self._is_parked(entry):
                    break  # its own turn comes

    def __len__(self) -> int:
        return len(self._entries) - self._num_held

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if counts contradict the entries."""
        entries, named = self._entries, {entry.key for entry in self._named}
        assert named <= entries.keys()
        assert self._num_held == sum(entry.is_held for entry in entries.values())
        candidates = (entry for key, entry in entries.items() if key not in named)
        parents = (entry.parent for entry in candidates if not entry.is_held)
        assert self._num_children == Counter(key for key in parents if key is not None)

    @abstractmethod
    def _come(self, entry: Entry) -> None:
        """Give an entry that has just come in its place."""

    @abstractmethod
    def _touch(self, entry: Entry) -> None:
        """Count another use of an entry."""

    @abstractmethod
    def _next(self) -> Entry | None:
        """Take the next victim out of its queue; ``None`` if there is none."""

    @abstractmethod
    def _ranking(self) -> Iterable[Entry]:
        """The entries that are in line, about as they would leave."""

    def _remember(self, entry: Entry) -> None:  # noqa: B027
        """An entry was evicted."""

    def _forget(self, key: PageKey) -> None:  # noqa: B027
        """Whatever is remembered of a page that is gone is no longer wanted."""

    def _end_request(self) -> None:  # noqa: B027
        """All uses of a request were counted."""

    def _put_back(self, entry: Entry) -> None:
        """Make an entry that ``_next`` took the first of its queue again."""
        entry.queue.prepend(entry)

    def _unpark(self, entry: Entry) -> None:
        """Nothing hinders an entry any more; if it was parked, it is the first of its queue."""
        if self._is_parked(entry):
            entry.queue.unpark(entry)

    def _is_parked(self, entry: Entry) -> bool:
        """Whether an entry that ``_next`` has not taken stands out of line."""
        return entry.after is None

    def _take_out(self, entry: Entry) -> None:
        """Take an entry out of its queue."""
        entry.queue.remove(entry)

    def _may_leave(self, entry: Entry) -> bool:
        """Whether it is a candidate, and none of its children is one."""
        return not entry.is_held and entry.key not in self._num_children

    def _first_free(self, queue: Queue) -> Entry | None:
        """The first in line that may leave; those before it are parked."""
        num_children = self._num_children
        while (entry := queue.first()) is not None:
            if not entry.is_held and entry.key not in num_children:
                return entry
            queue.park(entry)
        return None

    def _release(self, entry: Entry) -> None:
        entry.is_held = False
        self._num_held -= 1
        self._unpark(entry)

    def _drop_child(self, parent: PageKey | None) -> None:
        if parent is None:
            return
        left = self._num_children[parent] - 1
        if left:
            self._num_children[parent] = left
            return
        del self._num_children[parent]
        entry = self._entries.get(parent)
        if entry is not None and not entry.is_held:
            self._unpark(entry)

    def _take_back(self) -> None:
        """What ``victims`` named has not left."""
        named, num_children = self._named, self._num_children
        while named:
            entry = named.pop()
            if entry.parent is not None:
                num_children[entry.parent] = num_children.get(entry.parent, 0) + 1
            self._put_back(entry)

    def _candidates(self, keys: Sequence[PageKey]) -> list[Entry]:
        """The entries of ``keys``; ``KeyError`` if one is no candidate."""
        entries = [self._entries[key] for key in keys]
        for entry in entries:
            if entry.is_held:
                raise KeyError(entry.key)
        if len(set(keys)) < len(keys):  # the second time it would be none
            raise KeyError(next(key for key in keys if list(keys).count(key) > 1))
        return entries
