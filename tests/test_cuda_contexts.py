"""Only workers may open a CUDA context: each costs hundreds of MB of a GPU. Here CUDA is pretended to be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.nvidia_smi import GpuProcess, has_opened_cuda, misplaced
from tests.leaks import no_leaks

ROOT = Path(__file__).resolve().parent.parent

PRETEND = """
import importlib.machinery, os, sys

NOTES = os.environ["CUDA_NOTES"]

def note(what):
    role = os.environ.get("RPRUNTIME_ROLE") or os.path.basename(sys.argv[0])
    with open(NOTES, "a") as file:
        file.write(f"{what} {role}\\n")

class Finder:
    # torch.cuda as if two devices were there; whoever initialises it is written down
    def find_spec(self, name, path=None, target=None):
        if name != "torch.cuda":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            original = module._lazy_init
            def lazy_init():
                note("initialised")
                original()
            module._lazy_init = lazy_init
            module.is_available = lambda: True
            module.device_count = lambda: 2
            note("loaded")
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""

TRAIN = """
import json, pathlib
import torch
from torch import nn
import rpruntime as rp
import rpruntime.session as sessions

assert torch.cuda.is_available()
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
mse = nn.functional.mse_loss
with rp.RoundPipe(model, optimizer, loss_fn=mse, num_microbatches=2, asynchronous=True) as pipe:
    for _ in range(3):
        pipe.forward_backward(torch.ones(4, 4), torch.zeros(4, 1))
        pipe.step(max_grad_norm=1.0)
    pipe.save_checkpoint("ckpt", wait=True)
    pipe.load_checkpoint("ckpt")
    pipe.evaluate([(torch.ones(4, 4), torch.zeros(4, 1))])
    pipe.gradients()
    pipe.synchronize()
    launcher = json.loads((sessions.current().folder / "session.json").read_text())["launcher"]["pid"]
    maps = pathlib.Path(f"/proc/{launcher}/maps").read_text()
print(json.dumps({"launcher has torch": "libtorch" in maps, "initialised": torch.cuda.is_initialized()}))
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(PRETEND)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RPRUNTIME_")}
    return {**kept, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "CUDA_NOTES": str(folder / "notes"), **more}


def test_script_launcher_and_optimizer_never_initialise_cuda(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with no_leaks(within_s=10.0) as watch:
        run = subprocess.run(
            [sys.executable, "-m", "launcher", "-q", "--devices", "cpu:2", str(script)],
            env=environment(tmp_path, **watch.environ),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == {"launcher has torch": False, "initialised": False}
    notes = (tmp_path / "notes").read_text().splitlines()
    # the roles are forks of the server, which has loaded it for them
    assert sorted(note for note in notes if note.startswith("loaded")) == ["loaded forkserver.py", "loaded train.py"]
    assert [note for note in notes if note.startswith("initialised")] == []


def test_an_initialisation_is_written_down(tmp_path: Path) -> None:
    code = "import torch\ntry:\n    torch.cuda.init()\n    torch.cuda._lazy_init()\nexcept Exception:\n    pass"
    subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), check=True, timeout=60)
    assert any(note.startswith("initialised") for note in (tmp_path / "notes").read_text().splitlines())


PIDS = {"launcher": 1, "script": 2, "optimizer": 3, "worker-0": 4, "worker-1": 5}
RIGHT = [GpuProcess("a", 4), GpuProcess("b", 5), GpuProcess("b", 99)]  # 99 is somebody else


@pytest.mark.parametrize(
    "processes, problem",
    [
        (RIGHT, None),
        ([*RIGHT, GpuProcess("a", 3)], "optimizer (pid 3) has a context on a"),
        ([*RIGHT, GpuProcess("a", 2)], "script (pid 2) has a context on a"),
        ([*RIGHT, GpuProcess("a", 5)], "worker-1 (pid 5) is on 2 GPUs, not on one"),
        (RIGHT[:1], "worker-1 (pid 5) is on 0 GPUs, not on one"),
        ([GpuProcess("a", 4), GpuProcess("a", 5)], "worker-0, worker-1 share a"),
    ],
)
def test_what_nvidia_smi_must_list(processes: list[GpuProcess], problem: str | None) -> None:
    found = misplaced(PIDS, processes)
    assert found == [] if problem is None else problem in found


def test_who_has_cuda_open(tmp_path: Path) -> None:
    folder = tmp_path / "proc/7/fd"
    folder.mkdir(parents=True)
    (folder / "3").symlink_to("/dev/nvidiactl")
    assert not has_opened_cuda(7, tmp_path)
    (folder / "4").symlink_to("/dev/nvidia-uvm")
    assert has_opened_cuda(7, tmp_path)
    assert not has_opened_cuda(8, tmp_path)
    assert not has_opened_cuda(os.getpid())
