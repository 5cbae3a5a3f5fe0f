"""Replay training jobs on measured spot capacity, and compare prediction and outcome.

    python bench/spot_replay.py --traces DIR [--json]

DIR is any tree of files {"metadata": {"gap_seconds": g}, "data": [instances available, ...]}. The
model of a zone comes from the first half of its trace and is judged on the second half. There, jobs
of several lengths are wanted at evenly spaced moments, wait for capacity, save at the planned
interval, lose what was not saved, and restart; a job that reaches the end of the trace continues at
the start of the half, so that no start is left out. Errors are of the mean over all starts.
"Pooled" sums the hours of all zones before they are compared.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from farthing.planner.spot import (
    HALF_LIFE_S,
    Floats,
    Interruptions,
    SaveSchedule,
    Trace,
    best_interval_s,
    expect,
    fit,
    read_traces,
    spells_of,
)

JOB_HOURS = (1, 2, 4, 8, 12, 24, 48)
SAVE_S, RESTART_S = 20, 180
N_STARTS = 400


@dataclass(frozen=True, eq=False)
class Replayed:
    """What happened to the job of each start."""

    wall_s: Floats
    billed_s: Floats
    n_interruptions: Floats


def replay(trace: Trace, work_s: float, saves: SaveSchedule, starts_s: Sequence[int]) -> Replayed:
    """Jobs wanted at `starts_s`, event by event and all starts at once; the trace begins again when
    it ends.
    """
    is_up = np.asarray(trace.available) > 0
    if not is_up.any():
        raise ValueError(f"{trace.name}: never up")
    edges = np.flatnonzero(np.diff(np.r_[False, is_up, False].astype(int)))
    begins, ends = edges[::2] * float(trace.gap_s), edges[1::2] * float(trace.gap_s)
    length = len(is_up) * float(trace.gap_s)
    if is_up.all():
        ends[:] = math.inf
    elif is_up[0] and is_up[-1]:  # the last spell goes on in the first
        begins, ends = begins[1:], np.r_[ends[1:-1], length + ends[0]]
    began = (
        np.asarray(starts_s, float) + length
    )  # the first round is for spells that reach into this one
    index, shift = np.searchsorted(ends, began - length, "right"), np.full(len(began), length)
    if ends[-1] > length and ends[-1] < math.inf:
        early = began - length < ends[-1] - length
        index, shift = np.where(early, len(ends) - 1, index), np.where(early, 0.0, shift)
    shift, index = np.where(index == len(ends), shift + length, shift), index % len(ends)
    now, left, restart = began.copy(), np.full(len(began), float(work_s)), np.zeros(len(began))
    billed, hits = np.zeros(len(began)), np.zeros(len(began))
    who = np.arange(len(began))
    while who.size:
        now[who] = np.maximum(now[who], begins[index[who]] + shift[who])
        spell = ends[index[who]] + shift[who] - now[who]
        needed = restart[who] + saves.needed_s(left[who])
        done, used = spell >= needed, np.minimum(spell, needed)
        kept = np.where(done, left[who], saves.kept_s(spell, restart[who]))
        now[who] += used
        billed[who] += used
        left[who] -= kept
        who = who[~done]
        hits[who] += 1
        restart[who] = saves.restart_s
        index[who] += 1
        shift[who] += np.where(index[who] == len(ends), length, 0)
        index[who] %= len(ends)
        if who.size and float((now[who] - began[who]).max()) > 1000 * length:
            raise ValueError(f"{trace.name}: a job of {work_s} s never ends there")
    return Replayed(now - began, billed, hits)


def halves(trace: Trace) -> tuple[Trace, Trace]:
    middle = len(trace.available) // 2
    first, second = trace.available[:middle], trace.available[middle:]
    return replace(trace, available=first), replace(trace, available=second)


def judge(trace: Trace, zone: Interruptions) -> dict[str, Any]:
    """Predicted and replayed hours of each job in the second half of one zone."""
    future = halves(trace)[1]
    saves = SaveSchedule(
        max(60, round(best_interval_s(SAVE_S, RESTART_S, zone))), SAVE_S, RESTART_S
    )
    length_s = len(future.available) * trace.gap_s
    starts = [round(i * length_s / N_STARTS) for i in range(N_STARTS)]
    jobs = []
    for hours in JOB_HOURS:
        work_s = hours * 3600.0
        happened, predicted = replay(future, work_s, saves, starts), expect(work_s, saves, zone)
        edges = [expect(work_s, saves, one).wall_s / 3600 for one in zone.good_and_bad]
        jobs.append(
            {
                "job_hours": hours,
                "predicted_wall_h": predicted.wall_s / 3600,
                "range_wall_h": edges,
                "replayed_wall_h": float(happened.wall_s.mean()) / 3600,
                "predicted_billed_h": predicted.billed_s / 3600,
                "replayed_billed_h": float(happened.billed_s.mean()) / 3600,
                "predicted_interruptions": predicted.n_interruptions,
                "replayed_interruptions": float(happened.n_interruptions.mean()),
            }
        )
    errors = {f"{what}_error_percent": error_percent(jobs, what) for what in ("billed_h", "wall_h")}
    return {"zone": trace.name, "interval_s": saves.interval_s, **errors, "jobs": jobs}


def error_percent(jobs: Sequence[dict[str, Any]], what: str) -> float:
    """Mean absolute error in percent of what happened."""
    return 100 * float(
        np.mean([abs(job[f"predicted_{what}"] / job[f"replayed_{what}"] - 1) for job in jobs])
    )


def judge_all(traces: Sequence[Trace]) -> dict[str, Any]:
    """Every zone that is up in both halves, the mean error over zones and jobs, and that of the
    sums over the zones.
    """
    usable = [trace for trace in traces if all(max(half.available) > 0 for half in halves(trace))]
    seen = [
        fit(*spells_of(halves(trace)[0].available, trace.gap_s), HALF_LIFE_S) for trace in usable
    ]
    zones = [judge(*pair) for pair in zip(usable, seen, strict=True)]
    jobs = [job for zone in zones for job in zone["jobs"]]
    sums = [
        {
            key: sum(zone["jobs"][i][key] for zone in zones)
            for key in jobs[0]
            if key.startswith(("predicted", "replayed"))
        }
        for i in range(len(JOB_HOURS))
    ]
    inside = [
        job["range_wall_h"][0] <= job["replayed_wall_h"] <= job["range_wall_h"][1] for job in jobs
    ]
    return {
        "mean_error_percent": {what: error_percent(jobs, what) for what in ("billed_h", "wall_h")},
        "pooled_error_percent": {
            what: error_percent(sums, what) for what in ("billed_h", "wall_h")
        },
        "wall_in_range_percent": 100 * float(np.mean(inside)),
        "zones": zones,
    }


def main() -> None:
    """Read, judge, print."""
    parser = argparse.ArgumentParser(
        description="predicted against replayed hours and cost of jobs on spot capacity"
    )
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    result = judge_all(read_traces(asked.traces))
    if asked.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{'zone':44} {'cost error':>11} {'wall error':>11}   12 h job: predicted / replayed")
    for zone in result["zones"]:
        job = next(job for job in zone["jobs"] if job["job_hours"] == 12)
        good, bad = job["range_wall_h"]
        print(
            f"{zone['zone']:44} {zone['billed_h_error_percent']:9.1f} %"
            f" {zone['wall_h_error_percent']:9.1f} %   {job['predicted_wall_h']:.1f} h"
            f" ({good:.1f} to {bad:.1f}) / {job['replayed_wall_h']:.1f} h"
        )
    for words, errors in (
        ("mean over zones and jobs", result["mean_error_percent"]),
        ("zones pooled", result["pooled_error_percent"]),
    ):
        print(f"{words:44} {errors['billed_h']:9.1f} % {errors['wall_h']:9.1f} %")
    print(f"replayed mean inside the range: {result['wall_in_range_percent']:.0f} % of jobs")


if __name__ == "__main__":
    main()
