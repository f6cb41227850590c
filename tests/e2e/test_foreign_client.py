"""What any gRPC client can rely on: the protos alone, standard health, reflection."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from raw_calls import RawClient

from ampd.cli.cluster import LocalCluster
from ampd.core.model import Role
from ampd.v1 import session_service_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="session")

NODE_CLIENT = Path(__file__).parents[2] / "clients" / "node"
ROUNDS = 3
TIMEOUT_S = 120.0
SERVING = health_pb2.HealthCheckResponse.SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def output_of(*command: str) -> str:
    """What the command, run in the client's folder, prints; an error with all of it if it fails."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=NODE_CLIENT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{command}: {output.decode()}{errors.decode()}"
    return output.decode()


@pytest.fixture(scope="module")
def node() -> str:
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        pytest.skip("Node.js is not installed: node and npm are needed")
    return found


async def test_a_session_from_node(node: str, cluster: LocalCluster) -> None:
    if not (NODE_CLIENT / "node_modules").is_dir():
        await output_of("npm", "ci", "--no-audit", "--no-fund")
    async with RawClient(cluster.address, tenant="node") as client:
        await client.set_policy("ampd-paper")
        printed = await output_of(node, "session.js", cluster.address, str(ROUNDS))
        rounds = [json.loads(line) for line in printed.splitlines()]
        assert [r["round"] for r in rounds] == list(range(ROUNDS))
        history = 0
        for told in rounds:
            assert told["route"] in {"ROUTE_LOCAL", "ROUTE_REMOTE"}
            assert told["reason"].startswith("ROUTE_REASON_")
            assert told["finish_reason"] in {"FINISH_REASON_LENGTH", "FINISH_REASON_STOP"}
            assert 0 < told["tokens"] <= 12
            assert told["text"]
            # The question and the answer.
            assert told["history_tokens"] > history + told["tokens"]
            history = told["history_tokens"]
        # It has closed its session.
        listed = await client.call(client.sessions.ListSessions, pb.ListSessionsRequest())
        assert not listed.sessions


@pytest_asyncio.fixture(loop_scope="session")
async def channel(cluster: LocalCluster) -> AsyncIterator[grpc.aio.Channel]:
    """To a coordinator."""
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        yield channel


async def test_health(channel: grpc.aio.Channel, cluster: LocalCluster) -> None:
    services = {
        Role.COORDINATOR: ["ampd.v1.SessionService", "ampd.v1.AdminService"],
        Role.DECODE: ["ampd.worker.v1.DecodeService"],
        Role.PREFILL: ["ampd.worker.v1.PrefillService"],
    }
    for process in cluster.services:
        async with grpc.aio.insecure_channel(process.address) as its_channel:
            health = health_pb2_grpc.HealthStub(its_channel)
            for service in ("", *services[process.role]):
                request = health_pb2.HealthCheckRequest(service=service)
                assert (await health.Check(request, timeout=10)).status == SERVING
    health = health_pb2_grpc.HealthStub(channel)
    unknown = health_pb2.HealthCheckRequest(service=f"nobody.{uuid.uuid4().hex}")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await health.Check(unknown, timeout=10)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    for request, status in (
        (health_pb2.HealthCheckRequest(service="ampd.v1.SessionService"), SERVING),
        (unknown, UNKNOWN),
    ):
        watch = health.Watch(request, timeout=10)
        assert (await anext(aiter(watch))).status == status
        watch.cancel()


async def test_reflection(channel: grpc.aio.Channel) -> None:
    """Enough for a tool like grpcurl to list the services and to call them."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="ampd.v1.SessionService"),
    ]
    listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in listed.list_services_response.service}
    assert {
        "ampd.v1.SessionService",
        "ampd.v1.AdminService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    } <= names
    (encoded, *_) = described.file_descriptor_response.file_descriptor_proto
    (service,) = FileDescriptorProto.FromString(encoded).service
    methods = {method.name for method in service.method}
    assert methods == {
        "CreateSession",
        "Generate",
        "GetSession",
        "ListSessions",
        "CloseSession",
    }
