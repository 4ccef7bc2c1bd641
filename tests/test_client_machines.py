"""Calls whose tasks are submitted one by one, in the machines: every legal order gives the sums of a plan."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rpruntime.control import events as ev
from rpruntime.control.coverage import Coverage, TaskOrder, spelled
from rpruntime.control.tasks import slabs_in_order
from rpruntime.errors import ConfigError
from tests.cluster import Cluster, make_spec
from tests.examples import examples
from tests.test_machines import Script


def a_legal_task(rng: random.Random, done: Coverage, roles: tuple[str, ...], earlier: list[int]) -> TaskOrder:
    """Any task that may come next: written apart from the code that checks it."""
    count, layers = len(done.active), done.num_layers

    def may_go_up(m: int, start: int, stop: int, others: list[int]) -> bool:
        before = m == 0 or m - 1 in others or all(done.forward[m - 1] > p for p in done.buffered if start <= p < stop)
        return done.forward[m] == start and before

    while True:
        kind = rng.choice(["forward", "fused", "backward"])
        m = rng.randrange(count)
        if kind == "backward":
            if done.forward[m] < layers or done.backward[m] == 0:
                continue
            stop = done.backward[m]
            start = rng.randrange(stop)
            able = [n for n in range(count) if done.forward[n] == layers and done.backward[n] == stop]
        else:
            start = done.forward[m]
            if start == layers or (kind == "forward" and start == layers - 1):
                continue
            stop = layers if kind == "fused" else rng.randrange(start + 1, layers)
            able = []
            for n in range(count):
                if may_go_up(n, start, stop, able) and (n == 0 or n - 1 in able or rng.random() < 0.9):
                    able.append(n)
        chosen = able if rng.random() < 0.5 else sorted(rng.sample(able, rng.randint(1, len(able)))) if able else []
        if kind != "backward":
            kept: list[int] = []
            for n in chosen:
                if may_go_up(n, start, stop, kept):
                    kept.append(n)
            chosen = kept
        if not chosen:
            continue
        after = tuple(rng.sample(earlier, min(len(earlier), rng.choice([0, 0, 0, 1, 2]))))
        role = rng.choice(roles) if rng.random() < 0.5 else ""
        return TaskOrder(kind, range(start, stop), tuple(chosen), role, after)


class TaskScript(Script):
    """A script some of whose training calls have no plan; other things happen between two submissions."""

    def __init__(self, seed: int, **settings: bool) -> None:
        self.unfinished: dict[int, int] = {}
        """Model -> its call that lacks tasks."""
        self.first_of: dict[int, int] = {}
        """Slot -> first micro-batch, of calls without a plan."""
        self.submitted: dict[int, list[int]] = {1: [], 2: []}
        """Model -> slots."""
        self.waited = self.passed_on = 0
        super().__init__(seed, **settings)

    def _act(self, model: int) -> None:
        call = self.unfinished.get(model)
        if call is not None and not self.machine.is_known(call):
            call = None
            del self.unfinished[model]
        if call is None:
            super()._act(model)
            return
        if self.machine.is_cancelling(model):
            return
        kind = self.rng.choice(["submit", "submit", "submit", "infer", "save", "abandon"])
        if kind == "submit":
            self._submit(model, call)
        elif kind == "infer":
            self.cluster.call(model, self._plan(), [1.0], True, False)
        elif kind == "save":
            self.cluster.save(model)
            self.asked += 1
        elif self.rng.random() < 0.1:
            lost = self.machine.open_calls(model)
            assert {*self.machine.wanted_calls(model)} <= {*lost}
            self.cluster.controller.handle(ev.AbandonEvent(model, False))
            self.cluster.controller.cancelled.update(lost)

    def _call(self, model: int) -> None:
        if self.rng.random() < 0.4:
            super()._call(model)
            return
        weights = [self.rng.choice([0.0, 1.0, 1.0, 2.0]) for _ in range(self.rng.randint(1, 4))]
        if not any(weights):
            weights[0] = 1.0
        call = self.unfinished[model] = self.cluster.call(model, None, weights)
        self.microbatches[call] = [m for m, weight in enumerate(weights) if weight]

    def _submit(self, model: int, call: int) -> None:
        """Some tasks at once; at times all that are left."""
        coverage = self.machine._calls[call].coverage
        assert coverage is not None
        done, orders = coverage.copy(), []
        first = self.machine.next_slot
        count = self.rng.choice([1, 1, 2, 3, 100])
        while len(orders) < count and not done.is_complete:
            earlier = self.submitted[model][-5:]
            orders.append(a_legal_task(self.rng, done, self.cluster.names, earlier))
            done.add(orders[-1])
        self.cluster.controller.handle(ev.TasksEvent(model, call, tuple(orders)))
        slots = self.machine._slots
        self.waited += sum(slots.is_waiting(slot) for slot in slots)
        self.passed_on += sum(slots[slot].is_late for slot in slots)
        for slot, order in enumerate(orders, first):
            self.first_of[slot] = order.microbatches[0]
            self.submitted[model].append(slot)
        if self.failures and self.rng.random() < 0.1:
            self.cluster.failing.add(self.rng.randrange(first, first + len(orders)))
        if done.is_complete:
            del self.unfinished[model]

    def run(self, actions: int) -> None:
        super().run(actions)
        if self.cluster.controller.ended:
            return
        for model, call in list(self.unfinished.items()):
            while self.unfinished.get(model) == call and self.machine.is_known(call):
                if not self.machine.is_cancelling(model):
                    self._submit(model, call)
                self.cluster.settle(5)
        self.cluster.settle()

    def _place(self, gradient: tuple[int, int]) -> tuple[int, ...]:
        slot, minus = gradient
        return (self.first_of[slot], minus, slot) if slot in self.first_of else gradient

    def check_tasks(self) -> None:
        """Every slot of a call that was not cancelled has been told to be done, once."""
        slots = {slot for slots in self.submitted.values() for slot in slots}
        done = self.cluster.controller.tasks_done
        assert done <= slots
        assert done == slots or self.cluster.controller.cancelled


@examples(150)
@given(st.integers(0, 10**9))
@example(1552)  # buffers of the first call come before the note that the model is new
def test_tasks_submitted_in_any_legal_order_give_the_sums_of_a_plan(seed):
    script = TaskScript(seed)
    script.run(actions=20)
    script.check_steps()
    script.check_work()
    script.check_tasks()
    script.finish()


@examples(150)
@given(st.integers(0, 10**9))
def test_the_same_when_workers_die(seed):
    script = TaskScript(seed, deaths=True)
    script.run(actions=20)
    assert not script.cluster.controller.failures and not script.cluster.controller.ended
    script.check_steps()
    script.check_work()
    script.check_tasks()
    script.finish()


@examples(150)
@given(st.integers(0, 10**9), st.booleans())
@example(799, False)  # inference between two calls of the iteration that is given up
@example(72, False)  # inference before them
def test_failed_tasks_cancel_the_iteration_and_nothing_else(seed, deaths):
    script = TaskScript(seed, failures=True, deaths=deaths)
    script.run(actions=20)
    if script.cluster.controller.ended:
        return  # a dead attempt had handed over all gradients of the iteration that failed: its step was taken
    for failure in script.cluster.controller.failures:
        assert failure.call in failure.calls and failure.slot
    script.check_steps()
    script.check_work()
    script.check_tasks()
    script.finish()


def test_most_calls_without_a_plan_do_come_to_their_end():
    finished = waited = passed_on = 0
    for seed in range(30):
        script = TaskScript(seed)
        script.run(actions=20)
        calls = set(script.machine._calls) | set(script.cluster.controller.finished)
        finished += len(calls & set(script.cluster.controller.finished))
        waited += script.waited
        passed_on += script.passed_on
        script.finish()
    assert finished >= 100 and waited >= 15 and passed_on >= 200


def a_coverage(**settings):
    return Coverage(6, settings.get("active", (True,) * 4), frozenset(settings.get("buffered", ())))


@pytest.mark.parametrize(
    "before, task, reason",
    [
        ([], TaskOrder("sideways", range(2), (0,)), "task sideways 0-1 mb 0: the kind must be one of forward, fused, "),
        ([], TaskOrder("forward", range(0, 4, 2), (0,)), "layers must be a range of consecutive layers"),
        ([], TaskOrder("forward", range(3, 3), (0,)), "layers must be a range of consecutive layers"),
        ([], TaskOrder("fused", range(4, 7), (0,)), "the model has layers 0 to 5"),
        ([], TaskOrder("forward", range(2), ()), "it has no micro-batch"),
        ([], TaskOrder("forward", range(2), (1, 0)), "micro-batches must ascend, each once"),
        ([], TaskOrder("forward", range(2), (0, 0)), "micro-batches must ascend, each once"),
        ([], TaskOrder("forward", range(2), (3, 4)), "the call has micro-batches 0 to 3"),
        ([], TaskOrder("forward", range(6), (0,)), "layer 5, the last one, runs in a fused task"),
        ([], TaskOrder("fused", range(5), (0,)), "a fused task ends with layer 5"),
        ([], TaskOrder("forward", range(2, 4), (0, 1), "worker-1"),
         "task forward 2-3 mb 0-1 dev worker-1: the forward of layer 0 for micro-batch 0 comes before it"),
        ([("forward", 0, 2, 0)], TaskOrder("forward", range(2), (0, 1, 3)),
         "task forward 0-1 mb 0-1,3: layer 0 has its forward for micro-batch 0 already"),
        ([("forward", 0, 2, 0)], TaskOrder("backward", range(2), (0,)), "the fused task of micro-batch 0 comes before"),
        ([("fused", 0, 6, 0)], TaskOrder("backward", range(2), (0,)), "layer 1 has its backward for micro-batch 0"),
        ([("forward", 0, 4, 0), ("fused", 4, 6, 0)], TaskOrder("backward", range(2), (0,)),
         "the backward of layer 3 for micro-batch 0 comes before it"),
    ],
)  # fmt: skip
def test_tasks_that_may_not_come_next_are_refused_by_name(before, task, reason):
    done = a_coverage()
    for kind, start, stop, m in before:
        done.add(TaskOrder(kind, range(start, stop), (m,)))
    as_it_was = done.copy()
    with pytest.raises(ConfigError) as caught:
        done.add(task)
    assert reason in str(caught.value)
    assert (done.forward, done.backward) == (as_it_was.forward, as_it_was.backward)


def test_buffers_pass_from_micro_batch_to_micro_batch():
    done = a_coverage(buffered=[1])
    with pytest.raises(ConfigError, match=r"layer 1 has buffers, .* submit its forward for micro-batch 0 first"):
        done.add(TaskOrder("forward", range(2), (1,)))
    done.add(TaskOrder("forward", range(2), (0, 1)))
    done.add(TaskOrder("forward", range(2), (2,)))
    done.add(TaskOrder("forward", range(1), (3,)))  # the layer with buffers is not in it


def test_what_is_missing_is_said():
    done = a_coverage()
    assert done.missing() == "micro-batch 0 lacks the forward of layers 0 to 5"
    done.add(TaskOrder("forward", range(2), (0, 1, 2, 3)))
    done.add(TaskOrder("fused", range(2, 6), (0, 1, 2, 3)))
    assert done.missing() == "micro-batch 0 lacks the backward of layers 0 to 1" and not done.is_complete
    done.add(TaskOrder("backward", range(2), (0, 1, 2, 3)))
    assert done.missing() == "" and done.is_complete


def test_a_refused_batch_of_tasks_changes_nothing():
    cluster = Cluster(2, 0)
    cluster.load(make_spec(1, random.Random(0), 3, asynchronous=False, grain="stage"))
    call = cluster.call(1, None, [1.0, 1.0])
    machine = cluster.controller.machine
    first = TaskOrder("forward", range(1), (0, 1))
    with pytest.raises(ConfigError, match="task forward 0-0 mb 1: layer 0 has its forward for micro-batch 1 already"):
        cluster.controller.handle(ev.TasksEvent(1, call, (first, TaskOrder("forward", range(1), (1,)))))
    assert machine.next_slot == 1 and machine.missing_tasks(1) == "micro-batch 0 lacks the forward of layers 0 to 2"
    rest = (first, TaskOrder("fused", range(1, 3), (0, 1)), TaskOrder("backward", range(1), (0, 1)))
    cluster.controller.handle(ev.TasksEvent(1, call, rest))
    cluster.settle()
    assert call in cluster.controller.finished and not machine.missing_tasks(1)


def test_submitting_nothing_changes_nothing():
    cluster = Cluster(2, 0)
    cluster.load(make_spec(1, random.Random(0), 3, asynchronous=False, grain="stage"))
    first, last = TaskOrder("fused", range(3), (0,)), TaskOrder("fused", range(3), (1,))
    calls = []
    for _ in range(2):
        calls.append(cluster.call(1, None, [1.0, 1.0]))
        for orders in ((), (first,), (), (last,)):
            cluster.controller.handle(ev.TasksEvent(1, calls[-1], orders))
        cluster.settle()
        cluster.controller.handle(ev.TasksEvent(1, calls[0], ()))  # complete, also when another call has begun
    cluster.controller.handle(ev.StepEvent(1, ({},), None))
    cluster.settle()
    assert cluster.controller.steps == [(1, 0)]


def test_only_what_is_read_is_copied_where_the_backward_is_known():
    def published(*batches: tuple[TaskOrder, ...]) -> list[int]:
        cluster = Cluster(2, 0)
        spec = make_spec(1, random.Random(3), 6, asynchronous=False, grain="stage")
        cluster.load(spec)
        call = cluster.call(1, None, [1.0])
        for tasks in batches:
            cluster.controller.handle(ev.TasksEvent(1, call, tasks))
        return [position for position, _ in cluster.controller.machine._slots[1].task.publish]

    up, last = TaskOrder("forward", range(4), (0,)), TaskOrder("fused", range(4, 6), (0,))
    down = (TaskOrder("backward", range(2, 4), (0,)), TaskOrder("backward", range(2), (0,)))
    assert published((up, last, *down)) == [2, 4]
    assert published((up, last), down) == [1, 2, 3, 4]
    assert published((up,)) == [1, 2, 3, 4]


def test_gradients_are_added_by_micro_batch_and_depth_whatever_was_submitted_first():
    orders = {
        5: TaskOrder("fused", range(4, 6), (2, 3)),
        6: TaskOrder("backward", range(4), (2, 3)),
        7: TaskOrder("forward", range(4), (0, 1)),
        8: TaskOrder("fused", range(4, 6), (0, 1)),
        9: TaskOrder("backward", range(2, 4), (0, 1)),
        10: TaskOrder("backward", range(2), (0, 1)),
    }
    assert slabs_in_order(orders) == ((8, 4, 6), (9, 2, 4), (10, 0, 2), (5, 4, 6), (6, 0, 4))


def test_numbers_are_spelled_in_runs():
    assert spelled((0, 1, 2, 3, 6, 8, 9)) == "0-3,6,8-9"
