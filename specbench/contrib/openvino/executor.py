"""Models run by OpenVINO's CPU runtime, which lays weights out and fuses operations when a model is loaded."""

import copy
import importlib.util
from typing import Any

import torch
from torch import nn

from specbench.component import Selections
from specbench.contrib.openvino.graph import Converted, convert_module
from specbench.contrib.openvino.program import OpenVINOProgram
from specbench.decoding.executor import Executor, Module
from specbench.errors import ConfigError, installing

# Bytes. Weights below this stay in one core's caches, and a second thread costs more than it reads.
SMALLEST_BYTES = 16e6


class OpenVINOExecutor(Executor):
    """Runs models on a CPU in OpenVINO, and everything else in PyTorch's eager mode. The stock module stays as it is,
    so that weights exist twice."""

    runs_encoders = False
    runs_recurrent = False

    def __init__(self) -> None:
        self.compiled_bytes = 0

    @classmethod
    def refuses(cls, settings: Any, run: Selections) -> str | None:
        if run.device != "cpu":
            return f"on device={run.device}: it runs on CPUs, use executor=cudagraph or device=cpu"
        if importlib.util.find_spec("openvino") is None:
            return f"without OpenVINO: {installing('openvino')}, or choose executor=auto"
        return None

    def load(self, module: Module, exact: bool = True) -> Module:
        """A view of the module whose forward runs in OpenVINO. Raises ConfigError if the module cannot be converted, or
        computes something else afterwards."""
        program = vars(module).get("forward")
        if isinstance(program, OpenVINOProgram) and program.module is module:  # a drafter that is the target
            return module
        stock, view = copy.copy(module), copy.copy(module)
        vars(stock).pop("forward", None)  # of the target, if these are its first layers
        with torch.no_grad():
            found = convert_module(stock, self._threads(stock))
            program = OpenVINOProgram(view, found)
            self._check(program, found)
        vars(view)["forward"] = program
        self.compiled_bytes += found.weight_bytes
        return view

    @staticmethod
    def _threads(module: nn.Module) -> int:
        small = sum(p.nbytes for p in module.parameters()) < SMALLEST_BYTES
        return 1 if small else torch.get_num_threads()

    @staticmethod
    def _check(program: OpenVINOProgram, found: Converted) -> None:
        """Raises ConfigError unless the program's logits of some tokens are those of the stock module."""
        logits = program(**found.sample).logits.float()
        allowed = found.tolerance * float(found.logits.abs().max())
        error = float((logits - found.logits).abs().max())
        if not error <= allowed:
            raise ConfigError(
                f"executor=openvino is not possible with {type(program.module).__name__}: converted, its logits differ "
                f"by {error:.2g} from those of PyTorch, more than {allowed:.2g}; choose executor=auto"
            )

    def loaded(self) -> int:
        return self.compiled_bytes

    def share(self, loaded: int) -> None:
        self.compiled_bytes += loaded

    def held(self, weights: int, tied: int, device: torch.device, halves: bool) -> int:
        return 2 * weights

    def bytes(self) -> int:
        """Bytes of weights that OpenVINO holds beside the stock modules'."""
        return self.compiled_bytes
