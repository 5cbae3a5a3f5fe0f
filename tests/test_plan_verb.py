"""`farthing plan` as a person and a program meet it."""

import html
import json
import re
import stat
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from command import Cli, in_python, sets
from farthing.config.load import load_job
from farthing.local.machine import Cpu, LocalMachine
from farthing.planner import inputs as study
from farthing.report.plan_words import span
from farthing.tiny import demo_rows, write_jsonl
from farthing.units import said_apart, say_usd

MACHINE = LocalMachine(
    "cpu", "Old CPU", 0, 8 << 30, 2, Cpu("Old CPU", 2, 2.0, frozenset({"avx2", "fma"}))
)
EIGHT = ("--set", "model.model_name_or_path=meta-llama/Llama-3.1-8B", "--mean-tokens", "400")
BIG = (*EIGHT, "--examples", "10000")
L4 = ("--gpu", "L4")
HEAD = "provider,instance,gpu,n_gpus,region,zone,kind,unit,usd,source,date\n"


ANSWERED = {}
"""What was asked before in this process: most tests look at the same answer in another way."""


@pytest.fixture(autouse=True)
def _as_everywhere(tmp_path, monkeypatch):
    def study_once(job, asked, *, now):
        if asked.prices is not None:  # a file that each test writes anew
            return study_job(job, asked, now=now)
        question = repr((job, asked, now.date(), study.local_machine())).replace(str(tmp_path), "")
        if question not in ANSWERED:
            ANSWERED[question] = study_job(job, asked, now=now)
        return ANSWERED[question]

    study_job = study.study_job
    monkeypatch.setattr(study, "study_job", study_once)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(study, "local_machine", lambda: MACHINE)


@pytest.fixture
def job(tmp_path, tiny_folders):
    """A small job: the data is here, the model is a folder."""
    write_jsonl(tmp_path / "rows.jsonl", demo_rows(200))
    path = tmp_path / "job.yaml"
    values = {
        "task": "causal-lm",
        "model": str(tiny_folders["llama"]),
        "data": "rows.jsonl",
        "method": "lora",
        "output_dir": "./run",
        "cache_dir": "./cache",
    }
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_a_family_without_a_table_is_planned_and_said_to_be(plan, tmp_path):
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 500}
    (tmp_path / "bart").mkdir()
    config = json.dumps({"model_type": "bart", **sizes})
    (tmp_path / "bart" / "config.json").write_text(config)
    asked = "--set", f"model={tmp_path / 'bart'}", "--set", "task=seq2seq", "--gpu", "L4"
    found = plan.json(*asked, "--examples", "500", "--mean-tokens", "60")
    assert found["best"]["gpu"] == "L4"
    assert any("bart: sizes are exact" in note for note in found["notes"])


class Plan(Cli):
    """`farthing plan` of the small job."""

    def __init__(self, job, capsys):
        super().__init__(capsys)
        self.job = job

    def __call__(self, *argv, code=0):
        return super().__call__("plan", self.job, *argv, code=code)

    def json(self, *argv, code=0):
        return super().json(*argv, "--all", code=code)

    def words(self, *argv):
        return " ".join(self.out(*argv).split())


@pytest.fixture
def plan(job, capsys):
    return Plan(job, capsys)


def under_the_head(out: str) -> list[str]:
    """The rows of the one table of choices, and what follows it."""
    lines = out.splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.split()[:3] == ["#", "machine", "at"])
    return lines[head + 1 :]


def ranks_of(rows: list[str]) -> list[str]:
    return [line.split()[0].rstrip("*") for line in rows]


def test_the_short_answer_is_fifteen_lines_and_none_is_broken(plan):
    out = plan.out(*BIG)
    lines = [line for line in out.splitlines() if line.strip()]
    assert len(lines) <= 16
    assert max(len(line) for line in lines if not line.startswith("next")) <= 80
    best = plan.json(*BIG)["best"]["name"]
    assert re.match(rf"Rent {re.escape(best)}: \$.*\(", lines[0])
    assert re.match(r"\d.* \(.* to .*\).*; \d.* of .* GiB$", lines[1]), (
        "time with its range, and the memory"
    )
    *table, order, rest = under_the_head(out)[:7]
    assert ranks_of(table) == ["1", "2", "3", "4", "5"]
    assert re.match(r"By dollars, within 5% or a cent by time.*Ranges: 4 of 5 runs\.$", order)
    assert rest.endswith("refused: --all")
    words = " ".join(out.split())
    assert "supposed 10,000 examples of 400 tokens" in words
    assert "check the lengths of your examples" in words
    # whose offer is first, and so how it is rented, depends on how old the prices are
    assert re.search(r"next (rent it at .* where\.usd_per_hour=|farthing launch )", words)


def test_the_head_has_an_output_for_each_class_of_the_data(job):
    rows = [{"text": f"text {n}", "label": f"class {n % 214}"} for n in range(428)]
    write_jsonl(Path(job).parent / "rows.jsonl", rows)
    asked, shapes = study.PlanOptions(gpu=("T4",), is_local=False), []
    for label_map in ({}, {f"class {n}": "other" for n in range(2, 214)}):
        sets = "task=classification", f"data.label_map={json.dumps(label_map)}"
        now = datetime(2026, 11, 22).astimezone()
        shapes.append(study.study_job(load_job(job, sets), asked, now=now).wanted.shape)
    many, three = (shape.n_parameters for shape in shapes)
    assert many - three == (214 - 3) * shapes[0].hidden


@pytest.mark.parametrize("day", ["2026-11-22", "2031-01-01"])
def test_rows_say_how_old_their_prices_are_and_old_ones_name_the_refresh(day, plan, monkeypatch):
    monkeypatch.setenv("FARTHING_TODAY", day)
    out = plan.out(*BIG)
    ages = [row["price_age_days"] for row in plan.json(*BIG)["plans"][:5]]
    for age, line in zip(ages, under_the_head(out)[:5], strict=True):
        shown = f"{age}d" if age < 730 else f"{age // 365}y"
        assert (shown in line) is (age >= 30)
    assert ("farthing prices update" in out) is (max(ages) > 90)


def prices_of(folder: Path, gpu: str, unit: str, usd: float, n_gpus: int = 1):
    """Options that name a file with one price."""
    row = f"Colab,x,{gpu},{n_gpus},any,,on-demand,{unit},{usd},made up,2026-11-01\n"
    (folder / "prices.csv").write_text(HEAD + row)
    return "--prices", str(folder / "prices.csv")


def test_a_row_says_how_long_spot_waits(plan):
    spot = plan.json(*BIG, *L4, "--offers", "spot")["best"]["spot"]
    out = plan.out(*BIG, *L4, "--offers", "spot")
    assert "wait" in next(line for line in out.splitlines() if line.startswith(" # ")).split()
    assert spot["waiting_s"] > 60
    assert f"{spot['waiting_s'] / 60:.0f} min of it waiting" in out or "h of it waiting" in out
    assert "no machine that farthing can train on" not in " ".join(out.split())


def test_a_row_says_what_has_to_be_bought(plan, tmp_path):
    prices = prices_of(tmp_path, "A100-80GB", "gb_hour", 0.01)
    assert "buy $9.99" in plan.out(*prices, "--examples", "10", "--mean-tokens", "40")
    said = "check     the price: you have to buy $9.99; the run uses $"
    assert said in plan.out(*prices)


def test_what_is_asked_for_is_shown_without_all(plan):
    words = plan.words(*BIG, "--runs", "12", "--paid", "33", "--samples-per-min", "300", "--serve")
    for part in (
        "12 runs: ",
        "you paid $33.00: here it is $",
        "By your own figures",
        "Serving: 1,000 requests a day",
    ):
        assert part in words, part
    assert "Assumptions" not in words


@pytest.mark.parametrize(
    ("low_s", "high_s", "words"),
    [
        (11, 43, "11-43 s"),
        (27, 27, "27 s"),
        (168, 336, "2.8-5.6 min"),
        (1300, 7000, "22-117 min"),
        (4680, 45000, "1.3-12 h"),
        (80000, 648000, "0.9-7.5 d"),
    ],
)
def test_a_range_of_time_has_one_unit_and_no_more_digits_than_it_deserves(low_s, high_s, words):
    assert span(low_s, high_s) == words


def test_all_of_a_plan_has_ten_rows_and_what_was_supposed(plan):
    out = plan.out(*BIG, "--all")
    assert ranks_of(under_the_head(out)[:10]) == [str(rank) for rank in range(1, 11)]
    words = " ".join(out.split())
    for part in (
        "more choices (--limit N)",
        "two cheap or one dear: ",
        "this machine (Old CPU): needs",
        "spot or not: ",
        "Why not the other",
        "try method: qlora",
        "Prices: ",
        "days old",
        "Confidence: ",
        "Assumptions: a rented machine boots in",
        "given on the command line: 10,000 examples of 400 tokens",
    ):
        assert part in words, part


def test_no_line_is_wider_than_a_narrow_terminal(plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    own = ("--own", "RTX 4090:1600usd:0.45kW", "--runs-per-month", "5", "--serve")
    for more in (
        ("--limit", "0", "--all", *own),
        ("--explain",),
        ("--compare", "H100", "2x RTX 4090"),
    ):
        out = plan.out(*BIG, "--provider", "RunPod", *more)
        lines = [line for line in out.splitlines() if not line.startswith("next")]
        assert max(map(len, lines)) <= 60


def test_a_program_gets_everything(plan):
    found = plan.json(*BIG)
    assert found["kind"] == "farthing plan"
    assert len(found["plans"]) == found["n_choices"] > 200
    short = plan.out(*BIG, "--json")
    assert len(short) <= 150_000
    assert json.loads(short)["n_choices"] == found["n_choices"]
    few = plan.json(*BIG, "--limit", "7")
    assert [row["rank"] for row in few["plans"]] == list(range(1, 8))
    assert few["best"] == found["best"]
    assert few["n_choices"] == found["n_choices"]


def test_wishes_narrow_the_offers(plan):
    found = plan.json(*BIG, "--gpu", "h100", "--gpu", "l40s", "--offers", "spot", "--max-gpus", "1")
    rows = [(row["gpu"], row["kind"], row["n_gpus"]) for row in found["plans"]]
    assert set(rows) == {("H100-80GB", "spot", 1), ("L40S", "spot", 1)}
    late = plan.json(*BIG, "--gpu", "h100", "--deadline", "90min", "--budget", "$2")
    assert all(row["hours"] <= 1.5 and row["total_usd"] <= 2 for row in late["plans"])
    assert late["job"]["limits"]["max_usd"] == 2


def test_components_are_explained(plan):
    best = plan.json(*BIG)["best"]
    out = plan.out(*BIG, "--explain")
    assert f"Plan {best['rank']}: {best['name']}" in out
    parts = "Memory of one GPU, One step, The whole run, Dollars, weights, matmul, training, █"
    assert [part for part in parts.split(", ") if part not in out] == []
    out = plan.out(*BIG, "--explain", "h100 spot")
    assert re.search(r"Plan \d+: .*x H100-", out)
    assert "expected interruptions" in out
    assert re.search(r"checkpoints +every ", out)


def test_a_service_is_compared_beside_everything_else_and_page_and_text_agree(plan, tmp_path):
    page = tmp_path / "plan.html"
    own = ("--own", "RTX 4090:1600usd:0.45kW", "--own", "T4:300usd", "--runs-per-month", "24")
    more = (*own, "--html", str(page), "--explain", "1")
    words = plan.words(*BIG, "--compare", "1", "Together", *more)
    shown = html.unescape(" ".join(re.sub(r"<[^>]+>", " ", page.read_text()).split()))
    assert re.search(r"Together, LoRA up to 16B = \$[\d.]+: \d+ % more", words)
    for part in (
        "dollar range",
        "tokens/s",
        "the adapter",
        "Own 1x RTX 4090: $0.",
        "bought for $1,600 it pays for itself after ",
        "Own 1x T4: needs ",
        "24 runs a month",
        "Plan 1: ",
    ):
        assert part in words, part
    comparison = re.match(r".*?(?:more|less|the same)", words)
    services = "Services that fine-tune for you"
    for part in (comparison[0], "dollar range", "saved in a year", services):
        assert part in shown, part
    err = plan.err(*BIG, "--explain", "OpenAI")
    assert "no plan is called `OpenAI`" in err, "a service is made of nothing but its fee"


# ---- the page ----


def test_a_page_is_written_whole(plan, tmp_path):
    page = tmp_path / "plan.html"
    page.write_text("old")
    assert f"wrote {page}" in plan.out(*BIG, "--html", page)
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert plan.json(*BIG)["best"]["name"] in text
    assert stat.S_IMODE(page.stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.glob("*plan.html*")] == ["plan.html"], "no draft is left"
    assert plan.json(*BIG, "--html", page)["kind"] == "farthing plan"


@pytest.mark.parametrize(
    ("where", "words"), [(".", "is a folder"), ("none/plan.html", "no such folder")]
)
def test_a_page_that_can_not_be_written(plan, tmp_path, where, words):
    out, err = plan(*BIG, "--html", tmp_path / where, code=2)
    assert out == ""
    assert words in err
    assert "to do: " in err


# ---- mistakes ----


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--budget", "much"), "--budget: 'much' is not an amount of dollars"),
        (("--deadline", "soon"), "--deadline: 'soon' is neither a date nor a duration"),
        (("--deadline", "2020-01-01"), "--deadline: 2020-01-01 is in the past"),
        (("--own", "RTX 4090:cheap"), "own: RTX 4090:cheap"),
        (("--runs-per-month", "nan"), "--runs-per-month"),
        (("--explain", "9999"), "there is no plan 9999"),
        (("--compare", "H100", "the moon"), "no plan is called `the moon`"),
        (("--compare", "H100", "1x A4000"), "`1x A4000` was rejected: needs "),
        (("--spot-discount", "50%"), "need a throughput"),
        (("--samples-per-min", "0"), "--samples-per-min"),
        (("--samples-per-min", "5", "--tokens-per-s", "5"), "one throughput is enough"),
        (("--interrupted-every", "soon", "--samples-per-min", "5"), "--interrupted-every"),
        (("--step-time", "200", "130"), "'200' has no unit: write it as"),
    ],
)
def test_mistakes_are_named(plan, argv, words):
    err = plan.err(*BIG, *argv)
    assert words in err
    assert "Traceback" not in err
    if argv[0] != "--explain":
        assert plan.json(*BIG, *argv, code=2)["exit_code"] == 2


def test_an_impossible_job_names_the_three_nearest_ways(plan):
    out, err = plan(*BIG, "--budget", "0.01", code=2)
    assert out.startswith("Nothing can do this job as it is")
    assert "the nearest ways:" in err
    ways = err.splitlines()[2:]
    assert [line.split(".")[0].strip() for line in ways] == ["1", "2", "3"]
    assert not [way for way in ways if "K80" in way or "V100" in way], "no torch runs on them"
    found = plan.json(*BIG, "--budget", "0.01", code=2)
    assert (found["exit_code"], found["plans"], len(found["nearest"])) == (2, [], 3)
    assert found["error"] in err


def test_markup_in_names_is_only_text(tmp_path, tiny_folders, plan):
    (tmp_path / "[red]m[").symlink_to(tiny_folders["llama"])
    prices = tmp_path / "mine.csv"
    rows = "provider,instance,gpu,n_gpus,usd,source\n[red]x[/],[/],T4,1,0.2,[link=http://x]y\n"
    prices.write_text(rows)
    argv = ("--set", f"model.model_name_or_path={tmp_path}/[red]m[", "--prices", str(prices))
    for more in ((), ("--explain", "2"), ("--compare", "1", "2")):
        assert "[red]x[/]" in plan.out(*argv, *more)
    assert "[red]m[" in plan.out(*argv).replace("\n", "")


# ---- quick ----


def test_a_plan_comes_without_torch(job):
    code = (
        "import sys\nfrom farthing import cli\n"
        f"assert cli.main(['plan', {job!r}, *{[*BIG, *L4]!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'datasets', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = in_python(code)
    assert done.returncode == 0, done.stderr
    assert "supposed" in done.stdout


# ---- figures of one's own ----

SMALL = ("--mean-tokens", "300", "--provider", "OpenRelay")


def by_hand(plan: Plan, n: int, n_epochs: int, *argv: str):
    epochs = sets(f"train.num_train_epochs={n_epochs}", "train.save_minutes=5")
    return plan.json(*SMALL, "--examples", str(n), *epochs, *argv)["by_hand"]


def test_a_throughput_that_no_gpu_reaches_is_told_apart_from_one_that_is_likely(plan):
    ask = (*EIGHT[:2], "--examples", "100000", "--mean-tokens", "1024", "--gpu", "RTX 4090")
    found = plan.json(*ask, "--samples-per-min", "1100")["by_hand"]
    assert found["share_of_peak"] > 2
    assert found["words"][-1].endswith("of its peak FLOP/s, more than it has")
    assert "samples/min of 1,024 tokens there; 1,100 would take" in found["words"][-1]
    assert "share_of_peak" not in plan.json(*ask, "--samples-per-min", "130")["by_hand"]


def test_a_throughput_that_is_known_is_reckoned_with_by_hand(plan):
    spot = ("--spot-discount", "50%")
    found = by_hand(plan, 100_000, 3, "--samples-per-min", "1100", *spot, "--spot-overhead", "10%")
    assert (round(found["hours"], 2), round(found["price_hours"], 2)) == (4.55, 4.55)
    assert round(found["spot"]["price_hours"], 1) == 2.5
    assert round(found["spot"]["saved_share"], 2) == 0.45
    taken = (*spot, "--interrupted-every", "8h", "--restart", "3min")
    found = by_hand(plan, 200_000, 2, "--samples-per-min", "1200", *taken)
    assert round(found["hours"], 2) == 5.56
    assert found["spot"]["saved_share"] == pytest.approx(0.5, abs=0.02), "still about half"
    tokens = by_hand(plan, 200_000, 2, "--tokens-per-s", str(1200 * 300 / 60))
    assert tokens["hours"] == pytest.approx(found["hours"], rel=0.01)
    found = by_hand(plan, 72_000, 1, "--samples-per-min", "100", *taken)
    assert (found["hours"], found["n_interruptions"]) == (12.0, 1.5)
    assert 8 <= found["lost_s"] / 60 <= 10
    found = by_hand(plan, 1000, 1, "--step-time", "200ms", "130ms")
    assert (round(found["times_as_fast"], 2), round(found["saved_share"], 2)) == (1.54, 0.35)
    out = plan.out(*SMALL, "--examples", "1000", "--step-time", "200ms", "130ms")
    assert "1.54 x as fast, 35% fewer dollars" in out


def test_hours_that_are_paid_by_the_gigabyte(plan, tmp_path):
    """15 GB x 9 h are 135 units at $9.99 per 100: $13.49, and two packs to have them."""
    prices = prices_of(tmp_path, "T4", "gb_hour", 0.0999)
    known = ("--examples", "54000", "--mean-tokens", "300", "--samples-per-min", "100")
    found = plan.json(*known, *prices, "--set", "train.num_train_epochs=1")["by_hand"]
    assert (found["hours"], round(found["units"], 1), round(found["usd"], 2)) == (9.0, 135.0, 13.49)
    assert "15 GB x 9.00 h = 135.0 units" in found["words"][0]


@pytest.mark.parametrize(("n_gpus", "fits", "needed"), [(1, True, 83.3), (2, False, 166.7)])
def test_a_cap_on_gpu_hours_counts_every_gpu(plan, tmp_path, n_gpus, fits, needed):
    """25 h at 100 a minute: within 30 GPU-hours on one GPU, and not on two."""
    changes = ("limits.max_gpu_hours=30", "train.num_train_epochs=1", "where.gpus=all")
    known = "--samples-per-min", "100", "--mean-tokens", "20", "--examples", "150000"
    prices = prices_of(tmp_path, "T4", "machine_hour", 1, n_gpus)
    found = plan.json(*sets(*changes), *known, *prices)["by_hand"]
    assert (found["fits_the_cap"], round(found["needed_samples_per_min"], 1)) == (fits, needed)


# ---- words that say what they mean ----


def test_a_gpu_that_nobody_sells_is_named_and_no_option_that_was_not_given(plan):
    err = plan.err("--gpu", "MI325X")
    assert "no offer has gpu MI325X" in err
    assert "--prices FILE" in err
    assert "--provider" not in err
    err = plan.err("--gpu", "H100", "--provider", "Colab")
    assert "no offer has gpu H100, provider Colab" in err
    assert "--region" not in err


def test_examples_alone_are_as_long_as_those_that_are_here(plan):
    here, more, longer = (
        plan.json(*L4, *words)["job"]
        for words in ((), ("--examples", "5000"), ("--mean-tokens", "99"))
    )
    assert (here["n_examples"], here["n_epochs"], here["n_steps"]) == (200, 3, 3 * 13)
    assert more["n_examples"] == 5000
    assert more["mean_tokens"] == pytest.approx(here["mean_tokens"])
    assert more["longest_tokens"] == here["longest_tokens"]
    assert not more["lengths_are_exact"]
    assert (longer["n_examples"], round(longer["mean_tokens"])) == (here["n_examples"], 99)
    err = plan.err("--set", "data.train=gone.jsonl", "--examples", "5000")
    assert "give --mean-tokens too" in err


@pytest.mark.parametrize(
    ("value", "cap", "said"),
    [
        (5.004, 5.0, ("$5.004", "$5.000")),
        (6.0, 5.0, ("$6.00", "$5.00")),
        (2.0, 2.0, ("$2.00", "$2.00")),
    ],
)
def test_a_cap_and_what_passes_it_are_said_with_digits_that_tell_them_apart(value, cap, said):
    assert said_apart(value, cap, say_usd, "${}") == said


def test_a_machine_with_several_gpus_shows_each_way_to_use_them(plan, monkeypatch):
    gpus = {
        "kind": "cuda",
        "device_name": "NVIDIA GeForce RTX 4090",
        "n_gpus": 6,
        "memory_bytes": 24 << 30,
    }
    monkeypatch.setattr(study, "local_machine", lambda: replace(MACHINE, **gpus))

    def rows(*argv):
        found = plan.json(*BIG, "--gpu", "RTX 4090", *argv)
        return {row["n_gpus"]: row for row in found["plans"] if row["kind"] == "here"}

    every = rows("--set", "where.usd_per_hour=0.1")
    ways = {n: row["recipe"]["to_set"] for n, row in every.items()}
    assert sorted(ways) == [1, 2, 4, 6]
    assert (ways[1], ways[2], ways[6]) == ([], ["where.gpus: 2"], ["where.gpus: all"])
    assert every[6]["wall_s"] < every[2]["wall_s"] < every[1]["wall_s"]
    assert every[2]["name"] == "this machine (2x RTX 4090)"
    assert list(rows("--set", "where.gpus=2")) == [2]
    assert list(rows("--set", "where.gpus=all")) == [6]
    gpus["taken_bytes"] = 20 << 30
    assert rows() == {}, "others hold most of the memory"


def test_the_device_of_this_machine_says_nothing_of_other_places(plan):
    own = ("--own", "RTX 4090:1600usd:0.45kW")
    found = plan.json("--examples", "9", *L4, "--set", "where.device=cpu", *own)
    assert {row["kind"] for row in found["plans"]} > {"here", "own"}
    assert any("where.device: cpu is of this machine" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ((), "fp32, because it was trained in bf16"),
        (("--set", "train.fp16=true"), "fp16 was asked for, but"),
    ],
)
def test_what_is_to_be_known_of_the_precision_is_in_the_short_answer(plan, more, words):
    model = ("--set", "model.model_name_or_path=Qwen/Qwen2.5-0.5B", "--gpu", "T4")
    assert words in plan.words(*BIG[2:], *model, *more)
