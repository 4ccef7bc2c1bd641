"""What users of such systems have reported, with real processes: errors from anywhere, full queues, several users."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rpruntime as rp
from rpruntime.store.arena import GROWTH_BYTES
from rpruntime.worker.transfers import CpuTransfers
from tests.launching import LAUNCH, ROOT, WAIT_READY, Run, rplaunch, small_cgroup
from tests.leaks import no_leaks, wait_until
from tests.reference import inline

pytestmark = pytest.mark.usefixtures("single_thread")

MIB = 1 << 20
mse = nn.functional.mse_loss


def run_real(tmp_path: Path, script: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A script under rplaunch with real workers."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    (tmp_path / "train.py").write_text(script)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RPRUNTIME_")}
    with no_leaks(within_s=10.0) as watch:
        return subprocess.run(
            [sys.executable, "-m", "launcher", *flags, "train.py"],
            cwd=tmp_path,
            env={**kept, "PYTHONPATH": str(ROOT), **watch.environ, **environ},
            capture_output=True,
            text=True,
            timeout=100,
        )


# --- errors from places that are neither a layer's forward nor the loss


class Odd(Exception):
    """Takes arguments that its pickle does not know of."""

    def __init__(self, where: str, *, code: int) -> None:
        super().__init__(where)
        self.code = code


def raises(*_: Any) -> None:
    raise Odd("out of luck", code=7)


class Steps(torch.optim.SGD):
    """Raises in its first step."""

    def step(self, closure: Any = None) -> Any:
        raise Odd("out of luck", code=7)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with no_leaks(within_s=10.0, descriptors=False), rp.init("cpu:2", quiet=True) as found:
        found.wait_ready()
        yield found


def wrap(session: Any, model: nn.Sequential, kind: Any = torch.optim.SGD, name: str = "default") -> rp.RoundPipe:
    return rp.RoundPipe(
        model, kind(model.parameters(), lr=0.1), loss_fn=mse, num_microbatches=2, session=session, plan="layers",
        name=name,
    )  # fmt: skip


HOOKS = {
    "forward hook": ("register_forward_hook", lambda module, inputs, output: raises(), "forward"),
    "forward pre-hook": ("register_forward_pre_hook", lambda module, inputs: raises(), "forward"),
    "backward hook": ("register_full_backward_hook", lambda module, grad_in, grad_out: raises(), "backward"),
}


@pytest.mark.parametrize("which", HOOKS)
def test_an_exception_in_a_hook_of_a_layer(session: Any, which: str) -> None:
    """Its own type and place within two seconds; the hook gone, the pipe goes on."""
    register, hook, phase = HOOKS[which]
    model = small()
    getattr(model[1], register)(hook)
    pipe = wrap(session, model)
    slack = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(Odd, match="out of luck") as caught:
            float(pipe.forward_backward(torch.ones(4, 4), torch.zeros(4, 1)))
        assert time.monotonic() - began < 2.0 * slack
        context: Any = caught.value.rp_context  # type: ignore[attr-defined]
        assert caught.value.code == 7
        assert (context.phase, context.layer, context.micro_batch) == (phase, 1, 0)
        assert context.device.startswith("cpu:") and "test_field_cases" in context.worker_traceback
        assert any(function == "raises" for _, _, function, _ in context.worker_frames)
    with pytest.raises(rp.RoundPipeError, match="step without gradients"):
        pipe.step()
    pipe.close()


def test_an_exception_in_the_optimizers_step(session: Any) -> None:
    """Of the user's own optimizer class, in a process of its own: type and line within two seconds, no hang."""
    pipe = wrap(session, small(), Steps, "broken")
    slack = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    pipe.forward_backward(torch.ones(4, 4), torch.zeros(4, 1))
    began = time.monotonic()
    with pytest.raises(Odd, match="out of luck") as caught:
        pipe.step().result(30)
    assert time.monotonic() - began < 2.0 * slack
    context: Any = caught.value.rp_context  # type: ignore[attr-defined]
    assert caught.value.code == 7 and context.phase == "step" and context.device == "optimizer"
    assert any(function == "step" for _, _, function, _ in context.worker_frames)
    with pytest.raises(Odd):
        pipe.forward_backward(torch.ones(4, 4), torch.zeros(4, 1))
    assert all(torch.isfinite(parameter).all() for parameter in pipe.model.parameters())
    other = wrap(session, small())  # the session has not ended
    float(other.forward_backward(torch.ones(4, 4), torch.zeros(4, 1)))
    other.step().result(30)
    other.close()


@pytest.mark.parametrize("kind", ["upload_pieces", "upload"], ids=["weights", "act"])
def test_an_exception_in_a_copy_to_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the device has no memory for it: an error of this call, and the next one works."""
    upload = getattr(CpuTransfers, kind)
    broken = [False]

    def failing(self: CpuTransfers, *arguments: Any) -> Any:
        if broken[0]:
            raise ValueError("cannot copy this")
        return upload(self, *arguments)

    monkeypatch.setattr(CpuTransfers, kind, failing)
    with inline(workers=2) as session:
        pipe = wrap(session, small())
        first = float(pipe.forward_backward(torch.ones(4, 4), torch.zeros(4, 1)))
        pipe.zero_grad()
        for _ in range(3):
            broken[0] = True
            with pytest.raises(ValueError, match="cannot copy this"):
                float(pipe.forward_backward(torch.ones(4, 4), torch.zeros(4, 1)))
            broken[0] = False
            assert float(pipe.forward_backward(torch.ones(4, 4), torch.zeros(4, 1))) == first
            pipe.zero_grad()
        pipe.close()


# --- what a script may define


UNGUARDED = """
import dataclasses, functools, torch, rpruntime as rp
from torch import nn

print("top level", __name__)

@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    extra: dict

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, batch):
        return self.linear(batch.x) * batch.extra["factor"]

def make():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.act = lambda x: x * two
        def forward(self, x):
            return self.act(self.linear(x))
    return Inner()

two = torch.tensor(2.0)
def weighted(out, y, by):
    return ((out - y) ** 2).mean() * by
def closure(by):
    return lambda out, y: weighted(out, y, by)

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)  # sums over other rows round otherwise
for kind, loss_fn in {
    "lambda": lambda out, y: ((out - y) ** 2).mean() * two,
    "closure over a tensor": closure(two),
    "partial": functools.partial(weighted, by=2.0),
}.items():
    model = nn.Sequential(Net(), make())
    batch, y = Batch(torch.ones(4, 4), {"factor": 3.0}), torch.zeros(4, 1)
    wanted = float(loss_fn(model(batch), y))
    pipe = rp.RoundPipe(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn, num_microbatches=2, name=kind
    )
    found = float(pipe.forward_backward(batch, y))
    pipe.step().result()
    pipe.close()
    print(kind, abs(found - wanted) < 1e-5 * abs(wanted))
"""


UNPICKLABLE = """
import threading, torch, rpruntime as rp
from torch import nn

class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.guard = threading.Lock()

model = nn.Sequential(nn.Linear(4, 4), Locked())
rp.RoundPipe(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=nn.functional.mse_loss)
"""


@pytest.fixture(scope="module")
def defining(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """One run of both scripts, of which the second is to fail."""
    return run_real(tmp_path_factory.mktemp("defining"), UNGUARDED + UNPICKLABLE, "--devices=cpu:2", "-q")


def test_a_script_without_a_guard_defines_what_it_likes(defining: subprocess.CompletedProcess[str]) -> None:
    assert defining.stdout.splitlines() == [
        "top level __main__",
        "lambda True",
        "closure over a tensor True",
        "partial True",
    ], defining.stderr


def test_what_cannot_travel_fails_where_it_is_wrapped(defining: subprocess.CompletedProcess[str]) -> None:
    done = defining
    assert done.returncode == 1
    lines = len((UNGUARDED + UNPICKLABLE).splitlines())
    assert f"line {lines}, in <module>" in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "ConfigError: model[1].guard (lock)" in last and "__getstate__" in last


# --- the end of a run


QUEUED = (
    WAIT_READY
    + """
import os, signal
from rpruntime.wire.messages import ShutdownMsg
pid = session.ready["worker-0"]["pid"]
os.kill(pid, signal.SIGSTOP)
for _ in range(300):
    session.post.send("worker-0", ShutdownMsg("x" * 100_000))
if WITH_DEATH:
    os.kill(pid, signal.SIGKILL)
    for _ in range(300):
        session.post.send("worker-0", ShutdownMsg("x" * 100_000))
print("end", flush=True)
"""
)


@pytest.mark.parametrize("with_death", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_messages_that_nobody_reads_hold_nobody_up(tmp_path: Path, with_death: bool) -> None:
    """60 MB are queued to a process that is killed, or stopped, when the script ends."""
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, QUEUED.replace("WITH_DEATH", str(with_death)))
        run.wait_for("end")
        began = time.monotonic()
        assert run.wait() == 0, run.err
        assert time.monotonic() - began < 5.0
    assert not list(run.folder.glob("*.sock"))


@pytest.mark.parametrize(
    "script, code",
    [
        pytest.param("raise ValueError('of the script')", 1, marks=pytest.mark.slow),
        ("import os; os._exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV),
    ],
)
def test_the_exit_code_of_a_script_with_a_session(tmp_path: Path, script: str, code: int) -> None:
    """With processes of ours alive, which end in good order whatever the script does."""
    with no_leaks() as watch:
        run = rplaunch(tmp_path, watch, WAIT_READY + script)
        assert run.wait() == code, run.err


# --- several users


STRANGER_UID = 12345
BECOME = [
    *("setpriv", f"--reuid={STRANGER_UID}", f"--regid={STRANGER_UID}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]
"""The Python of this environment may lie where only root can read."""


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="needs another uid")
def test_two_users_at_once() -> None:
    """Each has a folder of its own; the one that is killed takes nothing of the other's along."""
    script = WAIT_READY + (
        "segment, memory = session.segments.create(1 << 20)\n"
        "print('ready', session.folder, flush=True)\n"
        "import sys, time, os\n"
        "while os.path.exists(sys.argv[1]):\n"
        "    time.sleep(0.01)\n"
        "print(len(session.segments.create(4096)[1]), session.launcher_alive(), len(session.ready))\n"
    )
    with tempfile.TemporaryDirectory(prefix="rpruntime-test-") as name, no_leaks(sockets=False) as watch:
        folder = Path(name)
        folder.chmod(0o755)
        going = folder / "going"
        going.touch()
        command = [*LAUNCH, "train.py", str(going)]
        for place in ("ours", "theirs"):
            (folder / place).mkdir()
            (folder / place / "train.py").write_text(script)
        ours = Run(folder / "ours", watch, command)
        theirs = Run(folder / "theirs", watch, [*BECOME, *command])
        for run in (ours, theirs):
            wait_until(lambda run=run: "ready" in run.out or run.popen.poll() is not None, 20.0, "both run")
        assert f"/tmp/rpruntime-{STRANGER_UID}/" in theirs.out, theirs.err
        assert "/tmp/rpruntime-0/" in ours.out, ours.err
        theirs.kill_group(signal.SIGKILL)
        assert theirs.wait() == 128 + signal.SIGKILL
        going.unlink()
        assert ours.wait() == 0, ours.err
        assert ours.out.splitlines()[-1] == "4096 True 3"
        left = Path(theirs.out.split()[1])
    shutil.rmtree(left)


# --- memory, for real


MEASURED = """
import sys, torch, rpruntime as rp
from torch import nn
from rpruntime import loading
from rpruntime.store.limits import cgroup_folders, read_cgroup

check = loading.check_host_memory
def noted(need, memory, **more):
    print("need", need, "used", memory.cgroup_used, flush=True)
    check(need, memory, **more)
loading.check_host_memory = noted

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
pipe = rp.RoundPipe(
    model, torch.optim.AdamW(model.parameters()), loss_fn=nn.functional.mse_loss, num_microbatches=2, plan="layers"
)
x = torch.ones(4, 2048)
for _ in range(2):
    float(pipe.forward_backward(x, x))
    pipe.step().result()
shared = [line.split()[1] for line in (cgroup_folders()[0][0] / "memory.stat").open() if line.startswith("shmem ")]
print("used at the end", read_cgroup()[1], "shared", *shared)
"""


@pytest.mark.slow
def test_a_model_in_a_real_cgroup(tmp_path: Path) -> None:
    """Refused before it is loaded where it does not fit; with a tenth to spare it trains, and nobody is killed.

    CPU workers compute in host memory too, which is no part of the plan: the tenth is on top of what a run has used.
    """
    (tmp_path / "train.py").write_text(MEASURED)

    def run(limit: int) -> tuple[Run, list[int]]:
        with small_cgroup(f"rpruntime-test-model-{os.getpid()}", limit) as cgroup, no_leaks(within_s=10.0) as watch:
            join = f'echo $$ > {cgroup}/cgroup.procs; exec "$@"'
            command = ["sh", "-c", join, "sh", *LAUNCH, "-q", "train.py"]
            run = Run(tmp_path, watch, command, RPRUNTIME_CHILD_COMMAND="", RPRUNTIME_DEVICES="cpu:1")
            run.wait(60)
        return run, [int(word) for word in re.findall(r"\d+", run.out)]

    first, (need, used, used_at_end, shared) = run(8 << 30)
    assert first.popen.returncode == 0, first.err
    assert need == 4 * (2048 * 2048 * 4) * 21 // 4, (
        "two copies, Adam's two, gradients, and a quarter of them on the way"
    )
    assert need < shared < need * 9 // 8 + 4 * GROWTH_BYTES, "the plan, and the rest of what arenas grew by"
    refused, _ = run(used + need * 2 // 3)
    assert refused.popen.returncode == 1
    last = refused.err.splitlines()[-1]
    assert "HostMemoryError: the model needs" in refused.err
    for words in ("shared memory /dev/shm", "cgroup limit", "RAM", "memory.max"):
        assert words in last
    assert "used at the end" not in refused.out
    enough, _ = run(used_at_end * 11 // 10)
    assert enough.popen.returncode == 0, enough.err
    assert "used at the end" in enough.out
