"""Small plain models, plans for them, and training steps to compare."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SWAP = {"swap_config": {"swap": True, "smallest_bytes": 0, "layer_swap": [{"backward_prefetch": 2, "layers": True}]}}
SAVED = {
    "swap_config": {
        "swap": True,
        "smallest_bytes": 0,
        "layer_swap": [{"backward_prefetch": 1, "layers": True}],
        "activations": "both",
    }
}
WHOLE = {"recompute_config": {"recompute": True}}
PARTS = {"recompute_config": {"select_recompute": {"norm": True, "act": True, "fc2": True}}}
MIXED = {
    "swap_config": {
        "swap": True,
        "smallest_bytes": 0,
        "op_swap": [{"op_name": "fc1", "backward_prefetch": 3, "layers": True}],
    },
    "recompute_config": {"select_recompute": {"norm": True}},
}
PLANS = {"swap": SWAP, "saved": SAVED, "whole": WHOLE, "parts": PARTS, "mixed": MIXED}
TEXT = torch.arange(4 * 9).view(4, 9) * 7 % 31


class Block(nn.Module):
    def __init__(self, width, checkpointed=None):
        super().__init__()
        self.norm, self.fc1, self.act = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU()
        self.drop, self.fc2 = nn.Dropout(0.1), nn.Linear(4 * width, width)
        self.checkpointed = checkpointed

    def mlp(self, x):
        return self.fc2(self.drop(self.act(self.fc1(self.norm(x)))))

    def forward(self, x):
        if self.checkpointed is not None:
            return x + checkpoint(self.mlp, x, use_reentrant=self.checkpointed)
        return x + self.mlp(x)


class Net(nn.Module):
    """Embedding tied to the head, blocks, a norm; ``turns``: the blocks run so often."""

    def __init__(self, blocks=3, width=16, turns=1, checkpointed=None):
        super().__init__()
        self.embedding = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(Block(width, checkpointed) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 31, bias=False)
        self.head.weight = self.embedding.weight
        self.turns, self.fails_at = turns, None

    def forward(self, text):
        x = self.embedding(text)
        for _ in range(self.turns):
            for number, block in enumerate(self.blocks):
                if number == self.fails_at:
                    raise KeyError("half way")
                x = block(x)
        return self.head(self.norm(x))


def loss_of(model, text=TEXT):
    text = text.to(next(model.parameters()).device)
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def accumulated(model):
    """Two micro-batches, one after the other."""
    found = []
    for part in TEXT.split(2):
        loss = loss_of(model, part)
        loss.backward()
        found.append(loss)
    return found


def at_once(model):
    """Both forwards before the backward."""
    losses = [loss_of(model, part) for part in TEXT.split(2)]
    sum(losses).backward()
    return losses


def crossed(model):
    """Backwards in the order of the forwards, an evaluation in between."""
    losses = [loss_of(model, part) for part in TEXT.split(2)]
    losses[0].backward()
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(model))
    model.train()
    losses[1].backward()
    return losses


def broken(model):
    """A forward that raises, between a forward and its backward."""
    loss = loss_of(model)
    model.fails_at = 1
    try:
        loss_of(model)
    except KeyError:
        model.fails_at = None
    loss.backward()
    return [loss, *accumulated(model)]


def in_vain(model):
    """A forward that has no backward."""
    loss_of(model)
    return accumulated(model)


def twice(model):
    """Two backwards through one forward."""
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def of_inputs(model):
    """Gradients of the parameters' gradients."""
    loss = loss_of(model)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(grad.square().sum() for grad in grads)
    penalty.backward()
    return [loss, penalty]


def by_parts(model):
    """Blocks called without the model around them."""
    x = model.embedding(TEXT)
    for block in model.blocks:
        x = block(x)
    x.square().mean().backward()
    return [x]


STEPS = {f.__name__: f for f in (accumulated, at_once, crossed, broken, in_vain, twice, of_inputs, by_parts)}


def results(model, step, times=3):
    """Losses and gradients of some steps, each with an optimizer's step after it."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(times):
        optimizer.zero_grad()
        found += [loss.detach().clone() for loss in step(model)]
        found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        optimizer.step()
    return found


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))
