"""The list of scenarios: each registers itself with what it needs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from driver import Ability, Shape
from scene import Scene

Body = Callable[[Scene], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A body, the cluster that it runs on, and what its driver must be able to do."""

    name: str
    body: Body
    shape: Shape
    needs: frozenset[Ability]
    cases: tuple[str, ...] = ()
    """ids of lifecycle.yaml."""
    real: bool = False
    """Whether it is worth real processes, which start and restart slowly: it has to do with
    their lives, or with what lies between them."""


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    shape: Shape | None = None,
    *,
    needs: frozenset[Ability] | set[Ability] = frozenset(),
    cases: tuple[str, ...] = (),
    real: bool = False,
) -> Callable[[Body], Body]:
    """Register the body under its name."""

    def register(body: Body) -> Body:
        name = body.__name__
        assert name not in SCENARIOS, name
        SCENARIOS[name] = Scenario(name, body, shape or Shape(), frozenset(needs), cases, real)
        return body

    return register
