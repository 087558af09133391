"""Every wrapper of a text model against transformers' own wrapped class on text alone, with adapters of both names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapter_store.validate import validate_adapter
from loraplex.checkpoints.text_models import DEFAULTS, ROPE_THETA, TEXT_FAMILIES, WRAPPERS
from loraplex.contracts.artifacts import ArtifactError, MismatchError
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.families import FAMILIES
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine_api import AdapterSource, NewSequence
from tests.worker.engine.model.tiny_families import CRAMPED, NEW_TOKENS, PROMPTS
from tests.worker.engine.model.tiny_towers import make_config, make_wrapped

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]

# Wrappers of `make test`, each of a form of its own: names of tensors, windows, M-RoPE, experts.
OFTEN = {"gemma3", "llava", "qwen2_5_vl", "glm4v_moe", "smolvlm"}
# Wrappers with another text model than their default.
OTHERS = [("mistral3", "ministral3"), ("llava", "mistral"), ("llava_next", "qwen2"), ("internvl", "qwen3")]
FORMS = [(name, "") for name in sorted(WRAPPERS)] + OTHERS


def forms() -> list[Any]:
    return [
        pytest.param(*form, id="-".join(filter(None, form)))
        if form[0] in OFTEN and not form[1]
        else pytest.param(*form, id="-".join(filter(None, form)), marks=pytest.mark.nightly)
        for form in FORMS
    ]


@pytest.mark.parametrize(("model_type", "text_type"), forms())
def test_a_text_model_answers_as_its_wrapper_does(
    model_type: str,
    text_type: str,
    tmp_path: Path,
    save_adapter: Callable[..., None],
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
) -> None:
    wrapped = make_wrapped(make_config(model_type, text_type), tmp_path / "model")
    base = read_base_model(str(tmp_path / "model"))
    assert base.tower_of == type(wrapped).__name__
    assert not [one.name for one in base.modules if "vision" in one.name or "visual" in one.name]
    of_whole, of_text = make_adapters(wrapped, base.architecture, tmp_path, save_adapter)
    assert validate_adapter(of_whole, base).rank == validate_adapter(of_text, base).rank == 4

    engine = make_engine(tmp_path / "model", **CRAMPED)
    adapters = [None, of_whole, of_text]
    outputs = run_until_idle(engine, {0: [request(str(at), one) for at, one in enumerate(adapters)]})
    answers = {
        name: [(token, told.logprob) for one in some for token, told in zip(one.token_ids, one.logprobs, strict=True)]
        for name, some in outputs.items()
    }
    expected = [truth(wrapped, None), truth(wrapped, of_whole)]
    assert [token for token, _ in expected[0]] != [token for token, _ in expected[1]]
    assert answers["1"] == answers["2"]
    for name, of in (("0", expected[0]), ("1", expected[1])):
        assert [token for token, _ in answers[name]] == [token for token, _ in of]
        assert [told for _, told in answers[name]] == pytest.approx([told for _, told in of], abs=1e-5)


def request(name: str, adapter: Path | None) -> NewSequence:
    source = AdapterSource(str(adapter), str(adapter)) if adapter else None
    return NewSequence(name, PROMPTS[0], adapter=source, stopping=StoppingParams(max_tokens=NEW_TOKENS), logprobs=0)


def make_adapters(wrapped: Any, family: str, directory: Path, save_adapter: Callable[..., None]) -> tuple[Path, Path]:
    """The same adapter as peft saves it of the wrapped model, and of the text model alone."""
    from safetensors.torch import load_file, save_file

    whole, text = directory / "of-whole", directory / "of-text"
    inner = next(name for name, _ in wrapped.named_modules() if name.endswith(("language_model", "text_model")))
    experts = FAMILIES[family].experts
    chosen = [
        name
        for name, module in wrapped.named_modules()
        if name.startswith(inner) and type(module).__name__ == "Linear" and not (experts and ".self_attn." not in name)
    ]
    save_adapter(wrapped, whole, 3, scale=0.4, r=4, lora_alpha=4, target_modules=chosen)
    text.mkdir()
    config = json.loads((whole / "adapter_config.json").read_text())
    (text / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(whole / "adapter_model.safetensors")
    prefix = f"base_model.model.{inner}."
    assert all(name.startswith(prefix) for name in tensors)
    save_file(
        {name.replace(prefix, "base_model.model.model."): one for name, one in tensors.items()},
        text / "adapter_model.safetensors",
    )
    return whole, text


def truth(wrapped: Any, adapter: Path | None) -> list[tuple[int, float]]:
    """The ids that the wrapped class generates after the first prompt, with their log probabilities."""
    import torch
    from peft import PeftModel

    model = PeftModel.from_pretrained(wrapped, adapter) if adapter else wrapped
    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.tensor([PROMPTS[0]]),
            attention_mask=torch.ones(1, len(PROMPTS[0]), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    ids = output.sequences[0, len(PROMPTS[0]) :].tolist()
    told = [step[0].log_softmax(-1)[token].item() for step, token in zip(output.logits, ids, strict=True)]
    if adapter:
        model.unload()
    return list(zip(ids, told, strict=True))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wrapped Gemma 3 whose head shares the embeddings' weight, as those that are published."""
    directory = tmp_path_factory.mktemp("gemma")
    config = make_config("gemma3")
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    make_wrapped(config, directory)
    return directory


def rewrite(source: Path, directory: Path, name_of: Callable[[str], str]) -> dict[str, Any]:
    """Copy a checkpoint with other names of tensors, the towers' in a file of their own; returns its config."""
    from safetensors.torch import load_file, save_file

    tensors = {name_of(name): one for name, one in load_file(source / "model.safetensors").items()}
    files: dict[str, dict[str, Any]] = {"text.safetensors": {}, "towers.safetensors": {}}
    for name, one in tensors.items():
        files["text.safetensors" if "language_model" in name or "lm_head" in name else "towers.safetensors"][name] = one
    placed = {name: file for file, some in files.items() for name in some}
    directory.mkdir()
    for file, some in files.items():
        save_file(some, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    return dict(json.loads((source / "config.json").read_text()))


def state(directory: Path, scheme: str = "") -> dict[str, Any]:
    from loraplex.worker.engine.model.loader import load_model

    return dict(load_model(str(directory), quantize=scheme).module.state_dict())


def test_both_names_of_tensors_are_one_model_and_the_towers_are_not_read(gemma: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "renamed"
    rewrite(gemma, renamed, lambda name: name.replace("language_model.model.", "model.language_model."))
    before, base = state(gemma), read_base_model(str(renamed))
    towers = renamed / "towers.safetensors"
    data = bytearray(towers.read_bytes())
    data[len(data) // 2 :] = b"\xff" * (len(data) - len(data) // 2)
    towers.write_bytes(data)
    after = state(renamed)
    assert before.keys() == after.keys()
    assert all(after[name].equal(one) for name, one in before.items())
    assert read_base_model(str(renamed)) == base
    assert base.modules == read_base_model(str(gemma)).modules
    assert base.sizes["lm_head"] == base.sizes["model.embed_tokens"][::-1]


def test_a_head_that_is_missing_is_not_taken_from_the_embeddings(gemma: Path, tmp_path: Path) -> None:
    from loraplex.worker.engine.model.loader import load_model
    from loraplex.worker.engine_api import ModelUnusableError

    config = rewrite(gemma, tmp_path / "untied", str)
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "untied" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnusableError, match=r"missing keys in the weights: lm_head\.weight"):
        load_model(str(tmp_path / "untied"))


def test_a_config_without_text_config_is_read_too(tmp_path: Path) -> None:
    make_wrapped(make_config("qwen2_5_vl"), tmp_path)
    before, file = state(tmp_path), tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    file.write_text(json.dumps(text | config | {"rope_theta": rope["rope_theta"], "rope_scaling": flat}))
    base, after = read_base_model(str(tmp_path)), state(tmp_path)
    assert (base.architecture, base.tower_of) == ("qwen2", "Qwen2_5_VLForConditionalGeneration")
    assert all(after[name].equal(one) for name, one in before.items())
    assert json.loads(base.files["config.json"])["rope_scaling"] == {"type": "default"}


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (
            "qwen3_5",
            "qwen3_5_text",
            "Qwen3_5ForConditionalGeneration is not supported for its text model, qwen3_5_text: it keeps a recurrent",
        ),
        ("gemma4", "gemma4_text", "Gemma4ForConditionalGeneration is not supported for its text model, gemma4_text"),
        ("aria", "aria_text", "model_type 'aria' is not supported beside a tower for images or sound, only deep"),
        ("llava", "gpt2", "text_config.model_type 'gpt2' is not supported beside a tower for images or sound, only d"),
    ],
)
def test_other_wrappers_are_refused_by_name(kind: str, text: str, message: str, tmp_path: Path) -> None:
    from loraplex.worker.engine.model.loader import load_model
    from loraplex.worker.engine_api import ModelUnusableError

    name = f"{kind.title()}ForConditionalGeneration"
    config = {"model_type": kind, "architectures": [name], "text_config": {"model_type": text}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=message):
        read_base_model(str(tmp_path))
    with pytest.raises(ModelUnusableError, match=message):
        load_model(str(tmp_path))


def test_deltas_of_a_tower_are_refused_by_name(tmp_path: Path, save_adapter: Callable[..., None]) -> None:
    wrapped = make_wrapped(make_config("llava"), tmp_path / "model")
    base = read_base_model(str(tmp_path / "model"))
    save_adapter(wrapped, tmp_path / "both", 3, r=4, target_modules=["q_proj"])
    tensor = r"tensor base_model\.model\.model\.vision_tower\.encoder\.layers\.0\.self_attn\.q_proj\.lora_A\.weight"
    with pytest.raises(MismatchError, match=f"{tensor} changes a tower for images or sound, or its projector"):
        validate_adapter(tmp_path / "both", base)
    projector = ["model.multi_modal_projector.linear_1"]
    save_adapter(wrapped, tmp_path / "projector", 3, r=4, target_modules=projector)
    with pytest.raises(MismatchError, match=r"multi_modal_projector\.linear_1\.lora_A\.weight changes a tower"):
        validate_adapter(tmp_path / "projector", base)


def test_a_quantized_copy_is_the_text_model_alone(gemma: Path, tmp_path: Path) -> None:
    from loraplex.contracts.artifacts.checkpoint import read_header
    from loraplex.model_tools.quantized_copy import write_copy

    (gemma / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    base = read_base_model(str(gemma), quantize="int8")
    copy = write_copy(str(gemma), str(tmp_path / "copy"), "int8")
    assert (copy.tower_of, copy.architecture) == ("Gemma3ForConditionalGeneration", "gemma3_text")
    assert copy.adapted_digest == base.adapted_digest == read_base_model(str(gemma)).digest
    assert copy.files["chat_template.jinja"] == base.files["chat_template.jinja"] == b"{{ messages[0]['content'] }}"
    assert {name.split(".")[0] for name in read_header(tmp_path / "copy" / "model.safetensors")} == {"model"}
    quantized = state(tmp_path / "copy")
    assert all(quantized[name].equal(one) for name, one in state(gemma, "int8").items())


def test_fields_that_a_text_config_leaves_out_are_those_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    for name, fields in DEFAULTS.items():
        config = CONFIG_MAPPING[name]()
        own = {field: getattr(config, field, config.rope_parameters.get(field, 1.0)) for field in fields}
        assert own == fields, name
    for name in TEXT_FAMILIES:
        theta = CONFIG_MAPPING[name]().rope_parameters.get("rope_theta")
        if name != TEXT_FAMILIES[name] and theta != 10_000:
            assert ROPE_THETA[name] == theta, name
