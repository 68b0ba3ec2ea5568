"""Models with sliding windows in all layers, or in some."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm.engines import BLOCK_TOKENS, VOCABULARY

WINDOW = 128


@dataclass(frozen=True)
class Model:
    """The layers that have a window, and the data path."""

    windows: tuple[bool, ...]
    path: str

    def blocks(self, tokens: int) -> int:
        """Returns the number of blocks of all layers that move."""
        every, within = -(-tokens // BLOCK_TOKENS), max(tokens - WINDOW, 0) // BLOCK_TOKENS
        return sum(every - within * windowed for windowed in self.windows)


MODELS = {
    "all": Model((True,) * 4, "nixl"),
    "alternating": Model((True, False) * 2, "cma"),
    "one-layer-groups": Model((True,) * 5 + (False, True), "cma"),
}


def write_model(folder: Path, model: Model) -> None:
    """Writes a Mistral or a Gemma 3 with random weights."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8,
        "num_hidden_layers": len(model.windows), "num_key_value_heads": 4, "head_dim": 32, "bos_token_id": 1,
        "eos_token_id": 2, "max_position_embeddings": 4096, "sliding_window": WINDOW, "initializer_range": 0.08,
        "tie_word_embeddings": False,
    }  # fmt: skip
    made: Any
    if all(model.windows):
        made = MistralForCausalLM(MistralConfig(**common))
    else:
        layers = ["sliding_attention" if windowed else "full_attention" for windowed in model.windows]
        made = Gemma3ForCausalLM(Gemma3TextConfig(**common, layer_types=layers, query_pre_attn_scalar=32))
    made.save_pretrained(folder)
