"""What each choice saves, the other methods, and what a project comes to."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from farthing.data.lengths import from_arrays
from farthing.planner.alternatives import padded_as_it_comes
from workshop import job_file

COLUMNS = "provider,instance,gpu,n_gpus,region,zone,kind,unit,usd,source,date\n"
OFFERS = (
    "Cloud,a100,A100-80GB,1,x,,on-demand,machine_hour,2.0,made up,2026-11-01\n"
    "Cloud,4090,RTX 4090,1,x,,on-demand,machine_hour,0.5,made up,2026-11-01\n"
)


def plan_of(tmp_path: Path, *more: str, offers: str = OFFERS):
    prices = tmp_path / "prices.csv"
    prices.write_text(COLUMNS + offers)
    size = (
        "--set",
        "model.model_name_or_path=meta-llama/Llama-3.2-1B",
        "--examples",
        "20000",
        "--mean-tokens",
        "300",
    )
    return [
        "plan",
        str(job_file(tmp_path)),
        "--prices",
        str(prices),
        *size,
        "--set",
        "method.name=lora",
        "--all",
        *more,
    ]


def test_one_line_for_each_choice_from_the_plain_way_to_the_plan(tmp_path, cli):
    asked = plan_of(tmp_path)
    view, out = cli.json(*asked), " ".join(cli.out(*asked).split())
    rungs = view["savings"]["rungs"]
    assert [one["choice"] for one in rungs] == [
        "plain",
        "method",
        "precision",
        "packing",
        "checkpointing",
        "place",
    ]
    assert rungs[-1]["usd"] == view["best"]["total_usd"] == view["savings"]["usd"]
    usd = [one["usd"] for one in rungs]
    assert usd == sorted(usd, reverse=True), "no choice makes it dearer here"
    assert view["savings"]["saved_share"] == pytest.approx(1 - usd[-1] / usd[0])
    assert view["savings"]["saved_share"] > 0.6, "60 to 90 % and more against the plain way"
    assert "What each choice saves" in out
    for one in rungs:
        assert one["words"].split(":")[0] in out
    methods = {one["method"]: one for one in view["methods"]}
    assert methods.keys() == {"full", "lora", "qlora"}, "even where all fit"
    assert methods["lora"]["is_asked"]
    assert methods["full"]["usd"] > methods["lora"]["usd"] == view["best"]["total_usd"]
    assert f"By method: {view['methods'][0]['method']} $" in out


def test_a_model_whose_adapters_are_not_known_is_compared_without_them(tmp_path, cli):
    job, prices = job_file(tmp_path, "bert"), tmp_path / "prices.csv"
    prices.write_text(COLUMNS + OFFERS)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "embedding_size": 32,
    }
    AutoConfig.for_model("squeezebert", **sizes).save_pretrained(tmp_path / "base")
    methods = [one["method"] for one in cli.json("plan", str(job), "--prices", prices)["methods"]]
    assert "full" in methods
    assert not {"lora", "qlora"} & {*methods}


@pytest.mark.slow
def test_spot_is_a_choice_of_its_own(tmp_path, cli):
    spot = "Cloud,4090,RTX 4090,1,x,y,spot,machine_hour,0.1,made up,2026-11-01\n"
    view = cli.json(*plan_of(tmp_path, offers=OFFERS + spot))
    assert view["best"]["kind"] == "spot"
    place, last = view["savings"]["rungs"][-2:]
    assert (place["choice"], last["choice"]) == ("place", "spot")
    assert last["usd"] == view["best"]["total_usd"] < place["usd"]


def test_runs_add_up_and_the_saving_is_said(tmp_path, cli):
    managed = "Boss,one run,,1,x,,on-demand,run,250,made up,2026-11-01\n"
    asked = plan_of(tmp_path, "--runs", "5", "--runs-per-month", "2", offers=OFFERS + managed)
    view, out = cli.json(*asked), cli.out(*asked)
    runs = view["runs"]["usd"]
    assert runs["Boss, one run"] == 1250
    assert runs[view["best"]["name"]] == pytest.approx(5 * view["best"]["total_usd"])
    assert runs["the plain way"] == pytest.approx(5 * view["savings"]["plain_usd"])
    assert "5 runs:" in out
    saved = view["years"]["saved_in_a_year"]
    assert saved[f"rent {view['best']['name']}"]["usd"] == pytest.approx(
        24 * (250 - view["best"]["total_usd"])
    )
    assert "saved in a year" in out


def test_a_gpu_pays_back_against_a_service_by_the_month(tmp_path, cli):
    """$1,600 against $480 a month: 3.3 months."""
    managed = "Boss,one run,,1,x,,on-demand,run,20,made up,2026-11-01\n"
    own = ("--own", "RTX 4090:1600usd:0W", "--runs-per-month", "24")
    asked = plan_of(tmp_path, *own, offers=OFFERS + managed)
    view, out = cli.json(*asked), " ".join(cli.out(*asked).split())
    against = {one["name"]: one["break_even_months"] for one in view["own"][0]["against"]}
    assert round(against["Boss, one run"], 1) == 3.3
    assert "3.3 months" in out
    assert "its fee" in out


def test_padding_as_it_comes_is_that_of_the_longest_in_each_batch():
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(5, 200, 800), rng.integers(5, 90, 800)
    padded = padded_as_it_comes(from_arrays(tokens, targets, source="drawn", n_examples=8000))
    alone = [np.sort(rng.permutation(tokens).reshape(-1, 8).max(axis=1)).mean() for _ in range(20)]
    assert padded.mean == pytest.approx(np.mean(alone), rel=0.05)
    assert padded.n_examples == 8000
    assert padded.n_target_tokens == pytest.approx(targets.mean() * 8000), (
        "as many labels as there were"
    )
    assert padded.targets is not None
    assert padded.longest == tokens.max()
