"""Certificates of revisions: kept beside the catalog's revisions, and judged by the store's limits."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass

from adapter_store.database import Database
from adapter_store.records import FitnessCertificate
from adapter_store.rows import adapter_row, read_revision
from artifacts.certificate import Figures, FitnessLimits
from artifacts.names import RevisionName
from rpc.errors import InvalidField, Mismatch

# Maximum number of quantizations for which a revision has certificates.
_QUANTIZATIONS = 32


@dataclass(frozen=True, slots=True)
class FitnessPolicy:
    """The limits of the store, and whether an adapter beyond them is refused on such a base instead of warned of."""

    limits: FitnessLimits
    refuses: bool


class FitnessCertificates:
    """Keeps certificates. Its calls block: make them in a thread."""

    def __init__(self, database: Database, policy: FitnessPolicy) -> None:
        self._database = database
        self.policy = policy

    def keep(self, name: RevisionName, quantization: str, base_digest: str, figures: Figures) -> FitnessCertificate:
        """Keep a revision's certificate, in the place of an earlier one for the same base and quantization.

        Raises NotFound, Mismatch where the base is not the revision's, InvalidField for one quantization too many.
        """
        kept = FitnessCertificate(quantization, base_digest, figures, time.time_ns())
        with self._database.transaction() as rows:
            revision = read_revision(rows, name)
            if base_digest != revision.base_digest:
                raise Mismatch(
                    str(name),
                    f"measured with base model {base_digest}, not with {revision.base_digest}, which it is for",
                    reason="WRONG_BASE",
                )
            others = {each.quantization for each in revision.certificates} - {quantization}
            if len(others) >= _QUANTIZATIONS:
                raise InvalidField(
                    "certificate.quantization", f"the revision has certificates for {_QUANTIZATIONS} others already"
                )
            rows.execute(
                "INSERT OR REPLACE INTO certificates (adapter_id, digest, base_digest, quantization, create_ns, "
                "prompts, drawn, tokens, agreement, mean_kl, max_kl) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(adapter_row(rows, name.adapter_name)["id"], name.digest, base_digest, quantization),
                    *(kept.create_ns, *astuple(figures)),
                ),
            )
        return kept
