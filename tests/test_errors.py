"""Errors cross processes: a pool's worker that raises one must not take the pool down."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from flintmq import errors

#: Those whose constructors take more than a text.
SPECIAL: dict[type[Any], Any] = {
    errors.ProtocolError: lambda: errors.ProtocolError("E_X", "text", fatal=False),
    errors.PublishError: lambda: errors.PublishError("x", code="E_X", retriable=False),
    errors.ClusterError: lambda: errors.ClusterError("x", {"a": "b"}),
    errors.HttpError: lambda: errors.HttpError(404, "TOPIC_NOT_FOUND", topic="t"),
    errors.StageError: lambda: errors.StageError(409, "E_STAGE_FENCED", "by another"),
    errors.DataLossError: lambda: errors.DataLossError("x", topic="t", node="n"),
    errors.DamageError: lambda: errors.DamageError("x", 5, 7),
}
KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.FlintError)]


class OfAnotherModule(errors.HttpError):
    def __init__(self, where: str) -> None:
        self.where = where
        super().__init__(503, "DOWN")


@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", [*KINDS, OfAnotherModule])
def test_an_error_is_the_same_after_a_journey(kind: type[Any], copied: Any) -> None:
    error = SPECIAL.get(kind, lambda: kind("text"))()
    error.add_note("a note")
    again = copied(error)
    assert type(again) is kind
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    assert again.retriable == error.retriable
