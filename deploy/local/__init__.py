"""The one-machine launcher: embedded Valkey, store, routers and workers as child processes."""
