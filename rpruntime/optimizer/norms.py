"""Norms of gradients as `clip_grad_norm_` has them to the bit, several at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

THREADED_ELEMENTS = 1 << 20
"""Norms of smaller gradients are not worth a thread."""

WINDOW_BYTES = 2 << 30
"""Units whose gradients are widened together, so that there are enough tensors for all threads: a largest unit of its
own size, and the smaller ones up to this."""

T = TypeVar("T")


def in_windows(items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Neighbours together, as long as their bytes stay within a window."""
    found: list[list[T]] = []
    used = 0
    for item, size in zip(items, sizes, strict=True):
        if not found or used + size > WINDOW_BYTES:
            found.append([])
            used = 0
        found[-1].append(item)
        used += size
    return found


class Norms:
    """Measures on threads of its own: `vector_norm` adds up a fp32 tensor on one thread, in an order that cutting the
    tensor would change, so that only several tensors at once fill the cores. Use in a `with` block."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Norms:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def measure(self, gradients: Iterable[Tensor | None]) -> list[Tensor]:
        """The norms of all that are there, in order."""
        found = [gradient for gradient in gradients if gradient is not None]
        large = [g for g in found if g.dtype == torch.float32 and g.numel() >= THREADED_ELEMENTS]
        if len(large) < 2 or torch.get_num_threads() < 2:
            return [torch.linalg.vector_norm(gradient) for gradient in found]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="norms")
        # the longest first, so that none is left to run alone
        order = sorted(large, key=lambda gradient: -gradient.numel())
        running = {id(gradient): self._pool.submit(torch.linalg.vector_norm, gradient) for gradient in order}
        return [
            running[id(gradient)].result() if id(gradient) in running else torch.linalg.vector_norm(gradient)
            for gradient in found
        ]
