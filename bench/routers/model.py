"""The tokenizer of the tiny model: every token is a word of its own."""

from pathlib import Path

from bench.routers.cases import word
from tests.vllm.engines import VOCABULARY

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
"""The first tokens. The tokenizer also finds them within words, so no word may contain one."""


def write_tokenizer(folder: Path) -> None:
    """Writes the tokenizer beside the weights, with a template for chats."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    ids = {text: token for token, text in enumerate(SPECIAL.values())}
    ids |= {word(token): token for token in range(len(SPECIAL), VOCABULARY)}
    made = Tokenizer(WordLevel(ids, unk_token=SPECIAL["unk_token"]))
    made.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
