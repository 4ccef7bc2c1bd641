"""`save_checkpoint`: saves that wait for their turn, and the thread that writes them.

script: what only it has, pickled now; SaveEvent -> the machine holds master copies and buffers
optimizer: copies each unit between two steps -> StateMsg
writer thread: files, unit by unit; at the end the folder gets its name
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpruntime.checkpoints.files import CheckpointWriter, explain, prune, writing_in
from rpruntime.checkpoints.filling import Filler
from rpruntime.checkpoints.handle import Save, SaveHandle, SaveNotice
from rpruntime.control import events as ev
from rpruntime.errors import CheckpointError, ConfigError
from rpruntime.interrupts import uninterrupted, wait_for
from rpruntime.store.limits import read_host_memory
from rpruntime.terminal import say
from rpruntime.wire.messages import SnapshotBegunMsg, SnapshotFailedMsg, StateMsg

if TYPE_CHECKING:
    from rpruntime.model import Model

log = logging.getLogger(__name__)

MIN_ROOM_BYTES = 64 << 20
"""Copies of units may take this much at least, and up to half of what the machine has free."""
CHECK_INTERVAL_S = 0.5


class Saves:
    """Those of one model that are not over.

    Attributes:
        inline: there is no writer thread; whoever asks writes what has come.
    """

    def __init__(self, model: Model) -> None:
        self.inline = hasattr(model.client.session, "drive")
        self._model = model
        self._client = model.client
        self._filler = Filler(model)
        self._numbers = itertools.count(1)
        self._running: dict[int, Save] = {}
        self._queue: deque[Save] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def forget_frozen(self) -> None:
        """Frozen weights are being replaced."""
        self._filler.forget_frozen()

    def on_message(self, msg: Any) -> None:
        """What the machine and the optimizer tell (under the client's lock)."""
        save = self._running.get(msg.request if isinstance(msg, StateMsg) else msg.save)
        if save is None:
            return
        if isinstance(msg, StateMsg):
            save.inbox.append(msg)
            save.arrived += msg.last
        elif isinstance(msg, SnapshotBegunMsg):
            save.begun, save.scaler = True, msg.scaler
        elif isinstance(msg, SnapshotFailedMsg):
            save.failure = f"the optimizer process could not copy the state: {msg.reason}"
        elif isinstance(msg, ev.DropSave):
            save.failure = "a call before it failed, so its step was never done"

    # --- the script's part

    def save(
        self, folder: str | os.PathLike[str], pack: Callable[[], bytes], *, keep: int | None, wait: bool
    ) -> SaveHandle:
        """Queue a save of the state after the newest step; `pack` gives what only the script has."""
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise ConfigError(f"keep must be a positive number of checkpoints or None, not {keep!r}")
        model, client = self._model, self._client
        units = sum(unit.trainable for unit in model.layout.units)
        script, handle = pack(), SaveHandle(self)
        save = Save(next(self._numbers), Path(folder).absolute(), keep, script, handle, units)
        room = 1 << 62 if self.inline else max(MIN_ROOM_BYTES, read_host_memory().available()[0] // 2)

        def book() -> ev.SaveEvent:
            save.step = client.machine.step_number(model.number)
            seed = client.machine.seed(model.number)
            save.seed = model.seed if seed is None else seed
            self._running[save.number] = save
            with self._lock:
                self._queue.append(save)
            return ev.SaveEvent(model.number, save.number, room)

        model.act(book)
        self._start_writer()
        self.work_inline()
        if wait:
            handle.result()
        return handle

    def _start_writer(self) -> None:
        with self._lock:
            if self._queue and self._thread is None and not self.inline:
                # no daemon: a script that ends here ends with the checkpoint written
                thread = threading.Thread(target=self._work, name="rpruntime-checkpoint", daemon=False)
                with uninterrupted():
                    thread.start()
                    self._thread = thread

    def finish(self, *, ending: bool = False) -> None:
        """Wait until every save is over. `ending`: nothing more is computed, so one whose step is not done fails."""
        self._start_writer()
        self.work_inline()
        while True:
            with self._client.lock:
                running = list(self._running.values())
                if ending and (self.inline or self._client.machine.unfinished_steps(self._model.number)):
                    self.fail("the pipe was closed before its step was done")
                elif self._model.books.broken is not None:
                    self.fail(f"the run ended before its step was saved: {self._model.books.broken}")
            self.work_inline()
            if self.inline or not running:
                return
            wait_for(running[0].handle._over, CHECK_INTERVAL_S)

    def fail(self, reason: str) -> None:
        """Nothing comes any more: end the saves that have not got everything (under the client's lock)."""
        for save in self._running.values():
            if not save.failure and not self._is_whole(save):
                save.failure = reason
        self._client._bell.ring()

    def work_inline(self) -> None:
        """Without a thread: write what has come."""
        if not self.inline:
            return
        with contextlib.suppress(Exception):
            self._client._drive()
        while self._queue and self._is_here(self._queue[0]):
            self._write(self._queue.popleft())

    def _is_here(self, save: Save) -> bool:
        if save.failure or self._client._closed or self._client._broken is not None:
            return True
        return self._is_whole(save)

    def _is_whole(self, save: Save) -> bool:
        machine, model = self._client.machine, self._model.number
        here = save.begun and save.arrived == save.units
        return save.taken or (here and machine.saved_buffers(model, save.number) is not None)

    # --- the writer's part

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                save = self._queue.popleft()
            try:
                self._write(save)
            except BaseException:  # the handle has it; the saves after this one are written all the same
                log.exception("in the writer of checkpoints")

    def _write(self, save: Save) -> None:
        """Write a save, whatever happens: its handle has a path or an error after this."""
        handle, what = save.handle, f"checkpoint step-{save.step} in {save.folder}"
        try:
            progress = SaveNotice(save, quiet=self._model._quiet)
            with writing_in(save.folder):
                writer = CheckpointWriter(save.folder, save.step, progress)
                try:
                    handle._path = self._filler.fill(save, writer, progress)
                except BaseException:
                    writer.abandon()
                    raise
                self._client.checkpoints[self._model.name] = str(handle._path)
                if save.keep is not None:
                    try:
                        prune(save.folder, save.keep, handle._path)
                    except Exception as err:  # this one is complete; the next save tries again
                        log.warning("older checkpoints in %s stay: %s", save.folder, explain(err, save.folder))
        except BaseException as err:
            reason = str(err) if isinstance(err, CheckpointError) else explain(err, save.folder)
            over = self._client._closed or (self._client._broken or self._model.books.broken) is not None
            handle._error = CheckpointError(f"{what} is not written: {reason}{'' if over else '; training goes on'}")
            handle._error.__cause__ = err
            say(f"rpruntime: {handle._error}")
            if not isinstance(err, Exception):
                raise
        finally:
            save.taken = True
            with contextlib.suppress(Exception):
                self._client.do(ev.SaveOverEvent(self._model.number, save.number))
            with self._client.lock:
                self._running.pop(save.number, None)
            handle._over.set()
