"""Promises of an engine, by name, and the error that names a broken one."""

GUIDE = "docs/integrating.md#what-an-engine-promises"

TEXTS = {
    "handed_over_blocks_stay": "blocks of a hand-over are given to no other request before BlocksReturned",
    "handed_over_blocks_are_not_written": "nothing is written into blocks of a hand-over before BlocksReturned",
    "returned_blocks_are_freed": "blocks are free once BlocksReturned came, whatever the hand-over's end",
    "each_hand_over_holds": "a block is held once for each hand-over of it, and let go once for each",
    "preempted_blocks_are_taken_back": "blocks are taken back (take_back) before a preemption reuses them",
    "hand_overs_name_their_step": "after_step of a hand-over names the last step that writes its blocks",
    "content_is_the_prompt": "what is handed over, and what is asked for, is named by the request's own tokens",
    "blocks_being_filled_stay": "blocks given to a transfer are not reused before Received or BlocksReturned",
    "loads_name_their_step": "after_step of a load names the last step that uses its blocks' earlier contents",
    "who_leaves_lets_go": "a request that leaves, at whatever stage, ends its transfer, and its blocks come back",
    "what_failed_is_not_used": "nothing of a transfer that failed is computed with, or found by a later request",
    "an_id_is_reused": "events belong to their transfer: a late one does nothing to another request with the same id",
    "a_lost_lead_is_survived": "if the lead dies, requests go on without KV, blocks come back, and a new lead serves",
}
"""Sentences by the names of the promises."""


class BrokenPromise(AssertionError):
    """Raised when an engine breaks a promise."""

    def __init__(self, promise: str, seen: str) -> None:
        self.promise = promise
        super().__init__(f"{promise} is broken: {seen}. The promise: {TEXTS[promise]}. Read {promise} in {GUIDE}")
