"""When each machine of a launch was asked for, was there and was gone, to the second, and what it
cost, under each fault: `PYTHONPATH=bench python tests/test_launch_courses.py` writes the file anew.
"""

import json
import os
import tempfile
from pathlib import Path

import pytest

from fake_clouds import FAULTS, World
from farthing.errors import FarthingError
from farthing.launch.machines import MachineLedger
from launch_faults import Fate, Killed, prepared_for, supervise
from launched import ALIVE
from launched import keys as keys
from thinned import thinned

COURSES = Path(__file__).parent / "golden/launch_courses.json"
DEATHS = [(kind, n) for kind in ("kill", "signal") for n in (3, 9, 25)]
EVENTS = ("asked", "created", "booted", "left", "gone")
CAPS = {"tight": 0.2, "short": 0.03}


def course_of(provider: str, what: str, folder: Path):
    """[exit code of each life, a line a machine, dollars]."""
    fault, _, death = what.partition("/")
    kind, _, n = death.partition(" ")
    usd_cap = CAPS.get(death, 4.0)
    world = World(provider, n_steps=150, script=[fault])
    began, codes = world.now, []
    prepared = prepared_for(provider, folder, usd_cap, 0.4)
    for fate in [*([Fate(int(n), is_before=True, kind=kind)] if n else []), ALIVE]:
        try:
            codes.append(str(supervise(world, prepared, folder, fate)))
        except (Killed, FarthingError) as error:
            codes.append(type(error).__name__)
    ledger = MachineLedger(folder)
    machines = []
    for machine in ledger.machines.values():
        times = [(name, getattr(machine, f"{name}_at")) for name in EVENTS]
        parts = [f"{name} {round(at - began)}" for name, at in times if at]
        machines.append(" ".join([machine.provider, machine.instance, *parts]))
    usd = ledger.usd(world.now)
    assert (world.n_alive, world.n_double, ledger.open) == (0, 0, [])
    assert usd == pytest.approx(world.usd, abs=0.03)
    assert world.usd <= usd_cap
    return [codes, machines, round(usd, 3), round(world.usd, 3)]


def cases():
    found = [(provider, fault) for provider in ("runpod", "vast", "lambda") for fault in FAULTS]
    found += [("runpod", f"/{cap}") for cap in CAPS]
    return found + [
        (provider, f"{fault}/{kind} {n}")
        for provider in ("runpod", "lambda")
        for fault in ("", "taken away", "gets dearer on the way")
        for kind, n in DEATHS
    ]


@pytest.mark.parametrize(("provider", "what"), thinned(cases(), 8))
def test_a_launch_takes_the_course_that_it_took(provider, what, tmp_path):
    wanted = json.loads(COURSES.read_text())[f"{provider}: {what}"]
    *course, usd, real_usd = course_of(provider, what, tmp_path / "run")
    assert course == wanted[:2]
    assert [usd, real_usd] == pytest.approx(wanted[2:], abs=0.002)


if __name__ == "__main__":
    os.environ |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "no key")
    rows = {}
    for provider, what in cases():
        with tempfile.TemporaryDirectory() as folder:
            rows[f"{provider}: {what}"] = course_of(provider, what, Path(folder) / "run")
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
    COURSES.write_text("{\n" + lines + "\n}\n")
