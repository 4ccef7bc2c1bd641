"""The optimizer's step in pieces that stay in the cores' caches, so that memory is moved once.

    gradients, bf16 --cast--> scratch, fp32 --fused kernel--> weights and moments, fp32 --cast--> master slab, bf16

Each arrow is one call of torch over one batch of runs. A batch is so small that what one call wrote is still in the
cache of the core that reads it in the next call (torch gives a thread the same part each time). Over a whole unit the
same three calls would go to memory and back: 40 bytes a parameter instead of 28.

The result is that of `optimizer.step()` bit for bit. The kernels are elementwise, but what is left over at the end of
a tensor is computed with other instructions than its vectors are: so runs are cut at multiples of `GRAIN`, where no
vector is cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from rpruntime.store.arena import dtype_of

ELEMENTS_A_THREAD = 1 << 18
"""Of a batch, for each thread: 20 bytes each (gradient, scratch, weight, moments, master) are 5 MiB, a core's share of
the last cache. The smaller it is, the more the calls and their barriers cost (docs/performance.md)."""
GRAIN = 16
"""Elements of a line of 64 bytes in fp32: torch's kernels cut tensors there for their threads too."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements `start` to `stop` of a parameter; `last`: it ends there."""

    index: int
    start: int
    stop: int
    last: bool


def batch_elements() -> int:
    """Elements of a batch, with the threads that this process has now."""
    return max(GRAIN, ELEMENTS_A_THREAD // GRAIN * GRAIN * torch.get_num_threads())


def in_batches(counts: Iterable[tuple[int, int]], limit: int) -> list[list[Run]]:
    """Cut parameters, given as (index, elements), into batches of at most `limit` elements (a multiple of `GRAIN`).

    Small parameters share a batch. Every parameter has a run, also an empty one.
    """
    found: list[list[Run]] = []
    room = 0
    for index, count in counts:
        start = 0
        while True:
            rest = count - start
            if not found or room == 0 or (rest > room and 2 * room < limit):
                found.append([])
                room = limit
            stop = start + min(rest, room)
            found[-1].append(Run(index, start, stop, stop == count))
            room -= min(room, _in_grains(stop - start))
            if stop == count:
                break
            start = stop
    return found


def _in_grains(count: int) -> int:
    return max(GRAIN, -(-count // GRAIN) * GRAIN)


class Cutter:
    """Views of runs in a slab, made in few calls: slabs move from step to step, where runs lie in them does not."""

    def __init__(self, runs: Sequence[Run], offsets: Sequence[int], dtypes: Sequence[str]) -> None:
        """`offsets` in bytes and `dtypes` by parameter. Runs of a parameter ascend."""
        self._count = len(runs)
        by_dtype: dict[str, list[tuple[int, int, int]]] = {}
        for place, run in enumerate(runs):
            first = offsets[run.index] // dtype_of(dtypes[run.index]).itemsize + run.start
            by_dtype.setdefault(dtypes[run.index], []).append((first, place, run.stop - run.start))
        self._parts: list[tuple[torch.dtype, list[int], list[int]]] = []
        """(dtype, sizes of gap, run, gap, run ..., places of the runs)."""
        for dtype, members in by_dtype.items():
            sizes, end = [], 0
            members.sort()
            for first, _, count in members:
                sizes += [first - end, count]
                end = first + count
            self._parts.append((dtype_of(dtype), sizes, [place for _, place, _ in members]))

    def __call__(self, memory: Tensor) -> list[Tensor]:
        """One view [elements] a run, of a slab (uint8)."""
        found: list[Any] = [None] * self._count
        for dtype, sizes, places in self._parts:
            views = memory[: sum(sizes) * dtype.itemsize].view(dtype).split(sizes)
            for place, piece in zip(places, views[1::2], strict=True):
                found[place] = piece
        return found


class Scratch:
    """Private room for gradients in fp32, reused: fresh memory would cost a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._whole = torch.empty(0, dtype=torch.uint8)
        self._piece = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] for gradients of whole units; what was taken before is void."""
        if self._whole.numel() < nbytes:
            self._whole = torch.empty(0, dtype=torch.uint8)  # give the smaller one back first
            self._whole = torch.empty(nbytes, dtype=torch.uint8)
        return self._whole[:nbytes]

    def piece(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] for one batch: always the same bytes, void with every batch."""
        if self._piece.numel() < nbytes:
            self._piece = torch.empty(nbytes, dtype=torch.uint8)
        return self._piece[:nbytes]

    def views(self, runs: Sequence[Run], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """One view a run of the room for a batch, in the parameter's wide dtype (`dtypes`, by parameter)."""
        ends, end = [], 0
        for run in runs:
            end += _in_grains(run.stop - run.start) * dtypes[run.index].itemsize
            ends.append(end)
        memory = self.piece(end)
        found = []
        for run, stop in zip(runs, ends, strict=True):
            dtype = dtypes[run.index]
            start = stop - _in_grains(run.stop - run.start) * dtype.itemsize
            found.append(memory[start:stop].view(dtype)[: run.stop - run.start])
        return found


def widen(given: list[Tensor], wide: list[Tensor], inverse: float = 1.0, factor: float = 1.0) -> list[Tensor]:
    """Gradients in the dtype of `wide`, times `inverse` and then `factor`; what changes lies in `wide` afterwards."""
    plain = inverse == 1.0 and factor == 1.0
    changed = [not plain or g.dtype != w.dtype for g, w in zip(given, wide, strict=True)]
    into = [w for w, change in zip(wide, changed, strict=True) if change]
    if into:
        torch._foreach_copy_(into, [g for g, change in zip(given, changed, strict=True) if change])
        if inverse != 1.0:
            torch._foreach_mul_(into, inverse)
        if factor != 1.0:
            torch._foreach_mul_(into, factor)
    return [w if change else g for g, w, change in zip(given, wide, changed, strict=True)]


# --- which optimizers


_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
FUSED = (*_ADAMS, torch.optim.SGD, torch.optim.Adagrad)
"""Classes with a fused kernel for the CPU; not those that are derived from them."""


def state_names(kind: type, group: dict[str, Any]) -> tuple[str, ...]:
    """Names of the state tensors of a parameter's size, for the classes that are known here."""
    if kind in _ADAMS:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
    if kind is torch.optim.SGD:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()
    return ("sum",) if kind is torch.optim.Adagrad else ()


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step()` is nothing but torch's fused kernel over all groups, as these stand now."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    other = ("foreach", "capturable", "differentiable")
    return (
        type(optimizer) in FUSED
        and not hooks
        and not scaled
        and all(
            group.get("fused") is True and not any(group.get(name) for name in other)
            for group in optimizer.param_groups
        )
    )


def is_regular(kind: type, group: dict[str, Any], param: Tensor, state: dict[str, Any]) -> bool:
    """Whether a parameter and its state are what the class itself makes of them: dense, and one beside the other."""
    if param.dtype not in (torch.float32, torch.float64) or not param.is_contiguous():
        return False
    if not state:
        return True
    names = state_names(kind, group)
    if kind is torch.optim.SGD:
        names = tuple(name for name in names if state.get(name) is not None)
    elif not (
        isinstance(state.get("step"), Tensor) and state["step"].shape == () and state["step"].dtype == torch.float32
    ):
        return False
    return all(
        isinstance(value := state.get(name), Tensor)
        and value.layout is torch.strided
        and value.is_contiguous()
        and (value.shape, value.dtype) == (param.shape, param.dtype)
        for name in names
    )


def begin_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor, room: Callable[[str], Tensor]
) -> None:
    """Make the state that the class makes at a parameter's first step. `room(name)`: a tensor like the parameter.

    Momentum of SGD begins with the step itself.
    """
    kind = type(optimizer)
    if kind is torch.optim.SGD or optimizer.state[param]:
        return
    start = float(optimizer.defaults["initial_accumulator_value"]) if kind is torch.optim.Adagrad else 0.0
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32)}
    state.update({name: room(name).fill_(start) for name in state_names(kind, group)})
    optimizer.state[param] = state


# --- the step


@dataclass
class _Batch:
    """Runs of one group that are stepped by one call. Lists have one entry a run."""

    group: int
    runs: list[Run]
    params: list[Tensor]
    states: list[list[Tensor]]
    """By name."""
    steps: list[Tensor]
    counters: list[tuple[Tensor, Tensor]]
    """(what the kernel counts up, the parameter's counter) of runs that are not the last: a step counts once."""
    wide: list[Tensor]
    first: bool
    """SGD: the momentum begins with this step, in `states`."""
    place: slice = field(default_factory=lambda: slice(0, 0))
    """Of the runs, among those of all batches."""


class PiecewiseStep:
    """A unit's step, cut once for as long as its state stays where it is and the same parameters have gradients."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[Tensor],
        present: Sequence[bool],
        scratch: Scratch,
        room: Callable[[int, str], Tensor],
    ) -> None:
        """`optimizer` is fused, and the present parameters are regular. `room(index, name)`: where state begins."""
        self._optimizer = optimizer
        kind = type(optimizer)
        place_of = {id(param): index for index, param in enumerate(params)}
        dtypes = [param.dtype for param in params]
        self._batches: list[_Batch] = []
        self._begun: list[tuple[int, Tensor]] = []
        """(parameter, its momentum) that begin with this step."""
        for number, group in enumerate(optimizer.param_groups):
            members = [i for p in group["params"] if present[i := place_of[id(p)]]]
            buffers: dict[int, list[Tensor]] = {}
            fresh: dict[int, bool] = {}
            for index in members:
                begin_state(optimizer, group, params[index], functools.partial(room, index))
                state = optimizer.state.get(params[index], {})
                buffers[index], fresh[index] = [], False
                for name in state_names(kind, group):
                    if state.get(name) is None:
                        fresh[index] = True
                        self._begun.append((index, room(index, name)))
                    buffers[index].append((self._begun[-1][1] if fresh[index] else state[name]).view(-1))
            for first in (False, True):
                chosen = [(index, params[index].numel()) for index in members if fresh[index] == first]
                for runs in in_batches(chosen, batch_elements()):
                    self._batches.append(self._batch(number, runs, params, buffers, scratch.views(runs, dtypes), first))
        self._params = params
        self.runs: list[Run] = []
        for batch in self._batches:
            batch.place = slice(len(self.runs), len(self.runs) + len(batch.runs))
            self.runs += batch.runs

    def _batch(
        self,
        group: int,
        runs: list[Run],
        params: Sequence[Tensor],
        buffers: dict[int, list[Tensor]],
        wide: list[Tensor],
        first: bool,
    ) -> _Batch:
        steps, counters = [], []
        for run in runs:
            real = self._optimizer.state.get(params[run.index], {}).get("step")
            if real is not None:
                steps.append(real if run.last else torch.empty_like(real))
                if not run.last:
                    counters.append((steps[-1], real))
        names = len(buffers[runs[0].index])
        return _Batch(
            group,
            runs,
            [params[run.index].detach().view(-1)[run.start : run.stop] for run in runs],
            [[buffers[run.index][name][run.start : run.stop] for run in runs] for name in range(names)],
            steps,
            counters,
            wide,
            first,
        )

    @property
    def only_once(self) -> bool:
        """Whether this step begins state, so that the next one is another."""
        return bool(self._begun)

    @torch.no_grad()
    def run(self, gradients: list[Tensor], masters: list[Tensor], inverse: float, factor: float) -> None:
        """Step, with the groups as they stand; `gradients` and `masters` have a view for each of `runs`.

        Gradients are widened and multiplied by `inverse` and `factor` first; weights are cast into `masters`.
        """
        for batch in self._batches:
            wide = widen(gradients[batch.place], batch.wide, inverse, factor)
            for counter, real in batch.counters:
                counter.copy_(real)
            self._call(self._optimizer.param_groups[batch.group], batch, wide)
            torch._foreach_copy_(masters[batch.place], batch.params)
        for index, buffer in self._begun:
            self._optimizer.state[self._params[index]]["momentum_buffer"] = buffer

    def _call(self, group: dict[str, Any], batch: _Batch, gradients: list[Tensor]) -> None:
        kind = type(self._optimizer)
        if kind in _ADAMS:
            means, squares, *largest = batch.states
            adam(
                batch.params, gradients, means, squares, largest[0] if largest else [], batch.steps,
                foreach=group["foreach"], capturable=group["capturable"], differentiable=group["differentiable"],
                fused=group["fused"], decoupled_weight_decay=group["decoupled_weight_decay"], amsgrad=group["amsgrad"],
                beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"],
                eps=group["eps"], maximize=group["maximize"],
            )  # fmt: skip
        elif kind is torch.optim.SGD:
            momenta: list[Tensor | None] = [*(batch.states[0] if batch.states else [])]
            if batch.first:
                momenta = [None] * len(momenta)
            sgd(
                batch.params, gradients, momenta, foreach=group["foreach"], fused=group["fused"],
                weight_decay=group["weight_decay"], momentum=group["momentum"], lr=group["lr"],
                dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"],
            )  # fmt: skip
            if batch.first:
                torch._foreach_copy_(batch.states[0], [made for made in momenta if made is not None])
        else:
            adagrad(
                batch.params, gradients, batch.states[0], batch.steps, fused=group["fused"], foreach=group["foreach"],
                differentiable=group["differentiable"], lr=group["lr"], weight_decay=group["weight_decay"],
                lr_decay=group["lr_decay"], eps=group["eps"], maximize=group["maximize"],
            )  # fmt: skip
