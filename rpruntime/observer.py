"""What the controller lets others see of a run: the books of its time, traces, and the page that `rpctl top` reads.

One for each client, called under its lock with whatever passes: messages out and in, finished steps, and `tick`, which
comes several times a second. Nothing here changes what is computed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpruntime.errors import RoundPipeError
from rpruntime.meter import Account, Meter
from rpruntime.progress import ProgressPage, progress_path
from rpruntime.terminal import SAY_INTERVAL_S, say
from rpruntime.trace.recording import Recording
from rpruntime.wire.messages import CancelMsg, RoleReadyMsg, TaskMsg, TraceMsg, TraceSpansMsg

if TYPE_CHECKING:
    from rpruntime.client import Client

log = logging.getLogger(__name__)

PAGE_INTERVAL_S = 0.2
MAX_SLOTS_SHOWN = 400


@dataclass
class ModelFigures:
    """What is shown of a model."""

    name: str
    asynchronous: bool
    num_layers: int
    num_units: int
    """Units that the optimizer steps."""
    optimizer_bytes: int
    """fp32 copy and state."""
    values: dict[str, Any] = field(default_factory=dict)
    """Of the newest finished step, as given to sinks (`rpruntime/metrics.py`)."""
    account: Account | None = None
    plan: str = ""


@dataclass
class _FirstStep:
    """How far a model's first step is."""

    sent: int = 0
    """Tasks handed out."""
    began_s: float = field(default_factory=time.monotonic)
    told_s: float = field(default_factory=time.monotonic)


class Observer:
    """Of one client; the client's lock is held in every call."""

    def __init__(self, client: Client) -> None:
        self._client = client
        session = client.session
        self.meter = Meter(session.worker_roles)
        self.models: dict[int, ModelFigures] = {}
        self._first: dict[int, _FirstStep] = {}
        """Models of which no step has finished."""
        self._recordings: list[Recording] = []
        self._writing: list[Recording] = []
        """Over, but their files may still be being written."""
        self._page: ProgressPage | None = None
        self._dirty = True
        self._written_s = 0.0
        self._is_ready = self._is_closing = False
        if session.folder is not None:
            try:
                self._page = ProgressPage.create(progress_path(Path(session.folder)))
            except OSError as err:  # nobody can watch then
                log.warning("no page for rpctl top: %s", err)
        path = session.config.get("trace")
        if path:
            self.start(Path(path))

    # --- what passes

    def roles_ready(self) -> None:
        """Every process takes messages now."""
        self._is_ready = True
        self._switch(bool(self._recordings))  # a controller before this one may have left it on

    def sent(self, role: str, msg: Any) -> None:
        """A message goes out."""
        self.meter.sent(role, msg)
        if isinstance(msg, TaskMsg) and msg.task.model in self._first:
            self._first[msg.task.model].sent += 1
        if isinstance(msg, CancelMsg) and role == "optimizer":  # everybody gets it
            for recording in self._recordings:
                recording.cancelled(msg.model, range(msg.first_call, msg.last_call + 1))
        self._dirty = True

    def came(self, msg: Any) -> bool:
        """A message has come, and nobody has acted on it yet; True: it was for us alone."""
        if isinstance(msg, TraceSpansMsg):
            for recording in self._recordings:
                recording.rows(msg.role, msg.rows, self.meter.slots)
            return True
        self.meter.came(msg)
        if isinstance(msg, RoleReadyMsg) and self._recordings:
            self._client.session.post.send(msg.role, TraceMsg(True))
        self._dirty = True
        return False

    def took(self, count: int, began_s: float) -> None:
        """So many messages were taken in and acted on since `began_s` (`time.monotonic`)."""
        if self._recordings:
            now = time.monotonic() * 1e3
            for recording in self._recordings:
                recording.messages(count, began_s * 1e3, now)

    def add_model(self, number: int, figures: ModelFigures) -> None:
        """A model has been loaded."""
        self.models[number] = figures
        self._first[number] = _FirstStep()
        for recording in self._recordings:
            self._note_model(recording, number, figures)
        self._dirty = True

    def remove_model(self, number: int) -> None:
        """A model has been unloaded."""
        self.models.pop(number, None)
        self._first.pop(number, None)
        for recording in [r for r in self._recordings if r.steps is not None and r.steps[0] == number]:
            self.end(recording)
        self._dirty = True

    def step_finished(self, number: int, iteration: int) -> Account | None:
        """A step is done; `iteration` counts the steps of the whole training. Returns the newest account."""
        self._first.pop(number, None)
        figures = self.models.get(number)
        found = self.meter.step_finished(number, iteration, asynchronous=figures is not None and figures.asynchronous)
        if figures is not None and found is not None:
            figures.account = found
        for recording in list(self._recordings):
            if recording.steps is not None and recording.steps[0] == number and iteration >= recording.steps[2] - 1:
                self.end(recording)
        self._dirty = True
        return figures.account if figures is not None else found

    # --- traces

    def start(self, path: Path, steps: tuple[int, int, int] | None = None) -> Recording:
        """Begin a trace; see `Recording`.

        Raises:
            ConfigError: the file cannot be written.
        """
        roles, devices = self._client.session.worker_roles, self._client.session.devices
        named = {role: devices[min(index, len(devices) - 1)] for index, role in enumerate(roles)}
        recording = Recording(path, self._client.session.name, named, self._tell, steps)
        for number, figures in self.models.items():
            self._note_model(recording, number, figures)
        self._recordings.append(recording)
        self.meter.listeners.append(recording.commit)
        if self._is_ready and len(self._recordings) == 1:
            self._switch(True)
        return recording

    def end(self, recording: Recording) -> None:
        """End a trace, if it has not ended; its file is written in the background (`Recording.wait`)."""
        if recording not in self._recordings:
            return
        self._recordings.remove(recording)
        self.meter.listeners.remove(recording.commit)
        if not self._recordings:
            self._switch(False)
        self._writing = [*(r for r in self._writing if not r.is_written()), recording]
        recording.finish(in_background=not self._is_closing)

    def _switch(self, on: bool) -> None:
        with contextlib.suppress(RoundPipeError, OSError):
            for role in (*self._client.machine.living_workers, "optimizer"):
                self._client.session.post.send(role, TraceMsg(on))

    def _note_model(self, recording: Recording, number: int, figures: ModelFigures) -> None:
        recording.note_model(number, figures.name, asynchronous=figures.asynchronous, num_layers=figures.num_layers)

    def _tell(self, line: str) -> None:
        if not self._client.session.config.get("quiet"):
            say(f"rpruntime: {line}")

    # --- the page

    def tick(self) -> None:
        """Bring the page up to date, now and then, and say that a first step takes long."""
        self._say_first_steps()
        if self._page is None or not self._dirty:
            return
        now = time.monotonic()
        if now - self._written_s < PAGE_INTERVAL_S:
            return
        self._write_page(now)

    def _say_first_steps(self) -> None:
        """Memory is reserved, mapped and pinned on its way, which takes long with a large model."""
        now = time.monotonic()
        for number, first in self._first.items():
            left = sum(info.task.model == number for info in self.meter.slots.values()) if first.sent else 0
            if not left:
                first.began_s = first.told_s = now
            elif now - first.told_s > SAY_INTERVAL_S:
                first.told_s = now
                done = first.sent - left
                self._tell(f"the first step ... {done} of {first.sent} stages, {now - first.began_s:.0f} s")

    def _write_page(self, now: float) -> None:
        assert self._page is not None
        self._written_s, self._dirty = now, False
        body = self._body(now)
        if not self._page.write(body):
            self._page.write({**body, "slots": {}})

    def _body(self, now: float) -> dict[str, Any]:
        session = self._client.session
        newest = [figures.account for figures in self.models.values() if figures.account is not None]
        account = max(newest, key=lambda found: found.iteration, default=None)
        devices = []
        for index, role in enumerate(session.worker_roles):
            info = session.ready.get(role, {})
            devices.append(
                {
                    "role": role,
                    "device": session.devices[index],
                    "name": info.get("name", ""),
                    "memory_bytes": info.get("memory_bytes", 0),
                    "peak_bytes": account.peak_by_role.get(role, 0) if account else 0,
                    "busy": account.busy_by_role.get(role) if account else None,
                }
            )
        slots = {}
        for slot, info in list(self.meter.slots.items())[:MAX_SLOTS_SHOWN]:
            task = info.task
            slots[str(slot)] = [task.kind, *task.layers, len(task.microbatches), info.iteration, task.model]
        return {
            "pid": os.getpid(),
            "argv": [word[:200] for word in sys.argv[:20]],
            "monotonic_s": now,
            "devices": devices,
            "models": [self._of_model(number, figures) for number, figures in self.models.items()],
            "memory": self.memory(),
            "slots": slots,
        }

    def _of_model(self, number: int, figures: ModelFigures) -> dict[str, Any]:
        step, published = self.meter.units_published(number)
        account = figures.account
        return {
            "name": figures.name,
            "layers": figures.num_layers,
            "asynchronous": figures.asynchronous,
            "plan": figures.plan,
            "values": figures.values,
            "optimizer": {
                "step": step if step < 0 else self._client.machine.step_number(number, step),
                "units": published,
                "of": figures.num_units,
            },
            "bubbles": None
            if account is None
            else {
                "iteration": account.iteration,
                "window_ms": account.window_ms,
                "bubble": account.bubble,
                "fill": account.fill,
                "switch": account.switch,
                "intra": account.intra,
                "drain": account.drain,
            },
        }

    def memory(self) -> dict[str, int]:
        """Bytes of host memory in use by kind."""
        found = {"weights": 0, "gradients": 0, "activations": 0, "inputs": 0, "buffers": 0}
        for kind, nbytes in self._client.machine.live_bytes().items():
            found[_MEMORY_KINDS[kind]] += nbytes
        found["optimizer"] = sum(figures.optimizer_bytes for figures in self.models.values())
        return found

    # --- end

    def close(self) -> None:
        """Write what is being recorded; call it while the session is there."""
        self._is_closing = True  # maybe at Python's end, when no thread can be started any more
        for recording in list(self._recordings):
            self.end(recording)
        for recording in self._writing:
            recording.wait()
        if self._page is not None:
            self._page.close()
            self._page = None


_MEMORY_KINDS = {
    "weights": "weights",
    "slab": "gradients",
    "act": "activations",
    "agrad": "activations",
    "out": "activations",
    "label": "inputs",
    "input": "inputs",
    "buffer": "buffers",
}
