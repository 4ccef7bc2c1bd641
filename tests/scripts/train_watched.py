"""Trains until the file of SCRIPT_GO is there, and is interrupted then, as by Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import torch
from torch import nn

import rpruntime as rp

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with rp.RoundPipe(model, optimizer, loss_fn=nn.functional.cross_entropy, num_microbatches=3, plan="layers") as pipe:
    step = 0
    while True:
        pipe.forward_backward(torch.randn(12, 16), torch.randint(4, (12,)))
        float(pipe.step().result().loss)
        step += 1
        if step == 3:
            logging.getLogger("rpruntime").info("said by the script's process")
            print("trains", flush=True)
        if Path(os.environ["SCRIPT_GO"]).exists():
            os.kill(os.getpid(), signal.SIGINT)
