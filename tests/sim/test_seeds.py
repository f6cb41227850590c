"""Seeds of a simulated cluster: whatever the faults, the promises of docs/reliability.md hold.

pytest tests/sim                                         the suite's seeds
pytest tests/sim --sim-profile store --sim-seed 17       one of them again
make soak                                                thousands
"""

from __future__ import annotations

import pytest
from sim_run import run_seed


def test_promises_hold(profile: str, seed: int) -> None:
    outcome = run_seed(seed, profile)
    if outcome.violations:
        pytest.fail(outcome.report(), pytrace=False)
    assert outcome.rounds > 0


def test_a_seed_is_one_run() -> None:
    first, second = run_seed(1, "everything"), run_seed(1, "everything")
    assert (first.digest, first.log) == (second.digest, second.log)
    assert run_seed(2, "everything").digest != first.digest
