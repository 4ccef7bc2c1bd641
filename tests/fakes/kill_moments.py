"""Case M2, run inside a mount namespace with a /dev/shm of its own: kills whole runs at 20 moments."""

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from tests.launching import WAIT_READY, rplaunch
from tests.leaks import MARK, Watch, processes_with, wait_until

MIB = 1 << 20
SCRIPT = (
    WAIT_READY
    + """
import time
segment, memory = session.segments.create(32 << 20)
memory[:4] = b"abcd"
print("ready", flush=True)
for _ in range(6000):
    time.sleep(0.01)
    assert memory[:4] == b"abcd"
    if session.segments.create(4096):
        print(".", end="", flush=True)
"""
)


def used() -> int:
    """Bytes in use of this namespace's /dev/shm."""
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def kill_all(watch: Watch) -> None:
    """SIGKILL to everything of one run, again until nothing is left."""

    def again() -> bool:
        found = processes_with(MARK, watch.mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait_until(again, 5.0, "all killed")


def main() -> None:
    folder = Path(sys.argv[1])
    rng = random.Random(1)
    live_watch = Watch()
    (folder / "live").mkdir()
    live = rplaunch(folder / "live", live_watch, SCRIPT.replace("    if session.segments.create(4096):", "    if 1:"))
    live.wait_for("ready")
    before = used()
    assert before >= 32 * MIB
    for count in range(20):
        watch = Watch()
        place = folder / str(count)
        place.mkdir()
        run = rplaunch(place, watch, SCRIPT, FAKE_SEGMENT=str(16 * MIB))
        time.sleep(0.1 + 1.0 * rng.random())
        peak = used()
        kill_all(watch)
        run.popen.wait()
        wait_until(lambda: used() == before, 5.0, f"{used()} bytes used, {before} before")
        print(f"killed with {peak - before} bytes in use: back to {used()}", os.listdir("/dev/shm"))
        assert os.listdir("/dev/shm") == [] or all(
            os.stat(f"/dev/shm/{name}").st_size == 0 for name in os.listdir("/dev/shm")
        )
    assert live.popen.poll() is None, live.err
    seen = live.out.count(".")
    wait_until(lambda: live.out.count(".") > seen, 5.0, "the live run goes on")
    kill_all(live_watch)
    wait_until(lambda: used() == 0, 5.0, "nothing in use")
    print("20 moments, the live run is unharmed")


main()
