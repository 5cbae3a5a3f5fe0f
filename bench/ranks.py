"""Several processes against one: the same gradients, as many collectives, the same bits after
kills.

    python bench/ranks.py --json [--seeds 3] [--first-seed 0]

Gradients of the first step: for each task, method, tied or untied embeddings, uneven lengths, and
fewer examples than ranks; the worst relative error of any weight against one process. Bits: a seed
draws a job, on how many processes it begins, which of them is killed and when, and on how many it
goes on; one sha256 of weights, moments and losses is wanted of all, and of 1, 2, 3 and 4 processes
undisturbed, half of them with frozen weights that are spread. Full training whose weights are
spread: killed and resumed in the same way, its losses and last weights are to be those of one
process to rounding. CPU only.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import command, play, seeds_of
from farthing.run.group import Elastic
from forked import FULL, TASKS, apart, make_job, run_on, sha256_of, start_of

TOLERANCE = 1e-5
COLLECTIVES = (
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
"""Those that carry weights and gradients; some are names of torch 2.13, some of before."""


def note_gradients(folder: str, rank: int, attempt: int) -> None:
    """In a rank: keep the gradients of the first step as they are before clipping, and the number
    of collectives on them.
    """
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    from farthing.train.step import Step

    clip, done = Step.clip, []
    # appended to: the thread that beats goes through here too, and an addition could be lost
    calls: list[str] = []

    def counted(name: str) -> None:
        plain = getattr(dist, name, None)

        def call(*arguments: Any, **more: Any) -> Any:
            given = (*arguments, *more.values())
            if not done and any(
                isinstance(each, torch.Tensor) and each.is_floating_point() for each in given
            ):
                calls.append(name)
            return plain(*arguments, **more)

        setattr(dist, name, call)

    for name in COLLECTIVES:
        counted(name)

    def noted(steps: Any, *arguments: Any) -> Any:
        if not done:
            done.append(1)
            weights = steps.ranks.trained_of(steps.forward.model)
            found = {
                name: weight.grad.clone()
                for name, weight in weights.items()
                if weight.grad is not None
            }
            save_file(found, Path(folder) / f"gradients-{rank}.safetensors")
            (Path(folder) / f"collectives-{rank}").write_text(str(len(calls)))
        return clip(steps, *arguments)

    Step.clip = noted  # type: ignore[method-assign]


def cases(seeds: range) -> Iterator[dict[str, Any]]:
    """What is compared: gradients of (way, family, method, tied, processes, examples of a step),
    and for each seed bits and spread weights.
    """
    for family, method, tied in itertools.product(TASKS, ("full", "lora"), (True, False)):
        if family != "bert" or tied:  # a classifier has no output embeddings
            ways = "replicated", "sharded" if method == "full" else "frozen sharded"
            for way, (n, batch) in itertools.product(ways, ((2, 13), (3, 2))):
                case = {"way": way, "family": family, "method": method, "tied": tied}
                yield case | {"what": "gradients", "n": n, "batch": batch, "seed": seeds[0]}
    for seed, what in itertools.product(seeds, ("bits", "spread")):
        yield {"what": what, "seed": seed}


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """One case."""
    how = {"gradients": compare_gradients, "bits": compare_bits, "spread": compare_spread}
    with tempfile.TemporaryDirectory(prefix="farthing-ranks-") as top:
        found = how[case["what"]](case, Path(top))
    return {**case, **found, "said": f"{case} {found}"}


def compare_gradients(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The worst relative error of a weight's gradient on every rank, and the collectives of each."""  # noqa: E501
    base, way, family = folder / "base", case["way"], case["family"]
    train = {"max_steps": 1, "global_batch_size": case["batch"], "max_grad_norm": 0}
    train |= {"micro_batch_tokens": 200, "eval_strategy": "no", "eval_steps": None}
    train |= {"predict_with_generate": False} if family == "t5" else {}
    method = FULL if case["method"] == "full" else {"lora_dropout": 0.0}
    for n in (1, case["n"]):
        place = folder / str(n)
        where = {"gpus": n, "same_bits": n > 1 and way != "sharded"}
        where["strategy"] = "fsdp" if n > 1 and way != "replicated" else "ddp"
        keys = {"method": method, "where": where, "train": train, "data": {"eval": None}}
        make_job(place, base, case["seed"], family, **keys)
        config = json.loads((base / "config.json").read_text())
        tied = json.dumps(config | {"tie_word_embeddings": case["tied"]})
        (base / "config.json").write_text(tied)
        run_on(n, place, note_gradients, str(place))
    return _difference(folder / "1", folder / str(case["n"]), case["n"], way)


def _difference(alone: Path, together: Path, n: int, way: str) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    wanted = load_file(alone / "gradients-0.safetensors")
    ranks = [load_file(together / f"gradients-{rank}.safetensors") for rank in range(n)]
    if way == "sharded":  # each has rows
        ranks = [{name: torch.cat([each[name] for each in ranks]) for name in ranks[0]}]
    worst, has_same = 0.0, True
    least = 1e-6 * max(
        float(each.abs().max()) for each in wanted.values()
    )  # below are sums that should be 0
    for found in ranks:
        has_same = has_same and found.keys() == wanted.keys()
        for name in wanted.keys() & found.keys():
            scale = max(float(wanted[name].abs().max()), least)
            worst = max(worst, float((found[name] - wanted[name]).abs().max()) / scale)
    n_sums = [int((together / f"collectives-{rank}").read_text()) for rank in range(n)]
    is_ok = has_same and worst <= TOLERANCE and len(set(n_sums)) == 1 and n_sums[0] > 0
    return {"worst": worst, "same_weights": has_same, "collectives": n_sums, "ok": is_ok}


def kill_at(folder: str, victim: int, step: int, rank: int, attempt: int) -> None:
    """In a rank: the victim ends in the middle of a step of the first attempt."""
    from farthing.train.step import Step

    take = Step.take

    def taken(steps: Any, number: int) -> Any:
        if rank == victim and number == step and not (Path(folder) / "killed").exists():
            (Path(folder) / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return take(steps, number)

    Step.take = taken


def killed(folder: Path, drawn: random.Random, keys: dict[str, Any]) -> str:
    """A run that loses a process and goes on with another number; what happened."""
    n_steps = keys["train"]["max_steps"]
    begins, goes_on = drawn.randint(2, 4), drawn.randint(1, 4)
    victim, step = drawn.randrange(begins), drawn.randrange(1, n_steps)
    make_job(folder, folder.parent / "base", **{**keys, "where": keys["where"] | {"gpus": begins}})
    first = Elastic(begins, start_of(folder, kill_at, str(folder), victim, step), lambda text: None)
    first.wait_for_all()  # nothing goes on by itself here: another number does
    run_on(goes_on, folder)
    return f"{begins} ranks, {victim} killed in step {step + 1} of {n_steps}, then {goes_on}"


def drawn_train(drawn: random.Random) -> dict[str, Any]:
    """Settings of a small run."""
    return {
        "max_steps": drawn.randint(5, 12),
        "global_batch_size": drawn.randint(2, 17),
        "micro_batch_tokens": drawn.randint(60, 300),
        "save_steps": drawn.randint(1, 4),
        "eval_steps": drawn.randint(2, 5),
    }


def compare_bits(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One digest of runs on 1 to 4 processes, and of one that loses a process and goes on with
    another number.
    """
    seed, drawn = case["seed"], random.Random(case["seed"])
    keys: dict[str, Any] = {"seed": seed, "train": drawn_train(drawn), "where": {"same_bits": True}}
    digests = set()
    for n in (1, 2, 3, 4):
        strategy = "fsdp" if n in (2, 4) and seed % 2 else "ddp"
        where = {"gpus": n, "strategy": strategy, "same_bits": True}
        make_job(folder / str(n), folder / "base", **{**keys, "where": where})
        run_on(n, folder / str(n))
        digests.add(sha256_of(folder / str(n) / "run", keys["train"]["max_steps"]))
    happened = killed(folder / "killed", drawn, keys)
    digests.add(sha256_of(folder / "killed" / "run", keys["train"]["max_steps"]))
    return {"happened": happened, "sha256": sorted(digests), "ok": len(digests) == 1}


def compare_spread(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Full training on one process, and spread over some, of which one is killed, then over another
    number: how far apart.
    """
    drawn = random.Random(case["seed"] + 1000)
    optim = drawn.choice(("adamw_torch", "adamw_torch_fused", "adamw_torch_offload", "sgd"))
    train = drawn_train(drawn) | {"learning_rate": 0.001, "optim": optim}
    keys: dict[str, Any] = {"seed": case["seed"], "method": FULL, "train": train}
    make_job(folder / "alone", folder / "base", **keys)
    run_on(1, folder / "alone")
    where = {"strategy": "fsdp", "reshard_after_forward": drawn.random() < 0.5}
    happened = killed(folder / "spread", drawn, {**keys, "where": where})
    worst = apart(folder / "spread" / "run", folder / "alone" / "run", train["max_steps"])
    return {"happened": f"{optim}, {happened}", "worst": worst, "ok": worst < 1e-3}


if __name__ == "__main__":
    asked = command(__doc__, n=3).parse_args()
    sys.exit(play(cases(seeds_of(asked)), compare, asked.json))
