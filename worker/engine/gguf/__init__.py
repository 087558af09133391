"""GGUF files, as llama.cpp has them: models are imported as transformers directories, LoRA adapters as peft's."""

from worker.engine.gguf.base import import_gguf as import_gguf
