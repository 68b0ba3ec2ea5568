"""A request as its scheduler knows it, with a prompt of token ids."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvgrpc.core.policy.spec import Offer, RequestSpec, Source
from kvgrpc.core.values.content import Item
from kvgrpc.core.values.grants import read_claims
from kvgrpc.core.values.ids import request_label
from kvgrpc.core.values.records import dataclass
from kvgrpc.engine.transfers.handles import Content, content


@dataclass(frozen=True)
class ScheduledRequest(RequestSpec[Sequence[int]]):
    """A request with the names and the content of its transfers."""

    prompt: Sequence[int] = ()
    """Token ids, copied since engines go on writing to their own lists; empty if the prompt has none."""
    adapter: str = ""
    cache_salt: str = ""
    items: tuple[Item, ...] = ()
    """Multimodal items, with their places in the prompt."""

    def __post_init__(self) -> None:
        ids = self.prompt
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()  # otherwise they would be numpy's own integers
        object.__setattr__(self, "prompt", tuple(ids))

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    def first(self, tokens: int) -> Sequence[int]:
        return self.prompt[:tokens]

    def content(self, ids: Sequence[int]) -> Content:
        """Returns the content of these tokens' KV."""
        return content(ids, adapter=self.adapter, cache_salt=self.cache_salt, items=self.items)

    @property
    def taken_under(self) -> bytes:
        """Transfer key of what the request takes; empty if it takes nothing. Raises InvalidRequest (GRANT_INVALID)."""
        match self.take:
            case Offer(grant):
                return read_claims(grant).transfer_key
            case Source():
                return self.transfer_key
        return b""

    @property
    def labels(self) -> dict[str, Any]:
        """Request id and trace context of its transfers."""
        return {"request_id": request_label(self.label or self.request_id), "traceparent": self.traceparent}
