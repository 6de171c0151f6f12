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
constexpr uint64_t kAtomOffset = 8 * kPanelDims * 2 / 16;
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

// Advances a descriptor by `offset` units. Addresses are in the lower half, and never overflow it.
__device__ __forceinline__ uint64_t Advance(uint64_t descriptor, uint32_t offset) {
  return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + offset);
}

// An operand of a product in shared memory. Step(i) is the descriptor of elements 16 * i to
// 16 * i + 15 of the contraction. This one is contiguous along the contraction, such as q and k in
// the product for scores: its panels, of `panel_bytes` each, follow one another along it.
template <int kClusterSize = 1, int kPanelDims = 64>
struct AlongOperand {
  static constexpr Contiguous kContiguous = Contiguous::kAlong;
  uint64_t first;
  uint32_t panel_bytes;

  __device__ __forceinline__ AlongOperand(const void* tile, uint32_t panel_bytes)
      : first(kSwizzle<kPanelDims> | (kAtomOffset<kPanelDims> << 32) | (uint64_t{1} << 16) |
              DescriptorAddress<kClusterSize>(tile)),
        panel_bytes(panel_bytes) {}
  __device__ __forceinline__ uint64_t Step(int i) const {
    constexpr uint32_t kSteps = kPanelDims / 16;  // Per panel. 16 elements are 32 bytes.
    return Advance(first, i / kSteps * (panel_bytes / 16) + 2 * (i % kSteps));
  }
};

// This one is contiguous across the contraction, such as v in the product for the output, and so
// are its panels, which are `panel_bytes` apart.
template <int kClusterSize = 1, int kPanelDims = 64>
struct AcrossOperand {
  static constexpr Contiguous kContiguous = Contiguous::kAcross;
  uint64_t first;

  __device__ __forceinline__ AcrossOperand(const void* tile, uint32_t panel_bytes)
      : first(kSwizzle<kPanelDims> | (kAtomOffset<kPanelDims> << 32) |
              (uint64_t{panel_bytes / 16} << 16) | DescriptorAddress<kClusterSize>(tile)) {}
  __device__ __forceinline__ uint64_t Step(int i) const {
    return Advance(first, i * 2 * kAtomOffset<kPanelDims>);
  }
};

// What becomes of a product: the result, or it is added to the result, or subtracted from it.
enum class Product { kIsResult, kIsAdded, kIsSubtracted };
template <Product kProduct>
constexpr int kSignOf = kProduct == Product::kIsSubtracted ? -1 : 1;

// result[64, kN] = a[64, kK] * b[kK, kN], both in shared memory.
template <typename Element, int kN, int kK, Product kProduct = Product::kIsResult, typename A,
          typename B>
__device__ __forceinline__ void Multiply(const A& a, const B& b, float (&result)[kN / 2]) {
#pragma unroll
  for (int i = 0; i < kK / 16; ++i) {
    WgmmaInstruction<kN>::template Shared<Element, kSignOf<kProduct>, A::kContiguous,
                                          B::kContiguous>(
        a.Step(i), b.Step(i), result,
        /*accumulate=*/kProduct != Product::kIsResult || i > 0);
  }
}

// The same with `a` in registers, as packed pairs.
template <typename Element, int kN, int kK, Product kProduct = Product::kIsResult, typename B>
__device__ __forceinline__ void Multiply(const uint32_t (&a)[kK / 4], const B& b,
                                         float (&result)[kN / 2]) {
#pragma unroll
  for (int i = 0; i < kK / 16; ++i) {
    WgmmaInstruction<kN>::template Registers<Element, kSignOf<kProduct>, B::kContiguous>(
        a + 4 * i, b.Step(i), result, /*accumulate=*/kProduct != Product::kIsResult || i > 0);
  }
}

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_WGMMA_CUH_
