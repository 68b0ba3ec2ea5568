"""The bootstrap server that SGLang asks for: there is none, since prefill's lead serves at that address."""

from sglang.srt.disaggregation.base import BaseKVBootstrapServer


class NoBootstrapServer(BaseKVBootstrapServer):
    """Stands where SGLang expects a server, in the process of its HTTP server. The lead is the schedulers'."""

    def __init__(self, host: str, port: int) -> None:
        pass

    def close(self) -> None:
        """Does nothing."""
