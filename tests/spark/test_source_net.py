"""The plain clients that are shipped to executors, against real brokers: TLS, deflate, AUTH, tokens, discovery."""

from __future__ import annotations

import pytest

from flintmq.errors import ConnectError, HttpError, OptionError
from flintmq.spark.shipped.net import Cluster, Connection, Web
from flintmq.spark.shipped.options import read_sink_options, read_source_options
from support.secure import Certificates

from .conftest import wait_for


def network(address, **more):
    return read_sink_options({"nsq.nsqd.addresses": address, "topic": "t", **more}).network


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def closing():
    """``closing(thing)``: it is closed at the end of the test."""
    things = []

    def note(thing):
        things.append(thing)
        return thing

    yield note
    for thing in things:
        thing.close()


@pytest.mark.parametrize("kind", ["flintmq", "go"])
@pytest.mark.parametrize("deflate", ["none", "deflate"])
@pytest.mark.parametrize("tls", ["false", "true"])
def test_messages_pass_all_layers(start_node, certificates, kind, deflate, tls):
    node = start_node(kind, f"--tls-cert={certificates.cert}", f"--tls-key={certificates.key}")
    found = network(node.tcp, **{"nsq.tls": tls, "nsq.tls.ca": certificates.ca, "nsq.compression": deflate})
    body = b"".join(b"%d " % n for n in range(20_000))
    publisher = Connection(node.tcp, found)
    publisher.send(b"PUB t\n" + len(body).to_bytes(4, "big") + body)
    assert publisher.next_frame() == (0, b"OK")
    publisher.close()
    consumer = Connection(node.tcp, found)
    consumer.subscribe("t", "c")
    consumer.send(b"RDY 1\n")
    kind_of_frame, data = consumer.next_frame()
    assert (kind_of_frame, data[26:]) == (2, body)
    consumer.close()
    assert bool(consumer.flintmq) == (kind == "flintmq")


def test_the_http_port_is_recognized(start_node):
    node = start_node("flintmq")
    with pytest.raises(ConnectError, match="is that the HTTP port of a broker"):
        Connection(node.http, network(node.http))


def test_a_certificate_that_nobody_vouches_for_is_refused(start_node, certificates):
    node = start_node("flintmq", f"--tls-cert={certificates.cert}", f"--tls-key={certificates.key}")
    with pytest.raises(ConnectError, match="certificate verify failed"):
        Connection(node.tcp, network(node.tcp, **{"nsq.tls": "true"}))
    Connection(node.tcp, network(node.tcp, **{"nsq.tls": "true", "nsq.tls.verify": "false"})).close()
    plain = start_node("flintmq")
    with pytest.raises(ConnectError, match=r"has no TLS: take nsq\.tls away"):
        Connection(plain.tcp, network(plain.tcp, **{"nsq.tls": "true"}))


def test_tokens_go_over_http_and_are_in_no_text(closing, start_node, tmp_path, certificates):
    tokens = tmp_path / "tokens"
    tokens.write_text("hush-hush read\ntop-secret read,publish,admin\n")
    tokens.chmod(0o600)
    node = start_node("flintmq", f"--http-auth-token-file={tokens}")
    web = closing(Web(network(node.tcp, **{"nsq.http.token": "hush-hush"})))
    assert web.ask("GET", node.http, "/info", extended="true")["flintmq"]["log"] is True
    for method, token in (("POST", "hush-hush"), ("GET", "wrong-token")):
        stranger = closing(Web(network(node.tcp, **{"nsq.http.token": token})))
        with pytest.raises(HttpError) as caught:
            stranger.ask(method, node.http, "/topic/create" if method == "POST" else "/stats", topic="t")
        assert caught.value.status in (401, 403)
        assert token not in str(caught.value)


def test_an_answer_may_come_over_https(closing, start_node, certificates):
    address = free_address()
    start_node(
        "flintmq",
        f"--https-address={address}",
        f"--tls-cert={certificates.cert}",
        f"--tls-key={certificates.key}",
    )
    given = {"nsq.nsqd.http.addresses": f"https://{address}", "subscribe": "t", "nsq.tls.ca": certificates.ca}
    options = read_source_options(given, streaming=False)

    def brokers():
        try:
            return closing(Cluster(options.network)).brokers()
        except ConnectError:
            # It listens there a moment after its other ports.
            return None

    (broker,) = wait_for(brokers, "the broker listens")
    assert broker.has_log
    distrustful = read_source_options({**given, "nsq.tls.ca": ""}, streaming=False)
    with pytest.raises(ConnectError, match="certificate verify failed"):
        closing(Cluster(distrustful.network)).brokers()


def test_a_connection_that_went_stale_is_made_anew(closing, start_node):
    node = start_node()
    web = closing(Web(network(node.tcp)))
    assert web.ask("GET", node.http, "/info")["version"]
    node.stop()
    node.start()
    assert web.ask("GET", node.http, "/info")["version"]
    node.stop()
    with pytest.raises(ConnectError, match="cannot be asked over HTTP"):
        web.ask("GET", node.http, "/info")


def test_lookupds_are_asked_and_one_of_them_may_be_down(closing, start_node, lookupd):
    node = start_node("flintmq", f"--lookupd-tcp-address={lookupd.tcp}")
    go = start_node("go", f"--lookupd-tcp-address={lookupd.tcp}", f"--http-address={free_address()}")
    node.publish("orders", [b"x"])
    go.publish("orders", [b"x"])
    options = read_source_options(
        {"nsq.lookupd.http.addresses": f"127.0.0.1:1,{lookupd.http}", "subscribe": "orders"}, streaming=True
    )
    cluster = closing(Cluster(options.network))

    def both():
        try:
            brokers = {broker.tcp: broker for broker in cluster.brokers()}
        except ConnectError:
            return None
        return brokers if len(brokers) == 2 and all(broker.topics for broker in brokers.values()) else None

    found = wait_for(both, "both are registered")
    assert (found[node.tcp].has_log, found[node.tcp].has_keys) == (True, True)
    assert (found[go.tcp].has_log, found[go.tcp].node) == (False, go.tcp)
    assert cluster.addresses() == sorted([node.tcp, go.tcp])
    with pytest.raises(ConnectError, match=r"127\.0\.0\.1:1"):
        cluster.brokers(strict=True)


def free_address():
    """Go's nsqd tells lookupds the port it was given, not the one it got."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_the_way_to_the_http_side_is_asked_for_over_tcp(closing, start_node):
    node, go = start_node(), start_node("go")
    options = read_source_options({"nsq.nsqd.addresses": f"{node.tcp},{go.tcp}", "subscribe": "t"}, streaming=True)
    ours, theirs = sorted(closing(Cluster(options.network)).brokers(), key=lambda broker: not broker.has_log)
    assert (ours.http, len(ours.node)) == (node.http, 32)
    assert (theirs.http, theirs.node) == ("", go.tcp)
    with pytest.raises(ConnectError, match=r"name it by nsq\.nsqd\.http\.addresses"):
        closing(Cluster(options.network)).topics(theirs)
    both = {
        "nsq.nsqd.addresses": f"{node.tcp},{go.tcp}",
        "nsq.nsqd.http.addresses": f"{node.http},{go.http}",
        "subscribe": "t",
    }
    brokers = closing(Cluster(read_source_options(both, streaming=True).network)).brokers()
    assert {broker.tcp for broker in brokers} == {node.tcp, go.tcp}
    assert {broker.http for broker in brokers} == {node.http, go.http}


def test_a_broker_that_wants_auth_says_so(start_node):
    node = start_node("flintmq", "--auth-http-address=127.0.0.1:1")
    with pytest.raises(ConnectError, match=r"asks for AUTH: set the option nsq\.auth\.secret"):
        Connection(node.tcp, network(node.tcp))
    with pytest.raises(ConnectError) as caught:
        Connection(node.tcp, network(node.tcp, **{"nsq.auth.secret": "hush-hush"}))
    assert "hush-hush" not in str(caught.value)
    assert not isinstance(caught.value, OptionError)
