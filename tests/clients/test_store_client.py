"""The SDK's store clients, blocking and async, against a real adapter store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import loraplex_client as lx
from loraplex.cli.models import registered
from loraplex.contracts.artifacts.base_model import read_base_model

Ask = Callable[..., Any]
MODEL = read_base_model("hash:?vocab=1024&seed=3")


def _ask(address: str, tenant: str, method: str, *arguments: Any, **options: Any) -> Any:
    with lx.StoreClient(address, tenant) as client:
        return getattr(client, method)(*arguments, **options)


def _ask_async(address: str, tenant: str, method: str, *arguments: Any, **options: Any) -> Any:
    async def run() -> Any:
        async with lx.AsyncStoreClient(address, tenant) as client:
            return await getattr(client, method)(*arguments, **options)

    return asyncio.run(run())


@pytest.fixture(params=[_ask, _ask_async], ids=["sync", "async"])
def ask(request: pytest.FixtureRequest, store_address: str) -> Iterator[Ask]:
    """Call a method of either client as tenant acme or globex; the store knows the base model, and ends up empty."""

    def bound(method: str, *arguments: Any, tenant: str = "acme", **options: Any) -> Any:
        return request.param(store_address, tenant, method, *arguments, **options)

    bound("register_model", registered(MODEL), MODEL.files)
    yield bound
    for tenant in ("acme", "globex"):
        for adapter in bound("list", tenant, tenant=tenant):
            bound("delete", adapter.name, tenant=tenant)


def test_register_and_list_models(ask: Ask) -> None:
    files = {"config.json": b"{}", "tokenizer.json": bytes(700_000), "added_tokens.json": b""}
    module = lx.Module("model.layers.0.mlp.up_proj", 8, 16)
    model = lx.BaseModel("tiny", f"sha256:{'0' * 64}", "llama", 512, 1000, (1, 2), (module,))
    registered_model = ask("register_model", model, files)
    assert {file.name: file.size for file in registered_model.files} == {
        name: len(data) for name, data in files.items()
    }
    assert (registered_model.modules, registered_model.end_token_ids) == ((module,), (1, 2))
    assert {one.name: one for one in ask("models")}["tiny"] == registered_model
    other = lx.BaseModel("tiny", f"sha256:{'1' * 64}", "llama", 512, 1000, (1, 2), (module,))
    with pytest.raises(lx.LoraplexError):
        ask("register_model", other, files)
    assert ask("register_model", other, files, replace=True).digest == other.digest
    ask("register_model", model, files, replace=True)


def test_a_template_beside_an_adapter_is_a_part_of_it(ask: Ask, adapter_directory: Path, tmp_path: Path) -> None:
    plain = ask("push", adapter_directory, "support", base_model=MODEL.name).revision
    (adapter_directory / "chat_template.jinja").write_text("{{ messages }} — ☀")
    own = ask("push", adapter_directory, "support", base_model=MODEL.name).revision
    assert own.digest != plain.digest
    ask("download", own.name, tmp_path / "down")
    config = json.loads((tmp_path / "down/adapter_config.json").read_text())
    assert config.pop("loraplex_chat") == {"template": "{{ messages }} — ☀"}
    assert config == json.loads((adapter_directory / "adapter_config.json").read_text())
    # A downloaded adapter is pushed as the same revision, whatever template file is beside it.
    (tmp_path / "down/chat_template.jinja").write_text("another")
    assert ask("push", tmp_path / "down", "support", base_model=MODEL.name).revision.digest == own.digest


def test_prompts_beside_an_adapter_are_a_part_of_it(ask: Ask, adapter_directory: Path, tmp_path: Path) -> None:
    prompts = adapter_directory / "certificate_prompts.jsonl"
    prompts.write_text('{"prompt": "Dear ☀"}\n{"prompt": "b", "more": 1}\n')
    pushed = ask("push", adapter_directory, "support", base_model=MODEL.name).revision
    ask("download", pushed.name, tmp_path / "down")
    config = json.loads((tmp_path / "down/adapter_config.json").read_text())
    assert config["loraplex_certificate_prompts"] == ["Dear ☀", "b"]
    chat = {"messages": [{"role": "user", "content": "Is 7 prime?"}], "answer": "yes"}
    prompts.write_text(json.dumps({**chat, "id": 1}) + '\n{"prompt": "b", "messages": null, "answer": "c"}\n')
    pushed = ask("push", adapter_directory, "support", base_model=MODEL.name).revision
    assert ask("config", pushed.name)["loraplex_certificate_prompts"] == [chat, {"prompt": "b", "answer": "c"}]
    for bad in ('{"text": "b"}', '{"prompt": "b", "messages": []}', "b", "\n"):
        prompts.write_text(f'{{"prompt": "a"}}\n{bad}')
        with pytest.raises(lx.InvalidRequestError, match="line 2 is not a JSON object") as caught:
            ask("push", adapter_directory, "support", base_model=MODEL.name)
        assert caught.value.field == "directory"


def test_a_certificate_goes_up_with_a_verdict(ask: Ask, adapter_directory: Path) -> None:
    pushed = ask("push", adapter_directory, "support", base_model=MODEL.name).revision
    given = lx.FitnessCertificate("int8", MODEL.digest, 16, False, 300, 0.5, 0.25, 1.5)
    kept = ask("certify", pushed.name, given)
    assert replace(kept, verdict="", breach="", create_time=None) == given
    assert (kept.verdict, kept.breach) == (
        "refused",
        "greedy agreement 0.5 is below 0.8, mean divergence 0.25 nats is above 0.2",
    )
    assert ask("get", "support")[1].certificates == (kept,)


def test_push_show_list(ask: Ask, adapter_directory: Path) -> None:
    sent: list[tuple[int, int]] = []
    pushed = ask(
        "push",
        adapter_directory,
        "support",
        base_model="hash",
        progress=lambda so_far, total: sent.append((so_far, total)),
    )
    total = sum(path.stat().st_size for path in adapter_directory.iterdir())
    assert sent[-1] == (total, total)
    assert len(sent) == 4  # the configuration, and three chunks of weights
    assert pushed.created
    assert pushed.revision.name == f"tenants/acme/adapters/support/revisions/{pushed.revision.digest}"
    assert pushed.revision.weight_bytes == 1_300_000
    assert pushed.adapter.aliases == {"live": pushed.revision.digest}
    assert ask("get", "support") == (pushed.adapter, pushed.revision)
    assert ask("list") == (pushed.adapter,)
    assert ask("list", tenant="globex") == ()
    assert not ask("push", adapter_directory, "support", base_model="hash").created


def test_revisions_and_aliases(ask: Ask, adapter_directory: Path) -> None:
    first = ask("push", adapter_directory, "support", base_model="hash").revision
    (adapter_directory / "adapter_model.safetensors").write_bytes(b"other")
    second = ask("push", adapter_directory, "support", base_model="hash", alias="canary").revision
    assert ask("revisions", "support") == (second, first)
    assert ask("get", "support")[1] == first
    assert ask("get", "support@canary")[1] == second
    assert ask("set_alias", "support", "live", second.digest).aliases["live"] == second.digest
    assert ask("set_alias", "support", "canary", "").aliases == {"live": second.digest}


def test_what_went_up_comes_down(ask: Ask, adapter_directory: Path, tmp_path: Path) -> None:
    pushed = ask("push", adapter_directory, "support", base_model="hash")
    for name in ("support", "support@live", pushed.revision.name):
        target = tmp_path / "down" / name.replace("/", "_")
        assert ask("download", name, target) == pushed.revision
        assert {path.name: path.read_bytes() for path in target.iterdir()} == {
            path.name: path.read_bytes() for path in adapter_directory.iterdir()
        }


def test_failed_download_leaves_nothing(ask: Ask, tmp_path: Path) -> None:
    missing = f"tenants/acme/adapters/support/revisions/sha256:{'0' * 64}"
    with pytest.raises(lx.NotFoundError):
        ask("download", missing, tmp_path / "down")
    assert list((tmp_path / "down").iterdir()) == []


def test_another_tenants_adapter_is_not_found(ask: Ask, adapter_directory: Path) -> None:
    name = ask("push", adapter_directory, "support", base_model="hash").adapter.name
    for method in ("get", "revisions", "delete"):
        with pytest.raises(lx.NotFoundError):
            ask(method, name, tenant="globex")


def test_many_pages(ask: Ask, adapter_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex_client.adapters.PAGE_SIZE", 2)
    names = [ask("push", adapter_directory, f"a{number}", base_model="hash").adapter.name for number in range(5)]
    assert [adapter.name for adapter in ask("list")] == names


def test_not_an_adapter(ask: Ask, tmp_path: Path) -> None:
    with pytest.raises(lx.InvalidRequestError, match=r"has no adapter_config\.json") as caught:
        ask("push", tmp_path, "support")
    assert caught.value.field == "directory"


def test_what_breaks_an_upload_is_what_is_raised(ask: Ask, adapter_directory: Path) -> None:
    def fail(sent: int, total: int) -> None:
        raise KeyError(sent, total)

    with pytest.raises(KeyError):
        ask("push", adapter_directory, "support", base_model="hash", progress=fail)
    assert ask("list") == ()
