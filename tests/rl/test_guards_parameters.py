"""Parameters that never move are found and named."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from infra.errors import CheckFailed
from rl.guards import GuardConfig, GuardPanel, raise_on_stop
from rl.guards.parameters import ParameterWatch, checksum


class Model(nn.Module):
    """Attention that learns beside experts and sinks that may not."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.experts = nn.Parameter(torch.ones(3, 4, 4))
        self.sinks = nn.Parameter(torch.full((2,), 0.7))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def healthy(model: Model, x: Tensor) -> Tensor:
    hidden = model.attention(x) + torch.einsum("bi,eij->bj", x, model.experts)
    return hidden + model.sinks[0] - model.sinks[1]


def experts_without_gradient(model: Model, x: Tensor) -> Tensor:
    return model.attention(x) + torch.einsum("bi,eij->bj", x, model.experts.detach()) + model.sinks.sum()


def sinks_dropped(model: Model, x: Tensor) -> Tensor:
    return model.attention(x) + torch.einsum("bi,eij->bj", x, model.experts) + 0 * model.sinks.sum()


def train(
    forward: Callable[[Model, Tensor], Tensor],
    updates: int = 10,
    learning_rate: float = 1e-3,
    dtype: torch.dtype = torch.float32,
    weight_decay: float = 0.0,
) -> dict[str, bool]:
    """Names of what did not move."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    watch = ParameterWatch(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
    for _ in range(updates):
        optimizer.zero_grad()
        loss = forward(model, torch.randn(8, 4, dtype=dtype)).float().pow(2).mean()
        torch.autograd.backward(loss)
        watch.look()
        optimizer.step()
    return watch.unmoved()


def test_all_that_learns_is_moved():
    assert train(healthy) == {}
    assert train(healthy, updates=1) == {}, "equal sinks that move by +lr and -lr have moved"


def test_experts_that_get_no_gradient_are_named():
    """SFT-16: the loss goes down because the attention learns."""
    assert train(experts_without_gradient) == {"experts": False}


def test_dropped_sinks_are_named_though_weight_decay_moves_them():
    assert train(sinks_dropped) == {"sinks": False}
    assert train(sinks_dropped, weight_decay=0.1) == {"sinks": False}


def test_updates_below_the_precision_are_named():
    """RO-07's cousin: gradients arrive, the weights stay."""
    stuck = train(healthy, learning_rate=1e-7, dtype=torch.bfloat16)
    assert stuck["experts"]
    assert stuck["sinks"]
    assert "frozen" not in stuck


def test_the_preflight_lists_what_the_first_backward_left_out():
    model = Model()
    watch = ParameterWatch(model.named_parameters())
    torch.autograd.backward(experts_without_gradient(model, torch.randn(8, 4)).pow(2).mean())
    watch.look()
    assert watch.without_gradient == ("experts",)


def test_the_panel_looks_once_and_stops():
    panel = GuardPanel(GuardConfig())
    assert not panel.parameters_due(9)
    assert panel.parameters_due(10)
    found = panel.observe_parameters(4, 10, {"a.experts": False, "b.sinks": True})
    with pytest.raises(
        CheckFailed, match=r"1 got no gradient \(a.experts\); 1 got gradient and kept their value"
    ) as error:
        raise_on_stop(found)
    assert "may_stay" in error.value.fix
    assert "float32 master weights" in error.value.fix
    assert not panel.parameters_due(1000)


def test_parameters_that_may_stay():
    config = GuardConfig.model_validate({"parameters": {"may_stay": ["*.sinks"], "action": "warn"}})
    assert GuardPanel(config).observe_parameters(4, 10, {"b.sinks": True}) == ()
    (alarm,) = GuardPanel(config).observe_parameters(4, 10, {f"{i}.experts": False for i in range(9)})
    assert alarm.action == "warn"
    assert "9 got no gradient (0.experts, 1.experts, 2.experts, 3.experts, 4.experts, …)" in alarm.what
    off = GuardPanel(GuardConfig.model_validate({"parameters": {"action": "off"}}))
    assert not off.parameters_due(10**6)


def test_a_resumed_watch_remembers_the_beginning():
    model = Model()
    before = ParameterWatch(model.named_parameters())
    torch.autograd.backward(healthy(model, torch.randn(8, 4)).pow(2).mean())
    before.look()
    state = json.loads(json.dumps(before.state_dict()))
    with torch.no_grad():
        model.experts += 1
    resumed = ParameterWatch(model.named_parameters())
    resumed.load_state_dict(state)
    assert resumed.unmoved() == before.unmoved()
    assert "experts" not in resumed.unmoved()


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(())])
def test_checksums_see_every_bit(tensor: Tensor):
    changed = tensor.clone()
    changed.view(-1)[-1] = -0.0
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor) != checksum(changed)


def test_checksums_follow_the_elements_not_the_memory():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert checksum(tensor.T) == checksum(tensor.T.contiguous())
    assert checksum(tensor.T) != checksum(tensor)
    assert checksum(torch.zeros(0)) == 0
