"""Tiny float32 models with peft's adapters on them: what peft says, and what an engine made of the same checkpoints.

The vocabulary has 20 ids, as many as an engine tells log probabilities of: so every logit is compared, but for a
constant at each position, which changes no probability.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraplex.contracts.artifacts.checkpoint import read_header
from loraplex.contracts.artifacts.revision import WEIGHTS_FILE
from loraplex.contracts.options import StoppingParams
from loraplex.worker.engine_api import AdapterSource, NewSequence, Output

VOCAB = 20
# Largest difference over largest logit.
TOLERANCE = 1e-4
# Where the two best logits are closer, either is right; no case here may be so.
MARGIN = 1e-5
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


class PeftOracle:
    """Hold a saved model, and peft's adapters of it by name, saved as peft saves them."""

    def __init__(
        self,
        model_type: str,
        directory: Path,
        configs: Mapping[str, Mapping[str, Any]],
        seed: int = 0,
        shape: Mapping[str, Any] | None = None,
        change: Callable[[Any, Path], object] = lambda model, directory: None,
    ):
        """Make and save them; `shape` changes fields of SHAPE, `change` the oracle's base model once all is saved.

        An adapter's name must be no part of a module's: peft would not save all of it.
        """
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        torch.manual_seed(seed)
        sizes = SHAPE | dict(shape or {})
        known = set(AutoConfig.for_model(model_type).to_dict()) | set(AutoConfig.for_model(model_type).attribute_map)
        config = AutoConfig.for_model(model_type, **{name: one for name, one in sizes.items() if name in known})
        model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or "ln_" in name:
                parameter.data += 0.1 * values
            else:
                parameter.data.copy_(values * (0.3 if parameter.ndim == 1 else 2.0 / parameter.shape[-1] ** 0.5))
        embeddings = model.get_input_embeddings().weight
        embeddings.data.copy_(torch.randn(embeddings.shape, generator=generator))
        self.directory = directory / "model"
        model.save_pretrained(self.directory)
        self.peft: Any = None
        for name, fields in configs.items():
            lora = LoraConfig(task_type="CAUSAL_LM", **fields)
            if self.peft is None:
                self.peft = get_peft_model(model, lora, adapter_name=name)
            else:
                self.peft.add_adapter(name, lora)
        # peft begins with a B of zeros: nothing would be compared.
        for name, parameter in self.peft.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "lora_magnitude" in name:
                parameter.data *= 1 + 0.3 * values
            elif "trainable_tokens" in name or "modules_to_save" in name:
                parameter.data += values
            elif "lora_" in name:
                parameter.data.copy_(values * 0.25)
        self.peft.eval().save_pretrained(directory)
        change(self.peft.get_base_model(), self.directory)
        self.adapters = {name: directory / name for name in configs}
        for name, path in self.adapters.items():
            made = [one for one, _ in self.peft.named_parameters() if one.removesuffix(".weight").endswith(f".{name}")]
            header = read_header(path / WEIGHTS_FILE)
            assert (
                len(made) == sum(not one.endswith((".base_layer.weight", ".base_layer.bias")) for one in header) > 0
            ), f"peft has not saved all of {name}"

    def request(
        self, name: str, prompt: Iterable[int], tokens: int, source: AdapterSource | str | None = None
    ) -> NewSequence:
        """A greedy sequence that asks for all log probabilities; an adapter by its name, or as a source."""
        ids, invoked_at = tuple(prompt), 0
        if isinstance(source, str):
            invocation = tuple(self.peft.peft_config[source].alora_invocation_tokens or ())
            invoked_at = len(ids) - (self.offset(ids, source) or len(ids))
            source = AdapterSource(f"digest of {source}", str(self.adapters[source]), invocation=invocation)
        return NewSequence(
            name,
            ids,
            adapter=source,
            stopping=StoppingParams(tokens),
            logprobs=VOCAB,
            prompt_logprobs=VOCAB,
            invoked_at=invoked_at,
        )

    def offset(self, prompt: tuple[int, ...], adapter: str) -> int | None:
        """Return how many of the prompt's last ids an activated adapter computes, as peft counts them."""
        from peft.tuners.lora.variants import calculate_alora_offsets

        offset: int | None = calculate_alora_offsets(self.peft.peft_config, adapter, torch.tensor([prompt]))[0]
        return offset

    def check(self, request: NewSequence, outputs: Sequence[Output], adapter: str | None) -> tuple[int, ...]:
        """Assert that an engine's whole answer is peft's with this adapter, logits and greedy ids; the ids."""
        ids = tuple(token for output in outputs for token in output.token_ids)
        assert len(ids) == request.stopping.max_tokens, outputs[-1].failure
        told = [one for output in outputs for one in (*output.prompt_logprobs, *output.logprobs)]
        logprobs = [[logprob for _, logprob in sorted(one.alternatives)] for one in told]
        self.check_answer(request, ids, logprobs, adapter)
        return ids

    def check_answer(
        self, request: NewSequence, ids: tuple[int, ...], logprobs: Sequence[Sequence[float]], adapter: str | None
    ) -> None:
        """Check an answer's ids and the log probabilities of all ids, in their order, at each position."""
        logits = self._logits(request.prompt_ids, adapter, ids[:-1])
        greedy = logits[len(request.prompt_ids) - 1 :]
        best = greedy.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > MARGIN, f"{request.sequence_id}: peft's best two logits are too close"
        assert ids == tuple(greedy.argmax(-1).tolist()), f"{request.sequence_id}: other tokens than peft's"
        logits = logits if request.prompt_logprobs is not None else greedy
        error = (torch.tensor(logprobs) - logits.log_softmax(-1)).abs().max() / logits.abs().max()
        assert error <= TOLERANCE, f"{request.sequence_id}: {error:.1e} of the largest logit"

    def greedy(self, request: NewSequence, adapter: str) -> tuple[int, ...]:
        """Return the ids that follow those that were emitted already."""
        ids = request.emitted_ids
        while len(ids) < request.stopping.max_tokens:
            ids = (*ids, int(self._logits(request.prompt_ids, adapter, ids)[-1].argmax()))
        return ids[len(request.emitted_ids) :]

    @torch.inference_mode()
    def _logits(self, prompt: tuple[int, ...], adapter: str | None, answer: tuple[int, ...] = ()) -> Tensor:
        """Peft's logits [position, vocab], the sequence alone; as its generate does, it looks at the prompt alone."""
        more = {}
        if adapter is not None:
            self.peft.set_adapter(adapter)
            if offset := self.offset(prompt, adapter):
                more["alora_offsets"] = [offset + len(answer)]
        with self.peft.disable_adapter() if adapter is None else contextlib.nullcontext():
            logits: Tensor = self.peft(input_ids=torch.tensor([(*prompt, *answer)]), **more).logits[0]
        return logits


def check_batch(oracle: PeftOracle, engine: Any, run_until_idle: Callable[..., Any], seed: int) -> None:
    """Check requests of all adapters and of none, in one batch, whose answers are to be diverse."""
    chance = random.Random(seed)
    rows = [*oracle.adapters, None, *chance.choices([*oracle.adapters, None], k=4)]
    requests = {
        f"{number}: {name}": oracle.request(
            f"{number}: {name}", chance.choices(range(VOCAB), k=chance.choice([2, 9, 21])), chance.randint(8, 14), name
        )
        for number, name in enumerate(rows)
    }
    outputs = run_until_idle(engine, {0: list(requests.values())})
    answers = {}
    for name, (key, request) in zip(rows, requests.items(), strict=True):
        answers[key] = oracle.check(request, outputs[key], name)
    assert len({ids[:6] for ids in answers.values()}) >= len(rows) - 2, f"answers are to be diverse: {answers}"
