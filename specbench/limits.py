"""Bounds of settings that several schemas share. Nothing here needs torch, so a wrong value is told before it loads."""

from typing import Any

# Bounds within which float32 logits stay finite and keep their order, for `setting`.
TEMPERATURE: dict[str, Any] = {"ge": 1e-3, "le": 1e3, "zero": True}
TOP_K: dict[str, Any] = {"ge": 0, "le": 10**9}
TOP_P: dict[str, Any] = {"ge": 1e-6, "le": 1}
REPETITION_PENALTY: dict[str, Any] = {"ge": 1e-2, "le": 1e2}
LENIENCE: dict[str, Any] = {"ge": 1e-6, "le": 1}  # p / l
MOST_RANKS = 1024  # processes that share a target
MOST_BEAMS = 64  # w of a beam search
LARGEST_GAMMA = 1000  # guesses of a draft, one after another
LARGEST_SEED = 2**32 - 1  # of numpy; torch takes larger ones
UNLIMITED_CONTEXT = 2**31 - 1  # tokens: of a model whose positions have no end, such as T5
