"""A worker that ends itself at a chosen moment; every other role runs as always.

    PYTHONPATH=tests/fakes/dying:...                             workers that the fork server forks
    RPRUNTIME_CHILD_COMMAND="python tests/fakes/dying_worker.py" processes that are started without it

DYING holds rules as JSON: [{"role": "worker-0", "incarnation": 1, "moment": "fused", "count": 2, "how": "kill"}, ...].
A process dies at the `count`-th time (1 is the first) that it comes to the moment:

    start, load          at its first line; when it builds a model
    stage, run           before weights are staged; before a micro-batch is launched
    forward, backward... inside the user's code of that phase
    launched             after a micro-batch was launched
    finish, handed       before and after the gradients are handed over
    commit, committed    before and after the message that a slot is done
    built                after it has said that a model is built
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import time
from collections import Counter
from typing import Any

rules: list[dict[str, Any]] = []
"""Those of this process."""
came: Counter[str] = Counter()


def begin() -> None:
    """A worker's first line: read who this process is and when it is to die."""
    role, incarnation = os.environ["RPRUNTIME_ROLE"], int(os.environ["RPRUNTIME_INCARNATION"])
    for rule in json.loads(os.environ.get("DYING", "[]")):
        if rule["role"] == role and rule.get("incarnation", 1) in (incarnation, 0):
            rules.append(rule)
    come_to("start")
    if rules:
        arm()


def die(how: str) -> None:
    if how == "exit":
        os._exit(3)
    if how == "sleep":
        while True:
            time.sleep(1)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}[how])


def come_to(moment: str) -> None:
    came[moment] += 1
    for rule in rules:
        if rule["moment"] == moment and rule.get("count", 1) == came[moment]:
            die(rule.get("how", "kill"))


def around(owner: Any, name: str, before: str = "", after: str = "") -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            come_to(before)
        result = original(*args, **kwargs)
        if after:
            come_to(after)
        return result

    setattr(owner, name, wrapped)


def arm() -> None:
    from rpruntime.wire.mailbox import Mailbox
    from rpruntime.wire.messages import SlotCommittedMsg
    from rpruntime.worker.shell import WorkerShell
    from rpruntime.worker.stage import Stage

    around(WorkerShell, "_build", "load")
    around(WorkerShell, "_stage_weights", "stage")
    around(WorkerShell, "_run", "run", "launched")
    around(WorkerShell, "_finish", "finish", "handed")
    at, send = Stage._at, Mailbox.send

    def _at(self: Any, phase: str, layer: int) -> None:
        at(self, phase, layer)
        come_to(phase)

    def sending(self: Any, role: str, msg: Any) -> None:
        committed = isinstance(msg, SlotCommittedMsg)
        if committed:
            come_to("commit")
        send(self, role, msg)
        if committed:
            come_to("committed")
        elif type(msg).__name__ == "ModelReadyMsg":
            come_to("built")

    Stage._at = _at  # type: ignore[method-assign]
    Mailbox.send = sending  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RPRUNTIME_ROLE"] == "optimizer":
        runpy.run_module("rpruntime.optimizer", run_name="__main__")
    else:
        begin()
        runpy.run_module("rpruntime.worker", run_name="__main__")
