"""The engine protocol: SglangScheduler of the package smg-grpc-proto, translated into the router's own requests."""
