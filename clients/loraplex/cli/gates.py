"""Gates of a release: what it must answer, run as ordinary requests of the lowest priority, and their figures.

A file of gates is TOML; docs/guides/releases.md explains it. A gate that does not end within its time has failed.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraplex.cli.terminal import CommandError

if TYPE_CHECKING:
    from loraplex_client import Client, FitnessCertificate, Generation

# Lowest priority among a tenant's requests.
LOWEST = -100
# Default and maximum time in seconds of a gate.
TIMEOUT_S, MOST_S = 300.0, 86_400.0
# Number of tokens whose log probabilities one request of a perplexity gate asks for.
WINDOW = 1024
# Number of questions of an accuracy gate that are asked at once.
_AT_ONCE = 8
_DETAIL = 500


@dataclass(frozen=True, slots=True)
class Golden:
    """A prompt, or a chat, and what its greedy answer must be.

    `answer` is the text without white space around it, or the same JSON; `text` is the exact text.
    """

    name: str
    prompt: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    max_tokens: int = 32
    answer: str | None = None
    token_ids: Sequence[int] | None = None
    text: str | None = None
    regex: str | None = None
    json_schema: Mapping[str, Any] | None = None
    min_mean_logprob: float | None = None
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A file of questions with answers, and the least share of right greedy answers: `min`, or live's less `max_drop`.

    Each line is {"messages": ..., "answer": ...}, or has a `prompt` in place of the messages.
    """

    name: str
    file: str
    min: float | None = None
    max_drop: float | None = None
    max_tokens: int = 64
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Perplexity:
    """A text, and the maximum perplexity of the release on it, absolute or relative to the live one's."""

    name: str
    file: str
    max: float | None = None
    max_ratio: float | None = None
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Certificate:
    """A quantization of the base for which the revision must have a certificate within the store's limits."""

    name: str
    quantization: str
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Judge:
    """A command that gets the golden prompts' answers as JSON on stdin, and ends with 0 if they are good.

    It may print a JSON object of figures.
    """

    name: str
    command: Sequence[str]
    timeout_s: float = TIMEOUT_S


Gate = Golden | Accuracy | Perplexity | Certificate | Judge
_KINDS: Mapping[str, type[Gate]] = {
    "golden": Golden,
    "accuracy": Accuracy,
    "perplexity": Perplexity,
    "certificate": Certificate,
    "judge": Judge,
}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a gate; its fields are those of the store's message."""

    name: str
    passed: bool
    figures: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""


class GateError(Exception):
    """A gate that has failed: why, and its figures."""

    def __init__(self, detail: str, figures: Mapping[str, float] | None = None) -> None:
        super().__init__(detail)
        self.figures = figures or {}


def read_gates(path: Path) -> list[Gate]:
    """Read a file of gates. Raises CommandError, which names the gate and the field."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}") from error
    gates = [
        _gate(path, kind, number, values)
        for kind, rows in tables.items()
        for number, values in enumerate(rows if isinstance(rows, list) else [rows], start=1)
    ]
    if not gates:
        raise CommandError(f"{path}: has no gates; write tables such as [[golden]]")
    names = [gate.name for gate in gates]
    if twice := {name for name in names if names.count(name) > 1}:
        raise CommandError(f"{path}: two gates are called {min(twice)}; give them names")
    if any(isinstance(gate, Judge) for gate in gates) and not any(isinstance(gate, Golden) for gate in gates):
        raise CommandError(f"{path}: a judge needs golden prompts, whose answers it gets")
    return gates


def _gate(path: Path, kind: str, number: int, values: Any) -> Gate:
    where = f"{path}: {kind} {number}"
    if kind not in _KINDS or not isinstance(values, dict):
        raise CommandError(f"{path}: [[{kind}]] is not one of {', '.join(f'[[{name}]]' for name in _KINDS)}")
    known = {one.name: one for one in fields(_KINDS[kind])}
    for name in values:
        if name not in known:
            raise CommandError(f"{where}: {name} is not one of {', '.join(known)}")
    try:
        gate: Gate = _KINDS[kind](**{"name": f"{kind} {number}", **values})
    except TypeError:
        needed = [
            one.name
            for one in known.values()
            if one.name not in values and one.name in {"file", "quantization", "command"}
        ]
        raise CommandError(f"{where}: give {', '.join(needed)}") from None
    if not isinstance(gate.timeout_s, (int, float)) or not 0 < gate.timeout_s <= MOST_S:
        raise CommandError(f"{where}: timeout_s {gate.timeout_s} is not a time up to {MOST_S:g} s")
    _check(where, gate, path.parent)
    return gate


def _check(where: str, gate: Gate, directory: Path) -> None:
    match gate:
        case Golden():
            _check_golden(where, gate)
        case Accuracy():
            if gate.min is None and gate.max_drop is None:
                raise CommandError(f"{where}: give min or max_drop")
            for name, share in (("min", gate.min), ("max_drop", gate.max_drop)):
                if share is not None and not (isinstance(share, (int, float)) and 0 <= share <= 1):
                    raise CommandError(f"{where}: {name} {share!r} is not a share from 0 to 1")
            _read_questions(where, directory / gate.file)
        case Perplexity():
            if gate.max is None and gate.max_ratio is None:
                raise CommandError(f"{where}: give max or max_ratio")
            if not (directory / gate.file).is_file():
                raise CommandError(f"{where}: {directory / gate.file} is not a file")
        case Judge():
            if not gate.command or isinstance(gate.command, str):
                raise CommandError(f'{where}: command is a list of words, such as ["python", "judge.py"]')
        case Certificate():
            pass


def _read_questions(where: str, path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of questions, each with an answer. Raises CommandError."""
    from loraplex_client import InvalidRequestError
    from loraplex_client.adapter_directory import read_prompts

    if not path.is_file():
        raise CommandError(f"{where}: {path} is not a file")
    try:
        questions = read_prompts(path)
    except InvalidRequestError as error:
        raise CommandError(f"{where}: {error}") from error
    if not questions:
        raise CommandError(f"{where}: {path} has no questions")
    answered = []
    for number, question in enumerate(questions, start=1):
        if isinstance(question, str) or not isinstance(question.get("answer"), str):
            raise CommandError(f"{where}: {path}: line {number} has no answer, which is a text")
        answered.append(question)
    return answered


def _check_golden(where: str, gate: Golden) -> None:
    if bool(gate.prompt) == bool(gate.messages):
        raise CommandError(f"{where}: give either prompt or messages")
    expected = (gate.answer, gate.token_ids, gate.text, gate.regex, gate.json_schema, gate.min_mean_logprob)
    if all(one is None for one in expected):
        raise CommandError(f"{where}: give answer, token_ids, text, regex, json_schema or min_mean_logprob")
    try:
        re.compile(gate.regex or "")
    except re.error as error:
        raise CommandError(f"{where}: regex: {error}") from error
    if gate.json_schema is not None:
        from jsonschema import SchemaError  # type: ignore[import-untyped]
        from jsonschema.validators import validator_for  # type: ignore[import-untyped]

        try:
            validator_for(gate.json_schema).check_schema(gate.json_schema)
        except SchemaError as error:
            raise CommandError(f"{where}: json_schema: {error.message}") from error


class Examination:
    """Runs gates on a revision, `adapter` as a request names it, beside `live`, the revision to compare with."""

    def __init__(
        self,
        client: Client,
        adapter: str,
        live: str,
        certificates: Sequence[FitnessCertificate],
        directory: Path,
    ) -> None:
        self._client = client
        self._adapter, self._live = adapter, live
        self._certificates = certificates
        # Files and commands of gates are relative to it.
        self._directory = directory
        self._answers: list[dict[str, Any]] = []

    def run(self, gates: Sequence[Gate]) -> Iterator[Result]:
        """Yield the result of each gate, those of judges last. Raises LoraplexError."""
        for gate in sorted(gates, key=lambda gate: isinstance(gate, Judge)):
            yield self._result(gate)

    def _result(self, gate: Gate) -> Result:
        from loraplex_client import DeadlineExceededError

        try:
            match gate:
                case Golden():
                    figures = self._golden(gate)
                case Accuracy():
                    figures = self._accuracy(gate)
                case Perplexity():
                    figures = self._perplexity(gate)
                case Certificate():
                    figures = self._certificate(gate)
                case Judge():
                    figures = self._judge(gate)
        except GateError as error:
            return Result(gate.name, False, error.figures, str(error)[:_DETAIL])
        except (DeadlineExceededError, subprocess.TimeoutExpired):
            return Result(gate.name, False, {}, f"did not end within {gate.timeout_s:g} s")
        return Result(gate.name, True, figures)

    def _golden(self, gate: Golden) -> dict[str, float]:
        answer = self._ask(
            self._adapter,
            gate.prompt,
            [dict(message) for message in gate.messages],
            max_tokens=gate.max_tokens,
            logprobs=0,
            timeout_s=gate.timeout_s,
        )
        logprobs = [token.logprob for token in answer.choices[0].logprobs]
        figures: dict[str, float] = {"tokens": len(answer.token_ids)}
        if logprobs:
            figures["mean_logprob"] = sum(logprobs) / len(logprobs)
        self._answers.append({"name": gate.name, "text": answer.text, "token_ids": list(answer.token_ids), **figures})
        if detail := _wrong(gate, answer, figures.get("mean_logprob", 0.0)):
            raise GateError(detail, figures)
        return figures

    def _ask(self, adapter: str, prompt: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> Generation:
        """Return the greedy answer to a chat, or to a prompt where there are no messages."""
        options = {"adapter_id": adapter, "temperature": 0.0, "priority": LOWEST, **options}
        if messages:
            return self._client.chat(messages, **options)
        answer: Generation = self._client.generate(prompt, **options)
        return answer

    def _accuracy(self, gate: Accuracy) -> dict[str, float]:
        from loraplex.contracts.artifacts.fitness import wilson_interval

        questions = _read_questions(gate.name, self._directory / gate.file)
        ends_at = time.monotonic() + gate.timeout_s
        right, wrong = self._right(gate, questions, self._adapter, ends_at)
        low, high = wilson_interval(right, len(questions))
        figures = {"questions": len(questions), "accuracy": right / len(questions), "low": low, "high": high}
        least = gate.min or 0.0
        if gate.max_drop is not None:
            if not self._live:
                raise GateError("max_drop needs a live revision to compare with; give min", figures)
            figures["live_accuracy"] = self._right(gate, questions, self._live, ends_at)[0] / len(questions)
            least = max(least, figures["live_accuracy"] - gate.max_drop)
        if figures["accuracy"] < least - 1e-9:
            share = f"{right} of {len(questions)} answers are right (95% interval {low:.2f} to {high:.2f})"
            raise GateError(f"{share}, less than {least:.4g}; {wrong}", figures)
        return figures

    def _right(
        self, gate: Accuracy, questions: Sequence[Mapping[str, Any]], adapter: str, ends_at: float
    ) -> tuple[int, str]:
        """Return how many questions are answered right, and the first wrong answer."""
        from loraplex.contracts.artifacts.fitness import is_right

        def ask(question: Mapping[str, Any]) -> str:
            asked = question.get("prompt", ""), question.get("messages", ())
            timeout_s = max(0.001, ends_at - time.monotonic())
            return self._ask(adapter, *asked, max_tokens=gate.max_tokens, timeout_s=timeout_s).text

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = list(pool.map(ask, questions))
        wrong = [
            f"question {number}: the answer is {answer!r}"
            for number, (answer, question) in enumerate(zip(answers, questions, strict=True), start=1)
            if not is_right(answer, question["answer"])
        ]
        return len(questions) - len(wrong), next(iter(wrong), "")

    def _perplexity(self, gate: Perplexity) -> dict[str, float]:
        text = (self._directory / gate.file).read_text(encoding="utf-8")
        ends_at = time.monotonic() + gate.timeout_s
        figures = {"perplexity": self._perplexity_of(text, self._adapter, ends_at)}
        if gate.max is not None and figures["perplexity"] > gate.max:
            raise GateError(f"perplexity {figures['perplexity']:.4g} is above {gate.max:g}", figures)
        if gate.max_ratio is not None:
            if not self._live:
                raise GateError("max_ratio needs a live revision to compare with; give max", figures)
            figures["live_perplexity"] = self._perplexity_of(text, self._live, ends_at)
            figures["ratio"] = figures["perplexity"] / figures["live_perplexity"]
            if figures["ratio"] > gate.max_ratio:
                raise GateError(f"perplexity is {figures['ratio']:.4g} times the live revision's", figures)
        return figures

    def _perplexity_of(self, text: str, adapter: str, ends_at: float) -> float:
        """Return exp of the mean negative log probability of a text's tokens, in windows of WINDOW tokens."""
        ids = self._client.tokenize(text, adapter_id=adapter)
        values: list[float] = []
        for at in range(0, len(ids), WINDOW):
            window = ids[at : at + WINDOW]
            if len(window) > 1:  # the first token follows nothing
                answer = self._client.generate(
                    token_ids=window,
                    adapter_id=adapter,
                    max_tokens=0,
                    prompt_logprobs=0,
                    priority=LOWEST,
                    timeout_s=max(0.001, ends_at - time.monotonic()),
                )
                values += [token.logprob for token in answer.prompt_logprobs]
        if not values:
            raise GateError("the text has fewer than two tokens")
        return math.exp(-sum(values) / len(values))

    def _certificate(self, gate: Certificate) -> dict[str, float]:
        for one in self._certificates:
            if one.quantization == gate.quantization:
                figures = {"agreement": one.agreement, "mean_kl": one.mean_kl, "max_kl": one.max_kl}
                if one.verdict != "fit":
                    raise GateError(f"{one.verdict}: {one.breach}", figures)
                return figures
        raise GateError(f"no certificate for {gate.quantization}; make one with: loraplex adapters certify")

    def _judge(self, gate: Judge) -> dict[str, float]:
        asked = json.dumps({"adapter": self._adapter, "answers": self._answers})
        status, output, errors = run_command(gate.command, asked, gate.timeout_s, self._directory)
        try:
            printed = json.loads(output or "{}")
            figures = {str(name)[:100]: float(value) for name, value in printed.items()}
        except (AttributeError, TypeError, ValueError):
            raise GateError("the command printed something else than a JSON object of numbers") from None
        if status:
            last = (errors.strip().splitlines() or [f"exit status {status}"])[-1]
            raise GateError(last, figures)
        return figures


def _wrong(gate: Golden, answer: Generation, mean_logprob: float) -> str:
    """Return what of an answer is not as the gate wants it; empty: all is."""
    from loraplex.contracts.artifacts.fitness import is_right

    if gate.token_ids is not None and (ids := list(answer.token_ids)) != list(gate.token_ids):
        at = next((at for at, pair in enumerate(zip(ids, gate.token_ids, strict=False)) if pair[0] != pair[1]), None)
        return f"token {min(len(ids), len(gate.token_ids)) if at is None else at} differs: the answer is {ids}"
    if (gate.text is not None and answer.text != gate.text) or not is_right(answer.text, gate.answer or answer.text):
        return f"the answer is {answer.text!r}"
    if gate.regex is not None and not re.search(gate.regex, answer.text):
        return f"the answer does not match the regex: {answer.text!r}"
    if gate.json_schema is not None:
        from jsonschema import ValidationError, validate

        try:
            validate(json.loads(answer.text), gate.json_schema)
        except (ValueError, ValidationError) as error:
            return f"the answer does not match the schema: {getattr(error, 'message', error)}"
    if gate.min_mean_logprob is not None and mean_logprob < gate.min_mean_logprob:
        return f"its mean log probability {mean_logprob:.4g} is below {gate.min_mean_logprob:g}"
    return ""


def run_command(command: Sequence[str], given: str, timeout_s: float, directory: Path) -> tuple[int, str, str]:
    """Run a command with a text on stdin; returns its exit status and what it printed.

    It and its children end with the call, whatever happens. Raises TimeoutExpired, CommandError.
    """
    try:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=directory,
            start_new_session=True,
        )
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror}") from error
    try:
        output, errors = child.communicate(given, timeout=timeout_s)
        return child.returncode, output, errors
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
