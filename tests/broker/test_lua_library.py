"""Scripts as functions of a library: their variables begin anew in every call, and versions stand side by side."""

from __future__ import annotations

from redis.asyncio import Redis

from broker.functions import Function, load
from broker.lua_library import Library, make_library
from broker.scripts import Scripts

COUNTS = """#!lua flags=allow-oom
-- Counts calls of `more` in this call.
local count, seen = 0
local names = {}

local function more(name)
  count = count + 1
  names[#names + 1] = name
end

for i = 2, #ARGV do more(ARGV[i]) end
if ARGV[1] == 'early' then
  return {count, 'early'}
end
local last = names[#names]
seen = (seen or 0) + 1
return {count, last, seen, KEYS[1]}
"""
# More variables than a Lua function may use of those around it.
NUMBERS = range(80)
MANY = "\n".join(
    [
        "#!lua",
        *(f"local v{n} = (tonumber(ARGV[1]) or 0) + {n}\nlocal function f{n}() return v{n} end" for n in NUMBERS),
        "if ARGV[1] == 'early' then return 'early' end",
        "local sum = 0",
        *(f"sum = sum + f{n}()" for n in NUMBERS),
        "return sum",
    ]
)


async def test_variables_begin_anew_in_every_call(redis: Redis) -> None:
    counts = Function(redis, make_library({"counts": COUNTS}), "counts")
    assert await counts("key", ["", "a", "b"]) == [2, b"b", 1, b"key"]
    assert await counts("key", ["early", "a", "b", "c"]) == [3, b"early"]
    assert await counts("other", ["", "z"]) == [1, b"z", 1, b"other"]


async def test_a_script_with_many_variables_is_divided(redis: Redis) -> None:
    many = Function(redis, make_library({"many": MANY}), "many")
    assert await many("key", [1]) == sum(range(1, 81))
    assert await many("key", [0]) == sum(range(80))
    assert await many("key", ["early"]) == b"early"


async def test_versions_have_libraries_side_by_side(redis: Redis) -> None:
    await redis.function_flush()
    versions = [Scripts(), Scripts(constants={"HOLD_MS": 1}), Scripts()]
    assert versions[0].library == versions[2].library
    for version in versions:
        await load(redis, version.library)
    assert await names(redis) == {versions[0].library.name, versions[1].library.name}


async def test_whoever_finds_the_library_missing_loads_it(redis: Redis) -> None:
    library: Library = make_library({"counts": COUNTS})
    counts = Function(redis, library, "counts")
    await redis.function_flush()
    assert (await counts("key", ["", "a"]))[0] == 1
    assert await names(redis) == {library.name}


async def names(redis: Redis) -> set[str]:
    """Return the names of the server's libraries."""
    found = await redis.function_list()
    return {library[library.index(b"library_name") + 1].decode() for library in found}
