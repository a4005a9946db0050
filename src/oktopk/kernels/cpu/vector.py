"""LLVM intrinsics that Numba does not provide.

A block of 32 floats is loaded, added, stored and compared as one vector, and the comparison returns a 32-bit mask.
LLVM maps the vector to the registers of the processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

compiled = njit(nogil=True, cache=True)
"""Compile a kernel: it releases the GIL, and the machine code is cached on disk."""

WIDTH = 32
_FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
_INTS = ir.VectorType(ir.IntType(32), WIDTH)


def _block_pointer(context: Any, builder: Any, array_type: Any, array: Any, start: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), _FLOATS.as_pointer())


def _at_least(builder: Any, x: Any, threshold: Any) -> Any:
    """Bit i is set unless |x[i]| < threshold, so that a NaN counts as found."""
    magnitude = builder.bitcast(
        builder.and_(builder.bitcast(x, _INTS), ir.Constant(_INTS, [0x7FFFFFFF] * WIDTH)), _FLOATS
    )
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    lane0 = builder.insert_element(undefined, threshold, ir.Constant(ir.IntType(32), 0))
    splat = builder.shuffle_vector(lane0, undefined, ir.Constant(_INTS, [0] * WIDTH))
    return builder.bitcast(builder.fcmp_unordered(">=", magnitude, splat), ir.IntType(WIDTH))


@intrinsic
def block_select(typing_context: Any, x: Any, grad: Any, old: Any, start: Any, threshold: Any) -> Any:
    """Mask of the entries of x[start:start+32] that are at least the threshold in magnitude.

    If grad is an array, it is added to x first. If old is an array, it receives the old x; it may be grad itself.
    """
    add, keep = (isinstance(array, types.Array) for array in (grad, old))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_at, grad_at, old_at = (
            _block_pointer(context, builder, kind, array, args[3]) if isinstance(kind, types.Array) else None
            for kind, array in zip(signature.args[:3], args[:3], strict=True)
        )
        value = builder.load(x_at, align=4)
        if add:
            before = value
            value = builder.fadd(before, builder.load(grad_at, align=4))
            builder.store(value, x_at, align=4)
            if keep:
                builder.store(before, old_at, align=4)
        return _at_least(builder, value, args[4])

    return types.uint32(x, grad, old, types.int64, types.float32), codegen


@intrinsic
def stream_block(typing_context: Any, x: Any, start: Any, source: Any, at: Any) -> Any:
    """Non-temporal x[start:start+32] = source[at:at+32]; x[start] must be aligned to 128 bytes.

    Returns start.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source_at = (
            _block_pointer(context, builder, signature.args[place], args[place], args[place + 1])
            for place in (0, 2)
        )
        store = builder.store(builder.load(source_at, align=4), to, align=4 * WIDTH)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return args[1]

    return types.int64(x, types.int64, source, types.int64), codegen


@intrinsic
def prefetch(typing_context: Any, x: Any, at: Any) -> Any:
    """Prefetch the cache line of x[at] for writing; an invalid index is harmless. Returns at."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind)
        builder.call(function, [pointer, word(1), word(3), word(1)])
        return args[1]

    return types.int64(x, types.int64), codegen


@intrinsic
def pointer(typing_context: Any, address: Any, like: Any) -> Any:
    """A pointer to elements of the type of array `like`. The address is not checked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_data_type(like.dtype).as_pointer())

    return types.CPointer(like.dtype)(types.int64, like), codegen


@intrinsic
def trailing_zeros(typing_context: Any, bits: Any) -> Any:
    """Position of the lowest set bit of a non-zero integer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return bits(bits), codegen


def _bitcast(source: Any, target: Any, llvm_type: Any) -> Any:
    def cast(typing_context: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], llvm_type)

        return target(source), codegen

    return intrinsic(cast)


as_bits = _bitcast(types.float32, types.uint32, ir.IntType(32))
as_float = _bitcast(types.uint32, types.float32, ir.FloatType())
