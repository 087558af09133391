"""Buckets as sources that are read with the identity of the store's account, from what Kubernetes gives to its pod."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from loraplex.cli.development_ca import DevelopmentCa
from loraplex.runtime.rpc.timed_http import OpenSockets
from loraplex.transfers.objects import ObjectFolder
from loraplex.transfers.policy import Rule, Sources, SourcesError, parse_uri
from tests.adapter_store.sources.places import Place, XmlBucket, served

_STS = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>FROMSTS</AccessKeyId><SecretAccessKey>s</SecretAccessKey>
<SessionToken>t</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>
</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""
_POD = {"AccessKeyId": "FROMAGENT", "SecretAccessKey": "s", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}
_BLOBS = """<EnumerationResults><Blobs><Blob><Name>lora/x/weights</Name><Properties>
<Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT</Last-Modified><Content-Length>3</Content-Length><Etag>1</Etag>
<Content-Type>x</Content-Type></Properties></Blob></Blobs><NextMarker /></EnumerationResults>"""


class Bucket(XmlBucket):
    """A bucket with one file that keeps what its callers come with."""

    def __init__(self) -> None:
        super().__init__()
        self.put("lora/x/weights", b"abc")
        self.callers: list[str] = []

    def answer(self, handler: Place) -> None:
        """Answer a request for the list."""
        self.callers.append(handler.headers.get("authorization") or "nobody")
        if "comp=list" in handler.path:
            handler.send(200, _BLOBS.encode())
        else:
            super().answer(handler)


def identify(handler: Place) -> None:
    """Answer as a token service or a metadata service to whoever has the account's token, or asks as a pod does."""
    handler.body()
    if "WebIdentityToken=account" in handler.path:
        handler.send(200, _STS.encode())
    elif handler.path.endswith("/pod") and handler.headers["authorization"] == "account":
        handler.send(200, json.dumps(_POD).encode())
    else:
        assert handler.headers["metadata-flavor"] == "Google" or handler.path.endswith("/tenant/oauth2/v2.0/token")
        handler.send(200, b'{"access_token": "from-service", "expires_in": 3600, "token_type": "Bearer"}')


@contextmanager
def with_tls(directory: Path) -> Iterator[str]:
    """Run the token service of AWS, which is called with TLS alone, with a certificate of ca.pem; yields its URL."""
    ca = DevelopmentCa()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*ca.write(directory, "sts", ca.issue("loraplex://store/sts", ["127.0.0.1"])))
    ca.write_ca(directory)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Place)
    server.daemon_threads = True
    server.answer = identify  # type: ignore[attr-defined]
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def token(tmp_path: Path) -> str:
    """The file with the account's token that Kubernetes mounts."""
    (tmp_path / "token").write_text("account")
    return str(tmp_path / "token")


@pytest.fixture
def services(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL of the service with TLS, and of the one without."""
    with with_tls(tmp_path) as secure, served(identify) as plain:
        yield secure, plain


def irsa(secure: str, _: str, token: str) -> Mapping[str, str]:
    """Return the variables of a pod whose account is annotated with a role; the CA is the test's."""
    role = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/store", "AWS_WEB_IDENTITY_TOKEN_FILE": token}
    return {**role, "AWS_ENDPOINT_URL_STS": secure, "SSL_CERT_FILE": str(Path(token).parent / "ca.pem")}


def pod_identity(_: str, plain: str, token: str) -> Mapping[str, str]:
    """Return the variables of a pod of EKS whose account has an association."""
    agent = f"{plain}/pod"
    return {"AWS_CONTAINER_CREDENTIALS_FULL_URI": agent, "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": token}


def gke(_: str, plain: str, token: str) -> Mapping[str, str]:
    """Return the place of the metadata service, which a pod of GKE finds without a variable."""
    place = plain.removeprefix("http://")
    return dict.fromkeys(("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"), place)


def aks(_: str, plain: str, token: str) -> Mapping[str, str]:
    """Return the variables of a pod of AKS with the label of workload identities, and the account of the container."""
    account = {"AZURE_STORAGE_ACCOUNT_NAME": "acme", "AZURE_AUTHORITY_HOST": plain}
    return {**account, "AZURE_CLIENT_ID": "c", "AZURE_TENANT_ID": "tenant", "AZURE_FEDERATED_TOKEN_FILE": token}


@pytest.mark.parametrize(
    ("scheme", "variables", "caller"),
    [
        ("s3", irsa, "AWS4-HMAC-SHA256 Credential=FROMSTS/"),
        ("s3", pod_identity, "AWS4-HMAC-SHA256 Credential=FROMAGENT/"),
        ("gs", gke, "Bearer from-service"),
        ("az", aks, "Bearer from-service"),
    ],
)
def test_a_bucket_knows_the_store_by_its_account(
    scheme: str,
    variables: object,
    caller: str,
    services: tuple[str, str],
    token: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert callable(variables)
    for name, value in variables(*services, token).items():
        monkeypatch.setenv(name, value)
    uri, bucket = parse_uri(f"{scheme}://acme/lora/x"), Bucket()
    with served(bucket.answer) as url:
        lines = f'[[source]]\nprefix = "{scheme}://acme/lora"\nendpoint = "{url}"\nallow_private = true\n'
        (tmp_path / "sources.toml").write_text(f"{lines}identity = true\n")
        rule = Sources(tmp_path / "sources.toml").rule(uri, "acme")
        with closing(ObjectFolder(uri, rule, OpenSockets())) as folder:
            assert [file.path for file in folder.list().files] == ["weights"]
        assert bucket.callers[0].startswith(caller)
        if scheme != "az":
            anonymous = Rule(uri, endpoint=url, allow_private=True)
            with closing(ObjectFolder(uri, anonymous, OpenSockets())) as folder:
                assert folder.list().files
            assert bucket.callers[1] == "nobody", "a source without identity is not read as the store"


@pytest.mark.parametrize("rest", ['prefix = "s3://acme"\ncredentials = "a"', 'prefix = "hf://acme"'])
def test_an_identity_where_there_can_be_none_is_refused(rest: str, tmp_path: Path) -> None:
    path = tmp_path / "sources.toml"
    path.write_text(f"[[source]]\nidentity = true\n{rest}\n[credentials.a]\naccess_key_id_env = 'A'\n")
    with pytest.raises(SourcesError, match="source 1: identity: in place of credentials, and of s3, gs, az alone"):
        Sources(path)
