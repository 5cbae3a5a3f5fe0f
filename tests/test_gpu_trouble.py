"""A GPU that fails, and memory that it lacks outside of a step: in words, with the right exit code,
and a run that goes on.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from farthing.after.held_out import held_out_of
from farthing.device_memory import in_words, reported
from farthing.errors import DeviceError, HardwareError, OutOfMemoryError
from farthing.events import StepTaken
from farthing.export.folders import export_run, trained_model
from farthing.model.forward import Forward
from farthing.model.hardware import pinned
from farthing.model.liger import use_liger
from farthing.run.accounts import read_ledger
from farthing.train.update import load_update_kernels
from interrupted import when
from scarce import OPTIMIZERS, Failing, optimizer_of, small_model, step_of
from workshop import (
    Heard,
    job_file,
    losses_of,
    make_job,
    opened,
    rows_of,
    train,
    trained,
)

ILLEGAL = "CUDA error: an illegal memory access was encountered"
BROKEN = [
    torch.AcceleratorError(f"{ILLEGAL}\nCUDA kernel errors might be asynchronously reported"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    RuntimeError("CUDA error: unknown error"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    RuntimeError("Triton Error [CUDA]: misaligned address"),
]
WHOLE = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(...)`"),
    torch.AcceleratorError("CUDA error: invalid argument"),
    ValueError(ILLEGAL),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
def test_a_gpu_that_torch_can_not_use_is_warned_of(tmp_path, monkeypatch):
    machine = SimpleNamespace(n_gpus=1)
    monkeypatch.setattr("farthing.train.summary.local_machine", lambda: machine)
    heard = Heard()
    train(make_job(tmp_path, max_steps=1, where={"device": "auto"}), heard)
    assert "there is a GPU here that torch can't use" in heard.warnings


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: str(error)[:40])
def test_a_gpu_that_has_failed_is_said(error):
    said = in_words(error, "the run")
    assert isinstance(said, DeviceError)
    assert (said.where, said.exit_code) == ("the run", 1)
    assert str(error).splitlines()[0] in said.what
    assert len(str(said).splitlines()) == 2


@pytest.mark.parametrize("error", WHOLE, ids=lambda error: str(error)[:40])
def test_an_error_that_is_not_the_gpus_is_not_said_to_be(error):
    assert in_words(error) is None


KEYS = {"max_steps": 5, "save_steps": 2, "n_rows": 40}


@pytest.mark.slow
def test_a_gpu_that_fails_in_a_models_own_code_ends_a_run_that_goes_on(tmp_path, monkeypatch):
    job = make_job(tmp_path, **KEYS)

    def broken(*_, **__):
        raise torch.AcceleratorError(f"{ILLEGAL}\nmore of it")

    breaks = when(StepTaken, 2, lambda: monkeypatch.setattr(torch.nn.functional, "silu", broken))
    with pytest.raises(DeviceError) as caught:
        train(job, breaks)
    monkeypatch.undo()
    assert caught.value.exit_code == 1, "not 2, after which --retry would not go on"
    assert f"the GPU has failed: {ILLEGAL}\n  to do: run the same command" in str(caught.value)
    run = Path(job.output_dir)
    assert read_ledger(run / "ledger.jsonl").accounts[-1].state == "failed"
    assert not [each for each in (run / "checkpoints").iterdir() if "00003" in each.name]
    train(job)
    assert len(losses_of(job)) == 5


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError(ILLEGAL), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_a_gpu_that_fails_leaves_no_run_without_ligers_kernels(error, monkeypatch):
    def failing(_):
        raise error

    monkeypatch.setattr("farthing.model.liger.why_not_liger", lambda model: None)
    monkeypatch.setattr("farthing.model.liger.try_one_kernel", failing)
    with pytest.raises(type(error)):
        use_liger(small_model())


@pytest.mark.parametrize("as_json", [False, True])
def test_memory_that_runs_out_in_any_verb_is_said(as_json, tmp_path, monkeypatch, cli):
    path = job_file(tmp_path, max_steps=2)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("farthing.train.profiling.opened_run", full)
    out, err = cli("profile", path, *(["--json"] if as_json else []), code=1)
    assert "the device has no memory left: CUDA out of memory" in (out if as_json else err)
    assert "Traceback" not in out + err


def test_a_model_that_does_not_fit_is_not_called_damaged(tmp_path, monkeypatch):
    job = make_job(tmp_path, max_steps=2, pretrained=True)
    for place in (
        "farthing.model.load._body_must_be_whole",
        "farthing.train.build.refuse_looking_ahead",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, Failing(print, 1))
            with pytest.raises(OutOfMemoryError, match="CUDA error: out of memory") as caught:
                train(job)
        assert caught.value.where == "model.model_name_or_path"
        assert "qlora" in caught.value.to_do


def test_memory_that_runs_out_as_weights_are_converted_is_found_in_the_report():
    def log_state_dict_report(loading_info):
        raise RuntimeError("We encountered some issues during automatic conversion of the weights.")

    why = (
        "Traceback (most recent call last):\ntorch.OutOfMemoryError: CUDA out of memory. Tried to"
        " allocate 2.00 GiB"
    )
    for said, expected in (
        (f"{why}\nError: Bnb4bit", "CUDA out of memory. Tried"),
        ("shapes", "We encountered"),
    ):
        with pytest.raises(RuntimeError) as caught:
            log_state_dict_report(SimpleNamespace(conversion_errors={"a.weight": said}))
        assert str(reported(caught.value)).startswith(expected)


def test_memory_that_cannot_be_pinned_is_done_without(monkeypatch):
    tensor = torch.arange(3)
    monkeypatch.setattr(Tensor, "pin_memory", Failing(Tensor.pin_memory, 1))
    assert pinned(tensor) is tensor

    def wrong(_):
        raise RuntimeError("cannot pin 'torch.cuda.LongTensor'")

    monkeypatch.setattr(Tensor, "pin_memory", wrong)
    with pytest.raises(RuntimeError, match="cannot pin"):
        pinned(tensor)


# ---- kernels of the update ----


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_of_the_update_are_loaded_without_a_trace(name):
    models = [small_model(), small_model()]
    tried, other = (optimizer_of(model, name) for model in models)
    for seed in range(2):
        load_update_kernels(tried)
        step_of(models[0], tried, seed)
        step_of(models[1], other, seed)
    assert len(tried.state) == len(other.state)
    assert all(
        torch.equal(*pair)
        for pair in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )


def test_an_update_without_room_for_its_kernels_is_missed_where_nothing_has_changed(
    tmp_path, monkeypatch
):
    job = make_job(tmp_path, max_steps=2)
    heard, failing = Heard(), Failing(torch.optim.AdamW.step, 1)
    with opened(job, heard) as run:
        before = {name: weight.clone() for name, weight in run.model.state_dict().items()}
        monkeypatch.setattr(torch.optim.AdamW, "step", lambda *args: failing(*args))
        run.steps.rehearse(0)
        assert failing.n > 1
        assert (
            "step 1: out of memory (CUDA error: out of memory); unused memory was freed"
            in heard.warnings
        )
        assert all(
            torch.equal(weight, before[name]) for name, weight in run.model.state_dict().items()
        )


# ---- after a run ----


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with an adapter."""
    folder = tmp_path_factory.mktemp("finished")
    keys = {
        "method": "lora",
        "pretrained": True,
        "eval_rows": rows_of("llama", 9, 5),
    }
    return trained(folder, max_steps=3, **keys)


@pytest.mark.slow
def test_an_evaluation_afterwards_goes_on_with_less_where_memory_runs_out(finished, monkeypatch):
    held_out = held_out_of(finished)
    model = trained_model(finished)
    expected = held_out.measure(model)
    honest, asked = Forward.measure, []

    def measure(forward, batch, step):
        asked.append(batch["input_ids"].numel())
        if asked[-1] > 90:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(forward, batch, step)

    monkeypatch.setattr(Forward, "measure", measure)
    found = held_out.measure(model)
    assert max(asked) > 90 >= asked[-1]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_an_adapter_is_merged_without_a_gpu(finished, tmp_path, monkeypatch):
    def busy():
        raise HardwareError("the GPU belongs to another run")

    monkeypatch.setattr("peft.peft_model.infer_device", busy)
    assert export_run(finished, tmp_path / "merged", "merged")["bytes"] > 0
