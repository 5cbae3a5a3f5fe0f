"""Speed: FLOPs against the shapes, what recomputing and adapters do to them, communication by hand,
calibration.
"""

from dataclasses import replace

import pytest

from farthing.data.lengths import Largest, Padded
from farthing.models.shapes import Shape
from farthing.models.weights import Adapters
from farthing.planner.recipe import Case, Recipe, stack_for
from farthing.planner.speed import (
    Calibration,
    Device,
    step_time,
)
from farthing.planner.work import Work, forward_work
from farthing.planner.work import work_of as work_of_case
from farthing.settings import Settings
from planned import shape_of

LLAMA = shape_of("meta-llama/Llama-2-7b-hf")
QWEN = shape_of("Qwen/Qwen2.5-0.5B")


def with_settings(recipe: Recipe, **changed) -> Recipe:
    return replace(recipe, settings=replace(recipe.settings, **changed))


FULL = Recipe("full", Settings(precision="bf16"), "adamw_torch_fused", 8, n_micro_batches=2.0)
LORA = replace(FULL, method="lora", lora_r=16)
DEVICE = Device("made", 100e12, 1e12, 50e9, True)
ENDLESS = Device("computes in no time", 1e18, 1e12, 50e9, True)


def flat(n: int) -> Padded:
    """Examples that are all as long."""
    return Padded(float(n), 0.0, float(n * n), 0.0, 0.0)


def work_of(
    shape: Shape,
    recipe: Recipe,
    padded: Padded,
    mean: float,
    adapters: Adapters | None = None,
    labelled_share: float = 1.0,
) -> Work:
    case = Case(shape, recipe, adapters, Largest(1, 1024, 0), padded, mean, labelled_share)
    return work_of_case(case)


def work(recipe: Recipe, shape: Shape = LLAMA, n: int = 1024, **more) -> Work:
    """The work of a step on examples of one length."""
    adapters = None if recipe.method == "full" else shape.with_lora(16)
    return work_of(shape, recipe, flat(n), float(n), adapters, **more)


# ---- FLOPs ----


def test_flops_are_those_of_the_shape():
    counted = LLAMA.training_flops(1024)
    found = work(FULL)
    assert found.matmul_flops == pytest.approx(8 * (counted.body + counted.head))
    again = 3.5 / 3  # scores are computed once more
    assert found.attention_flops == pytest.approx(8 * counted.attention * again)
    half = work(replace(FULL, n_gpus=2, sharding="ddp"))
    assert half.matmul_flops == pytest.approx(found.matmul_flops / 2)
    assert half.flops == found.flops  # of all of them


def upper(n_layers: int) -> Adapters:
    """Adapters on the queries of the topmost layers."""
    first = LLAMA.n_layers - n_layers
    return LLAMA.with_lora(
        16, tuple(f"layers.{n}.self_attn.q_proj" for n in range(first, LLAMA.n_layers))
    )


def test_layers_below_the_first_trained_one_are_computed_once():
    lengths, mean = flat(1024), 1024.0
    few, every = (work_of(LLAMA, LORA, lengths, mean, upper(n)) for n in (8, 32))
    once = LLAMA.forward_flops(1024)
    of_adapters = LLAMA.training_flops(1024, adapters=upper(8)).adapters
    # 32 layers forward, 8 of them back; the head both ways
    both = once.body * (1 + 8 / 32) + 2 * once.head + of_adapters
    assert few.matmul_flops == pytest.approx(8 * both)
    # flash computes scores again in the backward pass: 2.5 times the forward pass
    assert few.attention_flops == pytest.approx(8 * once.attention * (1 + 2.5 * 8 / 32))
    checked = work_of(LLAMA, with_settings(LORA, checkpoint_every=1), lengths, mean, upper(8))
    again = once.body * 8 / 32 + of_adapters / 3
    assert checked.matmul_flops - few.matmul_flops == pytest.approx(8 * again)
    for name in ("traffic_bytes", "read_bytes", "host_s"):
        assert 0.3 < getattr(few, name) / getattr(every, name) < 0.7, name


def test_only_labelled_positions_go_through_the_head():
    ours = replace(FULL, stack=stack_for("qwen2", "causal-lm", "bf16", "full"))
    few, all_of_them = (work(ours, QWEN, labelled_share=share) for share in (0.25, 1.0))
    of_head = 8 * 1024 * 6 * QWEN.n_head_matmul
    assert all_of_them.matmul_flops == pytest.approx(work(FULL, QWEN).matmul_flops)
    assert all_of_them.matmul_flops - few.matmul_flops == pytest.approx(0.75 * of_head)
    of_logits = 8 * 1024 * QWEN.vocab * (8 + 5 * 2)
    assert all_of_them.traffic_bytes - few.traffic_bytes == pytest.approx(0.75 * of_logits)


@pytest.mark.parametrize(("recipe", "factor"), [(FULL, 4 / 3), (LORA, 3 / 2)])
def test_recomputing_every_layer_is_one_more_forward_pass(recipe, factor):
    # the head is no layer, so it is not computed again: it is a fiftieth of this model
    ratio = work(with_settings(recipe, checkpoint_every=1)).matmul_flops / work(recipe).matmul_flops
    assert ratio == pytest.approx(factor, rel=0.02)
    halfway = (
        work(with_settings(recipe, checkpoint_every=2)).matmul_flops / work(recipe).matmul_flops
    )
    assert halfway - 1 == pytest.approx((ratio - 1) / 2)


# ---- seconds ----


def test_parts_add_up_and_are_what_the_device_takes_for_them():
    asked = work(replace(LORA, method="qlora"))
    found = step_time(asked, DEVICE)
    assert found.seconds == sum(found.parts.values())
    assert found.tokens_per_s == pytest.approx(8 * 1024 / found.seconds)
    assert {"matmul", "attention", "memory traffic", "dequantization", "optimizer"} <= set(
        found.parts
    )
    reached = asked.tokens_per_micro_batch / (asked.tokens_per_micro_batch + 220)
    assert asked.tokens_per_micro_batch == 4 * 1024
    reached *= LLAMA.hidden / (LLAMA.hidden + 260)
    assert found.parts["matmul"] == pytest.approx(asked.matmul_flops / (100e12 * reached))
    assert found.parts["memory traffic"] == asked.traffic_bytes / 1e12
    assert found.parts["optimizer"] == asked.optimizer_bytes / 1e12


def test_a_tiny_micro_batch_takes_the_time_to_read_the_weights():
    asked = work_of(LLAMA, replace(FULL, global_batch=1, n_micro_batches=1.0), flat(4), 3.0)
    assert (asked.n_tokens, asked.n_padded_tokens) == (3.0, 4.0)
    assert asked.read_bytes == 2 * 2 * (LLAMA.n_matmul + LLAMA.n_head_matmul)
    assert step_time(asked, ENDLESS).parts["matmul"] == asked.read_bytes / 1e12


def test_a_gpu_waits_for_its_host_only_when_it_is_done_sooner():
    small, large = (step_time(work(LORA, QWEN, n), DEVICE).parts for n in (8, 4096))
    of_layer = 6.4e-6 * (190 + 7 * 14)  # `facts/blocks.csv` has the 190
    host_s = 2 * (QWEN.n_layers * of_layer + 6.4e-6 * 125) + 1.3e-3
    assert small["launch"] > 0
    assert large["launch"] == pytest.approx(0.039 * host_s), "what is too short to hide it"
    busy = sum(small[name] for name in ("matmul", "attention", "memory traffic"))
    assert busy + small["launch"] == pytest.approx(host_s)


N_LLAMA, N_LORA, CLIPPING = LLAMA.n_parameters, LLAMA.with_lora(16).n_trainable, 3 * 4


@pytest.mark.parametrize(
    ("recipe", "n", "n_bytes"),
    [
        (FULL, N_LLAMA, 7 * 4),  # four read, three written
        (replace(FULL, optim="adamw_torch"), N_LLAMA, 21 * 4),
        (replace(FULL, optim="sgd"), N_LLAMA, 3 * 4),
        (replace(FULL, optim="adamw_8bit"), N_LLAMA, 3 * 4 + 4),
        (LORA, N_LORA, 7 * 4),
        (replace(FULL, n_gpus=4, sharding="fsdp"), N_LLAMA / 4, 7 * 4),
    ],
)
def test_the_optimizer_moves_weights_gradients_and_state(recipe, n, n_bytes):
    assert work(recipe).optimizer_bytes == pytest.approx(n * (n_bytes + CLIPPING), rel=1e-6)


def test_an_off_loaded_optimizer_takes_the_bus_and_leaves_the_device_alone():
    n, off = LLAMA.n_parameters, replace(FULL, optim="adamw_torch_offload")
    asked = work(off)
    assert asked.bus_bytes == n * 2 * 4  # gradients there, weights back
    assert asked.optimizer_bytes == n * (2 * 4 + 3 * 4)
    assert work(FULL).bus_bytes == 0
    seconds = step_time(asked, DEVICE).parts["optimizer"]
    assert seconds == pytest.approx(n * (8 / 20e9 + 20 / 1e12))
    assert seconds > step_time(work(FULL), DEVICE).parts["optimizer"]
    assert forward_work(asked, 3).bus_bytes == 0
    sharded = work(replace(off, n_gpus=4, sharding="fsdp"))
    assert sharded.bus_bytes == pytest.approx(asked.bus_bytes / 4, rel=1e-6)


# ---- communication ----


def test_copies_exchange_their_gradients_in_a_ring():
    for n in (2, 4, 8):
        copies = replace(FULL, n_gpus=n, sharding="ddp")
        assert work(copies).sent_bytes == pytest.approx(2 * (n - 1) / n * 4 * LLAMA.n_parameters)
    adapters = LLAMA.with_lora(16).n_trainable
    assert work(replace(LORA, n_gpus=2, sharding="ddp")).sent_bytes == pytest.approx(4 * adapters)
    assert work(FULL).sent_bytes == 0


def test_shards_gather_frozen_layers_twice_and_copy_the_gradients_of_adapters():
    frozen = replace(LORA, n_gpus=4, sharding="fsdp", global_batch=32)
    n, of_adapters = LLAMA.n_parameters, 4 * LLAMA.with_lora(16).n_trainable
    of_layers = sum(w.n_parameters for w in LLAMA.weights if "*" in w.name)
    sent = 2 * 2 * (n + of_layers) + 2 * of_adapters  # two micro-batches in bf16; once a step
    assert work(frozen).sent_bytes == pytest.approx(3 / 4 * sent)


# ---- calibration and evaluation ----


def test_calibration_multiplies_what_it_was_measured_on():
    asked = work(FULL)
    raw = step_time(asked, DEVICE).parts
    known = step_time(asked, DEVICE, Calibration(compute=1.5, optimizer=3.0, waiting_s=0.02)).parts
    for name in ("matmul", "attention", "memory traffic"):
        assert known[name] == pytest.approx(1.5 * raw[name])
    assert known["optimizer"] == pytest.approx(3.0 * raw["optimizer"])
    assert known["data"] == 0.02
    assert "data" not in raw


@pytest.mark.parametrize(
    ("recipe", "share"),
    [(FULL, 1 / 3), (LORA, 1 / 2), (with_settings(FULL, checkpoint_every=1), 1 / 4)],
)
def test_an_evaluation_is_forward_passes_only(recipe, share):
    asked = work(recipe)
    alone = forward_work(asked, 3.0)
    assert alone.matmul_flops == pytest.approx(3 * share * asked.matmul_flops, rel=0.03)
    assert alone.optimizer_bytes == alone.sent_bytes == 0


def test_experts_that_are_trained_whole_write_a_gradient_each_for_every_micro_batch():
    shape = shape_of("mistralai/Mixtral-8x7B-v0.1")
    n = sum(w.copies * w.n_weights for w in shape.experts)
    twice, four = (replace(FULL, n_micro_batches=times) for times in (2.0, 4.0))
    one, more = work(twice, shape), work(four, shape)
    assert more.traffic_bytes - one.traffic_bytes == pytest.approx(
        2 * (4 + 12) * n + 2 * (shape.n_matmul + shape.n_head_matmul) * 2 * (4 + 2), rel=0.01
    ), "written in fp32 and added up, beside the casts of all weights"


def test_spread_experts_are_multiplied_in_the_precision_of_the_run():
    shape = shape_of("mistralai/Mixtral-8x7B-v0.1")
    spread = replace(FULL, n_gpus=8, sharding="fsdp", n_micro_batches=1.0)
    alone = replace(spread, sharding="ddp")
    assert work(spread, shape).matmul_flops < work(alone, shape).matmul_flops
