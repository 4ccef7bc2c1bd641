"""Train a small GPT on real text, byte by byte, then let it write.

    rplaunch examples/train_gpt.py                       every GPU, or two CPU devices: about a minute there
    rplaunch examples/train_gpt.py --data book.txt --minutes 10 --width 384 --layers 6
    rplaunch examples/train_gpt.py --help                all that can be changed
    python examples/train_gpt.py                         the same without the launcher

The text is the English manual that every Python carries (what `help("topics")` shows), or your own files. It is an
ordinary PyTorch script: model, optimizer, LR scheduler and loop are as always, and three lines hand the work to
rpruntime: `rp.RoundPipe(...)`, `pipe.forward_backward(...)` and `pipe.step()`. The results go to stdout, all else to
stderr.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import rpruntime as rp

VOCABULARY = 256  # a token is a byte: no tokenizer, no unknown words
WARM_UP_STEPS = 20
MAX_VALIDATION_BATCHES = 100  # the whole of the manual's last tenth, and not hours of a large corpus's


# --- the model: an nn.Sequential, whose entries are the layers that rpruntime sends from device to device


class Embedding(nn.Module):
    """Bytes to vectors: what the byte is, plus where it stands."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        nn.init.normal_(self.byte.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # [rows, time] -> [rows, time, width]
        return self.byte(tokens) + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    """One pre-norm transformer block: look at the bytes before (attention), then think about each (MLP)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.merge_heads = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        nn.init.zeros_(self.merge_heads.weight)  # a new block changes nothing, so a deep stack starts well
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:  # [rows, time, width] -> the same
        x = x + self.merge_heads(self.attend(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.query_key_value(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [rows, heads, time, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(rows, length, width)


def make_model(layers: int, width: int, heads: int, context: int) -> nn.Sequential:
    blocks = [Block(width, heads) for _ in range(layers)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY))
    return nn.Sequential(Embedding(context, width), *blocks, head)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean surprise at the next byte, in nats; guessing blindly costs ln 256 = 5.5."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_plan(num_layers: int) -> rp.ExecutionPlan:
    import os
    kind = os.environ.get("PLAN", "auto")
    if kind == "auto": return "auto"
    if kind[0] == "h":
        k = int(kind[1:])
        return rp.ExecutionPlan([range(k)], [range(k, num_layers), range(k)])
    if kind[0] == "s":
        return rp.ExecutionPlan([], [range(num_layers)], int(kind[1:]))


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]  # biases and norms are not pulled towards zero
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


# --- the text


def read_text(files: list[Path]) -> bytes:
    if files:
        try:
            return b"".join(file.read_bytes() for file in files)
        except OSError as err:
            give_up(f"cannot read {err.filename}: {err.strerror}")
    try:
        from pydoc_data.topics import topics
    except ImportError:
        give_up("this Python came without its manual (pydoc_data): name a text with --data FILE")
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def split_text(text: bytes, context: int) -> tuple[Tensor, Tensor]:
    """The first 90% to train on, the rest for validation; both long enough for one window."""
    if not text:
        give_up("the text is empty: name another with --data FILE")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    training, validation = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    if len(validation) <= context:
        give_up(
            f"the text has {len(data):,} bytes, so {len(validation):,} for validation, and a context of {context} "
            f"needs {context + 1:,}: give at least {10 * (context + 1):,} bytes with --data or a smaller --context"
        )
    return training, validation


def windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the windows at `starts`: both [rows, context], the targets one byte further."""
    found = data[starts[:, None] + torch.arange(context + 1)].long()
    return found[:, :-1], found[:, 1:]


def random_batches(data: Tensor, rows: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows(data, torch.randint(len(data) - context, (rows,), generator=generator), context)


def validation_batches(data: Tensor, rows: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The text once, front to back, in batches of nearly equal size."""
    starts = torch.arange(0, len(data) - context, context)
    for some in starts.tensor_split(math.ceil(len(starts) / rows)):
        yield windows(data, some, context)


# --- what is shown meanwhile


class Watch(Progress):
    """A bar on a terminal, otherwise a line every two seconds; on stderr either way."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        super().__init__(BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console)
        self.disable = not console.is_terminal
        self.begin = time.monotonic()
        self.bar = self.add_task("", total=1.0)
        self._said = -math.inf

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def show(self, done: float, text: str) -> None:
        self.update(self.bar, completed=done, description=text)
        if self.disable and self.seconds - self._said > 1.5:
            self._said = self.seconds
            print(f"{text}  {self.seconds:.0f} s", file=sys.stderr, flush=True)


class Budget:
    """How much of the run is over: by steps or by the clock, whichever is further along."""

    def __init__(self, steps: int | None, minutes: float | None) -> None:
        self.steps = steps or math.inf
        self.seconds = 60 * minutes if minutes else math.inf
        self.begin = time.monotonic()

    def spent(self, step: int) -> float:  # 0 to 1
        return min(1.0, max(step / self.steps, (time.monotonic() - self.begin) / self.seconds))

    def lr_factor(self, step: int) -> float:
        """A short warm-up, then half a cosine down to a tenth."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * self.spent(step))
        return min(1.0, (step + 1) / WARM_UP_STEPS) * (0.1 + 0.9 * cosine)


# --- the run


def train(pipe: rp.RoundPipe, scheduler: torch.optim.lr_scheduler.LRScheduler, budget: Budget, batches: Iterator[tuple[Tensor, Tensor]], max_grad_norm: float | None, watch: Watch) -> int:
    raise NotImplementedError


@torch.inference_mode()
def write(model: nn.Module, prompt: bytes, length: int, context: int, temperature: float, seed: int) -> Iterator[int]:
    """The bytes that the model puts after the prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    model.eval()
    for _ in range(length):
        logits = model(torch.tensor([tokens[-context:]]))[0, -1].float()
        if temperature > 0:
            tokens.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
        else:
            tokens.append(int(logits.argmax()))
        yield tokens[-1]


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    training, validation = split_text(read_text(args.data), args.context)

    model = make_model(args.layers, args.width, args.heads, args.context)
    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    budget = Budget(args.steps, args.minutes)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, budget.lr_factor)
    pipe = rp.RoundPipe(
        model,
        optimizer,
        loss_fn=loss_fn,
        num_microbatches=args.num_microbatches,
        dtype=getattr(torch, args.dtype),
        asynchronous=args.asynchronous,
        plan=make_plan(len(model)),
    )
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters:,} parameters, {len(training):,} bytes to train on", file=sys.stderr)

    with pipe, Watch() as watch:
        step = 0
        for inputs, targets in random_batches(training, args.batch_size, args.context, args.seed):
            if budget.spent(step) >= 1:
                break
            pipe.forward_backward(inputs, targets)  # queues and returns: the next batch is cut while this one runs
            pipe.step(max_grad_norm=args.max_grad_norm or None)
            scheduler.step()
            step += 1
            loss = f"{pipe.last_step.loss:.3f}" if pipe.last_step else "-"  # the newest that is known, without waiting
            rate = step * inputs.numel() / watch.seconds
            watch.show(budget.spent(step), f"step {step}  loss {loss}  {rate:,.0f} tokens/s")
        pipe.synchronize()
        seconds = watch.seconds

        batches = validation_batches(validation, args.batch_size, args.context)
        result = pipe.evaluate(batches, max_batches=MAX_VALIDATION_BATCHES)
    print(f"{step} steps {seconds:.1f} s {step*args.batch_size*args.context/seconds:.0f} tok/s val {result.loss:.4f} items {result.num_items} {watch.seconds-seconds:.1f}")
    t = time.time()
    print(bytes(write(model, args.prompt.encode(), args.generate, args.context, args.temperature, args.seed)).decode("utf-8", "replace"))
    print("gen", time.time() - t)


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser()
    p.add_argument("--data", nargs="+", type=Path, default=[])
    p.add_argument("--steps", type=int)
    p.add_argument("--minutes", type=float)
    for k, v in dict(layers=4, width=192, heads=3, batch_size=16, context=128, lr=3e-3, num_microbatches=4, dtype="float32", max_grad_norm=1.0, seed=0, weight_decay=0.1, prompt="The ", generate=200, temperature=0.8).items():
        p.add_argument("--" + k.replace("_", "-"), type=type(v), default=v)
    p.add_argument("--asynchronous", action="store_true")
    return p.parse_args()


def give_up(sentence: str) -> None:
    sys.exit(f"train_gpt.py: {sentence}")


if __name__ == "__main__":
    main()
