"""How a run is computed: one value, its JSON, and the file that later attempts follow."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from farthing.data.packing import MicroBatchCost
from farthing.events import Decided
from farthing.local.measurements import append_measurement, read_measurements
from farthing.settings import Settings
from interrupted import LeavesAt
from workshop import Heard, losses_of, make_job, read_json, room_for, train

EVERYTHING = Settings(
    512,
    2,
    shares_prefix=True,
    packed=False,
    compiled=True,
    kernels="liger",
    precision="bf16",
    probed=True,
)


def test_what_was_written_is_read():
    assert Settings.from_json(json.loads(json.dumps(EVERYTHING.to_json()))) == EVERYTHING
    assert Settings.from_json({"micro_batch_tokens": 77, "step": 3}) == Settings(77)
    assert MicroBatchCost(Settings().least_tokens, Settings().more_tokens) == MicroBatchCost(
        least_tokens=0, more_tokens=32
    )
    assert Settings(100).with_probed(EVERYTHING) == Settings(512, 2, probed=True)


@pytest.mark.parametrize(
    "name",
    [
        "micro_batch_tokens",
        "checkpoint_every",
        "compiled",
        "precision",
        "more_tokens",
    ],
)
@pytest.mark.parametrize("bad", [-1, 1.5, [2]])
def test_values_that_farthing_never_writes_are_refused(name, bad):
    with pytest.raises(ValueError, match="no settings"):
        Settings.from_json(EVERYTHING.to_json() | {name: bad})


def test_memory_that_ran_out_lowers_them():
    events = [
        {"micro_batch_tokens": 400, "checkpoint_every": 0},
        {"micro_batch_tokens": 200, "checkpoint_every": 1},
    ]
    assert Settings(512, 2).lowered_by(events[:1]) == Settings(400, 2)
    assert Settings(512, 2).lowered_by(events) == Settings(200, 1)
    assert Settings(100).lowered_by([]) == Settings(100)


def test_the_plan_stays_as_it_was_and_the_settings_are_lowered(tmp_path, monkeypatch):
    job = make_job(tmp_path, max_steps=6)
    run, seen = Path(job.output_dir), {}

    def leaves(event):
        if isinstance(event, Decided):
            seen.update(
                {name: (run / name).read_bytes() for name in ("plan.json", "settings.json")}
            )
            room_for(150, monkeypatch)
        LeavesAt(step=3)(event)

    assert train(job, leaves).exit_code == 75
    lowered = Settings.from_json(read_json(run / "settings.json"))
    assert (
        lowered.micro_batch_tokens
        < Settings.from_json(json.loads(seen["settings.json"])).micro_batch_tokens
    )
    heard = Heard()
    outcome = train(job, heard)
    assert outcome.state == "finished"
    assert "out of memory" not in heard.warnings, "what had no room is not tried again"
    assert (run / "plan.json").read_bytes() == seen["plan.json"]
    assert Settings.from_json(outcome.receipt.settings) == lowered


@pytest.mark.slow
def test_what_others_probe_between_two_attempts_changes_nothing(tmp_path):
    job = make_job(tmp_path / "run", max_steps=6, n_rows=48)
    assert train(job, LeavesAt(step=3)).exit_code == 75
    shutil.copytree(tmp_path / "run", tmp_path / "alone")
    alone = make_job(tmp_path / "alone", max_steps=6, n_rows=48)
    assert train(alone).state == "finished"
    train(make_job(tmp_path / "like", max_steps=8, n_rows=48))
    measured = read_measurements(tmp_path / "like/cache/measurements.jsonl")[-1]
    probed = replace(measured, probed=True, micro_batch_tokens=64)
    append_measurement(Path(job.cache_dir) / "measurements.jsonl", probed)
    heard = Heard()
    assert train(job, heard).state == "finished"
    assert losses_of(job) == losses_of(alone)
    assert "up to 64 tokens" not in heard.of(Decided)[0].batch
    new, told = make_job(tmp_path / "run", max_steps=6, n_rows=48, output_dir="./new"), Heard()
    train(new, told)
    assert "up to 64 tokens" in told.of(Decided)[0].batch, "a run that begins takes it"
