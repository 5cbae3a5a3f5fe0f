"""The step: micro-batches made ready ahead, figures that stay on the device, and what happens when
a thread fails.
"""

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farthing.data.loader import MicroBatch, Prefetcher, micro_batches
from farthing.data.row_table import row_table
from farthing.errors import NotFiniteError
from farthing.events import Decided, StepSkipped, StepTaken
from farthing.model.forward import Forward
from farthing.train.loop import take_step
from farthing.train.step import Step
from farthing.train.update import WeightUpdate
from patience import until
from thinned import thinned
from workshop import (
    Heard,
    Watched,
    are_same,
    log_of,
    losses_of,
    make_job,
    opened,
    read_json,
    rows_of,
    steps_of,
    train,
    with_system_prompt,
)

# ---- the feed ----


def times(honest, factor: float):
    """`Forward.loss` with losses so many times as large."""

    def loss(*args):
        found, figures = honest(*args)
        return found * factor, figures

    return loss


def items(n: int) -> Iterator[MicroBatch]:
    return micro_batches(
        0,
        n,
        lambda step: np.arange(4) + 4 * step,
        lambda examples: row_table([[examples[:3], examples[3:]]]),
        lambda examples: {"input_ids": examples},
    )


def test_a_feed_runs_ahead_but_not_away():
    made = []

    def noting():
        for micro_batch in items(100):
            made.append(micro_batch.step)
            yield micro_batch

    feed = Prefetcher(noting(), ahead=2)
    until(lambda: len(made) == 3)
    time.sleep(0.2)
    assert len(made) == 3  # two wait, one is in the thread's hand
    feed.close()
    assert not any(each.name.startswith("farthing-feed") for each in threading.enumerate())


def test_an_error_of_collating_ends_the_run_and_switches_all_on_again(tmp_path, monkeypatch):
    job = make_job(tmp_path, max_steps=6)
    honest, calls = Forward.collate, []

    def failing(forward, tokens, examples):
        calls.append(examples)
        if len(calls) == 4:
            raise ValueError("no such row")
        return honest(forward, tokens, examples)

    monkeypatch.setattr(Forward, "collate", failing)
    with pytest.raises(ValueError, match="no such row"):
        train(job)
    assert gc.isenabled()


# ---- running ahead ----


def ends_of(job, patch: pytest.MonkeyPatch) -> tuple[list[Any], dict[str, torch.Tensor], Any]:
    watched = Watched(patch)
    receipt = train(job).receipt
    rows = [row for row in log_of(job) if "loss" in row or "metrics" in row]
    for row in rows:
        row.pop("samples", None)
    rows.sort(key=lambda row: (row["step"], "metrics" in row))
    return rows, dict(watched.model.named_parameters()), receipt


def test_a_host_that_runs_ahead_of_the_device_ends_in_the_same_bits(tmp_path, monkeypatch):
    """On a GPU the host is a step ahead when it reads a loss; the same order of things is played on
    the CPU here.
    """
    keys = {"max_steps": 8, "n_rows": 40, "save_steps": 3, "max_skipped_steps": 3}
    keys |= {"eval_rows": rows_of("llama", 6, 5), "eval_strategy": "steps"}
    take = Step.take

    def spoil(steps, step):
        honest = steps.forward.loss
        if step + 1 in (2, 3, 7):
            steps.forward.loss = times(honest, torch.nan)  # type: ignore[method-assign]
        try:
            return take(steps, step)
        finally:
            steps.forward.__dict__.pop("loss", None)

    monkeypatch.setattr(Step, "take", spoil)
    rows, weights, receipt = ends_of(make_job(tmp_path / "a", eval_steps=4, **keys), monkeypatch)
    monkeypatch.setattr(WeightUpdate, "n_ahead", property(lambda _: 1))
    ahead = ends_of(make_job(tmp_path / "b", eval_steps=4, **keys), monkeypatch)
    assert ahead[0] == rows
    assert are_same(weights, ahead[1])
    assert ahead[2].skipped_steps == receipt.skipped_steps == 3
    assert ahead[2].steps == 8


def test_too_many_bad_steps_end_a_run_that_is_ahead_with_everything_noted(tmp_path, monkeypatch):
    honest = Forward.loss
    monkeypatch.setattr(Forward, "loss", times(honest, torch.nan))
    monkeypatch.setattr(WeightUpdate, "n_ahead", property(lambda _: 1))
    job = make_job(tmp_path, max_steps=9, max_skipped_steps=2)
    with pytest.raises(NotFiniteError):
        train(job)
    assert [row["step"] for row in steps_of(job)] == [1, 2, 3]  # the third was under way
    assert list((tmp_path / "run/checkpoints").glob("step-00000003-*"))


@pytest.mark.parametrize("is_loss", [True, False])
def test_a_step_that_is_left_out_names_the_rows_that_it_may_come_from(
    is_loss, tmp_path, monkeypatch
):
    honest, n_of, bad = Forward.loss, [], torch.nan

    def loss(forward, *given):
        n_of.append(int(given[0]["n_targets"].numel()))
        found, figures = honest(forward, *given)
        if len(n_of) != 2:
            return found, figures
        if is_loss:
            return found * bad, figures
        found.register_hook(lambda gradient: gradient * bad)
        return found, figures

    monkeypatch.setattr(Forward, "loss", loss)
    job, heard = make_job(tmp_path, max_steps=1, micro_batch_tokens=150), Heard()
    train(job, heard)
    (skipped,) = heard.of(StepSkipped)
    assert len(n_of) == 2
    assert len(skipped.samples) == (n_of[1] if is_loss else 8)
    assert skipped.skipped == ("the loss is" if is_loss else "the gradient is")


@pytest.mark.parametrize("optim", thinned(["adamw_torch_fused", "adamw_torch", "sgd"], 2))
def test_no_optimizer_moves_a_weight_when_the_gradient_is_not_finite(optim, tmp_path, monkeypatch):
    honest = Forward.loss
    monkeypatch.setattr(Forward, "loss", times(honest, torch.inf))
    watched = Watched(monkeypatch)
    train(make_job(tmp_path, max_steps=2, optim=optim))
    assert watched.changed() == set()


def test_a_step_moves_each_weight_by_the_keys_of_its_job_and_is_counted(tmp_path, monkeypatch):
    keys = {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    keys |= {"where": {"same_bits": True}}
    job = make_job(
        tmp_path, method={"name": "lora", "loraplus_lr_ratio": 16, "use_dora": True}, **keys
    )
    seeds, honest = [], Forward.loss

    def loss(*given):
        seeds.append(torch.initial_seed())
        return honest(*given)

    monkeypatch.setattr(Forward, "loss", loss)
    with opened(job) as run:
        take_step(run)
        groups = run.optimizer.param_groups
        at, tokens = run.progress, run.train_examples.tokens
        examples = run.feed.batches.examples_of(0)
        assert at.n_tokens == at.n_padded_tokens == tokens.lengths[examples].sum()
        assert at.n_targets == tokens.target_lengths[examples].sum() < at.n_tokens
        seeds += [(run.steps.step.begin(step), torch.initial_seed())[1] for step in (1, 2)]
    assert len({*seeds}) == len(seeds) == 4 + 2, "each micro-batch and step drops others"
    assert [(each["lr"], each["weight_decay"]) for each in groups] == [(0.01, 0.1), (0.16, 0.1)]
    assert 2 * len(groups[0]["params"]) == len(groups[1]["params"]), "B, and DoRA's magnitudes"
    assert all((each["betas"], each["eps"]) == ((0.8, 0.95), 1e-6) for each in groups)


# ---- what is computed ----


@pytest.mark.parametrize("family", thinned(["llama", "t5", "bert"], 9))
def test_a_run_computes_useful_tokens_only(family, tmp_path):
    job = make_job(tmp_path, family, max_steps=4, n_rows=120, global_batch_size=32)
    heard = Heard()
    train(job, heard)
    last = heard.of(StepTaken)[-1]
    least = 0.85 if family == "t5" else 1.0  # padded: another piece has to save more than it costs
    assert last.run_tokens >= least * last.run_padded_tokens


def test_micro_batches_grow_where_a_beginning_is_then_computed_less_often(tmp_path):
    keys = {"rows": with_system_prompt(48, 40), "max_steps": 1}
    keys |= {"data": {"max_length": 2048}, "global_batch_size": 16}

    def settings_of(name, heard, **more):
        job = make_job(tmp_path / name, **keys, **more)
        train(job, heard)
        kept = read_json(Path(job.output_dir) / "settings.json")
        return kept, heard.of(Decided)[0].batch, losses_of(job)

    kept, said, losses = settings_of("free", Heard())
    assert kept["shares_prefix"]
    assert kept["micro_batch_tokens"] > 1024
    assert f"up to {kept['micro_batch_tokens']:,} tokens at a time" in said
    asked, told, expected = settings_of("asked", Heard(), micro_batch_tokens=1024)
    assert asked["micro_batch_tokens"] == 1024
    assert "up to 1,024 tokens at a time" in told
    assert losses == pytest.approx(expected, rel=1e-5)
