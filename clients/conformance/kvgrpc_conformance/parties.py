"""Certificates of the servers and clients of a case, in folders with the names that kvgrpc gives the files."""

import shutil
from datetime import timedelta
from pathlib import Path

from examples.certs import Authority, usual_names

TLS = "tls"
"""The setting that puts a server of a case under mutual TLS."""


class Parties:
    """The folders: one for each server, and some for clients."""

    def __init__(self, folder: Path, servers: list[str]) -> None:
        self._folder, self._servers = folder, servers
        self._issue(Authority(), [*servers, "client"])
        self._issue(Authority("a foreign CA"), ["foreign"])

    def folder_of(self, name: str) -> Path:
        """Returns the folder of a party. That of `nobody` does not exist."""
        return self._folder / name

    def variables(self) -> dict[str, str]:
        """Returns the folders for clients, as `$tls.client`."""
        return {name: str(self.folder_of(name)) for name in ("client", "former", "foreign", "nobody")}

    def renew(self) -> None:
        """Gives servers and the client certificates of another CA. `former` has what the client had."""
        shutil.copytree(self.folder_of("client"), self.folder_of("former"), dirs_exist_ok=True)
        self._issue(Authority("the next CA"), [*self._servers, "client"])

    def _issue(self, authority: Authority, names: list[str]) -> None:
        for name in names:
            authority.issue(self.folder_of(name), usual_names(name), ends=timedelta(days=1))
