"""The gRPC services that clients and operators call."""
