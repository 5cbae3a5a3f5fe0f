"""farthing's rows: its own loop over each method and lengths, what the planner had promised, and
one thing changed at a time.

A run is opened by the code of `farthing train` and its steps are taken by `loop.take_step`, as the
loop takes them; nothing is evaluated, saved or exported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from farthing.train.optim import state_bytes
from on_gpu.clocks import busy_s, clean
from on_gpu.work import SHAPES, WARM_UP, Scale, facts_of, job_values, opened
from peers import figures
from peers.assignment import Examples as Drawn
from peers.clock import Clock

MOST_STEPS = 1000  # of a run whose settings are changed: more than are ever taken
N_PROFILED = 2  # steps of which every kernel is recorded, after the timed ones
N_WARM, N_TIMED = 1, 3  # of a variant
Row = dict[str, Any]
Emit = Callable[[Row], None]


def measured(run: Any, n_warm: int, n_timed: int) -> Row:
    """Figures of the next steps of a run, by the clock that everyone gets."""
    from farthing.train.loop import rare_collections, take_step

    clock, progress = Clock(torch.cuda.is_available()), run.progress
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with rare_collections():
        clock.begin()
        for _ in range(n_warm + n_timed):
            before = progress.n_tokens, progress.n_padded_tokens
            take_step(run)
            clock.count(progress.n_tokens - before[0], progress.n_padded_tokens - before[1])
            clock.step_done()
        run.log.settle()
    return row_of(clock.facts(), n_warm)


def row_of(facts: Row, n_warm: int) -> Row:
    """The figures of a row, for everyone alike, from what a `Clock` saw."""
    n_steps = len(facts["useful"])
    first = min(n_warm, n_steps - 1)
    rates = figures.rates(facts, first, n_steps)
    return {
        "tokens_per_s": rates["tokens_per_s"],
        "step_s": rates["wall_s"] / (n_steps - first),
        "useful_share": rates["useful_share"],
        "peak_bytes": facts.get("gpu_peak_bytes", facts["peak_bytes"]),
        "n_steps": n_steps,
    }


@contextlib.contextmanager
def failing(what: Row, emit: Emit) -> Iterator[None]:
    """An error in the block is put on record in a line, and the program goes on."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        emit({**what, "failed": f"{type(error).__name__}: {lines[0][:300]}"})
    clean()


# ---- rows, and the planner's truth ----


def rows(shape: str, work: Path, scale: Scale, usd_per_hour: float, emit: Emit) -> None:
    """Every method on every law of lengths. The first of a method is planned by formulas alone, the
    second after one measurement."""
    n_steps = WARM_UP + SHAPES[shape]["timed"] + N_PROFILED
    for method in SHAPES[shape]["methods"]:
        for lengths in SHAPES[shape]["lengths"]:
            folder, out = work / f"{shape}-{lengths}", work / f"ours-{shape}-{method}"
            what = {"kind": "row", "who": "farthing", "shape": shape}
            what |= {"method": method, "lengths": lengths}
            with failing(what, emit):
                facts_of(folder, method)
                values = job_values(folder, out, method, scale, n_steps, usd_per_hour)
                emit({**what, **as_planned(values, Drawn.load(folder / "train.npz"))})


def as_planned(values: Row, drawn: Drawn) -> Row:
    """A run as the plan has it: its figures, what was promised and what happened. It leaves a
    measurement.
    """
    from farthing.train.loop import take_step
    from farthing.train.measure import leave_measured

    resting = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    said = list[str]()
    with opened(values, drawn, said) as run:
        if run.estimate is None:
            raise RuntimeError("; ".join(said) or "no estimate")
        planned = run.feed.settings
        row = measured(run, WARM_UP, run.schedule.n_steps - WARM_UP - N_PROFILED)
        row |= {"settings": settings_of(run), "promised": run.estimate.to_json()}
        row["ran_out_of_memory"] = planned != run.feed.settings
        row["happened"] = happened_to(run, row, row["peak_bytes"] - resting)
        leave_measured(run)
        try:
            n_before = run.progress.n_tokens
            if busy := busy_s(lambda: take_step(run), N_PROFILED):
                busy_share = busy / (run.progress.n_tokens - n_before) * row["tokens_per_s"]
                row["idle_percent"] = 100 * max(0.0, 1 - busy_share)
        except RuntimeError as error:  # no permission to look, say
            row["why_no_idle"] = str(error)[:200]
        run.log.settle()
        return row


def happened_to(run: Any, found: Row, peak_bytes: int) -> Row:
    """Memory by component and seconds, in the planner's words. `rest` is what no tensor that stays
    accounts for.
    """
    weights = sum(p.nbytes for p in run.model.parameters())
    optimizer = state_bytes(run.steps.step.optimizer, run.spec.numerics.device)
    gradients = sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
    facts = {
        "peak_bytes": peak_bytes,
        "weights": weights,
        "optimizer": optimizer,
        "gradients": gradients,
        "rest": peak_bytes - weights - optimizer - gradients,
        "step_s": found["step_s"],
        "usd": found["step_s"] * run.schedule.n_steps / 3600 * run.spec.usd_per_hour,
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        facts["device_bytes"] = total - free
    return facts


def settings_of(run: Any) -> Row:
    """How it computed."""
    from farthing.model.attention_kernels import AttentionSettings, choose_kernel
    from farthing.train.run_settings import tried

    config = run.spec.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query = torch.empty(
        1, 1, width, dtype=run.spec.numerics.base_dtype, device=run.spec.numerics.device
    )
    return {
        **tried(run.feed.settings),
        "attention": choose_kernel(query, AttentionSettings(True, 1.0)),
        "precision": run.spec.numerics.name,
        "liger": run.kernels.liger,
    }


# ---- variants ----


def variants(
    shape: str, work: Path, scale: Scale, usd_per_hour: float, emit: Emit, is_smoke: bool
) -> None:
    """One thing changed at a time, on chat lengths: the setting of the plan first, then each way;
    what takes minutes to compile last.
    """
    folder = work / f"{shape}-chat"
    drawn = Drawn.load(folder / "train.npz")
    base: Row = {"kind": "variant", "shape": shape, "lengths": "chat"}

    def values(method: str, source: Path = folder, **train: Any) -> Row:
        out = work / f"variants-{method}"
        return job_values(source, out, method, scale, MOST_STEPS, usd_per_hour, **train)

    def anew(method: str, group: str, way: str, mode: str = "default", **train: Any) -> None:
        what = {**base, "method": method, "group": group, "way": way}
        with failing(what, emit), compiled_in(mode):
            source = with_weights(folder) if method == "qlora" else folder
            emit({**what, **opened_anew(values(method, source, **train), drawn, is_smoke)})

    on_gpu = torch.cuda.is_available()
    has_8bit = on_gpu and importlib.util.find_spec("bitsandbytes") is not None
    liger = on_gpu and importlib.util.find_spec("liger_kernel") is not None
    for method in ("lora", "full"):
        what = {**base, "method": method}
        with (
            failing({**what, "group": "all", "way": "all"}, emit),
            opened(values(method), drawn) as run,
        ):
            changed(run, what, emit)
        anew(method, "optimizer", "off-loaded", optim="adamw_torch_offload")
        if has_8bit:
            anew(method, "optimizer", "8-bit", optim="adamw_8bit")
        if on_gpu:
            anew(method, "liger", "off" if liger else "on", use_liger_kernel=not liger)
    if has_8bit:
        anew("qlora", "qlora", "weights in 4 bits")
    for mode, method in (
        *(("default", "lora"), ("default", "full")),
        *(("reduce-overhead", "lora"), ("max-autotune", "lora")),
    ):
        keys = {"torch_compile": True, "use_liger_kernel": False}
        anew(method, "compile", f"{mode}, no Liger", mode, **keys)


def with_weights(folder: Path) -> Path:
    """A folder like this one whose model has weights: random, in bf16, for those who can't draw
    them.
    """
    import transformers

    copied = folder.with_name(f"{folder.name}-weights")
    shutil.copytree(folder, copied)
    with torch.device("cuda"):
        config = transformers.AutoConfig.from_pretrained(copied / "model")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(copied / "model")
    return copied


@contextlib.contextmanager
def compiled_in(mode: str) -> Iterator[None]:
    """Layers are compiled by this mode of torch's; farthing itself has only the default one."""
    from farthing.model import compiled

    more = {} if mode == "default" else torch._inductor.list_mode_options(mode)
    with mock.patch.dict(compiled.HOW["options"], more):
        yield


def changed(run: Any, what: Row, emit: Emit) -> None:
    """One run, one thing of it changed after the other."""
    for group, name, way in ways(run):
        its = {**what, "group": group, "way": name}
        with failing(its, emit), way:
            wanted = run.feed.settings.micro_batch_tokens
            found = measured(run, N_WARM, N_TIMED)
            if run.feed.settings.micro_batch_tokens != wanted:
                raise MemoryError(f"went on with {run.feed.settings.micro_batch_tokens:,} tokens")
            emit({**its, **found, "micro_batch_tokens": wanted, "settings": settings_of(run)})
    run.feed.close()


def opened_anew(values: Row, drawn: Drawn, is_smoke: bool) -> Row:
    """A run whose job says something else. Layers compile in its first steps; in a smoke they are
    traced, and no more.
    """
    from farthing.model.compiled import HOW

    how = {"backend": "eager"} if is_smoke else HOW
    n_warm = N_WARM + 2 * ("torch_compile" in values["train"])
    with mock.patch.dict(HOW, how, clear=True), opened(values, drawn) as run:
        if "torch_compile" in values["train"] and isinstance(run.kernels.compiled, str):
            raise RuntimeError(run.kernels.compiled)
        found = measured(run, n_warm, N_TIMED)
        return {**found, "micro_batch_tokens": run.feed.settings.micro_batch_tokens}


def ways(run: Any) -> Iterator[tuple[str, str, AbstractContextManager[Any]]]:
    """(group, name, what changes one thing of a run and changes it back) of each; flex, which is
    compiled, last.
    """
    from farthing.model import attention_kernels

    yield "as planned", "", contextlib.nullcontext()
    yield "attention", "sdpa, padded", padded(run)
    kernels = ["padded"]
    if torch.cuda.is_available():
        kernels += ["flash"] * torch.backends.cuda.is_flash_attention_available()
        kernels += ["flex"] * (attention_kernels._flex() is not None)
    for kernel in kernels:
        by = mock.patch.object(attention_kernels, "choose_kernel", return_value=kernel)
        yield "attention", kernel, by
    if run.kernels.lora is not None:
        yield "adapters", "by peft", by_peft(run)


@contextlib.contextmanager
def padded(run: Any) -> Iterator[None]:
    """Padded micro-batches, and transformers' own attention."""
    from farthing.model.attention import go_packed

    inner = run.model.get_base_model() if hasattr(run.model, "get_base_model") else run.model
    run.feed.close()
    run.forward.why_padded = "to be compared"
    inner.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        run.feed.close()
        run.forward.why_padded = None
        go_packed(run.model)


@contextlib.contextmanager
def by_peft(run: Any) -> Iterator[None]:
    """Adapters as peft computes them."""
    from farthing.model.lora_kernels import LowRank, use_low_rank

    for module in run.model.modules():
        if isinstance(module, LowRank):
            module.__class__ = type(module).__bases__[1]
    try:
        yield
    finally:
        use_low_rank(run.model)
