"""A drafter's own standardization (paper, section 6): M_q need not be sampled as M_p is."""

import dataclasses
from dataclasses import dataclass

from specbench.context import Context
from specbench.decoding.drafter import DrafterSettings
from specbench.decoding.sampling import Sampling
from specbench.settings import setting


@dataclass(kw_only=True)
class OwnSampling(DrafterSettings):
    """Settings of every drafter with a law of its own. What is null is as for the target."""

    temperature: float | None = setting(ge=0, default=None)
    top_k: int | None = setting(ge=0, default=None)
    top_p: float | None = setting(gt=0, le=1, default=None)

    def sampling_of(self, target: Sampling) -> Sampling:
        """How the drafter's logits become q, given how the target's become p. Whatever q becomes, the output
        law stays p: q is what guesses are drawn from."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(OwnSampling)}
        return dataclasses.replace(target, **{name: value for name, value in own.items() if value is not None})

    def own(self, context: Context) -> Context:
        """The context that the drafter's model is built from."""
        return dataclasses.replace(context, sampling=self.sampling_of(context.sampling))
