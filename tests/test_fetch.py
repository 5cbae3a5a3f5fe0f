"""Data behind addresses: connections that fail are no missing files, and no address of credentials
is ever asked.
"""

import socket

import pytest

from farthing.addresses import is_metadata_host
from farthing.data.fetch import fetch, refuse_metadata
from farthing.errors import DataError
from web import serving

METADATA = [
    "169.254.169.254",
    "169.254.0.1",
    "2852039166",
    "0xa9fea9fe",
    "0xA9.0xFE.0xA9.0xFE",
    "0251.0376.0251.0376",
    "169.254.43518",
    "::ffff:169.254.169.254",
    "[::ffff:a9fe:a9fe]",
    "::169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "fe80::1",
    "fe80::1%eth0",
    "fd00:ec2::254",
    "fd00:0ec2:0:0::254",
    "metadata.google.internal",
    "METADATA.google.internal.",
    "metadata",
    "instance-data",
    "100.100.100.200",
    "168.63.129.16",
]
OTHERS = [
    "example.org",
    "127.0.0.1",
    "10.0.0.1",
    "192.168.1.1",
    "8.8.8.8",
    "fd00::1",
    "metadata.example.org",
    "",
    "::1",
]


def test_hosts_that_give_credentials_away_are_known_however_they_are_spelt():
    assert [host for host in METADATA if not is_metadata_host(host)] == []
    assert [host for host in OTHERS if is_metadata_host(host)] == []


@pytest.fixture
def connections(monkeypatch):
    """Where a connection was tried to; none of them gets there."""
    tried = []

    def connect(self, address):
        tried.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket.socket, "connect", connect)
    return tried


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/a.jsonl",
        "https://user:x@0xa9fea9fe:80/a.jsonl",
        "http://[::ffff:169.254.169.254]/a.jsonl",
        "simplecache::http://metadata.google.internal/a.jsonl",
        "ftp://169.254.169.254/a.jsonl",
    ],
)
def test_they_are_refused_by_every_verb_before_any_connection(url, desk, run, connections):
    desk.set("data", train=url)
    for verb in ("train", "plan", "doctor"):
        said = run(verb=verb, code=2)
        assert "an address at which machines keep their credentials" in said.out + said.err
    assert connections == []


def test_a_bucket_may_be_called_metadata():
    refuse_metadata("s3://metadata/a.jsonl")


def answer(request, _):
    """`/to/HOST` redirects there, `/500` fails, `/403` refuses, everything else is not there."""
    first, _, rest = request.path.removeprefix("/").partition("/")
    host = "[::ffff:a9fe:a9fe]" if rest == "six" else rest
    status = 302 if first == "to" else int(first) if first.isdigit() else 404
    return status, b"", {"Location": f"http://{host}/a.jsonl"}


@pytest.fixture
def host():
    with serving(answer) as address:
        yield address.removeprefix("http://")


@pytest.mark.parametrize("target", ["169.254.169.254", "2852039166", "six", "leads-there.example"])
def test_a_redirect_or_a_name_that_leads_there_is_refused(target, host, tmp_path, monkeypatch):
    resolve = socket.getaddrinfo

    def resolved(name, *arguments, **options):
        return resolve(
            "169.254.169.254" if name == "leads-there.example" else name, *arguments, **options
        )

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with pytest.raises(DataError, match="keep their credentials"):
        fetch(f"http://{host}/to/{target}", tmp_path)
    assert list((tmp_path / "downloads").glob("*")) == []


def test_what_a_server_answers_is_said(host, tmp_path):
    for path, words in {
        "500/a.jsonl": f"{host} answers 500",
        "403/a.jsonl": f"{host} answers 403",
        "a.jsonl": "no such file",
    }.items():
        with pytest.raises(DataError) as caught:
            fetch(f"http://{host}/{path}", tmp_path)
        assert words in caught.value.what


@pytest.fixture
def port():
    """One on which nobody listens, nor will: it is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


@pytest.mark.parametrize("scheme", ["http", "https", "s3"])
def test_a_refused_connection_names_host_and_reason(scheme, port, tmp_path, monkeypatch):
    place = f"127.0.0.1:{port}"
    if scheme == "s3":
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{place}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "hunter2",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
    url = (
        f"{scheme}://{place}/a.jsonl"
        if scheme.startswith("http")
        else f"{scheme}://bucket-{port}/a.jsonl"
    )
    with pytest.raises(DataError) as caught:
        fetch(url, tmp_path)
    assert f"no connection to {place}" in caught.value.what
    assert "no such file" not in caught.value.what
    assert any(word in caught.value.what.lower() for word in ("refused", "connect"))


def test_a_name_that_is_not_known_is_no_missing_file(tmp_path, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(DataError, match=r"no connection to nowhere\.example"):
        fetch("https://nowhere.example/a.jsonl", tmp_path)
