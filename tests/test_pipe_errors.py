"""What a script gets for its mistakes and its exceptions, and a run that goes on.   pytest tests/test_pipe_errors.py"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpruntime as rp
from rpruntime import ConfigError, ExecutionPlan, RoundPipeError
from tests.reference import PausedSession, PlainLoop, inline

pytestmark = pytest.mark.usefixtures("single_thread")

SEED = 3


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=False, foreach=False)


mse = nn.functional.mse_loss


# --- what cannot be wrapped


class NotSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)


def ddp() -> nn.Module:
    model = object.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = linear()
    return model


MODELS = {
    "a plain module": (NotSequential, "nn.Sequential.*not a NotSequential"),
    "a list": (lambda: [nn.Linear(4, 1)], "not a list"),
    "empty": (nn.Sequential, "empty"),
    "DDP": (ddp, r"model\.module instead of the DistributedDataParallel"),
    "DataParallel": (lambda: nn.DataParallel(linear()), r"model\.module instead of the DataParallel"),
    "compiled": (lambda: torch.compile(linear(), backend="eager"), r"before torch\.compile \(model\._orig_mod\)"),
    "meta": (lambda: linear().to("meta"), r"0\.weight is on the meta device"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), r"0\.weight has no shape yet"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_models_that_cannot_be_wrapped(session: PausedSession, name: str) -> None:
    build, message = MODELS[name]
    with pytest.raises(ConfigError, match=message):
        rp.RoundPipe(build(), loss_fn=mse, session=session)


def test_optimizers_that_cannot_step(session: PausedSession) -> None:
    model, other = linear(), linear()
    for optimizer, message in (
        (sgd(other), r"param_groups\[0\].*shape \(4, 4\).*not the model's"),
        (torch.optim.LBFGS(model.parameters()), "LBFGS"),
        ("adam", "not a str"),
    ):
        with pytest.raises(ConfigError, match=message):
            rp.RoundPipe(model, optimizer, loss_fn=mse, session=session)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"num_microbatches": 2.0}, "num_microbatches"),
        ({"recompute": "all"}, "stage, layer"),
        ({"plan": "best"}, "auto"),
        ({"plan": ExecutionPlan.one_layer_a_stage(3)}, "the plan has 3 layers, the model 2:"),
        ({"dtype": torch.int8}, "floating torch dtype"),
        ({"grad_scaler": "auto"}, r"rp\.GradScaler"),
        ({"compile": "on"}, "compile"),
    ],
)
def test_settings(session: PausedSession, settings: dict[str, Any], message: str) -> None:
    model = linear()
    with pytest.raises(ConfigError, match=message):
        rp.RoundPipe(model, sgd(model), loss_fn=mse, session=session, **settings)


@pytest.mark.parametrize(
    "forward, backward, message",
    [
        ([range(1)], [range(2, 3), range(2)], "layer 1 is in no stage"),
        ([range(2)], [range(1, 3), range(1)], "layer 1 is in two stages"),
        ([range(1)], [range(1, 3)], "layer 0 is in no stage"),
        ([], [], "fused stage"),
        ([range(0)], [range(3)], "holds no layer"),
        ([[0]], [range(1, 3)], "a stage is a range"),
    ],
)
def test_plans(forward: Any, backward: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExecutionPlan(forward, backward)


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.guard = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_what_cannot_be_pickled_is_named(session: PausedSession) -> None:
    """L7."""
    with pytest.raises(ConfigError, match=r"model\[1\].*inner.*guard.*lock"):
        rp.RoundPipe(nn.Sequential(nn.Linear(4, 4), Locked()), loss_fn=mse, session=session)
    lock = threading.Lock()

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        with lock:
            return mse(outputs, labels)

    with pytest.raises(ConfigError, match=r"loss_fn -> variable lock.*lock"):
        rp.RoundPipe(linear(), loss_fn=loss_fn, session=session)


def test_what_can_be_pickled_works(session: PausedSession) -> None:
    """L7: a lambda, a closure over a tensor, a partial, a class made in a function."""
    factor = torch.tensor(2.0)

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * factor

    x, y = torch.randn(4, 4), torch.randn(4, 1)
    for loss_fn in (lambda o, y: mse(o, y), functools.partial(mse, reduction="mean"), lambda o, y: mse(o, y * factor)):
        model = nn.Sequential(Local())
        wanted = loss_fn(model(x), y)
        with rp.RoundPipe(model, loss_fn=loss_fn, num_microbatches=1, session=session) as pipe:
            assert float(pipe.forward_backward(x, y)) == pytest.approx(wanted.item(), rel=1e-6)


# --- habits that are caught


def test_habits(session: PausedSession, capfd: pytest.CaptureFixture[str]) -> None:
    model = linear()
    optimizer = sgd(model)
    x, y = torch.randn(4, 4), torch.randn(4, 1)
    with rp.RoundPipe(model, optimizer, loss_fn=mse, num_microbatches=2, session=session) as pipe:
        with pytest.raises(RoundPipeError, match=r"call pipe\.step\(\) instead of optimizer\.step\(\)"):
            optimizer.step()
        with pytest.raises(RoundPipeError, match="step without gradients: nothing has been trained"):
            pipe.step()
        loss = pipe.forward_backward(x, y)
        with pytest.raises(TypeError, match=r"remove loss\.backward\(\)"):
            loss.backward()
        assert all(p.grad is None for p in model.parameters())
        pipe.zero_grad()
        assert pipe.gradients() == {}
        with pytest.raises(RoundPipeError, match="step without gradients"):
            pipe.step()
        for wrong in (0, -1.0):
            pipe.forward_backward(x, y)
            with pytest.raises(ConfigError, match="max_grad_norm"):
                pipe.step(max_grad_norm=wrong)
        pipe.step()
        with pytest.raises(RoundPipeError, match=r"call pipe\.synchronize\(\) first"):
            optimizer.state_dict()
        pipe.synchronize()
        assert optimizer.state_dict()["state"][0]["momentum_buffer"].abs().sum() > 0
        pipe.forward_backward(x, y)
        with pytest.raises(RoundPipeError, match=r"call pipe\.synchronize\(\) first"):
            optimizer.state_dict()
    optimizer.step()  # the pipe is closed: it is the script's again
    for use in (
        lambda: pipe.forward_backward(x, y),
        pipe.step,
        pipe.synchronize,
        pipe.gradients,
        lambda: pipe.forward(x),
    ):
        with pytest.raises(RoundPipeError, match="'default' is closed"):
            use()
    pipe.close()


def test_what_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """eval mode while training; a second pipe of the same name closes the first."""
    with inline(quiet=False) as session:
        model = linear()
        x, y = torch.randn(4, 4), torch.randn(4, 1)
        first = rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=2, session=session)
        model.eval()
        for _ in range(2):
            first.forward_backward(x, y)
            first.step()
        assert capfd.readouterr().err.count("the model is in eval mode while training") == 1
        model.train()
        second = rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=2, session=session)
        assert capfd.readouterr().err.count("pipe 'default' is made again: the older one is closed") == 1
        with pytest.raises(RoundPipeError, match="'default' is closed"):
            first.forward_backward(x, y)
        second.forward_backward(x, y)
        second.close()


def test_a_pipe_that_was_never_stepped_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    words = "made 2 calls of forward_backward and no step(): nothing was trained"
    with inline(quiet=False) as session:
        for steps in (0, 1):
            model = linear()
            with rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=2, session=session) as pipe:
                for _ in range(2):
                    pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1))
                for _ in range(steps):
                    pipe.step()
            assert (words in capfd.readouterr().err) == (steps == 0)


def test_parameters_that_no_group_holds_are_warned_about_in_the_scripts_line(session: PausedSession) -> None:
    model = linear()
    before = model[1].weight.detach().clone()
    with pytest.warns(UserWarning, match=r"no optimizer group holds.*1\.weight, 1\.bias") as caught:
        pipe = rp.RoundPipe(model, sgd(model[0]), loss_fn=mse, num_microbatches=2, session=session)
    assert [w.filename for w in caught] == [__file__]
    pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1))
    assert set(pipe.gradients()) == {"0.weight", "0.bias"}
    pipe.step()
    pipe.close()
    assert torch.equal(model[1].weight, before)


def test_writing_to_parameters_is_refused(session: PausedSession) -> None:
    model = linear()
    x, y = torch.randn(4, 4), torch.randn(4, 1)
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=2, session=session) as pipe:
        with torch.no_grad():
            model[1].weight.mul_(1.0)
        with pytest.raises(ConfigError, match=r"1\.weight was written to, which has no effect"):
            pipe.forward_backward(x, y)
        pipe.forward_backward(x, y)
        pipe.step()
        pipe.synchronize()
        pipe.forward_backward(x, y)
        with torch.no_grad():
            model[0].bias.add_(0.0)
        with pytest.raises(ConfigError, match=r"0\.bias was written to"):
            pipe.forward_backward(x, y)


def test_a_refused_write_has_no_effect(session: PausedSession) -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    batch = torch.ones(2, 2), torch.zeros(2, 1)
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=1, session=session) as pipe:
        wanted = float(pipe.forward_backward(*batch))
        with torch.no_grad():
            model[0].weight.fill_(100.0)
        with pytest.raises(ConfigError, match="was written to"):
            pipe.forward_backward(*batch)
        assert float(pipe.forward_backward(*batch)) == wanted


def test_synchronized_parameters_are_kept_after_closing(session: PausedSession) -> None:
    model = linear()
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=2, session=session) as pipe:
        pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1))
        pipe.step()
        pipe.synchronize()
        wanted = [p.detach().clone() for p in model.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), wanted, strict=True))
    with torch.no_grad():
        model[0].weight.zero_()  # private again
    again = rp.RoundPipe(model, sgd(model), loss_fn=mse, session=session)
    assert not again.forward(torch.randn(2, 4)).isnan().any()
    again.close()


def test_settings_in_groups_do_not_warn(session: PausedSession) -> None:
    model = linear()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with rp.RoundPipe(model, optimizer, loss_fn=mse, num_microbatches=2, session=session) as pipe:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1))
            pipe.step()
            scheduler.step()


# --- bad batches: an error before any work, nothing moved


@pytest.mark.parametrize(
    "inputs, labels, message",
    [
        (torch.zeros(0, 4), torch.zeros(0, 1), "no rows"),
        (torch.zeros(3, 4), torch.zeros(2, 1), r"argument 0 has shape \[3, 4\].*chunk_dims"),
        ([torch.zeros(2, 4)], [], "labels must be a list of 1"),
        ([], None, "list of inputs is empty"),
        (torch.zeros(4, 4).to_sparse(), torch.zeros(4, 1), "cannot be cut|layout"),
        ((torch.zeros(4, 4), threading.Lock()), torch.zeros(4, 1), r"inputs.*lock"),
        (torch.zeros(4, 4), (torch.zeros(4, 1), threading.Lock()), r"labels.*lock"),
    ],
)
def test_batches_that_cannot_be_used(session: PausedSession, inputs: Any, labels: Any, message: str) -> None:
    model = linear()
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=2, session=session) as pipe:
        with pytest.raises(ConfigError, match=message):
            pipe.forward_backward(inputs, labels)
        with pytest.raises(RoundPipeError, match="step without gradients"):
            pipe.step()
        pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1))
        pipe.step()


def test_evaluating_nothing(session: PausedSession) -> None:
    with rp.RoundPipe(linear(), loss_fn=mse, session=session) as pipe, pytest.raises(ConfigError, match="no batch"):
        pipe.evaluate([])


# --- exceptions of the user's code


class Own(Exception):
    """Survives a pickle, with what it carries."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code


class Unpicklable(Exception):
    """Carries a lock, and says more than its arguments."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code, self.lock = code, threading.Lock()

    def __str__(self) -> str:
        return f"{self.args[0]} (code {self.code})"


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Trap.spring("backward")
        return grad


class Trap(nn.Module):
    """Identity that raises at the n-th time that a phase reaches it; `armed` is the test's own (inline sessions)."""

    armed: tuple[str, int, Callable[[], BaseException]] | None = None

    @classmethod
    def spring(cls, phase: str) -> None:
        if cls.armed is None or cls.armed[0] != phase:
            return
        _, count, error = cls.armed
        if count:
            cls.armed = (phase, count - 1, error)
            return
        cls.armed = None
        raise error()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.spring("evaluation")
        elif x.requires_grad:
            self.spring("recompute")
            return Failing.apply(x)
        else:
            self.spring("forward")
        return x


def trapped_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    Trap.spring("loss")
    return mse(outputs, labels)


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    Trap.armed = None


def trapped() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), Trap(), nn.Linear(4, 4), nn.Linear(4, 1))


PHASES = ["forward", "recompute", "backward", "loss"]


class Undisturbed:
    """A pipe beside a plain loop that never makes the iterations that fail."""

    def __init__(self, session: PausedSession, asynchronous: bool = False, **settings: Any) -> None:
        self.session = session
        model = trapped()
        plain = copy.deepcopy(model)
        self.loop = PlainLoop(
            plain, sgd(plain), mse, num_microbatches=2, seed=SEED, asynchronous=asynchronous
        )  # fmt: skip
        self.pipe = rp.RoundPipe(
            model, sgd(model), loss_fn=trapped_loss, num_microbatches=2, seed=SEED, asynchronous=asynchronous,
            plan=ExecutionPlan.one_layer_a_stage(6), session=session, **settings,
        )  # fmt: skip

    def batch(self) -> tuple[Tensor, Tensor]:
        return torch.randn(4, 4), torch.randn(4, 1)

    def iterate(self, count: int) -> None:
        for _ in range(count):
            for _ in range(2):
                batch = self.batch()
                assert float(self.pipe.forward_backward(*batch)) == self.loop.forward_backward(*batch)
            self.pipe.step()
            self.loop.step()

    def check_after_failure(self) -> None:
        """All is as after the step before, and goes on as if nothing had been tried."""
        self.loop.rewind()
        self.check()
        self.iterate(3)
        self.check()
        self.pipe.close()

    def check(self) -> None:
        self.pipe.synchronize()
        for (name, p), wanted in zip(self.pipe.model.named_parameters(), self.loop.model.parameters(), strict=True):
            assert torch.equal(p, wanted), name
        for name, wanted in self.loop.stepped_buffers.items():
            assert torch.equal(dict(self.pipe.model.named_buffers())[name], wanted), name
        assert not (self.pipe._model.books.steps or self.pipe._model.books.losses or self.pipe._model.books.finished)


class Unbuildable(nn.Linear):
    """No worker can make its own copy of it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise Own("out of luck", 17)


class Unsteppable(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise Own("out of luck", 17)


@pytest.mark.parametrize("where", ["layer", "building", "step"])
def test_what_the_script_gets_inline_is_not_said_beside_it(where: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "rpruntime")
    model = trapped()
    if where == "building":
        model.append(Unbuildable(1, 1))
    kind = Unsteppable if where == "step" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.1)

    def train(session: PausedSession) -> None:
        with rp.RoundPipe(model, optimizer, loss_fn=mse, num_microbatches=2, session=session) as pipe:
            if where == "layer":
                Trap.armed = ("forward", 0, lambda: Own("out of luck", 17))
            float(pipe.forward_backward(torch.ones(4, 4), torch.ones(4, 1)))
            pipe.step()
            pipe.synchronize()

    with inline() as session:
        with pytest.raises(Own, match="out of luck"):
            train(session)
    said = [record for record in caplog.records if record.exc_info and isinstance(record.exc_info[1], Own)]
    assert [record.levelname for record in said] == ["DEBUG"], said


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_keeps_its_type_and_the_run_goes_on(phase: str, asynchronous: bool) -> None:
    """L4. The second call of iteration 2 fails in its second micro-batch, with nothing queued after it."""
    with inline(workers=2) as session:
        run = Undisturbed(session, asynchronous)
        run.iterate(2)
        first = run.pipe.forward_backward(*run.batch())
        # of two micro-batches a call; a backward stage recomputes each once
        Trap.armed = (phase, 1, lambda: Own("out of luck", 17))
        second = run.pipe.forward_backward(*run.batch())
        with pytest.raises(Own, match="out of luck") as caught:
            float(second)
        assert caught.value.code == 17
        context = caught.value.rp_context
        assert (context.phase, context.micro_batch, context.num_microbatches, context.step) == (phase, 1, 2, 2)
        if phase == "loss":
            assert context.layer is None
        else:
            assert context.layer == 3 and context.layer_name == "3 (Trap)"
        assert context.device and any(frame[0] == __file__ for frame in context.worker_frames)
        assert "out of luck" in context.worker_traceback
        assert float(first) > 0  # it had finished
        with pytest.raises(RoundPipeError, match="step without gradients"):
            run.pipe.step()
        run.check_after_failure()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_calls_and_steps_queued_after_a_failure_are_cancelled(phase: str, asynchronous: bool) -> None:
    with inline(workers=2) as session:
        run = Undisturbed(session, asynchronous)
        run.iterate(3)
        scheduler = torch.optim.lr_scheduler.ConstantLR(run.pipe.optimizer, 1.0)
        session.paused = True
        Trap.armed = (phase, 2, lambda: Own("out of luck", 17))  # the first micro-batch of the second call
        losses, steps = [], []
        for _ in range(2):
            losses += [run.pipe.forward_backward(*run.batch()) for _ in range(2)]
            steps.append(run.pipe.step())
            scheduler.step()
        session.paused = False
        with pytest.raises(Own, match="out of luck") as caught:
            losses[3].item()
        assert caught.value.rp_context.step == 3
        assert any("2 step(s) issued after it were cancelled" in note for note in caught.value.__notes__)
        for pending in (losses[2], losses[1]):
            with pytest.raises(RoundPipeError, match=r"cancelled: Own in call .*out of luck"):
                float(pending)
        for info in steps:
            with pytest.raises(RoundPipeError, match="cancelled: Own"):
                info.result()
        assert run.pipe.last_step.step == 2
        run.check_after_failure()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_before_a_failure_finish(asynchronous: bool) -> None:
    """Iteration 1 fails while step 0 has not begun: it is done, and the repeated iteration 1 follows it."""
    with inline(workers=2, delayed_copies=1) as session:
        run = Undisturbed(session, asynchronous)
        session.paused = True
        batches = [run.batch() for _ in range(2)]
        first = [run.pipe.forward_backward(*batch) for batch in batches]
        info = run.pipe.step()
        Trap.armed = ("backward", 5, lambda: Own("late", 1))
        run.pipe.forward_backward(*run.batch())
        run.pipe.step()
        session.paused = False
        with pytest.raises(Own, match="late"):
            run.pipe.synchronize()
        wanted = [run.loop.forward_backward(*batch) for batch in batches]
        run.loop.step()
        assert [float(loss) for loss in first] == wanted
        assert info.result().step == 0
        run.check_after_failure()


@pytest.mark.parametrize(
    "wait", ["forward_backward", "step", "synchronize", "gradients", "forward", "zero_grad", "close"]
)
def test_the_next_wait_or_call_raises_it_once(session: PausedSession, wait: str) -> None:
    run = Undisturbed(session)
    run.iterate(1)
    Trap.armed = ("forward", 0, lambda: Own("out of luck", 17))
    loss = run.pipe.forward_backward(*run.batch())
    arguments: dict[str, tuple[Any, ...]] = {"forward_backward": run.batch(), "forward": run.batch()[:1]}
    with pytest.raises(Own):
        getattr(run.pipe, wait)(*arguments.get(wait, ()))
    with pytest.raises(RoundPipeError, match="cancelled: Own"):
        float(loss)
    if wait == "close":
        for p, wanted in zip(run.pipe.model.parameters(), run.loop.model.parameters(), strict=True):
            assert torch.equal(p, wanted)  # private, and those before the failed iteration
        run.pipe.close()
        return
    run.check_after_failure()


@pytest.mark.parametrize("phase", PHASES)
def test_an_exception_class_that_cannot_be_pickled(session: PausedSession, phase: str) -> None:
    """L4: the type and the text survive."""
    run = Undisturbed(session)
    Trap.armed = (phase, 0, lambda: Unpicklable("out of luck", 17))
    with pytest.raises(Unpicklable, match=r"out of luck \(code 17\)") as caught:
        float(run.pipe.forward_backward(*run.batch()))
    assert caught.value.rp_context.phase == phase
    run.check_after_failure()


def test_an_exception_class_made_in_a_function(session: PausedSession) -> None:
    class Inner(ValueError):
        pass

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise Inner("here")

    with rp.RoundPipe(nn.Sequential(nn.Linear(4, 1), Raises()), loss_fn=mse, session=session) as pipe:
        with pytest.raises(Inner, match="here"):
            float(pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1)))
        with pytest.raises(Inner, match="here"):
            pipe.forward(torch.randn(4, 4))


def test_a_layer_that_exits_is_an_exception_like_others(session: PausedSession) -> None:
    run = Undisturbed(session)
    Trap.armed = ("forward", 0, lambda: SystemExit(3))
    with pytest.raises(SystemExit):
        float(run.pipe.forward_backward(*run.batch()))
    run.check_after_failure()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_evaluation_leaves_the_iteration_alone(session: PausedSession, asynchronous: bool) -> None:
    run = Undisturbed(session, asynchronous)
    run.iterate(2)
    batch = run.batch()
    run.pipe.forward_backward(*batch)
    run.loop.forward_backward(*batch)
    for use in (lambda: run.pipe.forward(batch[0]), lambda: run.pipe.evaluate([batch])):
        Trap.armed = ("evaluation", 1, lambda: Own("out of luck", 17))
        with pytest.raises(Own) as caught:
            use()
        assert caught.value.rp_context.phase == "evaluation" and caught.value.rp_context.micro_batch == 1
    run.pipe.step()
    run.loop.step()
    run.iterate(1)
    run.check()
    run.pipe.close()


def test_a_failure_after_zero_grad_rewinds_the_whole_iteration(session: PausedSession) -> None:
    run = Undisturbed(session)
    run.iterate(1)
    run.pipe.forward_backward(*run.batch())
    run.pipe.zero_grad()
    Trap.armed = ("backward", 0, lambda: Own("out of luck", 17))
    run.pipe.forward_backward(*run.batch())
    with pytest.raises(Own):
        run.pipe.gradients()
    assert run.pipe.gradients() == {}
    run.check_after_failure()


@pytest.mark.parametrize("phase", ["forward", "recompute", "backward"])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_a_stage_of_several_layers_names_the_layer(session: PausedSession, grain: str, phase: str) -> None:
    model = trapped()
    plan = ExecutionPlan([range(5)], [range(5, 6), range(5)])
    with rp.RoundPipe(
        model, sgd(model), loss_fn=mse, num_microbatches=2, plan=plan, recompute=grain, session=session
    ) as pipe:
        Trap.armed = (phase, 0, lambda: Own("out of luck", 17))
        with pytest.raises(Own) as caught:
            float(pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1)))
        assert caught.value.rp_context.layer == 3


class InPlace(torch.autograd.Function):
    """Doubles a tensor in place; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Own("out of luck", 17)


class ReturnsItsParameter(nn.Module):
    """As a head does whose loss multiplies by its weights; notes how many hooks they have."""

    hooks: list[int] = []

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.hooks.append(len(self.weight._backward_hooks or {}))
        return x * 1, self.weight


def test_a_layer_that_changes_its_input_in_place_is_named(session: PausedSession) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Returns(InPlace.apply), nn.Linear(4, 1))
    plan = ExecutionPlan([], [range(4)])
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=1, plan=plan, session=session) as pipe:
        with pytest.raises(Own) as caught:
            float(pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1)))
        assert caught.value.rp_context.layer == 2


def test_no_hook_stays_on_a_parameter_that_a_layer_returns(session: PausedSession) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), ReturnsItsParameter())
    ReturnsItsParameter.hooks.clear()
    with rp.RoundPipe(
        model, sgd(model), loss_fn=lambda out, y: ((out[0] * out[1]).sum(1, keepdim=True) - y).pow(2).mean(),
        num_microbatches=2, plan=ExecutionPlan([], [range(3)]), session=session,
    ) as pipe:  # fmt: skip
        for _ in range(3):
            float(pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1)))
            pipe.step().result()
    assert ReturnsItsParameter.hooks == [0] * 6


class Pair(nn.Module):
    """(x, skip) -> (x, skip), the skip as it is; `where`: what fails in its backward."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails = fails

    def forward(self, pair: Any) -> Any:
        x, skip = pair if isinstance(pair, tuple) else (pair, pair * 1)
        x = self.linear(x)
        return (Failing.apply(x) if self.fails else x), skip


class Spoils(nn.Module):
    """Writes into what its own backward needs: torch raises in C++, so no frame of Python tells the layer."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        z = y * 2
        y.add_(1)
        return z


def spoiled() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Spoils(), nn.Identity(), nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 1))


def of_pairs() -> nn.Sequential:
    return nn.Sequential(Pair(), Pair(fails=True), Pair(), Returns(sum), nn.Linear(4, 1))


@pytest.mark.parametrize("build, layer", [(spoiled, 1), (of_pairs, 1)])
@pytest.mark.parametrize("fused", [True, False])
def test_a_failure_of_backward_names_the_layer(session: PausedSession, build: Any, layer: int, fused: bool) -> None:
    model = build()
    last = len(model) - 1
    plan = (
        ExecutionPlan([], [range(last + 1)])
        if fused
        else ExecutionPlan([range(last)], [range(last, last + 1), range(last)])
    )
    Trap.armed = ("backward", 0, lambda: RuntimeError("out of luck"))
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=2, plan=plan, session=session) as pipe:
        with pytest.raises(RuntimeError, match=r"inplace operation|out of luck") as caught:
            float(pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1)))
    context = caught.value.rp_context
    assert (context.phase, context.layer, context.micro_batch) == ("backward", layer, 0)


def test_a_failure_of_the_losss_own_backward_names_no_layer(session: PausedSession) -> None:
    model = linear()
    plan = ExecutionPlan([], [range(2)])
    Trap.armed = ("backward", 0, lambda: RuntimeError("out of luck"))

    def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
        return Failing.apply(mse(outputs, labels))

    with rp.RoundPipe(model, sgd(model), loss_fn=loss_fn, num_microbatches=2, plan=plan, session=session) as pipe:
        with pytest.raises(RuntimeError, match="out of luck") as caught:
            float(pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1)))
    assert caught.value.rp_context.phase == "backward" and caught.value.rp_context.layer is None


# --- wrong results of layers and losses


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x: (x, threading.Lock()), r"layer 1 1 \(Returns\) returned something that cannot cross.*lock"),
        (lambda x: x.to_sparse(), r"layer 1 1 \(Returns\) returned a Tensor of torch\.sparse"),
        (lambda x: (y for y in (x,)), r"layer 1 1 \(Returns\).*generator"),
    ],
)
def test_layer_outputs_that_cannot_cross_processes(session: PausedSession, make: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Returns(make), nn.Identity(), nn.Linear(4, 1))
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=2, session=session) as pipe:
        with pytest.raises(ConfigError, match=message) as caught:
            float(pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1)))
        assert caught.value.rp_context.layer == 1


@pytest.mark.parametrize(
    "loss_fn, message",
    [
        (lambda o, y: o - y, r"loss_fn's result is a tensor of shape \(2, 1\)"),
        (lambda o, y: 3.0, "loss_fn's result is a float; return the tensor itself"),
        (lambda o, y: None, "loss_fn's result is a NoneType"),
        (None, r"the last layer's output \(loss_fn is None\) is a tensor of shape \(2, 1\); pass loss_fn="),
    ],
)
def test_losses_that_are_no_scalar(session: PausedSession, loss_fn: Any, message: str) -> None:
    model = linear()
    with rp.RoundPipe(model, sgd(model), loss_fn=loss_fn, num_microbatches=2, session=session) as pipe:
        with pytest.raises(ConfigError, match=message) as caught:
            float(pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1)))
        assert caught.value.rp_context.phase == "loss" and caught.value.rp_context.micro_batch == 0


@torch.no_grad()
def without_graph(outputs: Tensor, labels: Tensor) -> Tensor:
    return mse(outputs, labels)


@pytest.mark.parametrize("plan", [ExecutionPlan.one_layer_a_stage(3), ExecutionPlan([], [range(3)])], ids=str)
@pytest.mark.parametrize(
    "last, loss_fn, message",
    [
        (nn.Identity(), lambda o, y: mse(o, y).detach(), r"loss_fn's result has no gradient \(float32\)"),
        (nn.Identity(), without_graph, "loss_fn's result has no gradient"),
        (nn.Identity(), lambda o, y: torch.tensor(mse(o, y).item()), "loss_fn's result has no gradient"),
        (nn.Identity(), lambda o, y: (o.argmax(-1) == 0).sum(), r"loss_fn's result has no gradient \(int64\)"),
        (Returns(lambda x: x.detach()), mse, "the last layer's output has no gradient"),
        (Returns(lambda x: x.detach().mean()), None, "the last layer's output has no gradient"),
    ],
)
def test_losses_without_gradient(session: PausedSession, plan: Any, last: Any, loss_fn: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), last)
    with rp.RoundPipe(model, sgd(model), loss_fn=loss_fn, num_microbatches=2, plan=plan, session=session) as pipe:
        assert pipe.evaluate([(torch.randn(4, 4), torch.randn(4, 1))]).num_items == 4  # may have none
        with pytest.raises(ConfigError, match=f"{message}.*so nothing would be trained") as caught:
            float(pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1)))
        assert caught.value.rp_context.phase == "loss" and caught.value.rp_context.micro_batch == 0


class Fickle(nn.Module):
    """Returns more the second time."""

    calls = 0

    def forward(self, x: Tensor) -> Any:
        Fickle.calls += 1
        return (x, x + 1) if Fickle.calls > 1 else (x,)


def test_a_recompute_that_gives_something_else_is_said(session: PausedSession) -> None:
    Fickle.calls = 0
    model = nn.Sequential(nn.Linear(4, 4), Fickle(), Returns(lambda pair: pair[0]), nn.Linear(4, 1))
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=1, session=session) as pipe:
        with pytest.raises(ConfigError, match="recompute gave 2 tensors where forward gave 1"):
            float(pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1)))


# --- reading leaves unstepped gradients alone


def test_forward_and_evaluate(session: PausedSession) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    with rp.RoundPipe(model, sgd(model), loss_fn=mse, num_microbatches=3, session=session) as pipe:
        pipe.forward_backward(x, y)
        pipe.step()
        pipe.synchronize()
        plain = copy.deepcopy(model).eval()
        pipe.forward_backward(x, y)
        before = pipe.gradients()
        outputs = pipe.forward(x)
        assert not outputs.requires_grad and model.training
        torch.testing.assert_close(outputs, plain(x))
        torch.testing.assert_close(pipe.forward(x, num_microbatches=1), plain(x))
        result = pipe.evaluate([(x, y), (x[:2], y[:2]), (x, y)], max_batches=2)
        wanted = (mse(plain(x), y) * 6 + mse(plain(x[:2]), y[:2]) * 2) / 8
        assert result.loss == pytest.approx(wanted.item(), rel=1e-5) and result.num_items == 8
        after = pipe.gradients()
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
        pipe.step()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_forward_sees_every_step_issued(session: PausedSession, asynchronous: bool) -> None:
    model = linear()
    plain = copy.deepcopy(model)
    loop = PlainLoop(plain, sgd(plain), mse, num_microbatches=2, seed=0, asynchronous=asynchronous)
    x, y = torch.randn(4, 4), torch.randn(4, 1)
    with rp.RoundPipe(
        model, sgd(model), loss_fn=mse, num_microbatches=2, asynchronous=asynchronous, session=session
    ) as pipe:
        for _ in range(3):
            pipe.forward_backward(x, y)
            loop.forward_backward(x, y)
            pipe.step()
            loop.step()
            torch.testing.assert_close(pipe.forward(x), plain(x), rtol=0, atol=1e-6)
