// Zero-fills a bias gradient for the pairs that no slice makes visible; the backward kernel writes
// the visible ones.

#ifndef JAX_MAGI_CUDA_ATTENTION_HIDDEN_PAIRS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_HIDDEN_PAIRS_CUH_

#include "cc/cuda/attention/term_gradients.h"
#include "cc/mask.h"

namespace jax_magi::cuda {

// Shared memory of the threads that cooperate on a query.
template <int kMaxRanges_>
struct HiddenShared {
  static constexpr int kMaxRanges = kMaxRanges_;
  Range ranges[kMaxRanges];  // The key ranges that the query sees.
  int num_ranges;
  uint32_t query;
};

// Writes zeros for those of eight keys whose bit in `shown` is not set.
__device__ __forceinline__ void ZeroOthers(uint16_t* keys, unsigned shown) {
  if (shown == 0) {
    *reinterpret_cast<uint4*>(keys) = make_uint4(0, 0, 0, 0);
    return;
  }
  for (int i = 0; i < 8; ++i) {
    if (!(shown >> i & 1)) keys[i] = 0;
  }
}

// Whether there is a single slice, and it hides nothing.
__device__ __forceinline__ bool IsNothingHidden(const HiddenPairs& pairs) {
  if (pairs.num_slices != 1 || pairs.slice_stride != 0) return false;
  const Slice slice = ClampSlice(pairs.slices[0], pairs.q_len, pairs.k_len);
  return slice.q_begin == 0 && slice.q_end == pairs.q_len && slice.k_begin == 0 &&
         slice.k_end == pairs.k_len && slice.lo <= 1 - pairs.q_len && slice.hi >= pairs.k_len - 1;
}

// The default: no shared memory holds zeros that could be copied.
struct NoZeros {
  static constexpr bool kCanCopy = false;
};

// Handles query `index` of the batch, for all heads. `sync` is a barrier of the threads.
template <int kThreads, typename Shared, typename Sync, typename Zeros = NoZeros>
__device__ __forceinline__ void ZeroHidden(const HiddenPairs& pairs, uint32_t index, int thread,
                                           Shared& shared, Sync sync, Zeros zeros = {}) {
  const int q_len = pairs.q_len, k_len = pairs.k_len;
  const int query = index % q_len;
  const int64_t batch = index / q_len;
  const Slice* slices = pairs.slices + batch * pairs.slice_stride;
  const auto visible = [&](int i) {
    const Slice slice = ClampSlice(slices[i], q_len, k_len);
    const bool has_query = slice.q_begin <= query && query < slice.q_end;
    return has_query ? VisibleKeys(slice, query) : Range{0, 0};
  };
  if (thread == 0) shared.num_ranges = 0;
  sync();
  for (int i = thread; i < pairs.num_slices; i += kThreads) {
    const Range keys = visible(i);
    if (keys.begin >= keys.end) continue;
    const int place = atomicAdd(&shared.num_ranges, 1);
    if (place < Shared::kMaxRanges) shared.ranges[place] = keys;
  }
  sync();
  if constexpr (Zeros::kCanCopy) {
    if (shared.num_ranges <= 1) {
      const Range keys = shared.num_ranges == 1 ? shared.ranges[0] : Range{k_len, k_len};
      const int before = keys.begin / 8 * 8, after = (keys.end + 7) / 8 * 8;
      for (int head = thread; head < pairs.num_heads; head += kThreads) {
        uint16_t* row = pairs.dbias + ((batch * pairs.num_heads + head) * q_len + query) * k_len;
        zeros.CopyTo(row, before);
        zeros.CopyTo(row + after, k_len - after);
        for (int i = before; i < keys.begin; ++i) row[i] = 0;
        for (int i = keys.end; i < after; ++i) row[i] = 0;
      }
      Zeros::Commit();
      return;
    }
  }
  // With more ranges than fit, the slices are examined again for each group of keys.
  const bool has_ranges = shared.num_ranges <= Shared::kMaxRanges;
  const int num_looks = has_ranges ? shared.num_ranges : pairs.num_slices;
  // The bits of the eight keys from `key` on that are visible.
  const auto shown_from = [&](int key) {
    unsigned shown = 0;
    for (int i = 0; i < num_looks; ++i) {
      const Range keys = has_ranges ? shared.ranges[i] : visible(i);
      const int begin = Clamp(keys.begin - key, 0, 8), end = Clamp(keys.end - key, 0, 8);
      if (begin < end) shown |= (1u << end) - (1u << begin);
    }
    return shown;
  };
  constexpr unsigned kAll = 0xff;
  // Writes long runs of one head before the next head, which memory handles faster.
  constexpr int kPieces = 8, kStep = 8 * kThreads;
  for (int first = 8 * thread; first < k_len; first += kPieces * kStep) {
    unsigned shown[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int key = first + i * kStep;
      shown[i] = key < k_len ? shown_from(key) : kAll;
    }
    uint16_t* row = pairs.dbias + (batch * pairs.num_heads * q_len + query) * k_len + first;
    for (int head = 0; head < pairs.num_heads; ++head, row += int64_t{q_len} * k_len) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (shown[i] != kAll) ZeroOthers(row + i * kStep, shown[i]);
      }
    }
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_HIDDEN_PAIRS_CUH_
