"""Loads the model of SCRIPT_FOLDER, trains adapters on it, and prints one JSON line: memory, losses, what moved.

Then what train_causal_lm.py prints in the same session.
"""

import contextlib
import io
import json
import os
import runpy
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model

import rpruntime as rp
from rpruntime.client import client_of

torch.set_num_threads(1)
torch.manual_seed(0)


def status(*names):
    rows = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    return [int(rows[name].split()[0]) * 1024 for name in names]


folder = os.environ["SCRIPT_FOLDER"]
session = rp.init()
sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))  # imports what a model needs
client = client_of(session)
before, private = status("VmRSS", "RssAnon")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts anew
model = rp.from_pretrained(folder)
(peak,) = status("VmHWM")
result = {
    "peak_bytes": peak - before,
    "private_bytes": status("RssAnon")[0] - private,
    "slab_bytes": client.slabs.live_bytes,
}
reference = [p.clone() for p in model.parameters()]
model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).train()
trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
base = [p for p in model.parameters() if not p.requires_grad]
pipe = rp.RoundPipe(model, torch.optim.AdamW(trainable.values(), lr=1e-2), num_microbatches=2)
ids = torch.randint(0, 32000, (2, 8))
losses = []
for _ in range(3):
    losses.append(float(pipe.forward_backward({"input_ids": ids, "labels": ids})))
    pipe.step()
pipe.synchronize()
result["lent"] = all(
    (extent is not None) == (not unit.trainable)
    for unit, extent in zip(pipe._model.layout.units, pipe._model.loan.extents, strict=True)
)
result["losses"] = losses
result["optimizer_bytes"] = sum(nbytes for _, nbytes in session.segments.segments_of("optimizer.1"))
result["moved"] = all(bool(p.norm() > 0) for name, p in trainable.items() if "lora_B" in name)
pipe.close()
result["base_unchanged"] = all(torch.equal(p, r) for p, r in zip(base, reference, strict=True))
with contextlib.redirect_stdout(io.StringIO()) as out:
    runpy.run_path(str(Path(__file__).with_name("train_causal_lm.py")))
result["causal_lm"] = json.loads(out.getvalue())
session.close()
result["base_unchanged"] &= all(torch.equal(p, r) for p, r in zip(base, reference, strict=True))
print(json.dumps(result))
