"""Layers of causal LMs: buffers, ties, masks, routing, plans, what is refused.   pytest tests/test_models_layers.py"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import rpruntime as rp
from rpruntime.models.layers import Block, Prelude, Tail
from rpruntime.models.parts import layers_of
from rpruntime.worker.outbox import Outbox
from tests.reference import inline, one_thread
from tests.tiny_models import batch, reference, tiny

ROOT = Path(__file__).resolve().parent.parent
seen: dict[str, list[Any]] = {}
"""What hooks in an inline session's copies of the layers noted; they find this module by its name."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    seen.clear()
    with one_thread():
        yield


def note(name: str, value: Any) -> None:
    seen.setdefault(name, []).append(value)


class Noting:
    """A forward hook that notes what `pick(module, args, kwargs, output)` gives; travels with its module."""

    def __init__(self, name: str, pick: Any) -> None:
        self.name, self.pick = name, pick

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        note(self.name, self.pick(module, args, kwargs, output))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def pick_output(_module: Any, _args: Any, _kwargs: Any, output: Any) -> Any:
    return output


def pick_call(_module: Any, _args: Any, kwargs: Any, _output: Any) -> Any:
    mask, (cos, _) = kwargs["attention_mask"], kwargs["position_embeddings"]
    return None if mask is None else mask.data_ptr(), cos.data_ptr()


def pick_table(module: Any, _args: Any, _kwargs: Any, _output: Any) -> Any:
    return {name: (buffer.dtype, buffer.clone()) for name, buffer in module.named_buffers()}


# --- layers


def test_layers_hold_the_models_own_modules_under_their_names():
    model = tiny("llama-tied")
    layers = layers_of(model)
    assert [name for name, _ in layers] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head",
    ]  # fmt: skip
    assert [type(layer) for _, layer in layers] == [Prelude, Block, Block, Block, Tail]
    found = {parameter for _, layer in layers for parameter in layer.parameters()}
    assert found == set(model.parameters())
    assert layers_of(nn.Sequential(one := nn.Linear(2, 2))) == [("0", one)]


def test_masks_and_rotary_tables_are_made_once_a_micro_batch():
    model = tiny("gemma3")
    rotary = model.model.rotary_emb.register_forward_hook(Noting("rotary", pick_output), with_kwargs=True)
    for block in model.model.layers:
        block.register_forward_hook(Noting("block", pick_call), with_kwargs=True)
    with inline() as session, rp.RoundPipe(model, num_microbatches=2, session=session) as pipe:
        pipe.forward({"input_ids": batch()["input_ids"], "attention_mask": batch()["attention_mask"]})
    assert len(seen["rotary"]) == 2 * 2  # two kinds of table, two micro-batches
    assert len(seen["block"]) == 2 * 3
    rotary.remove()
    stages = rp.ExecutionPlan(forward=[], backward=[range(0, 5)])
    seen.clear()
    with inline() as session, rp.RoundPipe(model, num_microbatches=1, session=session, plan=stages) as pipe:
        pipe.forward({"input_ids": batch()["input_ids"], "attention_mask": batch()["attention_mask"]})
    sliding, full, again = seen["block"]
    assert sliding == again and sliding[0] != full[0] and sliding[1] != full[1]


def test_values_that_blocks_pass_on_keep_their_handles(monkeypatch):
    """Only hidden states are copied from stage to stage."""
    copied: dict[int, int] = {}
    add_value = Outbox.add_value

    def watching(self: Outbox, key: Any, skeleton: bytes, tensors: Any, flags: Any, reused: Any = None) -> None:
        if key[0] == "act":
            copied[key[3]] = len(tensors) - len(reused or ())
        add_value(self, key, skeleton, tensors, flags, reused)

    monkeypatch.setattr(Outbox, "add_value", watching)
    model = tiny("qwen2")
    with inline() as session, rp.RoundPipe(model, sgd(model), num_microbatches=1, session=session) as pipe:
        pipe.forward_backward(batch()).item()
    assert copied[1] == 5  # hidden states, two masks, a table of cos and one of sin; positions are the call's own
    assert [copied[position] for position in (2, 3, 4)] == [1, 1, 1]


# --- precision and buffers


def test_bf16_leaves_rotary_frequencies_alone():
    model = tiny("llama")
    wanted = {name: buffer.clone() for name, buffer in model.model.rotary_emb.named_buffers()}
    model.model.rotary_emb.register_forward_hook(Noting("table", pick_table), with_kwargs=True)
    with (
        inline() as session,
        rp.RoundPipe(model, sgd(model), num_microbatches=2, dtype=torch.bfloat16, session=session) as pipe,
    ):
        pipe.forward_backward(batch())
        pipe.step().result()
    assert seen["table"]
    for table in seen["table"]:
        assert table.keys() == wanted.keys()
        for name, (dtype, value) in table.items():
            assert dtype == torch.float32 and torch.equal(value, wanted[name])
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


def test_bf16_equals_the_model_cast_by_hand_with_its_buffers_in_fp32():
    model = tiny("gemma3")
    cast = copy.deepcopy(model)
    for parameter in cast.parameters():
        parameter.data = parameter.data.bfloat16()
    inputs = {name: batch()[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        wanted = cast(**inputs, use_cache=False).logits
    with (
        inline() as session,
        rp.RoundPipe(model, num_microbatches=1, dtype=torch.bfloat16, session=session) as pipe,
    ):
        assert torch.equal(pipe.forward(inputs), wanted)


def test_rotary_angles_at_long_positions_are_those_of_fp64():
    model = tiny("llama", max_position_embeddings=4096)
    model.model.rotary_emb.register_forward_hook(Noting("rotary", pick_output), with_kwargs=True)
    positions = torch.arange(4090, 4096)[None]
    with inline() as session, rp.RoundPipe(model, dtype=torch.bfloat16, session=session) as pipe:
        pipe.forward({"input_ids": torch.ones_like(positions), "position_ids": positions}, num_microbatches=1)
    cos, sin = seen["rotary"][0]
    angles = positions[0, -1].double() / 10000 ** (torch.arange(0, 8, 2).double() / 8)
    for got, wanted in ((cos, angles.cos()), (sin, angles.sin())):
        torch.testing.assert_close(got[0, -1, :4].double(), wanted, atol=3e-3, rtol=0)


# --- tied weights


def test_tied_weights_are_one_parameter_over_steps():
    model = tiny("llama-tied").double()  # AdamW makes much of how a gradient near zero is rounded; the loss is fp32
    alone = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    with inline(devices=["cpu", "cpu"]) as session, rp.RoundPipe(model, optimizer, session=session) as pipe:
        for step in range(5):
            inputs = batch(seed=step)
            pipe.forward_backward(inputs)
            pipe.step()
            alone(**inputs, use_cache=False).loss.backward()
            alone_optimizer.step()
            alone_optimizer.zero_grad()
        pipe.synchronize()
        state = optimizer.state_dict()["state"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(state) == len(list(model.parameters()))
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], parameter, rtol=0, atol=5e-6)


def test_untied_weights_stay_untied():
    model = tiny("llama-tied")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    _, _, wanted = reference(model, batch())
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= wanted.keys()
    with inline() as session, rp.RoundPipe(model, sgd(model), num_microbatches=2, session=session) as pipe:
        pipe.forward_backward(batch())
        got = pipe.gradients()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=1e-6)


# --- cache, recompute, plans, modes


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("recompute", ["stage", "layer"])
def test_the_cache_is_off_whatever_the_configuration_says(use_cache, recompute):
    model = tiny("qwen3-mixed-tied")
    model.config.use_cache = use_cache
    loss, _, wanted = reference(model, batch())
    plan = rp.ExecutionPlan(forward=[range(0, 2)], backward=[range(2, 5), range(0, 2)])
    with (
        inline() as session,
        rp.RoundPipe(model, sgd(model), num_microbatches=1, recompute=recompute, plan=plan, session=session) as pipe,
    ):
        assert float(pipe.forward_backward(batch())) == pytest.approx(loss, abs=1e-6)
        got = pipe.gradients()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=1e-6)
    assert model.config.use_cache is use_cache


def test_exact_ties_of_a_router_go_to_the_same_experts_in_recompute():
    model = tiny("qwen3-moe")
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.gate.weight.zero_()
    model.model.layers[0].mlp.gate.register_forward_hook(Noting("gate", pick_output), with_kwargs=True)
    _, _, wanted = reference(model, batch())
    seen.clear()
    with inline() as session, rp.RoundPipe(model, sgd(model), num_microbatches=1, session=session) as pipe:
        pipe.forward_backward(batch())
        got = pipe.gradients()
    first, second = seen["gate"]  # forward, recompute
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=1e-6)


def test_dropout_follows_the_models_mode():
    model = tiny("phi", embd_pdrop=0.5)
    with inline() as session, rp.RoundPipe(model, sgd(model), num_microbatches=1, session=session, seed=3) as pipe:
        training = float(pipe.forward_backward(batch()))
        pipe.zero_grad()
        model.eval()
        evaluating = float(pipe.forward_backward(batch()))
        pipe.zero_grad()
        assert pipe.evaluate([batch()]).loss == pytest.approx(evaluating, abs=1e-6)
        assert abs(training - evaluating) > 1e-3
        assert all(not module.training for module in model.modules())


def test_other_attention_masks_travel():
    """A mask of [B, 1, S, S] made by the script."""
    model = tiny("llama-eager")
    inputs = batch()
    length = inputs["input_ids"].shape[1]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1).expand(4, 1, -1, -1).contiguous()
    inputs["attention_mask"] = mask
    loss, _, wanted = reference(model, inputs)
    with inline() as session, rp.RoundPipe(model, sgd(model), num_microbatches=2, session=session) as pipe:
        assert float(pipe.forward_backward(inputs)) == pytest.approx(loss, abs=1e-6)
        got = pipe.gradients()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=1e-6)


# --- labels, losses, generate


def test_a_row_without_labels_contributes_exactly_nothing():
    inputs = batch()
    rows = [0, 1, 3]
    model = tiny("llama")
    found = []
    for chosen, count in ((inputs, 4), ({name: value[rows] for name, value in inputs.items()}, 3)):
        with inline() as session, rp.RoundPipe(model, sgd(model), num_microbatches=count, session=session) as pipe:
            found.append((float(pipe.forward_backward(chosen)), pipe.gradients()))
    assert found[0][0] == found[1][0]
    for name, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][name])


@pytest.mark.parametrize("count", [1, 3])
def test_the_chunked_head_gives_the_same_numbers_and_logits(count):
    model = tiny("qwen3-mixed-tied")
    loss, logits, wanted = reference(model, batch())
    with (
        inline() as session,
        rp.RoundPipe(
            model, sgd(model), loss_fn=rp.losses.causal_lm_chunked, num_microbatches=count, session=session
        ) as pipe,
    ):
        assert float(pipe.forward_backward(batch())) == pytest.approx(loss, abs=1e-6)
        got = pipe.gradients()
        assert pipe.evaluate([batch()]).loss == pytest.approx(loss, abs=1e-6)
        output = pipe.forward({name: value for name, value in batch().items() if name != "labels"})
        counted = batch()["attention_mask"].bool()
        torch.testing.assert_close(output[counted], logits[counted], rtol=1e-6, atol=1e-6)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-6, atol=1e-6)


def test_a_loss_function_of_the_user_gets_logits_and_labels():
    model = tiny("llama")
    inputs = batch()
    labels = inputs.pop("labels")
    with (
        inline() as session,
        rp.RoundPipe(model, sgd(model), loss_fn=own_loss, num_microbatches=1, session=session) as pipe,
    ):
        one = float(pipe.forward_backward(inputs, labels))
        two = float(pipe.forward_backward({**inputs, "labels": labels}))
    assert one == two
    logits = model(**inputs, use_cache=False).logits
    assert one == pytest.approx(own_loss(logits, labels).item(), abs=1e-6)


def own_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert logits.shape == (*labels.shape, 64)
    return logits.square().mean()


def test_micro_batches_that_are_cut_already_have_lengths_of_their_own():
    model = tiny("mistral")
    parts = [batch(rows=3, length=8), batch(rows=4, length=11, seed=2)]
    weights = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    losses = [reference(model, part)[0] for part in parts]
    wanted = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    with inline() as session, rp.RoundPipe(model, sgd(model), session=session) as pipe:
        assert float(pipe.forward_backward(parts)) == pytest.approx(wanted, abs=1e-6)


def test_generate_is_greedy_as_the_models_own_or_drawn_by_seed():
    model = tiny("llama")
    prompts = batch()["input_ids"][:2, :5]
    wanted = model.generate(prompts, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    with inline() as session, rp.RoundPipe(model, num_microbatches=4, session=session) as pipe:
        assert torch.equal(pipe.generate(prompts, max_new_tokens=6), wanted)
        assert torch.equal(pipe.generate(prompts[0].tolist(), max_new_tokens=6), wanted[0])
        drawn = [pipe.generate(prompts, max_new_tokens=6, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
        assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
        stop = int(wanted[0, 6])
        ended = pipe.generate(prompts, max_new_tokens=6, eos_token_id=stop)
        assert (ended[0, 6 : ended.shape[1]] == stop).all()
        with pytest.raises(rp.ConfigError, match="input_ids"):
            pipe.generate([])


PADDED = ["llama", "gemma3", "gpt2", "mistral", "granite"]


@pytest.mark.parametrize("family", PADDED)
def test_generate_continues_padded_prompts_as_each_alone(family):
    model = tiny(family)
    rows = [batch(seed=row)["input_ids"][0, :length] for row, length in enumerate((3, 7, 5))]
    ids = torch.stack([torch.cat([torch.zeros(7 - len(row), dtype=torch.int64), row]) for row in rows])
    mask = torch.stack([(torch.arange(7) >= 7 - len(row)).long() for row in rows])
    with inline() as session, rp.RoundPipe(model, num_microbatches=2, session=session) as pipe:
        alone = [pipe.generate(row, max_new_tokens=5)[len(row) :] for row in rows]
        for found in (
            pipe.generate(ids, attention_mask=mask, max_new_tokens=5),
            pipe.generate({"input_ids": ids, "attention_mask": mask.bool()}, max_new_tokens=5),
        ):
            assert torch.equal(found[:, :7], ids)
            assert torch.equal(found[:, 7:], torch.stack(alone))
        assert torch.equal(pipe.generate(ids[1], attention_mask=mask[1].tolist(), max_new_tokens=5)[7:], alone[1])
    wanted = model.generate(
        ids, attention_mask=mask, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"input_ids": [[5, 6, 7], [8, 9]]}, r"different lengths are padded on the left.*padding_side = \"left\""),
        ({"input_ids": [torch.tensor([5, 6]), torch.tensor([7])]}, "different lengths are padded on the left"),
        ({"input_ids": [[5, 6], [0, 7]]}, r"prompt 1 is padded \(token 0\).*pass attention_mask"),
        ({"input_ids": [[5, 6], [7, 0]]}, r"prompt 1 is padded \(token 0\)"),
        ({"input_ids": [[5, 6], [7, 0]], "attention_mask": [[1, 1], [1, 0]]}, "prompt 1 has padding behind its tokens"),
        ({"input_ids": [[5, 6], [0, 0]], "attention_mask": [[1, 1], [0, 0]]}, "prompt 1 has padding behind its tokens"),
        ({"input_ids": [[5, 6]], "attention_mask": [1, 1]}, r"shape of input_ids, \[1, 2\], not \[2\]"),
    ],
)
def test_prompts_that_would_be_continued_wrongly(arguments, message):
    with inline() as session, rp.RoundPipe(tiny("llama"), session=session) as pipe:
        with pytest.raises(rp.ConfigError, match=message):
            pipe.generate(**arguments, max_new_tokens=1)


def test_a_token_for_padding_that_is_none():
    model = tiny("llama", bos_token_id=0)
    with inline() as session, rp.RoundPipe(model, num_microbatches=1, session=session) as pipe:
        assert pipe.generate([0, 5], max_new_tokens=1).shape == (3,)  # every prompt begins with it
        assert pipe.generate([5, 0], attention_mask=[1, 1], max_new_tokens=1).shape == (3,)
    with inline() as session, rp.RoundPipe(nn.Sequential(nn.Embedding(5, 5)), session=session) as pipe:
        assert pipe.generate([[0, 1]], attention_mask=[[1, 1]], max_new_tokens=1).shape == (1, 3)
        with pytest.raises(rp.ConfigError, match="goes with a causal LM"):
            pipe.generate([[0, 1]], attention_mask=[[0, 1]])


def test_rows_longer_than_the_context_are_said_once(capfd):
    with inline(quiet=False) as session, rp.RoundPipe(tiny("llama"), num_microbatches=1, session=session) as pipe:
        pipe.generate([5] * 60, max_new_tokens=4)
        row = torch.full((1, 80), 5)
        pipe.forward({"input_ids": row, "position_ids": torch.arange(80)[None] % 40})  # two examples in a row
        assert "context" not in capfd.readouterr().err
        pipe.generate([5] * 60, max_new_tokens=8)
        pipe.forward({"input_ids": row})
        assert capfd.readouterr().err.count("rows longer than the model's context of 64 tokens") == 1


IDS = batch()["input_ids"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"input_ids": IDS + 61}, r"input_ids holds 12\d, but the model's tokens are 0 to 63: are tokenizer and"),
        ({"input_ids": IDS - 70}, r"input_ids holds -\d+, but the model's tokens"),
        ({"input_ids": IDS.float()}, r"whole numbers \[B, S\], not torch\.float32"),
        ({"input_ids": IDS[0], "labels": IDS[0]}, r"\[B, S\], not torch\.int64 \[5\]: for one row, ids\[None\]"),
        ({"labels": IDS + 61}, r"labels holds 12\d, but the model's tokens are 0 to 63 or -100"),
        ({"labels": IDS - 103}, r"labels holds -\d\d, but the model's tokens"),
        (
            {"labels": IDS[:, :5]},
            r"labels is \[2, 5\], but input_ids is \[2, 10\]: labels are the input ids, not shifted",
        ),
        ({"attention_mask": IDS[:, :5]}, r"attention_mask is \[2, 5\], but input_ids is \[2, 10\]"),
    ],
)
@pytest.mark.parametrize("loss", [None, rp.losses.causal_lm_chunked])
def test_batches_that_no_model_takes_are_refused_before_they_travel(change, message, loss):
    model = tiny("llama")
    inputs = {"input_ids": IDS, "labels": IDS.masked_fill(IDS == 5, -100), **change}
    with (
        inline() as session,
        rp.RoundPipe(model, sgd(model), loss_fn=loss, num_microbatches=2, session=session) as pipe,
    ):
        for call in (pipe.forward_backward, lambda each: pipe.evaluate([each])):
            with pytest.raises(rp.ConfigError, match=message) as caught:
                call(inputs)
            assert not hasattr(caught.value, "rp_context")


def test_labels_of_another_loss_are_the_users_own():
    model = tiny("llama")

    def classes(output, labels):
        return torch.nn.functional.cross_entropy(getattr(output, "logits", output)[:, -1, :3], labels)

    with inline() as session, rp.RoundPipe(model, sgd(model), loss_fn=classes, session=session) as pipe:
        assert float(pipe.forward_backward({"input_ids": IDS}, torch.tensor([0, 1, 2, 0]))) > 0


# --- refusals


def refused(model: Any, match: str, **more: Any) -> None:
    with inline() as session, pytest.raises(rp.ConfigError, match=match):
        rp.RoundPipe(model, session=session, **more)


def test_what_cannot_be_cut_is_refused_by_name():
    refused(transformers.LlamaModel(tiny("llama").config), "has no head")
    refused(nn.Linear(2, 2), r"pip install 'rpruntime\[hf\]'")
    moe = tiny("qwen3-moe")
    moe.config.output_router_logits = True
    refused(moe, "output_router_logits = False")
    hooked = tiny("llama")
    hooked.model.register_forward_hook(Noting("x", pick_output), with_kwargs=True)
    refused(hooked, "hooks on its base model")
    refused(tiny("gemma2"), "causal_lm", loss_fn=rp.losses.causal_lm_chunked)
    config = transformers.T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    refused(transformers.T5ForConditionalGeneration(config), "decoder-only")


def test_a_model_whose_parts_do_not_make_up_its_forward_is_refused():
    class Odd(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, **kwargs):
            output = super().forward(input_ids=input_ids, **kwargs)
            if input_ids is not None:
                output.logits = output.logits + 1.0
            return output

    refused(Odd(tiny("llama").config), "other logits than its own forward")

    class Skipping(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.norm = None

    refused(Skipping(tiny("llama").config), "no final norm")


@pytest.mark.parametrize("name", ["use_cache", "output_hidden_states", "output_router_logits"])
def test_outputs_other_than_logits_are_refused(name):
    model = tiny("llama")
    with inline() as session, rp.RoundPipe(model, num_microbatches=1, session=session) as pipe:
        with pytest.raises(rp.ConfigError, match=name):
            pipe.forward({"input_ids": batch()["input_ids"], name: True})


def test_importing_and_training_a_sequential_needs_no_transformers():
    code = """
import sys, torch, rpruntime as rp
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "peft"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
rp.init(devices="inline", quiet=True)
model = torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.Linear(8, 5))
with rp.RoundPipe(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=rp.losses.causal_lm) as pipe:
    ids = torch.randint(5, (4, 6))
    pipe.forward_backward(ids, ids).item()
    pipe.step()
    assert pipe.generate(ids[:, :2], max_new_tokens=2).shape == (4, 4)
assert "transformers" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
