"""The adapter store: who owns which adapter, its immutable revisions, and the base models that they belong to."""
