"""The pooling of a model's hidden states to one vector, as sentence-transformers' files beside the weights say it."""

from __future__ import annotations

from pathlib import Path

from artifacts.checkpoint import read_small_file
from artifacts.errors import ArtifactError
from artifacts.json_object import parse_object

_MODULES = "modules.json"
_POOLING = "1_Pooling/config.json"
_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
# Modules of a sentence-transformers pipeline that are served. Normalize is no step here: a request asks for it.
_STAGES = ("Transformer", "Pooling", "Normalize")


def read_pooling(directory: Path) -> str:
    """Return "cls", "mean" or "last"; empty where the files do not say. Raises ArtifactError for another one."""
    if (directory / _MODULES).is_file():
        # The file is a list, which parse_object does not take alone.
        stages = parse_object(b'{"stages": ' + read_small_file(directory / _MODULES) + b"}", _MODULES)["stages"]
        kinds = [str(stage.get("type", "")).rpartition(".")[2] for stage in stages if isinstance(stage, dict)]
        if unknown := [kind for kind in kinds if kind not in _STAGES]:
            raise ArtifactError(_MODULES, f"{unknown[0]} is not served behind a model, only {', '.join(_STAGES)}")
    if not (directory / _POOLING).is_file():
        return ""
    config = parse_object(read_small_file(directory / _POOLING), _POOLING)
    chosen = [field for field, value in config.items() if field.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise ArtifactError(
            _POOLING, f"{', '.join(chosen) or 'no pooling'} is not served, only one of {', '.join(_MODES)}"
        )
    return _MODES[chosen[0]]
