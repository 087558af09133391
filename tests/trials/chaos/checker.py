"""The offline check of a history: every answer is computed again, and every difference has a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.trials.chaos.history import (
    Account,
    Answer,
    Begun,
    Charged,
    CrowdCall,
    Fault,
    Idle,
    Left,
    Line,
    Observation,
    Quota,
    Request,
)
from tests.trials.chaos.ledger import OVER_QUOTA, LedgerLine, check_ledger
from tests.trials.chaos.oracle import answers, next_token, prompt_tokens, scores, truth, vectors
from tests.trials.chaos.refusals import Doors, check_crowd, check_refusals
from tests.trials.chaos.verdict import Verdict

# Of the error of a call whose connection the SDK gave up, because a ping was not answered within 2 s. On a machine with
# more work than cores this happens without a fault, and the call goes on at once.
LATE_PING = "(ping timeout)"
# Maximum number of such calls, as a share of the requests.
MANY_LATE = 0.01


@dataclass
class _Records:
    """The lines of a history, by what they tell of."""

    begun: Begun | None = None
    requests: dict[int, Observation] = field(default_factory=dict)
    crowd: list[CrowdCall] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    ledger: list[LedgerLine] = field(default_factory=list)

    def read(self, lines: Iterable[Line], verdict: Verdict) -> Begun:
        """Read a whole history; return its beginning."""
        for line in lines:
            match line:
                case Begun():
                    self.begun = line
                case Observation():
                    if line.request.number in self.requests:
                        verdict.findings.append(f"request {line.request.number} has two outcomes")
                    self.requests[line.request.number] = line
                case CrowdCall():
                    self.crowd.append(line)
                case Fault():
                    self.faults.append(line)
                case Charged() | Account() | Quota() | Idle():
                    self.ledger.append(line)
                case Left():
                    verdict.left = line
        if self.begun is None:
            raise ValueError("the history has no beginning")
        return self.begun


def check(lines: Iterable[Line]) -> Verdict:
    """Check a whole history; the first line is its Begun."""
    verdict, records = Verdict(), _Records()
    begun = records.read(lines, verdict)
    requests, faults, doors = records.requests, records.faults, Doors(records.faults)
    verdict.planned = begun.planned
    verdict.requests = max(begun.requests, len(requests))
    for number in range(begun.requests):
        if number not in requests:
            verdict.findings.append(f"request {number} has no outcome")
    digests = sorted({observation.request.revision.digest for observation in requests.values()})
    limited = {line.tenant for line in records.ledger if isinstance(line, Quota)}
    for observation in requests.values():
        _check_request(verdict, begun.model, observation, digests, limited)
        _check_calls(verdict, observation, doors)
    for fault in faults:
        _check_fault(verdict, fault, requests, doors)
    check_crowd(verdict, records.crowd, doors, overlap=begun.overlap)
    if begun.ledger or records.ledger:
        check_ledger(verdict, begun.model, requests, records.ledger, faults)
    check_refusals(verdict, list(requests.values()), () if begun.overlap else faults, doors)
    if verdict.late_pings > MANY_LATE * verdict.requests:
        verdict.findings.append(f"late pings broke {verdict.late_pings} calls of {verdict.requests} requests")
    return verdict


def _check_fault(verdict: Verdict, fault: Fault, requests: dict[int, Observation], doors: Doors) -> None:
    if fault.proof:
        verdict.faults[fault.kind] += 1
    if fault.error:
        verdict.findings.append(f"fault {fault.number} ({fault.kind} of {fault.victim}): {fault.error}")
    hit = [number for number in fault.hit if number in requests and requests[number].ended > fault.began]
    verdict.hits[fault.kind] += bool(hit)
    for number in hit:
        verdict.gaps.setdefault(fault.kind, []).append(_gap(requests[number], fault))
        calls = [pair for pair in pairwise(requests[number].calls) if fault.began < pair[1].at <= fault.mended]
        if calls and not (LATE_PING in calls[0][0].error or doors.broken(calls[0][1].at, calls[0][1].at)):
            verdict.findings.append(f"request {number}: fault {fault.number} ({fault.kind}) broke its call")


def _gap(observation: Observation, fault: Fault) -> float:
    """The longest silence of a stream that ended after the fault had struck, and began before it was mended."""
    times = sorted({delta.at for delta in observation.deltas} | {observation.ended})
    near = ((a, b) for a, b in pairwise(times) if b >= fault.began and a <= fault.mended)
    return max((b - a for a, b in near), default=0.0)


def _check_request(
    verdict: Verdict, model: str, observation: Observation, digests: Sequence[str], limited: Container[str]
) -> None:
    request, number = observation.request, observation.request.number
    verdict.refused += len(observation.refused)
    verdict.completed += observation.completed
    if observation.error == OVER_QUOTA and request.revision.tenant in limited:
        verdict.over_quota += 1  # whether it had to be refused is checked with the ledger
        _check_wire(verdict, observation)
        return
    if not observation.completed:
        verdict.findings.append(f"request {number} failed: {observation.error}")
    elif observation.revision.rpartition("/")[2] != request.revision.digest:
        verdict.other += 1
        verdict.findings.append(f"request {number} was answered by {observation.revision}")
    _check_wire(verdict, observation)
    if request.continuations:
        _check_scores(verdict, model, observation)
    if request.texts or request.documents:
        _check_vectors(verdict, model, observation, digests)
    whole = request.continuations or request.texts or request.documents
    for choice in range(0 if whole else request.n):
        answer = observation.answers.get(choice, Answer())
        expected = truth(model, request, choice)
        if tuple(answer.token_ids) != expected.token_ids:
            counts = _compare(model, request, choice, answer.token_ids, expected.token_ids, digests)
            for name, count in counts.items():
                setattr(verdict, name, getattr(verdict, name) + count)
            verdict.findings.append(f"request {number} choice {choice}: {dict(counts)}")
        elif (answer.text, answer.reason, answer.stop) != (expected.text, expected.reason, expected.stop):
            verdict.other += 1
            verdict.findings.append(f"request {number} choice {choice}: its text or its end is another")
        elif tuple(answer.logprobs) != expected.logprobs:
            verdict.other += 1
            verdict.findings.append(f"request {number} choice {choice}: its log probabilities are not its tokens'")
    if observation.completed:
        _check_whole(verdict, model, observation)


def _check_whole(verdict: Verdict, model: str, observation: Observation) -> None:
    """Check what belongs to no choice: the prompt's log probabilities, and the number of tokens."""
    expected, number = answers(model, observation.request), observation.request.number
    if observation.prompt_tokens != (tokens := prompt_tokens(model, observation.request)):
        verdict.other += 1
        counted = f"{observation.prompt_tokens} prompt tokens of {tokens}"
        verdict.findings.append(f"request {number}: its usage counts {counted}")
    if tuple(observation.prompt_logprobs) != expected.prompt_logprobs:
        verdict.other += 1
        count = f"{len(observation.prompt_logprobs)}, the model's are {len(expected.prompt_logprobs)}"
        verdict.findings.append(f"request {number}: its prompt's log probabilities are wrong ({count})")
    if observation.completion_tokens != expected.completion_tokens:
        verdict.other += 1
        counts = f"{observation.completion_tokens} tokens, the model's are {expected.completion_tokens}"
        verdict.findings.append(f"request {number}: its usage counts {counts}")
    most = 0 if observation.request.speculation == "off" else observation.drafted
    if not observation.accepted <= most >= observation.drafted:
        verdict.other += 1
        counts = f"{observation.accepted} accepted of {observation.drafted} drafted tokens"
        verdict.findings.append(f"request {number}: its summary counts {counts} of at most {most}")


def _check_scores(verdict: Verdict, model: str, observation: Observation) -> None:
    expected = [(one.token_ids, one.logprobs, one.greedy) for one in scores(model, observation.request)]
    if observation.completed and [(one.token_ids, one.logprobs, one.greedy) for one in observation.scores] != expected:
        verdict.other += 1
        verdict.findings.append(f"request {observation.request.number}: its scores are not the model's")


def _check_vectors(verdict: Verdict, model: str, observation: Observation, digests: Sequence[str]) -> None:
    """Count texts whose vector is missing, another text's or another adapter's."""
    request, got = observation.request, observation.vectors
    expected = [vector for vector, _ in vectors(model, request)]
    if not observation.completed or got == expected:
        return
    verdict.lost += max(0, len(expected) - len(got))
    verdict.duplicated += max(0, len(got) - len(expected))
    foreign = {vector for digest in digests if digest for vector, _ in vectors(model, request, digest)}
    wrong = [vector for vector, right in zip(got, expected, strict=False) if vector != right]
    for vector in wrong:
        name = "reordered" if vector in expected else "wrong_adapter" if vector in foreign else "other"
        setattr(verdict, name, getattr(verdict, name) + 1)
    verdict.findings.append(f"request {request.number}: {len(wrong)} of {len(got)} vectors are not its {len(expected)}")


def _check_calls(verdict: Verdict, observation: Observation, doors: Doors) -> None:
    """A call that has brought tokens ends with an error only where its connection was broken: the SDK would hide it."""
    last = {delta.call: delta.at for delta in observation.deltas}
    for number, (call, following) in enumerate(pairwise(observation.calls)):
        if call.error and number in last and not doors.broken(last[number], following.at):
            if LATE_PING in call.error:
                verdict.late_pings += 1
            else:
                verdict.findings.append(f"request {observation.request.number}: call {number} broke with {call.error}")


def _check_wire(verdict: Verdict, observation: Observation) -> None:
    """No call may bring what its client has, nor anything after the next call has begun."""
    newest, have = 0, Counter[tuple[int, int]]()
    for delta in observation.deltas:
        number = observation.request.number
        if delta.call < newest:
            verdict.stale_attempt_delivered += len(delta.token_ids)
            verdict.findings.append(f"request {number}: call {delta.call} brought tokens after call {newest} had")
            continue
        newest = max(newest, delta.call)
        place = (delta.call, delta.choice)
        if place not in have:
            have[place] = observation.calls[delta.call].received.get(delta.choice, 0)
        again = have[place] - delta.offset
        if again > 0:
            verdict.duplicated += min(again, len(delta.token_ids))
            verdict.findings.append(f"request {number}: call {delta.call} brought {again} tokens again")
        elif again < 0:
            verdict.lost -= again
            verdict.findings.append(f"request {number}: call {delta.call} left out {-again} tokens")
        have[place] = delta.offset + len(delta.token_ids)


def _compare(
    model: str, request: Request, choice: int, got: Sequence[int], wanted: Sequence[int], digests: Sequence[str]
) -> Counter[str]:
    """Compare the tokens of one answer with the oracle's."""
    counts = Counter[str]()
    places: dict[int, list[int]] = {}
    for place, token in enumerate(wanted):
        places.setdefault(token, []).append(place)
    seen: set[int] = set()
    last = -1
    for at, token in enumerate(got):
        free = [place for place in places.get(token, ()) if place not in seen]
        if not places.get(token):
            others = (digest for digest in digests if digest != request.revision.digest)
            foreign = any(next_token(model, request, choice, other, got[:at]) == token for other in others)
            counts["wrong_adapter" if foreign else "other"] += 1
        elif not free:
            counts["duplicated"] += 1
        else:
            place = next((place for place in free if place > last), free[0])
            counts["reordered"] += place < last
            seen.add(place)
            last = max(last, place)
    counts["lost"] = len(wanted) - len(seen)
    return +counts
