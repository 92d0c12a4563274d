"""IBM's MLP speculator (Wertheimer et al., 2404.19124), Snowflake Arctic's LSTM in its format, and Hydra heads (Ankner
et al., 2402.05109).

Guess k follows from a state and the token before it, and the first state is the target's last hidden state: an
autoregressive drafter without attention or cache. B rows, H hidden of the target, M inner width, V vocabulary.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.errors import ConfigError
from specbench.models.checkpoint import reading
from specbench.models.published import FILES, checked, fill_module, read_config, read_tensors
from specbench.settings import BaseSettings, setting

GATES = ("forget", "input", "output", "cell")
# Copies of tied tensors that a file may hold: of those of another guess, and of another gate.
COPIES = re.compile(r"(?:emb|head|ln|proj)\.\d+\.(?:weight|bias)"), re.compile(r"(?:input|output|cell)_emb\.0\.weight")


@dataclass
class SpeculatorConfig(BaseSettings):
    """Keys of config.json. A width may be text, "8", or several of which the first counts, "8.8"."""

    n_predict: int = setting(ge=1, le=1000)
    vocab_size: int = setting(ge=1)
    emb_dim: str = setting()
    inner_dim: str = setting(default="0")  # 0 is emb_dim
    input_hidden_dim: str = setting(default="0")  # 0 is emb_dim
    method: str = setting(choices=("sum_rnn", "sum_lstm"), default="sum_rnn")
    tie_weights: bool = False
    tie_lstm_embs: bool = False
    scale_input: bool = False

    def check(self, prefix: str) -> None:
        for name in ("emb_dim", "inner_dim", "input_hidden_dim"):
            width = getattr(self, name).split(".")[0]
            if not width.isdecimal() or len(width) > 9 or (name == "emb_dim" and int(width) < 1):
                raise ConfigError(f"{prefix}{name}={getattr(self, name)} is not allowed: it must be an integer above 0")
            setattr(self, name, width)


@dataclass
class HydraConfig(BaseSettings):
    """Keys of config.json; heads of other kinds attend to the text, or do not read guesses."""

    hydra_num_heads: int = setting(ge=1, le=1000)
    hydra_num_layers: int = setting(ge=1, le=1000, default=1)
    hydra_head_arch: str = setting(choices=("mlp",))
    grounded_heads: bool = setting(choices=(True,))
    hidden_state_offset: int = setting(choices=(0,), default=0)


def rms_norm(x: Tensor) -> Tensor:
    """x [..., M] divided by its root mean square."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Norm(nn.LayerNorm):
    """RMS norm with weight and bias [M]."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] to [..., M]."""
        return rms_norm(x) * self.weight + self.bias


class Speculator(nn.Module):
    """Base class. A state is a tuple of tensors [B, ...]; of the first one, s, the logits are."""

    embed: Callable[[Tensor], Tensor]  # the target's embeddings [B, H] of tokens [B]; the drafter sets it

    def __init__(self, config: SpeculatorConfig):
        super().__init__()
        self.vocab_size, self.count, self.scale_input = config.vocab_size, config.n_predict, config.scale_input
        self.inner = int(config.inner_dim) or int(config.emb_dim)
        self.hidden_size = int(config.input_hidden_dim) or int(config.emb_dim)
        a = 0.5 ** (0.5 / self.count)
        self.token_weight = ((1 - a * a) * self.inner / 2) ** 0.5 / a  # of an embedding beside the state

    def start(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """The state before the first guess, from the target's last hidden states [B, H]."""
        return (rms_norm(hidden) / 2**0.5 if self.scale_input else hidden,)

    def step(self, number: int, state: tuple[Tensor, ...], last: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits [B, V] of guess `number` (from 0) after the tokens last [B], and the next state."""
        raise NotImplementedError


class MlpSpeculator(Speculator):
    """s = gelu(norm_k(P_k s + w E_k x)) after token x, logits W_k s. Tied ones have one E, norm and W for all guesses,
    and one P for all but the first."""

    def __init__(self, config: SpeculatorConfig):
        super().__init__(config)
        V, M, own = self.vocab_size, self.inner, 1 if config.tie_weights else self.count
        widths = ([self.hidden_size] + [M] * (self.count - 1))[: 2 if config.tie_weights else self.count]
        self.emb = nn.ModuleList(nn.Embedding(V, M) for _ in range(own))
        self.proj = nn.ModuleList(nn.Linear(width, M, bias=False) for width in widths)
        self.ln = nn.ModuleList(Norm(M) for _ in range(own))
        self.head = nn.ModuleList(nn.Linear(M, V, bias=False) for _ in range(own))

    def step(self, number: int, state: tuple[Tensor, ...], last: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        own, projection = min(number, len(self.emb) - 1), self.proj[min(number, len(self.proj) - 1)]
        s = F.gelu(self.ln[own](projection(state[0]) + self.token_weight * self.emb[own](last)))
        return self.head[own](s), (s,)


class LstmSpeculator(Speculator):
    """Arctic's sum_lstm: z_g = P_g s + w E x for forget, input and output gate and cell, c = sigma(z_f) c +
    sigma(z_i) gelu(norm(z_c)), s = sigma(z_o) gelu(norm'(c)), logits W s. Its state is (s, c)."""

    def __init__(self, config: SpeculatorConfig):
        super().__init__(config)
        V, M, widths = self.vocab_size, self.inner, (self.hidden_size, self.inner)[: self.count]
        self.forget_emb = nn.ModuleList([nn.Embedding(V, M)])
        for gate in GATES:
            self.add_module(f"{gate}_proj", nn.ModuleList(nn.Linear(width, M, bias=False) for width in widths))
        self.cell_ln, self.state_ln = nn.ModuleList([Norm(M)]), nn.ModuleList([Norm(M)])
        self.head = nn.ModuleList([nn.Linear(M, V, bias=False)])

    def step(self, number: int, state: tuple[Tensor, ...], last: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        token = self.token_weight * self.forget_emb[0](last)
        z = {gate: self.get_submodule(f"{gate}_proj.{min(number, 1)}")(state[0]) + token for gate in GATES}
        c = z["input"].sigmoid() * F.gelu(self.cell_ln[0](z["cell"]))
        if number:
            c = c + z["forget"].sigmoid() * state[1]
        s = z["output"].sigmoid() * F.gelu(self.state_ln[0](c))
        return self.head[0](s), (s, c)


class Block(nn.Module):
    """R x + silu(L x); without R its width stays."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.linear = nn.Linear(width, hidden)
        self.res_connection = nn.Identity() if width == hidden else nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] to [B, hidden]."""
        found: Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return found


class HydraSpeculator(Speculator):
    """Head k reads the target's hidden state and its embeddings of the k + 1 tokens after it, side by side: a state."""

    def __init__(self, config: HydraConfig, V: int, H: int):
        super().__init__(SpeculatorConfig(config.hydra_num_heads, V, str(H)))
        widths = [[(head + 2) * H] + [H] * (config.hydra_num_layers - 1) for head in range(self.count)]
        self.hydra_mlp = nn.ModuleList(nn.Sequential(*(Block(width, H) for width in own)) for own in widths)
        self.hydra_lm_head = nn.ModuleList(nn.Linear(H, V) for _ in widths)

    def step(self, number: int, state: tuple[Tensor, ...], last: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        joined = torch.cat([state[0], self.embed(last)], 1)
        return self.hydra_lm_head[number](self.hydra_mlp[number](joined)), (joined,)


def read_speculator(path: str, key: str) -> Speculator:
    """The speculator, or Hydra heads, in a folder or of a hub id. Raises ConfigError."""
    named, given = f"{key}={path}", read_config(path, key)
    if "hydra_num_heads" in given:
        tensors, settings = read_tensors(path, key, FILES), checked(HydraConfig, given, named)
        with reading(key, path, "weights"), torch.device("meta"):  # without heads the names of what is there are told
            heads = HydraSpeculator(settings, *tensors.get("hydra_lm_head.0.weight", torch.empty(1, 1)).shape)
        fill_module(heads, tensors, named)
        return heads
    if given.get("model_type") != "mlp_speculator" and "method" not in given:
        raise ConfigError(f"{named} has model_type={given.get('model_type')} in its config.json, not mlp_speculator")
    config = checked(SpeculatorConfig, given, named)
    with reading(key, path, "weights"), torch.device("meta"):
        network = LstmSpeculator(config) if config.method == "sum_lstm" else MlpSpeculator(config)
    tensors, own = read_tensors(path, key), network.state_dict()
    for name in list(tensors):  # Arctic's sum_rnn holds sequences of one layer
        short = re.sub(r"^((?:emb|proj|ln)\.\d+\.)0\.", r"\1", name.removeprefix("speculator."))
        tensors[short] = tensors.pop(name)
        tied = zip(COPIES, (config.tie_weights, config.tie_lstm_embs), strict=True)
        if short not in own and any(is_tied and copies.fullmatch(short) for copies, is_tied in tied):
            del tensors[short]
    fill_module(network, tensors, named)
    return network
