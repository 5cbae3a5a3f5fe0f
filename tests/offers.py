"""Offers that are made up."""

from datetime import date

from farthing.prices.offers import Billing, Offer

TODAY = date(2026, 11, 21)


def offer_of(
    gpu: str, usd: float, n_gpus: int = 1, *, provider: str = "A", spot: bool = False, **more
) -> Offer:
    """Machines by the hour, whole, without other terms; `more` are fields of `Offer`."""
    plain = {"instance": "", "region": "here", "zone": "", "unit": "machine_hour", "source": "made"}
    terms = {"is_spot": spot, "date": TODAY, "billing": Billing(provider)}
    known = {"provider": provider, "gpu": gpu, "n_gpus": n_gpus, "usd": usd}
    return Offer(**known | plain | terms | more)
