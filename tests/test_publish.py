"""Models go to the Hub by its own client, to a server on this machine: private, with a card, noted,
and taken up again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import workshop
from farthing.cli import main
from farthing.errors import InputError
from farthing.export.publish import PublishError
from farthing.report.receipt import build_receipt
from hub_server import Hub, hub_server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub of this machine, and the token that it knows."""
    from huggingface_hub import constants

    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", server.token)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adapter."""
    job = workshop.make_job(
        tmp_path_factory.mktemp("pushed"), pretrained=True, method="lora", max_steps=2
    )
    workshop.train(job)
    return Path(job.output_dir)


def push(run: Path, output: Path, *more: str) -> int:
    """`farthing export --push`."""
    words = ["--output", str(output), "--format", "adapter", "--push", "hub:team/small"]
    return main(["export", str(run), *words, *more])


def test_an_export_is_published_in_private_with_its_card(hub, trained, tmp_path, cli, capsys):
    assert push(trained, tmp_path / "out", "--json") == 0
    said = json.loads(capsys.readouterr().out)["published"]
    repository = hub.repositories["team/small"]
    assert repository.is_private
    assert said["commit"] == repository.commits[-1] != "0" * 40
    assert (
        repository.files["adapter_model.safetensors"]
        == (tmp_path / "out/adapter_model.safetensors").read_bytes()
    )
    assert b"## Receipt" in repository.files["README.md"]
    assert not any(str(tmp_path).encode() in content for content in repository.files.values())
    assert [one["commit"] for one in build_receipt(trained).published][-1] == said["commit"]
    assert (
        json.loads((trained / "receipt.json").read_text())["published"][-1]["commit"]
        == said["commit"]
    )
    assert f"commit {said['commit']}" in " ".join(cli.out("report", trained).split())


@pytest.mark.parametrize("part", ["repos/create", "objects/batch", "commit"])
def test_a_push_that_fails_is_taken_up_by_the_same_command(part, hub, trained, tmp_path, capsys):
    hub.fails_at = part
    assert push(trained, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "run the same command again" in said
    assert hub.token not in said
    written = (tmp_path / "out/adapter_model.safetensors").stat().st_mtime_ns
    assert build_receipt(trained).published[-1]["commit"] == ""
    hub.fails_at = ""
    n_asked = len(hub.asked)
    assert push(trained, tmp_path / "out") == 0
    assert (tmp_path / "out/adapter_model.safetensors").stat().st_mtime_ns == written, (
        "it is not written again"
    )
    assert hub.repositories["team/small"].files["adapter_model.safetensors"]
    sent_before = part == "commit"
    assert any(path.startswith("PUT /blobs/") for path in hub.asked[n_asked:]) != sent_before


def test_what_would_be_wrong_is_refused_before_a_byte_is_sent(
    hub, trained, tmp_path, monkeypatch, capsys
):
    assert push(trained, tmp_path / "first", "--public") == 0
    assert not hub.repositories["team/small"].is_private
    n_files = len(hub.repositories["team/small"].files)
    assert push(trained, tmp_path / "second") == 2
    assert "this repository is public" in capsys.readouterr().err
    assert len(hub.repositories["team/small"].files) == n_files
    (tmp_path / "first/adapter_model.safetensors").write_bytes(b"another")
    assert push(trained, tmp_path / "first", "--public") == 2, "not what was written"
    assert main(["export", str(trained), "--output", str(tmp_path / "x"), "--push", "a/b/c"]) == 2
    assert main(["export", str(trained), "--output", str(tmp_path / "x"), "--public"]) == 2
    hub.token = "hf_other"
    assert push(trained, tmp_path / "third") == 1
    assert "hf_secret" not in capsys.readouterr().err
    monkeypatch.delenv("HF_TOKEN")
    assert push(trained, tmp_path / "fourth") == 2
    assert "set HF_TOKEN" in capsys.readouterr().err
    assert not (tmp_path / "fourth").exists()


def test_a_finished_run_publishes_its_model_once(hub, tmp_path, monkeypatch):
    keys = {"pretrained": True, "method": "lora", "max_steps": 2}
    job = workshop.make_job(tmp_path, **keys, push_to_hub=True, hub_model_id="team/of-a-run")
    hub.fails_at = "preupload"
    with pytest.raises(PublishError, match="same command again"):
        workshop.train(job)
    assert build_receipt(Path(job.output_dir)).state == "finished"
    wall_s = build_receipt(Path(job.output_dir)).wall_s
    hub.fails_at = ""
    assert main(["train", str(tmp_path / "job.yaml")]) == 0
    published = build_receipt(Path(job.output_dir)).published
    assert [one["commit"] for one in published] == [hub.repositories["team/of-a-run"].commits[-1]]
    assert b"## Receipt" in hub.repositories["team/of-a-run"].files["README.md"]
    assert build_receipt(Path(job.output_dir)).wall_s == wall_s, "nothing was trained"
    n_asked = len(hub.asked)
    assert main(["train", str(tmp_path / "job.yaml")]) == 0
    assert len(hub.asked) == n_asked, "the Hub has it"
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(InputError, match="no token"):
        workshop.train(workshop.make_job(tmp_path / "other", **keys, push_to_hub=True))
