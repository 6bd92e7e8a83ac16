"""Ports for daemons that are told theirs before they listen, or that come back at the one they had."""

from __future__ import annotations

from flintmq.addresses import HeldPort, port_of

_held: list[HeldPort] = []


def held_port() -> int:
    """A port of the loopback interface that nobody else is given as long as this process lives.

    A port that was free a moment ago is not enough: another test, or the near end of any connection, may get it first.
    """
    _held.append(HeldPort())
    return port_of(_held[-1].address)
