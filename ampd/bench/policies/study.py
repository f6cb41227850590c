"""The study of one cell: its unit of rates, every contender's layout, the grid, and what else the
figures need. A pure plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from ampd.bench.policies.cells import Cell, Span
from ampd.bench.policies.contenders import REFERENCE, Contender, Settings
from ampd.bench.policies.goodput import Goodput, find_goodput
from ampd.bench.policies.plans import Plan, together
from ampd.bench.policies.runs import UNDISTURBED, Disturbance, Outcome, Run, rounded_rate
from ampd.bench.policies.search import Score, best_split, find_crossing
from ampd.core.policies import ALWAYS_REMOTE, AMPD, AMPD_PAPER
from ampd.profiling.catalogue import open_profile
from ampd.sim.workload import DrawnWorkload, open_workload

RATES: Final = (0.5, 0.8, 0.95, 1.0, 1.05, 1.2)
"""In r50 of the cell."""
HALF: Final = 0.5
"""r50: where the reference attains so much, by session-mean."""
SEARCH_SHARE: Final = 1 / 4
LEAST_SEARCH_S: Final = 15.0
"""Of the counted time: what a search's run has, and no less seconds."""
SEARCH_RATES: Final = (0.85, 1.2)
"""In r50: a layout is best if its session-mean attainment is, on average over these. A cluster
has one layout, whatever its load."""
COARSE, FINE = 0.08, 0.02
"""How closely r50 is found, to compare layouts and in the end."""
COARSE_STEP, FINE_STEP = 1.3, 1.08

DISTURBANCES: Final[Mapping[str, Disturbance]] = {
    "none": UNDISTURBED,
    "costs 30 % wrong": Disturbance(slowdown=1.3),
    "noise": Disturbance(noise=0.3),
    "state 200 ms old": Disturbance(heartbeat_s=0.4),
    "one prefill worker half as fast": Disturbance(slow_prefill=2.0),
    "one decode worker half as fast": Disturbance(slow_decode=2.0),
    "all, slow prefill worker": Disturbance(1.3, slow_prefill=2.0, noise=0.3, heartbeat_s=0.4),
    "all, slow decode worker": Disturbance(1.3, slow_decode=2.0, noise=0.3, heartbeat_s=0.4),
}
"""A heartbeat every 0.4 s makes state 0.2 s old on average. Wrong costs: all work takes 1.3 times
what is published."""
ROBUSTNESS_OF: Final = (AMPD, AMPD_PAPER, ALWAYS_REMOTE)
"""Contenders that are disturbed."""
ABLATION: Final[Mapping[str, tuple[str, Settings]]] = {
    "ampd-paper": (AMPD_PAPER, ()),
    "no reordering": (AMPD_PAPER, (("w", 1),)),
    "no adaptive routing": (AMPD_PAPER, (("alpha", 10.0),)),
    "neither": (ALWAYS_REMOTE, ()),
}
"""Of the paper's policy. An alpha of 10 sends all to the least loaded prefill worker."""
SENSITIVITY: Final[Mapping[str, tuple[float, ...]]] = {
    "w": (1, 2, 3, 4, 5, 6),
    "alpha": (0.3, 0.5, 0.7, 0.9, 1.2),
    "beta": (0.3, 0.5, 0.7, 0.85, 1.0),
}


class Layout(StrEnum):
    """Whose layout a run has."""

    BALANCED = "balanced"
    """All policies' the same."""
    OWN = "own"
    """The best one of each, with the best of its tunings."""


class Part(StrEnum):
    """What a run is for."""

    GRID = "grid"
    ABLATION = "ablation"
    SENSITIVITY = "sensitivity"
    ROBUSTNESS = "robustness"


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is run. `rates` are in r50, `counted_s` as in `Cell.span`."""

    rates: tuple[float, ...] = RATES
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    counted_s: float = 300.0
    parts: tuple[Part, ...] = tuple(Part)
    part_rate: float = 1.0
    """In r50, of all parts but the grid."""


@dataclass(frozen=True, slots=True)
class Series:
    """One contender at one rate: an outcome for every seed of the scope."""

    part: Part
    contender: str
    """Of the ablation: what was left out; of the sensitivity: the setting and its value."""
    layout: Layout
    disturbance: str
    factor: float
    """The rate in r50."""
    run: Run
    """Of the first seed."""
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A contender's place in the comparison: how many workers prefill, under which settings, and
    its goodput there. Without a grid there is none."""

    contender: str
    layout: Layout
    prefill: int
    decode: int
    settings: Settings
    goodput: Goodput | None


@dataclass(frozen=True, slots=True)
class Study:
    """All of a cell. `r50` in sessions a second, found on `r50_prefill` prefill workers."""

    cell: Cell
    span: Span
    r50: float
    r50_prefill: int
    places: tuple[Place, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class _Site:
    """A contender on a layout."""

    contender: Contender
    layout: Layout
    prefill: int
    settings: Settings


def study(cell: Cell, contenders: Sequence[Contender], scope: Scope) -> Plan[Study]:
    """Everything about a cell that the scope asks for."""
    bench = _Bench(cell, scope)
    r50, r50_prefill = yield from bench.find_r50()
    own = yield from together([bench.best_site(c, r50) for c in contenders])
    balanced = [
        _Site(c, Layout.BALANCED, 0 if c.colocated else cell.balanced, c.settings)
        for c in contenders
    ]
    sites = [*balanced, *own]
    series: list[Series] = []
    goodputs: list[Goodput | None] = [None] * len(sites)
    if Part.GRID in scope.parts:
        series += yield from bench.series(
            [bench.entry(site, factor, r50) for site in sites for factor in scope.rates]
        )
        found = yield from together([bench.goodput(site, series) for site in sites])
        goodputs = list(found)
    series += yield from bench.series(bench.further_entries(sites, r50))
    places = [
        Place(
            site.contender.name,
            site.layout,
            site.prefill,
            cell.workers - site.prefill,
            site.settings,
            goodput,
        )
        for site, goodput in zip(sites, goodputs, strict=True)
    ]
    return Study(cell, bench.span, r50, r50_prefill, tuple(places), tuple(series))


class _Bench:
    """The runs of one cell."""

    def __init__(self, cell: Cell, scope: Scope) -> None:
        self.cell = cell
        self.span = cell.span(scope.counted_s)
        self._short = cell.span(max(LEAST_SEARCH_S, scope.counted_s * SEARCH_SHARE))
        self._scope = scope

    def run(
        self, policy: str, settings: Settings, prefill: int, rate: float, span: Span, seed: int
    ) -> Run:
        """A run in this cell."""
        return Run(
            profile=self.cell.profile,
            workload=self.cell.workload,
            prefill=prefill,
            decode=self.cell.workers - prefill,
            policy=policy,
            settings=tuple(sorted(settings)),
            rate=rounded_rate(rate),
            seed=seed,
            warm_up_s=span.warm_up_s,
            end_s=span.end_s,
        )

    # --- the unit of rates -------------------------------------------------------------------

    def find_r50(self) -> Plan[tuple[float, int]]:
        """Where the reference on its best layout attains a half, and that layout."""
        capacities: dict[int, float] = {}

        def evaluate(splits: Sequence[int]) -> Plan[Mapping[int, Score]]:
            found = yield from together(
                [
                    self._r50_on(
                        split,
                        self._short,
                        max(capacities.values(), default=self._guess(split)),
                        COARSE_STEP,
                        COARSE,
                    )
                    for split in splits
                ]
            )
            capacities.update(zip(splits, found, strict=True))
            return {split: (capacities[split],) for split in splits}

        least = REFERENCE.least_prefill
        prefill = yield from best_split(evaluate, workers=self.cell.workers, least=least)
        r50 = yield from self._r50_on(prefill, self.span, capacities[prefill], FINE_STEP, FINE)
        return r50, prefill

    def _r50_on(
        self, prefill: int, span: Span, guess: float, step: float, tolerance: float
    ) -> Plan[float]:
        seed = self._scope.seeds[0]

        def share_at(rate: float) -> Plan[float]:
            run = self.run(REFERENCE.policy, REFERENCE.settings, prefill, rate, span, seed)
            (outcome,) = yield [run]
            return outcome.attainment.session_mean

        rate = yield from find_crossing(
            share_at, level=HALF, guess=guess, step=step, tolerance=tolerance
        )
        return rounded_rate(rate)

    def _guess(self, prefill: int) -> float:
        """Sessions a second that so many workers prefill."""
        cell, workload = self.cell, open_workload(self.cell.workload)
        if not isinstance(workload, DrawnWorkload):
            return 0.01  # a session lasts hours
        cost, rounds = open_profile(cell.profile).cost, workload.mean_rounds
        session_s = cost.t_pre(0, int(workload.initial.mean))
        session_s += (rounds - 1) * cost.t_pre(0, int(workload.increment.mean))
        return prefill / session_s

    # --- layouts -----------------------------------------------------------------------------

    def best_site(self, contender: Contender, r50: float) -> Plan[_Site]:
        """The contender's best layout and tuning: tuned on the balanced layout first, for with
        defaults that fit badly it may do without prefill workers; tuned again in the end."""
        if contender.decodes_only:
            settings = yield from self._tuned(contender, 0, r50)
            return _Site(contender, Layout.OWN, 0, settings)
        settings = yield from self._tuned(contender, self.cell.balanced, r50)

        def evaluate(splits: Sequence[int]) -> Plan[Mapping[int, Score]]:
            sites = [(split, settings) for split in splits]
            scores = yield from self._scores(contender, sites, r50)
            return dict(zip(splits, scores, strict=True))

        prefill = yield from best_split(
            evaluate, workers=self.cell.workers, least=contender.least_prefill
        )
        settings = yield from self._tuned(contender, prefill, r50)
        return _Site(contender, Layout.OWN, prefill, settings)

    def _tuned(self, contender: Contender, prefill: int, r50: float) -> Plan[Settings]:
        """The best settings on a layout; of equals the first: the defaults."""
        tried = [contender.settings, *contender.tunings]
        if len(tried) == 1:
            return contender.settings
        scores = yield from self._scores(contender, [(prefill, s) for s in tried], r50)
        return tried[max(range(len(tried)), key=lambda index: (scores[index], -index))]

    def _scores(
        self, contender: Contender, sites: Sequence[tuple[int, Settings]], r50: float
    ) -> Plan[list[Score]]:
        """Of each layout and settings: mean session-mean attainment, then by round."""
        seed, count = self._scope.seeds[0], len(SEARCH_RATES)
        outcomes = yield [
            self.run(contender.policy, settings, prefill, factor * r50, self._short, seed)
            for prefill, settings in sites
            for factor in SEARCH_RATES
        ]
        scores: list[Score] = []
        for start in range(0, len(outcomes), count):
            shares = [outcome.attainment for outcome in outcomes[start : start + count]]
            scores.append((sum(s.session_mean for s in shares), sum(s.round for s in shares)))
        return scores

    # --- what is compared --------------------------------------------------------------------

    def entry(
        self,
        site: _Site,
        factor: float,
        r50: float,
        *,
        part: Part = Part.GRID,
        contender: str = "",
        disturbance: str = "none",
        policy: tuple[str, Settings] | None = None,
    ) -> Series:
        """A series without outcomes."""
        name, settings = policy or (site.contender.policy, site.settings)
        seed = self._scope.seeds[0]
        run = self.run(name, settings, site.prefill, factor * r50, self.span, seed)
        run = replace(run, disturbance=DISTURBANCES[disturbance])
        shown = contender or site.contender.name
        return Series(part, shown, site.layout, disturbance, factor, run, ())

    def series(self, entries: Sequence[Series]) -> Plan[list[Series]]:
        """The entries with their outcomes."""
        seeds = self._scope.seeds
        outcomes = yield [replace(entry.run, seed=seed) for entry in entries for seed in seeds]
        count = len(seeds)
        return [
            replace(entry, outcomes=tuple(outcomes[index * count : (index + 1) * count]))
            for index, entry in enumerate(entries)
        ]

    def goodput(self, site: _Site, grid: Sequence[Series]) -> Plan[Goodput]:
        """Of a contender on a layout."""
        shares = {
            series.run.rate: _mean_share(series.outcomes)
            for series in grid
            if series.contender == site.contender.name and series.layout == site.layout
        }
        return find_goodput(shares, self._share_at(site))

    def _share_at(self, site: _Site) -> Callable[[float], Plan[float]]:
        def share_at(rate: float) -> Plan[float]:
            policy, settings = site.contender.policy, site.settings
            outcomes = yield [
                self.run(policy, settings, site.prefill, rate, self.span, seed)
                for seed in self._scope.seeds
            ]
            return _mean_share(outcomes)

        return share_at

    def further_entries(self, sites: Sequence[_Site], r50: float) -> list[Series]:
        """Of all parts but the grid."""
        parts, factor = self._scope.parts, self._scope.part_rate
        entries = []
        for site in sites:
            if Part.ROBUSTNESS in parts and site.contender.name in ROBUSTNESS_OF:
                entries += [
                    self.entry(site, factor, r50, part=Part.ROBUSTNESS, disturbance=name)
                    for name in DISTURBANCES
                ]
            if site.contender.name != AMPD_PAPER or site.layout is not Layout.OWN:
                continue
            if Part.ABLATION in parts:
                entries += [
                    self.entry(site, rate, r50, part=Part.ABLATION, contender=name, policy=policy)
                    for name, policy in ABLATION.items()
                    for rate in self._scope.rates
                ]
            if Part.SENSITIVITY in parts:
                entries += [
                    self.entry(
                        site,
                        factor,
                        r50,
                        part=Part.SENSITIVITY,
                        contender=f"{setting}={value:g}",
                        policy=(AMPD_PAPER, ((setting, value),)),
                    )
                    for setting, values in SENSITIVITY.items()
                    for value in values
                ]
        return entries


def _mean_share(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.attainment.session_mean for outcome in outcomes) / len(outcomes)
