"""Adding a micro-batch's gradient to its fp32 sum on the device.

torch adds tensors of two dtypes element by element, at a fraction of the memory's rate (docs/performance.md); with
Triton, which comes with torch for CUDA, one kernel reads both in wide loads. The sums are the same to the bit: a
low-precision number is exact in fp32, and both add once and round once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger(__name__)

_BLOCK = 4096
_LEAST_NUMEL = 1 << 16
"""Smaller gradients cost what a launch costs, whoever adds them."""


def add_to(total: torch.Tensor, grad: torch.Tensor) -> None:
    """total [any shape, fp32] += grad [same shape, fp32 or lower precision]."""
    if (
        total.is_cuda
        and grad.dtype != total.dtype
        and total.dtype == torch.float32
        and total.numel() >= _LEAST_NUMEL
        and total.is_contiguous()
        and grad.is_contiguous()
    ):
        kernel = _kernel()
        if kernel is not None:
            kernel(total, grad)
            return
    total.add_(grad)


@functools.cache
def _kernel() -> Callable[[torch.Tensor, torch.Tensor], None] | None:
    """The Triton kernel; None where it cannot be built (no Triton, no compiler for its launcher)."""
    try:
        return _build()
    except Exception as err:
        log.info("fp32 sums are torch's: no Triton kernel (%s: %s)", type(err).__name__, err)
        return None


def _build() -> Callable[[torch.Tensor, torch.Tensor], None]:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def add(total: Any, grad: Any, numel: Any, block: tl.constexpr) -> None:
        place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = place < numel
        value = tl.load(total + place, inside) + tl.load(grad + place, inside).to(tl.float32)
        tl.store(total + place, value, inside)

    def run(total: torch.Tensor, grad: torch.Tensor) -> None:
        numel = total.numel()
        add[(triton.cdiv(numel, _BLOCK),)](total, grad, numel, block=_BLOCK)

    probe = torch.zeros(8, device="cuda")
    run(probe, torch.ones(8, dtype=torch.bfloat16, device="cuda"))
    if probe.sum().item() != 8:
        raise RuntimeError("the kernel adds wrongly on this device")
    return run
