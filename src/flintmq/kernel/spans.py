# cython: language_level=3
"""Sets of numbers as sorted ranges: two arrays of 64-bit numbers, where each begins and where it ends.

A million scattered messages are a million ranges: what goes over all of them is here.
"""

from array import array

import cython


def _room(count: cython.Py_ssize_t) -> object:
    return array("q", bytes(8 * count))


@cython.boundscheck(False)
@cython.wraparound(False)
def spans_total(starts: array, stops: array) -> int:
    """Return how many numbers there are."""
    n: cython.Py_ssize_t = _both(starts, stops)
    total: cython.longlong = 0
    i: cython.Py_ssize_t
    a: cython.longlong[::1] = starts
    b: cython.longlong[::1] = stops
    for i in range(n):
        total += b[i] - a[i]
    return total


@cython.boundscheck(False)
@cython.wraparound(False)
def spans_union(starts: array, stops: array, other_starts: array, other_stops: array) -> tuple:
    """Return what is in either set, joined where ranges touch or overlap; empty ranges are left out.

    Each set is sorted by where its ranges begin; ValueError if not.
    """
    n: cython.Py_ssize_t = _both(starts, stops)
    m: cython.Py_ssize_t = _both(other_starts, other_stops)
    i: cython.Py_ssize_t = 0
    j: cython.Py_ssize_t = 0
    k: cython.Py_ssize_t = 0
    first: cython.longlong
    stop: cython.longlong
    before: cython.longlong = 0
    begun: cython.bint = False
    a: cython.longlong[::1] = starts
    a_stops: cython.longlong[::1] = stops
    b: cython.longlong[::1] = other_starts
    b_stops: cython.longlong[::1] = other_stops
    new_starts = _room(n + m)
    new_stops = _room(n + m)
    c: cython.longlong[::1] = new_starts
    c_stops: cython.longlong[::1] = new_stops
    while i < n or j < m:
        if j >= m or (i < n and a[i] <= b[j]):
            first = a[i]
            stop = a_stops[i]
            i += 1
        else:
            first = b[j]
            stop = b_stops[j]
            j += 1
        if begun and first < before:
            raise ValueError("the ranges are not in order")
        begun = True
        before = first
        if first >= stop:
            continue
        if k and first <= c_stops[k - 1]:
            if stop > c_stops[k - 1]:
                c_stops[k - 1] = stop
            continue
        c[k] = first
        c_stops[k] = stop
        k += 1
    # An array that somebody looks at cannot shrink.
    del c, c_stops
    del new_starts[k:], new_stops[k:]
    return new_starts, new_stops


@cython.boundscheck(False)
@cython.wraparound(False)
def spans_without(starts: array, stops: array, hole_starts: array, hole_stops: array) -> tuple:
    """Return what is in the first set and not in the second. Both are sorted and have no overlaps."""
    n: cython.Py_ssize_t = _both(starts, stops)
    m: cython.Py_ssize_t = _both(hole_starts, hole_stops)
    i: cython.Py_ssize_t
    j: cython.Py_ssize_t = 0
    k: cython.Py_ssize_t = 0
    first: cython.longlong
    stop: cython.longlong
    a: cython.longlong[::1] = starts
    a_stops: cython.longlong[::1] = stops
    b: cython.longlong[::1] = hole_starts
    b_stops: cython.longlong[::1] = hole_stops
    new_starts = _room(n + m)
    new_stops = _room(n + m)
    c: cython.longlong[::1] = new_starts
    c_stops: cython.longlong[::1] = new_stops
    for i in range(n):
        first = a[i]
        stop = a_stops[i]
        while j < m and b_stops[j] <= first:
            j += 1
        while first < stop:
            if j >= m or b[j] >= stop:
                c[k] = first
                c_stops[k] = stop
                k += 1
                break
            if first < b[j]:
                c[k] = first
                c_stops[k] = b[j]
                k += 1
            first = b_stops[j]
            if first < stop:
                # The hole ends in this range: the next one may begin here too.
                j += 1
    del c, c_stops
    del new_starts[k:], new_stops[k:]
    return new_starts, new_stops


@cython.boundscheck(False)
@cython.wraparound(False)
def spans_of(seqs: array) -> tuple:
    """Return the ranges of ascending numbers; ValueError if one is not greater than the one before it."""
    n: cython.Py_ssize_t = len(seqs)
    i: cython.Py_ssize_t
    k: cython.Py_ssize_t = 0
    a: cython.longlong[::1] = seqs
    new_starts = _room(n)
    new_stops = _room(n)
    c: cython.longlong[::1] = new_starts
    c_stops: cython.longlong[::1] = new_stops
    for i in range(n):
        if k and a[i] <= c_stops[k - 1]:
            if a[i] < c_stops[k - 1]:
                raise ValueError("the numbers are not in order")
            c_stops[k - 1] = a[i] + 1
            continue
        c[k] = a[i]
        c_stops[k] = a[i] + 1
        k += 1
    del c, c_stops
    del new_starts[k:], new_stops[k:]
    return new_starts, new_stops


@cython.boundscheck(False)
@cython.wraparound(False)
def spans_hold(starts: array, stops: array, seqs: array) -> bytearray:
    """Return a byte for each of the ascending numbers: 1 if it is in the set."""
    n: cython.Py_ssize_t = _both(starts, stops)
    m: cython.Py_ssize_t = len(seqs)
    i: cython.Py_ssize_t
    j: cython.Py_ssize_t = 0
    a: cython.longlong[::1] = starts
    b: cython.longlong[::1] = stops
    s: cython.longlong[::1] = seqs
    mask: bytearray = bytearray(m)
    for i in range(m):
        while j < n and b[j] <= s[i]:
            j += 1
        if j < n and a[j] <= s[i]:
            mask[i] = 1
    return mask


def _both(starts: array, stops: array) -> int:
    if len(starts) != len(stops):
        raise ValueError("as many ends as beginnings are needed")
    return len(starts)
