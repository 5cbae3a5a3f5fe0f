"""Data sets of the Hub, read by the real client from a local server that answers as the Hub does."""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from web import Quiet, serving

REVISION = "a" * 40
READ = """
import sys
from pathlib import Path
from typing import ClassVar
from farthing.data.read import open_sources
from farthing.errors import DataError
try:
    source = open_sources(("someone/rows",), cache_dir=Path(sys.argv[1]), split="train")[0]
    print(sum(1 for _ in source.rows()), source.sha256)
except DataError as error:
    print(error)
"""


class Hub(Quiet):
    """One data set, someone/rows, of the files of the class."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, bytes]] = {}
    n_asked = 0

    def do_GET(self):
        """Facts of the data set, its folder, or a file."""
        type(self).n_asked += 1
        path = self.path.split("?")[0]
        status, found, headers = 200, b"{}", {"X-Error-Code": "EntryNotFound"}
        etags = {name: hashlib.sha1(data).hexdigest() for name, data in self.files.items()}
        name = path.partition("/resolve/")[2].partition("/")[2]
        if name in self.files:
            found, headers = (
                self.files[name],
                {"ETag": json.dumps(etags[name]), "X-Repo-Commit": REVISION},
            )
        elif name or path.endswith("/data"):
            status = 404
        elif "/tree/" in path:
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": etags[name]}
                for name, data in self.files.items()
            ]
            found = json.dumps(listed).encode()
        else:
            siblings = [{"rfilename": name} for name in self.files]
            facts = {"id": "someone/rows", "sha": REVISION, "siblings": siblings}
            found = json.dumps(facts).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(found))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(found)

    do_HEAD = do_GET


@pytest.fixture
def hub():
    """Its address."""
    Hub.n_asked = 0
    with serving(Hub) as address:
        yield address


def said(folder: Path, hub: str, *, offline: bool = False) -> str:
    """What the data set is, in a process of its own: the client reads its address when it is
    imported.
    """
    env = {
        **os.environ,
        "HF_ENDPOINT": hub,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": str(int(offline)),
    }
    env["HF_DATASETS_OFFLINE"] = str(int(offline))
    command = [sys.executable, "-c", READ, str(folder / "cache")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def rows_with(n_bytes: int) -> bytes:
    """Twenty rows, one of so many bytes."""
    rows = [{"prompt": str(i), "completion": "b" * (n_bytes if i == 3 else 5)} for i in range(20)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_looked_over_before_datasets_unfolds_it(tmp_path, hub):
    Hub.files = {"train.jsonl": rows_with(11_000_000)}
    assert said(tmp_path, hub).startswith(
        "someone/rows/train.jsonl: a row of 10.5 MiB; the limit is 9.5 MiB"
    )


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_the_same_again_and_without_the_network(tmp_path, hub):
    Hub.files = {"train.jsonl": rows_with(5)}
    first = said(tmp_path, hub)
    assert first.startswith("20 ")
    assert said(tmp_path, hub) == first
    n_asked = Hub.n_asked
    assert said(tmp_path, hub, offline=True) == first
    assert Hub.n_asked == n_asked
