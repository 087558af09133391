"""GGUF files, as llama.cpp has them: models are imported as transformers directories, LoRA adapters as peft's."""

from worker.engine.gguf.adapter import convert_adapter as convert_adapter
from worker.engine.gguf.base import import_gguf as import_gguf
