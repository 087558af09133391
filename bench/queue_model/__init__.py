"""The queue's policy in Python, decision for decision as the Lua scripts of `broker`: for simulations and for tests
that compare both.
"""
