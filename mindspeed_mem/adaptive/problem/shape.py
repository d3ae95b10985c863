"""The shape of a GPT as Megatron's options give it, how it is split, and the machine it is to run on."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

ELEMENT = 2  # bytes: bf16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder in bf16; names and meanings are Megatron's."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int = 50304
    swiglu: bool = False
    normalization: str = "LayerNorm"
    rope: bool = False
    bias: bool = True
    untied: bool = False
    flash: bool = True
    """Core attention keeps its output and a number per token and head, not the scores."""
    fused: bool = True
    """Bias and activation function are one operator, as by default."""
    cpu: bool = False
    """Bytes are those of torch's CPU kernels: norms, unfused attention and dropout keep other numbers there."""
    attention_dropout: bool = False
    hidden_dropout: bool = False
    context: int = 1
    """Context-parallel ranks, which split each sequence."""
    window: int = 0
    """Tokens that each one attends to, with itself; 0: all before it."""
    te: bool = False
    """TransformerEngine's layers: their norms are part of the linears after them."""
    fp8: bool = False
    """Of them linears keep what they are given, and copies of their weights, in fp8."""
    fp8_params: bool = False
    """These copies are the weights, which have no bf16 ones."""
    num_experts: int = 0
    """0: every layer has an MLP."""
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int = 0
    shared_expert_size: int = 0
    imbalance: float = 1.0
    """How many times as many tokens as on average the fullest rank's experts get."""
    with_experts: str = ""
    """For each layer 1 or 0; empty: all, if any."""
    kv_lora_rank: int = 0
    """0: no latent attention."""
    q_lora_rank: int = 0
    """0: queries are made by one linear."""
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    qk_layernorm: bool = False
    mtp_num_layers: int = 0
    """Layers of multi-token prediction, after the decoder's."""

    @property
    def tokens(self) -> int:
        """Of one micro-batch on one rank."""
        return self.seq_length * self.micro_batch_size // self.context

    @property
    def mask_element(self) -> int:
        """Bytes that dropout keeps for each number; on a CPU it keeps the factors themselves."""
        return ELEMENT if self.cpu else 1

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.kv_channels

    @property
    def key_width(self) -> int:
        return self.num_query_groups * self.kv_channels

    @property
    def gates(self) -> int:
        """Outputs of an MLP's first linear for each input of its second one."""
        return 2 if self.swiglu else 1

    @property
    def latent_query_width(self) -> int:
        return self.num_attention_heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer of the decoder, or of those after it, has experts: these are like the decoder's last."""
        which = self.with_experts or "1" * self.num_layers
        return bool(self.num_experts) and which[min(layer, self.num_layers - 1)] == "1"

    def parameters(self, split: Degrees, experts: bool = False) -> tuple[int, int]:
        """Of one layer on one rank: without its experts, which are split over other ranks, and those."""
        hidden, norm = self.hidden_size, 2 if self.normalization == "LayerNorm" else 1
        linear = 1 if self.bias else 0
        divided, whole = 0, 2 * hidden * norm
        if self.kv_lora_rank:
            narrow, of_values = self.kv_lora_rank, self.num_attention_heads * self.v_head_dim
            down = hidden * (narrow + self.qk_pos_emb_head_dim + self.q_lora_rank)
            whole += down * self.te + linear * hidden  # TransformerEngine's layers have all of these on each rank
            divided += down * (not self.te)
            divided += narrow * (self.num_attention_heads * self.qk_head_dim + of_values) + of_values * hidden
            divided += (self.q_lora_rank or hidden) * self.latent_query_width
            if self.qk_layernorm:
                whole += norm * (narrow + self.q_lora_rank)
        else:
            width = self.query_width + 2 * self.key_width
            divided += (hidden + linear) * width + self.query_width * hidden
            whole += linear * hidden
            whole += 2 * norm * self.kv_channels * self.qk_layernorm
        wide = self.shared_expert_size if experts else self.ffn_hidden_size
        divided += wide * hidden * (self.gates + 1) + linear * wide * self.gates
        whole += linear * hidden * bool(wide)
        routed = 0
        if experts:
            whole += hidden * self.num_experts
            each = self.moe_ffn_hidden_size * (hidden * (self.gates + 1) + linear * self.gates)
            routed = self.num_experts * (each // split.experts_split + linear * hidden) // split.expert
        return divided // split.tensor + whole, routed

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How the model is split over ranks."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    data: int = 1
    context: int = 1
    micro_batches: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    stage_layers: str = ""
    """Layers of each part, such as 3,5,5,3; empty: as many of each."""
    expert: int = 1
    """Ranks that experts are spread over,"""
    expert_tensor: int = 0
    """and ranks that split each of them; 0: as many as split other layers."""
    grad_bytes: int = 4
    """Of a gradient as it is added up and reduced,"""
    state_bytes: int = 12
    """of the optimizer's states of a parameter with its master copy,"""
    widened_bytes: int = 0
    """and of the copy of a gradient that the optimizer makes for its step alone: it works in 32 bits."""
    chunk_zero_stage: int = 0
    """What chunks split over data-parallel ranks: from 1 on states, from 2 gradients, from 3 parameters."""
    reduce_each: bool = False
    """Gradients are reduced after each micro-batch; else they are whole until the last one, if there are several."""
    on_device: float = 1.0
    """Of what chunks split, the share that rests on the device."""
    schedule: str = "1f1b"
    """``--pipeline-schedule``: 1f1b, zb or v."""
    cap: int | None = None
    """``--max-inflight-microbatches``."""
    split_backward: bool = False
    overlap: bool = True
    """Gradients are reduced during the last backward, parameters gathered during the first forward."""

    def parts(self, layers: int) -> list[range]:
        """The layers of each part in the model's order: the first of all stages, then the second of all."""
        parts = self.pipeline * self.virtual
        counts = (
            [int(count) for count in self.stage_layers.split(",")] if self.stage_layers else [layers // parts] * parts
        )
        ends = list(itertools.accumulate(counts))
        return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]

    @property
    def experts_split(self) -> int:
        return self.expert_tensor or self.tensor

    @property
    def groups(self) -> int:
        """Groups of ranks in which a rank has a communicator."""
        return sum(size > 1 for size in (self.tensor, self.pipeline, self.data, self.context, self.expert))

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.tensor * self.data * self.context // (self.expert * self.experts_split))

    @property
    def bytes_per_parameter(self) -> float:
        """bf16 parameter, gradient, master copy and Adam's states, of which ranks may split some."""
        return self.bytes_on(self.data * self.context)

    def bytes_on(self, ranks: int) -> float:
        """The same where so many data-parallel ranks hold the same parameter."""
        stage = self.chunk_zero_stage
        if not stage:
            return ELEMENT + self.grad_bytes + self.state_bytes / (ranks if self.distributed_optimizer else 1)
        if stage >= 2 and self.micro_batches > 1 and not self.reduce_each:
            return self.grad_bytes + dataclasses.replace(self, grad_bytes=0, reduce_each=True).bytes_on(ranks)
        sizes = {1: self.state_bytes, 2: self.grad_bytes, 3: ELEMENT}
        parts = [self.on_device * size / ranks if number <= stage else size for number, size in sizes.items()]
        return sum(parts)

    def widened_on(self, ranks: int) -> float:
        """`widened_bytes`, likewise."""
        return self.widened_bytes * self.on_device / (ranks if self.distributed_optimizer else 1)


@dataclass(frozen=True, kw_only=True)
class Network:
    """GB/s per rank that groups of ranks reach, as far away as a layout puts them."""

    context_gbps: float
    """Keys and values handed round."""
    expert_gbps: float
    """Tokens on their way to experts and back."""
    pipeline_gbps: float
    """Between pipeline stages."""
    data_gbps: float
    """Collectives of gradients and parameters,"""
    expert_data_gbps: float
    """and of those of experts."""
    latency_seconds: float = 0.0
    """Of each message: a collective of n ranks passes n - 1 of them on."""
    sends_overlap: bool = True
    """Virtual stages compute while they send and receive, as by Megatron's default; others never do."""
    slows: float = 0.2
    """Of the time of a collective beside computation, what that takes longer: NCCL's channels are multiprocessors, some
    24 of an H100's 132."""

    def beside(self, seconds: float, computing: float) -> float:
        """Seconds that computation gets longer by a collective that runs beside it."""
        return max(0.0, seconds - computing) + self.slows * min(seconds, computing)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a rank can do. All speeds are those reached, not those of the data sheet."""

    memory_bytes: int
    host_bytes: int | None = None
    link_gbps: float = 50.0
    """Host copies, GB/s each way, with all ranks of the host copying during compute."""
    tflops: float = 400.0
    """Matrix products in bf16."""
    memory_gbps: float = 2500.0
    """Device memory, GB/s."""
    tensor_gbps: float = 200.0
    """Collectives between tensor-parallel ranks, GB/s per rank."""
    network: Network | None = None
    """How other ranks reach each other; None: context-parallel ranks and experts as tensor-parallel ones, and what
    travels between others hides."""
    operand_share: float = 0.0
    """Of the time that what products read and write takes, how much they do not hide: small ones are slower."""
