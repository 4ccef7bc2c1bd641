"""A model: its weights, what is under way with them, and what others own of it: sums, loss scale, buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rpruntime.optimizer.buffers import StartBuffers
from rpruntime.optimizer.events import StepUnit
from rpruntime.optimizer.outbox import Outbox
from rpruntime.optimizer.scales import Scales
from rpruntime.optimizer.scaling import inverse_of
from rpruntime.optimizer.sums import Sums
from rpruntime.store.handle import Extent
from rpruntime.wire.messages import (
    CancelMsg,
    ModelSpec,
    ReadStateMsg,
    RestoreMsg,
    SnapshotMsg,
    StepMsg,
    WeightsReadyMsg,
)
from rpruntime.wire.succession import KeepOpenMsg, NoteModelMsg

UNITS_A_MESSAGE = 1000
"""So many keep a message under its limit."""


@dataclass
class RunningStep:
    """The one step of a model that is under way."""

    msg: StepMsg
    queue: list[StepUnit] = field(default_factory=list)
    """Units whose turn has not come, or which a snapshot has to copy first."""
    is_stepping: bool = False
    """Whether a unit is being stepped."""
    norm: float | None = None
    """None: nothing is clipped."""
    skipped: bool = False
    """Whether it found a gradient that is not finite."""
    awaits_buffers: bool = False
    """Whether it is done but for the buffers."""
    late_cancels: list[CancelMsg] = field(default_factory=list)
    """Cancels of its calls."""


@dataclass
class Snapshot:
    """What a save still needs of the model as it is between two steps."""

    msg: SnapshotMsg
    to_copy: deque[int]
    """Trainable units that are not copied, in the order of steps; no step of `msg.step` or later touches them."""
    begun: bool = False
    copied: dict[int, int] = field(default_factory=dict)
    """Unit -> bytes of a copy that is not written."""


class Model:
    """One that is loaded.

    Attributes:
        sums: its gradients.
        scales: its loss scale.
        buffers: those that its iterations start with.
        read_versions: iteration -> the version that it reads.
    """

    def __init__(self, spec: ModelSpec, out: Outbox) -> None:
        self.spec = spec
        self.sums = Sums(spec, out)
        self.scales = Scales(spec.scaler)
        self.buffers = StartBuffers(spec, out)
        self.read_versions: dict[int, int] = {}
        self._out = out
        self.version = 0
        """Steps done, as versions are counted."""
        self.master: dict[int, Extent] = {}
        """The newest copy of each unit."""
        self.previous: dict[int, Extent] = {}
        """Those of the version before."""
        self.torn = False
        """Whether weights have been announced that have not all come: nothing could go on from here."""
        self.failed = ""
        """Why an instruction has failed: nothing is added or stepped any more, and nobody goes on from here."""
        self.steps: deque[StepMsg] = deque()
        """Those that have not begun."""
        self.running: RunningStep | None = None
        self.snapshots: list[Snapshot] = []
        self.copying = False
        """Whether the shell is copying a unit."""
        self.restoring: RestoreMsg | None = None
        self.restored: set[int] = set()
        """Units that have their values."""
        self.reads: list[ReadStateMsg] = []
        """Questions that wait for gradients."""
        self.note: NoteModelMsg | None = None
        """What the controller said when the model was loaded, or last got new weights; None: it is still loading."""
        self.to_keep: KeepOpenMsg | None = None
        """Waits for the last gradients: the calls' ends are told by another link than they come by."""
        self.open: KeepOpenMsg | None = None
        """What a controller that detached has left of the open iteration."""

    @property
    def number(self) -> int:
        """Its name among the models of the session."""
        return self.spec.model

    def units_in_order(self) -> list[int]:
        """Trainable units as they are stepped: shallow ones first, as the next forward waits for those.

        When asynchronous, deepest ones first: an iteration that runs beside the step still reads the version before,
        and its gradients come deepest first, each into the room of that version, which stays until a newer one is
        written.
        """
        units = sorted((unit for unit in self.spec.units if unit.trainable), key=lambda unit: unit.positions[0])
        return [unit.index for unit in (reversed(units) if self.spec.asynchronous else units)]

    def publish(self, version: int, units: Iterable[tuple[int, Extent]]) -> None:
        """Tell of new weights, as (unit, where they lie)."""
        found, scale = tuple(units), self.scales.announced(version)
        for start in range(0, len(found), UNITS_A_MESSAGE):
            part = found[start : start + UNITS_A_MESSAGE]
            self._out.send_readers(WeightsReadyMsg(self.number, version, part, scale))

    def scale(self, iteration: int) -> float:
        """That the losses of an iteration were multiplied by."""
        return 1.0 if self.scales.state is None else self.scales.of(self.read_versions[iteration])

    def inverse(self, iteration: int) -> float:
        """What its gradients are multiplied by."""
        return 1.0 if self.scales.state is None else inverse_of(self.scale(iteration))

    # --- for the next controller

    def forget_open(self) -> None:
        """What a controller left, or is leaving, of the open iteration is not wanted or not whole."""
        self.open = self.to_keep = None

    def left_behind(self) -> Model:
        """As the next controller finds it: at its newest version, with the sums of `open` or with none."""
        calls = self.open.calls if self.open is not None else ()
        left = Model(self.spec, self._out)
        left.sums = self.sums.left_by(calls, self.version)
        left.scales = self.scales.left_at(self.version)
        # as the next controller calls them; its head may be another one than before
        left.buffers = StartBuffers(self.spec, self._out, kept_from=(-self.number, 0))
        left.read_versions = {self.version: self.read_versions[self.version]} if calls else {}
        left.version, left.master, left.previous = self.version, self.master, self.previous
        left.note, left.open = self.note, self.open
        return left

    def previous_read(self) -> tuple[Extent, ...]:
        """Version `version - 1`, where the calls that are kept have read it: so will others of their iteration."""
        if self.version == 0 or self.read_versions.get(self.version, self.version) == self.version:
            return ()
        return tuple(self.previous.get(unit, extent) for unit, extent in self.master.items())
