"""Train a small GPT on real text, byte by byte, then let it write.

    rplaunch examples/train_gpt.py                       every GPU, or two CPU devices: about a minute there
    rplaunch examples/train_gpt.py --data book.txt --minutes 10 --width 384 --layers 6
    rplaunch examples/train_gpt.py --help                all that can be changed
    python examples/train_gpt.py                         the same without the launcher

The text is the English manual that every Python carries (what `help("topics")` shows), or your own files.
This is an ordinary PyTorch script: model, optimizer, LR scheduler and loop are as always. Three lines hand the
work to rpruntime: `rp.RoundPipe(...)`, `pipe.forward_backward(...)` and `pipe.step()`. Results go to stdout, all
else to stderr.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import rpruntime as rp

VOCABULARY = 256  # a token is a byte: no tokenizer, no unknown words
WARM_UP_STEPS = 20
LINE_EVERY_S = 1.5
MAX_VALIDATION_BATCHES = 100  # the whole of the manual's last tenth, and not hours of a large corpus's


# --- the model: an nn.Sequential, whose entries are the layers that rpruntime sends from device to device


class Embedding(nn.Module):
    """Bytes to vectors: which byte, which one before it, and where it stands.

    Attention would learn to look one byte back by itself, but that alone takes longer than this whole run.
    """

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.byte, self.before = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        for table in (self.byte, self.before, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # [rows, time] -> [rows, time, width]
        before = F.pad(tokens, (1, 0))[:, :-1]
        return self.byte(tokens) + self.before(before) + self.position.weight[: tokens.shape[1]]


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


def make_plan(kind: str, num_layers: int) -> rp.ExecutionPlan:
    """Which layers run together on a device. The result is the same for every plan; only the time differs.

    One layer per stage is right for a big model: a device never needs to hold more than one layer. But every hop
    to the next stage costs messages and copies, which layers as small as these do not repay. So half a model runs
    at a time: the lower half forward, the upper half forward and backward, the lower half backward.
    """
    half = num_layers // 2
    if kind == "halves":
        return rp.ExecutionPlan(forward=[range(half)], backward=[range(half, num_layers), range(half)])
    if kind == "whole":  # all of it at once, so nothing is computed twice; a device takes every other micro-batch
        return rp.ExecutionPlan(forward=[], backward=[range(num_layers)], round_size=1)
    return rp.ExecutionPlan.one_layer_a_stage(num_layers)


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
            f"the text has {len(data):,} bytes, {len(validation):,} of them for validation; a context of {context} "
            f"needs {context + 1:,} there: give at least {10 * (context + 1):,} bytes or a smaller --context"
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


def validation_batches(data: Tensor, rows: int, context: int, watch: Watch) -> Iterator[tuple[Tensor, Tensor]]:
    """The text once, front to back, in batches of nearly equal size."""
    starts = torch.arange(0, len(data) - context, context)
    batches = starts.tensor_split(math.ceil(len(starts) / rows))[:MAX_VALIDATION_BATCHES]
    for number, batch in enumerate(batches):
        watch.show(number / len(batches), f"validation batch {number + 1} of {len(batches)}")
        yield windows(data, batch, context)


# --- what is shown meanwhile


class Watch:
    """A bar on a terminal, otherwise a calm line now and then; on stderr either way."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("first step", total=1.0)
        self.begin = time.monotonic()
        self.next_line_s = 0.0

    def __enter__(self) -> Watch:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def show(self, done: float, text: str) -> None:
        """`done` goes from 0 to 1."""
        self.bar.update(self.task, completed=done, description=text)
        if self.bar.disable and self.seconds >= self.next_line_s:
            self.next_line_s = self.seconds + LINE_EVERY_S
            print(f"{text}  {self.seconds:.0f} s", file=sys.stderr, flush=True)


# --- the run


class Budget:
    """How much of the training is over, and the learning rate that goes with it."""

    def __init__(self, steps: int, minutes: float | None) -> None:
        self.steps, self.minutes = steps, minutes
        self.begin = time.monotonic()

    def spent(self, step: int) -> float:
        """From 0 to 1: by the clock if minutes were asked for, else by steps."""
        if self.minutes:
            return min(1.0, (time.monotonic() - self.begin) / (60 * self.minutes))
        return min(1.0, step / self.steps)

    def lr_factor(self, step: int) -> float:
        """A short warm-up, then half a cosine down to a tenth."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * self.spent(step))
        return min(1.0, (step + 1) / WARM_UP_STEPS) * (0.1 + 0.9 * cosine)


def main() -> None:
    args = parse_arguments()
    training, validation = split_text(read_text(args.data), args.context)
    torch.manual_seed(args.seed)

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
        plan=make_plan(args.plan, len(model)),
    )
    with pipe, Watch() as watch:
        step = 0
        for inputs, targets in random_batches(training, args.batch_size, args.context, args.seed):
            pipe.forward_backward(inputs, targets)  # queues and returns; the devices work while the loop goes on
            pipe.step(max_grad_norm=args.max_grad_norm or None)
            scheduler.step()
            step += 1
            watch.show(budget.spent(step), progress_text(pipe, step, step * inputs.numel() / watch.seconds))
            if budget.spent(step) >= 1:
                break
        pipe.synchronize()  # waits for the steps still queued; from here on `model` holds the newest weights
        seconds = watch.seconds
        trained = f"trained {step} steps, {step * inputs.numel():,} bytes, in {seconds:.1f} s"
        result = pipe.evaluate(validation_batches(validation, args.batch_size, args.context, watch))
        sample = write(model, args, watch) if args.generate > 0 else ""

    print(f"{trained}; training loss {pipe.last_step.loss:.3f} nats per byte")
    print(f"validation loss {result.loss:.3f} nats per byte")
    if sample:
        print(f"\n{sample}")


def progress_text(pipe: rp.RoundPipe, step: int, rate: float) -> str:
    newest = pipe.last_step  # the newest step that is done: the loss of this one would have to be waited for
    return f"step {step}  loss {newest.loss:.3f}  {rate:,.0f} tokens/s" if newest else f"step {step}"


@torch.inference_mode()
def write(model: nn.Module, args: argparse.Namespace, watch: Watch) -> str:
    """The prompt and what the model makes of it. The model runs right here, as any module does."""
    torch.set_num_threads(1)  # one row of bytes at a time is too little work to share
    generator = torch.Generator().manual_seed(args.seed)
    tokens = list(args.prompt.encode(errors="surrogateescape")) or [ord("\n")]
    model.eval()
    for done in range(args.generate):
        watch.show(done / args.generate, f"writing byte {done + 1} of {args.generate}")
        logits = model(torch.tensor([tokens[-args.context :]]))[0, -1].float()
        if args.temperature:
            chances = (logits / args.temperature).softmax(0)
            tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
        else:
            tokens.append(int(logits.argmax()))
    text = bytes(tokens).decode(errors="replace")
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)


# --- the command line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    group = parser.add_argument_group("text")
    files = "files to learn from, joined; their last 10%% is for validation"
    group.add_argument("--data", nargs="+", type=Path, default=[], metavar="FILE", help=files)
    flag(group, "--context", count, 128, "bytes that the model sees at a time")

    group = parser.add_argument_group("model")
    flag(group, "--layers", count, 4, "transformer blocks")
    flag(group, "--width", count, 128, "numbers that stand for a byte inside the model")
    flag(group, "--heads", count, 2, "attention heads, among which the width is divided")

    group = parser.add_argument_group("training")
    flag(group, "--steps", count, 300, "optimizer steps")
    group.add_argument("--minutes", type=positive, metavar="X", help="train for so long instead")
    flag(group, "--batch-size", count, 16, "windows of text in a step")
    flag(group, "--lr", positive, 4e-3, "highest learning rate, after the warm-up and before the cosine")
    flag(group, "--weight-decay", not_negative, 0.1, "pull of the matrices towards zero")
    flag(group, "--max-grad-norm", not_negative, 1.0, "clip gradients to this norm; 0: do not")
    flag(group, "--seed", int, 0, "of the first weights, the batches and the sample")

    group = parser.add_argument_group("how rpruntime runs it")
    flag(group, "--num-microbatches", count, 4, "parts of a batch that follow each other through the stages")
    flag(group, "--plan", ["halves", "layers", "whole"], "halves", "what runs together; changes the time only")
    flag(group, "--dtype", ["float32", "bfloat16"], "float32", "of the layers; the optimizer's is float32")
    stale = "gradients from weights one step old, so that devices never wait; wants a lower --lr, such as 1e-3"
    group.add_argument("--asynchronous", action="store_true", help=stale)

    group = parser.add_argument_group("sample")
    flag(group, "--prompt", str, "The ", "text to continue")
    flag(group, "--generate", int, 300, "bytes to write; 0: none")
    flag(group, "--temperature", not_negative, 0.7, "0: always the likeliest byte; higher: more daring")

    args = parser.parse_args()
    if args.width % args.heads:
        give_up(f"--width {args.width} cannot be divided among --heads {args.heads}: make it a multiple")
    return args


def flag(group: Any, name: str, kind: Any, default: object, text: str) -> None:
    """A flag with a default. `kind`: a function that reads the word, or the words to choose from."""
    how: dict[str, Any] = {"choices": kind} if isinstance(kind, list) else {"type": kind, "metavar": "X"}
    group.add_argument(name, default=default, help=f"{text} (default: {default})", **how)


def count(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a positive number")
    return value


def positive(word: str) -> float:
    value = float(word)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{word} is not a positive number")
    return value


def not_negative(word: str) -> float:
    value = float(word)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{word} is negative or infinite")
    return value


def give_up(sentence: str) -> NoReturn:
    sys.exit(f"train_gpt.py: {sentence}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("train_gpt.py: interrupted", file=sys.stderr)
        sys.exit(130)
