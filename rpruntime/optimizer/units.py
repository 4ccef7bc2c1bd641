"""One storage unit in the optimizer process: its fp32 copy, its part of the user's optimizer, its sums."""

from __future__ import annotations

import bisect
import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rpruntime.optimizer.pieces import (
    FUSED,
    Cutter,
    PiecewiseStep,
    Scratch,
    batch_elements,
    in_batches,
    is_fused,
    is_regular,
    state_names,
    widen,
)
from rpruntime.store.allocator import align
from rpruntime.store.arena import Arena, view
from rpruntime.store.handle import Extent
from rpruntime.store.layout import gradient_layout, optimizer_dtype, optimizer_layout
from rpruntime.wire.messages import SlabPart, UnitSpec

SHARED_STATE_BYTES = 4096
"""Optimizer state tensors from this size on live in shared memory; step counters and the like stay private."""


@dataclass
class _Sum:
    """A unit's gradients of one iteration, in the arena."""

    extent: Extent
    kind: str
    """How they lie there: as in a worker's "slab", or as a "sum" in the optimizer's dtypes."""
    present: set[int]
    """Parameters that have a gradient."""


class Unit:
    """A trainable unit. Parameters are fp32 views of one extent; sums come and go by iteration."""

    def __init__(self, spec: UnitSpec, arena: Arena, scratch: Scratch) -> None:
        self.spec = spec
        self._arena = arena
        self._scratch = scratch
        self._store = arena.store
        offsets, nbytes = optimizer_layout(spec)
        self.extent = arena.allocate(nbytes)
        memory = self._store.bytes_of(self.extent)
        self.params = [
            torch.nn.Parameter(view(memory, offset, param.shape, optimizer_dtype(param.dtype)))
            for offset, param in zip(offsets, spec.params, strict=True)
        ]
        self.optimizer: torch.optim.Optimizer | None = None
        self._group_of: list[int] = []
        self._sums: dict[int, _Sum] = {}
        """By iteration."""
        self._received: list[dict[str, Any]] = []
        """Of each group, the hyper-parameters as the script last sent them."""
        self._shared: dict[tuple[int, str], tuple[Extent, torch.Tensor]] = {}
        """(parameter index, state name) -> where a large state tensor lies in the arena."""
        self._rooms: dict[tuple[int, str], tuple[Extent, torch.Tensor]] = {}
        """The same for state that the optimizer has not made yet."""
        self._offsets = {
            "slab": (gradient_layout(spec)[0], [param.grad_dtype for param in spec.params]),
            "sum": (offsets, [optimizer_dtype(param.dtype) for param in spec.params]),
            "master": ([param.offset for param in spec.params], [param.dtype for param in spec.params]),
        }
        """Of each kind of slab: bytes at which the parameters begin, and their dtypes."""
        self._nbytes = {"slab": gradient_layout(spec)[1], "sum": nbytes, "master": spec.nbytes}
        self._plan: PiecewiseStep | None = None
        self._plan_key: tuple[Any, ...] = ()
        self._cutters: dict[str, Cutter] = {}
        """Of the plan's runs, by kind of slab."""
        self._adding: tuple[Any, ...] = ((), [], None, None)
        """(present parameters, batches with their scratch, cutters of slabs and of sums) of the last addition."""

    def adopt_optimizer(self, whole: torch.optim.Optimizer) -> None:
        """Take this unit's parameters, groups and state out of the user's optimizer."""
        mine = {id(param) for param in self.params}
        own = object.__new__(type(whole))
        own.__dict__ = dict(whole.__dict__)
        own.param_groups = []
        for index, group in enumerate(whole.param_groups):
            params = [param for param in group["params"] if id(param) in mine]
            if params:
                own.param_groups.append(use_fast_kernel(type(whole), {**group, "params": params}))
                self._group_of.append(index)
                self._received.append({name: _plain(value) for name, value in group.items() if name != "params"})
        own.state = defaultdict(dict)
        for param in self.params:
            if param in whole.state:
                own.state[param] = {name: _widened(value, param) for name, value in whole.state[param].items()}
        own._patch_step_function()
        self.optimizer = own

    def state_bytes(self) -> int:
        """Bytes of the arena that `place_state` takes."""
        assert self.optimizer is not None
        tensors = [value for _, _, value in self.state_rows() if _is_large(value)]
        return sum(align(tensor.nbytes) for tensor in (*tensors, *(self.params[i] for i, _ in self._state_to_come())))

    def place_state(self) -> None:
        """Keep the adopted state in the arena; room for what the first step makes, where the class is known, too."""
        self._share_state([])
        for index, name in self._state_to_come():
            self._rooms[index, name] = self._room(index, name)
            self._rooms[index, name][1].zero_()  # so that the first step need not wait for the pages

    def _state_to_come(self) -> list[tuple[int, str]]:
        """(parameter index, name) of large state that the first step with a gradient makes."""
        assert self.optimizer is not None
        index_of = {id(param): index for index, param in enumerate(self.params)}
        return [
            (index_of[id(param)], name)
            for group in self.optimizer.param_groups
            for param in group["params"]
            if _is_large(param)
            for name in state_names(type(self.optimizer), group)
            if self.optimizer.state.get(param, {}).get(name) is None
        ]

    def _room(self, index: int, name: str) -> tuple[Extent, torch.Tensor]:
        """Where a large state tensor of a parameter is to lie; what is there is void."""
        found = self._rooms.pop((index, name), None)
        if found is None:
            handle = self._arena.allocate_tensor(tuple(self.params[index].shape), self.params[index].dtype)
            found = handle.extent, self._store.tensor(handle)
        return found

    def _begin_state(self, index: int, name: str) -> torch.Tensor:
        """An uninitialised state tensor of a parameter's size."""
        if not _is_large(self.params[index]):
            return torch.empty_like(self.params[index], requires_grad=False)
        self._shared[index, name] = self._room(index, name)
        return self._shared[index, name][1]

    @property
    def wide_bytes(self) -> int:
        """Bytes of its parameters, or of their gradients, in the optimizer's dtypes."""
        return self.extent.nbytes

    # --- gradients

    def add(self, iteration: int, part: SlabPart) -> None:
        """Take a gradient slab into the arena (G_cp). The first one is kept as it is; with the second one begins the
        sum, in the optimizer's dtypes. The slab itself is not read any more."""
        slab = self._store.bytes_of(part.extent)
        if not any(part.present):
            return
        if iteration not in self._sums:
            extent = self._arena.allocate(self._nbytes["slab"])
            self._store.bytes_of(extent).copy_(slab)
            self._sums[iteration] = _Sum(extent, "slab", {i for i, here in enumerate(part.present) if here})
            return
        total = self._widened(self._sums[iteration])
        sums = self._store.bytes_of(total.extent)
        again = [index in total.present for index in range(len(self.params))]
        fresh = {index for index, here in enumerate(part.present) if here and not again[index]}
        views = self._views("sum", sums)
        for index, gradient in self._views("slab", slab, fresh).items():
            views[index].copy_(gradient)
        total.present |= fresh
        key = tuple(here and before for here, before in zip(part.present, again, strict=True))
        if any(key):
            self._add_again(key, slab, sums)

    def _widened(self, total: _Sum) -> _Sum:
        """The same gradients in the optimizer's dtypes, of which more can be added."""
        if total.kind == "slab" and self._lies_as("slab", "sum"):
            total.kind = "sum"
        if total.kind == "slab":
            extent = self._arena.allocate(self._nbytes["sum"])
            views = self._views("sum", self._store.bytes_of(extent))
            for index, gradient in self._views("slab", self._store.bytes_of(total.extent), total.present).items():
                views[index].copy_(gradient)
            self._arena.free(total.extent)
            total.extent, total.kind = extent, "sum"
        return total

    def _lies_as(self, kind: str, other: str) -> bool:
        """Whether each parameter lies at the same place, in the same dtype, in both kinds of slab."""
        return self._offsets[kind] == self._offsets[other] and self._nbytes[kind] == self._nbytes[other]

    def _views(self, kind: str, memory: torch.Tensor, which: Iterable[int] | None = None) -> dict[int, torch.Tensor]:
        """Parameters, or what belongs to them, in a slab of this kind, by index."""
        offsets, dtypes = self._offsets[kind]
        chosen = range(len(self.params)) if which is None else sorted(which)
        return {i: view(memory, offsets[i], self.spec.params[i].shape, dtypes[i]) for i in chosen}

    def _add_again(self, present: tuple[bool, ...], slab: torch.Tensor, sums: torch.Tensor) -> None:
        """Add these parameters' gradients in batches: an add of two dtypes runs far slower than a cast and an add."""
        if self._adding[0] != present:
            counts = [(index, self.params[index].numel()) for index, here in enumerate(present) if here]
            dtypes = [param.dtype for param in self.params]
            cut = [(runs, self._scratch.views(runs, dtypes)) for runs in in_batches(counts, batch_elements())]
            runs = [run for batch, _ in cut for run in batch]
            cutters = [Cutter(runs, *self._offsets[kind]) for kind in ("slab", "sum")]
            self._adding = (present, [wide for _, wide in cut], *cutters)
        _, batches, cut_slab, cut_sums = self._adding
        gradients, totals = cut_slab(slab), cut_sums(sums)
        start = 0
        for wide in batches:
            place = slice(start, start + len(wide))
            torch._foreach_add_(totals[place], widen(gradients[place], wide))
            start = place.stop

    def drop_sums(self, *, but: int | None) -> None:
        """Forget all sums, except an iteration's."""
        for iteration in [iteration for iteration in self._sums if iteration != but]:
            self.drop_sum(iteration)

    def drop_sum(self, iteration: int) -> None:
        """Forget an iteration's sum."""
        found = self._sums.pop(iteration, None)
        if found is not None:
            self._arena.free(found.extent)

    def gradients(
        self, iteration: int, inverse: float = 1.0, room: torch.Tensor | None = None
    ) -> list[torch.Tensor | None]:
        """The iteration's fp32 gradients by parameter, times `inverse` (of the loss scale).

        Views of what is kept of them where that is all; else they lie in `room` (uint8 [`wide_bytes`]), or in the
        scratch if there is none.
        """
        found: list[torch.Tensor | None] = [None] * len(self.params)
        total = self._sums.get(iteration)
        if total is None:
            return found
        wide = self._views("sum", self._scratch.take(self.wide_bytes) if room is None else room)
        for index, gradient in self._views(total.kind, self._store.bytes_of(total.extent), total.present).items():
            if inverse != 1.0:
                gradient = wide[index].copy_(gradient).mul_(inverse)
            elif gradient.dtype != wide[index].dtype:
                gradient = wide[index].copy_(gradient)
            found[index] = gradient
        return found

    # --- step

    def step(self, iteration: int, groups: tuple[dict[str, Any], ...], inverse: float, factor: float) -> Extent | None:
        """Run the user's optimizer on this unit and write its weights into a slab in the model's dtype (P_cp).

        That slab is the one of the gradients, where weights have the same layout: piece by piece they take their place.
        Gradients are multiplied by `inverse` (of the loss scale), then by `factor` (of clipping). None: no parameter
        had a gradient, nothing moved.
        """
        total = self._sums.get(iteration)
        if self.optimizer is None or total is None:
            return None
        self._take_groups(groups)
        if self._lies_as(total.kind, "master"):
            self._step_into(total.extent, iteration, inverse, factor)
            return self._sums.pop(iteration).extent
        master = self._arena.allocate(self.spec.nbytes)
        try:
            self._step_into(master, iteration, inverse, factor)
        except BaseException:
            self._arena.free(master)
            raise
        return master

    def _step_into(self, master: Extent, iteration: int, inverse: float, factor: float) -> None:
        total = self._sums[iteration]
        present = tuple(index in total.present for index in range(len(self.params)))
        plan = self._plan_for(present)
        if plan is None:
            self._step_whole(self.gradients(iteration, inverse), factor)
            self.write_master(master)
            return
        memory = self._store.bytes_of(master)
        gradients = self._cutters[total.kind](self._store.bytes_of(total.extent))
        plan.run(gradients, self._cutters["master"](memory), inverse, factor)
        rest = {index: param for index, param in enumerate(self.params) if not present[index]}
        write_params(memory, self.spec, rest)
        if plan.only_once:
            self._plan = None

    def _take_groups(self, groups: tuple[dict[str, Any], ...]) -> None:
        """Hyper-parameters as the script has them now."""
        assert self.optimizer is not None
        for group, index, received in zip(self.optimizer.param_groups, self._group_of, self._received, strict=True):
            for name, value in groups[index].items():
                if name in ("params", "fused") or (name in received and received[name] == _plain(value)):
                    continue  # what the optimizer itself has changed since stays as it is
                received[name] = _plain(value)
                if isinstance(group.get(name), torch.Tensor):  # a tensor lr computes in its own dtype
                    value = torch.as_tensor(value, dtype=group[name].dtype)
                group[name] = value

    def _plan_for(self, present: tuple[bool, ...]) -> PiecewiseStep | None:
        """How to step these parameters in pieces; None: only `optimizer.step()` itself does what it does."""
        assert self.optimizer is not None
        kind, groups, state = type(self.optimizer), self.optimizer.param_groups, self.optimizer.state
        if not is_fused(self.optimizer):
            return None
        key = (present, *(state_names(kind, group) for group in groups))
        if self._plan is not None and self._plan_key == key:
            return self._plan
        self._plan = None
        index_of = {id(param): index for index, param in enumerate(self.params)}
        members = [(group, p) for group in groups for p in group["params"] if present[index_of[id(p)]]]
        if not all(is_regular(kind, group, param, state.get(param, {})) for group, param in members):
            return None
        self._plan = PiecewiseStep(self.optimizer, self.params, present, self._scratch, self._begin_state)
        self._plan_key = key
        self._cutters = {kind: Cutter(self._plan.runs, *layout) for kind, layout in self._offsets.items()}
        return self._plan

    def _step_whole(self, gradients: list[torch.Tensor | None], factor: float) -> None:
        """Let the optimizer itself step all parameters at once."""
        assert self.optimizer is not None
        self._plan = None
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient if gradient is None or factor == 1.0 else gradient * factor
        try:
            self.optimizer.step()
            lent = [param.grad for param in self.params if param.grad is not None]
        finally:
            for param in self.params:
                param.grad = None
        self._share_state(lent + [gradient for gradient in gradients if gradient is not None])

    def write_master(self, extent: Extent) -> None:
        """Write the fp32 weights into a slab in the model's dtype (P_cp)."""
        write_params(self._store.bytes_of(extent), self.spec, dict(enumerate(self.params)))

    def _share_state(self, lent: list[torch.Tensor]) -> None:
        """Keep large state tensors (moments) in the arena, whatever tensors the optimizer has put into its state.

        `lent`: the gradients, whose memory is reused, so no state may lie there.
        """
        assert self.optimizer is not None
        self._plan = None
        rows = [
            (self.optimizer.state[param], index, name, value)
            for index, param in enumerate(self.params)
            if param in self.optimizer.state
            for name, value in self.optimizer.state[param].items()
            if isinstance(value, torch.Tensor)
        ]
        moved = []
        old, self._shared = self._shared, {}
        taken = _Spans([*lent, *(shared for _, shared in old.values())])
        for state, index, name, value in rows:
            place = old.get((index, name))
            if not _is_large(value):
                if taken.overlap(value):
                    state[name] = value.clone()
            elif place is not None and place[1].shape == value.shape and place[1].dtype == value.dtype:
                self._shared[index, name] = old.pop((index, name))
                if value.data_ptr() != place[1].data_ptr():
                    moved.append((state, name, value, place[1]))
            else:
                self._shared[index, name] = self._place(index, name, value)
                moved.append((state, name, value, self._shared[index, name][1]))
        # one name's old memory can be another's new value
        shared = _Spans([tensor for _, tensor in self._shared.values()])
        values = [v.clone() if shared.overlap(v) else v for _, _, v, _ in moved]
        for (state, name, _, room), value in zip(moved, values, strict=True):
            state[name] = room.copy_(value)
        for extent, _ in old.values():
            self._arena.free(extent)

    def _place(self, index: int, name: str, value: torch.Tensor) -> tuple[Extent, torch.Tensor]:
        """Where a large value of a parameter's state is to lie."""
        if (value.shape, value.dtype) == (self.params[index].shape, self.params[index].dtype):
            return self._room(index, name)
        handle = self._arena.allocate_tensor(tuple(value.shape), value.dtype)
        return handle.extent, self._store.tensor(handle)

    def state_rows(self) -> list[tuple[int, str, Any]]:
        """(parameter index, name, value) of the optimizer's state."""
        if self.optimizer is None:
            return []
        return [
            (index, name, value)
            for index, param in enumerate(self.params)
            for name, value in self.optimizer.state.get(param, {}).items()
        ]

    def group_rows(self) -> list[tuple[int, dict[str, Any]]]:
        """(index of a parameter, its group's values here and those that the script last sent), once a group."""
        if self.optimizer is None:
            return []
        indices = {id(param): index for index, param in enumerate(self.params)}
        return [
            (
                indices[id(group["params"][0])],
                {"values": {n: v for n, v in group.items() if n not in ("params", "fused")}, "received": received},
            )
            for group, received in zip(self.optimizer.param_groups, self._received, strict=True)
        ]

    def restore(
        self,
        weights: dict[int, torch.Tensor],
        state: dict[int, dict[str, Any]] | None = None,
        groups: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        """Take over values by parameter index; `state` None: the optimizer's state and groups stay.

        Tensors are copied; `groups` is what `group_rows` gave, under any parameter of the group.
        """
        with torch.no_grad():
            for index, value in weights.items():
                self.params[index].copy_(value)
        if state is None or self.optimizer is None:
            return
        lent = [v for values in state.values() for v in values.values() if isinstance(v, torch.Tensor)]
        for param in self.params:
            self.optimizer.state.pop(param, None)
        for index, values in state.items():
            self.optimizer.state[self.params[index]] = dict(values)
        self._share_state(lent)
        for group, received in zip(self.optimizer.param_groups, self._received, strict=True):
            mine = {id(param) for param in group["params"]}
            for index, row in (groups or {}).items():
                if id(self.params[index]) in mine:
                    group.update(copy.deepcopy(row["values"]))
                    received.update(row["received"])

    def free(self) -> None:
        """Give all memory back."""
        for iteration in list(self._sums):
            self.drop_sum(iteration)
        kept = [extent for places in (self._shared, self._rooms) for extent, _ in places.values()]
        for extent in (self.extent, *kept):
            self._arena.free(extent)
        self._shared, self._rooms, self._plan = {}, {}, None


def write_params(memory: torch.Tensor, spec: UnitSpec, values: Mapping[int, torch.Tensor]) -> None:
    """Write a unit's parameters, by index, into a slab in the model's dtype."""
    with torch.no_grad():
        for index, value in values.items():
            param = spec.params[index]
            view(memory, param.offset, param.shape, param.dtype).copy_(value)


def _widened(value: Any, param: torch.nn.Parameter) -> Any:
    """State that was made for a low-precision parameter, in the dtype of its optimizer copy, and contiguous as that is:
    torch's fused kernels read both as they lie."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == param.shape and value.dim():
        wide = value.to(torch.promote_types(value.dtype, param.dtype))
        return wide.contiguous() if wide.layout is torch.strided else wide
    return value


def _plain(value: Any) -> Any:
    """A hyper-parameter as the script sends it, and a copy that nobody changes."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return tuple(value) if isinstance(value, list) else value


def _is_large(value: Any) -> bool:
    """Whether a value of an optimizer's state belongs into shared memory."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return plain and value.nbytes >= SHARED_STATE_BYTES


class _Spans:
    """Where tensors lie, for many questions whether another one shares memory with any."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        """Of runs that neither overlap nor touch, ascending."""
        for start, end in sorted(_span(t) for t in tensors if t.layout is torch.strided and t.numel()):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def overlap(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with one of them."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return False
        start, end = _span(tensor)
        place = bisect.bisect_right(self._ends, start)
        return place < len(self._starts) and self._starts[place] < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the byte after its last."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + steps) * tensor.element_size()


def use_fast_kernel(kind: type, group: dict[str, Any]) -> dict[str, Any]:
    """`fused=None` leaves the kernel to us: torch's fused one where the group allows it; other choices stand.

    Complex parameters have none.
    """
    plain = not (group.get("foreach") or group.get("capturable") or group.get("differentiable"))
    own = kind in FUSED
    real = all(param.is_floating_point() for param in group["params"])
    if own and real and plain and "fused" in group and group["fused"] is None and group.get("foreach") is None:
        group["fused"] = True
    return group


def revive_optimizer(kind: type, attributes: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer with these attributes, without running its constructor (whose arguments nobody kept)."""
    optimizer: torch.optim.Optimizer = object.__new__(kind)
    optimizer.__setstate__(copy.copy(attributes))
    return optimizer
