"""The operators of a layer of each kind in forward order: whose backward reads what one produces, and what its second
run starts from. Those of a dense layer are in `plan.operators`; what is not listed there differs as said here."""

from __future__ import annotations

from mindspeed_mem.adaptive.problem.shape import Shape
from mindspeed_mem.plan import operators as op
from mindspeed_mem.plan.operators import Operator

KEPT = (op.ROUTER,)
"""Those with too little to decide about."""
SENT = (op.DISPATCH,)
"""Those that hold what other ranks sent: not made again."""
_AFTER_LATENT = (
    Operator(op.PROJ),
    Operator(
        op.ATTENTION_ADD,
        used_by=(op.ATTENTION_ADD, op.MLP_NORM),
        starts_from=(op.INPUT, op.ATTENTION),
        with_it=(op.PROJ,),
    ),
)
_EXPERTS = (
    Operator(op.ROUTER, used_by=(op.ROUTER,)),
    Operator(op.DISPATCH, used_by=(op.EXPERT_FC1, op.EXPERT_ACTIVATION)),
    Operator(op.EXPERT_FC1, used_by=(op.EXPERT_ACTIVATION,), starts_from=(op.DISPATCH,)),
    Operator(op.EXPERT_ACTIVATION, used_by=(op.EXPERT_ACTIVATION,), starts_from=(op.EXPERT_FC1,)),
    Operator(op.ROUTED),
)
_SHARED = (
    Operator(op.SHARED_FC1, used_by=(op.SHARED_ACTIVATION,), starts_from=(op.MLP_NORM,)),
    Operator(op.SHARED_ACTIVATION, used_by=(op.SHARED_ACTIVATION,), starts_from=(op.SHARED_FC1,)),
    Operator(op.SHARED_FC2),
)


def operators(shape: Shape, experts: bool) -> tuple[Operator, ...]:
    """Of one layer; `experts`: one that has some."""
    found: list[Operator] = []
    for one in op.DENSE:
        if one.path == op.INPUT_NORM and shape.kv_lora_rank:  # what runs inside attention is one with it
            found += [one._replace(used_by=(op.INPUT_NORM, op.ATTENTION), fused_into=())]
        elif one.path == op.ATTENTION and shape.kv_lora_rank:
            found += [one._replace(used_by=(op.ATTENTION,), starts_from=(op.INPUT_NORM,)), *_AFTER_LATENT]
        elif shape.kv_lora_rank and (op.within(one.path, op.ATTENTION) or one.path == op.ATTENTION_ADD):
            continue
        elif shape.flash and op.within(one.path, op.CORE):
            continue
        elif one.path == op.QKV and shape.qk_layernorm:
            after = (op.CORE,) * (not shape.rope)
            found += [
                one,
                *(Operator(name, used_by=(name, *after), starts_from=(op.QKV,)) for name in (op.Q_NORM, op.K_NORM)),
            ]
        elif one.path == op.ROTARY and shape.qk_layernorm:
            found.append(one._replace(with_it=(*one.with_it, op.Q_NORM, op.K_NORM)))
        elif one.path == op.CORE and shape.qk_layernorm and not shape.rope:
            found.append(one._replace(starts_from=(op.QKV, op.Q_NORM, op.K_NORM)))
        elif one.path == op.ACTIVATION and shape.fused and not experts:  # its own backward reads what it was given
            found.append(one._replace(used_by=(op.FC2,)))
        elif one.path == op.MLP_NORM and experts:
            users = (op.MLP_NORM, op.ROUTER, *(op.SHARED_FC1,) * bool(shape.shared_expert_size))
            found += [one._replace(used_by=users, fused_into=())]
        elif one.path == op.MLP and experts:
            found += [one, *_SHARED * bool(shape.shared_expert_size), *_EXPERTS]
        elif experts and op.within(one.path, op.MLP):
            continue
        else:
            found.append(one)
    return tuple(_fused(found)) if shape.te else tuple(found)


def _fused(some: list[Operator]) -> list[Operator]:
    """Where norms are part of the linears after them: these start from what the norms do."""
    norms = {one.fused_into[0]: one for one in some if one.fused_into and one.path in (op.INPUT_NORM, op.MLP_NORM)}
    gone = {one.path for one in norms.values()}
    found = []
    for one in some:
        if one.path in norms:
            one = one._replace(used_by=(one.path, *one.used_by), starts_from=norms[one.path].starts_from)
        if one.path not in gone:
            users = tuple(_into(norms, user) for user in one.used_by)
            found.append(one._replace(used_by=tuple(dict.fromkeys(users))))
    return found


def _into(norms: dict[str, Operator], name: str) -> str:
    return next((linear for linear, norm in norms.items() if norm.path == name), name)
