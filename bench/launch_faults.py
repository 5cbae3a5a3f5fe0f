"""Launches that go wrong in every way a scripted provider knows, watched by a supervisor that may
be killed at any line.

    python bench/launch_faults.py --faults 500 --first-seed 0 --json

A case is a provider (RunPod, Vast.ai), a series of faults, and moments at which our process dies
and is started anew; in some it never comes back. Afterwards no machine may be left, no two may have
trained at once, and what all have really cost may pass the cap by the boot limit times the price at
most.

One thing can be left, and is counted apart as `left_loading`: where our process dies for ever
between the two requests of a creation at Vast.ai, and that instance never boots, nothing ends it.
It costs its disk then, not its GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from fake_clouds import FAULTS, World
from farthing.config.job import Job
from farthing.errors import EXIT_MISTAKE, InputError
from farthing.launch.clients import RunPod, Vast
from farthing.launch.http import Api
from farthing.launch.inputs import Packed
from farthing.launch.prepare import S3_KEYS, Prepared, Wishes
from farthing.launch.registry import TARGETS
from farthing.launch.request import LaunchRequest
from farthing.launch.supervise import Launch
from farthing.prices.offers import Billing, Offer
from farthing.run.accounts import Account
from farthing.run.machines import MachineLedger

PROVIDERS = {"runpod": "RunPod", "vast": "Vast.ai"}
GPUS = ("RTX 4090", "RTX 3090", "A40", "L40S", "RTX 5090", "H100-80GB")
DAY = date(2026, 11, 22)


class Killed(BaseException):
    """Our process is dead from here on."""


class Mortal:
    """A value whose calls count down to the death of the process: it dies before or after one of
    them is carried out.
    """

    def __init__(self, inner: Any, fate: Fate) -> None:
        self._inner, self._fate = inner, fate

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **more: Any) -> Any:
            self._fate.before()
            result = found(*args, **more)
            self._fate.after()
            return result

        return call


class Fate:
    """When the process dies: at the n-th call, before it or after."""

    def __init__(self, n: int | None, *, is_before: bool) -> None:
        self.left, self.is_before = n, is_before

    def before(self) -> None:
        """A call begins."""
        if self.left is not None:
            self.left -= 1
            if self.left <= 0 and self.is_before:
                raise Killed

    def after(self) -> None:
        """A call has come back."""
        if self.left is not None and self.left <= 0:
            raise Killed


def prepared_for(provider: str, folder: Path, max_usd: float, usd_per_hour: float) -> Prepared:
    """A launch over six offers."""
    job = Job.model_validate(
        {
            "task": "causal-lm",
            "model": "org/model",
            "data": "org/data",
            "output_dir": str(folder),
            "output_store": f"s3://bucket/{folder.name}",
            "limits": {"max_usd": max_usd},
        }
    )
    offers = tuple(
        Offer(
            PROVIDERS[provider],
            f"1x {gpu} secure",
            gpu,
            1,
            "any",
            "",
            n % 2 == 1,
            "machine_hour",
            usd_per_hour,
            "made up",
            DAY,
            Billing(PROVIDERS[provider]),
        )
        for n, gpu in enumerate(GPUS)
    )
    return Prepared(job, TARGETS[provider], "", Wishes(), offers, {}, Packed())


def supervise(
    world: World,
    prepared: Prepared,
    folder: Path,
    fate: Fate,
    *,
    stop: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """One life of our process, or one `--stop`; its exit code. It dies between two requests of one
    creation too. Raises
    `Killed`."""
    ledger = MachineLedger(folder)
    send = Mortal(world, fate).send
    api = Api("https://api.example", {"Authorization": "Bearer key"}, send=send, sleep=world.sleep)
    driver = RunPod(api) if world.provider == "runpod" else Vast(api)

    def make_ask(number: int, offer: Offer, accounts: list[Account]) -> LaunchRequest:
        ask = prepared.ask(number, offer, ledger, accounts, world.now)
        world.asks[ask.name] = ask
        return ask

    launch = Launch(
        Mortal(ledger, fate),
        Mortal(driver, fate),
        prepared.offers,
        make_ask,
        world,
        say=say,
        clock=world.clock,
        sleep=world.sleep,
    )
    try:
        if stop:
            launch.stop(prepared.launch_id)
            return 0
        return launch.run(prepared.launch_id)
    finally:
        ledger.close()


def run_case(seed: int) -> dict[str, Any]:
    """One faulty launch; what became of it."""
    dice = random.Random(seed)
    os.environ |= dict.fromkeys(S3_KEYS, "no key")
    provider = dice.choice(tuple(PROVIDERS))
    world = World(provider, script=[dice.choice(FAULTS) for _ in range(dice.randrange(1, 9))])
    max_usd = dice.choice((0.3, 0.7, 1.5, 4.0))
    n_deaths = dice.choice((0, 0, 1, 2, 3))
    returns = dice.random() > 0.15
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name) / "run"
        prepared = prepared_for(provider, folder, max_usd, world.usd_per_hour)
        code: int | None = None
        for life in range(n_deaths + 1):
            is_last = life == n_deaths
            fate = Fate(
                None if is_last and returns else dice.randrange(1, 60),
                is_before=dice.random() < 0.5,
            )
            try:
                code = supervise(world, prepared, folder, fate)
                break
            except InputError:
                code = EXIT_MISTAKE
                break
            except Killed:
                world.sleep(dice.choice((1, 30, 400, 4000)))
        if not returns:
            world.sleep(40 * 3600)
        ledger = MachineLedger(folder)
        counted = ledger.usd(world.now)
        open_ = [machine.name for machine in ledger.open]
        ledger.close()
    boot_usd = prepared.wishes.boot_s / 3600 * world.usd_per_hour
    loading = [] if returns else world.loading
    usd = world.usd - sum(map(world.usd_of, loading))
    return {
        "seed": seed,
        "provider": provider,
        "script": world.script,
        "max_usd": max_usd,
        "n_deaths": n_deaths,
        "returns": returns,
        "code": code,
        "saved": world.saved,
        "n_steps": world.n_steps,
        "n_machines": len(world.machines),
        "leaked": world.n_alive - len(loading),
        "left_loading": len(loading),
        "double": world.n_double,
        "usd": usd,
        "counted_usd": counted,
        "open": open_,
        "over_usd": max(0.0, usd - max_usd),
        "may_be_over_usd": boot_usd,
    }


def is_good(case: dict[str, Any]) -> bool:
    """Whether a case kept every promise. What was counted is what it cost; more where our process
    was away when it ended.
    """
    off_usd = case["counted_usd"] - case["usd"]
    counted = not case["returns"] or (off_usd > -0.05 and (off_usd < 0.05 or case["n_deaths"] > 0))
    ended = not case["returns"] or (case["code"] is not None and not case["open"])
    kept = (
        case["leaked"] == 0
        and case["double"] == 0
        and case["over_usd"] <= case["may_be_over_usd"] + 1e-9
    )
    return kept and ended and counted


def main() -> int:
    """Run the cases; 1 where one is bad."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=500, metavar="N", help="launches")
    parser.add_argument("--first-seed", type=int, default=0, metavar="K")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    began = time.perf_counter()
    cases = [
        run_case(seed)
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.faults)
    ]
    bad = [case for case in cases if not is_good(case)]
    result = {
        "kind": "farthing launch faults",
        "launches": len(cases),
        "bad": bad,
        "leaked": sum(case["leaked"] for case in cases),
        "left_loading": sum(case["left_loading"] for case in cases),
        "double_trainers": sum(case["double"] > 0 for case in cases),
        "most_over_usd": max(case["over_usd"] for case in cases),
        "may_be_over_usd": cases[0]["may_be_over_usd"],
        "machines": sum(case["n_machines"] for case in cases),
        "deaths": sum(case["n_deaths"] for case in cases),
        "finished": sum(case["code"] == 0 for case in cases),
        "wall_s": time.perf_counter() - began,
    }
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        print(
            f"{len(cases)} launches, {result['machines']} machines, {result['deaths']} deaths of"
            " our process"
        )
        print(
            f"{result['leaked']} leaked ({result['left_loading']} left loading),"
            f" {result['double_trainers']} double trainers"
        )
        print(
            f"{len(bad)} bad, {result['finished']} finished; most over the cap"
            f" ${result['most_over_usd']:.3f}"
        )
        for case in bad:
            print(json.dumps(case))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
