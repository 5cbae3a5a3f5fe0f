"""Full fine-tuning and adapters on the three tasks: what learns, what stays, and by which rule it
moves.
"""

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

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
from farthing.model.adapters import count_parameters
from farthing.model.load import ModelChoice, load_config, load_model
from farthing.train.build import build_model
from farthing.train.loop import take_step
from farthing.train.resolve import resolve
from farthing.train.schedule import schedule
from heads import gradients_of, summed_loss
from packed_models import model_of, with_adapter
from scarce import optimizer_of, with_scaler
from scarce import small_model as small_weights
from thinned import thinned
from workshop import (
    Heard,
    Watched,
    are_same,
    log_of,
    losses_of,
    make_job,
    read_json,
    weights_in,
)

ADAPTERS = {
    "dora": {"name": "lora", "use_dora": True},
    "rslora": {"name": "lora", "use_rslora": True},
}


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


# ---- what learns ----


@pytest.mark.parametrize(
    ("family", "method"),
    thinned([("llama", "dora"), ("llama", "full"), ("t5", "lora"), ("bert", "rslora")], 9),
)
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
    assert workshop.train(job).state == "finished"
    losses, changed, trainable = losses_of(job), watched.changed(), watched.trainable()
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert changed <= trainable
    assert len(changed) > 0.9 * len(trainable), "a decoder start or unused position may stay"
    if method != "full":
        kinds = ("lora_", "modules_to_save") if family == "bert" else ("lora_",)
        assert all(any(kind in name for kind in kinds) for name in trainable)
        assert any("lora_magnitude_vector" in name for name in changed) == (method == "dora")


ALL_OF_LLAMA = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("family", "target_modules", "adapted"),
    [
        ("llama", (), ALL_OF_LLAMA),
        ("llama", "all-linear", ALL_OF_LLAMA),
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


@pytest.mark.parametrize(
    ("family", "names"),
    thinned(
        [
            ("t5", {"target_modules": ["q"], "modules_to_save": ["lm_head"]}),
            (
                "llama",
                {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
            ),
            ("bert", {"target_modules": ["word_embeddings", "position_embeddings"]}),
        ],
        9,
    ),
)
def test_whatever_a_job_names_is_trained_over_a_base_in_bf16_and_merged(
    tmp_path, watched, family, names
):
    keys = {"max_steps": 2, "bf16": True, "pretrained": True}
    job = make_job(tmp_path, family, method={"name": "lora", **names}, **keys)
    workshop.train(job)
    assert watched.changed() == watched.trainable()
    kinds = {each.dtype for each in watched.model.parameters() if each.requires_grad}
    assert kinds == {torch.float32}, "masters"
    assert export_run(Path(job.output_dir), tmp_path / "merged", "merged")


@pytest.mark.parametrize(
    ("family", "key", "wrong", "known"),
    [
        ("llama", "modules_to_save", "lm_haed", ("lm_head",)),
        ("llama", "target_modules", "v_porj", ("v_proj",)),
        ("t5", "target_modules", "shared", ()),  # never computed
        ("t5", "modules_to_save", "shared", ()),
    ],
)
def test_modules_that_cannot_be_trained_are_refused_and_the_choices_named(
    family, key, wrong, known, tmp_path
):
    names = ["q_proj", wrong] if known else [wrong]
    job = make_job(tmp_path, family, method={"name": "lora", key: names})
    with pytest.raises(ModelError, match=wrong) as caught:
        workshop.train(job)
    assert caught.value.where == f"method.{key}"
    assert all(name in caught.value.to_do for name in known)


# ---- precision ----


@pytest.mark.parametrize("method", ["full", "lora"])
def test_bf16_keeps_frozen_weights_in_bf16_and_trained_ones_in_fp32(method, tmp_path, watched):
    workshop.train(make_job(tmp_path, method=method, bf16=True, max_steps=1))
    dtypes = {name: p.dtype for name, p in watched.model.named_parameters()}
    assert {dtypes[name] for name in watched.trainable()} == {torch.float32}
    frozen = {dtype for name, dtype in dtypes.items() if name not in watched.trainable()}
    assert frozen == (set() if method == "full" else {torch.bfloat16})
    assert read_json(tmp_path / "run/run.json")["machine"]["precision"] == "bf16"


def test_random_weights_are_the_same_in_every_precision(tmp_path):
    folder = workshop.make_folder(tmp_path / "base", "llama")
    choice = ModelChoice(str(folder), init="random")
    exact, rounded = (
        load_model(choice, load_config(choice), "causal-lm", dtype=dtype, seed=3).state_dict()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)


def test_the_scaler_unscales_before_clipping(tmp_path, monkeypatch):
    keys = {"max_steps": 2, "max_grad_norm": 0.5}
    plain, scaled = (make_job(tmp_path / name, **keys) for name in ("plain", "scaled"))
    workshop.train(plain)
    with_scaler(monkeypatch)
    workshop.train(scaled)
    for key in ("loss", "grad_norm"):
        ours, theirs = ([row[key] for row in log_of(job)] for job in (scaled, plain))
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_an_overflow_skips_the_step_and_halves_the_scale_and_is_not_counted_as_nan(
    tmp_path, monkeypatch
):
    with_scaler(monkeypatch)
    job, heard = make_job(tmp_path, max_skipped_steps=2), Heard()
    with workshop.opened(job, heard) as run:
        before = weights_in(run.model)
        step = run.steps.step
        unscale = step.scaler.unscale_

        def overflow(optimizer):
            next(p for p in step.trained if p.grad is not None).grad.fill_(torch.inf)
            unscale(optimizer)

        with monkeypatch.context() as patch:
            patch.setattr(step.scaler, "unscale_", overflow)
            for expected in (2.0**15, 2.0**14, 2.0**13):
                take_step(run)
                assert step.scaler.get_scale() == expected
        assert are_same(before, weights_in(run.model))
        states = [value for state in step.optimizer.state.values() for value in state.values()]
        assert not any(value.any() for value in states)
        assert (run.progress.step, run.progress.skipped_in_a_row) == (3, 0)
        assert "overflowed" in heard.warnings
        take_step(run)
        assert not are_same(before, weights_in(run.model))
        run.saver.save_last()
    with workshop.opened(job, heard) as run:
        assert run.scaler.get_scale() == 2.0**13


# ---- optimizers and schedules ----


def test_a_polynomial_that_would_have_to_rise_is_refused():
    for rate in (1e-8, 1e-7):  # it ends at 1e-7
        with pytest.raises(InputError, match=f"the learning rate is {rate}"):
            schedule("polynomial", n_warmup_steps=0, n_steps=4, learning_rate=rate)
    even = {"n_steps": 4, "learning_rate": 0.1, "kwargs": {"min_lr": 0.1}}
    assert schedule("cosine_with_min_lr", n_warmup_steps=0, **even)(3) == 1


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.5},
            [0, 0.01 / 3, 0.02 / 3, 0.01, 0.01],
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 1}
            | {"lr_scheduler_kwargs": {"num_decay_steps": 4, "decay_type": "linear"}},
            [0, 0.01, 0.0075, 0.005, 0.0025],
        ),
    ],
)
def test_a_run_follows_its_schedule_at_a_rate_for_its_global_batch(keys, rates, tmp_path):
    """A quarter of the batch that 0.04 was tuned for."""
    batch = {"global_batch_size": 8, "learning_rate_batch_size": 32, "learning_rate": 0.04}
    job = make_job(tmp_path, max_steps=5, **batch, **keys)
    workshop.train(job)
    assert [row["lr"] for row in log_of(job)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "label_smoothing_factor", 0.2),
        ("bert", "label_smoothing_factor", 0.2),
        ("llama", "neftune_noise_alpha", 5.0),
    ],
)
def test_keys_of_the_loss_change_training(family, key, value, tmp_path):
    losses = []
    for more in ({}, {key: value}):
        job = make_job(tmp_path / f"{len(more)}", family, max_steps=1, **more)
        workshop.train(job)
        losses += losses_of(job)
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.2)


# ---- loading ----


def test_a_model_whose_weights_are_not_all_there_is_refused(tmp_path):
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


# ---- activation checkpointing ----


def small_model(family: str, method: str = "full", dropout: float = 0.0):
    """A model of four layers that trains, and its forward pass of so many copies of a batch."""
    task = workshop.TASK[family]
    drops = {"attention_dropout": dropout, "hidden_dropout_prob": dropout}
    model = model_of(family, task, num_hidden_layers=4, **drops)
    if method == "lora":
        model = with_adapter(model, task)
    ids = torch.randint(5, 99, (4, 24), generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([0, 1, 2, 0]) if family == "bert" else ids

    def forward(n_copies=1):
        given = [torch.cat([each] * n_copies) for each in (ids, torch.ones_like(ids), labels)]
        batch = dict(zip(("input_ids", "attention_mask", "labels"), given, strict=True))
        return summed_loss(model, batch, task)[0]

    return model, forward


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_checkpointing_saves_memory_and_changes_no_bit_of_the_gradients(family, method):
    model, forward = small_model(family, method, dropout=0.1)

    def gradients():
        torch.manual_seed(5)
        return gradients_of(model, forward())

    expected, kept = gradients(), {0: saved_bytes(model, forward)}
    for every in (1, 2, 4):
        checkpoint_layers(model, every)
        found, kept[every] = gradients(), saved_bytes(model, forward)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert kept[1] < kept[2] < kept[4] < kept[0]
    checkpoint_layers(model, 0)
    assert saved_bytes(model, forward) == kept[0]


def choose(model, forward, free_bytes: int, wanted: bool | int | str = "auto"):
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


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("method", thinned(["full", "lora"], 2))
def test_auto_checkpoints_no_more_than_the_memory_asks_for(family, method):
    model, forward = small_model(family, method)
    ample, tiny = choose(model, forward, 1 << 40), choose(model, forward, 1)
    assert (ample.checkpoint_every, ample.fits) == (0, True)
    assert (tiny.checkpoint_every, tiny.fits) == (1, False)
    half = choose(model, forward, 1, wanted=2)
    assert tiny.saved.at(4000) < half.saved.at(4000) < ample.saved.at(4000)
    assert tiny.total_bytes < half.total_bytes < ample.total_bytes
    between = (half.total_bytes + ample.total_bytes) / 2
    assert choose(model, forward, int(between / 0.9)).checkpoint_every == 2
    assert ample.gradients.all_bytes == 4 * count_parameters(model)["trainable"]


def test_a_sample_without_room_is_a_mode_that_does_not_fit():
    model, forward = small_model("llama")

    def short(n_copies=1):
        if not any(
            getattr(module, "gradient_checkpointing", False) for module in model.model.layers
        ):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(n_copies)

    assert choose(model, short, 1 << 40).checkpoint_every == 2
    with pytest.raises(torch.OutOfMemoryError):
        choose(model, short, 1 << 40, wanted=False)


def test_nothing_is_kept_of_a_pass_that_was_counted():
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.Sigmoid(), torch.nn.Linear(8, 8), torch.nn.Softmax(-1)
    )
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda _, __, out: seen.append(weakref.ref(out)))
    rows = torch.ones(5, 8)
    # the input, what the sigmoid gives, which the next layer reads too, and what the softmax gives
    assert saved_bytes(model, lambda: model(rows).sum()) == 3 * rows.nbytes
    assert len(seen) == 4
    assert not any(each() is not None for each in seen)  # a circle is never collected
    with pytest.raises(ModelError, match="can't recompute"):
        choose(model, None, 0, wanted=True)


SCHEDULES = [
    *((name, {}) for name in ("linear", "cosine", "constant", "constant_with_warmup")),
    ("polynomial", {"lr_end": 0.001, "power": 2.0}),
    ("warmup_stable_decay", {"num_decay_steps": 19, "decay_type": "1-sqrt", "min_lr_ratio": 0.2}),
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


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "needs one of min_lr and min_lr_rate"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "needs the steps"),
        ({"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, "constant has no `min_lr_rate`"),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 10}},
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
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.5}},
            "decays to 0.5, and the learning rate is 0.01",
        ),
    ],
)
def test_a_schedule_that_can_not_be_followed_is_refused(keys, words, tmp_path):
    with pytest.raises(InputError, match=words):
        workshop.train(make_job(tmp_path, **keys))


def test_adafactor_has_the_rate_of_the_job():
    groups = optimizer_of(small_weights(), "adafactor").param_groups
    kept = [(each["lr"], each["scale_parameter"], each["relative_step"]) for each in groups]
    assert kept == [(0.01, False, False)] * 2
