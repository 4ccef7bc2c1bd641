"""The example that people start from, `examples/finetune.py`: its parts, all of it inline, and in real processes."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

import rpruntime as rp
from tests.launching import LAUNCH, ROOT, Run
from tests.leaks import no_leaks

EXAMPLE = ROOT / "examples" / "finetune.py"
QUESTIONS = ROOT / "examples" / "questions.jsonl"
SAMPLE = re.compile(r"^(?P<prompt>.*)\n  model: (?P<said>.*)\n  data:  (?P<data>.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("finetune", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["finetune"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pairs(example: ModuleType) -> list[dict[str, str]]:
    found: list[dict[str, str]] = example.read_pairs(QUESTIONS)
    return found


@pytest.fixture(scope="module")
def tokenizer(example: ModuleType, pairs: list[dict[str, str]]) -> Any:
    return example.make_tokenizer(pairs)


def tiny_llama(tokenizer: Any, **more: Any) -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, **more}
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes, **special)
    )


def weighted_loss(model: Any, batch: Any) -> float:
    """The loss of a list of micro-batches, by transformers alone."""
    model.eval()
    with torch.no_grad():
        losses = [rp.losses.causal_lm(model(**i, use_cache=False), label) for i, label in zip(*batch, strict=True)]
    weights = [rp.losses.causal_lm.loss_weight(label) for label in batch[1]]  # type: ignore[attr-defined]
    return float(sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights))


# --- parts


def test_the_data(pairs: list[dict[str, str]]) -> None:
    assert len(pairs) >= 150
    assert len({pair["prompt"] for pair in pairs}) == len(pairs)
    assert all(pair["prompt"].endswith("?") and pair["answer"] for pair in pairs)


def test_only_answers_are_learnt(example: ModuleType, pairs: list[dict[str, str]], tokenizer: Any) -> None:
    for pair in pairs:
        found = example.encode(tokenizer, pair, 512)
        assert tokenizer.decode(found.ids) == f"Question: {pair['prompt']}\nAnswer: {pair['answer']}<end>"
        assert len(found.ids) == len(found.labels)
        learnt = [label for label in found.labels if label != example.IGNORED]
        assert tokenizer.decode(learnt) == f" {pair['answer']}<end>"


def test_a_chat_format_is_used(example: ModuleType, pairs: list[dict[str, str]]) -> None:
    tokenizer = example.make_tokenizer(pairs)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    found = example.encode(tokenizer, {"prompt": "Why?", "answer": "So."}, 512)
    assert tokenizer.decode(found.ids) == "[user]Why?[assistant]So.<end>"


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_padding_and_packing_give_the_same_loss(
    example: ModuleType, pairs: list[dict[str, str]], tokenizer: Any, parts: int
) -> None:
    """As the examples have one by one."""
    model = tiny_llama(tokenizer)
    examples = [example.encode(tokenizer, pair, 512) for pair in pairs[::21]]
    assert len(examples) == 8
    single = [example.padded([one], 1, tokenizer.pad_token_id) for one in examples]
    wanted = weighted_loss(model, ([b[0][0] for b in single], [b[1][0] for b in single]))
    for batch in (example.padded(examples, parts, tokenizer.pad_token_id), example.packed(examples, parts)):
        assert len(batch[0]) == len(batch[1]) == parts
        assert example.num_learnt(batch) == sum(label != -100 for one in examples for label in one.labels)
        assert weighted_loss(model, batch) == pytest.approx(wanted, rel=1e-5)


def test_packing_pads_nothing(example: ModuleType, pairs: list[dict[str, str]], tokenizer: Any) -> None:
    examples = [example.encode(tokenizer, pair, 512) for pair in pairs[:20]]
    inputs, _ = example.packed(examples, 4)
    assert [len(one["input_ids"]) for one in inputs] == [1] * 4
    assert sum(one["input_ids"].numel() for one in inputs) == sum(len(one.ids) for one in examples)


def test_the_order_goes_on_where_it_was(example: ModuleType) -> None:
    names = [example.Example([number], [number]) for number in range(10)]
    first, second = (example.Shuffled(names, 4, 7) for _ in range(2))
    epoch = [next(first) for _ in range(3)]
    assert sorted(one.ids[0] for batch in epoch for one in batch) == list(range(10))
    next(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [next(first) for _ in range(9)] == [next(second) for _ in range(9)]
    second.examples = names[:3]
    second.load_state_dict({"epoch": 4, "start": 8})  # a place that less data does not have
    assert len(next(second)) == 3 and second.epoch == 6


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--data", "missing.jsonl"], "cannot read missing.jsonl: No such file or directory"),
        (["--data", "."], "cannot read .: Is a directory"),
        (["--data", "wrong.jsonl"], 'line 3 of wrong.jsonl is not {"prompt": "...", "answer": "..."}: KeyError'),
        (["--data", "list.jsonl"], "line 1 of list.jsonl is not"),
        (["--data", "binary.jsonl"], "binary.jsonl is not text in UTF-8"),
        (["--data", "empty.jsonl"], "empty.jsonl is empty: it takes lines of"),
        (["--held-out", "1"], "152 lines of data leave none to train on"),
        (["--longest", "8"], "no answer fits behind it: raise --longest (now 8"),
        (["--resume"], "--resume needs --save FOLDER"),
        (["--merge", "--export=out"], "--merge goes with --lora and --export FOLDER"),
        (["--eval-every", "0"], "--eval-every must be 1 or more, not 0"),
        (["--export", "wrong.jsonl"], "--export wrong.jsonl is a file"),
        (["--model", "none/at/all"], "there is no folder 'none/at/all'"),
    ],
)
def test_wrong_input(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    """One clear line before any process is started."""
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "Why?", "answer": "So.\\u2028"}\n\n{"prompt": "Why?"}\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["finetune.py", *words])
    with pytest.raises(SystemExit) as exit_:
        example.main()
    assert str(exit_.value.code).startswith("finetune.py: ")
    assert sentence in str(exit_.value.code)


# --- all of it, inline


class Notes:
    """What was logged, in W&B's form."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))

    def of(self, name: str) -> dict[int, float]:
        return {step: values[name] for step, values in self.rows if name in values}


def run_inline(example: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> Notes:
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--dtype=fp32", "--samples=0", *words])
    notes = Notes()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    session = rp.init(devices="inline", quiet=True)
    try:
        example.main(notes)
    finally:
        session.close()
        torch.set_rng_state(state)
        torch.set_num_threads(threads)
    return notes


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--dtype=fp32"], id="fp32"),
        pytest.param(["--packing", "--dtype=fp32"], id="packed-fp32"),
        pytest.param(["--packing"], id="packed", marks=pytest.mark.slow),
        pytest.param(["--dtype=fp16"], id="fp16", marks=pytest.mark.slow),
    ],
)
def test_any_object_is_a_logger(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    steps = ["--steps=8", "--eval-every=5", "--accumulate=2", "--samples=1"]
    notes = run_inline(example, monkeypatch, *steps, *words)
    losses = notes.of("train/loss")
    assert list(losses) == list(range(1, 9))
    assert losses[8] < losses[1] - 0.5
    assert list(notes.of("validation/loss")) == [5, 8]
    assert len(notes.of("train/lr")) == 8
    scales = set(notes.of("train/loss_scale").values())
    assert scales != {1.0} if "--dtype=fp16" in words else scales == {1.0}
    assert len(SAMPLE.findall(capsys.readouterr().out)) == 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A model with a context of 64 tokens."""
    folder: Path = tmp_path_factory.mktemp("base")
    model = tiny_llama(tokenizer, max_position_embeddings=64)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_end_is_saved_and_can_be_gone_on_from(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    base: Path,
    tokenizer: Any,
) -> None:
    words = [f"--model={base}", f"--save={tmp_path / 'saved'}"]
    run_inline(example, monkeypatch, *words, "--steps=3", "--save-every=2")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-2", "step-3"]
    assert "cut at 64 tokens, the model's context, and not at 512" in capsys.readouterr().err
    notes = run_inline(example, monkeypatch, *words, "--steps=5", "--resume")
    assert list(notes.of("train/loss")) == [4, 5]
    assert "goes on behind step 3: 2 steps are left" in capsys.readouterr().err
    assert run_inline(example, monkeypatch, *words, "--steps=5", "--resume").rows == []
    assert "none of 5 steps is left" in capsys.readouterr().err
    other = tmp_path / "other"
    tiny_llama(tokenizer, intermediate_size=32).save_pretrained(other)
    tokenizer.save_pretrained(other)
    for more, sentence in (
        (f"--model={other}", "of another model: model.layers.0.mlp.gate_proj.weight has shape"),
        ("--dtype=bf16", "of a run with another dtype: model.embed_tokens.weight has dtype float32 there and bfloat16"),
    ):
        with pytest.raises(SystemExit) as exit_:
            run_inline(example, monkeypatch, *words, "--steps=9", "--resume", more)
        assert "--resume takes a run with the same --model, --lora and --dtype" in str(exit_.value.code)
        assert sentence in str(exit_.value.code)


def test_a_model_without_its_tokenizer(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any
) -> None:
    tiny_llama(tokenizer).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        run_inline(example, monkeypatch, f"--model={tmp_path}")
    assert f"{tmp_path} has no tokenizer: copy tokenizer*.json" in str(exit_.value.code)
    small = tiny_llama(tokenizer)
    small.resize_token_embeddings(100)
    small.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        run_inline(example, monkeypatch, f"--model={tmp_path}")
    assert f"the tokenizer has {len(tokenizer)} tokens and the model 100" in str(exit_.value.code)


def test_a_prompt_longer_than_the_context(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, base: Path
) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "word " * 80, "answer": "So."}) + "\n")
    with pytest.raises(SystemExit) as exit_:
        run_inline(example, monkeypatch, f"--model={base}", f"--data={tmp_path / 'long.jsonl'}", "--held-out=0")
    assert "no answer fits behind it: raise --longest (now 64; the model's context is the limit)" in str(
        exit_.value.code
    )


# --- all of it, in real processes


def _run(folder: Path, *words: str, devices: str = "cpu:2") -> str:
    """What it printed."""
    with no_leaks() as watch:
        command = [*LAUNCH, f"--devices={devices}", str(EXAMPLE), "--dtype=fp32", *words]
        run = Run(folder, watch, command, RPRUNTIME_CHILD_COMMAND="")
        watch.folders.add(run.folder)
        assert run.wait(280) == 0, run.err
        return run.out


def _logged(folder: Path, name: str) -> dict[int, float]:
    """What TensorBoard shows: step -> value."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {event.step: event.value for event in found.Scalars(name)}


def _validation(example: ModuleType, folder: Path) -> Any:
    """The held-out questions as one batch, by a tokenizer that was exported."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    _, held_out = example.split_pairs(example.read_pairs(QUESTIONS), 0.1, 0)
    examples = [example.encode(tokenizer, pair, 512) for pair in held_out]
    return example.padded(examples, 4, tokenizer.pad_token_id)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # of what reads the log
def test_learns_by_heart_saves_resumes_and_exports(tmp_path: Path, example: ModuleType) -> None:
    saves = [f"--save={tmp_path / 'saved'}", "--save-every=50", "--keep=2"]
    out = _run(tmp_path / "a", "--epochs=14", *saves, "--export=export", "--log=log", "--samples=4")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-100", "step-120"]
    losses = _logged(tmp_path / "a" / "log", "train/loss")
    assert list(losses) == list(range(1, 121))
    assert losses[1] > 5
    assert losses[120] < 0.3
    samples = [found.groupdict() for found in SAMPLE.finditer(out)]
    assert len(samples) == 8
    assert [s["said"] for s in samples[:4]] == [s["data"] for s in samples[:4]]  # those that it was trained on

    # The export is an ordinary model, which gives what the run gave.
    export = tmp_path / "a" / "export"
    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    assert model.dtype == torch.float32
    validation = _logged(tmp_path / "a" / "log", "validation/loss")
    assert weighted_loss(model, _validation(example, export)) == pytest.approx(validation[120], rel=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    for sample in samples:
        ids = torch.tensor([example.prompt_tokens(tokenizer, sample["prompt"])])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        assert tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True).strip() == sample["said"]

    # From the checkpoint of step 100, on another number of devices: the same losses to the bit.
    shutil.rmtree(tmp_path / "saved" / "step-120")
    _run(tmp_path / "b", "--epochs=14", *saves, "--resume", "--log=log", "--samples=0", devices="cpu:1")
    again = _logged(tmp_path / "b" / "log", "train/loss")
    assert again == {step: loss for step, loss in losses.items() if step > 100}
    assert _logged(tmp_path / "b" / "log", "validation/loss")[120] == validation[120]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
def test_adapters(tmp_path: Path, example: ModuleType, tokenizer: Any) -> None:
    """Only adapters move; they load in peft, and merged they are a plain model."""
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    tiny_llama(tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    words = [f"--model={base}", "--lora", "--lora-targets=q_proj,v_proj", "--lora-rank=4", "--lr=1e-2", "--steps=30"]
    _run(tmp_path / "a", *words, "--samples=0", "--log=log", "--export=export")
    _run(tmp_path / "b", *words, "--samples=0", "--merge", "--export=export")
    losses = _logged(tmp_path / "a" / "log", "train/loss")
    assert losses[30] < losses[1]

    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert not (tmp_path / "a" / "export" / "model.safetensors").exists()
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "a" / "export")
    validation = _logged(tmp_path / "a" / "log", "validation/loss")[30]
    batch = _validation(example, base)
    assert weighted_loss(adapted, batch) == pytest.approx(validation, rel=1e-5)

    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b" / "export").state_dict()
    before = transformers.AutoModelForCausalLM.from_pretrained(base).state_dict()
    moved = {name for name, value in before.items() if not torch.equal(value, merged[name])}
    assert moved == {f"model.layers.{i}.self_attn.{part}.weight" for i in range(2) for part in ("q_proj", "v_proj")}
