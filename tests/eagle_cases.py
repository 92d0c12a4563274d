"""Tiny EAGLE checkpoints in every dialect, and their forward pass in numpy, a row and a head at a time."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

V, DRAFT_V, D, HEADS, KV_HEADS, HEAD_SIZE, INNER, EPS = 4160, 300, 16, 4, 2, 4, 24, 1e-5
SIZES = dict(hidden_size=D, intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
             head_dim=HEAD_SIZE, rms_norm_eps=EPS, vocab_size=V, max_position_embeddings=512)  # fmt: skip
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TARGET = dict(num_hidden_layers=8, initializer_range=0.3)  # of `checkpoints.checkpoint`
NO_PARTS = frozenset[str]()


def numbers(name: str, *shape: int) -> torch.Tensor:
    """Numbers that depend on a name alone: around 1 for norms, else around 0."""
    places = torch.arange(1, int(np.prod(shape)) + 1, dtype=torch.float64)
    found = torch.sin(places * (1 + zlib.crc32(name.encode()) % 997)).float().view(shape)
    return 1 + 0.5 * found if len(shape) == 1 and "bias" not in name else 0.6 * found


def eagle3_tensors(layers: int = 1, qwen: bool = False, without=NO_PARTS, **flags: bool):
    """The tensors of EAGLE-3 under speculators' names. `without` are embedding, head or map."""
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (D,), "fc.weight": (D, 3 * D)}
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * D,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{j}.weight": (D,) for j in range(3)}
    shapes |= layer_shapes("layers.0", 2 * D, qwen) | {"layers.0.hidden_norm.weight": (D,)}
    for i in range(1, layers):
        shapes |= layer_shapes(f"layers.{i}", D, qwen)
    shapes |= {"embed_tokens.weight": (V, D), "lm_head.weight": (DRAFT_V if "map" not in without else V, D)}
    dropped = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}
    found = {name: numbers(name, *shape) for name, shape in shapes.items() if dropped.get(name, "") not in without}
    if "map" not in without:
        targets = 5 + 13 * torch.arange(DRAFT_V)
        found |= {"d2t": targets - torch.arange(DRAFT_V), "t2d": torch.zeros(V, dtype=torch.bool)}
        found["t2d"][targets] = True
    return found


def layer_shapes(prefix: str, width: int, qwen: bool = False) -> dict[str, tuple[int, ...]]:
    attention = {"q_proj": (HEADS * HEAD_SIZE, width), "k_proj": (KV_HEADS * HEAD_SIZE, width),
                 "v_proj": (KV_HEADS * HEAD_SIZE, width), "o_proj": (D, HEADS * HEAD_SIZE)}  # fmt: skip
    attention |= {"q_norm": (HEAD_SIZE,), "k_norm": (HEAD_SIZE,)} if qwen else {}
    mlp = {"gate_proj": (INNER, D), "up_proj": (INNER, D), "down_proj": (D, INNER)}
    norms = {f"{prefix}.{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    parts = {f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()}
    return norms | parts | {f"{prefix}.mlp.{name}.weight": shape for name, shape in mlp.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict, binary: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def speculators(tensors, ids=None, layers=1, qwen=False, **flags: bool) -> dict:
    """The config.json of speculators 0.9.0."""
    kind = {"model_type": "qwen3" if qwen else "llama", "num_hidden_layers": layers}
    return {
        "speculators_model_type": "eagle3", "speculators_version": "0.9.0", "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else V,
        "eagle_aux_hidden_state_layer_ids": ids, "target_hidden_size": None, "embed_requires_grad": False,
        "transformer_layer_config": SIZES | kind, "tie_word_embeddings": False, "dtype": "float32",
        **{name: flags.get(name, False) for name in FLAGS},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": None, "architectures": []}},
    }  # fmt: skip


def plain(tensors, layers=1, **more) -> dict:
    """The config.json of SafeAILab and SpecForge."""
    draft = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else V
    return SIZES | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": layers,
                    "draft_vocab_size": draft, "rope_theta": 10000.0, "torch_dtype": "float32", **more}  # fmt: skip


def renamed(tensors, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """With the beginnings of names exchanged."""
    pairs = ((next((new + name[len(old) :] for old, new in names.items() if name.startswith(old)), name), tensor)
             for name, tensor in tensors.items())  # fmt: skip
    return dict(pairs)


class PlainEagle:
    """The forward pass of EAGLE-3 in float64."""

    def __init__(self, tensors: dict[str, torch.Tensor], embedding=None, head=None, **flags: bool):
        self.W = {name: tensor.double().numpy() for name, tensor in tensors.items()}
        self.W.setdefault("embed_tokens.weight", embedding)
        self.W.setdefault("lm_head.weight", head)
        self.flags = flags
        self.layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))

    def rms(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + EPS) * self.W[name] if name in self.W else x

    def feature(self, hidden: np.ndarray) -> np.ndarray:
        """What stands for the target's hidden states of one token."""
        hidden = self.rms(hidden, "input_norm.weight")
        parts = np.split(hidden, len(hidden) // D)
        return self.W["fc.weight"] @ np.concatenate([self.rms(x, f"fc_norm.{j}.weight") for j, x in enumerate(parts)])

    def attend(self, layer: str, inputs: list[np.ndarray]) -> list[np.ndarray]:
        keys = [self.heads(layer, "k", x, place) for place, x in enumerate(inputs)]
        values = [(self.W[f"{layer}.self_attn.v_proj.weight"] @ x).reshape(KV_HEADS, -1) for x in inputs]
        found = []
        for place, x in enumerate(inputs):
            mixed = []
            for head, q in enumerate(self.heads(layer, "q", x, place)):
                group = head * KV_HEADS // HEADS
                scores = np.array([q @ keys[j][group] for j in range(place + 1)]) / HEAD_SIZE**0.5
                weights = np.exp(scores - scores.max())
                mixed.append(sum(w * values[j][group] for j, w in enumerate(weights / weights.sum())))
            found.append(self.W[f"{layer}.self_attn.o_proj.weight"] @ np.concatenate(mixed))
        return found

    def heads(self, layer: str, kind: str, x: np.ndarray, place: int) -> list[np.ndarray]:
        """Queries or keys of one token, turned by its position."""
        angles = place / 10000 ** (np.arange(HEAD_SIZE // 2) * 2 / HEAD_SIZE)
        turned = []
        for part in (self.W[f"{layer}.self_attn.{kind}_proj.weight"] @ x).reshape(-1, HEAD_SIZE):
            part = self.rms(part, f"{layer}.self_attn.{kind}_norm.weight")
            whole = (part[: HEAD_SIZE // 2] + 1j * part[HEAD_SIZE // 2 :]) * np.exp(1j * angles)
            turned.append(np.concatenate([whole.real, whole.imag]))
        return turned

    def mlp(self, layer: str, x: np.ndarray) -> np.ndarray:
        gate = self.W[f"{layer}.mlp.gate_proj.weight"] @ x
        up = self.W[f"{layer}.mlp.up_proj.weight"] @ x
        return self.W[f"{layer}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def __call__(self, features: list[np.ndarray], tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits and next feature behind pairs of features (see `feature`) and the tokens after theirs."""
        W, embedded = self.W, [self.W["embed_tokens.weight"][token] for token in tokens]
        normed = [self.rms(g, "layers.0.hidden_norm.weight") for g in features]
        rows = normed if self.flags.get("norm_before_residual") else features
        inputs = [np.concatenate([self.rms(e, "layers.0.input_layernorm.weight"), u])
                  for e, u in zip(embedded, normed, strict=True)]  # fmt: skip
        for number in range(self.layers):
            layer = f"layers.{number}"
            if number:
                inputs = [self.rms(x, f"{layer}.input_layernorm.weight") for x in rows]
            rows = [x + o for x, o in zip(rows, self.attend(layer, inputs), strict=True)]
            rows = [x + self.mlp(layer, self.rms(x, f"{layer}.post_attention_layernorm.weight")) for x in rows]
        last = self.rms(rows[-1], "norm.weight")
        return W["lm_head.weight"] @ last, last if self.flags.get("norm_output") else rows[-1]
