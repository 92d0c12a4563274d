"""Names of multi-token-prediction modules in checkpoints, whose tensors transformers leaves out when it loads a model.

Known are names of a layer behind the last one (DeepSeek-V3, GLM-4.5), of a part of its own, `mtp` (Qwen3-Next,
Qwen3.5), and `mtp_layers` (MiMo).
"""

import re
from collections.abc import Iterable, Mapping

PARTS = ("embedding_norm", "hidden_norm", "projection", "norm")
NAMES = {
    "enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "projection", "shared_head.norm": "norm",
    "token_layernorm": "embedding_norm", "hidden_layernorm": "hidden_norm", "input_proj": "projection",
    "final_layernorm": "norm",
}  # fmt: skip
NAMES_IN_MTP = {
    "pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm", "fc": "projection", "norm": "norm",
}  # fmt: skip
SHARED = ("shared_head.head", "embed_tokens")  # copies of the target's matrices


def mtp_place(name: str, layers: int) -> tuple[int, str] | None:
    """The number of the module that a tensor of a checkpoint with so many `layers` belongs to, and its place there:
    "PART.weight" for one of PARTS, "layer.REST", or "" for a copy of the target's matrices. None if it belongs to the
    model itself."""
    if found := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        number = int(found[1]) - layers
        return None if number < 0 else (number, _within(NAMES, found[2]))
    if found := re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", name):
        return int(found[1]), f"layer.{found[2]}"
    if found := re.fullmatch(r"mtp\.(.+)", name):
        return 0, _within(NAMES_IN_MTP, found[1])
    if found := re.fullmatch(r"model\.mtp_layers\.(\d+)\.(.+)", name):
        return int(found[1]), _within(NAMES, found[2])
    return None


def _within(names: Mapping[str, str], rest: str) -> str:
    part, _, kind = rest.rpartition(".")
    if part in SHARED:
        return ""
    return f"{names[part]}.{kind}" if part in names else f"layer.{rest}"


def without_modules(names: Iterable[str], layers: int) -> list[str]:
    """The names that belong to no module: a layer behind the last one is one only if it has a projection."""
    places = {name: mtp_place(name, layers) for name in names}
    modules = {place[0] for place in places.values() if place is not None and place[1] == "projection.weight"}
    return [name for name, place in places.items() if place is None or place[0] not in modules]
