"""Every offer of the price table on every target: rendered, checked by farthing's own rules and by
the target's schema.

    python bench/launch_matrix.py --json
    python bench/launch_matrix.py --tools .venv/launch --sky .venv/sky     # with the targets' own
    validators

An offer that a target cannot rent (another provider's, a GPU that it does not have, several GPUs)
is refused with a reason and counted apart; of what is rendered everything has to be right.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from farthing.config.job import Job
from farthing.launch.inputs import Packed
from farthing.launch.machines import MachineLedger
from farthing.launch.prepare import NoBudgetError, Prepared, Wishes
from farthing.launch.registry import TARGETS, called
from farthing.prices.catalog import read_catalog
from farthing.prices.offers import Billing, Offer
from launch_rules import AT, RULES

DAY = date(2026, 11, 22)
HERE = Path(__file__).resolve().parent


def cases(every: int = 1) -> Iterator[tuple[str, Offer]]:
    """(target, offer), of all or of every so-manieth offer; one that each target has is among them."""  # noqa: E501
    offers = [offer for offer in read_catalog(None, DAY).offers if offer.usd_per_hour is not None]
    for target in TARGETS:
        known = [offer for offer in offers if why_not(target, offer) == ""]
        yield from (
            (target, offer) for offer in {id(o): o for o in [*offers[::every], *known[:1]]}.values()
        )


def why_not(target: str, offer: Offer) -> str:
    """Why a target can't rent an offer; empty where it can."""
    if TARGETS[target].providers and offer.provider not in TARGETS[target].providers:
        return "another provider's"
    if called(TARGETS[target], offer) is None:
        return "a GPU that it does not have"
    return ""


def prepared_on(target: str, offer: Offer) -> Prepared:
    """A launch of a plain job on one offer."""
    job = Job.model_validate(
        {
            "task": "causal-lm",
            "model": "org/model",
            "data": "org/data",
            "output_dir": "/shared/run",
            "limits": {"max_usd": 50},
            "output_store": "s3://bucket/run",
        }
    )
    at = AT.get(target, "").partition(":")[2]
    if not TARGETS[target].providers:
        offer = replace_provider(offer, target)
    return Prepared(
        job,
        TARGETS[target],
        at,
        Wishes(image="registry.example/farthing:1"),
        (offer,),
        {},
        Packed(),
    )


def replace_provider(offer: Offer, target: str) -> Offer:
    """The same machine as one's own, at that price."""
    return offer._replace(
        provider=TARGETS[target].title, instance="gpu1.example", billing=Billing(target)
    )


@cache
def _nobody() -> MachineLedger:
    return MachineLedger(Path("/nonexistent"))


def outcome_of(target: str, offer: Offer) -> dict[str, Any]:
    """Rendered and right, refused, or wrong; with the files."""
    row: dict[str, Any] = {
        "target": target,
        "offer": f"{offer.provider} {offer.n_gpus}x {offer.gpu} {offer.kind}",
        "files": {},
    }
    why = why_not(target, offer)
    if why:
        return row | {"state": "refused", "why": why}
    prepared = prepared_on(target, offer)
    try:
        ask = prepared.ask(1, prepared.offers[0], _nobody(), [], 1.8e9)
    except NoBudgetError as error:
        return row | {"state": "refused", "why": str(error)}
    files = prepared.target.files(ask)
    wrong = RULES[target](files)
    return row | {"state": "wrong" if wrong else "ok", "why": "; ".join(wrong), "files": files}


def FILES_OF_CASE(target: str) -> dict[str, str]:
    """The files of one offer on a target, an H100 where it has one."""
    offers = [
        offer
        for offer in read_catalog(None, DAY).offers
        if offer.usd_per_hour is not None and not why_not(target, offer)
    ]
    best = next((offer for offer in offers if offer.gpu == "H100-80GB"), offers[0])
    return dict(outcome_of(target, replace_offer(best))["files"])


def replace_offer(offer: Offer) -> Offer:
    """The same offer at a price that any cap can pay."""
    return offer._replace(usd=1.0, unit="machine_hour")


def validated(rows: list[dict[str, Any]], python: Path, kinds: tuple[str, ...]) -> list[str]:
    """What the targets' own validators, installed beside `python`, say of the files; the number of
    files looked at last.
    """
    files = [
        {"target": row["target"], "offer": row["offer"], "name": name, "text": text}
        for row in rows
        if row["state"] == "ok" and row["target"] in kinds
        for name, text in row["files"].items()
    ]
    done = subprocess.run(
        [str(python), str(HERE / "launch_schemas.py")],
        input=json.dumps(files),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the validators could not be run: {done.stderr[-500:]}")
    return list(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Run it; 1 where something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tools",
        type=Path,
        help="an environment with kubernetes-validate and google-cloud-aiplatform",
    )
    parser.add_argument("--sky", type=Path, help="an environment with skypilot")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="only each N-th offer (default: all)"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    began = time.perf_counter()
    rows = [outcome_of(target, offer) for target, offer in cases(arguments.every)]
    wrong = [
        f"{row['target']}, {row['offer']}: {row['why']}" for row in rows if row["state"] == "wrong"
    ]
    by_schema: dict[str, int] = {}
    for folder, kinds in (
        (arguments.tools, ("kubernetes", "vertex")),
        (arguments.sky, ("skypilot",)),
    ):
        if folder is not None:
            wrong += validated(rows, folder / "bin" / "python", kinds)
            by_schema |= {
                kind: sum(row["state"] == "ok" and row["target"] == kind for row in rows)
                for kind in kinds
            }
    counts = {
        target: dict(Counter(row["state"] for row in rows if row["target"] == target))
        for target in TARGETS
    }
    result = {
        "kind": "farthing launch matrix",
        "cases": len(rows),
        "targets": counts,
        "wrong": wrong,
        "by_schema": by_schema,
        "refused": dict(Counter(row["why"] for row in rows if row["state"] == "refused")),
        "wall_s": time.perf_counter() - began,
    }
    print(
        json.dumps(result, indent=1)
        if arguments.json
        else f"{len(rows)} cases, {len(wrong)} wrong: {counts}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
