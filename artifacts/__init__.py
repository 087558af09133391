"""What store, worker and command line must agree on: digests, names, manifests, the PEFT fields that are served."""
