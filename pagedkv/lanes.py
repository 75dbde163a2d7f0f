"""Eight float32 numbers in registers, as the attention kernels use them.

They are generic LLVM vectors, which compile for any processor: an AVX2 register holds one, others
two or a half. Memory is named by address, an int64, of any alignment. What the numbers are stored
as is a dtype: float32, float16, uint16 for bfloat16, or int8.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 8

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _F16 = ir.FloatType(), ir.HalfType()
_STORED = {types.float32: _F32, types.float16: _F16, types.uint16: _I16, types.int8: _I8}
_NBYTES = {types.float32: 4, types.float16: 2, types.uint16: 2, types.int8: 1}

_SERIES = (
    1.0,
    0.6931471806,
    0.2402265070,
    0.0555041087,
    0.0096181291,
    0.0013333558,
    1.540353e-4,
)
"""Coefficients of the Taylor series of 2 ** x."""


class _Octet(types.Type):  # type: ignore[misc]  # numba has no types for mypy
    def __init__(self) -> None:
        super().__init__(name=f"{LANES}xfloat32")


octet = _Octet()


@register_model(_Octet)
class _OctetModel(models.PrimitiveModel):  # type: ignore[misc]  # the same
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _vector(_F32))


def _vector(element: Any) -> Any:
    return ir.VectorType(element, LANES)


def _all(element: Any, value: float) -> Any:
    return ir.Constant(_vector(element), [ir.Constant(element, value)] * LANES)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _call(builder: Any, name: str, arguments: list[Any]) -> Any:
    kind = ir.FunctionType(arguments[0].type, [a.type for a in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _shuffled(builder: Any, left: Any, right: Any, lanes: tuple[int, ...]) -> Any:
    mask = ir.Constant(_vector(_I32), [ir.Constant(_I32, lane) for lane in lanes])
    return builder.shuffle_vector(left, right, mask)


def _widen(builder: Any, stored: Any, dtype: Any) -> Any:
    """Stored numbers as float32, exactly."""
    if dtype == types.float32:
        return stored
    if dtype == types.float16:
        return builder.fpext(stored, _vector(_F32))
    if dtype == types.int8:
        return builder.sitofp(builder.sext(stored, _vector(_I32)), _vector(_F32))
    shifted = builder.shl(builder.zext(stored, _vector(_I32)), _all(_I32, 16))
    return builder.bitcast(shifted, _vector(_F32))


def _exp2(builder: Any, exponent: Any) -> Any:
    """2 ** exponent, 0 < result, for exponents up to 127."""
    least = _all(_F32, -126.0)
    small = builder.fcmp_ordered("<", exponent, least)
    exponent = builder.select(small, least, exponent)
    magic = _all(_F32, 12582912.0)  # 1.5 * 2**23: an integer in the lowest bits of the sum
    moved = builder.fadd(exponent, magic)
    rest = builder.fsub(exponent, builder.fsub(moved, magic))
    result = _all(_F32, _SERIES[-1])
    for power in reversed(_SERIES[:-1]):
        result = _call(builder, f"llvm.fma.v{LANES}f32", [result, rest, _all(_F32, power)])
    shift = builder.shl(builder.bitcast(moved, _vector(_I32)), _all(_I32, 23))
    bits = builder.add(builder.bitcast(result, _vector(_I32)), shift)
    return builder.bitcast(bits, _vector(_F32))


@intrinsic
def load(_: Any, address: Any, dtype: Any) -> Any:
    """The numbers of a dtype at ``address``."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        pointer = _pointer(builder, args[0], _vector(_STORED[dtype.dtype]))
        return _widen(builder, builder.load(pointer, align=1), dtype.dtype)

    return octet(types.int64, dtype), codegen


@intrinsic
def load_part(_: Any, address: Any, count: Any, dtype: Any) -> Any:
    """The first ``count`` numbers of a dtype at ``address``, the others 0."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        stored = _vector(_STORED[dtype.dtype])
        buffer = cgutils.alloca_once(builder, stored)
        builder.store(ir.Constant(stored, None), buffer)
        source = _pointer(builder, args[0], _I8)
        cgutils.raw_memcpy(builder, buffer, source, args[1], _NBYTES[dtype.dtype])
        return _widen(builder, builder.load(buffer), dtype.dtype)

    return octet(types.int64, types.int64, dtype), codegen


@intrinsic
def load_one(_: Any, address: Any, dtype: Any) -> Any:
    """The number of a dtype at ``address``, in all lanes."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        kind = _STORED[dtype.dtype]
        value = builder.load(_pointer(builder, args[0], kind), align=1)
        one = builder.insert_element(
            ir.Constant(_vector(kind), ir.Undefined), value, ir.Constant(_I32, 0)
        )
        return _widen(builder, _shuffled(builder, one, one, (0,) * LANES), dtype.dtype)

    return octet(types.int64, dtype), codegen


@intrinsic
def store(_: Any, address: Any, value: Any) -> Any:
    """Write float32 numbers to ``address``."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], _vector(_F32)), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, octet), codegen


@intrinsic
def store_part(_: Any, address: Any, value: Any, count: Any) -> Any:
    """Write the first ``count`` of float32 numbers to ``address``."""

    def codegen(context: Any, builder: Any, __: Any, args: Any) -> Any:
        buffer = cgutils.alloca_once(builder, _vector(_F32))
        builder.store(args[1], buffer)
        cgutils.raw_memcpy(builder, _pointer(builder, args[0], _I8), buffer, args[2], 4)
        return context.get_dummy_value()

    return types.void(types.int64, octet, types.int64), codegen


@intrinsic
def first_lane(_: Any, value: Any) -> Any:
    """The first of the numbers."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.Constant(_I32, 0))

    return types.float32(octet), codegen


@intrinsic
def splat(_: Any, value: Any) -> Any:
    """One number in all lanes."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        one = builder.insert_element(
            ir.Constant(_vector(_F32), ir.Undefined), args[0], ir.Constant(_I32, 0)
        )
        return _shuffled(builder, one, one, (0,) * LANES)

    return octet(types.float32), codegen


@intrinsic
def multiply_add(_: Any, left: Any, right: Any, addend: Any) -> Any:
    """``left * right + addend``, rounded once."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return _call(builder, f"llvm.fma.v{LANES}f32", list(args))

    return octet(octet, octet, octet), codegen


@intrinsic
def multiply(_: Any, left: Any, right: Any) -> Any:
    """Product, lane by lane."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.fmul(*args)

    return octet(octet, octet), codegen


@intrinsic
def add(_: Any, left: Any, right: Any) -> Any:
    """Sum, lane by lane."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return octet(octet, octet), codegen


@intrinsic
def subtract(_: Any, left: Any, right: Any) -> Any:
    """Difference, lane by lane."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.fsub(*args)

    return octet(octet, octet), codegen


@intrinsic
def larger(_: Any, left: Any, right: Any) -> Any:
    """The larger number, lane by lane; NaN if ``right`` is."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        left, right = args
        return builder.select(builder.fcmp_ordered(">", left, right), left, right)

    return octet(octet, octet), codegen


@intrinsic
def any_larger(_: Any, left: Any, right: Any) -> Any:
    """Whether any lane of ``left`` is larger than that of ``right``."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        more = builder.fcmp_unordered(">", *args)
        return builder.icmp_unsigned("!=", builder.bitcast(more, _I8), ir.Constant(_I8, 0))

    return types.boolean(octet, octet), codegen


@intrinsic
def first_lanes(_: Any, value: Any, count: Any, other: Any) -> Any:
    """The first ``count`` lanes of ``value``, and those of ``other`` behind them."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        value, count, other = args
        numbers = ir.Constant(_vector(_I32), [ir.Constant(_I32, lane) for lane in range(LANES)])
        one = builder.insert_element(
            ir.Constant(_vector(_I32), ir.Undefined),
            builder.trunc(count, _I32),
            ir.Constant(_I32, 0),
        )
        limit = _shuffled(builder, one, one, (0,) * LANES)
        return builder.select(builder.icmp_signed("<", numbers, limit), value, other)

    return octet(octet, types.int64, octet), codegen


@intrinsic
def sums(_: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any) -> Any:
    """The sum of all lanes of each of eight octets, as one octet."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        def joined(left: Any, right: Any, low: tuple[int, ...], high: tuple[int, ...]) -> Any:
            parts = (_shuffled(builder, left, right, lanes) for lanes in (low, high))
            return builder.fadd(*parts)

        values = list(args)
        for low, high in (
            ((0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15)),
            ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
            ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)),
        ):
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [joined(left, right, low, high) for left, right in pairs]
        return values[0]

    return octet(*[octet] * 8), codegen


@intrinsic(prefer_literal=True)
def rotated(_: Any, value: Any, by: Any) -> Any:
    """Lane ``i`` is lane ``i + by`` of ``value``, counted round; ``by`` is a constant."""
    distance = by.literal_value

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        lanes = tuple((lane + distance) % LANES for lane in range(LANES))
        return _shuffled(builder, args[0], args[0], lanes)

    return octet(octet, by), codegen


@intrinsic
def has_scales(_: Any, dtype: Any) -> Any:
    """Whether numbers of this dtype have scales, as a constant."""

    def codegen(_: Any, __: Any, ___: Any, ____: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(dtype.dtype == types.int8))

    return types.boolean(dtype), codegen


@intrinsic
def item_nbytes(_: Any, dtype: Any) -> Any:
    """Bytes of a stored number, as a constant."""

    def codegen(_: Any, __: Any, ___: Any, ____: Any) -> Any:
        return ir.Constant(_I64, _NBYTES[dtype.dtype])

    return types.int64(dtype), codegen


@intrinsic
def exp2(_: Any, exponent: Any) -> Any:
    """2 to these powers, at most 127, and at least -126 each."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return _exp2(builder, args[0])

    return octet(octet), codegen


@intrinsic
def capped(_: Any, score: Any, cap: Any) -> Any:
    """``cap * tanh(score / cap)``."""

    def codegen(_: Any, builder: Any, __: Any, args: Any) -> Any:
        score, cap = args
        limit, two, one = (_all(_F32, value) for value in (9.0, 2.0, 1.0))
        ratio = builder.fdiv(score, cap)
        ratio = builder.select(builder.fcmp_unordered("<", ratio, limit), ratio, limit)
        negative = _all(_F32, -9.0)
        ratio = builder.select(builder.fcmp_unordered(">", ratio, negative), ratio, negative)
        power = _exp2(builder, builder.fmul(ratio, _all(_F32, 2 * 1.4426950408889634)))
        tanh = builder.fsub(one, builder.fdiv(two, builder.fadd(power, one)))
        return builder.fmul(tanh, cap)

    return octet(octet, octet), codegen
