"""Tensor parallelism for Hugging Face's GPT-2: each rank computes some heads and some of the feed-forward's columns.

    with lazy_init():
        model = GPT2LMHeadModel(config)
        split_layers(model, group.tp_process_group())     # no rank keeps more than its part
    model = GeminiDDP(model, process_group=group)

Shoeybi et al., Megatron-LM (2019): the first product of a block is split by columns, the second by rows, so that ranks
meet once in each block's forward, where its output is summed, and once in its backward, where the gradient of its
input is. Embeddings, norms, the output layer and the residual stream are the same on all ranks, and so is the loss:
the ranks of a group take the same batch.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from mindspeed_mem.gemini import OptionError
from mindspeed_mem.gemini.layer_parallel import GradientSummed, Summed


def problems(tp_degree: int, sizes: Iterable[tuple[str, int]]) -> list[str]:
    """What is wrong with `tp_degree` ranks for a model: it divides each of `sizes`, (what it counts, number)."""
    sizes = list(dict.fromkeys(sizes))
    most = math.gcd(*(number for _, number in sizes))
    allowed = [degree for degree in range(1, most + 1) if most % degree == 0]
    if tp_degree in allowed:
        return []
    uneven = [f"{number} {name}" for name, number in sizes if tp_degree < 1 or number % tp_degree]
    return [f"tp_degree {tp_degree} does not divide {', '.join(uneven)}: it is one of {', '.join(map(str, allowed))}"]


def split_layers(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Leave in each attention and each feed-forward layer of `model` what is for this rank of `group`.

    The model is the same on all ranks, whole, in real memory or inside `lazy_init`. Parts carry the attribute
    `tensor_model_parallel`, for the norm of gradients. Raises OptionError with all that is wrong, before anything is
    changed.
    """
    modules = list(model.modules())
    attentions = [one for one in modules if hasattr(one, "c_attn")]
    feed_forwards = [one for one in modules if hasattr(one, "c_fc")]
    wrong = [] if attentions and feed_forwards else [f"there are no layers of GPT-2 in {type(model).__name__}"]
    if any(isinstance(one, (ColumnParallel, RowParallel)) for one in modules):
        wrong.append("the layers are split already")
    elif not wrong:
        heads = [("attention heads", one.num_heads) for one in attentions]
        columns = [("feed-forward columns", one.c_fc.weight.shape[1]) for one in feed_forwards]
        wrong = problems(group.size(), heads + columns)
    if any(hasattr(one, "q_attn") for one in attentions):
        wrong.append("cross attention cannot be split (config.add_cross_attention)")
    if group.size() > 1 and any(one.p for one in modules if isinstance(one, torch.nn.Dropout)):
        wrong.append("dropout is 0, in attn_pdrop, resid_pdrop and embd_pdrop: ranks would draw masks of their own")
    if wrong:
        raise OptionError("; ".join(wrong))
    if group.size() == 1:
        return
    for attention in attentions:
        attention.c_attn = ColumnParallel(attention.c_attn, group, matrices=3)  # queries, keys, values
        attention.c_proj = RowParallel(attention.c_proj, group)
        attention.num_heads //= group.size()
        attention.embed_dim = attention.split_size = attention.num_heads * attention.head_dim
    for feed_forward in feed_forwards:
        feed_forward.c_fc = ColumnParallel(feed_forward.c_fc, group)
        feed_forward.c_proj = RowParallel(feed_forward.c_proj, group)


class ColumnParallel(torch.nn.Module):
    """This rank's columns of a Conv1D: [..., in], the same on all ranks -> [..., out / ranks].

    whole: has weight [in, out] and bias [out]. matrices: how many lie side by side in it, each of which is split.
    """

    def __init__(self, whole: torch.nn.Module, group: dist.ProcessGroup, matrices: int = 1) -> None:
        super().__init__()
        self.weight = _part(whole.weight, 1, group, matrices)
        self.bias = _part(whole.bias, 0, group, matrices)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = GradientSummed.apply(x, self.group)
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class RowParallel(torch.nn.Module):
    """This rank's rows of a Conv1D: [..., in / ranks] -> [..., out], the same on all ranks.

    whole: has weight [in, out] and bias [out]; the bias is added once, to the sum over the ranks.
    """

    def __init__(self, whole: torch.nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias = _part(whole.weight, 0, group), whole.bias
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = Summed.apply(x.reshape(-1, x.shape[-1]) @ self.weight, self.group)
        return (product + self.bias).view(*x.shape[:-1], -1)


def _part(whole: torch.nn.Parameter, dim: int, group: dist.ProcessGroup, matrices: int = 1) -> torch.nn.Parameter:
    """This rank's part along `dim`, in memory of its own: of each of so many matrices that lie side by side there."""
    parts = whole.detach().unflatten(dim, (matrices, group.size(), -1)).select(dim + 1, group.rank())
    own = parts.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)
    part = torch.nn.Parameter(own, requires_grad=whole.requires_grad)
    part.tensor_model_parallel = True
    return part
