"""Options of the simulated runs, for `pytest tests/sim`: more seeds, or one of them again."""

from __future__ import annotations

import pytest
from sim_run import PROFILES

SUITE_SEEDS = 20
"""Of each profile in the suite; `make soak` runs hundreds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--soak-seeds", type=int, default=SUITE_SEEDS, help="seeds of each profile")
    group.addoption("--sim-first-seed", type=int, default=0, help="the first of them")
    group.addoption("--sim-seed", type=int, default=None, help="this seed only")
    group.addoption("--sim-profile", default=None, choices=tuple(PROFILES), help="this one only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not {"profile", "seed"} <= set(metafunc.fixturenames):
        return
    # Defaults: without tests/sim on the command line nobody knows the options.
    option = metafunc.config.getoption
    only, profile = option("--sim-seed", None), option("--sim-profile", None)
    first, count = option("--sim-first-seed", 0), option("--soak-seeds", SUITE_SEEDS)
    seeds = range(first, first + count) if only is None else [only]
    metafunc.parametrize("seed", seeds)
    metafunc.parametrize("profile", list(PROFILES) if profile is None else [profile])
