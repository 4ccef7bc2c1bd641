"""Steps: each begins when every gradient of its iteration is in, so a call that fails has moved nothing.

    StepMsg --> start --> NormEvent, if it is needed --> UnitSteppedEvent of each unit --> the buffers --> FinishStep

P_cp follows each unit's step at once, into a slab that nobody reads.

Units are stepped one at a time, in the order of `Model.units_in_order`: gradients that come meanwhile are taken in
between.
"""

from __future__ import annotations

from rpruntime.optimizer.cancels import Cancels
from rpruntime.optimizer.events import (
    FinishStep,
    MeasureNorm,
    NormEvent,
    StartClock,
    StepUnit,
    UnitSteppedEvent,
    WorkFailedEvent,
)
from rpruntime.optimizer.model import Model, RunningStep
from rpruntime.optimizer.models import Models
from rpruntime.optimizer.outbox import Outbox
from rpruntime.optimizer.saves import Saves
from rpruntime.rounding import rounded_to_single
from rpruntime.wire.messages import CancelMsg, DataReadyMsg, SetScalerMsg, StepDoneMsg, StepMsg


def clip_factor(limit: float, norm: float, *, single: bool) -> float:
    """As `torch.nn.utils.clip_grad_norm_` has it to the bit; `single`: the norm is fp32, and so is its arithmetic."""

    def rounded(value: float) -> float:
        return rounded_to_single(value) if single else value

    factor = rounded(rounded(1.0 / rounded(norm + rounded(1e-6))) * rounded(limit))
    return 1.0 if factor > 1 else factor  # nan stays nan, as there


class Steps:
    """One at a time of each model, and what cuts one short or has to wait for its end."""

    def __init__(self, models: Models, saves: Saves, cancels: Cancels, out: Outbox) -> None:
        self._models = models
        self._saves = saves
        self._cancels = cancels
        self._out = out

    # --- from its start to its end

    def on_step(self, msg: StepMsg) -> None:
        """The iteration is sealed."""
        model = self._models[msg.model]
        model.open = None
        if not model.failed:
            model.steps.append(msg)
            self.start(model)

    def start(self, model: Model) -> None:
        """Begin the next step, if it is there and its gradients are in."""
        if model.running is not None or not model.steps or not model.sums.have_come(model.steps[0].calls):
            return
        msg = model.steps.popleft()
        model.running = RunningStep(msg)
        self._out.add(StartClock(model.number, msg.step))
        if msg.max_grad_norm is None and model.scales.state is None:
            self._step_units(model, model.running, 1.0)
        else:
            self._out.add(MeasureNorm(model.number, msg.step, model.inverse(msg.step)))

    def on_norm(self, event: NormEvent) -> None:
        """The gradients are measured."""
        model = self._models.get(event.model)
        if model is None or model.running is None:
            return
        step, limit = model.running, model.running.msg.max_grad_norm
        if model.scales.state is not None:
            step.skipped = not event.finite
            model.scales.move(step.msg.step, model.read_versions[step.msg.step], found_inf=step.skipped)
        factor = 1.0
        if limit is not None:
            step.norm = event.norm
            factor = clip_factor(limit, event.norm, single=event.single)
        self._step_units(model, step, factor)

    def _step_units(self, model: Model, step: RunningStep, factor: float) -> None:
        """A skipped step publishes what there was."""
        msg, inverse = step.msg, model.inverse(step.msg.step)
        changed = [] if step.skipped else model.units_in_order()
        unchanged = [unit.index for unit in model.spec.units if step.skipped or not unit.trainable]
        model.previous = dict(model.master)
        step.queue = [StepUnit(model.number, msg.step, unit, msg.groups, factor, inverse) for unit in changed]
        self._saves.step_next(model)
        model.publish(msg.step + 1, [(unit, model.master[unit]) for unit in unchanged])
        self._finish(model)

    def on_unit_stepped(self, event: UnitSteppedEvent) -> None:
        """A unit has new weights."""
        model = self._models.get(event.model)
        if model is None:
            return
        model.master[event.unit] = event.extent
        model.publish(event.step + 1, [(event.unit, event.extent)])
        if model.running is not None:
            model.running.is_stepping = False
            self._saves.step_next(model)
        self._finish(model)

    def on_buffers(self, msg: DataReadyMsg) -> None:
        """A step may wait for them."""
        model = self._models.get(msg.model)
        if model is not None:
            model.buffers.add(msg)
            self._finish_waiting(model)

    def _finish_waiting(self, model: Model) -> None:
        if model.running is not None and model.running.awaits_buffers:
            self._finish(model)

    def _finish(self, model: Model) -> None:
        step = model.running
        if step is None or step.queue or step.is_stepping:
            return
        if not model.buffers.keep(step.msg.buffers_from) and not step.late_cancels:
            step.awaits_buffers = True  # of a call that is being cancelled they may never come
            return
        self._end(model, step)

    def _end(self, model: Model, step: RunningStep) -> None:
        msg = step.msg
        model.running, model.version = None, msg.step + 1
        model.sums.stepped(msg.step, msg.calls)
        scale = model.scale(msg.step)
        done = StepDoneMsg(model.number, msg.step, step.norm, step.skipped, 0.0, scale, model.scales.state)
        self._out.add(FinishStep(done))
        model.read_versions.pop(msg.step, None)
        model.scales.forget_before(msg.step)
        for cancel in step.late_cancels:
            self._cancels.carry_out(cancel)
        self._saves.copy_next(model)
        self.start(model)

    # --- what comes between

    def on_set_scaler(self, msg: SetScalerMsg) -> None:
        """Later iterations use another loss scale."""
        self._models[msg.model].scales.set(msg)

    def on_cancel(self, msg: CancelMsg) -> None:
        """Too late for calls that a step has taken: the controller will hear of the step first."""
        model = self._models[msg.model]
        step = model.running
        if step is None or not any(msg.first_call <= call <= msg.last_call for call in step.msg.calls):
            self._cancels.carry_out(msg)
            return
        step.late_cancels.append(msg)
        self._finish_waiting(model)

    def on_work_failed(self, event: WorkFailedEvent) -> None:
        """What was to follow is not done; the shell drops what it has been told. The controller hears why from there.

        A gradient that could not be taken would be missing in the step, and a step that ends half way has changed
        some of its weights in place.
        """
        model = self._models.get(event.model)
        if model is None:
            return
        step, model.running, model.failed = model.running, None, model.failed or event.reason
        model.steps.clear()
        model.reads.clear()
        model.forget_open()
        for cancel in step.late_cancels if step is not None else ():
            self._cancels.carry_out(cancel)
        self._saves.fail_all(model)

    def end_without_buffers(self, model: Model) -> None:
        """Workers have died beside the controller, and what a step waits for with them: the buffers before stay."""
        if model.running is not None and model.running.awaits_buffers:
            self._end(model, model.running)
