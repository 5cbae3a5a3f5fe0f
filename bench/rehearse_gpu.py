"""Whole runs of every family, task, method, precision and setting on a GPU that computes nothing:
`make rehearse-gpu`.

    python bench/rehearse_gpu.py [--only WORD ...] [--verbose] [--every-family] [--jobs 2]

Needs a CUDA build of torch and no GPU: `bench/hollow_gpu.py` stands in for what is below torch.
Each case is a job with a small model that goes through `farthing.train.run.train`: it is asked to
leave after its first step, and goes on from the checkpoint through four steps, evaluations and the
export. So forward and backward passes, optimizers, scalers, adapters, generation, Triton's compiler
and torch's allocator are those of a real run, and what fails in them for other reasons than what a
kernel computes, fails here: devices, dtypes, arguments, kernels that this GPU does not have. Where
documents are packed, a wait of the host within a step is a failure too. It finds nothing that a
kernel computes: what the host reads is zero.

The families are those that farthing knows by name; `--every-family` takes all that
`bench/every_family.py` makes, in the better part of an hour.

Only what fails is printed, and the sums; with `--verbose` a line a case: ok, failed or refused (in
farthing's own words). The exit code is 1 where a case failed, 2 where this torch has no CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import selectors
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch
import yaml
from torch import Tensor

import farthing.train.run
from every_family import MAPPINGS, make_framing_tokenizer, rows_of, small_config, small_model
from farthing.config.load import load_job
from farthing.errors import FarthingError
from farthing.events import Event, Note, StepTaken
from farthing.model import attention_kernels
from farthing.model.load import quiet_libraries
from farthing.models.families import DECODERS, ENCODERS, FAMILIES, PACKED, WHY_NOT_PACKED
from farthing.objectives.registry import objective_of
from farthing.tiny import write_jsonl
from farthing.train.step import Step
from hollow_gpu import environment

PRECISIONS: dict[str, dict[str, bool]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "fp32": {"bf16": False},
}
HARD = (
    "bert",
    "gemma2",
    "gpt2",
    "llama",
    "mistral",
    "mixtral",
    "qwen3",
    "roberta",
    "t5",
)  # tried with more besides
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RATES = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "dropout_rate",
    "dropout",
    "resid_pdrop",
)
CRASH = "the model's own code can't compute this"
CASE_CPU_S = 300  # a case that takes more goes round in circles

SETTINGS = Path(__file__).with_name("rehearsed_settings.yaml")
"""What is said besides in jobs of one family: keys with their values."""


@dataclass(frozen=True)
class Case:
    """What is tried."""

    family: str
    task: str
    method: str
    precision: str
    """bf16, fp16, fp32, or auto: the job leaves it to farthing."""
    layout: str
    """packed, shared (beginnings that documents share are computed once) or padded."""
    gpu: str
    besides: str = ""
    """dropout, or keys of the job with their values, as YAML."""

    def __str__(self) -> str:
        return " ".join(
            getattr(self, field.name) for field in fields(self) if getattr(self, field.name)
        )


def known_families() -> Iterator[tuple[str, str]]:
    """(family, task) of all that farthing knows by name. Left out are classifiers of
    encoder-decoder models, which count on the device how often their end token stands in a text:
    nothing is counted on this one."""
    causal, pairs = {*FAMILIES, *DECODERS, *WHY_NOT_PACKED}, PACKED[objective_of("seq2seq").head]
    by_task = {"causal-lm": causal, "classification": (causal | ENCODERS) - pairs, "seq2seq": pairs}
    for task, names in by_task.items():
        yield from ((name, task) for name in sorted(names & MAPPINGS[task].keys()))


def all_cases(every_family: bool = False) -> Iterator[Case]:
    """Each family in full and with adapters, in half precision on a new and an old GPU and in fp32,
    packed and padded; a few with more besides; the settings; Liger's kernels at real widths."""
    pairs = (
        [(name, task) for task in MAPPINGS for name in sorted(MAPPINGS[task])]
        if every_family
        else known_families()
    )
    for family, task in pairs:
        yield Case(family, task, "full", "bf16", "packed", "H100")
        yield Case(family, task, "lora", "bf16", "shared", "H100")
        yield Case(family, task, "full", "fp16", "packed", "T4")
        yield Case(family, task, "lora", "fp16", "padded", "T4")
        yield Case(family, task, "full", "fp32", "padded", "A100")
        yield Case(family, task, "lora", "fp32", "packed", "A100")
        if family in HARD:
            yield Case(family, task, "full", "bf16", "shared", "A100")
            yield Case(family, task, "full", "fp32", "shared", "T4")
            yield Case(family, task, "full", "bf16", "padded", "H100")
            yield Case(family, task, "full", "fp16", "packed", "H100", "dropout")
            yield Case(family, task, "lora", "bf16", "packed", "A100", "dropout")
    for row in yaml.safe_load(SETTINGS.read_text(encoding="utf-8")):
        for keys, gpu in itertools.product(row["keys"], row["gpus"]):
            besides = yaml.safe_dump(keys, default_flow_style=True, width=10**6).strip()
            yield Case(row["family"], row["task"], row["method"], "auto", "packed", gpu, besides)
    for gpu, name in itertools.product(("A100", "H100"), DTYPES):
        yield Case("liger", "kernels", "", name, "", gpu)


# ---- a case ----


class RefusedError(Exception):
    """What is refused in words, or can't be."""


def model_folder(folder: Path, case: Case) -> Path:
    """A small model of a family with weights, and a tokenizer; made once for all cases of both."""
    base = folder / f"base {case.besides == 'dropout'}"
    if base.exists():
        return base
    draft = Path(tempfile.mkdtemp(dir=folder))
    try:
        config = small_config(case.family, case.task)
        config.forced_eos_token_id = (
            None  # what may be forced is asked of the device, which says yes to all
        )
        for name in RATES if case.besides == "dropout" else ():
            if isinstance(getattr(config, name, None), float):
                setattr(config, name, 0.1)
        small_model(case.family, case.task, config).save_pretrained(draft)
        make_framing_tokenizer(draft, case.task)
    except Exception as error:
        raise RefusedError(f"no small model is made: {type(error).__name__}") from error
    with contextlib.suppress(OSError):  # another process was quicker
        draft.rename(base)
    return base


def rows_for(case: Case) -> list[dict[str, str]]:
    """Rows of uneven lengths; for beginnings that are shared, behind a common one."""
    rows = rows_of(case.task)
    if case.layout == "shared":
        first = next(iter(rows[0]))
        rows = [
            {**row, first: "the red old bread and the soup of the old race " * 4 + row[first]}
            for row in rows
        ]
    return rows


def job_of(case: Case, base: Path, folder: Path) -> Path:
    """The job file of a case in a folder of its own."""
    write_jsonl(folder / "data.jsonl", rows_for(case))
    train = {"max_steps": 4, "save_steps": 1, "eval_steps": 2, "global_batch_size": 6}
    train["micro_batch_tokens"] = 300 if case.layout == "shared" else 110
    model = {"model_name_or_path": str(base)}
    values: dict[str, Any] = {
        "task": case.task,
        "model": model | ({"attn_implementation": "eager"} if case.layout == "padded" else {}),
        "data": {
            "train": "data.jsonl",
            "eval": "data.jsonl",
            "max_length": 200,
            "max_target_length": 20,
        },
        "method": {"name": case.method, "lora_r": 4},
        "where": {"device": "cuda", "usd_per_hour": 1.0},
        "output_dir": "./run",
        "cache_dir": str(base.parent / "cache"),
        "train": train | PRECISIONS.get(case.precision, {}),
    }
    if case.besides.startswith("{"):
        for section, keys in yaml.safe_load(case.besides).items():
            values[section] = (
                {**values.get(section, {}), **keys} if isinstance(keys, dict) else keys
            )
            values[section] = {
                key: value for key, value in values[section].items() if value is not None
            }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


class Watch:
    """Which kernels attend in a run, and where the host waits for the device in its steps, but for
    the first two.

    Models with experts are left alone: docs/explanation/gpu.md says when they are waited for.
    """

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Within the block runs are watched."""
        kernels = {
            name: self._counted(name, kernel) for name, kernel in attention_kernels.KERNELS.items()
        }
        honest = Step.take
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(Step, "take", lambda steps, step: self._take(honest, steps, step))
            )
            stack.enter_context(mock.patch.dict(attention_kernels.KERNELS, kernels))
            yield

    def _counted(self, name: str, kernel: Any) -> Any:
        def call(*args: Any) -> Any:
            self.kernels[name] += 1
            return kernel(*args)

        return call

    def _take(self, honest: Any, steps: Step, step: int) -> Any:
        has_experts = any(
            name.endswith("experts") for name, _ in steps.forward.model.named_modules()
        )
        if step < 2 or has_experts or not steps.forward.is_packed:
            return honest(steps, step)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                return honest(steps, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waited = [each for each in caught if "called a synchronizing" in str(each.message)]
            self.waits.update(f"{Path(each.filename).name}:{each.lineno}" for each in waited)


def rehearse(case: Case, folder: Path) -> str:
    """What happened, in words. Raises `RefusedError`, or what the run raises."""
    heard: list[Event] = []

    def leave_after_a_step(event: Event) -> None:
        heard.append(event)
        if isinstance(event, StepTaken) and event.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    of_family = folder / f"{case.family}-{case.task}"
    of_family.mkdir(exist_ok=True)
    here = Path(tempfile.mkdtemp(dir=of_family))
    watch = Watch()
    try:
        job = load_job(job_of(case, model_folder(of_family, case), here))
        with watch():
            states = [
                farthing.train.run.train(job, hear).state
                for hear in (leave_after_a_step, heard.append)
            ]
    except FarthingError as error:
        words = " ".join(str(error).split())
        if CRASH in words:  # a model of transformers that has failed for whatever reason
            raise AssertionError(words) from error
        raise RefusedError(words) from error
    finally:
        shutil.rmtree(here, ignore_errors=True)
    if states != ["interrupted", "finished"]:
        raise AssertionError(
            f"a run that was asked to leave after a step, and began again, was {states}"
        )
    is_shared = any(
        "beginnings that examples share" in event.text for event in heard if isinstance(event, Note)
    )
    words = ["+".join(sorted(watch.kernels)) or "the model's attention", "shared"][: 1 + is_shared]
    if watch.waits:
        words += [f"the host waits for the device within a step: {dict(watch.waits)}"]
        if not case.besides.startswith("{"):
            raise AssertionError(words[-1])
    return ", ".join(words)


def launch_ligers_kernels(dtype: torch.dtype) -> str:
    """Norms, rotations and gated feed-forwards of a model of 8B, forward and backward: compiled for
    this GPU and launched.
    """
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def some(*shape: int) -> Tensor:
        return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True)

    weight = torch.empty(4096, device="cuda", requires_grad=True)
    outs = [LigerRMSNormFunction.apply(some(300, 4096), weight, 1e-6, 0.0, "llama", False, None)]
    outs += [LigerRMSNormFunction.apply(some(300, 4096), weight, 1e-6, 1.0, "gemma", False, None)]
    outs += [
        each.apply(some(300, 14336), some(300, 14336))
        for each in (LigerSiLUMulFunction, LigerGELUMulFunction)
    ]
    turns = torch.empty(1, 300, 128, device="cuda", dtype=dtype)
    outs += LigerRopeFunction.apply(some(1, 32, 300, 128), some(1, 8, 300, 128), turns, turns)
    torch.autograd.backward([out.float().sum() for out in outs])
    return f"{len(outs)} outputs and their gradients"


# ---- many cases ----


def ended(case: Case, folder: Path) -> tuple[str, str]:
    """(ok, failed or refused; what is said of it)."""
    try:
        return "ok", (
            launch_ligers_kernels(DTYPES[case.precision])
            if case.family == "liger"
            else rehearse(case, folder)
        )
    except RefusedError as reason:
        return "refused", str(reason).replace(str(folder), "...")
    except Exception as error:
        at = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "site-packages" not in frame.filename
        ][-1]
        text = " ".join(str(error).split())[:300]
        return "failed", f"{type(error).__name__}: {text} ({Path(at.filename).name}:{at.lineno})"


class Child:
    """A process that tries cases of one GPU in turn: where it dies, the case at work has failed."""

    def __init__(self, cases: list[Case], folder: Path) -> None:
        self.cases, self._n_done = cases, 0
        reads, writes = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _try(cases, folder, writes)
        os.close(writes)
        self.pipe: IO[str] = open(reads, encoding="utf-8")  # noqa: SIM115

    def next_end(self) -> tuple[Case, str, str] | None:
        """(case, end, what is said of it); None once all are tried."""
        line = self.pipe.readline()
        if not line:
            os.waitpid(self._pid, 0)
            self.pipe.close()
            if self._n_done == len(self.cases):
                return None
        end, said = json.loads(line) if line else ("failed", "its process died")
        self._n_done += 1
        return self.cases[self._n_done - 1], end, said

    @property
    def left(self) -> list[Case]:
        """What another process has to try, once this one is gone."""
        return self.cases[self._n_done :] if self.pipe.closed else []


def _try(cases: list[Case], folder: Path, writes: int) -> None:
    """All of `cases`, each end as a line into `writes`; does not return."""
    os.environ.update(environment(cases[0].gpu))
    signal.signal(signal.SIGPROF, _refuse_to_go_on)
    for case in cases:
        signal.setitimer(signal.ITIMER_PROF, CASE_CPU_S)
        line = json.dumps(ended(case, folder))
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(writes, line.encode() + b"\n")
    os._exit(0)


def _refuse_to_go_on(*_: Any) -> None:
    raise TimeoutError(f"more than {CASE_CPU_S} s of CPU time")


def in_children(cases: list[Case], folder: Path, n_jobs: int) -> Iterator[tuple[Case, str, str]]:
    """(case, end, what is said of it) of all, as they end, by so many processes at a time; a
    process knows one GPU.
    """
    waiting: list[list[Case]] = []
    for _, of_gpu in itertools.groupby(
        sorted(cases, key=lambda case: case.gpu), key=lambda case: case.gpu
    ):
        found = list(of_gpu)
        waiting += [part for n in range(2 * n_jobs) if (part := found[n :: 2 * n_jobs])]
    with selectors.DefaultSelector() as running:
        while waiting or running.get_map():
            while waiting and len(running.get_map()) < n_jobs:
                child = Child(waiting.pop(), folder)
                running.register(child.pipe, selectors.EVENT_READ, child)
            for key, _ in running.select():
                child = key.data
                end = child.next_end()
                if child.pipe.closed:
                    running.unregister(key.fd)
                    waiting += [child.left] if child.left else []
                if end is not None:
                    yield end


def say(text: str, indent: str = "  ") -> None:
    """Print within 80 columns."""
    print(textwrap.fill(text, 80, subsequent_indent=indent, break_on_hyphens=False), flush=True)


def main(arguments: list[str]) -> int:
    """Try every case, or those whose line has all the words of `--only`; print what failed and the
    sums.
    """
    parser = argparse.ArgumentParser(description="whole runs on a GPU that computes nothing")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="cases whose line has all these words"
    )
    parser.add_argument("--every-family", action="store_true", help="all families of transformers")
    parser.add_argument("--verbose", action="store_true", help="print a line a case")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time"
    )
    options = parser.parse_args(arguments)
    if torch.version.cuda is None:
        print(
            f"torch {torch.__version__} is not built for CUDA: `make rehearse-gpu` installs one"
            " that is",
            file=sys.stderr,
        )
        return 2
    quiet_libraries()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = [
        case
        for case in all_cases(options.every_family)
        if all(word in str(case).split() for word in options.only)
    ]
    say(f"{len(cases)} cases: whole runs on GPUs that compute nothing, torch {torch.__version__}")
    began_s, ends, reasons = time.monotonic(), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        for case, end, said in in_children(cases, Path(folder), options.jobs):
            ends[end] += 1
            reasons.update([said] if end == "refused" else [])
            if end == "failed" or options.verbose:
                say(f"{end}: {case}: {said}")
            elif ends.total() % 100 == 0:
                say(f"{ends.total()} of {len(cases)} cases, {ends['failed']} failed")
    for reason, n in reasons.most_common():
        say(f"{n} refused: {reason}")
    found = ", ".join(f"{n} {end}" for end, n in sorted(ends.items())) or "no such case"
    say(f"{found}; {time.monotonic() - began_s:.0f} s")
    return 1 if ends["failed"] or not ends else 0


if __name__ == "__main__":
    if torch.version.cuda is not None and "HOLLOW_NAME" not in os.environ:
        # what evaluations and receipts read is more than a value or two, and has to be a number
        whole = environment("H100") | {"HOLLOW_ZERO_BYTES": "65536"}
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | whole)
    sys.exit(main(sys.argv[1:]))
