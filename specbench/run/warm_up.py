"""Runs before and between the timed prompts: warm-up, calibration, probes of costs, and a trial before compiling."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from specbench.config.components import CALIBRATION_TOKENS, EVERY_GAMMA, SHORT, Components, new_tokens
from specbench.data.prompts import Request
from specbench.decoding import processes
from specbench.decoding.encoder_input import EncoderInput
from specbench.decoding.noise import prompt_key
from specbench.decoding.state import Job
from specbench.decoding.timer import decoding_seconds
from specbench.errors import ConfigError, causes
from specbench.policies.gamma.fixed import WatchedGamma
from specbench.run.batching import Batch
from specbench.run.decoder import Session
from specbench.run.machine_watch import BandwidthProbe
from specbench.stats.costs import pace_of
from specbench.stats.records import DecodeResult

log = logging.getLogger(__name__)
Prefixed = tuple[Request, Sequence[int]]  # a request, and the text that was decoded for it so far
WIDTHS, FEW = EVERY_GAMMA, 8  # other gammas that a warm-up without programs meets, at most; behind so many tokens
