"""A child that speaks protocol version 0. FAKE_OLD=deaf: it does not understand that it is to end, and goes on."""

import os
import time

from rpruntime.process import start_child

child = start_child()

from rpruntime.wire.messages import HelloMsg, ShutdownMsg  # noqa: E402


def main() -> None:
    child.mailbox.send("launcher", HelloMsg(child.role, child.incarnation, os.getpid(), protocol=0))
    if os.environ.get("FAKE_OLD") == "deaf":
        child.ready({"device": child.device, "pid": os.getpid()})
        time.sleep(3600)
    while not any(isinstance(msg, ShutdownMsg) for msg in child.mailbox.receive(0.5)):
        pass
    child.mailbox.close()


main()
