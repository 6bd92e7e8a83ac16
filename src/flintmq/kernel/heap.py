# cython: language_level=3
"""Deadlines: a heap packed in arrays."""

from array import array

import cython


@cython.cclass
class Heap:
    """Pairs of (due, seq), the earliest due first, packed in arrays: 16 bytes each, a million take 16 MB."""

    _due = cython.declare(object)
    _seq = cython.declare(object)

    def __init__(self):
        self._due = array("q")
        self._seq = array("q")

    def __len__(self) -> int:
        return len(self._due)

    def clear(self) -> None:
        self._due = array("q")
        self._seq = array("q")

    def first_due(self) -> int:
        """When the earliest is due; raises IndexError if there is none."""
        return self._due[0]

    def columns(self) -> tuple:
        """Copies of all due times and of their seqs, in no order."""
        return self._due[:], self._seq[:]

    def first_seq(self, start: cython.longlong = 0) -> int:
        """The lowest seq from ``start`` on; -1 if there is none."""
        low: cython.longlong = -1
        seq: cython.longlong
        i: cython.Py_ssize_t
        seqs: cython.longlong[::1] = self._seq
        for i in range(len(self._seq)):
            seq = seqs[i]
            if seq >= start and (seq < low or low < 0):
                low = seq
        return low

    def count_between(self, first: cython.longlong, stop: cython.longlong) -> int:
        """How many seqs of ``first`` … ``stop - 1`` there are."""
        n: cython.Py_ssize_t = 0
        i: cython.Py_ssize_t
        seqs: cython.longlong[::1] = self._seq
        for i in range(len(self._seq)):
            if first <= seqs[i] and seqs[i] < stop:
                n += 1
        return n

    def between(self, first: cython.longlong, stop: cython.longlong) -> list:
        """Their pairs, in no order."""
        i: cython.Py_ssize_t
        dues: cython.longlong[::1] = self._due
        seqs: cython.longlong[::1] = self._seq
        found: list = []
        for i in range(len(self._seq)):
            if first <= seqs[i] and seqs[i] < stop:
                found.append((dues[i], seqs[i]))  # noqa: PERF401  # Cython makes no comprehension over views
        return found

    def earliest(self, count: cython.Py_ssize_t, due: cython.longlong, seq: cython.longlong) -> list:
        """The ``count`` earliest pairs after ``(due, seq)``, in order."""
        i: cython.Py_ssize_t
        dues: cython.longlong[::1] = self._due
        seqs: cython.longlong[::1] = self._seq
        found: list = []
        # Beyond this one nothing is wanted any more, because there are enough before it.
        last: cython.longlong = (1 << 63) - 1
        for i in range(len(self._seq)):
            if dues[i] > last or dues[i] < due or (dues[i] == due and seqs[i] <= seq):
                continue
            found.append((dues[i], seqs[i]))
            if len(found) >= 2 * count + 64:
                found.sort()
                del found[count:]
                if found:
                    last = found[-1][0]
        found.sort()
        return found[:count]

    def remove(self, seq: cython.longlong) -> int:
        """Take this seq out, wherever it stands; when it was due, or -1 if it is not there."""
        i: cython.Py_ssize_t
        at: cython.Py_ssize_t = -1
        dues: cython.longlong[::1] = self._due
        seqs: cython.longlong[::1] = self._seq
        for i in range(len(self._seq)):
            if seqs[i] == seq:
                at = i
                break
        if at < 0:
            return -1
        found: cython.longlong = dues[at]
        # It becomes the earliest of all, and goes first.
        while at > 0:
            i = (at - 1) >> 1
            dues[at] = dues[i]
            seqs[at] = seqs[i]
            at = i
        # An array that somebody looks at cannot shrink.
        del dues, seqs
        self.pop()
        return found

    @cython.ccall
    def push(self, due: cython.longlong, seq: cython.longlong) -> cython.int:
        i: cython.Py_ssize_t
        parent: cython.Py_ssize_t
        self._due.append(due)
        self._seq.append(seq)
        i = len(self._due) - 1
        if cython.compiled:
            d: cython.longlong[::1] = self._due
            s: cython.longlong[::1] = self._seq
            while i > 0:
                parent = (i - 1) >> 1
                if d[parent] < due or (d[parent] == due and s[parent] <= seq):
                    break
                d[i] = d[parent]
                s[i] = s[parent]
                i = parent
            d[i] = due
            s[i] = seq
        else:
            dues = self._due
            seqs = self._seq
            while i > 0:
                parent = (i - 1) >> 1
                if dues[parent] < due or (dues[parent] == due and seqs[parent] <= seq):
                    break
                dues[i] = dues[parent]
                seqs[i] = seqs[parent]
                i = parent
            dues[i] = due
            seqs[i] = seq
        return 0

    def extend(self, dues: array, seqs: array) -> None:
        """Push many pairs: two arrays of 64-bit numbers, equally long. One by one costs ten times as much."""
        if len(dues) != len(seqs):
            raise ValueError("extend: as many seqs as due times are needed")
        i: cython.Py_ssize_t = len(self._due)
        n: cython.Py_ssize_t
        parent: cython.Py_ssize_t
        at: cython.Py_ssize_t
        due: cython.longlong
        seq: cython.longlong
        self._due.extend(dues)
        self._seq.extend(seqs)
        n = len(self._due)
        d: cython.longlong[::1] = self._due
        s: cython.longlong[::1] = self._seq
        while i < n:
            due = d[i]
            seq = s[i]
            at = i
            while at > 0:
                parent = (at - 1) >> 1
                if d[parent] < due or (d[parent] == due and s[parent] <= seq):
                    break
                d[at] = d[parent]
                s[at] = s[parent]
                at = parent
            d[at] = due
            s[at] = seq
            i += 1

    @cython.ccall
    def pop(self) -> cython.longlong:
        """Take the earliest out; its seq."""
        dues = self._due
        seqs = self._seq
        first: cython.longlong = seqs[0]
        due: cython.longlong = dues.pop()
        seq: cython.longlong = seqs.pop()
        n: cython.Py_ssize_t = len(dues)
        i: cython.Py_ssize_t = 0
        child: cython.Py_ssize_t
        if n == 0:
            return first
        if cython.compiled:
            d: cython.longlong[::1] = dues
            s: cython.longlong[::1] = seqs
            while True:
                child = 2 * i + 1
                if child >= n:
                    break
                if child + 1 < n and (
                    d[child + 1] < d[child] or (d[child + 1] == d[child] and s[child + 1] < s[child])
                ):
                    child += 1
                if due < d[child] or (due == d[child] and seq <= s[child]):
                    break
                d[i] = d[child]
                s[i] = s[child]
                i = child
            d[i] = due
            s[i] = seq
        else:
            while True:
                child = 2 * i + 1
                if child >= n:
                    break
                if child + 1 < n and (dues[child + 1], seqs[child + 1]) < (dues[child], seqs[child]):
                    child += 1
                if (due, seq) <= (dues[child], seqs[child]):
                    break
                dues[i] = dues[child]
                seqs[i] = seqs[child]
                i = child
            dues[i] = due
            seqs[i] = seq
        return first
