"""IBM's MLP speculator (Wertheimer et al., 2404.19124) and Snowflake Arctic's LSTM of the same checkpoint format.

Guess k follows from a state and the token before it; the first state is the target's last hidden state. So it is an
autoregressive drafter without attention or cache. B rows, H hidden of the target, M inner width, V vocabulary, K guesses.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.errors import ConfigError
from specbench.models.published import fill, read_config, read_tensors, refuse_unknown_keys, whole_number

KEYS = ("method", "emb_dim", "inner_dim", "proj_dim", "input_hidden_dim", "n_predict", "num_lookahead_tokens",
        "vocab_size", "top_k_tokens_per_head", "n_candidates", "tie_weights", "tie_lstm_embs", "scale_input")  # fmt: skip
METHODS = ("sum_rnn", "sum_lstm")  # of which the first is IBM's
MOST = 1000  # guesses
GATES = ("forget", "input", "output", "cell")


def rms_norm(x: Tensor) -> Tensor:
    """x [..., M] divided by its root mean square."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Norm(nn.Module):
    """RMS norm with weight and bias [M]."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] to [..., M]."""
        return rms_norm(x) * self.weight + self.bias


class Speculator(nn.Module, ABC):
    """Base class. A state is a tuple of tensors [B, ...]; the first one is s, of which the logits are."""

    def __init__(self, count: int, hidden: int, inner: int, vocab_size: int, scale_input: bool):
        """`count` is K."""
        super().__init__()
        self.count, self.hidden_size, self.vocab_size, self.scale_input = count, hidden, vocab_size, scale_input
        a = 0.5 ** (0.5 / count)
        self.of_token = ((1 - a * a) * inner / 2) ** 0.5 / a  # weight of the embedding beside the state

    def start(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """The state before the first guess, from the target's last hidden states [B, H]."""
        return (rms_norm(hidden) / 2**0.5 if self.scale_input else hidden,)

    @abstractmethod
    def step(self, number: int, state: tuple[Tensor, ...], last: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits [B, V] of guess `number` (from 0) after the tokens last [B], and the next state."""


class MlpSpeculator(Speculator):
    """s = gelu(norm_k(P_k s + w E_k[x_{k-1}])), logits W_k s. If `tied`, all guesses have one E, norm and W, and all but
    the first one P."""

    def __init__(self, count: int, hidden: int, inner: int, vocab_size: int, scale_input: bool, tied: bool):
        super().__init__(count, hidden, inner, vocab_size, scale_input)
        own = 1 if tied else count
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(own))
        widths = [hidden] + [inner] * (min(count, 2) - 1 if tied else count - 1)
        self.proj = nn.ModuleList(nn.Linear(width, inner, bias=False) for width in widths)
        self.ln = nn.ModuleList(Norm(inner) for _ in range(own))
        self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(own))

    def step(self, number: int, state: tuple[Tensor, ...], last: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        own, projection = min(number, len(self.emb) - 1), min(number, len(self.proj) - 1)
        mixed = self.proj[projection](state[0]) + self.of_token * self.emb[own](last)
        s = F.gelu(self.ln[own](mixed))
        return self.head[own](s), (s,)


class LstmSpeculator(Speculator):
    """Arctic's `sum_lstm`: z_g = P_g s + w E[x_{k-1}] for forget, input and output gate and cell,
    c = sigma(z_f) c + sigma(z_i) gelu(norm(z_c)), s = sigma(z_o) gelu(norm'(c)). Its state is (s, c)."""

    def __init__(self, count: int, hidden: int, inner: int, vocab_size: int, scale_input: bool):
        super().__init__(count, hidden, inner, vocab_size, scale_input)
        self.forget_emb = nn.ModuleList([nn.Embedding(vocab_size, inner)])
        for gate in GATES:
            widths = (hidden, inner)[:count]
            self.add_module(f"{gate}_proj", nn.ModuleList(nn.Linear(width, inner, bias=False) for width in widths))
        self.cell_ln, self.state_ln = nn.ModuleList([Norm(inner)]), nn.ModuleList([Norm(inner)])
        self.head = nn.ModuleList([nn.Linear(inner, vocab_size, bias=False)])

    def step(self, number: int, state: tuple[Tensor, ...], last: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        token = self.of_token * self.forget_emb[0](last)
        z = [self.get_submodule(f"{gate}_proj.{min(number, 1)}")(state[0]) + token for gate in GATES]
        new = z[1].sigmoid() * F.gelu(self.cell_ln[0](z[3]))
        c = new if number == 0 else z[0].sigmoid() * state[1] + new
        s = z[2].sigmoid() * F.gelu(self.state_ln[0](c))
        return self.head[0](s), (s, c)


def read_speculator(path: str, key: str, values: bool = True) -> Speculator:
    """The speculator in a folder or of a hub id, without `values` on "meta". Raises ConfigError."""
    named, config = f"{key}={path}", read_config(path, key)
    if config.get("model_type") != "mlp_speculator" and config.get("method") not in METHODS:
        raise ConfigError(f"{named} has model_type={config.get('model_type')} in its config.json, not mlp_speculator")
    refuse_unknown_keys(config, KEYS, named)
    found = {name.removeprefix("speculator."): t for name, t in read_tensors(path, key, values=values).items()}
    with torch.device("meta"):
        module = _shaped(config, named)
    fill(module, _without_copies(found, module), named)
    return module


def _shaped(config: Mapping[str, Any], named: str) -> Speculator:
    """A speculator of the sizes in config.json. Raises ConfigError."""
    method = config.get("method", METHODS[0])
    if method not in METHODS:
        raise ConfigError(f"{named} has method={method} in its config.json: it must be {' or '.join(METHODS)}")
    sizes = {name: _size(config, name, named) for name in ("emb_dim", "inner_dim", "proj_dim", "input_hidden_dim")}
    inner = sizes["inner_dim"] or sizes["emb_dim"]
    count, vocabulary = (whole_number(config, name, named) for name in ("n_predict", "vocab_size"))
    tied, scaled = (_truth(config, name, named) for name in ("tie_weights", "scale_input"))
    if count > MOST:
        raise ConfigError(f"{named} has n_predict={count} in its config.json: at most {MOST} guesses can be read")
    lstm = method == "sum_lstm"
    if lstm and not (tied and _truth(config, "tie_lstm_embs", named)):
        raise ConfigError(f"{named} has embeddings of its own for each gate or guess: only tie_weights=true and "
                          "tie_lstm_embs=true can be read with method=sum_lstm")  # fmt: skip
    own = {name: sizes[name] for name in ("emb_dim", "proj_dim") if lstm and sizes[name] not in (0, inner)}
    if own or not inner:
        raise ConfigError(f"{named} has inner_dim={inner} in its config.json, but {own or sizes}: they must be equal")
    hidden = sizes["input_hidden_dim"] or sizes["emb_dim"]
    if lstm:
        return LstmSpeculator(count, hidden, inner, vocabulary, scaled)
    return MlpSpeculator(count, hidden, inner, vocabulary, scaled, tied)


def _size(config: Mapping[str, Any], name: str, named: str) -> int:
    """A width, the first of several that are written as "a.b"; 0 if it is not given. Raises ConfigError."""
    value = config.get(name, 0)
    parts = str(value).split(".") if isinstance(value, str | int) and not isinstance(value, bool) else [""]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ConfigError(f"{named} has {name}={value} in its config.json: it must be an integer, or several as '8.8'")
    if len(set(parts)) > 1:
        raise ConfigError(f"{named} has {name}={value} in its config.json: layers of different widths cannot be read")
    return int(parts[0])


def _truth(config: Mapping[str, Any], name: str, named: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{named} has {name}={value} in its config.json: it must be true or false")
    return value


def _without_copies(tensors: Mapping[str, Tensor], module: Speculator) -> dict[str, Tensor]:
    """The tensors without the copies of tied ones that a file may hold, as emb.1 of emb.0."""
    tied = isinstance(module, LstmSpeculator) or (isinstance(module, MlpSpeculator) and len(module.emb) < module.count)
    copies = {f"{part}.{i}.{kind}" for part in ("emb", "head", "ln") for i in range(1, module.count)
              for kind in ("weight", "bias")}  # fmt: skip
    copies |= {f"proj.{i}.weight" for i in range(2, module.count)} | {f"{gate}_emb.0.weight" for gate in GATES[1:]}
    own = module.state_dict()
    return {name: tensor for name, tensor in tensors.items() if name in own or not (tied and name in copies)}
