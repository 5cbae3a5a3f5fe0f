"""Memory that runs out: which errors say so, what survives it anywhere in a run, and what ends in
words.
"""

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import farthing.run.checkpoint
import farthing.train.build
import farthing.train.resolve
import farthing.train.run
import farthing.train.state
import farthing.train.step
import survive
from command import in_python
from farthing.device_memory import (
    is_out_of_memory,
    is_out_of_resources,
    set_allocator,
)
from farthing.errors import HardwareError, OutOfMemoryError, SaveError
from farthing.events import Decided, Restored, Warned
from farthing.model.forward import Forward
from farthing.train.optim import allocate_state, load_state, state_bytes, state_tensors
from farthing.train.update import WeightUpdate, temporary_bytes, update_bytes
from interrupted import LeavesAt
from scarce import GONE, OPTIMIZERS, Failing, optimizer_of, small_model, step_of, with_scaler
from thinned import thinned
from workshop import (
    Heard,
    Watched,
    losses_of,
    make_job,
    opened,
    room_for,
    rows_of,
    train,
)

ILLEGAL = "CUDA error: an illegal memory access"
FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
    ),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError(
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp"'
    ),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
    ),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]
OTHERS = [
    torch.AcceleratorError(f"{ILLEGAL} was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("CUDA out of memory"),
    OutOfMemoryError("said already"),
]


class OutOfResources(Exception):
    """Triton's, by its name."""


@pytest.mark.parametrize("error", FULL, ids=str)
def test_memory_that_ran_out_is_recognised_in_anyones_words(error):
    assert is_out_of_memory(error)
    assert not is_out_of_resources(error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


def test_a_kernel_that_does_not_fit_on_the_gpu_is_said_and_not_tried_with_less(
    tmp_path, monkeypatch
):
    of_triton = OutOfResources(
        "out of resource: shared memory, Required: 180224, Hardware limit: 101376"
    )
    of_inductor = RuntimeError(
        "No valid triton configs. OutOfMemoryError: out of resource: triton_tem_fused_0"
    )
    for error in (of_triton, of_inductor):
        assert is_out_of_resources(error)
        assert not is_out_of_memory(error)
    calls = []

    def failing(*_, **keys):
        calls.append(1)
        raise of_triton

    job = make_job(tmp_path, max_steps=2)
    monkeypatch.setattr(farthing.train.step.Step, "accumulate", failing)
    with pytest.raises(HardwareError, match="a kernel does not fit on this GPU"):
        train(job)
    assert len(calls) == 1


# ---- the allocator ----


def test_the_allocator_is_asked_for_segments_that_grow_unless_someone_has_set_it():
    environment = {}
    assert set_allocator(environment) == "expandable_segments:True (PYTORCH_ALLOC_CONF)"
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment = {name: "max_split_size_mb:512"}
        assert set_allocator(environment) == f"max_split_size_mb:512 ({name})"
        assert environment == {name: "max_split_size_mb:512"}


def test_the_command_line_sets_it_before_torch_is_there_and_children_have_it_too():
    code = (
        "import os, subprocess, sys, farthing.cli\n"
        "farthing.cli.main(['init', '--schema'])\n"
        "assert 'torch' not in sys.modules\n"
        "command = [sys.executable, '-c', 'import os; print(os.environ[\"PYTORCH_ALLOC_CONF\"])']\n"
        "print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)\n"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")
    }
    done = in_python(code, check=True, env=environment)
    assert done.stdout.splitlines()[-2:] == ["expandable_segments:True", ""]


# ---- the optimizer's state is there before the first step ----


def states_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    return state_tensors(optimizer, dict(model.named_parameters()))[0]


def places_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    found = states_of(optimizer, model)
    # Adafactor makes a scalar anew in each step
    return {key: 0 if "|RMS" in key else value.data_ptr() for key, value in found.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_is_made_beforehand_is_what_the_first_step_makes(name):
    models = [small_model(), small_model()]
    early, late = (optimizer_of(model, name) for model in models)
    allocate_state(early)
    places = places_of(early, models[0])
    for seed in range(3):
        step_of(models[0], early, seed)
        step_of(models[1], late, seed)
    ours, theirs = states_of(early, models[0]), states_of(late, models[1])
    assert places_of(early, models[0]) == places
    for one, other in ((ours, theirs), *[[model.state_dict() for model in models]]):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saved_state_goes_into_the_memory_that_is_there(name):
    model, other = small_model(), small_model(1)
    optimizer, second = optimizer_of(model, name), optimizer_of(other, name)
    step_of(model, optimizer)
    tensors, values = state_tensors(optimizer, dict(model.named_parameters()))
    allocate_state(second)
    before = places_of(second, other)
    load_state(second, dict(other.named_parameters()), tensors, values)
    found = states_of(second, other)
    assert places_of(second, other) == before
    assert all(torch.equal(value, tensors[key]) for key, value in found.items())
    assert state_tensors(second, dict(other.named_parameters()))[1] == values


def test_a_run_has_its_state_before_memory_is_judged_and_probed(tmp_path):
    with opened(make_job(tmp_path, max_steps=2)) as run:
        trained = sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
        assert run.memory.optimizer_bytes == state_bytes(
            run.steps.step.optimizer, run.spec.numerics.device
        )
        assert run.memory.optimizer_bytes == pytest.approx(2 * trained, rel=1e-3)


def test_an_optimizer_without_room_for_its_state_says_so_before_the_first_step(
    tmp_path, monkeypatch
):
    def failing(_):
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(farthing.train.build, "allocate_state", failing)
    with pytest.raises(OutOfMemoryError, match="CUDA error: out of memory") as caught:
        train(make_job(tmp_path, max_steps=2))
    assert "adamw_torch_offload" in caught.value.to_do


# ---- memory that runs out somewhere in a run ----

KEYS = {
    "max_steps": 5,
    "n_rows": 40,
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
}


PLACES = {
    "placing a batch": (Forward, "to_device", 4),
    "forward": (Forward, "loss", 2),
    "backward": (Tensor, "backward", 4),
    "clipping": (torch.nn.utils, "clip_grads_with_norm_", 2),
    "before the first update": (farthing.train.step, "reserve_for_update", 1),
    "before a later update": (farthing.train.step, "reserve_for_update", 3),
    "the update, before it writes": (torch.optim.AdamW, "step", 2),
    "evaluation": (Forward, "measure", 1),
    "snapshot of a checkpoint": (farthing.run.checkpoint, "copied", 3),
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """How a run ends that always had memory; with a gradient scaler and without."""
    ends = {}
    for scales in (False, True):
        folder = tmp_path_factory.mktemp("untouched")
        with pytest.MonkeyPatch.context() as patch:
            with_scaler(patch, needs_scaler=scales)
            ends[scales] = ended(folder)
    return ends


def ended(folder: Path, heard: Heard | None = None, **keys):
    """Losses, weights and metrics of a run that finished, and its receipt."""
    job = make_job(folder, eval_rows=rows_of("llama", 6, 5), **{**KEYS, **keys})
    outcome = train(job, heard)
    assert outcome.state == "finished"
    return survive.result_of(Path(job.output_dir)), losses_of(job), outcome.receipt


@pytest.mark.parametrize(
    ("place", "scales"),
    thinned(
        [
            *((place, False) for place in PLACES),
            *(
                (place, True)
                for place in ("clipping", "before the first update", "the update, before it writes")
            ),
        ],
        3,
    ),
)
def test_memory_that_runs_out_once_is_survived_to_the_bit(
    place, scales, untouched, tmp_path, monkeypatch
):
    with_scaler(monkeypatch, needs_scaler=scales)
    holder, name, at = PLACES[place]
    failing = Failing(getattr(holder, name), at)
    monkeypatch.setattr(holder, name, lambda *args, **kwargs: failing(*args, **kwargs))
    heard = Heard()
    result, losses, receipt = ended(tmp_path, heard)
    assert failing.n > at
    expected, expected_losses, _ = untouched[scales]
    assert survive.differences(expected, result) == []
    assert losses == expected_losses
    assert receipt.out_of_memory == []  # nothing was halved
    said_nothing = place in ("evaluation", "snapshot of a checkpoint")  # tried again at once
    assert (f"out of memory ({GONE})" in heard.warnings) != said_nothing


@pytest.mark.slow
def test_an_update_that_was_begun_is_never_taken_again_or_saved(untouched, tmp_path, monkeypatch):
    """The second group of weights has no room after the first was updated."""
    honest, n = torch.optim.AdamW.step, []

    def half(optimizer, *args):
        n.append(1)
        if len(n) != 4:
            return honest(optimizer, *args)
        groups = optimizer.param_groups
        optimizer.param_groups = groups[:1]
        try:
            honest(optimizer, *args)
        finally:
            optimizer.param_groups = groups
        raise torch.AcceleratorError(GONE)

    with_scaler(monkeypatch, needs_scaler=False)
    monkeypatch.setattr(torch.optim.AdamW, "step", half)
    with pytest.raises(
        OutOfMemoryError, match="in the update of step 4, after some weights had changed"
    ) as caught:
        ended(tmp_path, max_steps=5)
    assert "resumes from the last checkpoint" in caught.value.to_do
    assert sorted(path.name[:13] for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "step-00000002"
    ]
    heard = Heard()
    result, losses, _ = ended(tmp_path, heard)
    assert [event.step for event in heard.of(Restored)] == [2]
    assert survive.differences(untouched[False][0], result) == []
    assert losses == untouched[False][1]


def test_what_ran_out_of_memory_before_the_job_was_corrected_cuts_nothing(tmp_path, monkeypatch):
    def stop(event):
        if isinstance(event, Warned) and "tokens at a time" in event.text:
            raise ZeroDivisionError

    keys = {
        "max_steps": 2,
        "n_rows": 32,
        "global_batch_size": 16,
        "micro_batch_tokens": 600,
    }
    with monkeypatch.context() as patch:
        room_for(100, patch)
        with pytest.raises(ZeroDivisionError):
            train(make_job(tmp_path, **keys), stop)  # type: ignore[arg-type]
    decided = []
    for more in ({}, {"weight_decay": 0.1}):
        heard = Heard()

        def leave(event, heard=heard):
            heard(event)
            if isinstance(event, Decided):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            train(make_job(tmp_path, **keys, **more), leave)  # type: ignore[arg-type]
        decided.append(heard.of(Decided)[0].batch)
    assert "up to 600 tokens" not in decided[0]  # the same job goes on with what fitted
    assert "up to 600 tokens" in decided[1]


def test_a_restore_that_fails_says_nothing_against_the_checkpoint(tmp_path, monkeypatch):
    job = make_job(tmp_path, max_steps=4, save_steps=2)
    assert train(job, LeavesAt(step=3)).state == "interrupted"
    with monkeypatch.context() as patch:
        failing = Failing(farthing.train.state.put_back, 1)
        patch.setattr(farthing.train.state, "put_back", failing)
        with pytest.raises(OutOfMemoryError, match=GONE):
            train(job)
    assert [path for path in (tmp_path / "run/checkpoints").iterdir() if ".bad" in path.name] == []
    assert train(job).state == "finished"


def test_checkpoints_without_room_for_a_snapshot_end_the_run_like_a_full_disk(
    tmp_path, monkeypatch
):
    def failing(_):
        raise MemoryError

    monkeypatch.setattr(farthing.run.checkpoint, "copied", failing)
    heard = Heard()
    with pytest.raises(SaveError):
        train(make_job(tmp_path, max_steps=6, save_steps=1), heard)
    assert "the checkpoint of step 1 could not be written" in heard.warnings


# ---- the update ----


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_guard_hears_of_every_write(name):
    model = small_model()
    optimizer = optimizer_of(model, name)
    allocate_state(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    guard = WeightUpdate(optimizer, scaler, [], torch.device("cpu"))
    guard.begin()
    guard.refuse_half_an_update(0, MemoryError())
    guard.enter()
    guard.refuse_half_an_update(0, MemoryError())
    step_of(model, optimizer)
    with pytest.raises(OutOfMemoryError, match="step 1"):
        guard.refuse_half_an_update(0, MemoryError())
    guard.begin()
    guard.refuse_half_an_update(1, MemoryError())


def test_what_an_update_takes_besides_is_known(monkeypatch):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 512), nn.LayerNorm(512))
    large, small = 4 << 20, 2 << 20
    expected = {
        "adamw_torch_fused": 0,
        "adamw_torch": large + small,
        "sgd": large,
        "adamw_torch_offload": 0,
        "adafactor": 3 * large,
        "adamw_bf16_stochastic_round": 5 * (large + small),
    }
    assert {name: update_bytes(optimizer_of(model, name)) for name in expected} == expected
    optimizer = optimizer_of(model, "adamw_torch")
    group = {"params": list(model.parameters()), "fused": False, "foreach": None}
    assert temporary_bytes(optimizer, group) == large + small, "of a block of their own"
    assert temporary_bytes(optimizer, group | {"foreach": False}) == large
    assert optimizer_of(model, "sgd").defaults["foreach"] is False
    monkeypatch.setattr("farthing.train.update.BUCKET", 1000)
    assert update_bytes(optimizer_of(model, "adamw_bf16_stochastic_round")) == 20 * 1000


@pytest.mark.parametrize(
    ("n_failed", "layers"), [(1, [False, False]), (2, [True, False]), (3, [True, True]), (4, None)]
)
def test_one_example_without_room_has_more_layers_computed_again(
    n_failed, layers, tmp_path, monkeypatch
):
    honest, failures, watched = Forward.loss, FULL[:1] * n_failed, Watched(monkeypatch)

    def loss(*given):
        if torch.is_grad_enabled() and failures:
            raise failures.pop()
        return honest(*given)

    monkeypatch.setattr(Forward, "loss", loss)
    job = make_job(tmp_path, global_batch_size=1, max_steps=1)
    with pytest.raises(OutOfMemoryError) if layers is None else nullcontext():
        train(job)
    if layers is not None:
        assert [each.gradient_checkpointing for each in watched.model.model.layers] == layers
