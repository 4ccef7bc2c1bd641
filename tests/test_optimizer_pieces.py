"""The step in pieces: bit for bit what `optimizer.step()` over whole units does, with one write to every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rpruntime.optimizer import pieces, units
from rpruntime.optimizer.norms import Norms, in_windows
from rpruntime.optimizer.pieces import GRAIN, Cutter, Run, Scratch, in_batches
from rpruntime.store.allocator import align
from rpruntime.store.arena import Arena, Store, view
from rpruntime.store.layout import gradient_layout, packed
from rpruntime.store.segments import PrivateSegments
from rpruntime.wire.messages import ParamSpec, SlabPart, UnitSpec

SHAPES = ((33, 1001), (), (7,), (0, 3), (4096,), (5,), (129, 77))
EVERY = (True,) * len(SHAPES)
SOME = (True, False, True, True, False, True, True)

adamw, adam, sgd, adagrad = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: adamw(p, lr=0.01),
    "adamw, fused": lambda p: adamw(p, lr=0.01, fused=True),
    "adamw, decay, amsgrad": lambda p: adamw(p, lr=0.01, weight_decay=0.3, amsgrad=True),
    "adam, decay, maximize": lambda p: adam(p, lr=0.01, weight_decay=0.3, maximize=True),
    "adam, tensor lr": lambda p: adam(p, lr=torch.tensor(0.01), betas=(0.8, 0.7)),
    "sgd": lambda p: sgd(p, lr=0.1),
    "sgd, decay, maximize": lambda p: sgd(p, lr=0.1, weight_decay=0.3, maximize=True),
    "sgd, momentum": lambda p: sgd(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd, nesterov": lambda p: sgd(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5),
}


class Bed:
    """One unit on private memory, with gradients that are the same in every bed of the same seed."""

    def __init__(
        self, make: Callable[[Any], torch.optim.Optimizer], dtype: str = "bfloat16", grad_dtype: str | None = None
    ) -> None:
        self.segments = PrivateSegments()
        self.arena = Arena("bed", self.segments, Store(self.segments))
        offsets, nbytes = packed(list(SHAPES), [dtype] * len(SHAPES))
        params = tuple(
            ParamSpec(f"p{number}", offset, shape, dtype, grad_dtype or dtype, number % 2)
            for number, (offset, shape) in enumerate(zip(offsets, SHAPES, strict=True))
        )
        self.unit = units.Unit(UnitSpec(0, True, (0,), nbytes, params), self.arena, Scratch())
        self.generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in self.unit.params:
                param.copy_(self._random(tuple(param.shape)))
        both = [self.unit.params[0::2], self.unit.params[1::2]]
        self.unit.adopt_optimizer(make([{"params": members} for members in both]))
        self.unit.place_state()
        self.groups: tuple[dict[str, Any], ...] = ({}, {})
        self.master: Tensor | None = None

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def slab(self, present: tuple[bool, ...] = EVERY) -> SlabPart:
        """Gradients, with garbage where there are none."""
        spec = self.unit.spec
        offsets, nbytes = gradient_layout(spec)
        extent = self.arena.allocate(nbytes)
        memory = self.arena.store.bytes_of(extent)
        memory.fill_(0xFF)
        for param, offset in zip(spec.params, offsets, strict=True):
            view(memory, offset, param.shape, param.grad_dtype).copy_(self._random(param.shape))
        return SlabPart(0, extent, present)

    def step(
        self, present: tuple[bool, ...] = EVERY, inverse: float = 1.0, factor: float = 1.0, slabs: int = 1
    ) -> None:
        """One step with the gradients of so many slabs."""
        for part in [self.slab(present) for _ in range(slabs)]:
            self.unit.add(0, part)
            self.arena.store.bytes_of(part.extent).fill_(0x7F)  # its worker uses the memory for something else
            self.arena.free(part.extent)
        extent = self.unit.step(0, self.groups, inverse, factor)
        assert extent is not None
        self.master = self.arena.store.bytes_of(extent).clone()
        self.unit.drop_sum(0)
        self.arena.free(extent)

    def values(self) -> dict[str, Any]:
        """All that a step may change, by name."""
        found: dict[str, Any] = {f"{index}": param.detach() for index, param in enumerate(self.unit.params)}
        found |= {f"{index}.{name}": value for index, name, value in self.unit.state_rows()}
        assert self.master is not None
        spec = self.unit.spec
        return found | {f"master {p.name}": view(self.master, p.offset, p.shape, p.dtype) for p in spec.params}


@pytest.fixture(autouse=True)
def small_batches(single_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest parameter is cut some dozens of times."""
    monkeypatch.setattr(pieces, "ELEMENTS_A_THREAD", 1024)


def assert_equal(ours: Bed, theirs: Bed) -> None:
    first, second = ours.values(), theirs.values()
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0, equal_nan=True, msg=name)


def beds(monkeypatch: pytest.MonkeyPatch, *args: Any) -> Iterator[tuple[Bed, Bed, Callable[..., None]]]:
    """A bed that steps in pieces, one that steps as a whole, and a step of both."""
    ours, theirs = Bed(*args), Bed(*args)
    whole = ours.unit._step_whole

    def forbidden(*args: Any) -> None:
        raise AssertionError("stepped as a whole")

    def both(*args: Any, **settings: Any) -> None:
        ours.unit._step_whole = forbidden  # type: ignore[method-assign]
        ours.step(*args, **settings)
        ours.unit._step_whole = whole  # type: ignore[method-assign]
        with monkeypatch.context() as patch:
            patch.setattr(units, "is_fused", lambda optimizer: False)
            theirs.step(*args, **settings)
        assert_equal(ours, theirs)

    yield ours, theirs, both
    for bed in (ours, theirs):
        bed.unit.free()
        assert bed.arena.live_bytes == 0
        bed.segments.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_pieces_is_the_step_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for ours, theirs, both in beds(monkeypatch, OPTIMIZERS[name]):
        both()
        both()
        both(factor=0.3)
        both(inverse=1 / 1024, factor=0.7)
        both(slabs=3)
        both(slabs=2, inverse=0.125)
        ours.groups = theirs.groups = ({"lr": 0.5, "weight_decay": 0.25}, {"lr": 0.03})
        both(SOME)
        both()
        counts = {int(value) for _, key, value in ours.unit.state_rows() if key == "step"}
        assert counts <= {7, 8}, "once for each step with a gradient"


def test_several_threads_step_to_the_same_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "ELEMENTS_A_THREAD", 5008)
    torch.set_num_threads(3)
    try:
        for _, _, both in beds(monkeypatch, OPTIMIZERS["adamw"]):
            both()
            both(factor=0.3)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("name", ["adamw", "sgd, momentum", "adagrad"])
@pytest.mark.parametrize(
    "dtypes", [("float16", None), ("float32", None), ("float64", None), ("bfloat16", "float32"), ("float32", "float16")]
)
def test_every_dtype_is_stepped_to_the_bit(
    name: str, dtypes: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, _, both in beds(monkeypatch, OPTIMIZERS[name], *dtypes):
        both()
        both(factor=0.3)
        both(slabs=2)
        both(inverse=0.5, slabs=2)


@pytest.mark.parametrize("name", ["adamw", "adagrad"])
def test_parameters_without_gradient_stay_and_begin_later(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for ours, _, both in beds(monkeypatch, OPTIMIZERS[name]):
        before = ours.unit.params[1].detach().clone()
        both(SOME)
        assert torch.equal(ours.unit.params[1], before)
        both()
        both(tuple(not here for here in SOME))
        both()


def test_momentum_begins_with_the_first_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it comes: torch's fused step refuses a group of which only some have momentum."""
    ours = Bed(OPTIMIZERS["sgd, momentum"], "float32")
    plain = Bed(lambda p: sgd(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1, foreach=False), "float32")
    for present in (SOME, EVERY, SOME, EVERY):
        ours.step(present)
        plain.step(present)
        for mine, other in zip(ours.unit.params, plain.unit.params, strict=True):
            torch.testing.assert_close(mine, other)


def test_a_nan_goes_where_torch_lets_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for ours, theirs, both in beds(monkeypatch, OPTIMIZERS["adamw"]):
        for bed in (ours, theirs):
            with torch.no_grad():
                bed.unit.params[0][3, 5] = float("nan")
        both()
        both(factor=float("nan"))
        assert ours.unit.params[2].isnan().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: adamw(p, fused=False),
        lambda p: adamw(p, foreach=True),
        lambda p: torch.optim.RMSprop(p),
        lambda p: type("Own", (adamw,), {})(p),
    ],
    ids=["not fused", "foreach", "another class", "a derived class"],
)
def test_what_is_not_torchs_fused_step_is_stepped_by_the_optimizer_itself(make: Any) -> None:
    bed = Bed(make)
    calls = []
    whole = bed.unit._step_whole
    bed.unit._step_whole = lambda *args: (calls.append(1), whole(*args))  # type: ignore[method-assign, assignment]
    bed.step()
    bed.step(factor=0.5)
    assert len(calls) == 2


def test_a_hook_of_the_optimizer_runs() -> None:
    bed = Bed(OPTIMIZERS["adamw"])
    ran = []
    assert bed.unit.optimizer is not None
    bed.unit.optimizer.register_step_post_hook(lambda *args: ran.append(1))
    bed.step()
    assert ran == [1]


def test_a_step_that_fails_takes_no_memory() -> None:
    bed = Bed(OPTIMIZERS["adamw"])
    bed.step()
    before = bed.arena.live_bytes
    bed.groups = ({"lr": "fast"}, {})
    part = bed.slab()
    bed.unit.add(0, part)
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        bed.unit.step(0, bed.groups, 1.0, 1.0)
    bed.unit.drop_sum(0)
    bed.arena.free(part.extent)
    assert bed.arena.live_bytes == before


@pytest.mark.parametrize(
    "dtype, grad_dtype, slabs, in_place",
    [
        ("bfloat16", "bfloat16", 1, True),
        ("bfloat16", "bfloat16", 2, False),
        ("bfloat16", "float32", 1, False),
        ("float32", "float32", 1, True),
        ("float32", "float32", 3, True),
    ],
)
def test_new_weights_take_the_gradients_place(dtype: str, grad_dtype: str, slabs: int, in_place: bool) -> None:
    """Where they lie alike, a step needs no memory: neither for gradients nor for sums or weights."""
    bed = Bed(OPTIMIZERS["adamw"], dtype, grad_dtype)
    bed.step()
    live = bed.arena.live_bytes
    for _ in range(slabs):
        part = bed.slab()
        bed.unit.add(0, part)
        bed.arena.free(part.extent)
    kept = bed.arena.live_bytes
    extent = bed.unit.step(0, bed.groups, 1.0, 1.0)
    assert extent is not None
    assert (bed.arena.live_bytes == kept) is in_place
    bed.unit.drop_sum(0)
    assert bed.arena.live_bytes == live + align(bed.unit.spec.nbytes)


def test_a_slab_without_gradients_is_no_gradient() -> None:
    bed = Bed(OPTIMIZERS["adamw"])
    live = bed.arena.live_bytes
    part = bed.slab((False,) * len(SHAPES))
    bed.unit.add(0, part)
    bed.arena.free(part.extent)
    assert bed.unit.step(0, bed.groups, 1.0, 1.0) is None
    assert bed.unit.gradients(0) == [None] * len(SHAPES)
    assert bed.arena.live_bytes == live


def test_the_steady_state_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(OPTIMIZERS["adamw"])
    for _ in range(2):
        bed.step(slabs=2)
    parts = [bed.slab(), bed.slab()]
    total = bed.arena.total_bytes
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for part in parts:
            bed.unit.add(0, part)
        extent = bed.unit.step(0, bed.groups, 1.0, 0.5)
        assert extent is not None
        bed.unit.drop_sum(0)
        bed.arena.free(extent)
    taken = [event.self_cpu_memory_usage for event in profile.events()]
    assert taken
    assert max(taken) <= 64, "counters of steps at most"
    assert bed.arena.total_bytes == total


def test_state_has_its_room_before_the_first_step() -> None:
    bed = Bed(OPTIMIZERS["adamw"])
    live = bed.arena.live_bytes
    assert bed.unit.state_bytes() >= 2 * 4 * (33 * 1001 + 4096 + 129 * 77)
    bed.step()
    assert bed.arena.live_bytes == live
    assert all(torch.is_tensor(value) for _, _, value in bed.unit.state_rows())


# --- arithmetic of pieces


@given(st.lists(st.integers(0, 5000), max_size=12), st.integers(1, 40))
def test_batches_cover_everything_once_and_are_cut_where_no_vector_is(counts: list[int], grains: int) -> None:
    limit = grains * GRAIN
    found = in_batches(enumerate(counts), limit)
    assert all(sum(run.stop - run.start for run in batch) <= limit for batch in found)
    runs = [run for batch in found for run in batch]
    at = [0] * len(counts)
    for run in runs:
        assert run.start == at[run.index] and run.start % GRAIN == 0
        assert run.last == (run.stop == counts[run.index])
        at[run.index] = run.stop
    assert at == counts
    assert {run.index for run in runs} == set(range(len(counts)))
    assert sum(run.last for run in runs) == len(counts)


def test_a_cutter_finds_runs_of_several_dtypes() -> None:
    memory = torch.arange(1024, dtype=torch.int32).view(torch.uint8)
    runs = [Run(1, 0, 3, True), Run(0, 16, 20, True), Run(2, 0, 0, True), Run(0, 0, 16, False)]
    views = Cutter(runs, [256, 512, 768], ["int32", "int16", "int32"])(memory)
    assert [v.tolist() for v in views] == [[128, 0, 129], [80, 81, 82, 83], [], list(range(64, 80))]


def test_norms_are_torchs_whatever_runs_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpruntime.optimizer.norms.THREADED_ELEMENTS", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    gradients = [torch.randn(size) for size in (3000, 10, 200_001, 5000)] + [torch.randn(4000, dtype=torch.float64)]
    with Norms() as norms:
        found = norms.measure([*gradients[:2], None, *gradients[2:]])
        assert norms._pool is not None
    for norm, gradient in zip(found, gradients, strict=True):
        assert norm.dtype == gradient.dtype and norm == torch.linalg.vector_norm(gradient)


def test_units_share_a_window_as_long_as_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpruntime.optimizer.norms.WINDOW_BYTES", 10)
    assert in_windows("abcdef", [4, 6, 1, 20, 9, 2]) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert in_windows("", []) == []
