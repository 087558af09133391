"""Redis in this process, for simulations, benchmarks in virtual time and tests."""
