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
from collections.abc import Callable
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


@dataclass
class Launch:
    """A run taken to machine after machine until it ends."""

    ledger: MachineLedger
    driver: Driver
    offers: list[Offer]
    make_ask: MakeAsk
    words: StoreWords
    say: Callable[[str], None]
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    awake: Callable[[], float]
    """Seconds that also pass while this machine is suspended, and that nobody sets."""
    patience: Patience = Patience()
    may_take: Callable[[Offer], bool] = lambda offer: True
    """Whether an offer will do at this moment: spot is left out when the deadline is near."""
    reaches: Callable[[Machine], bool] = lambda machine: True
    """Whether a machine is where the driver looks: elsewhere it would be taken for gone."""
    reclaim: Callable[[], None] = lambda: None
    """Make sure that this launch is still ours to watch. Raises `RunInterruptedError`."""

    def __post_init__(self) -> None:
        self._left_out, self._out_of_stock = set[Offer](), set[Offer]()
        self._repriced = set[tuple[str, str, bool]]()
        self._shared = dict[str, list[Json]]()
        """The lines of each machine that the store has."""
        self._is_ending = False
        """Everything is to be destroyed, whoever knows of it."""
        self._prefix = self._trouble_said = ""
        self._held_at, self._n_gaps = self.awake(), 0
        self._locked_at: float | None = None

    def run(self, prefix: str) -> int:
        """Until the run has ended or cannot continue; the exit code. `prefix` begins all names."""
        self._prefix, n_rounds = prefix, 0
        self._until_clear(self._take_over, "the store")
        self._refuse_what_can_not_be_counted()
        self._until_clear(self._adopt_orphans, "the provider")
        current = self._adopted()
        while not self._is_stopped():
            if current is None and self._is_finished():
                self.say("the run has already ended: nothing is rented")
                return self._closed(EXIT_FINISHED)
            try:
                current = current or self._rent()
            except NoBudgetError as error:
                self.say(str(error))
                return self._closed(EXIT_LIMIT)
            if current is None:
                if not self._out_of_stock or n_rounds == self.patience.n_stock_rounds:
                    self.say(
                        "no offer is left that could be had: try again later, or allow more (--on,"
                        " where.provider)"
                    )
                    return self._closed(EXIT_INTERRUPTED)
                n_rounds += 1
                self.say(
                    "nothing is available now; asking again in"
                    f" {say_seconds(self.patience.stock_s)}, which costs nothing"
                )
                self._out_of_stock.clear()
                self._pause(self.patience.stock_s)
                continue
            ending = self._watch(current)
            # a mistake may be that one which we have lost still holds the run
            may_be_held = ending.code == EXIT_MISTAKE and len(self.ledger.open) > 1
            if may_be_held:
                ending = replace(ending, code=EXIT_INTERRUPTED)
            self._release(current, ending)
            self._terminate(current)
            if may_be_held:
                self._pause(self.patience.stock_s)
            current, code = None, ending.code
            n_in_vain = self._n_in_vain()
            if code in (None, EXIT_INTERRUPTED):
                if n_in_vain < self.patience.n_in_vain:
                    continue
                self.say(f"{plural(n_in_vain, 'machine')} in a row saved nothing new: stopped")
            return self._closed(EXIT_INTERRUPTED if code is None else code)
        self.say("stopped by `farthing launch stop`")
        return self._closed(EXIT_INTERRUPTED)

    def stop(self, prefix: str) -> bool:
        """Destroy every machine, for sure. False where the store could not be read."""
        self._prefix, self._is_ending, is_whole = prefix, True, True
        try:
            self._take_over()
        except UnclearError as error:
            is_whole = False
            self.say(f"the store does not answer ({error}): only machines known here are stopped")
        except InputError as error:  # lines that are damaged; machines are found by their names too
            self.say(str(error))
        self._refuse_what_is_elsewhere()
        for machine in self.ledger.open:
            if machine.created_at is not None or self._found(machine):
                self._release(machine, Ending("stopped by the user"))
        self._closed(0)
        return is_whole

    def _is_stopped(self) -> bool:
        with contextlib.suppress(UnclearError):
            return self.words.is_stopped()
        return False

    def _clock(self) -> float:
        """The time of day by the provider's clock, by which it bills; ours where it tells none."""
        return self.clock() + self.driver.clock_offset_s

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
        self.sleep(seconds)
        self._hold()

    def _asked(self, call: Callable[[], T]) -> T:
        """Raises `UnclearError`; `InputError` once credentials were refused for a while."""
        try:
            answer = call()
        except UnauthorizedError as error:
            now = self.awake()
            self._locked_at = now if self._locked_at is None else self._locked_at
            if not self.ledger.open or now - self._locked_at >= self.patience.lost_s:
                still = self.ledger.open_in_words(self.driver.ends_by_itself, self._clock())
                raise InputError(
                    f"the provider refuses the credentials ({error})"
                    + (f"; still billed: {'; '.join(still)}" if still else ""),
                    where="environment",
                    to_do=(
                        "export a valid key, then: farthing launch attach JOB, or launch stop JOB"
                    ),
                ) from error
            raise UnclearError(str(error)) from error
        self._locked_at = None
        return answer

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
                    self.say(f"{who} does not answer ({said}): nothing is rented until it does")
                if self.awake() - began > most_s and not self.ledger.open:
                    raise RunInterruptedError(
                        f"{who} has not answered for {say_seconds(most_s)} ({said})",
                        where="--on" if who == "the provider" else "output_store",
                        to_do="try again when it does: nothing is rented",
                    ) from error
                self.sleep(self.patience.poll_s)

    def _take_over(self) -> None:
        """What other folders of this run asked for and paid is ours to count and give back."""
        self._shared = self.words.kept()
        self.ledger.take_over(self._shared)
        self._share()

    def _refuse_what_can_not_be_counted(self) -> None:
        for machine in self.ledger.machines.values():
            if not machine.asked_at:
                raise InputError(
                    f"the line of {machine.name} with its costs is damaged: the cap can't be kept",
                    where=str(self.ledger.folder / MACHINES),
                    to_do="restore the file from a copy, or end what there is: launch stop",
                )
        self._refuse_what_is_elsewhere()

    def _refuse_what_is_elsewhere(self) -> None:
        for machine in self.ledger.open:
            if not self.reaches(machine):
                on = machine.on or machine.target
                raise InputError(
                    f"{machine.name} of this launch is at {on}",
                    where="--on",
                    to_do=f"name it: --on {on}, or end it: farthing launch stop JOB --on {on}",
                )

    def _share(self) -> None:
        """Raises `UnclearError`."""
        for name, rows in self.ledger.rows.items():
            if self._shared.get(name) != rows:
                self.words.keep(name, rows)
                self._shared[name] = list(rows)

    def _adopt_orphans(self) -> None:
        """Put machines of this launch that no line of the ledger knows into it."""
        there = self._asked(lambda: self.driver.names(self._prefix))
        if set(there) - set(self.ledger.machines):
            self._take_over()  # another process may have asked for them since
        for name, number in there.items():
            known = self.ledger.machines.get(name)
            if known is None and name.rpartition("-")[2].isdigit():
                offer, now = self.offers[0], self._clock()
                self.ledger.note(
                    name,
                    "asked",
                    now,
                    number=int(name.rpartition("-")[2]),
                    provider=offer.provider,
                    usd_per_hour=max(each.usd_per_hour or 0.0 for each in self.offers),
                    committed=self._committed(),
                    is_paid_in_queue=self.driver.is_paid_in_queue,
                    why="asked for elsewhere; counted from now on",
                )
                self.ledger.note(name, "created", now, id=number)

    def _adopted(self) -> Machine | None:
        """The machine of an earlier process of ours that still works; others are sent away."""
        waiting = [machine for machine in self.ledger.open if machine.left_at is None]
        for machine in waiting[:-1]:
            self._release(machine, Ending("a younger machine took the run over"))
        if not waiting:
            for machine in self.ledger.open:
                self._terminate(machine)
            return None
        machine = waiting[-1]
        if (machine.created_at is None and not self._found(machine)) or not self._is_secured(
            machine
        ):
            return None
        self.say(f"{machine.name} is there already: continuing with it")
        return machine

    def _rent(self) -> Machine | None:
        """The next machine, made; None where no offer is left. Raises `NoBudgetError`."""
        while offer := self._next_offer():
            self._hold()
            number, accounts, now = self.ledger.next_number, self._accounts(), self._clock()
            ask = self.make_ask(number, offer, accounts, now)
            machine = self.ledger.note(
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
                is_paid_in_queue=self.driver.is_paid_in_queue,
                committed=self._committed(),
            )
            try:
                self._hold()
            except RunInterruptedError as error:  # the number may be another machine's by now
                self._refused(machine, error.what)
                raise
            self._until_clear(self._share, "the store")
            try:
                made = self.driver.create(ask, now)
                told = {} if made.usd_per_hour is None else {"usd_per_hour": made.usd_per_hour}
                self.ledger.note(ask.name, "created", self._clock(), id=made.id, **told)
                if not self._is_secured(machine):
                    continue
                self._hold_or_undo(machine)
                self.say(
                    f"{ask.name}: made ({offer.provider} {offer.instance or offer.gpu}, id"
                    f" {made.id}), {say_usd(machine.usd_per_hour)} an hour, {machine.price_from}"
                )
                with contextlib.suppress(UnclearError):
                    self._take_price(machine, self._asked(partial(self.driver.look, machine)))
            except UnauthorizedError as error:
                self._refused(machine, str(error))
                self._closed(EXIT_MISTAKE)
                to_do = "mend it there, then launch again"
                raise InputError(str(error), where=offer.provider, to_do=to_do) from error
            except RefusedError as error:
                self._refused(machine, str(error))
                self.say(f"{ask.name}: refused by {offer.provider}: {error}")
                is_stock = isinstance(error, OutOfStockError)
                (self._out_of_stock if is_stock else self._left_out).add(offer)
                continue
            except UnclearError as error:
                self.say(
                    f"{ask.name}: {offer.provider} gave no clear answer ({error}); looking for it"
                    " by name"
                )
                if not (self._found(machine) and self._is_secured(machine)):
                    self._left_out.add(offer)
                    continue
            if not self._is_too_dear(machine):
                self._tell_price(machine)
                return machine
            self._send_back(machine, offer)
        return None

    def _refused(self, machine: Machine, why: str) -> None:
        self.ledger.note(machine.name, "refused", self._clock(), why=why)

    def _hold_or_undo(self, machine: Machine) -> None:
        """End a machine made by a watcher that was suspended, unless it was adopted."""
        try:
            self._hold()
        except RunInterruptedError:
            told, counted = list[Json](), 0.0
            with contextlib.suppress(UnclearError):
                told = self.words.kept().get(machine.name, [])
            if any(row.get("event") == "created" for row in told):
                raise
            if ends := [row["at"] for row in told if row.get("event") == "gone"]:
                # it was looked for in vain, and counted until then as if it had been there
                counted = (machine.created_at or 0.0) - max(ends)
            why = "made after another process had taken over"
            self.ledger.note(machine.name, "left", self._clock() - counted, why=why)
            with contextlib.suppress(ProviderError):
                self.driver.destroy(machine)
                self.ledger.note(machine.name, "gone", self._clock() - counted, why=why)
            with contextlib.suppress(UnclearError):
                self.words.keep(machine.name, self.ledger.rows[machine.name])
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
        self.ledger.note(machine.name, "priced", at, usd_per_hour=price)
        if is_other:
            self.say(
                f"{machine.name}: the provider charges {say_usd(price)} an hour, not"
                f" {say_usd(known)}"
            )
            self._tell_price(machine)

    def _tell_price(self, machine: Machine) -> None:
        with contextlib.suppress(UnclearError):
            self.words.tell_price(machine.name, machine.usd_per_hour)

    def _is_too_dear(self, machine: Machine) -> bool:
        """Whether the machine's own end would come after the cap, at the price that is charged."""
        if machine.left_usd is None or not machine.most_s:
            return False
        most_usd = (machine.most_s + TEARDOWN_S) / 3600 * machine.usd_per_hour
        return most_usd > machine.left_usd * (1 + 1e-6) + 1e-6

    def _send_back(self, machine: Machine, offer: Offer) -> None:
        """End a machine that is too dear before it trains. Its offer comes last from now on, at
        the price that was charged; at a second rise it is left out."""
        price, planned = machine.usd_per_hour, offer.usd_per_hour or 0.0
        why = f"{say_usd(price)} an hour instead of {say_usd(planned)}"
        self._release(machine, Ending(f"{why}: the cap does not allow it for that long"))
        self._terminate(machine)
        self.offers.remove(offer)
        if _kind(offer) not in self._repriced and planned:
            self._repriced.add(_kind(offer))
            self.offers.append(offer._replace(usd=offer.usd * price / planned))

    def _next_offer(self) -> Offer | None:
        out = self._left_out | self._out_of_stock
        return next((each for each in self.offers if each not in out and self.may_take(each)), None)

    def _found(self, machine: Machine) -> bool:
        """Whether a machine is there whose creation was not answered; looked for until it must be
        in every list.

        While nobody looked it may have been there and gone: then it is counted as if it was.
        """
        is_said, late_s = False, self.driver.late_s
        while True:
            try:
                seen = self._asked(lambda: self.driver.look(machine))
                now = self._clock()
                self.ledger.note(machine.name, "sought", now)
                with contextlib.suppress(UnclearError):
                    self._share()
                if seen is not None:
                    self.ledger.note(machine.name, "created", now, id=seen.id)
                    self._take_price(machine, seen)
                    return True
                times = sorted([machine.asked_at, *machine.sought])
                back = [at for before, at in pairwise(times) if at - before > late_s + GAP_S]
                began = back[-1] if back else times[1]
                if now >= began + late_s and back:
                    at = min(began, machine.asked_at + machine.most_s) if machine.most_s else began
                    why = "can't tell whether it existed; counted as if it did"
                    self.ledger.note(machine.name, "gone", at, why=why)
                    return False
                if now >= began + late_s:
                    self._refused(machine, "no such machine came into being")
                    return False
            except UnclearError as error:
                if not is_said:
                    self.say(
                        f"{machine.name}: {error}; nothing else is requested until this is known"
                    )
                is_said = True
            self._pause(self.patience.poll_s)

    def _is_secured(self, machine: Machine) -> bool:
        """Whether a machine that was made has its end; one that has none is destroyed."""
        try:
            self._asked(lambda: self.driver.secure(machine))
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
        is_paid = self.driver.is_paid_in_queue
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
                word = self.words.of(machine.name)
                if word.has_booted and machine.booted_at is None:
                    self.ledger.note(machine.name, "booted", now)
                    self.say(f"{machine.name}: booted after {say_seconds(age)}")
                    beat_at = awake
                if word.beat != beat:
                    beat, beat_at = word.beat, awake
            except UnclearError:
                pass
            if word.code is not None and not (
                self.driver.restarts and word.code == EXIT_INTERRUPTED
            ):
                return Ending(word.why or f"left with {word.code}", word.code)
            try:
                seen = self._asked(lambda: self.driver.look(machine))
                self._take_price(machine, seen)
                answered_at, was_seen = awake, was_seen or seen is not None
                n_absent = n_absent + 1 if seen is None else 0
                missed_at = self._clock() if n_absent == 1 else missed_at
                if seen is not None:
                    machine.alive_at = self._clock()
                if n_absent >= 3 and (was_seen or age > self.driver.late_s):
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
            self.sleep(self.patience.poll_s)

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
                if (code := self.words.of(machine.name).code) is not None:
                    return code
            self.sleep(self.patience.poll_s)
        return None

    # ---- giving back ----

    def _release(self, machine: Machine, ending: Ending) -> None:
        if machine.left_at is None:
            at = self._clock() if ending.at is None else ending.at
            self.ledger.note(machine.name, "left", at, code=ending.code, why=ending.why)
            machine.is_missed = ending.at is not None
            usd = say_usd(machine.usd(self._clock()))
            self.say(f"{machine.name}: {ending.why}; {usd} so far")
        if ending.leaves_offer_out:
            self._left_out |= {each for each in self.offers if each.instance == machine.instance}
        elif ending.code in (None, EXIT_INTERRUPTED):  # the next in the ranking; this comes last
            of = machine.provider, machine.instance, machine.is_spot
            self.offers.sort(key=lambda each: _kind(each) == of)

    def _terminate(self, machine: Machine) -> None:
        """Ask for the deletion until it is confirmed. Where machines may overlap only a while: then
        the next is asked for meanwhile, and this one is asked again at every look."""
        began, pause_s = self._clock(), self.patience.poll_s / 2
        while not self._is_gone(machine):
            if self.driver.may_overlap and self._clock() - began > self.patience.stubborn_s:
                self.say(
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
            self._asked(lambda: self.driver.destroy(machine))
            machine.acknowledged_at = machine.acknowledged_at or self._clock()
            seen = self._asked(lambda: self.driver.look(machine))
            if seen is not None and seen.is_paid:
                machine.is_missed = False
                machine.alive_at = self._clock()
                return False
            why, at = machine.why, machine.acknowledged_at
        except UnclearError:
            end = machine.asked_at + machine.most_s + 300
            if not (self.driver.ends_by_itself and machine.most_s and self._clock() > end):
                return False
            why, at = f"{machine.why}; no answer, and its own time-out has passed", self._clock()
        if self.driver.ends_by_itself and machine.most_s:  # where it was gone long before we looked
            at = min(at, max(machine.asked_at + machine.most_s, machine.alive_at))
        if machine.is_missed:
            at = machine.left_at or at
        self.ledger.note(machine.name, "gone", at, why=why)
        self.say(f"{machine.name}: confirmed gone; {say_usd(machine.usd(self._clock()))} in all")
        return True

    def _sweep(self) -> None:
        """Destroy what bears our name and should not be there, or is not confirmed gone."""
        if self.ledger.trouble not in ("", self._trouble_said):
            self._trouble_said = self.ledger.trouble
            self.say(
                f"events of machines can't be recorded here ({self._trouble_said}); continuing"
                " without"
            )
        for machine in self.ledger.open:
            if machine.left_at is not None:
                self._is_gone(machine)
        with contextlib.suppress(UnclearError):
            self._share()
        with contextlib.suppress(UnclearError):
            for name, found in self._asked(lambda: self.driver.names(self._prefix)).items():
                if not self._is_known(name) and not self._is_ending:
                    self.reclaim()
                    self._take_over()  # whoever took this launch over has written it down
                if not self._is_known(name):
                    self.say(f"{name} should not be there: destroying it")
                    machine = self.ledger.machines.get(name) or Machine(name)
                    self.driver.destroy(replace(machine, id=found))

    def _is_known(self, name: str) -> bool:
        machine = self.ledger.machines.get(name)
        return machine is not None and machine.is_open and machine.asked_at > 0.0

    def _closed(self, code: int) -> int:
        """Wait until every machine is confirmed to be gone, then the code. A host of one's own that
        does not answer is waited for only a while, and said."""
        began = self._clock()
        self._sweep()
        while self.ledger.open:
            if self.driver.may_overlap and self._clock() - began > self.patience.farewell_s:
                names = ", ".join(machine.name for machine in self.ledger.open)
                self.say(
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
            return self.words.committed()
        except UnclearError:
            return max((machine.committed for machine in self.ledger.machines.values()), default=0)

    def _accounts(self) -> list[Account]:
        """The attempts so far: without the store the rest of the cap is not known."""
        return self._until_clear(self.words.accounts, "the store")

    def _is_finished(self) -> bool:
        """Also where the machine that did it was lost before it could say so."""
        return any(account.state == "finished" for account in self._accounts()[-1:])

    def _n_in_vain(self) -> int:
        """How many machines in a row, up to now, have brought the run no further."""
        made = [machine for machine in self.ledger.machines.values() if not machine.is_refused]
        reached = self._committed()
        return len(list(takewhile(lambda each: reached <= each.committed, reversed(made))))


def _kind(offer: Offer) -> tuple[str, str, bool]:
    return offer.provider, offer.instance, offer.is_spot


def _how(machine: Machine, code: int | None) -> str:
    if machine.booted_at is None and code is None:
        return "it ended before it had booted"
    return "it ended without a word" if code is None else f"left with {code}"
