"""What a recomputation leaves out: the last product of a layer, where nobody reads its value.

Backward reads what a layer's operations have saved, not what the layer returned. In a transformer block the result of
the last Linear, a quarter of the block's forward, is only added to the residual, and an addition saves nothing. Where a
graph outlives its forward, a recomputation can stop before that product (as torch's checkpoints do); here the graph is
made anew, so the product's node is needed, but not its kernel.

    first recomputation    looks at the graph: which Linear is called last whose output comes to the layer's own through
                           additions and views alone?
    later ones             from that call on, products and additions are put off. Whatever else is launched has all of
                           them done first; what is left when the layer returns is never computed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode

from rpruntime.worker.segment import tensors_within
from rpruntime.worker.transfers import variant

RECOMPUTE_VARIABLE = "RPRUNTIME_RECOMPUTE"
"""For measurements: "needed" (the default), or "whole" (layers are recomputed to their ends)."""

MIN_FLOPS = 5e10
"""Of a product that is worth the hooks (about 0.1 ms of Python): on a GPU of 500 TFLOP/s as much time as they take."""

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default}
_VIEWS = {
    _aten.t.default, _aten.view.default, _aten._unsafe_view.default, _aten.transpose.int, _aten.permute.default,
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.alias.default, _aten.detach.default,
}  # fmt: skip
_PASSING = {
    "AddBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0",
    "PermuteBackward0", "UnsqueezeBackward0", "SqueezeBackward1", "AliasBackward0",
}  # fmt: skip
"""Nodes of the graph that save no tensor."""


class Tail:
    """Of one layer: finds its last product and leaves it out where only the graph is wanted."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._found: tuple[nn.Linear, int] | None = None
        """The Linear and how many times it has been called before."""
        self.num_left_out = 0
        """Products and additions of the last run that were not computed."""
        self._looked = variant(RECOMPUTE_VARIABLE, "needed", "whole") == "whole"

    def run(self, forward: Callable[[], Any]) -> Any:
        """What `forward` returns, but for the values of its tensors: they are right, or memory that nobody has written.
        Their graph is right."""
        if not self._looked:
            self._looked = True
            return self._look(forward)
        self.num_left_out = 0
        if self._found is None:
            return forward()
        with self._putting_off(*self._found) as put_off:
            value = forward()
        self.num_left_out = put_off.num_waiting
        if put_off.was_needed:  # something reads it that did not when the graph was looked at
            self._found = None
        return value

    def _look(self, forward: Callable[[], Any]) -> Any:
        calls: list[tuple[nn.Linear, int, Any]] = []
        counts: Counter[nn.Module] = Counter()

        def called(module: nn.Linear, args: tuple[Any, ...], output: Any) -> None:
            flops = 2 * output.numel() * module.in_features
            if torch.is_grad_enabled() and flops >= MIN_FLOPS:
                calls.append((module, counts[module], output.grad_fn))
            counts[module] += 1

        linears = [module for module in self._layer.modules() if type(module) is nn.Linear]
        handles = [module.register_forward_hook(called) for module in linears]
        try:
            value = forward()
        finally:
            for handle in handles:
                handle.remove()
        passed = _nodes_behind(value)
        last = next(((module, count) for module, count, node in reversed(calls) if node in passed), None)
        if last is not None and calls[-1][:2] == last:
            self._found = last
        return value

    @contextlib.contextmanager
    def _putting_off(self, linear: nn.Linear, calls_before: int) -> Iterator[PutOff]:
        put_off, counts = PutOff(), Counter[nn.Module]()

        def begin(module: nn.Module, args: Any) -> None:
            if counts[module] == calls_before and not torch._C._len_torch_dispatch_stack():
                put_off.__enter__()
                put_off.is_on = True
            counts[module] += 1

        handle = linear.register_forward_pre_hook(begin)
        try:
            yield put_off
        finally:
            handle.remove()
            if put_off.is_on:
                put_off.__exit__(None, None, None)


def _nodes_behind(value: Any) -> set[Any]:
    """The nodes of the graph from which a layer's outputs come through additions and views alone."""
    found: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in tensors_within(value)]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        found.add(node)
        if node.name() in _PASSING:
            waiting += [following for following, _ in node.next_functions]
    return found


class PutOff(TorchDispatchMode):
    """Puts products off, and additions to their results, until something else is launched.

    It sits below autograd: nodes are made as always, and save the tensors whose memory is written later. So a product
    that reads what is put off has that computed first (it saves its inputs), and an addition need not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self.was_needed = False
        """Whether a product was computed after all."""
        self._waiting: list[tuple[Any, tuple[Any, ...], dict[str, Any], torch.Tensor]] = []
        self._memory: set[int] = set()
        """Storages of their results."""

    @property
    def num_waiting(self) -> int:
        """Operations that are put off."""
        return len(self._waiting)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS:
            return func(*args, **kwargs)
        result = None
        if func in _PRODUCTS:
            if any(map(self._is_put_off, args)):
                self._compute()
            left, right = args[-2:]
            result = left.new_empty(left.shape[0], right.shape[1])
        elif func is _aten.add.Tensor and any(map(self._is_put_off, args)) and _are_alike(*args):
            result = torch.empty_like(args[0])
        if result is None:
            self._compute()
            return func(*args, **kwargs)
        self._waiting.append((func, args, kwargs, result))
        self._memory.add(result.untyped_storage()._cdata)
        return result

    def _is_put_off(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._memory

    def _compute(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._memory.clear()
        self.was_needed |= bool(waiting)
        for func, args, kwargs, result in waiting:
            with _unsafe_preserve_version_counter(result):  # for who reads it, it was never anything else
                result.copy_(func(*args, **kwargs))


def _are_alike(left: torch.Tensor, right: Any) -> bool:
    """Whether the sum of two tensors has the form of each."""
    return (
        isinstance(right, torch.Tensor)
        and (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)
        and left.is_contiguous()
        and right.is_contiguous()
    )
