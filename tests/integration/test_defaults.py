"""What comes with the programs: warnings of open doors, files that open none, a profile that has them all shut."""

from __future__ import annotations

import configparser
import contextlib
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flintmq.broker.daemon import Broker
from flintmq.cli import main
from flintmq.lookup.daemon import Lookupd
from flintmq.options import NsqadminOptions, NsqdOptions, NsqlookupdOptions, parse, resolve
from support.http_client import HttpClient
from support.secure import AuthServer, Certificates, Peer, auth, grants, pub, until

ROOT = Path(__file__).resolve().parents[2]
EVERYWHERE = {"tcp_address": "0.0.0.0:0", "http_address": "0.0.0.0:0", "https_address": "0.0.0.0:0"}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return sorted(text.partition(":")[0] for text in found if "reached by other machines" in text)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    made = Certificates(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("hush admin\n")
    return {**made.options, "tls_root_ca_file": made.ca, "http_auth_token_file": str(tokens)}


CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], list[str]]] = {
    "open": ((), {}, ["HTTP", "TCP"]),
    "loopback": ((), {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}, []),
    "another loopback": ((), {"tcp_address": "127.0.0.2:0", "http_address": "127.0.0.3:0"}, []),
    "tokens": (("http_auth_token_file",), {}, ["TCP"]),
    "auth": ((), {"auth_http_addresses": ("127.0.0.1:1",)}, ["HTTP"]),
    "tls": (("tls_cert", "tls_key"), {}, ["HTTP", "HTTP", "TCP"]),
    "tls only": (("tls_cert", "tls_key"), {"tls_required": "true"}, ["HTTP", "TCP"]),
    "certificates": (
        ("tls_cert", "tls_key", "tls_root_ca_file"),
        {"tls_client_auth_policy": "require-verify"},
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_broker_warns_of_what_others_reach(
    name: str, files: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, options, expected = CASES[name]
    chosen = {**EVERYWHERE, **{key: files[key] for key in given}, **options}
    async with Broker(data_path=tmp_path, disk_reserve=0, **chosen):
        assert warnings_of(caplog) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), ["HTTP", "TCP"]),
        (("http_auth_token_file",), ["TCP"]),
        (("registration_token_file",), ["HTTP"]),
        (("tls_cert", "tls_key", "tls_root_ca_file"), []),
    ],
)
async def test_an_nsqlookupd_warns_too(
    given: tuple[str, ...], expected: list[str], files: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    files["registration_token_file"] = files["http_auth_token_file"]
    everywhere = {"tcp_address": "0.0.0.0:0", "http_address": "0.0.0.0:0"}
    async with Lookupd(**everywhere, **{key: files[key] for key in given}):
        assert warnings_of(caplog) == expected


def test_what_is_shipped_listens_on_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    broker = resolve(NsqdOptions, {"config": str(ROOT / "deploy" / "nsqd.toml")})
    lookupd = resolve(NsqlookupdOptions, {"config": str(ROOT / "deploy" / "nsqlookupd.cfg.example")})
    for options in (broker, lookupd):
        assert options.tcp_address.startswith("127.0.0.1:")
        assert options.http_address.startswith("127.0.0.1:")
    admin = resolve(NsqadminOptions, {"config": str(ROOT / "deploy" / "nsqadmin.toml")})
    assert admin.http_address.startswith("127.0.0.1:")
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    assert "0.0.0.0" not in capsys.readouterr().out


# --- The profile ------------------------------------------------------------------------------------------------------


async def test_the_secure_profile_lets_in_only_those_with_everything(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    shutil.copy(certificates.ca, tmp_path / "clients-ca.pem")
    (tmp_path / "tokens").touch(0o600)
    (tmp_path / "tokens").write_text("hush read\n")
    async with AuthServer.start(_server_tls(certificates)) as server:
        server.answer = lambda question: grants() if b'"secret":["good"]' in question.body else (403, b"{}")
        profile = (ROOT / "deploy" / "nsqd-secure.toml").read_text()
        profile = profile.replace("/etc/nsqd/", f"{tmp_path}/").replace("/var/lib/nsqd", str(tmp_path))
        profile = profile.replace("0.0.0.0:4150", "127.0.0.1:0").replace("0.0.0.0:4152", "127.0.0.1:0")
        profile = profile.replace("127.0.0.1:4151", "127.0.0.1:0").replace("auth.example.com", server.address)
        (tmp_path / "nsqd.toml").write_text(profile)
        async with Broker(parse(NsqdOptions, ["--strict-config", f"--config={tmp_path / 'nsqd.toml'}"])) as broker:
            good = certificates.client(signed_by=certificates.authority)
            async with Peer.connect(broker.tcp_address) as peer:
                assert await peer.error(pub()) == b"E_INVALID cannot PUB in current state (TLS required)"
            async with Peer.connect(broker.tcp_address) as peer:
                await peer.negotiate(tls_v1=True)
                with pytest.raises((ssl.SSLError, EOFError, AssertionError)):
                    await peer.encrypt(certificates.client())
                    assert await peer.frame() == (0, b"OK")
            for secret, expected in (
                (b"bad", b"E_AUTH_FAILED AUTH failed"),
                (b"", b"E_AUTH_FIRST AUTH required before PUB"),
            ):
                async with Peer.connect(broker.tcp_address) as peer:
                    await peer.negotiate(tls_v1=True)
                    await peer.encrypt(good)
                    assert await peer.frame() == (0, b"OK")
                    assert await peer.ask(auth(secret) if secret else pub()) == expected
            async with Peer.connect(broker.tcp_address) as peer:
                await peer.negotiate(tls_v1=True)
                await peer.encrypt(good)
                assert await peer.frame() == (0, b"OK")
                assert b"permission_count" in await peer.ask(auth(b"good"))
                assert await peer.ask(pub()) == b"OK"
            async with HttpClient.connect(broker.http_address) as client:
                assert (await client.get("/stats", "Authorization: Bearer hush")).message == "TLS_REQUIRED"
            async with HttpClient.connect(broker.https_address, good) as client:
                assert (await client.get("/stats")).status == 401
                assert (await client.get("/stats", "Authorization: Bearer hush")).status == 200
                assert (await client.get("/topic/peek?topic=t", "Authorization: Bearer hush")).status == 403


def _server_tls(certificates: Certificates) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.cert, certificates.key)
    return context


# --- Registration -----------------------------------------------------------------------------------------------------


async def test_an_nsqlookupd_registers_only_brokers_with_a_token(tmp_path: Path) -> None:
    for name, text in (("tokens", "# ours\none\ntwo\n"), ("good", "two\n"), ("bad", "three\n")):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(text)
    async with (
        Lookupd(registration_token_file=str(tmp_path / "tokens")) as lookupd,
        contextlib.AsyncExitStack() as stack,
    ):
        brokers = []
        for name in ("good", "bad", ""):
            (tmp_path / f"data{name}").mkdir()
            brokers.append(
                Broker(
                    data_path=tmp_path / f"data{name}",
                    http_address="127.0.0.1:0",
                    disk_reserve=0,
                    broadcast_address="127.0.0.1",
                    nsqlookupd_tcp_addresses=(lookupd.tcp_address,),
                    lookupd_registration_token_file=str(tmp_path / name) if name else "",
                )
            )
            await stack.enter_async_context(brokers[-1])
            brokers[-1].topic(f"of-{name or 'none'}")
        await until(lambda: "of-good" in lookupd.registry.topics)
        # The others have been there, and were turned away.
        await until(lambda: all(peer.tried.is_set() for broker in brokers for peer in broker.peers._peers.values()))
        assert list(lookupd.registry.topics) == ["of-good"]
        # Another token counts from the next reload on.
        (tmp_path / "tokens").write_text("three\n")
        lookupd.reload()
        await until(lambda: "of-bad" in lookupd.registry.topics)


# --- systemd ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nsqd.service", "nsqadmin.service"])
def test_the_unit_leaves_little_to_an_intruder(name: str) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[method-assign, assignment]
    unit.read(ROOT / "deploy" / name)
    service = unit["Service"]
    assert service["CapabilityBoundingSet"] == ""
    assert service["ProtectSystem"] == "strict"
    assert "SystemCallFilter" in service
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(ROOT / "deploy" / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
