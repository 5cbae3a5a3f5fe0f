"""Launches that go wrong in every way a scripted provider knows, watched by a supervisor that may
be killed at any line.

    python bench/launch_faults.py --faults 500 --first-seed 0

A case is a provider (RunPod, Vast.ai, Lambda), a series of faults, and moments at which our process
is killed, told to leave, or suspended while another one takes over; clocks of the processes differ
by up to two days. In some cases our process never comes back. Afterwards no machine may be left, no
two may have trained at once, and what all have really cost may not pass the cap.

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

import httpx

from fake_clouds import FAULTS, World
from farthing.config.job import Job
from farthing.errors import EXIT_INTERRUPTED, EXIT_MISTAKE, InputError, RunInterruptedError
from farthing.launch.driver import Driver
from farthing.launch.http import TIMEOUT_S, Api
from farthing.launch.machines import MachineLedger
from farthing.launch.prepare import S3_KEYS, Prepared, Wishes
from farthing.launch.registry import TARGETS
from farthing.launch.supervise import Launch
from farthing.launch.targets.lambda_cloud import Lambda
from farthing.launch.targets.runpod import RunPod
from farthing.launch.targets.vast import Vast
from farthing.prices.offers import Billing, Offer

PROVIDERS = {"runpod": "RunPod", "vast": "Vast.ai", "lambda": "Lambda"}
GPUS = ("RTX 4090", "RTX 3090", "A40", "L40S", "RTX 5090", "H100-80GB")
DAY = date(2026, 11, 22)
ANSWER_S = TIMEOUT_S + Driver.late_s
"""A request waits so long for its answer, and a provider's list for its machine."""


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
    """What befalls the process at the n-th call, before it or after: it is killed (SIGKILL), told
    to leave (SIGTERM, SIGHUP, Ctrl-C), or suspended while `meanwhile` happens.
    """

    def __init__(
        self,
        n: int | None,
        *,
        is_before: bool,
        kind: str = "kill",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.left, self.is_before, self.kind, self.meanwhile = n, is_before, kind, meanwhile

    def before(self) -> None:
        """A call begins."""
        if self.left is not None:
            self.left -= 1
            if self.left <= 0 and self.is_before:
                self._strike()

    def after(self) -> None:
        """A call has come back."""
        if self.left is not None and self.left <= 0:
            self._strike()

    def _strike(self) -> None:
        self.left = None
        if self.kind == "kill":
            raise Killed
        if self.kind == "signal":
            raise KeyboardInterrupt
        self.meanwhile()


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
    return Prepared(job, TARGETS[provider], "", Wishes(), offers)


def supervise(
    world: World,
    prepared: Prepared,
    folder: Path,
    fate: Fate,
    *,
    stop: bool = False,
    skew_s: float = 0.0,
    holder: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """One life of our process, or one `launch stop`; its exit code. Raises `Killed`."""
    ledger = MachineLedger(folder)
    mortal = Mortal(world, fate)
    api = Api(
        "https://api.example",
        {"Authorization": "Bearer key"},
        transport=httpx.MockTransport(lambda request: mortal.handle(request)),
        sleep=world.sleep,
        clock=world_clock(world, skew_s),
    )
    clients: dict[str, Any] = {"runpod": RunPod, "vast": Vast, "lambda": Lambda}
    driver = clients[world.provider](api)
    world.holder = holder

    launch = Launch(
        prepared,
        Mortal(ledger, fate),
        Mortal(driver, fate),
        world,
        write=lambda ask: world.asks.update({ask.name: ask}),
        say=say,
        clock=world_clock(world, skew_s),
        sleep=world.sleep,
        awake=world.clock,
        reclaim=lambda: reclaim(world, holder),
    )
    try:
        if stop:
            launch.stop()
            return 0
        return launch.run()
    except KeyboardInterrupt:  # Ctrl-C, SIGTERM or SIGHUP, as the command line treats them
        fate.left = None
        if not driver.ends_by_itself:
            launch.stop()
        return EXIT_INTERRUPTED
    finally:
        ledger.close()


def world_clock(world: World, skew_s: float) -> Callable[[], float]:
    """The clock of a machine that is off by so much."""
    return lambda: world.now + skew_s


def reclaim(world: World, holder: int) -> None:
    """As the lease does it. Raises `RunInterruptedError` where another process took over, and
    `UnclearError`."""
    world.kept()  # the store has to answer
    if world.holder != holder:
        raise RunInterruptedError("another process has taken this launch over")


def run_case(seed: int) -> dict[str, Any]:
    """One faulty launch; what became of it."""
    dice = random.Random(seed)
    os.environ |= dict.fromkeys(S3_KEYS, "no key")
    provider = dice.choice(tuple(PROVIDERS))
    world = World(provider, script=[dice.choice(FAULTS) for _ in range(dice.randrange(1, 9))])
    max_usd = dice.choice((0.3, 0.7, 1.5, 4.0))
    n_lives = 1 + dice.choice((0, 0, 1, 2, 3))
    returns = provider == "lambda" or dice.random() > 0.15  # nothing else ends a machine there
    kinds: list[str] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folders = [Path(name) / "run"]
        prepared = prepared_for(provider, folders[0], max_usd, world.usd_per_hour)
        code: int | None = None

        def live(life: int, fate: Fate, folder: Path) -> int | None:
            """One life; None where it was killed or lost the launch."""
            skew_s = dice.choice((0.0, 0.0, 0.0, -86400.0 * 2, 86400.0 * 2, 130.0, -40.0))
            try:
                return supervise(world, prepared, folder, fate, skew_s=skew_s, holder=life)
            except InputError:
                return EXIT_MISTAKE
            except (Killed, RunInterruptedError):
                return None

        def other() -> None:
            """While a watcher is suspended: its lease runs out, and another one takes over."""
            with world.unattended():
                world.sleep(dice.choice((10, 61, 900, 30_000)))
            if dice.random() < 0.7:
                folders.append(Path(name) / f"run-{len(folders)}")
                n = None if dice.random() < 0.5 else dice.randrange(1, 60)
                # that of the suspended one is locked
                live(1000 + len(folders), Fate(n, is_before=False), folders[-1])

        for life in range(n_lives):
            is_last = life == n_lives - 1 and returns
            kind = dice.choice(("kill", "kill", "signal", "suspend"))
            n = None if is_last else dice.randrange(1, 60)
            kinds += [] if n is None else [kind]
            fate = Fate(n, is_before=dice.random() < 0.5, kind=kind, meanwhile=other)
            code = live(life, fate, dice.choice(folders))
            if code not in (None, EXIT_INTERRUPTED):
                break
            with world.unattended():
                world.sleep(dice.choice((1, 30, 400, 4000)))
        last = MachineLedger(folders[-1])
        is_left = code == EXIT_MISTAKE and bool(last.open)  # until its user exports a valid key
        last.close()
        if returns and (code is None or is_left):
            code = live(n_lives, Fate(None, is_before=False), dice.choice(folders))
        if not returns:
            with world.unattended():
                world.sleep(40 * 3600)
        ledger = MachineLedger(folders[0])
        ledger.take_over(world.lines, to_disk=False)
        counted = ledger.usd(world.now)
        open_ = [machine.name for machine in ledger.open]
        ledger.close()
    # what nobody answered for counts from its request on, if we were away while it was looked for
    away_s = world.unattended_s and world.unattended_s + ANSWER_S * world.n_unanswered
    loading = [] if returns else world.loading
    usd = world.usd - sum(map(world.usd_of, loading))
    return {
        "seed": seed,
        "provider": provider,
        "script": world.script,
        "max_usd": max_usd,
        "kinds": kinds,
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
        "unattended_usd": world.unattended_usd,
        "unseen_usd": world.unseen_usd,
        "away_usd": away_s
        / 3600
        * max(
            [world.usd_per_hour, *(price for each in world.machines for _, price in each.prices)]
        ),
    }


def most_over_usd(case: dict[str, Any]) -> float:
    """How much more than its cap a case may cost: nothing where a process of ours is there. While
    none is, nothing ends a machine of Lambda, and nobody sees a price that rises.
    """
    away = case["unattended_usd"] if case["provider"] == "lambda" else case["unseen_usd"]
    return float(away)


def is_good(case: dict[str, Any]) -> bool:
    """Whether a case kept every promise. The bill is what the provider charged, within 1 % and a
    cent. What nobody of ours saw is another matter: a price above the one that was asked for may be
    missing, and a machine that ended, or never came, is counted for no longer than we were away.
    """
    off_usd = case["counted_usd"] - case["usd"]
    near_usd = 0.01 * case["usd"] + 0.01
    is_counted = -near_usd - case["unseen_usd"] < off_usd < near_usd + case["away_usd"]
    is_ended = case["code"] is not None and not case["open"]
    is_in_cap = case["over_usd"] <= most_over_usd(case) + 1e-9
    kept = case["leaked"] == 0 and case["double"] == 0 and is_in_cap
    return kept and (not case["returns"] or (is_counted and is_ended))


def main() -> int:
    """Run the cases; 1 where one is bad."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=500, metavar="N", help="launches")
    parser.add_argument("--first-seed", type=int, default=0, metavar="K")
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
        "most_over_usd": max(max(0.0, case["over_usd"] - most_over_usd(case)) for case in cases),
        "machines": sum(case["n_machines"] for case in cases),
        "blows": sum(len(case["kinds"]) for case in cases),
        "finished": sum(case["code"] == 0 for case in cases),
        "wall_s": time.perf_counter() - began,
    }
    print(json.dumps(result, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
