"""The pre-flight list: is this machine fit to train, and is this job fit to start? Nothing is
trained or changed.

Each check gives a state (ok, warning, failed), what was found and what to do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from farthing.config.job import Job
from farthing.config.load import load_job
from farthing.config.preflight import (
    load_job_or_tell_all,
    look_over,
    spot_without_store,
    unusual_settings,
)
from farthing.errors import (
    Check,
    DataError,
    FarthingError,
    InputError,
    JobError,
    ModelError,
    PreflightError,
)
from farthing.run.folder import CHECKPOINTS, RUN
from farthing.run.opening import refuse_folder
from farthing.storage.files import read_json
from farthing.units import plural, say_bytes, say_count, say_usd

_TRIED_BYTES = 4 << 20  # of the sources together: some seconds
EXTRAS = {
    "datasets": ("datasets", "data sets of the Hub and folders of them"),
    "sentencepiece": ("sentencepiece", "tokenizers without a tokenizer.json"),
    "bitsandbytes": ("gpu", "qlora, 8-bit and paged optimizers"),
    "liger_kernel": ("gpu", "train.use_liger_kernel"),
    "pynvml": ("gpu", "GPU utilisation in the progress line"),
    "boto3": ("s3", "profiles and logins of ~/.aws, for s3://"),
    "tensorboard": ("track", "train.report_to: [tensorboard]"),
    "wandb": ("wandb", "train.report_to: [wandb]"),
    "mlflow": ("mlflow", "train.report_to: [mlflow]"),
    "trackio": ("trackio", "train.report_to: [trackio]"),
}


def check_before(path: Path, overrides: list[str]) -> list[Check]:
    """What can be seen to be wrong with a job without torch: everything that is, or nothing."""
    try:
        look_over(load_job_or_tell_all(str(path), overrides))
    except JobError as error:
        is_read, looked_at = isinstance(error, PreflightError), (DataError, ModelError)
        names = [
            "model and data" if is_read or isinstance(one, looked_at) else "job"
            for one in error.problems
        ]
        return [_failed(name, one) for name, one in zip(names, error.problems, strict=True)]
    except FarthingError as error:
        return [_failed("model and data", error)]
    return []


def check_machine(folder: Path, *, with_device: bool = True) -> Iterator[Check]:
    """Python, torch, device, memory, disk, extras. Without `with_device` what torch would tell is
    left out.
    """
    import psutil

    version = ".".join(str(part) for part in sys.version_info[:3])
    yield Check(
        "python",
        "ok" if sys.version_info >= (3, 11) else "failed",
        version,
        "use Python 3.11 or later",
    )
    torch = _imported("torch") if with_device else _installed("torch")
    yield from (torch, _installed("transformers"), _installed("peft"))
    if with_device and torch.state == "ok":
        yield from _device()
    else:
        yield Check("gpu and cpu", "ok", "not checked: fix the failures first")
    memory = psutil.virtual_memory()
    enough = memory.available > 2 << 30
    yield Check(
        "memory",
        "ok" if enough else "warning",
        f"{say_bytes(memory.available)} of {say_bytes(memory.total)} free",
        "close something: loading a model needs twice its size",
    )
    disk = shutil.disk_usage(_nearest(folder))
    enough = disk.free > 5 << 30
    yield Check(
        "disk",
        "ok" if enough else "warning",
        f"{say_bytes(disk.free)} free at {_nearest(folder)}",
        "make room",
    )
    for module, (extra, what) in EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        absent = f"not installed; only for {what}: pip install 'farthing[{extra}]'"
        yield Check(module, "ok", "installed" if there else absent)


def _installed(package: str) -> Check:
    """Whether a package that every run needs is installed."""
    try:
        return Check(package, "ok", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Check(package, "failed", "not installed", f"pip install {package}")


def _imported(package: str) -> Check:
    """`_installed`, and whether it can be imported."""
    try:
        importlib.import_module(package)
    except Exception as error:  # a broken installation fails in any way
        why = (str(error).splitlines() or [type(error).__name__])[0]
        return Check(package, "failed", f"can't be imported: {why}", f"pip install {package}")
    return _installed(package)


def _device() -> Iterator[Check]:
    import torch

    from farthing.model.hardware import find_compiler

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _gpu(index)
    else:
        built = (
            "torch has no CUDA"
            if torch.version.cuda is None
            else f"no usable driver for CUDA {torch.version.cuda}"
        )
        yield Check(
            "gpu", "warning", f"none ({built})", "training runs on the CPU: fine for small models"
        )
    bf16 = (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if torch.backends.mkldnn.is_available()
        else False
    )
    yield Check(
        "cpu",
        "ok",
        f"{plural(os.cpu_count() or 1, 'core')}, {plural(torch.get_num_threads(), 'torch thread')}"
        + (", bf16" if bf16 else ""),
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    compiler = (
        find_compiler(device)
        or f"no {'C' if device == 'cuda' else 'C++'} one; only for train.torch_compile"
    )
    yield Check("compiler", "ok", compiler)


def _gpu(index: int) -> Check:
    """One GPU: whether torch has code for it, which it is, its memory, and what it would compute
    in.
    """
    import torch

    from farthing.model.hardware import must_be_built_for_gpu
    from farthing.prices.gpus import gpu_of_device

    try:
        must_be_built_for_gpu(index)
    except FarthingError as error:  # only the first that torch may see is computed on
        return Check(f"gpu {index}", "failed" if index == 0 else "warning", error.what, error.to_do)
    (major, minor), name = (
        torch.cuda.get_device_capability(index),
        torch.cuda.get_device_name(index),
    )
    free, total = torch.cuda.mem_get_info(index)
    precision = "bf16" if major >= 8 else "fp16 with a gradient scaler"
    found = (
        f"{name}, compute {major}.{minor}, {say_bytes(free)} of {say_bytes(total)} free,"
        f" {precision}"
    )
    if free <= 0.5 * total:
        return Check(f"gpu {index}", "warning", found, "something else holds its memory")
    unknown = (
        ""
        if gpu_of_device(name, total)
        else "; its peak is not known here: no estimate before a run, no MFU in it"
    )
    return Check(f"gpu {index}", "ok", found + unknown)


def check_job(path: Path, overrides: list[str]) -> Iterator[Check]:
    """The job file, then what a run is refused for, by the functions that `farthing train` calls:
    limits, run folder, model, tokenizer, and a part of the data.
    """
    from farthing.data.tokens import try_out
    from farthing.model.hardware import device_name
    from farthing.model.load import need_bitsandbytes, quiet_libraries
    from farthing.train.build import build_model
    from farthing.train.resolve import check_extras, refuse_too_few, resolve

    try:
        job = load_job(path, overrides)
    except FarthingError as error:
        yield _failed("job", error)
        return
    yield Check("job", "ok", str(path))
    yield from _try("limits", lambda: _limits(job))
    yield from _run_folder(Path(job.output_dir))
    quiet_libraries()
    if job.method.name == "qlora" or "8bit" in job.train.optim or "paged" in job.train.optim:
        yield from _try(
            "bitsandbytes works", lambda: f"version {need_bitsandbytes('this job').__version__}"
        )
    from farthing.data.read import say_names

    try:
        check_extras(job)
        spec = resolve(job)
        numerics = spec.numerics
    except FarthingError as error:
        yield _failed("model, tokenizer and data", error)
        return
    yield Check("computes on", "ok", f"{device_name(numerics.device)} in {numerics.name}")
    yield Check("model, tokenizer and data", "ok", "found")
    labels: list[str] = []

    def tried(role: str, sources: list[Any]) -> str:
        recipe = spec.recipe
        if role == "eval":
            recipe = replace(recipe, label_names=tuple(labels))
        facts, is_whole = try_out(sources, spec.tokenizer, recipe, _TRIED_BYTES)
        if role == "train" and is_whole:
            labels.extend(facts["label_names"])
            if job.data.eval_fraction and not spec.eval_sources:
                refuse_too_few(facts["n_distinct_inputs"], sources[0].name)
        return _of_data(facts, is_whole)

    for role, sources in (("train", spec.train_sources), ("eval", spec.eval_sources)):
        if sources:
            names = say_names([source.name for source in sources])
            yield from _try(f"{role} data {names}", functools.partial(tried, role, sources))

    def built() -> str:
        classes = tuple(labels) or ("a", "b")
        model = build_model(spec, classes, on_host=True, reads=False)
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        return f"{say_count(trained)} weights are trained; its weights were not looked at"

    yield from _try("method", built)
    yield from check_choices(job)
    if job.usd_per_hour == 0:
        yield Check(
            "price",
            "warning",
            "none given",
            "set where.usd_per_hour, or power_watts and usd_per_kwh",
        )


def look_at_data(
    path: Path, job_file: Path | None, overrides: list[str], model: str | None = None
) -> Any:
    """The `Summary` of a data file, read as a job reads it, or by the tokenizer and template of
    `model`.

    Without both, tokens are guessed from characters, and chats are rendered by farthing's own
    template. Raises `DataError`,
    `JobError`, and `ModelError` for a model that is not on this machine.
    """
    from farthing.data.light_tokenizer import light_tokenizer
    from farthing.data.read import file_source, is_text_folder, short_name
    from farthing.data.summary import summarize
    from farthing.data.token_set import Recipe
    from farthing.objectives.causal_lm import CAUSAL_LM

    shown = short_name(str(path))
    if path.is_dir() and not is_text_folder(path):
        raise DataError("a folder", where=shown, to_do="name one file of it")
    if path.is_symlink() and not path.exists():
        raise DataError(
            "a link to a file that is not there", where=shown, to_do="name the file itself"
        )
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError("no ordinary file", where=shown, to_do="write it to a file first")
    if job_file is None:
        source = file_source(path)
        tokenizer, task = light_tokenizer(_folder_here(model) if model else None, None), None
        recipe = Recipe(CAUSAL_LM.name, CAUSAL_LM.max_length)
    else:
        from farthing.clock import today
        from farthing.config.data_lengths import reading_of

        job = load_job(job_file, overrides)
        task = job.task
        tokenizer, recipe = reading_of(job, today().isoformat())
        source = file_source(path, job.data.layout)
        own = dict(zip(job.data.train, job.data.of_train, strict=False)).get(str(path.resolve()))
        source = replace(source, columns=own.columns if own else None)
    found = summarize(source, tokenizer, recipe, task)
    if not found.n_rows:
        raise DataError("there are no rows in it", where=shown, to_do="check how it was written")
    return found


def _folder_here(model: str) -> Path:
    """The folder of a model on this machine. Raises `ModelError`."""
    from farthing.models.model_config import cached_snapshot

    folder = Path(model) if Path(model).is_dir() else cached_snapshot(model, None)
    if folder is None:
        to_do = (
            "name a folder, or a Hub model that was fetched once; with a job: farthing doctor JOB"
            " --data FILE"
        )
        raise ModelError(
            "no such folder, and not in the cache of the Hub", where=model, to_do=to_do
        )
    return folder


def check_choices(job: Job) -> Iterator[Check]:
    """The list that one goes through before a run: what is chosen, by the job or by default, and
    what is missing.
    """
    where, train, limits, method = job.where, job.train, job.limits, job.method
    gpus = ", ".join(where.gpu) or f"any that is offered; here it computes on {where.device}"
    yield Check("GPU choice", "ok", f"{gpus}; `farthing plan` compares prices")
    is_spot = where.spot or where.offers == "spot"
    yield Check(
        "spot",
        "ok",
        "the machine may be taken away" if is_spot else "not used: where.spot, where.offers",
    )
    adapter = "" if method.name == "full" else f", r {method.lora_r}, alpha {method.lora_alpha:g}"
    for text in unusual_settings(job):
        yield Check("unusual", "warning", text, "correct it, unless it is meant")
    yield Check("method", "ok", f"{method.name}{adapter}, learning rate {job.learning_rate:g}")
    asked = "bf16" if train.bf16 else "fp16" if train.fp16 else "as the device and the model can"
    yield Check("precision", "ok", asked)
    every = {"auto": "as little as memory allows", "True": "every layer", "False": "off"}
    words = every.get(
        str(train.gradient_checkpointing), f"every {train.gradient_checkpointing} layers"
    )
    yield Check("activation checkpointing", "ok", words)
    micro = (
        f"{train.micro_batch_tokens:,} tokens"
        if train.micro_batch_tokens
        else f"{job.micro_batch_size} examples"
    )
    found = (
        f"{micro} at once, as the job says"
        if job.says_micro_batch
        else "planned, and probed where that pays"
    )
    yield Check("micro-batch", "ok", f"{found}; {job.global_batch_size} examples a step")
    save = f"every {train.save_steps} steps" if train.save_steps else "at the planned interval"
    save = f"every {train.save_minutes:g} min" if train.save_minutes else save
    yield Check(
        "save interval", "ok", f"{save}, the newest {train.save_total_limit} and the best are kept"
    )
    lost = spot_without_store(job)
    no_store = "none: checkpoints stay on this machine"
    yield Check(
        "store",
        "warning" if lost else "ok",
        job.output_store or no_store,
        lost,
    )
    if job.usd_per_hour and limits.max_usd is None and limits.most_hours() is None:
        yield Check("cap", "warning", "none", "set limits.max_usd")


def check_trial(path: Path, overrides: list[str], n_examples: int) -> Iterator[Check]:
    """Some examples through train, save, kill, resume and export."""
    from farthing.train.trial import try_out

    for stage in try_out(path, overrides, load_job(path, overrides), n_examples):
        to_do = "" if stage.is_good else "mend it before a long run"
        yield Check(f"trial: {stage.name}", "ok" if stage.is_good else "failed", stage.found, to_do)


def _limits(job: Job) -> str:
    """How much time a run has. Raises `InputError`."""
    from farthing.report.receipt import build_receipt
    from farthing.train.budget import refuse_limits

    spent_usd = spent_s = 0.0
    with contextlib.suppress(InputError):
        receipt = build_receipt(Path(job.output_dir))
        spent_usd, spent_s = receipt.usd, receipt.wall_s
    refuse_limits(job, spent_usd, spent_s)
    limits = job.limits
    caps = [
        say_usd(limits.max_usd) if limits.max_usd is not None else "",
        f"{limits.most_hours():g} h" if limits.most_hours() is not None else "",
        str(limits.deadline or ""),
    ]
    return ", ".join(cap for cap in caps if cap) or "none"


def _of_data(facts: Any, is_whole: bool) -> str:
    """What the rows that were tried became."""
    n_rows, n_bad = facts["n_rows"], facts["n_bad"]
    first = f" ({facts['bad_rows'][0][0]}: {facts['bad_rows'][0][1]})" if n_bad else ""
    parts = [
        f"format {', '.join(sorted(set(facts['formats'])))}",
        f"{plural(n_rows, 'row')} tried"
        + ("" if is_whole else "; the other rows were not looked at"),
        f"{n_bad:,} can't be used{first}" if n_bad else "",
        f"{facts['n_too_long']:,} too long" if facts["n_too_long"] else "",
        f"{facts['n_without_target']:,} without a target" if facts["n_without_target"] else "",
        *facts["notes"],
    ]
    return "; ".join(part for part in parts if part)


def _run_folder(folder: Path) -> Iterator[Check]:
    """Whether the job would start, continue or find itself finished, and the room there."""
    try:
        refuse_folder(folder)
    except InputError as error:
        yield Check("run folder", "failed", f"{folder}: {error.what}", error.to_do)
        return
    free = shutil.disk_usage(_nearest(folder)).free
    state = "a new run"
    if (folder / RUN).exists():
        facts = read_json(folder / RUN)
        n_saved = (
            len(list((folder / CHECKPOINTS).glob("step-*")))
            if (folder / CHECKPOINTS).is_dir()
            else 0
        )
        state = (
            "a finished run"
            if facts.get("finished")
            else f"an unfinished run with {n_saved} checkpoints: the run resumes"
        )
    enough = "ok" if free > 5 << 30 else "warning"
    yield Check(
        "run folder", enough, f"{folder}: {state}; {say_bytes(free)} free", "make room there"
    )


def _try(name: str, check: Callable[[], str]) -> Iterator[Check]:
    try:
        yield Check(name, "ok", check())
    except FarthingError as error:
        yield _failed(name, error)


def _failed(name: str, error: FarthingError) -> Check:
    return Check(
        name, "failed", f"{error.where}: {error.what}" if error.where else error.what, error.to_do
    )


def _nearest(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder
