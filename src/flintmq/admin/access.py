"""Who somebody is, and what he may do: users, sessions, roles, and the header of a trusted proxy.

``Access.identify`` says who sent a request; ``Access.require`` refuses it if that is not enough. There are four ways:

    off       nobody has to log in: on loopback, or with --insecure
    none      beyond loopback, and no way to log in: NSQ's own routes are open, as in NSQ; numbers can be seen
    proxy     a proxy says in a header who it is (--admin-user)
    password  a users file; scripts send name and password with each request (Basic), browsers get a session

A session is a random number in a cookie that no other site can send and no script can read. Requests that change
something and come with it must also carry the session's token in a header (CSRF).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flintmq.addresses import host_of
from flintmq.errors import HttpError, OptionError
from flintmq.http.site import Request
from flintmq.http.tokens import read_secrets
from flintmq.options import NsqadminOptions

__all__ = ["ADMIN", "NOBODY", "OPERATE", "ROLES", "VIEW", "Access", "Identity", "Users", "hash_password"]

logger = logging.getLogger(__name__)

#: Roles, each with the rights of those before it. NOBODY is for routes that everybody may use.
NOBODY, VIEW, OPERATE, ADMIN = "", "view", "operate", "admin"
ROLES = (VIEW, OPERATE, ADMIN)
COOKIE = "flintmq_session"
CSRF_HEADER = "X-Flintmq-Csrf"
#: Wrong passwords in WINDOW seconds: of an address for a user, of an address, and for a user from everywhere. The last
#: two are larger, so that nobody who guesses locks others out soon.
MOST_FAILURES = {"pair": 5, "address": 50, "user": 50}
WINDOW = 60.0
#: Sessions, and addresses or users with failures, that are remembered.
MOST_REMEMBERED = 10_000
#: Seconds for which a password that was sent with a request need not be checked again.
CHECKED_SECONDS = 300.0
#: Passwords that are checked at the same time: each takes some 50 ms of a core and 64 MiB.
AT_ONCE = 2
LONGEST_PASSWORD = 1024


Key = tuple[str, str]


def rank(role: str | None) -> int:
    return ROLES.index(role) + 1 if role in ROLES else 0


@dataclass(frozen=True)
class Identity:
    """Who sent a request; ``via`` is ``off``, ``none``, ``proxy``, ``cookie`` or ``basic``."""

    user: str | None
    role: str | None
    via: str
    #: Did a proxy that anybody could play say so? Enough for NSQ's own actions, as in NSQ, and for nothing else.
    acl_admin: bool = False
    csrf: str | None = None
    #: What the login hangs on: the session's key, and what changes with the password.
    session: bytes = b""
    fingerprint: str = ""


def hash_password(password: str) -> str:
    """Return what a users file holds instead of a password."""
    return str(_hasher().hash(password))


def _hasher() -> Any:
    try:
        import argon2
    except ImportError as exc:
        raise OptionError("--users-file needs argon2: pip install 'flintmq[login]'") from exc
    return argon2.PasswordHasher()


class Users:
    """A file with a user on each line, ``NAME ROLE HASH``, and ``#`` before a comment.

    A HASH of ``-`` is for those who come through a proxy only: no password fits.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._hasher = _hasher()
        # What an unknown name is compared with, so that it takes as long as a known one.
        self._decoy = self._hasher.hash(secrets.token_hex(16))
        self._users = self._read()
        self._gate = asyncio.Semaphore(AT_ONCE)

    def _read(self) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        for number, words in read_secrets(self.path, "users", "hashes of passwords", "HTTP"):
            if len(words) != 3 or words[1] not in ROLES or not (words[2] == "-" or words[2].startswith("$argon2")):
                # Never the line itself: it holds a secret.
                raise OptionError(
                    f"{self.path}, line {number}: write NAME, a role (view, operate or admin) and "
                    "what `nsqadmin --hash-password` prints"
                )
            if words[0] in found:
                raise OptionError(f"{self.path}, line {number}: there are two lines for {words[0]}")
            found[words[0]] = (words[1], words[2])
        return found

    def reload(self) -> None:
        """Read the file again. If that fails the old users stay: a typing error must not open or close the door."""
        try:
            self._users = self._read()
        except OptionError as exc:
            logger.error("HTTP: the users stay as they were - %s", exc)
            return
        logger.info("HTTP: %d users in %s", len(self._users), self.path)

    def role(self, name: str) -> str | None:
        return self._users.get(name, (None, ""))[0]

    def fingerprint(self, name: str) -> str:
        """What changes when a user gets another password."""
        return self._users.get(name, ("", ""))[1]

    async def check(self, name: str, password: str) -> bool:
        """Is it the user's password? Computed in a thread, a few at a time."""
        known = self._users.get(name, ("", "-"))[1]
        wanted = self._decoy if known == "-" else known

        def verify() -> bool:
            import argon2

            try:
                return bool(self._hasher.verify(wanted, password))
            except (argon2.exceptions.VerificationError, argon2.exceptions.InvalidHashError):
                return False

        if len(password) > LONGEST_PASSWORD:
            return False
        async with self._gate:
            fits = await asyncio.get_running_loop().run_in_executor(None, verify)
        return fits and known != "-"


class Failures:
    """How often somebody gave a wrong password lately, and how many of his are being checked.

    Keys are pairs of a kind, which has a limit of its own, and a text.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._times: OrderedDict[Key, list[float]] = OrderedDict()
        self._pending: Counter[Key] = Counter()

    def _recent(self, key: Key) -> list[float]:
        begin = self._now() - WINDOW
        return [time for time in self._times.get(key, ()) if time > begin]

    def wait(self, keys: Iterable[Key]) -> int:
        """Seconds until one of these may try again; 0: now."""
        wait = 0.0
        for key in keys:
            times, most = self._recent(key), MOST_FAILURES[key[0]]
            if len(times) >= most:
                wait = max(wait, times[-most] + WINDOW - self._now())
        return int(wait) + 1 if wait > 0 else 0

    def begin(self, keys: Iterable[Key]) -> bool:
        """May one more be checked now? Not if too many could turn out to be wrong."""
        keys = tuple(keys)
        if any(len(self._recent(key)) + self._pending[key] >= MOST_FAILURES[key[0]] for key in keys):
            return False
        self._pending.update(keys)
        return True

    def end(self, keys: Iterable[Key], *, is_wrong: bool) -> None:
        for key in keys:
            self._pending[key] -= 1
            if not self._pending[key]:
                del self._pending[key]
            if is_wrong:
                times = self._times.setdefault(key, [])
                times.append(self._now())
                del times[: -MOST_FAILURES[key[0]]]
                self._times.move_to_end(key)
        while len(self._times) > MOST_REMEMBERED:
            self._times.popitem(last=False)

    def forget(self, key: Key) -> None:
        self._times.pop(key, None)


@dataclass
class _Session:
    key: bytes
    user: str
    csrf: str
    ends: float
    fingerprint: str


class Access:
    """See the module's text. ``exposed``: other machines reach the listener."""

    def __init__(self, options: NsqadminOptions, *, exposed: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._exposed = exposed
        self._now = now
        self.users = Users(options.users_file) if options.users_file else None
        self._proxies = [ipaddress.ip_network(cidr, strict=False) for cidr in options.trusted_proxy_cidrs]
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._failures = Failures(now)
        self._turn = asyncio.Condition()
        # Checks that are under way, by what is checked and from where.
        self._checking: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        # Passwords that were right a moment ago, as digests under a key of our own.
        self._key = secrets.token_bytes(32)
        self._checked: OrderedDict[bytes, tuple[str, str, float]] = OrderedDict()
        if self.users is not None:
            self.way = "password"
        elif options.admin_users:
            self.way = "proxy"
        else:
            self.way = "none" if exposed and not options.insecure else "off"
        self._cookie_path = options.base_path or "/"

    def reload(self) -> None:
        if self.users is not None:
            self.users.reload()
            self._checked.clear()

    # --- Who is it -------------------------------------------------------------------------------------------------

    async def identify(self, request: Request) -> Identity:
        """HttpError 401 if name and password came with the request and are wrong."""
        if self.way in ("off", "none"):
            return Identity(None, ADMIN if self.way == "off" else VIEW, self.way, acl_admin=True)
        if self.users is not None:
            session = self._session(request)
            if session is not None:
                return self._of_session(session)
            found = await self._basic(request)
            if found is not None:
                return found
        by_proxy = self._by_proxy(request)
        if by_proxy is not None:
            return by_proxy
        # NSQ lets everybody read. With users of our own nobody does without a login.
        return Identity(None, VIEW if self.users is None else None, self.way)

    def _by_proxy(self, request: Request) -> Identity | None:
        name = self._options.acl_http_header
        every = getattr(request.headers, "getall", None)
        values = list(every(name, ())) if every is not None else [request.headers[name]] * (name in request.headers)
        if len(values) != 1 or not values[0] or not (self._options.admin_users or self._proxies):
            # Of two, one was not the proxy's.
            return None
        user = values[0]
        trusted = self._is_proxy(request) if self._proxies else not self._exposed or self._options.insecure
        if self._proxies and not trusted:
            return None
        role: str | None = VIEW if self.users is None else None
        if user in self._options.admin_users:
            role = ADMIN
        elif self.users is not None:
            role = self.users.role(user)
        if trusted:
            return Identity(user, role, "proxy", acl_admin=role == ADMIN)
        # Anybody who reaches the port may have written that header. It counts for what NSQ lets it count for.
        rest = VIEW if self.users is None else None
        return Identity(user, rest, "proxy", acl_admin=role == ADMIN and self.users is None)

    def _is_proxy(self, request: Request) -> bool:
        address = peer_of(request)
        return address is not None and any(address in network for network in self._proxies)

    async def _basic(self, request: Request) -> Identity | None:
        scheme, _, text = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "basic" or self.users is None:
            return None
        try:
            user, colon, password = base64.b64decode(text.strip(), validate=True).decode().partition(":")
        except ValueError:
            raise HttpError(401, "INVALID_LOGIN") from None
        if not colon:
            raise HttpError(401, "INVALID_LOGIN")
        digest = self._digest(user, password)
        known = self._checked.get(digest)
        if known is None or known[2] < self._now() or known[1] != self.users.fingerprint(user):
            await self._check(user, password, request)
            self._checked[digest] = (user, self.users.fingerprint(user), self._now() + CHECKED_SECONDS)
            while len(self._checked) > MOST_REMEMBERED:
                self._checked.popitem(last=False)
        return Identity(user, self.users.role(user), "basic", fingerprint=self.users.fingerprint(user))

    def _digest(self, user: str, password: str) -> bytes:
        return hmac.digest(self._key, f"{len(user)}:{user}:{password}".encode(), "sha256")

    def address_of(self, request: Request) -> str:
        """Who asks: the other end, or whom a trusted proxy names, which all of its users would share otherwise."""
        if self._proxies and self._is_proxy(request):
            for text in reversed(request.headers.get("X-Forwarded-For", "").split(",")):
                # The last that is no proxy of ours: what stands before it was written by anybody.
                try:
                    address = ipaddress.ip_address(host_of(text.strip()))
                except ValueError:
                    break
                if not any(address in network for network in self._proxies):
                    return str(address)
        return host_of(request.remote)

    async def _check(self, user: str, password: str, request: Request) -> None:
        """HttpError 429 if there were too many attempts, 401 if this is another wrong one.

        Those who send the same at the same time share the check.
        """
        address = self.address_of(request)
        key = self._digest(user, password), address
        task = self._checking.get(key)
        if task is None:
            task = self._checking[key] = asyncio.create_task(self._verify(user, password, address))

            def ended(done: asyncio.Task[None]) -> None:
                del self._checking[key]
                if not done.cancelled():
                    # Somebody who has gone does not hear of it.
                    done.exception()

            task.add_done_callback(ended)
        await asyncio.shield(task)

    async def _verify(self, user: str, password: str, address: str) -> None:
        assert self.users is not None
        pair = ("pair", f"{address} {user}")
        keys = (pair, ("address", address), ("user", user))
        async with self._turn:
            while True:
                if wait := self._failures.wait(keys):
                    raise HttpError(429, "TOO_MANY_ATTEMPTS", retry_after=wait)
                if self._failures.begin(keys):
                    break
                # Those before it may be right: then it may try, too.
                await self._turn.wait()
        is_right = True
        try:
            is_right = await self.users.check(user, password)
        finally:
            self._failures.end(keys, is_wrong=not is_right)
            async with self._turn:
                self._turn.notify_all()
        if not is_right:
            logger.warning("HTTP: a wrong password for %s from %s", ascii(user), ascii(address))
            raise HttpError(401, "INVALID_LOGIN")
        self._failures.forget(pair)

    # --- Sessions --------------------------------------------------------------------------------------------------

    def _cookie(self, request: Request) -> str:
        for pair in request.headers.get("Cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == COOKIE:
                return value
        return ""

    def _session(self, request: Request) -> _Session | None:
        token = self._cookie(request)
        if not token or self.users is None:
            return None
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        session = self._sessions.get(digest)
        if session is None:
            return None
        # Somebody who was taken out of the file, or has another password, must log in anew.
        if session.ends < self._now() or session.fingerprint != self.users.fingerprint(session.user):
            del self._sessions[digest]
            return None
        return session

    async def log_in(self, request: Request, user: str, password: str) -> tuple[Identity, str]:
        """Return who it is now, and the cookie to set."""
        if self.users is None:
            raise HttpError(404, "NO_LOGIN: there is no --users-file")
        await self._check(user, password, request)
        token, csrf = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        ends = self._now() + self._options.session_lifetime / 1e9
        digest = hashlib.sha256(token.encode()).digest()
        session = self._sessions[digest] = _Session(digest, user, csrf, ends, self.users.fingerprint(user))
        while len(self._sessions) > MOST_REMEMBERED:
            self._sessions.popitem(last=False)
        return self._of_session(session), self._set_cookie(request, token)

    def _of_session(self, session: _Session) -> Identity:
        assert self.users is not None
        role = self.users.role(session.user)
        return Identity(
            session.user, role, "cookie", csrf=session.csrf, session=session.key, fingerprint=session.fingerprint
        )

    def log_out(self, request: Request) -> str:
        """Return the cookie to set."""
        self._sessions.pop(hashlib.sha256(self._cookie(request).encode("utf-8", "surrogateescape")).digest(), None)
        return self._set_cookie(request, "")

    def still_may(self, identity: Identity, role: str) -> bool:
        """Does a login still hold, and is it enough for what needs this role? Asked by streams that go on for hours."""
        now = identity.role
        if self.users is not None and identity.user is not None:
            if identity.via == "cookie":
                session = self._sessions.get(identity.session)
                if session is None or session.ends < self._now():
                    return False
            if identity.via == "proxy" and identity.user in self._options.admin_users:
                pass
            elif identity.via != "proxy" and identity.fingerprint != self.users.fingerprint(identity.user):
                return False
            else:
                now = self.users.role(identity.user)
        return rank(now) >= rank(role)

    def _set_cookie(self, request: Request, token: str) -> str:
        is_https = bool(self._options.tls_cert) or request.headers.get("X-Forwarded-Proto", "").lower() == "https"
        age = self._options.session_lifetime // 1_000_000_000 if token else 0
        attributes = f"Path={self._cookie_path}; Max-Age={age}; HttpOnly; SameSite=Strict"
        return f"{COOKIE}={token}; {attributes}" + ("; Secure" if is_https else "")

    # --- What may he do --------------------------------------------------------------------------------------------

    def require(self, request: Request, identity: Identity, role: str, *, is_nsq: bool = False) -> None:
        """HttpError if a request may not do what needs this role; ``is_nsq``: NSQ's own nsqadmin has it."""
        if role == NOBODY:
            return
        if identity.via == "cookie" and request.method not in ("GET", "HEAD", "OPTIONS"):
            sent = request.headers.get(CSRF_HEADER, "")
            if not identity.csrf or not hmac.compare_digest(sent.encode("utf-8", "replace"), identity.csrf.encode()):
                raise HttpError(403, "CSRF: send the token of /api/v2/session in the header X-Flintmq-Csrf")
        if is_nsq and identity.acl_admin:
            return
        if rank(identity.role) >= rank(role):
            return
        if is_nsq and self.way == "proxy":
            raise HttpError(403, "FORBIDDEN")
        if identity.user is None:
            hint = {
                "password": "log in",
                "proxy": "a trusted proxy must say who you are",
                "none": "start nsqadmin with --users-file, or with --insecure",
            }[self.way]
            raise HttpError(401, f"LOGIN_REQUIRED: {hint}", missing_role=role)
        raise HttpError(403, "FORBIDDEN", missing_role=role)


def peer_of(request: Request) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address at the other end of the connection; None for a unix socket."""
    try:
        return ipaddress.ip_address(host_of(request.remote).partition("%")[0])
    except ValueError:
        return None
