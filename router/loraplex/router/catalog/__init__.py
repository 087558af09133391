"""Base models, adapters and live workers, as the store and Redis know them."""
