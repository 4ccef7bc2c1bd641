"""How a call's work is given out: its slots by a plan, all at once, or task by task as the script submits them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from rpruntime.control.calls import Call, Calls
from rpruntime.control.coverage import Coverage, TaskOrder
from rpruntime.control.events import CallEvent, TasksEvent
from rpruntime.control.lifetimes import Lifetimes
from rpruntime.control.model import Model, Place
from rpruntime.control.models import Models
from rpruntime.control.outbox import Outbox
from rpruntime.control.roster import OPTIMIZER, Roster
from rpruntime.control.slots import Slots
from rpruntime.control.tasks import CallTasks, plan_call, plan_tasks, slabs_in_order
from rpruntime.wire.messages import CallMsg, DataReadyMsg, ExpectSlabsMsg, Key, TaskMsg


class Issuing:
    """Plans slots, registers all that they will read before anything can be freed, and sends them."""

    def __init__(
        self, roster: Roster, models: Models, calls: Calls, slots: Slots, lifetimes: Lifetimes, out: Outbox
    ) -> None:
        self._roster = roster
        self._models = models
        self._calls = calls
        self._slots = slots
        self._lifetimes = lifetimes
        self._out = out

    # --- with a plan

    def on_call(self, event: CallEvent) -> None:
        """A call begins: all its slots are sent at once, or it waits for its tasks."""
        model = self._models[event.model]
        assert event.inference or not self.missing_tasks(event.model)
        if event.plan is None:
            self._open(event, model)
            return
        workers = self._roster.expected
        tasks = self._plan(event, model, workers)
        call = Call(event, model.iteration, _call_msg(event, model, tasks.buffers_from), set(tasks.slots))
        self._calls.add(call)
        self._send(call, model, tasks)
        for key in tasks.outputs:
            self._lifetimes.hold(key, ("output", event.call))
        self._register_reads(model, tasks)
        if not event.inference:
            model.move_head(_last_place(event))
        self._register_slabs(model, tasks)
        self._slots.add(tasks, call.msg)
        self._publish_inputs(event)
        model.first_device = (model.first_device + len(tasks.slots)) % len(workers)
        if not event.inference:
            model.count_in(event.call, len(event.inputs))

    def _plan(self, event: CallEvent, model: Model, workers: tuple[str, ...]) -> CallTasks:
        return plan_call(
            event,
            workers,
            first_slot=self._slots.next_number,
            first_device=model.first_device % len(workers),
            version=model.iteration if event.inference else model.version_read(),
            grain=model.spec.grain,
            buffered=model.buffered(),
            buffers_from=model.open.start if event.inference else model.head,
        )

    def _send(self, call: Call, model: Model, tasks: CallTasks) -> None:
        self._out.send_workers(call.msg)
        if tasks.slabs:
            self._expect_slabs(call, model, tasks.slabs)
        for m, msg in _inputs(call.event):
            for role in tasks.input_readers[m]:
                self._out.send(role, msg)
        for m, msg in _labels(call.event):
            self._out.send(tasks.label_readers[m], msg)
        for slot, task in tasks.slots.items():
            self._out.send(tasks.roles[slot], TaskMsg(task))

    # --- task by task

    def _open(self, event: CallEvent, model: Model) -> None:
        """A call whose tasks are yet to come."""
        active = [weight != 0 for weight in event.weights]
        coverage = Coverage(len(model.spec.layer_units), active, model.buffered())
        call = Call(event, model.iteration, _call_msg(event, model, model.head), coverage=coverage)
        self._calls.add(call)
        self._keep_unread(call, range(len(active)))
        model.move_head(_last_place(event))
        self._publish_inputs(event)
        model.count_in(event.call, len(event.inputs))

    def check_tasks(self, event: TasksEvent) -> Coverage:
        """What a call has with these tasks.

        Raises:
            ConfigError: one of them may not come next; names it. Nothing has changed.
        """
        known = self._calls[event.call].coverage
        assert known is not None
        coverage = known.copy()
        for order in event.tasks:
            coverage.add(order)
        return coverage

    def missing_tasks(self, model: int) -> str:
        """What is still to be submitted of the open iteration's calls, in words; empty: nothing."""
        for number in self._models[model].open.calls:
            coverage = self._calls[number].coverage
            if coverage is not None and not coverage.is_complete:
                return coverage.missing()
        return ""

    def on_tasks(self, event: TasksEvent) -> None:
        """Tasks are submitted together; each goes out now, or when those that it comes after have committed."""
        if not event.tasks:
            return  # the optimizer would be told once more what it has to expect of a complete call
        coverage = self.check_tasks(event)
        call, model = self._calls[event.call], self._models[event.model]
        call.coverage = coverage
        orders = dict(enumerate(event.tasks, self._slots.next_number))
        tasks = plan_tasks(
            call.event,
            orders,
            self._assign(orders, model),
            coverage,
            version=model.version_read(),
            grain=model.spec.grain,
            buffers_from=call.msg.buffers_from,
        )
        call.orders.update(orders)
        call.open_slots.update(orders)
        self._register_reads(model, tasks)
        self._register_slabs(model, tasks)
        self._slots.add(tasks, call.msg, late=True)
        self._keep_unread(call, coverage.touched(event.tasks))
        if coverage.is_complete:
            self._expect_slabs(call, model, slabs_in_order(call.orders))
        for slot, order in orders.items():
            self._slots.wait(slot, order.after)
            self._slots.hand_over(slot)

    def _assign(self, orders: Mapping[int, TaskOrder], model: Model) -> dict[int, str]:
        """Who runs each task: whom it names, or whose turn it is; for a worker that nobody replaces, another one."""
        workers, roles = self._roster.expected, {}
        for slot, order in orders.items():
            if not order.role:
                roles[slot] = workers[model.first_device % len(workers)]
                model.first_device = (model.first_device + 1) % len(workers)
            elif order.role in workers:
                roles[slot] = order.role
            else:
                roles[slot] = workers[self._roster.workers.index(order.role) % len(workers)]
        return roles

    def _keep_unread(self, call: Call, microbatches: Iterable[int]) -> None:
        """Hold what tasks yet to come may read, and let go of what they will not."""
        reader = ("open", call.number)
        for m in microbatches:
            keys = _unread(call, m)
            before, call.unread[m] = call.unread.get(m, set()), keys
            for key in sorted(keys - before):
                self._lifetimes.hold(key, reader)
            for key in sorted(before - keys):
                self._lifetimes.release(reader, key)

    # --- either way

    def _register_reads(self, model: Model, tasks: CallTasks) -> None:
        for slot, task in tasks.slots.items():
            for key in tasks.reads[slot]:
                self._lifetimes.hold(key, slot)
            for position in range(*task.layers):
                for unit in model.spec.layer_units[position]:
                    self._lifetimes.hold(("weights", model.number, unit, task.version), slot)

    def _register_slabs(self, model: Model, tasks: CallTasks) -> None:
        for slot, start, stop in tasks.slabs:
            for position in range(start, stop):
                for unit in model.spec.layer_units[position]:
                    if model.spec.units[unit].trainable:
                        self._lifetimes.hold(("slab", tasks.slots[slot].call, slot, position, unit), OPTIMIZER)

    def _expect_slabs(self, call: Call, model: Model, slabs: tuple[tuple[int, int, int], ...]) -> None:
        version = model.version_read()
        self._out.send(OPTIMIZER, ExpectSlabsMsg(model.number, model.iteration, call.number, slabs, version))

    def _publish_inputs(self, event: CallEvent) -> None:
        for _, msg in (*_inputs(event), *_labels(event)):
            self._lifetimes.provide(msg, self._out.owner)

    def validate(self, cancelling: Container[int]) -> None:
        """What is kept for tasks yet to come is what they may read (tests).

        Args:
            cancelling: models of which calls are being cleared away.
        """
        for number in self._calls:
            call = self._calls[number]
            expected: set[Key] = set()
            for m in range(len(call.event.inputs) if call.coverage is not None else 0):
                expected |= _unread(call, m)
            assert call.model in cancelling or self._lifetimes.reads(("open", number)) == expected


def _last_place(event: CallEvent) -> Place:
    return (event.call, len(event.inputs) - 1)


def _unread(call: Call, m: int) -> set[Key]:
    """What tasks yet to come may read for a micro-batch."""
    assert call.coverage is not None
    has_label = call.event.labels[m] is not None
    return call.coverage.unread(call.number, m, call.msg.buffers_from, has_label=has_label)


def _inputs(event: CallEvent) -> list[tuple[int, DataReadyMsg]]:
    """(micro-batch, where its input is)"""
    return [(m, DataReadyMsg(event.model, ("act", event.call, m, 0), found)) for m, found in enumerate(event.inputs)]


def _labels(event: CallEvent) -> list[tuple[int, DataReadyMsg]]:
    """(micro-batch, where its label is)"""
    return [
        (m, DataReadyMsg(event.model, ("label", event.call, m), found))
        for m, found in enumerate(event.labels)
        if found is not None
    ]


def _call_msg(event: CallEvent, model: Model, buffers_from: Place) -> CallMsg:
    return CallMsg(
        call=event.call,
        model=event.model,
        iteration=model.iteration + model.step_offset,
        num_microbatches=len(event.inputs),
        first_microbatch=model.open.num_microbatches,
        coefficients=event.coefficients,
        weights=event.weights,
        scale=event.scale,
        training=not event.inference,
        has_labels=any(label is not None for label in event.labels),
        wants_output=event.wants_output,
        buffers_from=buffers_from,
        buffers_kept=min(iteration.start[0] for iteration in model.iterations.values()),
        context=event.context,
        seed=model.seed,
        loss_scale=None if event.inference else model.versions.set_scales.get(model.version_read()),
    )
