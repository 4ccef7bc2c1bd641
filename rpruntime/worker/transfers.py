"""Copies between host memory and a device, behind one interface.

    activations up | activations down | weights up | gradients down | compute        five CUDA streams

`upload` and `download` return at once; `Copy.wait()` makes what computes next see the copied data, `Copy.done()` says
whether the host may act on it. A CPU device copies on the spot; `DelayedTransfers` is the double that copies late and
out of order, so that whoever uses data too early computes nonsense.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Copy(Protocol):
    """A copy under way. Whoever holds it keeps both ends alive."""

    def wait(self) -> torch.Tensor:
        """The destination; compute that is launched from now on sees the data."""
        ...

    def done(self) -> bool:
        """Whether the host may use the destination (a download) or reuse the source (an upload)."""
        ...


class Transfers(Protocol):
    """What a stage needs of its device."""

    device: torch.device

    def upload(self, host: torch.Tensor, kind: str) -> Copy:
        """Start copying host bytes to a new tensor on the device. `kind`: "act" or "weights"."""
        ...

    def download(self, source: torch.Tensor, host: torch.Tensor, kind: str) -> Copy:
        """Start copying a device tensor, as computed so far, to host memory. `kind`: "act" or "grad"."""
        ...

    def mark(self) -> Any:
        """A point in the device's computation, for `when_ms`."""
        ...

    def reached(self, mark: Any) -> bool:
        """Whether the device has come to a mark."""
        ...

    def when_ms(self, mark: Any) -> float:
        """When the device reached a mark, in milliseconds of the machine's monotonic clock."""
        ...

    def peak_bytes(self) -> int:
        """The device's memory at its highest since the last call; 0 where that is not measured."""
        ...

    def check(self) -> None:
        """Wait for the device; raises if it cannot be used any more (a fault in a kernel is for good)."""
        ...


class _Finished:
    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def wait(self) -> torch.Tensor:
        return self._result

    def done(self) -> bool:
        return True


class CpuTransfers:
    """A CPU device: every copy is real and immediate."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.device = torch.device("cpu")
        self._clock = clock

    def upload(self, host: torch.Tensor, kind: str) -> Copy:
        return _Finished(_like(host, self.device).copy_(host))

    def download(self, source: torch.Tensor, host: torch.Tensor, kind: str) -> Copy:
        return _Finished(host.copy_(source))

    def mark(self) -> float:
        return self._clock()

    def reached(self, mark: float) -> bool:
        return True

    def when_ms(self, mark: float) -> float:
        return mark * 1e3

    def peak_bytes(self) -> int:
        return 0

    def check(self) -> None:
        pass


def _like(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


class _CudaCopy:
    def __init__(self, event: torch.cuda.Event, result: torch.Tensor, source: torch.Tensor) -> None:
        self._event = event
        self._result = result
        self._source = source  # alive until the copy has been waited for

    def wait(self) -> torch.Tensor:
        torch.cuda.current_stream().wait_event(self._event)
        if self._result.is_cuda:
            self._result.record_stream(torch.cuda.current_stream())
        return self._result

    def done(self) -> bool:
        return self._event.query()


class CudaTransfers:
    """A CUDA device: every kind of copy on a stream of its own, ordered against compute by events alone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._up = {kind: torch.cuda.Stream() for kind in ("act", "weights")}
        self._down = {kind: torch.cuda.Stream() for kind in ("act", "grad")}
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record()
        self._origin.synchronize()
        self._origin_ms = clock() * 1e3

    def upload(self, host: torch.Tensor, kind: str) -> Copy:
        with torch.cuda.stream(self._up[kind]):
            result = _like(host, self.device)
            result.copy_(host, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return _CudaCopy(event, result, host)

    def download(self, source: torch.Tensor, host: torch.Tensor, kind: str) -> Copy:
        stream = self._down[kind]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return _CudaCopy(event, host, source)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def when_ms(self, mark: torch.cuda.Event) -> float:
        return self._origin_ms + float(self._origin.elapsed_time(mark))

    def check(self) -> None:
        torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


class _DelayedCopy:
    def __init__(self, owner: DelayedTransfers, source: torch.Tensor, result: torch.Tensor) -> None:
        self._owner = owner
        self._source = source
        self._result = result
        self.polls_left = owner.random.randrange(4)
        self.finished = False

    def perform(self) -> None:
        if not self.finished:
            self._result.copy_(self._source)
            self.finished = True

    def wait(self) -> torch.Tensor:
        self.perform()
        return self._result

    def done(self) -> bool:
        self._owner.tick()
        return self.finished


class DelayedTransfers(CpuTransfers):
    """Test double: a copy happens only when it is waited for or after some polls, in random order."""

    def __init__(self, clock: Callable[[], float], seed: int = 0) -> None:
        super().__init__(clock)
        self.random = random.Random(seed)
        self._pending: list[_DelayedCopy] = []

    def upload(self, host: torch.Tensor, kind: str) -> Copy:
        result = _like(host, self.device)
        _poison(result)
        return self._start(host, result)

    def download(self, source: torch.Tensor, host: torch.Tensor, kind: str) -> Copy:
        # a stream copies what was computed by then, so the source is frozen here; the destination is not
        _poison(host)
        return self._start(source.clone(), host)

    def _start(self, source: torch.Tensor, result: torch.Tensor) -> Copy:
        copy = _DelayedCopy(self, source, result)
        self._pending.append(copy)
        return copy

    def tick(self) -> None:
        self.random.shuffle(self._pending)
        for copy in self._pending:
            copy.polls_left -= 1
            if copy.polls_left <= 0:
                copy.perform()
        self._pending = [copy for copy in self._pending if not copy.finished]


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.zero_()
