"""Machines lost under a launch, again and again: the run goes on elsewhere, to the same bits, with
one bill.

    python bench/launch_chains.py --chains 100 --first-seed 0 --json [--kind ssh|slurm|both]
    [--lanes 3] [--minutes M]

Several chains go side by side, each in a lane with machines of its own. A chain over ssh: three
machines (namespaces, see ssh_machines.py), one or two of which are lost at a moment that the seed
draws, disk and all. A chain over Slurm: a controller and two nodes (see slurm_cluster.py), where a
job of a better partition preempts the run, or its node is lost. Each is held against one run of the
same job that was left alone: every logged step and the exported model, to the bit. What all
machines have cost must be the sum of their seconds, each confirmed gone.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import ssh_machines
from farthing.config.load import load_job
from farthing.errors import InputError
from farthing.launch.prepare import Wishes, prepare
from farthing.launch.request import Patience
from farthing.launch.session import Session
from farthing.report.receipt import leave_receipt
from farthing.run.commits import list_commits
from farthing.storage.objects import Store, StoreError, open_store
from farthing.tiny import demo_rows, make_model_folder, write_jsonl

N_STEPS, SAVE_STEPS = 120, 12
QUICK = Patience(poll_s=1.0, boot_s=120.0, lost_s=3.0, silent_s=120.0, stubborn_s=1.0)
_ONE_AT_A_TIME = threading.Lock()


def write_job(folder: Path, store: Path | None, n_steps: int = N_STEPS) -> Path:
    """A small model, data and job in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = demo_rows(120)
    with _ONE_AT_A_TIME:  # it seeds the random numbers of the whole process
        make_model_folder(
            folder / "base", [row["prompt"] + row["completion"] for row in rows], dropout=0.1
        )
    write_jsonl(folder / "data.jsonl", rows)
    values = {
        "task": "causal-lm",
        "model": {"model_name_or_path": "./base", "init": "random"},
        "data": "data.jsonl",
        "method": "full",
        "where": {"device": "cpu", "usd_per_hour": 3.6},
        "limits": {"max_usd": 50},
        "output_dir": "./run",
        "cache_dir": "./cache",
        "train": {
            "max_steps": n_steps,
            "global_batch_size": 8,
            "learning_rate": 0.003,
            "save_steps": SAVE_STEPS,
        },
        **({"output_store": str(store)} if store else {}),
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def result_of(run: Path) -> dict[str, Any]:
    """What a run has come to, to be compared to the bit."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = {
        row["step"]: [row.get("examples"), row["loss"], row.get("grad_norm")]
        for row in rows
        if "examples" in row
    }
    files = sorted(path for path in (run / "model").rglob("*.safetensors"))
    return {
        "steps": steps,
        "model": [hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
    }


def left_alone(folder: Path, n_steps: int = N_STEPS) -> dict[str, Any]:
    """The same job on this machine, uninterrupted."""
    job = write_job(folder, None, n_steps)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    words = [sys.executable, "-m", "farthing", "train", str(job)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return result_of(folder / "run")


def saved_step(store: Store) -> int:
    """The newest step in a store."""
    try:
        return max((commit.step for commit in list_commits(store)), default=0)
    except StoreError:
        return 0


def judged(session: Session, code: int, reference: dict[str, Any]) -> list[str]:
    """What of a launch is not as it should be."""
    if code != 0:
        with contextlib.suppress(InputError):
            return [f"it ended with {code}: {session.log()[-2000:]}"]
        return [f"it ended with {code}"]
    wrong = [] if result_of(session.folder) == reference else ["it is not the same to the bit"]
    receipt = leave_receipt(session.folder)
    rows = receipt.machines
    if [row["state"] for row in rows] != ["gone"] * len(rows):
        wrong.append(f"machines are {[row['state'] for row in rows]}")
    for row in rows:
        if abs(sum(row["usd_of"].values()) - row["usd"]) > 1e-6:
            wrong.append(f"the parts of {row['name']} do not add up")
    on_machines = sum(row["seconds"]["train"] for row in rows)
    if abs(on_machines - receipt.wall_s) > 0.05 * receipt.wall_s + 1.0:
        wrong.append(f"{receipt.wall_s:.1f} s of training, {on_machines:.1f} s of them on machines")
    return wrong


def ssh_chain(
    seed: int, folder: Path, machines: Sequence[ssh_machines.Machine], reference: dict[str, Any]
) -> dict[str, Any]:
    """One chain over some machines of a fleet; they are all up again afterwards."""
    dice = random.Random(seed)
    store = open_store(str(folder / "store"))
    job = write_job(folder / "job", folder / "store")
    moments = sorted(dice.sample(range(1, N_STEPS // SAVE_STEPS), dice.choice((1, 1, 2))))
    wishes = Wishes(on="ssh:" + ",".join(machine.name for machine in machines))
    said: list[str] = []
    session = Session(prepare(load_job(job), wishes, datetime.now(UTC)), said.append)
    lost: list[str] = []
    stop = threading.Event()

    def take_away() -> None:
        for moment, machine in zip(moments, machines, strict=False):
            while saved_step(store) < moment * SAVE_STEPS and not stop.is_set():
                time.sleep(0.1)
            time.sleep(dice.random() * 0.3)
            if not stop.is_set():
                lost.append(f"{machine.name} after step {saved_step(store)}")
                machine.lose()
                time.sleep(QUICK.lost_s)
                machine.boot()  # what has its address now is empty

    thread = threading.Thread(target=take_away)
    thread.start()
    try:
        code = session.run(is_attended=True, tokenize=list, patience=QUICK)
    finally:
        stop.set()
        thread.join()
    wrong = judged(session, code, reference)
    return {
        "seed": seed,
        "kind": "ssh",
        "lost": lost,
        "n_machines": len(session.ledger.machines),
        "wrong": wrong,
        "said": said if wrong else [],
    }


MACHINES_OF_A_LANE = 3


def run_ssh(
    seeds: range, folder: Path, reference: dict[str, Any], n_lanes: int = 1, until: float = math.inf
) -> list[dict[str, Any]]:
    """Chains over one fleet, three machines for each lane."""
    n = MACHINES_OF_A_LANE
    with (
        ssh_machines.Fleet(folder / "fleet", n * n_lanes) as fleet,
        environment(FARTHING_SSH=" ".join(fleet.ssh)),
    ):

        def chain(seed: int, lane: int) -> dict[str, Any]:
            return ssh_chain(
                seed, folder / f"ssh{seed}", fleet.machines[lane * n : (lane + 1) * n], reference
            )

        return side_by_side(chain, seeds, folder, n_lanes, until)


def side_by_side(
    chain: Callable[[int, int], dict[str, Any]],
    seeds: range,
    folder: Path,
    n_lanes: int,
    until: float,
) -> list[dict[str, Any]]:
    """`chain(seed, lane)` of every seed, as many at a time as there are lanes; what one finds goes
    to stderr at once. The folder of a chain that is as it should be is removed. None is begun after
    `until`, by the monotonic clock."""
    lanes: queue.SimpleQueue[int] = queue.SimpleQueue()
    for lane in range(n_lanes):
        lanes.put(lane)

    def one(seed: int) -> list[dict[str, Any]]:
        if time.monotonic() > until:
            return []
        lane = lanes.get()
        try:
            found = chain(seed, lane)
        finally:
            lanes.put(lane)
        if not found["wrong"]:
            shutil.rmtree(folder / f"{found['kind']}{seed}")
        print(
            f"{found['kind']} {seed}: {found['wrong'] or 'equal'}; lost {found['lost']}",
            file=sys.stderr,
            flush=True,
        )
        return [found]

    with ThreadPoolExecutor(n_lanes) as pool:
        return [chain for found in pool.map(one, seeds) for chain in found]


@contextlib.contextmanager
def environment(**values: str) -> Any:
    """Variables that are set for the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def main() -> int:
    """Run the chains; 1 where one is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chains", type=int, default=4, metavar="N", help="of each kind")
    parser.add_argument("--first-seed", type=int, default=0, metavar="K")
    parser.add_argument("--kind", choices=("ssh", "slurm", "both"), default="both")
    parser.add_argument(
        "--lanes", type=int, default=3, metavar="L", help="chains side by side (default: 3)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        metavar="M",
        help="of each kind: then none is begun",
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(1)
    )  # machines and daemons are taken down then too
    import slurm_cluster

    kinds: dict[str, tuple[Callable[[], str], Callable[..., list[dict[str, Any]]]]] = {
        "ssh": (ssh_machines.why_not, run_ssh),
        "slurm": (slurm_cluster.why_not, slurm_cluster.run_slurm),
    }
    chosen = list(kinds) if arguments.kind == "both" else [arguments.kind]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.chains)
    began, chains, skipped = time.perf_counter(), [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = left_alone(folder / "alone")
        for kind in chosen:
            cannot, run = kinds[kind]
            if why := cannot():
                skipped[kind] = why
                print(f"no chains over {kind}: {why}", file=sys.stderr)
            else:
                until = time.monotonic() + 60 * arguments.minutes
                chains += run(seeds, folder, reference, arguments.lanes, until)
    bad = [chain for chain in chains if chain["wrong"]]
    result = {
        "kind": "farthing launch chains",
        "chains": len(chains),
        "equal": len(chains) - len(bad),
        "bad": bad,
        "skipped": skipped,
        "lost": sum(len(chain["lost"]) for chain in chains),
        "undisturbed": [chain["seed"] for chain in chains if not chain["lost"]],
        "first_seed": arguments.first_seed,
        "kinds": {kind: sum(chain["kind"] == kind for chain in chains) for kind in chosen},
        "lanes": arguments.lanes,
        "wall_s": time.perf_counter() - began,
    }
    print(json.dumps(result, indent=1) if arguments.json else result)
    return 1 if bad or not chains else 0


if __name__ == "__main__":
    sys.exit(main())
