"""Trains a small model with tasks of its own, and prints losses and a digest of the weights.

Forward tasks of one micro-batch go out one by one, on devices in turn and on named ones; the backward ones are
submitted when their forward is done, as a controller would that looks at results.
"""

import hashlib
import json
import os

import torch
from torch import nn

import rpruntime as rp

torch.set_num_threads(1)
STEPS = int(os.environ.get("SCRIPT_STEPS", "3"))
COUNT = 4

torch.manual_seed(3)
model = nn.Sequential(
    nn.Linear(4, 16), nn.Sequential(nn.Dropout(0.1), nn.Tanh()), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
client = rp.Client.attach()
generator = torch.Generator().manual_seed(5)
losses = []
with client.load_model(model, optimizer, loss_fn=nn.functional.mse_loss, seed=11) as m:
    for _ in range(STEPS):
        x, y = torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)
        it = m.iteration(x, y, num_microbatches=COUNT)
        fused = []
        for mb in range(COUNT):
            it.submit(rp.StageTask("forward", range(2), [mb], device=mb % len(client.session.worker_roles)))
            it.submit(rp.StageTask("forward", range(2, 4), [mb]))
            fused.append(it.submit(rp.StageTask("fused", range(4, 5), [mb])))
        for mb in reversed(range(COUNT)):
            fused[mb].result(60)
            it.submit(rp.StageTask("backward", range(1, 4), [mb], after=[fused[0]]))
        it.submit(rp.StageTask("backward", range(1)))
        losses.append(it.loss())
        m.step(max_grad_norm=1.0)
digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())).hexdigest()
print(json.dumps({"losses": [float(loss) for loss in losses], "digest": digest}))
