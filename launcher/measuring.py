"""Times that `rpctl plan` measures: each kind of layer with one micro-batch, products of matrices, the optimizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from launcher.meta_run import Work
from rpruntime.errors import ConfigError
from rpruntime.store.values import put_together, take_apart
from rpruntime.worker.memory import is_out_of_memory
from rpruntime.worker.segment import enter_tensors

WARM_UPS, MIN_RUNS, MAX_RUNS, ENOUGH_S = 2, 3, 20, 1.0
_MATRIX = {"cpu": 1024, "cuda": 8192}
_STEPPED = 8_000_000


class LayerTimer:
    """Times what it is shown on a device; `ms` has (forward, recomputation and backward) by kind of layer.

    Weights and inputs are random. One layer is on the device at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ms: dict[tuple[Any, ...], tuple[float, float]] = {}

    def __call__(self, work: Work) -> None:
        """Time a layer. Raises ConfigError if the device has no room for it."""
        if work.kind in self.ms:
            return
        try:
            self.ms[work.kind] = self._time(work)
        except RuntimeError as err:
            if not is_out_of_memory(err):
                raise
            raise ConfigError(
                f"--measure: {work.kind[0]} with one micro-batch does not fit on {self.device}: "
                "more --microbatches make it smaller"
            ) from err

    def _time(self, work: Work) -> tuple[float, float]:
        skeleton, tensors = take_apart(work.layer)
        layer = put_together(skeleton, [self._filled(tensor) for tensor in tensors])
        inputs = [self._filled(tensor) for tensor in work.tensors]
        parameters = list(layer.parameters())

        def forward() -> None:
            with torch.no_grad():
                entered = enter_tensors(work.skeleton, inputs, [False] * len(inputs))
                value = layer(entered.value)
                if work.loss is not None:
                    work.loss(value)

        def backward() -> None:
            entered = enter_tensors(work.skeleton, inputs, work.flags)
            value = layer(entered.value)
            if work.loss is not None:
                value = work.loss(value)
            roots = [tensor for tensor in take_apart(value)[1] if tensor.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])
            for parameter in parameters:
                parameter.grad = None

        return median_ms(forward, self.device), median_ms(backward, self.device)

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape with something in it, a parameter for a parameter."""
        if tensor.is_floating_point():
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device).normal_(0.0, 0.02)
        elif tensor.dtype is torch.bool:
            made = torch.ones(tensor.shape, dtype=tensor.dtype, device=self.device)
        else:
            made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def median_ms(run: Callable[[], object], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """The median time of a call, the device's work included."""

    def timed() -> float:
        began = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - began

    for _ in range(WARM_UPS):
        timed()
    found: list[float] = []
    while len(found) < MIN_RUNS or (len(found) < MAX_RUNS and sum(found) < ENOUGH_S):
        found.append(timed())
    return statistics.median(found) * 1e3


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """10^12 floating-point operations a second of products of large matrices."""
    size = _MATRIX[device.type]
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: torch.mm(a, b, out=a), device) / 1e9


def optimizer_ms(kind: type[torch.optim.Optimizer], num_parameters: int) -> float:
    """A step over so many fp32 parameters on this host, from a step over 8 million."""
    parameter = nn.Parameter(torch.zeros(_STEPPED))
    parameter.grad = torch.zeros(_STEPPED)
    optimizer: Any = kind([parameter])  # type: ignore[call-arg]
    return median_ms(optimizer.step, torch.device("cpu")) * num_parameters / _STEPPED


def default_device() -> torch.device:
    """The device that times are measured on."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
