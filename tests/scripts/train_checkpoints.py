"""A run that saves or goes on, for test_checkpoints.py. Prints digests of all that a run consists of, as JSON.

SCRIPT_FOLDER: of the checkpoints. SCRIPT_STEPS: how many. SCRIPT_SAVE: steps after which to save, without waiting.
SCRIPT_LOAD=1: load first. SCRIPT_ASYNC=1, SCRIPT_PLAN, SCRIPT_SLOW (seconds a unit's step takes),
SCRIPT_KILL: "step.moment", end this process there.
"""

import hashlib
import json
import os
import random
import signal
import time

import numpy as np
import torch
from torch import nn

import rpruntime as rp
from rpruntime.checkpoints import files as checkpoint_files


class SlowAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        time.sleep(float(os.environ.get("SCRIPT_SLOW", "0")))
        return super().step(closure)


def digest(values) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 24),
        nn.BatchNorm1d(24),
        nn.Sequential(nn.GELU(), nn.Dropout(0.2)),
        nn.Linear(24, 24),
        nn.Linear(24, 3),
    )
    optimizer = SlowAdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def main() -> None:
    folder = os.environ["SCRIPT_FOLDER"]
    saves = [int(step) for step in os.environ.get("SCRIPT_SAVE", "").split(",") if step]
    model, optimizer, scheduler = build()
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)
    pipe = rp.RoundPipe(
        model,
        optimizer,
        loss_fn=nn.functional.cross_entropy,
        num_microbatches=4,
        asynchronous=os.environ.get("SCRIPT_ASYNC") == "1",
        plan=os.environ.get("SCRIPT_PLAN", "auto"),
        seed=3 if os.environ.get("SCRIPT_LOAD") != "1" else 99,
    )
    pipe.register_for_checkpointing(scheduler)
    first = 1
    if os.environ.get("SCRIPT_LOAD") == "1":
        torch.manual_seed(1234)
        first = pipe.load_checkpoint(folder).step + 1
    losses, handles = [], []
    for step in range(first, first + int(os.environ["SCRIPT_STEPS"])):
        losses.append(pipe.forward_backward(torch.randn(8, 8), torch.randint(3, (8,))))
        pipe.step(max_grad_norm=1.0)
        scheduler.step()
        if step in saves:
            if os.environ.get("SCRIPT_KILL", "").split(".")[0] == str(step):
                [handle.result(60) for handle in handles]
                kill_at(os.environ["SCRIPT_KILL"].partition(".")[2])
            handles.append(pipe.save_checkpoint(folder, extra={"step": step}))
    paths = [handle.result(60) for handle in handles]
    pipe.synchronize()
    state = optimizer.state_dict()
    found = {
        "step": pipe.last_step.step,
        "losses": [float(loss).hex() for loss in losses],
        "weights": digest(model.state_dict().values()),
        "moments": digest(v for values in state["state"].values() for _, v in sorted(values.items())),
        "lr": [group["lr"] for group in optimizer.param_groups],
        "random": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        "paths": paths,
    }
    pipe.close()
    print(json.dumps(found))


def kill_at(moment: str) -> None:
    def at(now: str) -> None:
        if now == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_files.at = at


if __name__ == "__main__":
    main()
