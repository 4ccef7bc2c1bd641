"""The low-level client in one process: tasks of one's own give `RoundPipe`'s numbers, and errors name them."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rpruntime as rp
from rpruntime import ExecutionPlan
from rpruntime.client import client_of
from rpruntime.control.coverage import Coverage
from rpruntime.iteration import FailureEvent, LossEvent, StepEvent, TaskEvent
from tests.examples import examples
from tests.reference import inline
from tests.test_client_machines import a_legal_task

pytestmark = pytest.mark.usefixtures("single_thread")

LAYERS, COUNT = 5, 4


class Bomb(nn.Module):
    """Raises when the first value is 99."""

    def forward(self, x: Tensor) -> Tensor:
        if (x[..., 0] == 99).any():
            raise ValueError("bomb")
        return x


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Bomb(), nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.2)), nn.Tanh(), nn.Linear(6, 3)
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(16, 6), torch.randn(16, 3)


def make(session, **settings) -> rp.Model:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    settings = {"loss_fn": nn.functional.mse_loss, "seed": 7, **settings}
    return client_of(session).load_model(model, optimizer, **settings)


def task(kind: str, start: int, stop: int, *microbatches: int, **more) -> rp.StageTask:
    return rp.StageTask(kind, range(start, stop), microbatches or None, **more)


def everything(*, device=None) -> list[rp.StageTask]:
    kinds = (("forward", 0, 2), ("forward", 2, 4), ("fused", 4, 5), ("backward", 1, 4), ("backward", 0, 1))
    return [task(*kind, device=device) for kind in kinds]


@pytest.fixture
def session():
    with inline(workers=3) as made:
        yield made


@pytest.fixture
def m(session):
    with make(session) as model:
        yield model


def trained_by_a_pipe(*, asynchronous: bool, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights with every micro-batch a round of its own."""
    plan = rp.ExecutionPlan([range(0, 2), range(2, 4)], [range(4, 5), range(1, 4), range(0, 1)], round_size=1)
    with inline(workers=2) as session:
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
        with rp.RoundPipe(
            model,
            optimizer,
            loss_fn=nn.functional.mse_loss,
            num_microbatches=COUNT,
            plan=plan,
            seed=7,
            asynchronous=asynchronous,
            session=session,
        ) as pipe:
            losses = []
            for t in range(steps):
                losses.append(pipe.forward_backward(*batch(t)))
                pipe.step(max_grad_norm=1.0)
            found = [float(loss) for loss in losses]
    return found, copy.deepcopy(model.state_dict())


@examples(15)
@given(st.integers(0, 10**9), st.booleans())
def test_any_legal_order_of_single_micro_batches_gives_the_numbers_of_a_pipe(seed, asynchronous):
    rng = random.Random(seed)
    with inline(workers=rng.randint(1, 3)) as session, make(session, asynchronous=asynchronous) as m:
        roles = session.worker_roles
        losses = []
        for t in range(3):
            it = m.iteration(*batch(t), num_microbatches=COUNT)
            done = Coverage(LAYERS, (True,) * COUNT, frozenset([2]))
            futures = {}
            while not done.is_complete:
                order = a_legal_task(rng, done, roles, list(futures))
                if len(order.microbatches) > 1:
                    continue  # sums are grouped by slot: the pipe's are single too
                done.add(order)
                after = [futures[slot] for slot in order.after]
                future = it.submit(task(order.kind, order.layers.start, order.layers.stop, *order.microbatches,
                                        device=order.role or None, after=after))  # fmt: skip
                futures[future.slot] = future
            losses.append(it.loss())
            m.step(max_grad_norm=1.0)
        found = [float(loss) for loss in losses]
        state = m.state_dict()
    expected, weights = trained_by_a_pipe(asynchronous=asynchronous)
    assert found == expected
    assert state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in state)


def test_a_pipe_and_tasks_of_one_plan_are_the_same_to_the_bit(session, m):
    it = m.iteration(*batch(0), num_microbatches=COUNT)
    futures = it.submit_all(everything())
    assert it.missing() == "" and m.client.models["default"] is m
    loss = float(it.loss())
    gradients = m.gradients()
    results = [future.result() for future in futures]
    assert [result.slot for result in results] == [1, 2, 3, 4, 5]
    m.close()
    plan = rp.ExecutionPlan([range(0, 2), range(2, 4)], [range(4, 5), range(1, 4), range(0, 1)])
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    mse = nn.functional.mse_loss
    with rp.RoundPipe(
        model, optimizer, loss_fn=mse, num_microbatches=COUNT, plan=plan, seed=7, session=session
    ) as pipe:
        assert float(pipe.forward_backward(*batch(0))) == loss
        expected = pipe.gradients()
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in gradients)


def test_a_result_has_the_times_of_its_phases_and_its_device(m):
    it = m.iteration(*batch(0), num_microbatches=2)
    first = it.submit(task("forward", 0, 4, device=1))
    last = it.submit(task("fused", 4, 5, device="worker-2"))
    done = it.submit(task("backward", 0, 4, 0, 1)).result()
    forward, fused = first.result(), last.result()
    assert [(span.phase, span.layers, span.microbatch) for span in forward.spans] == [
        ("forward", range(p, p + 1), mb) for mb in (0, 1) for p in range(4)
    ]
    assert {span.phase for span in fused.spans} == {"forward", "loss", "backward"}
    assert {span.phase for span in done.spans} == {"recompute", "backward"}
    assert forward.end_ms <= fused.start_ms <= fused.end_ms <= done.start_ms
    assert 0 < forward.busy_ms <= forward.end_ms - forward.start_ms + 1e-6
    assert forward.error is None and forward.tries == 1 and str(forward.task) == "forward 0-3 on 1"


@pytest.mark.parametrize(
    "tasks, message",
    [
        ([task("fused", 4, 5)], "task fused 4-4 mb 0-3: the forward of layer 0 for micro-batch 0 comes before it"),
        ([task("forward", 0, 5)], "task forward 0-4 mb 0-3: layer 4, the last one, runs in a fused task"),
        ([task("forward", 0, 2), task("forward", 1, 3)], "task forward 1-2 mb 0-3: layer 1 has its forward"),
        ([task("forward", 0, 2, 0, 4)], "task forward 0-1 mb 0,4: the call has micro-batches 0 to 3"),
        ([task("forward", 0, 2, device=3)], "task forward 0-1 on 3: the session has no device 3"),
        ([task("forward", 0, 2, device="cuda:7")], "task forward 0-1 on cuda:7: the session has no device 'cuda:7'"),
        ([rp.StageTask("forward", [0, 1])], "layers must be a range of consecutive layers"),
        ([task("forward", 0, 2, after=[3])], "after takes futures of tasks of the same model, not 3"),
        (["forward"], "submit takes an rp.StageTask, not a str"),
    ],
)  # fmt: skip
def test_what_may_not_come_next_is_refused_and_nothing_is_submitted(m, tasks, message):
    it = m.iteration(*batch(0), num_microbatches=COUNT)
    with pytest.raises(rp.ConfigError) as caught:
        it.submit_all(tasks)
    assert message in str(caught.value)
    assert it.missing() == "micro-batch 0 lacks the forward of layers 0 to 4" and not m.books.tasks
    it.submit_all(everything())
    assert float(it.loss()) > 0


def test_what_needs_all_tasks_says_which_are_missing(m):
    it = m.iteration(*batch(0), num_microbatches=2)
    it.submit_all(everything()[:3])
    missing = "micro-batch 0 lacks the backward of layers 0 to 3"
    for call, what in (
        (it.loss, f"the loss needs all tasks of the iteration: {missing}"),
        (m.step, f"a step needs all tasks of the last iteration: {missing}"),
        (m.gradients, missing),
        (m.zero_grad, missing),
        (lambda: m.iteration(*batch(1)), f"another iteration needs all tasks of the last iteration: {missing}"),
    ):
        with pytest.raises(rp.RoundPipeError) as caught:
            call()
        assert what in str(caught.value) and "abort()" in str(caught.value)
    it.submit_all(everything()[3:])
    m.step()
    with pytest.raises(rp.RoundPipeError, match=r"<Iteration 1 of default, 2 micro-batches> is over"):
        it.submit(everything()[0])
    with pytest.raises(rp.RoundPipeError, match="iteration 1 is over"):
        it.abort()


def test_a_step_of_some_layers_is_refused_in_words(m):
    it = m.iteration(*batch(0))
    it.submit_all(everything())
    with pytest.raises(rp.ConfigError, match=r"step\(layers=range\(0, 2\)\): a step takes all layers"):
        m.step(range(0, 2))
    assert not m.step(None, 1.0).result().skipped


def test_an_iteration_that_is_given_up_leaves_the_model_as_it_was(m):
    def whole(seed: int) -> float:
        it = m.iteration(*batch(seed), num_microbatches=2)
        it.submit_all(everything())
        return float(it.loss())

    first = whole(0)
    m.zero_grad()
    it = m.iteration(*batch(1), num_microbatches=2)
    future = it.submit(everything()[0])
    it.abort()
    assert future.done() and not m.books.open
    with pytest.raises(rp.RoundPipeError, match="is over"):
        it.submit(everything()[1])
    with pytest.raises(rp.RoundPipeError, match="given up"):
        float(it.loss())
    it = m.iteration(*batch(1), num_microbatches=2)
    it.submit_all(everything())
    float(it.loss())
    it.abort()  # all of it has run: its gradients are discarded
    assert m.gradients() == {}
    assert whole(0) != first  # its seeds are those of later micro-batches, and the batch norm has seen another batch
    assert m.step().result().step == 0


def test_giving_up_takes_the_evaluations_issued_since_the_iteration_began(m, session):
    """One that is older goes on to its end."""
    inputs, plan = m.calls.cut(*batch(0), 2), ExecutionPlan([], [range(LAYERS)])
    it = m.iteration(*batch(1), num_microbatches=2)
    it.submit_all(everything())
    session.paused = True
    older, number = m.calls.start_inference(inputs, plan, has_labels=True, wants_output=False)
    m.step()
    m.iteration(*batch(1), num_microbatches=2).submit(everything()[0])
    since, _ = m.calls.start_inference(inputs, plan, has_labels=True, wants_output=False)
    act = m.act

    def then_going_on(book):
        act(book)
        session.paused = False

    m.act = then_going_on
    m.drop_open()
    assert m.calls.end_inference(older, number).call == number
    with pytest.raises(rp.RoundPipeError, match="given up"):
        float(since)


def test_closing_gives_an_iteration_up_that_lacks_tasks(session):
    m = make(session)
    before = {name: value.clone() for name, value in m.module.state_dict().items()}
    m.iteration(*batch(0)).submit(everything()[0])
    m.close()
    assert all(torch.equal(value, before[name]) for name, value in m.module.state_dict().items())
    with pytest.raises(rp.RoundPipeError, match="closed"):
        m.iteration(*batch(0))


def test_a_task_that_raises_is_named_and_the_model_goes_on(m):
    inputs, labels = batch(0)
    inputs[9, 0] = 99.0
    events = m.events()
    it = m.iteration(inputs, labels, num_microbatches=COUNT)
    futures = it.submit_all(everything())
    error = futures[0].exception()
    assert isinstance(error, ValueError) and error.rp_context.layer == 0 and error.rp_context.micro_batch == 2
    assert "in task forward 0-1 of call 1" in error.__notes__
    with pytest.raises(ValueError, match="bomb"):
        futures[0].result()
    with pytest.raises(rp.RoundPipeError, match=r"cancelled: ValueError in task forward 0-1 of call 1: bomb"):
        futures[2].result()
    with pytest.raises(rp.RoundPipeError, match="is over"):
        it.submit(everything()[0])
    told = events.poll()
    assert any(isinstance(event, FailureEvent) and event.error is error for event in told)
    assert {event.result.slot for event in told if isinstance(event, TaskEvent)} == {1, 2, 3, 4, 5}
    it = m.iteration(*batch(0), num_microbatches=COUNT)
    it.submit_all(everything())
    assert m.step().result().loss == float(it.loss())


def test_events_come_in_order_and_end_with_the_model(m):
    events = m.events()
    it = m.iteration(*batch(0), num_microbatches=2)
    it.submit_all(everything())
    info = m.step()
    found = [events.get() for _ in range(7)]
    assert [type(event) for event in found] == [TaskEvent] * 5 + [LossEvent, StepEvent]
    assert found[5] == LossEvent(it.number, float(it.loss())) and found[6].info is info
    m.close()
    assert list(events) == []
    with pytest.raises(rp.RoundPipeError, match="no event will come"):
        events.get()


def test_tasks_wait_for_those_that_they_are_to_come_after(m):
    it = m.iteration(*batch(0), num_microbatches=2)
    first = it.submit(task("forward", 0, 2, 0, device=0))
    other = it.submit(task("forward", 0, 2, 1, device=1, after=[first]))
    it.submit_all([task("forward", 2, 4), task("fused", 4, 5), task("backward", 0, 4)])
    float(it.loss())
    assert first.result().end_ms <= other.result().start_ms


def test_weights_are_read_and_written_by_name(m):
    m.user_state["epoch"] = 3
    state = m.state_dict()
    state["1.weight"] = torch.ones(6, 6)
    m.load_state_dict(state)
    assert torch.equal(m.state_dict()["1.weight"], torch.ones(6, 6))
    assert m.state_dict()["1.weight"].data_ptr() != m.module[1].weight.data_ptr()
    assert m.num_layers == LAYERS and m.step_count == 0


def test_a_micro_batch_of_weight_0_is_covered_and_adds_nothing(session):
    def weight(labels: Tensor) -> float:
        return float((labels[:, 0] != 0).sum())

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, labels)

    inputs, labels = batch(0)
    labels[4:8] = 0.0  # micro-batch 1 of 4
    with make(session, loss_fn=loss_fn, loss_weight=weight) as m:
        it = m.iteration(inputs, labels, num_microbatches=COUNT)
        for one in everything():
            it.submit(one)
        loss = float(it.loss())
        assert loss == loss and m.step().result().step == 0


def test_two_models_on_one_session(session):
    with make(session, name="a") as a, make(session, name="b") as b:
        assert set(a.client.models) == {"a", "b"}
        one, two = a.iteration(*batch(0)), b.iteration(*batch(0))
        stages = everything()
        for stage in stages:
            future = one.submit(stage)
            with pytest.raises(rp.ConfigError, match="after takes futures of tasks of the same model"):
                two.submit(rp.StageTask("forward", range(1), after=[future]))
        two.submit_all(stages)
        assert float(one.loss()) == float(two.loss())
        assert a.step().result().step == b.step().result().step == 0
