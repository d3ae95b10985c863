"""megatron.training.arguments: Megatron-LM's parser knows our flags, and what it made of them is checked again.

Why here: ``add_megatron_arguments`` builds the parser and ``validate_args`` is where the arguments become final
(derived values, checkpoint arguments, defaults); parsing and checking stay Megatron's. Not in the megatron-core wheel.
"""

from __future__ import annotations

from mindspeed_mem import features
from mindspeed_mem.patching import around

when_validated = features.check
"""Called with the final namespace; the adaptor puts its own function here."""


@around("megatron.training.arguments:add_megatron_arguments")
def add_megatron_arguments(original, parser):
    return features.add_arguments(original(parser))


@around("megatron.training.arguments:validate_args")
def validate_args(original, args, *rest, **kwargs):
    validated = original(args, *rest, **kwargs)
    when_validated(validated)
    return validated
