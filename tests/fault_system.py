"""An operating system that fails, answers short, hangs, or is recorded, below one folder.

While a ``FaultySystem`` is entered, the file functions of ``os`` and ``fcntl.flock`` are replaced,
whoever calls them; what concerns other folders passes through untouched.
"""

import builtins
import errno
import fcntl
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import pytest

from pagedkv import files

PATH_CALLS = (
    "chmod",
    "listdir",
    "lstat",
    "mkdir",
    "open",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "scandir",
    "stat",
    "statvfs",
    "truncate",
    "unlink",
    "utime",
)
FD_CALLS = (
    "fdatasync",
    "fstat",
    "fsync",
    "ftruncate",
    "lseek",
    "posix_fallocate",
    "pread",
    "preadv",
    "pwrite",
    "pwritev",
    "read",
    "readv",
    "write",
    "writev",
)
READS = frozenset({"pread", "preadv", "read", "readv"})
WRITES = frozenset({"pwrite", "pwritev", "write", "writev"})
UNKNOWN_CALLS = ("copy_file_range", "link", "sendfile", "symlink")
"""What nothing here could fault or record: used below the folder, they are an error."""

PACKAGE = str(Path(files.__file__).parent)
SEAM = files.__file__


class Call(NamedTuple):
    """One call below the folder.

    Args:
        name: Of the function, such as ``"pwrite"``.
        path: Relative to the folder, which itself is ``"."``.
        site: The lines of the package that led to it, the seam's last.
        through_seam: Whether the line of the package nearest to it is in ``files.py``.
    """

    name: str
    path: str
    site: tuple[str, ...]
    through_seam: bool


Real = Callable[[], Any]
Action = Callable[["FaultySystem", str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Rule:
    """Which calls are harmed, and how.

    Args:
        action: What happens instead.
        names: Of the functions; all if empty.
        part: What the path contains.
        first: How many calls that fit are let through before.
        times: How many are harmed after those; all if None.
        site: The lines of the package that lead to it; any if empty.
    """

    action: Action
    names: tuple[str, ...] = ()
    part: str = ""
    first: int = 0
    times: int | None = 1
    site: tuple[str, ...] = ()
    harmed: list[Call] = field(default_factory=list)

    def takes(self, call: Call) -> bool:
        if (self.names and call.name not in self.names) or self.part not in call.path:
            return False
        if self.site and call.site != self.site:
            return False
        if self.first:
            self.first -= 1
            return False
        return self.times is None or len(self.harmed) < self.times


def failing(code: int) -> Action:
    """The call raises; names the path as the system would."""

    def action(_: "FaultySystem", name: str, real: Any, args: tuple[Any, ...], options: Any) -> Any:
        place = args[0] if args and not isinstance(args[0], int) else None
        raise OSError(code, os.strerror(code), *([] if place is None else [os.fspath(place)]))

    return action


def short(_: "FaultySystem", name: str, real: Any, args: tuple[Any, ...], options: Any) -> Any:
    """Half of the bytes are read or written, or none if there is only one to read."""
    if name == "read":
        return real(args[0], args[1] // 2 or 1)
    if name == "pread":
        return real(args[0], args[1] // 2 or 1, args[2])
    fd, data, *rest = args
    if name in {"write", "pwrite"}:
        view = memoryview(data).cast("B")
        return real(fd, view[: len(view) // 2 or 1], *rest, **options)
    views = [memoryview(buffer).cast("B") for buffer in data]
    left = sum(map(len, views)) // 2 or 1
    some = []
    for view in views:
        if left:
            some.append(view[:left])
            left -= len(some[-1])
    return real(fd, some, *rest, **options)


class Hang:
    """The call waits until it is let go; then it is done after all."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()
        self.ended = threading.Event()

    def __call__(self, _: Any, name: str, real: Any, args: tuple[Any, ...], options: Any) -> Any:
        self.entered.set()
        assert self.released.wait(60), "nobody let it go"
        try:
            return real(*args, **options)
        finally:
            self.ended.set()


class FaultySystem:
    """Stands between the package and the operating system, inside a ``with`` block.

    Args:
        root: Calls that concern this folder or what is in it are counted, and may be harmed.
        syncs: Whether ``fsync`` waits for the disk, if it is not harmed.

    Attributes:
        calls: What was called so far.
        has_page_cache: If False, no read is served at once from memory.
    """

    def __init__(self, root: Path, *, syncs: bool = True) -> None:
        self.root = str(root)
        self.syncs = syncs
        self.has_page_cache = True
        self.calls: list[Call] = []
        self._rules: list[Rule] = []
        self._lock = threading.RLock()
        self._opened: dict[int, tuple[str, int, int]] = {}  # path, device and inode
        self._fstat, self._lseek = os.fstat, os.lseek
        self._patch = pytest.MonkeyPatch()

    def add(self, rule: Rule) -> Rule:
        """Harm these calls from now on."""
        with self._lock:
            self._rules.append(rule)
        return rule

    def heal(self) -> None:
        """Harm no more calls."""
        with self._lock:
            self._rules.clear()

    def __enter__(self) -> Self:
        for name in (*PATH_CALLS, *FD_CALLS, *UNKNOWN_CALLS, "close"):
            real = getattr(os, name, None)
            if name in {"fsync", "fdatasync"} and not self.syncs:
                real = _not_waiting
            if real is not None:
                self._patch.setattr(os, name, self._stand_in(name, real))
        self._patch.setattr(files, "preadv2_address", lambda: 0)  # it would not be seen
        self._patch.setattr(fcntl, "flock", self._stand_in("flock", fcntl.flock))
        # The descriptor stays whoever's it was: only the reading of whole files goes through this.
        self._patch.setattr(files, "open", self._open_file, raising=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    # -- what a recorder adds ------------------------------------------------------------------

    def before(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Called before a call that is let through; what it returns goes to ``after``."""

    def after(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any], result: Any, before: Any
    ) -> None:
        """Called after it."""

    # -- inside --------------------------------------------------------------------------------

    def _stand_in(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            path = self._path_of(args, options)
            if path is None or name == "close":
                return real(*args, **options)
            if name == "preadv" and len(args) > 3 and args[3] and not self.has_page_cache:
                raise BlockingIOError(errno.EAGAIN, "not in the page cache")
            assert name not in UNKNOWN_CALLS, f"os.{name} is neither faulted nor recorded"
            return self._call(name, path, real, args, options)

        return call

    def _call(self, name: str, path: str, real: Any, args: Any, options: Any) -> Any:
        with self._lock:
            site, through_seam = _site(sys._getframe(2))
            call = Call(name, path, site, through_seam)
            self.calls.append(call)
            rule = next((rule for rule in self._rules if rule.takes(call)), None)
            if rule is not None:
                rule.harmed.append(call)
        if rule is not None and not isinstance(rule.action, Hang):
            with self._lock:
                return rule.action(self, name, self._noting(name, real), args, options)
        if rule is not None:
            return rule.action(self, name, real, args, options)
        if name in READS or name == "flock":  # these may wait
            return real(*args, **options)
        with self._lock:
            return self._noting(name, real)(*args, **options)

    def _noting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """``real``, with its effect noted."""

        def call(*args: Any, **options: Any) -> Any:
            before = self.before(name, args, options)
            result = real(*args, **options)
            if name == "open":
                path = self._absolute(args[0], options)
                status = self._fstat(result)
                path += "/(nameless)" if _is_nameless(args, options) else ""
                self._opened[result] = (path, status.st_dev, status.st_ino)
            self.after(name, args, options, result, before)
            return result

        return call

    def _open_file(self, file: Any, *args: Any, **options: Any) -> Any:
        opened = builtins.open(file, *args, **options)  # noqa: PTH123, SIM115 - as called
        path = self._path_of((file,), {})
        return opened if path is None else _Reader(opened, lambda real: self._read(path, real))

    def _read(self, path: str, real: Real) -> Any:
        return self._call("read", path, lambda *_: real(), (None, 1), {})

    def _absolute(self, place: Any, options: dict[str, Any], key: str = "dir_fd") -> str:
        name = os.fsdecode(os.fspath(place))
        folder = options.get(key)
        if folder is not None:
            return f"{self._name_of(folder)}/{name}"
        return name if name.startswith("/") else os.path.join(os.getcwd(), name)  # noqa: PTH118, PTH109

    def _path_of(self, args: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        """Path relative to the root, or None if the call does not concern it."""
        place = args[0] if args else None
        if isinstance(place, int):
            path = self._name_of(place)
        elif place is None:
            return None
        else:
            key = "src_dir_fd" if "src_dir_fd" in options else "dir_fd"
            path = self._absolute(place, options, key)
        if path in {self.root, f"{self.root}/"}:
            return "."
        return path[len(self.root) + 1 :] if path.startswith(f"{self.root}/") else None

    def _name_of(self, fd: int) -> str:
        """Path under which the descriptor was opened here; empty if it was not."""
        path, *identity = self._opened.get(fd, ("", 0, 0))
        if path:
            try:
                status = self._fstat(fd)
            except OSError:  # it was closed
                return ""
            if identity != [status.st_dev, status.st_ino]:
                return ""
        return path


class _Reader:
    """A file whose reading counts as a call."""

    def __init__(self, file: Any, through: Callable[[Real], Any]) -> None:
        self._file = file
        self._through = through

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, *args: Any) -> Any:
        return self._through(lambda: self._file.read(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _not_waiting(_: int) -> None:
    pass


def _is_nameless(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    flags = args[1] if len(args) > 1 else options.get("flags", 0)
    return flags & os.O_TMPFILE == os.O_TMPFILE


def _site(frame: FrameType | None) -> tuple[tuple[str, ...], bool]:
    """The nearest lines of the package: those of the seam, and the first outside it."""
    lines: list[str] = []
    nearest = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            nearest = nearest or file
            lines.append(f"{file[len(PACKAGE) + 1 :]}:{frame.f_lineno}")
            if file != SEAM:
                break
        frame = frame.f_back
    return tuple(reversed(lines)), nearest in (None, SEAM)


# -- what survives a power cut ---------------------------------------------------------------------

Content = bytes
ROOT_INODE, NAMELESS = 0, -2


class Op(NamedTuple):
    """One change of the disk. ``target`` is what has to be synced for it to last.

    ``kind`` is ``"link"`` (``name`` of the folder ``target`` becomes ``inode``), ``"unlink"``,
    ``"write"`` (``data`` at ``offset`` of the file ``target``), ``"truncate"`` (to ``offset``),
    ``"sync"`` of the file or folder ``target``, or ``"mark"``: ``data`` is what a test noted.
    """

    kind: str
    target: int
    name: str = ""
    inode: int = -1
    offset: int = 0
    data: Any = b""
    site: tuple[str, ...] = ()


class Recorder(FaultySystem):
    """Logs every change below the folder, which must be empty or not there when it is entered.

    Attributes:
        log: The changes so far.
        folders: Inodes of what is a folder.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root.parent)
        self.log: list[Op] = []
        self.folders: dict[int, dict[str, int]] = {ROOT_INODE: {}}
        self.labels = {ROOT_INODE: "."}
        self._inodes: dict[int, int] = {}
        self._next = ROOT_INODE + 1

    def mark(self, data: object) -> None:
        """Note in the log that something has happened."""
        with self._lock:
            self.log.append(Op("mark", -1, data=data))

    def before(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if name in {"write", "writev"}:
            return self._lseek(args[0], 0, os.SEEK_CUR)
        return None

    def after(  # noqa: C901 - one case a call
        self, name: str, args: tuple[Any, ...], options: dict[str, Any], result: Any, before: Any
    ) -> None:
        if name == "open":
            flags = args[1] if len(args) > 1 else options.get("flags", 0)
            if _is_nameless(args, options):
                self._inodes[result] = NAMELESS
                return
            parent, last = self._find(args[0], options)
            if last not in self.folders[parent] and flags & os.O_CREAT:
                self._link(parent, last, self._new())
            elif flags & os.O_TRUNC:
                self._log("truncate", self.folders[parent][last])
            self._inodes[result] = self.folders[parent].get(last, -1) if last else parent
        elif name == "mkdir":
            parent, last = self._find(args[0], options)
            inode = self._new()
            self.folders[inode] = {}
            self._link(parent, last, inode)
        elif name in {"rename", "replace"}:
            from_folder, old = self._find(args[0], options, "src_dir_fd")
            to_folder, new = self._find(args[1], options, "dst_dir_fd")
            self._link(to_folder, new, self.folders[from_folder][old])
            self._unlink(from_folder, old)
        elif name in {"unlink", "remove", "rmdir"}:
            self._unlink(*self._find(args[0], options))
        elif name in WRITES:
            buffers = [args[1]] if name in {"write", "pwrite"} else args[1]
            data = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)[:result]
            offset = before if name in {"write", "writev"} else args[2]
            self._log("write", self._inodes[args[0]], offset=offset, data=data)
        elif name == "truncate":
            parent, last = self._find(args[0], options)
            self._log("truncate", self.folders[parent][last], offset=args[1])
        elif name == "ftruncate":
            self._log("truncate", self._inodes[args[0]], offset=args[1])
        elif name == "posix_fallocate":
            self._log("write", self._inodes[args[0]], offset=args[1], data=bytes(args[2]))
        elif name in {"fsync", "fdatasync"}:
            self._log("sync", self._inodes[args[0]])

    def _log(self, kind: str, target: int, **fields: Any) -> None:
        if target == NAMELESS:
            return
        site = self.calls[-1].site if self.calls else ()
        self.log.append(Op(kind, target, site=site, **fields))

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def _link(self, folder: int, name: str, inode: int) -> None:
        self.folders[folder][name] = inode
        self.labels[inode] = f"{self.labels[folder]}/{name}"
        self._log("link", folder, name=name, inode=inode)

    def _unlink(self, folder: int, name: str) -> None:
        self.folders[folder].pop(name)
        self._log("unlink", folder, name=name)

    def _find(self, place: Any, options: dict[str, Any], key: str = "dir_fd") -> tuple[int, str]:
        """The inode of the folder, and the last part of the path."""
        path = self._absolute(place, options, key)
        assert path.startswith(self.root)
        parts = [part for part in path[len(self.root) :].split("/") if part and part != "."]
        inode = ROOT_INODE
        for part in parts[:-1]:
            inode = self.folders[inode][part]
        return inode, parts[-1] if parts else ""


class Disk:
    """What may be on the disk after a power cut at some place of a recorded log.

    It obeys POSIX at its meanest: bytes and size of a file last when the file was synced after
    they were written; a name, its change or its end when its folder was synced. What was not
    synced may have happened or not, in any order; a write also by half, or as a file that is longer
    by zeros.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._folders = frozenset(recorder.folders)
        self._names: dict[int, dict[str, int]] = {ROOT_INODE: {}}
        self._bytes: dict[int, Content] = {}
        self.pending: list[Op] = []

    def advance(self, op: Op, *, skip: bool = False) -> None:
        """Go over one more change. With ``skip`` a sync does nothing."""
        if op.kind == "sync":
            if skip:
                return
            for change in self.pending:
                if change.target == op.target:
                    self._apply(self._names, self._bytes, change, "keep")
            self.pending = [change for change in self.pending if change.target != op.target]
        elif op.kind != "mark":
            self.pending.append(op)

    def tree(self, fate: "Callable[[int, Op], str] | None" = None) -> dict[str, Content | None]:
        """Files, and folders as None, by path, where ``fate`` says what became of each change.

        A fate is ``"keep"``, ``"drop"``, ``"half"`` or ``"zeros"``; by default all are kept.
        """
        names: dict[int, dict[str, int]] = {}
        contents: dict[int, Content] = {}
        for number, op in enumerate(self.pending):
            what = "keep" if fate is None else fate(number, op)
            if what == "drop":
                continue
            if op.kind in {"link", "unlink"}:
                if op.target not in names:
                    names[op.target] = dict(self._names.get(op.target, {}))
            elif op.target not in contents:
                contents[op.target] = self._bytes.get(op.target, b"")
            self._apply(names, contents, op, what)
        tree: dict[str, Content | None] = {}
        folders = [(ROOT_INODE, "")]
        while folders:
            folder, path = folders.pop()
            entries = names.get(folder)
            if entries is None:
                entries = self._names.get(folder, {})
            for name, inode in entries.items():
                place = f"{path}{name}"
                if inode in self._folders:
                    tree[place] = None
                    folders.append((inode, f"{place}/"))
                else:
                    data = contents.get(inode)
                    tree[place] = self._bytes.get(inode, b"") if data is None else data
        return tree

    @staticmethod
    def _apply(
        names: dict[int, dict[str, int]], contents: dict[int, Content], op: Op, fate: str
    ) -> None:
        if op.kind == "link":
            names.setdefault(op.target, {})[op.name] = op.inode
        elif op.kind == "unlink":
            names.setdefault(op.target, {}).pop(op.name, None)
        elif op.kind == "truncate":
            old = contents.get(op.target, b"")
            contents[op.target] = old[: op.offset].ljust(op.offset, b"\0")
        else:
            data = op.data
            old = contents.get(op.target, b"").ljust(op.offset, b"\0")
            if fate == "half":
                data = data[: len(data) // 2]
            elif fate == "zeros":  # blocks that the file had keep what they held
                data = old[op.offset : op.offset + len(data)].ljust(len(data), b"\0")
            contents[op.target] = old[: op.offset] + data + old[op.offset + len(data) :]


def tree_of(root: Path) -> dict[str, Content | None]:
    """What is below ``root``, as ``Disk.tree`` says it."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }
