"""Spec 8, row by row, over raw stubs: the status, the typed reason, the field; nothing lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
import pytest_asyncio
from engine_harness import RemoteEngine
from google.protobuf.duration_pb2 import Duration
from raw_calls import RawClient, is_free, nothing_lost, refused, round_request, until
from rounds import RoundResult, Turn, random_tokens, reference

from ampd.cli.cluster import LocalCluster
from ampd.v1 import admin_service_pb2 as admin_pb
from ampd.v1 import session_service_pb2 as pb
from ampd.v1.policy_pb2 import Policy
from ampd.v1.round_pb2 import ROUTE_LOCAL, ROUTE_REMOTE
from ampd.v1.session_pb2 import SESSION_STATE_CLOSED, SESSION_STATE_RUNNING, Slo

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 32
MAX_MODEL_TOKENS = 4096
VOCABULARY = 49_152
DOMAIN = "ampd.dev"
INVALID_FIELD = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", DOMAIN)
TOO_LONG = (grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", DOMAIN)
NO_SESSION = (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND", DOMAIN)
ROUND_RUNNING = (grpc.StatusCode.FAILED_PRECONDITION, "ROUND_RUNNING", DOMAIN)
CONFLICT = (grpc.StatusCode.ABORTED, "SESSION_CONFLICT", DOMAIN)
NOT_VISIBLE = "not visible\x00é"
NAN, INFINITY = float("nan"), float("inf")

Spoil = Callable[[pb.GenerateRequest], None]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def raw(cluster: LocalCluster) -> AsyncIterator[RawClient]:
    async with RawClient(cluster.addresses[0]) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def other(cluster: LocalCluster) -> AsyncIterator[RawClient]:
    """The other coordinator."""
    async with RawClient(cluster.addresses[1]) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def session_id(raw: RawClient) -> AsyncIterator[str]:
    """One session that lives through all that is wrong."""
    await raw.set_policy("always-local")
    session_id = await raw.create()
    await raw.generate(round_request(session_id, range(1000, 1040)))
    yield session_id
    await raw.close(session_id)


# --- fields of a round -------------------------------------------------------------------------


def increment(**parts: object) -> Spoil:
    """Replace the increment."""

    def spoil(request: pb.GenerateRequest) -> None:
        request.ClearField("token_ids")
        request.MergeFrom(pb.GenerateRequest(**parts))

    return spoil


def sampling(**values: object) -> Spoil:
    """Set sampling parameters."""

    def spoil(request: pb.GenerateRequest) -> None:
        sampled = request.sampling
        for name, value in values.items():
            if isinstance(value, dict):
                getattr(sampled, name).update(value)
            elif isinstance(value, list):
                getattr(sampled, name).extend(value)
            else:
                setattr(sampled, name, value)

    return spoil


def sampling_bytes(encoded: bytes) -> Spoil:
    """Set sampling parameters as another client's encoder would."""

    def spoil(request: pb.GenerateRequest) -> None:
        request.sampling.MergeFromString(encoded)

    return spoil


def setting(**values: object) -> Spoil:
    """Set fields of the request itself."""

    def spoil(request: pb.GenerateRequest) -> None:
        for name, value in values.items():
            setattr(request, name, value)

    return spoil


MESSAGE, RESULT = pb.ChatMessage, pb.ToolResult
MINUS_ONE = b"\xff" * 9 + b"\x01"

WRONG_FIELDS: list[tuple[str, Spoil, str]] = [
    ("increment unset", increment(), "increment"),
    ("text empty", increment(text=""), "increment.text"),
    ("messages empty", increment(messages=pb.ChatMessages()), "increment.messages"),
    ("tool_results empty", increment(tool_results=pb.ToolResults()), "increment.tool_results"),
    ("token_ids empty", increment(token_ids=pb.TokenIds()), "increment.token_ids"),
    (
        "message without role",
        increment(messages=pb.ChatMessages(messages=[MESSAGE(content="hello")])),
        "increment.messages[0].role",
    ),
    (
        "tool name too long",
        increment(tool_results=pb.ToolResults(results=[RESULT(name="n" * 65, content="x")])),
        "increment.tool_results[0].name",
    ),
    (
        "too many messages",
        increment(messages=pb.ChatMessages(messages=[MESSAGE(role="user", content="x")] * 257)),
        "increment.messages",
    ),
    (
        "token outside the vocabulary",
        increment(token_ids=pb.TokenIds(ids=[5, VOCABULARY])),
        "increment.token_ids[1]",
    ),
    ("text over 4 MiB", increment(text="x" * (4 * 1024 * 1024 + 1)), "increment.text"),
    ("max_tokens 0", sampling(max_tokens=0), "sampling.max_tokens"),
    ("min_tokens beyond max", sampling(max_tokens=4, min_tokens=5), "sampling.min_tokens"),
    ("min_tokens -1", sampling_bytes(b"\x10" + MINUS_ONE), "sampling.min_tokens"),
    ("temperature negative", sampling(temperature=-0.1), "sampling.temperature"),
    ("temperature absurd", sampling(temperature=1e9), "sampling.temperature"),
    ("temperature NaN", sampling(temperature=NAN), "sampling.temperature"),
    ("temperature infinite", sampling(temperature=INFINITY), "sampling.temperature"),
    ("top_p 0", sampling(top_p=0.0), "sampling.top_p"),
    ("top_p above 1", sampling(top_p=1.5), "sampling.top_p"),
    ("top_p NaN", sampling(top_p=NAN), "sampling.top_p"),
    ("top_k absurd", sampling(top_k=1_000_001), "sampling.top_k"),
    ("top_k -1", sampling_bytes(b"\x28" + MINUS_ONE), "sampling.top_k"),
    ("min_p negative", sampling(min_p=-0.5), "sampling.min_p"),
    ("min_p NaN", sampling(min_p=NAN), "sampling.min_p"),
    ("presence_penalty", sampling(presence_penalty=2.5), "sampling.presence_penalty"),
    ("frequency_penalty", sampling(frequency_penalty=-2.5), "sampling.frequency_penalty"),
    ("frequency_penalty NaN", sampling(frequency_penalty=NAN), "sampling.frequency_penalty"),
    ("repetition_penalty 0", sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    ("repetition_penalty NaN", sampling(repetition_penalty=NAN), "sampling.repetition_penalty"),
    ("stop empty", sampling(stop=["ok", ""]), "sampling.stop[1]"),
    ("stop too many", sampling(stop=["x"] * 17), "sampling.stop"),
    ("stop token", sampling(stop_token_ids=[VOCABULARY]), "sampling.stop_token_ids[0]"),
    ("bad word empty", sampling(bad_words=[""]), "sampling.bad_words[0]"),
    ("bias NaN", sampling(logit_bias={7: NAN}), "sampling.logit_bias[7]"),
    ("bias absurd", sampling(logit_bias={7: 1e6}), "sampling.logit_bias[7]"),
    ("bias token", sampling(logit_bias={VOCABULARY: 1.0}), "sampling.logit_bias"),
    ("allowed token", sampling(allowed_token_ids=[VOCABULARY]), "sampling.allowed_token_ids[0]"),
    # Field 127, a varint, and field 2000, a string: a newer client's parameters.
    ("unknown sampling field", sampling_bytes(b"\xf8\x07\x01"), "sampling.127"),
    ("unknown sampling string", sampling_bytes(b"\x82\x7d\x02hi"), "sampling.2000"),
    ("session_id empty", setting(session_id=""), "session_id"),
    ("session_id not a name", setting(session_id="a b"), "session_id"),
    ("request_id too long", setting(request_id="r" * 65), "request_id"),
]


@pytest.mark.parametrize(
    ("spoil", "field"),
    [wrong[1:] for wrong in WRONG_FIELDS],
    ids=[wrong[0].replace(" ", "-") for wrong in WRONG_FIELDS],
)
async def test_a_wrong_field_is_named(
    spoil: Spoil, field: str, raw: RawClient, session_id: str
) -> None:
    async with nothing_lost(raw, session_id):
        request = round_request(session_id, [7, 8, 9])
        spoil(request)
        told = await refused(raw.generate(request))
    assert (told.kind, told.fields) == (INVALID_FIELD, (field,))
    assert all(told.descriptions)
    assert not told.has_retry


async def test_a_tenant_that_is_no_name(raw: RawClient, session_id: str) -> None:
    async with nothing_lost(raw, session_id):
        call = raw.sessions.Generate(
            round_request(session_id, [7]), timeout=10, metadata=(("ampd-tenant", "no spaces"),)
        )
        told = await refused(anext(aiter(call)))
    assert (told.kind, told.fields) == (INVALID_FIELD, ("ampd-tenant",))


async def test_keep_history_tokens_beyond_the_history(raw: RawClient, session_id: str) -> None:
    async with nothing_lost(raw, session_id) as session:
        length = session.history_tokens
        for keep in (length + 1, 2**32 - 1):
            told = await refused(raw.generate(round_request(session_id, [7], keep=keep)))
            assert (told.kind, told.fields) == (INVALID_FIELD, ("keep_history_tokens",))
            assert str(length) in told.message
            assert told.metadata == {"history_tokens": str(length)}


async def test_a_prompt_longer_than_the_model(raw: RawClient, session_id: str) -> None:
    async with nothing_lost(raw, session_id) as session:
        left = MAX_MODEL_TOKENS - session.history_tokens
        explained = await explain(raw, session_id)
        too_long = [
            round_request(session_id, [9] * (left + 1), max_tokens=1),
            round_request(session_id, [9] * 100_000, max_tokens=1),
            # One token of output has to fit as well.
            round_request(session_id, [9] * left, max_tokens=1),
            pb.GenerateRequest(session_id=session_id, text="word " * 10_000),
        ]
        for request in too_long:
            told = await refused(raw.generate(request))
            assert (told.kind, told.fields) == (TOO_LONG, ("increment",))
            assert told.metadata == {"max_model_tokens": str(MAX_MODEL_TOKENS)}
        # Where the prompt fits, it is the output that is too long.
        for max_tokens in (left, 2**32 - 1):
            request = round_request(session_id, [9] * 10, max_tokens=max_tokens)
            told = await refused(raw.generate(request))
            assert (told.kind, told.fields) == (TOO_LONG, ("sampling.max_tokens",))
        request = round_request(session_id, [9] * 10)
        request.sampling.MergeFromString(b"\x08" + MINUS_ONE)
        assert (await refused(raw.generate(request))).fields == ("sampling.max_tokens",)
        # Nothing was placed anywhere, and nothing is held.
        assert await explain(raw, session_id) == explained
        await until(is_free, raw, 2.0)


async def test_a_prompt_as_long_as_the_model(raw: RawClient) -> None:
    session_id = await raw.create()
    result = await raw.generate(
        round_request(session_id, [9] * (MAX_MODEL_TOKENS - 1), max_tokens=1)
    )
    assert result.finished is not None
    assert result.finished.history_tokens == MAX_MODEL_TOKENS
    told = await refused(raw.generate(round_request(session_id, [9], max_tokens=1)))
    assert told.kind == TOO_LONG
    # Cut, it goes on.
    result = await raw.generate(round_request(session_id, [9], keep=100))
    assert result.finished is not None
    assert result.finished.history_tokens == 105
    await raw.close(session_id)


# --- sessions that are not there ----------------------------------------------------------------


async def session_calls(client: RawClient, session_id: str) -> list[tuple[str, object]]:
    """How every call that names a session is refused."""
    stubs = client.sessions
    calls = {
        "Generate": client.generate(round_request(session_id, [7])),
        "GetSession": client.get(session_id),
        "CloseSession": client.close(session_id),
        "CloseSession with request_id": client.call(
            stubs.CloseSession,
            pb.CloseSessionRequest(session_id=session_id, request_id="never-used"),
        ),
        "ExplainRound": explain(client, session_id),
    }
    return [(name, (await refused(call)).kind) for name, call in calls.items()]


async def test_unknown_sessions(raw: RawClient) -> None:
    for name, kind in await session_calls(raw, "no-such-session"):
        assert kind == NO_SESSION, name


async def test_closed_sessions(raw: RawClient) -> None:
    session_id = await raw.create()
    await raw.generate(round_request(session_id, [7, 8], request_id="a-round"))
    await raw.close(session_id)
    for name, kind in await session_calls(raw, session_id):
        assert kind == NO_SESSION, name
    # Nor is the answer of a round that ended told after the close.
    told = await refused(raw.generate(round_request(session_id, [7, 8], request_id="a-round")))
    assert told.kind == NO_SESSION


async def test_another_tenants_session(
    raw: RawClient, session_id: str, cluster: LocalCluster
) -> None:
    async with (
        nothing_lost(raw, session_id),
        RawClient(cluster.address, tenant="somebody-else") as stranger,
    ):
        for name, kind in await session_calls(stranger, session_id):
            assert kind == NO_SESSION, name
        listed = await stranger.call(stranger.sessions.ListSessions, pb.ListSessionsRequest())
        assert not listed.sessions


# --- the same again -----------------------------------------------------------------------------


async def test_a_round_on_a_running_session(
    raw: RawClient, other: RawClient, single_engine: RemoteEngine
) -> None:
    await raw.set_policy("always-local")
    increment_ids = random_tokens(random.Random(1), 50)
    (expected,) = await reference(single_engine, [Turn(increment_ids, 400)])
    session_id = await raw.create()
    request = round_request(session_id, increment_ids, max_tokens=400, request_id="the-one")
    running = raw.start(request)
    await running.streams(3)
    assert (await raw.get(session_id)).state == SESSION_STATE_RUNNING
    for client in (raw, other):
        for again in (round_request(session_id, [7]), round_request(session_id, [7], keep=0)):
            told = await refused(client.generate(again))
            assert told.kind == ROUND_RUNNING
    result = await running.end()
    assert result.token_ids == expected
    async with nothing_lost(raw, session_id) as session:
        assert session.history_tokens == 450
    await raw.close(session_id)


async def test_a_request_repeated_while_it_runs_goes_on_with_the_round(
    raw: RawClient, other: RawClient, single_engine: RemoteEngine
) -> None:
    """As by a client that has lost its stream before the server has noticed."""
    await raw.set_policy("always-local")
    increment_ids = random_tokens(random.Random(2), 50)
    (expected,) = await reference(single_engine, [Turn(increment_ids, 400)])
    session_id = await raw.create()
    request = round_request(session_id, increment_ids, max_tokens=400, request_id="the-one")
    running = raw.start(request)
    await running.streams(3)
    result = await other.generate(request)
    assert result.token_ids == expected
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await running.end()
    assert lost.value.code() is grpc.StatusCode.ABORTED
    async with nothing_lost(raw, session_id) as session:
        assert (session.history_tokens, session.round_count) == (450, 1)
    await raw.close(session_id)


async def test_two_rounds_at_once(raw: RawClient, other: RawClient) -> None:
    """Of a race one wins, and the other one's caller is told that it lost."""
    session_id = await raw.create()
    history = 0
    for index in range(6):
        same_request = f"race-{index}" if index % 2 else ""
        request = round_request(session_id, [7, 8, 9], max_tokens=20, request_id=same_request)
        answers = await asyncio.gather(
            *(client.generate(request) for client in (raw, other, raw)), return_exceptions=True
        )
        won = [answer for answer in answers if isinstance(answer, RoundResult)]
        lost = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        if same_request:
            # Whoever comes last goes on with the round, or gets its answer.
            assert won
            assert len({tuple(result.token_ids) for result in won}) == 1
        else:
            assert (len(won), len(lost)) == (1, 2)
        for error in lost:
            assert error.code() in {
                grpc.StatusCode.ABORTED,
                grpc.StatusCode.FAILED_PRECONDITION,
            }
        history += 23
        session = await raw.get(session_id)
        assert (session.history_tokens, session.round_count) == (history, index + 1)
        if same_request:
            again = await other.generate(request)
            assert again.token_ids == won[0].token_ids
    await raw.close(session_id)


async def explain(client: RawClient, session_id: str) -> list[object]:
    request = admin_pb.ExplainRoundRequest(session_id=session_id)
    return list((await client.call(client.admin.ExplainRound, request)).rounds)


async def test_a_repeated_round(
    raw: RawClient, other: RawClient, single_engine: RemoteEngine
) -> None:
    await raw.set_policy("always-remote")
    turns = [Turn(random_tokens(random.Random(2), 70), 12), Turn([5, 6, 7], 6)]
    expected = await reference(single_engine, turns)
    session_id = await raw.create()
    request = round_request(session_id, turns[0].increment, max_tokens=12, request_id="once")
    first = await raw.generate(request)
    assert first.token_ids == expected[0]
    explained = await explain(raw, session_id)
    session = await raw.get(session_id)
    pulled = await idle_loads(raw)
    different = round_request(session_id, [1, 2], max_tokens=3, keep=9, request_id="once")
    for client in (raw, other):
        for repeated in (request, different):
            again = await client.generate(repeated)
            assert again.placed == first.placed[-1:]
            assert again.token_ids == first.token_ids
            assert again.text == first.text
            assert again.finished == first.finished
            # Its tokens came in one message, not one by one from an engine.
            assert len(again.placed) == 1
    # Nothing ran: no record, no change of the session, no load anywhere.
    assert await explain(raw, session_id) == explained
    assert await raw.get(session_id) == session
    assert await idle_loads(raw) == pulled
    second = await other.generate(round_request(session_id, turns[1].increment, max_tokens=6))
    assert second.token_ids == expected[1]
    # It is still the same answer when the session has gone on.
    assert (await raw.generate(request)).token_ids == first.token_ids
    await raw.close(session_id)


async def idle_loads(client: RawClient) -> list[tuple[int, int, int]]:
    """What the workers hold when nothing runs."""
    await until(is_free, client, 2.0)
    return [
        (w.load.sessions, w.load.kv_pinned_tokens, w.load.kv_reserved_tokens)
        for w in await client.workers()
    ]


async def test_a_repeated_create(raw: RawClient, other: RawClient, cluster: LocalCluster) -> None:
    request = pb.CreateSessionRequest(request_id="create-once", labels={"a": "b"})
    first = (await raw.call(raw.sessions.CreateSession, request)).session
    changed = pb.CreateSessionRequest(request_id="create-once", labels={"c": "d"})
    for client, repeated in ((raw, request), (other, request), (other, changed)):
        assert (await client.call(client.sessions.CreateSession, repeated)).session == first
    async with RawClient(cluster.address, tenant="somebody-else") as stranger:
        foreign = (await stranger.call(stranger.sessions.CreateSession, request)).session
        assert foreign.session_id != first.session_id
        await stranger.close(foreign.session_id)
    without = pb.CreateSessionRequest()
    others = [(await raw.call(raw.sessions.CreateSession, without)).session for _ in range(2)]
    assert len({session.session_id for session in (first, *others)}) == 3
    for session in (first, *others):
        await raw.close(session.session_id)


async def test_a_repeated_close(raw: RawClient, other: RawClient) -> None:
    session_id = await raw.create()
    await raw.generate(round_request(session_id, [7, 8]))
    request = pb.CloseSessionRequest(session_id=session_id, request_id="close-once")
    first = (await raw.call(raw.sessions.CloseSession, request)).session
    assert first.state == SESSION_STATE_CLOSED
    for client in (other, raw):
        assert (await client.call(client.sessions.CloseSession, request)).session == first
    for request_id in ("", "close-twice"):
        wrong = pb.CloseSessionRequest(session_id=session_id, request_id=request_id)
        told = await refused(raw.call(raw.sessions.CloseSession, wrong))
        assert told.kind == NO_SESSION


async def test_a_close_in_the_middle_of_a_round(raw: RawClient, other: RawClient) -> None:
    await raw.set_policy("always-local")
    session_id = await raw.create()
    running = raw.start(round_request(session_id, [7, 8], max_tokens=2000))
    await running.streams(3)
    await other.close(session_id)
    told = await refused(running.end())
    assert told.kind in {NO_SESSION, CONFLICT}
    await until(is_free, raw, 2.0)


# --- sizes that are right ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["always-local", "always-remote"])
async def test_increments_around_a_block(
    policy: str, raw: RawClient, single_engine: RemoteEngine
) -> None:
    """Shorter than a block, exact multiples, and their neighbours: routed as any other."""
    await raw.set_policy(policy)
    rng = random.Random(3)
    # The history's length passes through multiples of the block as well: 32, 64 after outputs.
    turns = [
        Turn(random_tokens(rng, count), output)
        for count, output in ((1, 31), (31, 1), (32, 32), (1, 1), (33, 30), (64, 64), (2, 30))
    ]
    expected = await reference(single_engine, turns)
    session_id = await raw.create()
    history = 0
    for turn, output in zip(turns, expected, strict=True):
        result = await raw.generate(
            round_request(session_id, turn.increment, max_tokens=turn.max_tokens)
        )
        assert result.finished is not None
        assert result.token_ids == output
        assert result.where.history_tokens == history
        assert result.where.increment_tokens == len(turn.increment)
        assert result.where.route == (ROUTE_LOCAL if policy == "always-local" else ROUTE_REMOTE)
        assert not result.where.history_rebuilt
        assert len(result.placed) == 1
        history += len(turn.increment) + turn.max_tokens
        assert result.finished.history_tokens == history
    await raw.close(session_id)


@pytest.mark.parametrize("policy", ["always-local", "always-remote"])
async def test_rewinds_to_the_edges(
    policy: str, raw: RawClient, single_engine: RemoteEngine
) -> None:
    """To nothing, to all, to a block's border and its neighbours."""
    await raw.set_policy(policy)
    rng = random.Random(4)
    session_id = await raw.create()
    tokens = random_tokens(rng, 120)
    await raw.generate(round_request(session_id, tokens, max_tokens=8))
    for keep in (96, 64, 65, 63, 32, 1, 0):
        increment_ids = random_tokens(rng, 40)
        result = await raw.generate(
            round_request(session_id, increment_ids, max_tokens=8, keep=keep)
        )
        tokens = tokens[:keep] + increment_ids
        (expected,) = await reference(single_engine, [Turn(tokens, 8)])
        assert result.token_ids == expected
        assert (await raw.get(session_id)).history_tokens == len(tokens) + 8
        # The rewinds to come cut off what this one has written.
        tokens += expected
    await raw.close(session_id)


# --- the other calls ----------------------------------------------------------------------------


async def test_wrong_fields_of_a_session(raw: RawClient) -> None:
    wrong = {
        "request_id": pb.CreateSessionRequest(request_id="r" * 65),
        "model": pb.CreateSessionRequest(model="another-model"),
        "slo.ttft": pb.CreateSessionRequest(slo=Slo(ttft=Duration(seconds=-1))),
        "slo.itl": pb.CreateSessionRequest(slo=Slo(itl=Duration(seconds=3601))),
        "slo.itl_statistic": pb.CreateSessionRequest(slo=Slo(itl_statistic=99)),
        "labels": pb.CreateSessionRequest(labels={str(i): "x" for i in range(17)}),
        "labels[key]": pb.CreateSessionRequest(labels={"key": "x" * 65}),
    }
    for field, request in wrong.items():
        told = await refused(raw.call(raw.sessions.CreateSession, request))
        assert (told.kind, told.fields) == (INVALID_FIELD, (field,))


async def test_wrong_pages(raw: RawClient) -> None:
    sessions, admin = raw.sessions, raw.admin
    wrong = [
        ("page_size", sessions.ListSessions, pb.ListSessionsRequest(page_size=1001)),
        ("page_size", sessions.ListSessions, pb.ListSessionsRequest(page_size=2**32 - 1)),
        ("page_token", sessions.ListSessions, pb.ListSessionsRequest(page_token=NOT_VISIBLE)),
        ("page_token", sessions.ListSessions, pb.ListSessionsRequest(page_token=NOT_VISIBLE * 40)),
        ("page_size", admin.ListWorkers, admin_pb.ListWorkersRequest(page_size=1001)),
        ("page_token", admin.ListWorkers, admin_pb.ListWorkersRequest(page_token=NOT_VISIBLE)),
        ("role", admin.ListWorkers, admin_pb.ListWorkersRequest(role=99)),
    ]
    for field, method, request in wrong:
        told = await refused(raw.call(method, request))
        assert (told.kind, told.fields) == (INVALID_FIELD, (field,))


async def test_pages(raw: RawClient) -> None:
    created = sorted([await raw.create() for _ in range(5)])
    listed: list[str] = []
    token = ""
    while True:
        request = pb.ListSessionsRequest(page_size=2, page_token=token)
        page = await raw.call(raw.sessions.ListSessions, request)
        assert len(page.sessions) <= 2
        listed += [session.session_id for session in page.sessions]
        token = page.next_page_token
        if not token:
            break
    assert listed == sorted(listed)
    assert set(created) <= set(listed)
    names: list[str] = []
    while True:
        answer = await raw.call(
            raw.admin.ListWorkers, admin_pb.ListWorkersRequest(page_size=2, page_token=token)
        )
        names += [worker.worker_id for worker in answer.workers]
        token = answer.next_page_token
        if not token:
            break
    assert names == ["coordinator-0", "coordinator-1", "decode-0", "decode-1", "prefill-0"]
    for session_id in created:
        await raw.close(session_id)


async def test_wrong_rounds_to_explain(raw: RawClient, session_id: str) -> None:
    request = admin_pb.ExplainRoundRequest(session_id=session_id, round_index=10_000)
    told = await refused(raw.call(raw.admin.ExplainRound, request))
    assert told.kind == (grpc.StatusCode.NOT_FOUND, "ROUND_NOT_FOUND", DOMAIN)
    told = await refused(raw.call(raw.admin.ExplainRound, admin_pb.ExplainRoundRequest()))
    assert (told.kind, told.fields) == (INVALID_FIELD, ("session_id",))


def policy(name: str, **settings: object) -> Policy:
    result = Policy(name=name)
    result.settings.update(settings)
    return result


async def test_wrong_policies(raw: RawClient, other: RawClient) -> None:
    await raw.set_policy("ampd-paper")
    in_force = (await raw.call(raw.admin.GetPolicy, admin_pb.GetPolicyRequest())).policy
    wrong: list[tuple[str, Policy]] = [
        ("policy.name", policy("")),
        ("policy.name", policy("no-such-policy")),
        ("policy.settings.nope", policy("ampd-paper", nope=1)),
        ("policy.settings.alpha", policy("always-local", alpha=1)),
        ("policy.settings.alpha", policy("ampd-paper", alpha=-1)),
        ("policy.settings.alpha", policy("ampd-paper", alpha=NAN)),
        ("policy.settings.alpha", policy("ampd-paper", alpha="x")),
        ("policy.settings.beta", policy("ampd-paper", beta=[1])),
        ("policy.settings.w", policy("ampd-paper", w=2.5)),
        ("policy.settings.w", policy("ampd-paper", w=100)),
        ("policy.settings.choice", policy("always-remote", choice="best")),
    ]
    requests = [("policy", admin_pb.SetPolicyRequest())]
    requests += [(field, admin_pb.SetPolicyRequest(policy=spec)) for field, spec in wrong]
    for field, request in requests:
        told = await refused(raw.call(raw.admin.SetPolicy, request))
        assert (told.kind, told.fields) == (INVALID_FIELD, (field,))
    for client in (raw, other):
        now = (await client.call(client.admin.GetPolicy, admin_pb.GetPolicyRequest())).policy
        assert now == in_force


async def test_two_writers_of_the_policy(raw: RawClient, other: RawClient) -> None:
    await raw.set_policy("ampd-paper")
    version = (await raw.call(raw.admin.GetPolicy, admin_pb.GetPolicyRequest())).policy.version
    request = admin_pb.SetPolicyRequest(policy=policy("always-local"), expected_version=version)
    assert (await raw.call(raw.admin.SetPolicy, request)).policy.version == version + 1
    late = admin_pb.SetPolicyRequest(policy=policy("always-remote"), expected_version=version)
    told = await refused(other.call(other.admin.SetPolicy, late))
    assert told.kind == (grpc.StatusCode.ABORTED, "POLICY_CONFLICT", DOMAIN)
    assert told.metadata == {"version": str(version + 1)}
    now = (await other.call(other.admin.GetPolicy, admin_pb.GetPolicyRequest())).policy
    assert (now.name, now.version) == ("always-local", version + 1)
    # Whoever names no version is never refused for another's write.
    requests = [
        admin_pb.SetPolicyRequest(policy=policy("always-remote", window_s=window_s))
        for window_s in (3, 4, 5, 6)
    ]
    answers = await asyncio.gather(
        *(c.call(c.admin.SetPolicy, r) for r in requests for c in (raw, other))
    )
    assert max(answer.policy.version for answer in answers) > version + 1
