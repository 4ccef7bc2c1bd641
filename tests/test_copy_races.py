"""Copies that are late, fail, or are of no use: each race of the device's streams, on doubles that lose it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpruntime as rp
from rpruntime import ExecutionPlan
from rpruntime.errors import ConfigError, HostMemoryError
from rpruntime.store.arena import Arena, Store
from rpruntime.store.segments import PrivateSegments
from rpruntime.wire.messages import SlotTask
from rpruntime.worker import shell as worker_shell
from rpruntime.worker.clock import DeviceClock
from rpruntime.worker.outbox import Outbox
from rpruntime.worker.stage import Stage
from rpruntime.worker.transfers import CpuTransfers, DelayedTransfers, transfers_mode
from tests.reference import inline
from tests.test_training_exact import Both, sgd

pytestmark = [pytest.mark.usefixtures("single_thread"), pytest.mark.timeout(120)]

NEVER = 1 << 30


class LateUploads(DelayedTransfers):
    """Uploads happen only when computation waits for them."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.uploads: list[tuple[int, Any]] = []
        """(slot, copy)."""

    def _noted(self, copy: Any) -> Any:
        copy.polls_left = NEVER
        self.uploads.append((self.log.place[0], copy))
        return copy

    def upload(self, host: Tensor) -> Any:
        return self._noted(super().upload(host))

    def upload_pieces(self, host: Tensor) -> Any:
        return self._noted(super().upload_pieces(host))


class EndsBehindItsCopies(Stage):
    """Looks, when its slot is done, whether one of its copies still reads host memory."""

    num_ended = 0

    def spans(self) -> Any:
        uploads = self._transfers.uploads  # type: ignore[attr-defined]
        assert not [copy for slot, copy in uploads if slot == self.task.slot and not copy.finished]
        EndsBehindItsCopies.num_ended += 1
        return super().spans()


def test_a_slot_ends_behind_copies_that_nothing_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels of micro-batches without weight are brought early and never looked at; the slot's end frees them."""
    monkeypatch.setattr("rpruntime.inline.DelayedTransfers", LateUploads)
    monkeypatch.setattr(worker_shell, "Stage", EndsBehindItsCopies)
    monkeypatch.setattr(EndsBehindItsCopies, "num_ended", 0)
    with inline(workers=2, delayed_copies=1) as session:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        pipe = rp.RoundPipe(
            model, sgd(model), loss_fn=nn.functional.cross_entropy, num_microbatches=4, session=session,
            loss_weight=lambda labels: float((labels >= 0).sum()),
        )  # fmt: skip
        labels = torch.tensor([0, 1, -100, -100, -100, -100, 2, 0])
        pipe.forward_backward(torch.randn(8, 4), labels)
        pipe.step().result()
        pipe.close()
    assert EndsBehindItsCopies.num_ended >= 3


def test_a_slot_without_micro_batches_ends_behind_its_weights() -> None:
    """A dead worker's slot of which all but the end was done."""
    transfers = LateUploads(lambda: 0.0)
    segments = PrivateSegments()
    arena = Arena("arena", segments, Store(segments))
    model: Any = SimpleNamespace(layers=[])
    stage = Stage(SlotTask(1, 1, 1, "forward", (0, 0), (), 0), model, transfers, arena)
    copy: Any = transfers.upload_pieces(torch.ones(8, dtype=torch.uint8))
    stage.weights[0] = copy
    copy.start(0, 8)
    stage.finish()
    assert copy.finished
    segments.close()


# --- what is copied to the host is nobody else's


class Scratch(nn.Module):
    """Returns the same memory every time, as captured graphs do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.room: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.room:
            self.room.append(torch.empty(x.shape[0], 4))
        with torch.no_grad():
            return self.room[0].copy_(self.linear(x))


@pytest.mark.parametrize("seed", range(3))
def test_a_layer_may_return_the_same_memory_for_every_micro_batch(seed: int) -> None:
    """Its next micro-batch overwrites it while the copy to the host of this one is late."""
    torch.manual_seed(0)
    with inline(workers=2, delayed_copies=seed) as session:
        model = nn.Sequential(Scratch(), nn.Linear(4, 4), Scratch())
        plain = model[2].linear, model[1], model[0].linear
        with rp.RoundPipe(model, loss_fn=None, num_microbatches=4, session=session) as pipe:
            x = torch.randn(8, 4)
            found = pipe.forward(x)
        wanted = plain[0](plain[1](plain[2](x)))
    torch.testing.assert_close(found, wanted.detach())


class LazyAxis(nn.Module):
    """Complex and real values whose signs torch has not applied yet."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Any) -> Any:
        z = x["z"] if isinstance(x, dict) else x
        z = (z * self.weight).conj()
        return {"z": z, "imag": z.imag}


class TellsFlags(CpuTransfers):
    """CUDA applies a sign to host memory as soon as it has launched the copy."""

    def download(self, source: Tensor, host: Tensor) -> Any:
        assert not source.is_conj() and not source.is_neg() and source.stride() == host.stride()
        return super().download(source, host)


def test_no_sign_is_left_to_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpruntime.inline.CpuTransfers", TellsFlags)
    torch.manual_seed(0)
    with inline(workers=2) as session:
        model = nn.Sequential(LazyAxis(), LazyAxis(), LazyAxis())
        both = Both(
            session, model, sgd, num_microbatches=2,
            loss_fn=lambda out, y: (out["z"] - y).abs().square().mean() + out["imag"].sum(),
        )  # fmt: skip
        both.call(torch.randn(4, 4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.complex64))
        both.check_gradients()
        both.step()
        both.close()


def test_numbers_that_are_on_the_host_do_not_go_through_the_device() -> None:
    """Bringing them there would wait for all that has been launched."""
    segments = PrivateSegments()
    arena = Arena("arena", segments, Store(segments))
    copied = []

    class Meta(CpuTransfers):
        def download(self, source: Tensor, host: Tensor) -> Any:
            copied.append(source.shape)
            host.fill_(7.0)
            return super().download(host, host)

    transfers = Meta(lambda: 0.0)
    transfers.device = torch.device("meta")
    outbox = Outbox(1, transfers, arena)
    there = torch.zeros((), device="meta")
    outbox.add_loss(0, there, {"accuracy": 0.5, "count": torch.tensor(3), "there": there})
    outbox.add_loss(1, torch.tensor(2.0), {"accuracy": True})
    first, second = outbox.take()
    assert copied == [(2,)]
    assert (first.loss, first.metrics) == (7.0, {"accuracy": 0.5, "count": 3.0, "there": 7.0})
    assert (second.loss, second.metrics) == (2.0, {"accuracy": 1.0})
    assert arena.live_bytes == 0
    segments.close()


# --- what fails half-way


class ShortInGradients(Stage):
    """Finds no room for the slab of its second position, once."""

    failures = 1

    def _at(self, phase: str, layer: int) -> None:
        if phase == "gradients" and self.gradients and ShortInGradients.failures:
            ShortInGradients.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        super()._at(phase, layer)


@pytest.mark.parametrize("failures", [1, 100])
@pytest.mark.parametrize("config", [{}, {"delayed_copies": 3, "window_bytes": 1}])
def test_no_room_for_the_second_slab_of_gradients(
    failures: int, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's copy has not started, and the stage is given up only when all its copies have come."""
    monkeypatch.setattr(worker_shell, "Stage", ShortInGradients)
    monkeypatch.setattr(ShortInGradients, "failures", failures)
    torch.manual_seed(0)
    with inline(workers=2, **config) as session:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        plan = ExecutionPlan([range(2)], [range(2, 4), range(2)])
        both = Both(session, model, sgd, num_microbatches=2, loss_fn=nn.functional.mse_loss, plan=plan)
        if failures > 1:
            with pytest.raises(torch.OutOfMemoryError, match="gradients"):
                float(both.pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 4)))
            monkeypatch.setattr(ShortInGradients, "failures", 0)
        for _ in range(2):
            both.call(torch.randn(4, 4), torch.randn(4, 4))
            both.step()
        both.close()
    assert ShortInGradients.failures == 0


class NoPrefetch(Stage):
    """Host memory cannot be pinned when it is looked at early, but later."""

    num_failures = 0

    def prefetch(self, inputs: Any) -> None:
        NoPrefetch.num_failures += 1
        raise HostMemoryError("CUDA refused to pin 2.00 GiB")


def test_what_cannot_be_brought_early_is_brought_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_shell, "Stage", NoPrefetch)
    monkeypatch.setattr(NoPrefetch, "num_failures", 0)
    torch.manual_seed(0)
    with inline(workers=2) as session:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        both = Both(session, model, sgd, num_microbatches=3, loss_fn=nn.functional.mse_loss)
        both.call(torch.randn(6, 4), torch.randn(6, 4))
        both.step()
        both.close()
    assert NoPrefetch.num_failures


# --- a device that computes


class Busy(CpuTransfers):
    """A device that reaches a mark when it has been asked several times."""

    asked = 0

    def reached(self, mark: float) -> bool:
        self.asked += 1
        return self.asked % 5 == 0


def test_a_worker_looks_until_its_device_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it does, the weights that wait behind micro-batches go all at once; no message tells of that moment."""
    monkeypatch.setattr("rpruntime.inline.CpuTransfers", Busy)
    seen = []
    with inline(workers=1) as session:
        ((_, shell),) = session._workers
        step = shell.step

        def look(messages: list[Any]) -> bool:
            busy = step(messages)
            seen.append((bool(shell._ahead and not shell._launched), shell.is_waiting_for_copies))
            return busy

        monkeypatch.setattr(shell, "step", look)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with rp.RoundPipe(
            model, sgd(model), loss_fn=nn.functional.mse_loss, num_microbatches=2, session=session
        ) as pipe:
            assert float(pipe.forward_backward(torch.randn(2, 4), torch.randn(2, 4))) > 0
            pipe.step().result()
    assert (True, True) in seen and (True, False) not in seen


# --- small things


@pytest.mark.parametrize("variable", ["RPRUNTIME_TRANSFERS", "RPRUNTIME_CONSISTENCY"])
def test_a_variant_that_does_not_exist_is_an_error(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert transfers_mode() == "windows"
    monkeypatch.setenv(variable, "window")
    with pytest.raises(ConfigError, match=f"{variable}=window: it may be "), inline():
        pass


class Mark:
    """An event of a device; the time between two is a float of 24 bits, as `cudaEventElapsedTime` tells it."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms

    def elapsed_time(self, other: Mark) -> float:
        return ctypes.c_float(other.at_ms - self.at_ms).value


def test_layers_are_timed_to_the_microsecond_after_days() -> None:
    clock = DeviceClock(Mark(500.0), 9_000.0)
    now = 500.0
    day = 24 * 3600 * 1000.0
    while now < 3 * day:
        now += 7_777.7
        begin, middle, end = (clock.when_ms(Mark(now + ms)) for ms in (0.0, 0.4, 1.7))
        before = clock.when_ms(Mark(now - 3.3))
        assert (middle - begin, end - begin, before - begin) == pytest.approx((0.4, 1.7, -3.3), abs=2e-3)
    assert begin == pytest.approx(now + 8_500.0, abs=50.0)
