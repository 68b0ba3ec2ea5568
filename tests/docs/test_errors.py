"""The "Errors:" lists of proto/ name exactly the errors that the code can raise."""

import re

from tests.docs import reasons
from tests.docs.pages import ROOT
from tests.service.contract import ANY_CALL, listed

RAISED = {(code, reason) for reason, codes in reasons.codes().items() for code in codes}


def rows() -> set[str]:
    """Returns the reasons in rows of replies, which have no code."""
    text = re.sub(r"\n *// ?", " ", (ROOT / "proto" / "kvgrpc" / "peer" / "v1" / "peer.proto").read_text())
    found = re.findall(r"(?:A row's failure|Why not): ([^.]*)\.", text)
    assert len(found) == 2
    return {name for part in found for name in re.findall(r"[A-Z][A-Z_]{3,}", re.sub(r"\([^)]*\)", "", part))}


def test_every_error_that_an_rpc_lists_can_come() -> None:
    assert {rpc: errors - RAISED for rpc, errors in listed().items() if not errors <= RAISED} == {}


def test_every_error_that_can_come_is_listed() -> None:
    left = RAISED - ANY_CALL - set().union(*listed().values())
    assert {reason for _, reason in left} <= rows()


def test_what_any_call_may_answer_is_in_the_conventions() -> None:
    text = (ROOT / "proto" / "kvgrpc" / "v1" / "common.proto").read_text().partition("syntax")[0]
    for code, reason in ANY_CALL:
        assert code in text
        assert reason in text


def test_every_reason_of_a_row_can_be_said() -> None:
    assert rows() <= reasons.sent()
