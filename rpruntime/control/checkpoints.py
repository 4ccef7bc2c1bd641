"""Saves, which hold the state between two steps while it is being written, and weights that come from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from rpruntime.control.calls import Calls
from rpruntime.control.events import DropSave, RestoreEvent, SaveEvent, SaveOverEvent
from rpruntime.control.lifetimes import Lifetimes
from rpruntime.control.model import Place
from rpruntime.control.models import Models
from rpruntime.control.outbox import Outbox
from rpruntime.control.roster import OPTIMIZER
from rpruntime.store.handle import Extent, Payload
from rpruntime.wire.messages import SnapshotEndMsg, SnapshotMsg
from rpruntime.wire.succession import NoteModelMsg


@dataclass(frozen=True)
class Save:
    """What a save holds: the state between step `step - 1` and step `step`."""

    step: int
    version_read: int
    """The version that iteration `step` reads."""
    start: Place
    """Whose buffers it starts with."""


class Checkpoints:
    """The saves that are not over, of all models."""

    def __init__(self, models: Models, calls: Calls, lifetimes: Lifetimes, out: Outbox) -> None:
        self._models = models
        self._calls = calls
        self._lifetimes = lifetimes
        self._out = out
        self._saves: dict[tuple[int, int], Save] = {}
        """(model, save)"""

    def on_save(self, event: SaveEvent) -> None:
        """Hold what the open iteration starts from, and have the units copied."""
        model, reader = self._models[event.model], _reader(event.model, event.save)
        save = Save(model.iteration, model.version_read(), model.open.start)
        self._saves[event.model, event.save] = save
        model.versions.hold((save.version_read, save.step), reader)
        model.hold_buffers(save.start, reader)
        self._out.send(OPTIMIZER, SnapshotMsg(event.model, event.save, save.step, event.room_bytes))

    def on_save_over(self, event: SaveOverEvent) -> None:
        """It is written or given up; maybe it was dropped before."""
        if self._drop(event.model, event.save):
            self._out.send(OPTIMIZER, SnapshotEndMsg(event.model, event.save))

    def _drop(self, model: int, save: int) -> bool:
        """Let go of what a save holds; False: it was over."""
        known = self._saves.pop((model, save), None) is not None
        if known:
            self._lifetimes.release(_reader(model, save))
        return known

    def drop_after(self, model: int, step: int) -> None:
        """The steps from this one on are undone, and so is what was to be saved after them."""
        for number, save in [key for key, held in self._saves.items() if key[0] == model and held.step > step]:
            self._drop(number, save)
            self._out.add(DropSave(number, save))

    def forget_model(self, model: int) -> None:
        """Drop all saves of a model that is being removed."""
        for number, save in [key for key in self._saves if key[0] == model]:
            self._drop(number, save)

    def start(self, model: int, save: int) -> Place:
        """Whose buffers a save holds."""
        return self._saves[model, save].start

    def weights(self, model: int, save: int) -> tuple[dict[int, Extent], dict[int, Extent]]:
        """Of a save whose units are copied: each unit's master copy, and the one that the next iteration reads (none,
        if it is the same version)."""
        held, versions = self._saves[model, save], self._models[model].versions
        read = {} if held.step == held.version_read else versions.places(held.version_read)
        return versions.places(held.step), read

    def buffers(self, model: int, save: int) -> dict[int, Payload] | None:
        """The buffers that a save holds; None: their calls have not finished."""
        held = self._saves[model, save]
        if held.step - 1 in self._models[model].unfinished_steps():
            return None
        return self._models[model].buffers(held.start)

    def on_restore(self, event: RestoreEvent) -> None:
        """Two iterations are skipped, so that the versions of the new weights are numbers that nobody has met."""
        model = self._models[event.model]
        assert not model.open.wanted and not model.unfinished_steps()
        iteration = model.iteration + 2
        step = model.iteration + model.step_offset if event.step is None else event.step
        model.step_offset = step - iteration
        model.seed = model.seed if event.seed is None else event.seed
        left = model.jump(iteration, (event.call, 0), event.buffers, previous=event.previous)
        self._calls.remove(left.calls)
        msg = NoteModelMsg(event.model, iteration, model.step_offset, model.seed, event.buffers)
        self._out.send(OPTIMIZER, msg)

    def validate(self) -> None:
        """Saves hold the buffers and weights that they name, and nobody else holds as a save (tests)."""
        for (number, save), held in self._saves.items():
            model = self._models[number]
            expected = {*model.versions.keys((held.step, held.version_read)), *model.buffer_keys(held.start)}
            assert self._lifetimes.reads(_reader(number, save)) == expected
        assert {holder[1:] for holder in self._lifetimes.holders("save")} <= self._saves.keys()


def _reader(model: int, save: int) -> tuple[str, int, int]:
    return ("save", model, save)
