"""Who a run is: it goes on wherever its content is the same, and never with files that were
damaged.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file

from farthing.config.job import Job
from farthing.config.load import load_job
from farthing.errors import RunChangedError, RunDamagedError
from farthing.events import Decided, Restored
from farthing.model import weights
from farthing.model.load import ModelChoice, load_config, model_sha256
from farthing.report.receipt import build_receipt
from farthing.run.folder import (
    claim,
    keep,
    kept,
    mend,
    unclaim,
)
from farthing.storage.files import DamagedFileError, commit_folder
from farthing.storage.logs import SummedLines
from interrupted import LeavesAt
from thinned import thinned
from workshop import (
    Heard,
    are_same,
    change_facts,
    job_file,
    log_of,
    make_folder,
    make_job,
    read_json,
    train,
)

KEYS = {
    "max_steps": 6,
    "save_steps": 2,
    "save_total_limit": 2,
    "size": {"hidden": 32},
    "n_rows": 24,
}


def are_equal(left: Job, right: Job) -> bool:
    """Whether two finished runs have the same log and the same weights, to the bit."""
    ours, theirs = (
        load_file(Path(job.output_dir) / "model/model.safetensors") for job in (left, right)
    )
    return log_of(left) == log_of(right) and are_same(ours, theirs)


# ---- places ----


@pytest.mark.parametrize("has_store", thinned([True, False], 2))
def test_a_run_goes_on_where_every_path_user_and_machine_is_another(
    has_store, tmp_path, monkeypatch
):
    alone = make_job(tmp_path / "alone", pretrained=True, **KEYS)
    assert train(alone).exit_code == 0
    here, there = tmp_path / "here", tmp_path / "home/another/deep er"
    path = job_file(here, pretrained=True, **KEYS)
    store = [f"output_store={tmp_path / 'store'}"] if has_store else []
    shutil.rmtree(here / "base")
    shutil.copytree(tmp_path / "alone/base", here / "base")
    assert train(load_job(path, store), LeavesAt(step=3)).exit_code == 75
    there.mkdir(parents=True)
    shutil.copy(path, there / "the same.yaml")
    shutil.move(here / "base", there / "base")
    shutil.move(here / "data.jsonl", there / "data.jsonl")
    if not has_store:
        shutil.move(here / "run", there / "moved")
    shutil.rmtree(here)
    monkeypatch.setenv("HOME", str(there))
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    monkeypatch.chdir(there)
    heard = Heard()
    job = load_job(there / "the same.yaml", [*store, "output_dir=moved", "cache_dir=elsewhere"])
    assert train(job, heard).exit_code == 0
    assert heard.of(Restored)[0].step == 3
    assert "other conditions" not in heard.warnings
    assert are_equal(job, alone)


def test_a_model_is_known_by_its_files_and_not_by_its_place(tmp_path):
    first = make_folder(tmp_path / "a", "llama", pretrained=True, hidden=32)
    hashed = "0123456789abcdef0123456789abcdef01234567"
    second = tmp_path / "models/snapshots" / hashed
    shutil.copytree(first, second)
    config = read_json(second / "config.json")
    config = dict(
        reversed(
            {**config, "transformers_version": "4.40.0", "_name_or_path": "/where/it/was"}.items()
        )
    )
    (second / "config.json").write_text(json.dumps(config))

    def identity(folder, **more):
        choice = ModelChoice(str(folder), **more)
        return model_sha256(choice, load_config(choice))

    assert identity(first) == identity(second)
    (second / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert identity(first) != identity(second)
    shutil.copy(first / "config.json", second / "config.json")
    assert identity(first, trust_remote_code=True) == identity(second, trust_remote_code=True)
    (second / "modeling_x.py").write_text("x = 1\n")
    assert identity(first, trust_remote_code=True) != identity(second, trust_remote_code=True), (
        "code that will run"
    )


def test_weights_that_are_the_same_file_are_read_once(tmp_path, monkeypatch):
    read = []
    honest = weights.sha256_of

    def counted(path):
        read.append(path.name)
        return honest(path)

    monkeypatch.setattr(weights, "sha256_of", counted)
    folder, cache = tmp_path / "model", tmp_path / "cache"
    folder.mkdir()
    for name in ("b.safetensors", "a.safetensors"):
        (folder / name).write_bytes(name.encode() * 1000)
    first = weights.weights_sha256(folder, cache)
    assert first == weights.weights_sha256(folder, cache)
    assert sorted(read) == ["a.safetensors", "b.safetensors"]
    (folder / "a.safetensors").write_bytes(b"x" * 13_000)
    assert dict(weights.weights_sha256(folder, cache)) != dict(first)
    for note in (cache / "weights").iterdir():
        note.write_text("{}")
    weights.weights_sha256(folder, cache)
    assert sorted(read) == ["a.safetensors"] * 3 + ["b.safetensors"] * 2


# ---- before anything was saved ----


@pytest.mark.slow
@pytest.mark.parametrize("has_store", [False, True])
def test_a_run_that_has_saved_nothing_follows_the_corrected_job(has_store, tmp_path):
    store = {"data": {}, "output_dir": "./run"}
    path = job_file(tmp_path, **KEYS, **store)
    more = [f"output_store={tmp_path / 'store'}"] if has_store else []
    # "decided" comes right before the first step
    assert train(load_job(path, more), LeavesAt(Decided)).exit_code == 75
    if has_store:
        shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "base")
    make_folder(tmp_path / "base", "llama", hidden=48)
    heard = Heard()
    corrected = load_job(path, [*more, "train.learning_rate=0.02"])
    outcome = train(corrected, heard)
    assert outcome.exit_code == 0
    said = [text for text in heard.warnings.splitlines() if "uses the job as it is now" in text]
    assert len(said) == 1
    assert "train.learning_rate: 0.01 -> 0.02" in said[0]
    assert "model (content)" in said[0]
    assert len(outcome.receipt.attempts) == 2
    shutil.copytree(tmp_path / "base", tmp_path / "other/base")
    other = make_job(tmp_path / "other", **KEYS, learning_rate=0.02)
    train(other)
    assert are_equal(corrected, other)
    with pytest.raises(RunChangedError, match=r"0.02 -> 0.03[\s\S]*train its weights further"):
        train(load_job(path, [*more, "train.learning_rate=0.03"]))


# ---- damage ----

VALUES = {
    "run.json": {
        "run_id": "r1",
        "farthing": "1",
        "identity": {"train.seed": 42},
        "machine": {"torch": "2"},
        "format": 1,
    },
    "plan.json": {
        "micro_batch_tokens": 512,
        "checkpoint_every": 0,
        "wall_range_s": [1.5, 2.5],
        "calibration": "é",
    },
    "settings.json": {
        "micro_batch_tokens": 512,
        "checkpoint_every": 2,
        "compiled": False,
    },
    "schedule.json": {"kind": "farthing schedule", "n_steps": 81, "settled": True, "step_s": 0.25},
}


def folder_with(folder: Path, *, has_checkpoint: bool = True) -> Path:
    """The deciding files, and a checkpoint whose manifest has copies of them."""
    folder.mkdir()
    for name, value in VALUES.items():
        keep(folder / name, value)
    if has_checkpoint:
        facts = {"step": 4, "run_id": "r1", "run_files": VALUES}
        commit_folder(folder / "checkpoints/step-00000004-0001", lambda draft: None, facts)
    return folder


def test_a_flipped_bit_of_every_byte_and_every_cut_of_a_deciding_file_is_found(tmp_path):
    path = folder_with(tmp_path / "run", has_checkpoint=False) / "plan.json"
    whole = path.read_bytes()
    assert kept(path) == VALUES["plan.json"]
    for at in range(len(whole)):
        for rest in (bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :], b""):
            path.write_bytes(whole[:at] + rest)
            with pytest.raises(DamagedFileError):
                kept(path)
    shutil.copy(path.with_name("run.json"), path)
    with pytest.raises(DamagedFileError, match="holds another file"):
        kept(path)


@pytest.mark.parametrize("name", VALUES)
def test_a_damaged_or_lost_deciding_file_is_written_anew_from_the_newest_whole_checkpoint(
    name, tmp_path
):
    folder = folder_with(tmp_path / "run")
    damaged = folder / "checkpoints/step-00000006-0001"
    damaged.mkdir()
    (damaged / "manifest.json").write_text("{}")
    whole = (folder / name).read_bytes()
    without_sum = json.dumps({**VALUES[name], "n_steps": 80}).encode()
    for content in [
        None,
        b"",
        b"{}",
        without_sum,
        *(whole[:at] + b"7" + whole[at + 1 :] for at in range(3, len(whole), 29)),
    ]:
        if content == whole:
            continue
        said = []
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        mend(folder, said.append)
        assert (folder / name).read_bytes() == whole
        assert len(said) == 1
        assert "written again from the checkpoint of step 4" in said[0]
    said = []
    mend(folder, said.append)
    assert said == []


def test_a_damaged_file_that_the_checkpoint_knows_nothing_of_is_removed(tmp_path):
    folder, said = folder_with(tmp_path / "run"), list[str]()
    facts = {"step": 6, "run_id": "r1", "run_files": {**VALUES, "schedule.json": None}}
    commit_folder(folder / "checkpoints/step-00000006-0002", lambda draft: None, facts)
    (folder / "schedule.json").write_text("{")
    mend(folder, said.append)
    assert not (folder / "schedule.json").exists()
    assert [text.partition(": ")[2][-53:] for text in said] == [
        "removed, the run had none at its checkpoint of step 6"
    ]


def test_a_run_of_another_format_is_refused_and_one_of_another_precision_is_said(tmp_path):
    folder, facts = folder_with(tmp_path / "run"), VALUES["run.json"]
    for other in ({"format": 2}, {"format": None}):
        change_facts(folder, **other)
        with pytest.raises(RunChangedError, match=r"another version of farthing began this run"):
            claim(folder, facts["identity"], facts["machine"], print)
    change_facts(folder, format=1)
    said = []
    claim(folder, facts["identity"], {"torch": "2", "precision": "fp16"}, said.append)
    assert "equal to rounding, not to the bit" in said[0]


def test_without_a_copy_a_damaged_run_file_is_refused_once_steps_were_saved(tmp_path):
    folder = folder_with(tmp_path / "run", has_checkpoint=False)
    commit_folder(
        folder / "checkpoints/step-00000004-0001",
        lambda draft: None,
        {"step": 4, "run_id": "r1"},
    )
    (folder / "run.json").write_bytes((folder / "run.json").read_bytes().replace(b"42", b"43"))
    with pytest.raises(RunDamagedError, match="differs from the file that was written"):
        claim(folder, {"train.seed": 42}, {}, print)
    (folder / "run.json").unlink()
    with pytest.raises(RunDamagedError, match="is gone"):
        claim(folder, {"train.seed": 42}, {}, print)
    said = []
    assert claim(folder, {"train.seed": 42}, {}, said.append, allow_restart=True)["run_id"] != "r1"
    assert "begins again" in said[0]
    shutil.rmtree(folder / "checkpoints")
    (folder / "run.json").write_text("{")
    assert claim(folder, {"train.seed": 43}, {}, said.append)["identity"] == {"train.seed": 43}
    keep(folder / "plan.json", VALUES["plan.json"])
    assert claim(folder, {"train.seed": 44}, {}, said.append)["identity"] == {"train.seed": 44}
    assert not (folder / "plan.json").exists()
    assert "begins again" in said[1]
    assert "uses the job as it is now (train.seed: 43 -> 44)" in said[2]


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_run_that_saved_nothing_can_be_taken_back(has_checkpoint, tmp_path):
    folder = folder_with(tmp_path / "run", has_checkpoint=has_checkpoint)
    unclaim(folder)
    assert {name: (folder / name).exists() for name in VALUES} == dict.fromkeys(
        VALUES, has_checkpoint
    )


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run whose schedule is fitted to its budget, asked to leave after step 5; and the same run,
    gone on with untouched.
    """
    folder = tmp_path_factory.mktemp("stopped")
    keys = KEYS | {
        "fit_schedule_to_budget": True,
        "lr_scheduler_type": "linear",
        "limits": {"max_hours": 10},
    }
    job = make_job(folder, **keys)
    assert train(job, LeavesAt(step=5)).exit_code == 75
    shutil.copytree(folder / "run", folder / "kept")
    assert train(job).exit_code == 0
    shutil.move(folder / "run", folder / "untouched")
    return folder, job.model_copy(update={"output_dir": str(folder / "untouched")})


def test_a_run_with_lost_files_ends_as_one_without(stopped, tmp_path):
    folder, untouched = stopped
    shutil.copytree(folder / "kept", tmp_path / "run")
    for name in (*VALUES, "job.json"):
        (tmp_path / "run" / name).unlink()
    heard = Heard()
    job = load_job(folder / "job.yaml", [f"output_dir={tmp_path / 'run'}"])
    assert train(job, heard).exit_code == 0
    assert "written again from the checkpoint of step" in heard.warnings
    assert are_equal(job, untouched)
    assert kept(tmp_path / "run/run.json")["machine"]["precision"] == "fp32"


def test_a_torn_line_of_a_log_is_none_and_a_changed_one_is_damaged(tmp_path):
    log = SummedLines(tmp_path / "log.jsonl")
    rows = [{"step": step, "loss": step / 7, "examples": [step]} for step in range(1, 4)]
    for row in rows:
        log.append(row)
    log.close()
    whole = log.path.read_bytes()
    assert list(log.rows()) == rows
    log.path.write_bytes(whole[:-9])
    assert list(log.rows()) == rows[:2]
    assert log.damaged == [], "torn by a kill"
    log.path.write_bytes(whole.replace(b'"step": 2', b'"step": 4'))
    assert (list(log.rows()), log.damaged) == ([rows[0], rows[2]], [2])


@pytest.mark.parametrize("name", ["job.json", "plan.json", "data_notes.json"])
def test_a_report_names_a_file_that_was_changed_or_is_gone_and_leaves_it_out(
    name, stopped, tmp_path, cli
):
    run = tmp_path / "run"
    shutil.copytree(stopped[1].output_dir, run)
    assert build_receipt(run).damaged_files == []
    content = bytearray((run / name).read_bytes())
    content[len(content) // 2] ^= 1
    (run / name).write_bytes(content)
    assert any(each.startswith(name) for each in build_receipt(run).damaged_files)
    assert re.search(rf"damaged 1 +{name}", cli.out("report", run))
    (run / name).unlink()
    is_known = name != "data_notes.json"
    assert [each.startswith(name) for each in build_receipt(run).damaged_files] == [True] * is_known
