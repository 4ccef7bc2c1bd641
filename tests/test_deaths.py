"""Workers of a real run die at chosen moments: the numbers are those of an undisturbed one, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.test_processes import ROOT, SCRIPTS, both_modes, result_of, run_script

STEPS = "8"
MOMENTS = (
    ("load", "backward"),
    ("built", "forward"),
    ("stage", "handed"),
    ("run", "commit"),
    ("recompute", "launched"),
    ("loss", "committed"),
    ("finish", "finish"),
)
"""For worker-0 and worker-1."""


def death(role: str, moment: str, count: int = 1, incarnation: int = 1, how: str = "kill") -> dict:
    return {"role": role, "moment": moment, "count": count, "incarnation": incarnation, "how": how}


def dying(*rules: dict) -> dict[str, str]:
    """Variables of a run whose forked workers die so."""
    path = os.pathsep.join(map(str, (ROOT / "tests" / "fakes" / "dying", ROOT)))
    return {"DYING": json.dumps(rules), "PYTHONPATH": path}


def started_alone() -> dict[str, str]:
    """Variables of a run whose workers are not forked."""
    return {"RPRUNTIME_CHILD_COMMAND": f"{sys.executable} {ROOT / 'tests' / 'fakes' / 'dying_worker.py'}"}


def run_dying(*rules: dict, devices: str = "cpu:2", flags: tuple[str, ...] = (), **more: str):
    flags = ("--devices", devices, "--max-restarts", "100", "--max-task-failures", "100", *flags)
    return run_script(SCRIPTS / "train_small.py", *flags, **{"SCRIPT_STEPS": STEPS, **dying(*rules), **more})


def deaths_told(run: subprocess.CompletedProcess[str]) -> int:
    return sum("died" in line and "worker-" in line for line in run.stderr.splitlines())


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, dict]:
    return both_modes(SCRIPT_STEPS=STEPS)


@pytest.mark.parametrize(
    "mode, more",
    [
        ("async", {"SCRIPT_ASYNC": "1", "RPRUNTIME_REHEARSAL": "all"}),
        pytest.param("sync", {}, marks=pytest.mark.slow),
        pytest.param("sync", started_alone(), marks=pytest.mark.slow),
    ],
    ids=["async", "sync", "sync, without the fork server"],
)
def test_deaths_in_forward_backward_and_hand_over_change_no_number(undisturbed, mode, more, tmp_path):
    run = run_dying(
        death("worker-0", "forward", 3),
        death("worker-1", "backward", 2, how="segv"),
        death("worker-0", "handed", 1, incarnation=2, how="exit"),
        flags=("--log-dir", str(tmp_path)),
        **more,
    )
    assert result_of(run) == undisturbed[mode]
    assert deaths_told(run) == 3, run.stderr
    counts = [
        [int(found) for found in re.findall(r"rehearsed (\d+) kinds of stages", path.read_text())]
        for path in sorted(tmp_path.glob("*/worker-*.log"))
    ]
    if "RPRUNTIME_REHEARSAL" in more:  # the second one of worker-0 knows what its predecessors knew, and more
        (first, second), (other,) = counts
        assert 0 < first <= second > 1 and other > 1, counts
    else:
        assert not any(counts)


def test_the_only_worker_is_killed_at_its_start_and_dies_twice_and_the_run_waits_for_its_replacements(undisturbed):
    run = run_dying(
        death("worker-0", "start"),
        death("worker-0", "commit", 2, incarnation=2),
        death("worker-0", "loss", 5, incarnation=3, how="segv"),
        devices="cpu:1",
        cores=1,  # so it has one thread, as the inline session
    )
    assert result_of(run) == undisturbed["sync"]
    assert "did not start: killed by signal 9 (SIGKILL)" in run.stderr
    assert deaths_told(run) == 2, run.stderr


def test_a_stopped_process_is_ended_and_a_device_that_never_starts_again_is_retired(undisturbed):
    run = run_dying(
        death("worker-0", "recompute", 2, how="stop"),
        *(death("worker-1", "start", incarnation=number, how="exit") for number in (2, 3, 4, 5)),
        death("worker-1", "run", 3),
        flags=("--hang-timeout", "3", "--max-restarts", "2"),
    )
    assert result_of(run) == undisturbed["sync"]
    assert "was stopped (SIGSTOP?)" in run.stderr
    assert "retired" in run.stderr


def test_a_stage_that_ends_every_process_is_the_users_error_and_the_run_goes_on(tmp_path):
    script = tmp_path / "poison.py"
    script.write_text(POISON)
    run = run_script(script, "--devices", "cpu:2", "--max-restarts", "100")
    assert run.returncode == 1, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("WorkerDied layer 0 (f"), lines
    assert "signal 11 (SIGSEGV)" in lines[0] and lines[0].count("worker-") == 2
    assert lines[1] == "place 0 2"
    assert lines[2] == "readable True"
    assert lines[3] == "goes on True"
    assert any("WorkerDied: layer 0 (" in line for line in run.stderr.splitlines()[-4:]), run.stderr
    assert "layer 0 (Touchy), forward, micro-batch 3/4" in run.stderr


@pytest.mark.slow
def test_the_chaos_script_survives(tmp_path):
    run = subprocess.run(
        [sys.executable, "scripts/chaos.py", "--kills", "4", "--devices", "cpu:2"],
        cwd=ROOT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["survived"] == 4


POISON = """
import os, signal, torch, rpruntime as rp
from torch import nn
torch.set_num_threads(1)

class Touchy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
    def forward(self, x):
        if (x > 1e6).any():
            os.kill(os.getpid(), signal.SIGSEGV)
        return self.linear(x)

model = nn.Sequential(Touchy(), nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pipe = rp.RoundPipe(model, optimizer, loss_fn=nn.functional.mse_loss, num_microbatches=4, plan="layers")
good, bad, y = torch.ones(4, 2), torch.ones(4, 2), torch.ones(4, 1)
bad[2] = 1e9
pipe.forward_backward(good, y)
pipe.step()
try:
    float(pipe.forward_backward(bad, y))
except rp.WorkerDied as err:
    print("WorkerDied", err)
    print("place", err.rp_context.layer, err.rp_context.micro_batch)
    print("readable", all(bool(p.isfinite().all()) for p in model.parameters()))
loss = pipe.forward_backward(good, y)
print("goes on", float(loss) > 0)
pipe.step()
float(pipe.forward_backward(bad, y))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("moments", MOMENTS, ids="-".join)
def test_deaths_at_any_moment_change_no_number(undisturbed, moments, mode):
    more = {"SCRIPT_ASYNC": "1"} if mode == "async" else {}
    counts = [1 if moment in ("load", "built") else 4 for moment in moments]
    rules = [death(f"worker-{index}", *rule) for index, rule in enumerate(zip(moments, counts, strict=True))]
    run = run_dying(*rules, **more)
    assert result_of(run) == undisturbed[mode]
    assert deaths_told(run) == 2, run.stderr


STOPPED = """
import json, os, signal, torch, rpruntime as rp
from torch import nn

model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
pipe = rp.RoundPipe(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=nn.functional.mse_loss)
folder = pipe._model.client.session.folder
x, y = torch.ones(4, 2), torch.ones(4, 1)
pipe.forward_backward(x, y)
pipe.step()
pipe.save_checkpoint(os.environ["SCRIPT_CHECKPOINTS"]).result()
os.kill(json.loads((folder / "session.json").read_text())["roles"]["optimizer"]["pid"], signal.SIGSTOP)
pipe.forward_backward(x, y)
pipe.step()
try:
    pipe.synchronize()
except rp.WorkerDied as err:
    print("WorkerDied", err)
"""


@pytest.mark.slow  # quick in test_restarts.py, with fake processes
def test_a_stopped_optimizer_ends_the_run_with_the_name_of_the_last_checkpoint(tmp_path):
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    flags = ("--devices", "cpu:1", "--hang-timeout", "3")
    run = run_script(script, *flags, SCRIPT_CHECKPOINTS=str(tmp_path / "ckpt"))
    assert run.returncode == 0, run.stderr
    assert re.search(r"WorkerDied optimizer \(pid \d+\) died: was stopped \(SIGSTOP\?\) for [34] s", run.stdout)
    assert f"last complete checkpoint of this run: {tmp_path / 'ckpt'}" in run.stdout
    assert re.search(r"optimizer \(pid \d+\) was stopped .* and the run ends with it", run.stderr)
