"""What the optimizer process does, as rows of a trace: G_cp, the norm, the step with P_cp, copies for checkpoints."""

from __future__ import annotations

from typing import Any

from rpruntime.optimizer import events as ev
from rpruntime.trace.spans import MESSAGES, OPTIMIZER, SpanLog
from rpruntime.wire.messages import ModelSpec

_NAMES: dict[type, str] = {
    ev.AddSlab: "G_cp",
    ev.MeasureNorm: "norm",
    ev.StepUnit: "step and P_cp",  # one pass over memory, where the optimizer allows it
    ev.CopyUnit: "copy for a checkpoint",
    ev.RestoreUnit: "restore",
    ev.ReadState: "read state",
}


class OptimizerTrace(SpanLog):
    """The log of the optimizer process; times are of `time.monotonic`, in seconds."""

    def carried_out(self, instruction: Any, spec: ModelSpec | None, began_s: float, ended_s: float) -> None:
        """An instruction was carried out for a model."""
        name = _NAMES.get(type(instruction))
        if name is None:
            return
        number = getattr(instruction, "step", getattr(instruction, "iteration", -1))
        part = getattr(instruction, "part", None)
        unit = getattr(instruction, "unit", -1 if part is None else part.unit)
        layers = (-1, -1)
        if spec is not None and 0 <= unit < len(spec.units):
            positions = spec.units[unit].positions
            layers = (positions[0], positions[-1] + 1)
        nbytes = 0 if part is None else part.extent.nbytes
        self.add(OPTIMIZER, name, began_s * 1e3, ended_s * 1e3, number=number, layers=layers, nbytes=nbytes)

    def took(self, count: int, began_s: float, ended_s: float) -> None:
        """So many messages were taken in."""
        self.add(MESSAGES, f"{count} messages", began_s * 1e3, ended_s * 1e3)
