"""Releases of adapters: gates, rollouts by steps, signers and webhooks. A store loads its `service` by its name."""
