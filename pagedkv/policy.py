"""``EvictionPolicy``: what decides in which order pages leave a tier."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from pagedkv.spec import PageKey


class EvictionPolicy(Protocol):
    """Ranks the pages of a tier that may leave it: its *candidates*.

    A policy knows keys, and of each its parent: the key of the page before it in the prompt, or
    ``None`` if that is not known. It never sees bytes or slots. Whoever owns the tier tells it what
    happens, and asks it for victims; ``pagedkv simulate`` and the cache call the very same methods.

    Every policy is *prefix-aware*: a page is no victim while a candidate is its child, since a page
    without its parent cannot be found. The keys of one call are consecutive pages of a prompt where
    there is one, the root first; of equal rank the deepest leaves first.

    A policy that was not started, and not used, can be copied (``copy.deepcopy``): a cache takes a
    copy for each of its specs.
    """

    name: ClassVar[str]
    """What the command line calls it."""

    def start(self, num_slots: int) -> None:
        """Say how many pages the tier holds, once, before all else."""

    def use(self, keys: Sequence[PageKey], parents: Sequence[PageKey | None]) -> None:
        """Pages were used just now, and may leave from now on.

        Unknown ones have come in, held ones are candidates again. One call is one request, as far
        as a policy counts them.
        """

    def hold(self, keys: Sequence[PageKey]) -> None:
        """Candidates are in use: no victims, until ``use`` names them again.

        What the policy knows of them stays. ``KeyError`` if one is no candidate.
        """

    def evict(self, keys: Sequence[PageKey]) -> None:
        """Candidates left since their room was needed; a policy may remember that they were there.

        ``KeyError`` if one is no candidate.
        """

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Forget pages altogether, candidates or held ones, if it knows them."""

    def victims(self) -> Iterator[PageKey]:
        """Candidates, the first to leave first; a child before its parent.

        A policy may give second chances while it looks for them, but asking again, with nothing
        changed in between, gives the same ones. The policy must not change while the iterator is in
        use.
        """

    def upcoming(self) -> Iterator[PageKey]:
        """About the same, for who looks ahead; changes nothing."""

    def __len__(self) -> int:
        """How many candidates there are."""


_METHODS = ("start", "use", "hold", "evict", "discard", "victims", "upcoming", "__len__")


def check_policy(policy: object) -> None:
    """Raise ``TypeError`` unless ``policy`` is an object that has all of an eviction policy."""
    if isinstance(policy, type):
        raise TypeError(f"policy is the class {policy.__name__}: give an object, made by it")
    missing = [name for name in ("name", *_METHODS) if not hasattr(policy, name)]
    if missing:
        raise TypeError(
            f"policy is {policy!r}: give an object, such as pagedkv.LRU(); of an EvictionPolicy it"
            f" lacks {', '.join(missing)}"
        )
