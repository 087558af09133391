"""Which base models, adapters and live workers there are."""
