"""The Lua scripts of `state_redis`: each is one atomic step on the server (docs/store.md).

Valkey does not undo a script that fails half way. So every script checks first, and its first
write is one that the server refuses when out of memory (later ones then pass): it does all of
its writes or none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the name under which the server caches it."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)


INCARNATION_DIGITS: Final = 20
"""Padded to equal length they compare as strings, beyond a double's 53 bits."""
INSTANT_DIGITS: Final = 15
"""Of an instant on the server's clock, Unix time in ms."""

_WORKERS: Final = f"""
-- A worker's entry: its incarnation, the instant of its last heartbeat and that of its lease's
-- end, its load. Kept in one hash, so that all are read by one command; the infos, larger and
-- constant, in another, with a version that changes with any of them.
local INCARNATION, INSTANT = {INCARNATION_DIGITS}, {INSTANT_DIGITS}
local LEASE_FROM, LEASE_TO = INCARNATION + INSTANT + 1, INCARNATION + 2 * INSTANT
local sub = string.sub
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
-- As digits of equal length, which compare as the numbers do.
local function instant(ms)
  return string.format('%0' .. INSTANT .. 'd', ms)
end
local function is_live(entry, now)
  return sub(entry, LEASE_FROM, LEASE_TO) > now
end
-- The incarnation of a worker that lives.
local function incarnation(workers, id)
  local entry = redis.call('HGET', workers, id)
  return entry and is_live(entry, instant(now_ms())) and sub(entry, 1, INCARNATION)
end
-- What lives, in turn id and entry; now; the infos' version, and id and info of every worker
-- unless that is the version which the reader knows.
local function live_workers(workers, infos, version, known)
  local now, live = instant(now_ms()), {{}}
  local entries = redis.call('HGETALL', workers)
  for i = 1, #entries, 2 do
    if is_live(entries[i + 1], now) then
      live[#live + 1] = entries[i]
      live[#live + 1] = entries[i + 1]
    else
      redis.call('HDEL', workers, entries[i])
      redis.call('HDEL', infos, entries[i])
    end
  end
  local held = redis.call('GET', version) or ''
  return {{live, now, held, held == known and {{}} or redis.call('HGETALL', infos)}}
end
"""

_LIFE: Final = """
-- Which life of the server answers, for how long it has lived (s), and in which one its data
-- began.
local function life(born)
  local info = redis.call('INFO', 'server')
  local id = string.match(info, 'run_id:(%w+)')
  return {id, string.match(info, 'uptime_in_seconds:(%d+)'), redis.call('GET', born) or id}
end
"""

_RENEW_INDEX: Final = """
local function renew(index, ttl_ms)
  if redis.call('PTTL', index) < tonumber(ttl_ms) then
    redis.call('PEXPIRE', index, ttl_ms)
  end
end
"""

LIST_WORKERS: Final = Script(
    _WORKERS
    + """
-- KEYS: workers, infos, their version. ARGV: the version that is known.
return live_workers(KEYS[1], KEYS[2], KEYS[3], ARGV[1])
"""
)

LOAD_ROUND: Final = Script(
    _LIFE
    + _WORKERS
    + """
-- KEYS: session, policy, replay, born, workers, infos, their version.
-- ARGV: the version that is known.
return {
  redis.call('HGET', KEYS[1], 'record'),
  redis.call('HGET', KEYS[2], 'spec'),
  redis.call('GET', KEYS[3]),
  live_workers(KEYS[5], KEYS[6], KEYS[7], ARGV[1]),
  life(KEYS[4]),
}
"""
)

HEARTBEAT: Final = Script(
    _LIFE
    + _WORKERS
    + """
-- KEYS: workers, infos, their version, policy, born.
-- ARGV: worker_id, incarnation, info, load, lease_ms, a version nobody else makes.
local held = incarnation(KEYS[1], ARGV[1])
if held and held > ARGV[2] then
  return {0, false, life(KEYS[5])}
end
local now = now_ms()
local entry = ARGV[2] .. instant(now) .. instant(now + ARGV[5]) .. ARGV[4]
redis.call('HSET', KEYS[1], ARGV[1], entry)
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[3] then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
  redis.call('SET', KEYS[3], ARGV[6])
end
local alive = life(KEYS[5])
redis.call('SET', KEYS[5], alive[1], 'NX')
return {1, redis.call('HGET', KEYS[4], 'spec'), alive}
"""
)

LIFE: Final = Script(
    _LIFE
    + """
-- KEYS: born.
return life(KEYS[1])
"""
)

DEREGISTER: Final = Script(
    _WORKERS
    + """
-- KEYS: workers, infos. ARGV: worker_id, incarnation.
local held = incarnation(KEYS[1], ARGV[1])
if held and held <= ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
end
return 1
"""
)

CREATE_SESSION: Final = Script(
    _RENEW_INDEX
    + """
-- KEYS: session, tenant's index, create request ('' where the caller gave no request_id).
-- ARGV: session_id, version, record, session ttl_ms, request ttl_ms, session key prefix,
--       expiry checks, most sessions of the tenant ('': no bound).
-- Returns the record that holds; nil: session_id is taken; 0: the tenant has too many.
if KEYS[3] ~= '' then
  local first_id = redis.call('GET', KEYS[3])
  local first = first_id and redis.call('HGET', ARGV[6] .. first_id, 'record')
  if first then
    return first
  end
end
local held = redis.call('HGET', KEYS[1], 'record')
if held and held ~= ARGV[3] then
  return false
end
if ARGV[8] ~= '' and not held and redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[8]) then
  return 0
end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'record', ARGV[3], 'writer', '')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('ZADD', KEYS[2], 0, ARGV[1])
renew(KEYS[2], ARGV[4])
if KEYS[3] ~= '' then
  redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[5])
end
for _, id in ipairs(redis.call('ZRANDMEMBER', KEYS[2], ARGV[7])) do
  if redis.call('EXISTS', ARGV[6] .. id) == 0 then
    redis.call('ZREM', KEYS[2], id)
  end
end
return ARGV[3]
"""
)

COMPARE_AND_SET: Final = Script(
    _RENEW_INDEX
    + """
-- KEYS: session, tokens, rounds, replay ('': none), tenant's index.
-- ARGV: 1 session_id, 2 expected version, 3 new version, 4 record, 5 writer, 6 ttl_ms,
--       7 '1': closed, 8 tokens offset in bytes, 9 tokens ('': none), 10 round_index ('': none),
--       11 round, 12 rounds kept, 13 replay, 14 replay ttl_ms.
-- Returns 1: swapped, 0: another version holds, -1: the tokens would leave a hole.
local held = redis.call('HMGET', KEYS[1], 'version', 'writer', 'closed')
if held[1] ~= ARGV[2] then
  -- The client sends a write again when the connection broke before the answer came.
  return held[2] == ARGV[5] and 1 or 0
end
if held[3] == '1' and ARGV[7] ~= '1' then
  -- Of a store that has lost its last writes, two versions may have one number.
  return 0
end
if ARGV[9] ~= '' and redis.call('STRLEN', KEYS[2]) < tonumber(ARGV[8]) then
  return -1
end
redis.call('HSET', KEYS[1], 'version', ARGV[3], 'record', ARGV[4], 'writer', ARGV[5],
  'closed', ARGV[7])
redis.call('PEXPIRE', KEYS[1], ARGV[6])
if ARGV[7] == '1' then
  redis.call('DEL', KEYS[2], KEYS[3])
  redis.call('ZREM', KEYS[5], ARGV[1])
else
  if ARGV[9] ~= '' then
    redis.call('SETRANGE', KEYS[2], ARGV[8], ARGV[9])
  end
  if ARGV[10] ~= '' then
    redis.call('ZREMRANGEBYSCORE', KEYS[3], ARGV[10], ARGV[10])
    redis.call('ZADD', KEYS[3], ARGV[10], ARGV[11])
    redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -1 - ARGV[12])
  end
  redis.call('PEXPIRE', KEYS[2], ARGV[6])
  redis.call('PEXPIRE', KEYS[3], ARGV[6])
  renew(KEYS[5], ARGV[6])
end
if KEYS[4] ~= '' then
  redis.call('SET', KEYS[4], ARGV[13], 'PX', ARGV[14])
end
return 1
"""
)

LIST_SESSIONS: Final = Script(
    """
-- KEYS: tenant's index. ARGV: session key prefix, lower bound, page size, scan bound.
-- Returns the records, and the id to go on behind (nil: this was the last page).
local page, last, low, scanned = {}, false, ARGV[2], 0
local size = tonumber(ARGV[3])
while scanned < tonumber(ARGV[4]) do
  local ids = redis.call('ZRANGEBYLEX', KEYS[1], low, '+', 'LIMIT', 0, size + 1)
  for _, id in ipairs(ids) do
    local record = redis.call('HGET', ARGV[1] .. id, 'record')
    if record then
      if #page == size then
        return {page, last}
      end
      page[#page + 1] = record
    else
      redis.call('ZREM', KEYS[1], id)
    end
    last = id
  end
  if #ids <= size then
    return {page, false}
  end
  low = '(' .. last
  scanned = scanned + #ids
end
return {page, last}
"""
)

SET_POLICY: Final = Script(
    """
-- KEYS: policy. ARGV: expected version ('0': none), new version, spec, writer.
local held = redis.call('HMGET', KEYS[1], 'version', 'writer')
if (held[1] or '0') ~= ARGV[1] then
  return held[2] == ARGV[4] and 1 or 0
end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'spec', ARGV[3], 'writer', ARGV[4])
return 1
"""
)
