"""Fine-tune a causal language model on questions and answers: copy this file and change what you like.

    rplaunch examples/finetune.py                                    a small Llama from nothing, on questions.jsonl
    rplaunch examples/finetune.py --model FOLDER --data mine.jsonl   a model of yours, all weights
    rplaunch examples/finetune.py --model FOLDER --lora --lr 2e-4    the adapters only
    rplaunch examples/finetune.py --save ckpt --save-every 100       stop it when you like, and go on with --resume
    rplaunch examples/finetune.py --export trained                   for transformers' from_pretrained, or peft's

Every line of the data is {"prompt": "...", "answer": "..."}. The model sees both and learns the answer: only the
answer's tokens, and the one that ends it, count in the loss, and they count alike wherever they are, whatever the
batch and however it is cut. Without --model there is nothing to build on, so a random Llama and a tokenizer made from
the data learn the questions by heart: that shows that all works, in a minute or two on two cores.

The way through this file: data -> tokens -> batches -> model -> the loop in `train`, which is the usual one with
`pipe.forward_backward` and `pipe.step`. Results go to stdout, all else to stderr. Needs `pip install rpruntime[hf]`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

import rpruntime as rp

try:
    import transformers
except ModuleNotFoundError:
    sys.exit("finetune.py: this needs transformers: pip install 'rpruntime[hf]'")

IGNORED = -100  # the label of a token that does not count
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LINE_EVERY_S = 2.0


# --- the data


def read_pairs(file: Path) -> list[dict[str, str]]:
    try:
        lines = enumerate(file.read_text(encoding="utf-8").split("\n"), 1)
    except OSError as err:
        give_up(f"cannot read {err.filename}: {err.strerror}")
    except UnicodeDecodeError as err:
        give_up(f"{file} is not text in UTF-8: {err}")
    pairs = [read_pair(line, f"line {number} of {file}") for number, line in lines if line.strip()]
    return pairs or give_up(f'{file} is empty: it takes lines of {{"prompt": "...", "answer": "..."}}')


def read_pair(line: str, where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
        return {name: str(row[name]) for name in ("prompt", "answer")}
    except (ValueError, KeyError, TypeError) as err:
        give_up(f'{where} is not {{"prompt": "...", "answer": "..."}}: {err!r}')


def split_pairs(pairs: list[dict[str, str]], held_out: float, seed: int) -> tuple[list, list]:
    """Training and validation; always the same ones for the same seed."""
    pairs = random.Random(seed).sample(pairs, len(pairs))
    count = round(held_out * len(pairs))
    if count >= len(pairs):
        give_up(f"{len(pairs)} lines of data leave none to train on: give more, or a smaller --held-out")
    return pairs[count:], pairs[:count]


# --- tokens


def make_tokenizer(pairs: list[dict[str, str]]) -> Any:
    """A byte-level BPE tokenizer, learnt from the data; it can spell any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<pad>", "<end>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((f"{as_text(pair['prompt'])} {pair['answer']}" for pair in pairs), trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<end>")


def as_text(prompt: str) -> str:
    return f"Question: {prompt}\nAnswer:"


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt as the model is asked it: in its own chat format, if it has one."""
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    return list(tokenizer(as_text(prompt)).input_ids)


class Example(NamedTuple):
    """A prompt with its answer as tokens; the labels are the same tokens, those of the prompt IGNORED."""

    ids: list[int]
    labels: list[int]


def encode(tokenizer: Any, pair: dict[str, str], longest: int) -> Example:
    prompt = prompt_tokens(tokenizer, pair["prompt"])
    space = "" if tokenizer.chat_template else " "
    answer = [*tokenizer(space + pair["answer"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    if len(prompt) >= longest:
        give_up(
            f"a prompt has {len(prompt)} tokens and no answer fits behind it: raise --longest (now {longest}; the "
            f"model's context is the limit) or leave it out: {pair['prompt'][:60]}"
        )
    return Example((prompt + answer)[:longest], ([IGNORED] * len(prompt) + answer)[:longest])


# --- batches: a list of micro-batches, each of its own shape, and a list of their labels

Batch = tuple[list[dict[str, Tensor]], list[Tensor]]


def padded(examples: list[Example], parts: int, pad: int) -> Batch:
    """Examples of like length share a micro-batch, so that little is padded."""
    examples = sorted(examples, key=lambda e: len(e.ids))
    inputs, labels = [], []
    for chosen in torch.arange(len(examples)).tensor_split(min(parts, len(examples))):
        rows = [examples[index] for index in chosen.tolist()]
        lengths = torch.tensor([len(row.ids) for row in rows])
        width = int(lengths.max())
        ids = torch.tensor([row.ids + [pad] * (width - len(row.ids)) for row in rows])
        mask = (torch.arange(width) < lengths[:, None]).long()
        inputs.append({"input_ids": ids, "attention_mask": mask})  # each [rows, width]
        labels.append(torch.tensor([row.labels + [IGNORED] * (width - len(row.ids)) for row in rows]))
    return inputs, labels


def packed(examples: list[Example], parts: int) -> Batch:
    """A micro-batch is one row of whole examples, nothing padded. Each has its own positions, from 0: where they start
    anew, transformers masks what came before, so that no example sees another."""
    bins: list[list[Example]] = [[] for _ in range(min(parts, len(examples)))]
    for example in sorted(examples, key=lambda e: -len(e.ids)):
        min(bins, key=lambda found: sum(len(e.ids) for e in found)).append(example)
    inputs, labels = [], []
    for found in bins:
        ids = torch.tensor([[token for e in found for token in e.ids]])
        positions = torch.tensor([[position for e in found for position in range(len(e.ids))]])
        inputs.append({"input_ids": ids, "position_ids": positions})  # each [1, tokens]
        labels.append(torch.tensor([[label for e in found for label in e.labels]]))
    return inputs, labels


def num_learnt(batch: Batch) -> int:
    """The tokens that count. The first of a row never does: nothing comes before it that could foretell it."""
    return sum(int((labels[:, 1:] != IGNORED).sum()) for labels in batch[1])


class Shuffled:
    """Endless batches of examples, every epoch in another order. Its state, a place in the data, goes into
    checkpoints, since it is registered."""

    def __init__(self, examples: list[Example], rows: int, seed: int) -> None:
        self.examples, self.rows, self.seed = examples, rows, seed
        self.epoch = self.start = 0

    def __next__(self) -> list[Example]:
        order = list(range(len(self.examples)))
        random.Random(f"{self.seed}, {self.epoch}").shuffle(order)
        chosen = order[self.start : self.start + self.rows]
        self.start += self.rows
        if self.start >= len(order):
            self.epoch, self.start = self.epoch + 1, 0
        return [self.examples[index] for index in chosen]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.start = state["epoch"], state["start"]
        if self.start >= len(self.examples):  # there is less data now
            self.epoch, self.start = self.epoch + 1, 0


# --- model and optimizer


def load_model(args: argparse.Namespace, pairs: list[dict[str, str]]) -> tuple[Any, Any]:
    """(model, tokenizer); the model's weights are in the host's shared memory from the start."""
    if args.model:
        try:
            model = rp.from_pretrained(args.model, dtype=DTYPES[args.dtype])
            tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        except rp.ConfigError as err:
            give_up(str(err))
        except (OSError, ValueError, ImportError) as err:
            reason = " ".join(str(err).split())[:100]
            give_up(f"{args.model} has no tokenizer: copy tokenizer*.json from where the model was ({reason})")
    else:
        tokenizer = make_tokenizer(pairs)
        sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": args.longest}
        special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        sizes |= {"vocab_size": len(tokenizer), "initializer_range": 0.06}  # so narrow a model learns nothing from 0.02
        config = transformers.LlamaConfig(**sizes, **special)
        model = transformers.LlamaForCausalLM(config)
    if tokenizer.eos_token_id is None:
        give_up("the model's tokenizer has no token that ends a text (eos_token)")
    if len(tokenizer) > (rows := model.get_input_embeddings().weight.shape[0]):
        give_up(f"the tokenizer has {len(tokenizer)} tokens and the model {rows}: they are not of one model")
    context = getattr(model.config, "max_position_embeddings", None) or args.longest
    if context < args.longest:
        print(f"examples are cut at {context} tokens, the model's context, and not at {args.longest}", file=sys.stderr)
        args.longest = context
    return (add_adapters(model, args) if args.lora else model), tokenizer


def add_adapters(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Freezes the model and puts low-rank matrices beside its linear layers; these are what is trained."""
    import peft

    targets = args.lora_targets if args.lora_targets == "all-linear" else args.lora_targets.split(",")
    sizes = {"r": args.lora_rank, "lora_alpha": args.lora_alpha}
    return peft.get_peft_model(model, peft.LoraConfig(**sizes, target_modules=targets, task_type="CAUSAL_LM"))


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=(0.9, 0.95))


def warm_up_and_cosine(optimizer: torch.optim.Optimizer, warm_up: int, steps: int) -> Any:
    def factor(step: int) -> float:
        done = max(0.0, step - warm_up) / max(1, steps - warm_up)
        return min(1.0, (step + 1) / (warm_up + 1)) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, done)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# --- what is shown and logged


class TensorBoard:
    """`tensorboard --logdir FOLDER` shows it. For Weights & Biases put `wandb.init(project=...)` in its place: all that
    is needed here is `log(dict, step=)`."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()


class Watch:
    """Logs every step once it is done, without waiting for it, and shows one now and then."""

    def __init__(self, steps: int, logger: Any) -> None:
        self.steps, self.logger = steps, logger
        self.pending: deque[tuple[int, Any]] = deque()
        self.next_line_s = time.monotonic()

    def note(self, step: int, info: Any) -> None:
        self.pending.append((step, info))
        while self.pending and (self.pending[0][1].done() or step == self.steps):  # waits for all in the end
            self.show(*self.pending.popleft())

    def show(self, step: int, info: Any) -> None:
        done = info.result()
        values = {"loss": done.loss, "grad_norm": done.grad_norm, "lr": done.lr[0], "loss_scale": done.loss_scale}
        if self.logger:
            self.logger.log({f"train/{name}": value for name, value in values.items() if value is not None}, step=step)
        if time.monotonic() >= self.next_line_s or step == self.steps:
            self.next_line_s = time.monotonic() + LINE_EVERY_S
            skipped = "  skipped: the scaled gradients were not finite" if done.skipped else ""
            print(f"step {step} of {self.steps}  loss {done.loss:.3f}{skipped}", file=sys.stderr, flush=True)

    def report(self, loss: float, step: int) -> None:
        print(f"step {step}: validation loss {loss:.3f}", flush=True)
        if self.logger:
            self.logger.log({"validation/loss": loss}, step=step)


# --- the run


def train(pipe: rp.RoundPipe, scheduler: Any, data: Shuffled, validation: list[Batch], args: Any, logger: Any) -> None:
    """The loop. `args.cut` makes a batch of a list of examples."""
    first = 0
    if args.save:
        pipe.register_for_checkpointing(scheduler, data)
    if args.resume:
        try:
            first = pipe.load_checkpoint(args.save).step  # weights, optimizer, scheduler and place in the data
        except rp.CheckpointError as err:
            give_up(f"--resume takes a run with the same --model, --lora and --dtype: {err}")
        left = args.steps - first
        rest = f"{left} steps are left" if left > 0 else f"none of {args.steps} steps is left, see --steps and --epochs"
        print(f"goes on behind step {first}: {rest}", file=sys.stderr)
    watch = Watch(args.steps, logger)
    for step in range(first + 1, args.steps + 1):
        batches = [args.cut(next(data)) for _ in range(args.accumulate)]
        total = sum(num_learnt(batch) for batch in batches)  # so that all calls of a step are one mean
        for inputs, labels in batches:
            pipe.forward_backward(inputs, labels, num_items=total)  # queues and returns
        info = pipe.step(max_grad_norm=args.clip or None)  # the optimizer's step and zero_grad
        scheduler.step()
        watch.note(step, info)
        if args.save and (step % args.save_every == 0 or step == args.steps):
            pipe.save_checkpoint(args.save, keep=args.keep)  # written in the background
        if validation and (step % args.eval_every == 0 or step == args.steps):
            watch.report(pipe.evaluate(validation).loss, step)


def answer(pipe: rp.RoundPipe, tokenizer: Any, prompt: str, most: int) -> str:
    ids = torch.tensor(prompt_tokens(tokenizer, prompt))
    found = pipe.generate(ids, max_new_tokens=most, eos_token_id=tokenizer.eos_token_id)
    return str(tokenizer.decode(found[len(ids) :], skip_special_tokens=True)).strip()


def main(logger: Any = None) -> None:
    """`logger`: any object with `log(dict, step=)`, instead of --log."""
    args = parse_arguments()
    pairs = read_pairs(args.data)
    learnt, held_out = split_pairs(pairs, args.held_out, args.seed)
    torch.manual_seed(args.seed)
    model, tokenizer = load_model(args, pairs)
    data = Shuffled([encode(tokenizer, pair, args.longest) for pair in learnt], args.batch, args.seed)
    args.steps = args.steps or math.ceil(args.epochs * len(learnt) / (args.batch * args.accumulate))
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    m = args.num_microbatches
    args.cut = (lambda examples: packed(examples, m)) if args.packing else (lambda examples: padded(examples, m, pad))
    shown = [encode(tokenizer, pair, args.longest) for pair in held_out]
    validation = [args.cut(shown[start : start + args.batch]) for start in range(0, len(shown), args.batch)]
    logger = TensorBoard(args.log) if args.log else logger

    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    scheduler = warm_up_and_cosine(optimizer, args.warm_up, args.steps)
    model.train()
    how = {"num_microbatches": m, "dtype": DTYPES[args.dtype], "asynchronous": args.asynchronous}
    with rp.RoundPipe(model, optimizer, loss_fn=rp.losses.causal_lm, **how) as pipe:
        train(pipe, scheduler, data, validation, args, logger)
        for pair in learnt[: args.samples] + held_out[: args.samples]:
            said = answer(pipe, tokenizer, pair["prompt"], args.max_new_tokens)
            print(f"\n{pair['prompt']}\n  model: {said}\n  data:  {pair['answer']}")
        if args.export:
            pipe.save_pretrained(args.export, merge_adapters=args.merge)
            tokenizer.save_pretrained(args.export)


# --- the command line


def parse_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="finetune.py", description=__doc__, formatter_class=raw)
    groups = {
        "data": [
            ("--data", Path, Path(__file__).with_name("questions.jsonl"), "JSONL of prompts and answers"),
            ("--held-out", float, 0.1, "part of the data that is not trained on, but evaluated"),
            ("--longest", int, 512, "tokens of a prompt and its answer; answers are cut there"),
            ("--packing", None, False, "rows of several examples without padding, instead of padding to like lengths"),
        ],
        "model": [
            ("--model", Path, None, "folder of a transformers causal LM with its tokenizer; else a small new Llama"),
        ],
        "LoRA": [
            ("--lora", None, False, "train low-rank adapters (peft) and freeze the rest; wants a higher --lr"),
            ("--lora-rank", int, 16, "columns of an adapter's matrices"),
            ("--lora-alpha", float, 32.0, "an adapter counts alpha / rank"),
            ("--lora-targets", str, "all-linear", "names of the layers that get one, such as q_proj,v_proj"),
        ],
        "training": [
            ("--epochs", float, 20.0, "times that the data is seen; a real model wants 1 to 3"),
            ("--steps", int, 0, "so many optimizer steps instead"),
            ("--batch", int, 16, "examples in a call"),
            ("--accumulate", int, 1, "calls in a step"),
            ("--lr", float, 2e-3, "highest learning rate; a real model wants about 1e-5, its adapters 2e-4"),
            ("--warm-up", int, 10, "steps until it is reached; then it follows half a cosine down to 0"),
            ("--weight-decay", float, 0.01, "pull of the matrices towards zero"),
            ("--clip", float, 1.0, "clip gradients to this norm; 0: do not"),
            ("--seed", int, 0, "of the new weights, the split and the order"),
        ],
        "how rpruntime runs it": [
            ("--dtype", list(DTYPES), "bf16", "of the layers; the optimizer's is fp32; fp16 scales the loss"),
            ("--num-microbatches", int, 4, "parts of a call that follow each other through the stages"),
            ("--asynchronous", None, False, "gradients one step old, so that devices never wait"),
        ],
        "what comes of it": [
            ("--eval-every", int, 100, "steps between evaluations"),
            ("--log", Path, None, "folder for TensorBoard"),
            ("--save", Path, None, "folder for checkpoints, the last one after the last step"),
            ("--save-every", int, 100, "steps between checkpoints"),
            ("--keep", int, 2, "checkpoints that are kept"),
            ("--resume", None, False, "go on from the newest checkpoint in --save; the other flags as before"),
            ("--export", Path, None, "folder for the model, or its adapters, and the tokenizer"),
            ("--merge", None, False, "with --lora: export the model with its adapters added, not the adapters"),
            ("--samples", int, 3, "prompts, known and held out, that the model is asked in the end"),
            ("--max-new-tokens", int, 40, "of an answer to them"),
        ],
    }
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for name, kind, default, text in flags:  # kind: what reads the word, the words to choose from, or None: no word
            how = {"choices": kind} if isinstance(kind, list) else {"type": kind, "metavar": "X"}
            how = {"action": "store_true"} if kind is None else how
            group.add_argument(name, default=default, help=f"{text} (default: {default})" if default else text, **how)
    args = parser.parse_args()
    if args.resume and not args.save:
        give_up("--resume needs --save FOLDER, where the checkpoints are")
    if args.merge and not (args.lora and args.export):
        give_up("--merge goes with --lora and --export FOLDER: it exports the model with its adapters added")
    for name in ("batch", "accumulate", "num_microbatches", "eval_every", "save_every", "longest"):
        if getattr(args, name) < 1:
            give_up(f"--{name.replace('_', '-')} must be 1 or more, not {getattr(args, name)}")
    for name in ("save", "export", "log"):  # not only after hours of training
        if getattr(args, name) and getattr(args, name).is_file():
            give_up(f"--{name} {getattr(args, name)} is a file: give a folder")
    return args


def give_up(sentence: str) -> NoReturn:
    sys.exit(f"finetune.py: {sentence}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print(
            "finetune.py: interrupted; with --save and --resume it goes on from the newest checkpoint", file=sys.stderr
        )
        sys.exit(130)
