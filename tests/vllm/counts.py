"""Counts of what moved between two engines."""

from tests.vllm.engines import Engine


def received(engine: Engine) -> int:
    """Returns the number of tokens whose KV an engine has received so far."""
    return engine.counts().get("received_tokens", 0)


def moved(engine: Engine) -> dict[str, int]:
    """Returns the bytes of each transfer that the engine's lead remembers."""
    with engine.lead() as lead:
        return {row.transfer_id: row.moved_bytes for row in lead.list_transfers().transfers}


def moved_since(engine: Engine, known: dict[str, int]) -> list[int]:
    """Returns the bytes of each transfer that is not `known` and moved any."""
    return [nbytes for name, nbytes in moved(engine).items() if name not in known and nbytes]
