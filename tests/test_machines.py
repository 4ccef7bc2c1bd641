"""The three machines together, under every order of events that the network and the devices allow."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rpruntime.control import events as ev
from rpruntime.control.machine import ControllerMachine
from rpruntime.optimizer.events import (
    AddSlab,
    DropSums,
    ForgetModel,
    KeepBuffers,
    ModelFilledEvent,
    ReadState,
    Send,
    StepUnit,
    UnitSteppedEvent,
    WorkFailedEvent,
)
from rpruntime.optimizer.machine import OptimizerMachine
from rpruntime.schedule.plan import ExecutionPlan
from rpruntime.store.handle import Extent
from rpruntime.wire import messages as msgs
from rpruntime.wire import succession as sc
from tests.cluster import ERROR, Cluster, make_spec, payload, random_plan
from tests.examples import examples


class Script:
    """A random training script on a cluster, with the bookkeeping of what must come out."""

    def __init__(
        self, seed: int, *, failures: bool = False, deaths: bool = False, max_task_failures: int = 1000
    ) -> None:
        self.rng = random.Random(seed)
        self.cluster = Cluster(self.rng.randint(1, 4), seed, max_task_failures=max_task_failures)
        self.failures = failures
        self.deaths = deaths
        self.killed = 0
        self.num_layers = self.rng.randint(1, 6)
        self.models = [1] if self.rng.random() < 0.7 else [1, 2]
        for model in self.models:
            spec = make_spec(
                model,
                self.rng,
                self.num_layers,
                asynchronous=self.rng.random() < 0.5,
                grain=self.rng.choice(["stage", "layer"]),
            )
            self.cluster.load(spec, self._maybe_kill if deaths else lambda: None)
        self.stepped: dict[tuple[int, int], tuple[int, ...]] = {}
        """(model, step) -> its calls."""
        self.microbatches: dict[int, list[int]] = {}
        self.inferred: list[int] = []
        self.asked = self.restores = self.successions = self.unsteady = self.lost = 0
        self.starts: dict[tuple[int, int], tuple[int, int]] = {(model, 0): (-model, 0) for model in self.models}
        """(model, iteration) -> whose buffers it starts with."""
        self.kept: dict[int, tuple[int, ...]] = {}
        """Model -> calls whose sums wait for the next controller."""
        self.heads: dict[int, tuple[int, int]] = {}
        """Model -> whose buffers the next call of the open iteration reads."""
        self.num_kept = 0
        self.origins: dict[tuple[int, tuple[int, int]], tuple[int, int]] = {}
        """(model, place that this controller says) -> the place that the one before said."""

    @property
    def machine(self):
        return self.cluster.controller.machine

    def has_ended(self, model: int) -> bool:
        """Whether nothing of a model has to go on."""
        return self.cluster.controller.ended or model in self.cluster.optimizer.failed

    def run(self, actions: int) -> None:
        for _ in range(actions):
            self._act(self.rng.choice(self.models))
            self.cluster.settle(self.rng.choice([0, 0, 5, 50, 500]))
            if self.deaths and self.rng.random() < 0.4:
                self._kill()
            if self.cluster.controller.ended:
                return
        self.cluster.settle()
        if not self.cluster.controller.ended:
            self.check_rest()

    def _maybe_kill(self) -> None:
        self.cluster.settle(self.rng.choice([0, 2, 10]))
        if self.rng.random() < 0.2:
            self._kill()

    def _kill(self) -> None:
        """One worker, sometimes several at once; at least one process is always there or on its way."""
        for worker in self.rng.sample(self.cluster.workers, min(len(self.cluster.workers), self.rng.choice([1, 1, 2]))):
            others = len(self.cluster.workers) + len(self.cluster.starting) - 1
            self.cluster.kill(worker.role, restarts=not others or self.rng.random() < 0.85)
            self.killed += 1
            self.cluster.settle(self.rng.choice([0, 5, 50]))

    def _act(self, model: int) -> None:
        if self.machine.is_cancelling(model):
            return
        kind = self.rng.choice(["call", "call", "step", "infer", "discard", "save", "restore"])
        if kind == "call":
            while len(self.machine.unfinished_steps(model)) > 1:
                if not self.cluster.advance():
                    assert self.has_ended(model), "the step two iterations back never finishes"
                    return
            if not self.machine.is_cancelling(model):
                self._call(model)
        elif kind == "infer":
            output = self.rng.random() < 0.5
            call = self.cluster.call(model, self._plan(), [1.0] * self.rng.randint(1, 3), True, output)
            if output:
                self.inferred.append(call)
        elif kind == "save":
            self.cluster.save(model)
            self.asked += 1
        elif kind == "restore" and self.rng.random() < 0.3:
            self._restore(model)
        elif kind == "step" and self.machine.wanted_calls(model):
            calls = self.machine.wanted_calls(model)
            self.stepped[model, self.machine.iteration(model)] = calls
            self.cluster.controller.handle(ev.StepEvent(model, ({},), self.rng.choice([None, 1.0])))
            self.starts[model, self.machine.iteration(model)] = self._head(model)
        elif kind == "discard" and self.machine.wanted_calls(model):
            while any(self.machine.is_running(call) for call in self.machine.wanted_calls(model)):
                if not self.cluster.advance():
                    assert self.has_ended(model), "a running call never completes"
                    return
            if not self.machine.is_cancelling(model):
                self.cluster.controller.handle(ev.DiscardEvent(model))

    def _restore(self, model: int) -> None:
        """Everything is over first: saves, steps, calls, whose gradients are discarded."""
        self.cluster.settle()
        if self.has_ended(model):
            return
        if self.machine.wanted_calls(model):
            self.cluster.controller.handle(ev.DiscardEvent(model))
        assert not self.machine.unfinished_steps(model) and not self.cluster.controller.saves
        self.cluster.restore(model)
        self.restores += 1
        self.starts[model, self.machine.iteration(model)] = self._head(model)

    def _call(self, model: int) -> None:
        weights = [self.rng.choice([0.0, 1.0, 1.0, 2.0]) for _ in range(self.rng.randint(1, 4))]
        if not any(weights):
            weights[0] = 1.0
        before = self.machine.next_slot
        call = self.cluster.call(model, self._plan(), weights)
        if self.failures and self.rng.random() < 0.15:
            self.cluster.failing.add(self.rng.randrange(before, self.machine.next_slot))
        if self.deaths and self.rng.random() < 0.2:
            slot = self.rng.randrange(before, self.machine.next_slot)
            self.cluster.short_of_memory.update((slot, worker.owner) for worker in self.cluster.workers)
        self.microbatches[call] = [m for m, weight in enumerate(weights) if weight]

    def _plan(self):
        return random_plan(self.rng, self.num_layers)

    def finish(self) -> None:
        """Take the outputs, close the models; nothing may be left anywhere."""
        controller = self.cluster.controller
        for call in self.inferred:
            if call not in controller.cancelled:
                assert len(controller.finished[call].outputs) > 0
                controller.handle(ev.OutputTakenEvent(call))
        self.cluster.settle()
        buried = {owner for grave in self.machine._roster.graves for owner in grave.owners}
        kept = {extent for found in self.cluster.optimizer.kept.values() for extent in found.values()}
        assert {e for e in self.cluster.memory.live if e.owner not in buried} - kept == {
            e for e in self.machine.live_extents() if e.owner not in buried
        }
        for model in self.models:
            controller.handle(ev.ModelRemovedEvent(model))
        self.cluster.settle()
        assert not self.cluster.memory.live
        assert not self.machine.live_extents()
        assert set(self.cluster.adopted) == set(self.cluster.dead)
        assert all(worker.machine.is_idle for worker in self.cluster.workers)
        assert not self.cluster.optimizer.sums
        assert not self.cluster.optimizer.copies and not controller.saves

    def check_rest(self) -> None:
        """Nothing runs: of each unit only versions are left that a call could still read, and no commit waits."""
        assert not any(self.machine._slots.is_held(slot) for slot in self.machine._slots)
        assert self.machine._cancels.is_settled()
        for model in self.models:
            at_most = 2 if self.cluster.spec(model).asynchronous else 1
            assert not self.machine.unfinished_steps(model)
            readable = self.machine._models[model].versions.readable
            assert all(1 <= len(versions) <= at_most for versions in readable.values())

    def succeed(self, *, lossy: bool) -> None:
        """The controller dies and another one goes on: what no step has taken is lost, and so far all is well."""
        cluster, dead = self.cluster, self.cluster.controller
        sealed = {model: self.machine.iteration(model) for model in self.models}
        unheard = cluster.links.get(("launcher.1", "controller.1"))  # a death that it has not heard of, say
        steady = not (cluster.starting or dead.machine._roster.graves or unheard or lossy)
        torn = {m for m in self.models if cluster.optimizer.machine._models[m].torn}
        cluster.succeed(lossy=lossy)
        self.successions += 1
        if not steady:
            self.unsteady += 1
        self.models = [model for model in self.models if self.machine.has_model(model)]
        for model in self.models:
            iteration = self.machine.iteration(model)
            assert iteration <= sealed[model] and (not steady or iteration == sealed[model] or model in torn)
            self.lost += sealed[model] - iteration
            self.check_found(model, iteration)
        for model in self.models:
            start = self.starts[model, self.machine.iteration(model)]
            self.origins[model, (-model, 0)] = start
            self.origins[model, (-model, 1)] = self.heads.get(model, start)
        done = {model: self.machine.iteration(model) for model in self.models}
        self.stepped = {(m, t): calls for (m, t), calls in self.stepped.items() if t < done.get(m, 0)}
        cluster.controller.steps += [place for place in self.stepped if place not in cluster.controller.steps]
        self.microbatches, self.inferred = {}, []

    def _head(self, model: int) -> tuple[int, int]:
        """Whose buffers the next call reads, whichever controller ran it."""
        place = self.machine._models[model].head
        return self.origins.get((model, place), place)

    def detach(self) -> None:
        """As a program does it: it has heard of the end of all calls and steps; gradients may be on their way."""
        cluster = self.cluster
        cluster.settle_until(self._is_heard_of)
        self.kept, self.heads = {}, {}
        for model in self.models:
            self.kept[model] = self.machine.wanted_calls(model)
            self.heads[model] = self._head(model)
            cluster.controller.handle(ev.KeepOpenEvent(model))
        cluster.settle_until(lambda: cluster.controller.kept >= set(self.models))
        assert cluster.controller.kept == set(self.models)
        self.succeed(lossy=False)
        self.num_kept += sum(bool(calls) for calls in self.kept.values())
        self.kept, self.heads = {}, {}

    def _is_heard_of(self) -> bool:
        calls = [call for model in self.models for call in self.machine.wanted_calls(model)]
        return not (
            any(self.machine.is_running(call) for call in (*calls, *self.inferred))
            or any(self.machine.is_cancelling(model) or self.machine.unfinished_steps(model) for model in self.models)
            or self.cluster.controller.saves
        )

    def check_found(self, model: int, iteration: int) -> None:
        """The new controller has the newest version and the buffers that belong to it, and what was kept."""
        cluster, state = self.cluster, self.machine._models[model]
        if model in self.heads:
            for position, found in state.buffers(state.head).items():
                cluster.memory.check(found.extents()[0], ("buffer", *self.heads[model], position))
        for unit, extent in self.machine.newest_weights(model).items():
            version = iteration if cluster.spec(model).units[unit].trainable else 0
            cluster.memory.check(extent, ("weights", model, unit, version))
        for position, found in self.machine.newest_buffers(model).items():
            cluster.memory.check(found.extents()[0], ("buffer", *self.starts[model, iteration], position))
        assert self.machine.wanted_calls(model) == self.kept.get(model, ())
        if not cluster.spec(model).asynchronous or not self.machine.wanted_calls(model):
            assert state.version_read() == iteration

    def check_steps(self) -> None:
        """Every step used the gradients of its calls, each once, in the order of dispatch, deepest first."""
        optimizer, cluster = self.cluster.optimizer, self.cluster
        for (model, step), calls in self.stepped.items():
            if set(calls) & cluster.controller.cancelled:
                continue
            assert (model, step) in cluster.controller.steps
            if (model, step) in optimizer.skipped:
                assert not any(key[:2] == (model, step) for key in optimizer.stepped)
                continue
            for unit in cluster.spec(model).units:
                if unit.trainable:
                    expected = [
                        (call, slot, -minus)
                        for call in calls
                        for slot, minus in sorted(cluster.gave[model, call, unit.index], key=self._place)
                    ]
                    assert optimizer.stepped[model, step, unit.index] == expected

    def _place(self, gradient: tuple[int, int]) -> tuple[int, ...]:
        """Of a (slot, minus its position), in the order of additions."""
        return gradient

    def check_work(self) -> None:
        """Every layer ran once forward and, with its weight, once backward, for each micro-batch of each call."""
        for call, active in self.microbatches.items():
            if call in self.cluster.controller.cancelled:
                continue
            entries = [*self.cluster.ran, *(self.cluster.put_back if self.deaths else [])]
            ran = [entry for entry in entries if entry[0] == call]
            count = len(self.cluster.controller.finished[call].losses)
            forward = sorted((m, p) for _, k, m, (a, b) in ran if k in ("forward", "fused") for p in range(a, b))
            backward = sorted((m, p) for _, k, m, (a, b) in ran if k == "backward" for p in range(a, b))
            backward += [(m, p) for _, k, m, (a, b) in ran if k == "fused" and m in active for p in range(a, b)]
            if self.deaths:  # some of it was done again
                forward, backward = sorted(set(forward)), sorted(set(backward))
            assert forward == [(m, p) for m in range(count) for p in range(self.num_layers)]
            assert sorted(backward) == [(m, p) for m in active for p in range(self.num_layers)]


@examples(150)
@given(st.integers(0, 10**9))
def test_any_order_of_events_gives_the_same_sums_and_leaks_nothing(seed):
    script = Script(seed)
    script.run(actions=14)
    script.check_steps()
    script.check_work()
    script.finish()


@examples(150)
@given(st.integers(0, 10**9))
def test_a_failed_call_cancels_what_followed_and_nothing_else(seed):
    script = Script(seed, failures=True)
    script.run(actions=14)
    for failure in script.cluster.controller.failures:
        assert failure.call in failure.calls
    assert len(script.cluster.controller.rewound) == len(script.cluster.controller.failures)
    script.check_steps()
    script.check_work()
    script.finish()


@examples(200)
@given(st.integers(0, 10**9))
def test_workers_that_die_at_any_moment_change_no_sum_and_leak_nothing(seed):
    script = Script(seed, deaths=True)
    script.run(actions=14)
    assert not script.cluster.controller.failures and not script.cluster.controller.ended
    script.check_steps()
    script.check_work()
    script.finish()


@examples(150)
@given(st.integers(0, 10**9), st.sampled_from([1, 2, 1000]))
def test_deaths_and_failures_together(seed, max_task_failures):
    script = Script(seed, failures=True, deaths=True, max_task_failures=max_task_failures)
    script.run(actions=14)
    if script.cluster.controller.ended:
        return  # a dead attempt had handed over all gradients of the iteration that failed: its step was taken
    script.check_steps()
    script.check_work()
    script.finish()


@examples(150)
@given(st.integers(0, 10**9), st.booleans(), st.booleans())
@example(704, False, True)  # it has not heard of a worker's death
@example(1113, True, True)  # it has asked for a save of weights that were being restored
def test_a_controller_that_dies_at_any_moment_loses_what_no_step_has_taken(seed, lossy, deaths):
    script = Script(seed, deaths=deaths)
    for _ in range(script.rng.choice([1, 2, 3])):
        for _ in range(6):
            if script.models:
                script._act(script.rng.choice(script.models))
            script.cluster.settle(script.rng.choice([0, 0, 5, 50, 500]))
            if deaths and script.rng.random() < 0.3:
                script._kill()
        script.succeed(lossy=lossy)
    if script.models:
        script.run(actions=6)
    script.check_steps()
    script.check_work()
    script.finish()


@examples(100)
@given(st.integers(0, 10**9), st.booleans())
@example(3809, False)  # the second one to leave buffers of an open iteration
def test_a_controller_that_detaches_leaves_its_sums_to_the_next_one(seed, deaths):
    script = Script(seed, deaths=deaths)
    for _ in range(3):
        for _ in range(4):
            script._act(script.rng.choice(script.models))
            script.cluster.settle(script.rng.choice([0, 5, 50]))
            if deaths and script.rng.random() < 0.2:
                script._kill()
        script.detach()
    script.run(actions=6)
    script.check_steps()
    script.check_work()
    script.finish()


def types(instructions):
    """Of instructions, and of the messages in them."""
    return [type(i.msg if isinstance(i, Send) else i) for i in instructions]


def two_layers(*, asynchronous=True):
    """A machine with a model of ten layers, and the gradients of the first two in slot 3 of call 7."""
    spec = make_spec(1, random.Random(3), 10, asynchronous=asynchronous, grain="stage")
    machine = OptimizerMachine(("worker-0",))
    machine.handle(spec, ModelFilledEvent(1, tuple(Extent("optimizer.1", "x", n, 4) for n in range(len(spec.units)))))
    slabs = []
    for position in (1, 0):
        (unit,) = [unit for unit in spec.layers[position].units if spec.units[unit].trainable]
        parts = (msgs.SlabPart(unit, Extent("worker-0.1", "y", unit, 4), (True,)),)
        slabs.append(msgs.SlabReadyMsg(1, 7, 3, position, parts))
    return machine, slabs


TAKEN = [AddSlab, msgs.SlabDoneMsg]


def test_gradients_stay_in_the_workers_memory_until_their_slot_is_over():
    machine, (deep, shallow) = two_layers()
    assert types(machine.handle(deep)) == []  # before the message that announces it
    assert types(machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),)))) == []
    assert types(machine.handle(deep, shallow, shallow)) == [], "told once more, as after a death"
    machine.handle(msgs.StepMsg(1, 0, (7,), ({},), None, (7, 0)))
    out = machine.handle(msgs.SlotOverMsg(1, 7, 3))
    assert types(out)[:4] == TAKEN * 2 and StepUnit in types(out)
    assert [i.part for i in out if isinstance(i, AddSlab)] == [*deep.parts, *shallow.parts]
    assert types(machine.handle(deep)) == []


@pytest.mark.parametrize("asynchronous, num_layers", [(True, 10), (False, 2)])
def test_gradients_of_large_slots_and_without_staleness_are_taken_as_they_come(asynchronous, num_layers):
    machine, (deep, shallow) = two_layers(asynchronous=asynchronous)
    assert types(machine.handle(deep)) == []  # nobody has said which layers its slot has
    assert types(machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, num_layers),)))) == TAKEN
    assert types(machine.handle(shallow)) == TAKEN


def test_a_gradient_that_is_repeated_after_its_call_was_left_to_the_next_controller_is_not_held():
    machine, (deep, shallow) = two_layers()
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),)), deep, shallow, msgs.SlotOverMsg(1, 7, 3))
    model = machine._models[1]
    model.sums = model.sums.left_by((7,), 0)
    assert types(machine.handle(deep)) == [] and not model.sums.stop_holding()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_units_are_stepped_one_at_a_time_the_deepest_first_when_asynchronous(asynchronous):
    machine, slabs = two_layers(asynchronous=asynchronous)
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),)), *slabs, msgs.SlotOverMsg(1, 7, 3))
    out, stepped = machine.handle(msgs.StepMsg(1, 0, (7,), ({},), None, (7, 0))), []
    while units := [i.unit for i in out if isinstance(i, StepUnit)]:
        stepped += units
        assert len(units) == 1
        out = machine.handle(UnitSteppedEvent(1, 0, units[0], Extent("optimizer.1", "z", units[0], 4)))
    units = machine._models[1].spec.units
    places = [units[unit].positions[0] for unit in stepped]
    assert places == sorted(places, reverse=asynchronous) and len(set(places)) > 2
    assert set(stepped) == {unit.index for unit in units if unit.trainable}


def test_a_failed_evaluation_beside_a_call_that_is_given_task_by_task_loses_no_gradient():
    machine, (deep, shallow) = two_layers()
    machine.handle(deep, msgs.SlotOverMsg(1, 7, 3))  # it is announced when its last task is given
    machine.handle(msgs.CancelMsg(1, 8, 8), msgs.SlotOverMsg(1, 7, 4))
    taken = types(machine.handle(shallow, msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),))))
    assert taken == TAKEN * 2 and machine._models[1].sums.have_come((7,))


def test_what_comes_late_of_a_cancelled_call_goes_with_the_next_step():
    machine, (deep, shallow) = two_layers()
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),)), deep, msgs.CancelMsg(1, 7, 7))
    assert types(machine.handle(shallow)) == [] and not machine._models[1].sums.calls
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 8, ()), msgs.DiscardMsg(1, (8,)))
    assert machine._models[1].sums._calls == {} and types(machine.handle(deep)) == []


def test_a_slot_may_be_over_before_its_call_is_announced_or_its_gradients_have_come():
    machine, (deep, shallow) = two_layers()
    assert types(machine.handle(deep, msgs.SlotOverMsg(1, 7, 3))) == []
    assert types(machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),)))) == TAKEN
    assert types(machine.handle(shallow)) == TAKEN


def test_gradients_of_a_sealed_step_are_taken_when_nobody_tells_any_more_which_slots_are_over():
    machine, (deep, shallow) = two_layers()
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),)), msgs.StepMsg(1, 0, (7,), ({},), None, (7, 0)), deep)
    assert types(machine.handle(sc.ControllerGoneMsg(1))) == TAKEN
    out = types(machine.handle(shallow))
    assert out[:2] == TAKEN and StepUnit in out


def test_gradients_that_wait_for_their_slot_are_let_go_when_nobody_wants_them():
    machine, (deep, shallow) = two_layers()
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),)), deep)
    assert types(machine.handle(msgs.DiscardMsg(1, (7,)))) == [DropSums, msgs.SlabDoneMsg]
    assert types(machine.handle(shallow)) == [msgs.SlabDoneMsg]
    machine, (deep, shallow) = two_layers()
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),)), deep)
    assert types(machine.handle(msgs.CancelMsg(1, 7, 7))) == [DropSums, msgs.CancelledMsg]
    assert types(machine.handle(shallow, msgs.ExpectSlabsMsg(1, 0, 8, ((4, 0, 2),)))) == []
    eighth = [dataclasses.replace(slab, call=8, slot=4) for slab in (deep, shallow)]
    assert types(machine.handle(*eighth, msgs.SlotOverMsg(1, 8, 4))) == TAKEN * 2


def test_gradients_are_kept_when_all_have_come_whatever_link_is_faster():
    spec = make_spec(1, random.Random(3), 2, asynchronous=False, grain="stage")
    assert [sum(spec.units[unit].trainable for unit in layer.units) for layer in spec.layers] == [1, 1]
    machine = OptimizerMachine(("worker-0",))
    machine.handle(spec, ModelFilledEvent(1, tuple(Extent("optimizer.1", "x", n, 4) for n in range(len(spec.units)))))
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),)))

    def came(position):
        found = [unit for unit in spec.layers[position].units if spec.units[unit].trainable]
        parts = tuple(msgs.SlabPart(unit, Extent("worker-0.1", "y", unit, 4), (True,)) for unit in found)
        return types(machine.handle(msgs.SlabReadyMsg(1, 7, 3, position, parts)))

    assert came(1) == [AddSlab, msgs.SlabDoneMsg]
    assert machine.handle(sc.KeepOpenMsg(1, (7,), 1, ())) == []
    assert machine.handle(msgs.SlotOverMsg(1, 7, 3)) == []
    assert came(0) == [AddSlab, msgs.SlabDoneMsg, KeepBuffers, sc.KeptMsg]
    assert machine.handle(sc.KeepOpenMsg(1, (7,), 1, ()))[-1] == Send("controller", sc.KeptMsg(1)), "all are here"


def test_what_an_older_controller_has_left_goes_with_the_iteration_that_is_given_up():
    given_up = 0
    for seed in range(40):
        script = Script(seed)
        for _ in range(4):
            script._act(script.rng.choice(script.models))
        script.cluster.settle()
        left = {model: script.machine.wanted_calls(model) for model in script.models}
        script.detach()
        for model in script.models:
            if left[model]:
                call = script.cluster.call(model, None, [1.0])
                assert script.machine.open_calls(model) == (*left[model], call)
                script.cluster.controller.cancelled.update(script.machine.open_calls(model))
                script.cluster.controller.handle(ev.AbandonEvent(model, False))
                script.cluster.settle()
                assert script.machine.wanted_calls(model) == ()
                given_up += 1
        script.finish()
    assert given_up >= 10


def test_controllers_do_die_and_detach_with_work_in_hand():
    lost = unsteady = kept = 0
    for seed in range(25):
        script = Script(seed)
        for lossy in (False, True):
            for _ in range(5):
                if script.models:
                    script._act(script.rng.choice(script.models))
                script.cluster.settle(5)
            script.succeed(lossy=lossy)
        for _ in range(6):
            if script.models:
                script._act(script.rng.choice(script.models))
        script.detach()
        lost, unsteady, kept = lost + script.lost, unsteady + script.unsteady, kept + script.num_kept
        script.finish()
    assert lost >= 1 and unsteady >= 25 and kept >= 5


def test_workers_do_die_with_work_in_hand():
    killed = redone = shortages = joined = 0
    for seed in range(40):
        script = Script(seed, deaths=True)
        script.run(actions=14)
        killed += script.killed
        redone += script.cluster.controller.redone
        shortages += script.cluster.controller.shortages
        joined += sum(worker.incarnation > 1 for worker in script.cluster.workers)
        script.finish()
    assert killed >= 100 and redone >= 100 and shortages >= 5 and joined >= 20


def test_the_end_of_the_last_worker_without_a_replacement_ends_the_run():
    cluster = Cluster(2, 0)
    cluster.load(make_spec(1, random.Random(0), 2, asynchronous=False, grain="stage"))
    cluster.kill("worker-0", restarts=False)
    cluster.settle()
    assert not cluster.controller.ended
    cluster.call(1, ExecutionPlan.one_layer_a_stage(2), [1.0, 1.0])
    cluster.settle(5)
    cluster.kill("worker-1", restarts=False)
    cluster.settle()
    assert cluster.controller.ended


def test_outputs_that_are_being_fetched_outlive_the_failure_of_another_call():
    cluster = Cluster(2, 0)
    cluster.load(make_spec(1, random.Random(0), 2, asynchronous=False, grain="stage"))
    plan = ExecutionPlan.one_layer_a_stage(2)
    trained = cluster.call(1, plan, [1.0])
    fetched = cluster.call(1, plan, [1.0], True, True)
    cluster.settle()
    controller = cluster.controller
    (output,) = controller.finished[fetched].outputs[0].extents()
    cluster.failing.add(controller.machine.next_slot)
    failed = cluster.call(1, plan, [1.0])
    cluster.settle()
    (failure,) = controller.failures
    assert trained in failure.calls and failed in failure.calls and fetched not in failure.calls
    assert output in cluster.memory.live
    controller.handle(ev.OutputTakenEvent(fetched))
    cluster.settle()
    assert output not in cluster.memory.live


def test_a_slot_that_ends_two_processes_is_blamed_once_with_the_first_cause():
    cluster = Cluster(2, 0)
    cluster.load(make_spec(1, random.Random(0), 2, asynchronous=False, grain="stage"))
    call = cluster.call(1, ExecutionPlan.one_layer_a_stage(2), [1.0])
    for number in (1, 2):
        while not any(w.machine._busy == 1 for w in cluster.workers):
            assert cluster.advance()
        role = next(w.role for w in cluster.workers if w.machine._busy == 1)
        cluster.kill(role)
        while cluster.links["launcher.1", "controller.1"]:
            cluster._deliver(("launcher.1", "controller.1"))
        assert len(cluster.controller.failures) == (number == 2)
    cluster.settle()
    (failure,) = cluster.controller.failures
    assert failure.call == call and failure.error.type_name == "WorkerDied"
    assert failure.error.text.startswith("layer 0 (forward) ended 2 processes")
    again = cluster.call(1, ExecutionPlan.one_layer_a_stage(2), [1.0])
    cluster.settle()
    assert again in cluster.controller.finished


@examples(100)
@given(st.integers(0, 10**9))
def test_models_may_be_given_up_at_any_moment(seed):
    script = Script(seed)
    cluster = script.cluster
    for _ in range(12):
        script._act(script.rng.choice(script.models))
        cluster.settle(script.rng.choice([0, 5, 50]))
    for model in script.models:
        cluster.controller.handle(ev.AbandonEvent(model, True))
    while any(script.machine.is_cancelling(model) for model in script.models):
        assert cluster.advance(), "somebody never answers a cancel"
    cluster.settle()
    assert all(not script.machine.is_running(call) for call in script.machine._calls)
    script.inferred = [call for call in script.inferred if call in cluster.controller.finished]
    cluster.optimizer.copies.clear()  # of saves after a step that has been given up; they go with the model
    for model, save in list(cluster.controller.saves):
        assert not cluster.controller._has_everything(model, save), "a save that lacks nothing never ended"
        cluster.controller._DropSave(ev.DropSave(model, save))  # as the pipe does at its end
    script.finish()


@examples(100)
@given(st.integers(0, 10**9))
def test_steps_end_though_evaluations_beside_them_are_given_up(seed):
    """One cancel is one call; what is sealed goes on."""
    script = Script(seed)
    cluster, machine = script.cluster, script.machine
    for _ in range(12):
        script._act(script.rng.choice(script.models))
        cluster.settle(script.rng.choice([0, 5, 50]))
    for model in script.models:
        while True:
            cluster.controller.handle(ev.AbandonEvent(model, False))
            if not machine.is_cancelling(model):
                break
            while machine.is_cancelling(model):
                assert cluster.advance(), "somebody never answers a cancel"
    assert not any(machine.is_running(call) for call in machine._calls if machine._calls[call].event.inference)
    cluster.settle()
    assert all(not machine.unfinished_steps(model) for model in script.models)


@examples(150)
@given(st.integers(0, 10**9), st.booleans())
def test_a_model_of_which_the_optimizer_misses_something_is_never_stepped_again(seed, another_goes_on):
    """Its gradient had no room, say; whoever goes on, or closes it, finds nothing of it."""
    script = Script(seed)
    cluster, optimizer = script.cluster, script.cluster.optimizer
    for _ in range(12):
        whole = [model for model in script.models if model not in optimizer.failed]
        if not whole:
            break
        script._act(script.rng.choice(whole))
        if script.rng.random() < 0.15:
            optimizer.failing.add(script.rng.choice(whole))
        cluster.settle(script.rng.choice([0, 5, 50]))
    optimizer.failing.clear()
    if another_goes_on:
        script.succeed(lossy=script.rng.random() < 0.5)
        assert not optimizer.failed & set(script.models)
    else:
        script.models = [model for model in script.models if model not in optimizer.failed]
        cluster.settle()
        running = [number for number in script.machine._calls if script.machine.is_running(number)]
        assert not running, "others, and what the failed ones had queued before them, come to an end"
        for model in optimizer.failed:  # as the pipe does it
            while True:
                cluster.controller.handle(ev.AbandonEvent(model, True))
                if not script.machine.is_cancelling(model):
                    break
                while script.machine.is_cancelling(model):
                    assert cluster.advance(), "somebody never answers a cancel"
            cluster.controller.handle(ev.ModelRemovedEvent(model))
            for save in [save for of, save in cluster.controller.saves if of == model]:
                cluster.controller._DropSave(ev.DropSave(model, save))
                optimizer.copies.pop((model, save), None)
        script.inferred = [call for call in script.inferred if call in cluster.controller.finished]
    script.stepped = {place: calls for place, calls in script.stepped.items() if place[0] not in optimizer.failed}
    if script.models:
        script.run(actions=4)
    script.check_steps()
    script.finish()


def test_a_step_that_was_to_follow_a_gradient_without_room_is_not_done():
    spec = make_spec(1, random.Random(3), 2, asynchronous=False, grain="stage")
    machine = OptimizerMachine(("worker-0",))
    machine.handle(spec, ModelFilledEvent(1, tuple(Extent("optimizer.1", "x", n, 4) for n in range(len(spec.units)))))
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),)), msgs.StepMsg(1, 0, (7,), ({},), None, (7, 0)))
    parts = tuple(msgs.SlabPart(unit, Extent("worker-0.1", "y", unit, 4), (True,)) for unit in spec.layers[1].units)
    machine.handle(msgs.SlabReadyMsg(1, 7, 3, 1, parts))
    machine.handle(msgs.SlotOverMsg(1, 7, 3))
    machine.handle(WorkFailedEvent(1, "no room"))
    rest = machine.handle(msgs.SlabReadyMsg(1, 7, 3, 0, ()))
    assert [type(i.msg) for i in rest] == [msgs.SlabDoneMsg], "the worker's memory is free all the same"
    assert not any(isinstance(i, StepUnit) for i in machine.handle(msgs.StepMsg(1, 1, (), ({},), None, (7, 0))))
    forgotten = machine.handle(sc.ResetMsg(2, {"worker-0": 1}, ()))
    assert [type(i) for i in forgotten[:1]] == [ForgetModel]


def test_a_question_about_gradients_that_are_discarded_is_dropped():
    spec = make_spec(1, random.Random(3), 2, asynchronous=False, grain="stage")
    machine = OptimizerMachine(("worker-0",))
    machine.handle(spec, ModelFilledEvent(1, tuple(Extent("optimizer.1", "x", n, 4) for n in range(len(spec.units)))))
    machine.handle(msgs.ExpectSlabsMsg(1, 0, 7, ((3, 0, 2),)), msgs.ReadStateMsg(1, 5, "gradients", (7,)))
    machine.handle(msgs.DiscardMsg(1, (7,)), msgs.ExpectSlabsMsg(1, 0, 8, ((4, 0, 2),)))
    answered = machine.handle(msgs.SlabReadyMsg(1, 8, 4, 1, ()), msgs.ReadStateMsg(1, 6, "state"))
    assert [i.msg.request for i in answered if isinstance(i, ReadState)] == [6]


def test_calls_do_fail_in_a_fair_share_of_the_scripts():
    failed = survived = 0
    for seed in range(60):
        script = Script(seed, failures=True)
        script.run(actions=14)
        script.check_steps()
        script.check_work()
        cancelled = script.cluster.controller.cancelled
        failed += bool(cancelled)
        survived += bool(cancelled) and any(not set(calls) & cancelled for calls in script.stepped.values())
        script.finish()
    assert failed >= 20
    assert survived >= 10


def test_a_failed_slot_of_an_unknown_call_is_answered_with_a_cancel():
    cluster = Cluster(2, 0)
    cluster.load(make_spec(1, random.Random(0), 2, asynchronous=False, grain="stage"))
    cluster.controller.handle(msgs.SlotFailedMsg(999, 998, "worker-1", ERROR))
    assert cluster.links["controller.1", "worker-1.1"][-1] == msgs.CancelMsg(1, 998, 998)
    cluster.settle()
    assert not cluster.controller.failures and not cluster.controller.rewound
    assert cluster.controller.machine._cancels.is_settled()


def test_what_a_cancelled_slot_passed_on_of_a_running_call_is_freed_once():
    """Slot 2 passes on slot 1's buffers and commits first; its call is cancelled before slot 1 commits."""
    machine = ControllerMachine(("worker-0", "worker-1"), "controller.1", check=True)
    numbers = itertools.count()

    def room(owner: str) -> Extent:
        return Extent(owner, "s", next(numbers) * 256, 1)

    freed: list[Extent] = []

    def handle(*events):
        for instruction in machine.handle(*events):
            if isinstance(instruction, ev.FreeOwn):
                freed.extend(instruction.extents)
            elif isinstance(instruction, ev.Send) and isinstance(instruction.msg, msgs.FreeMsg):
                freed.extend(instruction.msg.extents)

    def call(number):
        x, y = payload(room("controller.1")), payload(room("controller.1"))
        plan = ExecutionPlan([], [range(1)], None)
        handle(ev.CallEvent(number, 1, plan, (x,), (y,), ((1.0, 1.0),), (1.0,), 1.0, {}))

    param = msgs.ParamSpec("p", 0, (1,), "float32", "float32", 0)
    units = (msgs.UnitSpec(0, True, (0,), 4, (param,)),)
    start = payload(room("controller.1"))
    handle(ev.ModelAddedEvent(1, units, ((0,),), ((0, start),), "stage", True, (room("optimizer.1"),)))
    call(1)
    handle(ev.StepEvent(1, ({},), None))
    call(2)
    call(3)
    buffers, slab, dropped = room("worker-0.1"), room("worker-1.1"), room("worker-0.1")
    handle(msgs.DataReadyMsg(1, ("buffer", 2, 0, 0), payload(buffers), 2))
    handle(msgs.SlabReadyMsg(1, 2, 2, 0, (msgs.SlabPart(0, slab, (True,)),)))
    handle(msgs.SlotCommittedMsg(2, "worker-1"))
    handle(msgs.SlotFailedMsg(3, 3, "worker-0", ERROR))
    for role, extents in (("worker-0", (dropped,)), ("worker-1", ()), ("optimizer", ())):
        handle(msgs.CancelledMsg(1, 2, role, extents))
    assert dropped in freed
    assert buffers not in freed
    handle(msgs.DataReadyMsg(1, ("buffer", 1, 0, 0), payload(buffers), 1))
    handle(msgs.SlotCommittedMsg(1, "worker-0"))
    assert buffers not in freed and slab in freed
    assert buffers in machine.live_extents()
    handle(msgs.StepDoneMsg(1, 0, None, False, 0.0))
    handle(ev.ModelRemovedEvent(1))
    assert buffers in freed
    assert len(freed) == len(set(freed))
    assert not machine.live_extents()


@pytest.mark.slow
@examples(500)
@given(st.integers(0, 10**9), st.booleans(), st.booleans())
@pytest.mark.timeout(900)
def test_many_more_orders(seed, failures, deaths):
    script = Script(seed, failures=failures, deaths=deaths)
    script.run(actions=25)
    script.check_steps()
    script.check_work()
    script.finish()
