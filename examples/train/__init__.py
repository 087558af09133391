"""Training scripts: ``python -m examples.train.base``, then ``python -m examples.train.adapters``."""
