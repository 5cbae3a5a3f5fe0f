"""Models go to the Hub by its own client, to a server on this machine: private, with a card, noted,
and taken up again.
"""

from pathlib import Path

import pytest

import workshop
from farthing.errors import InputError
from farthing.export.publish import PublishError
from farthing.report.receipt import build_receipt
from hub_server import Repository, hub_server
from workshop import make_job, read_json, train


@pytest.fixture
def hub(monkeypatch):
    """A Hub of this machine, and the token that it knows."""
    from huggingface_hub import constants

    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", server.token)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with an adapter."""
    return workshop.trained(
        tmp_path_factory.mktemp("pushed"), pretrained=True, method="lora", max_steps=2
    )


def push(run: Path, output: Path) -> list[object]:
    """The words of `farthing export --push`."""
    return ["export", run, "--output", output, "--format", "adapter", "--push", "hub:team/small"]


def test_an_export_is_published_in_private_with_its_card(hub, trained, tmp_path, cli):
    hub.repositories["team/small"] = Repository(True, dict.fromkeys(("config.json", "a.txt"), b""))
    said = cli.json(*push(trained, tmp_path / "out"))["published"]
    repository = hub.repositories["team/small"]
    assert repository.is_private
    assert "a.txt" in repository.files
    assert "config.json" not in repository.files, "of another model"
    assert "is private" in cli.err(*push(trained, tmp_path / "out"), "--public")
    assert said["commit"] == repository.commits[-1] != "0" * 40
    assert (
        repository.files["adapter_model.safetensors"]
        == (tmp_path / "out/adapter_model.safetensors").read_bytes()
    )
    assert b"## Receipt" in repository.files["README.md"]
    assert not any(str(tmp_path).encode() in content for content in repository.files.values())
    assert [one["commit"] for one in build_receipt(trained).published][-1] == said["commit"]
    assert read_json(trained / "receipt.json")["published"][-1]["commit"] == said["commit"]
    assert f"commit {said['commit']}" in " ".join(cli.out("report", trained).split())


@pytest.mark.parametrize("part", ["repos/create", "objects/batch", "commit"])
def test_a_push_that_fails_is_taken_up_by_the_same_command(part, hub, trained, tmp_path, cli):
    hub.fails_at = part
    said = cli.err(*push(trained, tmp_path / "out"), code=1)
    assert "run the same command again" in said
    assert hub.token not in said
    written = (tmp_path / "out/adapter_model.safetensors").stat().st_mtime_ns
    assert build_receipt(trained).published[-1]["commit"] == ""
    hub.fails_at = ""
    n_asked = len(hub.asked)
    cli(*push(trained, tmp_path / "out"))
    assert (tmp_path / "out/adapter_model.safetensors").stat().st_mtime_ns == written, (
        "it is not written again"
    )
    assert hub.repositories["team/small"].files["adapter_model.safetensors"]
    sent_before = part == "commit"
    assert any(path.startswith("PUT /blobs/") for path in hub.asked[n_asked:]) != sent_before


def test_what_would_be_wrong_is_refused_before_a_byte_is_sent(
    hub, trained, tmp_path, monkeypatch, cli
):
    cli(*push(trained, tmp_path / "first"), "--public")
    assert not hub.repositories["team/small"].is_private
    n_files = len(hub.repositories["team/small"].files)
    assert "this repository is public" in cli.err(*push(trained, tmp_path / "second"))
    assert len(hub.repositories["team/small"].files) == n_files
    manifest = trained / "model/manifest.json"
    text = manifest.read_text()
    manifest.write_text(text + " ")
    cli(*push(trained, tmp_path / "first"), "--public", code=2)  # of another model
    manifest.write_text(text)
    (tmp_path / "first/adapter_model.safetensors").write_bytes(b"another")
    cli(*push(trained, tmp_path / "first"), "--public", code=2)  # not what was written
    cli("export", trained, "--output", tmp_path / "x", "--push", "a/b/c", code=2)
    cli("export", trained, "--output", tmp_path / "x", "--public", code=2)
    hub.token = "hf_other"
    assert "hf_secret" not in cli.err(*push(trained, tmp_path / "third"), code=1)
    monkeypatch.delenv("HF_TOKEN")
    assert "set HF_TOKEN" in cli.err(*push(trained, tmp_path / "fourth"))
    assert not (tmp_path / "fourth").exists()


def test_a_finished_run_publishes_its_model_once(hub, tmp_path, monkeypatch, cli):
    keys = {"pretrained": True, "method": "lora", "max_steps": 2}
    job = make_job(tmp_path, **keys, push_to_hub=True, hub_model_id="team/of-a-run")
    hub.fails_at = "preupload"
    with pytest.raises(PublishError, match="same command again"):
        train(job)
    assert build_receipt(Path(job.output_dir)).state == "finished"
    hub.fails_at = ""
    cli("train", tmp_path / "job.yaml")
    published = build_receipt(Path(job.output_dir)).published
    assert [one["commit"] for one in published] == [hub.repositories["team/of-a-run"].commits[-1]]
    assert b"## Receipt" in hub.repositories["team/of-a-run"].files["README.md"]
    assert "manifest.json" not in hub.repositories["team/of-a-run"].files
    n_asked = len(hub.asked)
    cli("train", tmp_path / "job.yaml")
    assert len(hub.asked) == n_asked, "the Hub has it"
    train(make_job(tmp_path, **keys, push_to_hub=True, hub_model_id="team/other"))
    assert len(hub.repositories) == 2
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(InputError, match="no token"):
        train(make_job(tmp_path / "other", **keys, push_to_hub=True))
