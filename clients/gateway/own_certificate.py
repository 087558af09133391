"""The gateway's own certificate, which is read again when its files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from rpc.settings import SettingsError

log = logging.getLogger(__name__)


class OwnCertificate:
    """A certificate and its key. `context` is what connections begin with; each gets the files as they are then.

    Raises SettingsError where the files cannot be used.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = Path(cert), Path(key)
        self._last_logged = ""
        try:
            self._seen = self._stamps()
            self.context = self._newest = self._read()
        except OSError as error:
            raise SettingsError(f"--tls-cert {cert}, --tls-key {key}: {error.strerror or error}") from error
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Give a connection the newest certificate; called in its handshake, whether it names a host or not."""
        self._look()
        connection.context = self._newest

    def _look(self) -> None:
        """Read the files again if they have changed; the former ones stay while the new ones cannot be used."""
        try:
            if (stamps := self._stamps()) == self._seen:
                return
            self._seen = stamps  # also where the files cannot be used: others are tried when they change
            self._newest = self._read()
        except OSError as error:  # ssl.SSLError too: one of the files has been replaced, the other follows
            if str(error) != self._last_logged:
                log.warning("keeps the former certificate: %s", error)
            self._last_logged = str(error)
            return
        self._last_logged = ""
        log.info("read %s and %s again", self._cert, self._key)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._cert, self._key, password="")  # an encrypted key must not ask at a terminal
        return context

    def _stamps(self) -> tuple[tuple[int, ...], ...]:
        found = [path.stat() for path in (self._cert, self._key)]
        # The last is the time of a change of owner or mode too, after which a file may be readable.
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size, stat.st_ctime_ns) for stat in found)
