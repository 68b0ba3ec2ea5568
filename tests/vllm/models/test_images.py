"""The KV of a prompt is taken up to its image and beyond with the same image only, though the token ids of all images
are equal.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.vllm.counts import received
from tests.vllm.engines import PREFILL, START_S, VOCABULARY, Answer, Engines, Pair, prompt_of, pushed

pytestmark = pytest.mark.timeout(START_S)

PAD, VIDEO_PAD, BEGIN, END = range(VOCABULARY - 4, VOCABULARY)
"""Special tokens. One pad stands for an image, and is expanded to the number of its patches."""
CAT, DOG = 1, 2
PATCHES = 16
PROMPT = [
    *(token % PAD for token in prompt_of(100, seed=9)),
    BEGIN,
    PAD,
    END,
    *(token % PAD for token in prompt_of(41, 8)),
]
TOKENS = len(PROMPT) - 1 + PATCHES
EQUAL = 96
"""Tokens that are the same with any image: the whole units of 16 tokens before it."""


def write_model(folder: Path) -> None:
    """Writes a Qwen 2-VL with random weights, and a processor for images of 112 x 112."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    torch.manual_seed(0)
    special = {PAD: "<|image_pad|>", VIDEO_PAD: "<|video_pad|>", BEGIN: "<|vision_start|>", END: "<|vision_end|>"}
    vocabulary = {special.get(number, f"t{number}"): number for number in range(VOCABULARY)}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096, "bos_token_id": 1,
            "eos_token_id": 2, "initializer_range": 0.08, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        },
        vision_config={"depth": 2, "embed_dim": 64, "num_heads": 2, "hidden_size": 256, "mlp_ratio": 2,
                       "initializer_range": 0.2},
        image_token_id=PAD, video_token_id=VIDEO_PAD, vision_start_token_id=BEGIN, vision_end_token_id=END,
        tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer_object = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_object, unk_token="t0", additional_special_tokens=list(special.values())
    )
    pixels = {"min_pixels": 112 * 112, "max_pixels": 112 * 112}
    Qwen2VLProcessor(
        Qwen2VLImageProcessor(**pixels), tokenizer, Qwen2VLVideoProcessor(**pixels), chat_template="x"
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def pair(engines: Engines) -> Iterator[Pair]:
    folder = engines.folder / "images"
    write_model(folder)
    more = {"model": str(folder), "skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    with closing(Pair(engines, more=more)) as pair:
        pair.start()
        yield pair


def alone(pair: Pair, image: int) -> list[int]:
    """Returns the tokens of one engine, which then forgets the prompt."""
    tokens = pair.p.ask(PROMPT, image=image).tokens
    assert pair.p.forgets()
    return tokens


def moved(pair: Pair, mode: str, given: int, taken: int) -> Answer:
    """Returns D's answer to a prompt with the image `taken`, for which P computed the image `given`."""
    if mode == "pull":
        return pair.d.ask(PROMPT, pair.p.ask(PROMPT, PREFILL, 1, image=given).params, image=taken)
    key = bytes([given, taken]) * 8
    line = pair.p.begin(PROMPT, {**PREFILL, **pushed(key)}, 1, image=given)
    answer = pair.d.ask(PROMPT, {"do_remote_prefill": True, **pushed(key, pair.p.address)}, image=taken)
    pair.p.answer(line)
    return answer


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_the_kv_of_a_prompt_is_taken_with_its_image_and_not_with_another(pair: Pair, mode: str) -> None:
    expected = [alone(pair, image) for image in (CAT, DOG)]
    assert expected[0] != expected[1]

    before = received(pair.d)
    assert moved(pair, mode, CAT, CAT).tokens == expected[0]
    assert received(pair.d) - before == TOKENS
    pair.at_rest()  # decode has nothing of the prompt
    assert moved(pair, mode, CAT, DOG).tokens == expected[1]
    assert received(pair.d) - before == TOKENS + EQUAL
    assert pair.d.ask(PROMPT, image=DOG).tokens == expected[1]
    pair.at_rest()
