"""The base models' tokenizers and chat templates."""
