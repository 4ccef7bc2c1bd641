"""Traces: complete, without overlap, on one clock; what the report says of them; what is off costs nothing."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import rpruntime as rp
from launcher import rpctl
from rpruntime.client import client_of
from rpruntime.errors import ConfigError
from rpruntime.meter import SlotInfo
from rpruntime.schedule import ExecutionPlan, simulate
from rpruntime.trace.chrome import TraceData, read_trace, write_trace
from rpruntime.trace.recording import Recording
from rpruntime.trace.report import layer_times, reports
from rpruntime.trace.spans import COMPUTE, COPIES, OPTIMIZER, STREAMS, WAITS, SpanLog, TraceSpan
from rpruntime.trace.waits import waits
from rpruntime.wire.codec import decode, encode
from rpruntime.wire.messages import RoleReadyMsg, SlotTask, TraceMsg, TraceSpansMsg
from tests.reference import inline

NUM_LAYERS, NUM_MICROBATCHES = 4, 3


def a_pipe(session: Any, **settings: Any) -> rp.RoundPipe:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(NUM_LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = ExecutionPlan([range(0, 2)], [range(2, 4), range(0, 2)])
    settings = {"plan": plan, "num_microbatches": NUM_MICROBATCHES, **settings}
    return rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, session=session, **settings)


def train(pipe: rp.RoundPipe, steps: int = 1) -> None:
    for _ in range(steps):
        pipe.forward_backward(torch.ones(6, 6), torch.zeros(6, 6))
        pipe.step(max_grad_norm=1.0)


def assert_sound(path: Path) -> dict[str, Any]:
    """The file as JSON, after what must hold for every trace."""
    body: dict[str, Any] = json.loads(path.read_text())
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in body["traceEvents"] if e["name"] == "thread_name"}
    for event in body["traceEvents"]:
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"]
            assert names[event["pid"], event["tid"]] == event["cat"]
            rows[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    for place, spans in rows.items():
        spans.sort()
        for (start, duration), (after, _) in pairwise(spans):
            assert after >= start + duration - 0.002, f"overlap on {names[place]}"
    return body


# --- of an inline session


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_task_is_there(session: Any, tmp_path: Path, asynchronous: bool) -> None:
    with a_pipe(session, asynchronous=asynchronous) as pipe:
        train(pipe)
        trace = pipe.trace(tmp_path / "t.json", steps=2)
        assert not trace.done()
        train(pipe, 3)
        pipe.synchronize()
        found = trace.stop()
        assert trace.done()
    assert_sound(tmp_path / "t.json")
    data = read_trace(tmp_path / "t.json")
    assert data.session == "inline" and data.devices == {"worker-0": "cpu:0", "worker-1": "cpu:0"}
    assert data.models == {1: {"name": "default", "asynchronous": asynchronous, "num_layers": NUM_LAYERS}}
    compute = [span for span in data.spans if span.stream == COMPUTE]
    assert {span.iteration for span in compute} == {1, 2}, "two whole iterations, and no other"
    for iteration in (1, 2):
        done: dict[tuple[str, int], set[int]] = defaultdict(set)
        for span in compute:
            if span.iteration == iteration:
                kind = span.kind if span.name == "forward" else span.name
                for layer in range(*span.layers) if span.layers[0] < span.layers[1] else [span.layers[0]]:
                    done[kind, layer].add(span.microbatch)
        every = set(range(NUM_MICROBATCHES))
        expected = [("forward", 0), ("forward", 1), ("fused", 2), ("fused", 3), ("loss", 4)]
        expected += [("recompute", 0), ("recompute", 1), *(("backward", layer) for layer in range(4))]
        assert done == dict.fromkeys(expected, every)
    streams = {span.stream for span in data.spans}
    assert {COMPUTE, *COPIES, OPTIMIZER} <= streams <= set(STREAMS)
    of_slots = {span.slot for span in compute}
    for stream in ("weights up", "gradients down"):
        spans = [span for span in data.spans if span.stream == stream]
        assert {span.slot for span in spans} <= of_slots
        assert all(span.nbytes > 0 for span in spans)
    # a layer of 6 x 6 weights and 6 biases, each at a multiple of 256 bytes
    ups = {(span.iteration, span.slot): 0 for span in compute}
    for span in data.spans:
        if span.stream == "weights up":
            ups[span.iteration, span.slot] += span.nbytes
    assert set(ups.values()) == {2 * 512}, "every slot has its two layers' weights brought up"
    names = [span.name for span in data.spans if span.stream == OPTIMIZER]
    assert names.count("step and P_cp") >= 2 * NUM_LAYERS and "norm" in names
    (report,) = found
    assert report.iterations == (1, 2) and report.num_microbatches == NUM_MICROBATCHES
    assert report.plan == ExecutionPlan([range(0, 2)], [range(2, 4), range(0, 2)])
    for bubbles in (report.real, report.predicted):
        assert bubbles is not None
        total = bubbles.busy + bubbles.fill + bubbles.switch + bubbles.intra + bubbles.drain
        assert total == pytest.approx(1.0)


def test_gradients_of_several_calls_show_what_is_added(session: Any, tmp_path: Path) -> None:
    with a_pipe(session) as pipe:
        with pipe.trace(tmp_path / "t.json"):
            pipe.forward_backward(torch.ones(6, 6), torch.zeros(6, 6))
            train(pipe)
        data = read_trace(tmp_path / "t.json")
    added = [span for span in data.spans if span.name == "G_cp"]
    assert len(added) >= NUM_LAYERS and all(span.nbytes for span in added)
    assert {span.layers for span in added} == {(layer, layer + 1) for layer in range(NUM_LAYERS)}
    (report,) = reports(data)
    assert report.num_microbatches == 2 * NUM_MICROBATCHES and report.plan.round_size == NUM_MICROBATCHES


def test_steps_are_counted_from_the_next_whole_iteration(session: Any, tmp_path: Path) -> None:
    with a_pipe(session) as pipe:
        pipe.forward_backward(torch.ones(6, 6), torch.zeros(6, 6))
        trace = pipe.trace(tmp_path / "t.json", steps=1)
        train(pipe, 2)
        trace.stop()
    spans = read_trace(tmp_path / "t.json").spans
    assert {span.iteration for span in spans if span.stream == COMPUTE} == {1}


def test_the_whole_run_also_after_an_error(tmp_path: Path) -> None:
    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.abs().sum() > 1e6:
                raise KeyError("too large")
            return x

    path = tmp_path / "run.json"
    with inline(workers=2, trace=str(path)) as session:
        model = nn.Sequential(nn.Linear(6, 6), Breaks())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn, m = nn.functional.mse_loss, NUM_MICROBATCHES
        with rp.RoundPipe(
            model, optimizer, loss_fn=loss_fn, num_microbatches=m, plan="layers", session=session
        ) as pipe:
            train(pipe, 2)
            with pytest.raises(KeyError):
                pipe.forward_backward(torch.full((6, 6), 1e9), torch.zeros(6, 6)).item()
            train(pipe)
            pipe.evaluate([(torch.ones(6, 6), torch.zeros(6, 6))])
        assert not path.exists(), "only at the end"
        session.close()
        assert_sound(path)
    data = read_trace(path)
    assert {span.iteration for span in data.spans if span.stream == COMPUTE} == {-1, 0, 1, 2}
    assert {span.kind for span in data.spans if span.iteration == -1 and span.stream == COMPUTE} == {"infer"}
    assert reports(data)[0].iterations == (0, 1, 2)


def test_off_nothing_is_marked_or_sent(session: Any, tmp_path: Path) -> None:
    received: list[Any] = []
    receive = session.post.receive

    def noting(timeout_s: float = 0.0) -> list[Any]:
        messages: list[Any] = receive(timeout_s)
        received.extend(messages)
        return messages

    session.post.receive = noting
    with a_pipe(session) as pipe:
        train(pipe)
        with pipe.trace(tmp_path / "t.json"):
            train(pipe)
        assert any(isinstance(msg, TraceSpansMsg) for msg in received)
        received.clear()
        train(pipe)
        assert not any(isinstance(msg, TraceSpansMsg) for msg in received)
        logs = [shell._log for _, shell in session._workers]
        assert not any(log.on or log._open or log.spans._rows for log in logs)


def test_two_at_a_time(session: Any, tmp_path: Path) -> None:
    with a_pipe(session) as pipe:
        with pipe.trace(tmp_path / "outer.json"):
            train(pipe)
            with pipe.trace(tmp_path / "inner.json"):
                train(pipe)
            train(pipe)
    kinds = {}
    for name in ("outer", "inner"):
        spans = read_trace(tmp_path / f"{name}.json").spans
        kinds[name] = {span.iteration for span in spans if span.stream == "weights up"}
    assert kinds == {"outer": {0, 1, 2}, "inner": {1}}


def test_a_closed_pipe_ends_its_trace(session: Any, tmp_path: Path) -> None:
    pipe = a_pipe(session)
    trace = pipe.trace(tmp_path / "t.json", steps=100)
    train(pipe)
    pipe.close()
    assert trace.stop()[0].iterations == (0,)
    assert_sound(tmp_path / "t.json")


def test_bad_places_and_steps(session: Any, tmp_path: Path) -> None:
    with a_pipe(session) as pipe:
        with pytest.raises(ConfigError, match="there is no folder"):
            pipe.trace(tmp_path / "nowhere" / "t.json")
        with pytest.raises(ConfigError, match="is a folder"):
            pipe.trace(tmp_path)
        for steps in (0, -1, 1.5, True):
            with pytest.raises(ConfigError, match="steps must be a positive integer"):
                pipe.trace(tmp_path / "t.json", steps=steps)  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == []
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(ConfigError, match="a device or a pipe"):
            pipe.trace(tmp_path / "fifo", steps=1)
    assert (tmp_path / "fifo").is_fifo()
    with pytest.raises(ConfigError, match="there is no folder"):
        with inline(trace=str(tmp_path / "nowhere" / "t.json")):
            pass


def test_a_replacement_is_told(session: Any, tmp_path: Path) -> None:
    observer = client_of(session).observer
    sent: list[tuple[str, Any]] = []
    session.post.send = lambda role, msg: sent.append((role, msg))
    roles = ("worker-0", "worker-1", "optimizer")
    observer.roles_ready()
    assert sent == [(role, TraceMsg(False)) for role in roles], "an earlier controller may have traced"
    sent.clear()
    recording = observer.start(tmp_path / "t.json")
    assert sent == [(role, TraceMsg(True)) for role in roles]
    sent.clear()
    observer.came(ready_again("worker-1"))
    assert sent == [("worker-1", TraceMsg(True))]
    observer.end(recording)
    recording.wait()
    sent.clear()
    observer.came(ready_again("worker-1"))
    assert sent == []


def ready_again(role: str) -> Any:
    return RoleReadyMsg(role, 2, {})


# --- recordings and files


def info(slot: int, iteration: int = 0, model: int = 1) -> SlotInfo:
    return SlotInfo(SlotTask(slot, 1, model, "forward", (0, 1), (0,), 0), "worker-0", iteration)


def test_a_full_recording_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    recording = Recording(tmp_path / "t.json", "s", {"worker-0": "cpu:0"}, told.append, max_spans=5)
    for number in range(9):
        recording.messages(number, number, number + 1)
    assert len(told) == 1 and "full after 5 spans" in told[0]
    recording.finish(in_background=False)
    data = read_trace(tmp_path / "t.json")
    assert len(data.spans) == 5 and "full after 5 spans" in data.note


def test_rows_of_slots_that_nobody_knows_are_dropped(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "t.json", "s", {"worker-0": "cpu:0"}, print, steps=(1, 3, 5))
    for slot, iteration, model in ((1, 2, 1), (2, 3, 1), (3, 4, 2), (4, 4, 1), (5, 5, 1)):
        rows = [("weights up", "weights up", slot, 0, 1, -1, 0.0, 1.0, 8)]
        recording.rows("worker-0", rows, {slot: info(slot, iteration, model)})  # type: ignore[arg-type]
        recording.rows("worker-0", rows, {})  # type: ignore[arg-type]
    recording.finish(in_background=False)
    assert [span.slot for span in read_trace(tmp_path / "t.json").spans] == [2, 4]


def test_a_folder_that_goes_away_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    place = tmp_path / "folder"
    place.mkdir()
    recording = Recording(place / "t.json", "s", {}, told.append)
    place.rmdir()
    recording.finish(in_background=False)
    assert len(told) == 1 and "could not be written" in told[0]
    assert not caplog.records, "no traceback on the terminal"


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    spans = [
        TraceSpan("worker-0", COMPUTE, "forward", 1000.0, 1001.25, 1, 7, 2, 3, "forward", (0, 1), 4),
        TraceSpan("worker-0", "weights up", "weights up", 1000.5, 1002.0, 1, 7, 2, 3, "forward", (0, 2), nbytes=10**9),
        TraceSpan("optimizer", OPTIMIZER, "G_cp", 1003.0, 1003.5, layers=(1, 2), nbytes=5),
        TraceSpan("controller", "messages", "3 messages", 1004.0, 1004.125),
    ]
    data = TraceData("s", {"worker-0": "cuda:0"}, {1: {"name": "m"}}, spans, "a note")
    write_trace(tmp_path / "t.json", data)
    again = read_trace(tmp_path / "t.json")
    assert (again.session, again.devices, again.models, again.note) == ("s", data.devices, data.models, "a note")
    assert again.spans == [replace(s, start_ms=s.start_ms - 1000.0, end_ms=s.end_ms - 1000.0) for s in spans]
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"], "no draft is left"
    event = next(e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["name"] == "weights up")
    assert event["args"]["GB/s"] == 666.67


@pytest.mark.parametrize(
    "text, sentence",
    [
        (None, "cannot read"),
        ("{", "is no trace"),
        ("[]", "is no trace of rpruntime"),
        ('{"traceEvents": []}', "is no trace of rpruntime"),
        ('{"otherData": {"program": "rpruntime", "format": 99}}', "has format 99"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, sentence: str, capsys: Any) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_trace(path)
    assert rpctl.main(["trace", str(path)]) == 1
    assert sentence in capsys.readouterr().err


def test_a_log_sends_in_parts() -> None:
    log = SpanLog()
    log.switch(True)
    for number in range(9000):
        log.add("optimizer", "norm", number, number + 1)
    messages = log.take("optimizer")
    assert [len(msg.rows) for msg in messages] == [4000, 4000, 1000]
    assert log.take("optimizer") == []
    assert decode(encode(messages[0])) == messages[0]


# --- the report


FORWARD, BACKWARD = [1.0, 2.0, 3.0, 2.0], [2.5, 4.0, 7.0, 6.0]
PLAN = ExecutionPlan([range(0, 2), range(2, 3)], [range(3, 4), range(1, 3), range(0, 1)])


def as_trace(*, asynchronous: bool, iterations: int, pause_ms: float = 0.0) -> TraceData:
    """A simulated run as if it had been recorded."""
    devices = {"worker-0": "cpu:0", "worker-1": "cpu:1"}
    settings: dict[str, Any] = {"num_devices": 2, "num_microbatches": 4}
    runs = iterations if asynchronous else 1
    found = simulate(PLAN, FORWARD, BACKWARD, asynchronous=asynchronous, iterations=runs, **settings)
    spans = []
    slots: dict[tuple[Any, ...], int] = {}
    for repeat in range(1 if asynchronous else iterations):
        for span in found.spans:
            iteration = span.iteration + repeat
            slot = slots.setdefault((span.kind, span.layers, iteration), len(slots) + 1)
            shift = 5000.0 + repeat * (found.makespan_ms + pause_ms)
            start, stop = span.layers.start, span.layers.stop
            rows: list[tuple[str, int, int, float]] = []
            if span.kind == "forward":
                rows = [("forward", layer, layer + 1, FORWARD[layer]) for layer in span.layers]
            else:
                name = "forward" if span.kind == "fused" else "recompute"
                rows = [(name, layer, layer + 1, FORWARD[layer]) for layer in span.layers]
                rest = sum(BACKWARD[layer] - FORWARD[layer] for layer in span.layers)
                if span.kind == "fused":
                    rows.append(("loss", 4, 4, 0.5))
                    rest -= 0.5
                rows.append(("backward", start, stop, rest))
            at = span.start_ms + shift
            for name, first, last, took in rows:
                spans.append(
                    TraceSpan(
                        f"worker-{span.device}", COMPUTE, name, at, at + took, 1, iteration, iteration + 1, slot,
                        span.kind, (first, last), span.microbatch,
                    )
                )  # fmt: skip
                at += took
    return TraceData("s", devices, {1: {"name": "m", "asynchronous": asynchronous}}, spans)


@pytest.mark.parametrize("asynchronous, iterations", [(False, 1), (False, 3), (True, 1), (True, 2), (True, 5)])
def test_a_run_as_simulated_is_reported_as_predicted(asynchronous: bool, iterations: int) -> None:
    data = as_trace(asynchronous=asynchronous, iterations=iterations, pause_ms=7.5)
    (report,) = reports(data)
    assert report.plan == PLAN and report.num_microbatches == 4
    assert report.iterations == tuple(range(iterations))
    assert report.predicted is not None
    for name in ("iteration_ms", "busy", "fill", "switch", "intra", "drain"):
        assert getattr(report.real, name) == pytest.approx(getattr(report.predicted, name), abs=1e-6), name
    assert (report.between_ms is None) == (asynchronous or iterations == 1)
    if report.between_ms is not None:
        assert report.between_ms == pytest.approx(7.5)
    assert len(report.lines()) == 4 + (report.between_ms is not None)


def test_layer_times_make_stages_take_what_they_took() -> None:
    data = as_trace(asynchronous=False, iterations=2)
    forward_ms, backward_ms = layer_times(PLAN, data.spans)
    assert forward_ms == pytest.approx(FORWARD)
    for stage in PLAN.backward:
        assert sum(backward_ms[layer] for layer in stage) == pytest.approx(sum(BACKWARD[layer] for layer in stage))


def test_only_whole_iterations_with_the_last_plan_count() -> None:
    data = as_trace(asynchronous=False, iterations=3)
    end = max(span.end_ms for span in data.spans if span.iteration == 1)
    data.spans = [span for span in data.spans if span.end_ms <= end or span.iteration == 1 or span.kind == "forward"]
    (report,) = reports(data)
    assert report.iterations == (0, 1), "the third lacks its backward"
    assert reports(TraceData("s", data.devices, {}, [])) == []


def test_causes_of_waits() -> None:
    def compute(
        role: str, name: str, slot: int, layers: tuple[int, int], start: float, end: float, kind: str
    ) -> TraceSpan:
        return TraceSpan(role, COMPUTE, name, start, end, 1, 0, 1, slot, kind, layers, 0)  # fmt: skip

    spans = [
        compute("worker-0", "forward", 1, (0, 1), 0, 10, "forward"),
        compute("worker-1", "forward", 9, (7, 8), 0, 2, "forward"),
        compute("worker-1", "forward", 2, (1, 2), 11, 20, "fused"),  # its input came at 10, its weights at 5
        TraceSpan("worker-1", "weights up", "weights up", 1, 5, slot=2),
        compute("worker-1", "backward", 2, (1, 2), 20, 25, "fused"),
        TraceSpan("worker-0", "weights up", "weights up", 24, 29, slot=3),
        compute("worker-0", "recompute", 3, (0, 1), 30, 40, "backward"),  # weights at 29, the gradient at 25
        TraceSpan("optimizer", OPTIMIZER, "step and P_cp", 42, 49),
        compute("worker-0", "forward", 4, (0, 1), 50, 60, "forward"),
        compute("worker-0", "forward", 5, (0, 1), 70, 80, "forward"),
        compute("worker-0", "forward", 6, (0, 1), 80.001, 90, "forward"),
    ]
    found = waits(spans, ["worker-0", "worker-1", "worker-2"])
    assert all(span.stream == WAITS for span in found)
    assert [(span.role, span.slot, span.start_ms, span.end_ms, span.name) for span in found] == [
        ("worker-0", 3, 10, 30, "waits for weights"),
        ("worker-0", 4, 40, 50, "waits for optimizer"),
        ("worker-0", 5, 60, 70, "waits for work"),
        ("worker-1", 2, 2, 11, "waits for input from worker-0, layers 0 to 0"),
    ]


# --- rpctl trace


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    data = as_trace(asynchronous=False, iterations=3, pause_ms=7.5)
    data.spans.append(TraceSpan("optimizer", OPTIMIZER, "G_cp", 5001, 5002))
    data.spans.append(TraceSpan("worker-0", "weights up", "weights <up>", 5001, 5900, nbytes=9))
    write_trace(path, data)
    assert rpctl.main(["trace", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "trace of m: 3 steps, 0 to 2" in printed and "simulated" in printed and "between two iterations" in printed
    root = ElementTree.parse(tmp_path / "t.svg").getroot()
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(title.startswith("fused") for title in titles) == 2 * 4, "the last two steps, a box a micro-batch"
    assert any("weights <up>" in title for title in titles)
    for rectangle in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, width = float(rectangle.get("x", 0)), float(rectangle.get("width", 0))
        assert math.isfinite(x) and 0 <= x <= x + width <= 1200.01
    assert rpctl.main(["trace", str(path), "--steps", "3", "--picture", str(tmp_path / "p.svg")]) == 0
    assert (tmp_path / "p.svg").read_text().count("fused,") == 3 * 4
    capsys.readouterr()
    assert rpctl.main(["trace", str(path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["model"] == "m" and row["backward"] == [[3, 4], [1, 3], [0, 1]]
    assert row["real"]["busy"] == pytest.approx(row["predicted"]["busy"], abs=1e-6)
    assert rpctl.main(["trace", str(path), "--picture", "x.png"]) == 2
    assert rpctl.main(["trace", str(path), "--steps", "0"]) == 2
    written = path.rename(tmp_path / "trace.svg").read_bytes()
    assert rpctl.main(["trace", str(tmp_path / "trace.svg")]) == 2 and (tmp_path / "trace.svg").read_bytes() == written
