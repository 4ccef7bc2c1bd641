"""A tiny causal LM with mixed attention and tied weights; prints what a run gives as JSON."""

import json

import torch

import rpruntime as rp
from tests.tiny_models import batch, tiny

model = tiny("qwen3-mixed-tied")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
losses = []
torch.manual_seed(5)
with rp.RoundPipe(model, optimizer, num_microbatches=4) as pipe:
    for step in range(3):
        losses.append(float(pipe.forward_backward(batch(seed=step))))
        pipe.step(max_grad_norm=1.0)
    tokens = pipe.generate(batch()["input_ids"][:, :4], max_new_tokens=3).tolist()
total = {name: parameter.double().sum().item() for name, parameter in model.named_parameters()}
print(json.dumps({"losses": losses, "tokens": tokens, "weights": total}))
