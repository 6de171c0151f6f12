// The Hopper instructions the kernels use: mbarriers, TMA, wgmma, register reallocation.

#ifndef JAX_MAGI_CUDA_ATTENTION_HOPPER_CUH_
#define JAX_MAGI_CUDA_ATTENTION_HOPPER_CUH_

#include <cuda.h>

#include <cstdint>
#include <utility>

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // wgmma with N = 48, 80, 112.
#include "cute/arch/mma_sm90.hpp"
#include "cute/numeric/integral_constant.hpp"

namespace jax_magi::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

constexpr int kReservedBytes = 1024;  // Of a block's shared memory: the driver's.

// The shared memory of a kernel that has no other than dynamic one. Such a kernel must check that
// it is there.
__device__ __forceinline__ void* DynamicShared() {
  return __cvta_shared_to_generic(kReservedBytes);
}

// --- mbarrier ---

__device__ __forceinline__ void InitBarrier(uint64_t* barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(num_arrivals));
}

// Makes barrier initialisation visible to the TMA unit.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Arrives, and makes the phase wait for `num_bytes` of TMA traffic too.
__device__ __forceinline__ void ArriveExpectBytes(uint64_t* barrier, uint32_t num_bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(num_bytes)
      : "memory");
}

__device__ __forceinline__ void Wait(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(phase)
      : "memory");
}

// Whether the phase is over now, or after a short while.
__device__ __forceinline__ bool IsDone(uint64_t* barrier, uint32_t phase) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(phase)
      : "memory");
  return done;
}

// --- Clusters of blocks of threads ---

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Until all threads of the cluster that have not ended come here.
__device__ __forceinline__ void ClusterSync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// What lies in another block's shared memory where `pointer` does in this one's.
__device__ __forceinline__ uint32_t AddressAt(const void* pointer, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(SharedAddress(pointer)), "r"(rank));
  return address;
}

__device__ __forceinline__ void StoreAt(uint32_t* pointer, uint32_t rank, uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(AddressAt(pointer, rank)), "r"(value)
               : "memory");
}

// What this thread has written can be read by whoever waits there with WaitForCluster.
__device__ __forceinline__ void ArriveAt(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(AddressAt(barrier, rank))
      : "memory");
}

// Says no more than that this thread's products have read shared memory: it does not order writes
// for others, as that would take a fence.
__device__ __forceinline__ void ArriveUnorderedAt(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(AddressAt(barrier, rank))
               : "memory");
}

__device__ __forceinline__ void WaitForCluster(uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(phase)
      : "memory");
}

// --- Kernels that start before the one they depend on has ended ---

// Lets the next kernel come up, if it was launched so, while this one ends.
__device__ __forceinline__ void LetNextKernelStart() {
  asm volatile("griddepcontrol.launch_dependents;");
}

// Until all that the previous kernel wrote can be read.
__device__ __forceinline__ void WaitForPreviousKernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// --- TMA ---

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies `num_bytes`, a multiple of 16, between places that are aligned to 16.
__device__ __forceinline__ void LoadBulk(void* dst, const void* src, uint32_t num_bytes,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(dst)),
      "l"(src), "r"(num_bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// Copies 4 bytes, or zero where `is_inside` is false.
__device__ __forceinline__ void CopyWord(void* dst, const void* src, bool is_inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(SharedAddress(dst)), "l"(src),
               "r"(is_inside ? 4 : 0)
               : "memory");
}
// Until this thread's copies are there.
__device__ __forceinline__ void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Loads a box at (dim, head, row, batch) of a [batch, rows, heads, dim] tensor.
__device__ __forceinline__ void LoadBox(const CUtensorMap* map, uint64_t* barrier, void* dst,
                                        int dim, int head, int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(SharedAddress(dst)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(dim), "r"(head), "r"(row), "r"(batch)
      : "memory");
}

// For what is read or written once: it shall not drive what is read again out of the L2 cache.
__device__ __forceinline__ uint64_t OncePolicy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void LoadBoxOnce(const CUtensorMap* map, uint64_t* barrier, void* dst,
                                            int dim, int head, int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(SharedAddress(dst)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(dim), "r"(head), "r"(row), "r"(batch),
      "l"(OncePolicy())
      : "memory");
}
// Has such a box brought to the L2 cache.
__device__ __forceinline__ void PrefetchBoxOnce(const CUtensorMap* map, int dim, int head, int row,
                                                int batch) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile.L2::cache_hint"
      " [%0, {%1, %2, %3, %4}], %5;" ::"l"(map),
      "r"(dim), "r"(head), "r"(row), "r"(batch), "l"(OncePolicy())
      : "memory");
}

// Loads a box, to the same place in each block of threads of the cluster whose bit is set in
// `ranks`.
__device__ __forceinline__ void LoadBoxForRanks(const CUtensorMap* map, uint64_t* barrier,
                                                void* dst, uint16_t ranks, int dim, int head,
                                                int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(SharedAddress(dst)),
      "l"(map), "r"(SharedAddress(barrier)), "h"(ranks), "r"(dim), "r"(head), "r"(row), "r"(batch)
      : "memory");
}

// Adds `num_bytes` of float32 in shared memory to as many in memory.
__device__ __forceinline__ void ReduceAdd(float* dst, const float* src, uint32_t num_bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
      "r"(SharedAddress(src)), "r"(num_bytes)
      : "memory");
}
// Writes a box in shared memory to such a tensor. It is committed and waited for like an addition.
__device__ __forceinline__ void StoreBoxOnce(const CUtensorMap* map, const void* src, int dim,
                                             int head, int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint"
      " [%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(map),
      "r"(SharedAddress(src)), "r"(dim), "r"(head), "r"(row), "r"(batch), "l"(OncePolicy())
      : "memory");
}
__device__ __forceinline__ void CommitReduce() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until what this thread has committed is read from shared memory.
__device__ __forceinline__ void WaitReduceRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Until it has reached memory.
__device__ __forceinline__ void WaitReduce() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes this thread's writes to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- Named barriers ---

__device__ __forceinline__ void NamedSync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Counts for the barrier, without waiting.
__device__ __forceinline__ void NamedArrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, transposed: lane l gives the address of column l % 8 of
// matrix l / 8.
__device__ __forceinline__ void StoreMatricesTransposed(void* address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   SharedAddress(address)),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void LoadMatrices(const void* address, uint32_t* x) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(SharedAddress(address))
               : "memory");
}

// The same, transposed.
__device__ __forceinline__ void LoadMatricesTransposed(const void* address, uint32_t* x) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(SharedAddress(address))
               : "memory");
}

// --- Registers ---

template <int kCount>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// --- wgmma ---

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

// A tile in shared memory is made of panels 64 elements wide: rows of 128 bytes, 128-byte swizzle,
// 8 rows a swizzle atom. Descriptor fields are in units of 16 bytes.
constexpr uint64_t kAtomOffset = 1024 / 16;
constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;

// An address as descriptors hold it. In a cluster, the addresses of a block of threads have its
// rank in bits 24 and up, which would end up in the distance of panels. Elsewhere there is none,
// and ptxas schedules kernels as they were tuned.
template <int kClusterSize>
__device__ __forceinline__ uint32_t DescriptorAddress(const void* tile) {
  const uint32_t address = SharedAddress(tile);
  return (kClusterSize == 1 ? address : address & 0x3ffff) >> 4;
}

// For an operand contiguous along the contraction: q and k.
template <int kClusterSize = 1>
__device__ __forceinline__ uint64_t RowDescriptor(const void* tile) {
  return kSwizzle128 | (kAtomOffset << 32) | (uint64_t{1} << 16) |
         DescriptorAddress<kClusterSize>(tile);
}

// For an operand contiguous across the contraction: v, whose panels lie `panel_bytes` apart.
template <int kClusterSize = 1>
__device__ __forceinline__ uint64_t ColumnDescriptor(const void* tile, uint32_t panel_bytes) {
  return kSwizzle128 | (kAtomOffset << 32) | (uint64_t{panel_bytes / 16} << 16) |
         DescriptorAddress<kClusterSize>(tile);
}

// A descriptor `offset` units further on. Addresses are in the lower half, and never leave it.
__device__ __forceinline__ uint64_t Advance(uint64_t descriptor, uint32_t offset) {
  return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + offset);
}

template <typename Atom, int... kIndex>
__device__ __forceinline__ void WgmmaShared(uint64_t a, uint64_t b, float* d, bool accumulate,
                                            std::integer_sequence<int, kIndex...>) {
  Atom::fma(a, b, d[kIndex]...,
            accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

template <typename Atom, int... kIndex>
__device__ __forceinline__ void WgmmaRegister(const uint32_t* a, uint64_t b, float* d,
                                              bool accumulate,
                                              std::integer_sequence<int, kIndex...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[kIndex]...,
            accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// What becomes of a product: the result, or it is added to it or subtracted from it.
enum class Product { kIsResult, kIsAdded, kIsSubtracted };

// scores[64, kN] = rows[64, kDim] * keys[kN, kDim]^T, both in shared memory. `rows_bytes` and
// `keys_bytes` are the sizes of their panels.
template <typename Element, int kN, int kDim, Product kProduct = Product::kIsResult>
__device__ __forceinline__ void MultiplyRowsKeys(uint64_t rows, uint32_t rows_bytes, uint64_t keys,
                                                 uint32_t keys_bytes, float (&scores)[kN / 2]) {
  using cute::SM90::GMMA::Major;
  using cute::SM90::GMMA::ScaleIn;
  using Atom =
      decltype(cute::SM90::GMMA::ss_op_selector<
               Element, Element, float, cute::Shape<cute::_64, cute::Int<kN>, cute::_16>, Major::K,
               Major::K, kProduct == Product::kIsSubtracted ? ScaleIn::Neg : ScaleIn::One>());
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint32_t panel = step / 4, offset = 2 * (step % 4);  // 16 elements are 32 bytes.
    WgmmaShared<Atom>(Advance(rows, panel * (rows_bytes / 16) + offset),
                      Advance(keys, panel * (keys_bytes / 16) + offset), scores,
                      /*accumulate=*/kProduct != Product::kIsResult || step > 0,
                      std::make_integer_sequence<int, kN / 2>());
  }
}

// The same, with the rows in registers.
template <typename Element, int kN, int kDim, Product kProduct = Product::kIsResult>
__device__ __forceinline__ void MultiplyRegisterRowsKeys(const uint32_t (&rows)[kDim / 4],
                                                         uint64_t keys, uint32_t keys_bytes,
                                                         float (&scores)[kN / 2]) {
  using cute::SM90::GMMA::Major;
  using cute::SM90::GMMA::ScaleIn;
  using Atom =
      decltype(cute::SM90::GMMA::rs_op_selector<
               Element, Element, float, cute::Shape<cute::_64, cute::Int<kN>, cute::_16>, Major::K,
               Major::K, kProduct == Product::kIsSubtracted ? ScaleIn::Neg : ScaleIn::One>());
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    const uint32_t panel = step / 4, offset = 2 * (step % 4);
    WgmmaRegister<Atom>(rows + 4 * step, Advance(keys, panel * (keys_bytes / 16) + offset), scores,
                        /*accumulate=*/kProduct != Product::kIsResult || step > 0,
                        std::make_integer_sequence<int, kN / 2>());
  }
}

// out[64, kDim] += p[64, kN] * values[kN, kDim], p in registers as packed pairs.
template <typename Element, int kN, int kDim>
__device__ __forceinline__ void MultiplyProbabilitiesValues(const uint32_t (&p)[kN / 4],
                                                            uint64_t values,
                                                            float (&out)[kDim / 2]) {
  using Atom = decltype(cute::SM90::GMMA::rs_op_selector<
                        Element, Element, float, cute::Shape<cute::_64, cute::Int<kDim>, cute::_16>,
                        cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::MN>());
#pragma unroll
  for (int step = 0; step < kN / 16; ++step) {
    WgmmaRegister<Atom>(p + 4 * step, Advance(values, step * 2 * kAtomOffset), out,
                        /*accumulate=*/true, std::make_integer_sequence<int, kDim / 2>());
  }
}

// out[64, kN] = columns[kK, 64]^T * rows[kN, kK]^T, both in shared memory: `columns` is one panel,
// contiguous across the contraction.
template <typename Element, int kN, int kK>
__device__ __forceinline__ void MultiplyColumnsRows(uint64_t columns, uint64_t rows,
                                                    uint32_t rows_bytes, float (&out)[kN / 2]) {
  using Atom = decltype(cute::SM90::GMMA::ss_op_selector<
                        Element, Element, float, cute::Shape<cute::_64, cute::Int<kN>, cute::_16>,
                        cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::K>());
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
    const uint32_t panel = step / 4, offset = 2 * (step % 4);
    WgmmaShared<Atom>(Advance(columns, step * 2 * kAtomOffset),
                      Advance(rows, panel * (rows_bytes / 16) + offset), out,
                      /*accumulate=*/step > 0, std::make_integer_sequence<int, kN / 2>());
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_HOPPER_CUH_
