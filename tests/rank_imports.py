"""Imported by the servers that ranks are forked from (`tests.worlds.Server`), which keep what they have imported."""

import os
import warnings
from pathlib import Path

from tests.worlds import prepare

os.environ["OMP_NUM_THREADS"] = "1"  # a thread pool would not be there after forking
if device := os.environ.pop("RANKS_DEVICE", None):
    from tests.accelerator import stand_in

    stand_in.start(device, Path(os.environ.pop("RANKS_LIBRARY")))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    prepare(device)
