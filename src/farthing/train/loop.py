"""The loop: the one place where everything meets.

A `Run` is one attempt at a job from its restored step on: evaluate and save when due, stop when asked, take a step.

Everything that can change the result is in `Run.parts` or follows from (seed, step): the data order, the dropout masks
and the learning rate are functions, not state. Refuses to print: it tells `tell`.
"""

from __future__ import annotations

import contextlib
import gc
import math
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import farthing
from farthing.config.job import Job
from farthing.data.batches import Batches
from farthing.device_memory import is_out_of_memory
from farthing.durability.checkpoint import Checkpoints, Part, SaveResult, n_bytes_of
from farthing.durability.files import Damaged
from farthing.durability.ledger import Ledger, Meter
from farthing.durability.preemption import Heard, Notice
from farthing.durability.replica import Mirror
from farthing.durability.run_folder import CHECKPOINTS, COPIES, LOG, MODEL, SCHEDULE, copies_of, rules_of
from farthing.durability.summed_lines import SummedLines
from farthing.errors import (
    Interrupted,
    NoSpace,
    NotFinite,
    RunDamaged,
)
from farthing.export import export_model
from farthing.metrics import GREATER_IS_BETTER
from farthing.model.activation_checkpointing import MemoryNeed
from farthing.model.adapters import count_parameters, put_back, trained_tensors
from farthing.model.compiled import compile_blocks, n_graphs, n_kinds, worth_compiling
from farthing.model.flops import flops_per_token
from farthing.model.forward import Forward
from farthing.model.hardware import (
    Numerics,
    free_bytes,
    free_cached,
    peak_bytes,
    taken_bytes,
)
from farthing.model.liger import use_liger
from farthing.planner.measurements import Record, leave_measurement
from farthing.report.receipt import build_receipt
from farthing.train.autotune import keep_setting, probe_run
from farthing.train.autotune_cache import Subject
from farthing.train.budget import LONGEST_START_S, over_limit, seconds_left
from farthing.train.evaluate import evaluate
from farthing.train.measure import measurement_of
from farthing.train.optim import allocate_state, fitted_schedule, schedule
from farthing.train.schedule import Fit, first_fit, keep_fit, kept_fit, settled_fit
from farthing.train.setup import (
    Examples,
    Inputs,
    Tell,
    build_optimizer,
    settle_checkpointing,
)
from farthing.train.state import ModelPart, OptimizerPart, Progress, ScalerPart
from farthing.train.step import Steps, Taken
from farthing.train.throughput import Pace
from farthing.train.update_guard import OPTIMIZER_TO_DO, out_of_memory_said
from farthing.units import plural, say_bytes

FORECAST_AFTER_STEPS = 5
SAVE_EVERY_S = 300.0  # where there is no plan
LOOKED_AT_STEPS = 64  # of a run, before its first: whether they have several micro-batches
COLLECT_EVERY_STEPS = 200  # cycles of references, each of which may hold on to tensors
STARTING = ("start_up", "load_model", "restore")  # what a start takes when data is tokenized
# a guess of what exporting takes until it is measured: files beside the weights, and a slow disk
EXPORT_S, WRITE_BYTES_PER_S = 0.5, 100e6


def note_news(notice: Notice, ledger: Ledger) -> list[Heard]:
    """Put on the ledger what was heard since the last time; returns it."""
    news = notice.news()
    for heard in news:
        ledger.write("running", notice=heard.as_dict())
    return news


@dataclass
class Run:
    """One attempt at a job, from the restored step to wherever it ends."""

    job: Job
    folder: Path
    inputs: Inputs
    numerics: Numerics
    model: Any
    train_examples: Examples
    eval_examples: Examples | None
    meter: Meter
    ledger: Ledger
    notice: Notice
    tell: Tell
    promise: dict[str, Any] = field(default_factory=dict)
    """What the plan said of this run before it began; empty where it could say nothing."""
    progress: Progress = field(default_factory=Progress)
    subject: Subject | None = None
    """What a probe of this run is of."""
    mirror: Mirror | None = None
    """The copy of this run in a store, where the job names one."""

    def __post_init__(self) -> None:
        job, train = self.job, self.job.train
        self.batches = Batches(self.train_examples.indices, job.global_batch_size, train.seed)
        self.n_steps = math.ceil(train.num_train_epochs * self.batches.steps_per_epoch)
        if train.max_steps is not None:
            self.n_steps = train.max_steps
        self.fit = self.fitted() if train.fit_schedule_to_budget else None
        self.optimizer = build_optimizer(job, self.model, rules_of(self.folder))
        self.scaler = torch.amp.GradScaler(self.numerics.device.type, enabled=self.numerics.needs_scaler)
        self.set_schedule()
        self.parameters = count_parameters(self.model)
        self.parts: dict[str, Part] = {
            "model": ModelPart(self.model),
            "optimizer": OptimizerPart(self.model, self.optimizer),
            "scaler": ScalerPart(self.scaler),
            "progress": self.progress,
        }
        self.fused = None
        if job.method.name != "full":
            from farthing.model.lora_kernels import use_low_rank  # takes peft along, which a full run has no use for

            self.fused = use_low_rank(self.model)
        wants_liger, is_cuda = train.use_liger_kernel, self.numerics.device.type == "cuda"
        self.liger = use_liger(self.model) if wants_liger is True or (wants_liger and is_cuda) else None
        self.forward = Forward(
            self.model,
            job.task,
            self.inputs.pad_id,
            self.numerics,
            label_smoothing=train.label_smoothing_factor,
            may_go_flat=job.model.attn_implementation is None,
            tile_tokens=self.promise.get("tile_tokens"),
        )
        most_tokens, every_n_layers = self.most_tokens(), self.promise.get("every_n_layers", 0)
        if self.ledger.out_of_memory:
            every_n_layers = self.ledger.out_of_memory[-1]["every_n_layers"] or every_n_layers
        before_bytes, free = taken_bytes(self.numerics.device), free_bytes(self.numerics.device)
        with out_of_memory_said(OPTIMIZER_TO_DO):
            allocate_state(self.optimizer)
        self.memory = settle_checkpointing(
            job,
            self.forward,
            self.train_examples,
            most_tokens,
            every_n_layers,
            optimizer=self.optimizer,
            free_bytes=free,
            accumulates=self.accumulates(most_tokens),
        )
        self.promised_bytes = before_bytes + self.memory.total_bytes
        self.compiled = self._compile()
        self.steps = Steps(
            self.forward,
            self.batches,
            self.train_examples.tokens,
            self.optimizer,
            self.scaler,
            self.n_steps,
            lambda step: job.learning_rate * self.lr_factor(step),
            train.max_grad_norm,
            train.seed,
            most_tokens,
            self.memory.every_n_layers,
            self.meter,
            lambda: bool(self.notice),
            self.ran_out_of_memory,
            self.wait_for_copies,
        )
        self.in_flight: deque[Taken] = deque()
        self.record = Record(loaded_bytes=before_bytes)
        self.log = SummedLines(self.folder / LOG)
        self.metric = (train.metric_for_best_model or "loss").removeprefix("eval_")  # known: the job was checked
        self.pace = Pace(self.numerics, flops_per_token(self.model, job.method.name), self.meter)
        minutes = train.save_minutes
        self.save_every_s = minutes * 60 if minutes else float(self.promise.get("interval_s", SAVE_EVERY_S))
        self._saved_at_s = self.meter.wall_s
        self._saved_mark = self._mark()
        self._save_now = False
        self._last_evaluation_s = 0.0
        self.n_evaluated = 0  # tokens of an evaluation, as computed
        self._save_s = self._settled_s = self._start_s = 0.0
        self._insured = False
        self._copies: dict[str, Any] = {}
        self._n_graphs, self._compute_s = n_graphs(), 0.0

    def _compile(self) -> int | str:
        """Compile the layers where the job says so or it pays; returns how many, or why none."""
        wanted, model = self.job.train.torch_compile, self.model
        if wanted == "auto" and self.liger and not self.liger.startswith("no "):
            return "Liger's kernels leave little to gain, and the two were never tried together"
        pays = worth_compiling(
            wanted,
            device=self.numerics.device.type,
            n_kinds=n_kinds(model) if wanted == "auto" else 0,
            step_s=self.promise.get("step_s"),
            n_steps_left=self.n_steps,
            full_determinism=self.job.train.full_determinism,
        )
        return compile_blocks(model) if pays else "it would not pay"

    def set_schedule(self) -> None:
        """The learning rate as a function of the step, by the job or as it was fitted to the budget."""
        train, rate = self.job.train, self.job.learning_rate
        if self.fit is None:
            self.n_warmup_steps = self.warmup_of(self.n_steps)
            self.lr_factor = schedule(
                train.lr_scheduler_type,
                n_warmup_steps=self.n_warmup_steps,
                n_steps=self.n_steps,
                learning_rate=rate,
            )
            return
        self.n_steps, self.n_warmup_steps = self.fit.n_steps, self.fit.n_warmup_steps
        self.lr_factor = fitted_schedule(
            train.lr_scheduler_type,
            n_warmup_steps=self.n_warmup_steps,
            holds_until=self.fit.settles_at,
            n_steps=self.n_steps,
            learning_rate=rate,
        )

    def warmup_of(self, n_steps: int) -> int:
        """Steps of warm-up in a run of `n_steps`."""
        train = self.job.train
        return math.ceil(train.warmup_ratio * n_steps) if train.warmup_steps is None else train.warmup_steps

    def fitted(self) -> Fit:
        """The steps that the limits buy: as an earlier attempt kept it, else by what the plan promises."""
        if kept := kept_fit(self.folder / SCHEDULE):
            return kept
        step_s, seconds = self.promise.get("step_s"), self.promise.get("seconds", {})
        if step_s is not None:
            step_s += (seconds.get("evaluation", 0.0) + seconds.get("checkpoints", 0.0)) / self.n_steps
        left_s, end_s = seconds_left(self.job, self.ledger), seconds.get("export", EXPORT_S)
        return keep_fit(self.folder / SCHEDULE, first_fit(self.n_steps, self.warmup_of, left_s, step_s, end_s))

    def settle_schedule(self) -> None:
        """Settle for good how many steps the limits buy, by the measured pace, before the rate comes down."""
        assert self.fit is not None
        self.settle()
        step_s = self.pace.step_s or self.ledger.takes.get("step_s")
        if step_s is not None:
            train = self.job.train
            if self.eval_examples is not None and train.eval_strategy != "no":
                step_s += self.evaluation_s() / (train.eval_steps or self.batches.steps_per_epoch)
            step_s += self._save_s / (train.save_steps or max(1.0, self.save_every_s / step_s))
        self.fit = settled_fit(self.fit, seconds_left(self.job, self.ledger), step_s, self.seconds_to_leave())
        keep_fit(self.folder / SCHEDULE, self.fit)
        self.set_schedule()
        self.steps.n_steps = self.n_steps
        self.steps.close()  # what was made ready knew the number
        self.tell(
            "note", {"text": f"the schedule is settled: {plural(self.n_steps, 'step')} of {self.fit.asked_steps:,}"}
        )

    def most_tokens(self) -> int:
        """Computed tokens of a micro-batch: as the job says, as an earlier attempt had room for, or as planned."""
        lengths = self.train_examples.tokens.lengths[self.train_examples.indices]
        longest = int(lengths.max()) * min(self.job.micro_batch_size, len(lengths))
        most = self.job.train.micro_batch_tokens or self.promise.get("micro_batch_tokens") or longest
        return min([int(most), *(event["most_tokens"] for event in self.ledger.out_of_memory)])

    # ---- before the loop ----

    def restore(self, run_id: str, allow_restart: bool) -> None:
        """Go back to the newest whole checkpoint, or to the start when there never was one. Raises `RunDamaged`."""
        self.checkpoints = Checkpoints(
            self.folder / CHECKPOINTS,
            run_id,
            self.job.train.save_total_limit,
            warn=self.warn,
            facts=self.manifest_facts,
            copy=self.mirror.offer if self.mirror is not None else None,
        )
        try:
            step = self.checkpoints.newest_valid()
            if step is None and self.ledger.committed_step > 0:
                raise RunDamaged(
                    f"the checkpoint of step {self.ledger.committed_step} was written, and is gone",
                    where=str(self.checkpoints.folder),
                    to_do="bring it back from a copy, or start from zero on purpose with --allow-restart",
                )
        except RunDamaged:
            if not allow_restart:
                raise
            self.checkpoints.forget_all()
            step = None
        if step is not None:
            self.checkpoints.restore(step, self.parts)
            self._saved_mark = self._mark()
            self.tell("restored", {"step": step, "n_steps": self.n_steps, "attempt": self.ledger.number})
        elif self.ledger.number > 1:
            self.tell("note", {"text": "an earlier attempt left no checkpoint: starting at step 0"})
        self._keep_log()
        self._refuse_small_disk()
        self.ledger.begin_at(self.progress.step)

    def _keep_log(self) -> None:
        """Drop the log's lines of steps that are taken again; warn of damaged ones, and of steps that it does not have."""
        at, steps = self.progress, set[int]()

        def is_kept(row: dict[str, Any]) -> bool:
            step = row.get("step", 0)
            if "examples" in row and 0 < step <= at.step:
                steps.add(step)
            return step <= at.step and ("metrics" not in row or step <= at.evaluated_step)

        self.log.keep(is_kept)
        if n_damaged := len(self.log.damaged):
            self.warn(f"{plural(n_damaged, 'line')} of {LOG} {'is' if n_damaged == 1 else 'are'} damaged: left out")
        if n_lost := at.step - len(steps):
            self.warn(f"{LOG} lacks {n_lost} of the {plural(at.step, 'step')} so far; the result is not touched by it")

    def manifest_facts(self) -> dict[str, Any]:
        """What a checkpoint's manifest says of the run, the files that decide its result among it."""
        self._copies = copies_of(self.folder, self._copies)
        return {"farthing": farthing.__version__, **self.ledger.witness(), COPIES: self._copies}

    def _refuse_small_disk(self) -> None:
        state_bytes = n_bytes_of(self.parts)
        n_aside = 2 if self.mirror is not None else 0  # one that is being sent, and the next
        need = state_bytes * (self.job.train.save_total_limit + 2 + n_aside)
        free = shutil.disk_usage(self.folder).free
        if free < need:
            raise NoSpace(
                f"{say_bytes(free)} are free, checkpoints and the model may take {say_bytes(need)}",
                where=str(self.folder),
                to_do="make room, or set output_dir to a disk that has it",
            )

    def share_beginnings(self, decided: int | None) -> int:
        """Compute once in a micro-batch what its examples begin with, where the data has enough of that.

        Returns the tokens of a micro-batch that does, 0 where there is none. Decided by the first attempt, as it
        changes rounding. A beginning is computed once in each micro-batch, so they grow, up to a step, while that saves
        more and needs no more activation checkpointing, where neither job nor probe has said how large they are.
        """
        steps, tokens = self.steps, self.train_examples.tokens
        if decided is None:
            budgets = [steps.most_tokens]
            if not (self.job.says_micro_batch or "probed" in self.promise or self.ledger.out_of_memory):
                of_a_step = int(tokens.lengths[self.train_examples.indices].mean() * self.job.global_batch_size)
                while budgets[-1] < of_a_step and self._need_of(2 * budgets[-1]).fits:
                    budgets.append(2 * budgets[-1])
            saved, decided = self.forward.share(tokens, self.batches, budgets)
            if decided:
                self.tell(
                    "note", {"text": f"{saved:.0%} of the tokens begin others too: computed once in a micro-batch"}
                )
        self.forward.shares = bool(decided)
        if decided and "probed" not in self.promise:
            most_tokens = min([decided, *(event["most_tokens"] for event in self.ledger.out_of_memory)])
            need = self._need_of(most_tokens)
            self.promised_bytes += need.total_bytes - self.memory.total_bytes
            self.memory, steps.most_tokens = need, most_tokens
        return decided

    def _need_of(self, most_tokens: int) -> MemoryNeed:
        """The memory of this run with larger micro-batches than those it was judged by."""
        gradients = replace(self.memory.gradients, accumulate=self.accumulates(most_tokens))
        return replace(self.memory, n_tokens=most_tokens, gradients=gradients)

    def accumulates(self, most_tokens: int) -> bool:
        """Whether a step may have several micro-batches of so many tokens, by the first steps."""
        lengths = self.train_examples.tokens.lengths
        steps = range(min(self.n_steps, LOOKED_AT_STEPS))
        return any(int(lengths[self.batches.examples_of(step)].sum()) > most_tokens for step in steps)

    def probe(self) -> None:
        """Spend a minute to find a cheaper way to compute the same steps. Raises `Interrupted`."""
        assert self.subject is not None
        self.tell("note", {"text": "trying a few sizes of the forward pass before the first step"})
        best = probe_run(self, self.subject)[0]
        self.promise = keep_setting(self.folder, self.promise, best.setting)

    def warn(self, text: str) -> None:
        """Say what the person should know; the run goes on."""
        self.tell("warning", {"text": text})

    # ---- the loop ----

    def loop(self) -> tuple[str, str]:
        """Steps until done, stopped early, interrupted or over a limit; returns (state, reason)."""
        state = reason = ""
        self._start_s = min(LONGEST_START_S, sum(self.meter.spans.get(name, 0.0) for name in STARTING))
        with contextlib.closing(self.steps), rare_collections():
            try:
                while not state:
                    self.hear()
                    limit = over_limit(self.job, self.ledger, self.seconds_to_reserve())
                    if self.evaluation_is_due() and not limit:
                        self.evaluate()
                    elif self.is_done():
                        state, reason = "finished", "stopped early" if self.progress.stopped_early else "all steps done"
                    elif self.notice:
                        state, reason = "interrupted", str(self.notice.reason)
                    elif limit:
                        state, reason = "limit", limit
                    else:
                        if self.fit and not self.fit.settled and self.progress.step >= self.fit.settles_at:
                            self.settle_schedule()
                        if not self._insured and over_limit(self.job, self.ledger, self.seconds_to_insure()):
                            self.insure()
                        if self.save_is_due():
                            self.save()
                        self.take_step()
            except Interrupted:
                state, reason = "interrupted", str(self.notice.reason)
            self.save_last()
        if state != "interrupted":
            with self.meter.span("export"):
                self.export()
        return state, reason

    def hear(self) -> None:
        """Take note of what clouds and signals have said: where the machine may go, save sooner."""
        for heard in note_news(self.notice, self.ledger):
            if not heard.is_certain:
                self._save_now = True
                self.warn(f"{heard.what}: saving now, and going on")
        while self.notice.warnings:
            self.warn(self.notice.warnings.pop(0))

    def is_done(self) -> bool:
        """Whether nothing is left to be trained or evaluated."""
        at = self.progress
        return (at.step >= self.n_steps or at.stopped_early) and not self.evaluation_is_due()

    def insure(self) -> None:
        """Write the model while what is left still pays for a start: killed from here on, the run has no need of one."""
        if self.progress.step == 0:
            return
        self._insured = True
        self.save_last()
        with self.meter.span("export"):
            now = {name: tensor.to("cpu", copy=True) for name, tensor in trained_tensors(self.model).items()}
            self.export()
            put_back(self.model, now)  # the best may have been written, which is another

    def take_step(self) -> None:
        """One optimizer step over the global batch; nothing changes when it is interrupted."""
        taken = self.steps.take(self.progress.step)
        at, sums = self.progress, taken.sums
        at.step += 1
        at.n_tokens += int(self.train_examples.tokens.lengths[sums.examples].sum())
        at.n_padded_tokens, at.n_targets = at.n_padded_tokens + sums.n_computed, at.n_targets + sums.n_targets
        self.record.micro_batch(*sums.largest)
        self.in_flight.append(taken)
        self.settle(self.steps.n_ahead)
        self.note_finished_save(self.checkpoints.finished_save())
        if self.mirror is not None:
            self.mirror.check()
        if at.step % COLLECT_EVERY_STEPS == 0:
            gc.collect()

    def settle(self, most_in_flight: int = 0) -> None:
        """Read the figures of steps that were taken, but for the last `most_in_flight`. Raises `NotFinite`."""
        while len(self.in_flight) > most_in_flight:
            taken = self.in_flight.popleft()
            losses, norm = self.note(taken)
            self.judge_finite(taken, losses, norm)

    def note(self, taken: Taken) -> tuple[list[float], float]:
        """Put a step in the log, on the meter and before the user. Returns its losses and gradient norm."""
        with self.meter.span("compute"):  # a GPU is waited for here
            losses, norm = taken.read()
        self.meter.move("compute", "optimizer", taken.update_s())
        step, sums, loss = taken.step + 1, taken.sums, math.fsum(losses)
        n_tokens = int(self.train_examples.tokens.lengths[sums.examples].sum())
        row = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "lr": taken.learning_rate,
            "n_targets": sums.n_targets,
            "n_tokens": n_tokens,
            "examples": sums.examples.tolist(),
        }
        self.log.append(row)
        self._note_compiling()
        now_s = self.meter.wall_s
        seconds, peak = now_s - max(taken.started_s, self._settled_s), peak_bytes(self.numerics.device)
        self._settled_s = now_s
        self.pace.step_done(n_tokens, sums.n_computed, seconds)
        n_pieces = len(sums.pieces)
        self.record.step_done(n_pieces, n_tokens, sums.n_computed, sums.n_targets, seconds, self.meter.spans, peak)
        self.report_step(row)
        return losses, norm

    def _note_compiling(self) -> None:
        """A step in which torch has compiled is warm-up: its time goes under that name, and figures begin anew."""
        compute_s, n = self.meter.spans.get("compute", 0.0), n_graphs()
        if isinstance(self.compiled, int) and n > self._n_graphs:
            self.meter.move("compute", "compile", compute_s - self._compute_s)
            self.pace.begin_again()
            self.record.begin_again()
        self._n_graphs, self._compute_s = n, self.meter.spans.get("compute", 0.0)

    def judge_finite(self, taken: Taken, losses: list[float], norm: float) -> None:
        """Count a skipped step and name its samples; too many in a row end the run. Raises `NotFinite`."""
        at, loss, step = self.progress, math.fsum(losses), taken.step + 1
        if math.isfinite(loss) and math.isfinite(norm):
            at.skipped_in_a_row = 0
            return
        at.skipped_steps += 1
        if math.isfinite(loss) and self.scaler.is_enabled() and self.scaler.get_scale() >= 1:
            self.log.append({"step": step, "skipped": "the gradients overflowed fp16"})
            self.warn(f"step {step}: gradients overflowed fp16, scale now {self.scaler.get_scale():g}; step skipped")
            return
        at.skipped_in_a_row += 1
        pieces = taken.sums.pieces
        guilty = [piece for piece, value in zip(pieces, losses, strict=True) if not math.isfinite(value)] or pieces
        places = [self.train_examples.tokens.place(int(index)) for piece in guilty for index in piece]
        named = ", ".join(places[:5]) + (f" and {len(places) - 5} more" if len(places) > 5 else "")
        what = "the gradient is" if math.isfinite(loss) else "the loss is"
        self.log.append({"step": step, "skipped": what, "samples": places})
        self.warn(f"step {step}: {what} not a number, step skipped; among {named}")
        if at.skipped_in_a_row >= self.job.train.max_skipped_steps:
            while self.in_flight:
                self.note(self.in_flight.popleft())
            self.save_last()
            raise NotFinite(
                f"{at.skipped_in_a_row} steps in a row had a loss or gradient that is not a number (last: {named})",
                where=str(self.folder),
                to_do="lower learning_rate, look at these rows, or use bf16/fp32 instead of fp16",
            )

    def ran_out_of_memory(self, step: int, why: str, is_less: bool) -> None:
        """Say that a step is taken again, and put on the receipt that it is with less at once."""
        steps = self.steps
        if not is_less:
            self.warn(
                f"step {step + 1}: out of memory ({why}); what was not needed was freed, it is taken again as it was"
            )
            return
        event = {"step": step + 1, "most_tokens": steps.most_tokens, "every_n_layers": steps.every_n_layers, "why": why}
        self.ledger.write("running", out_of_memory=event)
        self.warn(
            f"step {step + 1}: out of memory; it goes on with {steps.most_tokens:,} tokens at a time"
            f"{', more layers computed again' if steps.every_n_layers else ''}: the same examples a step, the same result"
        )

    # ---- evaluation ----

    def evaluation_is_due(self) -> bool:
        """At the end of epochs or every `eval_steps`, and at the very end; once for each step."""
        return self.progress.evaluated_step != self.progress.step and self.evaluation_is_at(self.progress.step)

    def evaluation_is_at(self, step: int) -> bool:
        """Whether `step` is one after which to evaluate."""
        train = self.job.train
        if self.eval_examples is None or step == 0:
            return False
        if step >= self.n_steps:
            return True
        return train.eval_strategy != "no" and step % (train.eval_steps or self.batches.steps_per_epoch) == 0

    def evaluation_s(self) -> float:
        """Seconds of an evaluation: of the last one, or as if a forward pass took a third of a step."""
        if self._last_evaluation_s or self.eval_examples is None:
            return self._last_evaluation_s
        if before_s := self.ledger.takes.get("evaluation_s"):
            return before_s
        return (self.pace.step_s or 0.0) * len(self.eval_examples) / self.job.global_batch_size / 3

    def evaluate(self) -> None:
        """Measure, and judge whether this is the best so far. Raises `Interrupted`.

        Best is best, by however little; the threshold only says how much better than the best so far counts for the
        patience (as `EarlyStoppingCallback` of transformers has it). Of equal ones the first is the best.
        """
        assert self.eval_examples is not None
        self.settle()
        at, train, started_s = self.progress, self.job.train, self.meter.wall_s
        longest = int(self.eval_examples.tokens.lengths[self.eval_examples.indices].max())
        n_before = self.forward.n_placed
        # as much at once as training was seen to have room for
        most_tokens = min(self.steps.most_tokens, train.per_device_eval_batch_size * longest)
        with self.meter.span("evaluation"):
            metrics = self.evaluated_in_memory(most_tokens, longest)
        at.evaluated_step = at.step
        self.n_evaluated = self.forward.n_placed - n_before
        value = metrics.get(self.metric)
        greater = train.greater_is_better
        better = GREATER_IS_BETTER[self.metric] if greater is None else greater
        gain = None if value is None or at.best_metric is None else (value - at.best_metric) * (1 if better else -1)
        is_best = value is not None and (gain is None or gain > 0)
        counts = is_best and (gain is None or gain > train.early_stopping_threshold)
        at.n_evaluations_without_gain = 0 if counts else at.n_evaluations_without_gain + 1
        if is_best:
            at.best_metric, at.best_step = value, at.step
            self._save_now = True
        patience = train.early_stopping_patience
        at.stopped_early = patience is not None and at.n_evaluations_without_gain >= patience
        self._last_evaluation_s = self.meter.wall_s - started_s
        self.record.evaluations_s.append(self._last_evaluation_s)
        self.log.append({"step": at.step, "metrics": metrics, "is_best": is_best})
        self.tell("evaluation", {"step": at.step, "metrics": metrics, "is_best": is_best, "metric": self.metric})

    def evaluated_in_memory(self, most_tokens: int, longest: int) -> dict[str, Any]:
        """The metrics, with less at once where memory runs out: once as before, then halved to the `longest` example."""
        has_freed = False
        while True:
            try:
                return self.evaluated(most_tokens)
            except Exception as error:
                if not is_out_of_memory(error) or (has_freed and most_tokens <= longest):
                    raise
            if has_freed:
                most_tokens = max(longest, most_tokens // 2)
                self.warn(f"out of memory in the evaluation; it begins again with {most_tokens:,} tokens at a time")
            free_cached(self.numerics.device)
            has_freed = True

    def evaluated(self, most_tokens: int) -> dict[str, Any]:
        """The metrics of the model as it is. Raises `Interrupted`, and what says that the memory is full."""
        assert self.eval_examples is not None
        return evaluate(
            self.forward,
            self.eval_examples.tokens,
            self.eval_examples.indices,
            tokenizer=self.inputs.tokenizer,
            most_tokens=most_tokens,
            generate=self.job.train.predict_with_generate,
            max_new_tokens=self.job.data.max_target_length,
            should_stop=lambda: bool(self.notice),
            progress=lambda done, total: self.tell("evaluating", {"done": done, "total": total}),
        )

    # ---- saving ----

    def save_is_due(self) -> bool:
        """Every `save_steps` or `save_minutes`, else at the planned interval; and when the best so far was just found."""
        train, at = self.job.train, self.progress
        if at.step == 0 or self._saved_mark == self._mark():
            return False
        by_steps = train.save_steps is not None and at.step % train.save_steps == 0
        by_time = train.save_steps is None and self.meter.wall_s - self._saved_at_s >= self.save_every_s
        return self._save_now or by_steps or by_time

    def save(self) -> None:
        """Snapshot now, write in the background."""
        self.settle()
        with self.meter.span("checkpoint"):
            started_s = self.meter.wall_s
            self.log.sync()
            self.note_finished_save(self.checkpoints.save(self.progress.step, self.parts, self.progress.best_step))
            self._save_s = self.meter.wall_s - started_s
            self.ledger.held_up_by_save(self._save_s)
        self._saved_at_s, self._saved_mark, self._save_now = self.meter.wall_s, self._mark(), False

    def wait_for_copies(self) -> None:
        """Until weights and state may change: what a checkpoint still copies from a GPU would be of two steps."""
        if not self.checkpoints.is_copying:
            return
        with self.meter.span("checkpoint"):
            started_s = self.meter.wall_s
            self.checkpoints.wait_until_copied()
            waited_s = self.meter.wall_s - started_s
            self._save_s += waited_s
            self.ledger.held_up_by_save(waited_s, n_saves=0)

    def _mark(self) -> tuple[Any, ...]:
        """What tells one saved state from another."""
        return self.progress.step, self.progress.evaluated_step, self.progress.stopped_early

    def save_last(self) -> None:
        """Commit where the run is, and wait until it is on the disk."""
        self.settle()
        if self.progress.step > 0 and self._saved_mark != self._mark():
            self.save()
        with self.meter.span("checkpoint"):
            started_s = self.meter.wall_s
            self.note_finished_save(self.checkpoints.wait())
            self.ledger.held_up_by_save(self.meter.wall_s - started_s, n_saves=0)

    def note_finished_save(self, result: SaveResult | None) -> None:
        """Put a finished background save on the ledger."""
        if result is not None and result.error is None:
            self.ledger.committed(result.step)
            self.record.saves_bytes.append(result.n_bytes)
            self.tell("saved", {"step": result.step, "bytes": result.n_bytes})

    def export(self) -> None:
        """Write the model for others: of the best checkpoint when there is evaluation data, else of the last step."""
        at = self.progress
        step = at.step
        if self.job.train.load_best_model_at_end and at.best_step is not None and at.best_step != at.step:
            try:
                self.checkpoints.verify(at.best_step)
                put_back(self.model, self.checkpoints.read(at.best_step)["model"][0])
                step = at.best_step
            except Damaged as error:
                self.warn(f"the best checkpoint (step {at.best_step}) is damaged ({error}): exporting the last step")
        self.tell("working", {"on": "writing the model"})
        self.ledger.write("running", exported=step)
        receipt = build_receipt(self.folder)
        export_model(self.folder / MODEL, self.model, self.inputs.tokenizer, receipt, step)
        self.tell("exported", {"folder": str(self.folder / MODEL), "step": step})

    # ---- what later plans learn from it ----

    def leave_measurement(self) -> None:
        """Write down what was measured, where enough was. Never fails a run: it warns."""
        try:
            measurement = measurement_of(self)
            if measurement is not None:
                leave_measurement(measurement, Path(self.job.cache_dir or "."), self.folder)
        except Exception as error:  # the run is done and safe, whatever is wrong here
            self.warn(f"what was measured could not be written down: {error}")

    # ---- words ----

    def seconds_to_reserve(self) -> float:
        """What comes next, an evaluation or a step, and leaving after it may still take."""
        if self.is_done():
            return 0.0
        return self.seconds_of_next() + self.seconds_to_leave()

    def seconds_of_next(self) -> float:
        """An evaluation that is due; else a step and the evaluation after it. Before the first, as in earlier attempts."""
        if self.evaluation_is_due():
            return self.evaluation_s()
        next_step = self.progress.step + 1
        step_s = self.pace.longest_step_s or self.ledger.takes.get("step_s", 0.0)
        return step_s + (self.evaluation_s() if self.evaluation_is_at(next_step) else 0.0)

    def seconds_to_leave(self) -> float:
        """Saving and exporting."""
        n_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        save_s = self._save_s or self.ledger.takes.get("save_s", 0.0)
        return 2 * save_s + EXPORT_S + n_bytes / WRITE_BYTES_PER_S

    def seconds_to_insure(self) -> float:
        """As long as so much is left, a run that is killed, and once more at its start, can still leave its model."""
        return self.seconds_to_reserve() + self.seconds_to_leave() + 2 * self._start_s

    def takes(self) -> dict[str, float]:
        """What parts of this attempt took, for a later one."""
        return {
            "start_s": round(self._start_s, 3),
            "step_s": round(self.pace.longest_step_s, 4),
            "save_s": round(self._save_s, 4),
            "evaluation_s": round(self.evaluation_s(), 4),
        }

    def remaining_s(self) -> float | None:
        """Seconds until the end at the present pace; None before a pace is known."""
        if self.pace.step_s is None:
            return None
        train, at = self.job.train, self.progress
        steps = self.n_steps - at.step
        rest = steps * self.pace.step_s
        if self.eval_examples is not None and train.eval_strategy != "no":
            each = train.eval_steps or self.batches.steps_per_epoch
            n_evaluations = math.ceil(self.n_steps / each) - at.step // each
            rest += max(0, n_evaluations) * self.evaluation_s()
        return rest

    def report_step(self, row: dict[str, Any]) -> None:
        """Tell how it goes, and put it on the ledger."""
        remaining_s = self.remaining_s()
        forecast: dict[str, Any] | None = None
        if self.ledger.forecast is None and self.pace.n_steps >= FORECAST_AFTER_STEPS and remaining_s is not None:
            total_s = self.ledger.spent_s + remaining_s
            forecast = {
                "step": row["step"],
                "wall_s": total_s,
                "usd": self.ledger.spent_usd + remaining_s / 3600 * self.job.usd_per_hour,
                "peak_bytes": self.promised_bytes,
            }
        facts = {
            "peak_bytes": peak_bytes(self.numerics.device),
            "tokens": self.progress.n_tokens,
            "padded_tokens": self.progress.n_padded_tokens,
            **self.pace.figures(),
            "takes": self.takes(),
        }
        self.ledger.at_step(row["step"], facts, forecast)
        self.tell(
            "step",
            {
                **{key: row[key] for key in ("step", "loss", "lr", "grad_norm")},
                **facts,
                "n_steps": self.n_steps,
                "epoch": row["step"] / self.batches.steps_per_epoch,
                "usd": self.ledger.spent_usd,
                "usd_to_go": None if remaining_s is None else remaining_s / 3600 * self.job.usd_per_hour,
                "s_to_go": remaining_s,
            },
        )


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Look for reference cycles only when told to: what was there before is never looked through again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
