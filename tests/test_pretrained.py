"""Models of transformers read into slabs, trained there, and saved: `rp.from_pretrained`, `pipe.save_pretrained`."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

import rpruntime as rp
from rpruntime.client import client_of
from rpruntime.models import pretrained, saving, shards
from rpruntime.models.pretrained import move_into_slabs
from tests.reference import inline, one_thread
from tests.test_models_versions import FOLDER
from tests.test_processes import SCRIPTS, inline_result, result_of, run_script
from tests.tiny_models import FAMILIES, batch, tiny

ROOT = Path(__file__).resolve().parent.parent
STEPS = 3


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    with one_thread():
        yield


@pytest.fixture
def session() -> Iterator[Any]:
    with inline(quiet=True) as session:
        yield session


def saved(folder: Path, family: str, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    tiny(family).to(dtype).save_pretrained(folder, **more)
    return folder


def plain(folder: Path, **more: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "auto", **more})


def assert_equal_models(first: Any, second: Any) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name
    for (name, value), (_, other) in zip(first.named_buffers(), second.named_buffers(), strict=True):
        assert torch.equal(value, other), name
    ties = [[len({id(p) for _, p in m.named_parameters(remove_duplicate=False)})] for m in (first, second)]
    assert ties[0] == ties[1]


def trained(model: nn.Module, session: Any, steps: int = STEPS, **settings: Any) -> tuple[rp.RoundPipe, list[float]]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    pipe = rp.RoundPipe(model.train(), optimizer, num_microbatches=2, seed=1, session=session, **settings)
    losses = []
    for step in range(steps):
        losses.append(float(pipe.forward_backward(batch(seed=step))))
        pipe.step()
    return pipe, losses


def lent(pipe: rp.RoundPipe) -> list[bool]:
    return [extent is not None for extent in pipe._model.loan.extents]


# --- loading


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "gpt-neox", "mixtral"])
def test_the_model_is_that_of_transformers_and_the_pipe_copies_nothing(family, tmp_path, session):
    saved(tmp_path, family, max_shard_size="30KB")
    ours, theirs = rp.from_pretrained(tmp_path, session=session), plain(tmp_path)
    assert type(ours) is type(theirs) and not ours.training
    assert_equal_models(ours, theirs)
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    with torch.no_grad():
        assert torch.equal(ours(**inputs).logits, theirs(**inputs).logits)
    with rp.RoundPipe(ours, session=session) as pipe:
        assert all(lent(pipe))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [None, torch.float32, torch.bfloat16])
def test_dtype_is_the_checkpoints_or_the_one_asked_for(stored, wanted, tmp_path, session):
    saved(tmp_path, "llama", stored)
    ours = rp.from_pretrained(tmp_path, dtype=wanted, session=session)
    assert_equal_models(ours, plain(tmp_path, dtype=wanted or "auto"))
    assert {p.dtype for p in ours.parameters()} == {wanted or stored}


def test_training_in_slabs_gives_the_numbers_of_training_in_copies(tmp_path, session):
    saved(tmp_path, "qwen3-mixed-tied")
    pipe, losses = trained(plain(tmp_path), session)
    pipe.close()
    other, again = trained(rp.from_pretrained(tmp_path, session=session), session)
    assert all(lent(other))
    assert losses == again
    other.close()
    assert_equal_models(pipe.model, other.model)


def test_first_versions_are_used_again_and_nothing_is_left(tmp_path, session):
    saved(tmp_path, "llama")
    client = client_of(session)
    optimizer = session._optimizer[1]._arena
    model = rp.from_pretrained(tmp_path, session=session)
    weights = client.slabs.live_bytes
    before = optimizer.total_bytes
    pipe, _ = trained(model, session, steps=4)
    spare = optimizer.total_bytes - before
    pipe.close()
    assert client.slabs.live_bytes == 0, "the optimizer has the slabs of trained weights"
    assert client.arena.live_bytes == optimizer.live_bytes == 0
    assert weights <= spare  # they count there since the first step
    values = [p.clone() for p in model.parameters()]
    pipe, _ = trained(plain(tmp_path), session, steps=2)  # writes over what was freed
    pipe.close()
    assert all(torch.equal(value, p) for value, p in zip(values, model.parameters(), strict=True))


def test_a_pipe_that_made_no_step_leaves_the_weights_in_their_slabs(tmp_path, session):
    saved(tmp_path, "llama")
    model = rp.from_pretrained(tmp_path, session=session)
    for _ in range(2):
        with rp.RoundPipe(model, session=session) as pipe:
            assert all(lent(pipe))
            pipe.forward({"input_ids": batch()["input_ids"]})
    assert_equal_models(model, plain(tmp_path))
    assert client_of(session).arena.live_bytes == 0


def test_another_dtype_is_copied_and_the_slabs_go(tmp_path, session):
    saved(tmp_path, "llama")
    model = rp.from_pretrained(tmp_path, session=session)
    client = client_of(session)
    assert client.slabs.live_bytes > 0
    pipe, _ = trained(model, session, steps=1, dtype=torch.bfloat16)
    assert not any(lent(pipe)) and client.slabs.live_bytes == 0
    pipe.close()


def test_a_layer_that_is_partly_frozen_is_copied_alone(tmp_path, session):
    saved(tmp_path, "llama")
    model = rp.from_pretrained(tmp_path, session=session)
    model.model.layers[1].self_attn.q_proj.weight.requires_grad = True
    model.model.layers[1].mlp.up_proj.weight.requires_grad = False
    pipe, losses = trained(model, session)
    where = [unit.positions[0] for unit, there in zip(pipe._model.layout.units, lent(pipe), strict=True) if not there]
    assert set(where) == {2}
    pipe.close()
    other = plain(tmp_path)
    other.model.layers[1].mlp.up_proj.weight.requires_grad = False
    pipe, again = trained(other, session)
    assert losses == again
    pipe.close()


def test_a_failed_load_leaves_the_weights_where_they_were(tmp_path, session, monkeypatch):
    saved(tmp_path, "llama")
    model = rp.from_pretrained(tmp_path, session=session)

    def fail(*_: Any) -> None:
        raise RuntimeError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("rpruntime.loading.Loader._write", fail)
        with pytest.raises(RuntimeError, match="no room"):
            rp.RoundPipe(model, session=session)
    assert_equal_models(model, plain(tmp_path))
    with rp.RoundPipe(model, session=session) as pipe:
        assert all(lent(pipe))


def test_slabs_of_a_model_that_is_gone_are_given_back_and_their_views_stay(tmp_path, session):
    saved(tmp_path, "llama")
    model = rp.from_pretrained(tmp_path, session=session)
    kept = model.lm_head.weight
    value = kept.clone()
    del model
    gc.collect()
    slabs = client_of(session).slabs
    assert slabs.live_bytes == 0
    slabs.make(1 << 20).memory.fill_(7)
    assert torch.equal(kept, value)


def test_parameters_stay_readable_after_the_session(tmp_path):
    saved(tmp_path, "llama")
    with inline(quiet=True) as session:
        model = rp.from_pretrained(tmp_path, session=session)
    gc.collect()
    assert_equal_models(model, plain(tmp_path))


def test_any_model_can_move_into_slabs(session):
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 4))
    before = [p.clone() for p in model.parameters()]
    steps: list[tuple[int, int]] = []
    move_into_slabs(client_of(session), model, list(model.named_children()), lambda *row: steps.append(row))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert steps[-1][0] == steps[-1][1] == sum(p.nbytes for p in before)


def test_a_checkpoint_whose_tied_weights_differ_is_left_to_transformers(tmp_path, session):
    model = saved(tmp_path, "llama") and plain(tmp_path)
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path)
    assert_equal_models(rp.from_pretrained(tmp_path, session=session), plain(tmp_path))


# --- refusals


def test_what_cannot_be_trained_is_refused(tmp_path, session):
    saved(tmp_path, "llama")
    for name, value in (("device_map", "auto"), ("load_in_8bit", True), ("quantization_config", {"bits": 4})):
        with pytest.raises(rp.ConfigError, match=name):
            rp.from_pretrained(tmp_path, session=session, **{name: value})
    with pytest.raises(rp.ConfigError, match="no_such_thing"):
        rp.from_pretrained(tmp_path, session=session, no_such_thing=1)
    with pytest.raises(rp.ConfigError, match="dtype"):
        rp.from_pretrained(tmp_path, session=session, dtype="int8")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(rp.ConfigError, match="quantised"):
        rp.from_pretrained(tmp_path, session=session)


def test_a_cut_file_and_a_missing_one_are_named_and_leave_no_slab(tmp_path, session):
    saved(tmp_path, "llama", max_shard_size="30KB")
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = last.read_bytes()
    last.write_bytes(content[:-100])
    with pytest.raises(rp.ConfigError, match=rf"{last.name} is cut"):
        rp.from_pretrained(tmp_path, session=session)
    last.write_bytes(content[:30])
    with pytest.raises(rp.ConfigError, match=rf"{last.name} is no safetensors"):
        rp.from_pretrained(tmp_path, session=session)
    last.unlink()
    with pytest.raises(rp.ConfigError, match=rf"{last.name} is missing"):
        rp.from_pretrained(tmp_path, session=session)
    assert client_of(session).slabs.live_bytes == 0


def test_an_unknown_dtype_in_a_file_is_refused(tmp_path):
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(rp.ConfigError, match=r"w in .* is F8_E4M3"):
        shards.entries_of(tmp_path)


def test_without_the_extra_the_error_names_it():
    with pytest.raises(rp.ConfigError, match=r"rpruntime\[hf\]"):
        pretrained.require("no_such_package_here")


# --- saving


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_trained_model_loads_back_equal(family, tmp_path, session):
    saved(tmp_path / "in", family)
    pipe, _ = trained(rp.from_pretrained(tmp_path / "in", session=session), session, steps=1)
    pipe.save_pretrained(tmp_path / "out")
    assert_equal_models(pipe.model, plain(tmp_path / "out"))
    again = rp.from_pretrained(tmp_path / "out", session=session)
    assert_equal_models(pipe.model, again)
    names = [set(shards.entries_of(tmp_path / part) or ()) for part in ("in", "out")]
    assert names[0] == names[1], "the same names as transformers writes"
    pipe.close()


def test_shards_dtype_and_other_files(tmp_path, session):
    model = plain(saved(tmp_path / "in", "llama-tied"))
    out = tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("{}")
    (out / "model-00001-of-00002.safetensors").write_text("of an older model")
    saving.save(model, out, dtype=torch.bfloat16, max_shard_bytes=20_000)
    loaded = plain(out)
    assert loaded.dtype == torch.bfloat16 and loaded.config.tie_word_embeddings
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    assert_equal_models(loaded, model)
    files = sorted(path.name for path in out.iterdir())
    weights = [name for name in files if name.startswith("model-")]
    assert "tokenizer.json" in files and "model-00001-of-00002.safetensors" not in files
    assert "generation_config.json" in files and len(weights) > 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_failed_save_leaves_the_old_folder(tmp_path, monkeypatch):
    model = plain(saved(tmp_path / "in", "llama"))
    out = saved(tmp_path / "out", "llama")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(saving.shards, "_write_file", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        saving.save(model, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_only_models_of_transformers_are_saved_so(tmp_path, session):
    model = nn.Sequential(nn.Linear(4, 4))
    with rp.RoundPipe(model, loss_fn=nn.functional.mse_loss, session=session) as pipe:
        with pytest.raises(rp.ConfigError, match=r"torch\.save"):
            pipe.save_pretrained(tmp_path / "out")
    with pytest.raises(rp.ConfigError, match="no adapters"):
        saving.save(tiny("llama"), tmp_path / "out", merge_adapters=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(rp.ConfigError, match="is a file"):
        saving.save(tiny("llama"), tmp_path / "file")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not (FOLDER / "transformers").is_dir(), reason=f"no transformers 4 in {FOLDER}")
def test_all_of_this_with_transformers_4():
    code = (
        "import sys, pytest, transformers; assert transformers.__version__.startswith('4.'), transformers.__file__; "
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'not slow', *sys.argv[1:]]))"
    )
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)])}
    command = [sys.executable, "-c", code, "tests/test_pretrained.py", "tests/test_lora.py"]
    found = subprocess.run(command, env=path, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stdout[-5000:]


# --- real processes, memory


@pytest.fixture(scope="module")
def in_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What lora_in_processes.py tells of a run with two workers."""
    folder = tmp_path_factory.mktemp("big")
    more = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 32000, "num_hidden_layers": 8}
    config = transformers.LlamaConfig(**more, num_attention_heads=8, num_key_value_heads=4)
    big = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    size = sum(p.nbytes for p in big.parameters())
    big.save_pretrained(folder, max_shard_size="30MB")
    del big
    run = run_script(SCRIPTS / "lora_in_processes.py", "--devices", "cpu:2", SCRIPT_FOLDER=str(folder))
    return {**result_of(run), "size": size, "stderr": run.stderr}


def test_real_processes_share_the_frozen_base_and_peak_memory_is_the_store(in_processes):
    found, size = in_processes, in_processes["size"]
    assert found["slab_bytes"] >= size > 100e6
    assert found["peak_bytes"] < size + shards.WINDOW_BYTES + (24 << 20), found
    assert found["private_bytes"] < 16 << 20, found
    assert found["lent"] and found["losses"][-1] < found["losses"][0]
    assert found["optimizer_bytes"] < 24 << 20, "no copy of the base"
    assert found["base_unchanged"] and found["moved"]
    assert "weights  " in found["stderr"]


def test_two_workers_train_and_generate_as_inline(in_processes):
    assert in_processes["causal_lm"] == inline_result(SCRIPTS / "train_causal_lm.py")
