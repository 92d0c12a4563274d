"""A model that is part of another one, as early exits and look-ahead tokens are."""

from transformers import PreTrainedModel

from specbench.decoding.sampling import Sampling
from specbench.models.language_model import LanguageModel


class BorrowedCache(LanguageModel):
    """A model that shares another's layers, and with them its cache: it reads no prompt of its own."""

    def __init__(self, module: PreTrainedModel, owner: LanguageModel, name: str, sampling: Sampling):
        super().__init__(
            module,
            owner.tokenizer,
            name=name,
            sampling=sampling,
            new_cache=owner.new_cache,
            executor=owner.executor,
        )
        self.owner = owner

    def allocate(self, rows: int, columns: int) -> None:
        self.borrow()

    def borrow(self) -> None:
        """The owner's cache, as it is now."""
        self.cache, self.cached = self.owner.cache, list(self.owner.cached)
