"""API keys: what is made, what is accepted, and how each refusal reads."""

from __future__ import annotations

import dataclasses

import pytest

from loraplex.runtime.rpc.errors import CallError, Unavailable
from loraplex.runtime.rpc.principal import CredentialKind, Role, Unauthenticated
from loraplex.runtime.tenancy.api_keys import (
    STALE_S,
    ApiKeyReader,
    HashedKey,
    HashedSecret,
    KeyDirectory,
    new_api_key,
    split_api_key,
)

NOW = 1_000.0


class Keys:
    """A directory with one key, and its reader at the time `now`."""

    def __init__(self) -> None:
        self.key_id, self.text, sha256 = new_api_key()
        self.key = HashedKey(
            self.key_id, "acme", Role.TENANT_USER, frozenset({"generate"}), None, False, (HashedSecret(sha256),)
        )
        self.now = NOW
        self.monotonic = 0.0
        self.directory = KeyDirectory(lambda: self.monotonic)
        self.directory.put([self.key])
        self.reader = ApiKeyReader(self.directory, lambda: self.now)

    def replace(self, **fields: object) -> None:
        """Change the key."""
        self.key = dataclasses.replace(self.key, **fields)  # type: ignore[arg-type]
        self.directory.put([self.key])

    def refusal(self, text: str) -> tuple[str, str]:
        """Return the reason and message of a refused key."""
        with pytest.raises(CallError) as caught:
            self.reader.read((("authorization", f"Bearer {text}"),), {})
        return caught.value.reason, caught.value.message

    def tenant(self, text: str) -> str:
        """Return the tenant of an accepted key."""
        found = self.reader.read((("authorization", f"Bearer {text}"),), {})
        assert found is not None
        return found.tenant


def test_a_key_has_256_random_bits_and_its_parts_come_apart() -> None:
    key_id, text, _ = new_api_key()
    parts = split_api_key(text)
    assert parts is not None
    assert parts[0] == key_id
    assert len(parts[1]) == 43  # 32 bytes in base64
    assert len({new_api_key()[1] for _ in range(1_000)}) == 1_000


def test_a_valid_key_is_its_tenant() -> None:
    keys = Keys()
    found = keys.reader.read((("authorization", f"bearer {keys.text}"),), {})
    assert found is not None
    assert (found.tenant, found.roles, found.kind) == ("acme", frozenset({Role.TENANT_USER}), CredentialKind.API_KEY)
    assert (found.key_id, found.scopes, found.expires_at) == (keys.key_id, frozenset({"generate"}), None)
    assert keys.text not in repr(found)


def test_other_calls_are_left_to_other_readers() -> None:
    reader = Keys().reader
    assert reader.read((), {}) is None
    assert reader.read((("authorization", "Bearer a.b.c"),), {}) is None


def test_wrong_keys_and_unknown_ones_read_the_same() -> None:
    keys = Keys()
    other = Keys().text
    secret = other.split("_", 2)[2]
    wrong = [other, f"lpx_{keys.key_id}_{secret[:43]:x<43}", "lpx_", keys.text[:-1], keys.text + "x", "lpx_a_b"]
    assert {keys.refusal(text) for text in wrong} == {("CREDENTIAL_INVALID", "the API key is not valid")}


def test_the_credential_comes_once_and_as_a_bearer() -> None:
    keys = Keys()
    for metadata in (
        (("authorization", keys.text),),
        (("authorization", f"Basic {keys.text}"),),
        (("authorization", "Bearer "),),
        (("authorization", f"Bearer {keys.text}"), ("authorization", f"Bearer {keys.text}")),
    ):
        with pytest.raises(CallError) as caught:
            keys.reader.read(metadata, {})
        assert caught.value.reason == "CREDENTIAL_INVALID"


def test_a_revoked_key_says_so_to_who_has_it_alone() -> None:
    keys = Keys()
    keys.replace(revoked=True)
    assert keys.refusal(keys.text)[0] == "CREDENTIAL_REVOKED"
    assert keys.refusal(keys.text[:-4] + "AAAA")[0] == "CREDENTIAL_INVALID"
    for text, holder in ((keys.text, keys.key_id), (keys.text[:-4] + "AAAA", None)):
        with pytest.raises(Unauthenticated) as caught:
            keys.reader.read((("authorization", f"Bearer {text}"),), {})
        assert (caught.value.holder.key_id if caught.value.holder else None) == holder


def test_a_key_expires() -> None:
    keys = Keys()
    keys.replace(expires_at=NOW + 1)
    assert keys.tenant(keys.text) == "acme"
    keys.now = NOW + 1
    assert keys.refusal(keys.text)[0] == "CREDENTIAL_EXPIRED"


def test_after_a_rotation_both_secrets_work_until_the_grace_ends() -> None:
    keys = Keys()
    _, text, sha256 = new_api_key(keys.key_id)
    former = dataclasses.replace(keys.key.secrets[0], expires_at=NOW + 10)
    keys.replace(secrets=(HashedSecret(sha256), former))
    assert keys.tenant(keys.text) == keys.tenant(text) == "acme"
    keys.now = NOW + 10
    assert keys.tenant(text) == "acme"
    assert keys.refusal(keys.text)[0] == "CREDENTIAL_EXPIRED"


def test_a_copy_that_is_too_old_admits_nobody() -> None:
    keys = Keys()
    keys.directory.follow()
    with pytest.raises(Unavailable, match="does not answer"):
        keys.tenant(keys.text)
    keys.directory.look_done()
    assert keys.tenant(keys.text) == "acme"
    assert keys.directory.age_s() == 0
    keys.monotonic = STALE_S
    assert keys.tenant(keys.text) == "acme", "the store may be away for a quarter of an hour"
    assert keys.directory.age_s() == STALE_S == 900
    keys.monotonic = STALE_S + 1
    with pytest.raises(Unavailable):
        keys.tenant(keys.text)
