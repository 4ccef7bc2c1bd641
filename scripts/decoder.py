"""The decoder of the benchmarks: grouped-query attention, gated MLP, RMS norms, rotary positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

SHAPES = {
    # hidden, layers, heads, key-value heads, head dim, MLP width, vocabulary
    "tiny": (256, 8, 4, 2, 64, 768, 4096),
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151936),
    "1.7b": (2048, 28, 16, 8, 128, 6144, 151936),
    "4b": (2560, 36, 32, 8, 128, 9728, 151936),
    "6b": (4096, 22, 32, 8, 128, 14336, 128256),  # what of the next one fits into 128 GiB
    "8b": (4096, 32, 32, 8, 128, 14336, 128256),
}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


def rotary(x: torch.Tensor, theta: float = 1e6) -> torch.Tensor:
    """x [batch, heads, length, dim] with its positions turned in; tables in fp32."""
    length, dim = x.shape[-2:]
    inverse = theta ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim)
    angle = torch.outer(torch.arange(length, device=x.device, dtype=torch.float32), inverse)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, dim: int, mlp: int) -> None:
        super().__init__()
        self.sizes = (heads, kv_heads, kv_heads)
        self.dim = dim
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.sizes) * dim, bias=False)
        self.out = nn.Linear(heads * dim, width, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * mlp, bias=False), nn.Linear(mlp, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, -1, self.dim).transpose(1, 2)
        q, k, v = heads.split(self.sizes, 1)
        attended = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Head(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.proj = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.norm(x))


class OpenHead(Head):
    """Leaves the product with the vocabulary to the loss, which never holds all logits."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return self.norm(x), self.proj.weight


def build(shape: str, *, device: str = "cpu", seed: int = 0, head: type[Head] = Head) -> tuple[nn.Sequential, int]:
    """(the model in bf16, its vocabulary). Weights repeat one random row: filling 8 G normal numbers takes minutes."""
    width, layers, heads, kv_heads, dim, mlp, vocabulary = SHAPES[shape]
    with torch.device("meta"):
        blocks = [Block(width, heads, kv_heads, dim, mlp) for _ in range(layers)]
        model = nn.Sequential(Embedding(vocabulary, width), *blocks, head(width, vocabulary))
    model = model.to(torch.bfloat16).to_empty(device=device)
    row = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)) * 0.02).to(torch.bfloat16).to(device)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            flat = parameter.view(-1)
            shifted = row.roll(7919 * number)
            for start in range(0, flat.numel(), row.numel()):
                piece = flat[start : start + row.numel()]
                piece.copy_(shifted[: piece.numel()])
    return model, vocabulary


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def chunked_loss_fn(output: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """The loss behind an `OpenHead`."""
    from rpruntime.losses import linear_cross_entropy

    hidden, weight = output
    return linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten())


def batch(vocabulary: int, rows: int, length: int) -> torch.Tensor:
    """Random token ids [rows, length]."""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(2))
