"""Every case of lifecycle.yaml is a scenario here, or a check of both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from bodies import SCENARIOS
from engine_contract import CHECKS

CASES: Final = {
    case["id"]: case
    for case in yaml.safe_load(Path(__file__).with_name("lifecycle.yaml").read_text())
}
VLLM_TESTS: Final = (Path(__file__).parents[1] / "e2e", Path(__file__).parents[1] / "engine")


AT_ANOTHER_LEVEL: Final = {
    # A client has no handle in its hands: the contract of both engines.
    "bad-kv-handles": "check_bad_handles_never_give_other_tokens",
}
"""Cases that are no scenario, and the check of tests/engine/engine_contract.py instead."""


@pytest.mark.parametrize("case_id", CASES)
def test_every_case_has_a_scenario(case_id: str) -> None:
    covered = {case for scenario in SCENARIOS.values() for case in scenario.cases}
    if case_id in AT_ANOTHER_LEVEL:
        assert AT_ANOTHER_LEVEL[case_id] in {check.__name__ for check in CHECKS}
        assert case_id not in covered
    else:
        assert case_id in covered


@pytest.mark.parametrize("case_id", [i for i, case in CASES.items() if case.get("engine")])
def test_cases_of_the_real_engine_are_tests_there(case_id: str) -> None:
    files = [path.read_text() for folder in VLLM_TESTS for path in folder.glob("*.py")]
    assert any(f'pytest.mark.case("{case_id}")' in text for text in files)


def test_no_scenario_names_an_unknown_case() -> None:
    named: set[Any] = {case for scenario in SCENARIOS.values() for case in scenario.cases}
    assert named <= set(CASES)
