"""How the cluster is run: the one-machine launcher, the images, and the check of what they name."""
