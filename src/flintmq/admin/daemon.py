"""nsqadmin: a web server that shows a cluster, and acts on it for those who may.

An ``Admin`` owns one listener, the connections to all daemons, and the parts: ``Cluster`` answers as NSQ's own program
does, ``State`` knows how the cluster was a moment ago, ``Access`` who may do what, ``ActionLog`` what was done. Routes
are in ``nsq_api`` (NSQ's), ``pages_api``, ``messages`` and ``queues_api`` (of the pages) and ``assets`` (files).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from flintmq import __version__, addresses
from flintmq.admin.access import NOBODY, OPERATE, Access, Identity
from flintmq.admin.actions import Action, ActionLog, Notifier
from flintmq.admin.assets import Assets
from flintmq.admin.clients import Clients
from flintmq.admin.cluster import Cluster, Result
from flintmq.admin.history import History
from flintmq.admin.hub import Hub
from flintmq.admin.jobs import Jobs
from flintmq.admin.messages import MessagesApi
from flintmq.admin.nsq_api import NsqApi
from flintmq.admin.pages_api import PagesApi
from flintmq.admin.queues_api import QueuesApi
from flintmq.admin.routes import AdminSite, Guarded, clean_base
from flintmq.admin.state import State
from flintmq.admin.upstream import Upstream, without_password
from flintmq.cluster.node import NodeClient
from flintmq.errors import ClusterError, ConnectError, HttpError, OptionError, StartError
from flintmq.http import site as web
from flintmq.http.browsers import Names, is_exposed, is_loopback
from flintmq.http.server import Server
from flintmq.http.tls import server_tls
from flintmq.options import NsqadminOptions

if TYPE_CHECKING:
    import ssl

__all__ = ["Admin"]

logger = logging.getLogger(__name__)

#: Seconds for which what was derived from settings serves.
SETTINGS_SECONDS = 10.0


class Admin:
    """``async with Admin(…) as admin`` runs an nsqadmin in this process; ``http_address`` says where."""

    def __init__(
        self,
        options: NsqadminOptions | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        **overrides: Any,
    ) -> None:
        if options is None:
            # Inside somebody's process: only loopback, any free port, unless said otherwise.
            options = NsqadminOptions(**{"http_address": "127.0.0.1:0", **overrides})
        elif overrides:
            raise TypeError("give options, or single ones by keyword, not both")
        options.validate()
        #: Replaced as a whole, never changed.
        self.options = replace(options, base_path=clean_base(options.base_path))
        self._assets = Assets(self.options)
        self.now = now
        self.wall = wall
        #: Changes with every start: pages that were loaded before it load anew.
        self.boot = secrets.token_hex(8)
        self._bound = ""
        self._http: Server | None = None
        self._tls: ssl.SSLContext | None = None
        # Made by `start`.
        self.upstream: Upstream
        self.cluster: Cluster
        self.access: Access
        self.site: AdminSite
        self.actions: ActionLog
        self.state: State
        self.clients: Clients
        self.hub: Hub
        self._jobs: Jobs
        self._notifier: Notifier
        self._node_clients: dict[str, NodeClient] = {}
        #: By topic and channel, each with the time at which it was asked for.
        self._dead_letter_topics: dict[tuple[str, str], tuple[str, float]] = {}
        self.is_stopping = False

    # --- Start and stop --------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Admin:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen. StartError says why it cannot."""
        options = self.options
        await self._check_addresses("lookupd-http-address", options.nsqlookupd_http_addresses)
        await self._check_addresses("nsqd-http-address", options.nsqd_http_addresses)
        if options.proxy_graphite and "://" not in options.graphite_url.lstrip(":/"):
            url = options.graphite_url
            raise StartError(f'failed to parse --graphite-url ({url}) - parse "{url}": missing protocol scheme')
        sock = addresses.bind(options.http_address, unix=False)
        try:
            exposed = is_exposed(sock)
            self.upstream = Upstream(options)
            self.access = Access(options, exposed=exposed, now=self.now)
            self._tls = self._load_tls()
            self.actions = ActionLog(options.action_log)
        except OptionError as exc:
            sock.close()
            raise StartError(str(exc)) from exc
        except StartError:
            sock.close()
            raise
        self._bound = addresses.text_of(sock.getsockname())
        self.cluster = Cluster(self.upstream, options.nsqlookupd_http_addresses, options.nsqd_http_addresses, self.wall)
        self._notifier = Notifier(self.upstream, options.notification_http_endpoint)
        interval = options.refresh_interval
        history = History(options.history_memory)
        self.state = State(self.upstream, self.cluster, history, self.wall, interval / 1e9)
        self.clients = Clients(self.upstream, self.state, self.wall)
        self.hub = Hub(self.state, self.boot, interval // 1_000_000, __version__)
        self._jobs = Jobs(self.wall, lambda job: self.hub.tell("job", job.describe(), OPERATE))
        self.actions.followers.append(lambda entry: self.hub.tell("action", msgspec.to_builtins(entry)))
        self.site = AdminSite(
            self._routes(),
            self.access,
            options.base_path,
            options.http_allowed_hosts,
            self.graphite,
            self._assets.document,
        )
        names = Names((socket.gethostname(), *options.http_allowed_hosts), is_guarded=is_loopback(sock))
        self._http = Server(self.site, names=names)
        await self._http.listen(sock, self._tls)
        logger.info("HTTP: listening on %s", self.http_address)
        self.state.start()
        if exposed and self.access.way != "password":
            self._warn()

    def _warn(self) -> None:
        if self.options.insecure:
            what = "whoever reaches it can read messages, and change and delete everything (--insecure)"
        elif self.access.way == "none":
            what = (
                "whoever reaches it can pause, empty and delete topics, as with NSQ's nsqadmin. "
                "Messages, settings and bulk actions are closed: give --users-file, or --admin-user and a proxy"
            )
        elif not self.options.trusted_proxy_cidrs:
            what = (
                f"whoever reaches it can write the header {self.options.acl_http_header}, as with NSQ's nsqadmin: "
                "say with --trusted-proxy-cidr whose header counts"
            )
        else:
            return
        logger.warning(
            "HTTP: %s can be reached by other machines, and %s; see docs/nsqadmin.md", self.http_address, what
        )

    async def _check_addresses(self, flag: str, given: tuple[str, ...]) -> None:
        loop = asyncio.get_running_loop()
        for address in given:
            try:
                parts = addresses.split(address.partition("://")[2] or address, unix=False)
            except OptionError as exc:
                reason = "missing port in address" if "port is missing" in str(exc) else str(exc)
                text = f"failed to resolve --{flag} ({address}) - address {address}: {reason}"
                raise StartError(text) from exc
            try:
                await loop.getaddrinfo(parts.host, parts.port)
            except (OSError, UnicodeError) as exc:
                text = f"failed to resolve --{flag} ({address}) - lookup {parts.host}: no such host"
                raise StartError(text) from exc

    def _load_tls(self) -> ssl.SSLContext | None:
        options = self.options
        if not options.tls_cert:
            return None
        return server_tls(options.tls_cert, options.tls_key, min_version=options.tls_min_version)

    def reload(self) -> None:
        """Users and certificate are read again; what is no good leaves the old one in its place."""
        logger.info("NSQ: reloading")
        self.access.reload()
        # Streams of users who are gone end now.
        self.hub.sampled()
        if self._tls is not None and self._http is not None:
            try:
                context = self._load_tls()
            except OptionError as exc:
                logger.error("TLS: the certificate stays as it was - %s", exc)
                return
            assert context is not None
            self._tls = context
            self._http.renew_tls(context)

    async def stop(self) -> None:
        if self._http is None:
            return
        logger.info("HTTP: closing %s", self.http_address)
        http, self._http = self._http, None
        self.is_stopping = True
        await self._jobs.close()
        await self.state.close()
        self.hub.close()
        await http.close()
        await self.clients.close()
        for client in self._node_clients.values():
            await client.close()
        await self._notifier.close()
        await self.upstream.close()
        self.actions.close()
        # Let the transports notice, so that no socket outlives us.
        for _ in range(3):
            await asyncio.sleep(0)

    @property
    def http_address(self) -> str:
        """``host:port`` as really bound."""
        return self._bound or self.options.http_address

    @property
    def url(self) -> str:
        scheme = "https" if self.options.tls_cert else "http"
        base = self.options.base_path
        return f"{scheme}://{self.http_address}{base if base != '/' else ''}"

    @property
    def graphite(self) -> str:
        """The Graphite that browsers ask themselves; empty if there is none, or if we ask it for them."""
        return "" if self.options.proxy_graphite else without_password(self.options.graphite_url)

    # --- Routes ----------------------------------------------------------------------------------------------------

    def _routes(self) -> list[Guarded]:
        return [
            Guarded("GET", "/ping", self._ping, NOBODY, plain=True),
            *self._assets.routes(),
            *NsqApi(self).routes(),
            *PagesApi(self).routes(),
            *MessagesApi(self, self._jobs).routes(),
            *QueuesApi(self).routes(),
        ]

    async def _ping(self, request: web.Request, identity: Identity) -> str:
        return "OK"

    # --- What the routes share -------------------------------------------------------------------------------------

    def client(self, node: str) -> NodeClient:
        """What asks a node of this cluster for more than NSQ has."""
        if node not in self.state.nodes:
            raise HttpError(404, "NODE_NOT_FOUND")
        # One that refuses plain HTTP, or does so no more, is asked elsewhere: it gets a client for each address.
        address = self.upstream.address(node)
        known = self._node_clients.get(address)
        if known is None:
            seconds = self.options.http_client_request_timeout / 1e9
            token = self.upstream.token("nsqd") or None
            known = NodeClient(address, token=token, tls=self.upstream.tls, timeout=seconds)
            self._node_clients[address] = known
        return known

    async def dead_letter_topic(self, topic: str, channel: str) -> str | None:
        """Where the dead letters of a channel go; None if no node can say."""
        known = self._dead_letter_topics.get((topic, channel))
        # Settings may change it, and not only through us: it is asked for again now and then.
        if known is not None and 0 <= self.wall() - known[1] < SETTINGS_SECONDS:
            return known[0]
        for node in self.state.having(topic, channel):
            if node.is_flintmq:
                try:
                    found = await self.client(node.address).redrive_progress(topic, channel)
                except (HttpError, ConnectError):
                    continue
                if found.dead_letter_topic:
                    if len(self._dead_letter_topics) > 10_000:
                        self._dead_letter_topics.clear()
                    self._dead_letter_topics[topic, channel] = found.dead_letter_topic, self.wall()
                    return found.dead_letter_topic
        return None

    def forget_settings(self) -> None:
        """Something was set: what was derived from settings is asked for again."""
        self._dead_letter_topics.clear()

    async def set_lookupds(self, given: list[str]) -> None:
        """Ask these nsqlookupds from now on. HttpError if that cannot be."""
        if self.options.nsqd_http_addresses or not given:
            # Both kinds of daemons, or none at all, would not be allowed at a start either.
            raise HttpError(400, "INVALID_VALUE")
        try:
            await self._check_addresses("lookupd-http-address", tuple(given))
        except StartError:
            raise HttpError(400, "INVALID_VALUE") from None
        self.options = replace(self.options, nsqlookupd_http_addresses=tuple(given))
        if {*given} != {*self.cluster.lookupds}:
            self.cluster.lookupds = tuple(given)
            await self.state.forget()

    def record(
        self,
        request: web.Request,
        identity: Identity,
        action: str,
        result: Result | ClusterError | None,
        *,
        topic: str = "",
        channel: str = "",
        node: str = "",
        detail: str = "",
        notify: bool = True,
    ) -> None:
        """Write an action down, and tell those who asked to be told of it."""
        outcome, message = "ok", ""
        if isinstance(result, ClusterError):
            outcome, message = "failed", str(result)
        elif result is not None:
            message = result.message
            failed = sum(1 for _, error in result.outcomes if error)
            if failed or result.warnings:
                outcome = "failed" if result.outcomes and failed == len(result.outcomes) else "partly"
        self.forget_settings()
        user = identity.user or request_user(request)
        self.actions.add(
            Action(
                time=self.wall() * 1000,
                user=user or None,
                role=identity.role,
                remote=request.remote,
                action=action,
                topic=topic,
                channel=channel,
                node=node,
                detail=detail,
                result=outcome,
                message=message,
            )
        )
        if not notify or action not in NOTIFIED:
            return
        https = self.options.tls_cert or request.headers.get("X-Scheme") == "https"
        self._notifier.send(
            action,
            topic,
            channel,
            node,
            # NSQ's own program knows only the name of HTTP Basic, whatever the password: it counts if nobody logged in.
            user=user,
            timestamp=int(self.wall()),
            remote=request.remote,
            user_agent=request.headers.get("User-Agent", ""),
            url=f"{'https' if https else 'http'}://{request.headers.get('Host', '')}{request.target}",
        )

    async def notified(self) -> None:
        """Wait until every notification is sent."""
        await self._notifier.drain()


#: What NSQ's nsqadmin tells the notification endpoint of.
NOTIFIED = frozenset(
    {f"{verb}_{kind}" for verb in ("create", "delete", "empty", "pause", "unpause") for kind in ("topic", "channel")}
    | {"tombstone_topic_producer"}
)


def request_user(request: web.Request) -> str:
    """The name of HTTP Basic, whatever the password."""
    import base64

    scheme, _, text = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(text.strip(), validate=True).decode().partition(":")[0]
    except ValueError:
        return ""
