"""The shape of a GPT as Megatron's options give it, how it is split, and the machine it is to run on."""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT = 2  # bytes: bf16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A dense decoder in bf16; names and meanings are Megatron's."""

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
    def fc1_width(self) -> int:
        return self.ffn_hidden_size * (2 if self.swiglu else 1)

    @property
    def layer_parameters(self) -> int:
        """Of one layer, over all tensor-parallel ranks."""
        width = self.query_width + 2 * self.key_width
        matrices = self.hidden_size * (width + self.query_width + self.fc1_width + self.ffn_hidden_size)
        biases = width + 2 * self.hidden_size + self.fc1_width if self.bias else 0
        norms = 2 * self.hidden_size * (2 if self.normalization == "LayerNorm" else 1)
        return matrices + biases + norms

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

    @property
    def groups(self) -> int:
        """Groups of ranks in which a rank has a communicator."""
        return sum(size > 1 for size in (self.tensor, self.pipeline, self.data, self.context))

    @property
    def bytes_per_parameter(self) -> float:
        """bf16 parameter, fp32 gradient; fp32 master copy and Adam's two states, which may be split over data-parallel
        (and context-parallel) ranks."""
        return 6 + 12 / (self.data * self.context if self.distributed_optimizer else 1)


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
