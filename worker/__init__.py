"""The worker: one base model, a batch that never stops, and a cache of adapters. Two processes, see worker.link."""
