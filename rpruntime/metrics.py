"""Figures of every finished step: for sinks (`pipe.log_to`) and for `rpctl top`.

    finished step --> Figures --> observer's page
                         |
                         +------> queue --> thread --> sink.log(dict, step=...)

Steps finish in the client's receiver thread, which must not wait for a disk or a network: sinks have a thread of their
own, and closing the model waits until it has logged all.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rpruntime.errors import ConfigError
from rpruntime.interrupts import uninterrupted
from rpruntime.loading import state_tensors_per_parameter
from rpruntime.microbatch import CutCall
from rpruntime.observer import ModelFigures
from rpruntime.store.layout import optimizer_layout
from rpruntime.trace.handle import Trace

if TYPE_CHECKING:
    from rpruntime.model import Model

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 30.0
"""How long closing waits for a sink that does not come to its end."""
JSONL_NAME = "metrics.jsonl"


class Sink(Protocol):
    """Where figures go: Weights & Biases' run, for example. May have `close()`."""

    def log(self, values: dict[str, Any], *, step: int) -> None: ...


class FolderSink:
    """A folder: `metrics.jsonl` with a line a step, and TensorBoard's events where tensorboard is installed."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / JSONL_NAME).open("a", encoding="utf-8")
        except OSError as err:
            raise ConfigError(f"log_to: nothing can be written in {folder} ({err.strerror})") from err
        self._folder = folder
        self._writer: Any = None
        self._tried = False

    def log(self, values: dict[str, Any], *, step: int) -> None:
        """Write a line; NaN and infinity as Python's JSON reads them."""
        self._file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        self._file.flush()
        if not self._tried:  # here, as importing it takes a while
            self._tried = True
            self._writer = _tensorboard(self._folder)
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Nothing more will come."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


class _Feed:
    """A sink and the thread that feeds it."""

    def __init__(self, sink: Any, what: str, say: Any) -> None:
        self._sink, self._what, self._say = sink, what, say
        self._queue: queue.SimpleQueue[tuple[dict[str, Any], int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rpruntime-log", daemon=True)
        with uninterrupted():
            self._thread.start()

    def put(self, values: dict[str, Any], step: int) -> None:
        self._queue.put((values, step))

    def _run(self) -> None:
        failed = False
        while True:
            entry = self._queue.get()
            try:
                if entry is None:
                    if callable(close := getattr(self._sink, "close", None)) and isinstance(self._sink, FolderSink):
                        close()
                    return
                if not failed:
                    values, step = entry
                    self._sink.log(values, step=step)
            except Exception as err:  # training goes on without it
                failed = True
                log.exception("logging to %s", self._what)
                self._say(f"nothing more is logged to {self._what}: {type(err).__name__}: {err}")
                if entry is None:
                    return

    def close(self) -> None:
        """Wait until everything is logged."""
        self._queue.put(None)
        self._thread.join(FLUSH_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("%s has not logged everything within %.0f s", self._what, FLUSH_TIMEOUT_S)


class Figures:
    """Of one model. Everything but `log_to` and `close` happens under the client's lock."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._counts: dict[int, tuple[int, int | None]] = {}
        """Call -> rows, and tokens where they can be told."""
        self._since_s: float | None = None
        """When the newest step finished, or the first call was issued."""
        self._feeds: list[_Feed] = []
        units = [unit for unit in model.layout.units if unit.trainable]
        states = 0 if model.optimizer is None else state_tensors_per_parameter(model.optimizer)
        self._shown = ModelFigures(
            name=model.name,
            asynchronous=model.asynchronous,
            num_layers=len(model.layout.layers),
            num_units=len(units),
            optimizer_bytes=sum(optimizer_layout(unit)[1] for unit in units) * (1 + states),
        )
        with model.client.lock:
            model.client.observer.add_model(model.number, self._shown)

    def note_call(self, call: int, cut: CutCall, stages: str) -> None:
        """A training call is issued under a plan."""
        self._counts[call] = sum(cut.rows), count_tokens(cut)
        self._shown.plan = stages
        if self._since_s is None:
            self._since_s = time.monotonic()

    def forget_calls(self, calls: Any) -> None:
        """Calls whose gradients no step will take."""
        for call in calls:
            self._counts.pop(call, None)

    def step_finished(self, done: dict[str, Any], calls: tuple[int, ...]) -> None:
        """`done`: the fields of `StepInfo`."""
        now = time.monotonic()
        client = self._model.client
        account = client.observer.step_finished(self._model.number, done["step"])
        counts = [self._counts.pop(call, (0, None)) for call in calls]
        self._counts = {call: count for call, count in self._counts.items() if call > max(calls)}  # others were dropped
        took = now - self._since_s if self._since_s is not None else 0.0
        self._since_s = now
        values: dict[str, Any] = {"loss": done["loss"]}
        if done["grad_norm"] is not None:
            values["grad_norm"] = done["grad_norm"]
        for group, rate in enumerate(done["lr"]):
            values["lr" if group == 0 else f"lr/{group}"] = rate
        if self._model.grad_scaler is not None:
            values["loss_scale"] = done["loss_scale"]
            values["skipped"] = int(done["skipped"])
        values["step_s"] = took
        values["optimizer_s"] = done["seconds"]
        if took > 0:
            values["items_per_s"] = sum(rows for rows, _ in counts) / took
            if counts and all(tokens is not None for _, tokens in counts):
                values["tokens_per_s"] = sum(tokens or 0 for _, tokens in counts) / took
        if account is not None:
            values["bubble"] = account.bubble
            for name in ("fill", "switch", "intra", "drain"):
                values[f"bubble/{name}"] = getattr(account, name)
            if any(account.peak_by_role.values()):
                values["memory/device_bytes"] = max(account.peak_by_role.values())
        if self._feeds:
            values["memory/host_bytes"] = sum(client.observer.memory().values())
        values.update({f"metric/{name}": value for name, value in done["metrics"].items()})
        self._shown.values = {"step": done["step"], **values}
        for feed in self._feeds:
            feed.put(values, done["step"])

    def log_to(self, sink: str | os.PathLike[str] | Sink) -> None:
        """See `RoundPipe.log_to`."""
        if isinstance(sink, str | os.PathLike):
            target: Any = FolderSink(Path(sink))
            what = str(sink)
        elif callable(getattr(sink, "log", None)):
            target, what = sink, f"a {type(sink).__name__}"
        else:
            raise ConfigError(f"log_to takes a folder or an object with log(dict, step=), not a {type(sink).__name__}")
        with self._model.client.lock:
            self._feeds.append(_Feed(target, what, self._model.say))

    def trace(self, file: str | os.PathLike[str], steps: int | None) -> Trace:
        """See `RoundPipe.trace`."""
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise ConfigError(f"steps must be a positive integer or None, not {steps!r}")
        if not isinstance(file, str | os.PathLike):
            raise ConfigError(f"trace takes the file's path, then steps=, not {file!r}")
        model, client = self._model, self._model.client
        with client.lock:
            part = None
            if steps is not None:
                first = client.machine.step_number(model.number) + bool(model.books.open)
                part = (model.number, first, first + steps)
            return Trace(client, client.observer.start(Path(file), part))

    def close(self) -> None:
        """Everything that has finished is logged; nothing more comes."""
        with self._model.client.lock:
            feeds, self._feeds = self._feeds, []
            self._model.client.observer.remove_model(self._model.number)
        for feed in feeds:
            feed.close()


def count_tokens(cut: CutCall) -> int | None:
    """Elements of the token ids of a call, padding included; None: its inputs are none."""
    total = 0
    for args, kwargs in zip(cut.args, cut.kwargs, strict=True):
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.is_complex():
            return None
        total += ids.numel()
    return total
