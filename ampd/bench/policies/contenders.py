"""Who is compared: every named policy, some of them in a second form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ampd.core.errors import invalid_field
from ampd.core.model import PolicySpec
from ampd.core.policies import (
    ALWAYS_LOCAL,
    ALWAYS_REMOTE,
    AMPD,
    AMPD_PAPER,
    FIRST_REMOTE,
    LEAST_LOADED,
    POLICIES,
    ROUND_ROBIN,
    SettingValue,
    resolve,
    searched_settings,
)

Settings = tuple[tuple[str, SettingValue], ...]
"""Of a policy, sorted by name; what is not in it has its default."""

COLOCATED_PREFIX: Final = "colocated"
"""Of the policies under which every worker does both: their one layout has decode workers only."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with settings. `tunings`: further settings that its search tries, as one would
    who deploys it."""

    name: str
    policy: str
    settings: Settings = ()
    tunings: tuple[Settings, ...] = ()

    @property
    def colocated(self) -> bool:
        """Whether every worker does both."""
        return self.policy.startswith(COLOCATED_PREFIX)

    @property
    def decodes_only(self) -> bool:
        """Whether prefill workers are of no use to it: its best layout has none."""
        return self.colocated or self.policy == ALWAYS_LOCAL

    @property
    def least_prefill(self) -> int:
        """The fewest prefill workers it can do with."""
        return int(self.policy in (ALWAYS_REMOTE, FIRST_REMOTE))


REFERENCE: Final = Contender(ALWAYS_REMOTE, ALWAYS_REMOTE, (("choice", LEAST_LOADED),))
"""Its saturation is the unit of all rates."""
_FORMS: Final = (
    Contender(f"{ALWAYS_REMOTE}[{ROUND_ROBIN}]", ALWAYS_REMOTE, (("choice", ROUND_ROBIN),)),
    Contender(f"{AMPD_PAPER}[literal]", AMPD_PAPER, (("literal", True),)),
)
"""Policies in their second form: what they are known for elsewhere."""


def contenders() -> tuple[Contender, ...]:
    """All of them: `ampd` first where there is one."""
    named = [
        REFERENCE if name == ALWAYS_REMOTE else Contender(name, name, (), _tunings(name))
        for name in POLICIES
    ]
    return (*named, *_FORMS)


def _tunings(name: str) -> tuple[Settings, ...]:
    """What the policy says is worth a search, but for its defaults."""
    defaults = resolve(PolicySpec(name)).settings
    return tuple(
        tuple(sorted(settings.items()))
        for settings in searched_settings(name)
        if any(defaults[key] != value for key, value in settings.items())
    )


def policy_names() -> tuple[str, ...]:
    """One contender of each policy."""
    return tuple(POLICIES)


def chosen_contenders(names: tuple[str, ...]) -> tuple[Contender, ...]:
    """Those of the names, in the order of `contenders`; all without names. INVALID_FIELD for a
    name that is none."""
    known = {contender.name: contender for contender in contenders()}
    for name in names:
        if name not in known:
            raise invalid_field("policies", f"{name} is none of {', '.join(known)}")
    return tuple(c for c in known.values() if not names or c.name in names)


def is_ours(name: str) -> bool:
    """Whether a contender is the one that all others are baselines of."""
    return name == AMPD
