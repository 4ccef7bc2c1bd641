"""The script's books and the machine's change as one: failures, interrupts and threads at the worst moment."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

import rpruntime as rp
from rpruntime import script_weights
from rpruntime.client import client_of
from rpruntime.inline import InlineSession
from rpruntime.interrupts import uninterrupted, wait_for
from rpruntime.store import segments
from rpruntime.store.arena import Arena, Store
from rpruntime.store.segments import PrivateSegments
from rpruntime.terminal import saying
from rpruntime.worker.transfers import CpuTransfers
from tests.leaks import no_leaks, wait_until
from tests.reference import inline


class Bomb(nn.Module):
    def forward(self, x):
        if (x == 99).any():
            raise ValueError("bomb")
        return x


@pytest.fixture(scope="module")
def session():
    with no_leaks(within_s=10.0, descriptors=False), rp.init("cpu:2", quiet=True) as found:
        yield found


def make(session, name="default"):
    torch.manual_seed(0)
    model = nn.Sequential(Bomb(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.mse_loss
    return rp.RoundPipe(model, optimizer, loss_fn=loss, num_microbatches=2, session=session, name=name)


def good(pipe):
    return pipe.forward_backward(torch.ones(4, 6), torch.zeros(4, 6))


def failing(pipe):
    return pipe.forward_backward(torch.full((4, 6), 99.0), torch.zeros(4, 6))


def until_failed(pipe):
    """Let the failure of a queued call arrive; what is being cleared away may still be going on."""
    assert pipe._model.client.wait(lambda: pipe._model.books.failure is not None, "the failure", timeout_s=30)


def test_a_failure_during_the_copy_of_the_next_batch_is_raised_once_and_leaves_nothing(session, monkeypatch):
    pipe = make(session)
    before = float(good(pipe))
    pipe.zero_grad()
    failing(pipe)
    encode = pipe._model.calls._call_event
    monkeypatch.setattr(
        pipe._model.calls, "_call_event", lambda *args, **kw: (encode(*args, **kw), until_failed(pipe))[0]
    )
    with pytest.raises(ValueError, match="bomb"):
        good(pipe)
    monkeypatch.undo()
    pipe.zero_grad()
    assert float(good(pipe)) == before
    assert pipe.step().result(30).loss == before
    pipe.close()


def test_a_failure_just_before_a_step_is_raised_by_it_and_the_run_goes_on(session, monkeypatch):
    pipe = make(session)
    failing(pipe)
    groups = pipe._model._hyper_parameters
    monkeypatch.setattr(pipe._model, "_hyper_parameters", lambda it: (until_failed(pipe), groups(it))[1])
    with pytest.raises(ValueError, match="bomb"):
        pipe.step()
    monkeypatch.undo()
    good(pipe)
    assert pipe.step().result(30).step == 0
    pipe.close()


def test_interrupts_at_any_moment_leave_the_pipe_usable(session):
    pipe = make(session)
    interrupted = 0
    gc.collect()
    gc.disable()  # an interrupt that comes inside a callback of the collector is swallowed there
    for number in range(60):
        timer = threading.Timer(0.0003 * (number % 20), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            loss = good(pipe)
            pipe.step()
            float(loss)
            timer.join()
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
    gc.enable()
    assert interrupted > 0
    pipe.zero_grad()
    good(pipe)
    assert pipe.step().result(30).loss > 0
    pipe.close()


def test_an_interrupt_waits_for_the_end_of_a_block():
    seen = []

    def block():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            seen.append("whole block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert seen == ["whole block"]


class Interrupter:
    """A trace function that sends one interrupt: at the n-th line, call or return of the code that takes locks."""

    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, argument):
        if os.path.basename(frame.f_code.co_filename) in ("threading.py", "interrupts.py"):
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def interrupted_everywhere(wait, take_locks):
    """Interrupt `wait` once at each place; each time another thread can `take_locks`. How often it was interrupted."""
    interrupted, number = 0, 1
    while True:
        interrupter = Interrupter(number)
        sys.settrace(interrupter)
        try:
            wait()
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        other = threading.Thread(target=take_locks, daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive(), f"an interrupt at place {number} has left a lock taken"
        if interrupter.left > 0:
            return interrupted
        number += 1


def test_an_interrupt_of_a_wait_leaves_no_lock_taken(session):
    client, event = client_of(session), threading.Event()

    def take_lock():
        with client.lock:
            pass

    def set_and_clear():
        event.set()
        event.clear()

    assert interrupted_everywhere(lambda: client.wait(lambda: False, "nothing", timeout_s=0.01), take_lock) > 5
    assert interrupted_everywhere(lambda: wait_for(event, 0.01), set_and_clear) > 5


def test_an_interrupt_of_a_request_for_memory_leaves_the_next_request_its_own_answer(session, monkeypatch):
    client = client_of(session)
    sizes, receive = [1 << 20, 2 << 20, 3 << 20], segments.receive_fd
    held = session.segments.held_bytes()[session.owner]

    def interrupted(sock):
        signal.raise_signal(signal.SIGINT)
        return receive(sock)

    with monkeypatch.context() as patch:
        patch.setattr(segments, "receive_fd", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.segments.create(5 << 20)
    found = [session.segments.create(size) for size in sizes]
    assert [len(mapping) for _, mapping in found] == sizes
    for name, _ in found:
        session.segments.release(name)
    assert client.arena.total_bytes <= held
    assert session.segments.held_bytes()[session.owner] - held in (0, 5 << 20), "what was interrupted, at most"


def test_an_interrupt_of_synchronize_leaves_parameters_that_nobody_has_written_to(monkeypatch):
    with inline() as session:
        pipe = make(session)
        point = script_weights.point_parameters

        def interrupted(*arguments):
            point(*arguments)
            signal.raise_signal(signal.SIGINT)

        good(pipe)
        pipe.step()
        with monkeypatch.context() as patch:
            patch.setattr(script_weights, "point_parameters", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pipe.synchronize()
        assert float(good(pipe)) > 0
        pipe.close()


def test_an_interrupt_at_the_start_of_a_thread_leaves_it_known(monkeypatch):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        signal.raise_signal(signal.SIGINT)

    with inline() as session:
        saves = make(session)._model.checkpoints.saves
        saves.inline = False
        before = threading.active_count()
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        saves._queue.append(None)
        release = threading.Event()
        monkeypatch.setattr(saves, "_write", lambda save: release.wait(10))
        with pytest.raises(KeyboardInterrupt):
            saves._start_writer()
        assert saves._thread is not None
        release.set()
        saves._thread.join()
        with pytest.raises(KeyboardInterrupt), saying("something slow", quiet=False):
            raise AssertionError("the block is not begun")
        monkeypatch.undo()
        wait_until(lambda: threading.active_count() <= before, 5, "threads end")
        saves.inline = True


def test_large_values_that_are_no_tensors_travel(session):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, text, array):
            assert len(text) == 3 << 20 and array.sum() == 1 << 19
            return self.linear(x)

    model = nn.Sequential(Reads(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=2, session=session)
    inputs = (torch.ones(4, 6), "w" * (3 << 20), np.ones(1 << 19))
    assert float(pipe.forward_backward(inputs, torch.zeros(4, 6))) > 0
    pipe.step().result(30)
    pipe.close()


def test_a_model_that_cannot_be_built_leaves_nothing(session):
    class Refuses(nn.Linear):
        def __setstate__(self, state):
            raise LookupError("not here")

    pipe = make(session, "other")
    client = pipe._model.client
    used = client.arena.live_bytes
    for _ in range(3):
        model = nn.Sequential(nn.Linear(6, 6), Refuses(6, 6))
        with pytest.raises(LookupError, match="not here"):
            rp.RoundPipe(model, torch.optim.SGD(model.parameters(), lr=0.1), session=session)
    assert client.arena.live_bytes == used
    assert float(good(pipe)) > 0
    pipe.close()


def test_batch_norm_read_by_evaluation_between_epochs_is_the_same_on_three_workers():
    losses = []
    for workers in (1, 3):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(2)
        data = [(torch.randn(8, 6, generator=generator) * 3, torch.zeros(8, 1)) for _ in range(6)]
        inline = InlineSession({"workers": workers, "quiet": True})
        with rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=2, session=inline) as pipe:
            found = []
            for _ in range(4):
                found.append(pipe.evaluate(data[:1]).loss)
                for x, y in data:
                    pipe.forward_backward(x, y)
                    pipe.step()
        losses.append(found)
        inline.close()
    assert losses[0] == losses[1]


class LateMarks(CpuTransfers):
    """A device whose marks are reached only at the third look, and that refuses to be read before."""

    def __init__(self):
        super().__init__(lambda: 0.0)
        self.looks: dict[int, int] = {}
        self.count = 0

    def mark(self):
        self.count += 1
        return self.count

    def reached(self, mark):
        self.looks[mark] = self.looks.get(mark, 0) + 1
        return any(number >= mark and looks >= 3 for number, looks in self.looks.items())

    def when_ms(self, mark):
        assert self.looks and max(n for n, looks in self.looks.items() if looks >= 3) >= mark, (
            "read before it was reached"
        )
        return float(mark)


def test_a_slot_that_publishes_nothing_waits_for_its_device(monkeypatch):
    monkeypatch.setattr(InlineSession, "_transfers", lambda self, index: LateMarks())
    inline = InlineSession({"workers": 2, "quiet": True})
    model = nn.Sequential(nn.Flatten(), nn.Identity(), nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=2, session=inline) as pipe:
        for _ in range(3):
            pipe.forward_backward(torch.ones(4, 6), torch.zeros(4, 1))
            pipe.step()
    inline.close()


def test_two_threads_share_an_arena():
    source = PrivateSegments()
    arena = Arena("me.1", source, Store(source))
    errors = []

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            held = []
            for _ in range(3000):
                size = int(torch.randint(1, 5000, (), generator=generator))
                held.append(arena.allocate(size))
                if len(held) > 20:
                    arena.free(held.pop(0))
            arena.free_all(held)
        except BaseException as err:
            errors.append(err)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and arena.live_bytes == 0
    source.close()


@pytest.mark.parametrize(
    "make_model, match",
    [
        (lambda: type("Net", (nn.Sequential,), {"forward": lambda self, x: x})(nn.Linear(2, 2)), "forward of its own"),
        (lambda: hooked(nn.Sequential(nn.Linear(2, 2))), "hooks on the nn.Sequential"),
        (lambda: masked(nn.Sequential(nn.Linear(2, 2))), "gradient hook"),
        (lambda: owning(nn.Sequential(nn.Linear(2, 2))), "scale belongs to the nn.Sequential"),
    ],
)
def test_what_would_be_ignored_is_refused(make_model, match):
    model = make_model()
    with pytest.raises(rp.ConfigError, match=match):
        rp.RoundPipe(model, torch.optim.SGD(model.parameters(), lr=0.1), session=InlineSession({"quiet": True}))


def hooked(model):
    model.register_forward_hook(lambda module, inputs, output: output)
    return model


def masked(model):
    model[0].weight.register_hook(lambda grad: grad * 0)
    return model


def owning(model):
    model.scale = nn.Parameter(torch.ones(()))
    return model
