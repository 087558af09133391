"""`loraplex probe HOST:PORT`: a health check that exits 0 when the process there serves, else 1 with one line.

`loraplex probe http://HOST:PORT/readyz` asks a path of the metrics' port, or a gateway's /health.
"""

from __future__ import annotations

import argparse
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def main(argv: Sequence[str]) -> int:
    """Ask grpc.health.v1 or the URL at the address once."""
    parser = argparse.ArgumentParser(prog="loraplex probe", description="Exits 0 when the process there serves.")
    parser.add_argument("address", help="HOST:PORT of a gRPC server, or an http:// or https:// URL")
    parser.add_argument("--ca", metavar="FILE", help="use TLS: the authority that signs the server's certificate")
    parser.add_argument("--cert", metavar="FILE", help="the certificate of the caller, for ports that require one")
    parser.add_argument("--key", metavar="FILE", help="the private key of --cert")
    arguments = parser.parse_args(argv)
    address = arguments.address
    if address.startswith(("http://", "https://")):
        return _ask_url(address, arguments.ca)
    try:
        channel = _channel(address, arguments.ca, arguments.cert, arguments.key)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            cause = tls_fault(address, arguments.ca, arguments.cert, arguments.key) or error.details()
            print(f"error: {address} does not answer: {cause}", file=sys.stderr)
            return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        print(f"error: {address} is not serving", file=sys.stderr)
        return 1
    return 0


def tls_fault(address: str, ca: str | None, cert: str | None = None, key: str | None = None) -> str:
    """Return why a client with these PEM files gets no connection, where TLS is why; `ca` is None for one without TLS.

    gRPC says of all of it that the socket was closed.
    """
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=ca) if ca else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if ca is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        if cert and key:
            context.load_cert_chain(cert, key)
        with (
            socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")) as connection,
        ):
            if ca is None:
                return "it speaks TLS: give --ca FILE"
            if _is_taken(connection):
                return ""
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted: {error.verify_message.rstrip('.')}"
    except (OSError, ValueError) as error:
        is_plain = ca and getattr(error, "reason", "") == "WRONG_VERSION_NUMBER"
        return "it speaks no TLS: leave out --ca" if is_plain else ""
    if cert:
        return f"it does not take the client certificate {cert}"
    return "it asks for a client certificate: give --cert FILE --key FILE"


def _is_taken(connection: ssl.SSLSocket) -> bool:
    """Wait for the first byte of an HTTP/2 server, which closes a connection whose certificate it does not take."""
    try:
        return bool(connection.recv(1))
    except (ssl.SSLError, ConnectionError):
        return False


def _ask_url(url: str, ca: str | None) -> int:
    try:
        context = ssl.create_default_context(cafile=ca) if url.startswith("https://") else None
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context):
            return 0
    except urllib.error.HTTPError as error:
        print(f"error: {url}: {error.code}: {error.read(1000).decode(errors='replace').strip()}", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"error: {url} does not answer: {error}", file=sys.stderr)
    return 1


def _channel(address: str, ca: str | None, cert: str | None, key: str | None) -> grpc.Channel:
    """Open a channel. Raises OSError for a file that cannot be read."""
    pems = [None if path is None else Path(path).read_bytes() for path in (ca, key, cert)]
    if not any(pems):
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*pems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
