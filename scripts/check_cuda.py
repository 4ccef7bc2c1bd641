"""Compare training on CUDA workers with a GPU-resident loop: bf16 within 1e-2, fp32 with deterministic kernels 1e-5.

    rplaunch --devices cuda scripts/check_cuda.py        # all visible devices
    rplaunch --devices cuda:0 scripts/check_cuda.py

The reference keeps the whole model on one GPU and uses the same grouping of sums. Needs no data. Also checked: during a
run exactly one process of ours has a context on each GPU, and a refused pinning leaves no error behind.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from torch import nn

import rpruntime as rp
import rpruntime.session as sessions
from launcher import nvidia_smi

STEPS, MICROBATCHES, BATCH, CONTEXT, WIDTH, LAYERS, VOCAB = 20, 4, 16, 128, 256, 6, 512


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (WIDTH // self.heads) ** -0.5
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(causal, float("-inf")).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.norm2(x))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Embed(), *[Block() for _ in range(LAYERS)], nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))
    )


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB // 4, (BATCH, CONTEXT), generator=generator) for _ in range(STEPS)]


def resident(dtype: torch.dtype) -> list[float]:
    """Losses of the plain loop on cuda:0: fp32 weights, a copy in `dtype`, fp32 gradient sums."""
    master = build().cuda()
    model = copy.deepcopy(master).to(dtype)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-3)
    losses = []
    for ids in batches():
        total = torch.zeros((), device="cuda")
        sums = [torch.zeros_like(p) for p in master.parameters()]
        for chunk in ids.cuda().chunk(MICROBATCHES):
            loss = loss_fn(model(chunk), chunk) / MICROBATCHES
            loss.backward()
            total += loss.detach().float()
            for s, p in zip(sums, model.parameters(), strict=True):
                s.add_(p.grad)
                p.grad = None
        for s, p in zip(sums, master.parameters(), strict=True):
            p.grad = s.to(dtype).float()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(model.parameters(), master.parameters(), strict=True):
                p.copy_(q)
        losses.append(float(total))
    return losses


def piped(dtype: torch.dtype, plan: rp.ExecutionPlan | str, recompute: str) -> list[float]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with rp.RoundPipe(
        model, optimizer, loss_fn=loss_fn, num_microbatches=MICROBATCHES, dtype=dtype, plan=plan, recompute=recompute
    ) as pipe:
        losses = []
        for ids in batches():
            losses.append(pipe.forward_backward(ids, ids))
            pipe.step()
        found = [float(loss) for loss in losses]
        check_contexts()
        return found


def check_contexts() -> None:
    """Raises unless exactly one process of this session, a worker, is on each GPU, as nvidia-smi lists them."""
    body = json.loads((sessions.current().folder / "session.json").read_text())
    pids = {"script": os.getpid(), "launcher": body["launcher"]["pid"]}
    pids |= {role: row["pid"] for role, row in body["roles"].items()}
    processes = nvidia_smi.compute_processes() or ()
    if not {process.pid for process in processes} & set(pids.values()):
        # a container whose processes the driver does not list: who has initialised CUDA at all?
        wrong = [role for role, pid in pids.items() if nvidia_smi.has_opened_cuda(pid) != role.startswith("worker-")]
        problems = [f"{role} and CUDA: a worker has it open, no other role does" for role in wrong]
    else:
        problems = nvidia_smi.misplaced(pids, processes)
    if problems:
        raise SystemExit("CUDA contexts: " + "; ".join(problems))


def refused_pinning() -> int:
    """CUDA's code for pinning memory that is not there. Raises if the next, innocent call is blamed for it."""
    from rpruntime.worker import pinning

    torch.cuda.init()
    code = pinning.register(1 << 46, 1 << 20)
    assert int(pinning.clear_error(pinning.load_runtime())) == 0, "the refusal is still pending"
    torch.ones(4, device="cuda").add_(1).sum().item()
    return code


def main() -> int:
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    # the reference runs in a process of its own: the script must own no CUDA context while workers run
    import multiprocessing

    worst = 0
    uneven = rp.ExecutionPlan([range(0, 3), range(3, 6)], [range(6, 8), range(3, 6), range(1, 3), range(0, 1)])
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            expected = pool.apply(resident, (dtype,))
        for name, plan, recompute in (
            ("layers", "layers", "stage"),
            ("uneven", uneven, "stage"),
            ("by layer", uneven, "layer"),
        ):
            began = time.perf_counter()
            got = piped(dtype, plan, recompute)
            off = max(abs(a - b) / abs(a) for a, b in zip(expected, got, strict=True))
            verdict = "ok" if off <= limit else "TOO FAR"
            worst |= off > limit
            seconds = time.perf_counter() - began
            print(
                f"{dtype!s:15} {name:9} loss {got[0]:.5f} -> {got[-1]:.5f}  off {off:.2e} <= {limit:g} {verdict} "
                f" {seconds:.1f} s"
            )
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        code = pool.apply(refused_pinning)
    print(f"a refused pinning (error {code}) leaves no error behind" if code else "NOT REFUSED")
    worst |= code == 0
    print("script has a CUDA context:", torch.cuda.is_initialized())
    return worst


if __name__ == "__main__":
    sys.exit(main())
