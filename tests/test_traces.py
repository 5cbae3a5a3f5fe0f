"""Traces as files, and what they say of an offer."""

import json
from pathlib import Path

import pytest

from farthing.errors import InputError
from farthing.planner.spot import hazards, prior, read_traces
from farthing.prices.offers import Offer
from offers import offer_of


def write(folder: Path, name: str, data: object) -> Path:
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"metadata": {"gap_seconds": 60}, "data": data}))
    return path


def offer(
    gpu: str = "V100-16GB", n_gpus: int = 1, region: str = "us-east-1", zone: str = "us-east-1a"
) -> Offer:
    where = {"region": region, "zone": zone}
    return offer_of(gpu, 1.0, n_gpus, provider="AWS", spot=True, **where)


LONG, SHORT = [1] * 600 + [0] * 60, [1] * 20 + [0] * 60


def test_a_zone_with_its_gpu_has_its_own_law(tmp_path):
    write(tmp_path, "aws/us-east-1a_v100_1", LONG * 6)
    write(tmp_path, "aws/us-east-1b_v100_1", SHORT * 40)
    law, words = hazards(read_traces(tmp_path))
    long, short = law(offer()), law(offer(zone="us-east-1b"))
    assert long.up.mean_s > 2 * short.up.mean_s
    assert "by traces of 2 zones" in words


def test_an_open_zone_takes_the_middle_one_of_its_region(tmp_path):
    for zone, data in (("a", LONG * 6), ("b", SHORT * 40), ("c", ([1] * 100 + [0] * 60) * 10)):
        write(tmp_path, f"us-east-1{zone}_v100_1", data)
    law, _ = hazards(read_traces(tmp_path))
    assert law(offer(zone="")).up.mean_s == law(offer(zone="us-east-1c")).up.mean_s


def test_several_traces_of_a_zone_are_one_law_and_a_region_may_be_traced_as_a_whole(tmp_path):
    write(tmp_path, "may/us-east-1a_v100_1", LONG * 6)
    write(tmp_path, "june/us-east-1a_v100_1", SHORT * 40)
    write(tmp_path, "june/eu-west-1_v100_1", SHORT * 40)
    law, words = hazards(read_traces(tmp_path))
    both = law(offer())
    assert "by traces of 2 zones" in words
    assert set(both.up.lengths_s) == {20 * 60.0, 600 * 60.0}
    whole = law(offer(region="eu-west-1", zone="eu-west-1a"))
    assert set(whole.up.lengths_s) == {20 * 60.0}


def test_larger_nodes_are_lost_more_often_and_other_gpus_have_the_prior(tmp_path):
    write(tmp_path, "us-east-1a_v100_1", LONG * 6)
    write(tmp_path, "us-east-1b_v100_1", [0] * 100)
    (tmp_path / "other.json").write_text("[]")
    traces = read_traces(tmp_path)
    assert len(traces) == 2
    law, _ = hazards(traces)
    assert law(offer(zone="us-east-1b")) == prior(1), "it was never up"
    assert law(offer(n_gpus=8)).up.mean_s < law(offer()).up.mean_s
    assert law(offer(gpu="V100-32GB")).up.mean_s == law(offer()).up.mean_s, "taken away alike"
    assert law(offer(gpu="H100-80GB")) == prior(1)
    assert law(offer(region="eu-west-1", zone="eu-west-1a")) == prior(1)


@pytest.mark.parametrize("data", [[], "no list", [1, -1], [1, "a"], [0.5]])
def test_a_broken_trace_is_named(data, tmp_path):
    path = write(tmp_path, "us-east-1a_v100_1", data)
    with pytest.raises(InputError) as caught:
        read_traces(tmp_path)
    assert caught.value.where == str(path)


def test_no_json_no_traces_no_folder(tmp_path):
    with pytest.raises(InputError, match="no traces"):
        read_traces(tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match="no JSON"):
        read_traces(tmp_path)
