"""Segments: nameless, reserved, passed as descriptors."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from rpruntime.errors import HostMemoryError, RoundPipeError, SessionLost
from rpruntime.store import fdsock
from rpruntime.store.limits import GIB, HostMemory
from rpruntime.store.segments import (
    PrivateSegments,
    SegmentClient,
    SegmentServer,
    make_segment,
    remove_stale_names,
)
from tests.leaks import open_descriptors, shm_names, wait_until

ROOT = Path(__file__).resolve().parent.parent
ROOMY = HostMemory(64 * GIB, 60 * GIB, None, 0, 128 * GIB, 100 * GIB)
TOKEN = "secret"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SegmentServer]:
    server = SegmentServer(tmp_path, TOKEN)
    yield server
    server.close()


@pytest.fixture
def client(server: SegmentServer, tmp_path: Path) -> Iterator[SegmentClient]:
    client = SegmentClient(tmp_path, TOKEN, owner="worker-0.1")
    yield client
    client.close()


def test_create_open_share(server: SegmentServer, client: SegmentClient, tmp_path: Path) -> None:
    segment, memory = client.create(12345)
    assert segment == "worker-0.1-1"
    assert server.segments() == {segment: "worker-0.1"}
    assert len(memory) == 12345
    memory[:5] = b"hello"
    peer = SegmentClient(tmp_path, TOKEN, owner="optimizer.1")
    theirs = peer.open(segment)
    assert theirs[:5] == b"hello"
    theirs[:5] = b"world"
    assert memory[:5] == b"world"
    assert peer.open(segment) is theirs
    assert client.open(segment) is memory
    assert peer.create(1)[0] == "optimizer.1-2"
    assert not shm_names()
    peer.close()


def test_release_keeps_mappings(server: SegmentServer, client: SegmentClient) -> None:
    segment, memory = client.create(4096)
    memory[0] = 7
    client.release(segment)
    assert server.segments() == {}
    assert memory[0] == 7
    with pytest.raises(RoundPipeError, match="there is no segment"):
        client.open(segment)
    client.release(segment)  # a second time is no error


def test_what_a_role_was_given_is_remembered(server: SegmentServer, client: SegmentClient, tmp_path: Path) -> None:
    kept, released, others = (client.create(4096)[0] for _ in range(3))
    replacement = SegmentClient(tmp_path, TOKEN, owner="worker-1.2")
    for name in (kept, released):
        replacement.open(name)
    client.release(released)
    assert client.handed_to("worker-1") == [kept]
    assert client.handed_to("worker-0") == [kept, others]
    assert client.handed_to("worker-2") == []
    replacement.close()


def test_release_owner(server: SegmentServer, client: SegmentClient, tmp_path: Path) -> None:
    client.create(1)
    client.create(1)
    peer = SegmentClient(tmp_path, TOKEN, owner="worker-1.1")
    kept, _ = peer.create(1)
    server.release_owner("worker-0.1")
    assert list(server.segments()) == [kept]
    peer.close()


def test_memory_is_reserved_and_goes_with_the_last_holder(server: SegmentServer, client: SegmentClient) -> None:
    nbytes = 64 << 20
    segment, memory = client.create(nbytes)
    fd, _ = server._segments[segment]
    assert os.fstat(fd).st_size == nbytes
    assert os.fstat(fd).st_blocks * 512 == nbytes, "allocated, not only truncated"
    assert not os.get_inheritable(fd)
    name = os.readlink(f"/proc/self/fd/{fd}")
    assert "deleted" in name
    assert name in Path("/proc/self/maps").read_text()
    client.release(segment)
    del memory
    gc.collect()
    assert name not in Path("/proc/self/maps").read_text()


def test_refusal_has_figures(tmp_path: Path) -> None:
    tight = HostMemory(64 << 20, 32 << 20, None, 0, GIB, GIB)
    server = SegmentServer(tmp_path, TOKEN, read_memory=lambda: tight)
    client = SegmentClient(tmp_path, TOKEN)
    with pytest.raises(HostMemoryError, match=r"200 MiB.*32 MiB.*--shm-size"):
        client.create(200 << 20)
    assert len(client.create(16 << 20)[1]) == 16 << 20, "the connection goes on"
    assert len(server.segments()) == 1
    client.close()
    server.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_reservation_fails(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    before = open_descriptors()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(HostMemoryError, match=r"reserving 1\.0 GiB.*60\.0 GiB free of 64\.0 GiB"):
        make_segment(GIB, lambda: ROOMY)
    assert open_descriptors() == before
    assert not shm_names()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root for a mount namespace")
@pytest.mark.parametrize("believe", ["statvfs", "wrong figures"])
def test_real_small_mount(tmp_path: Path, believe: str) -> None:
    """M1: 64 MiB of /dev/shm, 200 MiB wanted: an error with figures, no SIGBUS, nothing left in the mount."""
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from rpruntime.errors import HostMemoryError
from rpruntime.store.limits import HostMemory, read_host_memory
from rpruntime.store.segments import make_segment
big = HostMemory(1 << 40, 1 << 40, None, 0, 1 << 40, 1 << 40)
try:
    make_segment(200 << 20, read_host_memory if {believe == "statvfs"} else lambda: big)
except HostMemoryError as err:
    print(err)
stat = os.statvfs("/dev/shm")
print("used", (stat.f_blocks - stat.f_bfree) * stat.f_frsize, os.listdir("/dev/shm"))
fd = make_segment(32 << 20, read_host_memory)
print("fits", os.fstat(fd).st_size)
"""
    done = _in_small_mount([sys.executable, "-c", code])
    assert done.returncode == 0, done
    assert "200 MiB" in done.stdout
    assert "--shm-size" in done.stdout
    if believe == "statvfs":
        assert "64 MiB free of 64 MiB" in done.stdout
    assert "used 0 []" in done.stdout
    assert f"fits {32 << 20}" in done.stdout


def _in_small_mount(command: list[str]) -> subprocess.CompletedProcess[str]:
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", *command], capture_output=True, text=True, check=False
    )
    if done.returncode != 0 and "Operation not permitted" in done.stderr:
        pytest.skip("no mount namespace here")
    return done


def test_zero_bytes(client: SegmentClient) -> None:
    with pytest.raises(ValueError):
        client.create(0)


def test_many_threads(server: SegmentServer, client: SegmentClient) -> None:
    made: list[str] = []

    def work() -> None:
        for _ in range(20):
            segment, memory = client.create(4096)
            memory[0] = 1
            made.append(segment)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 160
    assert set(server.segments()) == set(made)


def test_slow_reservation_does_not_block_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SegmentServer(tmp_path, TOKEN)
    client, peer = SegmentClient(tmp_path, TOKEN), SegmentClient(tmp_path, TOKEN)
    segment, _ = client.create(4096)
    entered, go = threading.Event(), threading.Event()
    real = os.posix_fallocate

    def slow(fd: int, offset: int, length: int) -> None:
        entered.set()
        assert go.wait(10)
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    thread = threading.Thread(target=client.create, args=(8192,))
    thread.start()
    assert entered.wait(10)
    assert len(peer.open(segment)) == 4096
    go.set()
    thread.join()
    client.close()
    peer.close()
    server.close()


def test_server_gone(server: SegmentServer, client: SegmentClient, tmp_path: Path) -> None:
    segment, memory = client.create(4096)
    server.close()
    with pytest.raises(SessionLost, match="launcher"):
        client.create(4096)
    with pytest.raises(SessionLost):
        SegmentClient(tmp_path, TOKEN).create(1)
    memory[0] = 1
    assert client.open(segment) is memory
    assert not (tmp_path / "segments.sock").exists()


def _raw(folder: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5)
    sock.connect(str(folder / "segments.sock"))
    return sock


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("!I", 1 << 31),
        struct.pack("!I", 3) + b"\xc1\xc1\xc1",
        struct.pack("!I", 1) + msgpack.packb(1),
        struct.pack("!I", 3) + b"",
    ],
    ids=["huge", "broken", "no map", "cut short"],
)
@pytest.mark.parametrize("authenticated", [False, True])
def test_malformed_peer_is_dropped(
    server: SegmentServer, client: SegmentClient, tmp_path: Path, data: bytes, authenticated: bool
) -> None:
    with _raw(tmp_path) as sock:
        if authenticated:
            fdsock.send(sock, {"token": TOKEN, "owner": "x"})
            assert fdsock.receive(sock) == {"ok": True}
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""
    assert client.create(1)


@pytest.mark.parametrize("first", [{"token": "wrong"}, {"op": "create", "nbytes": 1}, {"token": None}])
def test_token_is_needed(
    server: SegmentServer, tmp_path: Path, first: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        with _raw(tmp_path) as sock:
            fdsock.send(sock, first)
            assert sock.recv(100) == b""
    assert server.segments() == {}
    assert len([record for record in caplog.records if "dropped" in record.message]) == 1, "said once"


@pytest.mark.parametrize("request_", [{"op": "nonsense"}, {}, {"op": "create", "nbytes": -1}, {"op": "create"}])
def test_unknown_request_drops_the_peer(server: SegmentServer, tmp_path: Path, request_: dict[str, object]) -> None:
    with _raw(tmp_path) as sock:
        fdsock.send(sock, {"token": TOKEN, "owner": "x"})
        assert fdsock.receive(sock) == {"ok": True}
        fdsock.send(sock, request_)
        assert sock.recv(100) == b""


@pytest.mark.skipif(os.getuid() != 0, reason="needs another uid")
def test_other_uid_is_dropped() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = SegmentServer(folder, TOKEN)
        folder.chmod(0o755)  # as it never is in a session
        (folder / "segments.sock").chmod(0o777)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(12345)
                with _raw(folder) as sock:
                    os._exit(0 if sock.recv(10) == b"" else 1)
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
        server.close()
        assert os.waitstatus_to_exitcode(status) == 0


def test_an_answer_that_was_read_counts_though_its_reader_has_died_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have told others of the segment."""
    send_fds = socket.send_fds
    ours, theirs = socket.socketpair()

    def dies(sock: socket.socket, buffers: list[bytes], fds: list[int]) -> int:
        sent = send_fds(sock, buffers, fds)
        theirs.shutdown(socket.SHUT_RD)  # what is sent from now on fails
        return sent

    monkeypatch.setattr(socket, "send_fds", dies)
    with ours, theirs:
        fdsock.send(ours, {"ok": True}, ours.fileno())
        with pytest.raises(BrokenPipeError):
            ours.sendall(b"")


def test_fork_does_not_share_the_socket(server: SegmentServer, client: SegmentClient) -> None:
    """D3: a forked child has a connection of its own; its end closes nothing of the parent's."""
    segment, memory = client.create(4096)
    child = os.fork()
    if child == 0:
        try:
            client.open(segment)[0] = 5
            own, _ = client.create(100)
            client.close()
            os._exit(0 if own != segment else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert memory[0] == 5
    assert client.create(100)


def test_fork_while_the_lock_is_held(server: SegmentServer, client: SegmentClient) -> None:
    client.create(1)
    with client._lock:
        child = os.fork()
        if child == 0:
            try:
                client.create(100)
                os._exit(0)
            finally:
                os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_descriptors_are_flat(server: SegmentServer, client: SegmentClient) -> None:
    client.create(1)
    before = open_descriptors()
    for _ in range(50):
        segment, memory = client.create(4096)
        client.release(segment)
        del memory
    wait_until(lambda: open_descriptors() <= before, 2.0, "descriptors")


def test_private_segments() -> None:
    segments = PrivateSegments()
    segment, memory = segments.create(1000)
    assert isinstance(memory, mmap.mmap)
    memory[:3] = b"abc"
    assert segments.open(segment)[:3] == b"abc"
    segments.release(segment)
    with pytest.raises(KeyError):
        segments.open(segment)


def test_stale_names(tmp_path: Path) -> None:
    uid = os.getuid()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale = tmp_path / f"rpruntime-{uid}-{ended.pid}-abc"
    of_live = tmp_path / f"rpruntime-{uid}-{os.getpid()}-abc"
    other = tmp_path / "something-else"
    for path in (stale, of_live, other):
        path.touch()
    assert remove_stale_names(tmp_path) == 1
    assert [path.exists() for path in (stale, of_live, other)] == [False, True, True]
