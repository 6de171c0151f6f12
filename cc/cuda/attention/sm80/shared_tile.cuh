// Matrices of 16-bit elements in shared memory: copied there from rows of a tensor (cp.async), and
// loaded from there as operands of mma.sync (ldmatrix).
//
// A tile has rows of kDim elements, kDim a multiple of 64, and begins at a multiple of 128 bytes.
// Eight elements, 16 bytes, are a chunk. In each group of eight chunks of row r, chunk c is at
// position c ^ (r % 8), so that the same chunk of eight neighbouring rows lies in different banks.
// Rows of 32 elements have four chunks, and chunk c is at position c ^ (r / 2 % 4).
//
//   SharedTile<kDim>    addresses in a tile
//   CopyRows            rows of a tensor to a tile, asynchronously, with zeros outside the tensor
//   CommitCopies, WaitForGroups<n>, as for any cp.async; then __syncthreads()
//   LeftRows<kDim>      pieces of a left operand, from a tile whose rows are its rows
//   LeftColumns<kDim>   the same, from a tile whose rows are the contraction
//   RightRows<kDim>     pieces of a right operand, from a tile whose rows are its columns
//   RightColumns<kDim>  the same, from a tile whose rows are the contraction
//
// The product q k^T uses LeftRows of q and RightRows of k; p v uses RightColumns of v; p^T dout,
// where p has a row per query, uses LeftColumns of p and RightColumns of dout.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_SHARED_TILE_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_SHARED_TILE_CUH_

#include <cstdint>

#include "cc/cuda/attention/instructions.cuh"

namespace jax_magi::cuda::sm80 {

constexpr int kChunk = 8;  // Elements.

template <int kDim_>
struct SharedTile {
  static constexpr int kDim = kDim_;
  static_assert(kDim % 64 == 0 || kDim == 32, "whole groups of chunks");
  static constexpr uint32_t kRowBytes = kDim * 2;
  static constexpr int Bytes(int num_rows) { return num_rows * kDim * 2; }
  uint32_t address;  // In shared memory.

  // The address of a chunk.
  __device__ __forceinline__ uint32_t At(int row, int chunk) const {
    if constexpr (kDim == 32) return address + row * kRowBytes + (chunk ^ (row / 2 % 4)) * 16;
    return address + row * kRowBytes + chunk / 8 * 128 + ((chunk % 8) ^ (row % 8)) * 16;
  }
  // The address of a pair of columns: `column` is even.
  __device__ __forceinline__ uint32_t PairAt(int row, int column) const {
    return At(row, column / kChunk) + column % kChunk * 2;
  }
};

__device__ __forceinline__ void StoreShared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ uint32_t LoadShared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// --- Copies from global memory ---

// Copies 16 bytes, or zeros where `is_inside` is false; the source is then not read.
__device__ __forceinline__ void CopyChunk(uint32_t to, const void* from, bool is_inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_inside ? 16 : 0)
               : "memory");
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all groups of this thread's copies but the last kNumPending are complete.
template <int kNumPending>
__device__ __forceinline__ void WaitForGroups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNumPending) : "memory");
}

// Copies rows begin, begin + 1, ... of a matrix to the kRows rows of a tile. `row0` is row 0 of the
// matrix, which has `num_rows` rows of `dim` elements, dim a multiple of 8 and at most kDim;
// neighbouring rows are `stride` elements apart. Rows outside [0, num_rows), and columns from `dim`
// on, become zeros. Called by kThreads threads.
template <int kThreads, int kRows, int kDim, typename Element>
__device__ __forceinline__ void CopyRows(SharedTile<kDim> tile, const Element* row0, int64_t stride,
                                         int begin, int num_rows, int dim, int thread) {
  constexpr int kStep = kThreads / 8;  // Eight threads copy a group of chunks.
  static_assert(kStep % 8 == 0 && kRows % kStep == 0, "the swizzle is the same for all rows");
  const int row = thread / 8, chunk = thread % 8;
  const uint32_t to = tile.At(row, chunk);
  const Element* from = row0 + (begin + row) * stride + chunk * kChunk;
  // Otherwise multiples of the stride stay in registers from one call to the next.
  int64_t step = kStep * stride;
  asm volatile("" : "+l"(step));
#pragma unroll
  for (int i = 0; i < kRows; i += kStep) {
    const bool has_row = static_cast<unsigned>(begin + row + i) < static_cast<unsigned>(num_rows);
#pragma unroll
    for (int d = 0; d < kDim; d += 64) {
      const bool is_inside = has_row && d + chunk * kChunk < dim;
      CopyChunk(to + i * tile.kRowBytes + d * 2, from + d, is_inside);
    }
    from += step;
  }
}

// --- Operands ---

// How a lane's row and chunk for ldmatrix follow from its index. The four 8 x 8 matrices of a 16 x
// 16 piece are, in the order of registers: top left, bottom left, top right, bottom right (kDown);
// or top left, top right, bottom left, bottom right (kAcross).
enum class PieceOrder { kDown, kAcross };

template <int kDim, PieceOrder kOrder, bool kIsTransposed>
struct Pieces {
  uint32_t lane_address;  // Of the lane's row in the piece at row 0 and column 0.

  __device__ __forceinline__ Pieces(SharedTile<kDim> tile, int lane)
      : lane_address(kOrder == PieceOrder::kDown
                         ? tile.At(lane % 16, lane / 16)
                         : tile.At(lane / 16 * 8 + lane % 8, lane / 8 % 2)) {}

  // Loads the piece from this row and column on: `row` is a multiple of 8, `column` of 16. An XOR
  // of the column is enough, because the piece's rows keep their position in groups of eight.
  __device__ __forceinline__ void Load(int row, int column, uint32_t* x) const {
    const uint32_t address = (lane_address ^ (column % 64 * 2)) +
                             (row * SharedTile<kDim>::kRowBytes + column / 64 * 128);
    if constexpr (kIsTransposed) {
      LoadMatricesTransposed(address, x);
    } else {
      LoadMatrices(address, x);
    }
  }
};

// A left operand a[16, 16], four words. Rows and columns of Load are those of the tile.
template <int kDim>
using LeftRows = Pieces<kDim, PieceOrder::kDown, false>;
template <int kDim>
using LeftColumns = Pieces<kDim, PieceOrder::kAcross, true>;
// Two right operands b[16, 8], two words each: the first for the first eight columns of b.
template <int kDim>
using RightRows = Pieces<kDim, PieceOrder::kAcross, false>;
template <int kDim>
using RightColumns = Pieces<kDim, PieceOrder::kDown, true>;

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_SHARED_TILE_CUH_
