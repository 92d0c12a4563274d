"""PaSS: the target guesses its own next tokens, in one more pass over look-ahead embeddings."""

from dataclasses import dataclass

from specbench.context import Context
from specbench.decoding.state import State
from specbench.drafters.non_autoregressive import NonAutoregressiveDrafter
from specbench.drafters.standard import OwnSampling, with_own_sampling
from specbench.models.borrowed_cache import BorrowedCache
from specbench.models.lookahead import LookAhead
from specbench.models.pretrained import load_extras
from specbench.settings import setting


class PassDrafter(NonAutoregressiveDrafter):
    """Shares the target's weights and cache. Its first guess is drawn from p itself; each round costs a
    second pass of the target."""

    models = ()  # none of its own
    reads = 1

    @dataclass
    class Settings(OwnSampling):
        lookahead: str = setting(required="a folder of look-ahead embeddings")

    def __init__(self, settings: Settings, context: Context):
        sampling = with_own_sampling(context, settings).sampling
        name = f"{context.target.name} with look-ahead tokens"
        model = BorrowedCache(context.target.module, context.target, name, sampling)
        lookahead = load_extras(LookAhead, settings.lookahead, "drafter.lookahead", model)
        self._use(model, lookahead, model.vocab_size, context.gamma)

    def _text_width(self, state: State) -> int:
        self.model.borrow()
        return 1
