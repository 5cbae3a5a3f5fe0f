"""A search on machines that are lost: it goes on elsewhere, to the same end, under one cap."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from farthing.cli import main
from farthing.config.load import load_job
from farthing.errors import InputError
from farthing.launch.prepare import Wishes, prepare
from farthing.launch.request import Patience
from farthing.launch.session import Session
from farthing.run.commits import list_commits
from farthing.search.receipt import read_receipt
from farthing.storage.objects import StoreError, open_store
from searching import SEARCH, job_of, searched, told, weights_of

QUICK = Patience(
    poll_s=0.5, boot_s=120.0, lost_s=3.0, silent_s=120.0, stubborn_s=1.0, farewell_s=1.0
)
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
[ -d ROOT/$2 ] || { echo "connect to host $2 port 22: Connection refused" >&2; exit 255; }
exec env HOME=ROOT/$2 PATH=BIN:$PATH sh -s
"""
"""Stands for ssh: a host is a folder, and is gone with it."""


def lose(host: Path):
    """Take a host away: its processes, then its disk."""
    for name in host.glob(".farthing/*/pid"):
        found = subprocess.run(
            ["pgrep", "-s", name.read_text().strip()], capture_output=True, text=True
        )
        for process in found.stdout.split():
            os.kill(int(process), signal.SIGKILL)
    host.rename(host.with_name(f"{host.name}-lost"))


@pytest.mark.slow
def test_a_launched_search_goes_on_elsewhere_to_the_same_end(tmp_path, monkeypatch):
    alone = job_of(tmp_path / "alone")
    receipt = searched(alone).receipt
    hosts, ssh = tmp_path / "hosts", tmp_path / "ssh"
    for name in ("one", "two"):
        (hosts / name).mkdir(parents=True)
    text = SSH.replace("ROOT", str(hosts)).replace("BIN", str(Path(sys.executable).parent))
    ssh.write_text(text)
    ssh.chmod(0o755)
    monkeypatch.setenv("FARTHING_SSH", str(ssh))
    path = job_of(tmp_path / "job", output_store=str(tmp_path / "store"))
    job, said = load_job(path), []
    session = Session(prepare(job, Wishes(on="ssh:one,two"), datetime.now(UTC)), said.append)

    def take_away():
        store, n_done = open_store(str(tmp_path / "store")), 0
        while n_done < 3:
            time.sleep(0.1)
            try:
                n_done = max((commit.step for commit in list_commits(store)), default=0)
            except StoreError:
                continue
        lose(hosts / "one")

    thread = threading.Thread(target=take_away, daemon=True)
    thread.start()
    code = session.run(is_attended=True, tokenize=list, patience=QUICK)
    assert code == 0, "\n".join((*said, session.log()))
    assert not thread.is_alive(), "the first machine was lost"
    assert len(session.ledger.machines) == 2
    again = ["launch", str(path), "--on", "ssh:two", "--yes"]
    assert main(again) == 0, "the search has finished: nothing is rented"
    assert len(session.ledger.machines) == 2
    found = read_receipt(tmp_path / "job/run")
    assert searched(path).receipt == found
    assert told(found) == told(receipt)
    assert found["winner"]["trial"] == receipt["winner"]["trial"]
    assert weights_of(tmp_path / "job/run") == weights_of(tmp_path / "alone/run")
    on_machines = sum(row["usd"] for row in session.standing()["machines"])
    assert found["usd"] <= on_machines <= 5


def test_files_of_this_machine_do_not_travel_as_choices(tmp_path):
    section = {**SEARCH, "vary": {"model": ["./base", "./other"]}}
    path = job_of(tmp_path, section, output_store=str(tmp_path / "store"))
    with pytest.raises(InputError, match="do not travel"):
        prepare(load_job(path), Wishes(on="ssh:one"), datetime.now(UTC))
    here = prepare(load_job(path), Wishes(on="local"), datetime.now(UTC))
    assert here.target.name == "local"
