"""The memory that is judged before the first step, against the peak of steps traced without data at
real sizes.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

import farthing.model.head
import farthing.models.tiles
from farthing.model.activation_checkpointing import (
    Beside,
    Linear,
    MemoryNeed,
    Sample,
    choose_checkpointing,
)
from farthing.model.attention import Documents
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.model.head import HeadSettings
from farthing.model.loss import Labelled
from farthing.models.tiles import head_bytes
from farthing.train.run_settings import first_settings
from heads import head_loss
from on_gpu.work import config_of
from traced import Alive, fake_model, traced_peak
from traced_models import cut_config
from traced_models import large_blocks as large_blocks
from workshop import make_job, opened

CPU = torch.device("cpu")
LENGTH = 512  # of a document


class Case(NamedTuple):
    """A model by its size or family, and how it is trained: micro-batches of `n_documents` of 512
    tokens.
    """

    model: str
    method: str
    every: int
    n_documents: int = 8
    accumulates: bool = False
    n_layers: int | None = None
    casts_once: bool = False


def config_for(case: Case):
    """The configuration, with a few layers or all."""
    if case.model in ("0.5B", "1B", "3B", "8B"):
        values = dict(config_of(case.model))
        if case.n_layers:
            values["num_hidden_layers"] = case.n_layers
    else:
        values = cut_config(case.model, case.n_layers or 4)
    values.pop("layer_types", None)
    kind = values.pop("model_type")
    return AutoConfig.for_model(kind, **values)


def how(case: Case) -> dict[str, Any]:
    """What both the judgement and the trace are made with."""
    lora = None if case.method == "full" else {"r": 16, "target_modules": "all-linear"}
    return {
        "method": case.method,
        "weights": "fp32" if case.method == "full" else "bf16",
        "lora": lora,
    }


def judged(case: Case) -> tuple[MemoryNeed, int]:
    """(the need that is found from one document and two, bytes of the loaded weights)."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = fake_model(config_for(case), "causal-lm", checkpoint_every=0, **how(case))
        forward = Forward(model, "causal-lm", 0, Numerics(CPU, torch.bfloat16))
        assert forward.is_packed

        def sample_of(n):
            of = Documents.of((LENGTH,) * n)
            ids = torch.zeros(1, LENGTH * n, dtype=torch.long)
            batch = {
                "input_ids": ids,
                "position_ids": ids,
                "attention_mask": of.no_mask,
                "documents": of,
            }
            batch |= {"labels": ids, "labelled_positions": ids[0]}
            batch["labelled_targets"] = ids[0]
            return Sample(LENGTH * n, lambda: forward.before_head(batch))

        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        largest = LENGTH * case.n_documents
        head, twice = forward.head_bytes(largest), forward.head_bytes(2 * largest)
        need = choose_checkpointing(
            model,
            (sample_of(1), sample_of(2)),
            Beside(
                n_tokens=largest,
                accumulates=case.accumulates,
                optimizer_bytes=2 * trained,
                update_bytes=0,
                free_bytes=1 << 50,
                head=Linear(2 * head - twice, (twice - head) / largest),
                autocast=torch.bfloat16,
                casts_once=case.casts_once,
            ),
            wanted=case.every,
        )
        return need, sum(p.nbytes for p in model.parameters())


CASES = [
    Case("1B", "full", 0, 2, accumulates=True, n_layers=3, casts_once=True),
    Case("1B", "full", 0, n_layers=3),
    Case("1B", "full", 1, accumulates=True, n_layers=2),
    Case("1B", "full", 1, 2, accumulates=True, n_layers=2, casts_once=True),
    Case("0.5B", "lora", 2, n_layers=3),
    Case("1B", "full", 1, 4, n_layers=3, casts_once=True),
    Case("1B", "qlora", 1, n_layers=3),
]


@pytest.mark.slow
@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_need_judged_from_two_short_documents_is_the_peak_of_a_step(case):
    need, loaded_bytes = judged(case)
    assert need.checkpoint_every == case.every
    seen_bytes = traced_peak(
        config_for(case),
        "causal-lm",
        autocast=True,
        checkpoint_every=case.every,
        documents=(LENGTH,) * case.n_documents,
        n_targets=LENGTH * case.n_documents,
        accumulates=case.accumulates,
        casts_once=case.casts_once,
        **how(case),
    )
    assert need.total_bytes + loaded_bytes == pytest.approx(seen_bytes, rel=0.05), need.moments()


def test_copies_of_trained_matrices_do_not_grow_with_the_tokens():
    """Sixteen times the tokens of the first sample, and copies in bf16 are counted once."""
    need, _ = judged(Case("1B", "full", 0, 32, n_layers=2))
    config = config_for(Case("1B", "full", 0, n_layers=2))
    h, f = config.hidden_size, config.intermediate_size
    kv = h * config.num_key_value_heads // config.num_attention_heads
    matrices = 2 * (2 * h * h + 2 * h * kv + 3 * h * f)
    assert need.saved.constant_bytes == pytest.approx(2 * matrices, rel=0.01)
    assert need.casts_bytes == 2 * matrices


def test_gradients_and_activations_are_not_there_at_once_but_where_gradients_are_held():
    once, _ = judged(Case("1B", "full", 0, 8, n_layers=2))
    held, _ = judged(Case("1B", "full", 0, 8, accumulates=True, n_layers=2))
    assert held.moments()["loss"] - once.moments()["loss"] == once.gradients.all_bytes
    assert once.moments()["update"] == held.moments()["update"] == once.gradients.all_bytes


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_head_has_one_block_of_rows_at_work(precision, cap, monkeypatch):
    n, n_words, width = 256, 4000, 8
    block_bytes = 64 * n_words * 4
    monkeypatch.setattr(
        farthing.model.head, "CPU_BLOCK_BYTES", block_bytes // torch.get_num_threads()
    )
    monkeypatch.setattr(farthing.models.tiles, "CPU_BLOCK_BYTES", block_bytes)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    hidden, weight = (
        torch.zeros(n, width, dtype=dtype, requires_grad=True),
        torch.zeros(n_words, width, dtype=dtype),
    )
    labelled = Labelled(torch.arange(n), torch.zeros(n, dtype=torch.long))
    with Alive() as alive:
        head_loss(hidden, weight, None, labelled, HeadSettings(soft_cap=cap))
    said = head_bytes(n, n_words, width, precision, is_cuda=False, has_cap=cap is not None)
    assert alive.peak == pytest.approx(said, rel=0.05)


def test_a_run_without_a_probe_begins_with_no_checkpointing_whatever_was_planned(tmp_path):
    """The least that fits is measured."""
    job = make_job(tmp_path, size={"hidden": 32, "layers": 1}, probe=False)
    with opened(job) as run:
        planned = run.estimate
        planned = replace(planned, settings=replace(planned.settings, checkpoint_every=2))
        found = first_settings(run.spec, run.context, run.train_examples, planned)
        assert found.checkpoint_every == 0
        assert run.memory.checkpoint_every == 0
