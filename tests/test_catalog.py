"""The room of GPUs and prices: facts that can be trusted, names that are found, files that say what
is wrong in them.
"""

import os
from datetime import date, timedelta
from pathlib import Path

import pytest

from farthing.errors import InputError
from farthing.prices.catalog import Catalog, cache_path, read_catalog, select, sort_offers
from farthing.prices.formats import read_prices
from farthing.prices.gpus import find_gpu, gpu_of_device, gpus
from farthing.prices.offers import Billing, Offer, bill, billings, up_front_usd
from farthing.report.words import say
from farthing.tables import facts
from offers import TODAY, offer_of


@pytest.fixture(autouse=True)
def _no_refreshed_prices(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def an_offer(**changes) -> Offer:
    plain = {"gpu": "T4", "usd": 1.0, "provider": "Somewhere", "instance": "box"}
    return offer_of(**{**plain, "region": "", **changes})


# ---- the facts ----


@pytest.mark.parametrize(
    "name",
    [
        "gpus",
        "gpu_usable_memory",
        "prices",
        "price_feeds",
        "billing",
        "gpu_software",
        "trained_dtypes",
    ],
)
def test_facts_have_a_source_and_a_date(name):
    for row in facts(name):
        assert row["source"], row
        assert date(2020, 1, 1) <= date.fromisoformat(row["date"]) <= date(2026, 11, 22), row


def test_every_gpu_has_sane_numbers():
    for gpu in gpus().values():
        assert 5 <= gpu.memory_gib <= 300, gpu.name
        assert 200e9 <= gpu.bandwidth_bytes_per_s <= 10e12, gpu.name
        assert 30 <= gpu.power_watts <= 1500, gpu.name
        assert 4e12 <= gpu.flops["fp32"] <= 200e12, gpu.name
        assert gpu.link in ("pcie", "nvlink", "infinity-fabric"), gpu.name
        assert 10e9 <= gpu.link_bytes_per_s <= 1000e9, gpu.name
        ladder = [gpu.flops[kind] for kind in ("fp32", "tf32", "bf16", "fp8") if kind in gpu.flops]
        assert ladder == sorted(ladder), gpu.name
        is_old = gpu.architecture in ("Kepler", "Pascal", "Volta", "Turing")
        assert gpu.has_bf16 == ("tf32" in gpu.flops) == (not is_old), gpu.name


def test_every_price_has_a_sane_size():
    catalog = read_catalog(None, TODAY)
    assert 400 <= len(catalog.offers) == len(facts("prices")), "a duplicate, or no GPU"
    for offer in catalog.offers:
        usd = offer.usd_per_gpu_hour
        assert usd is None or 0.02 <= usd <= 40, offer
        assert offer.unit != "million_tokens" or 0.01 <= offer.usd <= 100, offer


def test_what_people_train_on_is_covered_with_terms_that_have_sources():
    catalog = read_catalog(None, TODAY)
    assert len(catalog.providers) >= 12
    for name, terms in billings().items():
        assert name in catalog.providers
        assert terms.increment_s > 0
    assert billings()["RunPod"].egress_usd_per_gb == 0
    assert billings()["AWS"].egress_usd_per_gb is None
    for name in ("RTX 3090", "RTX 4090", "T4", "L4", "L40S", "A100-80GB", "H100-80GB", "B200"):
        offers = select(catalog, gpu=[name])
        assert len({offer.provider for offer in offers}) >= 2, name
        assert any(not offer.is_spot for offer in offers), name
    spot = select(catalog, ["h100"], ["aws"], kind="spot")
    assert len({offer.zone for offer in spot}) > 10, "by zone"


# ---- names ----


@pytest.mark.parametrize(
    ("text", "gib", "name"),
    [
        ("rtx4090", None, "RTX 4090"),
        ("A100", 80, "A100-80GB"),
        ("RTX4060Ti", 16, "RTX 4060 Ti 16GB"),
    ],
)
def test_gpus_are_found_by_whatever_name_and_told_apart_by_their_size(text, gib, name):
    assert find_gpu(text, gib).name == name
    with pytest.raises(InputError):
        find_gpu("RTX 4090", 48)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rtx 4900", "did you mean `"),
        ("L4-48GB", "L4 has 22 GiB"),
        ("h1000", "did you mean `H100"),
        ("", "known: "),
    ],
)
def test_names_of_nothing_get_a_hint(text, words):
    with pytest.raises(InputError) as caught:
        find_gpu(text)
    assert words in caught.value.to_do


@pytest.mark.parametrize(
    ("device", "gib", "name"),
    [
        ("NVIDIA GeForce RTX 4060 Ti", 7.6, "RTX 4060 Ti 8GB"),
        ("NVIDIA GeForce RTX 3080", 11.6, None),
        ("Tesla T4", 14.56, "T4"),
        ("NVIDIA GH200 480GB", 94.5, "GH200"),
        ("NVIDIA GH200 480GB", 143.0, None),
    ],
)
def test_devices_are_known_by_the_name_torch_gives_and_their_memory(device, gib, name):
    gpu = gpu_of_device(device, int(gib * 2**30))
    assert (gpu.name if gpu else None) == name


@pytest.mark.parametrize(
    "device",
    [  # cut down, with other memory, a part of one, or of another generation
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-40C",
        "NVIDIA H100 96GB HBM3",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA RTX A2000 12GB",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    ],
)
def test_devices_like_another_are_not_taken_for_it(device):
    assert gpu_of_device(device) is None


def test_every_gpu_is_known_by_its_own_memory():
    for gpu in gpus().values():
        for alias in (gpu.name, *gpu.aliases):
            assert gpu_of_device(alias) is gpu, alias
            assert gpu_of_device(alias, gpu.usable_bytes) in (gpu, gpus().get(f"{alias}-40GB")), (
                alias
            )


def test_peaks_of_a_run_come_from_the_same_table(monkeypatch):
    import torch

    from farthing.model.hardware import peak_flops

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (14 << 30, 15 << 30))
    assert peak_flops(torch.device("cuda"), "bf16") is None
    assert peak_flops(torch.device("cuda"), "fp16") == 65e12
    assert peak_flops(torch.device("cpu"), "fp32") is None


# ---- bills ----


def test_colab_units_by_the_gigabyte_and_hour():
    """15 GB x 9 h = 135 units at $9.99 per 100: $13.49, and two packs of units to have them."""
    colab = an_offer(unit="gb_hour", usd=9.99 / 100, billing=billings()["Colab"])
    paid_usd = sum(bill(colab, 9).values())
    assert round(paid_usd, 2) == 13.49
    assert up_front_usd(colab, paid_usd) == pytest.approx(19.98)
    assert up_front_usd(colab, 9.99) == pytest.approx(9.99)
    assert colab.usd_per_hour == pytest.approx(1.4985)


RUN = {"gpu": "", "n_gpus": 0, "unit": "run", "usd": 250}
TOKENS = {"gpu": "", "n_gpus": 0, "unit": "million_tokens", "usd": 0.5}
BY_HOUR, BY_SECOND = {"minimum_s": 60, "increment_s": 3600}, {"minimum_s": 60, "increment_s": 1}
STORES = {"storage_usd_per_gb_month": 0.1, "egress_usd_per_gb": 0.09}
FREE = dict.fromkeys(STORES, 0.0)
GOODS = {"storage_gb": 73, "egress_gb": 100}


@pytest.mark.parametrize(
    ("offer", "terms", "hours", "used", "expected"),
    [
        (RUN, {}, 0, {}, {"compute": 250}),
        (TOKENS, {"minimum_usd": 4}, 0, {"n_tokens": 1e6}, {"compute": 0.5, "minimum": 3.5}),
        ({"usd": 2}, BY_HOUR, 1.25, {}, {"compute": 2.5, "rounding": 1.5}),
        ({"usd": 2}, BY_HOUR, 1.25, {"n_starts": 5}, {"compute": 2.5, "rounding": 7.5}),
        ({"usd": 3.6}, BY_SECOND, 0.01, {}, {"compute": 0.036, "rounding": 0.024}),
        ({"usd": 3.6}, BY_SECOND, 0, {}, {"compute": 0}),
        ({"usd": 2}, STORES, 10, GOODS, {"compute": 20, "storage": 0.1, "egress": 9}),
        (
            {"usd": 2},
            STORES,
            10,
            GOODS | {"storage_hours": 730},
            {"compute": 20, "storage": 7.3, "egress": 9},
        ),
        ({"usd": 2}, {}, 730, GOODS, {"compute": 1460, "storage": 7.3, "egress": 9}),  # assumed
        ({"usd": 2}, FREE, 730, GOODS, {"compute": 1460}),
    ],
)
def test_bills_by_their_parts(offer, terms, hours, used, expected):
    sold = an_offer(**offer, billing=Billing("Somewhere", **terms))
    assert bill(sold, hours, **used) == pytest.approx(expected)


def test_a_machine_hour_is_of_all_its_gpus():
    eight = an_offer(gpu="H100-80GB", n_gpus=8, usd=55.04)
    assert eight.usd_per_hour == 55.04
    assert eight.usd_per_gpu_hour == pytest.approx(6.88)
    two = an_offer(gpu="T4", n_gpus=2, unit="gb_hour", usd=0.1)
    assert two.usd_per_hour == pytest.approx(3.0)
    assert an_offer(**RUN).usd_per_hour is an_offer(**RUN).usd_per_gpu_hour is None


# ---- age ----


def test_the_words_say_where_prices_are_from_and_how_old():
    def of(*ages):
        offers = tuple(an_offer(date=TODAY - timedelta(days=age)) for age in ages)
        return Catalog(offers, "here", TODAY, {})

    young = of(400, 1, 3)
    assert young.ages_days == (1, 3, 400)
    assert not young.is_stale
    assert (
        say("prices.txt", "words", young)
        == "3 prices of 1 provider from here: newest 1 day old, half within 3 days, oldest 400 days"
    )
    old = of(2, 31, 40)
    assert old.is_stale
    assert say("prices.txt", "words", old).endswith(
        "stale: `farthing prices update` reads newer ones"
    )
    assert of(-5).ages_days == (0, 0, 0), "a clock that is behind makes no price younger than new"


# ---- choosing ----


def test_offers_are_chosen_by_every_wish():
    catalog = read_catalog(None, TODAY)
    chosen = select(catalog, ["h100"], ["aws"], ["us-"], "spot")
    assert chosen
    for offer in chosen:
        assert (offer.provider, offer.gpu, offer.is_spot) == ("AWS", "H100-80GB", True)
        assert offer.region.startswith("us-")
    assert len(select(catalog)) == len(catalog.offers)
    two = {offer.provider for offer in select(catalog, provider=["runpod", "lambda"])}
    assert two == {"RunPod", "Lambda"}
    for wish, word in (
        ({"provider": ["runpd"]}, "RunPod"),
        ({"region": ["the-moon"]}, "no offer has region the-moon"),
    ):
        with pytest.raises(InputError, match=word):
            select(catalog, **wish)  # type: ignore[arg-type]


def test_offers_are_sorted_with_what_is_not_paid_by_the_hour_last():
    offers = [
        an_offer(instance="fee", gpu="", n_gpus=0, unit="run", usd=0.1),
        an_offer(instance="two", n_gpus=2, usd=1.5, date=TODAY - timedelta(days=9)),
        an_offer(instance="one", usd=1.0),
    ]
    assert [o.instance for o in sort_offers(offers, "usd")] == ["one", "two", "fee"]
    assert [o.instance for o in sort_offers(offers, "usd-per-gpu")] == ["two", "one", "fee"]
    assert [o.instance for o in sort_offers(offers, "age")][-1] == "two"


# ---- files of one's own ----

HEADER = "provider,instance,gpu,n_gpus,region,zone,kind,unit,usd,vcpus,ram_gib,source,date"
GPUHUNT = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags"  # noqa: E501
GOOD = "Lab,node1,RTX 4090,2,home,,on-demand,machine_hour,0.8,16,64,the lab's price list,2026-11-01"


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_file_of_ones_own_is_taken_alone(tmp_path):
    catalog = read_catalog(write(tmp_path / "mine.csv", HEADER, GOOD), TODAY)
    (offer,) = catalog.offers
    assert (offer.provider, offer.gpu, offer.n_gpus) == ("Lab", "RTX 4090", 2)
    assert (offer.usd_per_gpu_hour, offer.vcpus, offer.ram_gib) == (0.4, 16, 64)
    assert offer.source == "the lab's price list"
    assert catalog.ages_days == (20, 20, 20)
    assert str(tmp_path / "mine.csv") in say("prices.txt", "words", catalog)


def test_four_columns_are_enough(tmp_path):
    path = write(tmp_path / "mine.csv", "provider,gpu,n_gpus,usd", "Lab,h100,1,$2")
    os.utime(path, (1795000000, 1795000000))  # November 2026: a file's own time is another clock
    offer = read_catalog(path, date(2025, 12, 1)).offers[0]
    found = offer.gpu, offer.usd, offer.unit, offer.kind, offer.source
    assert found == ("H100-80GB", 2.0, "machine_hour", "on-demand", "mine.csv")
    assert offer.date == date(2025, 12, 1), "of the day on which it is given"


def test_a_price_of_tomorrow_is_of_another_time_zone(tmp_path):
    path = write(tmp_path / "mine.csv", HEADER, change(date="2026-11-22"))
    assert read_catalog(path, TODAY).offers[0].date == date(2026, 11, 22)
    with pytest.raises(InputError, match="2026-11-23 is after today"):
        read_catalog(write(tmp_path / "late.csv", HEADER, change(date="2026-11-23")), TODAY)


def change(**cells: str) -> str:
    row = dict(zip(HEADER.split(","), GOOD.split(","), strict=True)) | cells
    return ",".join(row.values())


@pytest.mark.parametrize(
    ("line", "where", "words"),
    [
        (change(usd="-1"), "usd", "'-1'"),
        (change(usd="nan"), "usd", "'nan'"),
        (change(usd="1e9"), "usd", "'1e9'"),
        (change(n_gpus="1.5"), "n_gpus", "'1.5'"),
        (change(date="yesterday"), "date", "'yesterday'"),
        (change(gpu="RTX 4900"), "gpu", "`RTX 4900`"),
        (change(gpu=""), "gpu", "no GPU"),
        (change(kind="cheap"), "kind", "`cheap`"),
        (change(unit="machine_hours"), "unit", "did you mean `machine_hour`?"),
        (change(provider=""), "provider", "no provider"),
        (change(vcpus="-3"), "vcpus", "'-3'"),
    ],
)
def test_a_broken_row_is_named_by_line_and_column(tmp_path, line, where, words):
    path = write(tmp_path / "mine.csv", HEADER, change(instance="another"), line)
    with pytest.raises(InputError, match=words) as caught:
        read_catalog(path, TODAY)
    assert caught.value.where == f"{path}:3: {where}"
    assert caught.value.to_do


def test_an_offer_that_is_there_twice_is_an_error(tmp_path):
    path = write(tmp_path / "mine.csv", HEADER, GOOD, change(usd="0.7"))
    with pytest.raises(InputError, match="the same offer as on line 2") as caught:
        read_catalog(path, TODAY)
    assert caught.value.where == f"{path}:3"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"a,b,c\n1,2,3\n", "the header lacks provider, gpu, n_gpus, usd"),
        (f"{HEADER}\n".encode(), "there is no price in it"),
        (f"{HEADER}\nLab,node1\n".encode(), "2 cells where the header has 13"),
        (b"\xff\xfe\x00provider", "not text in UTF-8"),
        (f"{HEADER},spot\n{GOOD},true\n".encode(), "the column `spot` is not known"),
        (f"{GPUHUNT}\nx,eu,1,1,1,1,L4,a lot,,,,\n".encode(), "no GPU in it is known: L4"),
        (f'{HEADER}\n"Lab'.encode(), "not CSV"),
    ],
)
def test_a_file_that_is_not_a_price_list_is_refused_with_a_reason(tmp_path, content, words):
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        read_catalog(path, TODAY)
    assert caught.value.where.startswith(str(path))


@pytest.mark.parametrize(("name", "words"), [("none.csv", "no such file"), ("", "is a directory")])
def test_a_file_that_is_not_there(tmp_path, name, words):
    with pytest.raises(InputError, match=words):
        read_catalog(tmp_path / name, TODAY)


def test_what_a_spreadsheet_writes_does_no_harm(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(f"\ufeff{HEADER}\r\n\r\n{GOOD}\r\n".replace(",", ";"))
    assert len(read_catalog(path, TODAY).offers) == 1


# ---- layouts of others ----


SKYPILOT = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"  # noqa: E501
A_SIZE = "\"{{'Gpus': [{{'Name': 'A100', 'Count': {n}, 'MemoryInfo': {{'SizeInMiB': {mib}}}}}]}}\""


def test_a_catalog_of_skypilot_is_read_by_its_header(tmp_path):
    rows = [
        f"a,A100,8,96,1152,{A_SIZE.format(n=8, mib=40960)},21.96,6.5,us-east-1,use1-az1",
        f"b,A100,2,96,1152,{A_SIZE.format(n=2, mib=163840)},3.1,0.00,r,",  # of both
        f"c,A100-80GB,2,96,1152,{A_SIZE.format(n=2, mib=80)},2.8,,r,",  # gigabytes
        f"d,RTX4090,1,32,64,{A_SIZE.format(n=1, mib=49140)},0.4,,r,",  # not the card of that name
        "e,,,4,16,,0.1,0.05,r,",
        ",T4,1,,,,0.35,0.11,us-central1,a",  # a GPU without its host
    ]
    catalog = read_catalog(write(tmp_path / "vast" / "vms.csv", SKYPILOT, *rows), date.today())
    assert [
        (o.provider, o.instance, o.gpu, o.n_gpus, o.kind, o.usd, o.zone) for o in catalog.offers
    ] == [
        ("Vast.ai", "a", "A100-40GB", 8, "on-demand", 21.96, "use1-az1"),
        ("Vast.ai", "a", "A100-40GB", 8, "spot", 6.5, "use1-az1"),
        ("Vast.ai", "b", "A100-80GB", 2, "on-demand", 3.1, ""),
        ("Vast.ai", "c", "A100-80GB", 2, "on-demand", 2.8, ""),
    ]
    assert catalog.skipped == {"RTX4090 (48 GiB)": 1}


def test_a_feed_may_have_a_few_bad_rows_but_not_many(tmp_path):
    good = [f"box{i},us-east-1,1.5,8,32,1,T4,16,False,,nvidia," for i in range(20)]
    bad = "box99,us-east-1,-1,8,32,1,T4,16,False,,nvidia,"
    path = write(tmp_path / "aws.csv", GPUHUNT, *good, good[0], bad)
    offers = read_prices(path, TODAY, is_feed=True)[0]
    assert (len(offers), {offer.provider for offer in offers}) == (20, {"AWS"})
    with pytest.raises(InputError, match="'-1'"):
        read_prices(write(tmp_path / "gcp.csv", GPUHUNT, *good[:5], bad), TODAY, is_feed=True)
    with pytest.raises(InputError, match="'-1'"):
        read_catalog(path, TODAY)


# ---- the refreshed copy ----


def test_newer_prices_replace_those_of_their_providers(tmp_path):
    shipped = read_catalog(None, TODAY)
    rows = [
        "RunPod,1x T4,T4,1,any,,on-demand,machine_hour,0.2,,,a feed,2026-11-20",
        "Oracle,old,T4,1,any,,on-demand,machine_hour,0.2,,,a feed,2020-01-01",
        "Nowhere,new,T4,1,any,,on-demand,machine_hour,0.3,,,a feed,2026-11-20",
        "Fancy,new,FX 9,1,any,,on-demand,machine_hour,0.3,,,a feed,2026-11-20",
    ]
    write(cache_path(), HEADER, *rows)
    catalog = read_catalog(None, TODAY)
    assert [o.instance for o in catalog.offers if o.provider == "RunPod"] == ["1x T4"]
    assert [o.usd for o in catalog.offers if o.provider == "Nowhere"] == [0.3]
    assert [o for o in catalog.offers if o.provider == "Oracle"] == [
        o for o in shipped.offers if o.provider == "Oracle"
    ]
    assert {o for o in catalog.offers if o.provider == "Lambda"} == {
        o for o in shipped.offers if o.provider == "Lambda"
    }
    assert catalog.skipped == {"FX 9": 1}
    assert str(cache_path()) in catalog.where


def test_a_torn_refreshed_copy_says_where_and_what_to_do():
    write(cache_path(), HEADER, "RunPod,1x T4,T4,1,any")
    with pytest.raises(InputError, match="5 cells") as caught:
        read_catalog(None, TODAY)
    assert str(cache_path()) in caught.value.where
    assert "farthing prices update" in caught.value.to_do


# ---- quick ----


def test_what_torch_can_have_of_a_gpu_is_less_than_what_its_driver_shows():
    assert {row["gpu"] for row in facts("gpu_usable_memory")} <= set(gpus())
    for gpu in gpus().values():
        assert 0.96 < gpu.usable_bytes / gpu.memory_bytes < 1, gpu.name
    assert find_gpu("A100-80GB").usable_bytes == int(79.15 * 2**30)
