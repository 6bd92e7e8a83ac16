"""Every interop test runs once for each client library and each broker; what is missing is skipped, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .processes import CLIENT_KINDS, Broker, BrokerKind, Client, ClientKind, broker_kind

StartBroker = Callable[..., Broker]
StartClient = Callable[[Broker], Client]


@pytest.fixture(params=["flintmq", "flintmq-everything", "go"])
def kind_of_broker(request: pytest.FixtureRequest) -> BrokerKind:
    kind = broker_kind(request.param)
    if kind.missing:
        pytest.skip(kind.missing)
    return kind


@pytest.fixture(params=list(CLIENT_KINDS))
def kind_of_client(request: pytest.FixtureRequest) -> ClientKind:
    kind = CLIENT_KINDS[request.param]()
    if kind.missing:
        pytest.skip(kind.missing)
    return kind


@pytest.fixture
def start_broker(kind_of_broker: BrokerKind, tmp_path: Path) -> Iterator[StartBroker]:
    started: list[Broker] = []

    def start(*flags: str) -> Broker:
        data_path = tmp_path / f"broker-{len(started)}"
        data_path.mkdir()
        started.append(Broker(kind_of_broker, data_path, *flags))
        return started[-1]

    yield start
    for broker in started:
        broker.close()


@pytest.fixture
def start_client(kind_of_client: ClientKind) -> Iterator[StartClient]:
    started: list[Client] = []

    def start(broker: Broker) -> Client:
        started.append(Client(kind_of_client, broker.address))
        return started[-1]

    yield start
    for client in started:
        client.close()


@pytest.fixture
def broker(start_broker: StartBroker) -> Broker:
    return start_broker()


@pytest.fixture
def client(broker: Broker, start_client: StartClient) -> Client:
    return start_client(broker)
