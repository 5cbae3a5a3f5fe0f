"""Memory: formulas against the real code traced without data, published peaks, and sums that must
add up.
"""

import sys
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from transformers.integrations import moe
from transformers.modeling_outputs import BaseModelOutput

from farthing.data.lengths import Largest, Padded
from farthing.models.model_config import known_config
from farthing.models.shapes import Shape, read_shape
from farthing.models.weights import Adapters
from farthing.planner.memory import (
    Memory,
    estimate_memory,
    evaluation_memory,
    logits_bytes,
    writing_memory,
)
from farthing.planner.recipe import Case, ModelSupport, Recipe, stack_for
from farthing.settings import Settings
from planned import wanted_of
from thinned import thinned
from traced import Alive, traced_peak
from traced_models import MIXTURES, NAMES, cut_config
from traced_models import large_blocks as large_blocks

N_LABELS = 7
ALL = ("all-linear",)
UPPER = tuple(
    f"layers.{n}.{name}"
    for n in (2, 3)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
)
DOCUMENTS = 300, 150, 450, 124  # tokens; more than the 128 for which a CPU has another way in bf16


class Traced(NamedTuple):
    """A step to trace, in fp32 (fp32), or with autocast of fp32 weights (amp) or of bf16 ones
    (frozen).

    Of documents, or of four rows where they are padded.
    """

    model: str
    method: str
    dtype: str
    every: int = 0
    targets: tuple[str, ...] = ()
    n_tokens: int = 256
    share: float = 1.0
    accumulates: bool = False
    dropout: float = 0.0
    dora: bool = False
    keeps_start: bool = False


OURS = [
    Traced("llama", "full", "amp", share=0.25),
    Traced("llama", "lora", "frozen", 0, UPPER, share=0.25),
    Traced("llama", "lora", "fp32", 2, UPPER, share=0.25),
    Traced("gpt2", "lora", "frozen", 0, ALL, share=0.25, dropout=0.1),
    Traced("qwen2", "lora", "fp32", 1, ALL, share=0.25, keeps_start=True),
    Traced("bert", "lora", "frozen", 0, ("query", "value")),
    Traced("llama", "full", "amp", 1, accumulates=True),
    Traced("llama", "lora", "frozen", 0, ALL, share=0.25, dora=True),
    Traced("distilbert", "lora", "frozen", 0, ("q_lin", "v_lin")),
]


MIXED = [
    Traced(model, method, dtype, every, targets, n_tokens=1024, share=0.25)
    for model in MIXTURES
    for method, dtype, targets in (("lora", "frozen", ("q_proj", "v_proj")), ("full", "amp", ()))
    for every in (0, 1)
]


def objective_of(model: str) -> str:
    """The task that a family is used for."""
    if model in ("bert", "distilbert"):
        return "classification"
    return "seq2seq" if model == "flan-t5" else "causal-lm"


def shape_of(model: str, n_layers: int | None = None) -> Shape:
    """The shape of a known model, with a few of its layers or all."""
    config = cut_config(model, n_layers) if n_layers else known_config(NAMES[model])
    task = objective_of(model)
    return read_shape(config, task, N_LABELS if task == "classification" else 0)


def compare(case: Traced) -> tuple[Memory, int]:
    """(what the formulas say, what the trace saw)."""
    task, n_layers = objective_of(case.model), 4
    if case.model in MIXTURES and not case.every:
        n_layers = 2  # layers are alike, and experts take long to trace
    config, shape = cut_config(case.model, n_layers), shape_of(case.model, n_layers)
    weights = "bf16" if case.dtype == "frozen" else "fp32"
    precision = "fp32" if case.dtype == "fp32" else "bf16"
    r, lora = 256 if case.keeps_start else 16, None
    how = {"lora_r": r, "use_dora": case.dora, "keeps_start": case.keeps_start}
    adapters = wanted_of(
        shape=shape, method=case.method, target_modules=case.targets, **how
    ).adapters
    if case.method == "lora":
        names = "all-linear" if case.targets == ALL else list(case.targets)
        lora = {
            "r": r,
            "target_modules": names,
            "lora_dropout": case.dropout,
            "use_dora": case.dora,
        }
    is_plain = not (case.dora or case.keeps_start)
    stack = stack_for(shape.model_type, task, precision, case.method, has_plain_adapters=is_plain)
    documents = DOCUMENTS if stack.is_packed else ()
    n_targets = (
        1 if task == "classification" else round(case.share * (sum(documents) or case.n_tokens))
    )
    kind = {name: value for name, value in config.items() if name != "model_type"}
    kind |= {"num_labels": N_LABELS} if task == "classification" else {}
    seen = traced_peak(
        AutoConfig.for_model(config["model_type"], **kind),
        task,
        method=case.method,
        weights=weights,
        autocast=precision == "bf16",
        checkpoint_every=case.every,
        n_rows=4,
        n_tokens=case.n_tokens,
        n_targets=n_targets,
        documents=documents,
        lora=lora,
        accumulates=case.accumulates,
        keeps_start=case.keeps_start,
    )
    recipe = Recipe(
        case.method,
        Settings(checkpoint_every=case.every, precision=precision),
        "adamw_torch_fused",
        8 if case.accumulates else 4,
        adapters.r if adapters else 0,
        case.dropout,
        case.dora,
        n_micro_batches=2.0 if case.accumulates else 1.0,
        stack=stack,
    )
    largest = Largest(4, case.n_tokens, 0)
    if documents:
        largest = Largest(1, sum(documents), 0, sum(length**2 for length in documents))
    share = case.share if task == "causal-lm" else 1.0
    return peak(shape, recipe, largest, adapters, share, is_cuda=False), seen


def case_of(
    shape: Shape,
    recipe: Recipe,
    largest: Largest,
    adapters: Adapters | None = None,
    labelled_share: float = 1.0,
    *,
    is_cuda: bool = True,
) -> Case:
    padded = Padded(64.0, 0.0, 64.0**2, 0.0, 0.0)  # memory asks for the largest alone
    return Case(shape, recipe, adapters, largest, padded, 64.0, labelled_share, is_cuda)


def peak(*case, **more) -> Memory:
    return estimate_memory(case_of(*case, **more))


def in_layers(shape: Shape) -> int:
    return sum(weight.n_parameters for weight in shape.weights if "*" in weight.name)


def agree(case: Traced):
    """The formulas are as close as they say."""
    said, seen = compare(case)
    assert sum(said.parts.values()) == pytest.approx(seen, rel=0.065), said


@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize("case", thinned(OURS, 999))
def test_the_peak_is_that_of_the_loop(case):
    agree(case)


@pytest.mark.slow
@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize("case", MIXED)
def test_the_peak_of_experts_is_that_of_the_modelling_code(case, monkeypatch):
    # without data there is a kernel of torch for bf16 alone; for fp32 the one that transformers has
    # itself
    monkeypatch.setattr(
        moe, "_can_use_grouped_mm", lambda _, weight, __: weight.dtype == torch.bfloat16
    )
    monkeypatch.setattr(sys.modules[__name__], "DOCUMENTS", (1200, 600, 1800, 496))
    agree(case)


# ---- bytes of each weight ----

BF16 = Settings(precision="bf16")
FULL = Recipe("full", Settings(checkpoint_every=1, precision="bf16"), "adamw_torch_fused", 2)
LORA = Recipe("lora", BF16, "adamw_torch_fused", 2, 16)
SHORT = Largest(2, 64, 0)


def test_layers_that_are_kept_to_the_backward_pass_and_fp16_take_more_of_spread_weights():
    shape = shape_of("llama")
    on_four = replace(FULL, n_gpus=4, sharding="fsdp")
    root = shape.n_parameters - in_layers(shape)
    for reshards, precision, of_each in ((True, "bf16", 2), (False, "bf16", 2), (True, "fp16", 4)):
        settings = replace(on_four.settings, precision=precision)
        recipe = replace(on_four, reshards=reshards, settings=settings)
        found = evaluation_memory(case_of(shape, recipe, SHORT)).parts["gathered weights"]
        layers = in_layers(shape) / (shape.n_layers if reshards else 1)
        assert found == pytest.approx(of_each * (root + layers), rel=1e-6)


@pytest.mark.parametrize(
    ("optim", "of_each"),
    [
        ("adamw_torch_fused", 16),
        ("adamw_torch", 20),
        ("sgd", 8),
        ("adamw_8bit", 10.03),
        ("adamw_bf16_stochastic_round", 8),
        ("paged_adamw_8bit", 8),
        ("adamw_torch_offload", 8),
    ],
)
def test_optimizers_by_what_they_keep(optim, of_each):
    shape = shape_of("mistral")
    found = peak(shape, replace(FULL, optim=optim), SHORT)
    assert sum(found.parts.values()) == pytest.approx(of_each * shape.n_parameters, rel=1e-3)


def test_quantized_weights_are_half_a_byte_and_their_constants_beside_bf16_embeddings():
    shape = shape_of("mistral")
    adapters = shape.with_lora(16, ALL)
    found = peak(shape, replace(LORA, method="qlora"), SHORT, adapters)
    rest = 2 * (shape.n_parameters - shape.n_matmul)
    assert rest >= 2 * 2 * shape.vocab * shape.hidden  # embeddings and head stay in bf16
    expected = (0.5 + 1 / 64 + 4 / (64 * 256)) * shape.n_matmul + rest + 4 * adapters.n_trainable
    assert found.parts["weights"] == pytest.approx(expected, abs=2)
    assert found.parts["optimizer"] == 8 * adapters.n_trainable


# ---- sums and orders ----


def test_parts_add_up_and_the_device_needs_more_than_torch_says():
    shape = shape_of("llama")
    for is_cuda in (True, False):
        found = peak(shape, FULL, SHORT, is_cuda=is_cuda)
        of_code = 0 if is_cuda else 256 << 20  # what oneDNN keeps for products in bf16
        assert found.allocated.n_bytes == sum(found.parts.values()) + of_code
        assert sum(found.as_dict().values()) == found.on_device.n_bytes
        assert all(value > 0 for value in found.as_dict().values())
    assert found.on_device.n_bytes == found.allocated.n_bytes  # of a processor
    on_gpu = peak(shape, FULL, SHORT)
    allocated, reserved = on_gpu.allocated.n_bytes, on_gpu.reserved.n_bytes
    assert reserved == allocated + int(0.05 * allocated)
    assert on_gpu.on_device.n_bytes == reserved + 858993459 + on_gpu.beside_bytes
    assert on_gpu.beside_bytes > 0, "of whole logits the allocator keeps a part"
    by_positions = replace(FULL, stack=replace(FULL.stack, scores_positions=True))
    assert peak(shape, by_positions, SHORT).beside_bytes == 0
    two = replace(by_positions, n_gpus=2, sharding="ddp", global_batch=2 * FULL.global_batch)
    assert peak(shape, two, SHORT).beside_bytes == 2**29


def test_what_one_meter_shows_is_not_compared_with_another():
    found = peak(shape_of("llama"), FULL, SHORT)
    for a, b in ((found.allocated, found.reserved), (found.reserved, found.on_device)):
        assert a != b
        with pytest.raises(TypeError):
            assert a < b  # type: ignore[operator]


@pytest.mark.parametrize("model", list(NAMES))
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_more_checkpointing_never_needs_more_and_a_larger_micro_batch_never_less(model, method):
    shape = shape_of(model)
    adapters, r = (None, 0) if method == "full" else (shape.with_lora(16), 16)
    n_targets = 256 if shape.task == "seq2seq" else 0

    def needed(every, rows):
        settings = replace(BF16, checkpoint_every=every)
        recipe = Recipe(method, settings, "adamw_torch_fused", 64, r, n_micro_batches=64 / rows)
        largest = Largest(rows, 1024, n_targets)
        return peak(shape, recipe, largest, adapters, labelled_share=0.5).allocated.n_bytes

    found = [[needed(every, rows) for rows in (1, 2, 4, 8)] for every in (1, 2, 3, 4, 0)]
    for row in (*found, *zip(*found, strict=True)):
        assert list(row) == sorted(row)


def test_only_labelled_positions_are_paid_for_and_a_tile_of_them_at_most():
    shape, adapters = shape_of("qwen2"), shape_of("qwen2").with_lora(16)
    stack = stack_for("qwen2", "causal-lm", "bf16", "lora")
    recipe = Recipe(
        "lora", Settings(65_536, precision="bf16"), "adamw_torch_fused", 64, lora_r=16, stack=stack
    )

    def logits(n_tokens, share, is_trained=False):
        largest = Largest(1, n_tokens, 0)
        return logits_bytes(case_of(shape, recipe, largest, None, share), is_trained)

    h, words, tile = shape.hidden, shape.vocab, 8192
    gradients = 2 * tile * h
    wider = logits(65_536, 0.25) - logits(65_536, 0.125)
    assert wider == gradients, "a whole tile either way, gradients of positions"
    assert logits(tile, 1.0) == 2 * 2048 * (words + h) + gradients
    assert logits(tile, 1.0, None) == logits(tile, 1.0) - gradients, "an evaluation has none"
    assert logits(1000, 0.1) == 2 * 100 * (words + h) + 2 * 100 * h, "fewer than a tile"
    block = 4 * (2**28 // (4 * words)) * words
    old, recipe = logits(tile, 1.0), replace(recipe, settings=Settings(65_536, precision="fp16"))
    assert logits(tile, 1.0) == old + block, "GPUs before Ampere make rows in fp32"
    whole = peak(shape, replace(recipe, stack=ModelSupport()), Largest(1, 65_536, 0), adapters)
    tiled = peak(shape, recipe, Largest(1, 65_536, 0), adapters)
    assert whole.allocated.n_bytes > 4 * tiled.allocated.n_bytes


LLAMA_LORA, T5_FULL = ("llama", "causal-lm", "bf16", "lora"), ("t5", "seq2seq", "bf16", "full")


@pytest.mark.parametrize(
    ("model", "more", "found"),  # packed, scores positions, fuses adapters
    [
        (LLAMA_LORA, {}, (True, True, True)),
        (LLAMA_LORA, {"may_go_packed": False}, (False, True, True)),
        (LLAMA_LORA, {"has_plain_head": False}, (True, False, True)),
        (LLAMA_LORA, {"has_plain_adapters": False}, (True, True, False)),
        (T5_FULL, {}, (True, True, False)),
        (("gpt_bigcode", "causal-lm", "fp32", "full"), {}, (True, False, False)),
        (("bert", "classification", "fp32", "full"), {}, (True, None, False)),
        (("distilbert", "classification", "fp32", "full"), {}, (False, None, False)),
    ],
)
def test_what_the_trainer_does_with_a_model_is_known_without_it(model, more, found):
    stack = stack_for(*model, **more)
    scores_positions = None if "classification" in model else stack.scores_positions
    fuses_adapters = stack.fuses_adapters and "full" not in model
    assert (stack.is_packed, scores_positions, fuses_adapters) == found


def test_spread_frozen_weights_leave_adapters_whole_and_gather_a_layer_and_what_is_beside():
    shape = shape_of("llama")
    adapters = shape.with_lora(8)
    lora = Recipe("lora", BF16, "adamw_torch_fused", 16, 8, n_gpus=4, n_micro_batches=2.0)
    spread, copied = (
        peak(shape, replace(lora, sharding=how), SHORT, adapters).parts for how in ("fsdp", "ddp")
    )
    assert spread["optimizer"] == copied["optimizer"] == 8 * adapters.n_trainable
    assert spread["gradients"] == copied["gradients"]
    frozen, trained = 2 * shape.n_parameters, 4 * adapters.n_trainable
    assert spread["weights"] == pytest.approx(frozen / 4 + trained, abs=4)
    layers = in_layers(shape)
    at_work = layers // shape.n_layers  # and the one that comes after
    assert spread["gathered weights"] == 2 * (shape.n_parameters - layers + 2 * at_work)


def test_an_evaluation_keeps_no_activations_but_all_logits():
    shape = shape_of("qwen2")
    adapters = shape.with_lora(16)
    small, large = (
        evaluation_memory(case_of(shape, LORA, each, adapters))
        for each in (Largest(1, 512, 0), Largest(64, 2048, 0))
    )
    assert large.moment == "evaluation"
    assert large.parts["logits"] == 12 * shape.vocab * 64 * 2048
    assert large.parts["weights"] == small.parts["weights"]
    training = peak(shape, LORA, Largest(1, 512, 0), adapters)
    assert small.allocated.n_bytes < training.allocated.n_bytes


def test_the_peak_of_writing_is_that_of_generate():
    """Keys and values of a whole batch, which is larger than any of training."""
    sizes = {"vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4}
    sizes |= {"num_layers": 4, "num_decoder_layers": 4}
    config = AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0, eos_token_id=None)
    shape = read_shape(config.to_dict(), "seq2seq")
    model, alive = AutoModelForSeq2SeqLM.from_config(config).eval(), Alive()
    for weight in model.parameters():
        alive.add(weight)
    with alive, torch.no_grad():
        ids = torch.ones(128, 64, dtype=torch.long)
        packed = torch.zeros(1, 128 * 64, 64)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            encoder_outputs=BaseModelOutput(packed.new_zeros(128, 64, 64)),
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
        )
    stack = stack_for("t5", "seq2seq", "fp32", "full")
    recipe = Recipe("full", Settings(precision="fp32"), "sgd", 8, stack=stack)
    most = Largest(128, 64, 8)
    said = writing_memory(case_of(shape, recipe, most, is_cuda=False), most)
    of_weights = said.parts["weights"]
    assert said.allocated.n_bytes - of_weights == pytest.approx(alive.peak - of_weights, rel=0.16)


def test_copies_of_weights_stay_to_the_end_of_a_step_of_several_micro_batches():
    """On a GPU, where they are made once a step; autocast's own go with the forward pass."""
    shape = shape_of("llama")
    recipe = replace(
        FULL, optim="adamw_torch_fused", stack=stack_for("llama", "causal-lm", "bf16", "full")
    )

    def at_its_peak(*, passes, is_cuda):
        of = replace(recipe, n_micro_batches=passes)
        found = peak(shape, of, Largest(1, 1, 0), is_cuda=is_cuda)
        return found.moment, found.parts.get("casts", 0)

    matrices = 2 * shape.n_matmul
    assert at_its_peak(passes=4.0, is_cuda=True) == ("embeddings", matrices)
    assert at_its_peak(passes=1.0, is_cuda=True) == ("embeddings", 0)
    assert at_its_peak(passes=4.0, is_cuda=False) == ("loss", matrices)
