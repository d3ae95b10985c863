"""--survive-oom through the adaptor: on, computing the same, and off again without a trace."""

import json

from tests.patches.test_adaptor import TRAIN, python

CODE = """
    import argparse, json, sys
    import mindspeed_mem.megatron_adaptor as mem
    from mindspeed_mem.activation import engine
    from mindspeed_mem.patching import REGISTRY
    exec(sys.argv.pop(1))
    ours = lambda: sorted({p.declared_by.rpartition(".")[2] for p in REGISTRY.patches
                           if p.status == "applied" and "survive" in p.declared_by})
    plain = train(2)
    parser = mem.add_arguments(argparse.ArgumentParser())
    mem.configure(parser.parse_args(["--device", "cpu", "--survive-oom", "--swap-host-memory-gib", "1"]))
    first = engine.current()
    survives = first.survival is not None
    found = [survives, first.mover.slabs.limit_bytes, ours(), train(2) == plain, REGISTRY.verify_once()]
    first.survival.policy.ends(lacked=True)  # as after a first lack of memory
    found += [train(2) == plain, first.survival.guarded_steps]
    mem.configure({"device": "cpu", "survive_oom": True, "swap_host_memory_gib": 1})
    found.append(engine.current() is first)
    mem.configure({"device": "cpu"})
    found += [engine.current() is None, ours(), train(2) == plain]
    print(json.dumps(found))
"""


def test_it_is_switched_on_and_off():
    out, _ = python(CODE, TRAIN, "--device", "cpu")
    survives, limit, on, same, lost, same_guarded, guarded, kept, gone, off, same_after = json.loads(out)
    assert survives and limit == 2**30
    assert on == ["survive_gradients", "survive_optimizer", "survive_passes"] and lost == []
    assert same and same_guarded and same_after
    assert guarded == 2  # one call of the schedule for each step
    assert kept and gone and off == []
