"""Where parameters lie in a slab. Arithmetic only; the worker and the optimizer must agree on it."""

from __future__ import annotations

from collections.abc import Sequence

from rpruntime.store.allocator import align
from rpruntime.store.arena import contiguous_stride, dtype_of
from rpruntime.wire.messages import UnitSpec


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a contiguous tensor."""
    count = dtype_of(dtype).itemsize
    for size in shape:
        count *= size
    return count


def packed(shapes: list[tuple[int, ...]], dtypes: list[str]) -> tuple[list[int], int]:
    """(offsets, total) in bytes of tensors laid one after another at aligned addresses."""
    offsets, total = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        offsets.append(total)
        total += align(tensor_bytes(shape, dtype))
    return offsets, total


def gradient_layout(unit: UnitSpec) -> tuple[list[int], int]:
    """(offsets, total) in bytes of a gradient slab: every parameter in its `grad_dtype`."""
    return packed([param.shape for param in unit.params], [param.grad_dtype for param in unit.params])


def optimizer_dtype(dtype: str) -> str:
    """dtype of the optimizer copy and of gradient sums: fp32, or wider where the parameter is."""
    import torch

    return str(torch.promote_types(dtype_of(dtype), torch.float32)).removeprefix("torch.")


def optimizer_layout(unit: UnitSpec) -> tuple[list[int], int]:
    """(offsets, total) in bytes of a unit's optimizer copy (and of its sums)."""
    return packed([param.shape for param in unit.params], [optimizer_dtype(param.dtype) for param in unit.params])


def is_replaced_in_place(unit: UnitSpec) -> bool:
    """Whether a unit's new weights take the place of its gradients in a step of one call: they have the same dtypes."""
    added = len(unit.positions) > 1
    return all(param.dtype == (optimizer_dtype(param.dtype) if added else param.grad_dtype) for param in unit.params)


def spare_bytes(units: Sequence[UnitSpec], asynchronous: bool) -> int:
    """Room beside a version of the weights for the gradients of an iteration, which become the next version, and for
    what is there a little longer.

    That is new weights, where they cannot take the place of gradients: for all when asynchronous, else for two large
    ones, as the old ones go while the step runs. When asynchronous, gradients come in where the weights were that their
    slot read; large slots (see `rpruntime/optimizer/sums.py`) take more room.
    """
    trained = [unit for unit in units if unit.trainable]
    kept = sum(gradient_layout(unit)[1] for unit in trained)
    beside = [unit.nbytes for unit in trained if not is_replaced_in_place(unit)]
    return kept + (sum(beside) if asynchronous else min(sum(beside), 2 * max(beside, default=0)))


__all__ = [
    "contiguous_stride",
    "gradient_layout",
    "is_replaced_in_place",
    "optimizer_dtype",
    "optimizer_layout",
    "packed",
    "spare_bytes",
    "tensor_bytes",
]
