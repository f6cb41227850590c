import pytest

from ampd.core.errors import AmpdError, ErrorReason
from ampd.core.model import PolicySpec
from ampd.core.policies import DEFAULT_POLICY, POLICIES, SettingValue, queue_order, resolve
from ampd.core.prefill_queue import FIFO, QueueOrder


def test_defaults_are_those_of_the_spec() -> None:
    assert resolve(PolicySpec("ampd-paper", version=7)) == PolicySpec(
        "ampd-paper",
        {"alpha": 0.9, "beta": 0.85, "w": 3, "window_s": 10.0, "literal": False},
        7,
    )
    assert resolve(PolicySpec("always-remote")).settings["choice"] == "least-loaded"
    assert DEFAULT_POLICY.name in POLICIES


def test_every_setting_is_documented_and_its_default_is_valid() -> None:
    for policy in POLICIES.values():
        assert policy.doc
        for setting in policy.settings:
            assert setting.doc
            assert setting.check(setting.default) == setting.default
            assert setting.type_name in {"bool", "int", "float", "str"}


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
    ],
)
def test_a_wrong_setting_is_named(policy: str, name: str, value: SettingValue) -> None:
    with pytest.raises(AmpdError) as caught:
        resolve(PolicySpec(policy, {name: value}))
    assert caught.value.reason is ErrorReason.INVALID_FIELD
    assert [v.field for v in caught.value.violations] == [f"policy.settings.{name}"]


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(AmpdError, match="always-local, always-remote, ampd-paper") as caught:
        resolve(PolicySpec("nonesuch"))
    assert caught.value.violations[0].field == "policy.name"


def test_queue_orders() -> None:
    def order(name: str, **settings: SettingValue) -> QueueOrder:
        return queue_order(resolve(PolicySpec(name, settings)))

    assert order("always-remote") == order("always-local") == FIFO
    assert order("ampd-paper", w=4) == QueueOrder(window=4, bound=4)
    assert order("ampd-paper", literal=True) == QueueOrder(window=3, bound=3, by_arrival=True)
