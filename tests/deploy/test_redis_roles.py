"""The chart's users of Redis are those of the command: `python -m tests.deploy.test_redis_roles` writes their file.

The embedded server's pod does not run the command: it would start again with each version.
"""

from __future__ import annotations

from hashlib import sha256

import pytest
import yaml

from loraplex.contracts.broker.acl import DEFAULT_USER, ROLES, acl_file, commands_of
from tests.deploy.kubernetes_tools import CHART, needs_helm, render

_FILE = CHART / "files" / "redis-roles.yaml"
_HEAD = "# The users of Redis, of broker/acl.py; python -m tests.deploy.test_redis_roles writes this file.\n"


def roles_text() -> str:
    """Return the file's text."""
    roles = {
        user: {"commands": commands_of(role), "keys": list(role.keys), "readKeys": list(role.read_keys)}
        for user, role in ROLES.items()
    }
    return _HEAD + yaml.safe_dump(roles, sort_keys=False, default_flow_style=None, width=120)


def test_the_file_is_of_these_roles() -> None:
    assert _FILE.read_text() == roles_text(), "write it: python -m tests.deploy.test_redis_roles"


@pytest.mark.parametrize("cell", ["main", "b"])
def test_the_rendered_rights_are_those_of_the_command(cell: str) -> None:
    needs_helm()
    more = ("redis.cells.b.urlSecret=null", "workers.b.model=llama", "workers.b.cell=b", "models.llama.hash=hash:?")
    name = "lx-valkey" if cell == "main" else "lx-valkey-b"
    (config,) = [
        one["data"]["users.acl"]
        for one in render("gpu", more)
        if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", name)
    ]
    passwords = {user: [f"secret of {user}"] for user in ROLES}
    for user, (password,) in passwords.items():
        config = config.replace(f"{user.upper()}_HASH", sha256(password.encode()).hexdigest())
    expected = [*acl_file(["llama", "qwen"], [cell], passwords), " ".join(["user", *DEFAULT_USER])]

    def words(line: str) -> list[str]:
        return sorted(line.split())

    assert sorted(map(words, config.splitlines())) == sorted(map(words, expected))


def test_another_version_leaves_the_server_as_it_is() -> None:
    needs_helm()

    def template(*settings: str) -> object:
        (found,) = [
            one["spec"]["template"]
            for one in render("gpu", settings)
            if (one["kind"], one["metadata"]["name"]) == ("StatefulSet", "lx-valkey")
        ]
        return found

    assert template() == template("image.tag=next", "credentials.secret.name=other", "redis.disk=9Gi")
    assert template() != template("models.llama.hash=hash:?"), "workers of another model need rights"


if __name__ == "__main__":
    _FILE.write_text(roles_text())
