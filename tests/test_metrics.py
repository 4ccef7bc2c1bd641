"""`pipe.log_to`: every finished step, in order, without holding up training; and the meter behind it."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rpruntime as rp
from rpruntime.errors import ConfigError
from rpruntime.meter import Meter
from rpruntime.metrics import count_tokens
from rpruntime.microbatch import cut_call
from rpruntime.schedule import ExecutionPlan, simulate
from rpruntime.wire.messages import (
    CallMsg,
    CancelMsg,
    SlotCommittedMsg,
    SlotTask,
    StepMsg,
    TaskMsg,
    UnloadModelMsg,
    WeightsReadyMsg,
)


class Sink:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.closed = False

    def log(self, values: dict[str, Any], *, step: int) -> None:
        self.rows.append((step, values))

    def close(self) -> None:
        self.closed = True


def a_pipe(session: Any, **settings: Any) -> rp.RoundPipe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    loss_fn = settings.pop("loss_fn", lambda out, labels: ((out - labels).pow(2).mean(), {"rate": out.mean()}))
    return rp.RoundPipe(model, optimizer, loss_fn=loss_fn, num_microbatches=2, session=session, **settings)


def train(pipe: rp.RoundPipe, steps: int, dtype: torch.dtype = torch.float32, **clip: Any) -> list[Any]:
    infos = []
    for step in range(steps):
        pipe.forward_backward(torch.full((6, 4), float(step), dtype=dtype), torch.zeros(6, 4))
        infos.append(pipe.step(**clip))
    return infos


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_step_is_logged_once_with_its_figures(session: Any, asynchronous: bool) -> None:
    sink = Sink()
    with a_pipe(session, asynchronous=asynchronous) as pipe:
        train(pipe, 1)
        pipe.log_to(sink)
        infos = train(pipe, 4, max_grad_norm=1.0)
        pipe.synchronize()
    assert [step for step, _ in sink.rows] == [1, 2, 3, 4]
    assert not sink.closed, "it is the user's"
    for (_, values), info in zip(sink.rows, infos, strict=True):
        assert values["loss"] == info.loss and values["grad_norm"] == info.grad_norm
        assert (values["lr"], values["lr/1"]) == (0.1, 0.5) == info.lr
        assert values["metric/rate"] == info.metrics["rate"]
        assert values["step_s"] > 0 and values["optimizer_s"] == info.seconds
        assert values["items_per_s"] == pytest.approx(6 / values["step_s"])
        assert "tokens_per_s" not in values and "loss_scale" not in values and "memory/device_bytes" not in values
        assert values["memory/host_bytes"] > 0
    shown = [values for _, values in sink.rows if "bubble" in values]
    assert len(shown) >= 3
    for values in shown:
        parts = [values[f"bubble/{name}"] for name in ("fill", "switch", "intra", "drain")]
        assert 0 <= values["bubble"] < 1 and sum(parts) == pytest.approx(values["bubble"])


def test_skipped_steps_and_scales(session: Any) -> None:
    sink = Sink()
    scaler = rp.GradScaler(init_scale=2.0**40)
    with a_pipe(session, dtype=torch.float16, grad_scaler=scaler) as pipe:
        pipe.log_to(sink)
        train(pipe, 2, torch.float16)
        pipe.synchronize()
    assert [values["skipped"] for _, values in sink.rows] == [1, 1]
    assert [values["loss_scale"] for _, values in sink.rows] == [2.0**40, 2.0**39]


def test_a_folder(session: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for _ in range(2):  # a second run goes on in the same file
        with a_pipe(session) as pipe:
            pipe.log_to(folder)
            train(pipe, 2)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 0, 1]
    assert all(row["time"] > 1e9 and row["loss"] > 0 for row in rows[1::2])
    events = list(folder.glob("events.out.tfevents.*"))
    assert bool(events) == (importlib.util.find_spec("tensorboard") is not None)


def test_a_folder_that_cannot_be_written_and_other_things(session: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with a_pipe(session) as pipe:
        with pytest.raises(ConfigError, match="nothing can be written"):
            pipe.log_to(tmp_path / "file")
        with pytest.raises(ConfigError, match="not a int"):
            pipe.log_to(3)  # type: ignore[arg-type]


def test_a_slow_sink_holds_up_nothing_and_closing_waits_for_it(session: Any) -> None:
    release, entered = threading.Event(), threading.Event()

    class Slow(Sink):
        def log(self, values: dict[str, Any], *, step: int) -> None:
            entered.set()
            assert release.wait(60)
            super().log(values, step=step)

    slow, quick = Slow(), Sink()
    with a_pipe(session) as pipe:
        pipe.log_to(slow)
        pipe.log_to(quick)
        infos = train(pipe, 5)
        assert all(info.done() for info in infos)
        assert entered.wait(60) and slow.rows == []
        release.set()
    assert [step for step, _ in slow.rows] == [step for step, _ in quick.rows] == [0, 1, 2, 3, 4]


def test_a_sink_that_raises_gets_no_more(session: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Sink):
        def log(self, values: dict[str, Any], *, step: int) -> None:
            super().log(values, step=step)
            if step == 1:
                raise OSError("the network is gone")

    sink, other = Broken(), Sink()
    with a_pipe(session) as pipe:
        pipe.log_to(sink)
        pipe.log_to(other)
        train(pipe, 4)
    assert len(sink.rows) == 2 and len(other.rows) == 4
    assert any("logging to a Broken" in record.message for record in caplog.records)


def test_tokens_are_counted() -> None:
    ids, mask = torch.ones(6, 5, dtype=torch.long), torch.ones(6, 5)
    assert count_tokens(cut_call({"input_ids": ids, "mask": mask}, None, num_microbatches=4)) == 30
    assert count_tokens(cut_call(ids, None, num_microbatches=4)) == 30
    for inputs in (mask, {"mask": mask}, torch.ones(6, dtype=torch.long), (mask, ids)):
        assert count_tokens(cut_call(inputs, None, num_microbatches=2)) is None


# --- the meter


FORWARD, BACKWARD = [1.0, 2.0, 3.0], [2.0, 4.0, 7.0]
PLAN = ExecutionPlan([range(0, 1), range(1, 2)], [range(2, 3), range(1, 2), range(0, 1)])
ROLES = ("worker-0", "worker-1")


def call_msg(call: int, iteration: int, training: bool = True) -> CallMsg:
    return CallMsg(call, 1, iteration, 4, 0, (), (), 1.0, training, False, False, (0, 0), 0, {})


def feed(meter: Meter, *, asynchronous: bool, iterations: int) -> tuple[Any, list[Any]]:
    """A simulated run as messages; returns the simulation and the accounts of the steps."""
    runs = {"iterations": iterations if asynchronous else 1}
    found = simulate(PLAN, FORWARD, BACKWARD, num_devices=2, num_microbatches=4, asynchronous=asynchronous, **runs)
    accounts, slot = [], 0
    for iteration in range(iterations):
        meter.sent("worker-0", call_msg(iteration + 1, iteration))
        mine = [span for span in found.spans if not asynchronous or span.iteration == iteration]
        for key in dict.fromkeys((span.kind, span.layers, span.device) for span in mine):
            slot += 1
            kind, layers, device = key
            task = SlotTask(slot, iteration + 1, 1, kind, (layers.start, layers.stop), (0, 1, 2, 3), 0)
            meter.sent(ROLES[device], TaskMsg(task))
            rows = tuple(
                (kind, layers.start, layers.stop, span.microbatch, 1e6 + span.start_ms, 1e6 + span.end_ms)
                for span in mine
                if (span.kind, span.layers, span.device) == key
            )
            meter.came(SlotCommittedMsg(slot, ROLES[device], rows, peak_bytes=100 + slot))
        accounts.append(meter.step_finished(1, iteration, asynchronous=asynchronous))
    return found, accounts


def test_a_synchronous_iteration_is_accounted_as_the_simulator_does() -> None:
    meter = Meter(ROLES)
    found, accounts = feed(meter, asynchronous=False, iterations=3)
    for iteration, got in enumerate(accounts):
        assert got.iteration == iteration
        assert got.window_ms == pytest.approx(found.makespan_ms)
        for name in ("fill", "switch", "intra", "drain", "bubble"):
            assert getattr(got, name) == pytest.approx(getattr(found, name)), name
        assert sum(got.busy_by_role.values()) == pytest.approx(2 * got.busy)
        assert set(got.peak_by_role) == set(ROLES) and max(got.peak_by_role.values()) > 100
    assert not meter.slots and not meter._commits and not meter._calls, "nothing piles up"


def test_overlapping_iterations_are_accounted_one_late() -> None:
    meter = Meter(ROLES)
    found, accounts = feed(meter, asynchronous=True, iterations=6)
    assert accounts[:2] == [None, None]
    ends = [max(span.end_ms for span in found.spans if span.iteration == t) for t in range(6)]
    for iteration, got in enumerate(accounts[2:], 1):
        assert got.iteration == iteration
        assert got.window_ms == pytest.approx(ends[iteration] - ends[iteration - 1])
        assert got.fill == got.drain == 0 and got.bubble == pytest.approx(got.switch + got.intra)
    assert len(meter._commits) <= 2


def test_what_is_cancelled_or_unloaded_is_forgotten() -> None:
    meter = Meter(ROLES)
    meter.sent("worker-0", call_msg(1, 0))
    meter.sent("worker-0", call_msg(2, -1, training=False))
    commits: list[Any] = []
    meter.listeners.append(commits.append)
    for slot, call in ((1, 1), (2, 1), (3, 2), (4, 1)):
        meter.sent("worker-0", TaskMsg(SlotTask(slot, call, 1, "forward", (0, 1), (0,), 0)))
    meter.came(SlotCommittedMsg(1, "worker-0", (("forward", 0, 1, 0, 0.0, 1.0),)))
    meter.came(SlotCommittedMsg(1, "worker-0", (("forward", 0, 1, 0, 0.0, 1.0),)))  # repeated
    meter.came(SlotCommittedMsg(3, "worker-0", (("forward", 0, 1, 0, 1.0, 2.0),)))
    assert [commit.info.iteration for commit in commits] == [0, -1]
    meter.sent("optimizer", CancelMsg(1, 1, 1))
    assert not meter.slots
    meter.came(SlotCommittedMsg(2, "worker-0"))
    assert len(commits) == 2 and meter.step_finished(1, 0, asynchronous=False) is None
    meter.sent("worker-0", TaskMsg(SlotTask(5, 1, 1, "forward", (0, 1), (0,), 0)))
    meter.sent("optimizer", UnloadModelMsg(1))
    assert not meter.slots and not meter._commits


def test_a_slot_that_moved_counts_where_it_ran() -> None:
    meter = Meter(ROLES)
    meter.sent("worker-0", call_msg(1, 0))
    meter.sent("worker-0", TaskMsg(SlotTask(1, 1, 1, "fused", (0, 1), (0,), 0)))
    meter.came(SlotCommittedMsg(1, "worker-1", (("forward", 0, 1, 0, 0.0, 4.0),)))
    found = meter.step_finished(1, 0, asynchronous=False)
    assert found is not None and found.busy_by_role == {"worker-0": 0.0, "worker-1": 1.0}


def test_how_far_the_optimizer_is() -> None:
    meter = Meter(ROLES)
    assert meter.units_published(1) == (-1, 0)
    meter.sent("optimizer", StepMsg(1, 7, (1,), (), None))
    meter.came(WeightsReadyMsg(1, 7, ((0, None), (1, None))))  # type: ignore[arg-type]  # an older version
    assert meter.units_published(1) == (7, 0)
    meter.came(WeightsReadyMsg(1, 8, ((0, None),)))  # type: ignore[arg-type]
    meter.came(WeightsReadyMsg(1, 8, ((0, None), (2, None))))  # type: ignore[arg-type]
    assert meter.units_published(1) == (7, 2)
