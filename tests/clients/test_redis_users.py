"""`loraplex redis acl`: its ACL file starts a real server, --apply sets users on one that runs, --rotate keeps both."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError
from typer.testing import CliRunner

from loraplex.cli.__main__ import app
from loraplex.cli.terminal import CommandError
from loraplex.contracts.broker.connection import RedisUnreachableError, connect
from loraplex.contracts.broker.keys import Keys
from loraplex.contracts.broker.liveness import Liveness
from loraplex.contracts.broker.queue import JobQueue
from loraplex.contracts.broker.startup import connect_once_up
from loraplex.contracts.broker.terms import QueueState
from tests.broker.clocked_queue import make_job
from tests.debian_program import debian_program
from tests.valkey_server import ValkeyServer


async def acl(*arguments: str) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["redis", "acl", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


@pytest.fixture
def users(tmp_path: Path) -> Path:
    return tmp_path / "users"


@pytest.fixture
async def server(tmp_path_factory: pytest.TempPathFactory, users: Path) -> AsyncIterator[ValkeyServer]:
    """A server with the ACL file that the command prints."""
    directory = tmp_path_factory.mktemp("v")
    text = await acl(str(users), "--model", "tiny")
    (directory / "users.acl").write_text(text)
    server = ValkeyServer(directory, "--aclfile", str(directory / "users.acl"))
    await server.start()
    yield server
    await server.kill()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def as_user(server: ValkeyServer, users: Path, user: str) -> str:
    return server.url.replace("unix://", f"unix://{user}@") + f"?password_file={users / user / 'password'}"


async def test_a_server_with_the_printed_file(server: ValkeyServer, users: Path) -> None:
    for user in ("router", "worker", "operator"):
        assert mode(users / user / "password") == 0o600
    assert mode(users) == 0o700
    with pytest.raises(RedisUnreachableError, match="already authenticated"):
        await connect_once_up(server.url)
    keys = Keys("tiny", "main")
    async with await connect(as_user(server, users, "router")) as router:
        await Liveness(router, keys).take_census("here")
    async with await connect(as_user(server, users, "worker")) as worker:
        with pytest.raises(NoPermissionError):
            await worker.set("anything", 1)
    await server.restart(keeps=False)
    async with await connect(as_user(server, users, "router")) as router:
        await Liveness(router, keys).take_census("here")


async def test_redis_itself_keeps_what_functions_wrote_over_a_restart(
    tmp_path_factory: pytest.TempPathFactory, users: Path
) -> None:
    program = await asyncio.to_thread(debian_program, "redis-server")
    directory = tmp_path_factory.mktemp("v")
    (directory / "users.acl").write_text(await acl(str(users), "--model", "tiny"))
    flags = ("--aclfile", str(directory / "users.acl"), "--appendonly", "yes")
    server = ValkeyServer(directory, *flags, program=program)
    await server.start()
    try:
        async with await connect(as_user(server, users, "router")) as router:
            queue = JobQueue(router, Keys("tiny", "main"))
            await queue.enqueue(make_job("a", "acme"))
            assert await queue.look_up([("a", 1)]) == [QueueState.WAITS]
        await server.kill()
        await server.start()
        async with await connect(as_user(server, users, "router")) as router:
            assert await JobQueue(router, Keys("tiny", "main")).look_up([("a", 1)]) == [QueueState.WAITS]
    finally:
        await server.kill()


async def test_passwords_are_rotated_while_processes_run(server: ValkeyServer, users: Path) -> None:
    url = as_user(server, users, "operator")
    apply = [str(users), "--model", "tiny", "--apply", "--redis-url", url]
    first = (users / "router" / "password").read_text()
    async with await connect(as_user(server, users, "router")) as router:
        assert "no ACL file" not in await acl(*apply, "--rotate")
        now, former = (users / "router" / "password").read_text().split()
        assert former == first.strip()
        for password in (former, now):
            await sign_in(server, password)
        await router.ping()
        await router.connection_pool.disconnect()
        await router.ping()
    await acl(*apply)  # without --rotate nothing changes
    assert (users / "router" / "password").read_text().split() == [now, former]
    await acl(*apply, "--rotate")
    await sign_in(server, now)
    with pytest.raises(RedisUnreachableError, match="invalid username-password"):
        await sign_in(server, former)


async def sign_in(server: ValkeyServer, password: str) -> None:
    async with await connect(server.url.replace("unix://", f"unix://router:{password}@")):
        pass


async def test_a_server_without_an_acl_file_forgets_its_users(
    tmp_path_factory: pytest.TempPathFactory, users: Path
) -> None:
    server = ValkeyServer(tmp_path_factory.mktemp("v"))
    await server.start()
    try:
        said = await acl(str(users), "--model", "tiny", "--apply", "--redis-url", server.url)
        assert "no ACL file: it forgets them" in said
        async with await connect(as_user(server, users, "operator")) as operator:
            libraries = await operator.function_list()
            assert len(libraries) == 1
    finally:
        await server.kill()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--model", "a b"], "model: 'a b' is not allowed"),
        (["--model", "tiny", "--cell", "*"], "--cell"),
        (["--model", "tiny", "--rotate"], "--rotate: needs --apply"),
        (["--model", "tiny", "--apply"], "--apply: name the server"),
        (["--model", "tiny", "--apply", "--redis-url", "redis://127.0.0.1:1"], "no answer"),
    ],
)
async def test_bad_arguments_make_no_files(users: Path, arguments: list[str], why: str) -> None:
    with pytest.raises(CommandError, match=why):
        await acl(str(users), *arguments)
    assert "users" not in os.listdir(users.parent)
