"""The server side of TLS, for every listener that speaks it."""

from __future__ import annotations

import logging
import warnings
from functools import cache
from typing import TYPE_CHECKING

from flintmq.errors import OptionError

if TYPE_CHECKING:
    import ssl

__all__ = ["reload_tls", "server_tls"]

logger = logging.getLogger(__name__)


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
    context.sslobject_class = _outspoken()
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
                    logger.warning("TLS: client certificates must be signed by an authority that this system trusts")
    except (OSError, ValueError) as exc:
        raise OptionError(f"failed to build TLS config - {exc}") from exc
    return context


def reload_tls(context: ssl.SSLContext, cert: str, key: str) -> None:
    """New connections get the certificate that is in the files now. OptionError, and no change, if it is no good."""
    import ssl

    try:
        # On the side first: a half that was loaded would stay.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as exc:
        raise OptionError(f"failed to reload the certificate - {exc}") from exc


@cache
def _outspoken() -> type[ssl.SSLObject]:
    """Return asyncio's side of a connection, which says why a handshake failed: to the log, and to the peer.

    asyncio drops such a connection without a word, with the alert that OpenSSL made for the peer still unsent. It sends
    what there is to send when the handshake wants more input. So that is what it is told first; the error follows with
    the next bytes, if the peer does not close by itself.
    """
    import ssl

    class Outspoken(ssl.SSLObject):
        _failure: ssl.SSLError | None = None

        def do_handshake(self) -> None:
            if self._failure is not None:
                raise self._failure
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as exc:
                logger.error("TLS: a handshake failed - %s", exc)
                self._failure = exc
                raise ssl.SSLWantReadError from exc

    return Outspoken
