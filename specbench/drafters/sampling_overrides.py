"""Settings of a drafter's own standardization, which may differ from the target's (section 6)."""

import dataclasses

from specbench.models.context import Context
from specbench.settings import BaseSettings, Temperature, TopK, TopP


class OwnSampling(BaseSettings):
    """Settings of every drafter that computes q. Null means the target's value."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None

    def own(self, context: Context) -> Context:
        """The run's context with the drafter's own sampling. The output distribution stays p, because guesses are drawn
        from this q."""
        own = {name: getattr(self, name) for name in OwnSampling.model_fields}
        changed = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(context, sampling=dataclasses.replace(context.sampling, **changed))
