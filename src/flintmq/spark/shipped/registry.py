"""A schema registry, over the HTTP API that Confluent's has and others offer too.

It is asked for few things: the newest schema of a subject when a query starts, and the schema of an id when a message
has one that was not met before. A registry that does not answer, or refuses, fails what asked: only its own word that
an id is unknown is about the message. Redirects are not followed, so that credentials stay with the host they are for.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from flintmq.errors import PipelineError

__all__ = ["FRAME", "Registry", "Schema", "UnknownSchemaError"]

#: Bytes before a body: a zero, and the schema's id, 4 bytes, the highest first.
FRAME = 5
#: How often a registry is asked that does not answer or is in trouble, and seconds before the second time.
_ATTEMPTS = 4
_FIRST_DELAY = 0.2
#: Bytes that an answer may have.
_ANSWER_BYTES = 16 << 20
#: "Subject not found", "Version not found", "Schema not found", as the API numbers them.
_UNKNOWN = {40401, 40402, 40403}


class UnknownSchemaError(Exception):
    """The registry has answered, and knows no such id or subject."""


@dataclass(frozen=True)
class Schema:
    """A schema, and those that it refers to."""

    #: AVRO, PROTOBUF or JSON.
    kind: str
    #: By the names under which they are referred to, each after those that it needs itself; the schema is the last.
    texts: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return self.texts[-1][1]


@dataclass(frozen=True)
class Registry:
    """Where a registry is, and what it is told about us."""

    #: With a path, if the API is not at the root.
    url: str
    user: str = ""
    password: str = field(default="", repr=False)
    #: Sent as a bearer token.
    token: str = field(default="", repr=False)
    #: A file of certificates to trust, in place of the system's; it must be there on every machine.
    ca: str = ""
    #: Seconds that an answer may take.
    timeout: float = 10.0

    @staticmethod
    def of(where: str | Registry, options: Mapping[str, str] | None = None) -> Registry:
        """Read a URL, which may have a user and a password in it, and further options by the names of the fields."""
        if isinstance(where, Registry):
            return where
        parts = urlsplit(where)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PipelineError(f"the registry is a URL such as http://registry:8081, not {_without_secrets(where)!r}")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        try:
            port = f":{parts.port}" if parts.port else ""
        except ValueError as exc:
            raise PipelineError(f"the registry's URL has no such port: {exc}") from exc
        found = Registry(
            f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}",
            unquote(parts.username or ""),
            unquote(parts.password or ""),
        )
        given: dict[str, Any] = dict(options or {})
        if unknown := sorted(given.keys() - {"user", "password", "token", "ca", "timeout"}):
            raise PipelineError(f"the registry has the options user, password, token, ca and timeout, not {unknown[0]}")
        if "timeout" in given:
            try:
                given["timeout"] = float(given["timeout"])
            except ValueError as exc:
                raise PipelineError(f"the registry's timeout is in seconds, not {given['timeout']!r}") from exc
            if not 0 < given["timeout"] < float("inf"):
                raise PipelineError("the registry's timeout must be greater than 0")
        return replace(found, **given)

    def by_id(self, id: int, *, serialized: bool = False) -> Schema:
        """The schema of an id. UnknownSchemaError if there is none."""
        return self._complete(self._ask(f"/schemas/ids/{id}", serialized), serialized)

    def latest(self, subject: str, *, serialized: bool = False) -> Schema:
        """The newest schema of a subject. UnknownSchemaError if there is none."""
        path = f"/subjects/{quote(subject, safe='')}/versions/latest"
        return self._complete(self._ask(path, serialized), serialized)

    def _complete(self, answer: Mapping[str, Any], serialized: bool) -> Schema:
        """Fetch what a schema refers to, too."""
        texts: dict[str, str] = {}
        asked: set[tuple[str, int]] = set()

        def add(references: list[Mapping[str, Any]]) -> None:
            for one in references:
                key = str(one["subject"]), int(one["version"])
                if key in asked:
                    continue
                asked.add(key)
                path = f"/subjects/{quote(key[0], safe='')}/versions/{key[1]}"
                found = self._ask(path, serialized)
                add(found.get("references") or [])
                texts[str(one["name"])] = str(found["schema"])

        try:
            add(answer.get("references") or [])
            # The API leaves the type away where it is Avro.
            return Schema(str(answer.get("schemaType") or "AVRO"), (*texts.items(), ("", str(answer["schema"]))))
        except (KeyError, TypeError, ValueError) as exc:
            raise PipelineError(f"the registry {self.url} answers with something that is no schema") from exc

    def _ask(self, path: str, serialized: bool) -> Mapping[str, Any]:
        query = "?format=serialized" if serialized else ""
        for attempt in range(_ATTEMPTS):
            try:
                status, data = self._get(path + query)
            except (OSError, http.client.HTTPException) as exc:
                problem = str(exc) or type(exc).__name__
            else:
                if status == 200:
                    break
                problem = self._refused(path, status, data)
                if status not in (408, 429) and status < 500:
                    raise PipelineError(f"the registry {self.url} refuses {path}: {problem}")
            if attempt == _ATTEMPTS - 1:
                raise PipelineError(f"the registry {self.url} cannot be asked for {path}: {problem}")
            time.sleep(_FIRST_DELAY * 2**attempt)
        try:
            read = json.loads(data)
        except ValueError:
            read = None
        if not isinstance(read, dict):
            raise PipelineError(f"what {self.url} answers to {path} is no JSON object: is it a schema registry?")
        return read

    def _refused(self, path: str, status: int, data: bytes) -> str:
        """What the registry says. UnknownSchemaError if that is that it has no such thing."""
        try:
            read = json.loads(data)
        except ValueError:
            read = None
        said = read if isinstance(read, dict) else {}
        text = str(said.get("message") or http.client.responses.get(status, "")).strip()[:200]
        if status == 404 and said.get("error_code") in _UNKNOWN:
            raise UnknownSchemaError(f"the registry knows no {path}: {text}")
        return f"{status} {text}".strip()

    def _get(self, path: str) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            trusted = ssl.create_default_context(cafile=self.ca or None)
            connection = http.client.HTTPSConnection(host, parts.port, timeout=self.timeout, context=trusted)
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=self.timeout)
        headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json", "Connection": "close"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        elif self.user:
            secret = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
            headers["Authorization"] = f"Basic {secret}"
        try:
            connection.request("GET", parts.path + path, headers=headers)
            answer = connection.getresponse()
            data = answer.read(_ANSWER_BYTES + 1)
        finally:
            connection.close()
        if len(data) > _ANSWER_BYTES:
            raise OSError(f"its answer is longer than {_ANSWER_BYTES >> 20} MiB")
        return answer.status, data


def _without_secrets(url: str) -> str:
    before, at, after = url.rpartition("@")
    return f"{before.partition('://')[0]}://…@{after}" if at else url
