"""An optimizer whose state is on the host takes the steps of one whose state is on the device, and
resumes exactly.
"""

import pytest
import torch
from torch import nn

import farthing.train.offload
from farthing.errors import ModelError
from farthing.train.optim import load_state, state_bytes, state_tensors
from scarce import optimizer_of, small_model, step_of
from workshop import are_same, weights_in

NAME = "adamw_torch_offload"


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


@pytest.mark.parametrize("bucket_bytes", [1, 4000, 1 << 30])
def test_its_steps_are_those_of_the_fused_one_bit_for_bit(bucket_bytes, monkeypatch):
    monkeypatch.setattr(farthing.train.offload, "BUCKET_BYTES", bucket_bytes)
    models = [small_model(), small_model()]
    optimizers = [
        optimizer_of(m, name) for m, name in zip(models, ("adamw_torch_fused", NAME), strict=True)
    ]
    for seed in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            step_of(model, optimizer, seed)
    assert not are_same(models[1].state_dict(), small_model().state_dict())
    assert are_same(*(model.state_dict() for model in models))
    states = [state_tensors(o, weights_of(m))[0] for o, m in zip(optimizers, models, strict=True)]
    assert len(states[0]) == 3 * 6
    assert are_same(*states)


def test_a_weight_without_a_gradient_stays_as_it_is():
    model = small_model()
    optimizer = optimizer_of(model, NAME)
    model[0].requires_grad_(False)
    step_of(model, optimizer, 0)
    assert torch.equal(model[0].weight, small_model()[0].weight)
    assert not torch.equal(model[3].weight, small_model()[3].weight)
    state = optimizer.state[model[0].weight]
    assert float(state["step"]) == 0
    assert not state["exp_avg"].any()


def test_a_restored_model_and_state_go_on_exactly():
    alone, broken = small_model(), small_model()
    optimizer, first = optimizer_of(alone, NAME), optimizer_of(broken, NAME)
    for seed in range(3):
        step_of(alone, optimizer, seed)
        step_of(broken, first, seed)
    weights = weights_in(broken)
    tensors, values = state_tensors(first, weights_of(broken))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    step_of(broken, first, 99)  # work that is lost

    # into the same optimizer: its copies of the weights are stale now
    broken.load_state_dict(weights)
    load_state(first, weights_of(broken), tensors, values)
    fresh = small_model(seed=7)
    second = optimizer_of(fresh, NAME)
    fresh.load_state_dict(weights)
    load_state(second, weights_of(fresh), tensors, values)
    for model, own in ((alone, optimizer), (broken, first), (fresh, second)):
        step_of(model, own, 3)
    assert are_same(alone.state_dict(), broken.state_dict())
    assert are_same(alone.state_dict(), fresh.state_dict())


def test_state_and_arithmetic_never_come_near_a_device_without_room():
    """Weights on the meta device, which keeps nothing: what is restored must not go there."""
    model = small_model()
    optimizer = optimizer_of(model, NAME)
    step_of(model, optimizer, 0)
    tensors, values = state_tensors(optimizer, weights_of(model))
    far = small_model().to("meta")
    for name, stays in ((NAME, True), ("adamw_torch_fused", False)):
        other = optimizer_of(far, name)
        load_state(other, weights_of(far), tensors, values)
        devices = {value.device.type for state in other.state.values() for value in state.values()}
        assert devices == ({"cpu"} if stays else {"meta"})
    assert state_bytes(optimizer, torch.device("cuda")) == 0


def test_gradients_are_unscaled_and_an_overflow_skips_the_step():
    model, plain = small_model(), small_model()
    optimizer, scaler = optimizer_of(model, NAME), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step_of(model, optimizer, 0, scaler)
    step_of(plain, optimizer_of(plain, NAME), 0)
    assert are_same(model.state_dict(), plain.state_dict())
    scaler.update()

    before = weights_in(model)
    with torch.no_grad():
        model[3].bias.fill_(torch.inf)
    before["3.bias"] = model[3].bias.detach().clone()
    step_of(model, optimizer, 1, scaler)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert are_same(before, weights_in(model))


def test_weights_that_are_not_fp32_are_refused_in_words():
    with pytest.raises(ModelError, match=r"fp32 weights, and some are bfloat16") as caught:
        optimizer_of(small_model().bfloat16(), NAME)
    assert caught.value.where == "train.optim"
