"""Cells and contenders: what the benchmark compares."""

from __future__ import annotations

import pytest

from ampd.bench.policies.cells import QWEN, cells, chosen_cells
from ampd.bench.policies.contenders import chosen_contenders, contenders
from ampd.core.errors import AmpdError
from ampd.core.model import PolicySpec
from ampd.core.policies import POLICIES, resolve
from ampd.profiling.catalogue import open_profile
from ampd.profiling.memory import kv_capacity_tokens


def test_the_twelve_cells_and_the_agents() -> None:
    found = cells()
    assert len(found) == 13
    assert {(cell.workload, cell.gpus) for cell in found if cell.gpu == "h20"} == {
        ("ToolBench", 8),
        ("HotpotQA", 8),
        ("DuReader", 16),
        ("GAIA", 32),
    }
    agents = found[-1]
    assert (agents.model, agents.gpu, agents.gpus) == (QWEN, "h200_sxm", 16)
    for cell in found:
        assert cell.workers >= 4
        assert (kv_capacity_tokens(open_profile(cell.profile)) or 0) > 50_000


def test_horizons() -> None:
    toolbench, agents = cells()[0], cells()[-1]
    assert (toolbench.span(300).warm_up_s, toolbench.span(300).end_s) == (60, 360)
    assert (agents.span(300).warm_up_s, agents.span(300).end_s) == (60, 3060)
    assert (toolbench.span(8).warm_up_s, toolbench.span(8).end_s) == (15, 23)


def test_cells_are_chosen_by_model_workload_or_both() -> None:
    assert len(chosen_cells(())) == 13
    assert [c.name for c in chosen_cells((f"{QWEN}/GAIA",))] == [f"{QWEN}/GAIA"]
    assert len(chosen_cells(("GAIA",))) == 3
    assert len(chosen_cells((QWEN,))) == 5
    with pytest.raises(AmpdError, match="Toolbench is none of"):
        chosen_cells(("GAIA", "Toolbench"))


def test_every_policy_is_there_with_settings_that_it_has() -> None:
    found = contenders()
    assert {c.policy for c in found} == set(POLICIES)
    for contender in found:
        for settings in (contender.settings, *contender.tunings):
            resolve(PolicySpec(contender.policy, dict(settings)))
    with pytest.raises(AmpdError, match="policies"):
        chosen_contenders(("ampd", "nobody"))
