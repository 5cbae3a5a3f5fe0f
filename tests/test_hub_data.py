"""Data sets of the Hub, read by the real client from a local server that answers as the Hub does."""  # noqa: E501

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command import in_python
from web import serving

REVISION = "a" * 40
READ = """
import sys
from pathlib import Path
from farthing.data.read import open_sources
from farthing.errors import DataError
try:
    source = open_sources(("someone/rows",), cache_dir=Path(sys.argv[1]), split="train")[0]
    print(sum(1 for _ in source.rows()), source.sha256)
except DataError as error:
    print(error)
"""


@pytest.fixture
def hub():
    """A Hub with one data set, someone/rows, of these `files`."""
    hub = SimpleNamespace(files={}, n_asked=0)

    def answer(request, _):
        hub.n_asked += 1
        path = request.path.split("?")[0]
        etags = {name: hashlib.sha1(data).hexdigest() for name, data in hub.files.items()}
        name = path.partition("/resolve/")[2].partition("/")[2]
        if name in hub.files:
            headers = {"ETag": json.dumps(etags[name]), "X-Repo-Commit": REVISION}
            return 200, hub.files[name], headers
        if name or path.endswith("/data"):
            return 404, b"{}", {"X-Error-Code": "EntryNotFound"}
        found: Any = [
            {"type": "file", "path": name, "size": len(data), "oid": etags[name]}
            for name, data in hub.files.items()
        ]
        if "/tree/" not in path:
            siblings = [{"rfilename": name} for name in hub.files]
            found = {"id": "someone/rows", "sha": REVISION, "siblings": siblings}
        return 200, json.dumps(found)

    with serving(answer, "HTTP/1.1") as hub.address:
        yield hub


def said(folder: Path, hub, *, offline: bool = False) -> str:
    """What the data set is, in a process of its own: the client reads its address when it is
    imported.
    """
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": str(int(offline)),
    }
    env["HF_DATASETS_OFFLINE"] = str(int(offline))
    done = in_python(READ, str(folder / "cache"), env=env, timeout=120, check=True)
    return done.stdout.strip()


def rows_with(n_bytes: int) -> bytes:
    """Twenty rows, one of so many bytes."""
    rows = [{"prompt": str(i), "completion": "b" * (n_bytes if i == 3 else 5)} for i in range(20)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_looked_over_before_datasets_unfolds_it(tmp_path, hub):
    hub.files = {"train.jsonl": rows_with(11_000_000)}
    assert said(tmp_path, hub).startswith(
        "someone/rows/train.jsonl: a row of 10.5 MiB; the limit is 9.5 MiB"
    )


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_the_same_again_and_without_the_network(tmp_path, hub):
    hub.files = {"train.jsonl": rows_with(5)}
    first = said(tmp_path, hub)
    assert first.startswith("20 ")
    assert said(tmp_path, hub) == first
    n_asked = hub.n_asked
    assert said(tmp_path, hub, offline=True) == first
    assert hub.n_asked == n_asked
