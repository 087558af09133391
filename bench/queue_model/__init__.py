"""A model of the queue in Python that decides as the Lua scripts of `broker` do: for simulations in virtual time, and
for the tests that compare both.
"""
