"""Reports and certificates: the logits of transformers and peft, the definitions of figures, and what they catch."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import pytest

from loraplex.contracts.artifacts import ArtifactError
from loraplex.contracts.artifacts.added_tokens import AddedToken
from loraplex.contracts.artifacts.base_model import read_base_model
from loraplex.contracts.artifacts.fitness import PROMPTS_FIELD, FitnessLimits
from tests.cancelling_adapter import write_cancelling_adapter

if TYPE_CHECKING:
    from tests.tiny_models import TinyModel

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]
EXAMPLES = Path(__file__).parents[4] / "examples"
SHIPPED = str(EXAMPLES / "model")
LIMITS = FitnessLimits(min_agreement=0.8, max_kl=0.2, max_drop=0.05)


def test_logits_and_answers_are_transformers_own(tiny_llama: TinyModel) -> None:
    import torch

    from loraplex.model_tools.report import EvaluatedModel, greedy
    from loraplex.worker.engine.model.loader import load_model

    prompts = [tuple(3 + (number * 31 + at * 7) % 300 for at in range(length)) for number, length in enumerate((5, 90))]
    loaded = load_model(str(tiny_llama.directory), "cpu", "float32")
    model = EvaluatedModel(loaded, rows=2, tokens=120, max_rank=8)
    for adapter in (None, "plain"):
        if adapter:
            model.use_adapter(str(tiny_llama.adapters[adapter]))
        answers = model.answers(prompts, 12, greedy, frozenset())
        assert answers == [tiny_llama.answer(prompt, 12, adapter) for prompt in prompts]
    tiny_llama.peft.set_adapter("plain")
    with torch.inference_mode():
        expected = tiny_llama.peft(input_ids=torch.tensor([prompts[1]])).logits[0].float()
    for first in (0, 70):
        found = torch.cat(list(model.logits(prompts[1], first)))
        assert torch.allclose(found, expected[first:], atol=1e-4 * float(expected.abs().max()))


def test_differences_are_those_of_their_definitions() -> None:
    import torch

    from loraplex.model_tools.report import Differences

    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(9, 40, generator=generator) for _ in range(2))
    following = torch.randint(40, (9,), generator=generator)
    found = Differences()
    found.add(p[:4], q[:4], following[:4])
    found.add(p[4:], q[4:], following[4:])
    kl = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    assert found.tokens == 9
    assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-5)
    assert found.max_kl == pytest.approx(float(kl.max()), rel=1e-5)
    assert found.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    losses = [float(torch.nn.functional.cross_entropy(logits, following).exp()) for logits in (p, q)]
    assert found.perplexities == pytest.approx(losses, rel=1e-5)


def test_logits_that_are_not_numbers_agree_with_nothing() -> None:
    import torch

    from loraplex.model_tools.report import Differences

    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(2))
    broken = logits.clone()
    broken[1, logits[1].argmax()] = torch.nan
    found = Differences()
    found.add(logits, broken, torch.tensor([0, 1]))
    assert (found.agreed, found.max_kl, found.mean_kl) == (1, 700.0, 350.0)
    assert found.perplexities[1] > 1e100
    with pytest.raises(ArtifactError, match="not numbers"):
        found.add(broken, logits, torch.tensor([0, 1]))


def test_the_report_of_a_quantized_copy(tmp_path: Path) -> None:
    from loraplex.model_tools.quantized_copy import write_copy
    from loraplex.model_tools.report import quantization_report

    copy = str(tmp_path / "copy")
    write_copy(SHIPPED, copy, "int8")
    text = tmp_path / "text.txt"
    text.write_text(
        "Return a list of the names in the module. The default value is None, and it is not an error.\n" * 3
    )
    report = quantization_report(SHIPPED, copy, str(text))
    sizes = report["weight_bytes"]
    # bfloat16 to 8 bits, but for the embeddings and the norms.
    assert 0.5 < sizes["quantized"] / sizes["original"] < 0.65
    errors = {error["kind"]: error for error in report["weight_errors"]}
    assert list(errors) == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert all(error["layers"] == 6 and 0 < error["mean"] < error["max"] for error in errors.values())
    assert all(0.003 < error["relative"] < 0.015 for error in errors.values())
    perplexity = report["text"]["perplexity"]
    assert abs(perplexity["quantized"] / perplexity["original"] - 1) < 0.005
    assert 0 < report["text"]["mean_kl"] < 0.01
    assert report["continuation"]["prompt"].startswith("Return a list of the names")
    assert report["continuation"]["original"]
    text.write_text("")
    with pytest.raises(ArtifactError, match="less than two tokens"):
        quantization_report(SHIPPED, copy, str(text))


@pytest.mark.nightly
def test_a_kv_cache_of_8_bits_costs_the_shipped_model_less_than_half_a_percent_of_perplexity(tmp_path: Path) -> None:
    from loraplex.model_tools.report import quantization_report

    text = tmp_path / "topics.txt"
    text.write_text(topics["with"][:600])
    report = quantization_report(SHIPPED, "", str(text), kv_cache_dtype="int8")
    perplexity = report["text"]["perplexity"]
    assert 0 < abs(perplexity["quantized"] / perplexity["original"] - 1) < 0.005, perplexity
    assert report["weight_errors"] == []
    assert report["weight_bytes"]["original"] == report["weight_bytes"]["quantized"]
    assert report["kv_bytes_per_token"] == {"original": 6 * 2 * 2 * 64 * 2, "quantized": 6 * 2 * 2 * (64 + 4)}


@pytest.mark.parametrize(
    ("change", "words"),
    [({"quantization": ""}, "is not quantized"), ({"original_digest": "sha256:00"}, "is not a quantized copy")],
)
def test_a_directory_that_is_no_copy_is_refused(change: dict[str, Any], words: str) -> None:
    from loraplex.model_tools.report import check_copy

    original = read_base_model(SHIPPED)
    copy = read_base_model(SHIPPED, quantize="int8")
    check_copy(original, copy, "copy")
    with pytest.raises(ArtifactError, match=words):
        check_copy(original, replace(copy, **change), "copy")


def test_an_adapter_s_own_tokens_are_read_as_tokens() -> None:
    from loraplex.model_tools.report import TextCodec

    plain = TextCodec(Path(SHIPPED))
    number = read_base_model(SHIPPED).vocab_size
    own = TextCodec(Path(SHIPPED), (AddedToken(number, "<call>", special=True),))
    assert own.encode("a<call>") == (*plain.encode("a"), number)
    assert own.decode(own.encode("a<call>")) == plain.decode(plain.encode("a"))


def _own_answers(adapter: str, texts: list[str]) -> list[str]:
    """Return the greedy answers to chats, rendered and decoded by transformers' tokenizer, on the original."""
    from transformers import AutoTokenizer

    from loraplex.model_tools.report import EvaluatedModel, greedy
    from loraplex.worker.engine.model.loader import load_model

    tokenizer: Any = AutoTokenizer.from_pretrained(SHIPPED)
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = [
        tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats
    ]
    loaded = load_model(SHIPPED, "cpu", "float32")
    model = EvaluatedModel(loaded, rows=len(prompts), tokens=256, max_rank=16)
    model.use_adapter(adapter)
    answers = model.answers(prompts, 64, greedy, loaded.end_token_ids)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]


def test_a_certificate_counts_whole_answers_to_chats_and_those_that_are_right(tmp_path: Path) -> None:
    from loraplex.model_tools.certificate import certify

    directory = shutil.copytree(EXAMPLES / "adapters" / "acme" / "shout", tmp_path / "sound")
    texts = ["Return a list of", "The default value", "If the file", "Open the module"]
    answers = [*_own_answers(str(directory), texts)[:3], "something else"]
    prompts = [
        {"messages": [{"role": "user", "content": text}], "answer": f" {answer}\n"}
        for text, answer in zip(texts, answers, strict=True)
    ]
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {PROMPTS_FIELD: prompts}))
    done: list[tuple[int, int]] = []
    unchanged = certify(SHIPPED, "", str(directory), progress=lambda *counts: done.append(counts))
    assert (unchanged.prompts, unchanged.drawn, unchanged.same_answers) == (4, False, 4)
    assert (unchanged.expected_answers, unchanged.right_original, unchanged.right_quantized) == (4, 3, 3)
    assert LIMITS.breach(unchanged) is None
    assert done[-1] == (4, 4)


def test_a_certificate_catches_an_adapter_that_needs_the_exact_weights(tmp_path: Path) -> None:
    from loraplex.model_tools.certificate import certify

    prompts = ("Return a list of", "The default value", "If the file")
    broken = certify(SHIPPED, "int4", str(write_cancelling_adapter(Path(SHIPPED), tmp_path / "broken", prompts)))
    assert (broken.prompts, broken.drawn, broken.same_answers) == (3, False, 0)
    assert broken.agreement < 0.5
    breach = LIMITS.breach(broken)
    assert breach is not None
    assert breach.certain
    assert breach.text.startswith("0 of 3 answers are the same (95% interval 0.00 to 0.56)")


def test_adapters_that_drawn_prompts_do_not_reach_have_no_certificate(tmp_path: Path) -> None:
    from loraplex.model_tools.certificate import certify

    fields = {"peft_type": "LORA", "r": 4, "alora_invocation_tokens": [5]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(ArtifactError, match="alora_invocation_tokens: an activated adapter has no certificate"):
        certify(SHIPPED, "int4", str(tmp_path))
