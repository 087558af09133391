"""The short forms of `make rehearsal`'s third part: what operators do with the chart, with a few streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.kubernetes_tools import needs_helm
from tests.deploy.operating_rehearsal import rehearse_oidc, rehearse_operations, rehearse_restricted, rehearse_rollout

pytestmark = pytest.mark.nightly


@pytest.fixture
def folder(short_temp_dir: Path) -> Path:
    """A folder of the rehearsal, which PostgreSQL enters as nobody."""
    needs_helm()
    short_temp_dir.chmod(0o711)
    path = short_temp_dir / "r"
    path.mkdir()
    return path


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", [rehearse_operations, rehearse_rollout, rehearse_restricted, rehearse_oidc])
async def test_no_request_fails_and_no_event_is_lost(part: Callable[..., Any], folder: Path) -> None:
    await part(folder, 4, print)
