"""``AdmissionPolicy``: which pages that leave the pool are worth writing to the store."""

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Protocol

from pagedkv.spec import PageKey

_LEFT = 1 << 5
"""Set in what ``AdmitLikely`` remembers of a page that has left the pool."""
_FEW = 32
"""Pages from which a share is worth nothing."""


class AdmissionPolicy(Protocol):
    """Spares the disk pages that nobody is likely to ask for again.

    A page that leaves the pool and is not admitted is forgotten; who wants it computes it again.
    A policy that was not used can be copied (``copy.deepcopy``).
    """

    name: ClassVar[str]
    """What the command line calls it."""

    def start(self, num_slots: int) -> None:
        """Say how many pages pool and store hold together, once, before all else."""

    def note(self, keys: Sequence[PageKey]) -> None:
        """Pages were requested, all those of a prompt, the root first, held or not."""

    def admits(self, key: PageKey) -> bool:
        """Whether a page that leaves the pool goes to the store; asked again, it says the same."""


def check_admission(admission: object) -> None:
    """Raise ``TypeError`` unless ``admission`` is an object that has all of an admission policy."""
    if isinstance(admission, type):
        raise TypeError(f"admission is the class {admission.__name__}: give an object, made by it")
    missing = [name for name in ("name", "start", "note", "admits") if not hasattr(admission, name)]
    if missing:
        raise TypeError(
            f"admission is {admission!r}: give an object, such as pagedkv.AdmitLikely(); of an"
            f" AdmissionPolicy it lacks {', '.join(missing)}"
        )


class AdmitAll:
    """Every page is written."""

    name: ClassVar[str] = "all"

    def start(self, num_slots: int) -> None:
        """Nothing depends on the number of pages."""

    def note(self, keys: Sequence[PageKey]) -> None:
        """Nothing is remembered."""

    def admits(self, key: PageKey) -> bool:
        """Always."""
        return True


class AdmitSeenTwice:
    """A page is written when it was requested at least twice not long ago.

    It remembers at most as many keys as pool and store have pages. What is requested twice in all
    is not read from the disk a single time, so that this spares most writes and loses many hits.

    Source: the ghost filter of S. Huang et al., "Improving flash-based disk cache with lazy
    adaptive replacement" (LARC), MSST 2013; A. Eisenman et al., "Flashield", NSDI 2019, on why
    flash caches need one.
    """

    name: ClassVar[str] = "seen-twice"

    def start(self, num_slots: int) -> None:
        """Remember so many keys."""
        self._times = _Memory(num_slots)

    def note(self, keys: Sequence[PageKey]) -> None:
        """Count a request of each page."""
        times = self._times
        for key in keys:
            times.put(key, min(2, times.get(key, 0) + 1))

    def admits(self, key: PageKey) -> bool:
        """Whether it was requested twice."""
        return self._times.get(key, 0) >= 2


class AdmitLikely:
    """A page is written when enough of the pages that were like it came back.

    Alike are pages that were requested equally often (once, twice, three times, more), in prompts
    of which an equal share was known (nothing, a page, less than half, more), and that were both
    the last of their prompt or both not. Of each such class it learns which share of the pages that
    left the pool was requested again, whether they were written or not, before as many other pages
    were requested as pool and store hold. A class of which it knows little is written. The last
    page of a prompt, which ends where the prompt happens to end, is so spared where that does not
    repeat; of a scan nothing is written in the end, of prompts that do return everything.

    Takes about 200 bytes for each page of pool and store, and a microsecond a requested page.

    Source: the admission by learnt reuse of Flashield (A. Eisenman et al., NSDI 2019), with classes
    in place of its vector machine.

    Args:
        share: Least share that must have come back.

    Raises:
        ValueError: ``share`` is not within 0..1.
    """

    name: ClassVar[str] = "likely"

    def __init__(self, share: float = 0.05) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share is {share}: it must be in 0..1")
        self._share = share

    def start(self, num_slots: int) -> None:
        """Remember so many keys."""
        self._memory = _Memory(num_slots)
        self._returned: dict[int, float] = defaultdict(float)  # by class
        self._lost: dict[int, float] = defaultdict(float)

    def note(self, keys: Sequence[PageKey]) -> None:
        """Learn from what came back, and remember the class of each page."""
        memory = self._memory
        before = [memory.get(key, -1) for key in keys]
        num_known = next((n for n, value in enumerate(before) if value < 0), len(keys))
        known = 0 if not num_known else 1 if num_known == 1 else 2 + (2 * num_known > len(keys))
        last = len(keys) - 1
        for number, (key, value) in enumerate(zip(keys, before, strict=True)):
            times = 0
            if value >= 0:
                times = min(3, (value & 3) + 1)
                if value & _LEFT:
                    self._returned[value & ~_LEFT] += 1
            dropped = memory.put(key, times | known << 2 | (number == last) << 4)
            if dropped:
                self._lose(dropped)

    def admits(self, key: PageKey) -> bool:
        """Whether enough of its class came back."""
        value = self._memory.get(key, -1)
        if value < 0:
            return True
        kind = value & ~_LEFT
        if value == kind:
            self._memory.change(key, value | _LEFT)
        returned, lost = self._returned[kind], self._lost[kind]
        return returned + lost < _FEW or returned >= self._share * (returned + lost)

    def _lose(self, dropped: dict[PageKey, int]) -> None:
        """Pages were not requested for so long that they are forgotten; so fades what is known."""
        for counts in (self._returned, self._lost):
            for kind in counts:
                counts[kind] /= 2
        for value in dropped.values():
            if value & _LEFT:
                self._lost[value & ~_LEFT] += 1


class _Memory:
    """A number for each of at most ``limit`` keys, of which the older half is forgotten at once."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[PageKey, int] = {}
        self._old: dict[PageKey, int] = {}

    def get(self, key: PageKey, default: int) -> int:
        """What is remembered of it."""
        value = self._young.get(key)
        return self._old.get(key, default) if value is None else value

    def put(self, key: PageKey, value: int) -> dict[PageKey, int] | None:
        """Remember it as the youngest; what has been forgotten for that."""
        self._old.pop(key, None)
        self._young[key] = value
        if len(self._young) < self._half:
            return None
        dropped, self._old, self._young = self._old, self._young, {}
        return dropped

    def change(self, key: PageKey, value: int) -> None:
        """Change what is remembered of a known key, which gets no younger."""
        where = self._young if key in self._young else self._old
        where[key] = value


_POLICIES = {policy.name: policy for policy in (AdmitAll, AdmitSeenTwice, AdmitLikely)}
ADMISSION_NAMES: tuple[str, ...] = tuple(_POLICIES)
"""The names that ``make_admission`` knows."""


def make_admission(name: str) -> AdmissionPolicy:
    """A fresh admission policy of this name; ``ValueError`` lists those there are."""
    if name not in _POLICIES:
        raise ValueError(
            f"there is no admission policy {name!r}: take one of {', '.join(ADMISSION_NAMES)}"
        )
    return _POLICIES[name]()
