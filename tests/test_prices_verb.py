"""`farthing prices` as a person and a program meet it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

from farthing import cli, clock
from farthing.prices import feeds as price_feeds
from farthing.prices.catalog import cache_path
from farthing.prices.feeds import Feed

GPUHUNT = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags"  # noqa: E501


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("GPUHUNT_CATALOG_DIR", "GPUHUNT_CATALOG_URL"):
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["prices", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    code, out, _ = run(capsys, *argv, "--json")
    assert code == 0
    return json.loads(out)


def test_the_table_fits_80_columns_and_says_age_and_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys, "--gpu", "rtx 4090")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    table = lines[
        : next(i for i, line in enumerate(lines) if line.startswith("and ") or "prices of" in line)
    ]
    assert len(table) == 21, "a header and 20 rows"
    assert max(map(len, table)) <= 80
    for word in ("GPUs", "provider", "where", "kind", "an hour", "per GPU", "age"):
        assert word in table[0]
    assert all("RTX 4090" in line for line in table[1:])
    assert "prices of" in out
    assert "days old" in out
    assert "read from: " in out
    assert "2026-09-20" in out


def test_no_table_is_wider_than_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--limit", "0")
    lines = [line for line in out.splitlines() if line.rstrip().endswith(" d")]
    assert len(lines) > 400
    assert max(map(len, lines)) <= 80
    for line in lines:
        cut = [word for word in line.split() if word.endswith("…")]
        assert len(cut) <= 2, "only who and where may be cut"
        assert "…" not in line[:20] or "…" not in line.split("  ")[0], line
        assert " demand " in line or " spot " in line, line


def test_sorting_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    by_hour = [
        offer["usd_per_hour"]
        for offer in run_json(capsys, "--sort", "usd", "--limit", "30")["offers"]
    ]
    assert len(by_hour) == 30
    assert by_hour == sorted(by_hour)
    by_age = [offer["age_days"] for offer in run_json(capsys, "--sort", "age")["offers"]]
    assert by_age == sorted(by_age)
    everything = run_json(capsys)
    assert len(everything["offers"]) == everything["n_found"] > 400, "a program gets all of them"
    assert (
        everything["age_days"]["oldest"]
        >= everything["age_days"]["median"]
        >= everything["age_days"]["newest"]
    )
    assert isinstance(everything["is_stale"], bool)


def test_managed_training_is_shown_by_what_is_paid_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    header = "provider,instance,gpu,n_gpus,region,zone,kind,unit,usd,vcpus,ram_gib,source,date"
    row = "Together,LoRA up to 16B,,0,any,,on-demand,million_tokens,0.48,,,made,2026-05-08"
    path.write_text(f"{header}\n{row}\n", encoding="utf-8")
    _, out, _ = run(capsys, "--prices", str(path))
    line = next(line for line in out.splitlines() if "LoRA up to 16B" in line)
    assert "$0.48" in line
    assert "/M tokens" in line


def test_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("provider,gpu,n_gpus,usd\nLab,T4,1,0.2\n", encoding="utf-8")
    _, out, _ = run(capsys, "--prices", str(path))
    assert "Lab" in out
    assert "1 price of 1 provider" in out
    path.write_text("provider,gpu,n_gpus,usd\nLab,T5,1,0.2\n", encoding="utf-8")
    code, _, err = run(capsys, "--prices", str(path))
    assert code == 2
    assert f"{path}:2: gpu: no GPU `T5` is known" in err
    assert "did you mean" in err


def test_markup_in_a_file_is_only_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "provider,instance,gpu,n_gpus,usd,source\n[red]x,[/],T4,1,0.2,[link=http://x]y\n",
        encoding="utf-8",
    )
    _, out, _ = run(capsys, "--prices", str(path))
    assert "[red]x" in out
    assert "[link=http://x]y" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--gpu", "h1000"), "did you mean `H100"),
        (("--provider", "runpd"), "did you mean `RunPod`?"),
        (("--region", "the-moon"), "no offer matches"),
        (("--limit", "-1"), "-1 rows can't be shown"),
        (("--prices", "none.csv"), "none.csv: no such file"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert words in err
    assert "to do: " in err
    code, out, _ = run(capsys, *argv, "--json")
    assert code == 2
    assert json.loads(out)["exit_code"] == 2


# ---- update ----


def feeds_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One feed that is a file of this test, one that no server answers."""
    (tmp_path / "gcp.csv").write_text(
        f"{GPUHUNT}\nbox,us-central1,0.5,4,16,1,T4,16,False,,nvidia,\n", encoding="utf-8"
    )
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    here = (
        Feed("GCP", "gpuhunt", "https://example.org/v3/gcp"),
        Feed("Azure", "gpuhunt", "https://example.org/v3/azure"),
        Feed("Lium", "gpuhunt-live", "no_such_library:Provider"),
    )
    monkeypatch.setattr(price_feeds, "known_feeds", lambda: here)


def test_update_names_what_is_new_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feeds_here(tmp_path, monkeypatch)
    code, out, err = run(capsys, "update")
    assert (code, err) == (0, "")
    assert "refreshed 1 provider: GCP" in out
    assert "no answer Azure (gpuhunt): " in out
    assert "not asked" in out
    assert "Lium" in out
    assert str(cache_path()) in out.replace("\n", "")
    found = run_json(capsys, "--provider", "gcp")
    assert [offer["instance"] for offer in found["offers"]] == ["box"]
    assert found["offers"][0]["date"] == os.environ["FARTHING_TODAY"]
    assert str(cache_path()) in found["where"]


def test_update_for_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feeds_here(tmp_path, monkeypatch)
    result = run_json(capsys, "update")
    assert result["refreshed"] == ["GCP"]
    assert [
        (feed["provider"], feed["n_offers"], feed["was_asked"]) for feed in result["feeds"]
    ] == [
        ("GCP", 1, True),
        ("Azure", 0, True),
        ("Lium", 0, False),
    ]


def test_update_without_a_network_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = (Feed("AWS", "skypilot", "http://127.0.0.1:9/vms.csv"),)
    monkeypatch.setattr(price_feeds, "known_feeds", lambda: closed)
    code, out, err = run(capsys, "update")
    assert (code, out) == (2, "")
    assert "Errno" not in err
    assert "none of the 1 price feed answered; the prices stay as they are" in err
    assert not cache_path().exists()
    code, out, _ = run(capsys, "update", "--json")
    assert code == 2
    assert json.loads(out)["exit_code"] == 2


# ---- quick ----


def test_prices_come_without_torch() -> None:
    code = (
        "import sys\nfrom farthing import cli\ncli.main(['prices', '--limit', '3'])\nheavy ="
        " {'torch', 'transformers', 'numpy', 'pydantic', 'httpx'} &"
        " set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    assert "prices of" in done.stdout


def test_the_day_can_be_said_and_the_time_of_day_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages of prices are counted from it: what tests make up does not grow old."""
    monkeypatch.setenv("FARTHING_TODAY", "2031-05-06")
    before, said, after = datetime.now().astimezone(), clock.now(), datetime.now().astimezone()
    assert said.date() == clock.today() == date(2031, 5, 6)
    assert before.time() <= said.time() <= after.time() or after.time() < before.time()
    monkeypatch.delenv("FARTHING_TODAY")
    assert before <= clock.now() <= datetime.now().astimezone()
