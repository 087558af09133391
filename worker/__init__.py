"""The worker: an I/O process (`worker.io`) and an engine process (`worker.engine`), which meet in `worker.ipc` and
`worker.engine_api`.
"""
