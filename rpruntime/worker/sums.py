"""A slot's gradients: fp32 sums on the device, micro-batches in order from zero (docs/numerics.md)."""

from __future__ import annotations

import torch

from rpruntime.store.arena import view
from rpruntime.store.layout import gradient_layout
from rpruntime.wire.messages import UnitSpec


class Sums:
    """By position, unit and parameter of the unit; a shared parameter has one for each position."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int, int], torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, position: int, unit: int, index: int, gradient: torch.Tensor) -> None:
        """A micro-batch's gradient, which may become the sum itself."""
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        total = self._sums.get((position, unit, index))
        if total is None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._sums[position, unit, index] = gradient.to(wide)
        else:
            total.add_(gradient)

    def take(
        self, position: int, unit: UnitSpec, scale: float, device: torch.device
    ) -> tuple[torch.Tensor, tuple[bool, ...]] | None:
        """The unit's sums in one slab, times `scale`, rounded once to the gradient dtype, and which parameters have
        one; None: none has. They are gone from here."""
        sums = [self._sums.pop((position, unit.index, index), None) for index in range(len(unit.params))]
        if all(total is None for total in sums):
            return None
        offsets, nbytes = gradient_layout(unit)
        slab = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for total, param, offset in zip(sums, unit.params, offsets, strict=True):
            if total is not None:
                total = total if scale == 1 else total * scale
                view(slab, offset, param.shape, param.grad_dtype).copy_(total)
        return slab, tuple(total is not None for total in sums)

    def clear(self) -> None:
        """Nobody wants them."""
        self._sums.clear()
