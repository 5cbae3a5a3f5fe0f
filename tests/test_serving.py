"""Serving: memory by hand, rates against published ones and the bounds of physics, going to zero
against a simulation.
"""

import csv

import numpy as np
import pytest

from farthing.errors import InputError
from farthing.models.model_config import known_config
from farthing.models.shapes import read_shape
from farthing.planner.serving import (
    Served,
    Server,
    Traffic,
    break_even_per_s,
    on_share,
    parse_traffic,
    serve,
)
from farthing.prices.gpus import find_gpu
from offers import offer_of
from planned import shape_of
from serving import ROWS, judge
from workshop import job_file

LLAMA = shape_of("meta-llama/Llama-3.1-8B")
H100 = find_gpu("H100-80GB")
WAYS = ("bf16", "fp8", "int8", "int4")


@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [
        ("meta-llama/Llama-3.1-8B", 131_072),
        ("meta-llama/Llama-2-7b-hf", 524_288),
        ("Qwen/Qwen2.5-7B", 57_344),
    ],
)
def test_the_cache_of_a_token(name, n_bytes):
    assert Server(shape_of(name), H100, 1, "bf16").cache_bytes_per_token == n_bytes
    assert Server(shape_of(name), H100, 1, "fp8").cache_bytes_per_token == n_bytes / 2


def test_the_memory_of_a_known_case():
    """An 8B in fp8 on 80 GiB: 9.1 GB of weights leave room for a million tokens; in bf16 on 24 GiB
    for three of 8k.
    """
    fp8 = Server(LLAMA, H100, 1, "fp8")
    assert fp8.weights_bytes == pytest.approx(9.1e9, rel=0.01)
    assert fp8.room_bytes == pytest.approx(0.9 * 79.15 * 2**30 - 3e9 - 9.1e9, rel=0.01)
    assert fp8.room_bytes / fp8.cache_bytes_per_token == pytest.approx(980_000, rel=0.02)
    small = Server(LLAMA, find_gpu("RTX 4090"), 1, "bf16")
    assert small.room_bytes == pytest.approx(3.8e9, rel=0.05)
    assert small.streams(Traffic(1, 8000, 1)) == 3


def test_less_precise_weights_are_smaller_and_are_read_sooner():
    traffic = Traffic()
    steps = [Server(LLAMA, H100, 1, name).decode_s(traffic, 1) for name in WAYS]
    assert steps[0] > steps[1] > steps[3]
    # computed in bf16 all the same: many streams gain nothing by four bits
    assert Server(LLAMA, H100, 1, "int4").decode_s(traffic, 900) == pytest.approx(
        Server(LLAMA, H100, 1, "int8").decode_s(traffic, 900), rel=0.1
    )


def test_published_rows_are_met_and_none_is_quicker_than_its_memory():
    with open(ROWS, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    result = judge(rows)
    assert len(result["rows"]) == len(rows) == 57
    assert result["table"][0]["median_percent"] < 12
    assert result["table"][0]["p90_percent"] < 25
    copied = rows[0] | {"model": "meta-llama/Meta-Llama-3-70B", "batch": "1", "tokens_per_s": "120"}
    assert "too fast" in judge([copied])["refused"][0]["why"], "70 GB at 3.35 TB/s allow 48"


def test_more_traffic_takes_more_machines_and_a_latency_fewer_streams():
    offer = offer_of("L40S", 0.86)
    (one, *_), _ = serve(LLAMA, Traffic(1000), [offer])
    (many, *_), _ = serve(LLAMA, Traffic(10_000_000), [offer])
    assert one.n_machines == 1 < many.n_machines
    assert many.always_on_usd == pytest.approx(many.n_machines * 0.86 * 730)
    quick, _ = serve(LLAMA, Traffic(1000, latency_s=8.0), [offer])
    assert quick
    assert all(s.server.answer_s(s.traffic, s.n_streams) <= 8.0 for s in quick)
    assert quick[0].n_streams < one.n_streams
    nothing, refused = serve(LLAMA, Traffic(1000, latency_s=0.1), [offer])
    assert not nothing
    assert "one answer alone takes" in refused[0].why


def test_a_mixture_reads_the_experts_that_tokens_go_to_and_holds_all():
    server = Server(shape_of("mistralai/Mixtral-8x7B-v0.1"), find_gpu("H200"), 1, "bf16")
    assert server.weights_bytes == 2 * 46_702_792_704
    traffic = Traffic()
    one, many = server.decode_s(traffic, 1), server.decode_s(traffic, 32)
    assert 2.5 < many / one < 4.5, "two of eight experts for one stream, nearly all for many"


def test_what_cannot_serve_says_why():
    offers = [
        offer_of("V100-16GB", 0.1),
        offer_of("A10", 0.5),
        offer_of("H100-80GB", 2.0, is_spot=True),
    ]
    found, refused = serve(shape_of("meta-llama/Meta-Llama-3-70B"), Traffic(), offers)
    assert found == []
    whys = {(one.gpu, one.precision): one.why for one in refused}
    assert "older" in whys["V100-16GB", "any"]
    assert "does not compute in fp8" in whys["A10", "fp8"]
    assert "needs" in whys["A10", "int4"]
    with pytest.raises(InputError, match="not for seq2seq"):
        serve(read_shape(known_config("google/flan-t5-base") or {}, "seq2seq"), Traffic(), offers)


def test_dollars_of_a_million_tokens_add_up_to_the_hour():
    one = Served(
        Server(LLAMA, H100, 1, "fp8"), offer_of("H100-80GB", 2.69), Traffic(1, 1000, 500), 300
    )
    dear_in, dear_out = one.usd_per_million(1.0)
    per_hour = one.capacity_tokens_per_s * 3600 / 1e6
    assert per_hour * dear_out + 2 * per_hour * dear_in == pytest.approx(2.69)
    assert one.usd_per_million(0.05)[1] == pytest.approx(20 * dear_out)
    assert dear_in < dear_out, (
        "tokens that are read together are cheaper than those written one by one"
    )


def test_going_to_zero_against_a_simulation():
    """50 random settings of 100,000 arrivals: on from one to the end of its warmth, or to the next;
    a start after a silence.
    """
    rng = np.random.default_rng(7)
    for _ in range(50):
        rate, busy, warm, cold = rng.uniform((0.002, 1, 0, 5), (0.2, 10, 120, 120))
        gaps = rng.exponential(1 / rate, 100_000)
        paid_s = np.minimum(gaps, busy + warm).sum() + cold * (gaps > busy + warm).sum()
        assert on_share(rate, busy, warm, cold) == pytest.approx(paid_s / gaps.sum(), rel=0.01)


def test_the_traffic_at_which_always_on_is_cheaper():
    assert break_even_per_s(1.6, 3, 5, 20) * 3600 == pytest.approx(96.4, rel=0.01)


@pytest.mark.parametrize(
    ("text", "traffic"),
    [
        ("", Traffic()),
        ("requests=2000/day,input=800,output=200,latency=2s", Traffic(2000, 800, 200, 2.0)),
        ("requests=10/min, output=1_000", Traffic(14_400, 800, 1000)),
        ("latency=0.5", Traffic(latency_s=0.5)),
    ],
)
def test_traffic_is_read(text, traffic):
    assert parse_traffic(text) == pytest.approx(traffic)


@pytest.mark.parametrize(
    "text",
    ["requests", "requests=many", "input=-3", "requests=5/year", "size=3"],
)
def test_traffic_that_is_not_understood_is_refused(text):
    with pytest.raises(InputError) as error:
        parse_traffic(text)
    assert error.value.where == "--serve"


def test_a_plan_says_what_serving_costs(tmp_path, cli):
    command = [
        "plan",
        str(job_file(tmp_path)),
        "--gpu",
        "L40S",
        "--gpu",
        "H100",
        "--serve",
        "requests=2000/day,input=300",
    ]
    serving = cli.json(*command, "--html", tmp_path / "plan.html")["serving"]
    assert {row["precision"] for row in serving["rows"]} == set(WAYS)
    assert serving["traffic"]["requests_per_day"] == 2000
    best = serving["rows"][0]
    assert min(best["always_on_usd_per_month"], best["to_zero_usd_per_month"]) > 0
    assert best["precision"] == "bf16", "where dollars are equal"
    page = (tmp_path / "plan.html").read_text()
    assert "<h2>Serving</h2>" in page
    out = " ".join(cli.out(*command).split())
    assert "Serving: 2,000 requests a day" in out
    assert "requests an hour" in out


def test_a_million_tokens_cost_what_a_machine_that_is_never_idle_takes_for_them():
    """8B in bf16 on an H100 at $3.60: 5.9 k tokens of answers a second, four times as many read."""
    ((one, *_), _) = serve(LLAMA, Traffic(), [offer_of("H100-80GB", 3.6)])
    assert one.server.precision == "bf16"
    assert one.usd_per_million_tokens == pytest.approx(0.001 / (5 * 5857) * 1e6, rel=1e-3)
