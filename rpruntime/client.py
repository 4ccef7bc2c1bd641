"""The low-level client: one per session, the shell around the controller's machine. `RoundPipe` is built on it.

script's thread     calls --lock--> machine --> messages
receiver thread     messages --lock--> machine --> messages, futures
inline session      no thread: whoever waits drives the roles
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

from rpruntime import looking
from rpruntime.client_models import Models
from rpruntime.control import events as ev
from rpruntime.control.deaths import MAX_TASK_FAILURES
from rpruntime.control.machine import ControllerMachine
from rpruntime.control.roster import OPTIMIZER
from rpruntime.errors import RoundPipeError, SessionLost, WorkerDied
from rpruntime.interrupts import Bell, uninterrupted
from rpruntime.observer import Observer
from rpruntime.recording import record
from rpruntime.store.arena import Arena, Store
from rpruntime.store.handle import by_owner, role_of
from rpruntime.store.slabs import Slabs
from rpruntime.terminal import say
from rpruntime.wire.messages import (
    ForgetMsg,
    FreeMsg,
    ModelAllocatedMsg,
    ModelReadyMsg,
    ProtocolErrorMsg,
    RestoredMsg,
    RoleDiedMsg,
    RoleFailedMsg,
    ShutdownMsg,
    SnapshotBegunMsg,
    SnapshotFailedMsg,
    StateMsg,
)
from rpruntime.wire.succession import KeptMsg, ModelsMsg

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rpruntime.model import Model
    from rpruntime.scaler import GradScaler

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
LOOK_UP_S = 0.1
"""How late the receiver sees that the client is closed."""
NUMBERS_A_CONTROLLER = 10**9
"""Calls and slots of one controller of a session: their numbers are never used again."""
Listener = Callable[[Any], None]
_FOR_LISTENERS = (
    ModelAllocatedMsg, ModelReadyMsg, StateMsg, RoleFailedMsg, SnapshotBegunMsg, SnapshotFailedMsg, RestoredMsg,
    KeptMsg,
)  # fmt: skip


class Client:
    """The controller of a session, for any number of models.

    Attributes:
        session: the session it controls.
        arena: the controller's own memory (inputs, labels, code objects).
        slabs: weights of models that no pipe has loaded yet, and frozen ones.
        store: views of everybody's memory.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        owner = getattr(session, "owner", "controller.1")
        first = (getattr(session, "incarnation", 1) - 1) * NUMBERS_A_CONTROLLER
        self.store = Store(session.segments)
        self.arena = Arena(owner, session.segments, self.store)
        self.slabs = Slabs(owner, session.segments, lambda segment: self.store.forget_all((segment,)))
        self.lock = threading.RLock()
        self._bell = Bell()
        self._machine = ControllerMachine(
            session.worker_roles,
            owner,
            max_task_failures=int(session.config.get("max_task_failures", MAX_TASK_FAILURES)),
            check=os.environ.get("RPRUNTIME_DEBUG") == "1",
            first_slot=first + 1,
            incarnations=getattr(session, "incarnations", None),
            retired=getattr(session, "retired", ()),
        )
        record(self._machine, "controller")
        self._listeners: dict[int, Listener] = {}
        self._calls: dict[int, int] = {}
        self._next_call = first
        self.models = Models(self)
        """By name."""
        self.checkpoints: dict[str, str] = {}
        """Of each pipe, by name, the newest checkpoint that this run has completed or loaded."""
        self._broken: BaseException | None = None
        self._closed = False
        self._pid = os.getpid()
        self._inline = hasattr(session, "drive")
        self._thread: threading.Thread | None = None
        self.observer = Observer(self)
        atexit.register(self._at_exit)

    @overload
    @classmethod
    def attach(cls, session: Any = None, *, observe: Literal[False] = False, timeout_s: float = 10.0) -> Client: ...

    @overload
    @classmethod
    def attach(cls, session: Any = None, *, observe: Literal[True], timeout_s: float = 10.0) -> looking.Observation: ...

    @classmethod
    def attach(
        cls, session: Any = None, *, observe: bool = False, timeout_s: float = 10.0
    ) -> Client | looking.Observation:
        """The client of a session.

        Args:
            session: a `Session`, or the name of a served one. None: this process's own, else the only one that is
                served, else one that is started now.
            observe: only look, at any time and beside a controller; gives an `Observation`.
            timeout_s: how long to wait for the session's answer, in s.

        Raises:
            ConfigError: there is no such session, or another program controls it; says which.
        """
        from rpruntime import session as sessions

        if observe:
            return looking.Observation(sessions.find(session), timeout_s)
        return client_of(sessions.attach(session, timeout_s))

    def __repr__(self) -> str:
        return f"<Client of {self.session.name}>"

    def wait_roles(self) -> None:
        """Wait until every process of the session takes work; the launcher says what it waits for."""
        if self._thread is not None:
            return
        self.session.wait_ready()
        with self.lock:
            for msg in self.session.backlog:
                self._take(msg)
            self.session.backlog.clear()
            self.observer.roles_ready()
        if not self._inline:
            self._thread = threading.Thread(target=self._receive, name="rpruntime-client", daemon=True)
            with uninterrupted():
                self._thread.start()

    def find_models(self) -> None:
        """Learn what earlier controllers of the session have left; once. After an interrupt, call it again."""
        self.models.find()

    def detach(self, wait: bool = True) -> None:
        """Leave the session; in a served one the models stay. `wait`: as `Model.detach`.

        A session that this program has started ends with it: there the models are closed, and the session stays until
        then.
        """
        if self._closed:
            return
        models = [model for model in self.models.loaded.values() if not model.closed]
        if not self.session.served:
            for model in models:
                model.close()
            return
        try:
            for model in models:
                model.detach(wait)
        finally:
            self.session.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.detach(wait=kind is None)

    def load_model(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        name: str = "default",
        dtype: torch.dtype | None = None,
        loss_fn: Callable[..., Any] | None = None,
        grad_dtype: torch.dtype | None = None,
        loss_weight: Callable[..., Any] | None = None,
        chunk_dims: dict[str | int, int | None] | None = None,
        asynchronous: bool = False,
        recompute: str = "stage",
        grad_scaler: GradScaler | None = None,
        seed: int | None = None,
    ) -> Model:
        """Load a model into the session's processes; waits until all have it. An older one of the name is closed.

        Args:
            model: as for `RoundPipe`: an `nn.Sequential`, whose entries are the layers, or a causal LM.
            optimizer: made from its parameters; None: there are no steps.
            name: in `models`.
            dtype: floating parameters are cast to it; None: each keeps its own.
            loss_fn, grad_dtype, loss_weight, chunk_dims, asynchronous, recompute, grad_scaler, seed: of `RoundPipe`.

        Raises:
            ConfigError: something cannot be wrapped; names it and the line to change.
            HostMemoryError: the machine cannot hold the model; with the figures.
        """
        from rpruntime.model import Model
        from rpruntime.preparing import prepare

        prepared = prepare(
            model,
            optimizer,
            name=name,
            dtype=dtype,
            grad_dtype=grad_dtype,
            loss_fn=loss_fn,
            loss_weight=loss_weight,
            chunk_dims=chunk_dims,
            asynchronous=asynchronous,
            recompute=recompute,
            grad_scaler=grad_scaler,
            seed=seed,
        )
        return Model(self, prepared)

    # --- for models

    @property
    def machine(self) -> ControllerMachine:
        """The machine; ask it only under `lock`."""
        return self._machine

    def add_listener(self, listener: Listener, model: int | None = None) -> int:
        """A number for a new model (None), whose messages and instructions go to `listener`, under the lock."""
        with self.lock:
            if model is None:
                model = self.models.new_number()
            self._listeners[model] = listener
            return model

    def remove_listener(self, model: int) -> None:
        """Forget a model."""
        with self.lock:
            self._listeners.pop(model, None)

    def new_call(self, model: int) -> int:
        """A fresh call number."""
        with self.lock:
            self._next_call += 1
            self._calls[self._next_call] = model
            return self._next_call

    def forget_call(self, call: int) -> None:
        """A call number that no call will use."""
        with self.lock:
            self._calls.pop(call, None)

    def do(self, event: Any) -> None:
        """Give the machine an event of the script's and carry out what follows."""
        self.act(lambda: event)

    def act(self, book: Callable[[], Any]) -> None:
        """`book` changes the script's books and returns an event for the machine, or None: not now.

        Both happen as one: no message comes between them, and no interrupt.
        """
        with uninterrupted(), self.lock:
            self.check_alive()
            event = book()
            if event is not None:
                self._apply(self._machine.handle(event))
        if self._inline:
            self._drive()

    def send(self, role: str, msg: Any) -> None:
        """Send a message that the machine has no part in (loading, reading state)."""
        with self.lock:
            self.check_alive()
            self.session.post.send(role, msg)
        if self._inline:
            self._drive()

    def free(self, extents: Any) -> None:
        """Free extents of others that a reply named."""
        for owner, freed in by_owner(extents).items():
            self.send(role_of(owner), FreeMsg(freed))

    def wait(self, ready: Callable[[], bool], what: str, timeout_s: float | None = None) -> bool:
        """Wait, under no lock of the caller's, until `ready()`; False: the time is over.

        Raises:
            WorkerDied, SessionLost: it can never become ready.
        """
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        if self._inline:
            self._drive()
        changed = self._bell.listen()
        try:
            while True:
                with self.lock:
                    if ready():
                        return True
                    self.check_alive()
                    left = min(CHECK_INTERVAL_S, deadline - time.monotonic())
                    if left <= 0:
                        return False
                    if self._inline:
                        raise RoundPipeError(f"nothing is left to do, but {what} has not come")
                changed.acquire(timeout=left)
        finally:
            self._bell.leave(changed)

    def check_alive(self) -> None:
        """Raises what ended the session, or RoundPipeError after `close`."""
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise RoundPipeError("this program has left or closed its session: attach again, or make a new RoundPipe")
        if os.getpid() != self._pid:
            raise RoundPipeError("a forked child cannot use the pipe of its parent")
        if not self.session.launcher_alive():
            self._broken = SessionLost(
                f"session {self.session.name} is gone: its launcher ended; start the script again"
            )
            raise self._broken

    # --- messages

    def _receive(self) -> None:
        try:
            while self._take_messages():
                pass
        except BaseException as err:
            log.exception("in the client's receiver")
            with self.lock:
                self._broken = self._broken or err
                self._bell.ring()

    def _take_messages(self) -> bool:
        """Take in what has come; False: the client is closed."""
        came = self.session.post.wait(LOOK_UP_S)
        with self.lock:
            if self._closed:
                return False
            if came:
                self._take_all(self.session.post.receive())
                self._bell.ring()
            self.observer.tick()
        return True

    def _take_all(self, messages: list[Any]) -> None:
        began = time.monotonic()
        for msg in messages:
            self._take(msg)
        self.observer.took(len(messages), began)

    def _take(self, msg: Any) -> None:
        if self.observer.came(msg):
            return
        if isinstance(msg, RoleDiedMsg) and msg.role == OPTIMIZER:  # its update may be half done
            self._broken = self._broken or WorkerDied(
                f"{msg.who} died: {msg.reason}; log {self._log_of(msg.role)}; {self._resume_from()}"
            )
            self._bell.ring()
            return
        if isinstance(msg, _FOR_LISTENERS):
            for model, listener in list(self._listeners.items()):
                if msg.model in (model, -1):
                    listener(msg)
        if self._machine.understands(msg):
            self._apply(self._machine.handle(msg))
        elif isinstance(msg, ForgetMsg):
            self.store.forget_all(msg.segments)
        elif isinstance(msg, ShutdownMsg):
            self._broken = self._broken or SessionLost(f"session {self.session.name} was ended: {msg.reason}")
        elif isinstance(msg, ModelsMsg):
            self.models.on_answer(msg)
        elif isinstance(msg, ProtocolErrorMsg):
            log.error("%s did not understand a message: %s", msg.role, msg.error)
        elif not isinstance(msg, _FOR_LISTENERS):
            log.warning("unexpected %s", type(msg).__name__)

    def _resume_from(self) -> str:
        if not self.checkpoints:
            return "no checkpoint of this run is complete"
        return f"last complete checkpoint of this run: {', '.join(self.checkpoints.values())}"

    def _log_of(self, role: str) -> str:
        folder = self.session.config.get("log_dir") or self.session.folder
        return f"{folder}/{role}.log"

    def _apply(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, ev.Send):
                if isinstance(instruction.msg, FreeMsg):
                    self.slabs.note_freed(instruction.msg.extents)
                self.observer.sent(instruction.role, instruction.msg)
                self.session.post.send(instruction.role, instruction.msg)
            elif isinstance(instruction, ev.FreeOwn):
                for extent in instruction.extents:
                    self.arena.free(extent)
            elif isinstance(instruction, ev.ReleaseOwner):
                self._release(instruction.owner)
            elif isinstance(instruction, ev.NoteRedone):
                self._say_redone(instruction)
            elif isinstance(instruction, ev.EndRun):
                self._broken = self._broken or WorkerDied(instruction.reason)
            elif isinstance(instruction, ev.FinishCall):
                self._listeners[self._calls.pop(instruction.call)](instruction)
            else:
                listener = self._listeners.get(instruction.model)
                if listener is not None:
                    listener(instruction)
        self._bell.ring()

    def _release(self, owner: str) -> None:
        """Nobody will have a dead process's segments: every process drops its mappings."""
        segments = tuple(name for name, _ in self.session.segments.segments_of(owner))
        self.session.segments.release_owner(owner)
        self.store.forget_all(segments)
        for role in (*self._machine.living_workers, OPTIMIZER):
            self.session.post.send(role, ForgetMsg(segments))

    def _say_redone(self, note: ev.NoteRedone) -> None:
        if not self.session.config.get("quiet"):
            where = "as soon as its replacement is ready" if note.to == (note.role,) else f"on {', '.join(note.to)}"
            say(
                f"rpruntime: {note.slots} unfinished stages of {note.role} ({note.microbatches} micro-batches) run "
                f"again {where}; numbers do not change"
            )

    def _drive(self) -> None:
        """Inline: let the roles work until nobody has anything to do."""
        busy = True
        while busy:
            busy = self.session.drive()
            with self.lock:
                messages = self.session.post.receive()
                self._take_all(messages)
                busy = busy or bool(messages)

    # --- end

    def close(self) -> None:
        """Stop listening; the session goes on."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()  # it looks up every LOOK_UP_S; the mailbox may be closed only after it
        with self.lock:
            self.observer.close()
            self._bell.ring()

    def _at_exit(self) -> None:
        if self.session.served:  # its models are left while this client can still wait for what runs
            self.session.close()
        self.close()


def client_of(session: Any) -> Client:
    """The client of a session, made at first use."""
    found: Client | None = getattr(session, "client", None)
    if found is None:
        found = session.client = Client(session)
    if (
        getattr(session, "incarnation", 1) > 1
    ):  # also when an interrupt came in the middle: numbers of models depend on it
        found.find_models()
    return found
