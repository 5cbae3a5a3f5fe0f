"""What is written for a target, judged by that target's own validator, in an environment of its
own.

`make launch-tools` makes the environments (kubernetes-validate and Vertex's protos; 500 MB for
SkyPilot). Without them these tests skip and say so. FARTHING_LAUNCH_TOOLS and FARTHING_SKY name
other places.
"""

import os
from pathlib import Path

import pytest

from launch_matrix import cases, outcome_of, validated

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("target", "variable", "folder", "old", "new"),
    [
        ("kubernetes", "FARTHING_LAUNCH_TOOLS", "launch", "backoffLimit", "backofLimit"),
        ("vertex", "FARTHING_LAUNCH_TOOLS", "launch", '"STANDARD"', '"CHEAP"'),
        ("skypilot", "FARTHING_SKY", "sky", "job_recovery", "job_recovry"),
    ],
)
def test_a_target_takes_its_files_and_would_have_found_a_mistake(
    target, variable, folder, old, new
):
    python = Path(os.environ.get(variable) or ROOT / ".venv" / folder) / "bin/python"
    if not python.exists():
        pytest.skip(f"{python} is not there: `make launch-tools`, or name an environment")
    rows = [outcome_of(name, offer) for name, offer in cases(every=40) if name == target]
    assert validated(rows, python, (target,)) == []
    good = next(row for row in rows if row["state"] == "ok" and old in str(row["files"]))
    files = {name: text.replace(old, new) for name, text in good["files"].items()}
    assert len(validated([good | {"files": files}], python, (target,))) == 1
