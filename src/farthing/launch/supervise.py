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
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NamedTuple, TypeVar

from farthing.config.job import Job
from farthing.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_LIMIT,
    EXIT_MISTAKE,
    InputError,
    RunChangedError,
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
from farthing.launch.machines import MACHINES, MachineLedger, RentedMachine
from farthing.launch.prepare import NoBudgetError, Prepared
from farthing.launch.request import TEARDOWN_S, LaunchRequest, Patience
from farthing.launch.words import StoreWords, Word
from farthing.prices.offers import Offer
from farthing.run.accounts import Account
from farthing.run.folder import JOB, MORE_STEPS, RUN, changes_of
from farthing.storage.files import Json, sha256_of
from farthing.units import plural, say_seconds, say_usd

T = TypeVar("T")
GAP_S = 30.0
"""A watcher that did nothing for longer may have been suspended: others may have taken over."""


class MachineEnding(NamedTuple):
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

    prepared: Prepared
    ledger: MachineLedger
    driver: Driver
    words: StoreWords
    write: Callable[[LaunchRequest], object]
    """Leaves the files of a request where its user finds them."""
    say: Callable[[str], None]
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    awake: Callable[[], float]
    """Seconds that also pass while this machine is suspended, and that nobody sets."""
    patience: Patience = field(default_factory=Patience)
    reclaim: Callable[[], None] = lambda: None
    """Make sure that this launch is still ours to watch. Raises `RunInterruptedError`."""

    def __post_init__(self) -> None:
        self._offers = [*self.prepared.offers]
        self._left_out, self._out_of_stock = set[Offer](), set[Offer]()
        self._repriced = set[tuple[str, str, bool]]()
        self._n_stock_rounds = 0
        self._shared = dict[str, list[Json]]()
        """The lines of each machine that the store has."""
        self._is_ending = False
        """Everything is to be destroyed, whoever knows of it."""
        self._prefix, self._said = self.prepared.launch_id, set[str]()
        self._held_at, self._n_gaps, self._is_sure = self.awake(), 0, True
        self._locked_at: float | None = None

    def run(self) -> int:
        """Until the run has ended or cannot continue; the exit code."""
        self._until_clear(self._take_over, "the store")
        for name, machine in self.ledger.machines.items():
            if not machine.asked_at:
                raise InputError(
                    f"the line of {name} with its costs is damaged: the cap can't be kept",
                    where=str(self.ledger.folder / MACHINES),
                    to_do="restore the file from a copy, or end what there is: launch stop",
                )
        self._refuse_what_is_elsewhere()
        self._until_clear(self._adopt_orphans, "the provider")
        code = self._round(self._adopted())
        while code is None:
            code = self._round(None)
        return self._closed(code)

    def _round(self, machine: RentedMachine | None) -> int | None:
        """A machine, or the next one, until it is given back; the exit code after the last one."""
        if self._is_stopped():
            self.say("stopped by `farthing launch stop`")
            return EXIT_INTERRUPTED
        if machine is None and self._is_finished():
            self.say("the run has already ended: nothing is rented")
            return EXIT_FINISHED
        try:
            machine = machine or self._rent()
        except NoBudgetError as error:
            self.say(str(error))
            return EXIT_LIMIT
        if machine is None:
            return self._without_offers()
        ending = self._watch(machine)
        # a mistake may be that one which we have lost still holds the run
        may_be_held = ending.code == EXIT_MISTAKE and len(self.ledger.open) > 1
        if may_be_held:
            ending = ending._replace(code=EXIT_INTERRUPTED)
        self._release(machine, ending)
        self._terminate(machine)
        if may_be_held:
            self._pause(self.patience.stock_s)
        if ending.code not in (None, EXIT_INTERRUPTED):
            return ending.code
        n_in_vain = self._n_in_vain()
        if n_in_vain < self.patience.n_in_vain:
            return None
        self.say(f"{plural(n_in_vain, 'machine')} in a row saved nothing new: stopped")
        return EXIT_INTERRUPTED

    def stop(self) -> bool:
        """Destroy every machine, for sure. False where the store could not be read."""
        self._is_ending, is_whole = True, True
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
                self._release(machine, MachineEnding("stopped by the user"))
        self._closed(EXIT_FINISHED)
        return is_whole

    # ---- what is asked, and who does not answer ----

    def _clock(self) -> float:
        """The time of day by the provider's clock, by which it bills; ours where it tells none."""
        return self.clock() + self.driver.clock_offset_s

    def _hold(self, *, surely: bool = False) -> None:
        """After a gap: make sure that the launch is still ours, and read what others did meanwhile;
        `surely` waits for the store, without which nobody else can take the launch over either.

        A suspended watcher may wake beside one that took over; nothing may be made by what it
        remembers.
        """
        if self.awake() - self._held_at > GAP_S and not self._is_ending:
            self._n_gaps += 1
            self._locked_at, self._is_sure = None, False
        self._held_at = self.awake()
        if surely:
            self._until_clear(self._make_sure, "the store")
        else:
            self._if_answered(self._make_sure, None)

    def _make_sure(self) -> None:
        """Raises `RunInterruptedError`, `UnclearError`."""
        if not self._is_sure:
            self.reclaim()
            self._read()
            self._is_sure = True

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def _pause(self, seconds: float) -> None:
        self.sleep(seconds)
        self._hold()

    def _asked(self, call: Callable[[], T]) -> T:
        """What the provider answers. Raises `UnclearError`; `InputError` once credentials were
        refused for a while."""
        try:
            answer = call()
        except UnauthorizedError as error:
            now = self.awake()
            self._locked_at = now if self._locked_at is None else self._locked_at
            if self.ledger.open and now - self._locked_at < self.patience.lost_s:
                raise UnclearError(str(error)) from error
            still = self.ledger.open_in_words(self.driver.ends_by_itself, self._clock())
            raise InputError(
                f"the provider refuses the credentials ({error})"
                + (f"; still billed: {'; '.join(still)}" if still else ""),
                where="environment",
                to_do="export a valid key, then: farthing launch attach JOB, or launch stop JOB",
            ) from error
        self._locked_at = None
        return answer

    def _if_answered(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except UnclearError:
            return otherwise

    def _until_clear(self, work: Callable[[], T], who: str) -> T:
        """What `work` gives, tried until it is answered: without that it is not known what is there
        and what is left. Raises `RunInterruptedError` after a while in which nothing was rented.
        """
        began = self.awake()
        most_s = self.patience.stock_s * self.patience.n_stock_rounds
        while True:
            try:
                return work()
            except UnclearError as error:
                self._say_once(f"{who} does not answer ({error}): nothing is rented until it does")
                if self.awake() - began > most_s and not self.ledger.open:
                    raise RunInterruptedError(
                        f"{who} has not answered for {say_seconds(most_s)} ({error})",
                        where="--on" if who == "the provider" else "output_store",
                        to_do="try again when it does: nothing is rented",
                    ) from error
                self.sleep(self.patience.poll_s)

    # ---- what the store and other processes know ----

    def _take_over(self) -> None:
        """What other folders of this run asked for and paid is ours to count and give back."""
        self._read()
        self._share()

    def _read(self) -> None:
        self._shared = self.words.kept()
        self.ledger.take_over(self._shared)

    def _share(self) -> None:
        """Raises `RunInterruptedError`: nothing is written over what another process has written
        since, and `UnclearError`."""
        self._hold()
        for name, rows in self.ledger.rows.items():
            if self._shared.get(name) != rows:
                self.words.keep(name, rows)
                self._shared[name] = list(rows)

    def _refuse_what_is_elsewhere(self) -> None:
        for machine in self.ledger.open:
            if not self.prepared.reaches(machine):
                on = machine.on or machine.target
                raise InputError(
                    f"{machine.name} of this launch is at {on}",
                    where="--on",
                    to_do=f"name it: --on {on}, or end it: farthing launch stop JOB --on {on}",
                )

    def _adopt_orphans(self) -> None:
        """Put machines of this launch that no line of the ledger knows into it."""
        there = self._asked(lambda: self.driver.names(self._prefix))
        if there.keys() - self.ledger.machines.keys():
            self._take_over()  # another process may have asked for them since
        for name, id_ in there.items():
            number = name.rpartition("-")[2]
            if name not in self.ledger.machines and number.isdigit():
                now = self._clock()
                self.ledger.note(
                    name,
                    "asked",
                    now,
                    number=int(number),
                    provider=self._offers[0].provider,
                    usd_per_hour=max(each.usd_per_hour or 0.0 for each in self._offers),
                    committed=self._committed(),
                    is_paid_in_queue=self.driver.is_paid_in_queue,
                    why="asked for elsewhere; counted from now on",
                )
                self.ledger.note(name, "created", now, id=id_)

    def _adopted(self) -> RentedMachine | None:
        """The machine of an earlier process of ours that still works; others are sent away."""
        waiting = [machine for machine in self.ledger.open if machine.left_at is None]
        for machine in waiting[:-1]:
            self._release(machine, MachineEnding("a younger machine took the run over"))
        if not waiting:
            for machine in self.ledger.open:
                self._terminate(machine)
            return None
        machine = waiting[-1]
        is_there = machine.created_at is not None or self._found(machine)
        if not (is_there and self._is_secured(machine)):
            return None
        self.say(f"{machine.name} is there already: continuing with it")
        if (max_usd := self.prepared.job.limits.max_usd) is not None:  # it may have been changed
            now = self._clock()
            others_usd = self.ledger.spent_usd(self._accounts(), now) - machine.usd(now)
            machine.left_usd = max_usd - others_usd
        return machine

    def _is_stopped(self) -> bool:
        return self._if_answered(self.words.is_stopped, False)

    def _committed(self) -> int:
        known = max((machine.committed for machine in self.ledger.machines.values()), default=0)
        return self._if_answered(self.words.committed, known)

    def _accounts(self) -> list[Account]:
        """The attempts so far: without the store the rest of the cap is not known."""
        return self._until_clear(self.words.accounts, "the store")

    def _is_finished(self) -> bool:
        """Also where the machine that did it was lost before it could say so. A run that is asked
        for more steps is not. Raises `RunChangedError` where what was saved is another job's.
        """
        read = self.words.run_file
        facts, kept = self._until_clear(lambda: (read(RUN), read(JOB)), "the store")
        job = self.prepared.job
        if self._committed() and (changed := _changed(job, facts.get("identity", {}))):
            raise RunChangedError(
                "what was saved is the run of another job:\n    " + "\n    ".join(changed),
                where=job.output_store or job.output_dir,
                to_do="undo the change, or give the job another output_dir and output_store",
            )
        before, now = kept.get("train", {}), job.train.model_dump(mode="json")
        if any(before.get(key, now[key]) != now[key] for key in MORE_STEPS):
            return False
        newest = self._accounts()[-1:]
        return any(each.state == "finished" for each in newest) or bool(facts.get("finished"))

    def _n_in_vain(self) -> int:
        """How many machines in a row, up to now, have brought the run no further."""
        made = [machine for machine in self.ledger.machines.values() if not machine.is_refused]
        reached = self._committed()
        return len(list(takewhile(lambda each: reached <= each.committed, reversed(made))))

    # ---- a new machine ----

    def _next_offer(self) -> Offer | None:
        out = self._left_out | self._out_of_stock
        return next(
            (each for each in self._offers if each not in out and self._may_take(each)), None
        )

    def _may_take(self, offer: Offer) -> bool:
        is_free = not offer.is_spot or self.prepared.job.limits.deadline is None
        return is_free or self.prepared.is_in_time(offer, self._clock(), self._committed())

    def _without_offers(self) -> int | None:
        """Wait for stock, a few times. The exit code where that is in vain."""
        if not self._out_of_stock or self._n_stock_rounds == self.patience.n_stock_rounds:
            self.say(
                "no offer is left that could be had: try again later, or allow more (--on,"
                " where.provider)"
            )
            return EXIT_INTERRUPTED
        self._n_stock_rounds += 1
        wait = say_seconds(self.patience.stock_s)
        self.say(f"nothing is available now; asking again in {wait}, which costs nothing")
        self._out_of_stock.clear()
        self._pause(self.patience.stock_s)
        return None

    def _rent(self) -> RentedMachine | None:
        """The next machine, made; None where no offer is left. Raises `NoBudgetError`."""
        while offer := self._next_offer():
            self._hold(surely=True)
            number, accounts, now = self.ledger.next_number, self._accounts(), self._clock()
            ask = self.prepared.ask(number, offer, self.ledger, accounts, now)
            self.write(ask)
            machine = self._noted(ask, number, now)
            if not self._is_made(machine, ask, now):
                continue
            if not self._is_too_dear(machine):
                self._tell_price(machine)
                return machine
            self._send_back(machine, offer)
        return None

    def _noted(self, ask: LaunchRequest, number: int, now: float) -> RentedMachine:
        """The machine, in the ledger here and in the store before anybody is asked for it."""
        offer = ask.offer
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
            self._hold(surely=True)
        except RunInterruptedError as error:  # the number may be another machine's by now
            self._refused(machine, error.what)
            raise
        self._until_clear(self._share, "the store")
        return machine

    def _is_made(self, machine: RentedMachine, ask: LaunchRequest, now: float) -> bool:
        """Ask for a machine; whether it is there and has its end. An offer that did not lead to one
        is left out. Raises `InputError` where the account may rent nothing.
        """
        offer, name = ask.offer, ask.name
        try:
            made = self.driver.create(ask, now)
        except UnauthorizedError as error:
            self._refused(machine, str(error))
            self._closed(EXIT_MISTAKE)
            to_do = "mend it there, then launch again"
            raise InputError(str(error), where=offer.provider, to_do=to_do) from error
        except RefusedError as error:
            self._refused(machine, str(error))
            self.say(f"{name}: refused by {offer.provider}: {error}")
            is_stock = isinstance(error, OutOfStockError)
            (self._out_of_stock if is_stock else self._left_out).add(offer)
            return False
        except UnclearError as error:
            self.say(
                f"{name}: {offer.provider} gave no clear answer ({error}); looking for it by name"
            )
            if self._found(machine) and self._is_secured(machine):
                return True
            self._left_out.add(offer)
            return False
        told = {} if made.usd_per_hour is None else {"usd_per_hour": made.usd_per_hour}
        self.ledger.note(name, "created", self._clock(), id=made.id, **told)
        if not self._is_secured(machine):
            return False
        self._hold_or_undo(machine)
        self.say(
            f"{name}: made ({offer.provider} {offer.instance or offer.gpu}, id {made.id}),"
            f" {say_usd(machine.usd_per_hour)} an hour, {machine.price_from}"
        )
        self._take_price(machine, self._if_answered(lambda: self._look(machine), None))
        return True

    def _refused(self, machine: RentedMachine, why: str) -> None:
        self.ledger.note(machine.name, "refused", self._clock(), why=why)

    def _look(self, machine: RentedMachine) -> InstanceStatus | None:
        return self._asked(lambda: self.driver.look(machine))

    def _hold_or_undo(self, machine: RentedMachine) -> None:
        """End a machine made by a watcher that was suspended, unless it was adopted."""
        try:
            self._hold()
        except RunInterruptedError:
            told: list[Json] = []
            with contextlib.suppress(UnclearError):
                told = self.words.kept().get(machine.name, [])
            at = {str(row.get("event")): float(row.get("at") or 0.0) for row in told}
            if "created" in at:
                raise
            # looked for in vain, it was counted until then as if it had been there
            counted_s = max(0.0, (machine.created_at or 0.0) - at["gone"]) if "gone" in at else 0.0
            gone_at = min(self._clock() - counted_s, self._own_end(machine))
            why = "made after another process had taken over"
            self.ledger.note(machine.name, "left", gone_at, why=why)
            with contextlib.suppress(ProviderError):
                self.driver.destroy(machine)
                self.ledger.note(machine.name, "gone", gone_at, why=why)
            with contextlib.suppress(UnclearError):
                self.words.keep(machine.name, self.ledger.rows[machine.name])
            raise

    def _found(self, machine: RentedMachine) -> bool:
        """Whether a machine is there whose creation was not answered; looked for until it must be
        in every list.

        While nobody looked it may have been there and gone: then it is counted as if it was.
        """
        late_s = self.driver.late_s
        while True:
            try:
                seen = self._look(machine)
                now = self._clock()
                self.ledger.note(machine.name, "sought", now)
                self._if_answered(self._share, None)
                if seen is not None:
                    self.ledger.note(machine.name, "created", now, id=seen.id)
                    self._take_price(machine, seen)
                    return True
                times = sorted([machine.asked_at, *machine.sought])
                back = [at for before, at in pairwise(times) if at - before > late_s + GAP_S]
                began = back[-1] if back else times[1]
                if now >= began + late_s:
                    if back:
                        why = "can't tell whether it existed; counted as if it did"
                        at = min(began, self._own_end(machine))
                        self.ledger.note(machine.name, "gone", at, why=why)
                    else:
                        self._refused(machine, "no such machine came into being")
                    return False
            except UnclearError as error:
                self._say_once(
                    f"{machine.name}: {error}; nothing else is requested until this is known"
                )
            self._pause(self.patience.poll_s)

    def _is_secured(self, machine: RentedMachine) -> bool:
        """Whether a machine that was made has its end; one that has none is destroyed."""
        try:
            self._asked(lambda: self.driver.secure(machine))
            return True
        except (RefusedError, UnclearError) as error:
            why = f"it could not be given its end ({error})"
            self._release(machine, MachineEnding(why, leaves_offer_out=True))
            self._terminate(machine)
            return False

    # ---- the price that is charged ----

    def _take_price(self, machine: RentedMachine, seen: InstanceStatus | None) -> None:
        """Book the price that the provider tells, where it is another than the one known."""
        if seen is None or (price := seen.usd_per_hour) is None:
            return
        known = machine.usd_per_hour
        is_other = abs(price - known) > 1e-4 * known
        if machine.charged and not is_other:
            return
        self.ledger.note(machine.name, "priced", self._clock(), usd_per_hour=price)
        if is_other:
            self.say(
                f"{machine.name}: the provider charges {say_usd(price)} an hour, not"
                f" {say_usd(known)}"
            )
            self._tell_price(machine)

    def _tell_price(self, machine: RentedMachine) -> None:
        with contextlib.suppress(UnclearError):
            self.words.tell_price(machine.name, machine.usd_per_hour)

    def _is_too_dear(self, machine: RentedMachine) -> bool:
        """Whether the machine's own end would come after the cap, at the price that is charged."""
        if machine.left_usd is None or not machine.most_s:
            return False
        most_usd = (machine.most_s + TEARDOWN_S) / 3600 * machine.usd_per_hour
        return most_usd > machine.left_usd * (1 + 1e-6) + 1e-6

    def _send_back(self, machine: RentedMachine, offer: Offer) -> None:
        """End a machine that is too dear before it trains. Its offer comes last from now on, at
        the price that was charged; at a second rise it is left out: each try pays for a boot."""
        price, planned = machine.usd_per_hour, offer.usd_per_hour or 0.0
        why = f"{say_usd(price)} an hour instead of {say_usd(planned)}"
        self._release(machine, MachineEnding(f"{why}: the cap does not allow it for that long"))
        self._terminate(machine)
        self._offers.remove(offer)
        if _kind(offer) not in self._repriced and planned:
            self._repriced.add(_kind(offer))
            self._offers.append(offer._replace(usd=offer.usd * price / planned))

    # ---- a machine at work ----

    def _watch(self, machine: RentedMachine) -> MachineEnding:
        """Until it has left, is lost or has to go."""
        is_paid, patience, n_gaps = self.driver.is_paid_in_queue, self.patience, self._n_gaps
        began = answered_at = beat_at = self.awake()
        missed, beat, waited_s = list[float](), "", 0.0
        # an adopted machine was asked for by another clock: its age counts from its adoption
        is_ours = abs(self._clock() - machine.asked_at) < patience.boot_s
        while True:
            self._hold()
            if n_gaps != self._n_gaps:  # nobody was listening meanwhile
                n_gaps, answered_at, beat_at = self._n_gaps, self.awake(), self.awake()
            self._sweep()
            if self._is_stopped():
                return MachineEnding("stopped by the user")
            now, awake = self._clock(), self.awake()
            age = now - machine.asked_at if is_ours else awake - began
            word = self._if_answered(lambda: self.words.of(machine.name), Word())
            if word.has_booted and machine.booted_at is None:
                self.ledger.note(machine.name, "booted", now)
                self.say(f"{machine.name}: booted after {say_seconds(age)}")
                beat_at = awake
            if word.beat not in ("", beat):
                beat, beat_at = word.beat, awake
            is_queued_again = self.driver.restarts and word.code == EXIT_INTERRUPTED
            if word.code is not None and not is_queued_again:
                return MachineEnding(word.why or f"left with {word.code}", word.code)
            try:
                seen = self._look(machine)
                self._take_price(machine, seen)
                answered_at = awake
                missed = [] if seen else [*missed, self._clock()]
                if ending := self._ending_by(seen, machine, missed, age, age - waited_s):
                    return ending
                if seen is not None and seen.is_waiting:
                    beat_at, waited_s = awake, age
                elif seen is not None and not is_paid and machine.began_at is None:
                    self.ledger.note(machine.name, "began", now)
            except UnclearError:
                if awake - answered_at > patience.lost_s:
                    return MachineEnding(f"no answer for {say_seconds(awake - answered_at)}")
            if machine.booted_at is not None and awake - beat_at > patience.silent_s:
                return MachineEnding(f"no sign of it for {say_seconds(patience.silent_s)}")
            if self._is_at_cap(machine):
                return MachineEnding("the cap is reached at the price that is charged", EXIT_LIMIT)
            if is_paid and machine.most_s and age > machine.most_s + 60:
                return MachineEnding("its time is over", EXIT_LIMIT)
            self.sleep(patience.poll_s)

    def _ending_by(
        self,
        seen: InstanceStatus | None,
        machine: RentedMachine,
        missed: list[float],
        age: float,
        up_s: float,
    ) -> MachineEnding | None:
        """The ending that the provider's answer shows. `missed` are the times of answers without
        the machine, `up_s` the seconds since a queue let it begin."""
        if seen is None:
            if len(missed) >= 3 and (machine.alive_at or age > self.driver.late_s):
                why = "taken away" if machine.booted_at else "gone before it had booted"
                return MachineEnding(why, at=missed[0])
        else:
            machine.alive_at = self._clock()
            if seen.is_over:
                return self._ended(machine, seen.code)
        is_late = machine.booted_at is None and up_s > self.patience.boot_s
        stuck = seen.stuck if seen is not None else ""
        if is_late and not (seen and seen.is_waiting):
            stuck = stuck or f"not booted after {say_seconds(up_s)}"
        return MachineEnding(stuck, leaves_offer_out=True) if stuck else None

    def _is_at_cap(self, machine: RentedMachine) -> bool:
        """Whether the machine has to end now for the cap to hold until it is confirmed gone."""
        if machine.left_usd is None:
            return False
        soon = self._clock() + self.patience.poll_s + TEARDOWN_S / 2
        return machine.usd(soon) > machine.left_usd

    def _ended(self, machine: RentedMachine, code: int | None) -> MachineEnding:
        """Of a machine that runs no more, whose words may be late."""
        for _ in range(2):
            if code is None:
                code = self._if_answered(lambda: self.words.of(machine.name), Word()).code
            if code is None:
                self.sleep(self.patience.poll_s)
        has_booted = machine.booted_at is not None
        why = "it ended without a word" if has_booted else "it ended before it had booted"
        why = why if code is None else f"left with {code}"
        return MachineEnding(why, code, leaves_offer_out=not has_booted)

    # ---- giving back ----

    def _release(self, machine: RentedMachine, ending: MachineEnding) -> None:
        if machine.left_at is None:
            at = self._clock() if ending.at is None else ending.at
            self.ledger.note(machine.name, "left", at, code=ending.code, why=ending.why)
            machine.is_missed = ending.at is not None
            usd = say_usd(machine.usd(self._clock()))
            self.say(f"{machine.name}: {ending.why}; {usd} so far")
        if ending.leaves_offer_out:
            self._left_out |= {each for each in self._offers if each.instance == machine.instance}
        elif ending.code in (None, EXIT_INTERRUPTED):  # the next in the ranking; this comes last
            of = machine.provider, machine.instance, machine.is_spot
            self._offers.sort(key=lambda each: _kind(each) == of)

    def _terminate(self, machine: RentedMachine, most_s: float | None = None) -> None:
        """Ask for the deletion until it is confirmed. Where machines may overlap only a while: then
        the next is asked for meanwhile, and this one is asked again at every look."""
        began, pause_s = self._clock(), self.patience.poll_s / 2
        most_s = self.patience.stubborn_s if most_s is None else most_s
        while not self._is_gone(machine):
            if self.driver.may_overlap and self._clock() - began > most_s:
                self._say_once(
                    f"{machine.name}: not confirmed gone, and counted until it is; `farthing launch"
                    " stop` asks again"
                )
                return
            self._pause(pause_s)
            pause_s = min(60.0, pause_s * 2)

    def _own_end(self, machine: RentedMachine) -> float:
        """When its provider ends it by itself, if it does."""
        start = machine.asked_at if machine.is_paid_in_queue else machine.began_at
        has_end = self.driver.ends_by_itself and machine.most_s
        return start + machine.most_s if start and has_end else math.inf

    def _is_gone(self, machine: RentedMachine) -> bool:
        """Ask once for its deletion, and whether it is gone."""
        own_end = self._own_end(machine)
        try:
            self._hold()
            self._asked(lambda: self.driver.destroy(machine))
            machine.acknowledged_at = machine.acknowledged_at or self._clock()
            seen = self._look(machine)
            if seen is not None and seen.is_paid:
                machine.is_missed = False
                machine.alive_at, machine.id = self._clock(), seen.id
                return False
            why, at = machine.why, machine.acknowledged_at
        except UnclearError:
            if self._clock() <= own_end + 300:
                return False
            why, at = f"{machine.why}; no answer, and its own time-out has passed", self._clock()
        at = min(at, max(own_end, machine.alive_at))  # it may have been gone before we looked
        if machine.is_missed:
            at = machine.left_at or at
        self.ledger.note(machine.name, "gone", at, why=why)
        self.say(f"{machine.name}: confirmed gone; {say_usd(machine.usd(self._clock()))} in all")
        return True

    def _sweep(self) -> bool:
        """Destroy what bears our name and should not be there, or is not confirmed gone; whether
        something was there that no line knows."""
        if why := self.ledger.trouble:
            self._say_once(f"events of machines can't be recorded here ({why}); continuing without")
        for machine in self.ledger.open:
            if machine.left_at is not None:
                self._is_gone(machine)
        self._if_answered(self._share, None)
        has_strangers = False
        with contextlib.suppress(UnclearError):
            for name, found in self._asked(lambda: self.driver.names(self._prefix)).items():
                if not self._is_known(name) and not self._is_ending:
                    self.reclaim()
                    self._take_over()  # whoever took this launch over has written it down
                if not self._is_known(name):
                    has_strangers = True
                    self._say_once(f"{name} should not be there: destroying it")
                    machine = self.ledger.machines.get(name) or RentedMachine(name)
                    self.driver.destroy(replace(machine, id=found))
        return has_strangers

    def _is_known(self, name: str) -> bool:
        machine = self.ledger.machines.get(name)
        return machine is not None and machine.is_open and machine.asked_at > 0.0

    def _closed(self, code: int) -> int:
        """The code, once every machine is confirmed to be gone."""
        while self._sweep():
            self._pause(self.patience.poll_s)
        for machine in self.ledger.open:
            self._terminate(machine, self.patience.farewell_s)
        self._if_answered(self._share, None)
        return code


def _changed(job: Job, known: Json) -> list[str]:
    """In what a job differs from the run whose identity is `known`, as far as that shows here."""
    now = json.loads(json.dumps(job.identity()))
    for role in ("train", "eval"):
        key, paths = f"data.{role} (content)", [Path(name) for name in getattr(job.data, role)]
        if key in known and all(path.is_file() for path in paths):
            now[key] = [sha256_of(path) for path in paths]
            known = {**known, key: [each[0] for each in known[key]]}
    return changes_of(known, {**known, **{key: now[key] for key in now if key in known}})


def _kind(offer: Offer) -> tuple[str, str, bool]:
    return offer.provider, offer.instance, offer.is_spot
