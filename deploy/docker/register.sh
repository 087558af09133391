#!/bin/sh
# Runs as compose's one-shot service: registers the base model, then uploads the adapters below /adapters.
set -eu

loraplex models push /models/base --quantize "${QUANTIZE:-}"

# An adapter at NAME/ is available to every tenant.
for config in /adapters/*/adapter_config.json; do
  [ -e "$config" ] || continue
  directory=$(dirname "$config")
  loraplex adapters push "$directory" --name "$(basename "$directory")" --tenant shared
done

# An adapter at TENANT/NAME/ belongs to the tenant.
for config in /adapters/*/*/adapter_config.json; do
  [ -e "$config" ] || continue
  directory=$(dirname "$config")
  loraplex adapters push "$directory" --name "$(basename "$directory")" --tenant "$(basename "$(dirname "$directory")")"
done
