"""Test which checkpoints are loaded, and which are refused with one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.contracts.artifacts.families import KvShape
from loraplex.worker.engine.device import available_bytes
from loraplex.worker.engine.linear import layouts
from loraplex.worker.engine.model import loader
from loraplex.worker.engine.model.loader import SUPPORTED, check_architecture, device_of, lay_out, load_model
from loraplex.worker.engine.quantized.layers import AnyLinear
from loraplex.worker.engine_api import ModelUnusableError
from loraplex.worker.plan import PlanSettings, plan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def copied(tiny_llama: Any, tmp_path: Path) -> Path:
    """A model directory that a test may break."""
    directory = tmp_path / "copied"
    shutil.copytree(tiny_llama.directory, directory)
    return directory


def change(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | fields))


def test_what_the_engine_must_know_of_a_model(tiny_qwen2: Any) -> None:
    loaded = load_model(str(tiny_qwen2.directory))
    assert loaded.kv == KvShape(layers=3, kv_heads=2, key_dim=16, value_dim=16)
    assert (loaded.vocab_size, loaded.context_length, loaded.end_token_ids) == (320, 256, frozenset({2}))
    assert loaded.dtype is torch.float32
    assert loaded.kv.token_bytes(loaded.dtype.itemsize, "") == 2 * 3 * 2 * 16 * 4
    assert loaded.kv.token_bytes(loaded.dtype.itemsize, "int8") == 2 * 3 * 2 * (16 + 4)
    assert len(loaded.linears) == 3 * 7
    assert loaded.linears["model.layers.0.mlp.down_proj"] == (96, 64)
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())


def test_end_tokens_are_the_generation_configs(copied: Path) -> None:
    config = json.loads((copied / "generation_config.json").read_text())
    (copied / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [5, 9]}))
    assert load_model(str(copied)).end_token_ids == frozenset({5, 9})


@pytest.mark.parametrize(
    ("wanted", "own", "got"),
    [
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float32", torch.float32),
        ("auto", None, torch.float32),
        ("bfloat16", "float32", torch.bfloat16),
        ("float32", "float16", torch.float32),
    ],
)
def test_dtypes(copied: Path, wanted: str, own: str | None, got: torch.dtype) -> None:
    change(copied, dtype=own)
    loaded = load_model(str(copied), "cpu", wanted)
    assert loaded.dtype is got
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {got}


def test_half_precision_becomes_one_that_the_cpu_computes(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(copied, dtype="float16")
    assert load_model(str(copied)).dtype in (torch.bfloat16, torch.float32)
    assert "the model is in float16" in caplog.text


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", "float16", "dtype float16 is for CUDA"),
        ("cpu", "int8", "dtype 'int8' is not supported"),
        ("tpu", "auto", "device 'tpu' is not"),
        ("mps", "auto", "device 'mps' is not supported"),
        pytest.param(
            "cuda", "auto", "device 'cuda': .*(CUDA|driver)",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has one"),
        ),
    ],
)  # fmt: skip
def test_devices_and_dtypes_that_are_refused(tiny_llama: Any, device: str, dtype: str, message: str) -> None:
    with pytest.raises(ModelUnusableError, match=message):
        load_model(str(tiny_llama.directory), device, dtype)


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_text(text)


def set_fields(**fields: Any) -> Callable[[Path], None]:
    return lambda directory: change(directory, **fields)


def cut_weights(directory: Path) -> None:
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(data[: len(data) // 2])


def lose_a_tensor(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "is not a directory"),
        (remove("config.json"), "config.json"),
        (write("config.json", "{"), "config.json: is not valid JSON"),
        (remove("model.safetensors"), "only safetensors weights are served"),
        (cut_weights, "is cut short"),
        (lose_a_tensor, "missing keys in the weights: model.layers.1.mlp.up_proj.weight"),
        (set_fields(intermediate_size=128), "can't be loaded|mismatched keys"),
        (set_fields(attention_bias="yes"), "can't be loaded: .*attention_bias"),
        (set_fields(architectures=["MambaForCausalLM"]), "architecture MambaForCausalLM is not supported"),
        (set_fields(architectures=[], model_type="bloom"), "model_type 'bloom' is not supported"),
        (
            set_fields(quantization_config={"quant_method": "hqq"}),
            "quantization_config.quant_method: 'hqq' is not read",
        ),
        (set_fields(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}), "rope type 'dynamic'"),
        (set_fields(rope_scaling={"type": "longrope", "factor": 2.0}), "rope type 'longrope'"),
    ],
)
def test_models_that_are_refused(copied: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(copied)
    with pytest.raises(ModelUnusableError, match=message) as refused:
        load_model(str(copied))
    assert str(copied) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def three_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three CUDA devices, of which the last one is current, and a compiler."""
    devices = {
        "init": None, "device_count": 3, "current_device": 2, "get_device_capability": (9, 0), "get_device_name": "H200"
    }  # fmt: skip
    pytest.importorskip("triton", reason="Triton is for Linux")
    from triton.runtime import driver

    for name, value in devices.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(driver, "_active", object())
    monkeypatch.setenv("CC", "cc")


@pytest.mark.usefixtures("three_devices")
def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.set_device and Triton's launches take a device's number, which `cuda` alone has none of."""
    chosen: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    for name in ("cuda", "cuda:0", "cuda:1"):
        torch.cuda.set_device(device_of(name))
    assert chosen == [2, 0, 1]
    with pytest.raises(ModelUnusableError, match="device 'cuda:3': this machine has 3 CUDA devices, from cuda:0 on"):
        device_of("cuda:3")
    assert device_of("cpu") == torch.device("cpu")


@pytest.mark.usefixtures("three_devices")
@pytest.mark.parametrize("words", ["Found no NVIDIA driver on your system.", "The NVIDIA driver is too old."])
def test_what_is_wrong_with_the_driver_is_said(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(f"{words}\nGo on here.")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ModelUnusableError, match=rf"^device 'cuda:1': {words} Go on here\.$"):
        device_of("cuda:1")


@pytest.mark.usefixtures("three_devices")
def test_an_older_gpu_and_a_missing_compiler_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelUnusableError, match=r"no C compiler.* install gcc, or set CC"):
        device_of("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ModelUnusableError, match=r"'cuda:2' is H200, of compute capability 7\.5: use one of 8\.0"):
        device_of("cuda")


@pytest.mark.usefixtures("three_devices")
def test_what_triton_cannot_compile_is_said_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler without headers, or a folder that cannot be written to, would end three engines."""
    from triton.runtime import driver

    def start(_: Any) -> None:
        raise subprocess.CalledProcessError(1, ["gcc", "main.c"])

    monkeypatch.setattr(type(driver), "active", property(start))
    with pytest.raises(ModelUnusableError, match=r"^Triton cannot compile for cuda:2: .*gcc.*; install gcc"):
        device_of("cuda")


@pytest.mark.usefixtures("three_devices")
def test_memory_for_no_adapter_slot_is_said_before_anything_loads(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(PlanSettings(str(tiny_llama.directory), rank=64, adapters=1, memory="1GB"))
    monkeypatch.setattr(loader, "available_bytes", lambda device: planned.weight_bytes + planned.adapter_bytes - 1)
    monkeypatch.setattr(loader, "from_pretrained", None)
    with pytest.raises(ModelUnusableError, match=r"the weights take .* with one adapter slot, and .* on cuda:2"):
        load_model(str(tiny_llama.directory), "cuda", slot_ranks=(64, 0))


def test_too_little_memory(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available_bytes", lambda device: 1000)
    with pytest.raises(ModelUnusableError, match=r"the weights take .* and 0\.0 GB are available on cpu"):
        load_model(str(tiny_llama.directory))


def test_memory_is_measured() -> None:
    assert 1 << 20 < available_bytes(torch.device("cpu")) < 1 << 50


def test_supported_architectures_and_rope_types_pass() -> None:
    for name in SUPPORTED:
        check_architecture({"architectures": [name], "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_replace_linears(tiny_qwen2: Any, dtype: torch.dtype) -> None:
    loaded = load_model(str(tiny_qwen2.directory), "cpu", str(dtype).removeprefix("torch."))
    head = loaded.module.lm_head
    x = torch.randn(5, 64).to(dtype)
    expected = head(x)
    stored = weakref.ref(head.weight)
    rows = head.weight.clone()
    del head
    lay_out(loaded)
    assert not [module for module in loaded.module.modules() if type(module) is torch.nn.Linear]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(loaded.module.lm_head(x), expected, rtol=tolerance, atol=tolerance * 10)
    # Tied: the embeddings are rows of the head's panels, and the model's own tensor is gone.
    assert stored() is None
    ids = torch.tensor([[7, 319], [0, 7]])
    assert torch.equal(loaded.module.model.embed_tokens(ids), rows[ids])
    assert torch.equal(loaded.module.model.embed_tokens.weight, rows)


def test_weights_on_the_cpu_take_memory_once(tiny_qwen2: Any) -> None:
    loaded = load_model(str(tiny_qwen2.directory))
    # Mapped, the whole file would stay until the last of its tensors is gone: the token embeddings never go.
    assert str(tiny_qwen2.directory) not in Path("/proc/self/maps").read_text()
    weights: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def make(linear: AnyLinear) -> torch.nn.Module:
        alive.append(sum(weight() is not None for weight in weights))
        weights.append(weakref.ref(linear.weight))
        return torch.nn.Identity()

    layouts.replace_linears(loaded.module.model, make)
    assert not any(alive), "a weight that was replaced is still there"
    assert len(weights) == 3 * 4


def test_weights_are_read_straight_to_another_device(tiny_qwen2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do so without a library that workers do not have; "meta" stands for a device here."""
    import torch
    import transformers

    from loraplex.contracts.artifacts.checkpoint import read_checkpoint
    from loraplex.worker.engine.attention import paged
    from loraplex.worker.engine.model.loader import from_pretrained
    from loraplex.worker.engine.quantized.stored import loading_options, open_slices

    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: False)
    directory, place = tiny_qwen2.directory, torch.device("meta")
    with open_slices(read_checkpoint(directory), mapped=True) as slices:
        module = from_pretrained(
            transformers.AutoModelForCausalLM, directory, slices, torch.float32, paged.NAME,
            loading_options(directory, None, None, place),
        )  # fmt: skip
    assert {parameter.device for parameter in module.parameters()} == {place}
