"""A model that shares layers and cache with another one: early exits, and the target with look-ahead tokens."""

from transformers import PreTrainedModel

from specbench.decoding.sampling import Sampling
from specbench.models.language_model import LanguageModel


class BorrowedCache(LanguageModel):
    """A model that uses its owner's layers and cache, and so reads no prompt of its own."""

    def __init__(
        self, module: PreTrainedModel, owner: LanguageModel, name: str, sampling: Sampling, exact: bool = True
    ):
        super().__init__(
            module,
            owner.tokenizer,
            name=name,
            sampling=sampling,
            new_cache=owner.new_cache,
            executor=owner.executor,
            exact=exact,
            attention=owner.attention if owner.kernel else "sdpa",
        )
        self.owner = owner

    def allocate(self, rows: int, columns: int) -> None:
        self.borrow()

    def borrow(self) -> None:
        """Takes the owner's cache in its present state."""
        self.cache, self.cached = self.owner.cache, list(self.owner.cached)
        if self.encoder is not None and self.owner.encoder is not None:
            self.encoder.borrow(self.owner.encoder)
