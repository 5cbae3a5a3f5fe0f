"""Hostile input and secrets: nothing that is loaded runs code or fills the memory, nothing that is
written holds a secret.

Each hostile thing carries a payload that leaves a file when it is run, and is made with whatever
checksums its reader asks for: they are no defence against those who can write them.
"""

import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from jinja2.exceptions import SecurityError

from canaries import CANARIES
from checkpoints import newest, restored, save
from farthing.cli import main
from farthing.data.chat_template import render
from farthing.data.light_tokenizer import light_tokenizer
from farthing.errors import ModelError, RunDamagedError, UnusableRowError
from farthing.run.checkpoint import Checkpoints
from farthing.run.folder import keep_job, kept, kept_job
from farthing.storage.files import DamagedFileError, read_manifest, seal, unseal, write_text
from farthing.storage.objects import open_store
from held import Held
from mirrored import Model, folder_of_run, mirror_of, mirroring, with_copies
from mishaps import fail_at
from peak_memory import PeakMemory
from thinned import thinned
from token_sets import reader_of_chats
from web import Pages
from workshop import job_file, read_json

MOST_BYTES = 200 << 20  # that reading something hostile may add to the memory


@pytest.fixture
def marker(tmp_path):
    """The file that a payload leaves when it is run: no test has one run."""
    path = tmp_path / "the payload ran"
    yield path
    assert not path.exists()


class Payload:
    """Whoever unpickles it runs a command."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def pickles(marker: Path):
    """The payload as each kind of pickle."""
    zipped = io.BytesIO()
    torch.save(Payload(marker), zipped)
    return {"pickle": pickle.dumps(Payload(marker)), "torch": zipped.getvalue()}


# ---- secrets ----


def secrets_in(content: bytes) -> list[str]:
    """Whose secrets some bytes hold, plainly or in base64."""
    return [
        name
        for name, secret in CANARIES.items()
        if secret.encode() in content or base64.b64encode(secret.encode())[:24] in content
    ]


def files_with_secrets(folder: Path):
    """What under a folder holds secrets, in its name or its bytes."""
    found = {
        str(path): secrets_in(path.read_bytes() + str(path).encode())
        for path in folder.rglob("*")
        if path.is_file()
    }
    return {path: names for path, names in found.items() if names}


@pytest.mark.slow
def test_no_secret_of_the_environment_gets_out(secrets, tmp_path, monkeypatch, capfd):
    """A run with evaluations, checkpoints, a copy in a store and a tracker is asked to leave,
    crashes and finishes; then it is planned, looked at and exported. Files, words and titles of
    processes are searched."""
    path = job_file(
        tmp_path,
        data={"eval_fraction": 0.2},
        max_steps=40,
        save_steps=4,
        eval_steps=20,
        method="lora",
        pretrained=True,
        report_to=["tensorboard"],
        output_store="./store",
    )
    monkeypatch.setattr("farthing.train.trackers.PATIENCE_S", 300.0)
    held = Held(tmp_path.with_name(f"{tmp_path.name}-hold"), "step-00000008")
    first = subprocess.Popen(
        [sys.executable, "-m", "farthing", "train", str(path), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=held.environment,
    )
    titles = set()
    while first.poll() is None and not (
        held.is_there() and list((tmp_path / "store").glob("commits/*-0*4.json"))
    ):
        for process in [
            psutil.Process(first.pid),
            *psutil.Process(first.pid).children(recursive=True),
        ]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                titles.add(" ".join(process.cmdline()))
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    held.let_go()
    said = b"".join(first.communicate(timeout=300))
    assert first.returncode == 75, said
    assert any("farthing" in title for title in titles)
    assert secrets_in(" ".join(titles).encode() + said) == []

    with monkeypatch.context() as patch:
        fail_at(2, patch)
        assert main(["train", str(path)]) == 1
    said = "".join(capfd.readouterr()).encode()
    assert b"Traceback" in said
    for argv in (
        ["train", str(path), "--json"],
        ["report", str(tmp_path / "run")],
        ["report", str(tmp_path / "run"), "--json"],
        ["plan", str(path), "--html", str(tmp_path / "plan.html")],
        ["plan", str(path), "--json"],
        ["doctor", str(path), "--json"],
        ["export", str(tmp_path / "run"), "--output", str(tmp_path / "merged"), "--json"],
    ):
        assert main(argv) == 0, capfd.readouterr()
        said += "".join(capfd.readouterr()).encode()
    assert secrets_in(said) == []
    kinds = {word for path in tmp_path.rglob("*") for word in (path.suffix, path.name)}
    assert {
        ".safetensors",
        "ledger.jsonl",
        "receipt.json",
        "plan.html",
        "commits",
        "writers",
        "tensorboard",
    } <= kinds
    assert files_with_secrets(tmp_path) == {}
    (tmp_path / "planted").write_text(f"key = {CANARIES['HF_TOKEN']}")
    assert files_with_secrets(tmp_path) == {str(tmp_path / "planted"): ["HF_TOKEN"]}, (
        "and it would have been found"
    )


@pytest.mark.parametrize(
    "keys",
    [
        {"hf_token": "{canary}"},
        {"where": {"aws_secret_access_key": "{canary}"}},
        {"output_store": "s3://key:{canary}@bucket/run"},
        {"output_store": "s3://bucket/run?sig={canary}"},
        {"output_dir": "s3://key:{canary}@bucket/run"},
        {"cache_dir": "https://user:{canary}@host/cache"},
        {"model": "https://user:{canary}@huggingface.co/org/name"},
        {
            "model": {
                "model_name_or_path": "org/name",
                "tokenizer_name_or_path": "https://u:{canary}@host/org/name",
            }
        },
    ],
    ids=lambda keys: "-".join(keys),
)
def test_a_secret_in_a_job_is_refused_and_not_repeated(keys, tmp_path, capsys):
    path = job_file(tmp_path)
    spelt = json.loads(json.dumps(keys).replace("{canary}", CANARIES["HF_TOKEN"]))
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **spelt}))
    for more in ([], ["--json"]):
        assert main(["train", str(path), *more]) == 2
    assert secrets_in("".join(capsys.readouterr()).encode()) == []
    assert list(files_with_secrets(tmp_path)) == [str(path)]


def test_a_password_in_the_address_of_data_is_kept_nowhere(desk, run):
    secret = CANARIES["AWS_SECRET_ACCESS_KEY"]
    with Pages({"/a.jsonl": (desk.folder / "train.jsonl").read_bytes()}).served() as address:
        host = address.removeprefix("http://")
        desk.set("data", train=f"http://user:{secret}@{host}/a.jsonl?key={secret}")
        said = run(code=0)
    assert secrets_in((said.out + said.err).encode()) == []
    (desk.folder / "job.yaml").unlink()
    assert files_with_secrets(desk.folder) == {}
    assert f"{address}/a.jsonl" in (desk.folder / "run/job.json").read_text()


def test_what_may_hold_data_is_for_its_owner_alone(desk, run):
    before = os.umask(0o022)
    try:
        run("--set", "output_store=store", code=0)
    finally:
        os.umask(before)
    kept = {path.parent for path in (desk.folder / "store").rglob("*") if path.is_file()}
    folders = [desk.folder / name for name in ("run", "run/checkpoints", "store", "cache/tokens")]
    modes = {str(path): path.stat().st_mode & 0o777 for path in (*folders, *kept)}
    assert modes == dict.fromkeys(modes, 0o700)
    open_to_others = [
        p
        for p in (desk.folder / "run").iterdir()
        if p.suffix == ".jsonl" and p.stat().st_mode & 0o077
    ]
    assert open_to_others == []


# ---- checkpoints ----


def tensors_file(header, says: int | None = None) -> bytes:
    """A safetensors file with any header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if says is None else says) + raw + b"\0" * 64


def nested() -> bytes:
    return b'{"a":' * 200_000 + b"0" + b"}" * 200_000


def zipped(content: bytes) -> bytes:
    """A zip archive that is a thousandth of what it holds."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("state.json", content)
    return archive.getvalue()


BILLION = 10**9
HOSTILE = {
    "header longer than the file": ("model.safetensors", tensors_file({}, says=1 << 40)),
    "header of 20 MB": ("model.safetensors", tensors_file(b"{" + b" " * (20 << 20) + b"}")),
    "shape and offsets of a billion": (
        "model.safetensors",
        tensors_file({"a": {"dtype": "F32", "shape": [BILLION], "data_offsets": [0, 4 * BILLION]}}),
    ),
    "shape that overflows": (
        "model.safetensors",
        tensors_file({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 64]}}),
    ),
    "nested header": ("optimizer.safetensors", tensors_file(nested())),
    "no tensors at all": ("optimizer.safetensors", b""),
    "gzip bomb": ("state.json", gzip.compress(b" " * (50 << 20))),
    "zip bomb": ("state.json", zipped(b" " * (50 << 20))),
    "nested state": ("state.json", nested()),
    "state of a list": ("state.json", b"[1, 2]"),
    "state that names a path": ("state.json", b'{"../../../model": {}, "optimizer": {}}'),
    "state of 65 MB": ("state.json", b'{"model": {"a": "' + b"x" * (65 << 20) + b'"}}'),
    "number of a million digits": ("state.json", b'{"model": {"a": ' + b"9" * 1_000_000 + b"}}"),
    "nested manifest": ("manifest.json", nested()),
    "manifest of lists": ("manifest.json", b"[" * 500_000),
    "gzip as manifest": ("manifest.json", b"\x1f\x8b" + b"\0" * 99),
    "manifest with no number": ("manifest.json", b'{"files": [], "spent_s": NaN}'),
}


def forge(folder: Path, name: str, content: bytes):
    """Put a file into a committed folder, with a manifest that vouches for it."""
    (folder / name).write_bytes(content)
    if name == "manifest.json":
        return
    manifest = read_json(folder / "manifest.json")
    entry = {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"] = [*(file for file in manifest["files"] if file["name"] != name), entry]
    write_text(folder / "manifest.json", seal(manifest))


@pytest.fixture
def two_saves(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", "run-1", 3, warn=print)
    save(checkpoints, 1, 2)
    return checkpoints.folder


def goes_on_from_the_one_before(folder: Path):
    said = []
    with PeakMemory(MOST_BYTES):
        assert restored(folder, said) == 1
    assert len(said) == 1
    assert "the checkpoint of step 2 is damaged" in said[0]
    assert len(said[0]) < 1000


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_checkpoint_is_refused_before_it_is_parsed(what, two_saves):
    forge(newest(two_saves), *HOSTILE[what])
    goes_on_from_the_one_before(two_saves)


@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
def test_a_pickle_under_any_name_of_a_checkpoint_is_not_run(name, kind, two_saves, marker):
    forge(newest(two_saves), name, pickles(marker)[kind])
    goes_on_from_the_one_before(two_saves)


@pytest.mark.parametrize(
    "name", ["training_args.bin", "rng_state.pth", "pytorch_model.bin", "scheduler.pt"]
)
def test_a_pickle_beside_a_checkpoint_is_not_looked_at(name, two_saves, marker):
    for content in pickles(marker).values():
        forge(newest(two_saves), name, content)
        assert restored(two_saves) == 2


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "..", "a/b", "", "manifest.json"])
def test_a_manifest_can_not_name_files_outside_its_folder(name, two_saves):
    path = newest(two_saves) / "manifest.json"
    manifest = read_json(path)
    manifest["files"][0]["name"] = name
    write_text(path, seal(manifest))
    with pytest.raises(DamagedFileError, match="names a file outside its folder"):
        read_manifest(path.parent)
    goes_on_from_the_one_before(two_saves)


@pytest.mark.parametrize("what", ["folder", "manifest", "file", "pipe"])
def test_links_and_pipes_in_place_of_a_checkpoint_are_not_followed(what, two_saves, tmp_path):
    folder, elsewhere = newest(two_saves), tmp_path / "elsewhere"
    path = folder / {"folder": "", "file": "model.safetensors"}.get(what, "manifest.json")
    path.rename(elsewhere)
    if what == "pipe":
        os.mkfifo(path)  # who opens it waits for ever
    else:
        path.symlink_to(elsewhere)
    goes_on_from_the_one_before(two_saves)
    assert elsewhere.exists()


# ---- commits in a store ----


@pytest.fixture
def two_copies(tmp_path):
    return with_copies(Model(), folder_of_run(tmp_path / "run"), 1, 2)


def forge_commit(store: Model, change):
    """Change what the newest commit says, and let it vouch for that."""
    key = max(store.list("commits/"))
    commit = unseal(store.objects[key].decode(), "it")
    change(commit)
    store.objects[key] = seal(commit).encode()


def takes_the_one_before(store: Model, tmp_path: Path):
    said = []
    with PeakMemory(MOST_BYTES), mirroring(store, tmp_path / "empty", said, step=1):
        pass
    assert "the copy of step 2 in the store is damaged" in said[0]
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "empty"}


def first_file(**keys):
    return lambda commit: commit["files"][0].update(keys)


COMMITS = {
    **{
        f"path {path!r}": first_file(path=path)
        for path in (
            "../evil",
            "/etc/evil",
            "checkpoints/step-1/x",
            "other.txt",
            "model/../x",
            "model\\x",
            "",
            "model",
            ".lock",
            "model/" + "x" * 300,
        )
    },
    **{
        f"object {name!r}": first_file(object=name)
        for name in ("../../etc/passwd", "data/../x", "writers/x")
    },
    "a file twice": lambda commit: commit["files"].append(commit["files"][0]),
    "a file and a folder": lambda commit: commit["files"].extend(
        [{**commit["files"][0], "path": "model/a"}, {**commit["files"][0], "path": "model/a/b"}]
    ),
    "a negative size": first_file(size=-1),
    "no files": lambda commit: commit.update(files={"a": 1}),
}


@pytest.mark.parametrize("what", COMMITS)
def test_a_hostile_commit_is_refused_before_anything_is_fetched(what, two_copies, tmp_path):
    forge_commit(two_copies, COMMITS[what])
    takes_the_one_before(two_copies, tmp_path)


@pytest.mark.parametrize("what", ["pickle", "nested", "gzip", "empty", "no number"])
def test_a_malformed_commit_is_refused(what, two_copies, tmp_path, marker):
    content = {
        "nested": nested(),
        "gzip": HOSTILE["gzip bomb"][1],
        "empty": b"",
        "no number": b'{"files": [], "at": 1e999}',
        **pickles(marker),
    }[what]
    two_copies.objects[max(two_copies.list("commits/"))] = content
    takes_the_one_before(two_copies, tmp_path)


def test_objects_larger_than_they_may_be_are_not_fetched(two_copies, tmp_path):
    """A folder as the store: its commit grows to 3 GB, and the one before names a file that has
    grown to as much.
    """
    folder = tmp_path / "store"
    for key, content in two_copies.objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(content)
    os.truncate(folder / max(two_copies.list("commits/")), 3 << 30)
    first = unseal(two_copies.objects[min(two_copies.list("commits/"))].decode(), "it")
    large = next(
        entry["object"] for entry in first["files"] if entry["path"].endswith("model.safetensors")
    )
    os.truncate(folder / large, 3 << 30)
    said = []
    with PeakMemory(MOST_BYTES), pytest.raises(RunDamagedError, match="none of the 2 commits"):
        mirror_of(open_store(str(folder)), tmp_path / "empty", said).bring_back()
    assert "bytes, no more than" in said[0]
    assert "bytes, no more than" in said[1]
    assert (
        sum(path.stat().st_size for path in (tmp_path / "empty").rglob("*") if path.is_file())
        < 1 << 20
    )


@pytest.mark.parametrize(
    "name", thinned(["run.json", "ledger.jsonl", "plan.json", "settings.json", "schedule.json"], 5)
)
def test_hostile_small_files_of_a_commit_end_in_words(name, tmp_path, marker, cli):
    """They are installed, as their checksums are right; the run that reads them says what is wrong,
    and writes those that decide its result again from its checkpoint."""
    path = job_file(tmp_path, max_steps=2)
    keys = ["--set", "limits.max_hours=1", "--set", "train.fit_schedule_to_budget=true"]
    cli("train", path, *keys)
    (tmp_path / "run" / name).write_bytes(nested() + b"\n" + pickles(marker)["pickle"])
    out, said = cli("train", path, *keys)
    assert ("written again from the checkpoint" in out) == (name != "ledger.jsonl")
    assert "Traceback" not in said


def test_a_hostile_lease_costs_nothing_but_the_lease(two_copies, tmp_path, marker, cli):
    newest_link = max(two_copies.list("writers/"))
    row = {"attempt": 1, "spans": {"compute": "a lot"}, "at": "never"}
    for number, content in enumerate(
        [
            nested(),
            pickles(marker)["pickle"],
            b"[]",
            seal({"released": True, "ledger": [row, 7, "[" * 1000], "lease_s": "long"}).encode(),
        ]
    ):
        two_copies.objects[newest_link] = content
        for key in [
            key for key in two_copies.objects if key.startswith("writers/") and key > newest_link
        ]:
            del two_copies.objects[key]
        with mirroring(two_copies, tmp_path / f"empty-{number}", step=2):
            pass
    cli("report", tmp_path / "empty-3")


# ---- jobs ----


def laughs(n: int) -> str:
    """Lists of lists of lists: a billion words in a page, where aliases are followed."""
    lines = ["a0: &a0 [lol]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, n)
    ]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("limits: !!python/object/apply:os.system ['touch \"{marker}\"']", "plain values only"),
        ("limits: !!python/name:os.system ''", "plain values only"),
        (laughs(12), "aliases that expand too far"),
        ("limits: &a [*a]", "aliases that expand too far"),
        ("limits: " + "[" * 5000, "nested too deep"),
    ],
    ids=["apply", "name", "laughs", "itself", "deep"],
)
def test_a_hostile_job_runs_nothing_and_stays_small(text, words, desk, run, marker):
    written = desk.job().read_text() + text.replace("{marker}", str(marker)) + "\n"
    (desk.folder / "evil.yaml").write_text(written)
    with PeakMemory(MOST_BYTES):
        said = run(verb="plan", job="evil.yaml", code=2)
    assert words in said.err


def test_an_override_that_would_run_code_runs_none(run, marker):
    said = run("--set", f"limits=!!python/object/apply:os.system ['touch \"{marker}\"']", code=2)
    assert "not valid YAML" in said.err


def test_nothing_of_the_environment_is_put_into_a_job(secrets, desk, run):
    written = "${HF_TOKEN} $HF_TOKEN %(HF_TOKEN)s {{ env.HF_TOKEN }}"
    desk.values["output_dir"] = written
    run(code=0)
    assert (desk.folder / written / "receipt.json").exists(), "a name like any other"
    assert files_with_secrets(desk.folder) == {}


def test_a_run_folder_that_is_a_link_of_ones_own_is_followed(desk, run):
    (desk.folder / "large disk").mkdir(mode=0o755)
    (desk.folder / "run").symlink_to(desk.folder / "large disk")
    run(code=0)
    assert (desk.folder / "large disk" / "model/config.json").exists()
    assert (desk.folder / "large disk").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a link that is another's")
def test_a_run_folder_that_somebody_else_has_linked_is_refused(desk, run):
    (desk.folder / "elsewhere").mkdir(mode=0o755)
    (desk.folder / "run").symlink_to(desk.folder / "elsewhere")
    os.chown(desk.folder / "run", 12345, 12345, follow_symlinks=False)
    said = run(code=2)
    assert "a link made by another user" in said.err
    assert list((desk.folder / "elsewhere").iterdir()) == []
    assert (desk.folder / "elsewhere").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    "name", [".lock", "log.jsonl", "ledger.jsonl", "run.json", "plan.json", "settings.json"]
)
def test_nothing_is_written_through_a_link_in_the_run_folder(name, desk, run):
    precious = desk.folder / "precious"
    precious.write_text("of someone")
    (desk.folder / "run").mkdir()
    (desk.folder / "run" / name).symlink_to(precious)
    said = run(code=2)
    assert f"`{name}` in this folder is a symbolic link" in said.err
    assert precious.read_text() == "of someone"


# ---- data ----


def test_a_link_in_a_data_folder_does_not_lead_out_of_it(desk, run):
    folder = desk.folder / "set"
    folder.mkdir()
    (desk.folder / "train.jsonl").rename(folder / "real.txt")
    link = folder / "train.jsonl"
    link.symlink_to("real.txt")
    desk.set("data", train="./set")
    assert run().code == 0, "a link within the folder is followed"
    (desk.folder / "private").write_text('{"text": "the contents of a private file"}\n' * 9)
    link.unlink()
    link.symlink_to("../private")
    said = run("--set", "output_dir=other", code=2)
    assert "leads out of the data set's folder" in said.err


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch \"MARKER\"') }}",
    "{{ lipsum.__globals__['os'].popen('touch \"MARKER\"').read() }}",
    "{{ messages.append('x') }}",
    "{{ raise_exception.__globals__['os'].system('touch \"MARKER\"') }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
]


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_chat_template_does_not_get_out_of_its_sandbox(
    escape, tokenizers, tiny_folders, marker, monkeypatch
):
    """Neither the one that renders for training nor the planner's."""
    template = escape.replace("MARKER", str(marker)) + "{{ messages[0].content }}"
    chat = {
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
    }
    monkeypatch.setattr(tokenizers["llama"], "chat_template", template)
    planners = light_tokenizer(tiny_folders["llama"], template)
    for tokenizer in (tokenizers["llama"], planners):
        convert = reader_of_chats(tokenizer)
        with pytest.raises(UnusableRowError):
            convert(chat)


def doubled(start: str, twice: str) -> str:
    """What becomes of a value that grows sixty times."""
    loop = f"{{% for i in range(60) %}}{{% set ns.x = {twice} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={start}) %}}{loop}"


LONG = "{% set x = 'a' * 100000 %}"
NESTED = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
TUPLES = NESTED.replace("[", "(").replace("]", ",)")
BOMBS = {
    "a long loop": "{% for i in range(1000000000) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2,
    "list times": "{{ [1] * 10 ** 10 }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "products": doubled("99999", "ns.x * ns.x"),
    "sums": doubled("'aaaaaaaa'", "ns.x + ns.x"),
    "joined": doubled("'aaaaaaaa'", "ns.x ~ ns.x"),
    "lists of lists": doubled("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "as JSON": doubled("[1]", "[ns.x, ns.x]") + "{{ ns.x | tojson }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "filter with a width": "{{ 'a' | center(10 ** 10) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10000000000, 1) }}",
    "replaced": LONG + "{{ x | replace('a', x) }}",
    "joined by a long text": LONG + "{{ x.join([x] * 99999) }}",
    "many short texts": LONG + "{{ range(99999) | map('string') | join(x) }}",
    "constant in a loop": "{% for i in range(99999) %}{{ 'x' | center(1000000) }}{% endfor %}",
    "text in a loop": "{% for i in range(99999) %}" + "y" * 100_000 + "{% endfor %}",
    "cut": LONG + "{% for i in range(99999) %}{{ x[1:] | length }}{% endfor %}",
    "summed": "{{ ([[1] * 20000] * 20000) | sum(start=[]) | length }}",
    "a field often": LONG + "{{ ('{0}' * 99999).format(x) }}",
    "a key often": LONG + "{{ ('%(a)s' * 99999) % {'a': x} }}",
    "many widths": "{{ ('{0:999999}' * 10000).format(1) }}",
    "much indented JSON": "{{ ([1] * 5000) | tojson(indent=999999) }}",
    "much separated JSON": LONG + "{{ ([1] * 99999) | tojson(separators=(x, x)) }}",
    "wrapped": LONG + "{{ ('a b ' * 9999) | wordwrap(1, true, x) }}",
    "linked": LONG + "{{ ('http://a.de ' * 9999) | urlize(rel=x) }}",
    "compared": NESTED + "{{ ns.x == ns.y }}",
    "compared by a test": NESTED + "{{ ns.x is in [ns.y] }}",
    "sorted": NESTED + "{{ [ns.x, ns.y] | sort }}",
    "counted": NESTED + "{{ [ns.y].count(ns.x) }}",
    "a key": TUPLES + "{{ {ns.x: 1} | length }}",
    "looked up": TUPLES + "{{ {1: 2}[ns.x] }}",
    "looked for": TUPLES + "{{ ns.x in {1: 2} }}",
    "looked through": LONG + "{% for i in range(99999) %}{{ x is lower }}{% endfor %}",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_chat_template_without_bounds_ends_the_job(what, tiny_folders):
    tokenizer = light_tokenizer(tiny_folders["llama"], BOMBS[what] + "{{ messages[0].content }}")
    with PeakMemory(MOST_BYTES), pytest.raises(ModelError, match="loops or grows without bound"):
        reader_of_chats(tokenizer)


@pytest.mark.parametrize("made", ["'a'.encode()", "(1).to_bytes(99999, 'big')"])
def test_a_chat_template_makes_no_bytes(made):
    with PeakMemory(MOST_BYTES), pytest.raises(SecurityError, match="not safely callable"):
        render("{{ " + made + " * 10 ** 9 }}", {})


def test_a_chat_template_may_format_any_content(tiny_folders):
    template = "{% for m in messages %}{{ '%s: %s' | format(m.role, m.content) }}\n{% endfor %}"
    tokenizer = light_tokenizer(tiny_folders["llama"], template)
    said = "**Call** 0049 30 1234567 {or {write}} 100 %*"
    chat = [{"role": role, "content": said} for role in ("user", "assistant")]
    text = reader_of_chats(tokenizer)({"messages": chat})
    assert "".join(part for part, _ in text.segments) == f"user: {said}\nassistant: {said}\n"


@pytest.mark.parametrize("verb", ["plan", "doctor", "train"])
def test_a_template_that_meets_its_bomb_in_the_data_ends_the_job(verb, desk, run):
    """The chats that farthing tries a template with are short."""
    turns = [{"role": role, "content": "hi"} for role in ("user", "assistant") * 9]
    desk.rows([{"messages": turns}] * 30)
    (desk.folder / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if messages | length > 12 %}{{ 'a' * 10 ** 10 }}{% endif %}"
    )
    desk.set("data", chat_template="t.jinja")
    said = run(verb=verb, code=2)
    assert "loops or grows without bound" in said.err + said.out


def test_json_within_a_row_that_is_nested_too_deep_is_a_bad_row(tokenizers):
    convert = reader_of_chats(tokenizers["llama"])
    with pytest.raises(UnusableRowError, match="not JSON"):
        convert({"messages": "[" * 500_000})


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.json", "[" * 100_000, "invalid JSON: nested too deep"),
        ("train.jsonl", "[" * 100_000, "invalid JSON: nested too deep"),
        ("train.json", '[{"text": ' + "9" * 5000 + "}]", "a number of thousands of digits"),
        ("train.jsonl", '{"text": ' + "9" * 5000 + "}", "a number of thousands of digits"),
        ("train.jsonl", None, "a pipe or a device, not a file"),
    ],
    ids=["list", "row", "digits", "digits of a row", "pipe"],
)
def test_data_without_bounds_is_refused_by_name(name, text, words, desk, run):
    (desk.folder / "train.jsonl").unlink()
    desk.set("data", train=name)
    if text is None:
        os.mkfifo(desk.folder / name)
    else:
        (desk.folder / name).write_text(text)
    for verb in ("plan", "train"):
        said = run(verb=verb, code=2)
        assert words in said.err + said.out


# ---- model folders ----


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", BILLION, "num_hidden_layers is 1000000000"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0"),
        ("num_hidden_layers", "9", "num_hidden_layers is 9"),
        ("num_local_experts", BILLION, "num_local_experts is 1000000000"),
        ("max_position_embeddings", -1, "max_position_embeddings is -1"),
        ("vocab_size", 10**12, "vocab_size is 1000000000000"),
        ("text_config", {"intermediate_size": 10**10}, "intermediate_size is 10000000000"),
        ("model_type", ["llama"], "names its model_type"),
        ("note", "x" * (17 << 20), "larger than 16 MiB"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_configuration_of_no_model_is_refused_before_anything_is_built(
    key, value, words, desk, run
):
    path = desk.own_model() / "config.json"
    path.write_text(json.dumps({**read_json(path), key: value}))
    said = run(verb="train" if isinstance(value, dict) else "plan", code=2)
    assert words in said.err + said.out


@pytest.mark.parametrize("what", ["chat template", "job"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_place_of_a_small_file_is_not_read(kind, what, desk, run):
    path = desk.folder / ("job.yaml" if what == "job" else "t.jinja")
    desk.set("data", chat_template="t.jinja")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    for verb in ("plan", "doctor", "train"):
        said = run(verb=verb, **({"job": path.name} if what == "job" else {}), code=2)
        assert "can't be read: a pipe or a device, not a file" in said.err + said.out


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_under_any_name_of_a_model_folder_is_not_run(kind, desk, run, marker):
    folder, content = desk.own_model(), pickles(marker)[kind]
    for name in (
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "adapter_model.bin",
        "tf_model.h5",
        "flax_model.msgpack",
        "vocab.pkl",
    ):
        (folder / name).write_bytes(content)
    assert run().code == 0, "beside whole weights it is not looked at"
    for name, words in (
        ("model.safetensors", "can't be loaded"),
        ("tokenizer.json", ""),
        ("config.json", ""),
    ):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        said = run("--set", "output_dir=other")
        assert said.code == 2, name
        assert words in said.err
        (folder / name).write_bytes(kept)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "../elsewhere.bin", "../elsewhere.safetensors"]
)
def test_an_index_does_not_make_a_pickle_of_a_model_folder_run(name, desk, run, marker):
    folder = desk.own_model()
    for content in pickles(marker).values():
        (folder / name).write_bytes(content)
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        index = {"metadata": {"total_size": 1}, "weight_map": {"model.embed_tokens.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        said = run(code=2)
        assert "names files outside its folder" in said.err
        (folder / "part.safetensors").rename(folder / "model.safetensors")


def auto_map(where: str, known: bool):
    names = {
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
    }
    more = {} if known or where != "config.json" else {"model_type": "unheard-of"}
    return {"auto_map": names, **more}


@pytest.mark.parametrize("known", [True, False], ids=["known model", "unheard-of model"])
@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_beside_a_model_is_not_run(where, known, desk, run, marker):
    folder = desk.own_model()
    code = f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n"
    for name in ("evil.py", "custom_generate/generate.py", "conftest.py", "sitecustomize.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
    tokenizer = {} if known or where == "config.json" else {"tokenizer_class": "EvilTokenizer"}
    said_before = read_json(folder / where)
    (folder / where).write_text(json.dumps(said_before | auto_map(where, known) | tokenizer))
    said = run()
    assert said.code == (0 if known else 2), said.err
    if said.code == 2:
        assert "trust_remote_code" in said.err


def test_kernels_that_a_model_would_fetch_and_run_are_refused(desk, run):
    path = desk.own_model() / "config.json"
    path.write_text(json.dumps(read_json(path) | {"attn_implementation": "someone/some-kernels"}))
    said = run(code=2)
    assert "attention 'someone/some-kernels' is code from the Hub" in said.err
    said = run("--set", "model.attn_implementation=someone/others", "--set", "model.init=random")
    assert "attention 'someone/others' is code from the Hub" in said.err


def test_a_run_folder_can_not_ask_for_code_to_be_run_at_its_export(tmp_path, marker, cli):
    path = job_file(tmp_path, method="lora", pretrained=True, max_steps=1)
    cli("train", path)
    base = tmp_path / "base"
    (base / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    (base / "config.json").write_text(
        json.dumps(read_json(base / "config.json") | auto_map("", True))
    )
    job = kept_job(tmp_path / "run")
    job["model"]["trust_remote_code"] = True
    keep_job(tmp_path / "run", job, kept(tmp_path / "run/run.json") or {})
    assert "--trust-remote-code" in cli.err(
        "export", tmp_path / "run", "--output", tmp_path / "out"
    )
