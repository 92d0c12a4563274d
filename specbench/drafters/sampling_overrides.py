"""Settings of a drafter's own standardization, which may differ from the target's (section 6)."""

import dataclasses
from dataclasses import dataclass

from specbench.models.context import Context
from specbench.settings import TEMPERATURE, TOP_K, TOP_P, BaseSettings, setting


@dataclass(kw_only=True)
class OwnSampling(BaseSettings):
    """Settings of every drafter that computes q. Null means the target's value."""

    temperature: float | None = setting(**TEMPERATURE, default=None)
    top_k: int | None = setting(**TOP_K, default=None)
    top_p: float | None = setting(**TOP_P, default=None)

    def own(self, context: Context) -> Context:
        """The run's context with the drafter's own sampling. The output distribution stays p, because guesses are drawn
        from this q."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(OwnSampling)}
        changed = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(context, sampling=dataclasses.replace(context.sampling, **changed))
