"""Many parts of a file read in one go, by a kernel where there is one: few calls, no GIL."""

from pagedkv import files, records
from pagedkv.files import Bytes
from pagedkv.memory import Numbers


def read_ranges(
    fd: int,
    starts: Numbers,
    lengths: Numbers,
    memory: Bytes,
    targets: Numbers,
    num_read: Numbers,
    *,
    hint: bool = True,
) -> None:
    """Read parts of a file, waiting for the disk; fewer bytes only where the file ends.

    Args:
        fd: The file.
        starts: Where the parts begin in it.
        lengths: How long they are.
        memory: Where they go.
        targets: Where each goes in it.
        num_read: Filled with the bytes read of each.
        hint: Let the system know of all parts first, so that it reads several at once; not for
            reads past the page cache.

    Raises:
        OSError: The system could not read.
    """
    kernels, function = records.compiled_reads(), files.preadv2_address()
    done = 0
    if kernels is not None and function:
        advise = files.fadvise_address() if hint else 0
        done = kernels.read_ranges(function, advise, fd, starts, lengths, memory, targets, num_read)
    for number in range(done, len(starts)):  # a kernel cannot say what went wrong
        begin = int(targets[number])
        part = memory[begin : begin + int(lengths[number])]
        num_read[number] = files.pread_into(fd, part, int(starts[number]))
