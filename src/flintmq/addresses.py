"""Addresses as people write them: ``host:port``, ``[v6]:port``, the path of a unix socket, an HTTP URL.

This is the only place that takes them apart, puts them together and binds them. It travels to Spark's executors, so it
needs nothing but the standard library and ``errors``.

    127.0.0.1:4150        an IPv4 address or a host name, and a port
    [fe80::1%eth0]:4150   an IPv6 address needs brackets; its zone stays with it
    :4150                 every IPv4 address of this machine; only to listen on
    /run/nsqd.sock        the path of a unix socket; to listen on, a name without a colon is one too
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
import sys
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from flintmq.errors import OptionError, StartError, permission_hint

__all__ = ["Address", "HeldPort", "bind", "host_of", "http_url", "join", "port_of", "reason_of", "split", "text_of"]

#: Connections that may wait to be accepted.
BACKLOG = 1024
_LARGEST_PORT = 65_535
_MAPPED = re.compile(r"::ffff:(\d+\.\d+\.\d+\.\d+)", re.IGNORECASE)


class Address(NamedTuple):
    """An address taken apart: a host without brackets and a port, or the path of a unix socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return self.path or join(self.host, self.port)


def split(address: str, *, listening: bool = False, unix: bool = True) -> Address:
    """Take an address apart. OptionError says what is wrong with it.

    An address to listen on may have an empty host (every address) and port 0 (any free one). Without ``unix`` only
    ``host:port`` will do.
    """
    if not isinstance(address, str):
        raise OptionError(f"{address!r} is not an address: it is a {type(address).__name__}, not a str")
    if re.match("[A-Za-z][A-Za-z0-9+.-]*://", address):
        raise _refusal(address, "it is a URL", unix)
    host, colon, port = address.rpartition(":")
    if unix and address and ("/" in address or (listening and not colon)):
        if "\0" in address:
            raise _refusal(address, "a path has no zero byte", unix)
        return Address("", 0, address)
    if not colon:
        raise _refusal(address, "the port is missing", unix)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise _refusal(address, "an IPv6 address needs brackets", unix)
    if re.search(r"[\[\]/@?#\s\0]", host):
        raise _refusal(address, f'"{host}" is not a host', unix)
    if not host and not listening:
        raise _refusal(address, "the host is missing", unix)
    if not re.fullmatch("[0-9]{1,5}", port, re.ASCII) or not int(not listening) <= int(port) <= _LARGEST_PORT:
        raise _refusal(address, f'"{port}" is not a port', unix)
    return Address(host, int(port))


def _refusal(address: str, reason: str, unix: bool) -> OptionError:
    shapes = "host:port, [v6]:port or the path of a unix socket" if unix else "host:port or [v6]:port"
    return OptionError(f'"{address}" is not an address ({reason}): write {shapes}')


def join(host: str, port: int | str) -> str:
    """Return ``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def host_of(authority: str) -> str:
    """Return the host of ``host`` or ``host:port`` as a header has it, an IPv6 address without its brackets."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    name, colon, port = authority.rpartition(":")
    return name if colon and port.isdigit() else authority.removesuffix(":")


def port_of(address: str) -> int:
    """Return the port of an address that somebody listens on; 0 for a unix socket, and for an empty text."""
    return split(address, listening=True).port if address else 0


def text_of(name: Any) -> str:
    """Return the text of a socket's own or its peer's name, as Go prints it: ``@`` for a unix socket without a path."""
    if isinstance(name, tuple):
        host = str(name[0])
        # An IPv4 client of a socket that takes both kinds.
        mapped = _MAPPED.fullmatch(host)
        return join(mapped[1] if mapped else host, name[1])
    if isinstance(name, bytes):
        name = "@" + os.fsdecode(name[1:])
    return name or "@"


def bind(address: str, *, unix: bool = True, mode: int | None = None) -> socket.socket:
    """Return a listening, non-blocking socket. StartError, in the Go daemon's words, if there cannot be one.

    ``mode`` is for the file of a unix socket; None: as the process makes files.
    """
    try:
        host, port, path = split(address, listening=True, unix=unix)
        if path:
            family, where = socket.AF_UNIX, path
            _remove_dead_socket(path)
        elif host:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            family, _, _, _, where = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]  # type: ignore[assignment]
        else:
            family, where = socket.AF_INET, ("", port)  # type: ignore[assignment]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if not path:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setblocking(False)
            if path and mode is not None:
                # Not for a moment may others connect. The mask is the process's: nobody else makes files meanwhile.
                before = os.umask(0o777 & ~mode)
                try:
                    sock.bind(where)
                finally:
                    os.umask(before)
                os.chmod(path, mode)
            else:
                sock.bind(where)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
    except (OptionError, OSError, ValueError) as exc:
        raise StartError(f"listen ({address}) failed - {reason_of(exc)}{_remedy(exc, address)}") from exc
    return sock


def _remove_dead_socket(path: str) -> None:
    """Delete the file of a unix socket that nobody listens on: a killed daemon leaves it, and could not start again."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.setblocking(False)
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)


def _remedy(exc: BaseException, address: str) -> str:
    """Return what to do where a permission is missing to listen, as the end of a sentence."""
    if not isinstance(exc, PermissionError):
        return ""
    if path := split(address, listening=True).path:
        return permission_hint(exc, os.path.dirname(path) or ".")
    return "; ports below 1024 need a privilege (CAP_NET_BIND_SERVICE): choose a higher one"


def reason_of(exc: BaseException) -> str:
    """Return the operating system's own words for an error, in lower case as Go prints them."""
    if isinstance(exc, OSError) and exc.errno is not None and exc.errno in errno.errorcode:
        return os.strerror(exc.errno).lower()
    return str(exc)


def http_url(address: str, owner: str, *, query: bool = False) -> str:
    """Return ``host:port`` or a URL as a URL without a slash at its end. OptionError if it is neither.

    ``owner`` names who listens there; only with ``query`` may the URL have one.
    """
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        is_good = is_good and (parts.scheme == "https" or parts.port is not None)
        is_good = is_good and (query or not parts.query) and not parts.fragment
    except ValueError:
        is_good = False
    if not is_good:
        raise OptionError(f'"{address}" is not an HTTP address of {owner}: write host:port or http(s)://host:port')
    return url.rstrip("/") if not query else url


class HeldPort:
    """A port of the loopback interface, held for one daemon: while that is down, nobody else is given it.

    Without it even a client that dials the dead daemon may be given the port, as the near end of its connection, and
    so reach itself.
    """

    def __init__(self) -> None:
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._holder.getsockname()[1]}"
        if sys.platform != "linux":
            # Elsewhere two sockets cannot share a port even if only one of them listens.
            self._holder.close()

    def close(self) -> None:
        self._holder.close()
