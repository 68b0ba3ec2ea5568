"""`python -m kvgrpc.rank_link FD ADDRESS [CREDENTIALS]`: started by a Rank, which sends connections over the socket FD.

CREDENTIALS are paths in JSON. Without them the paths are those of the environment.
"""

import asyncio
import json
import logging
import os
import socket
import sys

from kvgrpc.service.polling import poll_in_place


def main() -> None:
    """Serves until the other end of the socket is closed."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    fd, address = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(fd, False)
    poll_in_place(os.environ)
    from kvgrpc.client.credentials import Credentials
    from kvgrpc.rank_link.link import serve

    with socket.socket(fileno=fd) as control:
        shown = [Credentials(**json.loads(paths)) for paths in sys.argv[3:]] or [
            Credentials.from_environment(os.environ)
        ]
        asyncio.run(serve(control, address, shown[0]))


main()
