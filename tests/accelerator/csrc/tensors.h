// The device's tensors, as a piece of work sees them.
#pragma once

#include "memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

namespace accelerator {

using at::Tensor;

inline bool on_device(const Tensor& t) { return t.defined() && t.device().type() == device_type(); }

// ---- tensors without their storages: a piece of work holds no memory, as on a real device

struct Flat {
  char *low, *high;  // as the device's
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  char* data;  // as ours
};
inline Flat flat(const Tensor& t) {
  Flat f{nullptr, nullptr, t.sizes().vec(), t.strides().vec(), t.scalar_type(), nullptr};
  if (!t.numel()) return f;
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  const auto item = static_cast<int64_t>(t.element_size());
  TORCH_CHECK(static_cast<size_t>((t.storage_offset() + last + 1) * item) <= t.storage().nbytes(),
              "accelerator: a tensor is used whose storage was resized to ", t.storage().nbytes(), " bytes");
  f.low = static_cast<char*>(const_cast<void*>(t.storage().data())) + t.storage_offset() * item;
  f.high = f.low + (last + 1) * item;
  f.data = ours(f.low);
  return f;
}
inline Tensor on_host(const Flat& f) {
  static char nothing[64];
  return at::from_blob(f.data ? f.data : nothing, f.sizes, f.strides, at::TensorOptions().dtype(f.dtype));
}
// Work of `stream` on this memory, about to be submitted; under `submitting`.
inline void use(const Flat& f, bool writes, StreamThread* stream, const char* what) {
  if (!f.data) return;
  Block* block = allocator()->block_of(f.low);
  TORCH_CHECK(block, "accelerator: ", what, " uses memory that is freed");
  join(stream->clock, host_clock());
  block->uses.add({f.low, f.high, stream->index, stream->clock[stream->index] + 1, writes, what}, stream->clock);
}

}  // namespace accelerator
