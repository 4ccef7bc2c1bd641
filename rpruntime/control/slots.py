"""The slots in flight: who runs each, what it waits for and what it has written, until it commits or is cancelled.

A slot may pass on what it read, so its commit is *held* until all that it read has been published: only then is it
known which keys name an extent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from rpruntime.control.lifetimes import Lifetimes, Reader
from rpruntime.control.outbox import Outbox
from rpruntime.control.roster import Roster
from rpruntime.control.tasks import CallTasks
from rpruntime.store.handle import Extent
from rpruntime.wire.messages import CallMsg, DataReadyMsg, Key, SlotCommittedMsg, SlotTask, TaskMsg


@dataclass
class Slot:
    """One of them."""

    task: SlotTask
    role: str
    """Who runs it."""
    call: CallMsg
    """What that role has to know before."""
    is_late: bool
    """Its producers may have been told of no reader: the controller passes on to it what it reads."""
    is_moved: bool = False
    """It went to another role than the producers of what it reads were told."""
    written: dict[Key, dict[Extent, None]] = field(default_factory=dict)
    """What all its attempts have published so far: somebody may read any of them."""
    early_slabs: dict[Key, None] = field(default_factory=dict)
    """Of its gradients, what the optimizer was done with before the commit arrived."""
    causes: list[str] = field(default_factory=list)
    """Why processes died while they ran it."""

    def write(self, key: Key, extents: Iterable[Extent]) -> None:
        """An attempt has published these."""
        self.written.setdefault(key, {}).update(dict.fromkeys(extents))


class Slots:
    """All of them, by number, which ascends in the order of dispatch.

    Args:
        first: number of the first one.

    Attributes:
        next_number: what the next one gets.
    """

    def __init__(self, roster: Roster, lifetimes: Lifetimes, out: Outbox, first: int) -> None:
        self.next_number = first
        self._roster = roster
        self._lifetimes = lifetimes
        self._out = out
        self._slots: dict[int, Slot] = {}
        self._held: dict[int, SlotCommittedMsg] = {}
        """In the order in which they came."""
        self._waiting: dict[int, set[int]] = {}
        """Those that are not handed out before these have committed."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, number: int) -> bool:
        return number in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __getitem__(self, number: int) -> Slot:
        return self._slots[number]

    def is_running(self, number: int) -> bool:
        """Whether a slot is known and its commit has not come."""
        return number in self._slots and number not in self._held

    def is_held(self, number: int) -> bool:
        """Whether a slot's commit waits for what it read."""
        return number in self._held

    def is_waiting(self, number: int) -> bool:
        """Whether a slot is not handed out before others have committed."""
        return number in self._waiting

    def running_on(self, role: str) -> list[int]:
        """What a role has not committed, ascending."""
        return sorted(n for n, slot in self._slots.items() if slot.role == role and n not in self._held)

    def of_calls(self, calls: Collection[int]) -> list[int]:
        """All slots of these calls."""
        return [number for number, slot in self._slots.items() if slot.task.call in calls]

    def of_model(self, model: int) -> list[int]:
        """All slots of a model."""
        return [number for number, slot in self._slots.items() if slot.task.model == model]

    # --- on their way to a role

    def add(self, tasks: CallTasks, call: CallMsg, *, late: bool = False) -> None:
        """They are registered as readers already; numbers begin with `next_number`."""
        assert not tasks.slots or min(tasks.slots) == self.next_number
        for number, task in tasks.slots.items():
            self._slots[number] = Slot(task, tasks.roles[number], call, late)
        self.next_number += len(tasks.slots)

    def wait(self, number: int, after: Iterable[int]) -> None:
        """Hand a slot out only when these have committed."""
        before = {other for other in after if other in self._slots}
        if before:
            self._waiting[number] = before

    def released_by(self, number: int) -> list[int]:
        """Those that waited for nothing but this slot, which has committed."""
        released = []
        for slot, before in list(self._waiting.items()):
            before.discard(number)
            if not before:
                del self._waiting[slot]
                released.append(slot)
        return released

    def hand_over(self, number: int) -> None:
        """Everything that a role needs to run a slot, besides weights; it may know some of it."""
        slot = self._slots[number]
        if self._roster.is_away(slot.role) or self.is_waiting(number):
            return  # when it joins, or when what it waits for has committed
        self._out.send(slot.role, slot.call)
        self._out.send(slot.role, TaskMsg(slot.task))
        for key in sorted(self._lifetimes.reads(number)):
            announced = self._lifetimes.announced(key)
            if announced is not None:
                self._out.send(slot.role, announced[0])

    def move(self, number: int, role: str, microbatches: tuple[int, ...]) -> None:
        """Another role does these micro-batches of a slot, or the same one again."""
        slot = self._slots[number]
        slot.task = replace(slot.task, microbatches=microbatches, attempt=len(slot.causes))
        slot.role, slot.is_moved = role, True
        self.hand_over(number)

    # --- what they have done

    def take_data(self, msg: DataReadyMsg) -> bool:
        """A slot has published something, which goes on to readers that its role may not know of; False: repeated, or
        cancelled."""
        if not self.is_running(msg.slot):
            return False
        slot = self._slots[msg.slot]
        slot.write(msg.key, msg.payload.extents())
        if self._lifetimes.announce(msg, slot.role):
            readers = self.reading(msg.key)
            for role in sorted({reader.role for reader in readers if reader.is_moved or reader.is_late}):
                self._out.send(role, msg)
        return True

    def reading(self, key: Key) -> list[Slot]:
        """Those that read a key."""
        return [self._slots[reader] for reader in self._lifetimes.readers(key) if isinstance(reader, int)]

    def unpublished(self, reader: Reader) -> set[Key]:
        """What a reader reads, besides weights and what it writes itself, and what nobody has committed yet."""
        own = self._slots[reader].written.keys() if isinstance(reader, int) else ()
        return self._lifetimes.unpublished(reader).difference(own)

    def hold(self, msg: SlotCommittedMsg) -> None:
        """A commit has come."""
        self._held[msg.slot] = msg

    def committable(self) -> list[SlotCommittedMsg]:
        """Held commits of slots of which all that they read has been published."""
        return [msg for number, msg in self._held.items() if not self.unpublished(number)]

    def commit(self, number: int) -> Slot:
        """Publish what a slot has written and let go of what it read: it is over."""
        passed_on = self._may_be_passed_on(number) if self._slots[number].is_moved else ()
        slot = self.forget(number)
        for key, extents in slot.written.items():
            more = passed_on if key[0] in ("act", "buffer", "out") else ()
            self._lifetimes.publish(key, (*extents, *more))
        self._lifetimes.release(number)
        return slot

    def _may_be_passed_on(self, number: int) -> tuple[Extent, ...]:
        """Extents of all that a redone slot read: an attempt that nobody told of may have passed any on."""
        found: dict[Extent, None] = {}
        for key in sorted(key for key in self._lifetimes.reads(number) if key[0] in ("act", "buffer")):
            found.update(dict.fromkeys(self._lifetimes.extents(key) or ()))
        return tuple(found)

    def forget(self, number: int) -> Slot:
        """The slot is over; what it reads is the caller's to let go."""
        self._held.pop(number, None)
        self._waiting.pop(number, None)
        return self._slots.pop(number)

    def forget_model(self, model: int) -> None:
        """Drop all slots of a model and let go of what they read."""
        for number in self.of_model(model):
            self.forget(number)
            self._lifetimes.release(number)

    def validate(self) -> None:
        """Only slots in flight are held, wait, are waited for, or read anything (tests)."""
        numbers = self._slots.keys()
        assert self._held.keys() | self._waiting.keys() <= numbers
        assert all(before and before <= numbers for before in self._waiting.values())
        assert numbers >= self._lifetimes.slots()
        assert all(number == slot.task.slot < self.next_number for number, slot in self._slots.items())
