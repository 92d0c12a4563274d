"""Trains a multi-token-prediction module for a target that has none (DeepSeek-V3, 2412.19437, section 2.2)."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specbench.contrib.training.features import applications
from specbench.contrib.training.student import Student, StudentSettings, head_input, quoted
from specbench.models.mtp import PairInput
from specbench.models.mtp_weights import LAYER, one_layer
from specbench.settings import setting


class MtpStudent(Student):
    """One layer of the target's class, which begins as the target's last one. Guess k is its prediction when it has
    been applied k times: to the target's hidden states, then to its own."""

    @dataclass
    class Settings(StudentSettings):
        guesses: int = setting(ge=1, le=100)

        @property
        def ahead(self) -> int:
            return self.guesses

    def __init__(self, target: Any, loss: str, settings: Any, model: Any = None):
        super().__init__(target, loss, settings)
        config, last = target.config.get_text_config(), target.get_decoder().layers[-1]
        experts = any(".experts." in name for name, _ in last.named_parameters())
        self.layers = own = type(target)(one_layer(config, experts)).get_decoder()
        own.layers[0].load_state_dict(last.state_dict())
        del own.embed_tokens
        projection = nn.Linear(2 * config.hidden_size, config.hidden_size, False)
        self.pair_input = PairInput(copy.deepcopy(own.norm), copy.deepcopy(own.norm), projection)

    @classmethod
    def use(cls, settings: Any, folder: Path) -> list[str]:
        return ["drafter=mtp", quoted("drafter.path", folder)]

    def laws(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        output, count = self.target.get_output_embeddings(), self.settings.guesses
        with torch.no_grad():
            hidden = head_input(self.target, input_ids=tokens)  # [B, T, H]
            embedded = self.target.get_input_embeddings()(tokens)
            p = output(hidden)
        width = tokens.shape[1] - count  # positions that have all guesses
        ps, qs = [], []
        for k, (places, given) in enumerate(applications(self.layers, count, tokens), 1):
            joined = self.pair_input(embedded[:, k:], hidden[:, : len(places)])
            hidden = self.layers(inputs_embeds=joined, **given).last_hidden_state
            ps.append(p[:, k : k + width])
            qs.append(output(hidden[:, :width]))
        return torch.stack(ps, 2).flatten(0, 1), torch.stack(qs, 2).flatten(0, 1)

    def save(self, folder: Path, accuracy: list[list[float]]) -> None:
        """Writes the tensors under DeepSeek-V3's names, in 16 bits, beside the target's config."""
        parts = {"embedding_norm": self.pair_input.embedding_norm, "hidden_norm": self.pair_input.hidden_norm,
                 "projection": self.pair_input.projection, "norm": self.layers.norm}  # fmt: skip
        prefix = f"model.layers.{self.target.config.get_text_config().num_hidden_layers}"
        found = {f"{prefix}.{name}.weight": parts[part].weight for name, part in LAYER.items()}
        found |= {f"{prefix}.{name}": tensor for name, tensor in self.layers.layers[0].state_dict().items()}
        self.target.config.save_pretrained(folder)
        stored = {name: tensor.detach().half().cpu().contiguous() for name, tensor in found.items()}
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
