"""The moving average of trainable weights against its closed form."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from infra.compute.average import WeightAverage
from infra.errors import CheckFailed


class Half(nn.Module):
    """A trainable half-precision weight beside a frozen one."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self) -> torch.Tensor:
        return self.weight.float().sum()


def put(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.fill_(value)


@pytest.mark.parametrize("warm_up", [False, True])
def test_the_average_is_the_closed_form(warm_up: bool) -> None:
    model = nn.Linear(2, 1).double()
    put(model, 1.0)
    average = WeightAverage(model, 0.5, warm_up)
    expected = 1.0
    for n, value in enumerate([2.0, -3.0, 8.0, 0.5, 4.0, 4.0, 7.0, 1.0, 9.0]):
        put(model, value)
        average.update()
        decay = min(0.5, (1 + n) / (10 + n)) if warm_up else 0.5
        expected = decay * expected + (1 - decay) * value
    with average.applied():
        assert model.weight.tolist() == [[pytest.approx(expected, abs=1e-12)] * 2]
        assert model.bias.tolist() == [pytest.approx(expected, abs=1e-12)]


def test_small_steps_of_a_half_precision_weight_add_up_in_float32() -> None:
    model = Half(1.0)
    average = WeightAverage(model, 0.999)
    put(model, 2.0)
    for _ in range(1000):
        average.update()
    state = average.state_dict()
    assert set(state["average"]) == {"weight"}, "frozen weights are not copied"
    assert state["average"]["weight"].dtype == torch.float32
    assert state["average"]["weight"].tolist() == [pytest.approx(2 - 0.999**1000, abs=1e-5)] * 3
    with average.applied():
        assert model.weight.tolist() == [pytest.approx(2 - 0.999**1000, rel=2**-8)] * 3


def test_live_weights_come_back_bit_for_bit_also_after_an_error() -> None:
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    average = WeightAverage(model, 0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 7)).pow(2).sum().backward()
        optimizer.step()
        average.update()
    live = {name: weight.clone() for name, weight in model.state_dict().items()}

    def evaluate() -> None:
        with average.applied():
            assert not torch.equal(model.weight, live["weight"])
            raise RuntimeError("evaluation broke")

    with pytest.raises(RuntimeError, match="evaluation broke"):
        evaluate()
    assert all(torch.equal(weight, live[name]) for name, weight in model.state_dict().items())
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_tied_weights_stay_tied_and_are_averaged_once() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    put(model, 1.0)
    average = WeightAverage(model, 0.5)
    put(model, 3.0)
    average.update()
    with average.applied():
        assert model[1].weight is model[0].weight
        assert bool((model[1].weight == 2.0).all())


def test_a_resumed_average_goes_on_bit_for_bit() -> None:
    def run(steps: range, model: nn.Linear, average: WeightAverage) -> None:
        for step in steps:
            put(model, float(step) / 3)
            average.update()

    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.99, warm_up=True)
    run(range(5), model, average)
    file = io.BytesIO()
    torch.save(average.state_dict(), file)
    file.seek(0)
    other = nn.Linear(3, 2)
    resumed = WeightAverage(other, 0.99, warm_up=True)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    run(range(5, 9), model, average)
    run(range(5, 9), other, resumed)
    for name, tensor in average.state_dict()["average"].items():
        assert torch.equal(tensor, resumed.state_dict()["average"][name])
    assert resumed.updates == 9


def test_another_models_state_is_refused() -> None:
    average = WeightAverage(nn.Linear(3, 2), 0.9)
    before = average.state_dict()["average"]["weight"].clone()
    with pytest.raises(CheckFailed, match="bias"):
        average.load_state_dict(WeightAverage(nn.Linear(3, 2, bias=False), 0.9).state_dict())
    with pytest.raises(CheckFailed, match=r"\(2, 4\) for weight, the model has \(2, 3\)"):
        average.load_state_dict(WeightAverage(nn.Linear(4, 2), 0.9).state_dict())
    assert torch.equal(average.state_dict()["average"]["weight"], before)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        WeightAverage(nn.Linear(1, 1), decay)
