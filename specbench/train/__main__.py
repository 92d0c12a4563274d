"""`python -m specbench.train method=medusa`: trains heads, look-ahead embeddings, exits and drafters for a target."""

import os
import shlex
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from specbench.config.compose import conf_dir
from specbench.config.mistakes import explain
from specbench.errors import ConfigError, comes_from, stop, visible


def one_training(config: DictConfig) -> float:
    """Trains, and prints the result. Returns the mean alpha, for Hydra's optimisers. Raises ConfigError."""
    from specbench.train.trainer import train

    out_dir = Path(HydraConfig.get().runtime.output_dir)
    metrics = train(config, out_dir)
    alphas, training = metrics["alpha_by_guess"], metrics["training"]
    read = training["tokens"] * training["epochs"]
    title = f"{metrics['method']}, loss {metrics['loss']}: {read:,.0f} tokens in {training['seconds']:.0f} s"
    table = Table(title=title, title_justify="left")
    for heading in ("guess", "alpha on held-out text", "agreement of argmaxes"):
        table.add_column(heading, justify="right")
    for number, (alpha, agreement) in enumerate(zip(alphas, metrics["agreement_by_guess"], strict=True), 1):
        table.add_row(str(number), f"{alpha:.3f}", f"{agreement:.3f}")
    Console().print(table)
    print(visible(f"written to {out_dir}; use it with: python -m specbench {shlex.join(metrics['use'])}"))
    return float(sum(alphas) / len(alphas))


training_job = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")(one_training)


def main() -> None:
    """Runs Hydra; a mistake of the user's becomes one sentence and exit code 2."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    sys.argv[0] = "specbench.train"
    try:
        training_job()
    except ConfigError as error:
        stop(str(error), 2)
    except KeyboardInterrupt:
        stop("interrupted", 130)
    except Exception as error:
        if comes_from(one_training, error):
            raise
        stop(explain(error, sys.argv[1:], lambda words: ()), 2)


if __name__ == "__main__":
    main()
