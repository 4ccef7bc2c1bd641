"""Adapters of peft on a causal LM: only they have gradients, state and downloads; the frozen base is never copied."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import rpruntime as rp
from rpruntime.client import client_of
from rpruntime.models import saving
from rpruntime.store.allocator import align
from rpruntime.store.layout import gradient_layout, optimizer_layout
from rpruntime.store.relocate import extents_in
from rpruntime.wire.messages import SlabReadyMsg
from tests.reference import inline, one_thread
from tests.tiny_models import batch, tiny

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIGS: dict[str, tuple[str, Any]] = {
    "all-linear": ("llama", LoraConfig(r=4, target_modules="all-linear")),
    "attention": ("qwen3-mixed-tied", LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_rslora=True)),
    "dora": ("qwen2", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=True)),
    "embedding": ("llama", LoraConfig(r=2, target_modules=["embed_tokens", "lm_head", "o_proj"])),
    "tied-embedding": ("gemma3", LoraConfig(r=2, target_modules=["embed_tokens", "o_proj"])),
    "whole-head": ("llama", LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])),
    "biases": ("llama", LoraConfig(r=2, target_modules=["q_proj", "k_proj"], bias="lora_only")),
    "tokens": ("llama", LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 5, 7])),
    "ranks": ("llama", LoraConfig(r=2, target_modules=["q_proj", "up_proj"], rank_pattern={"q_proj": 6})),
    "experts": ("qwen3-moe", LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS)),
    "loha": ("llama", peft.LoHaConfig(r=2, target_modules=["q_proj", "down_proj"])),
    "ia3": ("llama", peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
}


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def _peft_warns() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="peft")
        warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, to peft
        yield


@pytest.fixture
def session() -> Iterator[Any]:
    with inline(quiet=True) as session:
        yield session


def saved(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    model = tiny(family)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    return folder


def adapted(model: Any, config: Any) -> Any:
    torch.manual_seed(2)
    return get_peft_model(model, config).train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def pair(folder: Path, name: str, session: Any, **settings: Any) -> tuple[Any, rp.RoundPipe]:
    """The same adapters on the model of transformers and on ours, this in a pipe."""
    family, config = CONFIGS[name]
    saved(folder, family)
    theirs = adapted(AutoModelForCausalLM.from_pretrained(folder), config)
    ours = adapted(rp.from_pretrained(folder, session=session), config)
    pipe = rp.RoundPipe(ours, optimizer_of(ours), num_microbatches=2, session=session, **settings)
    return theirs, pipe


def logits(model: nn.Module) -> Tensor:
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    model.eval()
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


# --- numbers, and what is saved


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_logits_and_saved_adapters_are_those_of_peft(name, tmp_path, session):
    theirs, pipe = pair(tmp_path / "base", name, session)
    optimizer = optimizer_of(theirs)
    for seed in range(2):
        loss = theirs(**batch(seed=seed), use_cache=False).loss
        loss.backward()
        assert float(pipe.forward_backward(batch(seed=seed))) == pytest.approx(loss.item(), rel=1e-6)
        optimizer.step()
        assert_close(pipe.gradients(), gradients_of(theirs))
        pipe.step()
    pipe.save_pretrained(tmp_path / "adapter")
    pipe.save_pretrained(tmp_path / "merged", merge_adapters=True)
    want = logits(pipe.model)
    torch.testing.assert_close(want, logits(theirs), rtol=1e-4, atol=1e-5)
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files and "model.safetensors" not in files
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(logits(again), want)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not any("lora" in name or "base_layer" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(logits(merged), want, rtol=1e-4, atol=2e-5)
    pipe.close()


@pytest.mark.parametrize("recompute", ["stage", "layer"])
def test_every_lora_b_moves_and_the_base_does_not(recompute, tmp_path, session):
    _, pipe = pair(tmp_path, "all-linear", session, recompute=recompute)
    base = {name: p.clone() for name, p in pipe.model.named_parameters() if not p.requires_grad}
    pipe.forward_backward(batch())
    pipe.step()
    pipe.synchronize()
    for name, parameter in pipe.model.named_parameters():
        if "lora_B" in name:
            assert parameter.norm() > 0, name
        elif name in base:
            assert torch.equal(parameter, base[name]), name
    pipe.close()


def test_gradients_equal_the_run_without_recompute(tmp_path, session):
    found = []
    layers = 5
    whole = rp.ExecutionPlan(forward=[], backward=[range(layers)])
    cut = rp.ExecutionPlan(
        forward=[range(2), range(2, 3)], backward=[range(3, layers), range(2, 3), range(1, 2), range(1)]
    )
    for plan in (whole, cut):
        _, pipe = pair(tmp_path, "all-linear", session, plan=plan)
        pipe.forward_backward(batch())
        found.append(pipe.gradients())
        pipe.close()
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


# --- what is not there


def test_frozen_weights_have_no_gradient_no_state_and_no_second_copy(tmp_path, session, monkeypatch):
    downloaded: list[int] = []
    shell = session._optimizer[1]
    take_in = shell.step

    def step(messages: list[Any]) -> bool:
        downloaded.extend(p.extent.nbytes for m in messages if isinstance(m, SlabReadyMsg) for p in m.parts)
        return take_in(messages)

    monkeypatch.setattr(shell, "step", step)
    _, pipe = pair(tmp_path, "all-linear", session)
    units = pipe._model.layout.units
    frozen = [unit for unit in units if not unit.trainable]
    names = {param.name for unit in units if unit.trainable for param in unit.params}
    assert names and all("lora_" in name for name in names)
    assert [extent is not None for extent in pipe._model.loan.extents] == [not unit.trainable for unit in units]
    arena = session._optimizer[1]._arena
    trainable_bytes = sum(unit.nbytes + optimizer_layout(unit)[1] for unit in units if unit.trainable)
    buffers = extents_in(shell._models[pipe._model.number].kept.buffers)  # rotary frequencies, for later controllers
    kept = sum(align(extent.nbytes) for extent in buffers)
    assert arena.live_bytes == trainable_bytes + kept
    for seed in range(3):
        pipe.forward_backward(batch(seed=seed))
        assert set(pipe.gradients()) == names
        pipe.step()
    pipe.synchronize()
    assert sum(downloaded) == 3 * sum(gradient_layout(unit)[1] for unit in units if unit.trainable)
    assert arena.live_bytes <= trainable_bytes + 4 * sum(optimizer_layout(u)[1] for u in units if u.trainable)
    assert client_of(session).slabs.live_bytes == sum(unit.nbytes for unit in frozen)
    state = pipe.optimizer.state_dict()["state"]
    assert len(state) == len(names)
    pipe.close()
    assert client_of(session).slabs.live_bytes == sum(unit.nbytes for unit in frozen)
    place = client_of(session).slabs
    assert all(place.slabs_of([p]) for p in pipe.model.parameters() if not p.requires_grad), "still in the slabs"


@pytest.mark.parametrize("which", [0, 2])
def test_only_the_first_or_the_last_block_is_trainable(which, tmp_path, session):
    theirs = tiny("llama").train()
    saved(tmp_path, "llama")
    ours = rp.from_pretrained(tmp_path, session=session).train()
    for model in (theirs, ours):
        model.requires_grad_(False)
        model.model.layers[which].requires_grad_(True)
    with rp.RoundPipe(ours, optimizer_of(ours), num_microbatches=2, session=session) as pipe:
        assert all(extent is not None for extent in pipe._model.loan.extents)
        theirs(**batch(), use_cache=False).loss.backward()
        pipe.forward_backward(batch())
        assert_close(pipe.gradients(), gradients_of(theirs))
        pipe.step()


def test_nothing_trainable_is_a_clear_error(tmp_path, session):
    saved(tmp_path, "llama")
    model = rp.from_pretrained(tmp_path, session=session)
    parameters = list(model.parameters())
    model.requires_grad_(False)
    with pytest.raises(rp.ConfigError, match="nothing to train"):
        rp.RoundPipe(model, torch.optim.AdamW(parameters), session=session)
    with rp.RoundPipe(model, session=session) as pipe:
        with pytest.raises(rp.ConfigError, match="no parameter requires a gradient"):
            pipe.forward_backward(batch())


def test_prompt_learning_is_refused(tmp_path, session):
    model = get_peft_model(tiny("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(rp.ConfigError, match="prompt learning"):
        rp.RoundPipe(model, session=session)


# --- dtypes


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_adapters_keep_their_dtype_when_the_base_has_another(dtype, tmp_path, session):
    saved(tmp_path, "llama", torch.bfloat16)
    model = adapted(rp.from_pretrained(tmp_path, session=session), CONFIGS["all-linear"][1])
    with rp.RoundPipe(model, optimizer_of(model), num_microbatches=2, dtype=dtype, session=session) as pipe:
        pipe.forward_backward(batch())
        pipe.step()
        pipe.synchronize()
        for name, parameter in model.named_parameters():
            assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name


def test_the_base_is_cast_and_the_adapters_are_not(tmp_path, session):
    saved(tmp_path, "llama", torch.bfloat16)
    model = adapted(rp.from_pretrained(tmp_path, session=session), CONFIGS["all-linear"][1])
    before = {name: p.clone() for name, p in model.named_parameters()}
    with rp.RoundPipe(model, optimizer_of(model), num_microbatches=2, dtype=torch.float32, session=session) as pipe:
        assert not any(extent is not None for extent in pipe._model.loan.extents)
        pipe.forward_backward(batch())
        pipe.step()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert "lora_" in name or torch.equal(parameter, before[name].float()), name


@pytest.mark.parametrize("name", ["attention", "whole-head", "tokens"])
def test_adapters_saved_in_another_dtype_are_those_cast(name, tmp_path, session, monkeypatch):
    _, pipe = pair(tmp_path / "base", name, session)
    files = ["adapter_model.safetensors"]
    model = pipe.model
    pipe.close()
    if name == "attention":
        model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"]))
        files.append("other/adapter_model.safetensors")
    base = {p.data_ptr() for n, p in model.named_parameters() if ".base_layer." in n}
    to = Tensor.to

    def watched(tensor: Tensor, *rest: Any, **more: Any) -> Tensor:
        assert tensor.data_ptr() not in base, "a weight of the base is cast"
        return to(tensor, *rest, **more)

    monkeypatch.setattr(Tensor, "to", watched)
    saving.save(model, tmp_path / "cast", dtype=torch.bfloat16)
    saving.save(model, tmp_path / "plain")
    for file in files:
        cast, plain = (safetensors.torch.load_file(tmp_path / folder / file) for folder in ("cast", "plain"))
        assert cast.keys() == plain.keys() and cast
        for key, value in plain.items():
            assert torch.equal(cast[key], value.bfloat16() if value.is_floating_point() else value), key
    assert not list((tmp_path / "cast").rglob(".*"))


def test_saved_in_another_dtype(tmp_path, session):
    _, pipe = pair(tmp_path / "base", "attention", session)
    pipe.save_pretrained(tmp_path / "adapter", dtype=torch.bfloat16)
    pipe.save_pretrained(tmp_path / "merged", dtype=torch.bfloat16, merge_adapters=True)
    from rpruntime.models.shards import _read_header

    entries = _read_header(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {entry.dtype for entry in entries.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").dtype == torch.bfloat16
    pipe.close()


def test_a_full_model_in_an_adapters_place_is_loaded_without_it(tmp_path, session):
    _, pipe = pair(tmp_path / "base", "attention", session)
    out = tmp_path / "out"
    pipe.save_pretrained(out)
    pipe.save_pretrained(out, merge_adapters=True)
    assert not list(out.glob("adapter_*"))
    pipe.save_pretrained(out)
    assert (out / "model.safetensors").exists() and (out / "adapter_config.json").exists()
    pipe.close()
