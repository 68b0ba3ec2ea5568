"""What decode answers, compared with the answers of one engine."""

import random
from concurrent.futures import ThreadPoolExecutor

from tests.sglang.servers import Pair, ids_of, prompt_of

LENGTHS = (1, 15, 16, 17, 200, 300, 700, 200)
"""Below and above a page of either engine, and of several chunks; the last prompt is one that prefill has cached."""


def test_tokens_are_those_of_one_engine_whose_pages_are_of_another_size(pair: Pair) -> None:
    for length in LENGTHS:
        prompt = prompt_of(length, seed=length)
        assert ids_of(pair.generate(prompt, 12)) == ids_of(pair.of_one(prompt, 12)), length


def test_requests_at_once_get_their_own_tokens(pair: Pair) -> None:
    prompts = [prompt_of(60 + 17 * number, seed=number) for number in range(12)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        found = list(threads.map(lambda prompt: ids_of(pair.generate(prompt)), prompts))
    assert found == [ids_of(pair.of_one(prompt)) for prompt in prompts]


def test_log_probabilities_of_the_first_token_come_with_it(pair: Pair) -> None:
    prompt, asked = prompt_of(50, seed=9), {"return_logprob": True, "top_logprobs_num": 2}
    found, expected = pair.generate(prompt, 3, **asked), pair.of_one(prompt, 3, **asked)
    name = "output_token_logprobs"
    assert found["meta_info"][name] == expected["meta_info"][name]
    assert found["meta_info"]["output_top_logprobs"] == expected["meta_info"]["output_top_logprobs"]


def test_prompts_that_differ_under_one_room_fail_at_both_engines(pair: Pair) -> None:
    room = random.getrandbits(63)
    at_p, at_d = pair.ask_both(pair.body(prompt_of(80, 1), room=room), pair.body(prompt_of(80, 2), room=room))
    assert "CONTENT_MISMATCH" in at_d["error"]
    assert "CONTENT_MISMATCH" in at_p["error"]
    pair.check_whole_memory(seed=1)
