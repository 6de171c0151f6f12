// wgmma: matrix products of a warpgroup, from registers and shared memory.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_WGMMA_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_WGMMA_CUH_

#include <cstdint>

#include "cc/cuda/attention/sm90/hopper.cuh"
#include "cc/cuda/attention/sm90/wgmma_instruction.cuh"

namespace jax_magi::cuda::sm90 {

__device__ __forceinline__ void FenceWgmma() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void CommitWgmma() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kOutstanding>
__device__ __forceinline__ void WaitWgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kOutstanding) : "memory");
}

// Keeps the compiler from moving reads or writes of accumulators across the asynchronous products.
template <int kCount>
__device__ __forceinline__ void FenceRegisters(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// A tile in shared memory consists of panels 64 elements wide: rows of 128 bytes, a 128-byte
// swizzle, and 8 rows per swizzle atom; or half as wide, with a 64-byte swizzle. Descriptor fields
// are in units of 16 bytes.
template <int kPanelDims>
constexpr uint64_t kAtomOffsetOf = 8 * kPanelDims * 2 / 16;
constexpr uint64_t kAtomOffset = kAtomOffsetOf<64>;
template <int kPanelDims>
constexpr uint64_t kSwizzle = uint64_t{kPanelDims == 64 ? 1 : 2} << 62;

// An address in descriptor format. In a cluster, a CTA's shared memory addresses hold its rank in
// bits 24 and up, which would spill into the field for the panel distance. Without clusters there
// is no rank to mask, and ptxas keeps the schedules that were tuned.
template <int kClusterSize>
__device__ __forceinline__ uint32_t DescriptorAddress(const void* tile) {
  const uint32_t address = SharedAddress(tile);
  return (kClusterSize == 1 ? address : address & 0x3ffff) >> 4;
}

// For an operand that is contiguous along the contraction: q and k.
template <int kClusterSize = 1, int kPanelDims = 64>
__device__ __forceinline__ uint64_t RowDescriptor(const void* tile) {
  return kSwizzle<kPanelDims> | (kAtomOffsetOf<kPanelDims> << 32) | (uint64_t{1} << 16) |
         DescriptorAddress<kClusterSize>(tile);
}

// For an operand that is contiguous across the contraction: v, whose panels are `panel_bytes`
// apart.
template <int kClusterSize = 1, int kPanelDims = 64>
__device__ __forceinline__ uint64_t ColumnDescriptor(const void* tile, uint32_t panel_bytes) {
  return kSwizzle<kPanelDims> | (kAtomOffsetOf<kPanelDims> << 32) |
         (uint64_t{panel_bytes / 16} << 16) | DescriptorAddress<kClusterSize>(tile);
}

// Advances a descriptor by `offset` units. Addresses are in the lower half, and never overflow it.
__device__ __forceinline__ uint64_t Advance(uint64_t descriptor, uint32_t offset) {
  return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + offset);
}

// Whether a product becomes the result, or is subtracted from it.
enum class Product { kIsResult, kIsSubtracted };
template <Product kProduct>
constexpr int kSignOf = kProduct == Product::kIsSubtracted ? -1 : 1;

// scores[64, kN] = rows[64, kDim] * keys[kN, kDim]^T, both in shared memory. `rows_bytes` and
// `keys_bytes` are the sizes of their panels; panels of rows may be narrower.
template <typename Element, int kN, int kDim, Product kProduct = Product::kIsResult,
          int kRowPanelDims = 64>
__device__ __forceinline__ void MultiplyRowsKeys(uint64_t rows, uint32_t rows_bytes, uint64_t keys,
                                                 uint32_t keys_bytes, float (&scores)[kN / 2]) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint32_t panel = step / 4, offset = 2 * (step % 4);  // 16 elements are 32 bytes.
    constexpr uint32_t kRowSteps = kRowPanelDims / 16;         // Per panel.
    WgmmaInstruction<kN>::template Shared<Element, kSignOf<kProduct>, Contiguous::kAlong,
                                          Contiguous::kAlong>(
        Advance(rows, step / kRowSteps * (rows_bytes / 16) + 2 * (step % kRowSteps)),
        Advance(keys, panel * (keys_bytes / 16) + offset), scores,
        /*accumulate=*/kProduct != Product::kIsResult || step > 0);
  }
}

// The same, if the rows are in registers.
template <typename Element, int kN, int kDim, Product kProduct = Product::kIsResult>
__device__ __forceinline__ void MultiplyRegisterRowsKeys(const uint32_t (&rows)[kDim / 4],
                                                         uint64_t keys, uint32_t keys_bytes,
                                                         float (&scores)[kN / 2]) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint32_t panel = step / 4, offset = 2 * (step % 4);
    WgmmaInstruction<kN>::template Registers<Element, kSignOf<kProduct>, Contiguous::kAlong>(
        rows + 4 * step, Advance(keys, panel * (keys_bytes / 16) + offset), scores,
        /*accumulate=*/kProduct != Product::kIsResult || step > 0);
  }
}

// out[64, kDim] += p[64, kN] * values[kN, kDim], with p in registers as packed pairs.
template <typename Element, int kN, int kDim>
__device__ __forceinline__ void MultiplyProbabilitiesValues(const uint32_t (&p)[kN / 4],
                                                            uint64_t values,
                                                            float (&out)[kDim / 2]) {
#pragma unroll
  for (int step = 0; step < kN / 16; ++step) {
    WgmmaInstruction<kDim>::template Registers<Element, 1, Contiguous::kAcross>(
        p + 4 * step, Advance(values, step * 2 * kAtomOffset), out, /*accumulate=*/true);
  }
}

// out[64, kN] = columns[kK, 64]^T * rows[kN, kK]^T, both in shared memory: `columns` is one panel,
// contiguous across the contraction.
template <typename Element, int kN, int kK>
__device__ __forceinline__ void MultiplyColumnsRows(uint64_t columns, uint64_t rows,
                                                    uint32_t rows_bytes, float (&out)[kN / 2]) {
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
    const uint32_t panel = step / 4, offset = 2 * (step % 4);
    WgmmaInstruction<kN>::template Shared<Element, 1, Contiguous::kAcross, Contiguous::kAlong>(
        Advance(columns, step * 2 * kAtomOffset), Advance(rows, panel * (rows_bytes / 16) + offset),
        out,
        /*accumulate=*/step > 0);
  }
}

// out[64, kDim] = rows[64, kK] * values[kK, kDim], both in shared memory. Panels of values are
// kPanelDims wide.
template <typename Element, int kDim, int kK, int kPanelDims>
__device__ __forceinline__ void MultiplyRowsValues(uint64_t rows, uint32_t rows_bytes,
                                                   uint64_t values, float (&out)[kDim / 2]) {
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
    const uint32_t panel = step / 4, offset = 2 * (step % 4);
    WgmmaInstruction<kDim>::template Shared<Element, 1, Contiguous::kAlong, Contiguous::kAcross>(
        Advance(rows, panel * (rows_bytes / 16) + offset),
        Advance(values, step * 2 * kAtomOffsetOf<kPanelDims>), out, /*accumulate=*/step > 0);
  }
}

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_WGMMA_CUH_
