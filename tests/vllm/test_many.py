"""Several requests at once, and several turns of one conversation."""

from tests.vllm.engines import BLOCK_TOKENS, PREFILL, Pair, prompt_of, wait_until

COUNT = 8


def test_eight_pulls_at_once_keep_their_tokens_apart(pair: Pair) -> None:
    prompts = [prompt_of(40 + 37 * seed, seed) for seed in range(COUNT)]
    expected = [pair.expected(prompt) for prompt in prompts]
    first = [pair.p.begin(prompt, PREFILL, 1) for prompt in prompts]
    params = [pair.p.answer(line).params for line in first]
    second = [pair.d.begin(prompt, taken) for prompt, taken in zip(prompts, params, strict=True)]
    assert [pair.d.answer(line).tokens for line in second] == expected


def test_eight_pushes_at_once_keep_their_tokens_apart(pair: Pair) -> None:
    prompts = [prompt_of(30 + 41 * seed, 20 + seed) for seed in range(COUNT)]
    expected = [pair.expected(prompt) for prompt in prompts]
    legs = [pair.begin_push(prompt, first="DP"[seed % 2]) for seed, prompt in enumerate(prompts)]
    assert [pair.d.answer(leg["D"]).tokens for leg in legs] == expected
    assert not any(pair.p.answer(leg["P"]).failed for leg in legs)


def test_what_decode_has_of_a_prompt_does_not_come_again(pair: Pair) -> None:
    shared = prompt_of(4 * BLOCK_TOKENS, seed=40)
    prompts = [shared + prompt_of(50, seed=41 + i) for i in range(3)]
    expected = [pair.expected(prompt) for prompt in prompts]
    came = []
    for prompt, tokens in zip(prompts, expected, strict=True):
        before = pair.d.counts()["external_hits"]
        assert pair.pull(prompt).tokens == tokens
        came.append(pair.d.counts()["external_hits"] - before)
    assert came == [len(prompts[0]), 50, 50]


def test_a_prompt_that_decode_has_lets_prefill_free_its_blocks(pair: Pair) -> None:
    prompt = prompt_of(3 * BLOCK_TOKENS + 1, seed=50)
    expected = pair.expected(prompt)
    assert pair.pull(prompt).tokens == expected
    before = pair.d.counts()["external_hits"]
    assert pair.pull(prompt).tokens == expected
    assert pair.d.counts()["external_hits"] - before == 1


def test_the_next_turn_takes_its_history_from_the_engine_that_decoded(pair: Pair) -> None:
    prompt = prompt_of(5 * BLOCK_TOKENS, seed=60)
    expected = pair.expected(prompt)
    turn = [*prompt, *expected, *prompt_of(40, seed=61)]
    expected_then = pair.expected(turn)
    answer = pair.pull(prompt)
    assert answer.tokens == expected
    assert answer.params["do_remote_decode"] is True
    wait_until(pair.p.rests)
    before = pair.p.counts().get("external_hits", 0)
    relayed = pair.p.ask(turn, answer.params, 1)
    history = len(prompt) + len(expected) - 1  # the last token of an answer was never computed
    assert pair.p.counts()["external_hits"] - before == history
    assert pair.d.ask(turn, relayed.params).tokens == expected_then


def test_short_histories_are_computed_anew(pair: Pair) -> None:
    prompt = prompt_of(20, seed=70)
    expected = pair.expected(prompt)
    turn = [*prompt, *expected, *prompt_of(10, seed=71)]
    expected_then = pair.expected(turn)
    answer, before = pair.pull(prompt), pair.p.counts().get("external_hits", 0)
    relayed = pair.p.ask(turn, answer.params, 1)
    assert pair.p.counts().get("external_hits", 0) == before
    assert pair.d.ask(turn, relayed.params).tokens == expected_then
