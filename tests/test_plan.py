"""The plan: what fits, what it costs, how it is ranked, what stands in the way, and that advice can
be followed.
"""

import random
import re
from dataclasses import replace

import pytest

from farthing.data.lengths import from_mean
from farthing.errors import InputError
from farthing.models.shapes import read_shape
from farthing.planner.inputs import estimate_of
from farthing.planner.managed import fees_of
from farthing.planner.memory import OnDevice
from farthing.planner.price import quiet_interval_s
from farthing.planner.ranges import class_of
from farthing.planner.search import budgets
from farthing.planner.software import Torch
from farthing.planner.spot import Interruptions, weibull
from farthing.planner.types import JobSpec
from farthing.prices.offers import Offer
from farthing.report.plan_view import why
from offers import TODAY, offer_of
from planned import H, Place, at, decide, lengths_of, only, place, refused, shape_of, wanted_of
from thinned import thinned

A100, RTX_4090 = place("A100-80GB", 2.0), place("RTX 4090", 0.5)
EIGHT = "meta-llama/Llama-3.1-8B"
MARKET = [
    place("A100-80GB", 2.5),
    place("H100-80GB", 3.5),
    RTX_4090,
    place("RTX 4090", 1.0, 2),
    place("L4", 0.6),
    place("T4", 0.3),
    place("A100-40GB", 1.3, provider="B"),
    place("A100-80GB", 1.25, spot=True),
    place("H100-80GB", 14.0, 4),
    place("RTX 3090", 0.3, provider="C"),
    place("V100-16GB", 0.8),
    place("A100-80GB", 5.0, 2),
    place("T4", 0.1, spot=True),
]


# ---- what a plan is made of ----


def test_micro_batches_are_budgets_of_tokens():
    asked, short, long = (wanted_of(lengths=lengths_of(longest=n)) for n in (1500, 200, 9000))
    found = budgets(asked, 1, is_cuda=True)
    assert found[:3] == [1500, 2048, 4096]
    assert found[-2] < asked.lengths.largest_step(32) <= found[-1]
    assert budgets(replace(asked, global_batch=4096), 1, is_cuda=True)[-1] == 65_536
    assert budgets(asked, 8, is_cuda=True)[-1] < found[-1], "each GPU has a part of the step"
    assert budgets(short, 1, is_cuda=True)[:2] == [200, 1024]
    assert budgets(short, 1, is_cuda=False) == [200, 1024, 2048]
    assert budgets(long, 1, is_cuda=False) == [9000]
    plan = only(replace(asked, micro_batch_tokens=777), A100)
    assert plan.recipe.settings.micro_batch_tokens == 777, "what the job says"
    assert "up to 777 tokens at a time" in plan.recipe.in_words()


@pytest.mark.parametrize(
    ("changes", "scores_positions", "fuses_adapters"),
    [
        ({}, True, True),
        ({"target_modules": ("q_proj", "lm_head")}, False, True),
        ({"modules_to_save": ("lm_head",)}, False, True),
        ({"lora_dropout": 0.1}, True, True),
        ({"use_dora": True}, True, False),
    ],
)
def test_a_head_with_an_adapter_scores_all_positions(changes, scores_positions, fuses_adapters):
    stack = wanted_of(**changes).stack("bf16")
    assert (stack.scores_positions, stack.fuses_adapters) == (scores_positions, fuses_adapters)


@pytest.mark.parametrize(
    ("changes", "n_steps", "n_evaluations", "n_taken"),
    [
        ({"n_epochs": 2.5}, 10, 0, 264),
        ({"max_steps": 7}, 7, 0, 196),
        ({"eval_lengths": lengths_of(10)}, 12, 3, 300),
        ({"eval_lengths": lengths_of(10), "eval_steps": 5}, 12, 3, 300),
        ({"eval_lengths": lengths_of(10), "eval_steps": 0}, 12, 1, 300),
    ],
)
def test_steps_are_those_of_the_trainer(changes, n_steps, n_evaluations, n_taken):
    """Of 100 examples and three epochs."""
    asked = wanted_of(lengths=lengths_of(100), **changes)
    found = asked.n_steps, asked.n_evaluations, asked.n_taken
    assert found == (n_steps, n_evaluations, n_taken)


def test_each_provider_has_its_own_time_to_boot_and_a_place_of_ones_own_none():
    """A place of one's own needs no download, and tokenizes nothing twice."""
    boots = {"AWS": 221.0, "Lambda": 420.0, "nobody": 240.0}
    rented = decide(wanted_of(), [place("RTX 4090", 0.1, provider=name) for name in boots]).plans
    assert {plan.offer.provider: plan.seconds["setup"] for plan in rented} == boots
    own = place("RTX 4090", 0.1).but(is_local=True)
    here = only(wanted_of(is_tokenized=True), own).seconds
    assert rented[0].seconds.keys() - here.keys() == {"setup", "download", "tokenizing"}
    assert here["training"] == rented[0].seconds["training"]


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [("T4", "fp16"), ("V100-16GB", "fp16"), ("A100-40GB", "bf16"), ("K80", "fp32")],
)
def test_old_gpus_compute_in_fp16_and_none_in_bf16(gpu, precision):
    assert at(offer_of(gpu, 0.3)).machine.precision == precision
    if precision == "fp16":
        found = at(offer_of(gpu, 0.3), wanted_of(precision="bf16")).machine
        assert found.reason == f"{gpu} does not compute in bf16"
        assert found.change == "leave train.bf16 out: fp16 is used"


def test_a_family_that_was_not_traced_is_planned_with_a_wider_range():
    sizes = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192}
    sizes |= {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4}
    asked = {"micro_batch_tokens": 1024, "checkpoint_every": 1}
    wide, known = (
        only(wanted_of(shape=shape, **asked), place("L4", 0.6))
        for kind in ("granite", "llama")
        for shape in [read_shape(sizes | {"model_type": kind})]
    )
    assert wide.on.memory.allocated == known.on.memory.allocated, "layers of a usual kind"
    assert wide.on.speed_spread.high == pytest.approx(1.15 * known.on.speed_spread.high, rel=0.05)
    assert "no model of its family was traced" in wide.on.speed_spread.known


# ---- ranking ----


def test_the_cheapest_is_first_and_ties_go_to_the_sooner_and_say_so():
    slow, quick = (only(wanted_of(), place(gpu, 2.0)) for gpu in ("A100-80GB", "H100-80GB"))
    even = 2.0 * slow.total_usd / quick.total_usd  # at which the quicker one costs as much
    for factor, first, words in (
        (1.03, "H100-80GB", "within 5% or a cent of the cheapest"),
        (1.08, "A100-80GB", "the cheapest"),
        (0.97, "H100-80GB", "the cheapest"),
    ):
        ranked = decide(wanted_of(), [A100, place("H100-80GB", even * factor)]).plans
        assert ranked[0].offer.gpu == first, factor
        assert why(ranked[0], ranked).startswith(words)
        assert "x as" in why(ranked[1], ranked)


def test_among_equals_one_gpu_comes_before_several():
    alone = only(wanted_of(), RTX_4090)
    two = only(wanted_of(), place("RTX 4090", 1.0, 2))
    price = 1.0 * alone.total_usd / two.total_usd * 0.97
    answer = decide(wanted_of(), [RTX_4090, place("RTX 4090", price, 2)])
    assert answer.plans[1].total_usd < answer.plans[0].total_usd
    assert answer.best == answer.plans[0]
    assert "estimates can't tell apart, and on one GPU" in why(answer.plans[0], answer.plans)
    assert answer.plans[0].wall_s > answer.plans[1].wall_s
    cheaper = decide(wanted_of(), [RTX_4090, place("RTX 4090", price * 0.8, 2)])
    assert cheaper.best == cheaper.plans[0]
    assert cheaper.plans[0].recipe.n_gpus == 2
    assert cheaper.plans[0].recipe.to_set == ("where.gpus: all",)


ARM = at(offer_of("GH200", 1.0), torch=Torch("2.13.0"))
SMALL_STEPS = {"micro_batch_tokens": 1024, "checkpoint_every": 1}
NEEDED = only(wanted_of(**SMALL_STEPS), place("RTX 4090", 0.2)).on.memory_range.likely
TIGHT = place("RTX 4090", 0.2).but(memory=OnDevice(int(NEEDED * 1.01)))


def fresh(usd: float, **changes) -> Place:
    return place("A100-80GB", usd, provider="B").but(**changes)


@pytest.mark.parametrize(
    ("first", "second", "is_first", "asked"),
    [
        (A100.aged(95), fresh(4.0), True, {}),
        (A100.aged(95), fresh(2.1), False, {}),
        (A100.aged(181), fresh(2.35, host_note="drivers of its own"), False, {}),
        (A100.aged(91), fresh(2.6, host_note="drivers of its own"), True, {}),
        (A100.aged(95), A100.aged(400).sold(usd=1.9), True, {}),  # the cheapest at worst
        (ARM, place("H100-80GB", 1.5), False, {}),
        (TIGHT, A100, False, SMALL_STEPS),
        (place("RTX 4090", 0.2), A100, True, SMALL_STEPS),
    ],
)
def test_the_first_choice_can_be_had_at_its_price_and_surely_does_the_job(
    first, second, is_first, asked
):
    answer = decide(wanted_of(**asked), [first, second])
    assert (answer.best.offer is first.offer) is is_first
    if first is TIGHT:
        assert why(answer.best, answer.plans) == "the cheapest that surely fits"
        assert answer.plans[1].on.is_tight
    assert decide(wanted_of(**asked), [first]).best is not None, "the only one is still said"


def test_a_machine_that_needs_hands_says_what_it_needs():
    index = "--index-url https://download.pytorch.org/whl/cu130"
    assert f"pip install torch==2.13.0 {index}" in ARM.machine.host_note
    assert not at(ARM.offer, torch=Torch("2.13.0", "cu130")).machine.host_note


def test_a_price_that_the_user_gave_is_taken_however_old_it_is():
    given = A100.aged(400)
    first = decide(wanted_of(), [given, fresh(2.2)], has_own_prices=True).plans[0]
    assert first.offer is given.offer
    plain = decide(wanted_of(), [given.aged(0)]).plans[0]
    assert first.usd_range == plain.usd_range


def test_a_cent_is_not_waited_for():
    """The slower one costs 5.9 cents, the quicker one at these prices 0.9 and 1.2 more."""
    for usd, first in ((0.72, "A100-80GB"), (0.75, "RTX 3090")):
        places = [place("A100-80GB", usd), place("RTX 3090", 0.5)]
        assert decide(wanted_of(max_steps=100), places).best.offer.gpu == first


def test_the_front_is_what_nothing_beats_in_both():
    drawn = random.Random(1)
    prices = [one.sold(usd=one.offer.usd * drawn.uniform(0.5, 2)) for one in MARKET * 2]
    plans = decide(wanted_of(), prices).plans
    for plan in plans:
        others = [other for other in plans if other is not plan]
        is_beaten = any(
            other.total_usd <= plan.total_usd and other.wall_s <= plan.wall_s for other in others
        )
        assert plan.on_front is not is_beaten


def test_the_same_question_has_the_same_answer_whatever_the_order():
    asked = wanted_of(deadline_s=40 * H, max_usd=60.0, eval_lengths=lengths_of(300))
    first = decide(asked, MARKET)
    other = decide(asked, random.Random(3).sample(MARKET, len(MARKET)))
    assert repr(other.plans) == repr(first.plans)
    assert sorted(map(repr, other.rejected)) == sorted(map(repr, first.rejected))


def test_nothing_to_choose_from_and_nothing_to_train_on():
    empty = decide(wanted_of(), [])
    assert (empty.plans, empty.rejected, empty.best) == ((), (), None)
    nothing = replace(lengths_of(), n_examples=0)
    with pytest.raises(InputError, match="no data to train on"):
        decide(wanted_of(lengths=nothing), MARKET)


# ---- two stacks ----


def test_targets_count_as_sources_do_where_both_are_laid_end_to_end():
    lengths = from_mean(20_000, 200.0, 512, mean_target=50.0)
    asked = wanted_of("google/flan-t5-base", lengths=lengths, global_batch=16)
    assert asked.is_packed
    step = only(asked, RTX_4090).on.step
    assert step.parts["launch"] < 0.2 * step.seconds
    assert step.n_padded_tokens == pytest.approx(step.n_tokens)
    cut = asked.cut(2048)
    assert cut.largest.tokens + cut.largest.targets <= 2048
    assert cut.largest.targets == pytest.approx(cut.largest.tokens / 4, rel=0.05)
    assert (cut.example.tokens, cut.example.targets) == (lengths.mean, lengths.mean_target)


# ---- several GPUs ----


def test_a_step_that_does_not_divide_evenly_still_holds_all_its_examples():
    plan = only(wanted_of(global_batch=10), place("A100-80GB", 2.0, 4))
    recipe, n_tokens = plan.recipe, 10 * wanted_of().lengths.mean
    most_at_once = recipe.settings.micro_batch_tokens * recipe.n_micro_batches
    assert most_at_once * recipe.n_gpus >= n_tokens
    assert plan.on.step.n_tokens == pytest.approx(n_tokens)


def test_more_gpus_than_examples_in_a_step_are_refused():
    eight = place("A100-80GB", 2.0, 8)
    found = refused(wanted_of(global_batch=4), eight)
    assert found.reason == "a step of 4 examples can't be divided by 8 GPUs"
    assert found.change == "train.global_batch_size: 8"
    assert only(wanted_of(global_batch=8), eight)


def test_a_model_too_large_for_one_gpu_is_divided():
    asked = wanted_of(EIGHT, method="full")
    assert "needs" in refused(asked, A100).reason
    plan = only(asked, place("A100-80GB", 16.0, 8))
    assert plan.recipe.sharding == "fsdp"
    adapters = only(replace(asked, method="lora"), place("RTX 4090", 4.0, 8))
    assert adapters.recipe.sharding == "ddp", "all weights on each, where they fit"
    assert plan.recipe.to_set == ("where.gpus: all", "where.strategy: fsdp")
    quantized = wanted_of("meta-llama/Llama-3.1-70B", method="qlora")
    assert "needs" in refused(quantized, place("RTX 4090", 4.0, 8)).reason


# ---- advice that can be followed ----


FIELDS = {
    "train.global_batch_size": ("global_batch", int),
    "train.micro_batch_tokens": ("micro_batch_tokens", int),
    "train.gradient_checkpointing": ("checkpoint_every", lambda _: 1),
    "train.optim": ("optim", str),
    "train.max_steps": ("max_steps", lambda text: int(text.split()[0])),
    "method": ("method", str),
    "limits.max_usd": ("max_usd", float),
    "limits.max_hours": ("max_hours", float),
}


def follow(wanted: JobSpec, change: str, *, last: bool = False) -> JobSpec:
    """The job with a named change made; of two that are offered the first, or the last."""
    for words in change.split(", or ")[-1 if last else 0].split(" with "):
        name, _, value = words.partition(" (")[0].partition(": ")  # what it costs in quality
        if name == "data.max_length":
            held = wanted.eval_lengths and wanted.eval_lengths.truncated(int(value))
            short = wanted.lengths.truncated(int(value))
            wanted = replace(wanted, lengths=short, eval_lengths=held)
        elif words.startswith("a deadline "):
            parts = re.findall(r"(\d+) (h|min|s)", words)
            later_s = sum(int(n) * {"h": 3600, "min": 60, "s": 1}[unit] for n, unit in parts)
            wanted = replace(wanted, deadline_s=(wanted.deadline_s or 0) + later_s)
        else:
            field, read = FIELDS[name]
            wanted = replace(wanted, **{field: read(value)})
    return wanted


def random_job(drawn: random.Random) -> JobSpec:
    """A job that some places can't do."""
    longest = drawn.choice([256, 1024, 4096])
    model = drawn.choice(
        [
            "meta-llama/Llama-3.2-1B",
            "Qwen/Qwen2.5-7B",
            "google/gemma-2-9b",
            "openai-community/gpt2-xl",
        ]
    )
    return wanted_of(
        model,
        method=drawn.choice(["full", "lora", "qlora"]),
        lengths=lengths_of(2000, longest),
        eval_lengths=drawn.choice([None, lengths_of(200, longest)]),
        global_batch=drawn.choice([1, 6, 32]),
        micro_batch_tokens=drawn.choice([None, None, 8 * longest]),
        checkpoint_every=drawn.choice([None, None, 0, 2]),
        optim=drawn.choice(["adamw_torch_fused", "adamw_torch"]),
        max_usd=drawn.choice([None, None, 1.0, 5.0]),
        max_hours=drawn.choice([None, None, 2.0]),
        deadline_s=drawn.choice([None, None, 2 * H]),
    )


@pytest.mark.parametrize("seed", thinned(range(25), 3))
def test_every_rejection_has_a_reason_and_its_change_lets_the_offer_in(seed):
    drawn = random.Random(seed)
    asked = random_job(drawn)
    places = [one for one in MARKET if not one.offer.is_spot]
    for refusal in decide(asked, places).rejected:
        assert refusal.reason
        assert refusal.change
        assert refusal.distance > 0
        if refusal.change == "a smaller model, or a GPU with more memory":
            continue
        here = [one for one in places if one.offer == refusal.offer]
        for last in (False, True):
            job, change = asked, refusal.change
            for _ in range(6):  # another limit may be in the way after the first, never the same
                job = follow(job, change, last=last)
                answer = decide(job, here)
                if answer.plans:
                    break
                (again,) = answer.rejected
                assert kind_of(again.reason) != kind_of(refusal.reason), (refusal, again)
                if again.change.startswith("a smaller model"):
                    break
                change = again.change
            else:
                raise AssertionError(f"advice without end: {refusal}")


def kind_of(reason: str) -> str:
    """The words of a reason without its figures."""
    return re.sub(r"[\d.,$%]+|\(.*\)", "", reason)[:12]


def test_evaluation_takes_as_many_tokens_at_once_as_training_but_one_row_has_to_fit():
    asked = wanted_of(
        lengths=lengths_of(2000, 128), eval_lengths=lengths_of(200, 2048), eval_batch=64
    )
    assert decide(asked, [RTX_4090]).plans
    long = replace(asked, eval_lengths=lengths_of(200, 1 << 20))
    assert "needs" in refused(long, RTX_4090).reason


# ---- spot and deadlines ----

SPOT = place("A100-80GB", 1.0, spot=True)


def nervous(offer: Offer) -> Interruptions:
    """Capacity that goes within the hour in one zone, and stays for weeks in the others."""
    stays_h, away_h = (0.7, 3) if offer.zone == "bad" else (1000, 0.01)
    return Interruptions(weibull(stays_h * H), weibull(away_h * H))


def test_each_zone_has_its_own_chance():
    spots = [SPOT.sold(zone=zone) for zone in ("good", "bad")]
    work = wanted_of(n_epochs=20.0)
    assert len({plan.wall_s for plan in decide(work, spots, hazard=nervous).plans}) == 2
    wall_s = only(work, spots[0], hazard=nervous).wall_s
    answer = decide(replace(work, deadline_s=wall_s * 2.5), spots, hazard=nervous)
    assert [plan.offer.zone for plan in answer.plans] == ["good"]
    assert answer.plans[0].chance > 0.9
    assert [one.offer.zone for one in answer.rejected] == ["bad"]


def test_a_run_is_promised_what_torch_allocates_for_it():
    asked = wanted_of(micro_batch_tokens=1024, checkpoint_every=1)
    plan = only(asked, RTX_4090)
    assert estimate_of(plan, asked).peak_bytes == plan.on.memory.allocated.n_bytes
    assert plan.on.memory_range.likely > plan.on.memory.allocated.n_bytes + 2**29, "and a context"


def test_capacity_that_never_lasts_a_start_is_refused():
    found = refused(wanted_of(), SPOT, hazard=lambda _: Interruptions(weibull(0.1)))
    assert found.reason == "interruptions come faster than work is saved"


# ---- what else is paid for ----


def test_managed_training_is_listed_with_its_fee_the_cheapest_first():
    fee = offer_of("", 250.0, 0, provider="M", unit="run")
    by_token = offer_of("", 0.5, 0, provider="N", unit="million_tokens")
    asked = wanted_of()
    trained = asked.n_steps * asked.global_batch * asked.lengths.mean / 1e6
    found = fees_of(asked, "m", 1024, [fee, by_token], TODAY)
    assert [(one.provider, one.usd) for one in found if not one.is_known] == [
        ("N", pytest.approx(0.5 * trained)),
        ("M", 250.0),
    ]


@pytest.mark.parametrize(("store", "sends_saves"), [("", 0), ("s3://a/b", 0), ("gs://a/b", 1)])
def test_checkpoints_that_go_to_a_store_elsewhere_are_egress(store, sends_saves):
    wanted = wanted_of(method="full", save_every_s=600.0, store=store)
    there = place("H100-80GB", 2.0, provider="AWS")
    plan = only(wanted, there)
    n_saves = sends_saves * (plan.seconds["training"] // 600 + 1)
    expected = (wanted.n_trainable * 4 + n_saves * wanted.save_bytes) * 9e-11
    assert plan.usd["egress"] == pytest.approx(expected)
    here = only(wanted, there.but(is_local=True))
    assert not {"egress", "storage"} & set(here.usd)


def test_a_host_without_room_for_the_copy_of_a_checkpoint_takes_it_at_the_pace_of_its_disk():
    wanted = wanted_of(method="full")
    gib = wanted.save_bytes / 2**30
    unknown, roomy, short = (
        only(wanted, place("H100-80GB", 2.0).sold(ram_gib=ram)).seconds["checkpoints"]
        for ram in (None, 2.1 * gib, 1.9 * gib)
    )
    assert short > 2 * roomy
    assert unknown == roomy


# ---- weights in main memory ----


def with_ram(gpu: str, usd: float, gib: float, n_gpus: int = 1) -> Place:
    return place(gpu, usd, n_gpus).sold(ram_gib=gib)


def test_weights_stay_on_the_gpu_where_they_fit_and_where_main_memory_is_short_or_not_known():
    asked = wanted_of(EIGHT, method="full")
    whole = only(asked, with_ram("B200", 5.0, 512.0))
    assert (whole.to_set, whole.on.host_bytes) == ((), 0)
    for small in (with_ram("RTX 4090", 0.5, 64.0), RTX_4090):
        assert refused(asked, small).reason.startswith("needs ")


def test_8b_in_full_fits_one_gpu_of_80_gb_without_copies_in_fp32():
    asked = wanted_of(EIGHT, method="full", spreads=False)
    change = refused(asked, place("H100-80GB", 2.5)).change
    setting, _, quality = change.partition(" (")
    assert setting.endswith("train.optim: adamw_bf16_stochastic_round")
    assert "arXiv 2502.20566" in quality
    plan = only(follow(asked, change), place("H100-80GB", 2.5))
    n = asked.shape.n_parameters
    assert plan.on.memory.parts["weights"] == 2 * n
    assert plan.on.memory.parts["optimizer"] == 4 * n
    old = at(offer_of("V100-16GB", 0.3), follow(asked, change)).machine
    assert old.reason.endswith("computes in bf16, and V100-16GB in fp16")


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({"spreads": False}, "bf16"),
        ({"may_spread": False}, "bf16"),
        ({"optim": "adamw_8bit"}, "bf16"),
        ({"precision": "fp16"}, "fp16"),
    ],
)
def test_weights_that_training_refuses_to_spread_are_not_planned_in_main_memory(changes, precision):
    asked = wanted_of("meta-llama/Llama-2-13b-hf", method="full", **changes)
    there = with_ram("RTX 4090", 0.5, 512.0).but(precision=precision)
    assert refused(asked, there).reason.startswith("needs ")
    told = refused(replace(asked, offloads_weights=True), there)
    assert told.reason.startswith("weights can't be kept in main memory: ")


def test_what_the_job_asks_for_is_planned_also_where_it_would_fit_otherwise():
    asked = wanted_of(EIGHT, method="full", offloads_weights=True)
    plan = only(asked, place("B200", 5.0))
    plain = only(replace(asked, offloads_weights=False), place("B200", 5.0))
    assert plan.recipe.offloads_weights
    assert plan.on.step.seconds > plain.on.step.seconds
    short = refused(asked, with_ram("B200", 5.0, 64.0))
    assert short.reason == "needs 119.7 GiB of main memory, has 64.0 GiB"


def test_more_gpus_bring_fewer_rows_each_and_adapters_leave_only_the_base_in_main_memory():
    asked = wanted_of(EIGHT, method="full", offloads_weights=True)
    one, two = (only(asked, with_ram("A100-80GB", 2.0, 512.0, n)) for n in (1, 2))
    assert one.on.host_bytes == two.on.host_bytes
    each, half = (
        plan.on.step.parts["weights from the host"] / plan.recipe.n_micro_batches
        for plan in (one, two)
    )
    assert half == pytest.approx(each / 2)
    assert one.to_set == ("where.strategy: fsdp", "where.offload_weights: true")
    assert two.to_set == ("where.gpus: all", *one.to_set)
    adapted = replace(asked, method="lora")
    lora = only(adapted, place("RTX 3090", 0.2))
    assert lora.on.host_bytes == 2 * asked.shape.n_parameters
    assert lora.on.memory.parts["weights"] == 4 * adapted.n_trainable


def test_an_off_loaded_optimizer_needs_main_memory_too():
    asked = wanted_of(EIGHT, method="full", optim="adamw_torch_offload", checkpoint_every=1)
    assert only(asked, A100).on.host_bytes == 16 * asked.shape.n_parameters
    short = with_ram("A100-80GB", 2.0, 100.0)
    assert refused(asked, short).reason.endswith("of main memory, has 100.0 GiB")


def test_checkpoints_where_nobody_takes_the_machine_are_youngs_for_a_crash_a_week():
    found = [quiet_interval_s(save_s) for save_s in (0.0001, 0.1, 10.0)]
    assert found == pytest.approx([60.0, 347.793, 1800.0], abs=1e-3)


def test_errors_are_alike_within_era_kind_and_precision():
    llama = shape_of(EIGHT)
    assert class_of(llama, "Volta", "fp16") == ("old", "causal", "16")
    assert class_of(llama, "Turing", "fp16") == ("old", "causal", "16")
    assert class_of(llama, "Ada", "fp32") == ("recent", "causal", "fp32")
    kinds = {
        "google/gemma-3-1b-it": "small",
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0": "causal",
        "google/flan-t5-base": "pair",
        "google-bert/bert-base-uncased": "encoder",
        "mistralai/Mixtral-8x7B-v0.1": "experts",
    }
    assert {name: class_of(shape_of(name), "Ada", "bf16")[1] for name in kinds} == kinds


def test_ranges_of_farthings_own_runs_come_before_those_of_other_trainers():
    found = {name: only(wanted_of(), place(name, 2.0)).on for name in ("H100-80GB", "L4")}
    h100, l4 = found["H100-80GB"], found["L4"]
    assert h100.memory_spread[:2] == (0.9, 1.1)
    assert not l4.memory_spread.is_own
    assert h100.speed_spread.high < 1.3 < l4.speed_spread.high
    old = only(wanted_of(), place("T4", 0.3)).on
    assert not old.memory_spread.is_own
    assert not l4.speed_spread.is_own


def test_what_must_fit_is_farthings_own_count_not_the_range_of_other_trainers():
    on = only(wanted_of("meta-llama/Llama-2-7b-hf"), RTX_4090).on
    certain = on.memory.certain_on_device.n_bytes
    most = certain + 1.2 * (on.memory_range.likely - certain)
    assert most <= on.machine.memory.n_bytes < on.memory_range.high
    assert not on.is_tight
