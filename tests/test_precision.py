"""fp16: the loss scale, skipped steps, unscaling and clipping, against torch's own GradScaler loop.

pytest tests/test_precision.py
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpruntime as rp
from rpruntime.client import client_of
from rpruntime.models.pretrained import move_into_slabs
from rpruntime.optimizer.scaling import as_dict, from_dict, inverse_of, moved
from rpruntime.wire.messages import ScalerState
from tests.reference import PausedSession, Times, inline

pytestmark = pytest.mark.usefixtures("single_thread")


class Columns(nn.Module):
    """A weight for one column: [B, 2] -> [B, 2]."""

    def __init__(self, column: int) -> None:
        super().__init__()
        self.column = column
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor([float(self.column == 0), float(self.column == 1)])
        return x + (self.w - 1) * mask * x


def total(outputs: Tensor) -> Tensor:
    return outputs.sum() / len(outputs)


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    return model.to(dtype)


def mse(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs.float(), labels.float())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False, fused=False)


class TorchLoop:
    """torch's documented loop: fp32 weights, computing in `dtype`, `torch.amp.GradScaler` on the CPU.

    `asynchronous`: iteration t computes with the weights and the scale after step t-2.
    """

    def __init__(
        self, model: nn.Sequential, dtype: torch.dtype, num_microbatches: int, *, asynchronous: bool, **scaler: Any
    ) -> None:
        self.model, self.runs_as = model, copy.deepcopy(model).to(dtype)
        self.optimizer = adamw(model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", **scaler)
        self.num_microbatches, self.asynchronous = num_microbatches, asynchronous
        self.history = [self._now()]

    def _now(self) -> tuple[list[Tensor], float]:
        return [p.detach().clone() for p in self.model.parameters()], self.scaler.get_scale()

    def iterate(self, x: Tensor, y: Tensor, max_grad_norm: float | None) -> dict[str, Any]:
        t = len(self.history) - 1
        weights, used = self.history[max(0, t - 1) if self.asynchronous else t]
        newest = self.scaler.get_scale()
        with torch.no_grad():
            for leaf, value in zip(self.runs_as.parameters(), weights, strict=True):
                leaf.copy_(value)
        sums = [torch.zeros(p.shape) for p in self.model.parameters()]
        m = self.num_microbatches
        for inputs, labels in zip(x.tensor_split(m), y.tensor_split(m), strict=True):
            (mse(self.runs_as(inputs.clone()), labels.clone()) / m * torch.tensor(used)).backward()
            for sum_, leaf in zip(sums, self.runs_as.parameters(), strict=True):
                sum_.add_(leaf.grad)
                leaf.grad = None
        for parameter, leaf, sum_ in zip(self.model.parameters(), self.runs_as.parameters(), sums, strict=True):
            parameter.grad = sum_.to(leaf.dtype).float()
        self.scaler.scale(torch.zeros(()))  # makes its tensors
        self.scaler._scale.fill_(used)  # that is what it unscales by
        self.scaler.unscale_(self.optimizer)
        norm = None
        if max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm).item()
        found = self.scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        skipped = any(value.item() for value in found.values())
        self.scaler.step(self.optimizer)
        if skipped and used != newest:  # the present scale has not been tried
            self.scaler._per_optimizer_states.clear()
        else:
            self.scaler._scale.fill_(newest)
            self.scaler.update()
        if skipped and used != newest:
            self.scaler._scale.fill_(newest)
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.history.append(self._now())
        return {"skipped": skipped, "loss_scale": used, "grad_norm": norm}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")  # torch's loop: its first steps are skipped
def test_a_run_is_that_of_torchs_scaler(asynchronous: bool, max_grad_norm: float | None, dtype: torch.dtype) -> None:
    """Starts so high that steps are skipped, then grows; some batches hold an infinity."""
    settings = {"init_scale": 2.0**20 if dtype is torch.float16 else 2.0**127, "growth_interval": 2}
    loop = TorchLoop(small(), dtype, 2, asynchronous=asynchronous, **settings)
    model = small()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    torch.manual_seed(5)
    batches = [(torch.randn(4, 6).to(dtype), torch.randn(4, 2)) for _ in range(14)]
    batches[8][0][2, 0] = torch.inf
    with inline(workers=2) as session:
        pipe = rp.RoundPipe(
            model, optimizer, loss_fn=mse, num_microbatches=2, dtype=dtype, grad_scaler=rp.GradScaler(**settings),
            asynchronous=asynchronous, plan="layers", session=session,
        )  # fmt: skip
        for x, y in batches:
            pipe.forward_backward(x, y)
            info = pipe.step(max_grad_norm=max_grad_norm)
            scheduler.step()
            wanted = loop.iterate(x, y, max_grad_norm)
            assert (info.skipped, info.loss_scale) == (wanted["skipped"], wanted["loss_scale"])
            if not wanted["skipped"]:
                assert info.grad_norm == wanted["grad_norm"]
            found = {k: v for k, v in pipe.grad_scaler.state_dict().items() if k != "_previous_scale"}
            assert found == loop.scaler.state_dict()
            pipe.synchronize()
            for parameter, wide in zip(model.parameters(), loop.model.parameters(), strict=True):
                assert torch.equal(parameter, wide.to(dtype))
            assert optimizer.param_groups[0]["lr"] == loop.optimizer.param_groups[0]["lr"]
        skips = sum(a[1] > b[1] for a, b in zip(loop.history, loop.history[1:], strict=False))
        assert skips >= 1 + (dtype is torch.float16)
        state = optimizer.state_dict()["state"]
        for key, values in loop.optimizer.state_dict()["state"].items():
            for name, value in values.items():
                assert torch.equal(state[key][name], value), (key, name)
        pipe.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_skipped_step_is_fully_skipped(session: PausedSession, asynchronous: bool) -> None:
    """N5: an infinity in one gradient at step 3."""
    model = small()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = rp.GradScaler()
    with rp.RoundPipe(
        model, optimizer, loss_fn=mse, num_microbatches=2, grad_scaler=scaler, asynchronous=asynchronous,
        plan="layers", session=session,
    ) as pipe:  # fmt: skip
        torch.manual_seed(0)
        for step in range(1, 6):
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"])) if step == 3 else None
            x = torch.randn(4, 6)
            if step == 3:
                x[1, 2] = torch.inf
            pipe.forward_backward(x, torch.randn(4, 2))
            info = pipe.step(max_grad_norm=1.0)
            scheduler.step()
            assert info.skipped == (step == 3)
            pipe.synchronize()
            after = (model.state_dict(), optimizer.state_dict()["state"])
            if before is not None:
                assert info.loss_scale == 65536 and scaler.get_scale() == 32768
                assert all(torch.equal(after[0][name], value) for name, value in before[0].items())
                for key, values in before[1].items():
                    assert values["step"] == 2
                    assert all(torch.equal(after[1][key][name], value) for name, value in values.items())
        assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5**5
        assert next(iter(optimizer.state_dict()["state"].values()))["step"] == 4
        assert scaler.get_scale() == 32768


@pytest.mark.parametrize("asynchronous", [False, True])
def test_clipping_on_unscaled_gradients_of_two_workers(session: PausedSession, asynchronous: bool) -> None:
    """N6: true gradients 3 and 4, scale 1024, limit 1; then an infinity in the second worker's alone."""
    model = nn.Sequential(Columns(0), Columns(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with rp.RoundPipe(
        model, optimizer, loss_fn=total, num_microbatches=2, grad_scaler=rp.GradScaler(1024.0), plan="layers",
        asynchronous=asynchronous, session=session,
    ) as pipe:  # fmt: skip
        ran = {post.role: shell for post, shell in session._workers}
        assert len(ran) == 2
        pipe.forward_backward(torch.tensor([[3.0, 4.0], [3.0, 4.0]]))
        assert {name: value.item() for name, value in pipe.gradients().items()} == {"0.w": 3.0, "1.w": 4.0}
        info = pipe.step(max_grad_norm=1.0)
        assert info.grad_norm == 5.0 and info.loss_scale == 1024.0 and not info.skipped
        pipe.synchronize()
        moved_by = [1 - model[0].w.item(), 1 - model[1].w.item()]
        assert moved_by == pytest.approx([0.6, 0.8], abs=1e-6)
        pipe.forward_backward(torch.tensor([[3.0, torch.inf], [3.0, 4.0]]))
        assert pipe.step(max_grad_norm=1.0).skipped
        pipe.synchronize()
        assert [1 - model[0].w.item(), 1 - model[1].w.item()] == moved_by
        assert pipe.grad_scaler.get_scale() == 512.0


def test_float16_gets_a_scaler_and_the_loss_is_never_scaled(session: PausedSession) -> None:
    model = small()
    x, y = torch.randn(4, 6).half(), torch.randn(4, 2)
    expected = mse(copy.deepcopy(model).half()(x), y).item()
    with rp.RoundPipe(model, adamw(model), loss_fn=mse, dtype=torch.float16, num_microbatches=1, session=session) as p:
        assert p.grad_scaler.get_scale() == 65536
        assert float(p.forward_backward(x, y)) == expected
        assert p.step().loss == expected
        assert p.evaluate([(x, y)]).num_items == 4
    model = small(torch.float16)  # parameters that are float16 already
    with rp.RoundPipe(model, adamw(model), loss_fn=mse, session=session) as pipe:
        assert pipe.grad_scaler is not None
    model = small()
    with rp.RoundPipe(model, adamw(model), loss_fn=mse, grad_dtype=torch.float16, session=session) as pipe:
        assert pipe.grad_scaler is not None
    for model in (small(), small(torch.bfloat16)):
        with rp.RoundPipe(model, adamw(model), loss_fn=mse, session=session) as pipe:
            assert pipe.grad_scaler is None


def test_a_scaler_that_is_not_enabled(session: PausedSession) -> None:
    model = nn.Sequential(Times())
    scaler = rp.GradScaler(enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with rp.RoundPipe(model, optimizer, loss_fn=total, num_microbatches=1, grad_scaler=scaler, session=session) as pipe:
        pipe.forward_backward(torch.tensor([torch.inf]))
        info = pipe.step()
        assert not info.skipped and info.loss_scale == 1.0
        assert scaler.get_scale() == 1.0 and scaler.state_dict() == {}
        scaler.load_state_dict({})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_after_a_failed_iteration_the_scaler_is_as_before_it(session: PausedSession, asynchronous: bool) -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x == 7).any():
                raise ValueError("seven")
            return x

    model = nn.Sequential(Times(), Raises())
    scaler = rp.GradScaler(8.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with rp.RoundPipe(
        model, optimizer, loss_fn=total, num_microbatches=1, grad_scaler=scaler, asynchronous=asynchronous,
        plan="layers", session=session,
    ) as pipe:  # fmt: skip
        used = []
        for x in (1.0, 1.0, 7.0, 1.0, 1.0, 1.0):
            try:
                loss = pipe.forward_backward(torch.tensor([x]))
                float(loss)
                used.append(pipe.step().loss_scale)
            except ValueError:
                assert scaler.get_scale() == 32.0
        stale = [8.0, 8.0, 32.0, 32.0, 64.0]  # the repeated iteration and the next one read version 2
        assert used == (stale if asynchronous else [8.0, 16.0, 32.0, 64.0, 128.0])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_is_taken_over_also_from_and_by_torch(session: PausedSession, asynchronous: bool) -> None:
    model = nn.Sequential(Times())
    scaler = rp.GradScaler(8.0, growth_interval=2)
    assert scaler.state_dict() == torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2).state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with rp.RoundPipe(
        model, optimizer, loss_fn=total, num_microbatches=1, grad_scaler=scaler, asynchronous=asynchronous,
        session=session,
    ) as pipe:  # fmt: skip
        x = torch.tensor([1.0])
        pipe.forward_backward(x)
        pipe.step()
        pipe.forward_backward(x)
        with pytest.raises(rp.RoundPipeError, match="scaled already"):
            scaler.load_state_dict(scaler.state_dict())
        pipe.step()
        other = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scaler.load_state_dict({**other.state_dict(), "_growth_tracker": 1})
        used = []
        for _ in range(4):
            pipe.forward_backward(x)
            assert pipe.gradients()["0.w"] == 1.0
            used.append(pipe.step().loss_scale)
        assert used == ([1024.0, 1024.0, 2048.0, 2048.0] if asynchronous else [1024.0, 2048.0, 2048.0, 4096.0])
        other.load_state_dict(scaler.state_dict())
        assert other.state_dict()["scale"] == scaler.get_scale() == 4096.0
    assert scaler.get_scale() == 4096.0  # also when its pipe is closed
    with pytest.raises(rp.RoundPipeError, match="lacks growth_factor"):
        scaler.load_state_dict({"scale": 1.0})
    with pytest.raises(rp.RoundPipeError, match="not enabled"):
        scaler.load_state_dict({})


def test_habits_are_caught(session: PausedSession) -> None:
    scaler = rp.GradScaler()
    for call, replacement in (
        (scaler.scale, "forward_backward"),
        (scaler.unscale_, r"step\(max_grad_norm"),
        (scaler.step, r"pipe\.step\(\)"),
        (scaler.update, r"pipe\.step\(\)"),
    ):
        with pytest.raises(rp.RoundPipeError, match=replacement):
            call(torch.ones(()))
    model = small()
    with pytest.raises(rp.ConfigError, match=r"rp\.GradScaler"):
        rp.RoundPipe(model, adamw(model), loss_fn=mse, grad_scaler=torch.amp.GradScaler("cpu"), session=session)
    with rp.RoundPipe(model, adamw(model), loss_fn=mse, grad_scaler=scaler, name="a", session=session):
        other = small()
        with pytest.raises(rp.ConfigError, match="pipe 'a'"):
            rp.RoundPipe(other, adamw(other), loss_fn=mse, grad_scaler=scaler, name="b", session=session)
    for arguments in ({"init_scale": "cuda"}, {"init_scale": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0},
                      {"growth_interval": 0}):  # fmt: skip
        with pytest.raises(rp.ConfigError):
            rp.GradScaler(**arguments)


@pytest.mark.parametrize("tracker", [0, 1, 2])
@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**127])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_the_scale_moves_as_torchs(scale: float, tracker: int, found: float) -> None:
    tensor, good = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
    torch._amp_update_scale_(tensor, good, torch.tensor(found), 2.1, 0.3, 3)
    state = moved(ScalerState(scale, 2.1, 0.3, 3, tracker), found_inf=bool(found), ran_under=scale)
    assert (state.scale, state.growth_tracker) == (tensor.item(), good.item())
    assert inverse_of(scale) == torch.tensor(scale).double().reciprocal().float().item()
    assert from_dict(as_dict(state, 5.0)) == (state, 5.0)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("saved_after", [1, 3, 5])
def test_a_resumed_run_goes_on_under_the_same_scale(tmp_path: Path, asynchronous: bool, saved_after: int) -> None:
    """C2: scale, growth counter, and the scale that an asynchronous iteration still uses."""
    torch.manual_seed(2)
    batches = [(torch.randn(4, 6).half(), torch.randn(4, 2)) for _ in range(8)]
    batches[2][0][0, 0] = torch.inf

    def run(first: int, last: int, *, save: bool, load: bool) -> tuple[list[Any], Any, list[Tensor]]:
        model = small()
        with (
            inline(workers=1 + load) as session,
            rp.RoundPipe(
                model, adamw(model), loss_fn=mse, num_microbatches=2, dtype=torch.float16, asynchronous=asynchronous,
                grad_scaler=rp.GradScaler(2.0**16, growth_interval=2), plan="layers", session=session,
            ) as pipe,
        ):  # fmt: skip
            if load:
                pipe.load_checkpoint(tmp_path)
            infos = []
            for number in range(first, last):
                pipe.forward_backward(*batches[number])
                infos.append(pipe.step())
                if save and number + 1 == saved_after:
                    pipe.save_checkpoint(tmp_path)
            steps = [(info.skipped, info.loss_scale, info.loss) for info in infos]
            state = pipe.grad_scaler.state_dict()
        return steps, state, [parameter.detach() for parameter in model.parameters()]

    whole = run(0, 8, save=True, load=False)
    rest = run(saved_after, 8, save=False, load=True)
    assert any(skipped for skipped, _, _ in whole[0])
    assert repr(rest[0]) == repr(whole[0][saved_after:])
    assert rest[1] == whole[1]
    assert all(torch.equal(a, b) for a, b in zip(rest[2], whole[2], strict=True))


# --- without an optimizer nothing is trained, so nothing is to be rounded


@pytest.mark.parametrize("in_slabs", [False, True])
def test_a_pipe_that_only_looks_leaves_the_model_as_it_was(session: PausedSession, in_slabs: bool) -> None:
    model = small()
    if in_slabs:
        layers = [(str(position), layer) for position, layer in enumerate(model)]
        move_into_slabs(client_of(session), model, layers, lambda done, of: None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    held = client_of(session).slabs.live_bytes
    x = torch.randn(4, 6)
    wanted = copy.deepcopy(model).bfloat16()(x.bfloat16())
    for _ in range(2):
        with rp.RoundPipe(model, dtype=torch.bfloat16, session=session) as pipe:
            assert torch.equal(pipe.forward(x.bfloat16()), wanted)
            assert next(model.parameters()).dtype == torch.bfloat16
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float32 and torch.equal(parameter, before[name]), name
        assert client_of(session).slabs.live_bytes == held


def test_what_is_loaded_into_such_a_pipe_stays(session: PausedSession) -> None:
    model = small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = next(iter(before))
    with rp.RoundPipe(model, dtype=torch.bfloat16, session=session) as pipe:
        pipe.load_state_dict({first: before[first] + 1}, strict=False)
    for name, parameter in model.named_parameters():
        wanted = (before[name] + 1).bfloat16() if name == first else before[name]
        assert parameter.dtype == wanted.dtype and torch.equal(parameter, wanted), name
