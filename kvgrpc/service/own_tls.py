"""The TLS identity of this server, from where the configuration says."""

import logging

from kvgrpc.config_security import TlsConfig
from kvgrpc.errors import InvalidRequest
from kvgrpc.tls import Tls, TlsFiles

_log = logging.getLogger(__name__)


def own_tls(config: TlsConfig) -> Tls | None:
    """Returns the identity; None: there is no TLS. Waits for a Workload API to answer. Raises InvalidRequest for an
    identity that is not usable, or that does not come.
    """
    if config.workload_api:
        from kvgrpc.workload_api import SvidFiles  # most have no such agent

        kept = SvidFiles(config.workload_api)
        try:
            made = Tls(kept.files, kept.close)
        except InvalidRequest:
            kept.close()
            raise
    elif (files := config.files()) is not None:
        made = Tls(TlsFiles(*files))
    else:
        return None
    if all("://" in name for name in made.identity.names):
        _log.warning(
            "the certificate has no DNS name and no address: peers and clients, which compare names, refuse this server"
        )
    return made
