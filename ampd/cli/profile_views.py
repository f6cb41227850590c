"""How a profile is shown: what it says, in words and as a plot."""

from __future__ import annotations

from pathlib import Path

from ampd.cli.errors import CliError, ExitCode
from ampd.cli.output import View, seconds
from ampd.core.cost_model import Hinges, KvCost, Link
from ampd.profiling.fit import FunctionFit
from ampd.profiling.profile_file import Profile


def summary(profile: Profile) -> View:
    """One line a function: examples, and how far it is off."""
    cost, fit = profile.cost, profile.fit
    near = cost.kv_same_host is not None
    return {
        "prefill": f"{seconds(cost.t_pre(0, 2048))} for 2,048 tokens, "
        f"{seconds(cost.t_pre(16_384, 2048))} over 16,384; {_error(fit.prefill)}",
        "decode": f"{seconds(cost.t_dec(1, 4096))} for one sequence of 4,096 tokens, "
        f"{seconds(cost.t_dec(32, 32 * 4096))} for 32; {_error(fit.decode)}",
        "mixed": f"{seconds(cost.t_mixed(512, 4096, 32, 32 * 4096))} with a chunk of 512 beside "
        f"them; {_error(fit.mixed)}",
        "transfer": f"{seconds(cost.t_kv(2048))} for 2,048 tokens between hosts; {_error(fit.kv)}",
        "same_host": f"{seconds(cost.t_kv(2048, Link.SAME_HOST))} for 2,048 tokens within one; "
        f"{_error(fit.kv_same_host)}"
        if near
        else None,
    }


def formulas(profile: Profile) -> View:
    """The coefficients, as the sums that they are."""
    cost = profile.cost
    pre, dec, mixed = cost.prefill, cost.decode, cost.mixed
    tokens = "(chunk + batch)" if mixed.batch_counts else "chunk"
    return {
        "T_pre": _sum(
            (pre.base_s, ""),
            (pre.token_s, "increment"),
            (pre.history_token_s, "history"),
            (pre.attention_pair_s, "increment x (history + increment/2)"),
        )
        + _bends(pre.token_s, pre.hinges, "increment"),
        "T_dec": _sum((dec.base_s, ""), (dec.sequence_s, "batch"), (dec.context_token_s, "context"))
        + _bends(dec.sequence_s, dec.hinges, "batch"),
        "T_mixed": _sum(
            (mixed.base_s, ""),
            (mixed.token_s, tokens),
            (mixed.sequence_s, "batch"),
            (mixed.context_token_s, "context"),
            (mixed.attention_pair_s, "chunk x (history + chunk/2)"),
        )
        + _bends(mixed.token_s, mixed.hinges, tokens),
        "T_kv": _line(cost.kv),
        "T_kv same host": _line(cost.kv_same_host) if cost.kv_same_host else "as between hosts",
    }


def draw(profile: Profile, path: Path) -> None:
    """Plot it; CliError when that is not possible."""
    from ampd.profiling.plots import plot_profile

    try:
        plot_profile(profile, path)
    except ImportError as error:
        raise CliError(
            "plots need matplotlib", hint="pip install 'ampd[plots]'", exit_code=ExitCode.USAGE
        ) from error
    except (OSError, ValueError) as error:
        raise CliError(f"{path}: {error}", exit_code=ExitCode.USAGE) from error


def _line(cost: KvCost) -> str:
    return _sum((cost.base_s, ""), (cost.token_s, "tokens"))


def _sum(*terms: tuple[float, str]) -> str:
    """What is not zero of it."""
    parts = [
        f"{_short(value)} x {name}" if name else _short(value) for value, name in terms if value
    ]
    return " + ".join(parts) or "0"


def _bends(slope: float, hinges: Hinges, name: str) -> str:
    """The slopes behind the bends."""
    parts = []
    for at, change in hinges:
        slope += change
        parts.append(f"{_short(slope)} from {at:,.0f} on")
    return f"; x {name}: {', '.join(parts)}" if parts else ""


def _short(value: float) -> str:
    """Seconds, down to picoseconds."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-12:.3g} ps"


def _error(fit: FunctionFit) -> str:
    """How far the function is off, in words."""
    if not fit.samples:
        return "not fitted"
    kind = "held-out error" if fit.held_out else "error of the fit itself"
    return (
        f"{kind} {fit.median_error:.1%} in the median, {fit.p95_error:.1%} P95 "
        f"({fit.held_out or fit.samples} points)"
    )
