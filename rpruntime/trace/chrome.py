"""A trace as a file of Chrome's trace event format, which Perfetto and chrome://tracing open as it is.

A role is a process and a stream one of its threads. What other programs have no use for is under "otherData".
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpruntime.errors import ConfigError
from rpruntime.trace.spans import STREAMS, TraceSpan

FORMAT = 1


@dataclass
class TraceData:
    """A trace: spans, and what they belong to."""

    session: str
    devices: dict[str, str]
    """Worker's role -> device, in order."""
    models: dict[int, dict[str, Any]]
    """Number -> `name`, `asynchronous`, `num_layers`."""
    spans: list[TraceSpan] = field(default_factory=list)
    note: str = ""
    """Why the trace is not the whole run, if so."""

    @property
    def roles(self) -> list[str]:
        """All roles with spans: devices first, in order."""
        others = sorted({span.role for span in self.spans} - set(self.devices))
        return [*self.devices, *others]


def write_trace(path: Path, data: TraceData) -> None:
    """Write the file whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump(as_chrome(data), file, separators=(",", ":"))
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def as_chrome(data: TraceData) -> dict[str, Any]:
    """The object to write as JSON; times count from the first span."""
    origin = min((span.start_ms for span in data.spans), default=0.0)
    pids = {role: number for number, role in enumerate(data.roles, 1)}
    events: list[dict[str, Any]] = []
    for role, pid in pids.items():
        name = f"{data.devices[role]} ({role})" if role in data.devices else role
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        used = {span.stream for span in data.spans if span.role == role}
        for tid in [tid for tid, stream in enumerate(STREAMS) if stream in used]:
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": STREAMS[tid]}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    tids = {stream: tid for tid, stream in enumerate(STREAMS)}
    events += [_event(span, origin, pids[span.role], tids[span.stream]) for span in data.spans]
    other = {
        "format": FORMAT,
        "program": "rpruntime",
        "session": data.session,
        "devices": data.devices,
        "models": {str(number): model for number, model in data.models.items()},
        "monotonic_ms": origin,
        "note": data.note,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _event(span: TraceSpan, origin: float, pid: int, tid: int) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for name in ("model", "iteration", "call", "slot", "microbatch"):
        value = getattr(span, name)
        if value >= 0:
            args[name] = value
    if span.kind:
        args["kind"] = span.kind
    if span.layers[0] >= 0:
        args["layers"] = list(span.layers)
    if span.nbytes:
        args["bytes"] = span.nbytes
        if span.end_ms > span.start_ms:
            args["GB/s"] = round(span.nbytes / (span.end_ms - span.start_ms) / 1e6, 2)
    start = round((span.start_ms - origin) * 1e3, 3)
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.stream,
        "pid": pid,
        "tid": tid,
        "ts": start,
        # of the rounded ends, so that neighbours touch and do not overlap
        "dur": round(round((span.end_ms - origin) * 1e3, 3) - start, 3),
        "args": args,
    }


def read_trace(path: Path) -> TraceData:
    """The trace in a file.

    Raises:
        ConfigError: there is no such file, or it holds no trace of ours.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}") from err
    except ValueError as err:
        raise ConfigError(f"{path} is no trace: it is not JSON") from err
    other = body.get("otherData") if isinstance(body, dict) else None
    if not isinstance(other, dict) or other.get("program") != "rpruntime":
        raise ConfigError(f"{path} is no trace of rpruntime; rplaunch --trace FILE and pipe.trace(FILE) write some")
    if other["format"] != FORMAT:
        raise ConfigError(f"{path} has format {other['format']}, this version reads {FORMAT}: record it again")
    devices: dict[str, str] = other["devices"]
    events = body["traceEvents"]
    roles: dict[int, str] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            name = event["args"]["name"]
            roles[event["pid"]] = next((r for r, d in devices.items() if name == f"{d} ({r})"), name)
    models = {int(number): model for number, model in other["models"].items()}
    spans = [_span(event, roles[event["pid"]]) for event in events if event["ph"] == "X"]
    return TraceData(other["session"], devices, models, spans, other["note"])


def _span(event: dict[str, Any], role: str) -> TraceSpan:
    args = event["args"]
    first, last = args.get("layers", (-1, -1))
    start = event["ts"] / 1e3
    return TraceSpan(
        role,
        event["cat"],
        event["name"],
        start,
        start + event["dur"] / 1e3,
        kind=args.get("kind", ""),
        layers=(first, last),
        nbytes=args.get("bytes", 0),
        **{name: args.get(name, -1) for name in ("model", "iteration", "call", "slot", "microbatch")},
    )
