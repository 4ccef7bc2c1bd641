"""`save_checkpoint` and `load_checkpoint`: the script's side of a model's checkpoints.

saves           saves.py, handle.py, filling.py
loads           loads.py, restoring.py
for both        script.py (what only the script has), fit.py, files.py (the disk)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rpruntime.checkpoints.files import CheckpointReader, find_checkpoint
from rpruntime.checkpoints.fit import check_fits
from rpruntime.checkpoints.handle import SaveHandle as SaveHandle
from rpruntime.checkpoints.loads import of_checkpoint, of_state
from rpruntime.checkpoints.restoring import Restoring
from rpruntime.checkpoints.saves import Saves
from rpruntime.checkpoints.script import ScriptState
from rpruntime.terminal import warn
from rpruntime.wire.messages import RestoredMsg

if TYPE_CHECKING:
    from rpruntime.model import Model


@dataclass(frozen=True)
class CheckpointInfo:
    """What was loaded: `step`, steps done in the training so far, and the `extra` that it was saved with."""

    step: int
    extra: Any
    path: str = ""


class Checkpoints:
    """The saves and loads of one model.

    Attributes:
        saves: those that are not over.
        script: what only the script has.
    """

    def __init__(self, model: Model) -> None:
        self.saves = Saves(model)
        self.script = ScriptState(model)
        self._restoring = Restoring(model)
        self._model = model

    def on_message(self, msg: Any) -> None:
        """What the machine and the optimizer tell (under the client's lock)."""
        if isinstance(msg, RestoredMsg):
            self._restoring.on_restored(msg.unit)
        else:
            self.saves.on_message(msg)

    def save(self, folder: str | os.PathLike[str], *, extra: Any, keep: int | None, wait: bool) -> SaveHandle:
        """Queue a save of the state after the newest step."""

        def pack() -> bytes:
            self.script.warn_scheduler()
            return self.script.pack(extra)

        return self.saves.save(folder, pack, keep=keep, wait=wait)

    def load(self, folder: str | os.PathLike[str]) -> CheckpointInfo:
        """Check everything, then take it over."""
        path, incomplete = find_checkpoint(folder)
        for entry in [entry for entry in incomplete if not entry.path.name.startswith(".")]:
            warn(f"{entry.path.name} is passed over: {entry.reason}")
        reader, model = CheckpointReader(path.absolute()), self._model
        check_fits(model, reader)
        script, values = reader.objects("script.pt"), reader.objects("optimizer.pt")
        self.script.check(reader.path, [kind for kind, _ in script["registered"]])
        self._settle()

        def before() -> None:
            self.script.load(reader.path, [state for _, state in script["registered"]])
            self.saves.forget_frozen()

        self._restoring.install(of_checkpoint(model, reader, values), before)
        self.script.load_rest(script)
        step = reader.meta["step"]
        model.client.checkpoints[model.name] = str(reader.path)
        model.say(f"step {step}: goes on from {reader.path}")
        return CheckpointInfo(step, script["extra"], str(reader.path))

    def load_weights(self, state: Mapping[str, Any], strict: bool) -> Any:
        """`pipe.load_state_dict`."""
        self._settle()
        self._model.synchronize()
        new, keys = of_state(self._model, state, strict)
        self._restoring.install(new, self.saves.forget_frozen)
        return keys

    def _settle(self) -> None:
        """Nothing runs and nothing is wanted after this."""
        model = self._model
        self.saves.finish()
        model.finish_open_calls()
        if model.books.open:
            model.say_once("gradients that no step has taken are discarded by loading")
            model.zero_grad()
        model.wait(lambda: not model.client.machine.unfinished_steps(model.number), "the steps issued")
        model.raise_failure()
        self.saves.work_inline()
