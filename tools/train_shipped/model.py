"""The shipped model for training: layers, head, and draft heads, the module tree named as Nemotron-H's checkpoints.

Letters: B sequences, T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_shipped.architecture import Architecture
from tools.train_shipped.mixers import ExpertMixer, Memory, RMSNorm, Weights, make_mixer


class Layer(nn.Module):
    """``x + mixer(norm(x))``."""

    def __init__(self, letter: str, arch: Architecture) -> None:
        super().__init__()
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mixer = make_mixer(letter, arch)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.mixer(self.norm(x))
        return result

    def step(self, x_BE: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """One token a sequence."""
        branch, memory = self.mixer.step(self.norm(x_BE), memory)
        return x_BE + branch, memory


class DraftLayer(Layer):
    """A layer of a draft head: the first also joins embedding and hidden state, the last also norms its result."""

    def __init__(self, letter: str, arch: Architecture, *, is_first: bool, is_last: bool) -> None:
        super().__init__(letter, arch)
        size, eps = arch.hidden_size, arch.norm_eps
        if is_first:
            self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
            self.eh_proj = Weights(size, 2 * size)
        if is_last:
            self.final_layernorm = RMSNorm(size, eps)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The head's stream from the token's embedding and the hidden state of the position before it."""
        joined: Tensor = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return joined.to(embedded.dtype)  # the stream is wide under autocast too, as the main model's


class Backbone(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.embeddings = Weights(arch.vocab_size, arch.hidden_size, scale=0.3 * arch.hidden_size**0.5)
        self.layers = nn.ModuleList(Layer(letter, arch) for letter in arch.pattern)
        self.norm_f = RMSNorm(arch.hidden_size, arch.norm_eps)


class DraftHeads(nn.Module):
    """All layers of all draft heads, numbered through."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        last = len(arch.draft_pattern) - 1
        self.layers = nn.ModuleList(
            DraftLayer(letter, arch, is_first=place == 0, is_last=place == last)
            for _ in range(arch.num_draft_heads)
            for place, letter in enumerate(arch.draft_pattern)
        )


class Hidden(NamedTuple):
    """Hidden states of the main model and of each draft head; head k lacks the first k + 1 positions."""

    main_BTE: Tensor
    drafts: tuple[Tensor, ...]


class Losses(NamedTuple):
    """Mean negative log-likelihoods in nats, float32."""

    main: Tensor
    drafts: tuple[Tensor, ...]


class ShippedModel(nn.Module):
    """Main model and draft heads; one embedding and one output matrix for all of them."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.backbone = Backbone(arch)
        self.lm_head = Weights(arch.vocab_size, arch.hidden_size, scale=0.3)
        self.mtp = DraftHeads(arch)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., E]."""
        return functional.embedding(tokens, self.backbone.embeddings.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states of the main model or of a head."""
        result: Tensor = self.lm_head(hidden)
        return result

    def forward(self, tokens_BT: Tensor, main_length: int | None = None) -> Hidden:
        """Hidden states of whole sequences, all beginning at their first token.

        Head k at position p takes the hidden state of position p - 1 (the main model's after its last norm, or that of
        head k - 1 after its) and the token at p, and tells of the token at p + 1.

        Args:
            tokens_BT: The sequences.
            main_length: Positions of the main model, the first ones; None: all. Each head goes one position further,
                as far as there are tokens.
        """
        embedded_BTE = self.embed(tokens_BT)
        x_BTE = embedded_BTE[:, :main_length]
        for layer in self.backbone.layers:
            x_BTE = layer(x_BTE)
        main_BTE = self.backbone.norm_f(x_BTE)
        drafts: list[Tensor] = []
        before = main_BTE
        for head in range(self.arch.num_draft_heads):
            embedded = embedded_BTE[:, head + 1 : head + 1 + before.shape[1]]
            before = self._draft(head, embedded, before[:, : embedded.shape[1]])
            drafts.append(before)
        return Hidden(main_BTE, tuple(drafts))

    def _draft(self, head: int, embedded: Tensor, before: Tensor) -> Tensor:
        count = len(self.arch.draft_pattern)
        layers = cast(list[DraftLayer], list(self.mtp.layers)[head * count : (head + 1) * count])
        x = layers[0].join(embedded, before)
        for layer in layers:
            x = layer(x)
        result: Tensor = layers[-1].final_layernorm(x)
        return result

    def losses(self, tokens_BT: Tensor) -> Losses:
        """How well the next token is told, everywhere but at the sequences' ends.

        The main model and all heads see equally many positions, T - 1 - heads of them, so that their tensors are of
        one shape: compiled code serves all.
        """
        hidden = self(tokens_BT, tokens_BT.shape[1] - 1 - self.arch.num_draft_heads)
        states = enumerate((hidden.main_BTE, *hidden.drafts))
        main, *drafts = (self._loss(state, tokens_BT[:, first + 1 :]) for first, state in states)
        return Losses(main, tuple(drafts))

    def _loss(self, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        logits = self.logits(hidden).flatten(0, 1)
        return functional.cross_entropy(logits.float(), next_tokens[:, : hidden.shape[1]].flatten())

    def step(self, tokens_B: Tensor, memories: list[Memory]) -> tuple[Tensor, list[Memory]]:
        """Logits [B, V] behind one more token a sequence; ``memories`` is empty at first."""
        memories = memories or [()] * len(self.backbone.layers)
        x_BE, after = self.embed(tokens_B), []
        for layer, memory in zip(self.backbone.layers, memories, strict=True):
            x_BE, memory = cast(Layer, layer).step(x_BE, memory)
            after.append(memory)
        return self.logits(self.backbone.norm_f(x_BE)), after

    def expert_layers(self) -> list[ExpertMixer]:
        """The mixers with experts, draft heads' included."""
        return [module for module in self.modules() if isinstance(module, ExpertMixer)]

    def all_layers(self) -> list[Layer]:
        """Layers of the main model, then of the draft heads."""
        return [cast(Layer, layer) for layer in (*self.backbone.layers, *self.mtp.layers)]
