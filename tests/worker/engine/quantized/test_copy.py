"""`loraplex quantize`: a copy whose weights are those of an engine that quantizes the original."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.model_tools import calibration
from loraplex.model_tools import quantized_copy as copy
from loraplex.model_tools.calibration import Calibration
from loraplex.model_tools.commands import quantize as run
from loraplex.model_tools.quantized_copy import stored_tensors, write_copy
from loraplex.worker.engine.model.loader import LoadedModel, load_model
from loraplex.worker.engine.quantized.rounding import round_weight
from loraplex.worker.engine.quantized.weight import QuantizedWeight, equal, quantize
from tests.worker.engine.model.tiny_families import CRAMPED, make_config, make_model, requests_of, with_adapter
from tests.worker.engine.quantized import published_layouts as layouts
from tests.worker.engine.quantized.dequantized import dequantize_into

pytestmark = pytest.mark.usefixtures("one_thread")


def quantized(loaded: LoadedModel) -> dict[str, QuantizedWeight]:
    layers = ((name, getattr(layer, "weight", None)) for name, layer in loaded.module.named_modules())
    return {name: weight for name, weight in layers if isinstance(weight, QuantizedWeight)}


@pytest.mark.parametrize(
    "scheme", ["int8", "int8-zero-point+embeddings", "int8-dynamic", "int4-dynamic", "int4-128+embeddings"]
)
def test_a_copy_has_the_weights_of_the_original_that_is_quantized_while_it_loads(
    tiny_qwen2: Any, tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    original, out = str(tiny_qwen2.directory), str(tmp_path / "copy")
    told: list[tuple[int, int]] = []
    base = write_copy(original, out, scheme, lambda done, of: told.append((done, of)))
    loaded = read_base_model(original, quantize=scheme)
    assert base.adapted_digest == loaded.adapted_digest == read_base_model(original).digest
    assert (base.quantization, base.modules) == (loaded.quantization, loaded.modules)
    assert told == [(done, len(told)) for done in range(1, len(told) + 1)]
    copied, ours = load_model(out), load_model(original, quantize=scheme)
    assert set(quantized(copied)) == set(quantized(ours))
    assert all(equal(weight, quantized(copied)[name]) for name, weight in quantized(ours).items())
    others = copied.module.state_dict()
    assert others.keys() == ours.module.state_dict().keys()
    assert all(torch.equal(values, others[name]) for name, values in ours.module.state_dict().items())
    assert (copied.linears, copied.ends, copied.parameters) == (ours.linears, ours.ends, ours.parameters)
    assert "MISSING" not in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]
    small = {path.name for path in tiny_qwen2.directory.iterdir() if not path.name.endswith(".safetensors")}
    assert small == {path.name for path in (tmp_path / "copy").iterdir()} - {"model.safetensors"}


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 32, False), (4, 32, True), (8, None, False), (8, None, True)]
)
def test_the_layout_is_the_published_one(bits: int, group: int | None, symmetric: bool) -> None:
    """13 outputs and 70 columns fill no word. Zero points of 4 bits, in eighths, are bytes."""
    weight = quantize(torch.randn(13, 70, generator=torch.Generator().manual_seed(1)), bits, group, symmetric=symmetric)
    shift = 0 if bits == 4 else 128
    codes = weight.codes + shift if bits == 8 else torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(1)
    codes = (weight.codes.int() + shift) if bits == 8 else codes.int()
    zeros = torch.zeros(13, 1) if weight.zeros is None else weight.zeros + shift
    expected = layouts.compressed((codes, weight.scales, zeros.int()), bits, symmetric=symmetric)
    if bits == 4 and weight.zeros is not None:
        expected["weight_zero_point"] = weight.zeros
    written = stored_tensors(weight)
    assert written.keys() == expected.keys()
    for name in expected.keys() - {"weight_scale"}:
        assert torch.equal(written[name], expected[name]), name
    assert torch.equal(written["weight_scale"], weight.scales)


def test_a_copy_in_several_files_of_a_model_that_stores_its_weights_transposed_serves_the_originals_adapter(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save_adapter: Callable[..., None],
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
) -> None:
    monkeypatch.setattr(copy, "_SHARD_BYTES", 6000)
    model = make_model(make_config("gpt2"), tmp_path / "model")
    out = tmp_path / "copy"
    write_copy(str(tmp_path / "model"), str(out), "int4+embeddings")
    assert len(list(out.glob("*.safetensors"))) > 3
    tiny = with_adapter(model, "gpt2", tmp_path, save_adapter, lambda base: dequantize_into(base, out))
    outputs = run_until_idle(make_engine(out, **CRAMPED), {0: requests_of(tiny)})
    answers = {name: tuple(token for output in some for token in output.token_ids) for name, some in outputs.items()}
    assert answers == {str(index): ids for index, ids in enumerate(tiny.answers)}


def test_what_can_not_be_copied_is_one_line_and_leaves_nothing(tiny_llama: Any, tmp_path: Path) -> None:
    model, out = str(tiny_llama.directory), tmp_path / "copy"
    write_copy(model, str(out), "int8")
    for source, target, scheme, message in [
        (model, out, "int8", "out: .*/copy exists; give a new directory"),
        (str(out), tmp_path / "other", "int8", "model: .*/copy is quantized already; give the original"),
        (model, out / "config.json" / "copy", "int8", "out: .*config.json"),
        (model, tmp_path / "other", "int3", "--quantize: 'int3' is not one of"),
        ("hash:?", tmp_path / "other", "int8", "a hash model has no weights"),
    ]:
        with pytest.raises(ArtifactError, match=message) as refused:
            write_copy(source, str(target), scheme)
        assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_the_command_writes_a_copy_with_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "examples/model", "--out", str(tmp_path / "copy"), "--to"]
    assert run([*flags, "int4"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"wrote {tmp_path / 'copy'}: int4 of sha256:")
    assert shown.err.splitlines()[-1] == "quantized 56 of 56 tensors"
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["model.embed_tokens"]
    assert (tmp_path / "copy" / "chat_template.jinja").is_file()
    for scheme, message in (("int3", "--to: 'int3' is not one of"), ("", "--to: name a scheme")):
        with pytest.raises(ArtifactError, match=message):
            run([*flags, scheme])
    with pytest.raises(ArtifactError, match="model: nowhere is not a directory"):
        run(["--model", "nowhere", "--out", "x", "--to", "int8"])


CALIBRATED = Calibration(bits=5.5, seed=3)


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TEXTS", 8)
    monkeypatch.setattr(calibration, "TOKENS", 32)


def calibrated(model: Path, out: Path, **fields: Any) -> dict[str, QuantizedWeight]:
    write_copy(str(model), str(out), "int4-64", calibration=replace(CALIBRATED, **fields))
    return quantized(load_model(str(out)))


@pytest.mark.usefixtures("few_texts")
def test_a_calibrated_copy_keeps_sensitive_layers_in_8_bits_within_its_bound(tiny_llama: Any, tmp_path: Path) -> None:
    original = read_base_model(str(tiny_llama.directory))
    weights = calibrated(tiny_llama.directory, tmp_path / "copy")
    base = read_base_model(str(tmp_path / "copy"))
    assert (base.quantization, base.modules) == ("int4-64-calibrated-5.5", original.modules)
    assert base.adapted_digest == original.digest
    assert {weight.bits for weight in weights.values()} == {4, 8}
    parts = [(weight.codes.nbytes, weight.scales.nbytes, weight.zeros) for weight in weights.values()]
    numbers = sum(weight.out_features * weight.in_features for weight in weights.values())
    size = sum(codes + scales + (0 if zeros is None else zeros.nbytes) for codes, scales, zeros in parts)
    assert 8 * size <= 5.5 * numbers
    # Layers that are computed as one product have one scheme.
    parents = {name.rpartition(".")[0] for name in weights if name.endswith("q_proj")}
    assert all(len({weights[f"{one}.{kind}_proj"].bits for kind in "qkv"}) == 1 for one in parents)


@pytest.mark.usefixtures("few_texts")
def test_a_calibrated_copy_is_the_same_for_the_same_seed(tiny_llama: Any, tmp_path: Path) -> None:
    one, same, other = (
        calibrated(tiny_llama.directory, tmp_path / f"copy{number}", seed=seed) for number, seed in enumerate((1, 1, 2))
    )
    assert all(equal(weight, same[name]) for name, weight in one.items())
    assert not all(name in other and equal(weight, other[name]) for name, weight in one.items())


def test_calibrated_codes_compute_what_the_layer_did_better_than_the_nearest_ones() -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(400, 96, generator=generator) @ torch.randn(96, 96, generator=generator)
    weight = torch.randn(48, 96, generator=generator)
    nearest = quantize(weight, 4, 32, symmetric=False)
    rounded = round_weight(weight, inputs.t() @ inputs, 32)
    errors = [((one.dequantize() - weight) @ inputs.t()).square().mean() for one in (rounded, nearest)]
    assert errors[0] < 0.6 * errors[1]
    assert (rounded.scales.dtype, rounded.group, rounded.bits) == (torch.bfloat16, 32, 4)


def test_what_cannot_be_calibrated_is_one_line_and_leaves_nothing(tiny_llama: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("int8", {}, "--calibrate: is for int4, int4-64 and int4-128, not int8"),
        ("int4-dynamic", {}, "--calibrate: is for int4, int4-64 and int4-128, not int4-dynamic"),
        ("int4-64", {"bits": 4.0}, "--bits: 4 is below the 4[.].* that int4-64 takes"),
        ("int4-64", {"texts": "nowhere.txt"}, "--texts: nowhere.txt cannot be read"),
    ]
    for scheme, fields, message in cases:
        with pytest.raises(ArtifactError, match=message):
            write_copy(
                str(tiny_llama.directory), str(tmp_path / "copy"), scheme, calibration=replace(CALIBRATED, **fields)
            )
    with pytest.raises(ArtifactError, match=r"--texts: .*short.txt has \d+ tokens; give a text of at least 256"):
        write_copy(
            "examples/model", str(tmp_path / "copy"), "int4", calibration=Calibration(6, str(tmp_path / "short.txt"))
        )
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]
