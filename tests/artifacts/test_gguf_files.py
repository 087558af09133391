"""GGUF files by their names: what is one, which parts a split one has, and what its model is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.checkpoints.gguf_names import model_name, parts_of
from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.gguf_files import is_gguf
from loraplex.contracts.artifacts.names import check_base_name


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
        ("big-00002-of-00003.gguf", "big"),
        ("_my model (new).gguf", "my-model-new"),
        ("模型.gguf", "model"),
        ("x" * 200 + ".gguf", "x" * 128),
        ("blob", "blob"),
    ],
)
def test_a_model_has_the_name_of_its_file(file: str, name: str) -> None:
    assert model_name(Path("folder") / file) == name == check_base_name(name)


def test_a_file_is_recognized_by_its_ending_or_its_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF\x03")
    (tmp_path / "text").write_bytes(b"GGU")
    (tmp_path / "folder.gguf").mkdir()
    assert is_gguf("nowhere/model.gguf")
    assert is_gguf(str(tmp_path / "blob"))
    assert not any(
        map(is_gguf, [str(tmp_path / "text"), str(tmp_path / "folder.gguf"), str(tmp_path), "hash:?vocab=9"])
    )


def test_a_split_file_has_all_its_parts_or_none(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.touch()
    assert [parts_of(part) for part in parts] == [tuple(parts)] * 3
    parts[1].unlink()
    with pytest.raises(ArtifactError, match=r"is one of 3 parts, and big-00002-of-00003\.gguf is missing beside it$"):
        parts_of(parts[2])
    assert parts_of(tmp_path / "one.gguf") == (tmp_path / "one.gguf",)


def test_a_process_that_needs_a_directory_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArtifactError, match=r"is a GGUF file; first: loraplex models import .*model\.gguf DIR$"):
        read_base_model(str(tmp_path / "model.gguf"))
