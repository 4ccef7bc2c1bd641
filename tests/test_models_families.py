"""Every family of causal LMs: loss, logits and gradients are the original's.   pytest tests/test_models_families.py

Runs with the installed transformers; `tests/test_models_versions.py` runs it with another one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rpruntime as rp
from tests.reference import inline
from tests.tiny_models import FAMILIES, OTHERS, VERSION, batch, reference, tiny

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def check(
    model: nn.Module, inputs: dict[str, torch.Tensor], *, counts: tuple[int, ...] = (1, 2, 4), **more: Any
) -> None:
    """Loss, gradients and logits of a pipe of `model`, cut into so many micro-batches, are the model's own."""
    before = model.config.to_dict()
    loss, logits, gradients = reference(model, inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted = inputs["attention_mask"].bool()
    for count in counts:
        with (
            inline() as session,
            rp.RoundPipe(model, optimizer, num_microbatches=count, session=session, **more) as pipe,
        ):
            close(float(pipe.forward_backward(inputs)), loss)
            got = pipe.gradients()
            assert got.keys() == gradients.keys()
            for name, gradient in gradients.items():
                close(got[name], gradient)
            output = pipe.forward({name: value for name, value in inputs.items() if name != "labels"})
            close(output[counted], logits[counted])
    assert model.config.to_dict() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_with_a_preset_gives_the_numbers_of_the_original(family):
    check(tiny(family), batch())


@pytest.mark.parametrize("family", OTHERS)
def test_a_model_without_a_preset_is_found_and_gives_the_numbers_of_the_original(family):
    check(tiny(family), batch(), counts=(2,))


def test_without_mask_and_positions_as_the_original():
    inputs = batch()
    model = tiny("gemma3")
    loss, logits, _ = reference(model, {"input_ids": inputs["input_ids"], "labels": inputs["labels"]})
    with inline() as session, rp.RoundPipe(model, num_microbatches=2, session=session) as pipe:
        close(pipe.forward({"input_ids": inputs["input_ids"]}), logits)
        close(pipe.forward(inputs["input_ids"]), logits)
        result = pipe.evaluate([{"input_ids": inputs["input_ids"], "labels": inputs["labels"]}])
    close(result.loss, loss)
    assert result.num_items == (inputs["labels"][:, 1:] != -100).sum()


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("rope", ["dynamic", "longrope", "yarn"])
def test_scaled_rotary_tables_are_each_micro_batch_own(rope, used_before):
    """Lengths beyond the original one, then short ones: a table that grew before is not used."""
    settings: dict[str, Any] = {"rope_type": rope, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    settings |= {"factor": 4.0}
    family, more = "llama", {}
    if rope == "longrope":
        family, more = "phi3", {"original_max_position_embeddings": 16}
        factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
        settings = {**settings, **factors} if VERSION >= 5 else {"type": rope, **factors}
    more["rope_parameters" if VERSION >= 5 else "rope_scaling"] = settings
    model = tiny(family, max_position_embeddings=16 if rope == "dynamic" else 64, **more)
    long, short = batch(length=40), batch(length=12)
    for key in ("attention_mask", "position_ids"):
        del long[key], short[key]
    wanted = [reference(copy.deepcopy(model), inputs) for inputs in (short, long)]
    if used_before:
        reference(model, long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        inline() as session,
        rp.RoundPipe(model, optimizer, num_microbatches=2, dtype=torch.float32, session=session) as pipe,
    ):
        for inputs, (loss, _, gradients) in [(long, wanted[1]), (short, wanted[0])]:
            close(float(pipe.forward_backward(inputs)), loss)
            for name, gradient in pipe.gradients().items():
                close(gradient, gradients[name])
            pipe.zero_grad()
