from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.peft_config import CONFIG_FILE
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.runtime.rpc.errors import CallError, InvalidField
from loraplex.transfers import fetch, http
from loraplex.transfers.folder import Folder
from loraplex.transfers.policy import Rule, parse_uri
from tests.adapter_store.sources.places import COMMIT, Hub, OciRegistry, Place, served

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

Refusal = Callable[[grpc.aio.AioRpcError], tuple[str, str, bytes]]
BIG = bytes(range(256)) * 12_000  # three pieces
FILES = {CONFIG_FILE: b'{"peft_type": "LORA", "r": 8}', WEIGHTS_FILE: BIG}
HF = "hf://acme/support"


@pytest.fixture
def hub() -> Hub:
    """A hub that has FILES."""
    return Hub(dict(FILES))


@pytest.fixture
def sources(hub: Hub, tmp_path: Path) -> Iterator[Path]:
    """The operator's file: acme may import from the hub, from a registry that is not there yet, and from a folder."""
    with served(hub.answer) as url:
        path = tmp_path / "sources.toml"
        path.write_text(
            f'[[source]]\nprefix = "hf://acme"\ntenants = ["acme"]\nendpoint = "{url}"\nallow_private = true\n'
            f'[[source]]\nprefix = "file://{tmp_path}/models"\n'
        )
        yield path


@pytest.fixture
def store_settings(data: Path, sources: Path) -> StoreSettings:
    """A store with these sources."""
    return StoreSettings(data=data, port=0, max_adapter_bytes=4 * 1024 * 1024, sources=str(sources))


@pytest.fixture
async def client(store: Store, hash_base: BaseModel, connect: Callable[[str], Client]) -> AsyncIterator[Client]:
    """A client of a store with a base model that takes any bytes."""
    connected = connect(f"127.0.0.1:{store.port}")
    await connected.register(hash_base)
    yield connected
    await connected.close()


async def import_(client: Client, source: str = HF, tenant: str = "acme", name: str = "support", **fields: Any) -> Any:
    """Import a revision; returns the last message's event."""
    request = pb.ImportRevisionRequest(adapter=name, source=source, **fields)
    call = client.stub.ImportRevision(request, metadata=(("x-loraplex-tenant", tenant),))
    events = [event async for event in call]
    return events[-1].imported


async def refused(client: Client, refusal: Refusal, **request: str) -> tuple[str, str]:
    """Return code and message of an import that is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await import_(client, **request)
    return refusal(error.value)[0], error.value.details() or ""


def trust_nobody(sources: Path) -> None:
    """Allow no private address."""
    sources.write_text(sources.read_text().replace("allow_private = true\n", ""))


def allow(sources: Path, prefix: str, url: str, more: str = "") -> None:
    """Allow one prefix, at a server of this machine."""
    rule = f'[[source]]\nprefix = "{prefix}"\nendpoint = "{url}"\nallow_private = true\n'
    sources.write_text(rule + more)


async def is_empty(client: Client, uploads_gone: Callable[[], Any]) -> None:
    """Check that nothing is visible and nothing stays."""
    listed = await client.call("ListAdapters", pb.ListAdaptersRequest())
    assert not listed.adapters
    await uploads_gone()


async def test_a_branch_is_imported_as_its_commit(client: Client, uploads_gone: Callable[[], Any]) -> None:
    imported = await import_(client, f"{HF}@main")
    revision = imported.revision
    assert imported.created
    assert imported.adapter.aliases["live"] == revision.digest
    assert (revision.provenance.uri, revision.provenance.pin) == (f"{HF}@main", f"{HF}@{COMMIT}")
    assert {file.path: file.size for file in revision.provenance.files} == {n: len(d) for n, d in FILES.items()}
    assert (await client.download(revision.name))[1] == FILES
    assert (await client.get("support")).revision == revision
    listed = await client.call("ListRevisions", pb.ListRevisionsRequest(parent="support"))
    assert list(listed.revisions) == [revision]
    await uploads_gone()
    uploaded = await client.upload("pushed", FILES)
    assert uploaded.revision.digest == revision.digest
    assert not uploaded.revision.HasField("provenance")
    again = await import_(client, f"{HF}@{COMMIT}")
    assert not again.created
    assert again.revision == revision  # the first origin stays


async def test_a_connection_that_breaks_goes_on_where_it_ended(
    client: Client, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_PAUSE_S", 0.0)
    hub.cut = [10, 1 << 30, 1_500_000, 1_000_000]  # the configuration, then twice the weights
    assert (await client.download((await import_(client)).revision.name))[1] == FILES
    assert [start for start in hub.ranges if start] == ["bytes=10-", "bytes=1500000-", "bytes=2500000-"]


async def test_what_a_broken_import_has_fetched_is_not_fetched_again(
    client: Client, hub: Hub, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_PAUSE_S", 0.0)
    hub.cut = [len(FILES[CONFIG_FILE]), 2_000_000, *[0] * 5]
    code, message = await refused(client, refusal)
    assert (code, "breaks off" in message) == ("UNAVAILABLE", True)
    request = pb.ImportRevisionRequest(adapter="support", source=HF)
    events = [e async for e in client.stub.ImportRevision(request, metadata=(("x-loraplex-tenant", "acme"),))]
    assert events[-1].imported.created
    assert hub.ranges[-1] == "bytes=2000000-"
    assert (await client.download(events[-1].imported.revision.name))[1] == FILES


async def test_a_cancelled_import_leaves_nothing_visible_and_goes_on(client: Client, hub: Hub) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        may_go_on.wait(60)

    hub.before_file = wait
    request = pb.ImportRevisionRequest(adapter="support", source=HF)
    call = client.stub.ImportRevision(request, metadata=(("x-loraplex-tenant", "acme"),))
    running = asyncio.ensure_future(call.read())
    await asyncio.to_thread(begun.wait, 20)
    with pytest.raises(grpc.aio.AioRpcError, match="another import"):
        await import_(client)
    call.cancel()
    may_go_on.set()
    await asyncio.gather(running, return_exceptions=True)
    assert not (await client.call("ListAdapters", pb.ListAdaptersRequest())).adapters
    hub.before_file = lambda: None
    async with asyncio.timeout(60):
        while True:
            try:
                imported = await import_(client)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.ABORTED:  # the thread of the cancelled one has not ended yet
                    raise
                await asyncio.sleep(0.02)
            else:
                break
    assert (await client.download(imported.revision.name))[1] == FILES


FAULTS: dict[str, tuple[Callable[[Hub], object], str, str]] = {
    "longer than listed": (lambda hub: setattr(hub, "lie", -5), "ABORTED", "changed"),
    "shorter than listed": (lambda hub: setattr(hub, "lie", 5), "ABORTED", "changed"),
    "no config": (lambda hub: hub.files.pop(CONFIG_FILE), "INVALID_ARGUMENT", "no adapter_config.json"),
    "a pickle alone": (
        lambda hub: hub.files.update({"adapter_model.bin": hub.files.pop(WEIGHTS_FILE)}),
        "INVALID_ARGUMENT",
        "a pickle",
    ),
    "two adapters": (
        lambda hub: (
            [hub.files.update({f"{at}/{name}": hub.files[name] for name in FILES}) for at in "ab"]
            and [hub.files.pop(name) for name in FILES]
        ),
        "INVALID_ARGUMENT",
        "give one of its folders, a or b",
    ),
    "a gone commit": (lambda hub: setattr(hub, "gone", True), "NOT_FOUND", "a revision main"),
    "a secret": (lambda hub: setattr(hub, "token", "s"), "FAILED_PRECONDITION", "credentials"),
    "too large": (lambda hub: hub.files.update({WEIGHTS_FILE: BIG * 2}), "INVALID_ARGUMENT", "at most 4194304"),
    "git's pointer": (
        lambda hub: hub.files.update({WEIGHTS_FILE: b"version https://git-lfs.github.com/spec/v1\n"}),
        "INVALID_ARGUMENT",
        "git-lfs",
    ),
    "too many files": (
        lambda hub: hub.files.update({f"{number}.txt": b"" for number in range(10_000)}),
        "INVALID_ARGUMENT",
        "more than 10000 files",
    ),
    "a bad template": (
        lambda hub: hub.files.update({"chat_template.jinja": b"\xff"}),
        "INVALID_ARGUMENT",
        "cannot be read",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_source_that_is_wrong_leaves_nothing(
    fault: str, client: Client, hub: Hub, refusal: Refusal, uploads_gone: Callable[[], Any]
) -> None:
    spoil, code, words = FAULTS[fault]
    spoil(hub)
    answer, message = await refused(client, refusal)
    assert (answer, words in message) == (code, True), message
    await is_empty(client, uploads_gone)


async def test_a_file_with_other_bytes_than_its_digest_is_refused(
    client: Client, hub: Hub, refusal: Refusal, uploads_gone: Callable[[], Any]
) -> None:
    hub.before_file = lambda: hub.files.update({WEIGHTS_FILE: BIG[::-1]})
    code, message = await refused(client, refusal)
    assert (code, "digest" in message) == ("INVALID_ARGUMENT", True)
    await is_empty(client, uploads_gone)


async def test_an_import_that_takes_too_long_ends(client: Client, store: Any, hub: Hub, refusal: Refusal) -> None:
    may_go_on = threading.Event()

    def wait() -> None:
        may_go_on.wait(60)

    hub.before_file = wait
    store._transfers._timeout_s = 0.2
    code, message = await refused(client, refusal)
    may_go_on.set()
    assert (code, "more than 0.2 s" in message) == ("DEADLINE_EXCEEDED", True)


async def test_a_redirect_to_a_private_address_is_refused(
    client: Client,
    hub: Hub,
    sources: Path,
    refusal: Refusal,
    uploads_gone: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = threading.Event()

    def answer(handler: Place) -> None:
        asked.set()
        handler.send(200, BIG)

    # For this test the hub's address is a public one, and that of the other server is not.
    monkeypatch.setattr(http, "_is_public", lambda address: address == "127.0.0.1")
    trust_nobody(sources)
    with served(answer, "127.0.0.2") as private:
        hub.redirect = private
        code, message = await refused(client, refusal)
    assert (code, "127.0.0.2, of a private network" in message) == ("PERMISSION_DENIED", True)
    assert not asked.is_set()
    await is_empty(client, uploads_gone)


async def test_a_hub_at_a_private_address_is_refused_unless_it_is_allowed(
    client: Client, hub: Hub, sources: Path, refusal: Refusal
) -> None:
    trust_nobody(sources)
    code, message = await refused(client, refusal)
    assert (code, "allow_private" in message) == ("PERMISSION_DENIED", True)
    assert not hub.ranges


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::a00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:a00:1::", False),
        ("2002:a83f:8110::", False),
        ("168.63.129.16", False),
        ("::ffff:168.63.129.16", False),
        ("192.0.0.192", False),
        ("fec0::1", False),
        ("::127.0.0.1", False),
        ("64:ff9b:1::a9fe:a9fe", False),
    ],
)
def test_private_addresses_are_known(address: str, public: bool) -> None:
    assert http._is_public(address) is public


@pytest.mark.parametrize(
    ("source", "tenant", "code", "words"),
    [
        ("hf://acme/support", "globex", "PERMISSION_DENIED", "globex may not import"),
        ("hf://acmeevil/support", "acme", "PERMISSION_DENIED", "--sources"),
        ("s3://acme/support", "acme", "PERMISSION_DENIED", "--sources"),
        ("hf://user:secret@acme/support", "acme", "INVALID_ARGUMENT", "credentials in it"),
        ("file:///etc/../etc/passwd", "acme", "INVALID_ARGUMENT", "'..'"),
        ("http://acme/support", "acme", "INVALID_ARGUMENT", "is not a source"),
        ("hf://acme/support?x=1", "acme", "INVALID_ARGUMENT", "a query"),
    ],
)
async def test_only_allowed_places_are_asked(
    source: str, tenant: str, code: str, words: str, client: Client, refusal: Refusal, hub: Hub
) -> None:
    answer, message = await refused(client, refusal, source=source, tenant=tenant)
    assert (answer, words in message) == (code, True), message
    assert not hub.ranges


async def test_a_folder_and_a_snapshot_of_a_hubs_cache_are_imported(
    client: Client, tmp_path: Path, refusal: Refusal
) -> None:
    cache = tmp_path / "models" / "models--acme--support"
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for name, content in FILES.items():
        (cache / "blobs" / name[8:]).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{name[8:]}")
    imported = await import_(client, f"file://{snapshot}")
    assert (await client.download(imported.revision.name))[1] == FILES
    outside = tmp_path / "secret"
    outside.write_bytes(BIG)
    for target in (outside, cache / "snapshots"):
        (snapshot / WEIGHTS_FILE).unlink()
        (snapshot / WEIGHTS_FILE).symlink_to(target)
        code, message = await refused(client, refusal, source=f"file://{snapshot}")
        assert (code, "links are not followed" in message) == ("INVALID_ARGUMENT", True)


def test_a_prefix_allows_what_is_below_it_alone() -> None:
    for prefix, uri, allowed in (
        ("s3://b/acme", "s3://b/acme/x", True),
        ("s3://b/acme", "s3://b/acme@corp/x", False),
        ("gs://b/acme", "gs://b/acme:old/x", False),
        ("file:///srv/acme", "file:///srv/acme:old", False),
        ("file:///srv/acme", "file:///srv/acme@old", False),
        ("hf://acme/support", "hf://acme/support@main/folder", True),
        ("hf://acme/support", "hf://acme/support:main", False),
        ("oci://registry.test/acme", "oci://registry.test/acme:v1", True),
        ("oci://registry.test", "oci://registry.test/acme:v1", True),
        ("oci://registry.test", "oci://registry.test:8443/acme:v1", False),
    ):
        assert Rule(parse_uri(prefix)).matches(parse_uri(uri), "acme") is allowed, uri


def read_folder(folder: Path, allowed: Path) -> list[bytes]:
    """Return the contents of a file:// source's files."""
    source = Folder(parse_uri(f"file://{folder}"), Rule(parse_uri(f"file://{allowed}")))
    return [b"".join(source.read(file, 0)) for file in source.list().files]


def test_a_folder_is_not_left_through_a_cache_whose_blobs_are_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/weights").write_bytes(b"of another tenant")
    cache = tmp_path / "allowed/models--a"
    snapshot = cache / "snapshots/x"
    snapshot.mkdir(parents=True)
    (cache / "blobs").symlink_to(tmp_path / "other")
    (snapshot / WEIGHTS_FILE).symlink_to("../../blobs/weights")
    with pytest.raises(InvalidField, match="links are not followed"):
        read_folder(snapshot, tmp_path / "allowed")
    (cache / "blobs").unlink()
    (cache / "blobs").mkdir()
    (cache / "blobs/weights").write_bytes(b"its own")
    assert read_folder(snapshot, tmp_path / "allowed") == [b"its own"]
    with pytest.raises(InvalidField, match="links are not followed"):
        read_folder(snapshot, snapshot)  # the blobs are not below what is allowed


def test_a_folder_that_is_exchanged_with_a_link_while_it_is_read_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each system call on a path of the folder finds it exchanged since the last one."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / WEIGHTS_FILE).write_bytes(b"of another tenant")
    (tmp_path / "allowed/z").mkdir(parents=True)
    (tmp_path / "allowed/z" / WEIGHTS_FILE).write_bytes(b"its own")
    away, link, here = tmp_path / "away", tmp_path / "link", tmp_path / "allowed/z"
    link.symlink_to(tmp_path / "other")
    real = {name: getattr(os, name) for name in ("open", "lstat", "stat", "scandir", "readlink")}
    calls, exchanged_at = 0, 0

    def exchanging(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == exchanged_at:
                here.rename(away)
                link.rename(here)
            return real[name](*args, **kwargs)

        return call

    def read() -> list[bytes]:
        with monkeypatch.context() as patched:
            for name in real:
                patched.setattr(os, name, exchanging(name))
            with suppress(CallError):
                return read_folder(tmp_path / "allowed", tmp_path / "allowed")
        return []

    assert read() == [b"its own"]
    for exchanged_at in range(1, calls + 1):
        calls = 0
        assert b"of another tenant" not in read(), exchanged_at
        if away.exists():
            here.rename(link)
            away.rename(here)


async def test_a_registry_that_asks_for_its_password_elsewhere_does_not_get_it(
    client: Client, sources: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "s3cret")
    asked = list[str | None]()

    def realm(handler: Place) -> None:
        asked.append(handler.headers.get("authorization"))
        handler.send(403)

    with served(realm, "127.0.0.2") as elsewhere:
        challenge = f'Bearer realm="{elsewhere}/token",service="registry"'
        with served(lambda handler: handler.send(401, www_authenticate=challenge)) as url:
            secret = 'credentials = "r"\n[credentials.r]\npassword_env = "REGISTRY_PASSWORD"\n'
            allow(sources, "oci://registry.test/acme", url, secret)
            code, message = await refused(client, refusal, source="oci://registry.test/acme/support:v1")
            assert (code, elsewhere in message, asked) == ("FAILED_PRECONDITION", True, [])
            allow(sources, "oci://registry.test/acme", url, f'realm = "{elsewhere}"\n{secret}')
            await refused(client, refusal, source="oci://registry.test/acme/support:v1")
            assert [bool(one and one.startswith("Basic ")) for one in asked] == [True]


async def test_extra_files_and_checkpoints_are_left_out_with_a_word(client: Client, hub: Hub) -> None:
    hub.files = {
        **FILES,
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
        "README.md": b"#",
        "adapter_model.bin": b"pickle",
        "added_tokens.json": b'{"<x>": 5}',
        **{f"checkpoint-5/{name}": content for name, content in FILES.items()},
    }
    imported = await import_(client)
    kept = (await client.download(imported.revision.name))[1]
    assert json.loads(kept[CONFIG_FILE])["loraplex_chat"] == {
        "template": "{{ messages }}", "tool_template": "{{ tools }}"
    }  # fmt: skip
    assert kept[WEIGHTS_FILE] == BIG
    words = " ".join(imported.warnings)
    for left_out in ("adapter_model.bin", "checkpoint-5", "added tokens", "chat_template.jinja was taken"):
        assert left_out in words
    hub.files = {f"checkpoint-5/{name}": content for name, content in FILES.items()}
    (warning,) = (await import_(client, name="other")).warnings
    assert "checkpoint-5 was taken" in warning
    assert (await import_(client, f"{HF}/checkpoint-5", name="third")).revision.provenance.pin.endswith("/checkpoint-5")


async def test_an_artifact_of_a_registry_is_the_same_revision_as_what_was_exported(
    client: Client, sources: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = OciRegistry(password="s3cret")
    monkeypatch.setenv("REGISTRY_PASSWORD", "s3cret")
    uploaded = await client.upload("support", FILES)
    with served(registry.answer) as url:
        secret = 'export = true\ncredentials = "r"\n[credentials.r]\npassword_env = "REGISTRY_PASSWORD"\n'
        allow(sources, "oci://registry.test/acme", url, secret)
        request = pb.ExportRevisionRequest(name="support", destination="oci://registry.test/acme/support:v1")
        call = client.stub.ExportRevision(request, metadata=(("x-loraplex-tenant", "acme"),))
        exported = [event async for event in call][-1].exported
        manifest = json.loads(registry.manifests["v1"])
        assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
        assert manifest["annotations"]["loraplex.revision"] == uploaded.revision.digest
        assert manifest["annotations"]["loraplex.base-digest"] == uploaded.revision.base_digest
        imported = await import_(client, "oci://registry.test/acme/support:v1", name="back")
        assert imported.revision.digest == uploaded.revision.digest
        assert imported.revision.provenance.pin == exported.pin
        assert (await client.download(imported.revision.name))[1] == FILES
        assert (await import_(client, exported.pin, name="pinned")).revision.digest == uploaded.revision.digest
        digest = manifest["layers"][1]["digest"]
        registry.blobs[digest] = BIG[::-1]
        code, message = await refused(client, refusal, source=exported.pin, name="damaged")
        assert (code, "digest" in message) == ("INVALID_ARGUMENT", True)
        registry.manifests["v1"] = b'{"layers": [], "config": {}}'
        code, message = await refused(client, refusal, source="oci://registry.test/acme/support:v1", name="damaged")
        assert (code, "not a model artifact" in message) == ("INVALID_ARGUMENT", True)
    request = pb.ExportRevisionRequest(name="support", destination="oci://elsewhere.test/acme/support:v1")
    with pytest.raises(grpc.aio.AioRpcError, match="may not export"):
        [event async for event in client.stub.ExportRevision(request, metadata=(("x-loraplex-tenant", "acme"),))]
