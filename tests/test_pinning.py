"""Limits of pinning: refusals leave no error behind, tens of thousands of parameters need few mappings."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rpruntime.errors import HostMemoryError
from rpruntime.worker import pinning
from tests.leaks import no_leaks

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
OUT_OF_MEMORY = 2


class FakeCuda:
    """A runtime whose refusals stay pending until `cudaGetLastError`, as the real one's; `largest`: a call's limit."""

    def __init__(self, largest: int = 1 << 62, most: int = 1 << 62) -> None:
        self.largest, self.most = largest, most
        self.ranges: dict[int, int] = {}
        self.pending = 0

        def get_last_error() -> int:
            found, self.pending = self.pending, 0
            return found

        # what ctypes sees is a function with a `restype`
        self.runtime = SimpleNamespace(cudaGetLastError=get_last_error)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if nbytes == 0 or nbytes > self.largest or len(self.ranges) == self.most:
            self.pending = OUT_OF_MEMORY
            return OUT_OF_MEMORY
        assert address % 4096 == 0 and nbytes % 4096 == 0
        assert all(address + nbytes <= a or a + n <= address for a, n in self.ranges.items()), "registered twice"
        self.ranges[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.ranges[address]
        return 0

    def launch(self) -> None:
        """An innocent kernel: torch raises what it finds pending."""
        if self.runtime.cudaGetLastError():
            raise RuntimeError("CUDA error: out of memory")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(pinning, "load_runtime", lambda: fake.runtime)
    return fake


def memory_of(nbytes: int) -> Any:
    """What pinning asks of a mapping; nothing is mapped."""
    return SimpleNamespace(data_ptr=lambda: 1 << 40, nbytes=nbytes)


@pytest.mark.parametrize("nbytes", [1, 4096, 64 * GIB, 64 * GIB + 1, 700 * GIB + 5])
def test_a_segment_is_pinned_in_calls_that_the_driver_takes(cuda: FakeCuda, nbytes: int) -> None:
    cuda.largest = 512 * GIB - 1
    pinning.pin_segment("worker-0.1-1", memory_of(nbytes))
    assert max(cuda.ranges.values()) <= 64 * GIB
    assert sum(cuda.ranges.values()) == -(-nbytes // 4096) * 4096
    pinning.unpin_segment("worker-0.1-1", memory_of(nbytes))
    assert cuda.ranges == {}


def test_after_a_refusal_the_next_call_succeeds_and_nothing_stays_pinned(cuda: FakeCuda) -> None:
    cuda.most = 2
    with pytest.raises(HostMemoryError, match=r"refused to pin 64\.00 GiB of segment optimizer\.1-1 \(error 2\): \w+"):
        pinning.pin_segment("optimizer.1-1", memory_of(200 * GIB))
    assert cuda.ranges == {}
    cuda.launch()


def test_the_fake_runtime_blames_the_next_call_unless_the_error_is_taken(cuda: FakeCuda) -> None:
    cuda.most = 0
    assert cuda.cudaHostRegister(4096, 4096, 1) == OUT_OF_MEMORY
    with pytest.raises(RuntimeError, match="out of memory"):
        cuda.launch()


def test_the_runtimes_function_is_called_by_its_real_name(tmp_path: Path) -> None:
    """`clear_error` on a library that a C compiler made, where there is one: the symbol and the return type."""
    source, library = tmp_path / "runtime.c", tmp_path / "runtime.so"
    source.write_text("static int last = 2; int cudaGetLastError(void) { int found = last; last = 0; return found; }")
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler")
    runtime = ctypes.CDLL(str(library))
    assert pinning.clear_error(runtime) == OUT_OF_MEMORY
    assert pinning.clear_error(runtime) == 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build with CUDA has it")
def test_a_runtime_that_torch_has_not_loaded_is_not_loaded_for_this() -> None:
    with pytest.raises(OSError, match="libtorch_cuda"):
        pinning.load_runtime()


MANY_PARAMETERS = """
import json, pathlib, re, sys
import torch
from torch import nn
import rpruntime as rp
import rpruntime.session as sessions

class Many(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(16)) for _ in range(count)])
    def forward(self, x):
        return x * torch.stack(list(self.scales)).mean(0)

torch.set_num_threads(1)
layers, each = 14, 5000
model = nn.Sequential(*[Many(each) for _ in range(layers)])
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
mse = nn.functional.mse_loss
with rp.RoundPipe(model, optimizer, loss_fn=mse, num_microbatches=2, plan="layers") as pipe:
    loss = float(pipe.forward_backward(torch.ones(2, 16), torch.zeros(2, 16)))
    pipe.step().grad_norm
    body = json.loads((sessions.current().folder / "session.json").read_text())
    pids = {"script": "self", "launcher": body["launcher"]["pid"]}
    pids |= {role: row["pid"] for role, row in body["roles"].items()}
    maps = {role: pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines() for role, pid in pids.items()}
    ours = {role: sum("rpruntime-" in line for line in lines) for role, lines in maps.items()}
weights = {float(p.detach().unique()) for p in model.parameters()}
print(json.dumps({"loss": loss, "ours": ours, "weights": len(weights), "moved": max(weights) < 1.0}))
"""


@pytest.mark.slow
def test_seventy_thousand_small_parameters_need_few_mappings(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MANY_PARAMETERS)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RPRUNTIME_")}
    with no_leaks(within_s=10.0) as watch:
        run = subprocess.run(
            [sys.executable, "-m", "launcher", "--devices", "cpu:1", str(script)],
            env={**kept, "PYTHONPATH": str(ROOT), **watch.environ},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["loss"] == 1.0 and found["moved"]
    assert set(found["ours"]) == {"script", "launcher", "optimizer", "worker-0"}
    assert found["ours"]["optimizer"] >= 1 and found["ours"]["worker-0"] >= 1
    assert all(count < 1000 for count in found["ours"].values()), found["ours"]
