import pytest

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.fixed_chunks import ITL_SAFE_RULE, LocalRule
from ampd.core.model import PolicySpec
from ampd.core.policies import (
    DEFAULT_POLICY,
    POLICIES,
    SettingValue,
    local_rule,
    queue_order,
    resolve,
    searched_settings,
)
from ampd.core.prefill_queue import FIFO, QueueOrder


def test_defaults_are_those_of_the_spec() -> None:
    assert resolve(PolicySpec("ampd-paper", version=7)) == PolicySpec(
        "ampd-paper",
        {
            "alpha": 0.9,
            "beta": 0.85,
            "w": 3,
            "chunk": "itl-safe",
            "chunk_tokens": 8192,
            "window_s": 10.0,
            "literal": False,
        },
        7,
    )
    assert resolve(PolicySpec("always-remote")).settings["choice"] == "least-loaded"
    assert DEFAULT_POLICY.name == "ampd"


def test_every_setting_is_documented_and_its_default_is_valid() -> None:
    for policy in POLICIES.values():
        assert policy.doc
        for setting in policy.settings:
            assert setting.doc
            assert setting.check(setting.default) == setting.default
            assert setting.type_name in {"bool", "int", "float", "str"}
            assert not setting.searched or setting.default in setting.searched
            assert [setting.check(value) for value in setting.searched] == list(setting.searched)


def test_numbers_come_as_floats_from_the_wire() -> None:
    settings = resolve(PolicySpec("ampd-paper", {"w": 2.0, "alpha": 1})).settings
    assert (settings["w"], settings["alpha"]) == (2, 1.0)
    assert isinstance(settings["w"], int)
    assert isinstance(settings["alpha"], float)


@pytest.mark.parametrize(
    ("policy", "name", "value"),
    [
        ("ampd-paper", "alpha", -0.1),
        ("ampd-paper", "alpha", 10.1),
        ("ampd-paper", "beta", float("nan")),
        ("ampd-paper", "beta", True),
        ("ampd-paper", "w", 0),
        ("ampd-paper", "w", 2.5),
        ("ampd-paper", "w", "3"),
        ("ampd-paper", "window_s", 0.0),
        ("ampd-paper", "literal", 1),
        ("ampd-paper", "choice", "least-loaded"),
        ("always-remote", "choice", "random"),
        ("always-remote", "choice", 1.0),
        ("always-local", "alpha", 0.9),
        ("threshold", "tokens", 0.5),
        ("threshold", "ratio", 1.1),
        ("threshold", "chunk", "whole"),
        ("colocated", "chunk_tokens", 63),
        ("colocated", "kv_ttl_s", -1.0),
        ("always-local", "kv_ttl_s", 1.0),
    ],
)
def test_a_wrong_setting_is_named(policy: str, name: str, value: SettingValue) -> None:
    with pytest.raises(AmpdError) as caught:
        resolve(PolicySpec(policy, {name: value}))
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    assert [v.field for v in caught.value.violations] == [f"policy.settings.{name}"]


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(AmpdError, match="always-local, always-remote, ampd, ampd-paper") as caught:
        resolve(PolicySpec("nonesuch"))
    assert caught.value.violations[0].field == "policy.name"


def test_local_rules() -> None:
    def rule(name: str, **settings: SettingValue) -> LocalRule:
        return local_rule(resolve(PolicySpec(name, settings)))

    for ours in ("ampd", "ampd-paper", "cheapest", "always-remote"):
        assert rule(ours) == ITL_SAFE_RULE
    for vllm in ("always-local", "threshold", "first-remote-then-local"):
        assert rule(vllm, chunk_tokens=2048) == LocalRule(budget_tokens=2048)
        assert rule(vllm, chunk="itl-safe") == ITL_SAFE_RULE
    assert rule("colocated") == LocalRule(budget_tokens=8192, kv_ttl_s=0.0)
    assert rule("colocated-session-priority", kv_ttl_s=3.0) == LocalRule(
        budget_tokens=8192, by_session=True, kv_ttl_s=3.0
    )


def test_what_is_searched_is_every_combination() -> None:
    assert searched_settings("ampd") == ({},)
    grid = searched_settings("threshold")
    assert len(grid) == 12
    assert {"tokens": 128, "chunk_tokens": 512} in grid
    for name in POLICIES:
        for settings in searched_settings(name):
            resolve(PolicySpec(name, settings))


def test_queue_orders() -> None:
    def order(name: str, **settings: SettingValue) -> QueueOrder:
        return queue_order(resolve(PolicySpec(name, settings)))

    assert order("always-remote") == order("always-local") == FIFO
    assert order("ampd-paper", w=4) == QueueOrder(window=4, bound=4)
    assert order("ampd-paper", literal=True) == QueueOrder(window=3, bound=3, by_arrival=True)
