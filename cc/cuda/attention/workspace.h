// The layout of the workspace: one description gives its size when a call is traced, and the
// addresses of its pieces when the call runs.

#ifndef JAX_MAGI_CUDA_ATTENTION_WORKSPACE_H_
#define JAX_MAGI_CUDA_ATTENTION_WORKSPACE_H_

#include "cc/cuda/attention/backward_finish.h"
#include "cc/cuda/attention/backward_prepare.h"
#include "cc/cuda/attention/dq_order.h"
#include "cc/cuda/attention/key_parts.h"
#include "cc/cuda/attention/term_gradients.h"

namespace jax_magi::cuda {

// Allocates consecutive pieces of memory. Without memory, it only counts bytes.
class Pieces {
 public:
  explicit Pieces(void* memory) : memory_(static_cast<char*>(memory)) {}

  // Two sectors of memory, so that no two pieces share a sector.
  static constexpr int64_t kAlignment = 64;

  template <typename T>
  T* Take(int64_t count, int64_t alignment = kAlignment) {
    static_assert(alignof(T) <= kAlignment, "a piece begins at a multiple of it");
    num_bytes_ = (num_bytes_ + alignment - 1) / alignment * alignment;
    T* piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + num_bytes_);
    num_bytes_ += count * static_cast<int64_t>(sizeof(T));
    return piece;
  }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  char* memory_;
  int64_t num_bytes_ = 0;
};

struct ForwardWorkspace {
  WorkCounter* counter;
  PartsParams parts;  // Their counters follow `counter` and are reset with it.
  int64_t num_bytes;
};
inline ForwardWorkspace ForwardWorkspaceOf(const AttentionShape& shape, const Tiling& tiling,
                                           int head_dim, int value_dim, void* memory) {
  Pieces pieces(memory);
  ForwardWorkspace workspace{};
  workspace.counter = pieces.Take<WorkCounter>(1);
  if (MayCutKeys(shape, tiling)) {
    // Directly after `counter`.
    workspace.parts.counters = pieces.Take<int32_t>(kMaxPartCounters, sizeof(WorkCounter));
    workspace.parts.parts = pieces.Take<float4>(int64_t{kMaxParts} * MaxConsumers(head_dim) *
                                                kPartThreads * PartWords(value_dim));
  }
  workspace.num_bytes = pieces.num_bytes();
  return workspace;
}

struct BackwardWorkspace {
  DqSum sum;  // The caller's, if it is summed over several calls.
  DqOrder order;
  ZeroBytes zeros;  // The sum, unless it is the caller's, and the counters of `order`.
  DkvParts parts;
  QueryStatistic* statistics;
  WorkCounter* counter;
  float* term_sums;  // See TermGradients.
  int64_t num_bytes;
};
inline BackwardWorkspace BackwardWorkspaceOf(const AttentionCall& call, const Tiling& tiling,
                                             int num_dims, int num_parts, void* memory) {
  const AttentionShape& shape = call.shape;
  Pieces pieces(memory);
  BackwardWorkspace workspace{};
  workspace.zeros.data = memory;
  const int64_t num_heads = shape.batch * shape.num_q_heads;
  const int64_t sum_words = call.sums_dq ? 0 : num_heads * DqSumWords(shape, num_dims);
  workspace.sum = {pieces.Take<float>(sum_words), num_dims};
  DqOrder& order = workspace.order;
  order = DqOrderOf(shape, tiling, num_dims, call.deterministic);
  if (call.deterministic) order.done = pieces.Take<int32_t>(NumDqDone(order));
  workspace.zeros.num_bytes = pieces.num_bytes();
  if (call.deterministic) order.turns = pieces.Take<int32_t>(NumDqTurns(shape, order, tiling));
  workspace.parts = {pieces.Take<float>(DkvPartsWords(shape, num_parts)), num_parts};
  workspace.statistics = pieces.Take<QueryStatistic>(NumStatistics(shape));
  workspace.counter = pieces.Take<WorkCounter>(1);
  workspace.term_sums = pieces.Take<float>(TermGradientsWords(call));
  workspace.num_bytes = pieces.num_bytes();
  return workspace;
}

// The same call with dk and dv directed to the parts, if there are several.
inline BackwardArgs WithParts(BackwardArgs args, const DkvParts& parts) {
  if (parts.num_parts == 1) return args;
  const AttentionShape& shape = args.shape;
  args.dk = parts.data;
  args.dv = parts.data +
            parts.num_parts * shape.batch * shape.k_len * shape.num_kv_heads * shape.head_dim;
  args.dkv_dtype = DType::kF32;
  return args;
}

// Whether `workspace` fits in the memory of a launch.
template <typename Workspace>
Status CheckFits(const Workspace& workspace, int64_t num_bytes) {
  if (workspace.num_bytes <= num_bytes) return {};
  return {"the workspace is too small", __FILE__, __LINE__};
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_WORKSPACE_H_
