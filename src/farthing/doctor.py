"""The pre-flight list: is this machine fit to train, and is this job fit to start? Nothing is
trained or changed.

Each check gives a state (ok, warning, failed), what was found and what to do.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
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
from farthing.device_memory import first_line
from farthing.errors import (
    Check,
    DataError,
    FarthingError,
    InputError,
    JobError,
    ModelError,
    PreflightError,
)
from farthing.run.accounts import read_ledger
from farthing.run.folder import CHECKPOINTS, LEDGER, facts_there, witnesses_of
from farthing.run.opening import refuse_folder, refuse_unpaid
from farthing.tables import facts
from farthing.units import plural, say_bytes, say_count, say_usd

TRIED_BYTES = 4 << 20
"""Of the sources together: some seconds."""


def _check(name: str, found: str, to_do: str = "", *, warns: object = False) -> Check:
    return Check(name, "warning" if warns else "ok", found, to_do)


def _failed(name: str, error: FarthingError) -> Check:
    found = f"{error.where}: {error.what}" if error.where else error.what
    return Check(name, "failed", found, error.to_do)


def _try(name: str, check: Callable[[], str]) -> Check:
    try:
        return _check(name, check())
    except FarthingError as error:
        return _failed(name, error)


def check_before(path: Path, overrides: list[str]) -> list[Check]:
    """Everything that can be seen to be wrong with a job without torch."""
    try:
        look_over(load_job_or_tell_all(str(path), overrides))
    except JobError as error:
        is_read, of_data = isinstance(error, PreflightError), (DataError, ModelError)
        return [
            _failed("model and data" if is_read or isinstance(one, of_data) else "job", one)
            for one in error.problems
        ]
    except FarthingError as error:
        return [_failed("model and data", error)]
    return []


# ---- the machine ----


def check_machine(folder: Path, *, with_device: bool = True) -> Iterator[Check]:
    """Python, torch, device, memory, disk, extras; the device only `with_device`."""
    import psutil

    state = "ok" if sys.version_info >= (3, 11) else "failed"
    yield Check("python", state, platform.python_version(), "use Python 3.11 or later")
    torch = _installed("torch", is_imported=with_device)
    yield from (torch, _installed("transformers"), _installed("peft"))
    if with_device and torch.state == "ok":
        yield from _device()
    else:
        yield _check("gpu and cpu", "not checked: fix the failures first")
    memory, (place, free_bytes) = psutil.virtual_memory(), _room(folder)
    yield _check(
        "memory",
        f"{say_bytes(memory.available)} of {say_bytes(memory.total)} free",
        "close something: loading a model needs twice its size",
        warns=memory.available < 2 << 30,
    )
    found = f"{say_bytes(free_bytes)} free at {place}"
    yield _check("disk", found, "make room", warns=free_bytes < 5 << 30)
    for row in facts("extras"):
        absent = (
            f"not installed; only for {row['needed_for']}: pip install 'farthing[{row['extra']}]'"
        )
        found = "installed" if importlib.util.find_spec(row["module"]) else absent
        yield _check(row["module"], found)


def _installed(package: str, *, is_imported: bool = False) -> Check:
    """Whether a package that every run needs is installed, and can be imported."""
    to_do = f"pip install {package}"
    try:
        if is_imported:
            importlib.import_module(package)
        return _check(package, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Check(package, "failed", "not installed", to_do)
    except Exception as error:  # a broken installation fails in any way
        return Check(package, "failed", f"can't be imported: {first_line(error)}", to_do)


def _room(folder: Path) -> tuple[Path, int]:
    """The nearest folder that is there, and the free bytes of its disk."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder, shutil.disk_usage(folder).free


def _device() -> Iterator[Check]:
    import torch

    from farthing.model.hardware import find_compiler

    has_gpu, cuda = torch.cuda.is_available(), torch.version.cuda
    if has_gpu:
        yield from map(_gpu, range(torch.cuda.device_count()))
    else:
        why = f"no usable driver for CUDA {cuda}" if cuda else "torch has no CUDA"
        to_do = "training runs on the CPU: fine for small models"
        yield _check("gpu", f"none ({why})", to_do, warns=True)
    has_mkldnn = torch.backends.mkldnn.is_available()
    has_bf16 = has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    cores, threads = plural(os.cpu_count() or 1, "core"), torch.get_num_threads()
    yield _check("cpu", f"{cores}, {plural(threads, 'torch thread')}{', bf16' if has_bf16 else ''}")
    compiler = find_compiler("cuda" if has_gpu else "cpu")
    absent = f"no {'C' if has_gpu else 'C++'} one; only for train.torch_compile"
    yield _check("compiler", compiler or absent)


def _gpu(index: int) -> Check:
    """One GPU: whether torch has code for it, its name, memory and precision."""
    import torch

    from farthing.model.hardware import must_be_built_for_gpu
    from farthing.prices.gpus import gpu_of_device

    try:
        must_be_built_for_gpu(index)
    except FarthingError as error:  # only the first that torch may see is computed on
        return Check(f"gpu {index}", "failed" if index == 0 else "warning", error.what, error.to_do)
    (major, minor), (free, total) = (
        torch.cuda.get_device_capability(index),
        torch.cuda.mem_get_info(index),
    )
    name = torch.cuda.get_device_name(index)
    precision = "bf16" if major >= 8 else "fp16 with a gradient scaler"
    memory = f"{say_bytes(free)} of {say_bytes(total)} free"
    found = f"{name}, compute {major}.{minor}, {memory}, {precision}"
    if free <= 0.5 * total:
        return _check(f"gpu {index}", found, "something else holds its memory", warns=True)
    if not gpu_of_device(name, total):
        found += "; its peak is not known here: no estimate before a run, no MFU in it"
    return _check(f"gpu {index}", found)


# ---- the job ----


def check_job(path: Path, overrides: list[str]) -> Iterator[Check]:
    """The job file, then what a run is refused for, by the functions that `farthing train` calls:
    limits, run folder, model, tokenizer, and a part of the data.
    """
    from farthing.data.read import say_names
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
    yield _check("job", str(path))
    yield _try("limits", lambda: _limits(job))
    yield _run_folder(Path(job.output_dir))
    quiet_libraries()
    if job.method.name == "qlora" or "8bit" in job.train.optim or "paged" in job.train.optim:
        yield _try(
            "bitsandbytes works", lambda: f"version {need_bitsandbytes('this job').__version__}"
        )
    try:
        check_extras(job)
        spec = resolve(job)
        numerics = spec.numerics
    except FarthingError as error:
        yield _failed("model, tokenizer and data", error)
        return
    yield _check("computes on", f"{device_name(numerics.device)} in {numerics.name}")
    yield _check("model, tokenizer and data", "found")
    labels: list[str] = []

    def tried(role: str, sources: list[Any]) -> str:
        recipe = spec.recipe
        if role == "eval":
            recipe = replace(recipe, label_names=tuple(labels))
        facts, is_whole = try_out(sources, spec.tokenizer, recipe, TRIED_BYTES)
        if role == "train" and is_whole:
            labels.extend(facts["label_names"])
            if job.data.eval_fraction and not spec.eval_sources:
                refuse_too_few(facts["n_distinct_inputs"], sources[0].name)
        return _of_data(facts, is_whole)

    for role, sources in (("train", spec.train_sources), ("eval", spec.eval_sources)):
        if sources:
            names = say_names([source.name for source in sources])
            yield _try(f"{role} data {names}", partial(tried, role, sources))

    def built() -> str:
        model = build_model(spec, tuple(labels) or ("a", "b"), on_host=True, reads=False)
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        return f"{say_count(trained)} weights are trained; its weights were not looked at"

    yield _try("method", built)
    yield from check_choices(job)
    if job.usd_per_hour == 0:
        to_do = "set where.usd_per_hour, or power_watts and usd_per_kwh"
        yield _check("price", "none given", to_do, warns=True)


def check_choices(job: Job) -> Iterator[Check]:
    """What is chosen, by the job or by default, and what is missing."""
    where, train, method = job.where, job.train, job.method
    gpus = ", ".join(where.gpu) or f"any that is offered; here it computes on {where.device}"
    yield _check("GPU choice", f"{gpus}; `farthing plan` compares prices")
    is_spot = where.spot or where.offers == "spot"
    taken, unused = "the machine may be taken away", "not used: where.spot, where.offers"
    yield _check("spot", taken if is_spot else unused)
    for text in unusual_settings(job):
        yield _check("unusual", text, "correct it, unless it is meant", warns=True)
    adapter = "" if method.name == "full" else f", r {method.lora_r}, alpha {method.lora_alpha:g}"
    yield _check("method", f"{method.name}{adapter}, learning rate {job.learning_rate:g}")
    precision = "bf16" if train.bf16 else "fp16" if train.fp16 else ""
    yield _check("precision", precision or "as the device and the model can")
    every = str(train.gradient_checkpointing)
    known = {"auto": "as little as memory allows", "True": "every layer", "False": "off"}
    yield _check("activation checkpointing", known.get(every, f"every {every} layers"))
    micro = "planned, and probed where that pays"
    if job.says_micro_batch:
        n_tokens, n_examples = train.micro_batch_tokens, job.micro_batch_size
        size = f"{n_tokens:,} tokens" if n_tokens else f"{n_examples} examples"
        micro = f"{size} at once, as the job says"
    yield _check("micro-batch", f"{micro}; {job.global_batch_size} examples a step")
    save = f"every {train.save_minutes:g} min" if train.save_minutes else "at the planned interval"
    save = f"every {train.save_steps} steps" if train.save_steps else save
    kept = f"the newest {train.save_total_limit} and the best are kept"
    yield _check("save interval", f"{save}, {kept}")
    store, lost = job.output_store, spot_without_store(job)
    yield _check("store", store or "none: checkpoints stay on this machine", lost, warns=lost)
    limits = job.limits
    if job.usd_per_hour and limits.max_usd is limits.max_hours is limits.max_gpu_hours is None:
        yield _check("cap", "none", "set limits.max_usd", warns=True)


def _limits(job: Job) -> str:
    """How much time a run has. Raises `InputError`."""
    from farthing.train.budget import refuse_limits

    refuse_limits(job, read_ledger(Path(job.output_dir) / LEDGER).accounts)
    limits = job.limits
    caps = [] if limits.max_usd is None else [say_usd(limits.max_usd)]
    caps += [] if limits.max_hours is None else [f"{limits.max_hours:g} h"]
    caps += [] if limits.max_gpu_hours is None else [f"{limits.max_gpu_hours:g} GPU-hours"]
    caps += [str(limits.deadline)] if limits.deadline else []
    return ", ".join(caps) or "none"


def _of_data(facts: Mapping[str, Any], is_whole: bool) -> str:
    """What the rows that were tried became."""
    n_bad, first = facts["n_bad"], next(iter(facts["bad_rows"]), ("", ""))
    others = "" if is_whole else "; the other rows were not looked at"
    parts = [
        f"format {', '.join(sorted(set(facts['formats'])))}",
        f"{plural(facts['n_rows'], 'row')} tried{others}",
        f"{n_bad:,} can't be used ({first[0]}: {first[1]})" if n_bad else "",
        f"{facts['n_too_long']:,} too long" if facts["n_too_long"] else "",
        f"{facts['n_without_target']:,} without a target" if facts["n_without_target"] else "",
        *facts["notes"],
    ]
    return "; ".join(filter(None, parts))


def _run_folder(folder: Path) -> Check:
    """Whether the job would start, continue or find itself finished, and the room there."""
    try:
        refuse_folder(folder)
        if not read_ledger(folder / LEDGER).accounts and not witnesses_of(folder):
            refuse_unpaid(folder)
        facts = facts_there(folder)
    except InputError as error:
        return Check("run folder", "failed", f"{folder}: {error.what}", error.to_do)
    state, (_, free_bytes) = "a new run", _room(folder)
    if facts:
        n_saved = len(list((folder / CHECKPOINTS).glob("step-*")))
        state = f"an unfinished run with {n_saved} checkpoints: the run resumes"
        if facts.get("finished"):
            state = "a finished run"
    found = f"{folder}: {state}; {say_bytes(free_bytes)} free"
    return _check("run folder", found, "make room there", warns=free_bytes < 5 << 30)


# ---- a data file ----


def look_at_data(
    path: Path, job_file: Path | None, overrides: list[str], model: str | None = None
) -> Any:
    """The `Summary` of a data file, read as a job reads it, or by the tokenizer and template of
    `model`. Without both, tokens are guessed from characters, and chats are rendered by farthing's
    own template.

    Raises `DataError`, `JobError`, and `ModelError` for a model that is not on this machine.
    """
    from farthing.data.light_tokenizer import light_tokenizer
    from farthing.data.read import file_source, place_of, short_name
    from farthing.data.summary import summarize
    from farthing.data.token_set import TokenRecipe
    from farthing.objectives.causal_lm import CAUSAL_LM

    shown = short_name(str(path))
    if place_of(str(path)) == "folder":
        raise DataError("a folder", where=shown, to_do="name one file of it")
    if job_file is None:
        source, task = file_source(path), None
        tokenizer = light_tokenizer(_folder_here(model) if model else None, None)
        recipe = TokenRecipe(CAUSAL_LM.name, CAUSAL_LM.max_length)
    else:
        from farthing.clock import today
        from farthing.config.data_lengths import reading_of

        job = load_job(job_file, overrides)
        task, data = job.task, job.data
        tokenizer, recipe = reading_of(job, today().isoformat())
        own = dict(zip(data.train, data.of_train, strict=False)).get(str(path.resolve()))
        source = replace(file_source(path, data.layout), columns=own.columns if own else None)
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
