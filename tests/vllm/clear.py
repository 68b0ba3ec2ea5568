"""Prompts whose greedy tokens do not depend on the batch in which they are computed."""

from typing import Any

from tests.vllm.engines import prompt_of


def clear_prompt(pair: Any, tokens: int, answers: int, seed: int) -> tuple[list[int], list[int]]:
    """Returns a prompt and its tokens by one engine alone, the same in a batch of several answers: no two logits are so
    close that a batch's rounding decides between them. `pair` has `p` and `expected`, as engines.Pair.
    """
    while True:
        prompt = prompt_of(tokens, seed=seed)
        expected: list[int] = pair.expected(prompt)
        for _ in range(2):
            alone = pair.p.ask(prompt, n=answers)
            assert pair.p.forgets()
            if [alone.tokens, *alone.others] != [expected] * answers:
                break
        else:
            return prompt, expected
        seed += 100
