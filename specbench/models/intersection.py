"""Vocabularies of which a drafter's model shares or predicts some tokens only (token-level intersection of Timor et al.
2025). q is a distribution over the target's tokens all the same."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specbench.models.vocabulary import VocabMap

SPACES = ("\u0120", "\u2581")  # what byte-level tokenizers and SentencePiece write for a space


class Intersection(VocabMap):
    """Two vocabularies that share some tokens. q is restricted to them and renormalised."""

    def __init__(self, own_of: Tensor, is_shared: Tensor, own: int):
        """own_of [V]: the model's token, of `own`, for each target's; is_shared [V] bool: if both are the same."""
        super().__init__(own, len(own_of))
        self.own_of, self.is_shared = own_of, is_shared
        self.shared = int(is_shared.sum())

    def read(self, tokens: Tensor) -> Tensor:
        return self.own_of[tokens]

    def fit(self, logits: Tensor) -> Tensor:
        return logits[..., self.own_of].masked_fill(~self.is_shared, -torch.inf)


class DraftVocabulary(Intersection):
    """A draft model that reads all tokens and predicts some of them: q of the others is zero."""

    def __init__(self, targets: Tensor, own: int, wanted: int):
        """targets [V'] are the tokens that it predicts; it embeds `own` tokens."""
        own_of, is_shared = targets.new_zeros(wanted), torch.zeros(wanted, dtype=torch.bool, device=targets.device)
        own_of[targets], is_shared[targets] = torch.arange(len(targets), device=targets.device), True
        super().__init__(own_of, is_shared, own)
        self.shared = None  # the tokenizer is the target's

    def read(self, tokens: Tensor) -> Tensor:
        return VocabMap.read(self, tokens)


def intersection(target: Any, drafter: Any, wanted: int, own: int, device: torch.device) -> Intersection:
    """The intersection of two vocabularies, of `wanted` and `own` rows: tokens that are spelt alike, and the ends of a
    text. For a token that the drafter lacks it reads the last one of its spelling of the same text."""
    known = {word: index for index, word in reversed(spelt(drafter.get_vocab()))}  # the first of several spelt alike
    ends = (target.eos_token_id, drafter.eos_token_id)
    paired = None not in ends
    own_of, is_shared = torch.zeros(wanted, dtype=torch.long), torch.zeros(wanted, dtype=torch.bool)
    missing, taken = [], {ends[1]} if paired else set()
    for index, word in spelt(target.get_vocab()):
        if index >= wanted:
            continue
        ends_text = paired and index == ends[0]
        there = ends[1] if ends_text else known.get(word)
        if there is None or there >= own or (there in taken and not ends_text):
            missing.append(index)
        else:
            own_of[index], is_shared[index] = there, True
            taken.add(there)
    if missing:
        texts = [target.decode([index]) for index in missing]
        read = drafter(texts, add_special_tokens=False, verbose=False)["input_ids"]
        own_of[missing] = torch.tensor([ids[-1] if ids and ids[-1] < own else 0 for ids in read])
    return Intersection(own_of.to(device), is_shared.to(device), own)


def spelt(vocabulary: Mapping[str, int]) -> list[tuple[int, str]]:
    """The tokens of a vocabulary in their order: number, and spelling, with a space for every sign of one."""
    ordered = sorted(vocabulary.items(), key=lambda entry: entry[1])
    return [(index, token.translate(dict.fromkeys(map(ord, SPACES), " "))) for token, index in ordered]
