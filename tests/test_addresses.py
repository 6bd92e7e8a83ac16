"""Addresses: taken apart, put together, bound; whatever else is given is refused with its own text."""

from __future__ import annotations

import ast
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq import addresses
from flintmq.addresses import Address, bind, http_url, join, port_of, split, text_of
from flintmq.errors import OptionError, StartError

SOURCE = Path(addresses.__file__).parent

names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z0-9]{1,10}){0,3}", fullmatch=True)
zones = st.from_regex(r"(%[a-z0-9]{1,8})?", fullmatch=True)
v4 = st.ip_addresses(v=4).map(str)
v6 = st.tuples(st.ip_addresses(v=6).map(str), zones).map("".join)
hosts = names | v4 | v6
ports = st.integers(1, 65_535)
paths = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1).map(lambda t: f"/{t}")


@given(hosts, ports)
def test_what_was_joined_is_split_into_the_same(host: str, port: int) -> None:
    address = join(host, port)
    assert split(address) == split(address, unix=False) == split(address, listening=True) == Address(host, port)
    assert str(split(address)) == address
    assert port_of(address) == port
    assert join(f"[{host}]", port) == f"[{host}]:{port}"


@given(paths | paths.map(lambda path: f".{path}"))
def test_a_path_is_a_unix_socket_whatever_else_is_in_it(path: str) -> None:
    assert split(path) == split(path, listening=True) == Address("", 0, path)
    assert (str(split(path)), port_of(path)) == (path, 0)
    with pytest.raises(OptionError):
        split(path, unix=False)


@pytest.mark.parametrize("address", [":4150", ":0", "127.0.0.1:0", "[::]:0", "nsqd.sock"])
def test_some_addresses_are_only_to_listen_on(address: str) -> None:
    split(address, listening=True)
    with pytest.raises(OptionError):
        split(address)


REASONS = {
    "": "the port is missing",
    "localhost": "the port is missing",
    ":": "the host is missing",
    ":4150": "the host is missing",
    "[]:4150": "the host is missing",
    "h:": '"" is not a port',
    "h:http": '"http" is not a port',
    "h:0": '"0" is not a port',
    "h:65536": '"65536" is not a port',
    "h:-1": '"-1" is not a port',
    "h:٣": '"٣" is not a port',
    "h:1 ": '"1 " is not a port',
    "::1:4150": "an IPv6 address needs brackets",
    "a:b:1": "an IPv6 address needs brackets",
    "[::1:4150": "an IPv6 address needs brackets",
    "[h:1": '"[h" is not a host',
    "a b:1": '"a b" is not a host',
    "me@h:1": '"me@h" is not a host',
}


@pytest.mark.parametrize("address", REASONS)
def test_odd_input_is_refused_with_the_value_the_reason_and_what_to_write(address: str) -> None:
    with pytest.raises(OptionError) as error:
        split(address)
    assert str(error.value) == (
        f'"{address}" is not an address ({REASONS[address]}): write host:port, [v6]:port or the path of a unix socket'
    )


@given(st.text())
def test_any_text_is_an_address_or_an_option_error(text: str) -> None:
    for listening in (False, True):
        for unix in (False, True):
            try:
                found = split(text, listening=listening, unix=unix)
            except OptionError as exc:
                assert f'"{text}"' in str(exc)
            else:
                assert found.path == text if found.path else split(str(found), listening=True) == found
    try:
        assert http_url(text, "x").startswith(("http://", "https://")) or "://" in text
    except OptionError as exc:
        assert f'"{text}"' in str(exc)


# --- Sockets


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "", "[::1]", "[::]"])
def test_a_bound_socket_listens_and_says_where(host: str) -> None:
    try:
        sock = bind(f"{host}:0")
    except StartError as exc:
        pytest.skip(f"no such address here: {exc}")
    with sock:
        port = port_of(text_of(sock.getsockname()))
        assert port > 0 and sock.getblocking() is False
        socket.create_connection((host.strip("[]") or "127.0.0.1", port)).close()
        if host == "[::]":
            # As in Go, every IPv6 address includes those of IPv4, and such a client is called by that.
            with socket.create_connection(("127.0.0.1", port)) as client:
                sock.setblocking(True)
                accepted, peer = sock.accept()
                while peer[1] != client.getsockname()[1]:
                    accepted.close()
                    accepted, peer = sock.accept()
                accepted.close()
                assert text_of(peer) == text_of(client.getsockname())
        with pytest.raises(StartError) as error:
            bind(f"{host}:{port}")
        assert str(error.value) == f"listen ({host}:{port}) failed - address already in use"


def test_a_unix_socket_is_bound_and_its_clients_have_no_name(tmp_path: Path) -> None:
    path = str(tmp_path / "a:1")
    with bind(path) as sock, socket.socket(socket.AF_UNIX) as client:
        assert text_of(sock.getsockname()) == path
        client.connect(path)
        assert text_of(client.getsockname()) == "@"
        with pytest.raises(StartError, match=r"listen \(.*\) failed - address already in use"):
            bind(path)
    assert text_of(b"\0abstract") == "@abstract"
    with pytest.raises(StartError, match=r"is not an address .*: write host:port or \[v6\]:port"):
        bind(path, unix=False)


def test_the_file_of_a_unix_socket_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "nsqd.sock"
    bind(str(path)).close()
    assert path.is_socket()
    with bind(str(path)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    path.unlink()
    path.write_text("not a socket")
    with pytest.raises(StartError, match="address already in use"):
        bind(str(path))
    assert path.read_text() == "not a socket"


@pytest.mark.parametrize("address", ["h:abc", "127.0.0.1:65536", "::1:4150", "127.0.0.1", "", "no.such.host.invalid:1"])
def test_what_cannot_be_bound_is_named(address: str) -> None:
    with pytest.raises(StartError) as error:
        bind(address, unix=False)
    assert str(error.value).startswith(f"listen ({address}) failed - ")


# --- URLs


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("h:1", "http://h:1"),
        ("[::1]:1", "http://[::1]:1"),
        ("http://h:1/", "http://h:1"),
        ("https://h", "https://h"),
        ("https://h:1/proxy/", "https://h:1/proxy"),
    ],
)
def test_an_http_address_becomes_a_url(address: str, url: str) -> None:
    assert http_url(address, "an nsqd") == url


@pytest.mark.parametrize("address", ["", "h", "http://h", "ftp://h:1", "h:port", "h:70000", "http://:1", "h:1?a=b"])
def test_what_is_no_http_address_is_refused(address: str) -> None:
    with pytest.raises(OptionError) as error:
        http_url(address, "an nsqd")
    assert str(error.value).startswith(f'"{address}" is not an HTTP address of an nsqd: write ')


# --- The only place

# They are being rewritten, or read a line of text that is no address.
ELSEWHERE = {"broker/net/session.py", "broker/http/lane.py"}


def test_nobody_else_takes_addresses_apart() -> None:
    found = []
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if name in ELSEWHERE | {"addresses.py"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="rpartition" | "rsplit"), args=[ast.Constant(value=":"), *_]):
                    found.append(f"{name}, line {node.lineno}: {ast.unparse(node)}")
                case ast.JoinedStr(values=parts) if any("]:" in str(getattr(part, "value", "")) for part in parts):
                    found.append(f"{name}, line {node.lineno}: {ast.unparse(node)}")
    assert found == []
