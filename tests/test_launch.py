"""`farthing launch`: what is refused, what is written, that no secret is in it, and launches that
go wrong in every way.
"""

import json
import re
import signal
import stat
import subprocess
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from canaries import CANARIES
from command import sets
from farthing.cli import main
from farthing.config.job import Job
from farthing.config.load import load_job
from farthing.errors import InputError, RunBusyError, StoreUnavailableError
from farthing.launch import agent as agent_module
from farthing.launch.agent import HostAgent
from farthing.launch.driver import OutOfStockError, RefusedError, UnauthorizedError, UnclearError
from farthing.launch.inputs import fetch_inputs, pack, send_inputs, with_token_sets
from farthing.launch.machines import MachineLedger
from farthing.launch.prepare import Prepared, Wishes, launch_id_of, plain_image, prepare
from farthing.launch.session import Session
from farthing.launch.wheel import refuse_without_extras
from farthing.launch.words import StoreWords, Word
from farthing.report.plan_compare import find_in_study
from farthing.storage.files import only_writer, seal
from farthing.storage.objects import StoreError, open_store
from launch_faults import Killed, is_good, run_case
from launch_matrix import AT, cases, outcome_of
from launched import Answers, Course, api_of, job_at
from launched import keys as keys
from thinned import thinned

NOW = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


@pytest.fixture
def demo(tiny_folders, tmp_path):
    where = {"usd_per_hour": 1.0}
    return job_at(tmp_path, tiny_folders, output_store="s3://bucket/run", where=where)


def launch(job: Path, *words: str) -> int:
    """`farthing launch`, as the command line runs it."""
    return main(["launch", str(job), *words])


# ---- dry ----


def test_a_flavor_without_a_price_has_no_dollars(demo, capsys):
    no_cap = "limits.max_usd=null", "limits.max_hours=3"
    assert (
        launch(demo, "--on", "hf", *sets(*no_cap, "where.spot=true", "where.usd_per_hour=0")) == 0
    )
    said = capsys.readouterr().out
    assert "on demand at Hugging Face Jobs: no price" in said
    assert "dollars not known" in said
    assert "$0.00" not in said


def test_dry_run_writes_files_shows_the_bill_and_rents_nothing(demo, capsys):
    assert launch(demo, "--on", "runpod", "--json") == 0
    view = json.loads(capsys.readouterr().out)
    folder = Path(view["folder"])
    assert sorted(path.name for path in folder.iterdir()) == view["files"] == ["pod.json", "run.sh"]
    assert not (demo.parent / "run/machines.jsonl").exists(), "nothing was asked for"
    assert view["most_usd"] < view["max_usd"] == 2
    assert view["name"] in (folder / "pod.json").read_text()


def test_a_model_folder_without_weights_is_refused_before_anything_is_rented(demo, capsys):
    assert launch(demo, "--on", "runpod", "--set", "model.init=pretrained") == 2
    assert "no weights (*.safetensors) in the folder" in capsys.readouterr().err


def _job(path: Path, *overrides: str) -> Job:
    return load_job(path, list(overrides))


def prepared_of(demo: Path, *overrides: str, **wishes) -> Prepared:
    """The launch of a job with these overrides."""
    return prepare(_job(demo, *overrides), Wishes(**wishes, find=find_in_study), NOW)


def session_of(prepared: Prepared) -> Session:
    return Session(prepared, lambda text: None, clock=NOW.timestamp)


@pytest.mark.parametrize(
    ("on", "overrides", "words"),
    [
        ("runpod", "output_store=", "no store"),
        ("kubernetes", "output_store=", "NAMESPACE/CLAIM"),
        ("runpod", "output_store=/mnt/share", "does not see this folder"),
        ("skypilot", "output_store=file:///mnt/share", "does not see this folder"),
        ("vast", "limits.max_usd=", "no limit on its cost"),
        ("vast", "output_store=gs://bucket/run", "does not travel to Vast.ai"),
        ("vast", "output_store=az://box/run", "export one of AZURE_STORAGE_ACCOUNT_KEY"),
        ("runpod", "data=https://user:pw@host/data.jsonl", "does not travel"),
        ("mars", "", "no target is called"),
        ("lambda", "", "needs to know where"),
        ("ssh:-oProxyCommand=x", "", "is no host"),
        ("hf", "where.gpu=K80 where.usd_per_hour=1", "has no K80"),
        ("hf", "where.gpu=L4 where={}", "a cap in dollars does not hold without a price"),
        ("runpod", "train.push_to_hub=true", "HF_TOKEN is not set here"),
        ("runpod", "model.from_run=./other", "the weights of another run do not travel"),
        ("kubernetes:lab/claim", "output_store=", "no way there"),
        ("runpod", "data=file:///data/rows.jsonl", "name the file by its path"),
        ("runpod", "data=zip://rows.jsonl::/data/all.zip", "name the file by its path"),
        (
            "runpod",
            "model.attn_implementation=flash_attention_2",
            "use sdpa or eager or flex_attention, or name an image",
        ),
    ],
)
def test_what_can_not_run_there_is_refused(demo, on, overrides, words, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(InputError, match=re.escape(words)):
        prepared_of(demo, *overrides.split(), on=on)


@pytest.mark.parametrize(
    ("on", "overrides", "offers"),
    [
        ("ssh:a,b", "where.device=cpu limits.max_usd=", "ssh a  0 False, ssh b  0 False"),
        ("local", "output_store= where.gpu=T4 where.spot=true", "machine local T4 1 True"),
        ("local", "output_store= data=file:///data/rows.jsonl", "machine local  1 False"),
        ("local", "output_store= model.from_run=./other", "machine local  1 False"),
        ("local", "model.attn_implementation=flash_attention_2", "machine local  1 False"),
        ("hf", "where.spot=true", "Jobs  L4 1 False"),
        ("hf", "output_store=gs://bucket/run", "Jobs  L4 1 False"),
        ("slurm:low", "output_store=", "Slurm   1 False"),
        ("ssh:a", "where={} limits.max_usd= train.push_to_hub=true", "ssh a  1 False"),
        ("kubernetes:lab/c", "output_store= model=a/m data=a/b", "Kubernetes   1 False"),
    ],
)
def test_what_can_run_there_is_offered(demo, on, overrides, offers, monkeypatch):
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "{}")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    prepared = prepared_of(demo, *overrides.split(), on=on)
    words = [
        f"{each.provider.split()[-1]} {each.instance} {each.gpu} {each.n_gpus} {each.is_spot}"
        for each in prepared.offers
    ]
    travels = on[:3] in ("ssh", "hf")
    assert (", ".join(words), len(prepared.packed.files)) == (offers, 4 if travels else 0)
    assert prepared.travels is travels


def test_machines_are_looked_for_without_an_offer_and_without_data(demo):
    job = _job(demo, "data=./gone", "limits.max_usd=0.000001")
    assert prepare(job, Wishes(on="runpod"), NOW, asks=False).offers == ()


@pytest.mark.parametrize(("gpu", "cuda"), [("V100-16GB", "12.6"), ("B200", "13.0"), ("", "12.6")])
def test_the_image_has_a_torch_for_the_gpu(gpu, cuda):
    assert plain_image(gpu) == f"pytorch/pytorch:2.13.0-cuda{cuda}-cudnn9-runtime"


@pytest.mark.parametrize(
    "place", ["http://:pw@localhost:5000", "sqlite:////home/me/m.db", "/mlruns"]
)
def test_a_tracker_on_this_machine_is_refused(demo, place, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    with pytest.raises(InputError, match=r"(?s)a tracker on this machine((?!pw).)*$"):
        prepared_of(demo, "train.report_to=mlflow", on="runpod")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    assert prepared_of(demo, "train.report_to=mlflow", on="runpod").offers


def test_a_published_model_keeps_its_name_and_keys_of_data_in_buckets_travel(demo, monkeypatch):
    for name in ("HF_TOKEN", "AZURE_CLIENT_SECRET", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    prepared = prepared_of(demo, "train.push_to_hub=true", on="runpod")
    data = prepared.job.data.model_copy(update={"train": ("az://container/rows.jsonl",)})
    job = prepared.job.model_copy(update={"data": data})
    ask = session_of(replace(prepared, job=job)).next_ask()
    assert yaml.safe_load(ask.job_text)["train"]["hub_model_id"] == "run"
    assert {"AZURE_STORAGE_ACCOUNT_NAME", "AZURE_CLIENT_SECRET"} <= set(ask.secrets)
    assert "HF_HUB_OFFLINE" not in ask.settings


def test_an_extra_that_the_installed_farthing_does_not_know_is_found_before_the_rent():
    refuse_without_extras(["datasets", "sentencepiece", "gpu"])
    with pytest.raises(InputError, match="knows no extra warp"):
        refuse_without_extras(["gpu", "warp"])


def test_no_gpu_is_rented_that_the_job_would_not_use(demo):
    with pytest.raises(InputError, match="2 GPUs, of which the job would use 1"):
        prepared_of(demo, "where.gpu=RTX 4090", offer="2x RTX 4090")
    two = prepared_of(demo, "where.gpu=RTX 4090", "where.gpus=all", offer="2x RTX 4090")
    assert two.offers[0].n_gpus == 2


def test_what_a_job_says_of_several_gpus_goes_along_and_what_it_says_of_this_machine_does_not(demo):
    said = "gpus=2", "strategy=fsdp", "patience_s=30", "device=cpu", "power_watts=300"
    prepared = prepared_of(demo, *(f"where.{each}" for each in said), offer="2x RTX 4090")
    where = yaml.safe_load(session_of(prepared).next_ask().job_text)["where"]
    assert where.pop("usd_per_hour") == prepared.offers[0].usd_per_hour
    spot = prepared.offers[0].is_spot
    assert where == {"gpus": "all", "strategy": "fsdp", "patience_s": 30, "spot": spot}


def test_an_offer_is_taken_by_its_rank_and_by_its_name(demo):
    named = prepared_of(demo, "where.gpu=L40S", offer="RunPod/L40S")
    assert {(offer.provider, offer.gpu) for offer in named.offers} == {("RunPod", "L40S")}
    with pytest.raises(InputError, match=r"`RunPod/L40S` is 1x L40S at RunPod, which Vast.ai"):
        prepared_of(demo, "where.gpu=L40S", on="vast", offer="RunPod/L40S")
    with pytest.raises(InputError, match="at OpenRelay, which farthing can't rent"):
        prepared_of(demo, "where.gpu=RTX 4090", offer="OpenRelay/RTX 4090")


@pytest.mark.parametrize(
    ("on", "words"),
    [("lambda:us-east-1/key", "--attended"), ("vast", "AWS_SECRET_ACCESS_KEY is not set")],
)
def test_without_an_end_of_its_own_or_a_secret_nothing_is_sent(on, words, demo, monkeypatch):
    """Where nothing ends a machine, somebody has to stay."""
    for key in ("LAMBDA_API_KEY", "VAST_API_KEY"):
        monkeypatch.setenv(key, "no key")
    if on == "vast":
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(InputError, match=words):
        session_of(prepared_of(demo, on=on)).run(is_attended=False, tokenize=list)


# ---- files ----


RENTED = {"runpod", "vast", "lambda", "vertex", "skypilot", "hf"}
EVERY_TARGET = RENTED | {"local", "ssh", "slurm", "kubernetes"}


def test_every_target_renders_and_its_own_rules_pass():
    found = [outcome_of(target, offer) for target, offer in cases(every=60)]
    rendered = {row["target"]: row["files"] for row in found if row["state"] == "ok"}
    assert rendered.keys() == EVERY_TARGET
    assert [row for row in found if row["state"] == "wrong"] == []
    assert all(row["why"] for row in found if row["state"] == "refused")
    for text in (text for files in rendered.values() for text in files.values()):
        if text.startswith("#!/bin/sh"):
            subprocess.run(["sh", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("on", "why"),
    [
        ("lambda:us-east-1", "`ssh_key_names.0` is missing"),
        ("kubernetes", "a ConfigMap holds 1 MiB at most"),
    ],
)
def test_what_a_user_has_said_wrongly_is_refused_before_a_file_is_written(on, why, demo):
    session = session_of(prepared_of(demo, on=on))
    with pytest.raises(InputError, match=re.escape(why)):
        session.write(replace(session.next_ask(), job_text="b" * (1 << 20)))


def test_the_job_that_travels_is_a_job_and_names_what_is_there(demo):
    (demo.parent / "more.jsonl").write_text((demo.parent / "data.jsonl").read_text())
    rows = [{"path": "./data.jsonl", "weight": 2}, {"path": "./more.jsonl", "weight": 1}]
    values = yaml.safe_load(demo.read_text()) | {"data": {"train": rows}}
    demo.write_text(yaml.safe_dump(values))
    ask = session_of(prepared_of(demo, on="runpod")).next_ask()
    travelling = demo.parent / "there/job.yaml"
    travelling.parent.mkdir()
    travelling.write_text(ask.job_text)
    job, there = _job(travelling), travelling.parent
    assert job.data.of_train == _job(demo).data.of_train
    assert job.data.train == (
        str(there / "inputs/train-0/data.jsonl"),
        str(there / "inputs/train-1/more.jsonl"),
    )
    assert job.model.model_name_or_path == str(there / "inputs/model")
    assert job.where.usd_per_hour == ask.usd_per_hour > 0
    assert job.output_store == "s3://bucket/run"
    assert Path(job.output_dir) == there / "run"


@pytest.mark.parametrize("on", thinned(["runpod", "vast", "skypilot", *AT.values()], 2))
def test_no_secret_is_in_any_file_or_word(demo, on, secrets, monkeypatch, capfd):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://user:canary-url@store.example")
    price = ("--set", "where.usd_per_hour=1")
    launch(demo, "--on", on, *price)
    launch(demo, "--on", on, *price, "--json")
    text = "".join(capfd.readouterr())
    assert "farthing-" in text
    text += "".join(_all_files(demo.parent / "run"))
    assert "canary-" not in text
    assert "HF_TOKEN" in text, "by name it goes along"


def _all_files(folder: Path) -> list[str]:
    return [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]


def test_values_of_secrets_are_in_the_request_and_nowhere_else(tmp_path, secrets):
    course = Course(tmp_path, "vast", 2.0, n_steps=24)
    assert course.goes() == 0
    world, said = course.world, course.said
    creation = next(
        body for method, path, body in world.requests if path.startswith("/api/v0/asks/")
    )
    assert CANARIES["AWS_SECRET_ACCESS_KEY"] in creation
    assert not any("canary-" in path for _, path, _ in world.requests), "keys are in no address"
    assert "canary-" not in "".join(_all_files(tmp_path)) + "".join(said)


# ---- launches that go wrong ----


@pytest.mark.parametrize("seed", thinned([*range(24), 120134], 24))
def test_faulty_launches_leave_nothing_behind_and_keep_the_cap(seed):
    case = run_case(seed)
    assert is_good(case), case


@pytest.mark.parametrize(
    ("provider", "fault"), [("runpod", ""), ("vast", "costs a little more than listed")]
)
def test_the_cap_holds_when_nobody_of_ours_lives(provider, fault, tmp_path):
    course = Course(tmp_path, provider, 0.9, n_steps=10**9, script=[fault])
    course.dies(40)
    world = course.world
    world.machines[0].most_train_usd = 1e9  # not even training knows its cap
    world.sleep(100 * 3600)
    assert (world.n_alive, world.machines[0].why_gone) == (0, "its own end")
    assert world.usd <= 0.9


# ---- HTTP ----


def test_answers_of_a_provider_are_told_apart():
    answers = Answers(
        (302, "https://x/elsewhere"),
        (401, {"detail": "who are you"}),
        (404, ""),
        *[(200, "<html>")] * 3,
        (400, {"msg": "no_such_ask"}),
    )
    api = api_of(answers)
    with pytest.raises(RefusedError, match="status 302"):
        api.ask("GET", "/list")
    with pytest.raises(UnauthorizedError, match="who are you"):
        api.ask("GET", "/list")
    assert api.ask("DELETE", "/one") is None, "gone already"
    with pytest.raises(UnclearError, match="not JSON"):
        api.ask("GET", "/list")
    with pytest.raises(OutOfStockError):
        api.ask("PUT", "/asks/1/", {}, n_tries=1)
    assert "/elsewhere" not in str(answers.asked), "a key is not carried elsewhere"


# ---- inputs ----


def test_inputs_travel_by_content_and_only_once(demo, tmp_path):
    tokens = tmp_path / "tokens-of-it"
    tokens.mkdir()
    (tokens / "ids.bin").write_bytes(b"123")
    (tokens / ".part").write_bytes(b"1234")
    packed = with_token_sets(pack(_job(demo)), [tokens])
    store = open_store(str(tmp_path / "store"))
    first = send_inputs(store, packed, "launch/x/inputs.json")
    assert first == packed.n_bytes
    assert send_inputs(store, packed, "launch/x/inputs.json") == 0
    there = tmp_path / "there"
    there.mkdir()
    fetch_inputs(store, "launch/x/inputs.json", there)
    assert (there / "inputs/train-0/data.jsonl").read_bytes() == (
        demo.parent / "data.jsonl"
    ).read_bytes()
    assert (there / "cache/tokens/tokens-of-it/ids.bin").read_bytes() == b"123"
    assert (there / "inputs/model/config.json").exists()
    assert not list(there.rglob(".part")), "what is hidden stays"
    assert stat.S_IMODE((there / "inputs/model").stat().st_mode) == 0o700
    objects = store.list("inputs/")
    short = next(name for name, entry in objects.items() if entry.n_bytes == 3)
    (tmp_path / "store" / short).write_bytes(b"12")
    assert send_inputs(store, packed, "launch/x/inputs.json") == 3, "what is cut off is sent again"
    store.remove(list(objects))
    fetch_inputs(store, "launch/x/inputs.json", there)  # nothing is fetched twice


def test_inputs_say_that_the_store_does_not_answer(demo, tmp_path, monkeypatch):
    def away(*_):
        raise StoreError("away")

    store = open_store(str(tmp_path / "store"))
    for name in ("list", "get"):
        monkeypatch.setattr(store, name, away)
    with pytest.raises(StoreUnavailableError, match="does not take the inputs"):
        send_inputs(store, pack(_job(demo)), "x.json")
    with pytest.raises(StoreUnavailableError, match="does not give the inputs"):
        fetch_inputs(store, "x.json", tmp_path)


def test_damaged_and_malicious_inputs_are_refused(demo, tmp_path):
    store, there = open_store(str(tmp_path / "store")), tmp_path / "there"
    there.mkdir()
    send_inputs(store, pack(_job(demo)), "launch/x/inputs.json")
    for path in (tmp_path / "store/inputs").iterdir():
        path.write_bytes(path.read_bytes().replace(b"a", b"c"))
    with pytest.raises(InputError, match="differs from the file that was written"):
        fetch_inputs(store, "launch/x/inputs.json", there)
    assert send_inputs(store, pack(_job(demo)), "launch/x/inputs.json"), "it is sent again"
    for path in ("../evil", "/etc/evil", "run/ledger.jsonl", "inputs/../../evil"):
        entry = {"path": path, "object": "inputs/x", "size": 1, "sha256": "0" * 64}
        store.remove(["launch/y/inputs.json"])
        store.create("launch/y/inputs.json", seal({"files": [entry]}).encode())
        with pytest.raises(InputError, match="outside the inputs"):
            fetch_inputs(store, "launch/y/inputs.json", there)
    with pytest.raises(InputError, match="not whole"):
        fetch_inputs(store, "launch/none/inputs.json", there)


# ---- on the machine ----

FACTS = {
    "name": "farthing-1-1",
    "inputs": None,
    "does": ["train", "--retry"],
    "most_s": 1000,
    "boot_limit_s": 600.0,
    "usd_per_hour": 3.6,
    "max_usd": 3.9,
    "n_gpus": 0,
}


class Child:
    """Stands for `farthing train`: runs until it is told to leave, or for a while."""

    def __init__(self, words, code, stdout):
        self.words, self.code, self.signals = words, code, []
        stdout.write(b"step 1\n")
        stdout.flush()

    def wait(self, timeout=None):
        """Its exit code; until it was told to leave none, where it goes on."""
        if self.code in (75, -15, 143) and not self.signals:
            raise subprocess.TimeoutExpired("train", timeout or 0.0)
        return self.code

    def send_signal(self, number):
        """Hear one."""
        self.signals.append(number)


def words_in(folder: Path, *launch: str) -> StoreWords:
    """What machines say in the store of this folder."""
    return StoreWords(open_store(str(folder / "store")), *launch)


def word_in(folder: Path) -> Word:
    """What the machine has said."""
    return words_in(folder).of("farthing-1-1")


def _on_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0, **facts):
    monkeypatch.chdir(tmp_path)
    children = []

    def begin(words, stdout, environ, **more):
        assert environ == {"FARTHING_MACHINE": "farthing-1-1"}
        children.append(Child(words, code, stdout))
        return children[-1]

    monkeypatch.setattr("farthing.launch.agent.begin", begin)
    facts = {**FACTS, "store": str(tmp_path / "store"), **facts}
    return HostAgent(Path("job.yaml"), facts, lambda: 10_000.0), children


def test_training_gets_what_the_cap_leaves_after_boot_and_the_machines_before(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("FARTHING_CREATED_AT", "9900")
    (tmp_path / "log.agent.txt").write_text("x" * 70_000)  # of an earlier stay
    stay, children = _on_machine(tmp_path, monkeypatch)
    assert stay.run() == 0
    assert capfd.readouterr().out == "step 1\n"
    assert children[0].words == [
        "train",
        "job.yaml",
        "--retry",
        "--set=limits.max_usd=3.8",
        "--set=when_done=null",
    ]  # 3.9 - 100 s
    words = words_in(tmp_path)
    assert words.of("farthing-1-1").code == 0
    assert words.of("farthing-1-1").has_booted
    assert words.log("farthing-1-1") == "x" * (65_536 - 7) + "step 1\n\n[1]\n"


@pytest.mark.parametrize(
    ("asked_at", "max_usd", "left"),
    [
        ("9900", 3.9, 3.8),
        ("10000", 3.9, 3.9),
        ("9400", 3.9, 3.3),
        ("10001", 3.9, 3.3),  # a clock that is off counts as the whole boot limit
        ("0", 3.9, 3.3),
        ("", 3.9, 3.9),
        ("9900", 0.05, 0.0),
        ("9900", 3.90000049, 3.8),
        ("9900", None, None),
    ],
)
def test_the_boot_is_paid_from_the_cap(asked_at, max_usd, left, tmp_path, monkeypatch):
    monkeypatch.setenv("FARTHING_CREATED_AT", asked_at)
    assert _on_machine(tmp_path, monkeypatch, max_usd=max_usd)[0].max_usd == left


def test_fetching_the_inputs_is_paid_from_the_cap(tmp_path, monkeypatch):
    now = [10_000.0]
    monkeypatch.setattr("farthing.launch.agent.fetch_inputs", lambda *_: now.append(10_100.0))
    stay, children = _on_machine(tmp_path, monkeypatch, inputs="x")
    stay.clock = lambda: now[-1]
    assert stay.run() == 0
    assert "--set=limits.max_usd=3.8" in children[0].words


def test_a_machine_without_its_gpus_trains_nothing_and_another_one_may_do(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stay, children = _on_machine(tmp_path, monkeypatch, n_gpus=2)
    assert (stay.run(), children) == (75, [])
    assert word_in(tmp_path).why == "torch can use 0 of the 2 GPUs that were rented"


@pytest.mark.parametrize(
    ("most_s", "code", "why"),
    [
        (279, 3, "booting left 59 s to train: too little"),
        (100, 3, "booting left 0 s to train: too little"),
        (280, 137, "`farthing train` ended with 137"),  # by its signal
    ],
)
def test_what_a_boot_has_left_no_time_for_does_not_begin(most_s, code, why, tmp_path, monkeypatch):
    monkeypatch.setenv("FARTHING_CREATED_AT", "9900")
    stay, children = _on_machine(tmp_path, monkeypatch, code=-9, most_s=most_s)
    assert (stay.run(), len(children)) == (code, int(code == 137))
    word = word_in(tmp_path)
    assert (word.code, word.why) == (code, why)


@pytest.mark.parametrize(
    ("at", "signals", "why"),
    [
        ("fetch_inputs", [], "asked to leave before it began"),
        ("begin", [[15]], "`farthing search`"),
    ],
)
def test_a_signal_is_heard_whenever_it_comes(at, signals, why, tmp_path, monkeypatch):
    def told(*words, **more):
        signal.raise_signal(signal.SIGTERM)
        return begin(*words, **more) if at == "begin" else None

    monkeypatch.setattr("farthing.launch.agent.fetch_inputs", print)
    stay, children = _on_machine(tmp_path, monkeypatch, code=75, inputs="x", does=["search"])
    words_in(tmp_path).tell_price("farthing-1-1", 0.7)
    begin = agent_module.begin
    monkeypatch.setattr(f"farthing.launch.agent.{at}", told)
    assert (stay.run(), [child.signals for child in children]) == (75, signals)
    assert word_in(tmp_path).why.startswith(why)
    settings = ["--set=limits.max_usd=3.9", "--set=where.usd_per_hour=0.7", "--set=when_done=null"]
    assert [child.words for child in children] == [["search", "job.yaml", *settings]] * len(signals)


@pytest.mark.parametrize("code", [75, -15, 143])
def test_training_is_told_to_leave_before_the_machine_ends(code, tmp_path, monkeypatch):
    monkeypatch.setattr("farthing.launch.agent.LEAST_USE_S", 0.0)
    stay, children = _on_machine(tmp_path, monkeypatch, code=code, most_s=120)
    assert stay.run() == 3, "another machine would find no money left"
    assert children[0].signals == [15]
    assert word_in(tmp_path).code == 3


def test_training_waits_for_the_machine_before_that_still_saves_in_the_same_folder(
    tmp_path, monkeypatch
):
    (tmp_path / "store").mkdir()
    stay, children = _on_machine(tmp_path, monkeypatch)
    with only_writer(tmp_path / "store"):
        thread = threading.Thread(target=stay.run)
        monkeypatch.setattr(
            "farthing.launch.agent.signal.signal", lambda number, handler: None
        )  # not in a thread
        thread.start()
        thread.join(1.0)
        assert children == []
    thread.join(120.0)
    assert len(children) == 1


def test_inputs_that_do_not_come_are_said_to_whoever_watches(tmp_path, monkeypatch, capfd):
    stay, children = _on_machine(tmp_path, monkeypatch, inputs="launch/none/inputs.json")
    assert (stay.run(), children) == (2, [])
    assert "not whole" in capfd.readouterr().err
    assert "not whole" in word_in(tmp_path).why


# ---- docs ----

DOCS = Path(__file__).resolve().parents[1] / "docs/guides/launch"


def test_every_target_has_a_page_and_every_page_is_about_one():
    pages = {page.stem for page in DOCS.glob("*.md")} - {"README"}
    assert pages == EVERY_TARGET - {"local", "ssh"} | {"hosts"}


def test_doctor_says_what_a_target_lacks(monkeypatch, cli):
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    checks = {
        check["name"]: check for check in cli.json("doctor", "--target", "runpod", code=2)["checks"]
    }
    assert checks["key"]["state"] == "failed"
    assert "export RUNPOD_API_KEY" in checks["key"]["to_do"]
    assert main(["doctor", "--target", "nowhere"]) == 2


# ---- more than one of us ----


def test_a_second_folder_counts_on_from_what_the_first_has_paid(tmp_path):
    course = Course(tmp_path, max_usd=0.3, n_steps=10**9, script=["never boots", "never boots"])
    world = course.world

    def die(text):
        if "confirmed gone" in text and len(world.machines) == 2:
            raise Killed

    with pytest.raises(Killed):
        course.goes(at=tmp_path / "laptop", say=die)
    assert world.usd > 0.1, "boots that led to nothing"
    assert course.goes() == 3
    assert world.usd <= 0.3 + 600 / 3600 * 0.4
    names = [machine.name for machine in world.machines]
    assert len(set(names)) == len(names) == 3, "no machine is taken for another one"
    assert course.goes(at=tmp_path / "laptop") == 3
    for ledger in (course.ledger, MachineLedger(tmp_path / "laptop")):
        assert sorted(ledger.machines) == sorted(names)
        assert ledger.usd(world.now) == pytest.approx(world.usd, abs=0.03)


def test_lines_of_machines_are_kept_in_the_store_and_damage_is_refused(tmp_path):
    words = words_in(tmp_path, "farthing-1")
    rows = [{"machine": "farthing-1-1", "event": "asked", "at": 1.0, "usd_per_hour": 2.0}]
    words.keep("farthing-1-1", rows)
    assert words.kept() == {"farthing-1-1": rows}
    path = tmp_path / "store/launch" / "farthing-1/machines/farthing-1-1.json"
    path.write_text(path.read_text().replace("2.0", "0.0"))
    with pytest.raises(InputError, match="damaged"):
        words.kept()


def test_one_store_is_one_launch_however_it_is_written(demo):
    stores = "s3://bucket/run", "s3://bucket/run/", "s3://bucket//run", "s3://bucket/other"
    first, *same, other = (launch_id_of(_job(demo, f"output_store={store}")) for store in stores)
    assert same == [first, first]
    assert other != first
    path, url = (
        launch_id_of(_job(demo, f"output_store={place}")) for place in ("/a/b", "file:///a//b/")
    )
    assert path == url


def test_one_process_watches_a_launch(demo, monkeypatch, tmp_path):
    monkeypatch.setattr("farthing.launch.session.LEASE_S", 6.0)
    store = f"output_store={tmp_path}/store"
    laptop, desktop = (
        Session(prepared_of(demo, store, f"output_dir={tmp_path}/{name}", on="ssh:a"), print)
        for name in ("laptop", "desktop")
    )
    is_over = threading.Event()
    with laptop.only_watcher() as (sleep, _):
        other = threading.Thread(target=lambda: [sleep(0.1) for _ in iter(is_over.is_set, True)])
        other.start()
        with pytest.raises(RunBusyError, match="another process watches"), desktop.only_watcher():
            pass
        is_over.set()
        other.join()
    with desktop.only_watcher():
        pass
