"""A worker whose engines die one after the other claims nothing for a while."""

from __future__ import annotations

from loraplex.worker.io.engine_client import DEATHS_LIMIT, OPEN_LIMIT_S, EngineBreaker

ACME, GLOBEX, INITECH = (frozenset({(tenant, "")}) for tenant in ("acme", "globex", "initech"))


def test_deaths_of_different_jobs_in_a_row_open_the_breaker() -> None:
    breaker = EngineBreaker()
    for pairs in (ACME, GLOBEX):
        breaker.died(pairs)
        assert not breaker.is_open
    breaker.died(INITECH)
    assert breaker.is_open


def test_deaths_of_suspects_open_no_breaker() -> None:
    breaker = EngineBreaker()
    for pairs in (ACME, GLOBEX):
        breaker.died(pairs)
        for _ in range(DEATHS_LIMIT):
            breaker.died(frozenset(), of_suspect=True)
    assert not breaker.is_open
    breaker.died(INITECH)
    assert breaker.is_open


def test_deaths_of_the_same_tenant_and_adapter_are_its_own_fault() -> None:
    breaker = EngineBreaker()
    breaker.died(ACME | GLOBEX)
    for _ in range(2 * DEATHS_LIMIT):
        breaker.died(ACME)
    assert not breaker.is_open


def test_an_engine_that_dies_in_a_step_of_its_own_opens_the_breaker() -> None:
    breaker = EngineBreaker()
    breaker.died(ACME)
    breaker.died(frozenset(), in_own_step=True)
    assert breaker.is_open


def test_the_pause_grows_with_each_death_until_a_step_gives_a_job_a_token() -> None:
    breaker = EngineBreaker(suspicious_s=0.5, open_s=2.0)
    breaker.stepped()
    breaker.died(ACME)
    assert (breaker.deaths, breaker.pause_s) == (1, 0.0)
    breaker.died(GLOBEX)
    assert breaker.pause_s == 0.5
    pauses = []
    for _ in range(12):
        breaker.died(INITECH)
        pauses.append(breaker.pause_s)
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, *[OPEN_LIMIT_S] * 4]
    breaker.stepped()
    assert (breaker.deaths, breaker.is_open) == (0, False)
    breaker.died(ACME)
    assert not breaker.is_open
