"""`python -m rpruntime.forkserver`: imports once what workers and the optimizer need, then forks their processes.

    launcher ------ {"role": "worker-0", "environ": {...}}, its log's descriptor ------> fork server
             <----- {"ready": true} | {"role": "worker-0", "pid": 123} | {"role": "worker-0", "error": "why"}

Each is a datagram of JSON on a SOCK_SEQPACKET pair. A role's process is a child of the launcher, as if that had
started it: who forks it ends, and the launcher, a "child subreaper" meanwhile, becomes its parent. If the server dies
meanwhile, what it was forking has that name still and no go, and the launcher ends and collects it.

    fork server --fork--> intermediate --fork--> the role's process says its pid, and waits
        |                     ends
        |                                        in a session of its own
        |-- collects the intermediate, tells the launcher the pid
        +-- says go ------------------------------------> its log on 1 and 2, environment, main

The server has no thread of its own (numpy's library for matrices has some, which end before a fork), and nothing of
CUDA: a context would be of no use to a forked process. It has the launcher's environment, which libraries read when
they are loaded; `environ` is what the role has beside that.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rpruntime.process import EXIT_UNFIT, PR_SET_NAME, PR_SET_PDEATHSIG, prctl

SOCKET_VARIABLE = "RPRUNTIME_FORK_FD"
PROCESS_NAME = "rp:forkserver"
"""Of the server, and of what it forks until that has its own."""
_MAX_BYTES = 1 << 16
_GPU_FILES = ("/dev/nvidia", "/dev/kfd")
"""Prefixes of what a driver opens when it is initialised, not yet when an import of torch for CUDA loads it."""


def main() -> None:
    """The server; in each process that it forks, the role's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    death_fd = int(os.environ["RPRUNTIME_DEATH_FD"])
    os.set_inheritable(death_fd, False)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_NAME, PROCESS_NAME.encode())
    sock = socket.socket(fileno=int(os.environ.pop(SOCKET_VARIABLE)))
    sock.set_inheritable(False)
    poller = select.poll()
    poller.register(death_fd, select.POLLIN)
    if poller.poll(0):  # the launcher ended before the kernel was asked to tell of it
        return
    import rpruntime.optimizer.run
    import rpruntime.worker.pinning
    import rpruntime.worker.run  # noqa: F401
    from rpruntime.optimizer.__main__ import main as optimizer
    from rpruntime.worker.__main__ import main as worker

    problem = why_unfit()
    if problem:
        print(f"processes are started without the fork server: {problem}", file=sys.stderr, flush=True)
        os._exit(EXIT_UNFIT)  # at once: every role waits for it
    gc.collect()
    gc.freeze()  # so that no collection in a process writes to the pages that all share
    poller.register(sock, select.POLLIN)
    role = serve(sock, poller, death_fd)
    if role:
        (optimizer if role == "optimizer" else worker)()


def why_unfit() -> str:
    """Why this process must not be forked; "" if it may."""
    import torch

    if threading.active_count() > 1 or _threads_after_a_fork() > 1:
        return "an import has started threads"
    if torch.cuda.is_initialized() or any(path.startswith(_GPU_FILES) for path in _open_files()):
        return "an import has opened a GPU"
    return ""


def _open_files() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # what lists the folder is closed by now
            yield str(entry.readlink())


def _threads_after_a_fork() -> int:
    """How many threads this process has when the libraries that know of forks have ended theirs."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task"))


def serve(sock: socket.socket, poller: select.poll, death_fd: int) -> str:
    """Fork until the launcher is gone. Returns "" then, and in each forked process its role."""
    try:
        _send(sock, {"ready": True})
        while death_fd not in dict(poller.poll()):
            data, fds, _, _ = socket.recv_fds(sock, _MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                break
            request = json.loads(data)
            try:
                forked = _fork(sock, request["role"])
            except OSError as err:
                _send(sock, {"role": request["role"], "error": f"no process can be forked: {err}"})
                forked = False
            if forked:
                sock.close()
                _become(request["role"], request["environ"], fds[0])
                return str(request["role"])
            os.close(fds[0])
    except (BrokenPipeError, ConnectionResetError):
        pass
    return ""


def _send(sock: socket.socket, body: dict[str, Any]) -> None:
    sock.send(json.dumps(body).encode())


def _fork(sock: socket.socket, role: str) -> bool:
    """Fork a role's process; True in it, when the launcher is its parent and knows its pid.

    Raises:
        OSError: there is no room for another process.
    """
    launcher = os.getppid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            intermediate = os.fork()
            if not intermediate:
                try:
                    if os.fork():
                        os._exit(0)
                    ours.close()
                    os.setsid()  # from when the launcher knows its pid, that is its group's too
                    theirs.send(str(os.getpid()).encode())
                    # Without a go the server has died, and the launcher may start this role in another way.
                    if not theirs.recv(1) or os.getppid() != launcher:
                        os._exit(1)
                    return True
                except OSError as err:
                    os.write(2, f"{role}: {err}\n".encode())
                    os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(intermediate, 0)[1])
        if code:
            raise OSError(f"exit code {code} of the process between")
        pid = ours.recv(16)
        if not pid:
            raise OSError("it was killed")
        _send(sock, {"role": role, "pid": int(pid)})
        with contextlib.suppress(OSError):  # killed by now: the launcher will see that
            ours.send(b"g")
    return False


def _become(role: str, environ: dict[str, str], log_fd: int) -> None:
    """Make of a fork of the server what a process of this role is that was started anew."""
    os.environ.update(environ)
    for fd in (1, 2):
        os.dup2(log_fd, fd)
    os.close(log_fd)
    kind = "optimizer" if role == "optimizer" else "worker"
    _set_command_line(f"rpruntime.{kind} {role} {Path(environ['RPRUNTIME_FOLDER']).name}")
    random = sys.modules.get("numpy.random")
    if random is not None:  # Python's own does so by itself
        random.seed()


def _set_command_line(text: str) -> None:
    """What `ps` shows; it has the room of the server's own command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    if 0 < begin < end:
        data = text.encode()[: end - begin - 1]
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, data, len(data))


if __name__ == "__main__":
    main()
