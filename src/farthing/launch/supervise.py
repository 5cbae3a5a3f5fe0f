"""One launch: machines asked for, watched, given back, until the run has come to its end. One state
machine for all targets.

    asked -> created -> booted -> left -> gone          or: asked -> refused

Each arrow is a line of the ledger, and the line `asked` stands there before the request. At most
one machine is tended to at a time: the next is asked for when the one before is confirmed to be
gone. Hosts of one's own are the exception, as one that does not answer may never: it is asked again
and again, paid for until it is confirmed, and kept from training by the lease in the store. What
another process of ours left behind is found by name, adopted or destroyed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile
from typing import TypeVar

from farthing.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_LIMIT,
    EXIT_MISTAKE,
    InputError,
    RunInterruptedError,
)
from farthing.launch.driver import (
    Driver,
    InstanceStatus,
    OutOfStockError,
    ProviderError,
    RefusedError,
    UnauthorizedError,
    UnclearError,
)
from farthing.launch.machines import MACHINES, Machine, MachineLedger
from farthing.launch.request import LaunchRequest
from farthing.launch.words import StoreWords, Word
from farthing.prices.offers import Offer
from farthing.run.accounts import Account
from farthing.storage.files import Json
from farthing.units import plural, say_seconds, say_usd

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """How long things may take, in seconds."""

    poll_s: float = 10.0
    boot_s: float = 600.0
    """From the request to the first word; then it is destroyed, its offer left out."""
    lost_s: float = 180.0
    """Without any answer about a machine it is given up, and the next one asked for."""
    silent_s: float = 600.0
    """The same for a machine that its provider shows and that says nothing itself."""
    stubborn_s: float = 60.0
    """To ask for a deletion before the next machine is asked for meanwhile, where that may be."""
    farewell_s: float = 60.0
    """At the end, for hosts of one's own that do not answer to be confirmed gone."""
    stock_s: float = 300.0
    """Before offers that were out of stock are tried again ..."""
    n_stock_rounds: int = 3
    """... and how often."""
    n_in_vain: int = 3
    """Machines in a row that saved nothing new."""


GAP_S = 30.0
"""A watcher that did nothing for longer may have been suspended: others may have taken over."""
TEARDOWN_S = 120
"""Kept back of every cap: from the end of training to the confirmed deletion."""
MOST_REPRICED = 2
"""An offer whose price rises this often on the way is left out."""


class NoBudgetError(Exception):
    """The rest of the cap, the hours or the time buys no further machine."""


MakeAsk = Callable[[int, Offer, list[Account], float], LaunchRequest]
"""(number, offer, attempts so far, now) -> what to ask for. Raises `NoBudgetError`."""


@dataclass(frozen=True)
class Ending:
    """How it went with a machine."""

    why: str
    code: int | None = None
    """None: lost, or never booted."""
    leaves_offer_out: bool = False
    at: float | None = None
    """When it was first missed, where it was taken away: it is billed no longer than that."""


class Launch:
    """A run taken to machine after machine until it ends."""

    def __init__(
        self,
        ledger: MachineLedger,
        driver: Driver,
        offers: Sequence[Offer],
        make_ask: MakeAsk,
        words: StoreWords,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._ledger, self._driver, self._make_ask, self._words = ledger, driver, make_ask, words
        self._offers, self._say, self._sleep = list(offers), say, sleep
        self._own_clock = clock
        self.patience = Patience()
        self.may_take: Callable[[Offer], bool] = lambda offer: True
        """Whether an offer will do at this moment: spot is left out when the deadline is near."""
        self.reaches: Callable[[Machine], bool] = lambda machine: True
        """Whether a machine is where the driver looks: elsewhere it would be taken for gone."""
        self.awake: Callable[[], float] = clock
        """Seconds that also pass while this machine is suspended, and that nobody sets."""
        self.reclaim: Callable[[], None] = lambda: None
        """Make sure that this launch is still ours to watch. Raises `RunInterruptedError`."""
        self._left_out: set[Offer] = set()
        self._out_of_stock: set[Offer] = set()
        self._shared: dict[str, list[Json]] = {}
        """The lines of each machine that the store has."""
        self._is_ending = False
        """Everything is to be destroyed, whoever knows of it."""
        self._n_repriced = Counter[tuple[str, str, bool]]()
        self._prefix = self._trouble_said = ""
        self._held_at = self._n_gaps = 0.0
        self._locked_at: float | None = None

    def run(self, prefix: str) -> int:
        """Until the run has ended or cannot continue; the exit code. `prefix` begins all names."""
        self._prefix, n_rounds, self._held_at = prefix, 0, self.awake()
        self._until_clear(self._take_over, "the store")
        self._refuse_what_has_no_price()
        self._refuse_what_is_elsewhere()
        self._until_clear(self._adopt_orphans, "the provider")
        current = self._adopted()
        while not self._is_stopped():
            if current is None and self._is_finished():
                self._say("the run has already ended: nothing is rented")
                return self._closed(EXIT_FINISHED)
            try:
                current = current or self._rent()
            except NoBudgetError as error:
                self._say(str(error))
                return self._closed(EXIT_LIMIT)
            if current is None:
                if not self._out_of_stock or n_rounds == self.patience.n_stock_rounds:
                    self._say(
                        "no offer is left that could be had: try again later, or allow more (--on,"
                        " where.provider)"
                    )
                    return self._closed(EXIT_INTERRUPTED)
                n_rounds += 1
                self._say(
                    "nothing is available now; asking again in"
                    f" {say_seconds(self.patience.stock_s)}, which costs nothing"
                )
                self._out_of_stock.clear()
                self._pause(self.patience.stock_s)
                continue
            ending = self._watch(current)
            may_be_held = (
                ending.code == EXIT_MISTAKE and len(self._ledger.open) > 1
            )  # by one that we have lost
            if may_be_held:
                ending = replace(ending, code=EXIT_INTERRUPTED)
            self._release(current, ending)
            self._terminate(current)
            if may_be_held:
                self._pause(self.patience.stock_s)
            current = None
            if ending.code is not None and ending.code != EXIT_INTERRUPTED:
                return self._closed(ending.code)
            if self._in_vain() >= self.patience.n_in_vain:
                self._say(
                    f"{plural(self._in_vain(), 'machine')} in a row saved nothing new: stopped"
                )
                return self._closed(EXIT_INTERRUPTED if ending.code is None else ending.code)
        self._say("stopped by `farthing launch stop`")
        return self._closed(EXIT_INTERRUPTED)

    def stop(self, prefix: str) -> bool:
        """Destroy every machine, for sure. False where the store could not be read."""
        self._prefix, self._held_at, self._is_ending = prefix, self.awake(), True
        is_whole = True
        try:
            self._take_over()
        except UnclearError as error:
            is_whole = False
            self._say(f"the store does not answer ({error}): only machines known here are stopped")
        except InputError as error:  # lines that are damaged; machines are found by their names too
            self._say(str(error))
        self._refuse_what_is_elsewhere()
        for machine in self._ledger.open:
            if machine.created_at is None and not self._found(machine):
                continue
            self._release(machine, Ending("stopped by the user"))
        self._closed(0)
        return is_whole

    def _is_stopped(self) -> bool:
        with contextlib.suppress(UnclearError):
            return self._words.is_stopped()
        return False

    def _clock(self) -> float:
        """The time of day by the provider's clock, by which it bills; ours where it tells none."""
        return self._own_clock() + self._driver.clock_offset_s

    def _hold(self) -> None:
        """After a gap: make sure that the launch is still ours, and read what others did meanwhile.

        A suspended watcher may wake beside one that took over; nothing may be made or destroyed by
        what it remembers.
        """
        if self.awake() - self._held_at > GAP_S and not self._is_ending:
            self.reclaim()
            self._until_clear(self._take_over, "the store")
            self._n_gaps += 1
            self._locked_at = None
        self._held_at = self.awake()

    def _pause(self, seconds: float) -> None:
        self._sleep(seconds)
        self._hold()

    def _asked(self, call: Callable[[], T]) -> T:
        """Raises `UnclearError`; `InputError` once credentials were refused for a while."""
        try:
            answer = call()
        except UnauthorizedError as error:
            now = self.awake()
            self._locked_at = now if self._locked_at is None else self._locked_at
            if not self._ledger.open or now - self._locked_at >= self.patience.lost_s:
                raise self._locked_out(error) from error
            raise UnclearError(str(error)) from error
        self._locked_at = None
        return answer

    def _locked_out(self, error: Exception) -> InputError:
        """The provider refuses the credentials: what is still billed, and until when."""
        still = self._ledger.open_in_words(self._driver.ends_by_itself, self._clock())
        return InputError(
            f"the provider refuses the credentials ({error})"
            + (f"; still billed: {'; '.join(still)}" if still else ""),
            where="environment",
            to_do="export a valid key, then: farthing launch attach JOB, or launch stop JOB",
        )

    # ---- a new machine ----

    def _until_clear(self, work: Callable[[], T], who: str) -> T:
        """What `work` gives, tried until it is answered: without that it is not known what is there
        and what is left. Raises `RunInterruptedError` after a while in which nothing was rented.
        """
        began, said = self.awake(), ""
        most_s = self.patience.stock_s * self.patience.n_stock_rounds
        while True:
            try:
                return work()
            except UnclearError as error:
                if said != str(error):
                    said = str(error)
                    self._say(f"{who} does not answer ({said}): nothing is rented until it does")
                if self.awake() - began > most_s and not self._ledger.open:
                    raise RunInterruptedError(
                        f"{who} has not answered for {say_seconds(most_s)} ({said})",
                        where="--on" if who == "the provider" else "output_store",
                        to_do="try again when it does: nothing is rented",
                    ) from error
                self._sleep(self.patience.poll_s)

    def _take_over(self) -> None:
        """What other folders of this run asked for and paid is ours to count and give back."""
        self._shared = self._words.kept()
        self._ledger.take_over(self._shared)
        self._share()

    def _refuse_what_has_no_price(self) -> None:
        for machine in self._ledger.machines.values():
            if not machine.asked_at:
                raise InputError(
                    f"the line of {machine.name} with its costs is damaged: the cap can't be kept",
                    where=str(self._ledger.folder / MACHINES),
                    to_do="restore the file from a copy, or end what there is: launch stop",
                )

    def _refuse_what_is_elsewhere(self) -> None:
        for machine in self._ledger.open:
            if not self.reaches(machine):
                on = machine.on or machine.target
                raise InputError(
                    f"{machine.name} of this launch is at {on}",
                    where="--on",
                    to_do=f"name it: --on {on}, or end it: farthing launch stop JOB --on {on}",
                )

    def _share(self) -> None:
        for name, rows in self._ledger.rows.items():
            if self._shared.get(name) != rows:
                self._words.keep(name, rows)
                self._shared[name] = list(rows)

    def _adopt_orphans(self) -> None:
        """Put machines of this launch that no line of the ledger knows into it."""
        there = self._asked(lambda: self._driver.names(self._prefix))
        if set(there) - set(self._ledger.machines):
            self._take_over()  # another process may have asked for them since
        for name, number in there.items():
            known = self._ledger.machines.get(name)
            if known is None and name.rpartition("-")[2].isdigit():
                offer, now = self._offers[0], self._clock()
                self._ledger.note(
                    name,
                    "asked",
                    now,
                    number=int(name.rpartition("-")[2]),
                    provider=offer.provider,
                    usd_per_hour=max(each.usd_per_hour or 0.0 for each in self._offers),
                    committed=self._committed(),
                    is_paid_in_queue=self._driver.is_paid_in_queue,
                    why="asked for elsewhere; counted from now on",
                )
                self._ledger.note(name, "created", now, id=number)

    def _adopted(self) -> Machine | None:
        """The machine of an earlier process of ours that still works; others are sent away."""
        waiting = [machine for machine in self._ledger.open if machine.left_at is None]
        for machine in waiting[:-1]:
            self._release(machine, Ending("a younger machine took the run over"))
        if not waiting:
            for machine in self._ledger.open:
                self._terminate(machine)
            return None
        machine = waiting[-1]
        if (machine.created_at is None and not self._found(machine)) or not self._is_secured(
            machine
        ):
            return None
        self._say(f"{machine.name} is there already: continuing with it")
        return machine

    def _rent(self) -> Machine | None:
        """The next machine, made; None where no offer is left. Raises `NoBudgetError`."""
        while offer := self._next_offer():
            self._hold()
            number = self._ledger.next_number
            accounts, now = self._accounts(), self._clock()
            ask = self._make_ask(number, offer, accounts, now)
            machine = self._ledger.note(
                ask.name,
                "asked",
                now,
                number=number,
                target=ask.target,
                on=ask.on,
                provider=offer.provider,
                instance=offer.instance,
                gpu=offer.gpu,
                is_spot=offer.is_spot,
                usd_per_hour=ask.usd_per_hour,
                price_source=f"{offer.source}, {offer.date.isoformat()}",
                left_usd=ask.left_usd,
                most_s=ask.most_s,
                is_paid_in_queue=self._driver.is_paid_in_queue,
                committed=self._committed(),
            )
            try:
                self._hold()
            except RunInterruptedError as error:  # the number may be another machine's by now
                self._ledger.note(ask.name, "refused", self._clock(), why=str(error.what))
                raise
            self._until_clear(self._share, "the store")
            is_there = True
            try:
                made = self._driver.create(ask, now)
                told = {} if made.usd_per_hour is None else {"usd_per_hour": made.usd_per_hour}
                self._ledger.note(ask.name, "created", self._clock(), id=made.id, **told)
                self._hold_or_undo(machine)
                self._say(
                    f"{ask.name}: made ({offer.provider} {offer.instance or offer.gpu}, id"
                    f" {made.id}), {say_usd(machine.usd_per_hour)} an hour, {machine.price_from}"
                )
                with contextlib.suppress(UnclearError):
                    self._take_price(machine, self._asked(partial(self._driver.look, machine)))
            except (RefusedError, UnauthorizedError) as error:
                self._ledger.note(ask.name, "refused", self._clock(), why=str(error))
                self._say(f"{ask.name}: refused by {offer.provider}: {error}")
                if isinstance(error, UnauthorizedError):
                    self._closed(EXIT_MISTAKE)
                    raise InputError(
                        str(error), where=offer.provider, to_do="mend it there, then launch again"
                    ) from error
                is_stock = isinstance(error, OutOfStockError)
                (self._out_of_stock if is_stock else self._left_out).add(offer)
                continue
            except UnclearError as error:
                self._say(
                    f"{ask.name}: {offer.provider} gave no clear answer ({error}); looking for it"
                    " by name"
                )
                is_there = self._found(machine) and self._is_secured(machine)
            if not is_there:
                self._left_out.add(offer)
            elif self._is_too_dear(machine):
                self._send_back(machine, offer)
            else:
                self._tell_price(machine)
                return machine
        return None

    def _hold_or_undo(self, machine: Machine) -> None:
        """End a machine made by a watcher that was suspended, unless it was adopted."""
        try:
            self._hold()
        except RunInterruptedError:
            told: list[Json] = []
            with contextlib.suppress(UnclearError):
                told = self._words.kept().get(machine.name, [])
                if any(row.get("event") == "created" for row in told):
                    raise
            why, counted = "made after another process had taken over", 0.0
            if ends := [row["at"] for row in told if row.get("event") == "gone"]:
                # it was looked for in vain, and counted until then as if it had been there
                counted = (machine.created_at or 0.0) - max(ends)
            self._ledger.note(machine.name, "left", self._clock() - counted, why=why)
            with contextlib.suppress(ProviderError):
                self._driver.destroy(machine)
                self._ledger.note(machine.name, "gone", self._clock() - counted, why=why)
            with contextlib.suppress(UnclearError):
                self._words.keep(machine.name, self._ledger.rows[machine.name])
            raise

    # ---- the price that is charged ----

    def _take_price(self, machine: Machine, seen: InstanceStatus | None) -> None:
        """Book the price that the provider tells, where it is another than the one known."""
        if seen is None or (price := seen.usd_per_hour) is None:
            return
        now, known = self._clock(), machine.usd_per_hour
        since, machine.price_seen_at = machine.price_seen_at or now, now
        is_other = abs(price - known) > 1e-4 * known
        if machine.charged and not is_other:
            return
        at = since if price > known else now  # a rise counts from the last look at the old price
        self._ledger.note(machine.name, "priced", at, usd_per_hour=price)
        if is_other:
            self._say(
                f"{machine.name}: the provider charges {say_usd(price)} an hour, not"
                f" {say_usd(known)}"
            )
            self._tell_price(machine)

    def _tell_price(self, machine: Machine) -> None:
        with contextlib.suppress(UnclearError):
            self._words.tell_price(machine.name, machine.usd_per_hour)

    def _is_too_dear(self, machine: Machine) -> bool:
        """Whether the machine's own end would come after the cap, at the price that is charged."""
        if machine.left_usd is None or not machine.most_s:
            return False
        most_usd = (machine.most_s + TEARDOWN_S) / 3600 * machine.usd_per_hour
        return most_usd > machine.left_usd * (1 + 1e-6) + 1e-6

    def _send_back(self, machine: Machine, offer: Offer) -> None:
        """End a machine that is too dear before it trains; its offer comes last from now on."""
        price = machine.usd_per_hour
        why = f"{say_usd(price)} an hour instead of {say_usd(offer.usd_per_hour or 0.0)}"
        self._release(machine, Ending(f"{why}: the cap does not allow it for that long"))
        self._terminate(machine)
        of = offer.provider, offer.instance, offer.is_spot
        self._n_repriced[of] += 1
        self._offers = [each for each in self._offers if each != offer]
        if self._n_repriced[of] <= MOST_REPRICED and offer.usd_per_hour:
            self._offers.append(offer._replace(usd=offer.usd * price / offer.usd_per_hour))

    def _next_offer(self) -> Offer | None:
        out = self._left_out | self._out_of_stock
        return next(
            (offer for offer in self._offers if offer not in out and self.may_take(offer)), None
        )

    def _found(self, machine: Machine) -> bool:
        """Whether a machine is there whose creation was not answered; looked for until it must be
        in every list.

        While nobody looked it may have been there and gone: then it is counted as if it was.
        """
        is_said, late_s = False, self._driver.late_s
        while True:
            try:
                seen = self._asked(lambda: self._driver.look(machine))
                now = self._clock()
                self._ledger.note(machine.name, "sought", now)
                with contextlib.suppress(UnclearError):
                    self._share()
                if seen is not None:
                    self._ledger.note(machine.name, "created", now, id=seen.id)
                    self._take_price(machine, seen)
                    return True
                times = sorted([machine.asked_at, *machine.sought])
                back = [at for before, at in pairwise(times) if at - before > late_s + GAP_S]
                began = back[-1] if back else times[1]
                if now >= began + late_s and back:
                    at = min(began, machine.asked_at + machine.most_s) if machine.most_s else began
                    why = "can't tell whether it existed; counted as if it did"
                    self._ledger.note(machine.name, "gone", at, why=why)
                    return False
                if now >= began + late_s:
                    why = "no such machine came into being"
                    self._ledger.note(machine.name, "refused", now, why=why)
                    return False
            except UnclearError as error:
                if not is_said:
                    self._say(
                        f"{machine.name}: {error}; nothing else is requested until this is known"
                    )
                is_said = True
            self._pause(self.patience.poll_s)

    def _is_secured(self, machine: Machine) -> bool:
        """Whether a machine that was found has its end; one that has none is destroyed."""
        try:
            self._asked(lambda: self._driver.secure(machine))
            return True
        except (RefusedError, UnclearError) as error:
            self._release(
                machine, Ending(f"it could not be given its end ({error})", leaves_offer_out=True)
            )
            self._terminate(machine)
            return False

    # ---- a machine at work ----

    def _watch(self, machine: Machine) -> Ending:
        """Until it has left, is lost or has to go."""
        is_paid = self._driver.is_paid_in_queue
        n_absent, was_seen, answered_at, beat, beat_at = 0, False, self.awake(), "", self.awake()
        began, n_gaps, missed_at = self.awake(), self._n_gaps, self._clock()
        is_ours = abs(self._clock() - machine.asked_at) < self.patience.boot_s
        # an adopted machine was asked for by another clock: its age counts from its adoption
        while True:
            self._hold()
            if n_gaps != self._n_gaps:  # nobody was listening meanwhile
                n_gaps, answered_at, beat_at = self._n_gaps, self.awake(), self.awake()
            self._sweep()
            if self._is_stopped():
                return Ending("stopped by the user")
            now, awake, word = self._clock(), self.awake(), Word()
            age = now - machine.asked_at if is_ours else awake - began
            try:
                word = self._words.of(machine.name)
                if word.has_booted and machine.booted_at is None:
                    self._ledger.note(machine.name, "booted", now)
                    self._say(f"{machine.name}: booted after {say_seconds(age)}")
                    beat_at = awake
                if word.beat != beat:
                    beat, beat_at = word.beat, awake
            except UnclearError:
                pass
            if word.code is not None and not (
                self._driver.restarts and word.code == EXIT_INTERRUPTED
            ):
                return Ending(word.why or f"left with {word.code}", word.code)
            try:
                seen = self._asked(lambda: self._driver.look(machine))
                self._take_price(machine, seen)
                answered_at, was_seen = awake, was_seen or seen is not None
                n_absent = n_absent + 1 if seen is None else 0
                missed_at = self._clock() if n_absent == 1 else missed_at
                if seen is not None:
                    machine.alive_at = self._clock()
                if n_absent >= 3 and (was_seen or age > self._driver.late_s):
                    why = "taken away" if machine.booted_at else "gone before it had booted"
                    return Ending(why, at=missed_at)
                if seen is not None and seen.is_over:
                    code = seen.code if seen.code is not None else self._last_word(machine)
                    return Ending(
                        _how(machine, code), code, leaves_offer_out=machine.booted_at is None
                    )
                if seen is not None and seen.is_waiting:
                    beat_at = awake
                elif is_paid and machine.booted_at is None and age > self.patience.boot_s:
                    return Ending(
                        f"not booted after {say_seconds(age)}",
                        leaves_offer_out=True,
                    )
            except UnclearError:
                if awake - answered_at > self.patience.lost_s:
                    return Ending(f"no answer for {say_seconds(awake - answered_at)}")
            if machine.booted_at is not None and awake - beat_at > self.patience.silent_s:
                return Ending(f"no sign of it for {say_seconds(self.patience.silent_s)}")
            if self._is_at_cap(machine):
                return Ending("the cap is reached at the price that is charged", EXIT_LIMIT)
            if is_paid and machine.most_s and age > machine.most_s + 60:
                return Ending("its time is over", EXIT_LIMIT)
            self._sleep(self.patience.poll_s)

    def _is_at_cap(self, machine: Machine) -> bool:
        """Whether the machine has to end now for the cap to hold until it is confirmed gone."""
        if machine.left_usd is None:
            return False
        soon = self._clock() + self.patience.poll_s + TEARDOWN_S / 2
        return machine.usd(soon) > machine.left_usd

    def _last_word(self, machine: Machine) -> int | None:
        """The exit code of a machine that runs no more, whose words may be late."""
        for _ in range(2):
            with contextlib.suppress(UnclearError):
                if (code := self._words.of(machine.name).code) is not None:
                    return code
            self._sleep(self.patience.poll_s)
        return None

    # ---- giving back ----

    def _release(self, machine: Machine, ending: Ending) -> None:
        if machine.left_at is None:
            at = self._clock() if ending.at is None else ending.at
            self._ledger.note(machine.name, "left", at, code=ending.code, why=ending.why)
            machine.is_missed = ending.at is not None
            usd = say_usd(machine.usd(self._clock()))
            self._say(f"{machine.name}: {ending.why}; {usd} so far")
        if ending.leaves_offer_out:
            self._left_out |= {each for each in self._offers if each.instance == machine.instance}
        elif ending.code in (
            None,
            EXIT_INTERRUPTED,
        ):  # the next one in the ranking; this comes last
            of = machine.provider, machine.instance, machine.is_spot
            self._offers.sort(key=lambda each: (each.provider, each.instance, each.is_spot) == of)

    def _terminate(self, machine: Machine) -> None:
        """Ask for the deletion until it is confirmed. Where machines may overlap only a while: then
        the next is asked for meanwhile, and this one is asked again at every look."""
        began, pause_s = self._clock(), self.patience.poll_s / 2
        while not self._is_gone(machine):
            if self._driver.may_overlap and self._clock() - began > self.patience.stubborn_s:
                self._say(
                    f"{machine.name}: not confirmed gone; asked again until it is, and counted"
                    " until then"
                )
                return
            self._pause(pause_s)
            pause_s = min(60.0, pause_s * 2)

    def _is_gone(self, machine: Machine) -> bool:
        """Ask once for its deletion, and whether it is gone."""
        try:
            self._hold()
            self._asked(lambda: self._driver.destroy(machine))
            machine.acknowledged_at = machine.acknowledged_at or self._clock()
            seen = self._asked(lambda: self._driver.look(machine))
            if seen is not None and seen.is_paid:
                machine.is_missed = False
                machine.alive_at = self._clock()
                return False
            why, at = machine.why, machine.acknowledged_at
        except UnclearError:
            end = machine.asked_at + machine.most_s + 300
            if not (self._driver.ends_by_itself and machine.most_s and self._clock() > end):
                return False
            why, at = f"{machine.why}; no answer, and its own time-out has passed", self._clock()
        if (
            self._driver.ends_by_itself and machine.most_s
        ):  # where it was gone long before we looked
            at = min(at, max(machine.asked_at + machine.most_s, machine.alive_at))
        if machine.is_missed:
            at = machine.left_at or at
        self._ledger.note(machine.name, "gone", at, why=why)
        self._say(f"{machine.name}: confirmed gone; {say_usd(machine.usd(self._clock()))} in all")
        return True

    def _sweep(self) -> None:
        """Destroy what bears our name and should not be there, or is not confirmed gone."""
        if self._ledger.trouble not in ("", self._trouble_said):
            self._trouble_said = self._ledger.trouble
            self._say(
                f"events of machines can't be recorded here ({self._trouble_said}); continuing"
                " without"
            )
        for machine in self._ledger.open:
            if machine.left_at is not None:
                self._is_gone(machine)
        with contextlib.suppress(UnclearError):
            self._share()
        with contextlib.suppress(UnclearError):
            for name, found in self._asked(lambda: self._driver.names(self._prefix)).items():
                if not self._is_known(name) and not self._is_ending:
                    self.reclaim()
                    self._take_over()  # whoever took this launch over has written it down
                if not self._is_known(name):
                    self._say(f"{name} should not be there: destroying it")
                    machine = self._ledger.machines.get(name) or Machine(name)
                    self._driver.destroy(replace(machine, id=found))

    def _is_known(self, name: str) -> bool:
        machine = self._ledger.machines.get(name)
        return machine is not None and machine.is_open and machine.asked_at > 0.0

    def _closed(self, code: int) -> int:
        """Wait until every machine is confirmed to be gone, then the code. A host of one's own that
        does not answer is waited for only a while, and said."""
        began = self._clock()
        self._sweep()
        while self._ledger.open:
            if self._driver.may_overlap and self._clock() - began > self.patience.farewell_s:
                names = ", ".join(machine.name for machine in self._ledger.open)
                self._say(
                    f"not confirmed gone, and counted until it is: {names}; `farthing launch"
                    " stop` asks again"
                )
                break
            self._pause(self.patience.poll_s)
            self._sweep()
        with contextlib.suppress(UnclearError):
            self._share()
        return code

    # ---- what the store knows ----

    def _committed(self) -> int:
        try:
            return self._words.committed()
        except UnclearError:
            return max((machine.committed for machine in self._ledger.machines.values()), default=0)

    def _accounts(self) -> list[Account]:
        """The attempts so far: without the store the rest of the cap is not known."""
        return self._until_clear(self._words.accounts, "the store")

    def _is_finished(self) -> bool:
        """Also where the machine that did it was lost before it could say so."""
        accounts = self._accounts()
        return bool(accounts) and accounts[-1].state == "finished"

    def _in_vain(self) -> int:
        """How many machines in a row, up to now, have brought the run no further."""
        made = [machine for machine in self._ledger.machines.values() if not machine.is_refused]
        reached = self._committed()
        return len(list(takewhile(lambda each: reached <= each.committed, reversed(made))))


def _how(machine: Machine, code: int | None) -> str:
    if machine.booted_at is None and code is None:
        return "it ended before it had booted"
    return "it ended without a word" if code is None else f"left with {code}"
