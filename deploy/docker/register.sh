#!/bin/sh
# What compose's one-shot service does: makes the base model known, then uploads the adapters below /adapters.
set -eu

loraplex models push /models/base

# NAME/ is everybody's
for config in /adapters/*/adapter_config.json; do
  [ -e "$config" ] || continue
  directory=$(dirname "$config")
  loraplex adapters push "$directory" --name "$(basename "$directory")" --tenant shared
done

# TENANT/NAME/ is the tenant's own
for config in /adapters/*/*/adapter_config.json; do
  [ -e "$config" ] || continue
  directory=$(dirname "$config")
  loraplex adapters push "$directory" --name "$(basename "$directory")" --tenant "$(basename "$(dirname "$directory")")"
done
