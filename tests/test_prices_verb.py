"""`farthing prices` as a person and a program meet it."""

import os
from datetime import date, datetime
from pathlib import Path

import pytest

from farthing import clock
from farthing.prices import feeds as price_feeds
from farthing.prices.catalog import cache_path
from farthing.prices.feeds import Feed

GPUHUNT = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags"  # noqa: E501


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("GPUHUNT_CATALOG_DIR", "GPUHUNT_CATALOG_URL"):
        monkeypatch.delenv(name, raising=False)


def test_the_table_fits_80_columns_and_says_age_and_source(cli):
    out, err = cli("prices", "--gpu", "rtx 4090")
    assert err == ""
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


def test_sorting_and_limits(cli):
    by_hour = cli.json("prices", "--sort", "usd", "--limit", "30")["offers"]
    dollars = [offer["usd_per_hour"] for offer in by_hour]
    assert (len(dollars), dollars) == (30, sorted(dollars))
    everything = cli.json("prices")
    assert len(everything["offers"]) == everything["n_found"] > 400, "a program gets all of them"
    ages = everything["age_days"]
    assert ages["oldest"] >= ages["median"] >= ages["newest"]
    assert isinstance(everything["is_stale"], bool)


def test_managed_training_is_shown_by_what_is_paid_for(tmp_path, cli):
    path = tmp_path / "mine.csv"
    header = "provider,instance,gpu,n_gpus,region,zone,kind,unit,usd,vcpus,ram_gib,source,date"
    row = "Together,LoRA up to 16B,,0,any,,on-demand,million_tokens,0.48,,,made,2026-05-08"
    path.write_text(f"{header}\n{row}\n")
    out = cli.out("prices", "--prices", str(path))
    line = next(line for line in out.splitlines() if "LoRA up to 16B" in line)
    assert "$0.48" in line
    assert "/M tokens" in line
    assert "1 price of 1 provider" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [(("--gpu", "h1000"), "did you mean `H100"), (("--limit", "-1"), "--limit: -1 is too small")],
)
def test_mistakes_are_named(cli, argv, words):
    out, err = cli("prices", *argv, code=2)
    assert out == ""
    assert words in err
    assert "to do: " in err
    assert cli.json("prices", *argv, code=2)["exit_code"] == 2


# ---- update ----


def feeds_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One feed that is a file of this test, one that no server answers."""
    (tmp_path / "gcp.csv").write_text(
        f"{GPUHUNT}\nbox,us-central1,0.5,4,16,1,T4,16,False,,nvidia,\n"
    )
    monkeypatch.setenv("GPUHUNT_CATALOG_DIR", str(tmp_path))
    here = (
        Feed("GCP", "gpuhunt", "https://example.org/v3/gcp"),
        Feed("Azure", "gpuhunt", "https://example.org/v3/azure"),
        Feed("Lium", "gpuhunt-live", "no_such_library:Provider"),
    )
    monkeypatch.setattr(price_feeds, "known_feeds", lambda: here)


def test_update_names_what_is_new_and_what_failed(tmp_path, monkeypatch, cli):
    feeds_here(tmp_path, monkeypatch)
    out, err = cli("prices", "update")
    assert err == ""
    assert "refreshed 1 provider: GCP" in out
    assert "no answer Azure (gpuhunt): " in out
    assert "not asked" in out
    assert "Lium" in out
    assert str(cache_path()) in out.replace("\n", "")
    found = cli.json("prices", "--provider", "gcp")
    assert [offer["instance"] for offer in found["offers"]] == ["box"]
    assert found["offers"][0]["date"] == os.environ["FARTHING_TODAY"]
    assert str(cache_path()) in found["where"]


# ---- quick ----


def test_the_day_can_be_said_and_the_time_of_day_stays(monkeypatch):
    """Ages of prices are counted from it: what tests make up does not grow old."""
    monkeypatch.setenv("FARTHING_TODAY", "2031-05-06")
    before, said, after = datetime.now().astimezone(), clock.now(), datetime.now().astimezone()
    assert said.date() == clock.today() == date(2031, 5, 6)
    assert before.time() <= said.time() <= after.time() or after.time() < before.time()
    monkeypatch.delenv("FARTHING_TODAY")
    assert before <= clock.now() <= datetime.now().astimezone()
