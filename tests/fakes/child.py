"""A fake worker or optimizer: the life of a real one, without torch. FAKE_* variables choose its faults.

Each is "value" for all processes, "worker-0=value" for a role, or "worker-0.2=value" for a role's second process.
"""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from rpruntime.process import start_child

child = start_child()

from rpruntime.status import StatusPage, start_heartbeat, status_path  # noqa: E402
from rpruntime.wire.messages import ShutdownMsg  # noqa: E402
from rpruntime.wire.succession import ControllerGoneMsg, ResetDoneMsg, ResetMsg, SettledMsg  # noqa: E402

log = logging.getLogger("fake")


def chosen(name: str) -> str | None:
    """The value of FAKE_name, if it is meant for this process."""
    value = os.environ.get(f"FAKE_{name}")
    if value is None:
        return None
    role, equals, rest = value.partition("=")
    if not equals:
        return value
    return rest if role in (child.role, f"{child.role}.{child.incarnation}") else None


def play_status() -> None:
    """The page of a worker that is in a backward, or of an optimizer at work.

    FAKE_HANG=busy: it makes no progress; =silent: nor a heartbeat.
    """
    page = StatusPage.create(status_path(child.folder, child.role, child.incarnation))
    if child.role == "optimizer":
        page.set_busy(True)
    else:
        page.finishing(11)
        page.at(12, "backward", 3, 1)
    hang = chosen("HANG")
    if hang != "silent":
        start_heartbeat(page)
    if hang is None:
        threading.Thread(target=make_progress, args=(page,), daemon=True).start()


def make_progress(page: StatusPage) -> None:
    while True:
        page.progress()
        time.sleep(0.2)


def main() -> None:
    log.info("started on %s, sees %r", child.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
    child.hello()
    if chosen("EXIT_EARLY"):
        print("something printed before the end")
        sys.exit(int(chosen("EXIT_EARLY")))
    if chosen("KILL_EARLY"):
        os.kill(os.getpid(), int(chosen("KILL_EARLY")))
    if chosen("START_FAILED"):
        child.start_failed(chosen("START_FAILED"))
    if chosen("NEVER_READY"):
        time.sleep(3600)
    mapping = None
    if chosen("SEGMENT"):
        _, mapping = child.segments.create(int(chosen("SEGMENT")))
        mapping[:4] = b"abcd"
    if child.role != "optimizer" or chosen("HANG"):
        play_status()
    child.ready({"device": child.device, "visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "pid": os.getpid()})
    if chosen("EAT"):
        Path("/proc/self/oom_score_adj").write_text("1000")
        eaten = []
        while True:
            eaten.append(b"x" * (8 << 20))
    if chosen("STUBBORN") == "ask":
        time.sleep(3600)
    if chosen("STUBBORN") == "term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(3600)
    while True:
        for msg in child.mailbox.receive(0.5):
            if isinstance(msg, ShutdownMsg):
                log.info("asked to end: %s", msg.reason)
                child.mailbox.close()
                return
            if isinstance(msg, ControllerGoneMsg):
                child.mailbox.send("launcher", SettledMsg(msg.incarnation))
            if isinstance(msg, ResetMsg):
                child.mailbox.send("launcher", ResetDoneMsg(child.role, msg.incarnation))


main()
