"""System calls as functions for kernels: batches of them without the GIL."""

import mmap
import os
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_POSIX_FADV_WILLNEED = getattr(os, "POSIX_FADV_WILLNEED", 3)
_MADV_WILLNEED = getattr(mmap, "MADV_WILLNEED", 3)
_I8, _I32, _I64 = (ir.IntType(bits) for bits in (8, 32, 64))


@intrinsic
def preadv2(
    _: Any, function: Any, fd: Any, target: Any, nbytes: Any, offset: Any, flags: Any
) -> Any:
    """Read from a file into memory; the bytes read, negative if the system could not.

    Args:
        function: Address of C's ``preadv2``, or of a function like it.
        fd: Descriptor of the file, int64.
        target: Address of the memory, int64.
        nbytes: How many bytes, int64.
        offset: Where in the file, int64.
        flags: ``RWF_…``, int64.
    """

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        function, fd, target, nbytes, offset, flags = args
        vector = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))  # a struct iovec
        for number, value in enumerate((target, nbytes)):
            place = builder.gep(vector, [ir.Constant(_I32, 0), ir.Constant(_I32, number)])
            builder.store(value, place)
        kind = ir.FunctionType(_I64, [_I32, _I8.as_pointer(), _I32, _I64, _I32])
        arguments = [
            builder.trunc(fd, _I32),
            builder.bitcast(vector, _I8.as_pointer()),
            ir.Constant(_I32, 1),
            offset,
            builder.trunc(flags, _I32),
        ]
        return builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)

    int64 = types.int64
    return int64(int64, int64, int64, int64, int64, int64), codegen


@intrinsic
def fadvise_will_need(_: Any, function: Any, fd: Any, offset: Any, nbytes: Any) -> Any:
    """Let the system begin to read a part of a file; 0 if it does.

    Args:
        function: Address of C's ``posix_fadvise``.
        fd: Descriptor of the file, int64.
        offset: Where the part begins, int64.
        nbytes: How long it is, int64.
    """

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        function, fd, offset, nbytes = args
        kind = ir.FunctionType(_I32, [_I32, _I64, _I64, _I32])
        advice = ir.Constant(_I32, _POSIX_FADV_WILLNEED)
        arguments = [builder.trunc(fd, _I32), offset, nbytes, advice]
        result = builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)
        return builder.sext(result, _I64)

    int64 = types.int64
    return int64(int64, int64, int64, int64), codegen


@intrinsic
def madvise_will_need(_: Any, function: Any, address: Any, nbytes: Any) -> Any:
    """Let the system begin to read mapped memory; 0 if it does.

    Args:
        function: Address of C's ``madvise``.
        address: Where the memory begins: with a page of the system; int64.
        nbytes: How long it is, int64.
    """

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        function, address, nbytes = args
        kind = ir.FunctionType(_I32, [_I64, _I64, _I32])
        arguments = [address, nbytes, ir.Constant(_I32, _MADV_WILLNEED)]
        result = builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)
        return builder.sext(result, _I64)

    int64 = types.int64
    return int64(int64, int64, int64), codegen
