"""The engine process: one thread that takes messages, steps the batch, and sends what came of it.

    python -m loraplex.worker.engine.process --fd N     N: an inherited stream socket, whose other end speaks worker.ipc

The process ends at once when the other end is gone. An error that no sequence can be blamed for ends it too (exit code
1): the I/O process starts another, and the routers dispatch its work again.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from importlib import import_module
from typing import Any

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import is_encoder
from loraplex.contracts.artifacts.hash_model import is_hash_spec
from loraplex.runtime.interpreter import hide_module, importing
from loraplex.runtime.telemetry.logging import logging_of, set_up_logging
from loraplex.worker.engine.engine import Engine
from loraplex.worker.engine_api import EngineConfig, EngineStats, ModelUnusableError, SequenceRefusedError
from loraplex.worker.ipc import (
    Abort,
    Add,
    Begun,
    BlockChanges,
    Compiling,
    Configure,
    EngineEnd,
    FollowBlocks,
    ForgetTenant,
    Loaded,
    Pin,
    Ready,
    Refused,
    Stepped,
    TenantForgotten,
    ToEngine,
    Unpin,
    Unusable,
    Warm,
    step_messages,
)

# Modules of the engines of encoders and of the hash model, which are at the edge.
ENCODERS, HASH_ENGINE = "loraplex.encoders.engine", "loraplex.hash_engine"
# Interval in seconds at which threads are switched. Python's default of 5 ms makes a step, whose thread lets go of the
# interpreter for every torch operator, wait that long for a thread that loads an adapter.
_SWITCH_S = 1e-4


def freeze_gc() -> None:
    """Exclude all present objects from garbage collection, a full run of which takes 300 ms; switch threads often."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)


log = logging.getLogger(__name__)

# Interval in seconds at which an engine without work sends a sign of life.
BEAT_S = 0.5
# Maximum number of blocks of a message to those who follow the prefix cache, one a step: half a millisecond's work.
_FOLLOWED_BLOCKS = 512
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run the process; return 0 when the other end is gone, 1 after an error, 2 for a model that can't be served."""
    parser = argparse.ArgumentParser(
        prog="python -m loraplex.worker.engine.process", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    parser.add_argument("--rank", action="store_true", help="run a rank of a split model, for its rank 0 at the socket")
    arguments = parser.parse_args()
    set_up_logging("engine", **logging_of(os.environ))
    # A terminal or a supervisor may signal the whole group of processes: the I/O process drains, which needs us; we
    # end with our link.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with_parent()
    try:
        sock = socket.socket(fileno=arguments.fd)
        return run_rank(sock) if arguments.rank else run(EngineEnd(sock))
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except Exception:
        log.exception("the engine failed")
        return 1


def run(end: EngineEnd) -> int:
    """Serve one connection, from Configure on; return the exit code."""
    messages: list[ToEngine] | None = []
    while messages == []:
        messages = end.receive(wait_s=BEAT_S)
    if messages is None:
        return 0
    first, *rest = messages
    if not isinstance(first, Configure):
        raise TypeError(f"the first message is {type(first).__name__}, not Configure")
    try:
        engine = _build(first.config, end)
    except (ModelUnusableError, ArtifactError) as error:
        end.send(Unusable.of(error))
        return 2
    try:
        stats = engine.stats()
        freeze_gc()
        end.send(Ready(engine.limits, stats))
        serve(engine, end, rest, stats)
    finally:
        engine.close()
    return 0


def run_rank(sock: socket.socket) -> int:
    """Run a rank of a split model; return the exit code."""
    with importing():
        from loraplex.worker.engine.ranks import RankEnd
        from loraplex.worker.engine.torch_engine import follow

    return follow(RankEnd(sock))


def serve(engine: Engine[Any], end: EngineEnd, messages: list[ToEngine] | None, reported: EngineStats) -> None:
    """Step until the other end is gone; wait only while no step would do anything. `reported`: the last stats sent."""
    beat = checked = False
    while messages is not None:
        for message in messages:
            _apply(engine, end, message)
        outputs = engine.step() if engine.has_work() else []
        stats = engine.stats()
        # Steps count up, so that each one is reported; so are aborts, and adapters that came or went.
        if outputs or beat or stats != reported:
            for report in step_messages(outputs, stats):
                end.send(report)
            reported = stats
        for digest, error in engine.adapters.ended_commands():
            end.send(Loaded(digest, error))
        changes = engine.block_changes(_FOLLOWED_BLOCKS)
        if changes is not None:
            end.send(BlockChanges(*changes))
        # Not idle while changes are left: the next turn sends more of them.
        idle = not engine.has_work() and (changes is None or changes[-1])
        messages = end.receive(wait_s=BEAT_S if idle else 0)
        # A sequence may wait long for its adapter, and nothing else be there to step.
        beat = idle and messages == []
        # Once in each idle time, after a beat's time without a message, so that nothing waits for it under load.
        if beat and not checked and not engine.has_work():
            engine.check()
        checked = beat


def _apply(engine: Engine[Any], end: EngineEnd, message: ToEngine) -> None:
    match message:
        case Add(sequences):
            for sequence in sequences:
                try:
                    engine.add_sequence(sequence)
                except SequenceRefusedError as error:
                    end.send(Refused(sequence.sequence_id, error.field, error.message))
        case Abort(sequence_ids):
            for sequence_id in sequence_ids:
                engine.abort(sequence_id)
        case Warm() | Pin() | Unpin():
            _place_adapter(engine, end, message)
        case ForgetTenant(tenant, kept_adapters):
            end.send(TenantForgotten(dict(engine.forget_tenant(tenant, kept_adapters))))
        case FollowBlocks(on):
            engine.follow_blocks(on)
        case Configure():
            raise TypeError("an engine is configured once")


def _place_adapter(engine: Engine[Any], end: EngineEnd, message: Warm | Pin | Unpin) -> None:
    match message:
        case Warm(adapter):
            engine.adapters.warm_adapter(adapter)
        case Pin(adapter):
            try:
                engine.adapters.pin_adapter(adapter)
            except ValueError as error:
                end.send(Loaded(adapter.digest, str(error), refused=True))
        case Unpin(digest):
            engine.adapters.unpin_adapter(digest)


def _build(config: EngineConfig, end: EngineEnd) -> Engine[Any]:
    def on_begun(sequence_id: str) -> None:
        end.send(Begun(sequence_id))

    if config.tensor_parallel > 1 and (is_hash_spec(config.model) or is_encoder(config.model)):
        raise ModelUnusableError("--tensor-parallel: only decoders are divided among ranks; leave it out")
    if is_hash_spec(config.model):
        hash_engine: Engine[Any] = import_module(HASH_ENGINE).HashEngine(config, end.wake, on_begun)
        return hash_engine
    # Torch is imported only where it is used: it takes seconds and hundreds of megabytes. It imports Triton, of 72 MB,
    # wherever that is installed.
    if config.device == "cpu":
        hide_module("triton")
    if is_encoder(config.model):
        with importing():
            build_encoder = import_module(ENCODERS).build_encoder

        def on_progress() -> None:
            end.send(Stepped([], encoder.stats()))

        encoder: Engine[Any] = build_encoder(config, on_loaded=end.wake, on_begun=on_begun, on_progress=on_progress)
        return encoder
    with importing():
        from loraplex.worker.engine.device import before_compilations
        from loraplex.worker.engine.torch_engine import build_engine

    if config.device.startswith("cuda"):
        before_compilations(lambda: end.send(Compiling()))

    def on_lost(rank: int, why: Unusable | None) -> None:
        """End the process: the I/O process starts another one, unless the model is at fault."""
        if why:
            end.send(why)
        else:
            log.critical("rank %d has died", rank)
        os._exit(2 if why else 1)

    return build_engine(config, on_loaded=end.wake, on_begun=on_begun, on_lost=on_lost)


def _die_with_parent() -> None:
    """Let Linux end this process when its parent is killed. Elsewhere the end of the socket ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
