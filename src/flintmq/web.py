"""What our HTTP servers and clients share: the TLS side of a server, JSON as Go writes it."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq.errors import OptionError

if TYPE_CHECKING:
    import ssl

__all__ = ["json_bytes", "server_tls"]

log = logging.getLogger(__name__)


def json_bytes(value: Any) -> bytes:
    """JSON as Go writes it: no spaces, keys in their order, and nothing that a browser could take for markup."""
    data = msgspec.json.encode(value)
    for character, escaped in _ESCAPED:
        if character in data:
            data = data.replace(character, escaped)
    return data


_ESCAPED = (
    (b"<", b"\\u003c"),
    (b">", b"\\u003e"),
    (b"&", b"\\u0026"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


def server_tls(
    cert: str, key: str, *, client_ca: str = "", policy: str = "", min_version: str = "tls1.2"
) -> ssl.SSLContext:
    """The TLS side of a server. OptionError if the files do not fit.

    ``policy`` is what is asked of clients: nothing, ``require`` or ``require-verify``. In NSQ ``require`` takes any
    certificate without looking at it; here a certificate that is asked for is always checked, against ``client_ca``
    or else the authorities that the system trusts.
    """
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    versions = {
        "tls1.0": ssl.TLSVersion.TLSv1,
        "tls1.1": ssl.TLSVersion.TLSv1_1,
        "tls1.2": ssl.TLSVersion.TLSv1_2,
        "tls1.3": ssl.TLSVersion.TLSv1_3,
    }
    with warnings.catch_warnings():
        # The old versions are there for those who ask for them by name.
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = versions[min_version]
    if min_version in ("tls1.0", "tls1.1"):
        # OpenSSL's own level forbids what these versions sign with.
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
    try:
        context.load_cert_chain(cert, key)
        if policy:
            context.verify_mode = ssl.CERT_REQUIRED
            if client_ca:
                context.load_verify_locations(client_ca)
            else:
                context.load_default_certs(ssl.Purpose.CLIENT_AUTH)
                if policy == "require":
                    log.warning("TLS: client certificates must be signed by an authority that this system trusts")
    except (OSError, ValueError) as exc:
        raise OptionError(f"failed to build TLS config - {exc}") from exc
    return context
