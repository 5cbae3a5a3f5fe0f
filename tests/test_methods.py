"""Full fine-tuning and adapters on the three tasks: what learns, what stays, and by which rule it
moves.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import workshop
from farthing.errors import InputError, ModelError
from farthing.export.folders import export_run
from farthing.model.activation_checkpointing import (
    Beside,
    Linear,
    Sample,
    checkpoint_layers,
    choose_checkpointing,
    saved_bytes,
)
from farthing.model.adapters import Adapter, add_adapter, count_parameters
from farthing.model.hardware import Numerics
from farthing.model.load import ModelChoice, load_config, load_model
from farthing.train.build import build_model
from farthing.train.built import Run
from farthing.train.loop import take_step
from farthing.train.optim import decayed_names, make_optimizer
from farthing.train.resolve import resolve
from farthing.train.schedule import schedule
from heads import summed_loss
from mishaps import fail_at
from thinned import thinned
from workshop import Heard, Watched, log_of, losses_of, make_job

FAMILIES = ("llama", "t5", "bert")
ADAPTERS = {
    "lora": {"name": "lora"},
    "dora": {"name": "lora", "use_dora": True},
    "rslora": {"name": "lora", "use_rslora": True},
}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


# ---- what learns ----


@pytest.mark.parametrize("family", thinned(FAMILIES, 9))
@pytest.mark.parametrize("method", thinned(["full", *ADAPTERS], 2))
def test_the_loss_falls_and_only_what_should_be_trained_changes(family, method, tmp_path, watched):
    rate = 0.002 if method == "full" else 0.01
    job = make_job(
        tmp_path,
        family,
        method=ADAPTERS.get(method, method),
        max_steps=15,
        n_rows=24,
        learning_rate=rate,
    )
    outcome = workshop.train(job)
    losses = losses_of(job)
    assert outcome.state == "finished"
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert watched.changed() <= watched.trainable()
    assert len(watched.changed()) > 0.9 * len(
        watched.trainable()
    )  # a decoder start or unused position may stay
    if method != "full":
        kinds = ("lora_", "modules_to_save") if family == "bert" else ("lora_",)
        assert all(any(kind in name for kind in kinds) for name in watched.trainable())
        magnitudes = {name for name in watched.changed() if "lora_magnitude_vector" in name}
        assert bool(magnitudes) == (method == "dora")


ALL_OF_LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("family", "target_modules", "adapted"),
    [
        ("llama", (), ALL_OF_LLAMA),
        ("llama", "all-linear", ALL_OF_LLAMA),
        ("llama", ["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        ("t5", ["q"], {"q"}),
        ("bert", "all-linear", {"query", "key", "value", "dense"}),
        ("bert", (), {"query", "value"}),
    ],
)
def test_target_modules_are_the_layers_that_get_an_adapter(
    family, target_modules, adapted, tmp_path
):
    method = {"name": "lora", "target_modules": target_modules}
    model = build_model(resolve(make_job(tmp_path, family, method=method)), ("a", "b", "c"))
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    adapters = {name.split(".lora_")[0].split(".")[-1] for name in trained if ".lora_" in name}
    assert adapters == adapted
    saved = [name for name in trained if ".lora_" not in name]
    assert all(".classifier.modules_to_save." in name for name in saved)
    assert len(saved) == (2 if family == "bert" else 0), "the head with its bias"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "saved"),
    [
        ("llama", ["lm_head"]),
        ("llama", ["embed_tokens", "lm_head"]),
        ("t5", ["lm_head"]),
        ("bert", ["pooler"]),
    ],
)
def test_modules_in_fp32_go_with_a_base_in_half_precision(tmp_path, family, saved):
    method = {"name": "lora", "target_modules": "all-linear", "modules_to_save": saved}
    keys: dict[str, Any] = {"max_steps": 2, "bf16": True, "predict_with_generate": False}
    job = make_job(
        tmp_path, family, method=method, pretrained=True, data={"eval_fraction": 0.2}, **keys
    )
    assert workshop.train(job).state == "finished"
    assert export_run(Path(job.output_dir), tmp_path / "merged", "merged")


@pytest.mark.parametrize(
    "method",
    [
        {"target_modules": ["shared"]},
        {"target_modules": ["q", "shared"]},
        {"modules_to_save": ["shared"]},
    ],
    ids=["an adapter alone", "one of two", "trained whole"],
)
def test_a_module_that_is_never_computed_is_refused_by_name(tmp_path, method):
    job = make_job(tmp_path, "t5", method={"name": "lora", **method})
    with pytest.raises(ModelError, match="computed without `shared`") as refused:
        workshop.train(job)
    assert refused.value.where == f"method.{next(iter(method))}"


@pytest.mark.parametrize(
    ("family", "names"),
    thinned(
        [
            ("t5", {"target_modules": ["q"], "modules_to_save": ["lm_head"]}),
            ("t5", {"target_modules": ["embed_tokens"]}),
            ("llama", {"target_modules": ["embed_tokens"]}),
            (
                "llama",
                {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
            ),
            ("bert", {"target_modules": ["word_embeddings", "position_embeddings"]}),
        ],
        2,
    ),
    ids=["t5 head", "t5 embeddings", "llama embeddings", "llama both", "bert embeddings"],
)
def test_whatever_a_job_names_is_trained(tmp_path, watched, family, names):
    workshop.train(make_job(tmp_path, family, method={"name": "lora", **names}, max_steps=2))
    assert watched.changed() == watched.trainable()


@pytest.mark.parametrize(
    ("key", "wrong", "known"),
    [
        ("target_modules", "q_porj", ("all-linear", "q_proj", "down_proj")),
        ("modules_to_save", "lm_haed", ("lm_head",)),
    ],
)
def test_unknown_modules_are_refused_and_the_choices_named(key, wrong, known, tmp_path):
    job = make_job(tmp_path, method={"name": "lora", key: [wrong]})
    with pytest.raises(ModelError) as caught:
        workshop.train(job)
    assert caught.value.where == f"method.{key}"
    assert wrong in caught.value.what
    assert all(name in caught.value.to_do for name in known)


# ---- precision ----


@pytest.mark.parametrize("method", thinned(["full", "lora"], 9))
def test_bf16_keeps_frozen_weights_in_bf16_and_trained_ones_in_fp32(method, tmp_path, watched):
    job = make_job(tmp_path, method=method, bf16=True, max_steps=12)
    workshop.train(job)
    losses = losses_of(job)
    dtypes = {name: p.dtype for name, p in watched.model.named_parameters()}
    assert {dtypes[name] for name in watched.trainable()} == {torch.float32}
    frozen = {dtype for name, dtype in dtypes.items() if name not in watched.trainable()}
    assert frozen == (set() if method == "full" else {torch.bfloat16})
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert json.loads((tmp_path / "run/run.json").read_text())["machine"]["precision"] == "bf16"


def test_random_weights_are_the_same_in_every_precision(tmp_path):
    folder = workshop.make_folder(tmp_path / "base", "llama")
    choice = ModelChoice(str(folder), init="random")
    exact, rounded = (
        load_model(choice, load_config(choice), "causal-lm", dtype=dtype, seed=3).state_dict()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)


def overflowing_run(tmp_path: Path, **keys: Any) -> tuple[Run, Heard]:
    """A run on the CPU whose scaler is enabled as it is for fp16 on a GPU."""
    from farthing.run.ledger import Ledger, Meter
    from farthing.run.signals import Notice
    from farthing.settings import Settings
    from farthing.storage.files import make_private
    from farthing.train.budget import RunLimits
    from farthing.train.build import assemble, build_model
    from farthing.train.context import Context
    from farthing.train.resolve import open_examples

    job = make_job(tmp_path, max_grad_norm=0.5, **keys)
    heard = Heard()
    folder = make_private(Path(job.output_dir))
    numerics = Numerics(torch.device("cpu"), autocast=None, needs_scaler=True)
    spec = workshop.resolved(job, numerics)
    examples = open_examples(spec, heard)
    model = build_model(spec, examples[0].tokens.label_names)
    meter = Meter()
    ledger = Ledger(folder / "ledger.jsonl", meter, 0.0)
    context = Context(folder, meter, ledger, RunLimits(job, ledger), Notice(), heard)
    run = assemble(spec, context, model, examples, None, Settings(micro_batch_tokens=1024))
    run.saver.restore(allow_restart=False)
    return run, heard


def test_the_scaler_unscales_before_clipping(tmp_path, monkeypatch):
    run, _ = overflowing_run(tmp_path)
    seen: list[float] = []
    clip = torch.nn.utils.clip_grads_with_norm_

    def watching(parameters, most, norm):
        seen.append(float(norm))
        clip(parameters, most, norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", watching)
    take_step(run)
    scaled = seen[0]
    plain = make_job(tmp_path / "plain", max_grad_norm=0.5, max_steps=1)
    workshop.train(plain)
    assert run.steps.step.scaler.get_scale() == 2.0**16
    assert scaled == pytest.approx(log_of(plain)[0]["grad_norm"], rel=1e-5)


def test_an_overflow_skips_the_step_and_halves_the_scale_and_is_not_counted_as_nan(
    tmp_path, monkeypatch
):
    run, heard = overflowing_run(tmp_path, max_skipped_steps=2)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    unscale = run.steps.step.scaler.unscale_

    def overflow(optimizer):
        next(p for p in run.steps.step.trained if p.grad is not None).grad.fill_(torch.inf)
        unscale(optimizer)

    monkeypatch.setattr(run.steps.step.scaler, "unscale_", overflow)
    for expected in (2.0**15, 2.0**14, 2.0**13):
        take_step(run)
        assert run.steps.step.scaler.get_scale() == expected
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    assert not any(
        bool(value.any())
        for state in run.steps.step.optimizer.state.values()
        for value in state.values()
    )
    assert (run.progress.step, run.progress.skipped_in_a_row) == (3, 0)
    assert "overflowed" in heard.warnings
    monkeypatch.undo()
    take_step(run)
    assert any(not torch.equal(p, before[name]) for name, p in run.model.named_parameters())


# ---- optimizers and schedules ----


@pytest.mark.parametrize("optim", thinned(["adamw_torch", "adamw_torch_fused", "sgd"], 9))
def test_every_torch_optimizer_learns(optim, tmp_path):
    job = make_job(
        tmp_path, optim=optim, max_steps=12, learning_rate=0.5 if optim == "sgd" else 0.01
    )
    workshop.train(job)
    losses = losses_of(job)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])


def test_a_polynomial_that_would_have_to_rise_is_refused():
    with pytest.raises(InputError, match="the learning rate is 1e-08"):
        schedule("polynomial", n_warmup_steps=0, n_steps=4, learning_rate=1e-8)


def test_warm_up_is_a_share_of_steps_to_a_rate_that_follows_the_global_batch(tmp_path):
    """A quarter of the batch that 0.04 was tuned for; of five steps three warm up."""
    batch = {"global_batch_size": 8, "learning_rate_batch_size": 32, "learning_rate": 0.04}
    warm = {"lr_scheduler_type": "constant_with_warmup", "max_steps": 5, "warmup_ratio": 0.5}
    job = make_job(tmp_path, **batch, **warm)
    workshop.train(job)
    assert [row["lr"] for row in log_of(job)] == pytest.approx([0, 0.01 / 3, 0.02 / 3, 0.01, 0.01])


def test_weight_decay_is_on_matrices_alone(tmp_path):
    folder = workshop.make_folder(tmp_path / "base", "bert")
    choice = ModelChoice(str(folder), init="random")
    model: Any = load_model(
        choice,
        load_config(choice),
        "classification",
        dtype=torch.float32,
        seed=0,
        label_names=("a", "b"),
    )
    optimizer = make_optimizer(
        model, "adamw_torch", learning_rate=0.1, weight_decay=0.5, betas=(0.9, 0.999), epsilon=1e-8
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim >= 2 else 1
        torch.testing.assert_close(parameter, before[name] * factor)


@pytest.mark.slow
def test_clipping_bounds_the_gradient_and_zero_switches_it_off(tmp_path):
    def moved(name, max_grad_norm):
        job = make_job(
            tmp_path / name,
            optim="sgd",
            learning_rate=1.0,
            max_steps=1,
            max_grad_norm=max_grad_norm,
        )
        with pytest.MonkeyPatch.context() as patch:
            watched = Watched(patch)
            workshop.train(job)
        now = dict(watched.model.named_parameters())
        steps = [(now[key].detach() - value).flatten() for key, value in watched.before.items()]
        norm = float(torch.cat(steps).norm())
        assert log_of(job)[0]["grad_norm"] > 1  # what is logged is the norm before clipping
        return norm

    assert moved("clipped", 0.125) == pytest.approx(0.125, rel=1e-3)
    assert moved("free", 0) > 1


def test_label_smoothing_is_that_of_torch():
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[-100, 3, 4, 0, -100], [1, -100, 2, 7, 10]])

    class Fixed:
        config: Any = None

        def __call__(self, **inputs):
            return type("Output", (), {"logits": logits})()

    batch = {
        "input_ids": labels.clamp(0),
        "attention_mask": torch.ones_like(labels),
        "labels": labels,
    }
    loss, _ = summed_loss(Fixed(), batch, "causal-lm", label_smoothing=0.1)
    log_p = logits.log_softmax(-1)
    expected = 0.0
    for row in range(2):
        for place in range(1, 5):
            label = int(labels[row, place])
            if label >= 0:
                at = log_p[row, place - 1]
                expected -= float(0.9 * at[label] + 0.1 * at.mean())
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_label_smoothing_changes_training_and_not_evaluation(tmp_path):
    plain = make_job(tmp_path / "plain", "bert", max_steps=1)
    smooth = make_job(tmp_path / "smooth", "bert", max_steps=1, label_smoothing_factor=0.2)
    workshop.train(plain)
    workshop.train(smooth)
    assert losses_of(plain)[0] != losses_of(smooth)[0]
    assert losses_of(plain)[0] == pytest.approx(losses_of(smooth)[0], rel=0.2)


# ---- loading ----


def test_a_head_for_other_classes_is_drawn_anew_and_the_body_is_kept(tmp_path, watched):
    rows = [{"text": f"row {i}", "label": "abcde"[i % 5]} for i in range(20)]
    job = make_job(tmp_path, "bert", pretrained=True, rows=rows, method="lora", max_steps=1)
    before = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    assert before.config.num_labels == 2
    workshop.train(job)
    model = watched.model.get_base_model()
    assert model.config.num_labels == 5
    assert torch.equal(
        model.bert.embeddings.word_embeddings.weight, before.bert.embeddings.word_embeddings.weight
    )


def test_a_model_whose_weights_are_not_all_there_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    job = make_job(tmp_path, pretrained=True)
    path = tmp_path / "base/model.safetensors"
    weights = load_file(path)
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file(
        {name: value for name, value in weights.items() if name != lost}, path, {"format": "pt"}
    )
    with pytest.raises(
        ModelError, match="1 of the weights of a llama for causal-lm are not in its files"
    ) as caught:
        workshop.train(job)
    assert lost in caught.value.what


# ---- counting ----


def shared(*parts: str) -> Path:
    folder = os.environ.get("FARTHING_DATA")
    if not folder:
        pytest.skip("FARTHING_DATA names no folder with real model configurations")
    return Path(folder, *parts)


def test_an_encoder_with_lora_and_a_head_counts_each_weight_once():
    config = transformers.AutoConfig.from_pretrained(shared("model_configs", "xlm-roberta-large"))
    config.num_labels = 214
    with torch.device("meta"):
        bare = transformers.AutoModel.from_config(config, add_pooling_layer=False)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        assert count_parameters(bare)["total"] == 558_840_832
        wrapped = add_adapter(
            model, Adapter(r=16, target_modules=("query", "value")), "classification", seed=0
        )
    counts = count_parameters(wrapped)
    assert counts["adapter"] == 1_572_864
    assert counts["saved_modules"] == 1_268_950
    assert counts["trainable"] == 1_572_864 + 1_268_950
    assert counts["total"] == 558_840_832 + 1_572_864 + 1_268_950
    trainable, total = wrapped.get_nb_trainable_parameters()
    assert (trainable, total) == (
        2_841_814,
        562_951_596,
    )  # what peft prints counts the frozen head as well


# ---- activation checkpointing ----


def small_model(
    family: str, folder: Path, method: str = "full", dropout: float = 0.0
) -> tuple[Any, Callable[..., Any]]:
    """A model of four layers in training mode, and its forward pass, of so many copies of a batch."""  # noqa: E501
    workshop.make_folder(folder, family, layers=4, dropout=dropout)
    choice, task = ModelChoice(str(folder), init="random"), workshop.TASK[family]
    model: Any = load_model(
        choice, load_config(choice), task, dtype=torch.float32, seed=0, label_names=("a", "b", "c")
    )
    if method == "lora":
        model = add_adapter(model, Adapter(r=4), task, seed=0)
    model.train()
    ids = torch.randint(5, 200, (4, 24), generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 2, 0]) if family == "bert" else ids
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def forward(n_copies: int = 1) -> torch.Tensor:
        copies = {
            name: value.repeat(n_copies, *[1] * (value.ndim - 1)) for name, value in batch.items()
        }
        return summed_loss(model, copies, task)[0]

    return model, forward


def gradients(model: Any, forward: Callable[[], Any]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    forward().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", thinned(FAMILIES, 2))
@pytest.mark.parametrize("method", ["full", "lora"])
def test_checkpointing_saves_memory_and_changes_no_bit_of_the_gradients(family, method, tmp_path):
    model, forward = small_model(family, tmp_path / "base", method, dropout=0.1)
    expected, kept = gradients(model, forward), {0: saved_bytes(model, forward)}
    for every in (1, 2, 4):
        checkpoint_layers(model, every)
        found, kept[every] = gradients(model, forward), saved_bytes(model, forward)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert kept[1] < kept[2] < kept[4] < kept[0]
    checkpoint_layers(model, 0)
    assert saved_bytes(model, forward) == kept[0]


def choose(
    model: Any, forward: Callable[..., Any], free_bytes: int, wanted: bool | int | str = "auto"
) -> Any:
    return choose_checkpointing(
        model,
        (Sample(96, forward), Sample(192, lambda: forward(2))),
        Beside(
            n_tokens=4000,
            accumulates=False,
            optimizer_bytes=8 * count_parameters(model)["trainable"],
            update_bytes=0,
            free_bytes=free_bytes,
            head=Linear(),
        ),
        wanted=wanted,
    )


@pytest.mark.parametrize("family", thinned(FAMILIES, 2))
@pytest.mark.parametrize("method", thinned(["full", "lora"], 2))
def test_auto_checkpoints_no_more_than_the_memory_asks_for(family, method, tmp_path):
    model, forward = small_model(family, tmp_path / "base", method)
    ample, tiny = choose(model, forward, 1 << 40), choose(model, forward, 1)
    assert (ample.checkpoint_every, ample.fits) == (0, True)
    assert (tiny.checkpoint_every, tiny.fits) == (1, False)
    half = choose(model, forward, 1, wanted=2)
    assert tiny.saved.at(4000) < half.saved.at(4000) < ample.saved.at(4000)
    assert tiny.total_bytes < half.total_bytes < ample.total_bytes
    between = (half.total_bytes + ample.total_bytes) / 2
    assert choose(model, forward, int(between / 0.9)).checkpoint_every == 2
    assert ample.gradients.all_bytes == 4 * count_parameters(model)["trainable"]


def test_a_sample_without_room_is_a_mode_that_does_not_fit(tmp_path):
    model, forward = small_model("llama", tmp_path / "base")

    def short(n_copies=1):
        if not any(
            getattr(module, "gradient_checkpointing", False) for module in model.model.layers
        ):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(n_copies)

    assert choose(model, short, 1 << 40).checkpoint_every == 2
    with pytest.raises(torch.OutOfMemoryError):
        choose(model, short, 1 << 40, wanted=False)


@pytest.mark.parametrize(("wanted", "every"), [(True, 1), (False, 0), (3, 3)])
def test_checkpointing_is_what_the_job_says_when_it_says(wanted, every, tmp_path):
    model, forward = small_model("llama", tmp_path / "base")
    assert choose(model, forward, 1 << 40, wanted).checkpoint_every == every


def test_a_frozen_embedding_stays_out_of_the_backward_pass(tmp_path):
    model, _ = small_model("llama", tmp_path / "base", "lora")
    checkpoint_layers(model, 1)
    embedding = model.get_input_embeddings()
    out: list[torch.Tensor] = []
    embedding.register_forward_hook(lambda module, inputs, output: out.append(output))
    model(input_ids=torch.tensor([[5, 6, 7]]))
    assert not embedding.weight.requires_grad
    assert not out[0].requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_training_with_and_without_checkpointing_ends_in_the_same_weights(family, tmp_path):
    # without it an encoder's last layer computes fewer rows, and draws other masks for them
    dropout = 0.0 if family == "bert" else 0.1
    ends = []
    for wanted in (False, True):
        job = make_job(
            tmp_path / str(wanted),
            family,
            method="lora",
            gradient_checkpointing=wanted,
            max_steps=3,
            size={"dropout": dropout},
        )
        with pytest.MonkeyPatch.context() as patch:
            watched = Watched(patch)
            workshop.train(job)
        ends.append({name: p.detach() for name, p in watched.model.named_parameters()})
    for name, end in ends[0].items():
        off = (end - ends[1][name]).abs().max().item()
        assert off <= (1e-5 if family == "bert" else 0.0), name


def test_nothing_is_kept_of_a_pass_that_was_counted():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 8), torch.nn.Softmax(-1)
    )
    seen: list[Any] = []
    for layer in model:
        layer.register_forward_hook(lambda _, __, out: seen.append(weakref.ref(out)))
    rows = torch.ones(5, 8)
    # the input, what the sigmoid gives, which the next layer reads too, and what the softmax gives
    assert saved_bytes(model, lambda: model(rows).sum()) == 3 * rows.nbytes
    assert len(seen) == 4
    assert not [each for each in seen if each() is not None], (
        "a graph that holds itself is never collected"
    )


SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("linear", "cosine", "cosine_with_restarts", "polynomial")),
    *((name, {}) for name in ("constant", "constant_with_warmup", "inverse_sqrt")),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_with_min_lr", {"min_lr": 0.002, "num_cycles": 1.25}),
    ("polynomial", {"lr_end": 0.001, "power": 2.0}),
    ("inverse_sqrt", {"timescale": 7}),
    ("warmup_stable_decay", {"num_decay_steps": 5}),
    ("warmup_stable_decay", {"num_decay_steps": 8, "decay_type": "1-sqrt", "min_lr_ratio": 0.2}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 3, "decay_type": "linear", "warmup_type": "cosine"},
    ),
    ("warmup_stable_decay", {"num_decay_steps": 4, "warmup_type": "1-sqrt", "min_lr_ratio": 0.1}),
]


@pytest.mark.parametrize(("name", "kwargs"), SCHEDULES, ids=str)
@pytest.mark.parametrize("n_warmup_steps", [0, 4])
def test_schedules_are_those_of_transformers_step_by_step(name, kwargs, n_warmup_steps):
    rate, n_steps = 0.03, 23
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    theirs = transformers.get_scheduler(
        name,
        optimizer,
        num_warmup_steps=n_warmup_steps,
        num_training_steps=n_steps,
        scheduler_specific_kwargs=dict(kwargs),
    )
    ours = schedule(
        name, n_warmup_steps=n_warmup_steps, n_steps=n_steps, learning_rate=rate, kwargs=kwargs
    )
    assert [ours(step) for step in range(n_steps + 3)] == [
        theirs.lr_lambdas[0](step) for step in range(n_steps + 3)
    ]


@pytest.mark.slow
def test_a_run_follows_its_schedule_to_the_least_rate(tmp_path):
    keys: dict[str, Any] = {"lr_scheduler_type": "cosine_with_min_lr", "max_steps": 8}
    keys |= {"lr_scheduler_kwargs": {"min_lr_rate": 0.25}, "warmup_steps": 0}
    job = make_job(tmp_path / "cosine", **keys)
    workshop.train(job)
    rates = [row["lr"] for row in log_of(job)]
    assert rates[0] == 0.01
    assert rates[4] == pytest.approx(0.01 * (0.5 * 0.75 + 0.25))
    keys = {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 8, "warmup_steps": 2}
    keys["lr_scheduler_kwargs"] = {"num_decay_steps": 4, "decay_type": "linear"}
    job = make_job(tmp_path / "wsd", **keys)
    workshop.train(job)
    rates = [row["lr"] for row in log_of(job)]
    assert rates == pytest.approx([0, 0.005, 0.01, 0.01, 0.01, 0.0075, 0.005, 0.0025])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "needs one of min_lr and min_lr_rate"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "needs the steps"),
        ({"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, "constant has no `min_lr_rate`"),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 10},
            },
            "min_lr_rate: Input should be less than or equal to 1",
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 2, "decay_type": "square"},
            },
            "decay_type: Input should be 'cosine'",
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 50},
            },
            "more than the run's 6",
        ),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr": 0.5},
            },
            "decays to 0.5, and the learning rate is 0.01",
        ),
    ],
)
def test_a_schedule_that_can_not_be_followed_is_refused(keys, words, tmp_path):
    with pytest.raises(InputError, match=words):
        workshop.train(make_job(tmp_path, **keys))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_adafactor_is_that_of_transformers_and_resumes(method, tmp_path, monkeypatch):
    """A plain loop over the run's own gradients, and a run that is stopped in its middle."""
    from transformers.optimization import Adafactor

    keys: dict[str, Any] = {"optim": "adafactor", "method": method, "n_rows": 24, "max_steps": 5}
    keys |= {"weight_decay": 0.1, "max_grad_norm": 0, "save_steps": 2}
    watched = Watched(monkeypatch)
    job = make_job(tmp_path / "whole", **keys)
    taken: list[dict[str, torch.Tensor]] = []
    step = Adafactor.step

    def noted(optimizer, closure=None):
        model = watched.model
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not taken:
            taken.append({n: p.detach().clone() for n, p in named.items()})
        taken.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
        return step(optimizer, closure)

    monkeypatch.setattr(Adafactor, "step", noted)
    workshop.train(job)
    begin, *gradients = taken
    weights = {name: torch.nn.Parameter(value.clone()) for name, value in begin.items()}
    named = decayed_names(watched.model)
    plain = Adafactor(
        [
            {"params": [w for n, w in weights.items() if n in named], "weight_decay": 0.1},
            {"params": [w for n, w in weights.items() if n not in named], "weight_decay": 0.0},
        ],
        lr=0.01,
        scale_parameter=False,
        relative_step=False,
    )
    for each in gradients:
        for name, weight in weights.items():
            weight.grad = each.get(name)
        step(plain)
    ends = dict(watched.model.named_parameters())
    assert all(torch.equal(weight, ends[name]) for name, weight in weights.items())

    stopped = make_job(tmp_path / "stopped", **keys)
    with monkeypatch.context() as patch:
        fail_at(4, ZeroDivisionError("of our own"), patch)
        with pytest.raises(ZeroDivisionError):
            workshop.train(stopped)
    workshop.train(stopped)
    assert losses_of(stopped) == losses_of(job)


def test_a_plan_counts_next_to_no_state_for_adafactor():
    from farthing.planner.optimizers import optimizer

    assert optimizer("adafactor").state_bytes(4) < 0.05
    assert optimizer("adafactor").state_bytes(4, rank=16) == 0.25
    assert optimizer("adamw_torch_fused").state_bytes(4) == 8
