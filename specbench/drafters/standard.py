"""A drafter's own standardization (paper, section 6): M_q need not be sampled as M_p is."""

import dataclasses
from dataclasses import dataclass

from specbench.context import Context
from specbench.settings import setting


@dataclass(kw_only=True)
class OwnSampling:
    """Settings of every drafter with a law of its own. What is null is as for the target."""

    temperature: float | None = setting(ge=0, default=None)
    top_k: int | None = setting(ge=0, default=None)
    top_p: float | None = setting(gt=0, le=1, default=None)


def with_own_sampling(context: Context, settings: OwnSampling) -> Context:
    """The context of a drafter. Whatever q becomes, the output law stays p: q is what guesses are drawn from."""
    own = {f.name: getattr(settings, f.name) for f in dataclasses.fields(OwnSampling)}
    changed = {name: value for name, value in own.items() if value is not None}
    return dataclasses.replace(context, sampling=dataclasses.replace(context.sampling, **changed))
