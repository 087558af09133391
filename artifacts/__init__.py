"""Formats that store, workers, routers and command line share: digests, names, manifests, PEFT fields. No torch."""
