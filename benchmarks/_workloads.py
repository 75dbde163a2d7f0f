"""Made request streams: what a cache may meet that no recorded trace shows.

Each function gives a list of requests; a request is a list of int ids, the root first. An id
names a page together with all that is before it, so that equal ids follow equal prefixes. The
same arguments give the same stream.
"""

import random
from collections.abc import Iterator

Requests = list[list[int]]


class _Ids:
    """Gives each prefix its id."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, object], int] = {}

    def path(self, names: list[object]) -> list[int]:
        """The ids of a request whose pages have these names."""
        path = []
        at = -1
        for name in names:
            at = self._ids.setdefault((at, name), len(self._ids))
            path.append(at)
        return path


def _named(kind: str, number: int, length: int) -> list[object]:
    return [(kind, number, place) for place in range(length)]


def uniform_prefixes(num: int, *, prefixes: int, length: int = 8, seed: int = 0) -> Requests:
    """One of some prefixes, each as likely, with two new pages behind it."""
    draw, ids = random.Random(seed), _Ids()
    return [
        ids.path(_named("prefix", draw.randrange(prefixes), length) + _named("new", at, 2))
        for at in range(num)
    ]


def zipf_prefixes(
    num: int, *, prefixes: int, length: int = 8, power: float = 1.0, seed: int = 0
) -> Requests:
    """The same, the k-th prefix as likely as ``k ** -power``."""
    draw, ids = random.Random(seed), _Ids()
    weights = [(number + 1) ** -power for number in range(prefixes)]
    chosen = draw.choices(range(prefixes), weights, k=num)
    return [
        ids.path(_named("prefix", number, length) + _named("new", at, 2))
        for at, number in enumerate(chosen)
    ]


def cyclic_scan(num: int, *, documents: int, length: int = 10) -> Requests:
    """Documents one after the other, again and again."""
    ids = _Ids()
    return [ids.path(_named("document", at % documents, length)) for at in range(num)]


def one_hit(num: int, *, length: int = 10) -> Requests:
    """Nothing comes twice."""
    ids = _Ids()
    return [ids.path(_named("new", at, length)) for at in range(num)]


def agents(num: int, *, at_once: int, turns: int = 20, grows: int = 3, seed: int = 0) -> Requests:
    """Agents whose prompts grow at each step; some at a time, each step soon after the last."""
    draw, ids = random.Random(seed), _Ids()
    running: list[list[int]] = []
    requests = []
    started = 0
    for _ in range(num):
        if len(running) < at_once:
            running.append([started, 0])
            started += 1
        agent = draw.choice(running)
        agent[1] += 1
        names = _named("system", 0, 4) + _named("agent", agent[0], grows * agent[1])
        requests.append(ids.path(names))
        if agent[1] >= turns:
            running.remove(agent)
    return requests


def system_prompts(
    num: int, *, prompts: int, length: int = 40, power: float = 1.2, seed: int = 0
) -> Requests:
    """Long prompts that many share, with few pages of their own behind; one in five comes back."""
    draw, ids = random.Random(seed), _Ids()
    weights = [(number + 1) ** -power for number in range(prompts)]
    requests: Requests = []
    names: list[list[object]] = []
    for at, number in enumerate(draw.choices(range(prompts), weights, k=num)):
        if names and draw.random() < 0.2:
            whole = names[-1 - draw.randrange(min(len(names), 50))] + _named("more", at, 2)
        else:
            whole = _named("system", number, length) + _named("user", at, draw.randint(1, 6))
        names.append(whole)
        requests.append(ids.path(whole))
    return requests


def chats(num: int, *, users: int, pause: int, seed: int = 0) -> Requests:
    """Conversations: a turn follows the last one after about ``pause`` requests, or never."""
    draw, ids = random.Random(seed), _Ids()
    due: dict[int, list[tuple[int, int]]] = {}
    requests = []
    fresh = 0
    for at in range(num):
        waiting = due.pop(at, [])
        if waiting:
            (number, length), *others = waiting
            due.setdefault(at + 1, []).extend(others)
        else:
            number, length = fresh, 0
            fresh += 1
        length += draw.randint(1, 12)
        requests.append(ids.path([("system", number % users), *_named("chat", number, length)]))
        if draw.random() < 0.6:
            then = at + 1 + int(draw.expovariate(1 / pause))
            due.setdefault(then, []).append((number, length))
    return requests


def recent_sets(
    num: int, *, working: int, change: float, length: int = 6, seed: int = 0
) -> Requests:
    """A working set of documents, of which now and then one is replaced: LRU's own case."""
    draw, ids = random.Random(seed), _Ids()
    documents = list(range(working))
    fresh = working
    requests = []
    for _ in range(num):
        if draw.random() < change:
            documents[draw.randrange(working)] = fresh
            fresh += 1
        requests.append(ids.path(_named("document", draw.choice(documents), length)))
    return requests


def one_after_the_other(*parts: Requests) -> Requests:
    """Several streams as phases of one; they share nothing."""
    requests = []
    start = 0
    for part in parts:
        requests += [[start + page for page in request] for request in part]
        start += 1 + max(page for request in part for page in request)
    return requests


def named(scale: float = 1) -> Iterator[tuple[str, Requests]]:
    """All of them, with names, about ``40_000 * scale`` pages each."""

    def n(requests: int) -> int:
        return max(10, round(scale * requests))

    yield "uniform prefixes", uniform_prefixes(n(4000), prefixes=200)
    yield "Zipf prefixes", zipf_prefixes(n(4000), prefixes=500)
    yield "cyclic scan, 60", cyclic_scan(n(4000), documents=6)
    yield "cyclic scan, 600", cyclic_scan(n(4000), documents=60)
    yield "cyclic scan, 2,000", cyclic_scan(n(4000), documents=200)
    yield "one-hit", one_hit(n(4000))
    yield "agents, 5", agents(n(1500), at_once=5)
    yield "agents, 40", agents(n(1500), at_once=40)
    yield "system prompts", system_prompts(n(1000), prompts=40)
    yield "chats, short pause", chats(n(2500), users=3, pause=20)
    yield "chats, long pause", chats(n(2500), users=3, pause=300)
    yield "working set", recent_sets(n(6000), working=50, change=0.02)
    yield "working set, fast", recent_sets(n(6000), working=20, change=0.2)
    phases = {
        "scan, then working set": (
            cyclic_scan(n(2000), documents=200),
            recent_sets(n(3000), working=50, change=0.02),
        ),
        "Zipf, then agents": (
            zipf_prefixes(n(2000), prefixes=500),
            agents(n(750), at_once=10),
        ),
        "one-hit, then chats": (one_hit(n(2000)), chats(n(1200), users=3, pause=20)),
        "chats, then other chats": (
            chats(n(1200), users=3, pause=300),
            chats(n(1200), users=3, pause=10, seed=1),
        ),
        "agents, then one-hit, then agents": (
            agents(n(700), at_once=10),
            one_hit(n(1500)),
            agents(n(700), at_once=10, seed=1),
        ),
        "Zipf, then another Zipf": (
            zipf_prefixes(n(2000), prefixes=300),
            zipf_prefixes(n(2000), prefixes=300, seed=1),
        ),
    }
    for name, parts in phases.items():
        yield name, one_after_the_other(*parts)
