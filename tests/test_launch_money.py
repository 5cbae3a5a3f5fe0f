"""What a machine costs is what its provider charges; no launch forgets one, and none says that it
looked where it could not.
"""

import subprocess
import sys

import pytest

from command import in_python
from farthing.config.load import load_job
from farthing.errors import InputError, RunInterruptedError
from farthing.launch.driver import RateLimitedError, ServerError, UnauthorizedError
from farthing.launch.machines import MachineLedger
from farthing.launch.prepare import extras_of, launch_id_of, modules_of, secrets_of
from farthing.launch.registry import find_target
from farthing.launch.still_billed import still_billed
from farthing.launch.wheel import fetch_script, wheel_of_this
from launch_faults import Fate, Killed, prepared_for
from launched import Answers, Course, api_of, job_at
from launched import keys as keys

# ---- the price that is charged ----


@pytest.mark.parametrize(
    ("provider", "fault", "usd_per_hour"),
    [("runpod", "costs less than listed", 0.24), ("vast", "costs a little more than listed", 0.42)],
)
def test_a_machine_is_booked_at_its_price_and_told_where_it_is_less(
    provider, fault, usd_per_hour, tmp_path
):
    course = Course(tmp_path, provider, 0.7, n_steps=120, script=[fault])
    assert course.goes() == 0
    course.is_counted(rel=0.02)
    (machine,) = course.ledger.machines.values()  # it is not sent back
    if "less" in fault:
        assert list(course.world.told.values()) == [pytest.approx(usd_per_hour)]
    assert machine.usd_per_hour == pytest.approx(usd_per_hour)


def test_what_is_billed_after_a_run_names_the_command_that_ends_it():
    row = {"name": "f-1", "usd_per_hour": 2.0, "state": "booted", "target": "skypilot"}
    rows = [row, row | {"name": "f-2", "state": "gone"}]
    assert still_billed({"output_store": "s3://b/run"}, rows, 5_000_000) == [
        {"what": "f-1: $2.00 an hour", "ends": "farthing launch stop JOB"},
        {"what": "SkyPilot's jobs controller", "ends": "`sky status` names it, `sky down` ends it"},
        {
            "what": "4.8 MiB in s3://b/run",
            "ends": "aws s3 rm --recursive s3://b/run --exclude '*' --include 'bills/*' --include"
            " 'commits/*' --include 'data/????????-*' --include 'inputs/sha256-*' --include"
            " 'launch/*' --include 'trials/*' --include 'writers/*', once you have the model",
        },
    ]
    own = {"where": {"usd_per_hour": 0.5}, "output_store": "/mnt/share"}
    assert still_billed(own, []) == [
        {
            "what": "the machine that it ran on: $0.50 an hour",
            "ends": "its provider, where you rented it",
        }
    ]
    assert still_billed({"output_store": "gs://b/r"}, [], 0) == []


# ---- answers that are none ----


@pytest.mark.parametrize(
    ("status", "kind"),
    [(403, UnauthorizedError), (429, RateLimitedError), (408, ServerError), (503, ServerError)],
)
def test_errors_of_a_provider_are_told_apart(status, kind):
    with pytest.raises(kind):
        api_of(Answers((status, {"error": "no"}))).ask("DELETE", "/")


def test_refused_credentials_end_a_launch_before_anything_is_rented(tmp_path):
    course = Course(tmp_path, refuses=(0.0, 9e9, 401))
    before = course.world.now
    with pytest.raises(InputError, match="refuses the credentials"):
        course.goes()
    assert course.world.machines == []
    assert course.world.now - before < 60, "it is not asked for ever"


# ---- more than one of us ----


@pytest.mark.parametrize("is_before", [True, False])
def test_a_watcher_that_wakes_beside_one_that_took_over_destroys_nothing(is_before, tmp_path):
    """And where its own request was under way, that machine is ended and counted: the other one has
    looked for it in vain.
    """
    late = []
    for n in range(3, 36, 2):
        course, alive = Course(tmp_path / f"{n}", n_steps=600), []
        world, first = course.world, tmp_path / f"{n}/a"

        def there(world=world):
            return [machine.name for machine in world.machines if machine.gone_at is None]

        def meanwhile(course=course, alive=alive, there=there):
            course.world.sleep(900)
            with pytest.raises(Killed):
                course.goes(Fate(60, is_before=False), course.run.parent / "b", holder=2)
            alive.append(there())

        fate = Fate(n, is_before=is_before, kind="suspend", meanwhile=meanwhile)
        try:
            code = course.goes(fate, first, holder=1)
        except RunInterruptedError:
            code = 75
        if alive:
            assert (code, there()) == (75, alive[0]), "the machine of the other one trains on"
        assert world.n_double == 0
        for machine in MachineLedger(first).machines.values():
            if machine.why == "made after another process had taken over":
                late.append(machine.state)
                until_given_up = pytest.approx(900, abs=1)
                assert machine.billed_s(world.now) == until_given_up
    assert set(late) == ({"gone"} if is_before else set())


@pytest.mark.parametrize("skew_s", [-2 * 86400.0, 130.0, 2 * 86400.0])
def test_a_watcher_whose_clock_is_off_evicts_nobody(skew_s, tmp_path):
    course = Course(tmp_path, n_steps=240)
    course.dies(40, tmp_path / "a")
    code = course.goes(skew_s=skew_s, holder=2)
    assert (code, len(course.world.machines), course.world.n_alive) == (0, 1, 0)
    course.is_counted(rel=0.01)


# ---- what could not be asked ----


def test_a_status_that_could_not_look_does_not_say_that_nothing_was_launched(
    tmp_path, tiny_folders, cli, monkeypatch
):
    monkeypatch.setattr("farthing.launch.session.LOOK_S", 0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    job = job_at(tmp_path, tiny_folders, output_store="s3://bucket/run")
    out, err = cli("launch", "status", job, code=75)
    assert "nothing has been launched yet" not in out + err
    known = cli.json("launch", "status", job, "--on", "ssh:a", code=1)
    for said in (err, known["not_known"]):
        assert "the store does not answer" in said
    assert "only machines known here are stopped" in cli.err(
        "launch", "stop", job, "--on", "local", code=1
    )


# ---- what travels ----


@pytest.mark.slow
def test_the_wheel_is_this_farthing(tmp_path):
    wheel, there = wheel_of_this(), tmp_path / "there"
    path = tmp_path / wheel.name
    path.write_bytes(wheel.content)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*install, "--target", str(there), str(path)], check=True)
    for name in ("farthing/facts/prices.csv", "farthing/cli/launch.py", "bin/farthing"):
        assert (there / name).exists()
    assert not list(there.glob("farthing/**/__pycache__"))


def test_a_machine_fetches_the_wheel_from_the_store_by_its_checksum(tmp_path):
    pytest.importorskip("obstore")
    wheel, store = wheel_of_this(), tmp_path / "a #store"
    key = f"inputs/sha256-{wheel.sha256}"
    (store / "inputs").mkdir(parents=True)
    (store / key).write_bytes(wheel.content)
    here = tmp_path / "machine"
    here.mkdir()
    script = fetch_script(wheel, str(store), key)
    assert in_python(script, cwd=here).returncode == 0
    assert (here / wheel.name).read_bytes() == wheel.content
    (store / key).write_bytes(wheel.content[:-1] + b"x")
    (here / wheel.name).unlink()
    done = in_python(script, cwd=here)
    assert done.returncode != 0
    assert "not the one that was sent" in done.stderr
    assert not [*here.iterdir(), *(store / "inputs").iterdir()], "it is sent again"


def test_nothing_is_installed_by_a_bare_name(tmp_path):
    prepared = prepared_for("runpod", tmp_path / "run", 4.0, 0.4)
    ledger = MachineLedger(tmp_path / "run")
    ask = prepared.ask(1, prepared.offers[0], ledger, [], 1_800_000_000.0)
    assert ask.install.endswith("./farthing-0.1.0-py3-none-any.whl[datasets,gpu,sentencepiece]'")
    assert wheel_of_this().sha256 in ask.fetch
    assert "farthing==" not in ask.install + ask.fetch


def test_what_a_job_needs_is_known_before_anything_is_rented(
    tmp_path, tiny_folders, cli, monkeypatch
):
    train = {"report_to": ["wandb", "tensorboard"], "use_liger_kernel": True}
    keys = {"method": "qlora", "data": "org/data", "train": train}
    job = load_job(job_at(tmp_path, tiny_folders, **keys))
    needs = {"bitsandbytes", "datasets", "liger_kernel", "tensorboard", "wandb"}
    assert set(modules_of(job)) == needs
    assert extras_of(job, 0) == ("datasets", "gpu", "sentencepiece", "track", "wandb")
    plain = load_job(job_at(tmp_path, tiny_folders, train={"report_to": ["wandb"]}))
    assert extras_of(plain, 1) == ("gpu", "sentencepiece", "wandb")
    assert extras_of(plain, 0) == ("sentencepiece", "wandb")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert {"WANDB_API_KEY", "WANDB_PROJECT"} <= set(secrets_of(plain, find_target("runpod")[0]))
    said = cli.err("launch", "needs", "0.0.1", "json", "no_such_module")
    assert "version 0.0.1 of farthing, this is" in said
    assert "`no_such_module` is not installed here" in said
    assert "`json`" not in said
    cli("launch", "needs", "any", "json")


def test_a_launch_here_is_refused_where_what_it_needs_is_not_installed(
    tmp_path, tiny_folders, cli, monkeypatch
):
    monkeypatch.setitem(sys.modules, "trackio", None)
    job = job_at(tmp_path, tiny_folders, train={"report_to": ["trackio"]})
    said = cli.err("launch", job, "--on", "local")
    assert "not installed here: trackio" in said
    assert "pip install 'farthing[trackio]'" in said


def test_two_volumes_at_one_path_are_two_launches(tmp_path, tiny_folders):
    job = load_job(job_at(tmp_path, tiny_folders))
    first = launch_id_of(job)
    assert launch_id_of(job) == first, "kept in the run folder"
    (tmp_path / "run/launch/id").unlink()  # another volume is mounted there
    assert launch_id_of(job) != first
