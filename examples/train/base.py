"""Trains the shipped base model from scratch: a tokenizer and a 5.5 M parameter Llama, on a CPU, in under an hour.

The model is small enough for git and for a laptop, yet has the features of a served model: grouped-query attention,
tied embeddings, an end token, a chat template and a context of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.train.corpus import Document, as_question, load_documents

END = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 1024
SHORT_WINDOW = 192
TOKENS_PER_STEP = 16 * SHORT_WINDOW
LONG_EVERY = 6  # Interval in steps between steps on windows of the whole context, which train the far positions.
# The newline is an expression, because renderers that trim blocks drop a plain newline after a tag.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def render(documents: Sequence[Document], seed: int) -> list[str]:
    """Return the documents as training texts: all unchanged, a quarter also as chats, one in twenty also in capitals.

    The chats teach the template. The capitals teach their spelling, which an adapter can then switch on; after a
    prompt in lower case the base model stays in lower case.
    """
    chance = random.Random(seed)
    texts: list[str] = []
    for document in documents:
        texts.append(document.text)
        if chance.random() < 0.25:
            texts.append(f"User: {as_question(document.name)}\nAssistant: {document.text}")
        if chance.random() < 0.05:
            texts.append(document.text.upper())
    chance.shuffle(texts)
    return texts


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can encode every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    """Return the ids of all texts in one row, each followed by the end token. Shape: (tokens,), int64."""
    backend = tokenizer.backend_tokenizer
    ids: list[int] = []
    for encoding in backend.encode_batch(list(texts)):
        ids.extend(encoding.ids)
        ids.append(0)
    return torch.tensor(ids)


def new_model(seed: int) -> LlamaForCausalLM:
    """Return the untrained model in float32: 6 layers, hidden 256, 4 query heads on 2 key-value heads."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def windows(stream: torch.Tensor, step: int, chance: torch.Generator) -> torch.Tensor:
    """Return random cuts of the stream, with the same number of tokens at each step. Shape: (rows, window), int64."""
    length = CONTEXT if step % LONG_EVERY == LONG_EVERY - 1 else SHORT_WINDOW
    starts = torch.randint(len(stream) - length, (TOKENS_PER_STEP // length,), generator=chance)
    return torch.stack([stream[start : start + length] for start in starts.tolist()])


def loss_of(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token loss in nats, without labels of -100. Computed in bfloat16, faster on recent CPUs."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    assert isinstance(loss, torch.Tensor)
    return loss


def learning_rate(step: int, steps: int, peak: float, warm_up: int = 100) -> float:
    """Return the learning rate: a linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor) -> float:
    """Return the mean loss over texts that training never sees, in nats per token."""
    model.train(False)
    rows = stream[: len(stream) // SHORT_WINDOW * SHORT_WINDOW].view(-1, SHORT_WINDOW)
    batches = [rows[start : start + 16] for start in range(0, len(rows), 16)]
    losses = [loss_of(model, batch, batch).item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a transformers directory in bfloat16, each file atomically."""
    staging = folder.with_name(folder.name + ".new")
    shutil.rmtree(staging, ignore_errors=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.bfloat16()
    copy.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    _name_tokenizer_class(staging / "tokenizer_config.json")
    folder.mkdir(parents=True, exist_ok=True)
    for file in staging.iterdir():
        file.chmod(0o644)
        file.replace(folder / file.name)
    staging.rmdir()


def _name_tokenizer_class(file: Path) -> None:
    """Use the class name that transformers 4 and 5 both know; version 5 writes one that only it can load."""
    config = json.loads(file.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def train(arguments: argparse.Namespace) -> None:
    """Train the tokenizer, then the model for `--steps` steps; write a usable checkpoint every `--save-every` steps."""
    documents, held_out = load_documents(arguments.seed)
    texts = render(documents, arguments.seed)
    tokenizer = train_tokenizer(texts)
    stream = token_stream(tokenizer, texts)
    check = token_stream(tokenizer, [document.text for document in held_out])
    model = new_model(arguments.seed)
    parameters = model.num_parameters() / 1e6
    print(f"{len(documents)} documents, {len(stream)} tokens, {parameters:.2f} M parameters", flush=True)

    decayed = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    chance = torch.Generator().manual_seed(arguments.seed)
    started = time.monotonic()
    smooth = 0.0
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments.steps, arguments.learning_rate)
        ids = windows(stream, step, chance)
        loss = loss_of(model, ids, ids)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} loss {smooth:.3f} {time.monotonic() - started:.0f} s", flush=True)
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            save(model, tokenizer, arguments.out)
            print(f"saved {arguments.out}, held-out loss {held_out_loss(model, check):.3f}", flush=True)


def main() -> None:
    """Read the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "model", help="directory to write")
    parser.add_argument("--steps", type=int, default=3200, help=f"optimizer steps of {TOKENS_PER_STEP} tokens")
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak of the cosine schedule")
    parser.add_argument("--seed", type=int, default=1, help="seed of shuffles, weights and batches")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
