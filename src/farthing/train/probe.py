"""The verb `probe`: find the cheapest setting on this machine, and take a few real steps with it.

The measurement that those steps leave is one that plans can stand on. The job's own run folder is
not touched.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

from farthing.config.job import Job
from farthing.events import Emit
from farthing.model.hardware import hardware_key
from farthing.train.autotune import PROBE_S, probe_run
from farthing.train.loop import take_step
from farthing.train.measure import leave_measured
from farthing.train.opened_run import opened_run, short_job
from farthing.train.run_settings import tried

STEPS_AFTER = 8  # real steps with the chosen setting: a measurement needs six


def probe(job: Job, emit: Emit, budget_s: float = PROBE_S) -> dict[str, Any]:
    """Probe a job on this machine and leave a measurement for plans and runs, which also take
    its settings; its run folder is not touched.

    Returns the trials, best first, and what the chosen setting made of a few real steps.
    """

    def usd_per_million_tokens(seconds_per_token: float) -> float:
        return seconds_per_token * 1e6 / 3600 * job.usd_per_hour

    with tempfile.TemporaryDirectory(prefix="farthing-probe-") as folder:
        short = short_job(job, folder, max_steps=STEPS_AFTER)
        with opened_run(short, emit) as run:
            started = time.perf_counter()
            trials = probe_run(run.steps, emit, 0.7 * budget_s)
            while run.progress.step < run.schedule.n_steps and (
                run.progress.step < STEPS_AFTER - 1 or time.perf_counter() - started < budget_s
            ):
                take_step(run)
            run.log.settle()
            leave_measured(run)
            tokens_per_s = run.pace.figures()["tokens_per_s"]
            return {
                "hardware": hardware_key(run.spec.numerics.device),
                "settings": tried(trials[0].settings),
                "trials": [
                    {
                        **tried(trial.settings),
                        "tokens_per_s": 1 / trial.seconds_per_token,
                        "useful_share": trial.computed_share,
                        "peak_bytes": trial.peak_bytes,
                        "usd_per_million_tokens": usd_per_million_tokens(trial.seconds_per_token),
                        "fits": trial.seconds_per_token < float("inf"),
                    }
                    for trial in trials
                ],
                "steps": run.progress.step,
                "tokens_per_s": tokens_per_s,
                "usd_per_million_tokens": (
                    usd_per_million_tokens(1 / tokens_per_s) if tokens_per_s else None
                ),
            }
