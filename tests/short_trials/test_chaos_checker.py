"""The checker finds what it is there for: forged histories, each with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.trials.chaos import checker
from tests.trials.chaos.checker import check
from tests.trials.chaos.history import (
    Account,
    Answer,
    Begun,
    Call,
    Charged,
    Delta,
    Fault,
    History,
    Idle,
    Left,
    Line,
    Observation,
    Pair,
    Quota,
    Request,
    Revision,
    Score,
    Texts,
    read_history,
)
from tests.trials.chaos.oracle import answers, next_token, prompt_tokens, scores, truth, vectors
from tests.trials.chaos.plan import MODEL
from tests.trials.chaos.report import as_json, as_lines, missed_aims
from tests.trials.chaos.verdict import MANY, Verdict

REVISIONS = (Revision("acme", "a", "sha256:a"), Revision("acme", "b", "sha256:b"))
NOTHING_LEFT = Left(0, 0, [])


def forged(
    change: Callable[[Observation], None] = lambda observation: None, *, request: Request | None = None
) -> Observation:
    """The history of a request that was answered over two calls, changed."""
    request = request or Request(0, REVISIONS[0], "prompt", 40, n=2, logprobs=1, prompt_logprobs=1)
    observation = Observation(request, [Call(0.0, "Generate", "r1"), Call(1.0, "Resume", "r2")], [], {}, [], ended=3.0)
    for choice in range(request.n):
        expected = truth(MODEL, request, choice)
        ids = expected.token_ids
        observation.calls[1].received[choice] = len(ids) // 2
        for at in range(len(ids)):
            second = at >= len(ids) // 2
            observation.deltas.append(Delta(1.5 * second + at / 1e3, int(second), choice, at, ids[at : at + 1]))
        ended = (expected.text, expected.reason, expected.stop)
        observation.answers[choice] = Answer(list(ids), *ended, list(expected.logprobs))
    observation.deltas.sort(key=lambda delta: delta.at)
    whole = answers(MODEL, request)
    observation.prompt_tokens = prompt_tokens(MODEL, request)
    observation.scores = [Score(one.token_ids, one.logprobs, one.greedy) for one in scores(MODEL, request)]
    observation.vectors = [vector for vector, _ in vectors(MODEL, request)]
    observation.prompt_logprobs = list(whole.prompt_logprobs)
    observation.completion_tokens = whole.completion_tokens
    observation.completed, observation.revision = True, f"tenants/acme/adapters/a/revisions/{request.revision.digest}"
    change(observation)
    return observation


def verdict_of(
    *observation: Observation, faults: tuple[Fault, ...] = (), planned: int = 0, left: Left | None = NOTHING_LEFT
) -> Verdict:
    other = forged(request=Request(len(observation), REVISIONS[1], "another", 30))
    lines: list[Line] = [Begun(MODEL, 1, len(observation) + 1, {"worker_kill": planned}), *observation, other, *faults]
    return check([*lines, left] if left else lines)


def counts(verdict: Verdict) -> dict[str, int]:
    names = ("lost", "duplicated", "reordered", "wrong_adapter", "stale_attempt_delivered", "other")
    return {name: count for name in names if (count := getattr(verdict, name))}


def test_a_history_without_fault_holds() -> None:
    verdict = verdict_of(forged())
    assert verdict.holds, verdict.findings
    assert (verdict.requests, verdict.completed, counts(verdict)) == (2, 2, {})


def lose(observation: Observation) -> None:
    del observation.answers[1].token_ids[7]


def repeat(observation: Observation) -> None:
    ids = observation.answers[1].token_ids
    ids[9:9] = ids[6:9]


def swap(observation: Observation) -> None:
    ids = observation.answers[0].token_ids
    ids[3], ids[4] = ids[4], ids[3]


def foreign(observation: Observation) -> None:
    ids = observation.answers[0].token_ids
    ids[5] = next_token(MODEL, observation.request, 0, REVISIONS[1].digest, ids[:5])


def nobodys(observation: Observation) -> None:
    ids = observation.answers[0].token_ids
    ids[5] = next(token for token in range(256, 32_000) if token not in ids)


def fail(observation: Observation) -> None:
    observation.completed, observation.error = False, "UNAVAILABLE"
    observation.answers[0].token_ids = observation.answers[0].token_ids[:10]


def retext(observation: Observation) -> None:
    observation.answers[1].text += "x"


def misplace_logprobs(observation: Observation) -> None:
    assert observation.answers[0].logprobs
    observation.answers[0].logprobs.reverse()


def lose_prompt_logprobs(observation: Observation) -> None:
    observation.prompt_logprobs = []


def miscount(observation: Observation) -> None:
    observation.completion_tokens += 1


def accept_more(observation: Observation) -> None:
    observation.drafted, observation.accepted = 4, 5


def send_again(observation: Observation) -> None:
    """The second call brings two tokens that the client said it had; the SDK would leave them out."""
    observation.calls[1].received[0] += 2


def zombie(observation: Observation) -> None:
    last = observation.deltas[-1]
    observation.deltas.append(Delta(2.9, 0, last.choice, last.offset + 1, (5, 6)))


def leave_out(observation: Observation) -> None:
    observation.deltas = [delta for delta in observation.deltas if (delta.choice, delta.offset) != (0, 3)]


def another_revision(observation: Observation) -> None:
    observation.revision = f"tenants/acme/adapters/b/revisions/{REVISIONS[1].digest}"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lose, {"lost": 1}),
        (repeat, {"duplicated": 3}),
        (swap, {"reordered": 1}),
        (foreign, {"lost": 1, "wrong_adapter": 1}),
        (nobodys, {"lost": 1, "other": 1}),
        (fail, {"lost": 30}),
        (retext, {"other": 1}),
        (misplace_logprobs, {"other": 1}),
        (lose_prompt_logprobs, {"other": 1}),
        (miscount, {"other": 1}),
        (accept_more, {"other": 1}),
        (send_again, {"duplicated": 1}),
        (zombie, {"stale_attempt_delivered": 2}),
        (leave_out, {"lost": 1}),
        (another_revision, {"other": 1}),
    ],
)
def test_what_is_wrong_is_found_and_named(change: Callable[[Observation], None], found: dict[str, int]) -> None:
    verdict = verdict_of(forged(change))
    assert not verdict.holds
    assert counts(verdict) == found
    assert verdict.findings


def test_wrong_scores_are_found() -> None:
    request = Request(0, REVISIONS[0], "prompt", 0, truncate_to=3, continuations=("more", (7, 300)))
    observation = forged(request=request)
    observation.answers.clear()
    assert verdict_of(observation).holds
    first, second = observation.scores
    assert (first.token_ids, observation.prompt_tokens) == (tuple(b"more"), 3 + 4 + 3 + 2)
    for wrong in ([second, first], [first], [first, msgspec.structs.replace(second, logprobs=first.logprobs[:2])]):
        observation.scores = wrong
        assert counts(verdict_of(observation)) == {"other": 1}


def test_wrong_vectors_are_found() -> None:
    texts = Texts("embed", ("one", Pair("a", "b"), (7, 300)))
    request = Request(0, REVISIONS[0], "", 0, texts=texts)
    observation = forged(request=request)
    observation.answers.clear()
    assert verdict_of(observation).holds
    assert observation.prompt_tokens == 3 + 2 + 2
    first, second, third = observation.vectors
    foreign, _ = vectors(MODEL, request, REVISIONS[1].digest)[0]
    for wrong, found in (
        ([first, second], {"lost": 1}),
        ([first, second, third, third], {"duplicated": 1}),
        ([second, first, third], {"reordered": 2}),
        ([foreign, second, third], {"wrong_adapter": 1}),
        ([first[:3], second, third], {"other": 1}),
    ):
        observation.vectors = wrong
        assert counts(verdict_of(observation)) == found


def test_a_request_without_an_outcome_is_found() -> None:
    verdict = check([Begun(MODEL, 1, 2, {}), forged(), NOTHING_LEFT])
    assert verdict.findings == ["request 1 has no outcome"]
    assert not verdict.holds
    twice = verdict_of(forged(), forged())
    assert "request 0 has two outcomes" in twice.findings


def test_a_fault_that_did_not_fire_is_found() -> None:
    fired = Fault(0, "worker_kill", "worker-1", 0.5, 0.9, [0], proof="process 1 ended with -9")
    assert verdict_of(forged(), faults=(fired,), planned=1).holds
    silent = Fault(1, "worker_kill", "worker-1", 0.5, 2.0, [], error="it could not happen")
    verdict = verdict_of(forged(), faults=(fired, silent), planned=2)
    assert verdict.not_fired == ["worker_kill"]
    assert not verdict.holds
    assert not verdict_of(forged(), faults=(fired,), planned=2).holds


def test_kills_that_hit_no_stream_are_found() -> None:
    faults = [Fault(n, "worker_kill", "worker-1", 3.5, 3.6, [0], proof="gone") for n in range(MANY)]
    verdict = verdict_of(forged(), faults=tuple(faults), planned=MANY)
    assert verdict.vain == ["worker_kill"]
    assert not verdict.holds
    assert any("hit no stream" in line for line in as_lines(verdict))
    faults[-1].began, faults[-1].mended = 0.5, 0.9
    assert verdict_of(forged(), faults=tuple(faults), planned=MANY).holds


def test_a_stream_that_breaks_without_a_fault_is_found_though_it_is_resumed() -> None:
    def broken(observation: Observation) -> None:
        observation.calls[0].error = "UNAVAILABLE: the router is shutting down"

    assert "call 0 broke with UNAVAILABLE" in verdict_of(forged(broken)).findings[0]
    killed = Fault(0, "router_kill", "router-1", 0.5, 0.9, [], proof="gone")
    assert verdict_of(forged(broken), faults=(killed,)).holds


def test_late_pings_may_break_one_stream_in_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(observation: Observation) -> None:
        observation.calls[0].error = "UNAVAILABLE: Stream removed (ping timeout)"

    assert verdict_of(forged(late)).findings == ["late pings broke 1 calls of 2 requests"]
    monkeypatch.setattr(checker, "MANY_LATE", 1.0)
    verdict = verdict_of(forged(late))
    assert verdict.holds
    assert "late pings: 1 calls went on elsewhere" in as_lines(verdict)


def test_leaks_are_found() -> None:
    for left in (Left(1, 0, []), Left(0, 1, []), Left(0, 0, ["lp:{hash/main}:job:1"]), None):
        verdict = verdict_of(forged(), left=left)
        assert verdict.leaks == 1
        assert not verdict.holds


def test_gaps_are_of_the_streams_that_a_fault_hit() -> None:
    fault = Fault(0, "worker_kill", "worker-1", 0.5, 0.9, [0], proof="gone")
    verdict = verdict_of(forged(), faults=(fault,), planned=1)
    # From the last token of the first call, the 20th, to the first of the second.
    assert verdict.gaps == {"worker_kill": [pytest.approx(1.5 + 0.020 - 0.019)]}
    observation = as_json(verdict)
    assert observation["token_gap_ms"] == {"worker_kill": {"p50": 1501.0, "p99": 1501.0}}
    assert observation["faults"] == {"worker_kill": 1}
    assert observation["leaked"] == {"blocks": 0, "pins": 0, "redis_keys": 0}
    assert missed_aims(verdict) == ["p99 of the gap at a worker_kill: 1501 ms, at most 1000 wanted"]


def test_a_history_reads_as_it_was_written(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    lines: list[Line] = [Begun(MODEL, 1, 1, {}), forged(), Fault(0, "x", "y", 0.0, 1.0, [0]), NOTHING_LEFT]
    for line in lines:
        history.append(line)
    history.close()
    assert list(read_history(history.path)) == lines


def charges_of(*observations: Observation) -> list[Charged]:
    return [
        Charged(f"e{one.request.number}", "acme", f"{one.request.number}.1", one.prompt_tokens, one.completion_tokens)
        for one in observations
    ]


def with_ledger(charges: list[Charged], tokens: int, observation: Observation, *faults: Fault) -> Verdict:
    lines: list[Line] = [Begun(MODEL, 1, 1, {}), observation, *faults, *charges, Account("acme", tokens), NOTHING_LEFT]
    return check(lines)


def test_clients_events_and_accounts_are_compared_to_the_token() -> None:
    observation = forged()
    charges, used = charges_of(observation), observation.prompt_tokens + observation.completion_tokens
    assert with_ledger(charges, used, observation).holds
    assert "the account of acme" in with_ledger(charges, used + 1, observation).findings[0]
    dear = [msgspec.structs.replace(charges[0], cost=600, due=600)]
    assert (
        "the account of acme has 0.000000000, its events have 0.000000600"
        in with_ledger(dear, used, observation).findings[0]
    )
    wrong = [msgspec.structs.replace(charges[0], due=600)]
    assert "has 0.000000000, its tokens cost 0.000000600" in with_ledger(wrong, used, observation).findings[0]
    more = [msgspec.structs.replace(charges[0], output=charges[0].output + 1)]
    assert with_ledger(more, used + 1, observation).holds, "a token was on its way when the link broke"
    more = [msgspec.structs.replace(charges[0], input=charges[0].input + 1)]
    assert "request 0.1 used" in with_ledger(more, used + 1, observation).findings[0]
    failed_over = Fault(0, "redis_failover", "redis", 0.0, 0.0, [], proof="it failed over")
    assert with_ledger(charges, used + 1, observation, failed_over).miscounted
    assert not with_ledger(charges, used + 1, observation, failed_over).findings
    wiped = Fault(0, "redis_wipe", "redis", 0.0, 0.0, [], proof="it was wiped")
    assert with_ledger(charges, used + 1, observation, wiped).findings
    killed = Fault(1, "router_kill", "router-1", 0.0, 0.5, [], proof="it was killed")
    verdict = with_ledger(charges, used + 1, observation, wiped, killed)
    assert (verdict.findings, len(verdict.miscounted)) == ([], 1)
    assert with_ledger(charges, used + 200, observation, wiped, killed).findings


def with_quota(quota: Quota, tokens: int, *observations: Observation) -> Verdict:
    begun, charges = Begun(MODEL, 1, len(observations), {}), charges_of(*(one for one in observations if one.completed))
    earlier = Charged("earlier", "acme", "earlier", tokens - sum(one.input + one.output for one in charges), 0)
    return check([begun, quota, *observations, *charges, earlier, Account("acme", tokens), NOTHING_LEFT])


def test_what_clients_got_of_a_quota_and_refusals_are_checked() -> None:
    observation = forged()
    used = observation.prompt_tokens + observation.completion_tokens
    assert with_quota(Quota("acme", used + 20, 20), used + 20, observation).holds
    assert "acme got" in with_quota(Quota("acme", 100, 300), used + 300, observation).findings[0]
    refused = Observation(
        msgspec.structs.replace(observation.request, number=1), [Call(4.0, "Generate", "r1")], [], {}, [], 4.1
    )
    refused.error = "QUOTA_EXCEEDED"
    verdict = with_quota(Quota("acme", used + 20, 20), used + 20, observation, refused)
    assert (verdict.holds, verdict.over_quota) == (True, 1)
    assert "though there was room" in with_quota(Quota("acme", 1_000, 20), used + 20, observation, refused).findings[0]


def test_an_idle_cluster_that_costs_redis_much_is_found() -> None:
    for commands_s in (499.0, 501.0):
        found = "\n".join(check([Begun(MODEL, 1, 1, {}), forged(), Idle(commands_s), NOTHING_LEFT]).findings)
        assert ("costs 501 commands/s" in found) is (commands_s > 500)


def test_a_call_that_was_made_again_may_be_charged_again() -> None:
    observation = forged(lambda one: one.calls.append(Call(2.0, "Generate", "r1")))
    charges, used = charges_of(observation), observation.prompt_tokens + observation.completion_tokens
    assert with_ledger([*charges, *[msgspec.structs.replace(charges[0], id="again")]], 2 * used, observation).holds
    assert with_ledger([], 0, observation).findings


def test_a_ledger_that_nobody_read_is_found() -> None:
    observation = forged()
    lines: list[Line] = [Begun(MODEL, 1, 1, {}, ledger=True), observation, *charges_of(observation), NOTHING_LEFT]
    assert check(lines).findings == ["acme has no account"]
