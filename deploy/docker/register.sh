#!/bin/sh
# Runs as compose's one-shot service: registers the base model, then uploads the adapters below /adapters that the store
# has not. Aliases that are there stay where they are.
set -eu

loraplex models push /models/base --quantize "${QUANTIZE:-}" --kv-cache-dtype "${KV_CACHE_DTYPE:-}"
loraplex adapters push-all /adapters
