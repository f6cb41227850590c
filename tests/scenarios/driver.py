"""What a scenario needs of a cluster: clients, its processes' lives, the store, a look inside.

A scenario body is written once against `Driver`; `in_process`, `over_grpc` and `processes` each
carry it out on the real composition roots of all services (`services.*.main`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

from scenario_client import Client
from sim_engine import COST

from ampd.adapters.engine_emulated import EmulatedSettings
from ampd.core.errors import AmpdError
from ampd.core.model import Role
from ampd.ports import EngineStats
from ampd.runtime.lifecycle import Shutdown
from services.coordinator import main as coordinator_main
from services.coordinator.settings import CoordinatorSettings
from services.decode import main as decode_main
from services.decode.settings import DecodeSettings
from services.prefill import main as prefill_main
from services.prefill.settings import PrefillSettings

BLOCK: Final = 32
"""Tokens of a KV block."""
KV_BYTES_PER_TOKEN: Final = 16_384
"""Modelled."""
MAX_STEP_TOKENS: Final = 256
LEASE_S: Final = 2.0
"""After so long a silence a process counts as gone."""
PREFILL_TOKEN_S: Final = COST.prefill.token_s
"""About what one more token of a prompt costs."""


class Ability(StrEnum):
    """What a driver may lack."""

    FREEZE = "a process that stops without a word"
    LOSE_STORE_WRITES = "a store that dies with its last second"
    BREAK_KV = "KV transfers that get stuck or fail"
    REFUSE = "an engine that refuses a round"
    BOOKS = "a look into engines and ledgers"
    EXACT = "time that depends on nothing but what runs"
    HASH_SEEDS = "interpreters of their own"


class KvTrouble(StrEnum):
    """What can be wrong with a read of a peer's KV."""

    NONE = "none"
    STUCK = "no end until its timeout"
    FAILED = "an error at once"


@dataclass(frozen=True, slots=True)
class Shape:
    """The cluster of a scenario. Times in seconds, sizes in tokens."""

    coordinators: int = 2
    prefill: int = 2
    decode: int = 2
    kv_tokens: int = 16_384
    max_model_tokens: int = 8192
    max_queued_tasks: int = 64
    max_running_rounds: int = 1024
    max_sessions: int = 100_000
    kv_lease_s: float = 60.0
    claim_timeout_s: float = 20.0
    admission_wait_s: float = 1.0
    max_state_age_s: float = 2.0

    def settings(self, role: Role) -> dict[str, Any]:
        """Those of its services that are not the default."""
        common: dict[str, Any] = {"lease_s": LEASE_S}
        if role is Role.COORDINATOR:
            return common | {
                "max_running_rounds": self.max_running_rounds,
                "max_sessions": self.max_sessions,
                "max_state_age_s": self.max_state_age_s,
                "ttft_slo_s": 30.0,
                "itl_slo_s": 2.0,
            }
        common |= {
            "max_model_tokens": self.max_model_tokens,
            "block_tokens": BLOCK,
            "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
            "max_step_tokens": MAX_STEP_TOKENS,
        }
        if role is Role.PREFILL:
            return common | {"max_queued_tasks": self.max_queued_tasks}
        return common | {
            "session_kv_lease_s": self.kv_lease_s,
            "claim_timeout_s": self.claim_timeout_s,
            "admission_wait_s": self.admission_wait_s,
        }

    def names(self, role: Role) -> list[str]:
        """worker_ids of that role."""
        count = {
            Role.COORDINATOR: self.coordinators,
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
        }[role]
        return [f"{role.value}-{index}" for index in range(count)]


class Driver(Protocol):
    """A running cluster under somebody's hands. Processes go by their worker_id."""

    @property
    def shape(self) -> Shape:
        """What it was started as."""
        ...

    @property
    def slack_s(self) -> float:
        """What a loaded machine may add to a time that the specification promises."""
        ...

    def client(self, coordinator: int = 0, tenant: str = "default") -> Client:
        """A client of that coordinator."""
        ...

    async def kill(self, name: str) -> None:
        """It takes no further step, and tells nobody."""
        ...

    async def restart(self, name: str) -> None:
        """A new life on the same address; returns when it serves and is registered."""
        ...

    async def terminate(self, name: str) -> bool:
        """SIGTERM; whether it has ended well, by itself."""
        ...

    async def ended(self, name: str, within_s: float) -> bool:
        """Whether it ends well, by itself, in that time."""
        ...

    async def freeze(self, name: str) -> None:
        """It takes no step until `thaw`."""
        ...

    async def thaw(self, name: str) -> None:
        """It goes on, and does not know what it has missed."""
        ...

    async def stop_store(self) -> None:
        """The shared store dies."""
        ...

    async def start_store(self, *, lose: bool = False) -> None:
        """It is back, with all it had; with `lose` without its last second."""
        ...

    def trouble_kv(self, trouble: KvTrouble) -> None:
        """What happens to every KV read from now on."""
        ...

    def refuse_next(self, worker: str, error: AmpdError) -> None:
        """The worker's engine answers its next generation with that error."""
        ...

    def engine(self, worker: str) -> EngineStats:
        """What that worker's engine holds; LookupError when nobody can look."""
        ...

    def check_books(self) -> None:
        """AssertionError unless the books of every live worker balance."""
        ...


async def serve(role: Role, settings: Mapping[str, Any], shutdown: Shutdown) -> None:
    """What the console script of that role runs."""
    match role:
        case Role.COORDINATOR:
            coordinator = CoordinatorSettings(**settings)
            policy = coordinator.default_policy()
            parser = coordinator_main.load_parser(coordinator.tool_call_parser)
            await coordinator_main.serve(coordinator, policy, parser, shutdown)
        case Role.PREFILL:
            await prefill_main.serve(PrefillSettings(**settings), shutdown)
        case Role.DECODE:
            decode = DecodeSettings(**settings)
            tools = decode_main.EntryPointTools(decode.tools, decode.tool_limits())
            await decode_main.serve(decode, tools, shutdown)


def role_of(name: str) -> Role:
    """Of a worker_id as `Shape.names` makes them."""
    return Role(name.rpartition("-")[0])


def engine_settings(shape: Shape) -> EmulatedSettings:
    """Of every worker's engine."""
    return EmulatedSettings(
        block_tokens=BLOCK,
        kv_capacity_tokens=shape.kv_tokens,
        max_model_tokens=shape.max_model_tokens,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        max_step_tokens=MAX_STEP_TOKENS,
        cost=COST,
    )


def refuse_once(engine: Any, error: AmpdError) -> None:
    """Shadow the engine's `generate` for one call."""

    async def generate(_request: object) -> Any:
        del engine.generate
        raise error
        yield

    engine.generate = generate


def names_of(shape: Shape) -> Sequence[str]:
    """All worker_ids, workers first: coordinators look for them."""
    return [n for role in (Role.DECODE, Role.PREFILL, Role.COORDINATOR) for n in shape.names(role)]
