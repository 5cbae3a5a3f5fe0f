"""What farthing says of GPUs, tried on one: `bash bench/gpu.sh right OUT`.

Every test is skipped where no GPU is in sight; `FARTHING_GPU=1` lets this file see one (see
conftest). With
`FARTHING_GPU=rehearsal` those tests that a CPU can follow run there instead, which tries the tests
and proves nothing of GPUs.

Jobs go through the real loop. Unless a test says otherwise they compute in fp32 without TF32, Liger
and compiled layers, and attend document by document in fp32, so that two ways to compute one thing
differ by rounding alone.
"""

import gc
import importlib.util
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import farthing.train.run
from farthing.config.load import load_job
from farthing.events import Decided, StepTaken
from farthing.model import attention_kernels, head
from farthing.model.attention_kernels import (
    AttentionSettings,
    choose_kernel,
    here,
    over_documents,
)
from farthing.model.documents import Documents
from farthing.model.hardware import find_compiler
from farthing.model.loss import Labelled
from farthing.prices.gpus import gpu_of_device
from farthing.train.built import Run
from farthing.train.loop import take_step
from farthing.train.step import seed_everything
from heads import head_loss
from one_step import added_up
from workshop import (
    Heard,
    Watched,
    are_same,
    job_file,
    losses_of,
    make_job,
    opened,
    rows_of,
    steps_of,
    train,
    weights_of,
    with_system_prompt,
    with_where,
)

HAS_GPU = torch.cuda.is_available()
both_methods = pytest.mark.parametrize("method", ["full", "lora"])
every_architecture = pytest.mark.parametrize("family", ["llama", "t5", "bert"])
IS_REHEARSAL = not HAS_GPU and os.environ.get("FARTHING_GPU") == "rehearsal"
DEVICE = "cuda" if HAS_GPU else "cpu"
if not (HAS_GPU or IS_REHEARSAL):
    pytest.skip(
        "no GPU in sight: FARTHING_GPU=1 on a machine that has one", allow_module_level=True
    )
on_a_gpu = pytest.mark.skipif(not HAS_GPU, reason="only a GPU can show this")


SAME = 1e-4  # of two ways to compute one thing in fp32, over a few steps
ROUNDED = {
    "bf16": 0.03,
    "fp16": 0.01,
}  # of gradients, all together: eight and eleven bits, through a few layers
LOSS_ROUNDED = {"bf16": 5e-3, "fp16": 1e-3}
KERNEL_ROUNDED = {"bf16": 0.015, "fp16": 3e-3}  # of one attention and its gradients


@pytest.fixture(autouse=True)
def clean_device(monkeypatch):
    """Nothing of one test in the memory, or in the settings, of the next; in fp32 no kernel that
    has to be compiled first.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def chosen(query, how):
        return "padded" if query.dtype == torch.float32 else choose_kernel(query, how)

    monkeypatch.setattr(attention_kernels, "choose_kernel", chosen)
    yield
    gc.collect()
    torch.use_deterministic_algorithms(False)
    if HAS_GPU:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()


# ---- what the tests work with ----


def strict(**keys) -> dict[str, Any]:
    """Keys of a job on the device with nothing but what a test asks for; `precision` is one of
    them.
    """
    precision = keys.pop("precision", "fp32")
    numbers = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {"bf16": False}}[precision]
    plain = {"tf32": False, "use_liger_kernel": False, "torch_compile": False, "probe": False}
    return {"where": {"device": DEVICE}, **plain, **numbers, **keys}


def uneven_rows(n: int = 40) -> list[dict[str, str]]:
    """Prompts and completions of lengths between thirty and a few hundred tokens."""
    rows = rows_of("llama", n)
    return [
        {"prompt": row["prompt"] * (1 + i * 7 % 5), "completion": row["completion"] * (1 + i % 3)}
        for i, row in enumerate(rows)
    ]


def gradients(run: Run) -> tuple[float, dict[str, Tensor]]:
    """(mean loss, gradients by name, on the CPU in fp64) of the first step, added up as the loop
    does; unscaled where fp16 scales.
    """
    for _ in range(24):  # the scale of fp16 halves until nothing overflows
        run.steps.step.optimizer.zero_grad(set_to_none=True)
        seed_everything(run.spec.train.seed, 0)
        sums = added_up(run, 0)
        run.steps.step.scaler.unscale_(run.steps.step.optimizer)
        found = {
            name: p.grad.double().cpu()
            for name, p in run.model.named_parameters()
            if p.grad is not None
        }
        if run.steps.step.scaler.is_enabled():
            run.steps.step.scaler.update()
        if all(bool(gradient.isfinite().all()) for gradient in found.values()):
            break
    return float(torch.stack(sums.losses).double().sum()) / sums.n_targets, found


def error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Of all tensors together, relative to their length."""
    assert ours.keys() == theirs.keys()
    ours, theirs = ({k: t.double() for k, t in each.items()} for each in (ours, theirs))
    off = sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs)
    return math.sqrt(off / sum(float(tensor.square().sum()) for tensor in theirs.values()))


def must_be_alike(
    ours: tuple[float, dict[str, Tensor]],
    theirs: tuple[float, dict[str, Tensor]],
    *,
    loss: float,
    gradients: float,
):
    """Two steps, within these shares."""
    assert ours[0] == pytest.approx(theirs[0], rel=loss)
    assert error(ours[1], theirs[1]) < gradients


def first_gradients(job) -> tuple[float, dict[str, Tensor]]:
    """`gradients` of a job's first step."""
    with opened(job) as run:
        return gradients(run)


def must_agree(ours, theirs, within: float):
    """Losses of every step, and the same examples in each."""
    steps, expected = ([row["examples"] for row in steps_of(job)] for job in (ours, theirs))
    assert steps == expected
    assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=within)


# ---- precision ----


@on_a_gpu
@every_architecture
def test_fp32_on_a_gpu_is_fp32_on_the_cpu(family, tmp_path):
    on_cpu = strict(where={"device": "cpu"})
    found, expected = (
        first_gradients(make_job(tmp_path / name, family, **keys))
        for name, keys in (("gpu", strict()), ("cpu", on_cpu))
    )
    must_be_alike(found, expected, loss=1e-5, gradients=SAME)


@both_methods
@every_architecture
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=on_a_gpu)])
def test_loss_and_gradients_in_half_precision_are_those_of_fp32(
    precision, family, method, tmp_path
):
    found, expected = (
        first_gradients(make_job(tmp_path / name, family, method=method, **strict(precision=name)))
        for name in (precision, "fp32")
    )
    must_be_alike(found, expected, loss=LOSS_ROUNDED[precision], gradients=ROUNDED[precision])


# ---- attention ----


def must_be_here(kernel: str):
    """Skip where a kernel can't be had."""
    if kernel != "padded" and not HAS_GPU:
        pytest.skip("only a GPU can show this")
    if kernel == "flex" and not here(torch.device("cuda"), False).has_flex:
        pytest.skip("the kernel flex is not installed")


def one_after_another() -> tuple[Documents, int]:
    """Documents that see themselves."""
    lengths = [1, 7, 128, 128, 300, 61]
    return Documents.of(lengths, DEVICE), sum(lengths)


def with_a_beginning() -> tuple[Documents, int]:
    """A beginning of fifty tokens that three other documents go on from."""
    lengths = [50, 20, 133, 1]
    own = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    rows = [own[0], *(np.concatenate([own[0], others]) for others in own[1:])]
    return Documents.of(lengths, DEVICE, [len(row) for row in rows], np.concatenate(rows)), sum(
        lengths
    )


def attended(
    documents: Documents, tensors: list[Tensor], dtype: torch.dtype, **how
) -> list[Tensor]:
    """Output [T, H, D] of the kernel that is chosen, and the gradients of queries, keys and values
    [T, H, D], in fp32.
    """
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    how = {"causal": True, "scale": tensors[0].shape[-1] ** -0.5} | how
    out = over_documents(*leaves, documents, AttentionSettings(**how))
    weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
    (out.float() * weights).sum().backward()
    return [out.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]


def drawn(n_tokens: int, head_size: int) -> list[Tensor]:
    """Queries of eight heads, keys and values of two."""
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randn(n_tokens, heads, head_size, generator=draw).to(DEVICE) for heads in (8, 2, 2)
    ]


ASKED = ["causal", "both ways", "window", "softcap", "beginnings"]
CASES = [*(("bf16", 64, asked) for asked in ASKED), ("bf16", 128, "causal"), ("fp16", 64, "causal")]


@pytest.mark.parametrize(("precision", "head_size", "asked"), CASES)
@pytest.mark.parametrize("kernel", ["padded", "flash", "flex"])
def test_a_kernel_attends_as_documents_one_by_one(kernel, precision, head_size, asked, monkeypatch):
    must_be_here(kernel)
    how = {
        "both ways": {"causal": False},
        "window": {"window": 40},
        "softcap": {"softcap": 5.0},
    }.get(asked, {})
    if asked == "softcap" and kernel == "flash":
        pytest.skip("flash has no soft cap, and is not chosen for it")
    documents, n_tokens = with_a_beginning() if asked == "beginnings" else one_after_another()
    tensors = drawn(n_tokens, head_size)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    rounded = [tensor.to(dtype).float() for tensor in tensors]
    expected = attended(documents, rounded, torch.float32, **how)  # by the padded kernel
    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *_: kernel)
    found = attended(documents, tensors, dtype, **how)
    for ours, theirs in zip(found, expected, strict=True):
        assert error({"": ours}, {"": theirs}) < KERNEL_ROUNDED[precision]


def test_the_kernel_that_fp32_gets_has_the_same_gradients(tmp_path, monkeypatch):
    keys = strict(rows=uneven_rows())
    expected = first_gradients(make_job(tmp_path / "padded", **keys))
    monkeypatch.setattr(attention_kernels, "choose_kernel", choose_kernel)
    found = first_gradients(make_job(tmp_path / "chosen", **keys))
    must_be_alike(found, expected, loss=1e-5, gradients=1e-3)


@on_a_gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@every_architecture
def test_a_deterministic_step_with_dropout_has_the_same_bits_twice(
    family, precision, tmp_path, monkeypatch
):
    """And no operation of it is refused for want of a deterministic kernel."""
    monkeypatch.setattr(attention_kernels, "choose_kernel", choose_kernel)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    keys = strict(
        precision=precision,
        full_determinism=True,
        size={"hidden": 128, "layers": 3, "dropout": 0.1},
    )
    first, second = (
        first_gradients(make_job(tmp_path / name, family, **keys)) for name in ("first", "second")
    )
    assert first[0] == second[0]
    assert are_same(first[1], second[1])


# ---- the head, adapters, checkpointing ----


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_in_one_kernel_are_those_of_operations(dtype, monkeypatch):
    """Also with a cap, smoothed labels and a scale; a missing kernel fails."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernel is for GPUs from Ampere on")
    assert head.one_kernel(torch.device("cuda:0")) is not None
    draw = torch.Generator("cuda").manual_seed(3)
    n, n_words, width = 70, 40_003, 64
    hidden = torch.randn(n, width, generator=draw, device="cuda", dtype=dtype)
    weight = torch.randn(n_words, width, generator=draw, device="cuda", dtype=dtype) * 0.2
    targets = torch.randint(0, n_words, (n,), generator=draw, device="cuda")
    labelled = Labelled(torch.arange(n, device="cuda"), targets)
    for cap, smoothing in ((None, 0.0), (5.0, 0.0), (None, 0.1), (5.0, 0.1)):
        how = head.HeadSettings(cap, smoothing, torch.full((), 0.5, device="cuda"))
        found = []
        for kernel in (head.one_kernel, lambda device: None):
            with monkeypatch.context() as patched:
                patched.setattr(head, "one_kernel", kernel)
                states = hidden.clone().requires_grad_()
                loss = head_loss(states, weight, None, labelled, how)
                (loss * 0.5).backward()
            found.append((float(loss.detach()), {"states": states.grad}))
        within = 1e-5 if dtype == torch.float32 else 0.015
        must_be_alike(*found, loss=1e-5, gradients=within)


@both_methods
def test_what_is_computed_again_is_what_was_kept(method, tmp_path):
    keys = {"method": method, "rows": uneven_rows(), "size": {"layers": 4, "dropout": 0.1}}
    found = {}
    for every in (False, 2, True):
        with opened(
            make_job(tmp_path / str(every), gradient_checkpointing=every, **strict(**keys))
        ) as run:
            assert run.feed.settings.checkpoint_every == int(every)
            found[every] = gradients(run)
    for every in (2, True):
        must_be_alike(found[every], found[False], loss=1e-6, gradients=1e-5)


# ---- optimizers, four bits, kernels of others ----


def test_four_bits_train(tmp_path, monkeypatch):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    watched = Watched(monkeypatch)
    method = {"name": "qlora", "lora_r": 4}
    job = make_job(
        tmp_path, pretrained=True, method=method, **strict(precision="bf16", max_steps=15)
    )
    assert train(job).state == "finished"
    losses = losses_of(job)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    layers = [m for m in watched.model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert {layer.weight.device.type for layer in layers} == {DEVICE}


@on_a_gpu
@pytest.mark.parametrize(
    ("optim", "within"),
    [
        ("adamw_torch_offload", 1e-4),
        ("paged_adamw_32bit", 1e-3),
        ("adamw_8bit", 0.05),
        ("paged_adamw_8bit", 0.05),
    ],
)
def test_other_optimizers_step_as_the_fused_one(optim, within, tmp_path):
    if "torch" not in optim:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    keys = {"max_steps": 10, "size": {"hidden": 128}, "learning_rate": 1e-3}
    jobs = [
        make_job(tmp_path / name, **strict(optim=name, **keys))
        for name in (optim, "adamw_torch_fused")
    ]
    for job in jobs:
        assert train(job).state == "finished"
    must_agree(*jobs, within)


@on_a_gpu
@both_methods
def test_ligers_kernels_compute_what_plain_ones_do(method, tmp_path):
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    expected = first_gradients(
        make_job(tmp_path / "plain", method=method, **strict(rows=uneven_rows()))
    )
    keys = strict(rows=uneven_rows(), use_liger_kernel=True)
    with opened(make_job(tmp_path / "liger", method=method, **keys)) as run:
        assert "5 norms" in run.kernels.liger, run.kernels.liger
        found = gradients(run)
    must_be_alike(found, expected, loss=1e-4, gradients=1e-3)


# ---- the host never waits ----


@pytest.mark.parametrize("kind", ["full", "lora", "liger", "checkpointed", "beginnings"])
def test_steps_never_wait_for_the_device(kind, tmp_path):
    """Micro-batches, clipping and the update: torch raises where anything would wait."""
    tokens = 8192 if kind == "beginnings" else 512
    keys = strict(precision="bf16", max_steps=12, global_batch_size=16, micro_batch_tokens=tokens)
    if kind == "liger":
        pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
        keys |= {"use_liger_kernel": True}
    rows = with_system_prompt(48) if kind == "beginnings" else uneven_rows(48)
    more = {"gradient_checkpointing": True} if kind == "checkpointed" else {}
    job = make_job(
        tmp_path, method="lora" if kind == "lora" else "full", **keys | {"rows": rows} | more
    )
    with opened(job) as run:
        assert run.feed.settings.shares_prefix == (kind == "beginnings")
        steps = run.steps
        taken = [steps.take(step) for step in range(2)]  # what is made once may be waited for
        if HAS_GPU:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            taken += [steps.take(step) for step in range(2, 5)]
        finally:
            if HAS_GPU:
                torch.cuda.set_sync_debug_mode("default")
        for one in taken:
            losses, norm = one.read()
            assert len(losses) == len(one.sums.micro_batches)
            assert all(math.isfinite(number) for number in (*losses, norm))


# ---- kills, and memory that runs out ----

IN_A_PROCESS = """
import os, signal, sys
from farthing.config.load import load_job
from farthing.events import Saved
from farthing.train.run import train

def tell(event):
    if isinstance(event, Saved) and event.step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.exit(train(load_job(sys.argv[1]), tell).exit_code)
"""


def train_in_a_process(job: Path, kill_after_save: int = 0) -> int:
    """The exit code of a run in a process of its own, that is killed when the checkpoint of a step
    is on the disk.
    """
    command = [sys.executable, "-c", IN_A_PROCESS, str(job), str(kill_after_save)]
    return subprocess.run(command, timeout=300).returncode


@pytest.mark.parametrize(
    ("is_exact", "dropout"),
    [(True, 0.0), (True, 0.1), (False, 0.0)],
)
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(is_exact, dropout, tmp_path):
    ends, losses = [], []
    keys = strict(
        precision="bf16",
        max_steps=10,
        save_steps=2,
        rows=uneven_rows(64),
        full_determinism=is_exact,
        global_batch_size=16,
        micro_batch_tokens=1024,
        size={"hidden": 128, "layers": 3, "dropout": dropout},
    )
    for name in ("alone", "killed"):
        job = job_file(tmp_path / name, **keys)
        if name == "killed":
            assert train_in_a_process(job, kill_after_save=4) == -signal.SIGKILL
        assert train_in_a_process(job) == 0
        ends.append(weights_of(tmp_path / name))
        losses.append(losses_of(load_job(job)))
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], rel=0.0 if is_exact else 0.01)
    assert are_same(*ends) if is_exact else error(*ends) < 0.05


@on_a_gpu
def test_memory_that_really_runs_out_halves_the_micro_batch_and_not_the_step(tmp_path):
    rows = [
        {"prompt": row["prompt"] * 12, "completion": row["completion"] * 12}
        for row in rows_of("llama", 96)
    ]
    keys = strict(
        rows=rows,
        max_steps=3,
        global_batch_size=32,
        micro_batch_tokens=1 << 16,
        size={"hidden": 512, "layers": 4},
    )
    keys |= {"gradient_checkpointing": False, "data": {"max_length": 1024}, "learning_rate": 1e-3}
    resting = []

    def at_first_step(event):
        if isinstance(event, Decided):
            torch.cuda.reset_peak_memory_stats()
            resting.append(torch.cuda.memory_allocated())

    plain = make_job(tmp_path / "plain", **keys)
    farthing.train.run.train(plain, at_first_step)
    peak = torch.cuda.max_memory_allocated() - resting[0]
    gc.collect()
    torch.cuda.empty_cache()
    assert peak > 1 << 29, "too small a step to fill a device with"

    ballast = []

    def fill(event):
        heard(event)
        if isinstance(event, Decided):  # the model is there, and no step was taken
            gc.collect()
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info()[0]
            ballast.append(torch.empty(free - int(0.7 * peak), dtype=torch.uint8, device="cuda"))

    heard = Heard()
    short = make_job(tmp_path / "short", **keys)
    try:
        outcome = farthing.train.run.train(short, fill)
    finally:
        ballast.clear()
    assert outcome.state == "finished"
    events = outcome.receipt.out_of_memory
    assert events, "the ballast left too much room"
    assert "CUDA out of memory" in events[0]["why"]
    assert 1 <= events[0]["step"] <= 3, "the one with the largest micro-batch, which is rehearsed"
    assert "out of memory; continuing" in heard.warnings
    must_agree(short, plain, SAME)


@on_a_gpu
@pytest.mark.parametrize("every", [False, 2, True])
@both_methods
def test_the_need_judged_before_the_first_step_is_the_peak(method, every, tmp_path):
    keys = {
        "rows": uneven_rows(64),
        "size": {"hidden": 1024, "layers": 6},
        "global_batch_size": 64,
        "method": method,
    }
    keys |= {
        "micro_batch_tokens": 1 << 13,
        "gradient_checkpointing": every,
        "data": {"max_length": 1024},
    }
    resting = torch.cuda.memory_allocated()
    with opened(make_job(tmp_path, **strict(precision="bf16", **keys))) as run:
        take_step(run)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        take_step(run)
        run.log.settle()
        peak = torch.cuda.max_memory_allocated() - resting
        assert run.log.expected_bytes - resting == pytest.approx(peak, rel=0.1)


@on_a_gpu
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_checkpoint_fetched_behind_the_next_step_is_of_one_step(share, tmp_path, monkeypatch):
    """Against copies that are made at once."""
    keys = strict(
        max_steps=6, save_steps=2, save_total_limit=5, size={"hidden": 512, "layers": 4}, n_rows=64
    )
    monkeypatch.setattr("farthing.run.snapshot.HOST_SHARE", share)
    found = {}
    for name in ("later", "at once"):
        if name == "at once":
            monkeypatch.setattr("farthing.run.checkpoint.can_wait", lambda tensor: False)
        assert train(make_job(tmp_path / name, full_determinism=True, **keys)).state == "finished"
        saved = sorted((tmp_path / name / "run/checkpoints").glob("step-*/*.safetensors"))
        found[name] = {
            f"{p.parent.name} {p.name} {k}": v for p in saved for k, v in load_file(p).items()
        }
    assert are_same(found["later"], found["at once"])


@on_a_gpu
def test_paged_state_comes_back_into_pages(tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    with opened(
        make_job(tmp_path, **strict(optim="paged_adamw_32bit", size={"hidden": 512}))
    ) as run:
        take_step(run)
        run.log.settle()
        tensors, values = run.state["optimizer"].state()
        run.state["optimizer"].restore(
            {name: tensor.clone() for name, tensor in tensors.items()}, values
        )
        states = [
            value
            for state in run.steps.step.optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        ]
        assert any(getattr(value, "is_paged", False) for value in states)
        assert all(getattr(value, "is_paged", False) for value in states if value.numel() >= 1e5)
        take_step(run)
        run.log.settle()


@on_a_gpu
def test_state_on_the_host_stays_there_in_pinned_blocks_that_are_not_rounded_up(tmp_path):
    before = torch.cuda.host_memory_stats()[
        "active_bytes.current"
    ]  # without what other tests have left in the cache
    with opened(
        make_job(tmp_path, **strict(optim="adamw_torch_offload", size={"hidden": 768, "layers": 4}))
    ) as run:
        trained = sum(p.nbytes for p in run.model.parameters())
        taken = torch.cuda.host_memory_stats()["active_bytes.current"] - before
        assert 2 * trained <= taken < 2.2 * trained
        take_step(run)
        run.log.settle()
        states = run.steps.step.optimizer.state.values()
        assert {value.device.type for state in states for value in state.values()} == {"cpu"}


# ---- what is said of a run ----


@on_a_gpu
def test_this_gpu_is_in_the_table_and_a_run_on_it_has_a_promise(tmp_path):
    name = torch.cuda.get_device_name()
    assert gpu_of_device(name) is not None, f"{name} is not in facts/gpus.csv"
    heard = Heard()
    outcome = train(make_job(tmp_path, **strict(precision="bf16", max_steps=8)), heard)
    assert heard.of(Decided)[0].device == name
    assert outcome.receipt.promised.peak_bytes
    assert heard.of(StepTaken)[-1].mfu > 0
    assert outcome.receipt.peak_bytes <= torch.cuda.max_memory_allocated()
    if importlib.util.find_spec("pynvml") is not None:
        busy = [event.utilisation_percent for event in heard.of(StepTaken)]
        assert all(percent is not None and 0 <= percent <= 100 for percent in busy)


# ---- what takes a minute to compile ----


@on_a_gpu
def test_compiled_layers_compute_what_plain_ones_do(tmp_path):
    if importlib.util.find_spec("triton") is None or find_compiler("cuda") is None:
        pytest.skip("Triton or a C compiler is not installed")
    torch.compiler.reset()
    jobs = []
    for name, compiles in (("compiled", True), ("plain", False)):
        jobs.append(
            make_job(
                tmp_path / name, method="lora", **strict(rows=uneven_rows(), torch_compile=compiles)
            )
        )
        heard = Heard()
        assert train(jobs[-1], heard).state == "finished"
        assert ("2 layers compiled" in heard.of(Decided)[0].computed) == compiles
    torch.compiler.reset()
    must_agree(*jobs, 1e-3)


# ---- weights that are spread, over one GPU ----


@pytest.mark.parametrize("zero_3", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@both_methods
def test_weights_spread_over_one_gpu_train_as_whole_ones(method, precision, zero_3, tmp_path):
    """The code of several GPUs with one: FSDP2, rows, files of rows, the rehearsal and the export
    from them.
    """
    keys = {
        "method": method,
        "max_steps": 5,
        "save_steps": 2,
        "rows": uneven_rows(24),
        "gradient_checkpointing": True,
    }
    plain = make_job(tmp_path / "plain", **strict(precision=precision, **keys))
    spread = make_job(tmp_path / "spread", **strict(precision=precision, **keys))
    spread = with_where(spread, strategy="fsdp", reshard_after_forward=zero_3)
    heard = Heard()
    train(plain)
    train(spread, heard)
    assert "the largest micro-batch was rehearsed" in str(heard)
    must_agree(spread, plain, 1e-4 if precision == "fp32" else 2e-2)
    name = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    ours, theirs = (load_file(Path(job.output_dir) / "model" / name) for job in (spread, plain))
    assert error(ours, theirs) < (1e-3 if precision == "fp32" else 5e-2)
