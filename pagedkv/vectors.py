"""Machine instructions that numba does not offer by itself, as functions for its kernels.

Memory is named by address, an int64, of any alignment unless said otherwise. ``floats`` are 16
float32 numbers in registers; they and all else here are generic LLVM, which compiles for any
processor, except the checksum step, which needs SSE4.2 or the CRC extension of ARMv8.
"""

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
"""Numbers of a vector: 32 bytes of half-precision numbers, the width of an AVX2 register."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_NUMBERS = {
    types.float32: (_F32, 4),
    types.float16: (ir.HalfType(), 2),
    types.uint16: (_I16, 2),  # bfloat16
}
_NEEDED = {"x86_64": ("sse4.2", "f16c"), "aarch64": ("crc",), "arm64": ("crc",)}
_ARCHITECTURE = llvmlite.binding.get_default_triple().split("-")[0]


def is_supported() -> bool:
    """Whether this processor has the instructions that the kernels need."""
    features = llvmlite.binding.get_host_cpu_features()
    needed = _NEEDED.get(_ARCHITECTURE)
    return needed is not None and all(features.get(name, False) for name in needed)


class _Floats(types.Type):  # type: ignore[misc]  # numba has no types for mypy
    def __init__(self) -> None:
        super().__init__(name=f"{LANES}xfloat32")


floats = _Floats()


@register_model(_Floats)
class _FloatsModel(models.PrimitiveModel):  # type: ignore[misc]  # the same
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _vector(_F32))


def _vector(element: Any) -> Any:
    return ir.VectorType(element, LANES)


def _all(element: Any, value: float) -> Any:
    """A constant vector of one value."""
    return ir.Constant(_vector(element), [ir.Constant(element, value)] * LANES)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Call an intrinsic function of LLVM."""
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _widen(builder: Any, numbers: Any, dtype: Any) -> Any:
    """Stored numbers as float32, exactly."""
    if dtype == types.float32:
        return numbers
    if dtype == types.float16:
        return builder.fpext(numbers, _vector(_F32))
    shifted = builder.shl(builder.zext(numbers, _vector(_I32)), _all(_I32, 16))
    return builder.bitcast(shifted, _vector(_F32))


def _narrow(builder: Any, value: Any, dtype: Any) -> Any:
    """Finite float32 as numbers to store, rounded to nearest, ties to even."""
    if dtype == types.float32:
        return value
    if dtype == types.float16:
        return builder.fptrunc(value, _vector(ir.HalfType()))
    # LLVM's own truncation to bfloat calls a library function that may be missing.
    high = _high_half(builder, builder.bitcast(value, _vector(_I32)))
    return builder.trunc(high, _vector(_I16))


def _high_half(builder: Any, bits: Any) -> Any:
    """The upper 16 of each 32 bits, rounded to nearest, ties to even."""
    odd = builder.and_(builder.lshr(bits, _all(_I32, 16)), _all(_I32, 1))
    rounded = builder.add(builder.add(bits, odd), _all(_I32, 0x7FFF))
    return builder.lshr(rounded, _all(_I32, 16))


@intrinsic
def load_word(_: Any, address: Any) -> Any:
    """The 8 bytes at ``address`` as uint64."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], _I64), align=1)

    return types.uint64(types.int64), codegen


@intrinsic
def load_half_word(_: Any, address: Any) -> Any:
    """The 4 bytes at ``address`` as uint32."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], _I32), align=1)

    return types.uint32(types.int64), codegen


@intrinsic
def load_byte(_: Any, address: Any) -> Any:
    """The byte at ``address``."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], _I8))

    return types.uint8(types.int64), codegen


@intrinsic
def store_half_word(_: Any, address: Any, value: Any) -> Any:
    """Write a uint32 to the 4 bytes at ``address``."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], _I32), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint32), codegen


@intrinsic
def prefetch(_: Any, address: Any) -> Any:
    """Ask for the cache line at ``address``, which need not be readable."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], _I8)
        read, keep, data = (ir.Constant(_I32, value) for value in (0, 3, 1))
        arguments = [pointer, read, keep, data]
        kind = ir.FunctionType(ir.VoidType(), [a.type for a in arguments])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, arguments)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def copy(_: Any, target: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes between places that do not overlap."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        pointers = [_pointer(builder, address, _I8) for address in args[:2]]
        cgutils.raw_memcpy(builder, *pointers, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def copy_line(_: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        _copy_line(builder, *args)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def stream_line(_: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes past the caches; ``target`` is a multiple of 16. Ends with ``fence``."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        for store in _copy_line(builder, *args):
            store.align = 16
            _mark_streaming(builder, store)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fence(_: Any) -> Any:
    """Make all that was streamed visible before what is written afterwards."""

    def codegen(context: Any, builder: Any, __: Any, ___: Any) -> Any:
        if _ARCHITECTURE == "x86_64":
            _call(builder, "llvm.x86.sse.sfence", ir.VoidType(), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def crc_word(_: Any, crc: Any, word: Any) -> Any:
    """CRC32C state after 8 more bytes."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        if _ARCHITECTURE == "x86_64":
            return _call(builder, "llvm.x86.sse42.crc32.64.64", _I64, list(args))
        crc = builder.trunc(args[0], _I32)
        return builder.zext(_call(builder, "llvm.aarch64.crc32cx", _I32, [crc, args[1]]), _I64)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def crc_byte(_: Any, crc: Any, byte: Any) -> Any:
    """CRC32C state after one more byte."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        crc = builder.trunc(args[0], _I32)
        if _ARCHITECTURE == "x86_64":
            crc = _call(builder, "llvm.x86.sse42.crc32.32.8", _I32, [crc, args[1]])
        else:
            byte = builder.zext(args[1], _I32)
            crc = _call(builder, "llvm.aarch64.crc32cb", _I32, [crc, byte])
        return builder.zext(crc, _I64)

    return types.uint64(types.uint64, types.uint8), codegen


@intrinsic
def item_nbytes(_: Any, dtype: Any) -> Any:
    """Bytes of a number of a dtype, as a constant."""

    def codegen(_: Any, __: Any, ___: Any, ____: Any) -> Any:
        return ir.Constant(_I64, _NUMBERS[dtype.dtype][1])

    return types.int64(dtype), codegen


@intrinsic
def load(_: Any, address: Any, dtype: Any) -> Any:
    """``LANES`` numbers of a dtype as ``floats``; bfloat16 is called uint16."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], _vector(_NUMBERS[dtype.dtype][0]))
        return _widen(builder, builder.load(pointer, align=1), dtype.dtype)

    return floats(types.int64, dtype), codegen


@intrinsic
def load_part(_: Any, address: Any, count: Any, dtype: Any) -> Any:
    """Fewer than ``LANES`` numbers of a dtype as ``floats``, the others 0."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        element, size = _NUMBERS[dtype.dtype]
        buffer = cgutils.alloca_once(builder, _vector(element))
        builder.store(ir.Constant(_vector(element), None), buffer)
        cgutils.raw_memcpy(builder, buffer, _pointer(builder, args[0], _I8), args[1], size)
        return _widen(builder, builder.load(buffer), dtype.dtype)

    return floats(types.int64, types.int64, dtype), codegen


@intrinsic
def store(_: Any, address: Any, value: Any, dtype: Any) -> Any:
    """Write ``floats`` as numbers of a dtype."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        numbers = _narrow(builder, args[1], dtype.dtype)
        builder.store(numbers, _pointer(builder, args[0], numbers.type), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, floats, dtype), codegen


@intrinsic
def stream(_: Any, address: Any, value: Any, dtype: Any) -> Any:
    """The same past the caches; ``address`` is a multiple of 16. Ends with ``fence``."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        element, size = _NUMBERS[dtype.dtype]
        numbers = _narrow(builder, args[1], dtype.dtype)
        per_part = 16 // size
        pointer = _pointer(builder, args[0], ir.VectorType(element, per_part))
        for part in range(LANES // per_part):
            lanes = [ir.Constant(_I32, part * per_part + lane) for lane in range(per_part)]
            mask = ir.Constant(ir.VectorType(_I32, per_part), lanes)
            place = builder.gep(pointer, [ir.Constant(_I64, part)])
            value = builder.shuffle_vector(numbers, numbers, mask)
            _mark_streaming(builder, builder.store(value, place, align=16))
        return context.get_dummy_value()

    return types.void(types.int64, floats, dtype), codegen


@intrinsic
def store_part(_: Any, address: Any, value: Any, count: Any, dtype: Any) -> Any:
    """Write the first ``count`` of ``floats`` as numbers of a dtype."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        numbers = _narrow(builder, args[1], dtype.dtype)
        size = _NUMBERS[dtype.dtype][1]
        _store_items(builder, args[0], numbers, args[2], size)
        return context.get_dummy_value()

    return types.void(types.int64, floats, types.int64, dtype), codegen


@intrinsic
def load_int8(_: Any, address: Any) -> Any:
    """``LANES`` signed bytes as ``floats``."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        integers = builder.load(_pointer(builder, args[0], _vector(_I8)), align=1)
        return builder.sitofp(builder.sext(integers, _vector(_I32)), _vector(_F32))

    return floats(types.int64), codegen


@intrinsic
def load_int8_part(_: Any, address: Any, count: Any) -> Any:
    """Fewer than ``LANES`` signed bytes as ``floats``, the others 0."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        buffer = cgutils.alloca_once(builder, _vector(_I8))
        builder.store(ir.Constant(_vector(_I8), None), buffer)
        cgutils.raw_memcpy(builder, buffer, _pointer(builder, args[0], _I8), args[1], 1)
        integers = builder.sext(builder.load(buffer), _vector(_I32))
        return builder.sitofp(integers, _vector(_F32))

    return floats(types.int64, types.int64), codegen


@intrinsic
def store_int8(_: Any, address: Any, value: Any) -> Any:
    """Write ``floats`` within ±127.5 as signed bytes, rounded to nearest, ties to even."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        integers = _round(builder, args[1])
        builder.store(integers, _pointer(builder, args[0], integers.type), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, floats), codegen


@intrinsic
def store_int8_part(_: Any, address: Any, value: Any, count: Any) -> Any:
    """The same for the first ``count`` of ``floats``."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        _store_items(builder, args[0], _round(builder, args[1]), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, floats, types.int64), codegen


@intrinsic
def splat(_: Any, value: Any) -> Any:
    """One float32 in all lanes."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        one = builder.insert_element(
            ir.Constant(_vector(_F32), ir.Undefined), args[0], ir.Constant(_I32, 0)
        )
        first = ir.Constant(_vector(_I32), None)
        return builder.shuffle_vector(one, one, first)

    return floats(types.float32), codegen


@intrinsic
def multiply(_: Any, left: Any, right: Any) -> Any:
    """Product, lane by lane."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return floats(floats, floats), codegen


@intrinsic
def larger(_: Any, largest: Any, value: Any) -> Any:
    """Larger of ``largest``, not negative, and the magnitude of ``value``, lane by lane.

    They are compared as integers, in which NaN is larger than infinity, and that than all else.
    """

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        left, right = (builder.bitcast(value, _vector(_I32)) for value in args)
        right = builder.and_(right, _all(_I32, 0x7FFFFFFF))
        more = builder.icmp_signed(">", right, left)
        return builder.bitcast(builder.select(more, right, left), _vector(_F32))

    return floats(floats, floats), codegen


@intrinsic
def largest_bits(_: Any, value: Any) -> Any:
    """The largest lane of ``floats`` that are not negative, as the bits of a float32."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _vector(_I32))
        return _call(builder, f"llvm.vector.reduce.umax.v{LANES}i32", _I32, [bits])

    return types.uint32(floats), codegen


@intrinsic
def scales(_: Any, largest: Any, top: Any, step: Any) -> Any:
    """Scales of groups whose largest magnitudes are given: see ``pagedkv.int8.Int8``.

    Bits of bfloat16 from ``top`` on are raised by ``step``.
    """

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        ints = _vector(_I32)
        quotient = builder.bitcast(builder.fdiv(args[0], _all(_F32, 127.0)), ints)
        low = _all(_I32, 0x00800000)  # the smallest normal number, whose reciprocal is finite
        bits = builder.select(builder.icmp_signed(">", quotient, low), quotient, low)
        bits = _high_half(builder, bits)
        top, step = (_splat_int(builder, value) for value in args[1:])
        raised = builder.add(bits, step)
        bits = builder.select(builder.icmp_signed(">=", bits, top), raised, bits)
        zero = builder.icmp_signed("==", builder.bitcast(args[0], ints), ir.Constant(ints, None))
        bits = builder.select(zero, ir.Constant(ints, None), bits)
        return builder.bitcast(builder.shl(bits, _all(_I32, 16)), _vector(_F32))

    return floats(floats, types.uint32, types.uint32), codegen


@intrinsic
def reciprocals(_: Any, value: Any) -> Any:
    """``1 / value`` lane by lane, 0 where that is 0."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        zero = ir.Constant(_vector(_F32), None)
        inverse = builder.fdiv(_all(_F32, 1.0), args[0])
        return builder.select(builder.fcmp_ordered("==", args[0], zero), zero, inverse)

    return floats(floats), codegen


def _splat_int(builder: Any, value: Any) -> Any:
    one = builder.insert_element(
        ir.Constant(_vector(_I32), ir.Undefined), value, ir.Constant(_I32, 0)
    )
    return builder.shuffle_vector(one, one, ir.Constant(_vector(_I32), None))


def _round(builder: Any, value: Any) -> Any:
    """Rounded integers: added to 1.5 * 2**23, a float32 has its integer in its lowest bits."""
    moved = builder.bitcast(builder.fadd(value, _all(_F32, 12582912.0)), _vector(_I32))
    return builder.trunc(moved, _vector(_I8))


def _store_items(builder: Any, address: Any, numbers: Any, count: Any, size: int) -> None:
    buffer = cgutils.alloca_once(builder, numbers.type)
    builder.store(numbers, buffer)
    cgutils.raw_memcpy(builder, _pointer(builder, address, _I8), buffer, count, size)


def _copy_line(builder: Any, target: Any, source: Any) -> list[Any]:
    """Copy 64 bytes; return the stores."""
    part = ir.VectorType(_I64, 2)
    pointers = [_pointer(builder, address, part) for address in (target, source)]
    places = [[builder.gep(p, [ir.Constant(_I64, i)]) for i in range(4)] for p in pointers]
    values = [builder.load(place, align=1) for place in places[1]]
    return [builder.store(v, place, align=1) for v, place in zip(values, places[0], strict=True)]


def _mark_streaming(builder: Any, store: Any) -> None:
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
