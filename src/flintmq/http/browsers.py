"""Web pages that send requests in the name of whoever visits them: how they are told from clients.

A browser says where a request comes from, in headers that no page can leave out or choose: ``Origin``,
``Sec-Fetch-Site`` and ``Host``. Clients that are no browsers send neither of the first two, and are not affected.

``is_foreign`` looks at the first two: such a request may read what a page cannot see anyway, and nothing else. A
``Names`` knows under which names a listener is asked for: a page whose name was made to point to this machine ("DNS
rebinding") is no stranger to the browser, but the name it asks for is one to us.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Sequence

from flintmq.addresses import host_of

__all__ = ["Names", "is_exposed", "is_foreign", "is_loopback"]

#: What a browser says of requests that no other site has made: by the page itself, or by its user.
_OWN_SITES = frozenset(("same-origin", "none"))
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class Names:
    """The names that a listener answers to. ``is_guarded``: to no other ones; else to all of them.

    Always known are ``localhost`` and names below it, addresses, and what ``names`` holds. No name at all is fine too:
    every browser sends one.
    """

    def __init__(self, names: Iterable[str] = (), *, is_guarded: bool = False) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self.is_guarded = is_guarded

    def knows(self, host: str) -> bool:
        """Return whether a request for ``host``, with or without a port, is meant for us."""
        if not self.is_guarded or not host:
            return True
        name = host_of(host).lower().rstrip(".")
        return name in self._names or name == "localhost" or name.endswith(".localhost") or _is_address(name)


def is_foreign(origins: Sequence[str], sites: Sequence[str], host: str, allowed: Collection[str] = ()) -> bool:
    """Return whether a web page of another origin has made the request.

    ``origins`` and ``sites`` are the values of ``Origin`` and ``Sec-Fetch-Site``, which may come more than once, and
    ``host`` is what was asked for. Pages from hosts in ``allowed`` are no strangers.
    """
    if not origins and not sites:
        return False
    if any(site.strip().lower() not in _OWN_SITES for site in sites):
        # A page of our own at a name that a proxy has taken away says "same-origin" all the same.
        return not (origins and all(_is_allowed(origin, allowed) for origin in origins))
    return any(not _is_allowed(origin, allowed) and not _is_same(origin, host) for origin in origins)


def is_loopback(sock: socket.socket) -> bool:
    """Return whether only this machine reaches what listens on a socket over the network."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    host = str(sock.getsockname()[0])
    if sock.family == socket.AF_INET:
        return host.startswith("127.")
    import ipaddress

    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_exposed(sock: socket.socket) -> bool:
    """Return whether other machines may reach what listens on a socket."""
    return sock.family in (socket.AF_INET, socket.AF_INET6) and not is_loopback(sock)


def _is_same(origin: str, host: str) -> bool:
    """Return whether a page's origin is where its request went. The scheme may differ: a proxy may end the TLS."""
    scheme, _, authority = origin.strip().lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    if not port or not authority:
        # Such as "null", of a page that has no origin or hides it.
        return False
    return authority.removesuffix(f":{port}") == host.strip().lower().removesuffix(f":{port}")


def _is_allowed(origin: str, allowed: Collection[str]) -> bool:
    return host_of(origin.strip().lower().partition("://")[2]) in allowed


def _is_address(name: str) -> bool:
    import ipaddress

    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
