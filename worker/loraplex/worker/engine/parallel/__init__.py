"""Tensor parallelism: the parts of a model's weights that each rank has, and the sums of what ranks compute."""
