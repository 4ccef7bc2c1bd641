"""A session of pure machines: no process, no tensor, a network that delivers in any order that real links allow.

Workers may be killed at any moment: what they had sent arrives in part, to some peers and not to others.

Memory is a table of extents with a description of what was written there, so that every read is checked: it must be
live and hold what the reader believes. Freed extents are never given out again, so a late reader is caught. Workers
pass values on unchanged at times (one extent, several keys), and messages that may be repeated sometimes are.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rpruntime.control import events as ev
from rpruntime.control.machine import ControllerMachine
from rpruntime.optimizer import events as oe
from rpruntime.optimizer.machine import OptimizerMachine
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.store.handle import Extent, Payload, TensorHandle
from rpruntime.wire import messages as msgs
from rpruntime.wire import succession as sc
from rpruntime.wire.succession import head_place
from rpruntime.worker import events as we
from rpruntime.worker import machine as wm


class Memory:
    """Extents and what was written there: a key, or several that name the same value."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.live: dict[Extent, set[Any]] = {}

    def write(self, owner: str, content: Any) -> Extent:
        extent = Extent(owner, f"{owner}-1", next(self._numbers) * 256, 1)
        self.live[extent] = {content}
        return extent

    def alias(self, extent: Extent, content: Any) -> None:
        """The same bytes are known under another name too."""
        assert extent in self.live, f"{extent} was freed before {content} could be passed on"
        self.live[extent].add(content)

    def check(self, extent: Extent, content: Any) -> None:
        assert extent in self.live, f"{extent} was freed while {content} was still to be read"
        assert content in self.live[extent], f"found {self.live[extent]} where {content} was expected"

    def free_all(self, owner: str) -> None:
        """Somebody adopts a dead process's arena."""
        for extent in [extent for extent in self.live if extent.owner == owner]:
            del self.live[extent]

    def free(self, extent: Extent, owner: str) -> None:
        assert extent.owner == owner, f"{owner} was told to free {extent}"
        assert self.live.pop(extent, None) is not None, f"double free of {extent}"


def payload(*extents: Extent) -> Payload:
    return Payload(b"", tuple(TensorHandle(e, 0, (1,), (1,), "float32") for e in extents), (True,) * len(extents))


def is_passed_on(read: msgs.Key, written: msgs.Key) -> bool:
    """Whether a stage can publish what it read under this key: the value of a micro-batch, a position's buffers."""
    if written[0] == "buffer":
        return read[0] == "buffer" and read[3] == written[3]
    return written[0] in ("act", "out") and read[0] == "act"


class Worker:
    """A worker machine with a shell that moves descriptions around and finishes its copies in any order."""

    def __init__(self, role: str, peers: tuple[str, ...], cluster: Cluster, incarnation: int = 1) -> None:
        self.role, self.owner, self.incarnation = role, f"{role}.{incarnation}", incarnation
        self.machine = wm.WorkerMachine(role, peers)
        self.cluster = cluster
        self.ready: list[Any] = []
        """Events that the shell can deliver now, in any order."""
        self.copies: dict[int, list[Any]] = defaultdict(list)
        self.ran: dict[int, list[tuple[int, str, int, tuple[int, int]]]] = defaultdict(list)
        """By slot, what its present attempt has run."""
        self.own: dict[int, list[Extent]] = defaultdict(list)
        self.finished: dict[int, we.FinishSlot] = {}
        self.dropping: list[tuple[int, list[Extent]]] = []
        self.staged: dict[int, dict[int, Extent]] = {}
        self.prefetched: set[tuple[int, int]] = set()
        """Slots and micro-batches whose inputs were asked for, of slots that have not been dropped since."""
        self.tries: Counter[int] = Counter()

    def handle(self, *events: Any) -> None:
        opened = [self.cluster.spec(e.model) if isinstance(e, msgs.LoadModelMsg) else e for e in events]
        for instruction in self.machine.handle(*opened):
            getattr(self, f"_{type(instruction).__name__}")(instruction)

    def choices(self) -> list[Any]:
        found: list[Any] = [("event", event) for event in self.ready]
        found += [("copy", slot, event) for slot, events in self.copies.items() for event in events]
        found += [("done", slot) for slot in self.finished if not self.copies[slot]]
        found += [("gone", entry) for entry in self.dropping]
        return found

    def act(self, choice: Any) -> None:
        kind, *rest = choice
        if kind == "event":
            self.ready.remove(rest[0])
            self.handle(rest[0])
        elif kind == "copy":
            slot, event = rest
            self.copies[slot].remove(event)
            self.handle(event)
        elif kind == "done":
            self.finished.pop(rest[0])
            self.copies.pop(rest[0])
            self.own.pop(rest[0], None)
            self.handle(we.SlotDoneEvent(rest[0], ()))
        else:
            self.dropping.remove(rest[0])
            self.handle(we.SlotDroppedEvent(rest[0][0], tuple(rest[0][1])))

    def _Send(self, i: we.Send) -> None:
        self.cluster.post(self.role, i.role, i.msg)

    def _Forget(self, i: we.Forget) -> None:
        pass

    def _FreeCaches(self, i: we.FreeCaches) -> None:
        pass

    def _Adopt(self, i: we.Adopt) -> None:
        assert i.owner in self.cluster.dead and i.owner.rpartition(".")[0] == self.role
        self.cluster.adopted.append(i.owner)
        self.cluster.memory.free_all(i.owner)

    def _BuildModel(self, i: we.BuildModel) -> None:
        self.ready.append(we.ModelBuiltEvent(i.msg.model))

    def _ForgetModel(self, i: we.ForgetModel) -> None:
        pass

    def _FreeOwn(self, i: we.FreeOwn) -> None:
        for extent in i.extents:
            self.cluster.memory.free(extent, self.owner)

    def _StageWeights(self, i: we.StageWeights) -> None:
        assert i.task.slot not in self.staged
        self.staged[i.task.slot] = i.units
        assert len(self.staged) <= wm.STAGED_SLOTS
        self._check_weights(i.task)

    def _check_weights(self, task: msgs.SlotTask) -> None:
        for unit, extent in self.staged[task.slot].items():
            spec = self.cluster.spec(task.model).units[unit]
            version = task.version if spec.trainable else 0
            self.cluster.memory.check(extent, ("weights", task.model, unit, version))

    def _write(self, slot: int, content: Any) -> Extent:
        extent = self.cluster.memory.write(self.owner, content)
        self.own[slot].append(extent)
        return extent

    def _Prefetch(self, i: we.Prefetch) -> None:
        assert i.task.slot in self.staged
        assert (i.task.slot, i.microbatch) not in self.prefetched, "brought to the device twice"
        self.prefetched.add((i.task.slot, i.microbatch))
        for key, found in i.inputs.items():
            for extent in found.extents():
                self.cluster.memory.check(extent, key)

    def _RunMicrobatch(self, i: we.RunMicrobatch) -> None:
        task, m, memory = i.task, i.microbatch, self.cluster.memory
        self._check_weights(task)
        scale = self.cluster.optimizer.scales[task.model][task.version] if task.kind == "fused" else 1.0
        assert i.loss_scale == scale, f"{task} was to run under scale {scale}, not {i.loss_scale}"
        for key, found in i.inputs.items():
            for extent in found.extents():
                memory.check(extent, key)
        last = m == task.microbatches[-1]
        if (task.slot, self.owner) in self.cluster.short_of_memory:
            self.tries[task.slot] += 1
            if self.tries[task.slot] == wm.MAX_TRIES - 1 or not self.cluster.random.randrange(3):
                self.cluster.short_of_memory.discard((task.slot, self.owner))
            self.ready.append(we.OutOfMemoryEvent(task.slot, ERROR))
            return
        if task.slot in self.cluster.failing and (last or self.cluster.random.random() < 0.5):
            self.cluster.failing.discard(task.slot)
            self.ready.append(we.SlotFailedEvent(task.slot, ERROR))
            return
        self.ran[task.slot].append((task.call, task.kind, m, task.layers))
        self.cluster.ran.append(self.ran[task.slot][-1])
        start, stop = task.layers
        out = self.copies[task.slot]

        def publish(key: msgs.Key) -> None:
            same = [read for read in i.inputs if is_passed_on(read, key)]
            if same and random.Random(str(key)).random() < 0.4:  # the same when redone
                found = i.inputs[same[0]]
                for extent in found.extents():
                    memory.alias(extent, key)
                out.append(we.PublishedEvent(task.slot, key, found, ()))
            else:
                extent = self._write(task.slot, key)
                out.append(we.PublishedEvent(task.slot, key, payload(extent), (extent,)))

        for position, _ in task.publish:
            publish(("act", task.call, m, position))
        if task.grad_to:
            if i.call.weights[m]:
                publish(("agrad", task.call, m, start))
        if task.kind in ("forward", "fused"):
            for position in range(start, stop):
                if self.cluster.spec(task.model).layers[position].buffers:
                    publish(("buffer", task.call, m, position))
        if stop == len(self.cluster.spec(task.model).layers) and task.kind in ("fused", "infer"):
            out.append(we.LossEvent(task.slot, m, float(m + 1), {}))
            if i.call.wants_output:
                publish(("out", task.call, m))
        self.ready.append(we.LaunchedEvent())

    def _FinishSlot(self, i: we.FinishSlot) -> None:
        task = i.task
        if task.kind in ("fused", "backward"):
            for position in reversed(range(*task.layers)):
                parts = []
                for unit in self.cluster.trainable(task.model, position):
                    if random.Random(f"{task.slot} {position} {unit}").random() < 0.9:  # the same when redone
                        content = ("slab", task.call, task.slot, position, unit)
                        parts.append(msgs.SlabPart(unit, self._write(task.slot, content), (True,)))
                        self.cluster.gave[task.model, task.call, unit].add((task.slot, -position))
                self.copies[task.slot].append(we.SlabEvent(task.slot, position, tuple(parts)))
        self.staged.pop(task.slot)
        self.copies[task.slot]  # a slot that published nothing is done too
        self.finished[task.slot] = i
        self.ready.append(we.LaunchedEvent())

    def _DropSlot(self, i: we.DropSlot) -> None:
        self.prefetched = {place for place in self.prefetched if place[0] != i.task.slot}
        self.staged.pop(i.task.slot, None)
        self.finished.pop(i.task.slot, None)
        self.copies.pop(i.task.slot, None)
        self.dropping.append((i.task.slot, self.own.pop(i.task.slot, [])))
        for entry in self.ran.pop(i.task.slot, []):  # one that is put back runs again from its start
            self.cluster.ran.remove(entry)
            self.cluster.put_back.append(entry)


class Optimizer:
    """The optimizer's machine with a shell that keeps the order of additions."""

    role, owner = "optimizer", "optimizer.1"

    def __init__(self, workers: tuple[str, ...], cluster: Cluster) -> None:
        self.machine = OptimizerMachine(workers)
        self.cluster = cluster
        self.todo: deque[Any] = deque()
        self.sums: dict[tuple[int, int, int], list[Any]] = defaultdict(list)
        self.stepped: dict[tuple[int, int, int], list[Any]] = {}
        """(model, step, unit) -> the slabs that the step used, in order of addition."""
        self.master: dict[tuple[int, int], Extent] = {}
        self.slabs: dict[int, set[Extent]] = defaultdict(set)
        self.scales: dict[int, dict[int, float]] = {}
        """Model -> version -> scale after that many steps, worked out beside the machine."""
        self.trackers: dict[int, int] = {}
        self.skipped: set[tuple[int, int]] = set()
        """(model, step)"""
        self.copies: dict[tuple[int, int], set[int]] = defaultdict(set)
        """(model, save) -> units whose copies lie here."""
        self.kept: dict[tuple[int, bool], dict[int, Extent]] = {}
        """(model, whether after the open iteration's calls) -> position -> copy of the buffers there."""
        self.told: set[Extent] = set()
        self.failing: set[int] = set()
        """Models of which the next gradient, norm or step cannot be worked out."""
        self.failed: set[int] = set()

    def handle(self, *events: Any) -> None:
        opened = [self.cluster.spec(e.model) if isinstance(e, msgs.LoadModelMsg) else e for e in events]
        self.todo.extend(self.machine.handle(*opened))

    def choices(self) -> list[Any]:
        return ["next"] if self.todo else []

    def act(self, choice: Any) -> None:
        instruction = self.todo.popleft()
        if isinstance(instruction, oe.WORK):
            assert instruction.model not in self.failed, f"{instruction} for a model that has failed"
            if instruction.model in self.failing:
                self.failed.add(instruction.model)
                self.cluster.post(self.role, "controller", msgs.RoleFailedMsg(self.role, instruction.model, ERROR))
                self.todo = deque(i for i in self.todo if not (isinstance(i, oe.WORK) and i.model in self.failed))
                self._happened(oe.WorkFailedEvent(instruction.model, "no room"))
                return
        getattr(self, f"_{type(instruction).__name__}")(instruction)

    def _happened(self, event: Any) -> None:
        following = deque(self.machine.handle(event))
        while following and isinstance(following[0], oe.Send):
            self._Send(following.popleft())
        self.todo.extend(following)

    def _Send(self, i: oe.Send) -> None:
        self.cluster.post(self.role, i.role, i.msg)

    def _new_master(self, model: int, unit: int, version: int) -> Extent:
        extent = self.cluster.memory.write(self.owner, ("weights", model, unit, version))
        self.master[model, unit] = extent
        self.slabs[model].add(extent)
        return extent

    def _BuildModel(self, i: oe.BuildModel) -> None:
        extents = tuple(self._new_master(i.msg.model, unit.index, 0) for unit in i.msg.units)
        self.cluster.post(self.role, "controller", msgs.ModelAllocatedMsg(i.msg.model, extents, ()))

    def _FillModel(self, i: oe.FillModel) -> None:
        units = self.cluster.spec(i.model).units
        self._happened(oe.ModelFilledEvent(i.model, tuple(self.master[i.model, unit.index] for unit in units)))
        self.cluster.post(self.role, "controller", msgs.ModelReadyMsg(i.model, self.role))

    def _ForgetModel(self, i: oe.ForgetModel) -> None:
        for extent in self.slabs.pop(i.model, ()):
            self.cluster.memory.free(extent, self.owner)
        self.sums = defaultdict(list, {key: total for key, total in self.sums.items() if key[0] != i.model})
        for head in (False, True):
            self._free_kept(i.model, head)

    def _FreeOwn(self, i: oe.FreeOwn) -> None:
        for extent in i.extents:
            self.cluster.memory.free(extent, self.owner)
            self.told.discard(extent)
            for slabs in self.slabs.values():
                slabs.discard(extent)

    def _read(self, part: msgs.SlabPart) -> Any:
        assert part.extent in self.cluster.memory.live, f"{part} was freed before it was read"
        (content,) = self.cluster.memory.live[part.extent]
        assert content[0] == "slab" and content[4] == part.unit
        return content[1:4]

    def _AddSlab(self, i: oe.AddSlab) -> None:
        call, slot, position = self._read(i.part)
        if "controller" in self.cluster.roles:
            units = self.machine._models[i.model].spec.units
            slots = self.cluster.controller.machine._slots
            if slot in slots and self.machine._models[i.model].spec.asynchronous:
                layers = range(*slots[slot].task.layers)
                read = [u for u in units if u.trainable and not set(u.positions).isdisjoint(layers)]
                share = len(read) / sum(u.trainable for u in units)  # all are of one size
                assert share > 1 / 4, "the weights that the slot read may still be there"
        self.sums[i.model, i.iteration, i.part.unit].append((call, slot, position))

    def _DropSums(self, i: oe.DropSums) -> None:
        for key in [key for key in self.sums if key[:2] == (i.model, i.iteration)]:
            del self.sums[key]

    def _MeasureNorm(self, i: oe.MeasureNorm) -> None:
        finite = self._move_scale(i) if self.cluster.spec(i.model).scaler is not None else True
        self._happened(oe.NormEvent(i.model, i.iteration, 2.0, True, finite))

    def _move_scale(self, i: oe.MeasureNorm) -> bool:
        """Whether the step is to be stepped."""
        scales, spec = self.scales[i.model], self.cluster.spec(i.model)
        used, newest = scales[self.cluster.read[i.model, i.iteration]], scales[i.iteration]
        assert i.inverse == 1 / used
        finite = self.cluster.random.random() < 0.6
        good = self.trackers.get(i.model, 0) + 1 if finite else 0
        if not finite and used == newest:
            newest /= 2
        elif not finite:
            good = self.trackers.get(i.model, 0)
        elif good == spec.scaler.growth_interval:
            newest, good = newest * 2, 0
        scales[i.iteration + 1], self.trackers[i.model] = newest, good
        if not finite:
            self.skipped.add((i.model, i.iteration))
            for unit in spec.units:  # what was version t is version t + 1 too
                version = i.iteration + 1 if unit.trainable else 0
                self.cluster.memory.alias(self.master[i.model, unit.index], ("weights", i.model, unit.index, version))
        return finite

    def _StepUnit(self, i: oe.StepUnit) -> None:
        assert (i.model, i.step) not in self.skipped
        used = list(self.sums.get((i.model, i.step, i.unit), ()))
        self.stepped[i.model, i.step, i.unit] = used
        # the shell repeats the handle of a unit without gradients; a new slab is as right, and checks the version
        extent = self._new_master(i.model, i.unit, i.step + 1)
        self._happened(oe.UnitSteppedEvent(i.model, i.step, i.unit, extent))

    def _CopyUnit(self, i: oe.CopyUnit) -> None:
        if self.cluster.random.random() < 0.05:
            self._happened(oe.CopyFailedEvent(i.model, i.save, "no room"))
            return
        saved = self.cluster.controller.saves.get((i.model, i.save))
        if saved is not None and i.model in self.machine._models:  # else it was torn, and no controller asks for it
            self.cluster.memory.check(self.master[i.model, i.unit], ("weights", i.model, i.unit, saved.step))
        self.copies[i.model, i.save].add(i.unit)
        self.cluster.post(self.role, "controller", msgs.StateMsg(i.model, i.save, "snapshot", (), unit=i.unit))
        self._happened(oe.UnitCopiedEvent(i.model, i.save, i.unit, 1))

    def _FreeCopies(self, i: oe.FreeCopies) -> None:
        if i.unit is not None:
            self.copies[i.model, i.save].discard(i.unit)  # a controller's end may have been faster
        if i.unit is None or not self.copies[i.model, i.save]:
            self.copies.pop((i.model, i.save), None)

    def _RestoreUnit(self, i: oe.RestoreUnit) -> None:
        if i.msg.model not in self.machine._models:
            return  # torn, and given up: the model is about to be forgotten
        model, unit, version = i.msg.model, i.msg.unit, self.machine._models[i.msg.model].restoring.version
        if not self.cluster.spec(model).units[unit].trainable:
            stays = self.master[model, unit]
            self._happened(oe.UnitRestoredEvent(model, i.msg.request, unit, stays, stays if i.previous else None))
            return
        previous = self._new_master(model, unit, version - 1) if i.previous else None
        extent = self._new_master(model, unit, version)
        self._happened(oe.UnitRestoredEvent(model, i.msg.request, unit, extent, previous))

    def _copied(self, extent: Extent, *names: Any) -> Extent:
        """A copy, also known under other names."""
        memory = self.cluster.memory
        assert extent in memory.live, f"{extent} was freed before it was kept"
        copy = memory.write(self.owner, None)
        memory.live[copy] = {*memory.live[extent], *names}
        return copy

    def _free_kept(self, model: int, head: bool) -> None:
        for extent in self.kept.pop((model, head), {}).values():
            self.cluster.memory.free(extent, self.owner)

    def _KeepBuffers(self, i: oe.KeepBuffers) -> None:
        copies = {position: self._copied(found.extents()[0]) for position, found in i.buffers}
        self._free_kept(i.model, i.head)
        self.kept[i.model, i.head] = copies

    def _TakeHead(self, i: oe.TakeHead) -> None:
        self._free_kept(i.model, False)
        self.kept[i.model, False] = self.kept.pop((i.model, True))

    def _KeepOnly(self, i: oe.KeepOnly) -> None:
        for model, slabs in self.slabs.items():
            for extent in slabs.difference(i.versions[model]):
                self.cluster.memory.free(extent, self.owner)
            slabs &= set(i.versions[model])
            if model not in i.iterations:
                self._free_kept(model, True)
        kept = set(i.iterations.items())
        self.sums = defaultdict(list, {key: total for key, total in self.sums.items() if key[:2] in kept})
        self.copies.clear()
        for extent in self.told:
            self.cluster.memory.free(extent, self.owner)
        self.told.clear()

    def _TellModels(self, i: oe.TellModels) -> None:
        found = []
        for row, state in i.rows:
            buffers = []
            for head in (False, True):
                kept = self.kept.get((row.model, head), {})
                place = head_place(row.model) if head else (-row.model, 0)
                copies = {p: self._copied(extent, ("buffer", *place, p)) for p, extent in kept.items()}
                self.told.update(copies.values())
                buffers.append(tuple((p, payload(extent)) for p, extent in sorted(copies.items())))
            found.append(replace(state, buffers=buffers[0], head=buffers[1]))
        self.cluster.states = found

    def _StartClock(self, i: oe.StartClock) -> None:
        pass

    def _FinishStep(self, i: oe.FinishStep) -> None:
        self.cluster.post(self.role, "controller", i.msg)


@dataclass
class Saved:
    """A save in progress."""

    step: int
    units: int
    begun: bool = False
    copied: list[int] = field(default_factory=list)
    written: set[int] = field(default_factory=set)


class Controller:
    """The controller's machine; the futures are plain tables."""

    role = "controller"

    def __init__(self, workers: tuple[str, ...], cluster: Cluster, incarnation: int = 1, **settings: Any) -> None:
        self.owner, self.incarnation = f"controller.{incarnation}", incarnation
        limit = cluster.max_task_failures
        self.machine = ControllerMachine(workers, self.owner, max_task_failures=limit, check=True, **settings)
        self.cluster = cluster
        self.kept: set[int] = set()
        """Models of which what is open is kept."""
        self.finished: dict[int, ev.FinishCall] = {}
        self.steps: list[tuple[int, int]] = []
        self.tasks_done: set[int] = set()
        """Slots of calls without a plan that have committed."""
        self.failures: list[ev.ReportFailure] = []
        self.cancelled: set[int] = set()
        self.rewound: list[tuple[int, int]] = []
        self.ended = False
        self.shortages = 0
        self.saves: dict[tuple[int, int], Saved] = {}
        """(model, save) -> what the writer has of a save that is not over."""
        self.saved: list[tuple[int, int]] = []
        self.restored: set[tuple[int, int]] = set()
        self.redone = 0
        self.allocated: dict[int, msgs.ModelAllocatedMsg] = {}

    def handle(self, *events: Any) -> None:
        for event in events:
            if isinstance(event, msgs.ModelAllocatedMsg):
                self.allocated[event.model] = event
            if isinstance(event, msgs.StateMsg):
                if (event.model, event.request) in self.saves:
                    self.saves[event.model, event.request].copied.append(event.unit)
            elif isinstance(event, msgs.SnapshotFailedMsg):
                if self.saves.pop((event.model, event.save), None) is not None:
                    self.handle(ev.SaveOverEvent(event.model, event.save))
            elif isinstance(event, msgs.SnapshotBegunMsg):
                if (event.model, event.save) in self.saves:
                    self.saves[event.model, event.save].begun = True
            elif isinstance(event, sc.KeptMsg):
                self.kept.add(event.model)
            elif isinstance(event, msgs.RestoredMsg):
                self.restored.add((event.model, event.unit))
            elif self.machine.understands(event):
                for instruction in self.machine.handle(event):
                    getattr(self, f"_{type(instruction).__name__}")(instruction)

    def choices(self) -> list[Any]:
        """Saves for which the writer can do something."""
        return [choice for choice, saved in self.saves.items() if saved.copied or self._has_everything(*choice)]

    def _has_everything(self, model: int, save: int) -> bool:
        saved = self.saves[model, save]
        here = saved.begun and len(saved.written) >= saved.units
        return here and self.machine.saved_buffers(model, save) is not None

    def act(self, choice: Any) -> None:
        """The writer writes a copied unit, or ends a save that has everything."""
        model, save = choice
        saved = self.saves[choice]
        if saved.copied:
            unit = saved.copied.pop()
            saved.written.add(unit)
            self.cluster.post(self.role, "optimizer", msgs.SnapshotWrittenMsg(model, save, unit))
            return
        buffers = self.machine.saved_buffers(model, save)
        assert buffers is not None
        for position, found in buffers.items():
            key = ("buffer", *self.machine._checkpoints.start(model, save), position)
            for extent in found.extents():
                self.cluster.memory.check(extent, key)
        for versions, number in zip(self.machine.saved_weights(model, save), (saved.step, saved.step - 1), strict=True):
            for unit, extent in versions.items():
                if self.cluster.spec(model).units[unit].trainable:
                    self.cluster.memory.check(extent, ("weights", model, unit, number))
        del self.saves[choice]
        self.saved.append(choice)
        self.handle(ev.SaveOverEvent(model, save))

    def _DropSave(self, i: ev.DropSave) -> None:
        del self.saves[i.model, i.save]
        self.handle(ev.SaveOverEvent(i.model, i.save))

    def _Send(self, i: ev.Send) -> None:
        self.cluster.post(self.role, i.role, i.msg)

    def _FreeOwn(self, i: ev.FreeOwn) -> None:
        for extent in i.extents:
            self.cluster.memory.free(extent, self.owner)

    def _FinishCall(self, i: ev.FinishCall) -> None:
        assert i.call not in self.finished and i.call not in self.cancelled
        self.finished[i.call] = i

    def _FinishTask(self, i: ev.FinishTask) -> None:
        assert i.slot not in self.tasks_done
        assert i.call not in self.cancelled, "who waits for it has been told that it is cancelled"
        self.tasks_done.add(i.slot)

    def _FinishStep(self, i: ev.FinishStep) -> None:
        self.steps.append((i.model, i.msg.step))

    def _ReportFailure(self, i: ev.ReportFailure) -> None:
        self.failures.append(i)
        self.cancelled.update(i.calls)

    def _NoteTimes(self, i: ev.NoteTimes) -> None:
        pass

    def _NoteShortage(self, i: ev.NoteShortage) -> None:
        self.shortages += 1

    def _NoteRedone(self, i: ev.NoteRedone) -> None:
        assert i.slots > 0
        self.redone += i.slots

    def _ReleaseOwner(self, i: ev.ReleaseOwner) -> None:
        assert i.owner in self.cluster.dead
        self.cluster.adopted.append(i.owner)
        self.cluster.memory.free_all(i.owner)

    def _EndRun(self, i: ev.EndRun) -> None:
        self.ended = True

    def _FinishCancel(self, i: ev.FinishCancel) -> None:
        self.rewound.append((i.model, i.iteration))


REPEATED = (
    msgs.WeightsReadyMsg,
    msgs.DataReadyMsg,
    msgs.SlabReadyMsg,
    msgs.SlabDoneMsg,
    msgs.SlotCommittedMsg,
    msgs.SlotFailedMsg,
    msgs.CancelledMsg,
    msgs.StepDoneMsg,
)
"""What a peer must bear to get twice."""

ERROR = msgs.ErrorInfo(b"", "ValueError", "boom", "", ())


class Cluster:
    """All roles and the links between them."""

    def __init__(self, num_workers: int, seed: int, *, max_task_failures: int = 2) -> None:
        self.random = random.Random(seed)
        self.max_task_failures = max_task_failures
        self.memory = Memory()
        self.links: dict[tuple[str, str], deque[Any]] = {}
        """(sender, receiver), both with their incarnation."""
        self.failing: set[int] = set()
        self.short_of_memory: set[tuple[int, str]] = set()
        """(slot, worker with its incarnation) that will not have enough device memory."""
        self.read: dict[tuple[int, int], int] = {}
        """(model, iteration) -> the version that it reads."""
        self.dead: list[str] = []
        self.adopted: list[str] = []
        self.starting: dict[str, int] = {}
        """Replacements on their way."""
        self.met: dict[str, dict[str, int]] = defaultdict(dict)
        """What each process takes to be the incarnation of a role; messages of older ones are dropped."""
        self.ran: list[tuple[int, str, int, tuple[int, int]]] = []
        self.put_back: list[tuple[int, str, int, tuple[int, int]]] = []
        """What ran and was dropped: it runs again, unless its worker dies after it has published all of it."""
        self.gave: dict[tuple[int, int, int], set[tuple[int, int]]] = defaultdict(set)
        self._specs: dict[int, msgs.ModelSpec] = {}
        self.states: list[sc.ModelState] = []
        """What the optimizer last told of its models."""
        self.waits_for: set[str] = set()
        self.was_settled = True
        """Whether the optimizer could finish every sealed step of the last controller."""
        self.retired: set[str] = set()
        names = tuple(f"worker-{index}" for index in range(num_workers))
        self.controller = Controller(names, self)
        self.optimizer = Optimizer(names, self)
        self.names = names
        self.again: list[tuple[tuple[str, str], Any]] = []
        """Messages that will be sent once more."""
        self.roles: dict[str, Any] = {"controller": self.controller, "optimizer": self.optimizer}
        self.roles.update({name: Worker(name, names, self) for name in names})
        self._calls = itertools.count(1)

    def spec(self, model: int) -> msgs.ModelSpec:
        return self._specs[model]

    def trainable(self, model: int, position: int) -> list[int]:
        spec = self.spec(model)
        return [unit for unit in spec.layers[position].units if spec.units[unit].trainable]

    @property
    def workers(self) -> list[Worker]:
        return [self.roles[name] for name in self.names if name in self.roles]

    def name_of(self, role: str) -> str:
        """A living role with its incarnation."""
        return f"{role}.{getattr(self.roles.get(role), 'incarnation', 1)}"

    def post(self, sender: str, receiver: str, msg: Any) -> None:
        sender = self.name_of(sender)
        incarnation = self.met[sender].get(receiver, 1)
        link = (sender, f"{receiver}.{incarnation}")
        self.links.setdefault(link, deque()).append(msg)
        if isinstance(msg, REPEATED) and self.random.random() < 0.05:
            self.again.append((link, msg))

    def _deliver(self, link: tuple[str, str]) -> None:
        msg = self.links[link].popleft()
        (sender, _, number), (receiver, _, _) = link[0].rpartition("."), link[1].rpartition(".")
        met = self.met[link[1]]
        if int(number) < met.get(sender, 1):
            return
        if sender == "controller":
            met[sender] = int(number)
        if isinstance(msg, sc.ResetMsg):
            met.update(msg.roles, controller=msg.incarnation)
            if receiver != "optimizer":
                self.reset(receiver, msg.incarnation)
                return
        if isinstance(msg, msgs.FenceMsg):
            met[msg.role] = msg.incarnation
        elif isinstance(msg, msgs.RoleDiedMsg):
            met[msg.role] = msg.incarnation + 1
        self.roles[receiver].handle(msg)

    def _can_deliver(self, link: tuple[str, str]) -> bool:
        receiver = link[1].rpartition(".")[0]
        return bool(self.links[link]) and receiver in self.roles and self.name_of(receiver) == link[1]

    def kill(self, role: str, *, restarts: bool = True, running: bool = True) -> None:
        """End a worker; of what it has sent on each link the last part may be lost."""
        if not restarts:
            self.retired.add(role)
        worker = self.roles.pop(role)
        name = worker.owner
        self.dead.append(name)
        for link, queue in self.links.items():
            if link[1] == name:
                queue.clear()
            elif link[0] == name:
                while queue and self.random.random() < 0.7:
                    queue.pop()
        self.again = [entry for entry in self.again if name not in entry[0]]
        busy = worker.machine._busy
        slots = (busy,) if running and busy is not None and busy not in worker.finished else ()
        died = msgs.RoleDiedMsg(role, worker.incarnation, 1, "killed", restarts, slots)
        self._tell("controller", died)
        if restarts:
            self.starting[role] = worker.incarnation + 1

    def succeed(self, *, lossy: bool = True) -> None:
        """The controller dies; the launcher lets the optimizer finish, has everybody reset, and a new one goes on."""
        old = self.controller
        for link, queue in self.links.items():
            if link[1] == old.owner:
                queue.clear()
            elif lossy and link[0] == old.owner:
                while queue and self.random.random() < 0.5:
                    queue.pop()
        self.again = [entry for entry in self.again if old.owner not in entry[0]]
        del self.roles["controller"]
        links = self.links.setdefault(("launcher.1", "controller.1"), deque())
        news = [*links]  # of deaths, for a controller that is no more
        links.clear()
        if lossy:
            self.settle(self.random.choice([0, 10, 100]))
        else:
            mine = [link for link in self.links if link[0] == old.owner]
            self.settle_until(lambda: not any(self._can_deliver(link) for link in mine))
        self._tell("optimizer", sc.ControllerGoneMsg(old.incarnation))
        answers = self.links.setdefault(("optimizer.1", "launcher.1"), deque())
        self.settle_until(lambda: sc.SettledMsg(old.incarnation) in answers)
        self.was_settled = sc.SettledMsg(old.incarnation) in answers
        while self.starting:
            self.start(next(iter(self.starting)))
        for msg in news:
            if isinstance(msg, msgs.RoleDiedMsg) and not msg.restarts:
                self.retired.add(msg.role)
        present = {role: worker.incarnation for role, worker in self.roles.items() if role != "optimizer"}
        number = old.incarnation + 1
        self.waits_for = set(self.roles)
        reset, done = sc.ResetMsg(number, present, tuple(self.retired)), sc.ResetDoneMsg("optimizer", number)
        for role in present:
            self._tell(role, reset)
        self.settle_until(lambda: self.waits_for == {"optimizer"})
        self._tell("optimizer", reset)
        self.settle_until(lambda: done in answers)
        assert done in answers, "the optimizer never answers a reset"
        answers.clear()
        self.links["launcher.1", "controller.1"].clear()
        for owner in {extent.owner for extent in self.memory.live} - {self.optimizer.owner}:
            self.memory.free_all(owner)
        self.dead, self.adopted = [], []
        settings: Any = {"incarnations": present, "retired": self.retired, "first_slot": old.machine.next_slot}
        self.controller = self.roles["controller"] = Controller(self.names, self, number, **settings)
        self.met[self.controller.owner].update(present)
        self.post("controller", "optimizer", sc.ReadModelsMsg("controller", True))
        self.settle()
        for state in self.states:
            self._find(state)

    def _tell(self, role: str, msg: Any) -> None:
        self.links.setdefault(("launcher.1", self.name_of(role)), deque()).append(msg)

    def reset(self, role: str, incarnation: int) -> None:
        """A worker forgets everything."""
        worker = self.roles[role]
        self.roles[role] = Worker(role, self.names, self, worker.incarnation)
        self.waits_for.discard(role)

    def settle_until(self, done: Callable[[], bool]) -> None:
        """Advance until something is so, or nothing can happen."""
        while not done() and self.advance():
            pass

    def _find(self, state: sc.ModelState) -> None:
        """The new controller takes a model over."""
        spec, scales = self.spec(state.model), dict(state.scales)
        nothing = TensorHandle(Extent(self.optimizer.owner, "x", 0, 1), 0, (1,), (1,), "uint8")
        self.controller.handle(ev.ModelFoundEvent(msgs.LoadModelMsg(state.model, nothing)))
        self.settle()
        layers = tuple(layer.units for layer in spec.layers)
        self.controller.handle(
            ev.ModelAddedEvent(
                spec.model, spec.units, layers, state.buffers, spec.recompute, spec.asynchronous, state.master,
                scales.get(state.version, 1.0), state,
            )
        )  # fmt: skip

    def start(self, role: str) -> None:
        """A replacement is ready."""
        incarnation = self.starting.pop(role)
        self.roles[role] = Worker(role, self.names, self, incarnation)
        ready = msgs.RoleReadyMsg(role, incarnation, {})
        self._tell("controller", ready)

    def advance(self) -> bool:
        """One random thing that can happen happens; False: nothing can."""
        if "controller" in self.roles and self.controller.ended:
            return False  # the client tells the script, and the session goes
        choices: list[Any] = [("link", link) for link in self.links if self._can_deliver(link)]
        choices += [("act", name, choice) for name, role in self.roles.items() for choice in role.choices()]
        choices += [("again", repeated) for repeated in self.again]
        choices += [("start", role) for role in self.starting]
        if not choices:
            return False
        kind, *rest = self.random.choice(choices)
        if kind == "again":
            link, msg = rest[0]
            self.again.remove(rest[0])
            self.links[link].append(msg)
        elif kind == "link":
            self._deliver(rest[0])
        elif kind == "start":
            self.start(rest[0])
        else:
            self.roles[rest[0]].act(rest[1])
        return True

    def settle(self, steps: int | None = None) -> None:
        """Advance until nothing can happen, or `steps` times."""
        for _ in itertools.count() if steps is None else range(steps):
            if not self.advance():
                return

    # --- the script

    def load(self, spec: msgs.ModelSpec, meanwhile: Callable[[], None] = lambda: None) -> None:
        """As the script does it; `meanwhile` is called while the roles load."""
        self._specs[spec.model] = spec
        scale = 1.0 if spec.scaler is None else spec.scaler.scale
        self.optimizer.scales[spec.model] = defaultdict(lambda: 1.0) if spec.scaler is None else {0: scale}
        nothing = TensorHandle(Extent(self.controller.owner, "x", 0, 1), 0, (1,), (1,), "uint8")
        self.controller.handle(ev.ModelLoadingEvent(msgs.LoadModelMsg(spec.model, nothing)))
        meanwhile()
        self.settle()
        extents = self.controller.allocated[spec.model].master
        self.post("controller", "optimizer", msgs.ModelFilledMsg(spec.model))
        meanwhile()
        buffers = []
        for position, layer in enumerate(spec.layers):
            if layer.buffers:
                extent = self.memory.write(self.controller.owner, ("buffer", -spec.model, 0, position))
                buffers.append((position, payload(extent)))
        self.controller.handle(
            ev.ModelAddedEvent(
                spec.model,
                spec.units,
                tuple(layer.units for layer in spec.layers),
                tuple(buffers),
                spec.recompute,
                spec.asynchronous,
                extents,
                scale,
            )
        )

    def call(
        self,
        model: int,
        plan: ExecutionPlan | None,
        weights: list[float],
        inference: bool = False,
        output: bool = False,
    ) -> int:
        """A call under a plan; None: its tasks are submitted one by one."""
        call = next(self._calls)
        machine = self.controller.machine
        self.read[model, machine.iteration(model)] = machine.version_read(model)
        write = self.memory.write
        owner = self.controller.owner
        inputs = tuple(payload(write(owner, ("act", call, m, 0))) for m in range(len(weights)))
        labels = tuple(payload(write(owner, ("label", call, m))) for m in range(len(weights)))
        self.controller.handle(
            ev.CallEvent(
                call,
                model,
                plan,
                inputs,
                labels,
                tuple((weight, sum(weights)) for weight in weights),
                tuple(weights),
                1.0,
                {},
                inference,
                output,
            )
        )
        return call

    def save(self, model: int) -> None:
        """Save what the open iteration starts from; there may be room for one copy only."""
        save, machine = next(self._calls), self.controller.machine
        units = sum(unit.trainable for unit in self.spec(model).units)
        self.controller.saves[model, save] = Saved(machine.iteration(model), units)
        self.controller.handle(ev.SaveEvent(model, save, self.random.choice([1, 2, 100])))

    def restore(self, model: int) -> None:
        """Load weights from nowhere; nothing runs."""
        call, spec = next(self._calls), self.spec(model)
        buffers = []
        for position, layer in enumerate(spec.layers):
            if layer.buffers:
                extent = self.memory.write(self.controller.owner, ("buffer", call, 0, position))
                buffers.append((position, payload(extent)))
        previous = spec.asynchronous and self.random.random() < 0.5
        step = self.random.choice([None, 3])
        self.controller.handle(ev.RestoreEvent(model, call, step, 7, tuple(buffers), previous))
        version = self.controller.machine.iteration(model)
        if spec.scaler is not None:
            scales = self.optimizer.scales[model]
            scales[version] = scales[version - 1] = scales[max(scales)]
        self.post("controller", "optimizer", msgs.RestoreMsg(model, call, version, previous))
        for unit in spec.units:
            self.post("controller", "optimizer", msgs.RestoreUnitMsg(model, call, unit.index, ()))


def make_spec(model: int, rng: random.Random, num_layers: int, *, asynchronous: bool, grain: str) -> msgs.ModelSpec:
    """A random model: trainable and frozen units, layers without parameters, a shared parameter, buffers."""
    units: list[msgs.UnitSpec] = []
    layer_units: list[list[int]] = [[] for _ in range(num_layers)]

    def add(positions: tuple[int, ...], trainable: bool) -> None:
        param = msgs.ParamSpec(f"p{len(units)}", 0, (1,), "float32", "float32", 0)
        for position in positions:
            layer_units[position].append(len(units))
        units.append(msgs.UnitSpec(len(units), trainable, positions, 4, (param,)))

    for position in range(num_layers):
        for trainable in (True, False):
            if rng.random() < 0.7:
                add((position,), trainable)
    if num_layers > 1 and rng.random() < 0.5:
        add(tuple(sorted(rng.sample(range(num_layers), 2))), True)
    if not any(unit.trainable for unit in units):
        add((0,), True)
    nothing = TensorHandle(Extent("controller.1", "x", 0, 1), 0, (1,), (1,), "uint8")
    layers = tuple(
        msgs.LayerSpec(str(p), "Layer", msgs.CodeObject(nothing, ()), tuple(found), rng.random() < 0.3)
        for p, found in enumerate(layer_units)
    )
    scaler = msgs.ScalerState(2.0**16, 2.0, 0.5, rng.choice([1, 2, 3]), 0) if rng.random() < 0.5 else None
    return msgs.ModelSpec(model, "m", layers, tuple(units), None, None, 0, grain, asynchronous, False, 0, (), scaler)


def random_plan(rng: random.Random, num_layers: int) -> ExecutionPlan:
    """Any legal plan."""

    def cut(stop: int) -> list[range]:
        bounds = sorted({0, stop, *(rng.randrange(stop + 1) for _ in range(rng.randrange(4)))})
        return [range(a, b) for a, b in itertools.pairwise(bounds)]

    fused = rng.randrange(num_layers)
    backward = [range(fused, num_layers), *reversed(cut(fused))]
    return ExecutionPlan(cut(fused), backward, rng.choice([None, 1, 2, 3]))
