"""The package as strangers get it: built, checked, installed where nothing else is, and used."""

import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

import farthing

ROOT = Path(__file__).parent.parent


def run(*words: object, cwd: Path) -> str:
    """What a command prints; a failure with it when it fails."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_place_says_the_same_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == farthing.__version__
    assert farthing.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_image_takes_the_locked_versions_and_extras_that_exist():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    installs = [line for line in lines if line.startswith("RUN pip install")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert len(installs) == 2
    for line in installs:
        assert "-c constraints.txt" in line
        for named in re.findall(r"'\.\[(.*)\]'", line):
            assert set(named.split(",")) <= extras.keys()
    copied = " ".join(
        line.removeprefix("COPY ") for line in lines if line.startswith("COPY ")
    ).split()
    assert all((ROOT / name).exists() for name in copied if name not in ("./", "src"))


def test_types_are_shipped():
    assert (ROOT / "src/farthing/py.typed").exists()
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in text["tool"]["setuptools"]["package-data"]["farthing"]


@pytest.mark.slow
def test_a_wheel_is_built_checked_installed_alone_and_trains_the_demo(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", source, cwd=tmp_path)
    files = sorted((tmp_path / "dist").iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=tmp_path)
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty/bin/python"
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        source / "constraints.txt",
        files[0],
        cwd=tmp_path,
    )
    farthing_there = tmp_path / "empty/bin/farthing"
    assert farthing.__version__ in run(farthing_there, "--version", cwd=tmp_path)
    run(farthing_there, "init", "--demo", cwd=tmp_path)
    run(farthing_there, "train", "demo/job.yaml", cwd=tmp_path)
    told = run(
        python,
        "-c",
        "import farthing; p = farthing.plan('demo/job.yaml'); print(farthing.__version__,"
        " len(p.choices))",
        cwd=tmp_path,
    )
    assert told.startswith(farthing.__version__)
