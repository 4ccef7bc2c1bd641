"""A small run with everything in one file, no main guard: classes, a lambda, a closure, a partial live in __main__.

Prints one JSON line: losses and a digest of the weights. SCRIPT_* variables choose the mode.
"""

import functools
import hashlib
import json
import os
import pathlib
import signal
import time

import torch
from torch import nn

import rpruntime as rp
from rpruntime.recording import read
from rpruntime.wire.messages import TaskMsg

torch.set_num_threads(1)
print("started")
STEPS = int(os.environ.get("SCRIPT_STEPS", "4"))
scale = torch.tensor(1.0)


class Noisy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.drop = nn.Linear(width, width), nn.Dropout(0.5)
        self.activation = lambda x: x.tanh()

    def forward(self, x):
        return self.drop(self.activation(self.linear(x)))


def make_block(width):
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(width, width)
            self.power = functools.partial(torch.mul, other=2.0)

        def forward(self, x):
            return self.power(self.inner(x))

    return Local()


class Marker(torch.autograd.Function):
    """Writes a line when the backward of a micro-batch has come this far."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with open(os.environ["SCRIPT_MARK"], "a") as file:
            file.write("backward\n")
        return grad


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 16)

    def forward(self, x):
        y = self.linear(x)
        return Marker.apply(y) if "SCRIPT_MARK" in os.environ else y


def wait_for_tasks(count):
    """Wait until the workers have all the tasks: only then is the dispatch over, as sockets send in the background."""

    def received():
        records = pathlib.Path(os.environ["RPRUNTIME_RECORD"]).glob("worker-*.record")
        return sum(isinstance(event, TaskMsg) for path in records for events, _ in read(path) for event in events)

    deadline = time.monotonic() + 60
    while received() < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


torch.manual_seed(3)
model = nn.Sequential(First(), Noisy(16), make_block(16), nn.BatchNorm1d(16), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
pipe = rp.RoundPipe(
    model,
    optimizer,
    loss_fn=lambda out, y: nn.functional.mse_loss(out, y) * scale,
    num_microbatches=4,
    asynchronous="SCRIPT_ASYNC" in os.environ,
    seed=11,
)
generator = torch.Generator().manual_seed(5)
losses = []
for _ in range(STEPS):
    x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
    losses.append(pipe.forward_backward(x, y))
    if "SCRIPT_STOP" in os.environ:
        wait_for_tasks(pipe.plan.num_stages * len(losses))
        os.kill(os.getpid(), signal.SIGSTOP)
    pipe.step()
pipe.synchronize()
digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())).hexdigest()
print(json.dumps({"losses": [float(loss) for loss in losses], "digest": digest}))
