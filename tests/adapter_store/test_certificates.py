"""Certificates: kept with a revision, judged by the store's limits, bound to base and quantization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from loraplex.adapters.v1 import adapters_pb2 as pb

from loraplex.adapter_store.app import Store, StoreSettings
from loraplex.adapter_store.embedded import EmbeddedDatabase
from loraplex.adapter_store.records import find_revision
from loraplex.contracts.artifacts.base_model import BaseModel
from loraplex.contracts.artifacts.fitness import Figures
from loraplex.contracts.artifacts.names import RevisionName
from loraplex.router.catalog.adapters import forget_warnings, resolve_adapters
from loraplex.router.catalog.store_client import StoreClient
from loraplex.router.request import Request, WeightedAdapter
from loraplex.runtime.rpc.errors import Mismatch

if TYPE_CHECKING:
    from tests.adapter_store.conftest import Client

Files = Callable[..., dict[str, bytes]]
Refusal = Callable[[grpc.aio.AioRpcError], tuple[str, str, bytes]]
FIGURES = {"prompts": 16, "drawn": False, "tokens": 200, "agreement": 0.96875, "mean_kl": 0.02, "max_kl": 0.5}


def certificate(base: BaseModel, quantization: str = "int4", **figures: Any) -> pb.FitnessCertificate:
    return pb.FitnessCertificate(quantization=quantization, base_digest=base.digest, **FIGURES | figures)


async def certify(
    client: Client, name: str, given: pb.FitnessCertificate, tenant: str = "acme"
) -> pb.FitnessCertificate:
    request = pb.CertifyRevisionRequest(name=name, certificate=given)
    kept: pb.FitnessCertificate = (await client.call("CertifyRevision", request, tenant)).certificate
    return kept


@pytest.fixture
async def revision(client: Client, tiny_base: BaseModel, adapter_files: Files) -> Any:
    """A revision of acme's adapter."""
    await client.register(tiny_base)
    return (await client.upload("support", adapter_files())).revision


async def test_a_certificate_stays_with_its_revision(
    client: Client, tiny_base: BaseModel, adapter_files: Files, revision: Any
) -> None:
    kept = await certify(client, revision.name, certificate(tiny_base))
    assert (kept.verdict, kept.breach, kept.agreement) == (pb.VERDICT_FIT, "", 0.96875)
    assert kept.create_time.ToNanoseconds() > 0
    await certify(client, revision.name, certificate(tiny_base, "int8"))
    later = await certify(client, revision.name, certificate(tiny_base, agreement=0.9375))
    other = (await client.upload("support", adapter_files(1))).revision
    assert not other.certificates
    listed = (await client.call("ListRevisions", pb.ListRevisionsRequest(parent="support"))).revisions
    assert list(listed) == [other, (await client.get(f"support@{revision.digest}")).revision]
    assert [(each.quantization, each.agreement) for each in listed[1].certificates] == [
        ("int4", 0.9375),
        ("int8", 0.96875),
    ]
    assert listed[1].certificates[0] == later
    # These bytes for another base are another matter.
    replaced = replace(tiny_base, digest="sha256:" + "2" * 64)
    await client.register(replaced, replace=True)
    again = (await client.upload("support", adapter_files())).revision
    assert (again.digest, list(again.certificates)) == (revision.digest, [])
    await client.call("DeleteAdapter", pb.DeleteAdapterRequest(name="support"))
    await client.register(tiny_base, replace=True)
    assert not (await client.upload("support", adapter_files())).revision.certificates


async def test_limits_are_the_store_s(
    store_settings: StoreSettings, connect: Callable[[str], Client], tiny_base: BaseModel, adapter_files: Files
) -> None:
    """They hold for certificates of before too; a store of before certificates has none, and its data is taken over."""
    figures: dict[str, Any] = {"agreement": 0.5, "mean_kl": 1.25, "max_kl": 9}
    settings = [
        store_settings,
        replace(store_settings, fitness_breach="warn", fitness_max_kl=1.5),
        replace(store_settings, fitness_min_agreement=0.4, fitness_max_kl=1.5),
    ]
    found = []
    for index, each in enumerate(settings):
        store = Store(each)
        await store.start()
        client = connect(f"127.0.0.1:{store.port}")
        if not index:
            await client.register(tiny_base)
            name = (await client.upload("support", adapter_files())).revision.name
            await certify(client, name, certificate(tiny_base, **figures))
        (kept,) = (await client.get("support")).revision.certificates
        found.append((kept.verdict, kept.breach))
        await client.close()
        await store.stop(drain_s=0)
    too_few = "greedy agreement 0.5 is below 0.8"
    assert found == [
        (pb.VERDICT_REFUSED, f"{too_few}, mean divergence 1.25 nats is above 0.2"),
        (pb.VERDICT_WARNED, too_few),
        (pb.VERDICT_FIT, ""),
    ]


async def test_drawn_prompts_only_warn(
    store_settings: StoreSettings, connect: Callable[[str], Client], tiny_base: BaseModel, adapter_files: Files
) -> None:
    store = Store(store_settings)
    await store.start()
    client = connect(f"127.0.0.1:{store.port}")
    await client.register(tiny_base)
    name = (await client.upload("support", adapter_files())).revision.name
    await certify(client, name, certificate(tiny_base, agreement=0.5, drawn=True))
    (kept,) = (await client.get("support")).revision.certificates
    assert (kept.verdict, kept.breach) == (pb.VERDICT_WARNED, "greedy agreement 0.5 is below 0.8")
    await client.close()
    await store.stop(drain_s=0)


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ({"same_answers": 16}, pb.VERDICT_FIT),
        ({"same_answers": 15}, pb.VERDICT_WARNED),
        ({"same_answers": 12}, pb.VERDICT_REFUSED),
        ({"same_answers": 12, "expected_answers": 16, "right_original": 15, "right_quantized": 15}, pb.VERDICT_FIT),
        ({"same_answers": 16, "expected_answers": 16, "right_original": 16, "right_quantized": 8}, pb.VERDICT_REFUSED),
    ],
)
async def test_whole_answers_to_own_prompts_are_judged(
    client: Client, tiny_base: BaseModel, revision: Any, answers: dict[str, Any], verdict: int
) -> None:
    kept = await certify(client, revision.name, certificate(tiny_base, agreement=0.5, **answers))
    assert kept.verdict == verdict
    assert {name: getattr(kept, name) for name in answers} == answers
    assert (await client.get("support")).revision.certificates[0] == kept


def test_certificates_of_before_whole_answers_are_kept(tmp_path: Path) -> None:
    database = EmbeddedDatabase(tmp_path / "catalog.db")
    with database.transaction() as rows:
        rows.execute("INSERT INTO adapters VALUES (1, 'acme', 'support', 'tiny', 0, 0, 0)")
        rows.execute("INSERT INTO revisions VALUES (1, 1, 'd', 'b', 8, 'c', 1, 'w', 1, 0, NULL)")
        rows.execute(
            "INSERT INTO certificates (adapter_id, digest, base_digest, quantization, prompts, drawn, tokens, "
            "agreement, mean_kl, max_kl, create_ns) VALUES (1, 'd', 'b', 'int4', 16, 0, 200, 0.97, 0.02, 0.5, 7)"
        )
    with database.reading() as rows:
        found = find_revision(rows, RevisionName("acme", "support", "d"))
    database.close()
    assert found is not None
    assert [one.figures for one in found.certificates] == [Figures(16, False, 200, 0.97, 0.02, 0.5)]


async def test_routers_refuse_an_unfit_adapter_on_such_a_base_alone(
    store_settings: StoreSettings,
    connect: Callable[[str], Client],
    tiny_base: BaseModel,
    adapter_files: Files,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forget_warnings()  # of the other database
    quantized = replace(tiny_base, digest="sha256:" + "2" * 64, quantization="int4", original_digest=tiny_base.digest)
    broken = "greedy agreement 0.25 is below 0.8, mean divergence 3 nats is above 0.2"
    request = Request("acme", "hello", "prompt", adapter="support")
    weighted = replace(request, adapter="", adapters=(WeightedAdapter("support", 0.5),))
    for settings in (store_settings, replace(store_settings, fitness_breach="warn")):
        store = Store(settings)
        await store.start()
        client, catalog = connect(f"127.0.0.1:{store.port}"), StoreClient(f"127.0.0.1:{store.port}")
        if settings is store_settings:
            await client.register(tiny_base)
            revision = (await client.upload("support", adapter_files())).revision
            await certify(client, revision.name, certificate(tiny_base, agreement=0.25, mean_kl=3, max_kl=9))
            assert (await resolve_adapters(request, [await catalog.manifest("tiny")], catalog))[1] is not None
            await client.register(quantized, replace=True)
            for each in (request, weighted):
                with pytest.raises(Mismatch) as caught:
                    await resolve_adapters(each, [await catalog.manifest("tiny")], catalog)
                assert caught.value.reason == "ADAPTER_UNFIT"
                assert "int4: greedy agreement 0.25 is below 0.8, mean divergence 3 nats is above 0.2" in str(
                    caught.value
                )
        else:
            for _ in range(2):
                assert (await resolve_adapters(request, [await catalog.manifest("tiny")], catalog))[1] is not None
            assert [record.message for record in caplog.records if "unfit" in record.message] == [
                f"{revision.name} is unfit for tiny, whose weights are int4: {broken}"
            ]
        await catalog.close()
        await client.close()
        await store.stop(drain_s=0)


async def test_bad_certificates_are_refused(
    client: Client, tiny_base: BaseModel, revision: Any, refusal: Refusal
) -> None:
    elsewhere = replace(tiny_base, digest="sha256:" + "2" * 64)
    cases: list[tuple[str, pb.FitnessCertificate, str, str, str]] = [
        (revision.name, certificate(elsewhere), "acme", "FAILED_PRECONDITION", "measured with base model"),
        (revision.name, certificate(tiny_base, ""), "acme", "INVALID_ARGUMENT", "certificate.quantization"),
        (revision.name, certificate(tiny_base, agreement=1.5), "acme", "INVALID_ARGUMENT", "agreement 1.5"),
        (revision.name, certificate(tiny_base, max_kl=float("nan")), "acme", "INVALID_ARGUMENT", "mean_kl 0.02"),
        (revision.name, certificate(tiny_base, tokens=0), "acme", "INVALID_ARGUMENT", "counts from 1"),
        (revision.name, certificate(tiny_base, same_answers=17), "acme", "INVALID_ARGUMENT", "17 is more than 16"),
        (revision.name, certificate(tiny_base), "globex", "NOT_FOUND", "adapter not found"),
        (revision.name[:-1] + "0", certificate(tiny_base), "acme", "NOT_FOUND", "revision not found"),
        ("support", certificate(tiny_base), "acme", "INVALID_ARGUMENT", "name"),
    ]
    for name, given, tenant, code, words in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await certify(client, name, given, tenant)
        assert refusal(caught.value)[0] == code
        assert words in (caught.value.details() or "")
    for number in range(32):
        await certify(client, revision.name, certificate(tiny_base, f"scheme-{number}"))
    await certify(client, revision.name, certificate(tiny_base, "scheme-7"))
    with pytest.raises(grpc.aio.AioRpcError, match="certificates for 32 others"):
        await certify(client, revision.name, certificate(tiny_base))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("Dear", "loraplex_certificate_prompts: is not a list of 1 to 64 prompts"),
        ([], "loraplex_certificate_prompts: is not a list of 1 to 64 prompts"),
        (["a", ""], r"loraplex_certificate_prompts\[1\]: is not a text of 1 to 4096 characters"),
        ([{"messages": [{"role": "user"}]}], r"prompts\[0\].messages\[0\]: is not an object with role and content"),
        (["\ud800"], r"loraplex_certificate_prompts\[0\]: has half of a surrogate pair"),
    ],
)
async def test_bad_prompts_are_refused_at_the_upload(
    client: Client, tiny_base: BaseModel, adapter_files: Files, value: Any, words: str
) -> None:
    await client.register(tiny_base)
    with pytest.raises(grpc.aio.AioRpcError, match=words):
        await client.upload("support", adapter_files(loraplex_certificate_prompts=value))


def calibration(base: BaseModel, quantization: str = "", temperature: float = 2.0, **figures: Any) -> pb.Calibration:
    measured: dict[str, Any] = {
        "questions": 40,
        "ece_before": 0.25,
        "ece_after": 0.125,
        "nll_before": 0.75,
        "nll_after": 0.5,
    }
    return pb.Calibration(
        quantization=quantization, base_digest=base.digest, temperature=temperature, **measured | figures
    )


async def calibrate(client: Client, name: str, given: pb.Calibration, tenant: str = "acme") -> pb.Calibration:
    request = pb.CertifyRevisionRequest(name=name, calibration=given)
    kept: pb.Calibration = (await client.call("CertifyRevision", request, tenant)).calibration
    return kept


async def test_a_calibration_stays_with_its_revision_and_routers_learn_its_temperature(
    store_settings: StoreSettings, connect: Callable[[str], Client], tiny_base: BaseModel, adapter_files: Files
) -> None:
    store = Store(store_settings)
    await store.start()
    client, catalog = connect(f"127.0.0.1:{store.port}"), StoreClient(f"127.0.0.1:{store.port}")
    await client.register(tiny_base)
    revision = (await client.upload("support", adapter_files())).revision
    assert not (await catalog.resolve("acme", "support")).temperatures
    first = await calibrate(client, revision.name, calibration(tiny_base))
    assert (first.temperature, first.questions, first.ece_after) == (2.0, 40, 0.125)
    await calibrate(client, revision.name, calibration(tiny_base, "int8", 1.5))
    later = await calibrate(client, revision.name, calibration(tiny_base, temperature=1.25))
    assert later.create_time.ToNanoseconds() > first.create_time.ToNanoseconds()
    await certify(client, revision.name, certificate(tiny_base))
    kept = (await client.get("support")).revision
    assert [(one.quantization, one.temperature) for one in kept.calibrations] == [("", 1.25), ("int8", 1.5)]
    assert [one.quantization for one in kept.certificates] == ["int4"]
    assert (await catalog.resolve("acme", f"support@{revision.digest}")).temperatures == {"": 1.25, "int8": 1.5}
    assert not (await client.upload("support", adapter_files(1))).revision.calibrations
    await catalog.close()
    await client.close()
    await store.stop(drain_s=0)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"temperature": 0.0}, "calibration: has a temperature above 0"),
        ({"temperature": float("inf")}, "calibration: has a temperature above 0"),
        ({"questions": 0}, "questions from 1"),
        ({"ece_after": float("nan")}, "ece_before and ece_after from 0 to 1"),
        ({"nll_after": 1.0}, "nll_after 1.0 is not from 0 to nll_before 0.75"),
        ({"quantization": "x" * 2000}, "calibration.quantization"),
    ],
)
async def test_bad_calibrations_are_refused(
    client: Client, tiny_base: BaseModel, revision: Any, figures: dict[str, Any], words: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=words):
        await calibrate(client, revision.name, calibration(tiny_base, **figures))
    assert not (await client.get("support")).revision.calibrations
