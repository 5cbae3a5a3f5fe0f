"""A run to look at, in its folder or in its store: nothing of it is changed, nothing asked of the
process that trains.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from farthing.addresses import is_remote
from farthing.errors import InputError


def names_a_store(address: str) -> bool:
    """Whether what was named is a job's `output_store` and not a folder of runs."""
    return (
        is_remote(address)
        or (Path(address) / "commits").is_dir()
        or (Path(address) / "writers").is_dir()
    )


@contextlib.contextmanager
def looked_at(address: str) -> Iterator[Callable[[], Path]]:
    """Within the block a function that gives the folder to read, brought up to what a store has
    now.

    The function raises `InputError` where the store can't be read, or holds no run.
    """
    if not names_a_store(address):
        yield lambda: Path(address)
        return
    from farthing.run.commits import take_small
    from farthing.storage.lease import newest_words
    from farthing.storage.objects import StoreError, open_store

    store = open_store(address)
    with tempfile.TemporaryDirectory(prefix="farthing-look-") as scratch:

        def look() -> Path:
            try:
                if not take_small(store, Path(scratch), newest_words(store)):
                    raise InputError(
                        "no run is in this store",
                        where=store.name,
                        to_do="name the job's output_store",
                    )
            except StoreError as error:
                to_do = "check the address and the credentials"
                raise InputError(
                    f"the store can't be read: {error}", where=store.name, to_do=to_do
                ) from error
            return Path(scratch)

        yield look
