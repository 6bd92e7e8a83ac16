"""What the interpreted kernel needs of the ``cython`` module, so that Cython is no run-time dependency.

The kernel's hot branches for the compiler stand under ``if cython.compiled:``; what is left for Python to
see are annotations, decorators and a few declarations, and these do nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


class _Type:
    """Stands for every C type; ``uint[::1]`` is one too."""

    def __getitem__(self, _: object) -> _Type:
        return self


compiled = False
uint = uchar = p_uchar = p_uint = p_longlong = Py_ssize_t = longlong = ulonglong = bint = double = void = _Type()
int = _Type()


def _same(function: _F) -> _F:
    return function


cfunc = inline = ccall = cclass = final = nogil = _same


def declare(_type: object = None, value: object = None, visibility: str = "") -> object:
    return value


def exceptval(*_args: object, **_kwargs: object) -> Callable[[_F], _F]:
    return _same


def boundscheck(_on: bool) -> Callable[[_F], _F]:
    return _same


wraparound = cdivision = initializedcheck = boundscheck
