"""Train a small residual network with BatchNorm on pictures of handwritten digits.

    rplaunch examples/train_resnet.py                    every GPU, or two CPU devices: under half a minute there
    rplaunch examples/train_resnet.py --asynchronous     gradients one step old, so that devices never wait
    python examples/train_resnet.py --save digits.pt     keep the weights and the BatchNorm statistics

The pictures are scikit-learn's digits, 1797 of 8 x 8 pixels, which come with the package (`pip install scikit-learn`).
It shows a model that is not a transformer: convolutions, BatchNorm, whose running statistics move from micro-batch to
micro-batch in order on whatever device, and metrics, which the loss function returns beside the loss. Results go to
stdout, all else to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rpruntime as rp

CLASSES = 10
LINE_EVERY_S = 1.5


# --- the model: an nn.Sequential, whose entries are the layers that rpruntime sends from device to device


class Residual(nn.Module):
    """Two convolutions, each with BatchNorm, beside a shortcut; `stride` 2 halves the picture."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:  # [rows, channels_in, h, w] -> [rows, channels, h / stride, w / stride]
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


def make_model(width: int) -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, CLASSES))
    return nn.Sequential(
        stem,  # 8 x 8 pixels
        Residual(width, width),
        Residual(width, 2 * width, stride=2),  # 4 x 4
        Residual(2 * width, 4 * width, stride=2),  # 2 x 2
        head,
    )


def loss_fn(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, and a metric; rpruntime averages both over the whole batch."""
    accuracy = (logits.argmax(1) == labels).float().mean()
    return F.cross_entropy(logits, labels, label_smoothing=0.05), {"accuracy": accuracy}


# --- the pictures


def read_digits(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and validation, four to one: pictures [rows, 1, 8, 8] from 0 to 1, and labels [rows]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("train_resnet.py: the pictures come with scikit-learn: pip install scikit-learn")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    cut = len(labels) // 5
    return (images[cut:], labels[cut:]), (images[:cut], labels[:cut])


def batches(data: tuple[Tensor, Tensor], rows: int, generator: torch.Generator | None) -> Iterator[tuple]:
    """All pictures once, in batches of nearly equal size: shuffled and shifted by up to a pixel, if there is a
    generator, else as they are."""
    images, labels = data
    order = torch.arange(len(labels)) if generator is None else torch.randperm(len(labels), generator=generator)
    for chosen in order.tensor_split(num_batches(data, rows)):
        found = images[chosen]
        if generator is not None:
            down, right = torch.randint(3, (2,), generator=generator).tolist()
            found = F.pad(found, (1, 1, 1, 1))[:, :, down : down + 8, right : right + 8]
        yield found, labels[chosen]


def num_batches(data: tuple[Tensor, Tensor], rows: int) -> int:
    return -(-len(data[1]) // rows)


# --- the run


def main() -> None:
    args = parse_arguments()
    training, validation = read_digits(args.seed)
    torch.manual_seed(args.seed)
    model = make_model(args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = args.epochs * num_batches(training, args.batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    generator = torch.Generator().manual_seed(args.seed)
    begin = line_s = time.monotonic()
    with rp.RoundPipe(
        model,
        optimizer,
        loss_fn=loss_fn,
        num_microbatches=args.num_microbatches,
        asynchronous=args.asynchronous,
    ) as pipe:
        for epoch in range(args.epochs):
            for images, labels in batches(training, args.batch, generator):
                pipe.forward_backward(images, labels)  # queues and returns
                pipe.step()  # instead of optimizer.step() and zero_grad()
                scheduler.step()
                if pipe.last_step and time.monotonic() - line_s >= LINE_EVERY_S:  # the newest that is done: no wait
                    line_s = time.monotonic()
                    newest = pipe.last_step
                    accuracy = newest.metrics["accuracy"]
                    line = f"epoch {epoch + 1} of {args.epochs}  step {newest.step + 1} of {steps}"
                    print(f"{line}  loss {newest.loss:.3f}  accuracy {accuracy:.3f}", file=sys.stderr, flush=True)
        result = pipe.evaluate(batches(validation, args.batch, None))  # eval mode: with the running statistics
        seconds = time.monotonic() - begin
    # Behind `with` the trained weights, and the statistics, are the model's own.
    print(f"trained {steps} steps in {seconds:.1f} s")
    accuracy = result.metrics["accuracy"]
    print(f"validation loss {result.loss:.3f}, accuracy {accuracy:.3f} of {result.num_items:.0f} pictures")
    if args.save:
        torch.save(model.state_dict(), args.save)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_resnet.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags: list[tuple[str, type, object, str]] = [
        ("--epochs", count, 8, "times that every picture is seen"),
        ("--batch", count, 64, "pictures in a step"),
        ("--lr", float, 0.1, "highest learning rate, before the cosine"),
        ("--width", count, 16, "channels of the first block; the last has four times as many"),
        ("--num-microbatches", count, 2, "parts of a batch; BatchNorm sees one part at a time"),
        ("--seed", int, 0, "of the weights, the split and the order"),
    ]
    for name, kind, default, text in flags:
        parser.add_argument(name, type=kind, default=default, metavar="X", help=f"{text} (default: {default})")
    stale = "gradients from weights one step old, so that devices never wait; wants a lower --lr, such as 0.05"
    parser.add_argument("--asynchronous", action="store_true", help=stale)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the model's state_dict here")
    return parser.parse_args()


def count(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a positive number")
    return value


if __name__ == "__main__":
    main()
