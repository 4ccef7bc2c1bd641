"""Between two controllers: a worker's replacement that becomes ready, and what killed programs have left."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.children import ReadyProc
from launcher.devices import Device
from launcher.launch import Launcher
from launcher.succession import Holder, Succession
from rpruntime.wire.messages import AttachedMsg, AttachMsg, RoleReadyMsg
from rpruntime.wire.succession import ControllerGoneMsg, DetachMsg, ResetDoneMsg, ResetMsg


class Sent:
    """A mailbox that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []

    def send(self, role: str, msg: Any) -> None:
        self.messages.append((role, msg))

    def to(self, role: str, kind: type) -> list[Any]:
        return [msg for to, msg in self.messages if to == role and isinstance(msg, kind)]


def launcher_between_controllers(monkeypatch: pytest.MonkeyPatch) -> tuple[Launcher, ReadyProc, Sent]:
    """Controller 5 has gone, all have been reset, and the second process of worker-0 takes work."""
    launcher = Launcher.__new__(Launcher)
    process: Any = SimpleNamespace(pid=100)
    proc = ReadyProc("worker-0", 2, Device("cpu:0"), Path("worker-0.log"), 0, process, {})
    sent = Sent()
    succession = Succession()
    succession.attach(Holder(5, 100, 1, (), 0.0))
    succession.leave()
    succession.begin_reset(["optimizer"], {"worker-0": 1}, [])
    assert succession.answered("optimizer")
    for name, value in {
        "_mailbox": sent,
        "_succession": succession,
        "_late": {},
        "_waiting": None,
        "_controller_fd": -1,
        "_supervisor": SimpleNamespace(procs={"worker-0": proc}),
        "_plan": SimpleNamespace(devices=(), roles=(("worker-0", None),)),
        "_deaths": SimpleNamespace(messages=lambda: []),
        "folder": SimpleNamespace(name="calm-otter", config={}),
    }.items():
        setattr(launcher, name, value)
    monkeypatch.setattr(launcher, "_save", lambda: None)
    return launcher, proc, sent


@pytest.mark.parametrize("number", [6, 9])  # 9: three programs took the place and ended before they were let in
def test_a_replacement_that_is_still_resetting_is_announced(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, proc, sent = launcher_between_controllers(monkeypatch)
    launcher._on_ready(proc)
    (told,) = sent.to("worker-0", ResetMsg)
    try:
        launcher._on_attach(AttachMsg(os.getpid(), incarnation=number))
        (attached,) = sent.to("controller", AttachedMsg)
        assert attached.ready == {} and not sent.to("controller", RoleReadyMsg), "it has not reset"
        launcher._on_reset_done(ResetDoneMsg("worker-0", told.incarnation))
        assert sent.to("controller", RoleReadyMsg) == [RoleReadyMsg("worker-0", 2, {})]
    finally:
        if launcher._controller_fd >= 0:
            os.close(launcher._controller_fd)


def test_sockets_of_dead_controllers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, _, _ = launcher_between_controllers(monkeypatch)  # the next one has number 6 or more
    names = [f"controller.{number}.sock" for number in (1, 5, 6, 12)]
    for name in (*names, "controller.log", "optimizer.1.sock"):
        (tmp_path / name).touch()
    launcher.folder = SimpleNamespace(path=tmp_path)  # type: ignore[assignment]
    launcher._segments = SimpleNamespace(segments=dict)  # type: ignore[assignment]
    launcher._after_reset()
    assert {path.name for path in tmp_path.iterdir()} == {*names[2:], "controller.log", "optimizer.1.sock"}


def test_a_controller_that_detaches_is_watched_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, _, sent = launcher_between_controllers(monkeypatch)
    launcher._on_attach(AttachMsg(os.getpid(), incarnation=6))
    mail: list[Any] = [DetachMsg(6)]
    read_fd, write_fd = os.pipe()
    for name, value in {
        "receive": lambda: [mail.pop()] if mail else [],
        "fileno": lambda: read_fd,
    }.items():
        setattr(sent, name, value)
    launcher._wakeup = SimpleNamespace(read_fd=read_fd, drain=lambda: None)  # type: ignore[assignment]
    launcher._follower = SimpleNamespace(copy=lambda: None)  # type: ignore[assignment]
    launcher._supervisor = SimpleNamespace(  # type: ignore[assignment]
        filenos=tuple, reap=list, take_started=bool, stopping=True
    )
    try:
        assert launcher.turn(timeout_s=0) == set()
    finally:
        os.close(read_fd)
        os.close(write_fd)
    assert launcher._controller_fd == -1 and sent.to("optimizer", ControllerGoneMsg)
