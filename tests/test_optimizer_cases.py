"""Gradients summed in 16 bits, memory taken beyond what was asked, bad input to the fused kernels (N3, M7, P2)."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import launcher
import rpruntime as rp
from rpruntime import ExecutionPlan
from rpruntime.optimizer.events import KeepOnly, TellModels
from rpruntime.optimizer.pieces import Scratch
from rpruntime.optimizer.units import Unit
from rpruntime.status import NullStatus
from rpruntime.store.arena import GROWTH_BYTES, Arena, Store
from rpruntime.store.handle import Extent, TensorHandle
from rpruntime.store.layout import packed
from rpruntime.store.segments import PrivateSegments
from rpruntime.wire.messages import ParamSpec, SlabPart, UnitSpec
from rpruntime.wire.succession import ModelRow, ModelState, ReadModelsMsg
from tests.reference import PausedSession, Times, live_bytes

SOURCES = [Path(package.__file__ or "").parent for package in (rp, launcher)]


def identity(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.float().sum()


# --- N3


def lost_in(dtype: torch.dtype, small: float) -> int:
    """How many of them make 1; one after the other, in `dtype`, they vanish beside a 1."""
    assert torch.ones((), dtype=dtype) + torch.tensor(small, dtype=dtype) == 1.0
    return round(1 / small)


@pytest.mark.parametrize("round_size", [None, 1])
@pytest.mark.parametrize(
    "dtype, small", [(torch.bfloat16, 2**-9), pytest.param(torch.float16, 2**-11, marks=pytest.mark.slow)]
)
def test_the_optimizer_gets_what_16_bits_would_lose(
    session: PausedSession, dtype: torch.dtype, small: float, round_size: int | None
) -> None:
    """A step of lr 1 shows what it got. `round_size` 1: each contribution is a slab, and the optimizer adds them up."""
    count = lost_in(dtype, small)
    x = torch.tensor([1.0] + [small] * count).to(dtype)
    model = nn.Sequential(Times(4.0, dtype=dtype))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = rp.GradScaler(init_scale=1.0) if dtype == torch.float16 else None
    with rp.RoundPipe(
        model, sgd, loss_fn=identity, num_microbatches=count + 1, plan=ExecutionPlan([], [range(1)], round_size),
        grad_scaler=scaler, session=session,
    ) as pipe:  # fmt: skip
        pipe.forward_backward(x, torch.zeros(count + 1), num_items=1)
        (gradient,) = pipe.gradients().values()
        assert gradient.dtype == torch.float32 and gradient == 2.0
        pipe.step().result()
        pipe.synchronize()
        assert model[0].w.item() == 2.0


@pytest.mark.parametrize("dtype, small", [("bfloat16", 2**-9), ("float16", 2**-12)])
def test_slabs_of_16_bits_are_added_in_fp32(dtype: str, small: float) -> None:
    """1 and then small ones, slab after slab, in a parameter that one batch takes and in one that is cut."""
    count = lost_in(getattr(torch, dtype), small)
    segments = PrivateSegments()
    arena = Arena("arena", segments, Store(segments))
    offsets, nbytes = packed([(3,), (40,)], [dtype] * 2)
    params = tuple(
        ParamSpec("p", offset, shape, dtype, dtype, 0) for offset, shape in zip(offsets, [(3,), (40,)], strict=True)
    )
    unit = Unit(UnitSpec(0, True, (0,), nbytes, params), arena, Scratch())
    slab = arena.allocate(nbytes)
    for value in (1.0, *[small] * count):
        arena.store.bytes_of(slab).view(getattr(torch, dtype)).fill_(value)
        unit.add(0, SlabPart(0, slab, (True, True)))
    for gradient in unit.gradients(0):
        assert gradient is not None and gradient.dtype == torch.float32 and (gradient == 2.0).all()
    segments.close()


# --- M7


class Sizes(PrivateSegments):
    """Remembers what the machine was asked for; nothing is touched, so nothing is resident."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def create(self, nbytes: int) -> tuple[str, mmap.mmap]:
        self.asked += nbytes
        return super().create(nbytes)


@pytest.mark.parametrize("buffers", [[9 << 28], [1288490189] * 5], ids=["2.25 GiB", "five of 1.2 GiB"])
def test_memory_is_what_was_asked_for(buffers: list[int]) -> None:
    source = Sizes()
    arena = Arena("arena", source, Store(source))
    arena.reserve(sum(buffers) + 256 * len(buffers))
    for nbytes in buffers:
        arena.allocate(nbytes)
    assert source.asked == arena.total_bytes <= 1.02 * sum(buffers)
    source.close()


@pytest.mark.parametrize(
    "kind, asynchronous",
    [
        ("AdamW", False),
        ("SGD", True),
        *(
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in (("AdamW", True), ("SGD", False), ("Adagrad", False), ("Adagrad", True))
        ),
    ],
)
def test_the_optimizers_memory_is_reserved_once_at_load(session: PausedSession, kind: str, asynchronous: bool) -> None:
    """bf16 weights and fp32 copies to the byte; then nothing grows.

    But once, when asynchronous: inline, a call is done when its step is asked for, and the weights that it has read are
    all there until then.
    """
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    settings: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **settings)
    arena = session._optimizer[1]._arena
    with rp.RoundPipe(
        model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=2, dtype=torch.bfloat16,
        asynchronous=asynchronous, session=session,
    ) as pipe:  # fmt: skip
        pipe.forward_backward(torch.randn(4, 256).bfloat16(), torch.randn(4, 256).bfloat16())
        count = 8 * 256 * 256
        states = 2 if kind == "AdamW" else 1
        assert arena.total_bytes == (2 + 4 + 4 * states + 2) * count
        reserved = arena.total_bytes
        for number in range(6):
            pipe.step(max_grad_norm=1.0).result()
            pipe.forward_backward(torch.randn(4, 256).bfloat16(), torch.randn(4, 256).bfloat16())
            if asynchronous and number == 1:
                assert arena.total_bytes == reserved + GROWTH_BYTES
                reserved = arena.total_bytes
        pipe.step().result()
        assert arena.total_bytes == reserved, "gradients come where old weights were, and become new ones"
    grown = 0 if asynchronous else GROWTH_BYTES
    assert arena.total_bytes - reserved == grown, "at the end all state lies there once more, for the script"
    reserved = arena.total_bytes
    with rp.RoundPipe(
        model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=2, asynchronous=asynchronous, session=session
    ) as pipe:
        pipe.forward_backward(torch.randn(4, 256).bfloat16(), torch.randn(4, 256).bfloat16())
    assert arena.total_bytes == reserved, "another model takes the same memory"


def test_no_pinned_buffer_of_torch_is_made() -> None:
    """Its allocator rounds each up to a power of two."""
    for folder in SOURCES:
        files = list(folder.rglob("*.py"))
        assert files
        for path in files:
            text = path.read_text()
            assert "pin_memory=" not in text and ".pin_memory(" not in text, path


# --- P2


class Holder(nn.Module):
    """Parameters in every layout: transposed, sliced with gaps, 0-d, empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.transposed = nn.Parameter(torch.randn(8, 6).t())
        self.gaps = nn.Parameter(torch.randn(6, 10)[:, ::2])
        self.large = nn.Parameter(torch.randn(70, 60).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        total = (x @ self.transposed).square().sum(-1) + (x @ self.gaps).sum(-1) * self.scalar
        return total + self.empty.sum() + self.large.square().mean()


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "Adagrad"])
@pytest.mark.parametrize("stepped_before", [False, True])
def test_parameters_in_any_layout_are_stepped_rightly(session: PausedSession, kind: str, stepped_before: bool) -> None:
    """Also where the script has stepped before, so that moments have these layouts too."""
    settings: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    x, y = torch.randn(4, 6) / 4, torch.randn(4)
    before = Holder().large.detach()
    ours, plain = nn.Sequential(Holder()), nn.Sequential(Holder())
    optimizers = []
    for model in (ours, plain):
        optimizers.append(getattr(torch.optim, kind)(model.parameters(), lr=0.01, foreach=False, **settings))
        optimizers[-1].param_groups[0]["foreach"] = None
        if stepped_before:
            nn.functional.mse_loss(model(x), y).backward()
            optimizers[-1].step()
            optimizers[-1].zero_grad()
    with rp.RoundPipe(ours, optimizers[0], loss_fn=nn.functional.mse_loss, num_microbatches=1, session=session) as pipe:
        for _ in range(3):
            pipe.forward_backward(x, y)
            pipe.step()
            nn.functional.mse_loss(plain(x), y).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        pipe.synchronize()
        for (name, mine), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), other.detach(), msg=lambda text, name=name: f"{name}: {text}")
            assert mine.isfinite().all()
        assert not torch.equal(ours[0].large.detach(), before)


def test_a_nan_in_a_weight_stays_a_nan(session: PausedSession) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[3, 4] = float("nan")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with rp.RoundPipe(model, optimizer, loss_fn=identity, num_microbatches=1, session=session) as pipe:
        pipe.forward_backward(torch.ones(2, 64), torch.zeros(2))
        assert pipe.step().result().skipped is False
        pipe.synchronize()
        assert model[0].weight[3, 4].isnan() and not model[0].weight[5].isnan().any()


def test_a_setting_that_the_kernel_refuses_is_an_error_of_the_step(session: PausedSession) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    pipe = rp.RoundPipe(model, optimizer, loss_fn=identity, num_microbatches=1, session=session)
    optimizer.param_groups[0]["betas"] = (0.9, "much")
    pipe.forward_backward(torch.ones(2, 4), torch.zeros(2))
    info = pipe.step()
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        info.result()
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        pipe.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_step_is_done_without_a_gradient_that_found_no_room(
    session: PausedSession, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pipe = rp.RoundPipe(
        model, optimizer, loss_fn=identity, num_microbatches=1, asynchronous=asynchronous, session=session
    )
    add = Unit.add

    def add_some(unit: Unit, iteration: int, part: SlabPart) -> None:
        if iteration == 1 and unit.spec.positions == (0,):
            raise rp.RoundPipeError("no room for a gradient")
        add(unit, iteration, part)

    monkeypatch.setattr(Unit, "add", add_some)
    shell = session._optimizer[1]
    (loaded,) = shell._models.values()
    params = [param for unit in loaded.units if unit is not None for param in unit.params]
    pipe.forward_backward(torch.ones(2, 4), torch.zeros(2))
    pipe.step().result()
    before = [param.detach().clone() for param in params]
    session.paused = True
    pipe.forward_backward(torch.ones(2, 4), torch.zeros(2))
    info = pipe.step()
    session.paused = False
    with pytest.raises(rp.RoundPipeError, match="no room for a gradient"):
        info.result()
    with pytest.raises(rp.RoundPipeError, match="no room for a gradient"):
        pipe.forward_backward(torch.ones(2, 4), torch.zeros(2))
    assert all(map(torch.equal, params, before)), "nothing was stepped"
    with pytest.raises(rp.RoundPipeError, match="no room for a gradient"):
        pipe.close()


class Refusing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise MemoryError("no room to step")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_other_models_go_on_when_the_optimizer_gives_one_up(session: PausedSession, asynchronous: bool) -> None:
    """What the first one has queued waits for weights that never come, in front of the second one's."""

    def make(name: str, kind: type[torch.optim.Optimizer]) -> rp.RoundPipe:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return rp.RoundPipe(
            model, kind(model.parameters(), lr=0.1), loss_fn=identity, num_microbatches=2, plan="layers", name=name,
            asynchronous=asynchronous, session=session,
        )  # fmt: skip

    refused, other = make("refused", Refusing), make("other", torch.optim.SGD)
    x, y = torch.ones(2, 4), torch.zeros(2)
    session.paused = True
    for _ in range(2):
        refused.forward_backward(x, y)
        refused.step()
    session.paused = False
    for _ in range(3):
        other.forward_backward(x, y)
        assert other.step().result().skipped is False
    with pytest.raises(MemoryError, match="no room to step"):
        refused.forward_backward(x, y)
    with pytest.raises(MemoryError, match="no room to step"):
        refused.close()
    other.close()


def failing_arena(monkeypatch: pytest.MonkeyPatch, owner: str, number: int) -> None:
    """An owner's allocation of this number, from now on, finds no room."""
    allocate, count = Arena.allocate, [0]

    def allocate_some(arena: Arena, nbytes: int, kind: str = "") -> Any:
        if arena.owner == owner:
            count[0] += 1
            if count[0] == number:
                raise rp.HostMemoryError("no room in the arena")
        return allocate(arena, nbytes, kind)

    monkeypatch.setattr(Arena, "allocate", allocate_some)


@pytest.mark.parametrize("number", range(1, 20, 3))
def test_a_model_that_finds_no_room_leaves_nothing_behind(
    session: PausedSession, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:

    def train() -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        with rp.RoundPipe(model, optimizer, loss_fn=identity, num_microbatches=1, session=session) as pipe:
            for _ in range(2):
                pipe.forward_backward(torch.ones(2, 64), torch.zeros(2))
                pipe.step().result()

    failing_arena(monkeypatch, "optimizer.1", number)
    with pytest.raises(rp.HostMemoryError, match="no room in the arena"):
        train()
    assert live_bytes(session) == {}


def test_a_model_that_cannot_be_kept_for_another_program_takes_no_other_with_it(
    session: PausedSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipes = []
    for name in ("lost", "kept"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        pipes.append(rp.RoundPipe(model, sgd, loss_fn=identity, num_microbatches=1, name=name, session=session))
        pipes[-1].forward_backward(torch.ones(2, 4), torch.zeros(2))
        pipes[-1].step().result()
    shell = session._optimizer[1]
    versions = {number: tuple(model.master) for number, model in shell._models.items()}
    second = shell._models[2]
    with monkeypatch.context() as patch:
        failing_arena(patch, "optimizer.1", 1)
        shell._keep_only(KeepOnly(versions, {}))
    shell.step([])
    assert "model lost cannot be kept for another program: no room in the arena" in caplog.text
    assert shell._models == {2: second} and second.kept.package is not None
    pipes[1].close()
    assert live_bytes(session).get("optimizer.1", 0) == 0, "nor does it keep memory"


@pytest.mark.parametrize("whole", [False, True])
def test_only_what_was_made_to_tell_the_models_goes_with_who_was_told(session: PausedSession, whole: bool) -> None:
    """Weights and the package are the optimizer's, also where a program that reads them all changes nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    pipe = rp.RoundPipe(model, None, loss_fn=identity, num_microbatches=1, session=session)
    shell = session._optimizer[1]
    ((number, loaded),) = shell._models.items()
    keep = KeepOnly({number: tuple(loaded.master)}, {})
    shell._keep_only(keep)
    before = shell._arena.live_bytes
    spec = loaded.msg
    row = ModelRow(number, spec.name, 0, 0, 0)
    nowhere = TensorHandle(Extent("", "", 0, 0), 0, (), (), "")
    state = ModelState(
        number, nowhere, 0, 0, 0, None, ((0, 1.0),), tuple(loaded.master), tuple(loaded.master), (), (), 0, ()
    )
    for _ in range(2):
        shell._tell_models(TellModels(ReadModelsMsg("controller", whole), ((row, state),)))
        assert (shell._arena.live_bytes > before) == whole
        shell._keep_only(keep)
        assert shell._arena.live_bytes == before
    pipe.close()


def test_a_long_step_is_seen_to_move(session: PausedSession) -> None:
    """Whatever a step takes, its launcher sees each unit of it."""

    class Counted(NullStatus):
        count = 0

        def progress(self) -> None:
            self.count += 1

    status = session._optimizer[1]._status = Counted()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters())
    with rp.RoundPipe(model, optimizer, loss_fn=identity, num_microbatches=1, plan="layers", session=session) as pipe:
        pipe.forward_backward(torch.ones(2, 4), torch.zeros(2))
        session.paused, before = True, status.count
        pipe.step(max_grad_norm=1.0)
        session.paused = False
        pipe.synchronize()
        assert status.count - before >= 1 + 5, "the norm, and each unit"


WATCHED = """
import sys
import torch  # may start what it likes
seen = []
WATCH = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "ctypes.dlopen")
sys.addaudithook(lambda event, args: seen.append((event, str(args))) if event in WATCH else None)
import rpruntime as rp
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
with rp.RoundPipe(model, optimizer, loss_fn=torch.nn.functional.mse_loss, num_microbatches=2) as pipe:
    for _ in range(2):
        pipe.forward_backward(torch.randn(4, 64), torch.randn(4, 1))
        pipe.step(max_grad_norm=1.0).result()
print(seen, "torch.utils.cpp_extension" in sys.modules)
"""


def test_nothing_is_compiled(tmp_path: Path) -> None:
    """No compiler, no library that was built on the spot, and no source that would need one."""
    environment = {"PATH": "", "HOME": str(tmp_path), "RPRUNTIME_DEVICES": "inline", "RPRUNTIME_QUIET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED],
        env=environment,
        cwd=SOURCES[0].parent,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[] False", done.stdout
    assert not list(tmp_path.rglob("*.so"))
    native = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".so", ".pyx"}
    assert not [path for folder in SOURCES for path in folder.rglob("*") if path.suffix in native]
