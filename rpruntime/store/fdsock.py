"""Messages over a Unix stream socket: a 4-byte length, a msgpack map, and at most one descriptor."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

import msgpack

MAX_MESSAGE_BYTES = 64 << 10


class BadPeer(Exception):
    """A peer that breaks the protocol; it is dropped."""


def send(sock: socket.socket, body: dict[str, Any], fd: int | None = None) -> None:
    """Send one message; the descriptor stays open here."""
    data = msgpack.packb(body, use_bin_type=True)
    frame = struct.pack("!I", len(data)) + data
    if fd is None:
        sock.sendall(frame)
        return
    sent = socket.send_fds(sock, [frame], [fd])
    if sent < len(frame):  # else nothing can fail any more: whoever has read all of it may be gone already
        sock.sendall(frame[sent:])


def receive(sock: socket.socket, *, within_s: float | None = None) -> dict[str, Any] | None:
    """One message; None at the end of the stream.

    Raises:
        TimeoutError: it was not whole after `within_s`, however it trickled in.
    """
    deadline = None if within_s is None else time.monotonic() + within_s
    head = _exactly(sock, 4, b"", deadline)
    return None if head is None else _body(sock, head, deadline)


def receive_fd(sock: socket.socket) -> tuple[dict[str, Any], int | None]:
    """One message and the descriptor that came with it, closed on exec.

    Raises:
        OSError: the connection ended, or this process has no descriptor left.
    """
    head, fds, flags, _ = socket.recv_fds(sock, 4, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        full = _exactly(sock, 4, head) if head else None
        if full is None:
            raise OSError("the connection ended")
        body = _body(sock, full)
        if flags & socket.MSG_CTRUNC:
            raise OSError("this process has no descriptor left, raise `ulimit -n`")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return body, fds[0] if fds else None


def _body(sock: socket.socket, head: bytes, deadline: float | None = None) -> dict[str, Any]:
    (length,) = struct.unpack("!I", head)
    if length > MAX_MESSAGE_BYTES:
        raise BadPeer(f"a message of {length} bytes")
    data = _exactly(sock, length, b"", deadline)
    if data is None:
        raise OSError("the connection ended inside a message")
    try:
        body = msgpack.unpackb(data, raw=False)
    except Exception as err:  # msgpack raises many unrelated types on broken input
        raise BadPeer(f"broken msgpack: {err}") from err
    if not isinstance(body, dict):
        raise BadPeer("a message that is not a map")
    return body


def _exactly(sock: socket.socket, count: int, start: bytes, deadline: float | None = None) -> bytes | None:
    data = bytearray(start)
    while len(data) < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{len(data)} of {count} bytes came in time")
            sock.settimeout(left)
        chunk = sock.recv(count - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
