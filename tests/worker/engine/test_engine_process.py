"""The engine process as the I/O process sees it: a real process at the other end of a socket pair."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from loraplex.contracts.options import FinishReason, SamplingParams, StoppingParams
from loraplex.worker.engine_api import AdapterSource, EngineConfig, EngineStats, NewSequence, Output, Speculation
from loraplex.worker.ipc import (
    Abort,
    Add,
    Begun,
    Configure,
    FromEngine,
    Loaded,
    Pin,
    Ready,
    Refused,
    Splitter,
    Stepped,
    ToEngine,
    Unpin,
    Unusable,
    Warm,
    encode,
    from_engine_decoder,
)
from tests.hash_oracle import expected_ids

SPEC = "hash:?vocab=600&seed=5"
CONFIG = EngineConfig(
    model=SPEC,
    device="cpu",
    dtype="auto",
    rows=4,
    kv_blocks=64,
    block_size=4,
    adapter_slots=2,
    host_adapter_bytes=0,
    max_rank=8,
    step_tokens=16,
    threads=0,
)
ENDLESS = StoppingParams(max_tokens=200)

M = TypeVar("M")


class EngineProcess:
    """An engine process and what it has sent."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(20)
        command = [sys.executable, "-m", "loraplex.worker.engine.process", "--fd", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE)
        theirs.close()
        self._splitter = Splitter()
        self._inbox: list[FromEngine] = []
        self.answers: dict[str, list[int]] = {}
        self.last: dict[str, Output] = {}
        self.stats: EngineStats | None = None

    def send(self, message: ToEngine) -> None:
        self.socket.sendall(encode(message))

    def receive(self, kind: type[M]) -> M:
        """The next message of this kind; before it come beats and beginnings."""
        while True:
            while not self._inbox:
                data = self.socket.recv(1 << 16)
                assert data, "the engine process closed its end"
                self._inbox = [from_engine_decoder.decode(body) for body in self._splitter.feed(data)]
            message = self._inbox.pop(0)
            if isinstance(message, kind):
                return message
            assert isinstance(message, (Begun, Loaded)) or (isinstance(message, Stepped) and not message.outputs), (
                message
            )

    def start(self, config: EngineConfig = CONFIG) -> Ready:
        self.send(Configure(config))
        return self.receive(Ready)

    def add(self, *sequences: NewSequence) -> None:
        for sequence in sequences:
            self.answers[sequence.sequence_id] = list(sequence.emitted_ids)
        self.send(Add(list(sequences)))

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            stepped = self.receive(Stepped)
            self.stats = stepped.stats
            for output in stepped.outputs:
                assert output.offset == len(self.answers[output.sequence_id])
                self.answers[output.sequence_id] += output.token_ids
                if output.finish:
                    self.last[output.sequence_id] = output

    def finish(self, *sequences: NewSequence) -> None:
        self.add(*sequences)
        names = {sequence.sequence_id for sequence in sequences}
        self.until(lambda: names <= self.last.keys())

    def exit_code(self) -> int:
        return self.process.wait(timeout=60)

    def close(self) -> None:
        self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr
        self.process.stderr.close()


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    engine = EngineProcess()
    yield engine
    engine.close()


@pytest.fixture
def adapters(tmp_path: Path) -> list[AdapterSource]:
    sources = []
    for name in ("a", "b", "c"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.safetensors").write_bytes(b"any")
        sources.append(AdapterSource(f"sha256:{name}", str(directory)))
    return sources


def test_operators_pin_and_warm_adapters(engine: EngineProcess, adapters: list[AdapterSource]) -> None:
    """Of two slots one may be pinned: the others take turns in the second."""
    engine.start()
    pinned, *others = adapters
    engine.send(Pin(pinned))
    engine.until(lambda: engine.stats is not None and engine.stats.adapters == (pinned.digest,))
    assert engine.receive(Loaded) == Loaded(pinned.digest)
    engine.send(Pin(others[0]))
    refused = engine.receive(Loaded)
    assert (refused.digest, refused.refused) == (others[0].digest, True)
    for number in range(4):
        engine.finish(NewSequence(str(number), (7, 8), adapter=others[number % 2], stopping=StoppingParams(3)))
    assert engine.stats is not None
    assert pinned.digest in engine.stats.adapters
    assert engine.stats.tiers.swaps == 3
    engine.send(Unpin(pinned.digest))
    engine.send(Warm(others[0]))
    assert engine.receive(Loaded) == Loaded(others[0].digest)
    digests = {adapter.digest for adapter in others}
    engine.until(lambda: engine.stats is not None and set(engine.stats.adapters) == digests)


def test_answers_with_adapters_are_the_oracles(engine: EngineProcess, adapters: list[AdapterSource]) -> None:
    ready = engine.start()
    assert (ready.limits.rows, ready.limits.blocks, ready.limits.vocab_size) == (4, 64, 600)
    assert (ready.stats.blocks_free, ready.stats.adapters) == (64, ())
    sources = [None, *adapters]
    sequences = [
        NewSequence(
            f"s{number}",
            (number,) * (number + 1),
            adapter=sources[number % 4],
            sampling=SamplingParams(temperature=0.5, seed=number),
            stopping=StoppingParams(max_tokens=20),
        )
        for number in range(12)
    ]
    engine.finish(*sequences)
    for sequence in sequences:
        assert tuple(engine.answers[sequence.sequence_id]) == expected_ids(
            SPEC,
            sequence.prompt_ids,
            adapter_digest=sequence.adapter.digest if sequence.adapter else "",
            sampling=sequence.sampling,
            stopping=sequence.stopping,
        )
    assert engine.stats
    assert (engine.stats.blocks_referenced, engine.stats.slots_pinned, engine.stats.slots_used) == (0, 0, 2)


def test_a_continuation_gives_the_undisturbed_ids(engine: EngineProcess) -> None:
    engine.start()
    whole = NewSequence("s", (1, 2, 3), stopping=StoppingParams(max_tokens=30))
    expected = expected_ids(SPEC, whole.prompt_ids, stopping=whole.stopping)
    engine.finish(replace(whole, emitted_ids=expected[:13]))
    assert tuple(engine.answers["s"]) == expected


def test_an_abort_frees_all_and_tells_so(engine: EngineProcess, adapters: list[AdapterSource]) -> None:
    engine.start(replace(CONFIG, model=SPEC + "&step_ms=5"))
    engine.add(*(NewSequence(f"s{n}", (n,) * 9, adapter=adapters[n % 2], stopping=ENDLESS) for n in range(6)))
    engine.until(lambda: engine.stats is not None and engine.stats.slots_pinned == 2)
    engine.send(Abort([f"s{n}" for n in range(6)]))

    def all_free() -> bool:
        stats = engine.stats
        assert stats
        return (stats.rows_running, stats.rows_waiting, stats.blocks_referenced, stats.slots_pinned) == (0, 0, 0, 0)

    engine.until(all_free)
    assert engine.stats
    assert engine.stats.blocks_free + engine.stats.blocks_cached == 64
    engine.finish(NewSequence("next", (1,), stopping=StoppingParams(max_tokens=3)))


def test_an_adapter_that_arrives_wakes_an_idle_engine(engine: EngineProcess, adapters: list[AdapterSource]) -> None:
    engine.start()
    for source in adapters:
        engine.finish(NewSequence(source.digest, (1,), adapter=source, stopping=StoppingParams(max_tokens=2)))
        assert engine.stats
        assert source.digest in engine.stats.adapters


def test_what_is_refused_says_why_and_disturbs_nobody(engine: EngineProcess) -> None:
    engine.start()
    engine.send(Add([NewSequence("bad", (1, 600)), NewSequence("worse", (1,), stopping=StoppingParams(max_tokens=-1))]))
    refused = engine.receive(Refused)
    assert (refused.sequence_id, refused.field) == ("bad", "prompt_ids")
    assert "600 is not a token id of this model" in refused.message
    refused = engine.receive(Refused)
    assert (refused.sequence_id, refused.field) == ("worse", "stopping.max_tokens")
    engine.finish(NewSequence("good", (1,), stopping=StoppingParams(max_tokens=2)))
    assert engine.last["good"].finish is FinishReason.LENGTH


def test_an_idle_engine_says_that_it_lives(engine: EngineProcess) -> None:
    ready = engine.start()
    assert engine.receive(Stepped) == Stepped([], ready.stats)


def test_the_end_of_the_socket_ends_a_busy_process(engine: EngineProcess) -> None:
    engine.start()
    engine.add(NewSequence("s", (1,), stopping=ENDLESS))
    engine.until(lambda: bool(engine.answers["s"]))
    engine.socket.close()
    assert engine.exit_code() == 0


def test_the_end_of_the_socket_ends_an_idle_process(engine: EngineProcess) -> None:
    engine.start()
    engine.socket.shutdown(socket.SHUT_RDWR)
    assert engine.exit_code() == 0


def test_ctrl_c_is_left_to_the_other_process(engine: EngineProcess) -> None:
    engine.start()
    engine.process.send_signal(signal.SIGINT)
    engine.finish(NewSequence("s", (1,), stopping=StoppingParams(max_tokens=2)))


def test_a_model_that_can_not_be_served_is_one_line(engine: EngineProcess) -> None:
    engine.send(Configure(replace(CONFIG, model="hash:?vocab=abc")))
    unusable = engine.receive(Unusable)
    assert "vocab must be a whole number" in unusable.message
    assert "\n" not in unusable.message
    assert engine.exit_code() == 2


def test_only_decoders_are_divided_among_ranks(engine: EngineProcess) -> None:
    engine.send(Configure(replace(CONFIG, tensor_parallel=2)))
    assert engine.receive(Unusable).message.startswith("--tensor-parallel: only decoders are divided")
    assert engine.exit_code() == 2


@pytest.mark.parametrize("name", ["rows", "block_size", "step_tokens", "tensor_parallel"])
def test_a_configuration_that_no_engine_can_work_with_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be 1 or more, is 0"):
        EngineConfig(SPEC, **{name: 0})  # type: ignore[arg-type]


def test_a_target_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="itl_target_ms must be more than 0, is 0"):
        EngineConfig(SPEC, itl_target_ms=0)


def test_a_configuration_of_drafts_has_the_names_that_users_know() -> None:
    text = '{"method": "suffix", "num_speculative_tokens": 5}'
    assert Speculation.parse(text) == Speculation("suffix", 5)
    assert Speculation.parse("{}") == Speculation()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("suffix", "must be a JSON object such as"),
        ("[]", "must be a JSON object such as"),
        ('{"method": "eagle"}', "method: 'eagle' is not supported; use 'suffix'"),
        ('{"method": ["suffix"]}', "method: ['suffix'] is not supported; use 'suffix'"),
        ('{"model": "small"}', "model: not supported; use method and num_speculative_tokens"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens: must be a number from 1 to 16, is 0"),
        ('{"num_speculative_tokens": 17}', "num_speculative_tokens: must be a number from 1 to 16, is 17"),
        ('{"num_speculative_tokens": "8"}', "num_speculative_tokens: must be a number from 1 to 16, is '8'"),
        ('{"num_speculative_tokens": true}', "num_speculative_tokens: must be a number from 1 to 16, is True"),
    ],
)
def test_a_configuration_of_drafts_that_is_not_served_is_refused_by_its_name(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Speculation.parse(text)


def test_an_error_that_is_nobodys_ends_the_process(engine: EngineProcess) -> None:
    engine.start()
    engine.send(Configure(CONFIG))
    assert engine.exit_code() == 1
    assert engine.process.stderr
    assert b"TypeError: an engine is configured once" in engine.process.stderr.read()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_process_dies_with_its_parent() -> None:
    """The parent is killed while others still hold our end of the socket open."""
    script = (
        "import socket, subprocess, sys, time\n"
        "ours, theirs = socket.socketpair()\n"
        "command = [sys.executable, '-m', 'loraplex.worker.engine.process', '--fd', str(theirs.fileno())]\n"
        "engine = subprocess.Popen(command, pass_fds=[theirs.fileno(), ours.fileno()])\n"
        "theirs.close()\n"
        "from loraplex.worker.engine_api import EngineConfig\n"
        "from loraplex.worker.ipc import Configure, encode\n"
        f"ours.sendall(encode(Configure({CONFIG!r})))\n"
        "ours.recv(1)\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    # The engine inherits the pipe to us: when it has gone, the pipe ends.
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        engine_pid = int(parent.stdout.readline())
        parent.kill()
        gone, _, _ = select.select([parent.stdout], [], [], 20)
        if not gone:
            os.kill(engine_pid, signal.SIGKILL)
        assert gone
        assert parent.stdout.read() == ""
