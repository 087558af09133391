"""The engine process: one base model, a continuously batched loop, a different adapter in every row; runs without the
other rooms.
"""
