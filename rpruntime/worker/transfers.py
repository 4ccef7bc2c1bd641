"""Copies between host memory and a device, behind one interface.

    activations up | activations down | weights up | gradients down | compute        five CUDA streams

`upload` and `download` return at once; `Copy.wait()` makes what computes next see the copied data, `Copy.done()` says
whether the host may act on it. Weights and gradients go in pieces (`windows.py`), each behind the activations that are
on their way in its direction. A CPU device copies on the spot; `DelayedTransfers` is the double that copies late and
out of order, so that whoever uses data too early computes nonsense.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from rpruntime.errors import ConfigError
from rpruntime.status import NullStatus
from rpruntime.store.arena import POISON
from rpruntime.worker.clock import DeviceClock
from rpruntime.worker.copies import ACTIVATIONS_DOWN, ACTIVATIONS_UP, GRADIENTS_DOWN, WEIGHTS_UP, CopyLog, Place


class Copy(Protocol):
    """A copy under way. Whoever holds it keeps both ends alive."""

    def wait(self) -> torch.Tensor:
        """The destination; compute that is launched from now on sees the data."""
        ...

    def done(self) -> bool:
        """Whether the host may use the destination (a download) or reuse the source (an upload)."""
        ...


class Pieces(Copy, Protocol):
    """A copy of bytes that starts piece by piece; it is done when every byte is there."""

    nbytes: int

    def start(self, first: int, stop: int) -> None:
        """Start copying bytes [first, stop); each byte once."""
        ...


TRANSFERS_VARIABLE = "RPRUNTIME_TRANSFERS"
"""For measurements: "windows" (the default), "stage" (a whole stage's weights or gradients at once) or "none" (copies
are part of the computation, nothing overlaps)."""


def transfers_mode() -> str:
    """The variant that the environment asks for."""
    return variant(TRANSFERS_VARIABLE, "windows", "stage", "none")


def variant(variable: str, *choices: str) -> str:
    """One of `choices`, by an environment variable; the first one where it is not set.

    Raises:
        ConfigError: it is set to something else.
    """
    value = os.environ.get(variable) or choices[0]
    if value not in choices:
        raise ConfigError(f"{variable}={value}: it may be {', '.join(choices)}")
    return value


class Transfers(Protocol):
    """What a stage needs of its device."""

    device: torch.device
    log: CopyLog
    """Is told of every copy."""

    def upload(self, host: torch.Tensor) -> Copy:
        """Start copying an activation, a buffer or labels to a new tensor on the device."""
        ...

    def download(self, source: torch.Tensor, host: torch.Tensor) -> Copy:
        """Start copying a device tensor, which nobody changes any more, to host memory of the same strides."""
        ...

    def upload_pieces(self, host: torch.Tensor) -> Pieces:
        """A new tensor on the device for weights (uint8 [n]), and the copy into it, of which nothing has started."""
        ...

    def download_pieces(self, source: torch.Tensor, host: torch.Tensor) -> Pieces:
        """The copy of gradients (uint8 [n]), which nobody changes any more, to host memory; nothing has started."""
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


class _HostPieces:
    """Pieces that are copied as they start."""

    def __init__(self, owner: CpuTransfers, kind: int, source: torch.Tensor, result: torch.Tensor) -> None:
        self.nbytes = source.numel()
        self._owner, self._kind, self._place = owner, kind, owner.log.place
        self._source, self._result = source, result
        self._left = self.nbytes

    def start(self, first: int, stop: int) -> None:
        begin = self._owner.mark()
        self._result[first:stop].copy_(self._source[first:stop])
        self._left -= stop - first
        self._owner.copied(self._kind, self._place, begin, stop - first)

    def wait(self) -> torch.Tensor:
        assert not self._left, "waited for a copy that has not started"
        return self._result

    def done(self) -> bool:
        return not self._left


class CpuTransfers:
    """A CPU device: every copy is real and immediate."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.device = torch.device("cpu")
        self.log = CopyLog(NullStatus())
        self._clock = clock

    def upload(self, host: torch.Tensor) -> Copy:
        begin = self.mark()
        result = _like(host, self.device).copy_(host)
        self.copied(ACTIVATIONS_UP, self.log.place, begin, host.nbytes)
        return _Finished(result)

    def download(self, source: torch.Tensor, host: torch.Tensor) -> Copy:
        begin = self.mark()
        host.copy_(source)
        self.copied(ACTIVATIONS_DOWN, self.log.place, begin, host.nbytes)
        return _Finished(host)

    def upload_pieces(self, host: torch.Tensor) -> Pieces:
        return _HostPieces(self, WEIGHTS_UP, host, _like(host, self.device))

    def download_pieces(self, source: torch.Tensor, host: torch.Tensor) -> Pieces:
        return _HostPieces(self, GRADIENTS_DOWN, source, host)

    def copied(self, kind: int, place: Place, begin: float, nbytes: int) -> None:
        """A copy that began then has just ended."""
        self.log.count(kind, nbytes)
        if self.log.on:
            self.log.note(kind, place, begin, self.mark(), nbytes)

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


class _CudaPieces:
    """Pieces on a stream of their own, behind the newest activation in their direction."""

    def __init__(self, owner: CudaTransfers, direction: str, source: torch.Tensor, result: torch.Tensor) -> None:
        self.nbytes = source.numel()
        self._owner, self._direction = owner, direction
        self._place = owner.log.place
        self._source, self._result = source, result  # alive until the copy has been waited for
        self._left = self.nbytes
        self._event = torch.cuda.Event()
        self._computed: torch.cuda.Event | None = None
        if direction == "down":
            self._computed = torch.cuda.Event()
            self._computed.record()

    def start(self, first: int, stop: int) -> None:
        stream = self._owner.pieces_stream(self._direction)
        if self._computed is not None:
            stream.wait_event(self._computed)
        with torch.cuda.stream(stream):
            kind = WEIGHTS_UP if self._direction == "up" else GRADIENTS_DOWN
            with self._owner.noted(kind, self._place, stop - first):
                self._result[first:stop].copy_(self._source[first:stop], non_blocking=True)
            self._left -= stop - first
            if not self._left:
                self._event.record()

    def wait(self) -> torch.Tensor:
        assert not self._left, "waited for a copy that has not started"
        torch.cuda.current_stream().wait_event(self._event)
        if self._result.is_cuda:
            self._result.record_stream(torch.cuda.current_stream())
        return self._result

    def done(self) -> bool:
        return not self._left and self._event.query()


class CudaTransfers:
    """A CUDA device: every kind of copy on a stream of its own, ordered against compute by events alone."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.log = CopyLog(NullStatus())
        alone = transfers_mode() == "none"
        self._act, self._pieces = (
            {way: torch.cuda.current_stream() if alone else torch.cuda.Stream() for way in ("up", "down")}
            for _ in range(2)
        )
        self._newest: dict[str, torch.cuda.Event] = {}
        """The newest activation's copy in each direction."""
        origin = self.mark()
        origin.synchronize()
        self._times = DeviceClock(origin, clock() * 1e3)

    def upload(self, host: torch.Tensor) -> Copy:
        with torch.cuda.stream(self._act["up"]):
            result = _like(host, self.device)
            with self.noted(ACTIVATIONS_UP, self.log.place, host.nbytes):
                result.copy_(host, non_blocking=True)
            event = self._newest["up"] = torch.cuda.Event()
            event.record()
        return _CudaCopy(event, result, host)

    def download(self, source: torch.Tensor, host: torch.Tensor) -> Copy:
        stream = self._act["down"]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with self.noted(ACTIVATIONS_DOWN, self.log.place, host.nbytes):
                host.copy_(source, non_blocking=True)
            event = self._newest["down"] = torch.cuda.Event()
            event.record()
        return _CudaCopy(event, host, source)

    def upload_pieces(self, host: torch.Tensor) -> Pieces:
        with torch.cuda.stream(self._pieces["up"]):
            result = _like(host, self.device)
        return _CudaPieces(self, "up", host, result)

    def download_pieces(self, source: torch.Tensor, host: torch.Tensor) -> Pieces:
        return _CudaPieces(self, "down", source, host)

    @contextlib.contextmanager
    def noted(self, kind: int, place: Place, nbytes: int) -> Iterator[None]:
        """A copy that is launched in the block, on the current stream."""
        self.log.count(kind, nbytes)
        if not self.log.on:
            yield
            return
        begin = self.mark()
        yield
        self.log.note(kind, place, begin, self.mark(), nbytes)

    def pieces_stream(self, way: str) -> torch.cuda.Stream:
        """Where pieces go, "up" or "down"; what is started there next comes behind the newest activation."""
        stream = self._pieces[way]
        newest = self._newest.pop(way, None)  # once is enough: a stream keeps its order
        if newest is not None:
            stream.wait_event(newest)
        return stream

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def when_ms(self, mark: torch.cuda.Event) -> float:
        return self._times.when_ms(mark)

    def check(self) -> None:
        torch.cuda.synchronize()

    def peak_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


class _DelayedCopy:
    def __init__(self, owner: DelayedTransfers, source: torch.Tensor, result: torch.Tensor, left: int = 0) -> None:
        self.nbytes = source.numel()
        self._owner = owner
        self._source = source
        self._result = result
        self._left = left
        """Bytes that have not started."""
        self.polls_left = owner.random.randrange(4)
        self.finished = False

    def start(self, first: int, stop: int) -> None:
        self._left -= stop - first
        if not self._left:
            self._owner.add(self)

    def perform(self) -> None:
        if not self.finished:
            self._result.copy_(self._source)
            self.finished = True

    def wait(self) -> torch.Tensor:
        assert not self._left, "waited for a copy that has not started"
        self.perform()
        return self._result

    def done(self) -> bool:
        self._owner.tick()
        return self.finished or not self.nbytes


class DelayedTransfers(CpuTransfers):
    """Test double: a copy happens only when it is waited for or after some polls, in random order.

    It reads then what lies in its source, as a copy on a stream of its own may: whoever changes the source meanwhile is
    found out.
    """

    def __init__(self, clock: Callable[[], float], seed: int = 0) -> None:
        super().__init__(clock)
        self.random = random.Random(seed)
        self._pending: list[_DelayedCopy] = []

    def upload(self, host: torch.Tensor) -> Copy:
        return self._start(host, self._poisoned(host))

    def download(self, source: torch.Tensor, host: torch.Tensor) -> Copy:
        _poison(host)
        return self._start(source, host)

    def _start(self, source: torch.Tensor, result: torch.Tensor) -> Copy:
        copy = _DelayedCopy(self, source, result)
        self.add(copy)
        return copy

    def upload_pieces(self, host: torch.Tensor) -> Pieces:
        return _DelayedCopy(self, host, self._poisoned(host), host.numel())

    def download_pieces(self, source: torch.Tensor, host: torch.Tensor) -> Pieces:
        _poison(host)
        return _DelayedCopy(self, source, host, source.numel())

    def _poisoned(self, host: torch.Tensor) -> torch.Tensor:
        result = _like(host, self.device)
        _poison(result)
        return result

    def add(self, copy: _DelayedCopy) -> None:
        """A copy has started."""
        self._pending.append(copy)

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
    elif tensor.dtype == torch.uint8:  # a slab: not-a-number in every floating dtype
        tensor.fill_(POISON)
    else:
        tensor.zero_()
