"""Certificates of the real adapters: verdicts agree with accuracies of `python -m examples.check --quantize`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from loraplex.adapter_store.app import StoreSettings
from loraplex.contracts.artifacts.fitness import FitnessLimits
from loraplex_client.adapter_directory import read_config
from tests.real.conftest import WHOLE

LIMITS = FitnessLimits(
    StoreSettings.fitness_min_agreement, StoreSettings.fitness_max_kl, StoreSettings.fitness_max_drop
)


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.skipif(not WHOLE, reason="it takes minutes; `make real` runs it")
@pytest.mark.parametrize(
    ("scheme", "adapter", "verdict"),
    [
        # The check: 1.000, 0.975 and 1.000 of 1.000, 0.975 and 1.000.
        ("int8", "extract", "fit"),
        ("int8", "triage", "fit"),
        ("int8", "sentiment", "fit"),
        # 0.975 and 1.000
        ("int4", "triage", "fit"),
        ("int4", "sentiment", "fit"),
        # 0.775
        ("int4-128+embeddings", "extract", "refused"),
    ],
)
def test_verdicts_agree_with_accuracies(
    model_directory: Path, adapters: dict[str, Path], tmp_path: Path, scheme: str, adapter: str, verdict: str
) -> None:
    from loraplex.model_tools.certificate import certify

    directory = shutil.copytree(adapters[adapter], tmp_path / adapter)
    (directory / "adapter_config.json").write_bytes(read_config(directory))
    figures = certify(str(model_directory), scheme, str(directory))
    assert (figures.prompts, figures.expected_answers, figures.drawn) == (64, 64, False)
    breach = LIMITS.breach(figures)
    found = "fit" if breach is None else "refused" if breach.certain else "warned"
    assert found == verdict, breach
