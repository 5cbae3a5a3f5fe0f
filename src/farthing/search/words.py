"""A search in sentences."""

from __future__ import annotations

from farthing.search.halving import SHARES
from farthing.storage.files import Json
from farthing.units import plural, say_count, say_usd


def in_words(receipt: Json) -> list[str]:
    """The receipt in sentences, the winner first."""
    lines = []
    metric, winner, margin = receipt["metric"], receipt["winner"], receipt["margin"]
    if winner is not None:
        lines.append(f"winner: trial {winner['trial']}, {metric} {score_in_words(winner)}")
        if winner["fraction"] < 1.0:
            lines.append(f"trained for {100 * winner['fraction']:.0f} % of its steps only")
    if margin is not None:
        noise = {True: ", within noise", False: ", beyond noise", None: ""}
        unit = 100 if metric in SHARES else 1
        said = f"{unit * margin['better_by']:.3g}{' points' if unit == 100 else ''}"
        bounds = margin["interval"]
        said += f" ({unit * bounds[0]:.2g} to {unit * bounds[1]:.2g})" if bounds else ""
        share = f" at {100 * margin['at_fraction']:.0f} % of their steps"
        lines.append(
            f"better than trial {margin['second']} by {said}{noise[margin['is_within_noise']]}"
            f"{share if margin['at_fraction'] < 1 else ''}"
        )
    for row in receipt["confirmed"]:
        lines.append(
            f"trial {row['trial']}: {row['metric']} {score_in_words(row)} on {row['n_examples']:,}"
            " examples that no choice was made on"
        )
    for each in receipt["models"] if len(receipt["models"]) > 1 else ():
        said = "not tried" if each["trial"] is None else f"{metric} {score_in_words(each)}"
        usd = each["usd_per_million_tokens"]
        serves = f"; serves at {say_usd(usd)} a million tokens" if usd else ""
        lines.append(f"{each['model']} ({say_count(each['n_parameters'])}): {said}{serves}")
    for each in receipt["gains"]:
        what = f"{each['more']:,} more rows" if each["of"] == "rows" else "another epoch"
        scale, of = (100, " points") if metric in SHARES else (1, f" {metric}")
        does, of = ("add", of) if receipt["greater_is_better"] else (f"lower the {metric} by", "")
        span = f"{scale * each['low']:.2g} to {scale * each['high']:.2g}{of}"
        basis = "" if each["of"] == "rows" else " (by the curve within this run)"
        lines.append(f"{what} should {does} {span} for {say_usd(each['usd'])}{basis}")
    saved = receipt["saved"]
    lines.append(
        f"saved {say_usd(saved['stopping_usd'])} by stopping trials,"
        f" {say_usd(saved['promotion_usd'])} by promoting from checkpoints,"
        f" {say_usd(saved['sharing_usd'])} by tokenizing once"
    )
    return lines


def score_in_words(trial: Json) -> str:
    """A score with its interval, where it has one."""
    if trial["score"] is None:
        return ""
    bounds = trial["interval"]
    return f"{trial['score']:.4g}" + (f" ({bounds[0]:.3g} to {bounds[1]:.3g})" if bounds else "")


def dollars_in_words(receipt: Json) -> str:
    """What it cost, of which cap, and what was planned."""
    said = f"{say_usd(receipt['usd'])} for {plural(len(receipt['trials']), 'trial')}"
    if receipt["max_usd"] is not None:
        said += f" of the cap of {say_usd(receipt['max_usd'])}"
    if receipt["planned_usd"]:
        said += f"; {say_usd(receipt['planned_usd'])} were planned"
    return said


def setting_in_words(trial: Json, key: str) -> str:
    """A setting of a trial, numbers short."""
    value = trial["settings"].get(key, "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def state_in_words(trial: Json) -> str:
    """How a trial stands, and why."""
    rows = f" on {trial['n_rows']:,} rows" if trial["n_rows"] else ""
    return trial["state"] + rows + (f": {trial['reason']}" if trial["reason"] else "")


def bill_in_words(bill: Json) -> list[str]:
    """How a search would go, and what to know before."""
    rungs = ", ".join(
        f"{plural(each['trials'], 'trial')} to {100 * each['fraction']:.0f} % of the steps"
        for each in bill["rungs"]
    )
    n, runs = bill["n_settings"], bill["full_trainings"]
    settings = "" if n is None else f" of {plural(n, 'possible setting')}"
    return [
        f"search: {plural(bill['trials'], 'trial')}{settings}. {rungs}: as much training as"
        f" {runs:.3g} full trial{'' if runs == 1 else 's'}",
        *bill["warnings"],
    ]
