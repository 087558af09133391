"""The week of an auditor: reads all tenants' things and the audit log, finds who did what, and can change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.weeks.conftest import Person, Workplace, until


@pytest.fixture(scope="module")
def auditor(workplace: Workplace) -> Person:
    """Somebody with an auditor's key, which the operator has made."""
    workplace.operator.run("loraplex keys create --role auditor --label auditor --out auditor.key")
    return workplace.person("auditor", workplace.operator.directory / "auditor.key", operates=True)


def records(log: Path, event: str) -> list[dict[str, Any]]:
    """Return the whole lines of a log with that event."""
    lines = log.read_text().rpartition("\n")[0].splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def test_who_revoked_what_is_in_the_log_and_its_chain_holds(workplace: Workplace, auditor: Person) -> None:
    admin, store = workplace.administrator("globex"), workplace.directory / "store.jsonl"
    until(lambda: "head" in auditor.tries(f"loraplex audit verify {store}"), "the log is whole")
    head = auditor.run(f"loraplex audit verify {store}").split()[-1]
    admin.run("loraplex keys create --label lost --out lost.key")
    lost = (admin.directory / "lost.key").read_text().split("_")[1]
    admin.run(f"loraplex keys revoke {lost}")
    (own,) = [key for key in admin.json("loraplex keys list") if key["label"] == "admin"]

    def revocations() -> list[dict[str, Any]]:
        calls = records(store, "call")
        return [one for one in calls if one["method"] == "KeyService/RevokeKey" and one["details"]["key_id"] == lost]

    until(revocations, "the revocation is on the disk")
    (revoked,) = revocations()
    assert (revoked["tenant"], revoked["result"]) == ("globex", "OK")
    assert own["key_id"] in revoked["caller"]
    assert lost in auditor.run(f"loraplex audit show {store} --tenant globex --since 1h")
    assert lost not in auditor.run(f"loraplex audit show {store} --tenant acme")
    exported = [json.loads(line) for line in auditor.run(f"loraplex audit show {store} --json").splitlines()]
    assert revoked in exported
    text = store.read_text()
    assert (admin.directory / "lost.key").read_text().strip() not in text, "no key is in the log"

    number, verified = int(head.partition(":")[0]), auditor.run(f"loraplex audit verify {store} --known {head}")
    assert int(verified.split()[0]) >= number + 2
    forged = auditor.directory / "forged.jsonl"
    forged.write_text(text.replace(f'"{lost}"', '"0123456789abcdef"'))
    assert "not as it was written" in auditor.run(f"loraplex audit verify {forged}", 1)
    forged.write_text("".join(text.splitlines(keepends=True)[: number - 1]))
    assert "not as it was written" in auditor.run(f"loraplex audit verify {forged} --known {head}", 1), "its end is cut"


@pytest.fixture(scope="module")
def revision(workplace: Workplace) -> str:
    """The digest of a revision of globex's adapter `audited`, of which there is a release."""
    directory = workplace.directory / "audited"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}')
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    admin = workplace.administrator("globex")
    admin.run(f"loraplex releases push {directory} --name audited")
    admin.run("loraplex adapters grant audited --to acme")
    (only,) = admin.json("loraplex adapters show audited")["revisions"]
    return str(only["digest"])


def test_the_things_of_all_tenants_are_seen(auditor: Person, revision: str) -> None:
    tenants = {one["tenant"]: one for one in auditor.json("loraplex tenants list")}
    assert {"acme", "globex"} <= tenants.keys()
    assert tenants["globex"]["adapters"]
    assert {"acme", "globex", ""} <= {key["tenant"] for key in auditor.json("loraplex keys list")}
    assert "tenants/acme" in {plan["name"] for plan in auditor.json("loraplex plans list")}
    assert "audited" in auditor.run("loraplex adapters list --tenant globex")
    assert revision[:19] in auditor.run("loraplex adapters show audited --tenant globex")
    assert "acme" in auditor.run("loraplex adapters grants audited --tenant globex")
    assert revision[:19] in auditor.run("loraplex releases list audited --tenant globex")
    assert "tiny" in auditor.run("loraplex models list")
    assert auditor.json("loraplex workers")
    assert "acme" in auditor.run("loraplex usage")
    assert "tiny" in auditor.run("loraplex queues")


def test_nothing_can_be_changed_and_attempts_are_on_record(
    workplace: Workplace, auditor: Person, revision: str
) -> None:
    for line in (
        "loraplex keys create --tenant acme",
        "loraplex keys revoke 0123456789abcdef",
        "loraplex keys rotate 0123456789abcdef",
        "loraplex plans set tenants/acme weight=9",
        "loraplex plans delete tenants/acme",
        "loraplex tenants purge acme --yes --router ''",
        f"loraplex adapters alias audited next {revision} --tenant globex",
        "loraplex adapters delete audited --tenant globex",
        "loraplex adapters grant audited --to initech --tenant globex",
        "loraplex adapters ungrant audited --to acme --tenant globex",
        "loraplex adapters pin audited --tenant globex",
        "loraplex releases promote audited#1 --tenant globex",
        "loraplex releases abort audited#1 --tenant globex",
        "loraplex models push hash:?seed=9 --name another",
        "loraplex drain worker-1",
        "loraplex resume-keys rotate",
        "loraplex quarantine lift acme",
        'loraplex generate "Hello" --tenant acme',
    ):
        auditor.refused(line, "role auditor may not call this")
    key_id = Path(auditor.environ["LORAPLEX_API_KEY_FILE"]).read_text().split("_")[1]
    for name, method in (("store.jsonl", "KeyService/CreateKey"), ("router.jsonl", "ClusterService/PinAdapter")):
        log = workplace.directory / name

        def tried(log: Path = log) -> set[str]:
            return {one["method"] for one in records(log, "refused") if key_id in one["caller"]}

        until(lambda tried=tried, method=method: method in tried(), f"the refusal of {method} is on the disk")  # type: ignore[misc]
