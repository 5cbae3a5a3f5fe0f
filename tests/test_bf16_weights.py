"""Full training without copies of the weights in fp32: the update against one in fp64, resume,
ranks, and what a plan says of it.
"""

import pytest
import torch
from torch import Tensor, nn

from farthing.errors import InputError
from farthing.model.hardware import Numerics
from farthing.model.precision import precision_of
from farthing.train import bf16_adamw
from farthing.train.optim import load_state, state_bytes, state_tensors
from scarce import optimizer_of
from workshop import losses_of, make_job, train

NAME = "adamw_bf16_stochastic_round"


def a_matrix(n: int = 64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(n, n).to(torch.bfloat16)


def gradient(weight: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(weight.shape, generator=generator).to(torch.bfloat16)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, drawn=gradient):
    for step in numbers:
        for weight in model.parameters():
            weight.grad = drawn(weight, step)
        torch.manual_seed(step)
        optimizer.step()


def adamw_in_fp64(weight: Tensor, moments: tuple[Tensor, Tensor], grad: Tensor, n: int) -> Tensor:
    """One update of Loshchilov and Hutter (arXiv 1711.05101), algorithm 2."""
    rate, decay, (b1, b2) = 0.01, 0.1, (0.9, 0.99)
    first = b1 * moments[0] + (1 - b1) * grad
    second = b2 * moments[1] + (1 - b2) * grad**2
    step = (first / (1 - b1**n)) / ((second / (1 - b2**n)).sqrt() + 1e-8)
    return weight - rate * decay * weight - rate * step


@pytest.mark.parametrize("bucket", [1 << 24, 1000, 7])
def test_each_update_is_that_of_fp64_rounded_up_or_down(bucket, monkeypatch):
    monkeypatch.setattr(bf16_adamw, "BUCKET", bucket)
    model = a_matrix(24)
    optimizer = optimizer_of(model, NAME)
    steps(model, optimizer, range(3))
    weight = model.weight
    before = weight.detach().double()
    state = optimizer.state[weight]
    wanted = adamw_in_fp64(
        before,
        (state["exp_avg"].double(), state["exp_avg_sq"].double()),
        gradient(weight, 3).double(),
        4,
    )
    steps(model, optimizer, range(3, 4))
    got = weight.detach().double()
    ulp = torch.exp2(torch.floor(torch.log2(wanted.abs()))) / 128
    assert weight.dtype == state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert ((got - wanted).abs() <= 1.001 * ulp).all()
    assert (got != before).any()
    assert float(state["step"]) == 4


def test_updates_too_small_for_bf16_are_made_in_the_mean():
    """Rounding to nearest would leave every weight where it is."""
    model = nn.Linear(128, 128, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = optimizer_of(model, NAME, 1e-5, weight_decay=0)
    steps(model, optimizer, range(100), lambda weight, _: torch.ones_like(weight))
    assert float(model.weight.detach().double().mean()) == pytest.approx(1 - 100 * 1e-5, abs=3e-5)


def test_the_second_moment_comes_down_again():
    """0.999 of a number is the number itself, rounded to nearest in bf16."""
    model = nn.Linear(128, 128, bias=False).to(torch.bfloat16)
    optimizer = optimizer_of(model, NAME, adam_beta2=0.999)
    steps(model, optimizer, range(201), lambda w, step: torch.full_like(w, float(step == 0)))
    mean = float(optimizer.state[model.weight]["exp_avg_sq"].double().mean())
    assert mean == pytest.approx(0.001 * 0.999**200, rel=0.02)


def test_what_is_not_finite_changes_nothing():
    model = a_matrix()
    optimizer = optimizer_of(model, NAME)
    steps(model, optimizer, range(2))
    weights = [weight.detach().clone() for weight in model.parameters()]
    state = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    steps(model, optimizer, range(2, 3))
    for weight, before in zip(model.parameters(), weights, strict=True):
        assert torch.equal(weight, before)
    for key, value in optimizer.state[model.weight].items():
        assert torch.equal(value, state[key])


def test_state_takes_four_bytes_a_weight_and_comes_back():
    models = [a_matrix(), a_matrix()]
    optimizers = [optimizer_of(model, NAME) for model in models]
    steps(models[0], optimizers[0], range(6))
    steps(models[1], optimizers[1], range(3))
    n = sum(weight.numel() for weight in models[1].parameters())
    assert state_bytes(optimizers[1], torch.device("cpu")) == 4 * n + 2 * 4
    tensors, values = state_tensors(optimizers[1], dict(models[1].named_parameters()))
    again = a_matrix()
    again.load_state_dict(models[1].state_dict())
    restored = optimizer_of(again, NAME)
    load_state(restored, dict(again.named_parameters()), tensors, values)
    steps(again, restored, range(3, 6))
    for one, other in zip(models[0].parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_learns_as_with_copies_in_fp32(tmp_path):
    losses = {}
    for name in ("adamw_torch_fused", NAME):
        job = make_job(
            tmp_path / name,
            "llama",
            max_steps=10,
            n_rows=24,
            learning_rate=0.002,
            optim=name,
            bf16=True,
        )
        assert train(job).state == "finished"
        losses[name] = losses_of(job)
    assert losses[NAME][0] == pytest.approx(losses["adamw_torch_fused"][0], rel=0.01)
    assert losses[NAME][-1] == pytest.approx(losses["adamw_torch_fused"][-1], rel=0.05)


def test_fp32_and_adapters_are_refused(tmp_path):
    numerics = Numerics(torch.device("cpu"), None)
    with pytest.raises(InputError, match="keeps weights in bf16") as refused:
        precision_of("full", NAME, numerics)
    assert refused.value.to_do == "set train.bf16: true, or use optim: adamw_torch_fused"
    with pytest.raises(InputError, match="adapters in fp32"):
        make_job(tmp_path, method="lora", optim=NAME)
