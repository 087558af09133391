"""Vectors of decoders beside answers: pooled hidden states and adapters' heads, as in transformers and peft."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex.contracts.options import Encode, FinishReason, StoppingParams
from loraplex.worker.engine_api import AdapterSource, NewSequence, SequenceRefusedError
from tests.worker.engine.encoder.encoder_oracle import scatter
from tests.worker.engine.model.tiny_families import CRAMPED, make_config, make_model
from tests.worker.engine.ranks.forked import fork_ranks

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_thread")]
TARGETS = {"gpt2": ["c_attn", "c_proj"], "opt": ["q_proj", "fc1"]}


def add_adapter(auto: Any, directory: Path, name: str, model_type: str, **config: Any) -> Any:
    """Save peft's adapter of one of transformers' classes over the model, and return that with it."""
    from peft import LoraConfig, get_peft_model

    model = auto.from_pretrained(directory / "model", dtype=torch.float32, attn_implementation="eager")
    targets = TARGETS.get(model_type, ["q_proj", "down_proj"])
    lora = LoraConfig(r=4, target_modules=targets, fan_in_fan_out=model_type == "gpt2", **config)
    peft = get_peft_model(model, lora)
    scatter(peft, 7, lambda one: "lora_" in one or "modules_to_save" in one)
    peft.save_pretrained(str(directory / name))
    return peft.eval()


def text(name: str, ids: tuple[int, ...], encode: Encode | None, adapter: str = "", **fields: Any) -> NewSequence:
    source = AdapterSource(Path(adapter).name, adapter) if adapter else None
    return NewSequence(
        name, ids, adapter=source, stopping=StoppingParams(max_tokens=0 if encode else 20), encode=encode, **fields
    )


@pytest.mark.parametrize(
    ("model_type", "ahead", "ranks"),
    [("llama", False, 1), ("llama", True, 1), ("llama", False, 2), ("gpt2", False, 1), ("gemma2", False, 1),
     ("opt", False, 1)],
)  # fmt: skip
def test_vectors_beside_answers_are_those_of_transformers_and_peft(
    model_type: str,
    ranks: int,
    tmp_path: Path,
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModel, AutoModelForSequenceClassification

    auto, classifier = AutoModel, AutoModelForSequenceClassification
    make_model(make_config(model_type), tmp_path / "model")
    plain = auto.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager").eval()
    classes = add_adapter(classifier, tmp_path, "classes", model_type, task_type="SEQ_CLS")
    features = add_adapter(auto, tmp_path, "features", model_type, task_type="FEATURE_EXTRACTION")
    generator = torch.Generator().manual_seed(1)
    cases: dict[str, tuple[str, tuple[int, ...], Encode]] = {}
    for index, length in enumerate((1, 9, 23, 5, 30, 14, 2, 18, 23)):
        ids = tuple(torch.randint(2, 100, (length,), generator=generator).tolist())
        adapter, task = (("", "embed"), ("features", "embed"), ("classes", "classify"))[index % 3]
        pooling: Any = ("", "mean", "last")[index // 3]
        cases[f"v{index}"] = adapter, ids, Encode(task, pooling if task == "embed" else "")  # type: ignore[arg-type]
    # Its prompt is in the cache when it comes.
    cases["again"] = "", cases["v6"][1] * 9, Encode("embed", "mean")
    cases["before"] = "", cases["v6"][1] * 9, Encode("embed")

    def expected(adapter: str, ids: tuple[int, ...], encode: Encode) -> torch.Tensor:
        batch: Any = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        if encode.task == "classify":
            return classes(**batch).logits[0]  # type: ignore[no-any-return]
        hidden = (features if adapter else plain)(**batch).last_hidden_state[0]
        return hidden.mean(0) if encode.pooling == "mean" else hidden[-1]  # type: ignore[no-any-return]

    fork_ranks(monkeypatch)
    engine = make_engine(tmp_path / "model", tensor_parallel=ranks, **CRAMPED)
    vectors = {
        name: text(name, ids, encode, str(tmp_path / adapter) if adapter else "")
        for name, (adapter, ids, encode) in cases.items()
    }
    answers = [text(f"a{index}", (5, 6, 7 + index), None) for index in range(4)]
    again = vectors.pop("again")
    waiting: list[int] = []
    outputs = run_until_idle(
        engine,
        {0: [*answers, *vectors.values()], 60: [again]},
        lambda _: waiting.append(engine.stats().rows_waiting),
    )
    with torch.inference_mode():
        for name, case in cases.items():
            [output] = outputs[name]
            assert (output.finish, output.failure, output.token_ids) == (FinishReason.LENGTH, None, ()), name
            wanted = expected(*case)
            scale = wanted.abs().max().clamp(min=1.0)
            assert (torch.tensor(output.vector) - wanted).abs().max() <= 1e-4 * scale, (name, case)
    assert engine.stats().preemptions or any(after > before for before, after in pairwise(waiting))
    assert outputs["again"][0].cached_tokens == 0
    alone = run_until_idle(engine, {0: answers})
    assert {name: [one.token_ids for one in its] for name, its in alone.items()} == {
        one.sequence_id: [output.token_ids for output in outputs[one.sequence_id]] for one in answers
    }


def test_vectors_that_a_decoder_has_not_are_refused(
    tmp_path: Path, make_engine: Callable[..., Any], run_until_idle: Callable[..., Any]
) -> None:
    from transformers import AutoModel

    make_model(make_config("llama"), tmp_path / "model")
    add_adapter(AutoModel, tmp_path, "features", "llama", task_type="FEATURE_EXTRACTION")
    engine = make_engine(tmp_path / "model", **CRAMPED)
    for encode, message in [
        (Encode("classify"), "adapter: neither the base model nor the adapter has a classifier"),
        (Encode("embed", "cls"), "encode.pooling: the first token of a decoder sees no other"),
    ]:
        with pytest.raises(SequenceRefusedError, match=message):
            engine.add_sequence(text("a", (5, 6), encode))
    outputs = run_until_idle(engine, {0: [text("a", (5, 6), Encode("classify"), str(tmp_path / "features"))]})
    assert [(one.failure.code, one.failure.reason) for one in outputs["a"]] == [
        ("FAILED_PRECONDITION", "NO_CLASSIFIER")
    ]


def test_a_mean_counts_no_chunk_twice_when_memory_was_not_enough(
    tmp_path: Path,
    make_engine: Callable[..., Any],
    run_until_idle: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from loraplex.worker.engine.sampling.step import launch_sampling

    make_model(make_config("llama"), tmp_path / "model")
    engine = make_engine(tmp_path / "model", rows=4, step_tokens=8)
    request = text("a", tuple(range(5, 35)), Encode("embed", "mean"))
    [whole] = run_until_idle(engine, {0: [request]})["a"]
    launch, calls = launch_sampling, 0

    def fail_once(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return launch(*arguments, **options)

    monkeypatch.setattr("loraplex.worker.engine.model.runner.launch_sampling", fail_once)
    [output] = run_until_idle(engine, {0: [request]})["a"]
    assert output.vector == pytest.approx(whole.vector, abs=1e-5)
    assert calls > 4
