"""Proves that the grammars of requests compile, before their jobs cost a place in the queue; in turns of the tenants.

The child process that proves them (artifacts.grammars.prover) is started with the first request that has a format.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from artifacts.grammars.errors import GrammarError
from artifacts.grammars.prover import Prover, ProverBusyError
from artifacts.grammars.vocabulary import special_tokens
from router.catalog.manifest import Manifest
from rpc.errors import InvalidField, Unavailable
from rpc.shares import FairTurns


class GrammarProofs:
    """The proofs of one router, each made once for a tenant."""

    def __init__(self) -> None:
        # By the digest of the base model.
        self._provers: dict[str, Prover] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-proofs")
        self._turns = FairTurns(1)

    async def check(self, grammar: str, field: str, tenant: str, model: Manifest) -> None:
        """Raise InvalidField, naming `field`, for a grammar that the model's workers would refuse."""
        if model.architecture == "hash" and model.digest not in self._provers:
            self._provers[model.digest] = Prover(model.vocab_size, {})
        prover = self._provers.get(model.digest)
        try:
            if prover is not None and prover.known(grammar, tenant):
                prover.prove(grammar, field, tenant)
            else:
                await self._in_turn(tenant, grammar, field, model)
        except GrammarError as error:
            raise InvalidField(error.path, error.message, reason="INVALID_FORMAT") from error
        except ProverBusyError as error:
            raise Unavailable(f"{field}: could not be checked in time", reason="FORMAT_NOT_CHECKED") from error

    async def _in_turn(self, tenant: str, grammar: str, field: str, model: Manifest) -> None:
        loop = asyncio.get_running_loop()
        await self._turns.run(
            tenant, lambda: loop.run_in_executor(self._thread, self._prove, tenant, grammar, field, model)
        )

    def _prove(self, tenant: str, grammar: str, field: str, model: Manifest) -> None:
        if model.digest not in self._provers:
            if "tokenizer.json" not in model.files:
                raise GrammarError(field, "the model has no tokenizer.json, without which it serves no formats")
            special = special_tokens(model.files["tokenizer.json"])
            self._provers[model.digest] = Prover(model.vocab_size, special)
        self._provers[model.digest].prove(grammar, field, tenant)

    def forget(self) -> int:
        """Forget all proofs; returns how many there were."""
        return sum(prover.forget() for prover in self._provers.values())

    def close(self) -> None:
        """End the child processes."""
        for prover in self._provers.values():
            prover.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
