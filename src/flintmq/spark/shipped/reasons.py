"""Errors of object stores in one line that says why, without what may be secret."""

from __future__ import annotations

import re

__all__ = ["reason"]

#: deltalake puts each cause on a line of its own behind this sign.
CAUSE = "↳"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_REQUEST = re.compile(r"Error performing [A-Z]+ \S+")
_STATUS = re.compile(r"[1-5]\d\d [A-Z].*")
_ANSWER = re.compile(r"<(Code|Message)>([^<]*)</")


def reason(exc: BaseException | str) -> str:
    """Return the first line of an error; of a store's also the request, its status, and the innermost cause.

    Of a store's answer only code and message are told, and no query of a URL, which may hold a signature.
    """
    lines = [line.strip() for line in _COLOUR.sub("", str(exc)).splitlines() if line.strip()]
    if not lines:
        return type(exc).__name__
    causes = []
    for line in lines[1:]:
        if not line.startswith(CAUSE):
            break
        causes.append(line.removeprefix(CAUSE).strip())
    told = [lines[0]]
    if causes:
        told += [found[0] for cause in causes if (found := _REQUEST.search(cause))]
        told += [cause for cause in causes if _STATUS.fullmatch(cause)]
        if answer := ": ".join(text for _, text in _ANSWER.findall(causes[-1]) if text):
            told.append(answer)
        elif not causes[-1].startswith("<") and causes[-1] not in told and not _REQUEST.search(causes[-1]):
            told.append(causes[-1])
    return ": ".join(re.sub(r"(://[^\s?]*)\?\S*", r"\1", part) for part in told)
