// The part of a mask that belongs to a row of scores, in the same vectors as the row.

#ifndef JAX_MAGI_CUDA_SOFTMAX_ROW_MASK_CUH_
#define JAX_MAGI_CUDA_SOFTMAX_ROW_MASK_CUH_

#include "cc/cuda/softmax/row_vectors.cuh"
#include "cc/softmax.h"

namespace jax_magi::cuda {

// Mask elements are uint8_t (a boolean), the element type of x, or float; NoMask means no mask.
struct NoMask {};
template <typename Mask>
constexpr bool kHasMask = !std::is_same_v<Mask, NoMask>;

// Whether a row of the mask takes no more registers than a row of x.
template <typename Element, typename Mask>
constexpr bool kIsMaskShort = !kHasMask<Mask> || sizeof(Mask) <= sizeof(Element);

// The position of a thread's row.
struct RowPlace {
  bool is_active;  // Otherwise the thread only takes part in reductions.
  uint32_t row;    // Index in [batch, heads, q_len].
  uint32_t batch, head, q;
};

// A row of the mask, as elements of type Mask.
template <typename Mask>
struct MaskRow {
  const Mask* data;
  bool is_broadcast;  // One element applies to all columns.
  bool is_aligned;    // The mask of each vector of x is one aligned piece.
};

// kIsWhole: the mask has an element for each column, and rows of x and of the mask begin at
// multiples of kSize.
template <typename Mask, bool kIsWhole, int kSize>
__device__ __forceinline__ MaskRow<Mask> GetMaskRow(const SoftmaxMask& mask, const RowPlace& place,
                                                    const Row<kSize>& row) {
  const int64_t begin =
      place.batch * mask.batch_stride + place.head * mask.head_stride + place.q * mask.row_stride;
  const bool is_broadcast = !kIsWhole && mask.column_stride == 0;
  return {static_cast<const Mask*>(mask.data) + begin, is_broadcast,
          kIsWhole || (!is_broadcast && (begin - row.shift) % kSize == 0)};
}

// Loads the mask of vectors first, first + kThreads, ...
template <typename Mask, int kThreads, int kSize, int kVectors, int kWords>
__device__ __forceinline__ void LoadMask(const MaskRow<Mask>& mask, const Row<kSize>& row,
                                         int first, uint32_t (&words)[kVectors][kWords]) {
  static_assert(kWords * 4 == kSize * sizeof(Mask));
  const Range whole = mask.is_aligned ? Intersect(row.touched, row.inside) : Range{0, 0};
  const Range loaded = {whole.begin, Max(whole.begin, whole.end)};
  const Mask* own = mask.data + row.Column(first);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[i][w] = 0;
    if (Contains(loaded, first + i * kThreads)) {
      LoadWords<Caching::kPlain>(own + i * kThreads * kSize, words[i]);
    }
  }
  if (mask.is_aligned && row.IsAligned()) return;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = first + i * kThreads;
    if (Contains(loaded, v) || !Contains(row.touched, v)) continue;
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      const int column = row.Column(v) + e;
      if (Contains(row.visible, column)) {
        PutElement(mask.data[mask.is_broadcast ? 0 : column], e, words[i]);
      }
    }
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_SOFTMAX_ROW_MASK_CUH_
