"""Grain "layer" keeps each layer's input as it was, also where the layer changes it in place."""

from __future__ import annotations

import torch
from torch import nn

import rpruntime as rp
from rpruntime.inline import InlineSession


class Spoils(nn.Module):
    def forward(self, x):
        y = (x * 3.0).sin()
        x.add_(1.0)
        return y


def gradients(recompute: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Spoils(), nn.Linear(4, 4), Spoils(), nn.Linear(4, 1))
    session = InlineSession({"quiet": True})
    plan = rp.ExecutionPlan([range(0, 1)], [range(1, 5), range(0, 1)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.mse_loss
    options = {"num_microbatches": 2, "plan": plan, "recompute": recompute, "session": session}
    with rp.RoundPipe(model, optimizer, loss_fn=loss, **options) as pipe:
        pipe.forward_backward(torch.randn(4, 4), torch.randn(4, 1))
        found = pipe.gradients()
        pipe.zero_grad()
    session.close()
    return found


def test_a_layer_that_changes_its_input_in_place_is_recomputed_from_the_original():
    by_stage, by_layer = gradients("stage"), gradients("layer")
    assert by_stage.keys() == by_layer.keys() and len(by_stage) == 6
    assert all(torch.equal(by_stage[name], by_layer[name]) for name in by_stage)
