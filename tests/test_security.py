"""Nobody without the session's keys gets in, and whoever tries harms nothing: sockets, folders, pickles."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from launcher.session import create_session, make_base
from rpruntime.failures import rebuild
from rpruntime.store import fdsock, segments
from rpruntime.store.segments import SegmentClient, SegmentServer
from rpruntime.wire.codec import MAX_MESSAGE_BYTES, encode
from rpruntime.wire.mailbox import Mailbox, new_keys, socket_path
from rpruntime.wire.messages import PROTOCOL_VERSION, ErrorInfo, HelloMsg, ProtocolErrorMsg, RoleFailedMsg
from tests.launching import ROOT, WAIT_READY, rplaunch
from tests.leaks import no_leaks, open_descriptors, wait_until

STRANGER_UID = 12345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")
HELLO = HelloMsg("worker-0", 1, 5)


# --- inboxes


class Inbox:
    """A mailbox, a peer of the same session, and what its owner has received."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = new_keys()
        self.box = Mailbox(folder, "launcher", 1, self.keys)
        self.peer = Mailbox(folder, "worker-0", 1, self.keys)
        self.address = f"ipc://{socket_path(folder, 'launcher', 1)}"

    def raw(self) -> socket.socket:
        """A plain connection to the socket file."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(socket_path(self.folder, "launcher", 1)))
        sock.settimeout(5)
        return sock

    def send_frames(self, *frames: bytes, sender: bytes | None = None) -> None:
        """A good message and then anything at all, from the peer, with the session's keys."""
        self.peer.send("launcher", HELLO)
        self.peer._outboxes["launcher"].send_multipart([self.sender if sender is None else sender, *frames])

    @property
    def sender(self) -> bytes:
        """The first frame of what the peer sends."""
        return self.peer._sender

    def receive(self, count: int = 1, within_s: float = 5.0) -> list[Any]:
        """The next messages."""
        found: list[Any] = []
        deadline = time.monotonic() + within_s
        while len(found) < count and time.monotonic() < deadline:
            found += self.box.receive(0.05)
        return found

    def check(self) -> None:
        """The next message is the peer's, promptly: nothing else came in, nothing is stuck."""
        began = time.monotonic()
        self.peer.send("launcher", HELLO)
        assert self.receive() == [HELLO]
        assert time.monotonic() - began < 3.0

    def close(self) -> None:
        self.peer.close()
        self.box.close()


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[Inbox]:
    found = Inbox(tmp_path)
    yield found
    found.close()


GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" * 32
"""What a ZeroMQ peer says first, up to where the keys come in."""
RAW = {
    "garbage": os.urandom(1000),
    "a request of another protocol": b"GET / HTTP/1.1\r\n\r\n" * 50,
    "half a greeting": GREETING[:10],
    "a greeting": GREETING,
    "4 EiB announced": GREETING + b"\x06" + struct.pack("!Q", 1 << 62),
    "1 MiB announced": GREETING + b"\x06" + struct.pack("!Q", 1 << 20) + b"x" * 100,
    "a message before the keys": GREETING + b"\x00\x08HelloMsg",
    "half a handshake": GREETING + b"\x04\xc8\x05HELLO\x01\x00",
    "a broken handshake": GREETING + b"\x04\xc8\x05HELLO\x01\x00" + b"x" * 192,
}


@pytest.mark.parametrize("what", RAW)
def test_bytes_that_are_no_handshake(inbox: Inbox, what: str) -> None:
    with inbox.raw() as silent, inbox.raw() as ended:
        for sock in (silent, ended):
            sock.sendall(RAW[what])
        ended.shutdown(socket.SHUT_WR)
        inbox.check()
    inbox.check()


def no_security(sock: Any, inbox: Inbox) -> None:
    pass


def password(sock: Any, inbox: Inbox) -> None:
    sock.plain_username, sock.plain_password = b"root", b"root"


def foreign_keys(sock: Any, inbox: Inbox) -> None:
    sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
    sock.curve_serverkey = zmq.curve_keypair()[0]


def public_key_known(sock: Any, inbox: Inbox) -> None:
    """Even the inbox's public key, which only `session.json` has, is not enough."""
    sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
    sock.curve_serverkey = inbox.keys[0].encode()


def say(stranger: Any, *frames: bytes) -> None:
    """As far as it can: who is refused before that has nobody to wait for."""
    with contextlib.suppress(zmq.Again):
        stranger.send_multipart(frames, flags=zmq.NOBLOCK)


@pytest.mark.parametrize("dress", [no_security, password, foreign_keys, public_key_known])
def test_peers_without_the_keys(inbox: Inbox, dress: Callable[[Any, Inbox], None]) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    dress(stranger, inbox)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(inbox.address)
    for _ in range(10):
        say(stranger, b"worker-0", *encode(HelloMsg("worker-0", 1, 666)))
    assert monitor.poll(5000), "the inbox hangs up"
    inbox.check()
    assert not stranger.poll(0)
    context.destroy(linger=0)
    inbox.check()


class Relay:
    """Stands where a mailbox is expected, passes everything on, and keeps what the connecting side said."""

    def __init__(self, path: Path, target: Path) -> None:
        self.said = b""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._target = target
        self._socks: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        peer, _ = self._listener.accept()
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        inner.connect(str(self._target))
        self._socks += [peer, inner]
        threading.Thread(target=self._pump, args=(inner, peer, False), daemon=True).start()
        self._pump(peer, inner, True)

    def _pump(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if keep:
                    self.said += data
                sink.sendall(data)

    def close(self) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.mark.parametrize("into", ["the same session", "a new session"])
def test_replayed_bytes(inbox: Inbox, into: str) -> None:
    (inbox.folder / "between").mkdir()
    (inbox.folder / "new").mkdir()
    between = inbox.folder / "between"
    relay = Relay(socket_path(between, "launcher", 1), socket_path(inbox.folder, "launcher", 1))
    peer = Mailbox(between, "worker-0", 1, inbox.keys)
    peer.send("launcher", HELLO)
    assert inbox.receive() == [HELLO], "what is recorded is a good conversation"
    peer.close()
    relay.close()
    assert len(relay.said) > 200
    target = inbox if into == "the same session" else Inbox(inbox.folder / "new")
    for pieces in (1, 3):  # all at once, and in the order of the real conversation
        with target.raw() as sock, contextlib.suppress(ConnectionError):
            size = -(-len(relay.said) // pieces)
            for start in range(0, len(relay.said), size):
                sock.sendall(relay.said[start : start + size])
                time.sleep(0.02)
            while sock.recv(65536):
                pass  # greeting, at most the answer to the first command; then it hangs up
        target.check()
    if target is not inbox:
        target.close()


def test_many_connections_at_once(inbox: Inbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inbox.check()
    descriptors = open_descriptors()
    held = []
    for number in range(300):
        sock = inbox.raw()
        sock.sendall(GREETING if number % 2 else GREETING[:5])
        held.append(sock)
    inbox.check()
    for sock in held:
        sock.close()
    inbox.check()
    wait_until(lambda: open_descriptors() <= descriptors, 5.0, "descriptors are back")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"


def in_child(uid: int, work: Callable[[], bool]) -> None:
    """Run `work` as another user; it must return True."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            code = 0 if work() else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(path))
        except PermissionError:
            return False
        return True


@as_root
def test_another_user_cannot_even_connect() -> None:
    with tempfile.TemporaryDirectory(prefix="rpruntime-test-") as name:
        Path(name).chmod(0o755)
        session = create_session(make_base([Path(name) / "base"]).path, None, {"log_dir": None}, {})
        session.keys = new_keys()
        session.save()
        box = Mailbox(session.path, "launcher", 1, session.keys)
        server = SegmentServer(session.path, session.token)
        paths = [socket_path(session.path, "launcher", 1), session.path / "segments.sock"]
        assert all(connects(path) for path in paths)

        def refused() -> bool:
            for path in paths:
                assert not connects(path)
            for path in (session.path, session.path.parent, session.path / "session.json"):
                assert not os.access(path, os.R_OK) and not os.access(path, os.W_OK)
            return True

        in_child(STRANGER_UID, refused)
        server.close()
        box.close()
        session.remove()


@as_root
def test_another_user_in_a_folder_that_is_open() -> None:
    """As it never is; still neither keys nor token are to be had."""
    with tempfile.TemporaryDirectory(prefix="rpruntime-test-") as name:
        inbox = Inbox(Path(name))
        Path(name).chmod(0o755)
        socket_path(inbox.folder, "launcher", 1).chmod(0o777)

        def refused() -> bool:
            keys = new_keys()
            stranger = zmq.Context().socket(zmq.DEALER)
            stranger.curve_publickey, stranger.curve_secretkey = (key.encode() for key in keys)
            stranger.curve_serverkey = inbox.keys[0].encode()
            monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stranger.connect(inbox.address)
            say(stranger, b"worker-0", *encode(HelloMsg("worker-0", 1, 666)))
            return bool(monitor.poll(5000))

        in_child(STRANGER_UID, refused)
        inbox.check()
        inbox.close()


BAD_FRAMES = {
    "unknown": [b"NoSuchMsg", b"\x80"],
    "truncated": [b"HelloMsg", encode(HELLO)[1][:-1]],
    "oversized": [b"ShutdownMsg", b"\xda" + b"x" * (MAX_MESSAGE_BYTES + 1)],
    "arrays within arrays": [b"TaskMsg", b"\x91" * 900_000 + b"\xc0"],
    "maps within maps": [b"TaskMsg", b"\x81\x01" * 400_000 + b"\xc0"],
    "structures within structures": [b"TaskMsg", b"\x81\xa4task" + b"\xc9\x00\x0f\x00\x00\x01" * 20_000],
    "array of 4 Gi": [b"HelloMsg", b"\xdd\xff\xff\xff\xff"],
    "map of 4 Gi": [b"HelloMsg", b"\xdf\xff\xff\xff\xff"],
    "bytes of 4 GiB": [b"HelloMsg", b"\xc6\xff\xff\xff\xff"],
    "extension of 4 GiB": [b"HelloMsg", b"\xc9\xff\xff\xff\xff\x01"],
    "no frames": [],
    "many frames": [b"x"] * 1000,
}


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_bad_messages_with_the_keys(inbox: Inbox, what: str) -> None:
    """A peer of another version, or broken: that one message is dropped, the sender is told."""
    inbox.box.send("worker-0", HELLO)
    assert inbox.peer.receive(5.0) == [HELLO]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inbox.send_frames(*BAD_FRAMES[what])
    inbox.peer.send("launcher", HELLO)
    assert inbox.receive(2) == [HELLO, HELLO]
    answer = inbox.peer.receive(5.0)
    assert [type(msg) for msg in answer] == [ProtocolErrorMsg]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"
    inbox.check()


@pytest.mark.parametrize(
    "sender",
    [b"", b".", b"worker-0", b"worker-0.", b"worker-0.-1", b"worker-0.x", "worker-0.²".encode(),
     "worker-0.١".encode(), b"worker-0." + b"9" * 5000, b"worker-0.1" * 100_000],
)  # fmt: skip
def test_senders_that_are_none(inbox: Inbox, sender: bytes, caplog: pytest.LogCaptureFixture) -> None:
    inbox.send_frames(*encode(HELLO), sender=sender)
    inbox.peer.send("launcher", HELLO)
    assert inbox.receive(2) == [HELLO, HELLO]
    assert len(said(caplog)) == 1 and len(said(caplog)[0]) < 400
    inbox.check()


def test_a_flood_of_bad_messages_is_logged_and_answered_once(inbox: Inbox, caplog: pytest.LogCaptureFixture) -> None:
    inbox.box.send("worker-0", HELLO)
    assert inbox.peer.receive(5.0) == [HELLO]
    other = Mailbox(inbox.folder, "worker-1", 1, inbox.keys)
    other.send("launcher", HELLO)
    assert inbox.receive() == [HELLO]
    for number in range(500):
        for peer in (inbox.peer, other):
            peer.send("launcher", HELLO)
            peer._outboxes["launcher"].send_multipart([peer._sender, b"NoSuchMsg%d" % number, b"\x80"])
    for number in range(500):
        inbox.send_frames(b"NoSuchMsg", b"\x80", sender=b"nobody-%d.1" % number)
    assert len(inbox.receive(1500)) == 1500
    inbox.check()
    assert [type(msg) for msg in inbox.peer.receive(5.0)] == [ProtocolErrorMsg]
    named = [message for message in said(caplog) if "worker-" in message]
    assert len(named) == 2, "each sender once"
    assert len(said(caplog)) < 100, "and not too many of them"
    other.close()


@pytest.mark.parametrize("dress", [None, foreign_keys, public_key_known])
def test_strangers_are_logged_once(
    inbox: Inbox, dress: Callable[[Any, Inbox], None] | None, caplog: pytest.LogCaptureFixture
) -> None:
    inbox.check()
    assert said(caplog) == []
    context = zmq.Context()
    for _ in range(5):
        if dress is None:
            _greet_without_security(inbox)
            inbox.check()
            continue
        stranger = context.socket(zmq.DEALER)
        dress(stranger, inbox)
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.connect(inbox.address)
        assert monitor.poll(5000)
        stranger.close(linger=0)
        monitor.close(linger=0)
        inbox.check()
    context.destroy(linger=0)
    wait_until(lambda: inbox.box.receive() or said(caplog), 5.0, "it is logged")
    assert len(said(caplog)) == 1 and "has not the session's keys" in said(caplog)[0]


def _greet_without_security(inbox: Inbox) -> None:
    """By hand: a ZeroMQ socket hangs up itself when it reads our greeting, often before the inbox has read its own."""
    with inbox.raw() as sock, contextlib.suppress(ConnectionResetError):
        sock.sendall(GREETING.replace(b"CURVE", b"NULL\0"))
        while sock.recv(4096):
            pass


def test_a_frame_that_is_far_too_large_cuts_only_its_connection(inbox: Inbox) -> None:
    inbox.send_frames(b"HelloMsg", b"x" * (8 << 20))
    assert inbox.receive() == [HELLO]
    inbox.check()


class Canary:
    """A pickle that leaves a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("dress", [no_security, public_key_known])
def test_no_pickle_of_a_stranger_is_opened(inbox: Inbox, tmp_path: Path, dress: Callable[[Any, Inbox], None]) -> None:
    mark = tmp_path / "opened"
    error = ErrorInfo(pickle.dumps(Canary(mark)), "ValueError", "", "", (), "", -1, "", -1, "", "")
    frames = encode(RoleFailedMsg("worker-0", 1, error))
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    dress(stranger, inbox)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(inbox.address)
    say(stranger, inbox.sender, *frames)
    assert monitor.poll(5000)
    context.destroy(linger=0)
    inbox.send_frames(*frames)
    received = inbox.receive(2)
    assert [type(msg) for msg in received] == [HelloMsg, RoleFailedMsg], "one of them, the session's own"
    assert not mark.exists(), "receiving opens none"
    rebuild(received[1].error, 1, 0)
    assert mark.exists(), "so it would have been seen"


def test_the_segment_socket_opens_no_pickle(tmp_path: Path) -> None:
    """Neither side of it, nor the codec, has anything to do with pickles."""
    for module in ("store.fdsock", "store.segments", "wire.codec", "wire.mailbox", "wire.messages", "process"):
        text = (ROOT / "rpruntime" / f"{module.replace('.', '/')}.py").read_text()
        assert "import pickle" not in text and "import cloudpickle" not in text and ".store.values" not in text


# --- the socket that hands out memory

TOKEN = "secret"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SegmentServer]:
    found = SegmentServer(tmp_path, TOKEN)
    yield found
    found.close()


def connect(folder: Path, *, token: str = "") -> socket.socket:
    """A connection to the segment socket; with a token, one that has said who it is."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(folder / "segments.sock"))
    sock.settimeout(5)
    if token:
        fdsock.send(sock, {"token": token, "owner": "x"})
        assert fdsock.receive(sock) == {"ok": True}
    return sock


def served(folder: Path) -> None:
    """A process of ours gets its memory promptly."""
    client = SegmentClient(folder, TOKEN, owner="worker-0.1")
    began = time.monotonic()
    segment, memory = client.create(4096)
    assert len(memory) == 4096 and time.monotonic() - began < 2.0
    client.release(segment)
    client.close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


BAD_BODIES = {
    "arrays within arrays": framed(b"\x91" * 60_000 + b"\xc0"),
    "maps within maps": framed(b"\x81\x01" * 30_000 + b"\xc0"),
    "extensions within extensions": framed(b"\xc9\x00\x00\xff\xff\x01" * 10_000),
    "array of 4 Gi": framed(b"\xdd\xff\xff\xff\xff"),
    "map of 4 Gi": framed(b"\xdf\xff\xff\xff\xff"),
    "map with a map for a key": framed(b"\x81\x80\x01"),
    "text that is none": framed(b"\x81\xa5token\xa4\xff\xff\xff\xff"),
    "the largest length": b"\xff\xff\xff\xff",
    "just above the limit": struct.pack("!I", fdsock.MAX_MESSAGE_BYTES + 1),
    "a pickle": framed(pickle.dumps({"token": TOKEN})),
}


@pytest.mark.parametrize("authenticated", [False, True])
@pytest.mark.parametrize("what", BAD_BODIES)
def test_bad_requests_for_memory(
    server: SegmentServer, tmp_path: Path, what: str, authenticated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        with connect(tmp_path, token=TOKEN if authenticated else "") as sock:
            sock.sendall(BAD_BODIES[what])
            assert sock.recv(100) == b""
    served(tmp_path)
    assert len(said(caplog)) == 1


@pytest.mark.parametrize(
    "request_",
    [
        {"op": ["create"], "nbytes": 1},
        {"op": "create", "nbytes": "1"},
        {"op": "create", "nbytes": 1.5},
        {"op": "create", "nbytes": 0},
        {"op": b"create", "nbytes": 1},
        {b"op": "create", "nbytes": 1},
    ],
)
def test_requests_of_wrong_types(server: SegmentServer, tmp_path: Path, request_: dict[Any, Any]) -> None:
    with connect(tmp_path, token=TOKEN) as sock:
        sock.sendall(framed(msgpack.packb(request_)))
        assert sock.recv(100) == b""
    served(tmp_path)


@pytest.mark.parametrize("nbytes", [1 << 50, (1 << 63) - 1, (1 << 64) - 1])
def test_a_request_beyond_all_memory_is_refused_in_words(server: SegmentServer, tmp_path: Path, nbytes: int) -> None:
    with connect(tmp_path, token=TOKEN) as sock:
        fdsock.send(sock, {"op": "create", "nbytes": nbytes})
        answer = fdsock.receive(sock)
        assert answer is not None and answer["kind"] == "memory" and str(nbytes) in answer["error"]
    served(tmp_path)


@pytest.mark.parametrize("begin", [b"", b"\x00\x00", framed(b"x" * 100)[:50]])
def test_a_silent_peer_is_dropped(
    server: SegmentServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(segments, "_AUTH_TIMEOUT_S", 0.2)
    with connect(tmp_path) as sock:
        sock.sendall(begin)
        served(tmp_path)
        assert sock.recv(100) == b""


def test_a_peer_that_trickles_is_dropped_in_time(
    server: SegmentServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is that of the whole message, not of each byte."""
    monkeypatch.setattr(segments, "_AUTH_TIMEOUT_S", 0.3)
    with connect(tmp_path) as sock, contextlib.suppress(ConnectionError):
        sock.settimeout(0.05)
        began = time.monotonic()
        for byte in framed(msgpack.packb({"token": TOKEN, "owner": "x" * 100})):
            assert time.monotonic() - began < 3.0, "it takes six seconds"
            sock.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                assert sock.recv(1) == b""
                break
    served(tmp_path)


def test_silent_connections_take_little_and_keep_nobody_out(
    server: SegmentServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = threading.active_count()
    ours = connect(tmp_path, token=TOKEN)
    held = [connect(tmp_path) for _ in range(300)]
    served(tmp_path)
    wait_until(lambda: threading.active_count() - threads <= segments._MAX_STRANGERS + 4, 5.0, "few threads")
    fdsock.send(ours, {"op": "create", "nbytes": 1})
    answer, fd = fdsock.receive_fd(ours)
    assert answer["ok"] and fd is not None, "who has said who it is stays connected"
    os.close(fd)
    assert len(said(caplog)) == 1
    for sock in (ours, *held):
        sock.close()
    wait_until(lambda: threading.active_count() <= threads, 5.0, "their threads end")


def test_a_server_without_descriptors_serves_again_later(tmp_path: Path) -> None:
    """Its own process has 40 of them; 200 connections are held against it, then let go."""
    code = f"""
import os, resource, sys, time
from pathlib import Path
from rpruntime.store.segments import SegmentServer
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
server = SegmentServer(Path({str(tmp_path)!r}), {TOKEN!r})
print("serving", flush=True)
sys.stdin.read()
server.close()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"serving\n"
        held = []
        for _ in range(200):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # the kernel's queue is full
                sock.connect(str(tmp_path / "segments.sock"))
            held.append(sock)
        assert b"did not say who they are" in process.stderr.readline(), "it has run out of descriptors"
        for sock in held:
            sock.close()
        served(tmp_path)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 0, errors
        assert errors == b"", "said once"


def test_descriptors_that_come_unasked_are_not_kept(server: SegmentServer, tmp_path: Path) -> None:
    with connect(tmp_path, token=TOKEN) as sock, open(os.devnull) as gift:
        before = open_descriptors()
        for _ in range(20):
            socket.send_fds(sock, [framed(msgpack.packb({"op": "open", "segment": "none"}))], [gift.fileno()] * 50)
            answer = fdsock.receive(sock)
            assert answer is not None and answer["kind"] == "unknown"
        assert open_descriptors() <= before


# --- modes


def too_open(folder: Path) -> list[str]:
    """What others than the owner may read, write or enter below a folder, the folder included."""
    found = []
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077:
            found.append(f"{path.name} {mode:o}")
    return found


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_what_the_launcher_makes_is_its_owners_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        session = create_session(make_base([tmp_path / "base"]).path, None, {"log_dir": None}, {})
        server = SegmentServer(session.path, session.token)
        session.save()
        assert too_open(tmp_path / "base") == []
        server.close()
        session.remove()
    finally:
        os.umask(before)


# --- a whole session


UNDER_ATTACK = (
    WAIT_READY
    + """
import sys
from rpruntime.wire.messages import AttachMsg, AttachedMsg
import os
print("ready", flush=True)
sys.stdin = open(os.environ["ATTACK_OVER"])  # waits for whoever writes
sys.stdin.read()
def ask(message):
    session.post.send("launcher", message)
    found = []
    while not found:
        found = [type(msg).__name__ for msg in session.post.receive(5.0)]
        assert found, "no answer"
    return found
print(ask(AttachMsg(os.getpid())), ask(AttachMsg(os.getpid(), protocol=0)))
segment, memory = session.segments.create(1 << 20)
memory[:4] = b"abcd"
alive = [os.path.exists(f"/proc/{info['pid']}") for info in session.ready.values()]
print(len(alive), all(alive), session.launcher_alive())
"""
)


def attack(folder: Path) -> None:
    """All that a process of the same user without the keys can say to each socket of a session."""
    paths = sorted(folder.glob("*.sock"))
    assert {path.name for path in paths} >= {"launcher.1.sock", "controller.1.sock", "segments.sock", "worker-0.1.sock"}
    context = zmq.Context()
    context.linger = 0
    canary = ErrorInfo(pickle.dumps(Canary(folder / "opened")), "E", "", "", (), "", -1, "", -1, "", "")
    said_ = [encode(HELLO), encode(RoleFailedMsg("worker-0", 1, canary)), [b"NoSuchMsg", b"\x80"]]
    held: list[Any] = []
    for path in paths:
        public, secret = zmq.curve_keypair()
        for keys in (False, True):
            stranger = context.socket(zmq.DEALER)
            if keys:
                stranger.curve_publickey, stranger.curve_secretkey, stranger.curve_serverkey = public, secret, public
            monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            held += [stranger, monitor]
            stranger.connect(f"ipc://{path}")
            for frames in said_:
                with contextlib.suppress(zmq.Again):  # it may have been refused before it has said everything
                    stranger.send_multipart([b"worker-0", *frames], flags=zmq.NOBLOCK)
            if path.name != "segments.sock":
                assert monitor.poll(5000), path
        for data in [*RAW.values(), *BAD_BODIES.values()] * 4:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(str(path))
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
            held.append(sock)
    for sock in held:
        sock.close()
    context.destroy(linger=0)


def test_a_run_under_attack_is_unharmed(tmp_path: Path) -> None:
    pipe = tmp_path / "over"
    os.mkfifo(pipe)
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, UNDER_ATTACK, ATTACK_OVER=str(pipe))
        run.wait_for("ready")
        attack(run.folder)
        assert not (run.folder / "opened").exists()
        logs = {path.name: path.read_text() for path in run.folder.glob("*.log")}
        pipe.write_text("over")
        assert run.wait() == 0, run.err
        assert run.out.splitlines()[1:] == ["['AttachedMsg'] ['RefusedMsg']", "3 True True"]
        told = run.err.splitlines()[2:]
        assert len(told) <= 3, "one line for each socket that the launcher and the script have"
        assert sum("was dropped" in line for line in told) == 1
        assert sum("launcher turned a peer away" in line for line in told) == 1
        for name, text in logs.items():
            assert len(text.splitlines()) < 5, (name, text)


@pytest.mark.parametrize("how", [pytest.param("obeys", marks=pytest.mark.slow), "deaf"])
def test_a_child_of_another_protocol_version(tmp_path: Path, how: str) -> None:
    command = f"{sys.executable} {ROOT / 'tests' / 'fakes' / 'old_version.py'}"
    with no_leaks() as watch:
        run = rplaunch(
            tmp_path, watch, WAIT_READY + "print('must not run')", RPRUNTIME_CHILD_COMMAND=command, FAKE_OLD=how
        )
        assert run.wait(15) == 1
        assert run.out == ""
        assert "WorkerDied" in run.err
        assert f"protocol version 0 does not fit {PROTOCOL_VERSION}: two versions of rpruntime are mixed" in run.err


@pytest.mark.parametrize("logs", [pytest.param((), marks=pytest.mark.slow), ("--log-dir=logs",)])
def test_all_that_a_run_leaves_in_its_folders_is_its_owners_alone(tmp_path: Path, logs: tuple[str, ...]) -> None:
    """Under the most generous umask, from the first moment to what stays at the end."""
    script = WAIT_READY + "session.segments.create(1)\nprint('ready', flush=True)\nimport time\ntime.sleep(60)"
    before = os.umask(0)
    try:
        with no_leaks() as watch:
            run = rplaunch(tmp_path, watch, script, flags=("--name=modes", *logs))
            folders = [run.folder, *([tmp_path / "logs" / "modes"] if logs else [])]
            run.wait_for("ready")
            assert {path.suffix for folder in folders for path in folder.iterdir()} >= {".sock", ".json", ".log"}
            assert [found for folder in folders for found in too_open(folder)] == []
            run.kill_group(signal.SIGTERM)
            assert run.wait() == 128 + signal.SIGTERM
            assert [found for folder in folders if folder.exists() for found in too_open(folder)] == []
    finally:
        os.umask(before)
