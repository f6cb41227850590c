"""The named policies and their declared settings (spec 4).

A policy is data here: name, settings with type, range and default. `ampd.core.routing` decides
by it, `queue_order` says how a prefill worker orders its queue under it, `local_rule` how a
decode worker prefills. docs/baselines.md says whose policies these are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import isfinite
from typing import Final

from ampd.core.errors import AmpdError, invalid_field
from ampd.core.fixed_chunks import LocalRule
from ampd.core.model import PolicySpec
from ampd.core.prefill_queue import FIFO, QueueOrder

SettingValue = float | int | bool | str

AMPD: Final = "ampd"
AMPD_PAPER: Final = "ampd-paper"
ALWAYS_REMOTE: Final = "always-remote"
ALWAYS_LOCAL: Final = "always-local"
CHEAPEST: Final = "cheapest"
COLOCATED: Final = "colocated"
COLOCATED_SESSION_PRIORITY: Final = "colocated-session-priority"
FIRST_REMOTE: Final = "first-remote-then-local"
THRESHOLD: Final = "threshold"

LEAST_LOADED: Final = "least-loaded"
ROUND_ROBIN: Final = "round-robin"

ITL_SAFE: Final = "itl-safe"
FIXED: Final = "fixed"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its type is that of `default`; numbers lie in [minimum, maximum], a string
    is one of `choices`."""

    name: str
    default: SettingValue
    doc: str
    minimum: float = 0.0
    maximum: float = 0.0
    choices: tuple[str, ...] = ()
    searched: tuple[SettingValue, ...] = ()
    """What one would try who tunes the policy for a workload, the default among them; empty: it
    is left alone."""

    @property
    def type_name(self) -> str:
        """`bool`, `int`, `float` or `str`."""
        return type(self.default).__name__

    def check(self, value: object) -> SettingValue:
        """The value in the setting's own type; a whole float is an int (the wire has floats
        only). Raises INVALID_FIELD `policy.settings.<name>`."""
        if isinstance(self.default, bool):
            if isinstance(value, bool):
                return value
            raise self._invalid("must be true or false")
        if isinstance(self.default, str):
            if isinstance(value, str) and value in self.choices:
                return value
            raise self._invalid(f"must be one of {', '.join(self.choices)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self._invalid("must be a number")
        if not self.minimum <= value <= self.maximum:
            raise self._invalid(f"must be from {self.minimum:g} to {self.maximum:g}")
        if isinstance(self.default, float):
            return float(value)
        if value != int(value):
            raise self._invalid("must be a whole number")
        return int(value)

    def _invalid(self, description: str) -> AmpdError:
        return invalid_field(f"policy.settings.{self.name}", description)


@dataclass(frozen=True, slots=True)
class Policy:
    """A named policy: what it does, in a line, and what can be set."""

    name: str
    doc: str
    settings: tuple[Setting, ...] = ()


WINDOW_S: Final = Setting(
    "window_s", 10.0, "length of the windowed TTFT and ITL statistics (s)", 0.1, 600.0
)


def _chunks(default: str) -> tuple[Setting, Setting]:
    """How prefills on decode workers are cut; a budget is searched where it is the default."""
    return (
        Setting(
            "chunk",
            default,
            "how a decode worker cuts its prefills: by its streams' ITL, or by a fixed budget",
            choices=(ITL_SAFE, FIXED),
        ),
        Setting(
            "chunk_tokens",
            8192,
            "the fixed budget: tokens of one step, its decodes included",
            64,
            1 << 17,
            searched=(512, 2048, 8192) if default == FIXED else (),
        ),
    )


def _kv_ttl_s(default: float, searched: tuple[float, ...] = ()) -> Setting:
    return Setting(
        "kv_ttl_s",
        default,
        "how long a paused session's KV is safe from eviction (s)",
        0.0,
        86_400.0,
        searched=searched,
    )


POLICIES: Final[Mapping[str, Policy]] = {
    policy.name: policy
    for policy in (
        Policy(
            AMPD,
            "binds late: a task waits at its home, and the first worker that can finish it on time "
            "takes it",
            (WINDOW_S,),
        ),
        Policy(
            AMPD_PAPER,
            "a prefill worker within alpha x TTFT SLO, else home within beta x ITL SLO, else "
            "the cheapest; reorders each prefill queue",
            (
                Setting(
                    "alpha",
                    0.9,
                    "share of the TTFT SLO a prefill worker may use",
                    0.0,
                    10.0,
                    searched=(0.5, 0.9),
                ),
                Setting(
                    "beta",
                    0.85,
                    "share of the ITL SLO the home may use",
                    0.0,
                    10.0,
                    searched=(0.6, 0.85),
                ),
                Setting("w", 3, "tasks at the queue's head that are reordered", 1, 6),
                *_chunks(ITL_SAFE),
                WINDOW_S,
                Setting(
                    "literal",
                    False,
                    "the paper's algorithm to the letter: random order, past windows only",
                ),
            ),
        ),
        Policy(
            ALWAYS_REMOTE,
            "every prefill on a prefill worker, first come, first served",
            (
                Setting(
                    "choice",
                    LEAST_LOADED,
                    "which prefill worker",
                    choices=(LEAST_LOADED, ROUND_ROBIN),
                ),
                WINDOW_S,
            ),
        ),
        Policy(
            ALWAYS_LOCAL,
            "every prefill on the session's home",
            (*_chunks(FIXED), WINDOW_S),
        ),
        Policy(
            COLOCATED,
            "every worker does both, rounds first come, first served; prefill workers stay idle",
            (*_chunks(FIXED), _kv_ttl_s(0.0), WINDOW_S),
        ),
        Policy(
            COLOCATED_SESSION_PRIORITY,
            "every worker does both, sessions first come, first served, their KV kept for a while; "
            "prefill workers stay idle",
            (
                *_chunks(FIXED),
                _kv_ttl_s(10.0, (2.0, 10.0, 60.0)),
                WINDOW_S,
            ),
        ),
        Policy(
            CHEAPEST,
            "wherever the predicted TTFT is smallest",
            (*_chunks(ITL_SAFE), WINDOW_S),
        ),
        Policy(
            FIRST_REMOTE,
            "a session's first prefill on the least loaded prefill worker, all others at home",
            (*_chunks(FIXED), WINDOW_S),
        ),
        Policy(
            THRESHOLD,
            "at home while little is not cached there and the home is not busy, else on the least "
            "loaded prefill worker",
            (
                Setting(
                    "tokens",
                    4096,
                    "most uncached tokens prefilled at home",
                    0,
                    1 << 20,
                    searched=(128, 512, 1024, 4096),
                ),
                Setting("ratio", 0.6, "largest share of the prompt that is uncached", 0.0, 1.0),
                Setting(
                    "busy_kv",
                    0.9,
                    "share of the home's KV memory held by running rounds above which it is busy",
                    0.0,
                    1.0,
                ),
                *_chunks(FIXED),
                WINDOW_S,
            ),
        ),
    )
}
DEFAULT_POLICY: Final = PolicySpec(AMPD)


def resolve(spec: PolicySpec) -> PolicySpec:
    """The policy with every setting present and checked.

    Raises INVALID_FIELD naming `policy.name` or `policy.settings.<name>`.
    """
    policy = POLICIES.get(spec.name)
    if policy is None:
        raise invalid_field("policy.name", f"must be one of {', '.join(sorted(POLICIES))}")
    declared = {setting.name: setting for setting in policy.settings}
    for name in spec.settings:
        if name not in declared:
            known = ", ".join(sorted(declared))
            raise invalid_field(
                f"policy.settings.{name}", f"{policy.name} has no such setting; it has {known}"
            )
    settings = {
        name: setting.check(spec.settings[name]) if name in spec.settings else setting.default
        for name, setting in declared.items()
    }
    return PolicySpec(spec.name, settings, spec.version)


def number(spec: PolicySpec, name: str) -> float:
    """A numeric setting of a resolved policy."""
    value = spec.settings[name]
    assert not isinstance(value, str)  # noqa: S101 - resolve() checked it
    return value


def is_literal(spec: PolicySpec) -> bool:
    """Whether a resolved policy is the paper's to the letter: its windows then know only what
    has completed."""
    return spec.name == AMPD_PAPER and bool(spec.settings["literal"])


def searched_settings(name: str) -> tuple[Mapping[str, SettingValue], ...]:
    """All combinations of a named policy's `searched` values, for whoever tunes it: a grid of a
    dozen points or so, one empty point for a policy without any."""
    tried = [setting for setting in POLICIES[name].settings if setting.searched]
    return tuple(
        {setting.name: value for setting, value in zip(tried, values, strict=True)}
        for values in product(*(setting.searched for setting in tried))
    )


def local_rule(spec: PolicySpec) -> LocalRule:
    """How decode workers prefill under a resolved policy, and how long they keep paused KV."""
    settings = spec.settings
    fixed = settings.get("chunk") == FIXED
    return LocalRule(
        budget_tokens=int(number(spec, "chunk_tokens")) if fixed else None,
        by_session=spec.name == COLOCATED_SESSION_PRIORITY,
        kv_ttl_s=number(spec, "kv_ttl_s") if "kv_ttl_s" in settings else None,
    )


def queue_order(spec: PolicySpec) -> QueueOrder:
    """How prefill workers order their queues under a resolved policy (spec 5)."""
    if spec.name != AMPD_PAPER:
        return FIFO
    w = int(number(spec, "w"))
    return QueueOrder(window=w, bound=w, by_arrival=is_literal(spec))
