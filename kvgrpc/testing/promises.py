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
    "pushed_blocks_stay": "blocks of a push are given to no other request before BlocksReturned",
    "parts_name_their_step": "after_step of a part names the step that computes it, and workers report it once done",
    "layers_are_reported_when_done": "a part names the layers that it has, which are reported once they are computed",
    "given_up_pushes_end": "a push whose request leaves is given up: blocks come back, and its destination is told",
    "reserved_blocks_stay": "blocks reserved for a push are not reused before Received or BlocksReturned",
    "pushes_are_used_when_received": "what a push brings is used at Received, not at LayersReceived or after Failed",
    "late_ranks_are_waited_for": "each rank reports its own steps, and a step counts once all ranks have reported it",
    "a_lost_lead_is_survived": "if the lead dies, requests go on without KV, blocks come back, and a new lead serves",
}
"""Sentences by the names of the promises."""


class BrokenPromise(AssertionError):
    """Raised when an engine breaks a promise."""

    def __init__(self, promise: str, seen: str) -> None:
        self.promise = promise
        super().__init__(f"{promise} is broken: {seen}. The promise: {TEXTS[promise]}. Read {promise} in {GUIDE}")
