"""The gateway's own certificate, which is read again when its files change."""

from __future__ import annotations

import logging
import ssl

from files.watched import WatchedFiles
from rpc.settings import SettingsError

log = logging.getLogger(__name__)


class OwnCertificate:
    """A certificate and its key. `context` is what connections begin with; each gets the files as they are then.

    Raises SettingsError where the files cannot be used.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self._last_logged = ""
        try:
            self._files = WatchedFiles(cert, key)
            self._files.changed()
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
            if not self._files.changed():
                return
            self._newest = self._read()
        except OSError as error:  # ssl.SSLError too: one of the files has been replaced, the other follows
            self._files.failed()
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
