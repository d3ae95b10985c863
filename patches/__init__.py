"""The only place where symbols of Megatron, MindSpeed and torch are replaced: one file per target module or concern."""

if __name__ != "mindspeed_mem.patches":
    raise ImportError("import mindspeed_mem.patches: under two names every patch would be applied twice")
