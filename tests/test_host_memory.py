"""Host memory that runs out: an error with figures wherever it is asked for, before the kernel kills anybody."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rpruntime as rp
from rpruntime import loading
from rpruntime.errors import HostMemoryError
from rpruntime.store import arena as arena_module
from rpruntime.store.arena import GROWTH_BYTES, Arena, Store
from rpruntime.store.limits import GIB, HostMemory, check_host_memory, margin
from rpruntime.store.segments import PrivateSegments, SegmentClient, SegmentServer
from tests.launching import ROOT, small_cgroup
from tests.leaks import no_leaks
from tests.reference import PausedSession, PlainLoop, inline, live_bytes

pytestmark = pytest.mark.usefixtures("single_thread")

MIB = 1 << 20
TOKEN = "secret"
ROOMY = HostMemory(64 * GIB, 60 * GIB, None, 0, 128 * GIB, 100 * GIB)


# --- the check


def test_a_margin_stays_free_where_the_kernel_would_kill() -> None:
    assert [margin(limit) for limit in (0, 2 * GIB, 50 * GIB, 1000 * GIB)] == [0, 2 * GIB // 50, GIB, GIB]
    cgroup = HostMemory(64 * GIB, 60 * GIB, 10 * GIB, 4 * GIB, 128 * GIB, 100 * GIB)
    assert cgroup.available() == (6 * GIB - margin(10 * GIB), "cgroup")
    ram = HostMemory(64 * GIB, 60 * GIB, None, 0, 100 * GIB, 10 * GIB)
    assert ram.available() == (9 * GIB, "ram")
    shm = HostMemory(64 * MIB, 60 * MIB, None, 0, 100 * GIB, 10 * GIB)
    assert shm.available() == (60 * MIB, "shm"), "a full mount is an error, it needs no margin"
    full = HostMemory(64 * GIB, 60 * GIB, GIB, GIB, 128 * GIB, 100 * GIB)
    assert full.available() == (0, "cgroup"), "never below nothing"


@pytest.mark.parametrize(
    "memory, words",
    [
        (HostMemory(64 * GIB, 60 * GIB, 10 * GIB, 9 * GIB, 128 * GIB, 100 * GIB), "of the cgroup 205 MiB stay free"),
        (HostMemory(64 * GIB, 60 * GIB, None, 0, 100 * GIB, GIB + 1), "of the RAM 1.0 GiB stay free"),
    ],
)
def test_the_refusal_says_what_stays_free(memory: HostMemory, words: str) -> None:
    room, _ = memory.available()
    check_host_memory(room, memory)
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(room + 1, memory)
    assert words in str(caught.value)
    assert f"({room} bytes) are available" in str(caught.value)


def test_what_the_session_holds_counts_against_the_flag() -> None:
    check_host_memory(2 * GIB, ROOMY, override_gib=8, held_bytes=6 * GIB)
    with pytest.raises(HostMemoryError, match=r"taken as 8 GiB .*; 6\.0 GiB of that are reserved already"):
        check_host_memory(2 * GIB + 1, ROOMY, override_gib=8, held_bytes=6 * GIB)
    check_host_memory(60 * GIB, ROOMY, held_bytes=50 * GIB)  # what is held is in the readings already


# --- growth


class Machine:
    """Injected readings: a cgroup that fills as segments are made."""

    def __init__(self, limit: int, folder: Path, **settings: Any) -> None:
        self.limit = limit
        self.server = SegmentServer(folder, TOKEN, read_memory=self.read, **settings)
        self.client = SegmentClient(folder, TOKEN, owner="worker-0.1")

    def read(self) -> HostMemory:
        return HostMemory(64 * GIB, 60 * GIB, self.limit, self.server._held_bytes(), 128 * GIB, 100 * GIB)

    def close(self) -> None:
        self.client.close()
        self.server.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(100 * MIB, tmp_path)
    yield found
    found.close()


def test_an_arena_grows_until_the_cgroup_is_nearly_full(machine: Machine) -> None:
    arena = Arena("worker-0.1", machine.client, Store(machine.client))
    held = [arena.allocate(GROWTH_BYTES) for _ in range(6)]
    with pytest.raises(HostMemoryError) as caught:
        arena.allocate(GROWTH_BYTES)
    for words in (f"needs 16 MiB ({16 * MIB} bytes)", "4 MiB free of 100 MiB", "2 MiB stay free", "memory.max"):
        assert words in str(caught.value)
    assert arena.total_bytes == 96 * MIB and len(machine.server.segments()) == 6, "a refusal keeps nothing"
    arena.free(held.pop())
    held.append(arena.allocate(MIB))  # what is free in it serves on
    machine.limit = 200 * MIB
    held.append(arena.allocate(GROWTH_BYTES))
    arena.free_all(held)
    assert arena.live_bytes == 0


def test_growth_is_modest_where_there_is_little(machine: Machine) -> None:
    """A large arena grows by an eighth; if the machine has less, by what was asked for."""
    machine.limit = 1030 * MIB
    arena = Arena("worker-0.1", machine.client, Store(machine.client))
    arena.reserve(960 * MIB)
    whole = arena.allocate(960 * MIB)
    last = arena.allocate(1000)
    assert arena.total_bytes == (960 + 16) * MIB
    arena.free_all([whole, last])


def test_the_flag_bounds_the_sum_of_all_segments(tmp_path: Path) -> None:
    machine = Machine(GIB, tmp_path, override_gib=0.0625)  # 64 MiB
    other = SegmentClient(tmp_path, TOKEN, owner="optimizer.1")
    machine.client.create(32 * MIB)
    segment, memory = other.create(32 * MIB)
    with pytest.raises(HostMemoryError, match=r"taken as 0\.0625 GiB \(--host-memory\); 64 MiB of that are reserved"):
        machine.client.create(4096)
    del memory
    other.release(segment)
    machine.client.create(4096)
    other.close()
    machine.close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN])
def test_a_mapping_that_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """For example at `ulimit -v`: figures of that limit, and nothing stays reserved."""

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        with pytest.raises(HostMemoryError, match=r"mapping segment worker-0\.1-1 of 1 MiB .*ulimit -v.*max_map_count"):
            machine.client.create(MIB)
    assert machine.server.segments() == {}
    assert len(machine.client.create(MIB)[1]) == MIB, "the connection goes on"


def test_address_space_that_is_limited(tmp_path: Path) -> None:
    """The real thing: `ulimit -v` of the process that asks."""
    server = SegmentServer(tmp_path, TOKEN)
    code = f"""
import resource
from pathlib import Path
from rpruntime.store.segments import SegmentClient
from rpruntime.errors import HostMemoryError
client = SegmentClient(Path({str(tmp_path)!r}), {TOKEN!r})
client.create(1 << 20)
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    client.create(1 << 30)
except HostMemoryError as err:
    print(err)
client.create(1 << 20)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Cannot allocate memory; this process may map 1.0 GiB (`ulimit -v`)" in done.stdout
    assert len(server.segments()) == 2
    server.close()


def test_a_segment_that_cannot_be_pinned_is_given_back(machine: Machine) -> None:
    refusing = True

    def pin(segment: str, memory: Tensor) -> None:
        if refusing:
            raise HostMemoryError(f"CUDA refused to pin {memory.nbytes} bytes")

    store = Store(machine.client, pin)
    arena = Arena("worker-0.1", machine.client, store)
    for _ in range(10):  # ten times 16 MiB would not fit
        with pytest.raises(HostMemoryError, match="refused to pin"):
            arena.allocate(1000)
    assert machine.server.segments() == {} and arena.total_bytes == 0
    refusing = False
    arena.free(arena.allocate(1000))
    peer = SegmentClient(machine.server._path.parent, TOKEN, owner="worker-1.1")
    segment, _ = peer.create(4096)
    refusing = True
    for _ in range(2):  # not pinned at the first look, so not handed out at the second either
        with pytest.raises(HostMemoryError):
            store.segment(segment)
    refusing = False
    assert store.segment(segment).nbytes == 4096
    peer.close()


def test_a_real_cgroup_is_never_overrun(tmp_path: Path) -> None:
    """Segments until the refusal, all pages touched: the kernel kills nobody."""
    code = """
import sys
from pathlib import Path
from rpruntime.errors import HostMemoryError
from rpruntime.store.limits import read_cgroup
from rpruntime.store.segments import SegmentClient, SegmentServer
server = SegmentServer(Path(sys.argv[1]), "token")
client = SegmentClient(Path(sys.argv[1]), "token")
made = []
try:
    while True:
        made.append(client.create(16 << 20)[1])
        made[-1][:] = b"x" * (16 << 20)
except HostMemoryError as err:
    print(len(made), err)
    limit, used = read_cgroup()
    print("free", limit - used)
"""
    with small_cgroup(f"rpruntime-test-memory-{os.getpid()}", 256 * MIB) as cgroup:
        join = f'echo $$ > {cgroup}/cgroup.procs; exec "$0" -c "$1" "$2"'
        done = subprocess.run(
            ["sh", "-c", join, sys.executable, code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
        )
        events = next(cgroup / name for name in ("memory.events", "memory.oom_control") if (cgroup / name).exists())
        kills = [line.split()[1] for line in events.read_text().splitlines() if line.startswith("oom_kill ")]
    assert done.returncode == 0, done
    assert kills == ["0"]
    first, last = done.stdout.splitlines()
    assert int(first.split()[0]) >= 10
    assert "free of 256 MiB" in first and "of the cgroup 5 MiB stay free" in first and "memory.max" in first
    assert 0 < int(last.split()[1]) < 32 * MIB, "no more than a segment and the margin were left"


# --- what the script sees


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 4), nn.Linear(4, 1))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=False, foreach=False)


mse = nn.functional.mse_loss


class Refusing:
    """Lets the n-th allocation of one process fail as growth does, once."""

    def __init__(self, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.fail_at = -1
        allocate = arena_module.Arena.allocate

        def wrapped(arena: Arena, nbytes: int, kind: str = "") -> Any:
            if arena.owner == owner:
                self.count += 1
                if self.count - 1 == self.fail_at:
                    raise HostMemoryError("a shared-memory segment needs 16 MiB, 4 MiB are available")
            return allocate(arena, nbytes, kind)

        monkeypatch.setattr(arena_module.Arena, "allocate", wrapped)

    def arm(self, number: int) -> None:
        self.count, self.fail_at = 0, number


def run_beside_a_loop(session: PausedSession) -> tuple[rp.RoundPipe, PlainLoop]:
    ours, plain = model(), model()
    loop = PlainLoop(plain, sgd(plain), mse, num_microbatches=2, seed=3)
    pipe = rp.RoundPipe(
        ours, sgd(ours), loss_fn=mse, num_microbatches=2, seed=3, session=session, plan="layers"
    )  # fmt: skip
    return pipe, loop


@pytest.mark.parametrize("owner", ["worker-0.1", "worker-1.1", "controller.1"])
def test_a_refusal_at_any_place_is_an_exception_as_in_a_layer(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs, outputs, gradients, sums, losses: the call fails, nothing of it stays, the same call works then."""
    with inline(workers=2) as session:
        pipe, loop = run_beside_a_loop(session)
        refusing = Refusing(owner, monkeypatch)
        places = set()
        number = 0
        while True:
            batch = torch.randn(4, 4), torch.randn(4, 1)
            used = live_bytes(session)
            refusing.arm(number)
            refusal: Any = None
            try:
                float(pipe.forward_backward(*batch))
            except HostMemoryError as err:
                refusal = err
            if refusal is None:
                break
            assert "16 MiB, 4 MiB are available" in str(refusal)
            assert live_bytes(session) == used
            if owner != "controller.1":
                places.add(refusal.rp_context.phase)
            refusing.arm(-1)
            with pytest.raises(rp.RoundPipeError, match="step without gradients"):
                pipe.step()
            assert float(pipe.forward_backward(*batch)) == loop.forward_backward(*batch)
            pipe.step()
            loop.step()
            number += 1
        assert number > 3
        if owner != "controller.1":
            assert places >= {"forward", "backward"}
        assert loop.forward_backward(*batch) > 0  # of the last call, which went through
        pipe.step()
        loop.step()
        pipe.synchronize()
        for ours, wanted in zip(pipe.model.parameters(), loop.model.parameters(), strict=True):
            assert torch.equal(ours, wanted)
        pipe.close()


@pytest.mark.parametrize("call", ["forward", "evaluate"])
def test_a_refused_evaluation_leaves_the_iteration_alone(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with inline(workers=2) as session:
        pipe, loop = run_beside_a_loop(session)
        batch = torch.randn(4, 4), torch.randn(4, 1)
        pipe.forward_backward(*batch)
        refusing = Refusing("worker-0.1", monkeypatch)
        refusing.arm(0)
        with pytest.raises(HostMemoryError):
            pipe.forward(batch[0]) if call == "forward" else pipe.evaluate([batch])
        refusing.arm(-1)
        loop.forward_backward(*batch)
        info = pipe.step()
        loop.step()
        assert info.result().step == 0
        pipe.synchronize()
        for ours, wanted in zip(pipe.model.parameters(), loop.model.parameters(), strict=True):
            assert torch.equal(ours, wanted)
        pipe.close()


@pytest.mark.parametrize("what", ["sum", "step"])
def test_a_refusal_to_the_optimizer_ends_the_pipe_in_words(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its update may be half done, so there is no going on; the figures reach the script at the next wait."""
    with inline(workers=2) as session:
        pipe, _ = run_beside_a_loop(session)
        batch = torch.randn(4, 4), torch.randn(4, 1)
        refusing = Refusing("optimizer.1", monkeypatch)
        if what == "step":
            pipe.forward_backward(*batch)
        refusing.arm(0)

        def use() -> None:
            if what == "sum":  # a second slab of a unit makes one
                for _ in range(2):
                    float(pipe.forward_backward(*batch))
            pipe.step().result()

        with pytest.raises(HostMemoryError, match="16 MiB, 4 MiB are available"):
            use()
        refusing.arm(-1)
        with pytest.raises(HostMemoryError):
            pipe.forward_backward(*batch)
        assert all(torch.isfinite(parameter).all() for parameter in pipe.model.parameters()), "they stay readable"


def reading(monkeypatch: pytest.MonkeyPatch, **changed: int) -> None:
    figures = {
        "shm_total": 64 * GIB, "shm_free": 60 * GIB, "cgroup_limit": None, "cgroup_used": 0,
        "ram_total": 128 * GIB, "ram_available": 100 * GIB, **changed,
    }  # fmt: skip
    monkeypatch.setattr(loading, "read_host_memory", lambda: HostMemory(**figures))


@pytest.mark.parametrize("short", ["shm", "cgroup", "ram"])
def test_a_model_that_does_not_fit_is_refused_before_anything_is_reserved(
    short: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
    created: list[int] = []
    create = PrivateSegments.create

    def counted(self: PrivateSegments, nbytes: int) -> Any:
        created.append(nbytes)
        return create(self, nbytes)

    monkeypatch.setattr(PrivateSegments, "create", counted)
    with inline(workers=1) as session:

        def load(into: Any) -> None:
            optimizer = torch.optim.AdamW(wide.parameters())
            rp.RoundPipe(wide, optimizer, loss_fn=mse, session=into).close()

        reading(monkeypatch)
        needs = []
        check = loading.check_host_memory
        monkeypatch.setattr(loading, "check_host_memory", lambda n, *a, **k: (needs.append(n), check(n, *a, **k))[1])
        load(session)
        need = needs[0]
        assert need > 3 * (512 * 512 * 4) * 5, "weights twice, an fp32 copy, two moments, gradients"
        del created[:]
        small = need * 2 // 3
        tight = {
            "shm": {"shm_total": small, "shm_free": small},
            "cgroup": {"cgroup_limit": small},
            "ram": {"ram_total": small, "ram_available": small},
        }[short]
        reading(monkeypatch, **tight)
        with pytest.raises(HostMemoryError) as caught:
            load(session)
        assert created == []
        for words in (f"the model needs {need / MIB:.0f} MiB ({need} bytes)", "/dev/shm", "cgroup limit", "RAM"):
            assert words in str(caught.value)
        enough = need * 11 // 10
        roomy = {
            "shm": {"shm_total": enough, "shm_free": enough},
            "cgroup": {"cgroup_limit": enough},
            "ram": {"ram_total": enough, "ram_available": enough},
        }[short]
        reading(monkeypatch, **roomy)
        with inline(workers=1) as fresh:  # the first one has the memory by now
            load(fresh)
        assert created


GROWS = """
import sys, torch, rpruntime as rp
from torch import nn

class Grows(nn.Module):
    def forward(self, x):
        return x, torch.ones(len(x), int(x[0, 0]) << 20)

class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, value):
        return self.linear(value[0] * 0 + 1)

torch.manual_seed(0)
def make(width, name):
    model = nn.Sequential(nn.Identity(), Grows(), Ends(), *(nn.Linear(1, width) for _ in range(width > 1)))
    return rp.RoundPipe(
        model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn=lambda out, y: out.mean(), num_microbatches=2,
        plan="layers", name=name,
    )
def call(pipe, mib):
    x = torch.zeros(8, 4)
    x[:, 0] = mib
    return float(pipe.forward_backward(x, torch.zeros(8, 1)))

pipe = make(1, "first")
first = call(pipe, 0)
pipe.step()
for _ in range(3):
    try:
        call(pipe, 5)
    except rp.HostMemoryError as err:
        print(err, "|", err.rp_context.line())
    assert call(pipe, 0) == first
    pipe.step()
assert call(pipe, 1) == first, "32 MiB still fit"
try:
    make(3 << 20, "second")
except rp.HostMemoryError as err:
    print(err)
assert call(pipe, 0) == first
assert pipe.step().result().step == 4
print("usable")
"""


def test_growth_in_a_worker_that_is_refused_reaches_the_script(tmp_path: Path) -> None:
    """Real processes under `--host-memory`: activations of 80 MiB, then a second model, do not fit."""
    (tmp_path / "train.py").write_text(GROWS)
    with no_leaks(within_s=10.0) as watch:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RPRUNTIME_")}
        done = subprocess.run(
            [sys.executable, "-m", "launcher", "-q", "--devices=cpu:2", "--host-memory=0.125", "train.py"],
            cwd=tmp_path, env={**kept, "PYTHONPATH": str(ROOT), **watch.environ}, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *refusals, last = done.stdout.splitlines()
    assert last == "usable" and len(refusals) == 4
    for line in refusals[:3]:
        assert "needs 80 MiB (83886080 bytes) of host memory" in line and "are available: shared memory" in line
        assert "taken as 0.125 GiB (--host-memory)" in line and "reserved already" in line
        assert "layer 1 (Grows), forward, micro-batch 1/2" in line
    assert "of host memory" in refusals[3] and "--host-memory" in refusals[3]
