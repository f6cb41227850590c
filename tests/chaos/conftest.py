"""Options of `make chaos`; without them the run is a short one."""

from __future__ import annotations

import pytest

SUITE_SECONDS = 12.0
"""Of faults; starting, ending and coming back take as long again."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--chaos-engine", default="emulated", choices=("emulated", "vllm"))
    group.addoption("--chaos-seconds", type=float, default=SUITE_SECONDS, help="of faults")
    group.addoption("--chaos-seed", type=int, default=None, help="default: another one each time")
    group.addoption("--chaos-report", default="", help="where to write the report (JSON)")
