"""The shipped example model and adapters, and the scripts that train them."""
