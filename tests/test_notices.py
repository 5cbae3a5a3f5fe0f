"""Notices of clouds, played by a scripted server on this machine, and of signals: each stops a run
that can go on.
"""

import json
import signal
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

import farthing.run.notices
import survive
import workshop
from command import in_python
from farthing.errors import InputError
from farthing.events import Saved, StepTaken
from farthing.run import mirror as mirror_module
from farthing.run.notices import Sign, Watch, services_for
from farthing.run.signals import Notice
from farthing.train.run import train
from interrupted import job_in, quiet
from mirrored import QUICK
from patience import until
from web import Pages

ACTION, REBALANCE, TOKEN = (
    "/latest/meta-data/spot/instance-action",
    "/latest/meta-data/events/recommendations/rebalance",
    "/latest/api/token",
)
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
EVENTS = "/metadata/scheduledevents"
NAME = "/metadata/instance/compute/name"

Answer = tuple[int, str]


@pytest.fixture
def metadata(monkeypatch):
    monkeypatch.setattr(farthing.run.notices, "TIMEOUT_S", 60.0)  # it is this process that answers
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):  # they are passed by
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    service = Pages()
    with service.served():
        yield service


class Ears(Notice):
    """What a watch passes on."""

    @property
    def signs(self):
        heard = list(self.heard)
        return [(each.source, Sign(each.what, each.leaves_at, each.is_certain)) for each in heard]

    def watch(self, metadata, *names):
        """A watch that is quick."""
        return Watch(list(names), self, base=metadata.address, pause_s=0.01)

    @contextmanager
    def watching(self, metadata, *names):
        watch = self.watch(metadata, *names)
        watch.start()
        yield
        watch.stop()


@pytest.fixture
def ears():
    return Ears()


def in_words(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(seconds_from_now: float) -> str:
    return in_words(time.time() + seconds_from_now)


def aws_token(request) -> Answer:
    ttl = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
    return (200, "token-1") if request.command == "PUT" and ttl == "60" else (400, "")


def with_token(body: str):
    return lambda request: (
        (200, body) if request.headers.get("X-aws-ec2-metadata-token") == "token-1" else (401, "")
    )


# ---- what clouds say ----


def azure_events(*kinds, at: str = "") -> Answer:
    """Events by kind and machines, and what is none."""
    events = [
        {
            "EventId": "x",
            "EventType": kind,
            "Resources": names,
            "EventStatus": "Scheduled",
            "NotBefore": at,
        }
        for kind, names in kinds
    ]
    return 200, json.dumps({"DocumentIncarnation": 1, "Events": [*events, "no event"]})


def of_google(request) -> Answer:
    return (200, "TRUE") if request.headers.get("Metadata-Flavor") == "Google" else (403, "")


SOON = int(time.time())
AT, LATER = (
    datetime.fromtimestamp(at, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    for at in (SOON + 120, SOON + 121)
)
GOOGLE = {"Metadata-Flavor": "Google"}
COURSES: dict[str, Any] = {
    "aws": [
        ({TOKEN: aws_token}, []),
        (
            {REBALANCE: with_token(json.dumps({"noticeTime": moment(0)}))},
            [Sign("AWS rebalance recommendation", is_certain=False)],
        ),
        (
            {ACTION: with_token(json.dumps({"action": "terminate", "time": in_words(SOON)}))},
            [Sign("AWS spot: terminate", SOON)],
        ),
    ],
    "aws though the rest fails": [
        (
            {
                TOKEN: aws_token,
                REBALANCE: (500, ""),
                ACTION: with_token(json.dumps({"action": "hibernate", "time": 5})),
            },
            [Sign("AWS spot: hibernate")],
        )
    ],
    "gcp": [
        ({PREEMPTED: of_google}, []),  # an answer without its mark is another's
        (GOOGLE | {PREEMPTED: (200, "FALSE\n"), MAINTENANCE: (200, "NONE")}, []),
        ({MAINTENANCE: (200, "MIGRATE_ON_HOST_MAINTENANCE")}, []),
        (
            {MAINTENANCE: (200, "TERMINATE_ON_HOST_MAINTENANCE")},
            [Sign("Google Cloud host maintenance", is_certain=False)],
        ),
        ({PREEMPTED: of_google}, [Sign("Google Cloud preemption")]),
    ],
    "azure": [
        (
            {
                NAME: (200, "vm_1"),
                EVENTS: azure_events(
                    ("Preempt", ["vm_2"]), ("Freeze", ["vm_1"]), ("Terminate", ["vm_2"])
                ),
            },
            [],  # those of other machines are not ours
        ),
        (
            {EVENTS: azure_events(("Preempt", ["vm_1", "vm_2"]), at=AT)},
            [Sign("Azure Preempt", SOON + 120)],
        ),
        (  # what is announced for later is a warning now, and a notice then
            {EVENTS: azure_events(("Reboot", ["vm_1"]), at=LATER)},
            [Sign("Azure Reboot", SOON + 121, is_certain=False)],
        ),
        ({EVENTS: azure_events(("Reboot", ["vm_1"]), at=AT)}, [Sign("Azure Reboot", SOON + 120)]),
    ],
}


@pytest.mark.parametrize("course", COURSES)
def test_what_a_cloud_says_is_heard_once_and_nothing_else(course, metadata, ears, monkeypatch):
    monkeypatch.setattr(farthing.run.notices, "time", SimpleNamespace(time=lambda: float(SOON)))
    cloud, heard = course.split()[0], []
    asked_for = {"aws": ACTION, "gcp": PREEMPTED, "azure": EVENTS}[cloud]
    with ears.watching(metadata, cloud):
        for says, signs in COURSES[course]:
            metadata.says |= {key: says[key] for key in says if key[0] == "/"}
            metadata.headers |= {key: says[key] for key in says if key[0] != "/"}
            n_asked = metadata.count(asked_for)
            heard += [(cloud, sign) for sign in signs]
            n_heard = len(heard)
            until(
                lambda n=n_asked, n_heard=n_heard: (  # type: ignore[misc]
                    metadata.count(asked_for) > n + 3 and len(ears.signs) >= n_heard
                )
            )
            assert ears.signs == heard


# ---- services that are not there, or not themselves ----


@pytest.mark.parametrize(
    "answer",
    [
        (200, "<html>log in</html>"),
        (200, "[1, 2]"),
        (200, "{" * 50_000),
        (200, "x" * 200_000),
        (302, ""),
        (200, '{"Events": 3}'),
    ],
    ids=["html", "list", "deep", "long", "moved", "no events"],
)
def test_unreadable_answers_of_a_metadata_service_are_not_notices(answer, metadata, ears):
    metadata.says = dict.fromkeys((ACTION, REBALANCE, PREEMPTED, EVENTS), answer) | {
        TOKEN: aws_token
    }
    metadata.headers["Location"] = "http://127.0.0.1:1/elsewhere"
    metadata.headers["Metadata-Flavor"] = "Google"
    watch = ears.watch(metadata, "aws", "gcp", "azure")
    watch.start()
    watch.thread.join(120)
    assert not watch.thread.is_alive(), "given up"
    assert (ears.signs, ears.warnings) == ([], [])


def test_without_a_service_it_is_given_up_and_nobody_waits(metadata, ears, monkeypatch):
    hang, first = threading.Event(), threading.Event()
    metadata.says = dict.fromkeys((PREEMPTED, EVENTS), lambda request: (200, str(hang.wait(60))))
    metadata.says[TOKEN] = lambda request: (404, "") if first.wait(60) else (200, "")
    watch = ears.watch(metadata, "aws", "gcp", "azure")
    watch.start()
    assert watch.thread.is_alive(), "it asks while the run goes on"
    monkeypatch.setattr(farthing.run.notices, "TIMEOUT_S", 0.05)
    first.set()
    watch.thread.join(120)
    assert not watch.thread.is_alive()
    until(lambda: metadata.count(PREEMPTED) >= 5)  # who asks is gone before some are answered
    hang.set()
    assert metadata.count(PREEMPTED) == 5
    assert (ears.signs, ears.warnings) == ([], [])


def test_a_service_that_was_there_and_falls_silent_is_said_and_asked_on(metadata, ears):
    metadata.headers["Metadata-Flavor"] = "Google"
    metadata.says[PREEMPTED] = (200, "FALSE")
    with ears.watching(metadata, "aws", "gcp", "azure"):
        until(lambda: metadata.count(PREEMPTED) > 2)
        assert metadata.count(TOKEN) == 1, "who answered is the only one asked"
        metadata.says[PREEMPTED] = (503, "")
        until(lambda: ears.warnings)
        assert "does not answer" in ears.warnings[0]
        metadata.says[PREEMPTED] = (200, "TRUE")
        until(lambda: ears.signs)
    assert len(ears.warnings) == 1


def test_a_watch_that_fails_says_so(metadata, ears, monkeypatch):
    monkeypatch.setitem(farthing.run.notices.SERVICES, "gcp", (lambda ask: 1 / 0, 1.0))
    ears.watch(metadata, "gcp").start()
    until(lambda: ears.warnings)
    assert "no longer watched: ZeroDivisionError" in ears.warnings[0]


def test_only_this_machine_stands_in_for_the_service(monkeypatch):
    for base in ("http://example.org:80", "https://127.0.0.1:80", "http://127.0.0.1"):
        with pytest.raises(InputError, match="not an address of this machine"):
            Watch([], Notice(), base=base)
    asked = []

    def connected(address, timeout):
        asked.append(address)
        raise OSError

    monkeypatch.delenv("FARTHING_METADATA")
    monkeypatch.setattr("http.client.HTTPConnection", connected)
    watch = Watch(["aws", "gcp"], Notice(), pause_s=0.0)
    watch.start()
    watch.thread.join(60)
    assert set(asked) == {"169.254.169.254:80"}


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2"}, "aws"),
        ({"product_name": "Google Compute Engine", "sys_vendor": "Google"}, "gcp"),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "1"}, None),
    ],
)
def test_whose_machine_it_is_stands_in_its_firmware(files, cloud, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    for is_spot, asked in ((False, []), (True, ["aws", "gcp", "azure"])):
        found = services_for("auto", is_spot=is_spot, firmware=tmp_path)
        assert found == ([cloud] if cloud else asked)
    assert services_for("off", is_spot=True, firmware=tmp_path) == []


# ---- signals ----


def test_a_signal_after_a_clouds_notice_is_not_a_second_one():
    with Notice() as notice:
        notice.say("Google Cloud preemption", "gcp")
        signal.raise_signal(signal.SIGTERM)
        assert [heard.what for heard in notice.news()] == ["Google Cloud preemption", "SIGTERM"]
        assert notice.reason == "Google Cloud preemption"
        assert notice.news() == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_the_signals_of_schedulers_and_terminals_are_heard(name):
    number = getattr(signal, name)
    before = signal.signal(number, lambda *_: None)  # a signal that is not heard ends no test
    try:
        with Notice() as notice:
            signal.raise_signal(number)
            assert notice.reason == name
    finally:
        signal.signal(number, before)


def test_a_limit_or_whoever_asked_first_is_why_a_run_leaves_and_one_press_is_one_wish():
    with Notice(one_press_s=300.0) as notice:
        for _ in range(2):  # the terminal's, and the launcher's
            signal.raise_signal(signal.SIGINT)
        assert [heard.what for heard in notice.heard] == ["SIGINT"]
        notice.reach("the cap")
        assert notice.how_it_ends() == ("interrupted", "SIGINT")
    limited = Notice()
    assert not limited
    assert limited.how_it_ends() == ("interrupted", "another rank was asked to leave")
    limited.reach("the cap")
    limited.say("SIGTERM", "signal")
    assert limited.how_it_ends() == ("limit", "the cap")


def test_a_second_signal_leaves_at_once_and_nohup_is_heeded():
    code = (
        "import os, signal\nfrom farthing.run.signals import Notice\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with Notice() as notice:\n"
        "    for number in (signal.SIGHUP, signal.SIGCONT, signal.SIGTERM, signal.SIGTERM):\n"
        "        os.kill(os.getpid(), number)\n"
        "        print(notice.reason, flush=True)\n"
    )
    done = in_python(code)
    assert (done.returncode, done.stdout.split()) == (75, ["None", "None", "SIGTERM"])
    assert "second signal" in done.stderr


# ---- whole runs ----


def notices_of(monkeypatch: pytest.MonkeyPatch) -> list[Notice]:
    """What each run from now on listens with."""
    found = []
    enter = Notice.__enter__
    monkeypatch.setattr(
        Notice, "__enter__", lambda notice: (found.append(notice), enter(notice))[1]
    )
    return found


@pytest.fixture
def quick(metadata, monkeypatch):
    """The service that runs ask, often."""
    monkeypatch.setenv("FARTHING_METADATA", metadata.address)
    services = farthing.run.notices.SERVICES
    assert {name: s for name, (_, s) in services.items()} == {"aws": 5, "gcp": 2, "azure": 2}
    quick = {name: (look, 0.005) for name, (look, _) in services.items()}
    monkeypatch.setattr(farthing.run.notices, "SERVICES", quick)
    metadata.says[TOKEN] = aws_token
    return metadata


def test_a_run_that_is_noticed_leaves_with_75_and_goes_on_to_the_bit(quick, tmp_path, monkeypatch):
    assert train(job_in(tmp_path, "alone"), quiet).exit_code == 0
    job, notices = job_in(tmp_path, "noticed"), notices_of(monkeypatch)

    def tell(event):
        if isinstance(event, StepTaken) and ACTION not in quick.says:
            said = {"action": "terminate", "time": moment(110)}
            quick.says[ACTION] = with_token(json.dumps(said))
            until(lambda: notices[-1].heard)  # before the next micro-batch

    began = time.monotonic()
    outcome = train(workshop.with_where(job, notices="aws"), tell)
    assert outcome.exit_code == 75
    (notice,) = outcome.receipt.notices
    assert (notice["source"], notice["attempt"], notice["is_certain"]) == ("aws", 1, True)
    assert 0 <= notice["left_after_s"] < time.monotonic() - began
    assert 100 < notice["grace_s"] <= 110
    assert outcome.reason == notice["what"]
    n_asked = len(quick.asked)
    assert train(job, quiet).exit_code == 0
    assert len(quick.asked) == n_asked, "this machine is none of a cloud"
    results = [survive.result_of(tmp_path / name) for name in ("alone", "noticed")]
    assert survive.differences(*results) == []


def test_a_rebalance_recommendation_saves_now_and_goes_on(quick, tmp_path, monkeypatch):
    job = workshop.make_job(tmp_path, save_steps=1000, where={"notices": "aws"})
    heard, notices = workshop.Heard(), notices_of(monkeypatch)

    def tell(event):
        heard(event)
        if isinstance(event, StepTaken) and event.step == 2:
            quick.says[REBALANCE] = with_token(json.dumps({"noticeTime": moment(0)}))
            until(lambda: notices[-1].heard)

    outcome = train(job, tell)
    assert outcome.exit_code == 0
    assert heard.of(Saved)[0].step == 2
    assert "AWS rebalance recommendation: saving now" in heard.warnings
    assert [notice["is_certain"] for notice in outcome.receipt.notices] == [False]


def test_how_long_may_be_waited_is_what_is_left_until_the_machine_goes():
    notice, now = Notice(), time.time()

    def waits(most_s):
        found = notice.patience_s(20, 600)
        return now + most_s - time.time() <= found <= most_s

    assert notice.patience_s(20, 600) == 20, "nobody has said anything"
    notice.say("rebalance", "aws", leaves_at=now + 3, is_certain=False)
    notice.say("SIGTERM", "signal")
    assert notice.patience_s(20, 600) == 20, "nobody has said when"
    notice.say("spot interruption", "aws", leaves_at=now + 320)
    assert waits(315)
    assert notice.patience_s(20, 60) == 60
    notice.say("preempted", "gcp", leaves_at=now + 230)
    assert waits(225)
    notice.say("preempted", "gcp", leaves_at=now - 10)
    assert notice.patience_s(20, 600) == 1


def test_a_store_gets_the_time_that_a_notice_leaves(tmp_path, monkeypatch):
    """Told that the machine goes in an hour, a run waits longer for a slow store than it would
    unasked.
    """
    asked = []
    real = mirror_module.Mirror.wait

    def wait(mirror, seconds):
        asked.append(seconds)
        return real(mirror, seconds)

    monkeypatch.setattr(mirror_module, "PACE", QUICK)
    monkeypatch.setattr(mirror_module.Mirror, "wait", wait)
    notices = notices_of(monkeypatch)

    def tell(event):
        if isinstance(event, StepTaken) and event.step == 2:
            notices[0].say("preempted", "gcp", leaves_at=time.time() + 3600)

    job = workshop.make_job(tmp_path, output_store=str(tmp_path / "store"))
    assert train(job, tell).exit_code == 75
    assert asked[:2] == [QUICK.finish_s] * 2, "for the last step, and for the last words"
    assert QUICK.leave_s < QUICK.finish_s
