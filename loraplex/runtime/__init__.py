"""The base of every process: gRPC servers and their guards, credentials, telemetry, followed files."""
