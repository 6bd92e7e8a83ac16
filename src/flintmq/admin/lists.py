"""Lists that are filtered, sorted and cut into pages here, so that pages need not know all rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from flintmq.errors import HttpError
from flintmq.http.arguments import Arguments

__all__ = ["by_names", "matching", "page"]

Row = Mapping[str, Any]

LIMIT = 100
MOST = 1000


def page(
    rows: Collection[Row],
    arguments: Arguments,
    *,
    names: Sequence[str],
    default: str,
    fields: Iterable[str],
    at: float,
    missing: Sequence[str] = (),
    is_ordered: bool = False,
) -> dict[str, Any]:
    """Cut what was asked for out of ``rows``.

    ``names`` are the fields that the filter looks at, and that order rows which are otherwise equal; ``default`` is how
    rows are sorted if nobody says, several fields with commas between them. ``is_ordered``: the rows are in this order
    already, and in that of ``by_names`` where it leaves a choice; with very many rows that takes most of the time.
    """
    offset = arguments.number("offset", 0)
    limit = arguments.number("limit", LIMIT, lowest=1, highest=MOST)
    matched = matching(rows, arguments, names)
    total = len(matched)
    known = set(fields)
    if not is_ordered:
        matched.sort(key=by_names(names))
    wanted = arguments.get("sort") or ("" if is_ordered else default)
    for word in reversed(wanted.split(",") if wanted else []):
        field, is_down = word.removeprefix("-"), word.startswith("-")
        if field not in known:
            raise HttpError(400, f"INVALID_SORT: there is no field {field[:80]}")
        # What is not known comes last in either direction.
        matched.sort(key=lambda row, f=field: _key(row[f]), reverse=is_down)  # type: ignore[misc]
        matched.sort(key=lambda row, f=field: row[f] is None)  # type: ignore[misc]
    return {
        "at": at * 1000,
        "total": len(rows),
        "matched": total,
        "offset": offset,
        "limit": limit,
        "items": matched[offset : offset + limit],
        "missing": list(missing),
    }


def matching(rows: Collection[Row], arguments: Arguments, names: Sequence[str]) -> list[Row]:
    """Return the rows that have every word of the filter in one of the fields ``names``."""
    words = arguments.get("filter", "").lower().split()
    if not words:
        return list(rows)
    return [
        row
        for row in rows
        if all(word in text for text in ["\n".join(str(row[name]) for name in names).lower()] for word in words)
    ]


def by_names(names: Sequence[str]) -> Callable[[Row], tuple[str, ...]]:
    """Return what orders rows that are otherwise equal."""
    return lambda row: tuple(str(row[name]) for name in names)


def _key(value: Any) -> Any:
    if value is None:
        return (0, 0, "")
    if isinstance(value, str):
        return (1, 0, value.lower())
    if isinstance(value, list):
        return (0, len(value), "")
    return (0, value, "")
