"""Bringing a model into a session: code objects to the roles, weights into the slabs, the memory plan before all."""

from __future__ import annotations

import contextlib
import mmap
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rpruntime.bar import Bar
from rpruntime.buffers import buffers_of
from rpruntime.client import Client
from rpruntime.control.events import ModelLoadingEvent, ModelUndoneEvent
from rpruntime.errors import ConfigError
from rpruntime.failures import raise_role_failure
from rpruntime.layout import ModelLayout, shown_class
from rpruntime.optimizer.units import revive_optimizer
from rpruntime.store.arena import Store, dtype_name, view
from rpruntime.store.handle import Extent, Payload, TensorHandle
from rpruntime.store.layout import gradient_layout, optimizer_dtype, optimizer_layout, spare_bytes, tensor_bytes
from rpruntime.store.limits import check_host_memory, gib, read_host_memory
from rpruntime.store.values import take_apart, why_not_picklable
from rpruntime.terminal import SAY_INTERVAL_S, say
from rpruntime.wire.codec import pack_struct
from rpruntime.wire.messages import (
    CodeObject,
    LayerSpec,
    LoadModelMsg,
    ModelAllocatedMsg,
    ModelFilledMsg,
    ModelReadyMsg,
    ModelSpec,
    RoleFailedMsg,
    UnitSpec,
)

UNDO_TIMEOUT_S = 5.0
_NOT_STATE = ("step", "state_dict", "load_state_dict", "profile_hook_step")
"""Instance attributes of an optimizer that are patches of ours, torch's or a scheduler's."""


def put_tensor(client: Client, tensor: torch.Tensor) -> TensorHandle:
    """Copy a tensor into the controller's arena."""
    handle = client.arena.allocate_tensor(tuple(tensor.shape), tensor.dtype)
    client.store.tensor(handle).copy_(tensor.detach())
    return handle


def views_of(store: Store, unit: UnitSpec, extent: Extent) -> dict[str, torch.Tensor]:
    """Views of a master copy's parameters, by name."""
    memory = store.bytes_of(extent)
    return {param.name: view(memory, param.offset, param.shape, param.dtype) for param in unit.params}


class ModelPackage:
    """A model in the form in which it travels; its code objects lie in the controller's arena until `free`.

    Raises:
        ConfigError: something cannot be pickled; names the attribute.
    """

    def __init__(
        self,
        client: Client,
        layout: ModelLayout,
        optimizer: torch.optim.Optimizer | None,
        loss_fn: Callable[..., Any] | None,
        **settings: Any,
    ) -> None:
        self._client = client
        self._places = layout.place_of()
        self._handles: list[TensorHandle] = []
        try:
            self.spec = self._spec(layout, optimizer, loss_fn, settings)
            self.handle = self._keep(client.arena.put_bytes(pack_struct(self.spec)))
        except BaseException:
            self.free()
            raise

    def _spec(
        self,
        layout: ModelLayout,
        optimizer: torch.optim.Optimizer | None,
        loss_fn: Callable[..., Any] | None,
        settings: dict[str, Any],
    ) -> ModelSpec:
        layers = []
        for position, layer in enumerate(layout.layers):
            buffers = {id(b): name for name, b in layer.named_buffers(remove_duplicate=False)}
            layers.append(
                LayerSpec(
                    name=layout.names[position],
                    class_name=shown_class(layer),
                    module=self._code(layer, f"model[{position}]", buffers),
                    units=tuple(layout.layer_units[position]),
                    buffers=any(module._buffers for module in layer.modules()),
                    shared=any(layer is other for other in layout.layers[:position] + layout.layers[position + 1 :]),
                )
            )
        loss = None if loss_fn is None else self._code(loss_fn, "loss_fn", {})
        if loss is not None and any(entry[0] == "param" for entry in loss.tensors):
            raise ConfigError(
                "loss_fn uses a parameter of the model: make it part of the last layer, where it gets a gradient"
            )
        optim = None
        if optimizer is not None:
            optim = self._code((type(optimizer), optimizer_attributes(optimizer)), "optimizer", {})
        return ModelSpec(
            layers=tuple(layers),
            units=tuple(layout.units),
            loss_fn=loss,
            optimizer=optim,
            worker_bytes=gradient_bytes(layout) // len(self._client.session.worker_roles),
            python_path=tuple(sys.path),
            **settings,
        )

    def _code(self, value: Any, name: str, buffers: dict[int, str]) -> CodeObject:
        try:
            skeleton, tensors = take_apart(value)
        except Exception as err:
            raise ConfigError(
                f"{why_not_picklable(value, name)}; it has to travel to the workers: create it inside forward, "
                "or give its class __getstate__ and __setstate__"
            ) from err
        entries: list[tuple[Any, ...]] = []
        for tensor in tensors:
            if id(tensor) in self._places:
                entries.append(("param", *self._places[id(tensor)]))
            elif id(tensor) in buffers:
                entries.append(("buffer", buffers[id(tensor)]))
            else:
                entries.append(("constant", self._keep(put_tensor(self._client, tensor))))
        return CodeObject(self._keep(self._client.arena.put_bytes(skeleton)), tuple(entries))

    def _keep(self, handle: TensorHandle) -> TensorHandle:
        self._handles.append(handle)
        return handle

    def free(self) -> None:
        """Give the arena's room back, once every role has built its part."""
        for handle in self._handles:
            self._client.arena.free(handle.extent)
        self._handles.clear()


def optimizer_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The instance's attributes, without patches; what `revive_optimizer` takes."""
    return {name: value for name, value in optimizer.__dict__.items() if name not in _NOT_STATE}


def state_tensors_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors of a parameter's size the optimizer keeps for it (2 for Adam), by trying it on a small one."""
    attributes = dict(optimizer_attributes(optimizer))
    probe = nn.Parameter(torch.zeros(6, 5))
    probe.grad = torch.zeros(6, 5)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    attributes["param_groups"] = [{**group, "params": [probe]}]
    attributes["state"] = defaultdict(dict)
    try:
        revived = revive_optimizer(type(optimizer), attributes)
        revived.step()
    except Exception:
        return 2  # an optimizer that cannot be tried out is planned like Adam
    return sum(1 for v in revived.state[probe].values() if isinstance(v, torch.Tensor) and v.numel() == probe.numel())


def gradient_bytes(layout: ModelLayout) -> int:
    """Room for gradient slabs on their way to the optimizer, in all workers together. How many these are depends on the
    plan, which is not known when the room is made; where a quarter is not enough, arenas grow."""
    return sum(gradient_layout(unit)[1] for unit in layout.units if unit.trainable) // 4


def host_kinds(layout: ModelLayout, states: int, asynchronous: bool) -> dict[str, int]:
    """Host memory that training needs, in bytes, by what it is for.

    Not in it: boundary activations, and fp32 sums (several calls or rounds a step).
    """
    trainable = [unit for unit in layout.units if unit.trainable]
    fp32 = sum(optimizer_layout(unit)[1] for unit in trainable)
    return {
        "master copy": sum(unit.nbytes for unit in layout.units),
        "gradients and next master copy": spare_bytes(layout.units, asynchronous),
        "optimizer copy": fp32,
        "optimizer state": fp32 * states,
        "gradients in flight": gradient_bytes(layout),
    }


def host_bytes(layout: ModelLayout, states: int, asynchronous: bool) -> int:
    """The sum of `host_kinds`."""
    return sum(host_kinds(layout, states, asynchronous).values())


class Loader:
    """Loads one model: `check_memory`, then `run`; says what it does where that takes time."""

    def __init__(self, client: Client, layout: ModelLayout, quiet: bool) -> None:
        self._client = client
        self._layout = layout
        self._quiet = quiet
        self._allocated: ModelAllocatedMsg | None = None
        self._ready: set[str] = set()
        self._failure: RoleFailedMsg | None = None
        self._heard: set[str] = set()
        """Roles that have read the package."""

    def on_message(self, msg: Any) -> None:
        """A message about this model while it is loading."""
        if isinstance(msg, ModelAllocatedMsg):
            self._allocated = msg
            self._heard.add("optimizer")
        elif isinstance(msg, ModelReadyMsg):
            self._ready.add(msg.role)
            self._heard.add(msg.role)
        elif isinstance(msg, RoleFailedMsg):
            self._failure = self._failure or msg
            self._heard.add(msg.role)

    def check_memory(self, optimizer: torch.optim.Optimizer | None, asynchronous: bool, lent_bytes: int = 0) -> None:
        """Raises HostMemoryError, with the machine's figures, before anything is allocated. `lent_bytes`: weights that
        lie in shared memory already."""
        need = host_bytes(
            self._layout, 0 if optimizer is None else state_tensors_per_parameter(optimizer), asynchronous
        )
        need -= lent_bytes
        override = self._client.session.config.get("host_memory")
        memory = read_host_memory()
        check_host_memory(need, memory, override_gib=override, what="the model")
        count = sum(parameter.numel() for parameter in self._layout.parameters.values())
        kinds = dict.fromkeys(param.dtype for unit in self._layout.units for param in unit.params)
        self._say(
            f"model    {_count(count)} parameters, {len(self._layout.layers)} layers, {', '.join(kinds) or 'empty'} | "
            f"needs host {gib(need)} of {gib(memory.available(override)[0])}"
        )

    def run(self, package: ModelPackage) -> ModelAllocatedMsg:
        """Send the package, write the weights, wait for everybody. Returns where the weights lie."""
        client, model = self._client, package.spec.model
        client.do(ModelLoadingEvent(LoadModelMsg(model, package.handle)))
        self._await(lambda: self._allocated is not None, "the optimizer's slabs", "reserving memory")
        assert self._allocated is not None
        self._write(self._allocated, package.spec.lent)
        client.send("optimizer", ModelFilledMsg(model))
        self._await(lambda: self._ready >= self._roles(), "the model in every process", "loading")
        return self._allocated

    def _roles(self) -> set[str]:
        """Who has to load it now: a worker that is being replaced does so when it joins."""
        return {*self._client.machine.living_workers, "optimizer"}

    def undo(self, package: ModelPackage) -> None:
        """After a failure: every role forgets the model, and the package goes once all have read it."""
        with contextlib.suppress(Exception):  # the first failure is the one to report
            self._client.do(ModelUndoneEvent(package.spec.model))
            read = self._client.wait(
                lambda: self._heard >= self._roles(), "every role's answer", timeout_s=UNDO_TIMEOUT_S
            )
            if read:
                package.free()

    def _await(self, ready: Callable[[], bool], what: str, doing: str) -> None:
        began = time.monotonic()
        told = began
        while not self._client.wait(lambda: ready() or self._failure is not None, what, timeout_s=1.0):
            if time.monotonic() - told > SAY_INTERVAL_S:
                told = time.monotonic()
                self._say(f"         {doing} ... {told - began:.0f} s")
        if self._failure is not None:
            raise_role_failure(self._failure)

    def _write(self, allocated: ModelAllocatedMsg, lent: tuple[Extent | None, ...]) -> None:
        """The initial weights: cast into the master copy, unless lent, and widened into the optimizer copy."""
        store = self._client.store
        wide_offsets = [optimizer_layout(unit)[0] for unit in self._layout.units]
        total = sum(parameter.nbytes for parameter in self._layout.parameters.values())
        done = 0
        with torch.no_grad(), Bar("writing weights", quiet=self._quiet) as bar:
            for (unit, index), parameter in self._layout.parameters.items():
                spec = self._layout.units[unit].params[index]
                if not lent or lent[unit] is None:
                    master = store.bytes_of(allocated.master[unit])
                    view(master, spec.offset, spec.shape, spec.dtype).copy_(parameter)
                extent = allocated.optim[unit]
                if extent is not None:
                    wide = optimizer_dtype(spec.dtype)
                    view(store.bytes_of(extent), wide_offsets[unit][index], spec.shape, wide).copy_(parameter)
                done += parameter.nbytes
                bar.update(done, total)

    def _say(self, line: str) -> None:
        if not self._quiet:
            say(line)


class Loan:
    """The slabs of the script's own memory in which a model's weights lie already (`rpruntime/store/slabs.py`), and
    with `keep` what the parameters were before they were cast: nothing trains them, so at the end they are that again.
    """

    def __init__(self, client: Client, layout: ModelLayout, *, keep: bool = False) -> None:
        self._client = client
        self._originals = {
            (unit, index): parameter.data
            for (unit, index), parameter in layout.parameters.items()
            if keep and dtype_name(parameter.dtype) != layout.units[unit].params[index].dtype
        }
        self._layout = layout
        members: dict[int, list[torch.Tensor]] = {}
        for (unit, _), parameter in layout.parameters.items():
            members.setdefault(unit, []).append(parameter)
        self._home = client.slabs.slabs_of(layout.parameters.values())
        self.extents = tuple(client.slabs.lend(unit, members[unit.index]) for unit in layout.units)
        """One a unit; None: its weights are copied."""

    @property
    def nbytes(self) -> int:
        """Bytes that are lent."""
        return sum(extent.nbytes for extent in self.extents if extent is not None)

    def cancel(self) -> None:
        """The model is not loaded after all."""
        for extent in self.extents:
            if extent is not None:
                self._client.slabs.take_back(extent)

    def begin(self) -> None:
        """The model is loaded and the parameters are elsewhere: slabs that were copied go, unless they are kept."""
        slabs = self._client.slabs
        kept = {slab.segment for slab in slabs.slabs_of(self._originals.values())}
        slabs.release([slab for slab in self._home if slab.segment not in kept])

    def replaced(self, places: Iterable[tuple[int, int]]) -> None:
        """The weights at these (unit, index) are others now."""
        for place in places:
            self._originals.pop(place, None)
        self.begin()

    def end(self, newest: dict[int, Extent]) -> None:
        """The pipe is closed: parameters whose newest weights (`newest`, by unit) are the lent ones are the slab's
        again, all others become private copies."""
        kept = set()
        for unit, extent in enumerate(self.extents):
            if extent is not None and unit in newest and not self._client.slabs.is_gone(extent):
                last = newest[unit]
                if (last.segment, last.offset) == (extent.segment, extent.offset):
                    kept.add(unit)
        with torch.no_grad():
            for (unit, index), parameter in self._layout.parameters.items():
                extent, spec = self.extents[unit], self._layout.units[unit].params[index]
                if (unit, index) in self._originals:
                    parameter.data = self._originals[unit, index]
                elif unit in kept and extent is not None:
                    memory = self._client.slabs.memory(extent)
                    parameter.data = view(memory, spec.offset, spec.shape, spec.dtype)
                else:
                    parameter.data = parameter.data.clone()
        for unit, extent in enumerate(self.extents):
            if extent is not None:
                (self._client.slabs.take_back if unit in kept else self._client.slabs.give_up)(extent)


class _PrivateMappings:
    """A source for a `Store` whose views nobody else sees."""

    def __init__(self, segments: Any) -> None:
        self._segments = segments

    def open(self, segment: str) -> mmap.mmap:
        mapping: mmap.mmap = self._segments.open_private(segment)
        return mapping

    def forget(self, segment: str) -> None:
        """Each mapping goes with its views."""


def point_parameters(client: Client, layout: ModelLayout, weights: dict[int, Extent]) -> None:
    """Make the script's parameters live views of these slabs, in the model's dtype.

    The mapping is private and new: what the script writes there reaches nobody, and is gone at the next call.
    """
    store = Store(_PrivateMappings(client.session.segments))
    for (unit, index), parameter in layout.parameters.items():
        spec = layout.units[unit].params[index]
        extent = weights[unit]
        first = extent.offset + spec.offset
        # a storage of its own: saving a parameter writes the whole storage that it is a view of
        memory = store.segment(extent.segment).numpy()[first : first + tensor_bytes(spec.shape, spec.dtype)]
        parameter.data = view(torch.from_numpy(memory), 0, spec.shape, spec.dtype)


def initial_buffers(client: Client, layout: ModelLayout) -> tuple[tuple[int, Payload], ...]:
    """(position, payload) of the layers with registered buffers; None buffers stay None."""
    found = []
    for position, layer in enumerate(layout.layers):
        buffers = buffers_of(layer)
        if buffers:
            skeleton, tensors = take_apart({n: None if b is None else b.detach() for n, b in buffers.items()})
            handles = tuple(put_tensor(client, tensor) for tensor in tensors)
            found.append((position, Payload(skeleton, handles, (False,) * len(handles))))
    return tuple(found)


def _count(number: int) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return str(number)
