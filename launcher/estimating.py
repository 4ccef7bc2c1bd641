"""`rpctl plan MODEL`: what a model that has not been loaded will need and how long a step will take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from launcher import measuring
from launcher.devices import probe_gpus
from launcher.estimates import DeviceEstimate, HostEstimate, device_memory, host_memory
from launcher.meta_run import LayerCost, cast_to_layout, costs_of
from launcher.model_source import OPTIMIZERS, read_source
from rpruntime.errors import ConfigError
from rpruntime.layout import ModelLayout, lay_out
from rpruntime.loading import state_tensors_per_parameter
from rpruntime.optimizer.pieces import FUSED
from rpruntime.schedule import ExecutionPlan
from rpruntime.store.limits import gib, read_host_memory


@dataclass(frozen=True)
class ModelEstimate:
    """A model before it is loaded.

    Attributes:
        forward_ms, backward_ms: of each layer and micro-batch; backward with the recomputation.
        basis: where these times come from.
        optimizer_ms: of a step; None: not measured.
        tokens: of a micro-batch.
    """

    layout: ModelLayout
    costs: list[LayerCost]
    forward_ms: list[float]
    backward_ms: list[float]
    basis: str
    optimizer: str
    states: int
    prepared: bool
    optimizer_ms: float | None
    tokens: int | None
    asynchronous: bool
    num_devices: int
    num_microbatches: int

    @property
    def param_bytes(self) -> list[float]:
        """Of each layer."""
        units = self.layout.units
        return [float(sum(units[unit].nbytes for unit in row)) for row in self.layout.layer_units]

    def memory(self, chosen: ExecutionPlan) -> tuple[HostEstimate, DeviceEstimate]:
        """With `plan="auto"` the run begins with one layer a stage, then it has the chosen plan."""
        first = ExecutionPlan.one_layer_a_stage(len(self.costs))
        plans = [first] if chosen == first else [first, chosen]
        host = host_memory(
            self.layout,
            self.costs,
            plans,
            states=self.states,
            asynchronous=self.asynchronous,
            num_devices=self.num_devices,
            num_microbatches=self.num_microbatches,
            prepared=self.prepared,
        )
        return host, device_memory(self.layout, self.costs, plans, self.num_devices)

    def lines(self, chosen: ExecutionPlan) -> list[str]:
        """For people."""
        host, device = self.memory(chosen)
        parameters = list(self.layout.parameters.values())
        kinds = dict.fromkeys(param.dtype for unit in self.layout.units for param in unit.params)
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        found = [
            f"{sum(p.numel() for p in parameters) / 1e9:.3g} G parameters, {trained / 1e9:.3g} G trained, "
            f"{', '.join(kinds)}, {self.optimizer} ({self.states} states)",
            f"host memory {gib(host.total)} shared ({gib(host.least)} to {gib(host.most)}, by when messages free it), "
            "beside the processes' own",
        ]
        found += [f"  {gib(nbytes):>10}  {kind}" for kind, nbytes in host.kinds.items() if nbytes]
        room = host.total - sum(host.kinds.values())
        if room >= 0:
            found.append(f"  {gib(room):>10}  room for growth in the arenas")
        else:
            found.append(f"  {gib(-room):>10}  less, as these are not all needed at once")
        room, which = read_host_memory().available()
        fits = "fits" if host.total <= room else "does NOT fit"
        found.append(f"  {fits} on this machine: {gib(room)} ({which})")
        found.append(
            f"device memory {gib(device.total)} beside CUDA's own (0.5 to 1 GiB): {gib(device.weights)} weights of two "
            f"stages, {gib(device.sums)} sums, {gib(device.activations)} activations, in the stage of layers "
            f"{device.stage.start}-{device.stage.stop - 1}"
        )
        gpus = [gpu.memory_bytes for gpu in probe_gpus() if gpu.memory_bytes]
        if gpus:
            fits = "fits" if device.total + (1 << 30) <= min(gpus) else "does NOT fit"
            found.append(f"  {fits} on this machine's GPUs: {gib(min(gpus))}")
        return [*found, f"times: {self.basis}"]

    def as_json(self, chosen: ExecutionPlan) -> dict[str, Any]:
        """For programs; bytes and milliseconds."""
        host, device = self.memory(chosen)
        return {
            "host_bytes": host.total,
            "host_range": [host.least, host.most],
            "host_kinds": host.kinds,
            "host_arenas": host.arenas,
            "device_bytes": device.total,
            "device_kinds": {"weights": device.weights, "sums": device.sums, "activations": device.activations},
            "forward_ms": self.forward_ms,
            "backward_ms": self.backward_ms,
            "flops": sum(2 * c.forward_flops + c.backward_flops for c in self.costs) * self.num_microbatches,
            "optimizer_ms": self.optimizer_ms,
            "basis": self.basis,
        }


def estimate_model(options: argparse.Namespace) -> ModelEstimate:
    """Build the model on the meta device and run its layers there.

    Raises:
        ConfigError: the model cannot be built, cut or run; or a setting does not fit.
    """
    for name in ("devices", "microbatches", "seq"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, not {getattr(options, name)}")
    batch = options.microbatches if options.batch is None else options.batch
    if batch < options.microbatches:
        raise ConfigError(f"--batch {batch} cannot be cut into {options.microbatches} micro-batches")
    if options.tflops is not None and not options.tflops > 0:
        raise ConfigError(f"--tflops must be above 0, not {options.tflops}")
    dtype = None if options.dtype is None else _dtype(options.dtype)
    source = read_source(str(options.file), batch=batch, seq=options.seq, dtype=dtype, shape=_shape(options.input))
    if source.rows < options.microbatches:
        raise ConfigError(f"a batch of {source.rows} rows cannot be cut into {options.microbatches} micro-batches")
    optimizer, states, kind = None, 0, None
    trained = [parameter for parameter in source.model.parameters() if parameter.requires_grad]
    if options.optimizer != "none" and trained:
        kind = OPTIMIZERS.get(options.optimizer.lower())
        if kind is None:
            raise ConfigError(f"--optimizer {options.optimizer}: one of {', '.join(OPTIMIZERS)} or none is needed")
        optimizer = kind(trained)
        states = state_tensors_per_parameter(optimizer)
    layout = lay_out(source.model, optimizer, dtype, None)
    cast_to_layout(layout)
    chunk = source.inputs[: -(-source.rows // options.microbatches)]
    timer = measuring.LayerTimer(measuring.default_device()) if options.measure else None
    costs = costs_of(layout, chunk, timer)
    forward, backward, basis = _times(options, costs, timer, dtype or _main_dtype(layout))
    step_ms = None
    if kind is not None and options.measure:
        step_ms = measuring.optimizer_ms(kind, sum(p.numel() for p in trained))
    return ModelEstimate(
        layout, costs, forward, backward, basis,
        "no optimizer" if kind is None else kind.__name__, states, kind is None or kind in FUSED, step_ms,
        None if source.tokens is None else source.tokens // options.microbatches,
        options.asynchronous, options.devices, options.microbatches,
    )  # fmt: skip


def _times(
    options: argparse.Namespace, costs: Sequence[LayerCost], timer: measuring.LayerTimer | None, dtype: torch.dtype
) -> tuple[list[float], list[float], str]:
    if timer is not None:
        rows = [timer.ms[cost.kind] for cost in costs]
        where = f"measured on {timer.device}, {len(timer.ms)} kinds of layers with one micro-batch each, one at a time"
        return [row[0] for row in rows], [row[1] for row in rows], where
    if options.tflops is not None:
        rate, where = options.tflops, "as given"
    else:
        device = measuring.default_device()
        rate = measuring.matmul_tflops(device, dtype)
        where = f"measured on {device} with products of matrices, which layers do not reach"
    forward = [cost.forward_flops / rate / 1e9 for cost in costs]
    backward = [(cost.forward_flops + cost.backward_flops) / rate / 1e9 for cost in costs]
    basis = f"from the layers' operations at {rate:.3g} TFLOP/s ({where}); --measure times the layers themselves"
    return forward, backward, basis


def _main_dtype(layout: ModelLayout) -> torch.dtype:
    counts: dict[torch.dtype, int] = {}
    for parameter in layout.parameters.values():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32


def _dtype(name: str) -> torch.dtype:
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    found = getattr(torch, names.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"{name!r} is no dtype of torch: bfloat16, float16, float32 or int64 are")
    return found


def _shape(text: str | None) -> tuple[tuple[int, ...], torch.dtype] | None:
    """`64,3,224,224` or `64,2048:int64`."""
    if text is None:
        return None
    sizes, _, kind = text.partition(":")
    try:
        shape = tuple(int(word) for word in sizes.split(","))
    except ValueError:
        raise ConfigError(f"--input {text!r}: a shape such as 64,3,224,224 or 64,2048:int64 is needed") from None
    return shape, _dtype(kind or "float32")
