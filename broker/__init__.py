"""The Redis contract between routers and workers, owned by neither side."""
