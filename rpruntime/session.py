"""The script's side of a session: attach to the launcher's, or start a launcher for this process.

rplaunch train.py    RPRUNTIME_SESSION names the folder: attach
rp.init(name=...)    the name of a session that `rpctl serve` has started: attach, and detach at the end
python train.py      start the launcher in a new session (it watches this process), then attach
devices="inline"     no launcher, no child: everything in this process
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rpruntime import flags as flags_table
from rpruntime.errors import ConfigError, HostMemoryError, RoundPipeError, SessionLost, WorkerDied
from rpruntime.logs import ControllerLog
from rpruntime.process import open_pidfd, start_time
from rpruntime.served import all_sessions, command, find_served, take_place
from rpruntime.store.segments import SegmentClient
from rpruntime.terminal import say
from rpruntime.wire.mailbox import Mailbox
from rpruntime.wire.messages import (
    AttachedMsg,
    AttachMsg,
    RefusedMsg,
    RoleDiedMsg,
    RoleReadyMsg,
    ShutdownMsg,
)
from rpruntime.wire.succession import DetachMsg

log = logging.getLogger(__name__)

SESSION_VARIABLE = "RPRUNTIME_SESSION"
_ATTACH_TIMEOUT_S = 120.0
"""The controller before may have left a step that is being finished."""
_START_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 8.0

# This process's session. Module-level on purpose: a process has one, as it has one __main__.
_current: Any = None
_current_pid = 0


class _Default(str):
    """A default, told from the same value given by hand."""


_AUTO = _Default("auto")


def init(devices: str = _AUTO, *, name: str | None = None, **flags: Any) -> Session:
    """Make or choose this process's session; the second call with the same settings returns the same one.

    Args:
        devices: auto, inline, cpu:N, cuda, cuda:0,1 or 0,1.
        name: of the session; that of a served one (`rpctl serve`) attaches to it.
        **flags: every flag of rplaunch with `_` for `-`.

    Returns:
        The `Session` (an `InlineSession` for "inline").

    Raises:
        ConfigError: settings that cannot be had, or that differ from those of the running session.
    """
    given = flags_table.from_python({"devices": None if devices is _AUTO else devices, "name": name, **flags})
    found = _existing()
    if found is not None:
        _check_same(found, given, flags_table.BY_KEY)
        return found
    attached_to = os.environ.get(SESSION_VARIABLE)
    served = None if attached_to or name is None else find_served(name)
    if served is not None:
        attached_to = str(served)
    if attached_to:
        session = _attach(Path(attached_to), None)
        _adopt(session)
        _check_same(session, given, flags_table.BY_KEY)
        return session
    settings = flags_table.settings(given)
    if settings["devices"].strip().lower() == "inline":
        from rpruntime.inline import InlineSession

        return _adopt(InlineSession({**settings, "devices": [], "devices_flag": "inline"}))
    if name is not None and not settings["quiet"]:
        say(f"rpruntime: no session {name} is served, so this script starts one of that name, which ends with it")
    return _adopt(_start(flags_table.to_command_line(given)))


def attach(session: Any, timeout_s: float) -> Any:
    """A session to control: `session` itself, the served one of this name; None: see `Client.attach`.

    Raises:
        ConfigError: there is none of this name, or another process controls it.
    """
    if session is not None and not isinstance(session, str):
        return _checked(session)
    found = _existing()
    if found is not None and session in (None, found.name):
        return found
    if found is None and session is None and os.environ.get(SESSION_VARIABLE):
        return current()
    if found is not None:
        raise ConfigError(f"this process has session {found.name}: close it before attaching to {session}")
    served = find_served(session)
    if served is None and session is None:
        return current()
    if served is None:
        raise ConfigError(f"no session {session} is served: `rpctl status` lists those of this user")
    return _adopt(_attach(served, None, timeout_s))


def _checked(session: Any) -> Any:
    if not hasattr(session, "config"):
        raise ConfigError(f"a session is given by its name or as what rp.init gives, not as {session!r}")
    return session


def find(session: Any) -> Path:
    """The folder of a session to look at, whoever controls it. Raises ConfigError: there is none."""
    if session is not None and not isinstance(session, str):
        return Path(_checked(session).folder)
    running = [path for path in all_sessions() if session in (None, path.name)]
    if len(running) == 1:
        return running[0]
    names = ", ".join(path.name for path in running)
    raise ConfigError(f"which session? {names}" if names else f"there is no session {session or ''}".rstrip())


def current() -> Session:
    """This process's session, made with default settings if there is none."""
    found = _existing()
    return found if found is not None else init()


def _existing() -> Any:
    if _current is None or getattr(_current, "closed", False):
        return None
    if _current_pid != os.getpid():
        raise RoundPipeError(
            f"this process was forked from the one with the session (pid {_current_pid}): use it there"
        )
    return _current


def _adopt(session: Any) -> Any:
    global _current, _current_pid
    _current, _current_pid = session, os.getpid()
    return session


def _check_same(session: Any, given: dict[str, Any], known: dict[str, Any]) -> None:
    config = session.config
    under_rplaunch = getattr(session, "under_rplaunch", False)
    for key, value in given.items():
        has = session.name if key == "name" else config.get("devices_flag" if key == "devices" else key)
        if has == value or (key == "devices" and _same_devices(value, config)):
            continue
        if config.get("served"):
            raise ConfigError(
                f"rp.init({key}={value!r}) conflicts with session {session.name}, which was served with {key} {has!r} "
                f"(--{known[key].name} or {known[key].variable}): change one of the two"
            )
        if under_rplaunch:
            raise ConfigError(
                f"rp.init({key}={value!r}) conflicts with rplaunch, which has {key} {has!r} "
                f"(--{known[key].name} or {known[key].variable}): change one of the two"
            )
        raise ConfigError(
            f"rp.init({key}={value!r}): session {session.name} is running with {key} {has!r}; "
            "call session.close() first, then rp.init(...) with the new settings"
        )


def _same_devices(wanted: str, config: dict[str, Any]) -> bool:
    """Whether both settings mean the same devices; nothing is probed here."""
    names = list(config.get("devices", []))
    text = wanted.strip().lower()
    if text == "inline" or not names:
        return bool(text == "inline" and not names)
    if text in ("auto", "cuda"):
        return names[0].startswith("cuda") and config.get("devices_flag") in ("auto", "cuda")
    if text.startswith("cpu"):
        number = text.partition(":")[2] or "1"
        return number.isdigit() and names == [f"cpu:{index}" for index in range(int(number))]
    return names == [f"cuda:{word.removeprefix('cuda:')}" for word in text.split(",")]


def _start(words: list[str]) -> Session:
    """Start a launcher that watches this process, and attach."""
    stderr = 2 if _is_open(2) else subprocess.DEVNULL  # before the pipe, which would get a free number
    read_fd, write_fd = os.pipe()
    pid = os.getpid()
    path = [os.path.abspath(entry) for entry in sys.path]  # "" is the working directory
    # By its path: a `launcher` beside the script is the user's.
    main_file = str(Path(__file__).resolve().parent.parent / "launcher" / "__main__.py")
    command = [
        sys.executable, main_file, "--watch-pid", str(pid), "--watch-start", str(start_time(pid)),
        "--ready-fd", str(write_fd), "--sys-path", json.dumps(path), *words,
    ]  # fmt: skip
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stderr,  # stdout is the script's alone
            stderr=stderr,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    finally:
        os.close(write_fd)
    try:
        answer = _read_answer(read_fd, process)
        return _attach(Path(answer["folder"]), process)
    except BaseException:
        _end_process(process, 0.0)
        raise


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _read_answer(read_fd: int, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The launcher's one line, or the error it stands for."""
    data = b""
    deadline = time.monotonic() + _START_TIMEOUT_S
    try:
        while not data.endswith(b"\n"):
            readable, _, _ = select.select([read_fd], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise SessionLost(f"the launcher said nothing for {_START_TIMEOUT_S:.0f} s (pid {process.pid})")
            chunk = os.read(read_fd, 65536)
            if not chunk:
                raise SessionLost(f"the launcher ended at its start, exit code {process.wait(5)}; its error is above")
            data += chunk
    finally:
        os.close(read_fd)
    answer: dict[str, Any] = json.loads(data)
    if "error" in answer:
        kind = HostMemoryError if answer.get("type") == "HostMemoryError" else ConfigError
        raise kind(answer["error"])
    return answer


def _attach(folder: Path, process: subprocess.Popen[bytes] | None, timeout_s: float = _ATTACH_TIMEOUT_S) -> Any:
    try:
        body = json.loads((folder / "session.json").read_text())
    except (OSError, ValueError) as err:
        raise SessionLost(
            f"the session {folder.name} has ended ({SESSION_VARIABLE}={folder}): its launcher is gone"
        ) from err
    if not body["config"]["devices"]:  # rplaunch --devices inline
        from rpruntime.inline import InlineSession

        session = InlineSession(body["config"])
        session.under_rplaunch = True
        return session
    return Session(folder, body, process, timeout_s)


class Session:
    """A running session, attached as its controller.

    Public: `name`, `devices`, `folder`, `close()`, context manager. The rest is for the controller: `post`
    (its mailbox, not thread-safe), `segments`, `config`, `ready` (role -> info), `worker_roles`.
    """

    def __init__(
        self,
        folder: Path,
        body: dict[str, Any],
        process: subprocess.Popen[bytes] | None,
        timeout_s: float = _ATTACH_TIMEOUT_S,
    ) -> None:
        self.folder = folder
        self.name: str = folder.name
        self.under_rplaunch = process is None
        self.closed = False
        self.ready: dict[str, dict[str, Any]] = {}
        """`ReadyMsg.info` of the roles that take work."""
        self.died: dict[str, str] = {}
        """Roles that could not start, with the reason, and the optimizer if it has ended."""
        self._retired: set[str] = set()
        """Workers that have ended and will not be replaced."""
        self.backlog: list[Any] = []
        """Messages that came while the session waited for its processes, for the controller to read first."""
        self.client: Any = None
        """The `Client` that serves this session, closed before it."""
        self._process = process
        self._pid = os.getpid()
        launcher = body["launcher"]
        try:
            self.launcher_fd = open_pidfd(launcher["pid"], launcher["start_time"])
        except ProcessLookupError as err:
            raise SessionLost(f"the launcher of session {self.name} is gone") from err
        self._launcher = (launcher["pid"], launcher["start_time"])
        try:
            self._place = take_place(folder)
        except BaseException:
            self._close_launcher_fd()
            raise
        try:
            self.incarnation = self._place.incarnation
            self.segments = SegmentClient(folder, body["token"], owner=self.owner)
            public, secret = body["keys"]
            self.post = Mailbox(folder, "controller", self.incarnation, (public, secret))
        except BaseException:
            self._place.leave()
            self._close_launcher_fd()
            raise
        try:
            attached = self._ask_for_place(timeout_s)
        except BaseException:
            self.post.send("launcher", DetachMsg(self.incarnation))  # it may still wait to be let in
            self.post.flush(1.0)
            self.post.close()
            self.segments.close()
            self._place.leave()
            self._close_launcher_fd()
            raise
        self.incarnations = dict(attached.incarnations)
        """Of workers whose first process has died, as everybody knows."""
        self.retired: tuple[str, ...] = tuple(attached.retired)
        self._retired.update(self.retired)
        for role, number in self.incarnations.items():
            self.post.meet(role, number)
        for role in self.retired:
            self.post.retire(role)
        self.devices: tuple[str, ...] = tuple(attached.devices)
        self.config: dict[str, Any] = attached.config
        self.worker_roles: tuple[str, ...] = tuple(f"worker-{index}" for index in range(len(self.devices)))
        self._log = ControllerLog(Path(self.config["log_dir"]), debug=bool(self.config.get("debug")))
        atexit.register(self._at_exit)

    def _ask_for_place(self, timeout_s: float) -> AttachedMsg:
        self.post.send("launcher", AttachMsg(os.getpid(), incarnation=self.incarnation, argv=tuple(command())))
        deadline = time.monotonic() + timeout_s
        attached = None
        while attached is None and time.monotonic() < deadline:
            # All that came in one go is looked at: news of roles may follow the answer closely.
            for msg in self.post.receive(0.1):
                if isinstance(msg, RefusedMsg):
                    raise ConfigError(msg.reason)
                if isinstance(msg, AttachedMsg):
                    attached = msg
                    self.ready = dict(msg.ready)
                else:
                    self._note(msg)
            self._check_launcher()
        if attached is not None:
            return attached
        raise SessionLost(
            f"session {self.name} was not ready for another controller within {timeout_s:g} s (the one before may have "
            "left a step that is being finished): try again, or wait longer with timeout_s"
        )

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles of the session's children."""
        return ("optimizer", *self.worker_roles)

    @property
    def owner(self) -> str:
        """The name of what this process allocates."""
        return f"controller.{self.incarnation}"

    @property
    def served(self) -> bool:
        """Whether the session outlives this process: its models are detached at the end, not closed."""
        return bool(self.config.get("served"))

    def launcher_alive(self) -> bool:
        """Whether the launcher runs."""
        if self.launcher_fd >= 0:
            poller = select.poll()
            poller.register(self.launcher_fd, select.POLLIN)
            return not poller.poll(0)
        return start_time(self._launcher[0]) == self._launcher[1]

    def _check_launcher(self) -> None:
        if not self.launcher_alive():
            raise SessionLost(f"the launcher of session {self.name} is gone")

    def wait_ready(self, progress: Callable[[list[str], float], None] | None = None) -> None:
        """Wait until every child takes work. `progress(roles not ready, seconds)` is called about ten times a
        second.

        Raises:
            WorkerDied: one ended before; with its reason.
            SessionLost: the launcher is gone.
        """
        began = time.monotonic()
        while True:
            if self.died:
                role, reason = next(iter(self.died.items()))
                raise WorkerDied(f"{role} did not start: {reason}; log {Path(self.config['log_dir']) / role}.log")
            missing = [role for role in self.roles if role not in self.ready and role not in self._retired]
            if not missing:
                return
            if progress is not None:
                progress(missing, time.monotonic() - began)
            for msg in self.post.receive(0.1):
                self._note(msg)
            if not self.died:
                self._check_launcher()

    def _note(self, msg: Any) -> None:
        if isinstance(msg, RoleReadyMsg):
            self.ready[msg.role] = msg.info
            if msg.incarnation > 1:
                self.backlog.append(msg)
        elif isinstance(msg, RoleDiedMsg):
            self.ready.pop(msg.role, None)
            if msg.role == "optimizer" or not (msg.restarts or msg.was_ready or msg.incarnation > 1):
                self.died[msg.role] = msg.reason
            else:  # replaced or retired; the controller's machine sees to it
                self.backlog.append(msg)
                if not msg.restarts:
                    self._retired.add(msg.role)
        else:
            self.backlog.append(msg)

    def close(self) -> None:
        """End the session if this process started it, else only let go of it. A second call does nothing."""
        if self.closed or os.getpid() != self._pid:
            return
        if self.client is not None and self.served:
            for model in list(self.client.models.loaded.values()):
                try:
                    model.detach()
                except Exception as err:
                    log.warning("model %s is left as by a death: %s: %s", model.name, type(err).__name__, err)
        self.closed = True
        if self.client is not None:
            self.client.close()  # its thread reads `post`
        self._log.close()
        atexit.unregister(self._at_exit)
        process = self._process
        if process is not None and process.poll() is None:
            self.post.send("launcher", ShutdownMsg("the script closed the session"))
            self.post.flush(1.0)
        elif process is None:
            self.post.send("launcher", DetachMsg(self.incarnation))
            self.post.flush(1.0)
        self.post.close()
        self.segments.close()
        self._place.leave()
        if process is not None:
            _end_process(process, _CLOSE_TIMEOUT_S)
        self._close_launcher_fd()

    def _close_launcher_fd(self) -> None:
        if self.launcher_fd >= 0:
            os.close(self.launcher_fd)
            self.launcher_fd = -1

    def _at_exit(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session {self.name} on {', '.join(self.devices)}{', closed' if self.closed else ''}>"


def _end_process(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait for our launcher; then SIGTERM, then SIGKILL (its children end with it)."""
    for number, wait_s in ((None, patience_s), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        if number is not None:
            process.send_signal(number)
        try:
            process.wait(wait_s)
            return
        except subprocess.TimeoutExpired:
            continue
