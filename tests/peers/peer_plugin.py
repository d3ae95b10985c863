"""For pytest on another project's tests (`-p peer_plugin`): the CPU, and the features that $PEER_FLAGS switches on."""

import os
import shlex
import sys
from types import ModuleType

_given, sys.argv = sys.argv, [sys.argv[0], *shlex.split(os.environ["PEER_FLAGS"])]
import mindspeed_mem.megatron_adaptor as mem  # noqa: E402 (it reads sys.argv)

sys.argv = _given
mem.configure({})

# Megatron-LM's conftest would download data that none of the listed tests reads.
_name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
_nothing = ModuleType(_name)
_nothing.download_and_extract_asset = lambda **where: None
sys.modules[_name] = _nothing
