"""farthing's rows: its own loop over each method and lengths, what the planner had promised, and
one thing changed at a time.

A run is opened by the code of `farthing train` and its steps are taken by `loop.take_step`, as the
loop takes them; nothing is evaluated, saved or exported. Never run on a GPU so far.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from farthing.train.optim import state_bytes
from on_gpu.clocks import Busy, clean, idle_percent
from on_gpu.work import METHODS, Scale, job_values, lengths_of, methods_of, opened
from peers import figures
from peers.assignment import Examples as Drawn
from peers.clock import Clock

MOST_STEPS = 1000  # of a run whose settings are changed: more than are ever taken
COMPILED = ("default", "reduce-overhead", "max-autotune")
N_PROFILED = 2  # steps of which every kernel is recorded, after the timed ones
Emit = Callable[[dict[str, Any]], None]
HasTime = Callable[[str], bool]
"""Asked before anything is begun, by its name; what gets no time is put on record."""


def measured(run: Any, n_warm: int, n_timed: int) -> dict[str, Any]:
    """Figures of the next steps of a run, by the clock that everyone gets."""
    from farthing.train.loop import rare_collections, take_step

    clock = Clock(torch.cuda.is_available())
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with Busy() as busy, rare_collections():
        clock.begin()
        for number in range(n_warm + n_timed):
            busy.is_on = number >= n_warm
            before = run.progress.n_tokens, run.progress.n_padded_tokens
            take_step(run)
            clock.count(run.progress.n_tokens - before[0], run.progress.n_padded_tokens - before[1])
            clock.step_done()
        run.log.settle()
        busy.is_on = False
    return row_of(clock.facts(), n_warm, busy.percent)


def row_of(facts: dict[str, Any], n_warm: int, busy_percent: float | None) -> dict[str, Any]:
    """The figures of a row, for everyone alike, from what a `Clock` saw."""
    n_steps = len(facts["useful"])
    rates = figures.rates(facts, min(n_warm, n_steps - 1), n_steps)
    assert rates is not None
    return {
        "tokens_per_s": rates["tokens_per_s"],
        "step_s": rates["wall_s"] / (n_steps - min(n_warm, n_steps - 1)),
        "useful_share": rates["useful_share"],
        "peak_bytes": facts.get("gpu_peak_bytes", facts["peak_bytes"]),
        "busy_percent": busy_percent,
        "n_steps": n_steps,
    }


# ---- rows, and the planner's truth ----


def rows(
    shape: str, work: Path, scale: Scale, usd_per_hour: float, emit: Emit, has_time: HasTime
) -> None:
    """Every method on every law of lengths. The first of a method is planned by formulas alone, the
    second after one measurement."""
    for method in methods_of(shape):
        out = work / f"ours-{shape}-{method}"
        for lengths in lengths_of(shape):
            folder = work / f"{shape}-{lengths}"
            what = {
                "kind": "row",
                "who": "farthing",
                "shape": shape,
                "method": method,
                "lengths": lengths,
            }
            if why := does_not_fit(folder, method):
                emit({**what, "failed": why})
                continue
            if not has_time(f"farthing {shape} {method} {lengths}"):
                continue
            n_steps = scale.warm_up + scale.n_timed(shape) + N_PROFILED
            values = job_values(folder, out, method, scale.batch(lengths), n_steps, usd_per_hour)
            with failing(what, emit):
                emit(
                    {**what, **as_planned(values, Drawn.load(folder / "train.npz"), scale.warm_up)}
                )
            clean()


def does_not_fit(folder: Path, method: str) -> str:
    """Why it can't be trained on this GPU whatever is done, in words; "" if it can."""
    if not torch.cuda.is_available():
        return ""
    least_bytes = json.loads((folder / "facts.json").read_text(encoding="utf-8"))["state_bytes"][
        method
    ]
    room_bytes = torch.cuda.get_device_properties(0).total_memory
    return (
        f"{least_bytes / 2**30:.0f} GiB of weights, gradients and moments do not fit"
        if least_bytes > room_bytes
        else ""
    )


def as_planned(values: dict[str, Any], drawn: Drawn, n_warm: int) -> dict[str, Any]:
    """A run as the plan has it: its figures, what was promised and what happened. It leaves a
    measurement.
    """
    from farthing.train.loop import take_step
    from farthing.train.measure import leave_measured

    rested, said = resting_bytes(), list[str]()
    with opened(values, drawn, said) as run:
        if run.estimate is None:
            raise RuntimeError("; ".join(said) or "no estimate")
        planned = run.steps.settings
        found = measured(run, n_warm, run.schedule.n_steps - n_warm - N_PROFILED)
        row = {**found, "settings": settings_of(run), "promised": run.estimate.to_json()}
        row["ran_out_of_memory"] = planned != run.steps.settings
        row["happened"] = happened_to(run, found, rested)
        leave_measured(run)
        try:
            row["idle_percent"] = idle_percent(lambda: take_step(run), N_PROFILED)
        except RuntimeError as error:  # no permission to look, say
            row["idle_percent"], row["why_no_idle"] = None, str(error)[:200]
        run.log.settle()
        return row


def resting_bytes() -> dict[str, int]:
    """What is taken before a run is there."""
    if not torch.cuda.is_available():
        return {"allocated": 0, "device": 0}
    free, total = torch.cuda.mem_get_info()
    return {"allocated": int(torch.cuda.memory_allocated()), "device": int(total - free)}


def happened_to(run: Any, found: dict[str, Any], rested: dict[str, int]) -> dict[str, Any]:
    """Memory by component and seconds, in the planner's words. `rest` is what no tensor that stays
    accounts for.
    """
    weights = sum(p.nbytes for p in run.model.parameters())
    optimizer = state_bytes(run.optimizer, run.spec.numerics.device)
    gradients = sum(p.nbytes for p in run.model.parameters() if p.requires_grad)
    peak = found["peak_bytes"] - rested["allocated"]
    facts = {
        "peak_bytes": peak,
        "weights": weights,
        "optimizer": optimizer,
        "gradients": gradients,
        "rest": peak - weights - optimizer - gradients,
        "step_s": found["step_s"],
        "usd": found["step_s"] * run.schedule.n_steps / 3600 * run.spec.job.usd_per_hour,
        "spans": {name: round(seconds, 4) for name, seconds in run.context.meter.spans.items()},
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        facts |= {
            "reserved_bytes": int(torch.cuda.max_memory_reserved()),
            "device_bytes": int(total - free),
        }
    return facts


def settings_of(run: Any) -> dict[str, Any]:
    """How it computed."""
    from farthing.model.attention_kernels import How, choose_kernel
    from farthing.train.run_settings import tried

    config = run.spec.config.get_text_config()
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    computed = run.spec.numerics
    query = torch.empty(1, 1, head_size, dtype=computed.base_dtype, device=computed.device)
    return {
        **tried(run.steps.settings),
        "attention": choose_kernel(query, How(True, 1.0)),
        "precision": computed.name,
        "liger": run.kernels.liger,
        "adapters": str(run.kernels.lora) if run.kernels.lora is not None else None,
        "compiled": run.kernels.compiled if isinstance(run.kernels.compiled, int) else False,
    }


@contextlib.contextmanager
def failing(what: dict[str, Any], emit: Emit) -> Iterator[None]:
    """An error in the block is put on record in a line, and the program goes on."""
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        emit({**what, "failed": f"{type(error).__name__}: {lines[0][:300]}"})


# ---- variants ----

Way = Callable[[Any], AbstractContextManager[None]]
"""Changes one thing of a run, and changes it back."""


def variants(
    shape: str,
    work: Path,
    scale: Scale,
    usd_per_hour: float,
    emit: Emit,
    has_time: HasTime,
    *,
    is_smoke: bool,
) -> None:
    """One thing changed at a time, on chat lengths: the setting of the plan first, then each way."""  # noqa: E501
    folder = work / f"{shape}-chat"
    drawn = Drawn.load(folder / "train.npz")

    def values(method: str, **keys: Any) -> dict[str, Any]:
        out = work / f"variants-{shape}-{method}"
        return job_values(
            folder, out, method, scale.batch("chat"), MOST_STEPS, usd_per_hour, **keys
        )

    def base(method: str) -> dict[str, Any]:
        return {"kind": "variant", "shape": shape, "method": method, "lengths": "chat"}

    def anew(method: str, group: str, name: str, **keys: Any) -> None:
        what = {**base(method), "group": group, "way": name}
        if has_time(f"{group}, {name}: variant of {shape} {method}"):
            with failing(what, emit):
                emit({**what, **opened_anew(values(method, **keys), drawn, scale, is_smoke)})
            clean()

    has_bitsandbytes = (
        torch.cuda.is_available() and importlib.util.find_spec("bitsandbytes") is not None
    )
    for method in METHODS:
        with failing({**base(method), "group": "all", "way": "all"}, emit):
            changed(values(method), drawn, base(method), scale, emit, has_time)
        clean()
        anew(method, "optimizer", "off-loaded", optim="adamw_torch_offload")
        if has_bitsandbytes:
            anew(method, "optimizer", "8-bit", optim="adamw_8bit")
        if torch.cuda.is_available():
            anew(
                method,
                "liger",
                "off" if on_by_default() else "on",
                use_liger_kernel=not on_by_default(),
            )
    if has_bitsandbytes:
        what = {**base("qlora"), "group": "qlora", "way": "weights in 4 bits"}
        if has_time(f"qlora: variant of {shape}"):
            with failing(what, emit):
                given = job_values(
                    with_weights(folder),
                    work / "qlora",
                    "qlora",
                    scale.batch("chat"),
                    MOST_STEPS,
                    usd_per_hour,
                )
                emit({**what, **opened_anew(given, drawn, scale, is_smoke)})
            clean()
    for mode in COMPILED:  # what takes minutes to begin comes last
        for method in METHODS if mode == COMPILED[0] else METHODS[:1]:
            with compiled_in(mode):
                anew(
                    method,
                    "compile",
                    f"{mode}, no Liger",
                    torch_compile=True,
                    use_liger_kernel=False,
                )


def with_weights(folder: Path) -> Path:
    """A folder like this one whose model has weights: random, in bf16, for those who can't draw
    them.
    """
    import transformers

    copied = folder.with_name(f"{folder.name}-weights")
    if not copied.exists():
        shutil.copytree(folder, copied)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            config = transformers.AutoConfig.from_pretrained(copied / "model")
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(copied / "model")
    return copied


@contextlib.contextmanager
def compiled_in(mode: str) -> Iterator[None]:
    """Layers are compiled by this mode of torch's; farthing itself has only the default one."""
    from farthing.model import compiled

    more = {} if mode == "default" else torch._inductor.list_mode_options(mode)
    with mock.patch.dict(compiled.OPTIONS, more):
        yield


def changed(
    values: dict[str, Any],
    drawn: Drawn,
    base: dict[str, Any],
    scale: Scale,
    emit: Emit,
    has_time: HasTime,
) -> None:
    """One run, one thing of it changed after the other."""
    with opened(values, drawn) as run:
        for group, name, way in ways(run):
            what = {**base, "group": group, "way": name}
            if not has_time(f"{group}, {name}: variant of {base['shape']} {base['method']}"):
                continue
            with failing(what, emit), way(run):
                wanted = run.steps.settings.micro_batch_tokens
                found = measured(run, *scale.of_variants)
                if run.steps.settings.micro_batch_tokens != wanted:
                    found = {
                        "failed": (
                            f"out of memory, went on with {run.steps.settings.micro_batch_tokens:,}"
                            " tokens"
                        )
                    }
                emit({**what, **found, "micro_batch_tokens": wanted, "settings": settings_of(run)})
            run.steps.feed.close()


def opened_anew(
    values: dict[str, Any], drawn: Drawn, scale: Scale, is_smoke: bool
) -> dict[str, Any]:
    """A run whose job says something else. Layers compile in its first steps; in a smoke they are
    traced, and no more.
    """
    import farthing.train.build
    import farthing.train.run
    from farthing.model.compiled import compile_blocks

    compiles = functools.partial(compile_blocks, backend="eager") if is_smoke else compile_blocks
    n_warm, n_timed = scale.of_variants
    with (
        mock.patch.object(farthing.train.build, "compile_blocks", compiles),
        opened(values, drawn) as run,
    ):
        if values["train"].get("torch_compile"):
            n_warm += 2
            if isinstance(run.kernels.compiled, str):
                raise RuntimeError(run.kernels.compiled)
        began = time.perf_counter()
        found = measured(run, n_warm, n_timed)
        warm_s = time.perf_counter() - began - n_timed * found["step_s"]
        return {
            **found,
            "micro_batch_tokens": run.steps.settings.micro_batch_tokens,
            "warm_up_s": warm_s,
            "said": run.kernels.liger,
        }


def on_by_default() -> bool:
    """Whether Liger's kernels are used where nobody says otherwise."""
    return torch.cuda.is_available() and importlib.util.find_spec("liger_kernel") is not None


def ways(run: Any) -> Iterator[tuple[str, str, Way]]:
    """(group, name, way) of each."""
    yield "as planned", "", as_planned_again
    yield "attention", "sdpa, padded", padded
    for kernel in kernels():  # flex, which is compiled, last
        yield "attention", kernel, attention_by(kernel)
    if run.kernels.lora is not None:
        yield "adapters", "by peft", by_peft


def kernels() -> list[str]:
    """Those of documents end to end that are here."""
    from farthing.model import attention_kernels

    found = ["padded"]
    if torch.cuda.is_available():
        found += ["flash"] * torch.backends.cuda.is_flash_attention_available()
        found += ["flex"] * (attention_kernels._flex() is not None)
    return found


@contextlib.contextmanager
def as_planned_again(run: Any) -> Iterator[None]:
    """Nothing is changed."""
    yield


def attention_by(kernel: str) -> Way:
    """Another kernel over documents end to end."""

    @contextlib.contextmanager
    def way(run: Any) -> Iterator[None]:
        from farthing.model import attention_kernels

        with mock.patch.object(attention_kernels, "choose_kernel", return_value=kernel):
            yield

    return way


@contextlib.contextmanager
def padded(run: Any) -> Iterator[None]:
    """Padded micro-batches, and transformers' own attention."""
    from farthing.model.attention import go_packed

    inner = run.model.get_base_model() if hasattr(run.model, "get_base_model") else run.model
    run.steps.feed.close()
    run.forward.why_padded = "to be compared"
    inner.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        run.steps.feed.close()
        run.forward.why_padded = None
        go_packed(run.model)


@contextlib.contextmanager
def by_peft(run: Any) -> Iterator[None]:
    """Adapters as peft computes them."""
    from farthing.model.lora_kernels import leave_low_rank, use_low_rank

    leave_low_rank(run.model)
    try:
        yield
    finally:
        use_low_rank(run.model)
