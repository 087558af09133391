"""All hostile cases."""

from __future__ import annotations

from tests.trials.hostile.cases import Case, bad_metadata, bad_names, broken_messages
from tests.trials.hostile.specs import bad_specs
from tests.trials.hostile.uploads import bad_models, bad_uploads


def all_cases() -> list[Case]:
    """Return the whole table."""
    return [*broken_messages(), *bad_metadata(), *bad_names(), *bad_specs(), *bad_uploads(), *bad_models()]
