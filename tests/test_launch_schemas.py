"""What is written for a target, judged by that target's own validator, in an environment of its
own.

`make launch-tools` makes the environments (kubernetes-validate and Vertex's protos; 500 MB for
SkyPilot). Without them these tests skip and say so. FARTHING_LAUNCH_TOOLS and FARTHING_SKY name
other places; FARTHING_RUNPOD_OPENAPI RunPod's own description of its REST API
(github.com/runpod/docs, api-reference-v2/openapi.json).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launch_matrix import cases, outcome_of, validated

ROOT = Path(__file__).resolve().parents[1]


def python_of(variable: str, folder: str) -> Path:
    """The interpreter of an environment; skips where there is none."""
    python = Path(os.environ.get(variable) or ROOT / ".venv" / folder) / "bin" / "python"
    if not python.exists():
        pytest.skip(
            f"{python} is not there: `make launch-tools` makes it, or name an environment in"
            f" {variable}"
        )
    return python


def rows_of(*targets: str) -> list[dict[str, object]]:
    """Outcomes of some offers on targets, of each at least one that is right."""
    rows = [outcome_of(target, offer) for target, offer in cases(every=40) if target in targets]
    assert {row["target"] for row in rows if row["state"] == "ok"} == set(targets)
    return rows


def test_kubernetes_and_vertex_take_the_files():
    python, rows = python_of("FARTHING_LAUNCH_TOOLS", "launch"), rows_of("kubernetes", "vertex")
    assert validated(rows, python, ("kubernetes", "vertex")) == []


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        ("kubernetes", "backoffLimit", "backofLimit"),
        ("kubernetes", "activeDeadlineSeconds: ", "activeDeadlineSeconds: x"),
        ("vertex", '"containerSpec"', '"containerspec"'),
        ("vertex", '"STANDARD"', '"CHEAP"'),
    ],
)
def test_and_would_have_found_a_mistake(target, old, new):
    python, rows = python_of("FARTHING_LAUNCH_TOOLS", "launch"), rows_of(target)
    good: Any = next(row for row in rows if row["state"] == "ok" and old in str(row["files"]))
    good["files"] = {name: text.replace(old, new) for name, text in good["files"].items()}
    assert len(validated([good], python, (target,))) == 1


def test_skypilot_takes_the_files_and_would_have_found_a_mistake():
    python, rows = python_of("FARTHING_SKY", "sky"), rows_of("skypilot")
    assert validated(rows, python, ("skypilot",)) == []
    good: Any = next(row for row in rows if row["state"] == "ok")
    good["files"] = {
        name: text.replace("job_recovery", "job_recovry") for name, text in good["files"].items()
    }
    assert len(validated([good], python, ("skypilot",))) == 1


def test_runpod_s_rest_api_is_used_as_it_is_described():
    name = os.environ.get("FARTHING_RUNPOD_OPENAPI")
    if not name:
        pytest.skip(
            "FARTHING_RUNPOD_OPENAPI names no file: it is api-reference-v2/openapi.json of"
            " github.com/runpod/docs"
        )
    described = json.loads(Path(name).read_text())
    paths, schemas = described["paths"], described["components"]["schemas"]
    assert described["servers"][0]["url"] == "https://api.runpod.io"
    assert "get" in paths["/v2/pods"]
    assert "delete" in paths["/v2/pods/{id}"]
    assert schemas["ListPodsResponse"]["required"] == ["pods"]
    assert {"id", "name", "status"} <= set(schemas["Pod"]["allOf"][1]["required"])
    assert {"EXITED", "ERROR", "TERMINATED"} < set(schemas["PodStatus"]["enum"])
    request = json.dumps(schemas["CreatePodRequest"]).lower()
    assert "terminate" not in request, (
        "it has an end now: pods need not be made by GraphQL any more"
    )
    assert "interrupt" not in request, "it has spot now"
