"""transformers models on CUDA in bf16: loss curves of the pipe beside a plain loop on one GPU, full and with LoRA.

    rplaunch --devices cuda scripts/check_models_cuda.py [--steps 8]

Qwen3 and Qwen3-MoE with random weights, at least 300 M parameters each. The plain loop keeps fp32 master weights,
as the pipe's optimizer does. Exit code 1 if a loss differs by more than 2%.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch

import rpruntime as rp

LIMIT = 0.02


def make(kind: str, size: int) -> Any:
    """A model with random weights, bf16, on the CPU."""
    import transformers

    shared = {
        "vocab_size": 32000, "hidden_size": size, "num_hidden_layers": 16, "num_attention_heads": 16, "head_dim": 64,
        "num_key_value_heads": 8, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    }  # fmt: skip
    if kind == "qwen3":
        config = transformers.Qwen3Config(intermediate_size=3 * size, **shared)
        found = transformers.Qwen3ForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(
            intermediate_size=size, moe_intermediate_size=size // 2, num_experts=8, num_experts_per_tok=2, **shared
        )
        found = transformers.Qwen3MoeForCausalLM(config)
    return found.to(torch.bfloat16)


def with_lora(model: Any) -> Any:
    """The model with adapters on the attention's projections."""
    import peft

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def plain(model: Any, ids: torch.Tensor, steps: int, lr: float, microbatches: int) -> list[float]:
    """Losses of an ordinary loop with fp32 master weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    master = [p.detach().float().clone().requires_grad_() for p in trained]
    optimizer = torch.optim.AdamW(master, lr=lr)
    losses = []
    for _ in range(steps):
        total = 0.0
        for chunk in ids.chunk(microbatches):
            loss = model(input_ids=chunk.to(device), labels=chunk.to(device), use_cache=False).loss / microbatches
            loss.backward()
            total += float(loss)
        for wide, narrow in zip(master, trained, strict=True):
            wide.grad, narrow.grad = narrow.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for wide, narrow in zip(master, trained, strict=True):
                narrow.copy_(wide)
        losses.append(total)
    return losses


def piped(model: Any, ids: torch.Tensor, steps: int, lr: float, microbatches: int) -> list[float]:
    """The same through the pipe."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    with rp.RoundPipe(model, optimizer, num_microbatches=microbatches) as pipe:
        losses = []
        for _ in range(steps):
            losses.append(pipe.forward_backward({"input_ids": ids, "labels": ids}))
            pipe.step()
        return [float(loss) for loss in losses]


def main() -> int:
    """All cases, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--size", type=int, default=1024, help="hidden size (default 1024)")
    parser.add_argument("--seq", type=int, default=512, help="tokens a row (default 512)")
    options = parser.parse_args()
    ids = torch.randint(32000, (8, options.seq), generator=torch.Generator().manual_seed(0))
    worst = 0.0
    for kind in ("qwen3", "qwen3_moe"):
        for lora in (False, True):
            began = time.perf_counter()
            curves = []
            for run in (plain, piped):
                torch.manual_seed(0)
                model = with_lora(make(kind, options.size)) if lora else make(kind, options.size)
                count = sum(p.numel() for p in model.parameters())
                curves.append(run(model, ids, options.steps, 1e-3 if lora else 1e-4, 4))
                del model
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            difference = max(abs(a - b) / a for a, b in zip(*curves, strict=True))
            worst = max(worst, difference)
            row = {
                "model": kind,
                "lora": lora,
                "parameters": count,
                "difference": round(difference, 5),
                "first": round(curves[1][0], 4),
                "last": round(curves[1][-1], 4),
                "plain_last": round(curves[0][-1], 4),
                "seconds": round(time.perf_counter() - began, 1),
            }
            print(json.dumps(row), flush=True)
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
