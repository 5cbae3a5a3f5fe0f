"""`farthing train JOB --from RUN[:STEP]`: a new run with the trained weights of another, which its
receipt names and adds.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

import workshop
from farthing.cli import main
from farthing.errors import InputError, ModelError, RunChangedError
from farthing.report.receipt import build_receipt
from thinned import thinned
from workshop import Watched, losses_of, make_job


def second(folder: Path, source: str, **keys: Any) -> Any:
    """A job in the same folder with another run folder, that begins from `source`."""
    path = workshop.job_file(folder, "llama", **keys)
    values = yaml.safe_load(path.read_text())
    values["output_dir"] = "second"
    values["model"] = {
        **(
            values["model"]
            if isinstance(values["model"], dict)
            else {"model_name_or_path": values["model"]}
        )
    }
    values["model"]["from_run"] = source
    path.write_text(yaml.safe_dump(values))
    from farthing.config.load import load_job

    return load_job(path)


@pytest.mark.parametrize("method", thinned(["full", "lora"], 2))
def test_a_run_begins_with_the_weights_of_another(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"method": method, "max_steps": 6, "n_rows": 24, "save_steps": 3}
    first = make_job(tmp_path, "llama", **keys)
    workshop.train(first)
    watched = Watched(monkeypatch)
    job = second(tmp_path, "run:3", **keys)
    outcome = workshop.train(job)
    saved = load_file(
        next((tmp_path / "run/checkpoints").glob("step-00000003-*")) / "model.safetensors"
    )
    assert outcome.receipt.ancestor["step"] == 3
    assert outcome.receipt.ancestor["run"] == str(tmp_path / "run")
    assert outcome.receipt.usd_with_ancestor == pytest.approx(
        outcome.receipt.usd + build_receipt(tmp_path / "run").usd
    )
    assert losses_of(job)[0] != losses_of(first)[0]
    assert set(saved) <= {name for name, _ in watched.model.named_parameters()} | {
        n for n, _ in watched.model.named_buffers()
    }


def test_the_first_loss_is_that_of_the_ancestors_weights(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "method": "full",
        "n_rows": 8,
        "global_batch_size": 8,
        "save_steps": 3,
        "save_total_limit": 5,
    }
    first = make_job(tmp_path, "llama", max_steps=7, **keys)
    workshop.train(first)
    job = second(tmp_path, "run:3", max_steps=2, **keys)
    workshop.train(job)
    assert losses_of(job)[0] == pytest.approx(
        losses_of(first)[3], rel=1e-6
    )  # one batch holds all rows


def test_it_goes_on_and_stays_the_same_run_when_the_ancestor_is_gone(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "lora", "max_steps": 4, "n_rows": 24, "save_steps": 2}
    workshop.train(make_job(tmp_path, "llama", **keys))
    job = second(tmp_path, "run", **keys)
    workshop.train(job)
    shutil.rmtree(tmp_path / "run")
    assert workshop.train(job).state == "finished"


def test_another_step_is_another_run(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "lora", "max_steps": 4, "n_rows": 24, "save_steps": 2}
    workshop.train(make_job(tmp_path, "llama", **keys))
    workshop.train(second(tmp_path, "run:2", **keys))
    with pytest.raises(RunChangedError):
        workshop.train(second(tmp_path, "run:4", **keys))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("run:9", "no checkpoint of step 9"),
        ("elsewhere", "no such run folder"),
        (".", "has no checkpoint"),
    ],
)
def test_what_is_not_there_is_said(source: str, words: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"method": "lora", "max_steps": 2, "n_rows": 24}
    workshop.train(make_job(tmp_path, "llama", **keys))
    with pytest.raises(InputError, match=words):
        workshop.train(second(tmp_path, source, **keys))


def test_a_damaged_checkpoint_or_another_method_is_refused(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"max_steps": 2, "n_rows": 24}
    workshop.train(make_job(tmp_path, "llama", method="lora", **keys))
    with pytest.raises(ModelError, match="another model"):
        workshop.train(second(tmp_path, "run", method="full", **keys))
    model = next((tmp_path / "run/checkpoints").glob("step-*")) / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-4] + b"0000")
    shutil.rmtree(tmp_path / "second")
    with pytest.raises(InputError, match="damaged"):
        workshop.train(second(tmp_path, "run", method="lora", **keys))


def test_the_verb_takes_a_run_and_its_receipt_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workshop.job_file(tmp_path, "llama", method="lora", max_steps=2, n_rows=24)
    assert main(["train", str(path)]) == 0
    words = [
        "train",
        str(path),
        "--set",
        f"output_dir={tmp_path / 'third'}",
        "--from",
        str(tmp_path / "run"),
    ]
    assert main(words) == 0
    assert "begun from step 2 of" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ancestor"]["step"] == 2
