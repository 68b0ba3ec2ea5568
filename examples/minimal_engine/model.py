"""A small decoder-only transformer whose only KV memory is a paged one that the caller owns.

Six layers over bytes: RMSNorm, grouped-query attention with rotary positions, SwiGLU. The weights
are random but fixed, so the text it writes means nothing; it depends on every byte of the prompt.
With `ModelConfig.window_tokens` every second layer sees the last tokens only.

Rules of this file:

1. Attention reads K and V back from the paged tensors, through the block table, in prefill and in
   decode. There is no private copy: a wrong byte in a block that is used gives wrong logits.
2. It knows token positions and block tables, not who filled a block or who allocates them.

Why decode from moved KV gives the same tokens as one engine doing both
-----------------------------------------------------------------------
A sum of floats depends on its order, and a matrix product of another shape sums in another order.
So an engine that computes a prompt at once, one that skips a cached prefix and one that goes token
by token would get slightly different KV, and once in a while another token. Two things prevent it.

Same bits, by construction, on one kind of machine. All work is done in tiles of TILE_TOKENS rows,
aligned to the position: the token at position p is row p % TILE_TOKENS of tile p // TILE_TOKENS. A
full prefill runs all tiles, layer by layer; a chunk that starts late, or a decode step, runs the same
tile with its other rows left empty. Rows see each other only through the KV. The context of a tile is
padded to the tile's end, and a position that a row must not see has weight exactly 0. Hence every
shape follows from the position: not from the chunk, the block size, the physical blocks or the
contents of slots that are not written yet. Each operand is freshly allocated, and torch runs on one
thread. The KV and logits of a position are therefore one function of the tokens up to it, on every engine.

Same tokens between machines whose CPU or torch build picks other kernels. The weights come from a
hash, not from torch's generator. KV is stored in float32 but all arithmetic is float64, so another
order of sums changes a value by about 1e-15, and a stored one only if it lies that close to a
rounding boundary: between the plainest and the fastest kernels of one CPU, 1 stored number in 22
million differed, and no logit by more than 2e-14. Over 32,000 decoded tokens, against a plain
forward pass without tiles and pages, a logit moved by 3e-9 at most, while the best and the
second-best were 0.26 apart in the median and 1.5e-5 at least. (Float32 arithmetic moves it by 1e-5,
too near to that, and other scales of the weights do not help: noise and margin grow together.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

# A byte is its own token id; two more ids mark the start and the end of a text.
BOS_ID = 256
EOS_ID = 257
VOCAB_TOKENS = 258

# One row per token of a usual block. Fewer rows make a prefill slower, more make a decode step slower.
TILE_TOKENS = 16

# Raise the number when the meaning of the weights or the KV changes and no field of ModelConfig does.
_REVISION_DOMAIN = "kvgrpc minimal engine weights 1"

_NORM_EPSILON = 1e-6


def encode(text: str) -> list[int]:
    """Returns the token ids of a prompt: BOS, then the UTF-8 bytes."""
    return [BOS_ID, *text.encode()]


def decode(token_ids: Sequence[int]) -> str:
    """Returns the text of token ids. BOS and EOS have none, and bytes that are not UTF-8 are replaced."""
    return bytes(token for token in token_ids if token < BOS_ID).decode(errors="replace")


def greedy_token(logits: Tensor) -> int:
    """Returns the token id with the largest logit; `logits` is [VOCAB_TOKENS]."""
    return int(logits.argmax())


@dataclass(frozen=True)
class ModelConfig:
    """Shape and seed of a model. Equal configs give equal weights, bit by bit, on every machine."""

    layers: int = 6
    hidden_dim: int = 256
    query_heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    mlp_dim: int = 512
    rope_base: float = 10_000.0
    # Standard deviation of attention scores. At 1, attention is nearly the mean of the prompt and decoding falls into a
    # loop. At 4, it follows single tokens and no loop was seen.
    score_deviation: float = 4.0
    seed: int = 1
    # Number of tokens that every second layer sees, its own included; 0 means that all layers see all.
    window_tokens: int = 0

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"{self.query_heads} query heads over {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim}")
        if self.window_tokens < 0 or (self.window_tokens and self.layers % 2):
            raise ValueError(f"every second of {self.layers} layers has a window of {self.window_tokens} tokens")

    def kv_shape(self, num_blocks: int, block_tokens: int) -> tuple[int, int, int, int, int]:
        """Returns the shape of one layer's KV: [num_blocks, 2 (K, V), block_tokens, kv_heads, head_dim]."""
        return (num_blocks, 2, block_tokens, self.kv_heads, self.head_dim)

    def block_bytes(self, block_tokens: int) -> int:
        """Returns the bytes of one block in one layer, K and V together."""
        return math.prod(self.kv_shape(1, block_tokens)) * torch.float32.itemsize

    def window_of(self, layer: int) -> int:
        """Returns how many tokens a layer sees; 0 means all."""
        return self.window_tokens if layer % 2 else 0

    @property
    def weights_revision(self) -> str:
        """Digest of everything that determines the weights, and thus the KV: 64 hex digits."""
        fields = asdict(self)
        if not self.window_tokens:
            # Without windows the KV equals that of engines that know no windows.
            del fields["window_tokens"]
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(f"{_REVISION_DOMAIN}\n{text}".encode()).hexdigest()


@dataclass(frozen=True)
class LayerWeights:
    """One layer's matrices, each [inputs, outputs], float64. The norms have no weights."""

    qkv: Tensor  # [hidden_dim, (query_heads + 2 * kv_heads) * head_dim]
    attention_out: Tensor  # [query_heads * head_dim, hidden_dim]
    gate_up: Tensor  # [hidden_dim, 2 * mlp_dim]
    down: Tensor  # [mlp_dim, hidden_dim]


@dataclass(frozen=True)
class _Tile:
    """Positions of the tokens of one tile and of their context; the same for all layers."""

    rows: slice  # the rows that hold tokens to compute
    written_tokens: int  # tokens whose KV exists once this tile has written its own
    padded_tokens: int  # the same up to the tile's end
    write_blocks: Tensor  # [tokens in rows], the physical block of each token
    write_slots: Tensor  # [tokens in rows], its slot in the block
    read_blocks: Tensor  # [blocks that hold written tokens], physical, in order of position
    rotation: tuple[Tensor, Tensor]  # cosines and sines, each [TILE_TOKENS, 1, head_dim / 2]


@dataclass
class ForwardPass:
    """Tokens of one request on their way through the layers. `MinimalModel.begin` makes it."""

    tiles: list[_Tile]
    hidden: list[Tensor]  # of each tile, [TILE_TOKENS, hidden_dim]
    kv: Sequence[Tensor]
    writes: bool
    layers_done: int = 0


class MinimalModel:
    """The transformer: weights only, and nothing about any request.

    `weights_revision` is equal between two engines exactly when they may read each other's KV.
    """

    def __init__(self, config: ModelConfig | None = None) -> None:
        self.config = c = config or ModelConfig()
        heads = c.query_heads + 2 * c.kv_heads
        self.embedding = self._weight("embedding", VOCAB_TOKENS, c.hidden_dim, deviation=1.0)
        self.layers = [
            LayerWeights(
                qkv=self._weight(f"{n}.qkv", c.hidden_dim, heads * c.head_dim),
                attention_out=self._weight(f"{n}.out", c.query_heads * c.head_dim, c.hidden_dim),
                gate_up=self._weight(f"{n}.gate_up", c.hidden_dim, 2 * c.mlp_dim),
                down=self._weight(f"{n}.down", c.mlp_dim, c.hidden_dim),
            )
            for n in range(c.layers)
        ]
        self.head = self._weight("head", c.hidden_dim, VOCAB_TOKENS)
        # Text is shown on a terminal, and random weights never end it: only printable ASCII.
        self._never = torch.ones(VOCAB_TOKENS, dtype=torch.bool)
        self._never[ord(" ") : ord("~") + 1] = False
        # A row must not see the rows after it; a tile hides nothing else.
        self._later = torch.ones(TILE_TOKENS, TILE_TOKENS, dtype=torch.bool).triu(1)

    @property
    def weights_revision(self) -> str:
        """Digest of config and seed: 64 hex digits."""
        return self.config.weights_revision

    def forward(
        self,
        token_ids: Sequence[int],
        start: int,
        block_table: Sequence[int],
        kv: Sequence[Tensor],
    ) -> Tensor:
        """Computes the tokens at positions start, start + 1, ... through all layers: `begin`, then every `next_layer`,
        then `logits`.
        """
        run = self.begin(token_ids, start, block_table, kv)
        for _ in self.layers:
            self.next_layer(run)
        return self.logits(run)

    def begin(
        self,
        token_ids: Sequence[int],
        start: int,
        block_table: Sequence[int],
        kv: Sequence[Tensor],
        *,
        writes: bool = True,
    ) -> ForwardPass:
        """Starts with the tokens at positions start, start + 1, ...; each layer will write their KV.

        `block_table` maps position // block_tokens to a physical block and reaches at least to the last token. The KV
        of the positions before `start` must already be in its blocks. `kv` is one float32 tensor per layer, of
        `ModelConfig.kv_shape`, with any strides. Only the slots of `token_ids` are written, so blocks before `start`
        may be shared. Without `writes` not even those are written: their KV must be there too. The KV of a layer is not
        read before that layer's turn.

        Sets torch to one thread in the calling thread, and leaves it so.
        """
        self._check(token_ids, start, block_table, kv)
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        end = start + len(token_ids)
        block_tokens = kv[0].shape[2]
        table = torch.tensor(block_table[: math.ceil(end / block_tokens)])
        run = ForwardPass([], [], kv, writes)
        for tile_start in range(start - start % TILE_TOKENS, end, TILE_TOKENS):
            first, stop = max(start, tile_start), min(end, tile_start + TILE_TOKENS)
            tile = self._place(range(first, stop), table, block_tokens)
            ids = torch.zeros(TILE_TOKENS, dtype=torch.int64)
            ids[tile.rows] = torch.tensor(token_ids[first - start : stop - start])
            run.tiles.append(tile)
            run.hidden.append(self.embedding[ids])
        return run

    def next_layer(self, run: ForwardPass) -> None:
        """Computes the next layer. Its KV is then complete, and is not written again."""
        weights = self.layers[run.layers_done]
        for i, (tile, hidden) in enumerate(zip(run.tiles, run.hidden, strict=True)):
            mixed = hidden + self._attention(run, _norm(hidden), tile)
            gate, up = (_norm(mixed) @ weights.gate_up).chunk(2, dim=-1)
            run.hidden[i] = mixed + (silu(gate) * up) @ weights.down
        run.layers_done += 1

    def logits(self, run: ForwardPass) -> Tensor:
        """Returns the logits of the last position after the last layer: [VOCAB_TOKENS], float64; -inf for tokens that
        are never produced.
        """
        if run.layers_done < len(self.layers):
            raise ValueError(f"{run.layers_done} of {len(self.layers)} layers are computed")
        last_row = run.tiles[-1].rows.stop - 1
        logits = (_norm(run.hidden[-1]) @ self.head)[last_row]
        return logits.masked_fill(self._never, -torch.inf)

    def _check(
        self,
        token_ids: Sequence[int],
        start: int,
        block_table: Sequence[int],
        kv: Sequence[Tensor],
    ) -> None:
        if not token_ids or start < 0:
            raise ValueError(f"{len(token_ids)} tokens to compute, from position {start}")
        if not all(0 <= token < VOCAB_TOKENS for token in token_ids):
            raise ValueError(f"a token id is outside 0..{VOCAB_TOKENS - 1}")
        if len(kv) != self.config.layers:
            raise ValueError(f"KV of {len(kv)} layers, the model has {self.config.layers}")
        num_blocks, _, block_tokens, _, _ = kv[0].shape
        shape = self.config.kv_shape(num_blocks, block_tokens)
        for layer in kv:
            if layer.shape != shape or layer.dtype != torch.float32:
                raise ValueError(f"KV is {layer.dtype} {list(layer.shape)}, not float32 {shape}")
        if start + len(token_ids) > len(block_table) * block_tokens:
            raise ValueError(
                f"{len(block_table)} blocks of {block_tokens} tokens do not reach to position "
                f"{start + len(token_ids) - 1}"
            )

    def _place(self, positions: range, table: Tensor, block_tokens: int) -> _Tile:
        """Returns the tile of `positions`, which are all in one tile, with their context."""
        c = self.config
        tile_start = positions.start - positions.start % TILE_TOKENS
        written = torch.arange(positions.start, positions.stop)
        exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
        rows = torch.arange(tile_start, tile_start + TILE_TOKENS)
        angles = rows[:, None, None] / c.rope_base**exponents
        return _Tile(
            rows=slice(positions.start - tile_start, positions.stop - tile_start),
            written_tokens=positions.stop,
            padded_tokens=tile_start + TILE_TOKENS,
            write_blocks=table[written // block_tokens],
            write_slots=written % block_tokens,
            read_blocks=table[: math.ceil(positions.stop / block_tokens)],
            rotation=(angles.cos(), angles.sin()),
        )

    def _attention(self, run: ForwardPass, x: Tensor, tile: _Tile) -> Tensor:
        """Writes the tile's K and V in the current layer, then attends over the blocks. Returns [TILE_TOKENS,
        hidden_dim].
        """
        c, layer = self.config, run.layers_done
        weights, layer_kv, window = self.layers[layer], run.kv[layer], self.config.window_of(layer)
        group = c.query_heads // c.kv_heads
        projected = (x @ weights.qkv).view(TILE_TOKENS, -1, c.head_dim)
        q, k = projected[:, : c.query_heads], projected[:, c.query_heads : -c.kv_heads]
        k, v = _rotate(k, tile.rotation), projected[:, -c.kv_heads :]
        if run.writes:
            layer_kv[tile.write_blocks, 0, tile.write_slots] = k[tile.rows].float()
            layer_kv[tile.write_blocks, 1, tile.write_slots] = v[tile.rows].float()
        start = tile.padded_tokens - TILE_TOKENS
        keys, values = _gather(layer_kv, tile, max(start + tile.rows.start + 1 - window, 0) if window else 0)

        q = _rotate(q, tile.rotation) * (c.score_deviation / math.sqrt(c.head_dim))
        q = q.view(TILE_TOKENS, c.kv_heads, group, c.head_dim).permute(1, 2, 0, 3)
        scores = q.reshape(c.kv_heads, group * TILE_TOKENS, c.head_dim) @ keys
        scores = scores.view(c.kv_heads, group, TILE_TOKENS, tile.padded_tokens)
        scores[..., -TILE_TOKENS:].masked_fill_(self._later, -torch.inf)
        if window:
            rows = torch.arange(start, tile.padded_tokens)[:, None]
            scores.masked_fill_(torch.arange(tile.padded_tokens) <= rows - window, -torch.inf)
        mixed = scores.softmax(dim=-1).view(c.kv_heads, group * TILE_TOKENS, -1) @ values
        mixed = mixed.view(c.kv_heads, group, TILE_TOKENS, c.head_dim).permute(2, 0, 1, 3)
        return mixed.reshape(TILE_TOKENS, -1) @ weights.attention_out

    def _weight(self, name: str, inputs: int, outputs: int, deviation: float = 0.0) -> Tensor:
        """Returns a fixed random [inputs, outputs]; by default one that keeps the scale of its input.

        Its values are uniform draws of 16 bits from a hash stream named by seed and matrix.
        """
        deviation = deviation or 1 / math.sqrt(inputs)
        stream = hashlib.shake_256(f"{self.config.seed}/{name}".encode())
        draws = torch.frombuffer(bytearray(stream.digest(2 * inputs * outputs)), dtype=torch.int16)
        return draws.view(inputs, outputs).double() * (deviation * math.sqrt(3) / 2**15)


def _gather(layer_kv: Tensor, tile: _Tile, first: int) -> tuple[Tensor, Tensor]:
    """Returns the context, read through the block table: keys [kv_heads, head_dim, padded_tokens] and values [kv_heads,
    padded_tokens, head_dim], float64.

    The padding is zeros, and so are the tokens before `first`, which no row sees. Contents of the blocks must not stand
    there: an unwritten slot may hold NaN, and its weight of 0 would not hide that.
    """
    _, _, _, kv_heads, head_dim = layer_kv.shape
    context = torch.zeros(2, tile.padded_tokens, kv_heads, head_dim, dtype=torch.float64)
    blocks = layer_kv[tile.read_blocks].transpose(0, 1)
    context[:, first : tile.written_tokens] = blocks.flatten(1, 2)[:, first : tile.written_tokens]
    keys, values = context
    return keys.permute(1, 2, 0), values.transpose(0, 1)


def _norm(x: Tensor) -> Tensor:
    """Returns the RMSNorm over the last dimension, without a weight."""
    return x * (x.square().mean(dim=-1, keepdim=True) + _NORM_EPSILON).rsqrt()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Applies rotary positions to [TILE_TOKENS, heads, head_dim]; the two halves of a head are pairs."""
    cosines, sines = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosines - b * sines, a * sines + b * cosines), dim=-1)
