"""Runs that an earlier farthing began and left unfinished go on from their folder, and from their
store, to the same end.

`fixtures/make_old_runs.py` has made them and says how; what each had ended with uninterrupted lies
beside them. The bits of the end are compared where torch and its CPU kernels are those of the
machine that made them; elsewhere the losses alone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

import workshop
from farthing.config.load import load_job
from farthing.run.folder import PLAN, kept
from farthing.settings import Settings
from thinned import thinned

ARCHIVE = Path(__file__).parent / "fixtures" / "old_runs.tar.xz"


@pytest.fixture(scope="module")
def old_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the archive was unpacked. Nobody writes into it."""
    folder = tmp_path_factory.mktemp("old_runs")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def weights_sha256(model: Path) -> str:
    """Over the names and bytes of the exported tensors."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            digest.update(name.encode() + tensor.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("came_from", thinned(["folder", "store"], 2))
@pytest.mark.parametrize("case", ["full", "lora", "shared", "short"])
def test_an_old_run_goes_on_as_it_would_have(
    case: str, came_from: str, old_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # another version may judge otherwise: what the run began with holds
    monkeypatch.setattr("farthing.train.frozen.FrozenCacheCost.why_not", lambda _: "not today")
    monkeypatch.setattr("farthing.model.forward.WORTH", 2.0)
    monkeypatch.setattr("farthing.train.settled.known_settings", lambda *_: Settings(64, 0, 8))
    expected = json.loads((old_runs / "expected.json").read_text())
    folder = tmp_path / case
    shutil.copytree(old_runs / case, folder)
    plan = kept(folder / "run" / PLAN)
    if came_from == "store":
        shutil.rmtree(folder / "run")
    job = load_job(folder / "job.yaml")
    job = job.model_copy(
        update={"output_store": str(folder / "store") if came_from == "store" else None}
    )
    heard = workshop.Heard()
    outcome = workshop.train(job, heard)
    assert outcome.state == "finished", heard.warnings
    assert "to rounding" not in heard.warnings
    assert kept(folder / "run" / PLAN) == plan
    end = expected["runs"][case]
    assert workshop.losses_of(job) == pytest.approx(end["losses"], rel=1e-6)
    machine = {"torch": torch.__version__, "kernels": torch.backends.cpu.get_cpu_capability()}
    if machine == {key: expected["machine"][key] for key in machine}:
        assert weights_sha256(folder / "run/model") == end["weights_sha256"]
