// The softmax kernels of one element type, JAX_MAGI_VARIANT.

#include <algorithm>
#include <limits>

#include "cc/cuda/launch.h"
#include "cc/cuda/softmax/softmax.h"
#include "cc/cuda/softmax/softmax_backward.cuh"
#include "cc/cuda/softmax/softmax_forward.cuh"

namespace jax_magi::cuda {
namespace {

constexpr int kLongThreads = 512;

template <DType kDType>
using ElementOf =
    std::conditional_t<kDType == DType::kF32, float,
                       std::conditional_t<kDType == DType::kBF16, __nv_bfloat16, __half>>;

RowsParams GetRowsParams(const SoftmaxShape& shape) {
  const Slice band = shape.band();
  // Whether some row sees fewer than all columns.
  const bool is_banded = band.lo > -shape.q_len + 1 || band.hi < shape.k_len - 1;
  return {static_cast<uint32_t>(shape.num_rows()),
          RowDivisor(static_cast<uint32_t>(shape.q_len)),
          static_cast<int>(shape.k_len),
          shape.num_rows() * shape.k_len,
          band,
          is_banded};
}

// The maximum number of vectors that cover this many elements at any alignment, as a whole row or
// as a part of one.
template <typename Element>
int64_t MaxVectors(int64_t length, bool is_row) {
  constexpr int kSize = kVectorSize<Element>;
  return is_row && length % kSize == 0 ? length / kSize : (length + 2 * kSize - 2) / kSize;
}

// The maximum number of vectors that the threads of a row hold: the visible ones, but at least half
// of the row, so that each thread has few other vectors to fill with zeros. With a mask, all
// vectors.
template <typename Element>
int64_t MaxVectors(const RowsParams& rows, bool has_mask) {
  const int64_t all = MaxVectors<Element>(rows.k_len, /*is_row=*/true);
  if (has_mask) return all;
  const int64_t num_visible = int64_t{rows.band.hi} - rows.band.lo + 1;
  return std::min(all, std::max(all / 2, MaxVectors<Element>(num_visible, /*is_row=*/false)));
}

template <typename Params>
Status Launch(void (*kernel)(Params), const Params& params, int threads_per_row,
              cudaStream_t stream) {
  const uint32_t rows_per_block = RowsPerBlock(threads_per_row);
  const uint32_t num_blocks = (params.rows.num_rows - 1) / rows_per_block + 1;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      LaunchKernel(kernel, num_blocks, BlockThreads(threads_per_row), stream, params));
  return {};
}

// How a row is distributed: the number of threads, and of vectors per thread.
template <int kThreads_, int kVectors_>
struct Spread {
  static constexpr int kThreads = kThreads_, kVectors = kVectors_;
};

template <typename... kSpreads>
struct SpreadList {};

// One warp per row if possible, because its reductions need no barrier. For longer rows, four
// vectors per thread, because more threads hide each other's barriers; but eight if two arrays are
// read, or a mask that is longer than x.
using Spreads = SpreadList<Spread<8, 1>, Spread<32, 1>, Spread<32, 2>, Spread<32, 4>, Spread<32, 8>,
                           Spread<128, 4>, Spread<128, 8>, Spread<256, 8>>;
using ShortSpreads = SpreadList<Spread<8, 1>, Spread<32, 1>, Spread<32, 2>, Spread<32, 4>,
                                Spread<64, 4>, Spread<128, 4>, Spread<256, 4>, Spread<512, 4>>;

template <typename Element, typename Mask>
using ForwardSpreads = std::conditional_t<kIsMaskShort<Element, Mask>, ShortSpreads, Spreads>;

// Calls `launch` with the first spread that holds a row, or with 0 vectors if none does.
template <typename LaunchFn, typename First, typename... Rest>
Status WithSpread(SpreadList<First, Rest...>, int64_t num_vectors, const LaunchFn& launch) {
  if (num_vectors <= First::kThreads * First::kVectors) return launch(First{});
  if constexpr (sizeof...(Rest) > 0) {
    return WithSpread(SpreadList<Rest...>{}, num_vectors, launch);
  } else {
    return launch(Spread<kLongThreads, 0>{});
  }
}

// Whether all rows of x and of the mask consist of whole vectors of x.
template <typename Element>
bool AreRowsWhole(const RowsParams& rows, const SoftmaxMask& mask) {
  const auto is_whole = [](int64_t stride) { return stride % kVectorSize<Element> == 0; };
  if (!is_whole(rows.k_len)) return false;
  return mask.kind == MaskKind::kNone || (mask.column_stride != 0 && is_whole(mask.batch_stride) &&
                                          is_whole(mask.head_stride) && is_whole(mask.row_stride));
}

// The number of rows of a mask that L2 can keep next to the data that streams through it, so that
// few rows that are far apart in memory are processed at a time. It divides the number of rows.
int Log2ChunkRows(const SoftmaxMask& mask, int64_t q_len) {
  constexpr int64_t kChunkBytes = 8 << 20;
  const int64_t row_bytes =
      mask.row_stride * (mask.kind == MaskKind::kBool ? 1 : ElementBytes(mask.dtype));
  const auto fits = [&](int64_t rows) {
    return rows <= q_len && q_len % rows == 0 && rows * row_bytes <= kChunkBytes;
  };
  int log2 = 0;
  while (fits(int64_t{2} << log2)) ++log2;
  return log2;
}

template <typename Element, typename Mask>
Status LaunchForward(const SoftmaxForwardParams& params, cudaStream_t stream) {
  const bool is_whole = AreRowsWhole<Element>(params.rows, params.mask);
  return WithSpread(
      ForwardSpreads<Element, Mask>{}, MaxVectors<Element>(params.rows, kHasMask<Mask>),
      [&](auto spread) {
        constexpr int kThreads = decltype(spread)::kThreads, kVectors = decltype(spread)::kVectors;
        if constexpr (kVectors == 0) {
          return Launch(LongSoftmaxForwardKernel<Element, Mask, kThreads>, params, kThreads,
                        stream);
        } else {
          return Launch(is_whole ? SoftmaxForwardKernel<Element, Mask, true, kThreads, kVectors>
                                 : SoftmaxForwardKernel<Element, Mask, false, kThreads, kVectors>,
                        params, kThreads, stream);
        }
      });
}

}  // namespace

template <DType kDType>
Status SoftmaxVariant<kDType>::Forward(const SoftmaxForwardArgs& args, cudaStream_t stream) {
  using Element = ElementOf<kDType>;
  const SoftmaxShape& shape = args.shape;
  const SoftmaxMask& mask = args.mask;
  int64_t num_sharing = 1;
  if (mask.kind != MaskKind::kNone && mask.head_stride == 0) {
    num_sharing = mask.batch_stride == 0 ? shape.batch * shape.heads : shape.heads;
  }
  // If nothing is shared, one row: no thread has to divide.
  const int log2_chunk_rows = num_sharing == 1 ? 0 : Log2ChunkRows(mask, shape.q_len);
  ScoreScale scale = GetScoreScale(args);
  scale.after = std::min(scale.after * kLog2E, std::numeric_limits<float>::max());
  const SoftmaxForwardParams params{
      GetRowsParams(shape),
      mask,
      RowDivisor(static_cast<uint32_t>(shape.heads)),
      static_cast<uint32_t>(num_sharing),
      log2_chunk_rows,
      RowDivisor(static_cast<uint32_t>(num_sharing << log2_chunk_rows)),
      RowDivisor(static_cast<uint32_t>(num_sharing * shape.q_len)),
      scale,
      args.x,
      args.offset,
      args.offset_batch_stride,
      args.y,
      args.offset_probability};
  switch (mask.kind) {
    case MaskKind::kNone:
      return LaunchForward<Element, NoMask>(params, stream);
    case MaskKind::kBool:
      return LaunchForward<Element, uint8_t>(params, stream);
    case MaskKind::kAdditive:
      break;
  }
  return mask.dtype == kDType ? LaunchForward<Element, Element>(params, stream)
                              : LaunchForward<Element, float>(params, stream);
}

template <DType kDType>
Status SoftmaxVariant<kDType>::Backward(const SoftmaxBackwardArgs& args, cudaStream_t stream) {
  using Element = ElementOf<kDType>;
  const SoftmaxBackwardParams params{
      GetRowsParams(args.shape), args.scale, args.y, args.dy, args.dx, args.dot};
  const bool is_whole = AreRowsWhole<Element>(params.rows, /*mask=*/{});
  return WithSpread(
      Spreads{}, MaxVectors<Element>(params.rows, /*has_mask=*/false), [&](auto spread) {
        constexpr int kThreads = decltype(spread)::kThreads, kVectors = decltype(spread)::kVectors;
        if constexpr (kVectors == 0) {
          return Launch(LongSoftmaxBackwardKernel<Element, kThreads>, params, kThreads, stream);
        } else {
          return Launch(is_whole ? SoftmaxBackwardKernel<Element, true, kThreads, kVectors>
                                 : SoftmaxBackwardKernel<Element, false, kThreads, kVectors>,
                        params, kThreads, stream);
        }
      });
}

template struct SoftmaxVariant<JAX_MAGI_VARIANT>;

}  // namespace jax_magi::cuda
