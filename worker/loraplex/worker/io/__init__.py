"""The I/O process: claims jobs, fetches their adapters, hands them to the engine process and relays its tokens to the
routers.
"""
