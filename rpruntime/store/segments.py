"""Life of shared-memory segments: made by the launcher, nameless from the start, handed out as descriptors.

    process                     launcher (one thread a connection)
      | -- auth token, owner -->  |  uid by SO_PEERCRED, then the token
      | <-- ok -----------------  |
      | -- create nbytes ------>  |  shm_open at size 0, shm_unlink, ftruncate, posix_fallocate
      | <-- segment + fd -------  |  SCM_RIGHTS
      | -- open segment ------->  |
      | <-- fd -----------------  |

A message is a 4-byte length and a msgpack map. As no segment has a name, no kill can leave one behind: its
memory goes with the last descriptor and mapping. Reserving is a real allocation: a full /dev/shm is an error
here, not a SIGBUS in whoever touches the page. (Several threads do not help within one file, the kernel holds
its inode's lock: measured 10 GiB/s with one as with four.)
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import itertools
import logging
import mmap
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import posix_ipc

from rpruntime.errors import HostMemoryError, RoundPipeError, SessionLost
from rpruntime.process import start_time
from rpruntime.store.fdsock import BadPeer, receive, receive_fd, send
from rpruntime.store.handle import role_of
from rpruntime.store.limits import HostMemory, check_host_memory, figures, gib, map_limits, read_host_memory

log = logging.getLogger(__name__)

SOCKET_NAME = "segments.sock"
_AUTH_TIMEOUT_S = 5.0
_MAX_STRANGERS = 64
"""Connections that have not said yet who they are; beyond these the oldest one is dropped. Ours say it at once."""
_ACCEPT_RETRY_S = 0.05


def make_segment(
    nbytes: int, memory: Callable[[], HostMemory], override_gib: float | None = None, held_bytes: int = 0
) -> int:
    """Reserve `nbytes` of shared memory without a name and return its descriptor.

    `held_bytes`: what the session has reserved before.

    Raises:
        HostMemoryError: it does not fit; nothing stays allocated.
    """
    check_host_memory(
        nbytes, memory(), override_gib=override_gib, held_bytes=held_bytes, what="a shared-memory segment"
    )
    name = f"/rpruntime-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
    segment = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=0, mode=0o600)
    segment.unlink()
    fd = int(segment.fd)
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as err:
        os.close(fd)
        if err.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        raise HostMemoryError(
            f"reserving {gib(nbytes)} ({nbytes} bytes) of shared memory failed: {err.strerror}; "
            f"{figures(memory(), override_gib)}. Enlarge /dev/shm (`docker run --shm-size=...`, "
            "`mount -o remount,size=... /dev/shm`) or the memory limit."
        ) from err
    except BaseException:
        os.close(fd)
        raise
    return fd


def remove_stale_names(folder: Path = Path("/dev/shm")) -> int:
    """Remove names of launchers killed in the instant between making a segment (size 0) and unlinking it."""
    removed = 0
    for path in folder.glob(f"rpruntime-{os.getuid()}-*-*"):
        pid = path.name.split("-")[2]
        with contextlib.suppress(OSError):
            if pid.isdigit() and start_time(int(pid)) is None and path.lstat().st_size == 0:
                path.unlink()
                removed += 1
    return removed


class SegmentServer:
    """The launcher's side: owns a descriptor of every segment and serves them from threads of its own."""

    def __init__(
        self,
        folder: Path,
        token: str,
        *,
        override_gib: float | None = None,
        read_memory: Callable[[], HostMemory] = read_host_memory,
    ) -> None:
        self._token = token
        self._override_gib = override_gib
        self._read_memory = read_memory
        self._path = folder / SOCKET_NAME
        self._lock = threading.Lock()
        # Guarded by _lock: descriptor and owner of each segment, who has had it, connections alive, the strangers among
        # them in the order in which they came.
        self._segments: dict[str, tuple[int, str]] = {}
        self._handed: dict[str, set[str]] = {}  # by segment, the roles whose processes were given its descriptor
        self._peers: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}
        self._counter = itertools.count(1)
        self._closed = False
        self._warned = False
        # Reservations run one after the other: each one's check sees what the one before took.
        self._reserving = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._path.chmod(0o600)
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._accept, name="segments", daemon=True)
        self._thread.start()

    def create(self, nbytes: int, owner: str) -> tuple[str, int]:
        """Make a segment; returns its name (`owner-N`) and the descriptor, which stays the server's."""
        with self._reserving:
            fd = make_segment(nbytes, self._read_memory, self._override_gib, self._held_bytes())
        with self._lock:
            if self._closed:
                os.close(fd)
                raise SessionLost("the session is ending")
            segment = f"{owner}-{next(self._counter)}"
            self._segments[segment] = (fd, owner)
        return segment, fd

    def _held_bytes(self) -> int:
        with self._lock:
            return sum(os.fstat(fd).st_size for fd, _ in self._segments.values())

    def release(self, segment: str) -> None:
        """Drop the descriptor; mappings that others have stay valid."""
        with self._lock:
            entry = self._segments.pop(segment, None)
            self._handed.pop(segment, None)
        if entry is not None:
            os.close(entry[0])

    def give(self, segment: str, owner: str) -> None:
        """A segment is this owner's from now on; its name stays."""
        with self._lock:
            if segment in self._segments:
                self._segments[segment] = (self._segments[segment][0], owner)

    def held_bytes(self) -> dict[str, int]:
        """Bytes by owner."""
        found: dict[str, int] = {}
        with self._lock:
            for fd, owner in self._segments.values():
                found[owner] = found.get(owner, 0) + os.fstat(fd).st_size
        return found

    def release_owner(self, owner: str) -> None:
        """Drop every segment of one owner."""
        with self._lock:
            names = [name for name, (_, holder) in self._segments.items() if holder == owner]
        for name in names:
            self.release(name)

    def segments(self) -> dict[str, str]:
        """Owner by segment."""
        with self._lock:
            return {name: owner for name, (_, owner) in self._segments.items()}

    def close(self) -> None:
        """Stop serving, drop all descriptors and the socket file."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers)
            held = [fd for fd, _ in self._segments.values()]
            self._segments.clear()
        for sock in [self._listener, *peers]:
            # shutdown wakes a thread that blocks in accept or recv; close alone would not.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()
        for fd in held:
            os.close(fd)
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        _block_signals()
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                # No descriptor is left, as a rule: who connects waits in the kernel's queue meanwhile.
                self._drop_strangers(keep=len(self._strangers) // 2)
                time.sleep(_ACCEPT_RETRY_S)
                continue
            with self._lock:
                if self._closed:
                    peer.close()
                    return
                self._peers.add(peer)
                self._strangers[peer] = None
            self._drop_strangers(keep=_MAX_STRANGERS)
            try:
                threading.Thread(target=self._serve, args=(peer,), name="segments-peer", daemon=True).start()
            except RuntimeError:  # no thread can be had
                self._forget(peer)

    def _drop_strangers(self, keep: int) -> None:
        """End the oldest connections that have not said who they are; their threads close them."""
        with self._lock:
            dropped = list(self._strangers)[: max(0, len(self._strangers) - keep)]
            for peer in dropped:
                del self._strangers[peer]
        for peer in dropped:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        if dropped:
            self._warn_once(f"{len(dropped) + keep} connections at once did not say who they are")

    def _forget(self, peer: socket.socket) -> None:
        with self._lock:
            self._peers.discard(peer)
            self._strangers.pop(peer, None)
        peer.close()

    def _warn_once(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("a peer of the segment socket was dropped: %s (said once)", what)

    def _serve(self, peer: socket.socket) -> None:
        _block_signals()
        try:
            owner = self._authenticate(peer)
            while True:
                request = receive(peer)
                if request is None:
                    return
                self._answer(peer, owner, request)
        except BadPeer as err:
            self._warn_once(str(err))
        except OSError:
            pass  # the peer went away
        finally:
            self._forget(peer)

    def _authenticate(self, peer: socket.socket) -> str:
        """Who it is, or `BadPeer`."""
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", raw)
        if uid != os.getuid():
            raise BadPeer(f"pid {pid} has uid {uid}")
        try:
            first = receive(peer, within_s=_AUTH_TIMEOUT_S)
        except TimeoutError as err:
            raise BadPeer(f"pid {pid} did not say who it is") from err
        if first is None:
            raise OSError("closed")
        if not hmac.compare_digest(str(first.get("token", "")).encode(), self._token.encode()):
            raise BadPeer(f"pid {pid} has no token of this session")
        with self._lock:
            self._strangers.pop(peer, None)
        peer.settimeout(None)
        send(peer, {"ok": True})
        return str(first.get("owner", ""))

    def _answer(self, peer: socket.socket, owner: str, request: dict[str, Any]) -> None:
        op, segment = request.get("op"), request.get("segment")
        try:
            if op == "create":
                nbytes = request.get("nbytes")
                if not isinstance(nbytes, int) or nbytes <= 0:
                    raise BadPeer(f"{owner} asked for a segment of {nbytes!r} bytes")
                name, _ = self.create(nbytes, str(request.get("owner") or owner))
                try:
                    self._send_fd(peer, name, owner)
                except OSError:  # it was interrupted, or is gone: nobody knows of the segment
                    self.release(name)
                    raise
            elif op == "open":
                self._send_fd(peer, str(segment), owner)
            elif op == "release":
                self.release(str(segment))
                send(peer, {"ok": True})
            elif op == "give":
                self.give(str(segment), owner)
                send(peer, {"ok": True})
            elif op == "held":
                send(peer, {"ok": True, "held": self.held_bytes()})
            elif op == "list":
                wanted = request.get("owner")
                with self._lock:
                    found = [[name, os.fstat(fd).st_size] for name, (fd, of) in self._segments.items() if of == wanted]
                send(peer, {"ok": True, "segments": found})
            elif op == "handed":
                role = str(request.get("role"))
                with self._lock:
                    names = [name for name, roles in self._handed.items() if role in roles]
                send(peer, {"ok": True, "segments": names})
            elif op == "release_owner":
                self.release_owner(str(request.get("owner")))
                send(peer, {"ok": True})
            else:
                raise BadPeer(f"{owner} sent an unknown request {op!r}")
        except (HostMemoryError, SessionLost) as err:
            kind = "memory" if isinstance(err, HostMemoryError) else "lost"
            send(peer, {"ok": False, "kind": kind, "error": str(err)})
        except BadPeer:
            raise
        except OSError as err:
            if peer.fileno() < 0 or err.errno in (errno.EPIPE, errno.ECONNRESET, errno.EBADF):
                raise
            send(peer, {"ok": False, "kind": "system", "error": str(err)})

    def _send_fd(self, peer: socket.socket, segment: str, owner: str) -> None:
        with self._lock:
            entry = self._segments.get(segment)
            if entry is not None:
                self._handed.setdefault(segment, set()).add(role_of(owner))
            # A copy: another thread may release (and the kernel reuse) the number before it is sent.
            fd = os.dup(entry[0]) if entry is not None else -1
        if fd < 0:
            send(peer, {"ok": False, "kind": "unknown", "error": f"there is no segment {segment}"})
            return
        try:
            send(peer, {"ok": True, "segment": segment, "nbytes": os.fstat(fd).st_size}, fd)
        finally:
            os.close(fd)


class SegmentClient:
    """One process's side: makes segments, maps those of others. Thread-safe; a forked child connects anew.

    `timeout_s`: the launcher counts as gone if it says nothing for so long; None: only its end counts, as reserving
    memory may take long.
    """

    def __init__(self, folder: Path, token: str, *, owner: str = "", timeout_s: float | None = None) -> None:
        self._folder = folder
        self._token = token
        self._owner = owner or f"pid{os.getpid()}"
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._sock: socket.socket | None = None
        self._maps: dict[str, mmap.mmap] = {}

    def create(self, nbytes: int) -> tuple[str, mmap.mmap]:
        """Make and map a segment of exactly `nbytes`.

        Raises:
            HostMemoryError: it does not fit, or this process cannot map it.
            SessionLost: the launcher is gone.
        """
        if nbytes <= 0:
            raise ValueError(f"a segment needs at least one byte, not {nbytes}")
        return self._map({"op": "create", "nbytes": nbytes})

    def open(self, segment: str) -> mmap.mmap:
        """The mapping of a segment, made once."""
        found = self._maps.get(segment)
        return found if found is not None else self._map({"op": "open", "segment": segment})[1]

    def open_private(self, segment: str) -> mmap.mmap:
        """A new mapping that sees what others write and keeps to itself what is written through it."""
        with self._exclusive():
            answer, fd = self._exchange({"op": "open", "segment": segment})
            assert fd is not None, answer
            try:
                return mmap.mmap(fd, int(answer["nbytes"]), mmap.MAP_PRIVATE)
            finally:
                os.close(fd)

    def release(self, segment: str) -> None:
        """Nobody will open it again: the launcher drops it, and this process does when nothing views it."""
        with self._exclusive():
            self._maps.pop(segment, None)
        self._request({"op": "release", "segment": segment})

    def segments_of(self, owner: str) -> list[tuple[str, int]]:
        """(segment, bytes) of all that a process has made."""
        return [(str(name), int(nbytes)) for name, nbytes in self._request({"op": "list", "owner": owner})["segments"]]

    def handed_to(self, role: str) -> list[str]:
        """The segments, of those that are still there, that any process of this role has ever made or opened."""
        return [str(name) for name in self._request({"op": "handed", "role": role})["segments"]]

    def held_bytes(self) -> dict[str, int]:
        """Bytes of all segments of the session, by owner."""
        return {str(owner): int(nbytes) for owner, nbytes in self._request({"op": "held"})["held"].items()}

    def release_owner(self, owner: str) -> None:
        """Nobody will open the segments of a process again: the launcher drops them."""
        self._request({"op": "release_owner", "owner": owner})

    def give(self, segment: str) -> None:
        """A segment, whoever made it, is this process's from now on."""
        self._request({"op": "give", "segment": segment})

    def forget(self, segment: str) -> None:
        """Drop this process's mapping only; the memory goes when no view of it is left."""
        with self._exclusive():
            self._maps.pop(segment, None)

    def close(self) -> None:
        """Close the connection; mappings live as long as somebody views them."""
        with self._exclusive():
            self._maps.clear()
            if self._sock is not None:
                self._sock.close()
                self._sock = None

    def _map(self, request: dict[str, Any]) -> tuple[str, mmap.mmap]:
        with self._exclusive():
            known = self._maps.get(str(request.get("segment")))
            if known is not None:
                return str(request["segment"]), known
            answer, fd = self._exchange(request)
            assert fd is not None, answer
            segment, nbytes = str(answer["segment"]), int(answer["nbytes"])
            try:
                mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
            except OSError as err:
                if request["op"] == "create":
                    self._exchange({"op": "release", "segment": segment})
                raise HostMemoryError(
                    f"mapping segment {segment} of {gib(nbytes)} ({nbytes} bytes) failed: {err.strerror}; "
                    f"{map_limits()}"
                ) from err
            finally:
                os.close(fd)
            self._maps[segment] = mapping
            return segment, mapping

    def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._exclusive():
            return self._exchange(request)[0]

    def _exclusive(self) -> threading.Lock:
        """The lock, fresh in a forked child: there the parent's threads, and what they held, do not exist."""
        if os.getpid() != self._pid:
            self._lock = threading.Lock()
            self._pid = os.getpid()
            if self._sock is not None:
                # Only this process's descriptor goes; the parent's connection is not shut down.
                self._sock.close()
                self._sock = None
        return self._lock

    def _exchange(self, request: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        try:
            if self._sock is None:
                self._connect()
            assert self._sock is not None
            send(self._sock, request)
            answer, fd = receive_fd(self._sock)
        except BaseException as err:
            if self._sock is not None:  # also at an interrupt: the answer that comes now is not the next request's
                self._sock.close()
                self._sock = None
            if not isinstance(err, (OSError, BadPeer)):
                raise
            raise SessionLost(f"the launcher of session {self._folder.name} is gone ({err})") from err
        if answer.get("ok"):
            return answer, fd
        error = {"memory": HostMemoryError, "lost": SessionLost}.get(str(answer.get("kind")), RoundPipeError)
        raise error(str(answer.get("error")))

    def _connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self._timeout_s)
        try:
            sock.connect(str(self._folder / SOCKET_NAME))
            send(sock, {"token": self._token, "owner": self._owner})
            if not receive_fd(sock)[0].get("ok"):
                raise OSError("refused")
        except BaseException:
            sock.close()
            raise
        self._sock = sock


class PrivateSegments:
    """The same methods on private memory, for sessions inside one process."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._fds: dict[str, int] = {}
        self._counter = itertools.count(1)

    def create(self, nbytes: int) -> tuple[str, mmap.mmap]:
        """Make a segment of `nbytes`."""
        segment = f"inline-{next(self._counter)}"
        fd = self._fds[segment] = os.memfd_create(segment)
        os.ftruncate(fd, nbytes)
        self._maps[segment] = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        return segment, self._maps[segment]

    def open_private(self, segment: str) -> mmap.mmap:
        """A new mapping that keeps to itself what is written through it."""
        return mmap.mmap(self._fds[segment], len(self._maps[segment]), mmap.MAP_PRIVATE)

    def open(self, segment: str) -> mmap.mmap:
        """The mapping of a segment."""
        return self._maps[segment]

    def segments_of(self, owner: str) -> list[tuple[str, int]]:
        """None: nobody dies here."""
        return []

    def give(self, segment: str) -> None:
        """Nobody dies here."""

    def forget(self, segment: str) -> None:
        """Nobody else has it here, so `release` does all."""

    def release_owner(self, owner: str) -> None:
        """Nobody dies here."""

    def release(self, segment: str) -> None:
        """Forget a segment; its memory goes when no view of it is left."""
        self._maps.pop(segment, None)
        os.close(self._fds.pop(segment))

    def close(self) -> None:
        """Forget all segments."""
        for segment in list(self._fds):
            self.release(segment)


def _block_signals() -> None:
    """Signals belong to the main thread; here they would only interrupt a reservation."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE})
