"""A small server that speaks what `huggingface_hub` asks of the Hub to make a repository and put
files there.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from web import serving


@dataclass
class Repository:
    """A repository of a model: its files by name, and its commits."""

    is_private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=lambda: ["0" * 40])


@dataclass
class Hub:
    """What the server holds; `fails_at` names a part of a path that is answered with 500."""

    token: str = "hf_secret"
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    fails_at: str = ""
    address: str = ""


def _answer(hub: Hub, method: str, path: str, body: bytes) -> tuple[int, Any]:
    parts = path.strip("/").split("/")
    if path == "/api/repos/create":
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in hub.repositories:
            return 409, {"url": f"{hub.address}/{name}"}
        hub.repositories[name] = Repository(asked["visibility"] == "private")
        return 200, {"url": f"{hub.address}/{name}"}
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    if parts[0] == "blobs" and method == "PUT":
        hub.blobs[parts[1]] = body
        return 200, {}
    if path.endswith(".git/info/lfs/objects/batch"):
        objects = []
        for one in json.loads(body)["objects"]:
            actions = {"upload": {"href": f"{hub.address}/blobs/{one['oid']}"}}
            objects.append({**one, **({} if one["oid"] in hub.blobs else {"actions": actions})})
        return 200, {"transfer": "basic", "objects": objects}
    repository = hub.repositories["/".join(parts[2:4])]
    if "preupload" in parts:
        return 200, {
            "files": [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
        }
    if "tree" in parts:
        row = {"type": "file", "oid": "", "size": 0}
        return 200, [{**row, "path": name} for name in repository.files]
    if "commit" in parts:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del repository.files[value["path"]]
        commit = hashlib.sha1(repr(sorted(repository.files.items())).encode()).hexdigest()
        repository.commits.append(commit)
        url = f"{hub.address}/{'/'.join(parts[2:4])}/commit/{commit}"
        return 200, {"commitOid": commit, "commitUrl": url, "pullRequestUrl": None}
    return 200, {
        "id": "/".join(parts[2:4]),
        "private": repository.is_private,
        "sha": repository.commits[-1],
        "siblings": [{"rfilename": name} for name in repository.files],
        "tags": [],
    }


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A server on this machine for the block."""
    hub = Hub()

    def answer(request, body):
        path = request.path.split("?")[0]
        hub.asked.append(f"{request.command} {path}")
        is_known = request.headers.get("Authorization") == f"Bearer {hub.token}"
        if hub.fails_at and hub.fails_at in path:
            status, value = 400, {"error": "out of order"}
        elif not path.startswith("/blobs/") and not is_known:
            status, value = 401, {"error": "no such token"}
        else:
            status, value = _answer(hub, request.command, path, body)
        return status, json.dumps(value), {"Content-Type": "application/json"}

    with serving(answer, "HTTP/1.1") as hub.address:
        yield hub
