"""`farthing train JOB --from RUN[:STEP]`: a new run with the trained weights of another, which its
receipt names and adds.
"""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from farthing.errors import FarthingError, InputError, RunChangedError
from farthing.report.receipt import build_receipt
from thinned import thinned
from workshop import losses_of, make_job, rows_of, train


def second(folder: Path, source: str, family: str = "llama", **keys):
    """A job in the same folder with another run folder, that begins from `source`."""
    return make_job(folder, family, output_dir="./second", model={"from_run": source}, **keys)


@pytest.mark.parametrize("method", thinned(["full", "lora"], 2))
def test_a_run_begins_with_the_weights_of_another(method, tmp_path):
    """One batch holds all rows, so that its first loss is that of the ancestor's next step."""
    keys = {"method": method, "n_rows": 8, "save_steps": 3, "save_total_limit": 5}
    first = make_job(tmp_path, max_steps=7, **keys)
    train(first)
    job = second(tmp_path, "run:3", max_steps=2, **keys)
    outcome = train(job)
    assert outcome.receipt.ancestor["step"] == 3
    assert outcome.receipt.ancestor["run"] == str(tmp_path / "run")
    assert outcome.receipt.usd_with_ancestor == pytest.approx(
        outcome.receipt.usd + build_receipt(tmp_path / "run").usd
    )
    assert losses_of(job)[0] == pytest.approx(losses_of(first)[3], rel=1e-6)


@pytest.mark.slow
def test_it_stays_the_same_run_without_the_ancestor_and_another_step_is_another_run(tmp_path):
    keys = {"method": "lora", "max_steps": 4, "n_rows": 24, "save_steps": 2}
    train(make_job(tmp_path, **keys))
    train(second(tmp_path, "run:2", **keys))
    with pytest.raises(RunChangedError):
        train(second(tmp_path, "run:4", **keys))
    shutil.rmtree(tmp_path / "run")
    assert train(second(tmp_path, "run:2", **keys)).state == "finished"


def test_weights_that_mean_something_else_are_refused(tmp_path):
    keys = {"max_steps": 2, "n_rows": 24, "pretrained": True}
    train(make_job(tmp_path, method={"name": "lora"}, **keys))
    for method, words in (
        ({"lora_alpha": 8}, r"method.lora_alpha is 32.0 there and 8.0 here"),
        ({"use_rslora": True}, r"method.use_rslora is false there and true here"),
        ({"name": "full"}, r"method\.name"),
    ):
        with pytest.raises(FarthingError, match=words):
            train(second(tmp_path, "run", method={"name": "lora"} | method, **keys))
        assert not (tmp_path / "second/checkpoints").exists()


@pytest.mark.parametrize("change", ["base", "seed"])
def test_another_base_under_the_same_adapter_is_refused(change, tmp_path):
    keys = {"max_steps": 2, "n_rows": 24, "method": "lora"}
    keys["pretrained"] = change == "base"
    train(make_job(tmp_path, **keys))
    if change == "base":
        path = tmp_path / "base/model.safetensors"
        tensors = load_file(path)
        save_file({name: t + 0.01 for name, t in tensors.items()}, path, {"format": "pt"})
    else:
        keys["seed"] = 7
    with pytest.raises(InputError, match=r"model \(content\)|train.seed is 42 there and 7 here"):
        train(second(tmp_path, "run", **keys))


def test_other_classes_are_refused(tmp_path):
    keys = {"max_steps": 2, "pretrained": True}
    train(make_job(tmp_path, "bert", rows=rows_of("bert", 24), **keys))
    names = {"food": "a", "sport": "b", "weather": "c"}
    rows = [{**row, "label": names[row["label"]]} for row in rows_of("bert", 24)]
    job = second(tmp_path, "run", "bert", rows=rows, **keys)
    with pytest.raises(
        InputError, match=r'\["food", "sport", "weather"\] there and \["a", "b", "c"\]'
    ):
        train(job)


def test_what_is_not_there_or_damaged_is_said(tmp_path):
    keys = {"method": "lora", "max_steps": 2, "n_rows": 24}
    train(make_job(tmp_path, **keys))

    def is_refused(source, words):
        with pytest.raises(InputError, match=words):
            train(second(tmp_path, source, **keys))

    is_refused("run:9", "no checkpoint of step 9")
    is_refused("elsewhere", "no such run folder")
    is_refused(".", "has no checkpoint")
    model = next((tmp_path / "run/checkpoints").glob("step-*")) / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-4] + b"0000")
    is_refused("run", "damaged")
