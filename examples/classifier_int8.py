"""Dynamic int8 of a DeBERTa-v2 classifier: size, time and agreement, beside the well-known recipe.

    python -m examples.classifier_int8            a random model of 52 M parameters, made here
    python -m examples.classifier_int8 DIR        another DeBERTa-v2 classifier, as transformers saves it

The recipe is torch's quantize_dynamic over all linear layers: weights as int8 with one scale for a layer, inputs
rounded to 7 bits by the range of the whole batch, so that a text's logits depend on what is beside it. The cluster's
`--quantize int8+embeddings` has a scale for each output of a layer and each token, and rounds inputs row by row, to 16
bits, where the kernel takes integers: a text's logits do not depend on its batch.

A random model shows size and time as a trained one would, and a stricter agreement: its classes are close.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from loraplex.contracts.options import Encode, StoppingParams
from loraplex.encoders.engine import EncoderEngine, build_encoder
from loraplex.worker.engine_api import EngineConfig, NewSequence
from loraplex.worker.plan import PlanSettings, plan

# Shaped like DeBERTa v3: relative positions in buckets, whose projections are the layers' own.
SIZES: dict[str, Any] = {
    "vocab_size": 8_000, "hidden_size": 768, "intermediate_size": 3_072, "num_hidden_layers": 6,
    "num_attention_heads": 12, "max_position_embeddings": 512, "relative_attention": True, "position_buckets": 256,
    "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "share_att_key": True, "num_labels": 4,
    "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip
SCHEME = "int8+embeddings"
TEXTS, LONGEST = 32, 128
# Number of times that each side runs; the fastest counts.
ROUNDS = 3

Texts = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Side:
    """The bytes of a model's weights, the seconds that all texts take, and their logits [texts, labels]."""

    bytes: int
    seconds: float
    logits: Tensor

    def agreement(self, original: Side) -> float:
        """Return the share of texts that get the class of the original."""
        return float((self.logits.argmax(-1) == original.logits.argmax(-1)).float().mean())


def make_model(directory: Path, sizes: dict[str, Any]) -> None:
    """Save a random classifier whose classes differ from text to text."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("deberta-v2", pooler_hidden_size=sizes["hidden_size"], **sizes)
    auto: Any = AutoModelForSequenceClassification
    model = auto.from_config(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embeddings" not in name:
            nn.init.normal_(weight, std=1.2 / weight.shape[1] ** 0.5)
    model.save_pretrained(directory)


def run(directory: Path, texts: int = TEXTS, longest: int = LONGEST, rounds: int = ROUNDS) -> dict[str, Side]:
    """Classify the same texts by all sides, which take turns."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(longest // 8, longest + 1, (texts,), generator=generator).tolist()
    ids = [tuple(torch.randint(5, model.config.vocab_size, (n,), generator=generator).tolist()) for n in lengths]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the move of this function to torchao
        recipe = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call]
    with _engine(directory, "") as whole, _engine(directory, SCHEME) as small:
        sides: dict[str, tuple[int, Callable[[], Tensor]]] = {
            "transformers": (_saved_bytes(model), lambda: _padded(model, ids)),
            "quantize_dynamic": (_saved_bytes(recipe), lambda: _padded(recipe, ids)),
            "engine": (_loaded_bytes(directory, ""), lambda: _joined(whole, ids)),
            "engine, int8": (_loaded_bytes(directory, SCHEME), lambda: _joined(small, ids)),
        }
        logits = {name: classify() for name, (_, classify) in sides.items()}
        seconds = dict.fromkeys(sides, float("inf"))
        for _ in range(rounds):
            for name, (_, classify) in sides.items():
                began = time.perf_counter()
                classify()
                seconds[name] = min(seconds[name], time.perf_counter() - began)
    return {name: Side(size, seconds[name], logits[name]) for name, (size, _) in sides.items()}


@contextmanager
def _engine(directory: Path, quantize: str) -> Iterator[EncoderEngine]:
    config = EngineConfig(str(directory), dtype="float32", quantize=quantize, threads=torch.get_num_threads())
    engine = build_encoder(config)
    try:
        yield engine
    finally:
        engine.close()


def _loaded_bytes(directory: Path, quantize: str) -> int:
    return plan(PlanSettings(str(directory), dtype="float32", quantize=quantize)).weight_bytes


def _saved_bytes(model: Any) -> int:
    file = BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


@torch.inference_mode()
def _padded(model: Any, texts: Texts, rows: int = 8) -> Tensor:
    """Classify in batches that are padded to their longest text."""
    logits = []
    for first in range(0, len(texts), rows):
        batch = texts[first : first + rows]
        ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(batch):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        logits.append(model(input_ids=ids, attention_mask=mask).logits)
    return torch.cat(logits)


def _joined(engine: EncoderEngine, texts: Texts) -> Tensor:
    """Classify by the engine of the cluster's workers, which joins texts without padding."""
    for index, text in enumerate(texts):
        engine.add_sequence(
            NewSequence(str(index), text, stopping=StoppingParams(max_tokens=0), encode=Encode("classify"))
        )
    vectors = {}
    while engine.has_work():
        vectors.update({int(output.sequence_id): output.vector for output in engine.step()})
    return torch.tensor([vectors[index] for index in range(len(texts))])


def show(sides: dict[str, Side]) -> None:
    """Print a line for each side."""
    original = sides["transformers"]
    for name, side in sides.items():
        size, faster = f"{side.bytes / 1e6:8.1f} MB", original.seconds / side.seconds
        difference = float((side.logits - original.logits).abs().max())
        print(f"{name:18} {size}   {side.seconds:7.3f} s   {faster:4.2f} x", end="   ")
        print(f"same class {side.agreement(original):.0%}, largest difference {difference:.4f}")


if __name__ == "__main__":
    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity_error()  # type: ignore[no-untyped-call]
    if len(sys.argv) > 1:
        show(run(Path(sys.argv[1])))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            make_model(Path(scratch), SIZES)
            show(run(Path(scratch)))
