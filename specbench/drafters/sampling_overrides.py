"""Settings of a drafter's own standardization, which may differ from the target's (section 6)."""

import dataclasses
from dataclasses import dataclass

from specbench.decoding.sampling import Sampling
from specbench.models.context import Context
from specbench.settings import TEMPERATURE, TOP_K, TOP_P, BaseSettings, setting


@dataclass(kw_only=True)
class OwnSampling(BaseSettings):
    """Settings of every drafter that computes q. Null means the target's value."""

    temperature: float | None = setting(**TEMPERATURE, default=None)
    top_k: int | None = setting(**TOP_K, default=None)
    top_p: float | None = setting(**TOP_P, default=None)

    def sampling_of(self, target: Sampling) -> Sampling:
        """How the drafter's logits become q, given how the target's become p. The output distribution stays p, because
        guesses are drawn from this q."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(OwnSampling)}
        return dataclasses.replace(target, **{name: value for name, value in own.items() if value is not None})

    def own(self, context: Context) -> Context:
        """The run's context with the drafter's own sampling: what its model is built from."""
        return dataclasses.replace(context, sampling=self.sampling_of(context.sampling))
