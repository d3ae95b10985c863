"""Imported by the server that ranks are forked from (`tests.worlds`), which keeps what it has imported."""

import os
import warnings

from tests.worlds import prepare

os.environ["OMP_NUM_THREADS"] = "1"  # a thread pool would not be there after forking
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    prepare()
