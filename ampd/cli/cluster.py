"""A cluster on this machine: embedded store, coordinator, prefill and decode workers.

    async with LocalCluster(ClusterSpec(model="/path"), run_dir=folder) as cluster:
        async with AmpdClient(cluster.address) as client: ...

The services are started as the processes they are in production, by their console scripts:
this package never imports them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

import grpc
from grpc_health.v1 import health_pb2

from ampd.cli.errors import CliError
from ampd.core.model import Role
from ampd.core.policies import DEFAULT_POLICY
from ampd.runtime.children import tied_to_this_process
from ampd.runtime.embedded_store import EmbeddedStore

Progress = Callable[[str], None]

HOST: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 300.0
"""Until every service serves: loading the engine takes seconds, on a busy machine a minute."""
STOP_GRACE_S: Final = 10.0
"""From SIGTERM to SIGKILL."""
KILL_TIMEOUT_S: Final = 10.0
"""From SIGKILL until the process is gone: giving back gigabytes of memory takes a moment."""
DRAIN_TIMEOUT_S: Final = 45.0
"""From SIGTERM until the process has ended by itself: its `drain_s` and what its end takes."""
LOG_TAIL_LINES: Final = 20
LOG_LINE_CHARS: Final = 500
_HEALTH_POLL_S: Final = 0.1

DEFAULT_KV_CACHE_BYTES: Final = 1 << 30
EMULATED_KV_CACHE_BYTES: Final = 16 << 30
"""Modelled: an emulated worker takes some 64 MiB for it at most."""
DEFAULT_MAX_MODEL_TOKENS: Final = 8192


class EngineKind(StrEnum):
    """The engines that a cluster can be started with."""

    VLLM = "vllm"
    EMULATED = "emulated"


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start. `model` is a folder (see `ampd.models.prepare`), or any name for an
    emulated engine."""

    model: Path | str
    engine: EngineKind = EngineKind.VLLM
    model_name: str = ""
    """What clients see; empty: the folder's name."""
    prefill: int = 1
    decode: int = 1
    coordinators: int = 1
    policy: str = DEFAULT_POLICY.name
    ttft_slo_s: float | None = None
    itl_slo_s: float | None = None
    """None: the coordinator's own defaults."""
    kv_cache_bytes: int = DEFAULT_KV_CACHE_BYTES
    """Per worker."""
    max_model_tokens: int = DEFAULT_MAX_MODEL_TOKENS
    threads: int | None = None
    """Per worker; None: the machine's cores shared out evenly, at least one."""
    profile: str | None = None
    """Cost model of the workers: a file or a built-in name; None: measured, or all is free."""
    time_scale: float = 1.0
    """How long a second of the profile takes on an emulated engine."""
    profile_dir: Path | None = None
    """Where workers keep what they measured of themselves; None: below the run directory."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More of every service's environment: settings that have no place here, as AMPD_..."""

    @property
    def worker_threads(self) -> int:
        """Threads of each worker."""
        workers = self.prefill + self.decode
        return self.threads or max(1, len(os.sched_getaffinity(0)) // workers)


@dataclass(slots=True)
class ServiceProcess:
    """One service: started, watched and stopped by its cluster."""

    name: str
    role: Role
    address: str
    log: Path
    process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        """Process id, which is its process group's too."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.returncode is None

    def send(self, signum: int) -> None:
        """Signal the service and whatever it has started: each leads a process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)


@dataclass(slots=True)
class LocalCluster:
    """Starts on entering, stops on leaving: nothing that it started outlives it.

    Where it is itself killed, the kernel kills its services (Linux). Raises CliError, with the
    end of the service's log, when one does not come up.
    """

    spec: ClusterSpec
    run_dir: Path
    progress: Progress = lambda _line: None
    services: list[ServiceProcess] = field(default_factory=list)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _store: EmbeddedStore = field(init=False)
    _launches: dict[str, _Launch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store = EmbeddedStore(appendonly_dir=self.run_dir / "store")

    @property
    def address(self) -> str:
        """host:port of the first coordinator."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """host:port of every coordinator."""
        return [s.address for s in self.services if s.role is Role.COORDINATOR]

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.progress("stopping the cluster")
        await self._stack.aclose()

    # --- starting -------------------------------------------------------------------------

    async def _start(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        kept = self.run_dir / "store"
        shutil.rmtree(kept, ignore_errors=True)  # an earlier cluster's
        kept.mkdir()
        await self._stack.enter_async_context(self._store)
        self.progress("store is up")
        self._stack.push_async_callback(self._stop_services)
        for launch in _launches(self.spec, self.run_dir):
            self._launches[launch.name] = launch
            launch.log.unlink(missing_ok=True)
            process = await self._launch(launch)
            self.services.append(
                ServiceProcess(launch.name, launch.role, launch.address, launch.log, process)
            )
        try:
            async with asyncio.timeout(START_TIMEOUT_S), asyncio.TaskGroup() as group:
                for service in self.services:
                    group.create_task(self._wait_until_serving(service, started_s))
        except* CliError as failed:
            raise failed.exceptions[0] from None
        except* TimeoutError:
            silent = ", ".join(s.name for s in self.services)
            raise CliError(
                f"the cluster was not ready within {START_TIMEOUT_S:.0f} s ({silent})",
                hint=f"their logs are in {self.run_dir}",
            ) from None

    async def _launch(self, launch: _Launch) -> asyncio.subprocess.Process:
        command = [str(_console_script(launch.script)), *launch.arguments]
        with launch.log.open("ab") as output:
            return await _spawn(
                tied_to_this_process(command, signal.SIGKILL),
                output,
                # In the environment, because everybody can read a command line and the URL
                # holds the store's password.
                {
                    **os.environ,
                    **self.spec.environment,
                    "AMPD_STORE_URL": self._store.url,
                },
            )

    async def _wait_until_serving(self, service: ServiceProcess, started_s: float) -> None:
        async with grpc.aio.insecure_channel(
            service.address, options=[("grpc.max_reconnect_backoff_ms", 200)]
        ) as channel:
            while not await _is_serving(channel):
                if not service.is_running:
                    raise CliError(
                        f"{service.name} ended with exit code {service.process.returncode} at "
                        f"start; the end of {service.log}:\n{_tail(service.log)}"
                    )
                await asyncio.sleep(_HEALTH_POLL_S)
        self.progress(f"{service.name} is ready after {time.monotonic() - started_s:.0f} s")

    # --- breaking it ----------------------------------------------------------------------

    def service(self, name: str) -> ServiceProcess:
        """The service of that name, e.g. "decode-0". KeyError for any other."""
        for service in self.services:
            if service.name == name:
                return service
        raise KeyError(name)

    async def kill(self, name: str) -> None:
        """End the service as a crash does, frozen or not, and wait until it is gone. Idempotent.
        CliError when it outlives that for KILL_TIMEOUT_S."""
        service = self.service(name)
        service.send(signal.SIGKILL)
        await _ended(service, KILL_TIMEOUT_S)

    def freeze(self, name: str) -> None:
        """Stop the service where it stands: its connections stay open and nothing answers."""
        self.service(name).send(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let a frozen service go on, as if no time had passed. Idempotent."""
        self.service(name).send(signal.SIGCONT)

    async def terminate(self, name: str) -> int:
        """Drain the service and wait for its end; its exit code. CliError when it has not ended
        after DRAIN_TIMEOUT_S; it goes on ending then."""
        service = self.service(name)
        service.send(signal.SIGTERM)
        return await _ended(service, DRAIN_TIMEOUT_S)

    async def restart(self, name: str) -> None:
        """Start the service again with the arguments and the address that it had, and wait until
        it serves; one that still runs is killed first. CliError, with the end of its log, when
        it does not come up within START_TIMEOUT_S."""
        started_s = time.monotonic()
        await self.kill(name)
        service = self.service(name)
        service.process = await self._launch(self._launches[name])
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._wait_until_serving(service, started_s)
        except TimeoutError:
            raise CliError(
                f"{name} does not serve; the end of {service.log}:\n{_tail(service.log)}"
            ) from None

    async def kill_store(self) -> None:
        """End the store as a crash does: it may lose what was written in its last second."""
        await self._store.kill()

    def freeze_store(self) -> None:
        """Stop the store where it stands: connections stay open and nothing answers."""
        self._store.send(signal.SIGSTOP)

    def thaw_store(self) -> None:
        """Let a frozen store go on. Idempotent."""
        self._store.send(signal.SIGCONT)

    async def restart_store(self) -> None:
        """Start the store again at its address with what it has kept. Idempotent."""
        await self._store.start()

    # --- stopping -------------------------------------------------------------------------

    async def _stop_services(self) -> None:
        for service in self.services:
            service.send(signal.SIGTERM)
            service.send(signal.SIGCONT)  # a frozen one hears nothing
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                for service in self.services:
                    await service.process.wait()
        except TimeoutError:
            pass
        finally:
            # Also for one that ended by itself: its group may hold a child that did not.
            for service in self.services:
                service.send(signal.SIGKILL)
            for service in self.services:
                await service.process.wait()


@dataclass(frozen=True, slots=True)
class _Launch:
    name: str
    role: Role
    script: str
    address: str
    arguments: tuple[str, ...]
    log: Path


def _launches(spec: ClusterSpec, run_dir: Path) -> list[_Launch]:
    """Every service's command line. Workers first: they take longest."""
    emulated = spec.engine is EngineKind.EMULATED
    workers = [(Role.PREFILL, i) for i in range(spec.prefill)]
    workers += [(Role.DECODE, i) for i in range(spec.decode)]
    ports = iter(free_ports(2 * len(workers) + spec.coordinators))
    launches = []
    for role, index in workers:
        address = f"{HOST}:{next(ports)}"
        name = f"{role}-{index}"
        arguments = _flags(
            {
                "listen": address,
                "model": spec.model,
                "engine": spec.engine,
                "profile": spec.profile,
                "time-scale": spec.time_scale if emulated else None,
                "worker-id": name,
                "kv-cache-bytes": spec.kv_cache_bytes,
                "threads": spec.worker_threads,
                "max-model-tokens": spec.max_model_tokens,
                "side-channel-port": next(ports),
                "profile-dir": spec.profile_dir or run_dir / "profiles",
            }
        )
        log = run_dir / f"{name}.log"
        launches.append(_Launch(name, role, f"ampd-{role}", address, arguments, log))
    for index in range(spec.coordinators):
        address = f"{HOST}:{next(ports)}"
        name = f"{Role.COORDINATOR}-{index}"
        arguments = _flags(
            {
                "listen": address,
                "model": spec.model,
                "model-name": spec.model_name or None,
                "tokenizer": "emulated" if emulated else None,
                "worker-id": name,
                "policy": spec.policy,
                "ttft-slo-s": spec.ttft_slo_s,
                "itl-slo-s": spec.itl_slo_s,
            }
        )
        launches.append(
            _Launch(
                name,
                Role.COORDINATOR,
                "ampd-coordinator",
                address,
                arguments,
                run_dir / f"{name}.log",
            )
        )
    return launches


def _flags(values: Mapping[str, object | None]) -> tuple[str, ...]:
    """`--key value` for all that have a value."""
    set_values = {key: value for key, value in values.items() if value is not None}
    return tuple(text for key, value in set_values.items() for text in (f"--{key}", str(value)))


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on now; all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in sockets:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in sockets]


def _console_script(name: str) -> Path:
    beside_python = Path(sys.executable).parent / name
    if beside_python.is_file():
        return beside_python
    on_path = shutil.which(name)
    if on_path is None:
        raise CliError(f"{name} is not installed", hint="`make install` installs every service")
    return Path(on_path).absolute()


async def _spawn(
    command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        # A Ctrl-C in the terminal is for us: we stop the services in our own order.
        start_new_session=True,
    )


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    # Not by the generated stub: its type stubs know no methods.
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        answer = await check(health_pb2.HealthCheckRequest(), timeout=1.0)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _ended(service: ServiceProcess, timeout_s: float) -> int:
    """Its exit code, once it has one."""
    try:
        async with asyncio.timeout(timeout_s):
            return await service.process.wait()
    except TimeoutError:
        raise CliError(
            f"{service.name} has not ended within {timeout_s:.0f} s", hint=f"its log: {service.log}"
        ) from None


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"  {line[:LOG_LINE_CHARS]}" for line in lines) or "  (empty)"
