"""Deployment: the one-machine launcher, the container images, and a check of the names in them."""
