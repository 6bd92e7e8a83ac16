"""Existing clients against ``deploy/nsqd-secure.toml``: those that know TLS and AUTH work with it as they are."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flintmq.broker.daemon import Broker
from flintmq.options import NsqdOptions, parse
from support.secure import AuthServer, Certificates, grants, until

from .processes import PEERS

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0

PUBLISH = {
    "pynsq": """
import ssl, sys
import nsq, tornado.ioloop
address, ca, cert, key = sys.argv[1:]
options = {"ca_certs": ca, "certfile": cert, "keyfile": key, "cert_reqs": ssl.CERT_REQUIRED}
writer = nsq.Writer([address], tls_v1=True, tls_options=options, auth_secret="good")

def answered(conn, data):
    print(data, flush=True)
    if data == b"OK":
        tornado.ioloop.IOLoop.current().stop()
    else:
        # It is not connected yet.
        tornado.ioloop.IOLoop.current().call_later(0.1, publish)

def publish():
    writer.pub("orders", b"from pynsq", answered)

tornado.ioloop.IOLoop.current().call_later(0.1, publish)
tornado.ioloop.IOLoop.current().start()
""",
    "gnsq": """
from gevent import monkey
monkey.patch_all()
import ssl, sys
import gnsq
address, ca, cert, key = sys.argv[1:]
options = {"ca_certs": ca, "certfile": cert, "keyfile": key, "cert_reqs": ssl.CERT_REQUIRED}
# Its Producer cannot do TLS with any broker: it stumbles over the OK of the handshake.
host, port = address.split(":")
client = gnsq.NsqdTCPClient(host, int(port), tls_v1=True, tls_options=options, auth_secret=b"good")
client.connect()
client.identify()
client.publish("orders", b"from gnsq")
print(client.read_response())
""",
    "flintmq": """
import asyncio, ssl, sys
import flintmq
address, ca, cert, key = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
context.load_cert_chain(cert, key)

async def main():
    async with flintmq.Producer(address, tls=context, auth_secret="good") as producer:
        await producer.publish("orders", b"from flintmq")
        print("OK")

asyncio.run(main())
""",
}


@dataclass
class Secure:
    broker: Broker
    #: The authority, a client's certificate and its key.
    files: tuple[str, str, str]

    async def run(self, *words: str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment
        )
        try:
            async with asyncio.timeout(PATIENCE):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode is not None
        return process.returncode, said.decode()


@pytest.fixture
async def secure(tmp_path: Path) -> AsyncIterator[Secure]:
    certificates = Certificates(tmp_path)
    shutil.copy(certificates.ca, tmp_path / "clients-ca.pem")
    # nsqjs looks for a name, and always for this one.
    own = certificates.authority.issue_cert("127.0.0.1", "localhost")
    own.private_key_pem.write_to_path(certificates.key)
    own.cert_chain_pems[0].write_to_path(certificates.cert)
    (tmp_path / "tokens").touch(0o600)
    (tmp_path / "tokens").write_text("hush admin\n")
    issued = certificates.authority.issue_cert("client.example")
    issued.private_key_pem.write_to_path(str(tmp_path / "client.key"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "client.pem"))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates.cert, certificates.key)
    async with AuthServer.start(tls) as server:
        server.answer = lambda question: grants() if b'"secret":["good"]' in question.body else (403, b"{}")
        text = (ROOT / "deploy" / "nsqd-secure.toml").read_text()
        text = text.replace("/etc/nsqd/", f"{tmp_path}/").replace("/var/lib/nsqd", str(tmp_path))
        for address in ("0.0.0.0:4150", "0.0.0.0:4152", "127.0.0.1:4151"):
            text = text.replace(address, "127.0.0.1:0")
        (tmp_path / "nsqd.toml").write_text(text.replace("auth.example.com", server.address))
        async with Broker(parse(NsqdOptions, [f"--config={tmp_path / 'nsqd.toml'}"])) as broker:
            yield Secure(broker, (certificates.ca, str(tmp_path / "client.pem"), str(tmp_path / "client.key")))


@pytest.mark.parametrize("client", PUBLISH)
async def test_a_client_publishes_with_the_secure_profile(secure: Secure, client: str) -> None:
    module = {"pynsq": "nsq", "gnsq": "gnsq", "flintmq": "flintmq"}[client]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{client} is not installed")
    status, said = await secure.run(sys.executable, "-c", PUBLISH[client], secure.broker.tcp_address, *secure.files)
    assert (status, "OK" in said) == (0, True), said
    await until(lambda: secure.broker.topics["orders"].message_count == 1)


NSQJS = """
const fs = require('fs')
const { Writer } = require('nsqjs')
const [address, ca, cert, key] = process.argv.slice(1)
const [host, port] = address.split(':')
const files = { ca: fs.readFileSync(ca), cert: fs.readFileSync(cert), key: fs.readFileSync(key) }
const writer = new Writer(host, Number(port), { tls: true, authSecret: 'good', ...files })
writer.on('error', error => { console.log(String(error)); process.exit(1) })
writer.on('ready', () => writer.publish('orders', 'from nsqjs', error => {
  console.log(error || 'OK')
  process.exit(error ? 1 : 0)
}))
writer.connect()
"""


async def test_nsqjs_publishes_with_the_secure_profile(secure: Secure, monkeypatch: pytest.MonkeyPatch) -> None:
    node, modules = shutil.which("node"), PEERS / "nsqjs" / "node_modules"
    if node is None or not modules.exists():
        pytest.skip("node or nsqjs is not installed: run scripts/peers")
    monkeypatch.setenv("NODE_PATH", str(modules))
    status, said = await secure.run(node, "-e", NSQJS, secure.broker.tcp_address, *secure.files)
    assert (status, "OK" in said) == (0, True), said
    await until(lambda: secure.broker.topics["orders"].message_count == 1)


async def test_a_go_tool_consumes_with_the_secure_profile(secure: Secure) -> None:
    tool = PEERS / "bin" / "nsq_tail"
    if not tool.exists():
        pytest.skip("FLINTMQ_PEERS names no folder with nsq_tail")
    topic = secure.broker.topic("orders")
    topic.publish(bytearray(b"\0\0\0\5hello"), 0, 9, 1)
    ca, cert, key = secure.files
    options = {"tls_v1": "true", "tls_root_ca_file": ca, "tls_cert": cert, "tls_key": key, "auth_secret": "good"}
    words = [f"--consumer-opt={name},{value}" for name, value in options.items()]
    address = f"--nsqd-tcp-address={secure.broker.tcp_address}"
    status, said = await secure.run(str(tool), address, "--topic=orders", "--channel=c", "-n", "1", *words)
    assert (status, "hello" in said) == (0, True), said
