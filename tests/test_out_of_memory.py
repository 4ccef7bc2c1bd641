"""A device out of memory: by layer the numbers are the same, what failed leaves nothing, the error has figures."""

from __future__ import annotations

import gc
import pickle
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import rpruntime as rp
import rpruntime.inline
from rpruntime import ExecutionPlan
from rpruntime.worker import shell
from rpruntime.worker.memory import (
    DeviceMemory,
    asked_bytes,
    explain,
    forget_frames,
    free_caches,
    is_out_of_memory,
    read_memory,
)
from rpruntime.worker.stage import Stage
from tests.reference import inline
from tests.test_training_exact import CASES, SEED, Both, adamw, assert_same, sgd

pytestmark = pytest.mark.usefixtures("single_thread")

TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.06 GiB is "
    "free. Including non-PyTorch memory, this process has 78.04 GiB memory in use."
)


class ByLayer(Stage):
    """What the shell makes of a slot that did not fit."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{**settings, "by_layer": True})


@pytest.fixture
def by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "Stage", ByLayer)


# --- by layer


PLANS = {
    "all_fused": lambda n: ExecutionPlan([], [range(n)]),
    "one_backward": lambda n: ExecutionPlan([range(n - 2)], [range(n - 2, n), range(n - 2)]),
    "several": lambda n: ExecutionPlan([range(1), range(1, n - 1)], [range(n - 1, n), range(2, n - 1), range(2)], 2),
}


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("recompute", ["stage", "layer"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_by_layer_equals_the_plain_loop(name: str, plan: str, recompute: str) -> None:
    """Dropout, BatchNorm, in-place activations, frozen and shared parameters."""
    case = CASES[name]
    torch.manual_seed(0)
    with inline(workers=2, delayed_copies=5) as session:
        model = case.model()
        both = Both(session, model, adamw, plan=PLANS[plan](len(model)), round_size=PLANS[plan](len(model)).round_size,
                    recompute=recompute)  # fmt: skip
        for _ in range(2):
            both.call(*case.batch(8), scale=0.5)
            both.call(*case.batch(8))
            both.check_gradients()
            both.step()
        both.close()


class Split(nn.Module):
    """x -> (x, scaled x, a mask without gradient): the mask is floating and goes on unchanged to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": self.linear(x), "skip": x, "mask": (x.detach() > 0).float(), "count": torch.tensor(0), "tag": "t"}


class Mix(nn.Module):
    """Passes skip and mask on; counts in place, moves a buffer, and replaces it by one that carries a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        x = value["x"].mul_(2.0)
        value["count"].add_(1)
        y = self.drop(self.linear(x)) * value["mask"] + value["skip"]
        self.calls += 1
        self.mean = 0.5 * self.mean + 0.5 * y.mean(0)
        return {**value, "x": x + y - self.mean.detach()}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, value: dict[str, Any]) -> Tensor:
        assert value["tag"] == "t"
        return self.linear(value["x"] * value["mask"] + value["skip"]) * value["count"]


def rich() -> nn.Sequential:
    torch.manual_seed(3)
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, Split(), Mix(), Mix(), Mix(), Join())
    model[4].linear.weight = shared.weight
    return model


def train(plan: ExecutionPlan, **settings: Any) -> dict[str, Tensor]:
    """Everything that can be seen of two steps, with a micro-batch of weight 0."""
    torch.manual_seed(0)
    seen: dict[str, Tensor] = {}
    with inline(workers=2) as session:
        model = rich()
        pipe = rp.RoundPipe(
            model, sgd(model), loss_fn=nn.functional.cross_entropy, loss_weight=lambda y: float((y >= 0).sum()),
            num_microbatches=4, seed=SEED, plan=plan, session=session, **settings,
        )  # fmt: skip
        for step in range(2):
            y = torch.randint(3, (8,))
            y[2:4] = -100
            seen[f"loss {step}"] = torch.tensor(float(pipe.forward_backward(torch.randn(8, 6), y)))
            seen |= {f"gradient {step} {name}": grad for name, grad in pipe.gradients().items()}
            pipe.step()
        pipe.synchronize()
        seen |= {f"state {name}": value.clone() for name, value in model.state_dict().items()}
        pipe.close()
    return seen


@pytest.mark.parametrize("stages", ["all_fused", "one_backward", "several"])
def test_values_that_pass_through_buffers_and_micro_batches_of_weight_0(
    stages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS[stages](6)
    wanted = train(plan)
    assert wanted["state 2.calls"] == 8, "buffers move once a micro-batch"
    assert_same(train(plan, recompute="layer"), wanted, 'recompute="layer"')
    monkeypatch.setattr(shell, "Stage", ByLayer)
    assert_same(train(plan), wanted, "by layer")
    assert_same(train(plan, recompute="layer"), wanted, 'by layer under recompute="layer"')


class Token:
    """Lives as long as the graph that it hangs on."""


class Graph(torch.autograd.Function):
    alive: weakref.WeakSet[Token] = weakref.WeakSet()
    most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        Graph.alive.add(ctx.token)
        Graph.most = max(Graph.most, len(Graph.alive))
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2.0


class HasGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Graph.apply(self.linear(x))


@pytest.mark.parametrize("plan", ["all_fused", "one_backward"])
@pytest.mark.parametrize("forced", [False, True])
def test_one_graph_is_alive_at_a_time(plan: str, forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if forced:
        monkeypatch.setattr(shell, "Stage", ByLayer)
    monkeypatch.setattr(Graph, "most", 0)
    model = nn.Sequential(*[HasGraph() for _ in range(6)])
    with inline() as session:
        pipe = rp.RoundPipe(
            model, sgd(model), loss_fn=nn.functional.mse_loss, num_microbatches=2, session=session,
            plan=PLANS[plan](6), recompute="stage" if forced else "layer",
        )  # fmt: skip
        float(pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 4)))
        pipe.close()
    assert Graph.most == 1


# --- an attempt that failed


class NoRoom(Exception):
    """Stands for an error that no retry hides from the test."""


class Fails(torch.autograd.Function):
    left = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Fails.left -= 1
        if Fails.left == 0:
            raise NoRoom(TORCH_SAYS)
        return grad


class FailsInBackward(nn.Module):
    """With a buffer that carries a graph, and weak references to what it saw."""

    storages: list[StorageWeakRef] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = Fails.apply(self.linear(x).sin())
        self.mean = 0.5 * self.mean + 0.5 * y.mean(0)
        self.storages.extend(StorageWeakRef(t.untyped_storage()) for t in (x, y))
        return y


class Drops(Stage):
    """What the shell does with a slot that failed; keeps what was alive before and after."""

    made: list[Drops] = []
    seen: list[str] = []

    def run(self, work: Any) -> None:
        try:
            super().run(work)
        except NoRoom as err:
            alive = [not storage.expired() for storage in FailsInBackward.storages]
            self.seen.append(str(self.explain(err, "cuda:5")))
            self.drop()
            forget_frames(err)
            free_caches(torch.device("cpu"))
            Drops.made.append(self)
            Drops.before = any(alive)
            Drops.after = [not storage.expired() for storage in FailsInBackward.storages]
            raise

    before = False
    after: list[bool] = []


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("kind", ["all_fused", "one_backward"])
@pytest.mark.parametrize("after", [1, pytest.param(3, marks=pytest.mark.slow), 9])
def test_a_stage_that_failed_in_backward_leaves_nothing(
    kind: str, after: int, forced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*args: Any, **settings: Any) -> Stage:
        return Drops(*args, **{**settings, "by_layer": forced})

    monkeypatch.setattr(shell, "Stage", make)
    for name, value in {"made": [], "seen": [], "before": False, "after": []}.items():
        monkeypatch.setattr(Drops, name, value)
    monkeypatch.setattr(FailsInBackward, "storages", [])
    monkeypatch.setattr(Fails, "left", after)
    torch.manual_seed(0)
    model = nn.Sequential(*[FailsInBackward() for _ in range(6)])
    plan = PLANS[kind](6)
    with inline() as session:
        pipe = rp.RoundPipe(
            model, sgd(model), loss_fn=nn.functional.mse_loss, num_microbatches=3, session=session, plan=plan
        )
        gc.collect()
        with pytest.raises(NoRoom):
            float(pipe.forward_backward(torch.randn(6, 4), torch.randn(6, 4)))
        (stage,) = Drops.made
        assert Drops.before, "the frames held activations"
        assert not any(Drops.after)
        layers = [stage._model.layers[position] for position in stage.layers]
        parameters = [parameter for layer in layers for parameter in layer.parameters.values()]
        assert all(parameter.grad is None and parameter.numel() == 0 for parameter in parameters)
        assert all(buffer is None for layer in layers for buffer in layer.module._buffers.values())
        assert not stage._sums and not stage._inputs
        assert "cuda:5 is out of memory in backward" in Drops.seen[0]
        # the next call finds nothing of it
        monkeypatch.setattr(Fails, "left", 0)
        x, y = torch.randn(6, 4), torch.randn(6, 4)
        float(pipe.forward_backward(x, y))
        found = pipe.gradients()
        pipe.close()
    monkeypatch.setattr(shell, "Stage", Stage)
    torch.manual_seed(0)
    model = nn.Sequential(*[FailsInBackward() for _ in range(6)])
    with inline() as session:
        pipe = rp.RoundPipe(
            model, sgd(model), loss_fn=nn.functional.mse_loss, num_microbatches=3, session=session, plan=plan
        )
        float(pipe.forward_backward(x, y))
        assert_same(found, pipe.gradients(), "gradients")
        pipe.close()


# --- telling and explaining it


@pytest.mark.parametrize(
    "err",
    [
        torch.OutOfMemoryError(TORCH_SAYS),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    ],
)
def test_out_of_memory_is_told(err: Exception) -> None:
    assert is_out_of_memory(err)
    wrapped = ValueError("the block failed")
    wrapped.__cause__ = err
    assert is_out_of_memory(wrapped)


def test_other_errors_are_not() -> None:
    while_handling = ValueError("another way failed too")
    while_handling.__context__ = torch.OutOfMemoryError(TORCH_SAYS)
    circle = RuntimeError("a circle")
    circle.__cause__ = ValueError("of causes")
    circle.__cause__.__cause__ = circle
    for err in (
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        MemoryError("host"),
        ValueError("CUDA out of memory"),
        while_handling,
        circle,
    ):
        assert not is_out_of_memory(err), err


@pytest.mark.parametrize(
    "text, asked",
    [
        (TORCH_SAYS, int(2.5 * 2**30)),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 20 << 20),
        ("CUDA out of memory. Tried to allocate 512 bytes. GPU", 512),
        ("CUDA out of memory. Tried to allocate 1.00 KiB", 1024),
        ("CUBLAS_STATUS_ALLOC_FAILED", None),
    ],
)
def test_bytes_asked_for(text: str, asked: int | None) -> None:
    assert asked_bytes(torch.OutOfMemoryError(text)) == asked


def failing(text: str) -> torch.OutOfMemoryError:
    try:
        raise torch.OutOfMemoryError(text)
    except torch.OutOfMemoryError as err:
        return err


def test_the_error_says_where_how_much_and_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    gib = 1 << 30
    memory = DeviceMemory(in_use=70 * gib, reserved=77 * gib, free=gib, total=80 * gib)
    err = failing(TORCH_SAYS)
    found = explain(
        err, phase="backward", layer="layer 3 3 (Linear)", stage=range(2, 6), device="cuda:1", memory=memory,
        by_layer=True, num_microbatches=8,
    )  # fmt: skip
    assert type(found) is torch.OutOfMemoryError and found.__traceback__ is err.__traceback__
    text = str(found)
    assert text.startswith(
        "cuda:1 is out of memory in backward of layer 3 3 (Linear) (stage of layers 2 to 5): "
        "2.5 GiB (2684354560 bytes) asked for, 70.0 GiB in use by tensors, 7.0 GiB more reserved by torch, "
        "1.0 GiB free of 80.0 GiB. "
        "Freed caches and running the stage layer by layer did not make enough room. What helps: "
    )
    for knob in ("num_microbatches above 8", 'recompute="layer"', "stages of fewer layers (plan)", "shorter sequences",
                 "PYTORCH_ALLOC_CONF=expandable_segments:True"):  # fmt: skip
        assert knob in text
    assert "It began with OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB." in text
    assert str(pickle.loads(pickle.dumps(found))) == text


def test_advice_that_does_not_apply_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    err = failing("CUBLAS_STATUS_ALLOC_FAILED")
    text = str(explain(err, phase="", layer="", stage=range(4, 5), device="cuda:0", memory=None, recompute="layer"))
    assert text.startswith(
        "cuda:0 is out of memory in the upload of the weights (stage of layer 4): "
        "an unknown number of bytes asked for. "
    )
    for knob in ("recompute", "plan", "expandable_segments"):
        assert knob not in text
    assert "num_microbatches" in text


def test_a_cpu_has_no_figures() -> None:
    assert read_memory(torch.device("cpu")) is None


def test_frames_are_forgotten_with_those_of_causes_and_lines_stay() -> None:
    def inner(tensor: Tensor) -> None:
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        raise torch.OutOfMemoryError(TORCH_SAYS)

    def outer() -> None:
        try:
            inner(torch.zeros(3))
        except torch.OutOfMemoryError as err:
            raise ValueError("the block failed") from err

    storages: list[StorageWeakRef] = []
    with pytest.raises(ValueError, match="the block failed") as caught:
        outer()
    assert not storages[0].expired()
    forget_frames(caught.value)
    assert storages[0].expired()
    text = "".join(traceback.format_exception(caught.value))
    assert "in inner" in text and "Tried to allocate" in text


# --- the whole path: again, then by layer, then the error


class Hungry(nn.Module):
    """Finds no memory the next `missing` times that it runs with a graph."""

    missing = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if Hungry.missing and x.requires_grad:
            Hungry.missing -= 1
            raise torch.OutOfMemoryError(TORCH_SAYS)
        return self.linear(x)


def train_hungry(missing: int, plan: Any = "layers") -> tuple[list[float], list[Tensor], rp.RoundPipe]:
    torch.manual_seed(0)
    Hungry.missing = 0
    with rp.inline.InlineSession({"workers": 2}) as session:
        model = nn.Sequential(nn.Linear(4, 4), Hungry(), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipe = rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=2, plan=plan,
                            session=session)  # fmt: skip
        x, y = torch.randn(8, 4), torch.randn(8, 1)
        losses = []
        for step in range(6):
            Hungry.missing = missing if step == 1 else 0
            loss = pipe.forward_backward(x, y)
            pipe.step()
            losses.append(float(loss))
        pipe.synchronize()
        return losses, [t.clone() for t in model.state_dict().values()], pipe


@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize("plan", ["layers", ExecutionPlan([range(1)], [range(1, 4), range(1)])])
def test_a_slot_short_of_memory_runs_again_with_the_same_numbers(missing: int, plan: Any) -> None:
    losses, weights, _ = train_hungry(0, plan)
    again, weights_again, _ = train_hungry(missing, plan)
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_again, strict=True))


def test_the_next_plan_is_smaller(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, pipe = train_hungry(1, "auto")
    said = capsys.readouterr().err
    assert "step 2: out of device memory in layer 1" in said
    assert all(len(stage) == 1 for stage in pipe.plan.backward if 1 in stage)


def test_what_never_fits_is_an_error_with_figures_and_the_run_is_usable() -> None:
    with inline(workers=2) as session:
        model = nn.Sequential(nn.Linear(4, 4), Hungry(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pipe = rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=2,
                            session=session)  # fmt: skip
        x, y = torch.randn(8, 4), torch.randn(8, 1)
        Hungry.missing = 100
        with pytest.raises(torch.OutOfMemoryError, match=r"layer 1 .*2.5 GiB") as raised:
            float(pipe.forward_backward(x, y))
        assert raised.value.rp_context.layer == 1  # type: ignore[attr-defined]
        Hungry.missing = 0
        assert float(pipe.forward_backward(x, y)) > 0
        pipe.step()
        pipe.synchronize()
