"""Base class of drafters that read the hidden states of several of the target's layers, and the format of their files.

B rows, T tokens, m places of a row, n places of all rows, A layers that are read, H the target's hidden size, V
vocabulary, V' of the drafter, K guesses.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache

from specbench.contrib.training.losses import distances
from specbench.contrib.training.stored import Seen, unpack
from specbench.contrib.training.student import BEST, Student, StudentSettings
from specbench.decoding.executor import cache_argument
from specbench.models.language_model import head_inputs, hidden_states
from specbench.results.atomic_files import replacing, write_json
from specbench.settings import setting

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}


class FeatureStudent(Student):
    """The drafter's own network is `network`. Guess k behind place j of a row reads hidden states of the target up to
    token j and the text's own tokens up to j + k at most, and is compared with p behind token j + k. The target runs
    beside it, or what it computes is stored before (`stored.store`).

    The drafter guesses the V' most frequent tokens. The loss of a place is the distance of q from p restricted to
    them, times their share of p; that of guess k counts `decay` times that of the one before.
    """

    spans = True
    network: Any
    targets: Tensor  # [V'], the target's token of each token of the drafter
    measured: int  # guesses that `evaluate` measures

    @dataclass
    class Settings(StudentSettings):
        draft_vocab_size: int | None = setting(ge=2 * BEST)
        layers: int = setting(ge=1, le=100)
        feature_layers: list[int] | None = setting(ge=0)
        decay: float = setting(ge=1e-6, le=1)
        dtype: str = setting(choices=tuple(DTYPES))
        intermediate_size: int | None = setting(ge=1)

    @classmethod
    def unfit(cls, settings: Any, target: Any) -> str | None:
        size, total = target.vocab_size, target.num_hidden_layers
        if (settings.draft_vocab_size or 0) > size:
            return f"method.draft_vocab_size={settings.draft_vocab_size} is not possible: the target has {size} tokens"
        if max(settings.feature_layers or [0]) > total:
            return f"method.feature_layers={settings.feature_layers} is not possible: the target has {total} layers"
        return None

    def prepare(self, tokens: Tensor, spans: Tensor) -> None:
        text, place = self.target.config.get_text_config(), torch.arange(tokens.shape[1])
        inside = (place > spans[:, :1]) & (place <= spans[:, 1:] + 1)
        self.frequency = tokens[inside].bincount(minlength=text.vocab_size)
        count = self.settings.draft_vocab_size or text.vocab_size
        targets = self.frequency.argsort(descending=True, stable=True)[:count].sort().values
        self.register_buffer("targets", targets, persistent=False)
        self.build(text)

    @property
    def all_tokens(self) -> bool:
        """Whether the drafter guesses all of the target's tokens."""
        return len(self.targets) == len(self.frequency)

    @abstractmethod
    def build(self, target: Any) -> None:
        """Makes `network` and `config_json`, the content of config.json, for a target of this configuration."""

    @abstractmethod
    def guesses(self, tokens: Tensor, features: Tensor, spans: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each guess k = 1, 2, ... the places [1 or B, m] that it follows, and its logits [B, m, V'], of tokens
        [B, T] and the target's hidden states [B, T, A * H]."""

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """What is stored, by the published names, without the map between the vocabularies."""

    @property
    @abstractmethod
    def read_layers(self) -> Sequence[int]:
        """The target's layers in front of which hidden states are read."""

    def head_rows(self) -> Tensor:
        """The rows [V', H] of the target's output matrix that belong to the drafter's tokens."""
        weight: Tensor = self.target.get_output_embeddings().weight.detach()
        return weight[self.targets.to(weight.device)].float()

    # -- Loss and measurement --------------------------------------------------------------------

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Seen:
        """What the target computes for tokens [B, T]."""
        with hidden_states(self.target, self.read_layers) as found, head_inputs(self.target) as last:
            logits = self.target(input_ids=tokens, use_cache=False).logits
        own = logits if self.all_tokens else logits[..., self.targets]
        share = (own.float().logsumexp(-1) - logits.float().logsumexp(-1)).exp()
        return Seen(found[0], own, share, logits.argmax(-1), last[0])

    def compared(
        self, tokens: Tensor, spans: Tensor, stored: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """For each guess, at the places where it counts: logits of p [n, V'] among the V' tokens, their share of p [n],
        the target's likeliest token [n], and logits of q [n, V']."""
        count = int(spans[:, 1].max()) + 1  # what stands behind is read by nobody
        tokens = tokens[:, :count]
        features, law, share, best, _ = self.read(tokens) if stored is None else unpack(self, stored[:, :count])
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        for k, (places, q) in enumerate(self.guesses(tokens, features, spans), 1):
            at = (places + k).expand(len(tokens), -1)
            counts = (at - k >= spans[:, :1]) & (at <= spans[:, 1:])
            where = rows.expand_as(at)[counts], at[counts]
            yield law[where].float(), share[where], best[where], q[counts].float()

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, spans: Tensor, stored: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The loss of rows [B, T], of which the places spans [B, 2], first and last, count. `stored` [B, T, S] is what
        the target computes for them, if that was stored."""
        losses, weights = [], []
        for k, (p, share, _, q) in enumerate(self.compared(input_ids, spans, stored)):
            weights.append(self.settings.decay**k)
            losses.append(weights[-1] * (distances(self.loss, p, q) * share).sum() / max(1, len(q)))
        return {"loss": torch.stack(losses).sum() / sum(weights)}

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, spans: Tensor | None = None) -> Tensor:
        assert spans is not None
        sums = torch.zeros(self.measured, 2 + BEST, dtype=torch.double)
        for k, (p, share, best, q) in enumerate(self.compared(tokens, spans)):
            beta = torch.minimum(p.softmax(-1) * share[:, None], q.softmax(-1)).sum()
            hits = (self.targets[q.topk(BEST).indices] == best[:, None]).sum(0)
            sums[k] = torch.cat([beta[None], hits, torch.full_like(beta[None], len(q))]).double().cpu()
        return sums

    # -- The checkpoint --------------------------------------------------------------------------

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        """Writes config.json and model.safetensors as speculators does, without the target's embedding."""
        dtype, tensors = self.settings.dtype, {name: t.detach().cpu() for name, t in self.tensors().items()}
        stored = {name: tensor.to(DTYPES[dtype]).contiguous() for name, tensor in tensors.items()}
        if not self.all_tokens:
            targets = self.targets.cpu()
            marks = torch.zeros(len(self.frequency), dtype=torch.bool)
            marks[targets] = True
            stored |= {"d2t": targets - torch.arange(len(targets)), "t2d": marks}
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "model.safetensors") as temporary:
            save_file(stored, temporary, metadata={"format": "pt"})
        write_json(folder / "config.json", self.config_json)

    def speculators(
        self, kind: str, architecture: str, guesses: int, layer: Mapping[str, Any], **own: Any
    ) -> dict[str, Any]:
        """The content of config.json of speculators 0.9.0, for a drafter of so many guesses."""
        proposal = {"proposal_type": "greedy", "speculative_tokens": guesses, "verifier_accept_k": 1,
                    "accept_tolerance": 0.0}  # fmt: skip
        target = self.target.config
        return {
            "speculators_model_type": kind, "speculators_version": "0.9.0", "architectures": [architecture],
            "draft_vocab_size": len(self.targets), "transformer_layer_config": dict(layer),
            "tie_word_embeddings": False, "dtype": self.settings.dtype, **own,
            "speculators_config": {
                "algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [proposal],
                "verifier": {"name_or_path": target._name_or_path, "architectures": target.architectures or []},
            },
        }  # fmt: skip


def applications(layers: Any, count: int, tokens: Tensor) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """For each of at most `count` applications of `layers` to pairs of tokens [B, T]: the places [m] whose guess it
    makes, and what the call is given. As when decoding, a place attends to the text's pairs up to it, of the first
    application, and to its own pairs of those since; pair j of application k + 1 stands at position j + k."""
    pairs, seen = torch.arange(tokens.shape[1] - 1, device=tokens.device), []
    cache = {cache_argument(layers.forward): DynamicCache()}
    for k in range(min(count, len(pairs))):
        rows = pairs[: len(pairs) - k]
        seen.append(rows)
        mask = torch.cat([rows[:, None] >= seen[0], *(rows[:, None] == own for own in seen[1:])], 1)
        if layers.config._attn_implementation == "eager":  # which adds it
            mask = torch.where(mask, 0.0, torch.finfo(torch.float).min)
        yield rows, {"attention_mask": mask[None, None], "position_ids": (rows + k)[None], **cache}


def layer_sizes(target: Any, model_type: str, own: Any) -> dict[str, Any]:
    """The configuration of the decoder layers that the settings `own` ask for, else of the target's sizes."""
    heads, rope = target.num_attention_heads, getattr(target, "rope_parameters", None) or {}
    return {
        "model_type": model_type, "num_hidden_layers": own.layers, "hidden_size": target.hidden_size,
        "intermediate_size": (own.intermediate_size or getattr(target, "intermediate_size", None)
                              or 4 * target.hidden_size),
        "num_attention_heads": heads, "num_key_value_heads": getattr(target, "num_key_value_heads", None) or heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads, "vocab_size": target.vocab_size,
        "max_position_embeddings": getattr(target, "max_position_embeddings", 2048), "attention_bias": False,
        "rms_norm_eps": getattr(target, "rms_norm_eps", 1e-6), "hidden_act": "silu", "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
    }  # fmt: skip


@torch.no_grad()
def last_norm(target: Any, own: nn.Module) -> None:
    """Begins a norm as the target's last one, if that has a weight alone."""
    found, weight = getattr(target.get_decoder(), "norm", None), own.weight
    if isinstance(weight, Tensor) and found is not None and getattr(found, "bias", None) is None:
        signs = 1 - 2.0 * (torch.arange(len(weight)) % 2)  # of mean 0 and mean square 1
        like = next(target.parameters())
        weight.copy_(found(signs.to(like.device, like.dtype)).float().cpu() * signs)
