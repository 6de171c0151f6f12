// The Hopper instructions the kernels use: mbarriers, TMA, register reallocation.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_HOPPER_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_HOPPER_CUH_

#include <cuda.h>

#include <cstdint>

#include "cc/cuda/attention/instructions.cuh"

namespace jax_magi::cuda::sm90 {

constexpr int kReservedBytes = 1024;  // Bytes of a CTA's shared memory that the driver uses.

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

// Arrives, and makes the phase also wait for `num_bytes` of TMA traffic.
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

// Whether the phase is complete, either now or after a short wait.
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

// --- Clusters of CTAs ---

// The address of shared memory in a kernel that has only dynamic shared memory. The kernel must
// check that it is there.
template <int kClusterSize = 1>
__device__ __forceinline__ void* DynamicShared() {
  if constexpr (kClusterSize == 1) return __cvta_shared_to_generic(kReservedBytes);
  // In a cluster, a CTA's shared memory addresses hold its rank in bits 24 and up.
  return __cvta_shared_to_generic(kReservedBytes | ClusterRank() << 24);
}

// Waits for all threads of the cluster that have not exited.
__device__ __forceinline__ void ClusterSync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// The address in the shared memory of CTA `rank` that corresponds to `pointer` in this CTA.
__device__ __forceinline__ uint32_t AddressAt(const void* pointer, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(SharedAddress(pointer)), "r"(rank));
  return address;
}

// The barrier in that CTA counts the four bytes, like bytes that TMA transfers: no fence is needed.
__device__ __forceinline__ void StoreAt(uint32_t* pointer, uint64_t* barrier, uint32_t rank,
                                        uint32_t value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                   AddressAt(pointer, rank)),
               "r"(value), "r"(AddressAt(barrier, rank))
               : "memory");
}

// A release: what this thread has read and written is ordered before what waiting threads do next.
__device__ __forceinline__ void ArriveAt(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(AddressAt(barrier, rank))
      : "memory");
}

// Signals only that this thread's products have read shared memory. It does not order writes for
// other CTAs, which would take a fence.
__device__ __forceinline__ void ArriveUnorderedAt(uint64_t* barrier, uint32_t rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(AddressAt(barrier, rank))
               : "memory");
}

// --- TMA ---

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies `num_bytes`, a multiple of 16, between addresses that are aligned to 16 bytes.
__device__ __forceinline__ void LoadBulk(void* dst, const void* src, uint32_t num_bytes,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(dst)),
      "l"(src), "r"(num_bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// Copies from shared to global memory. The bytes must stay in shared memory until WaitReduceRead.
__device__ __forceinline__ void StoreBulk(void* dst, const void* src, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst),
               "r"(SharedAddress(src)), "r"(num_bytes)
               : "memory");
}

// Loads a box at (dim, head, row, batch) of a [batch, rows, heads, dim] tensor.
__device__ __forceinline__ void LoadBox(const CUtensorMap* map, uint64_t* barrier, void* dst,
                                        int dim, int head, int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(SharedAddress(dst)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(dim), "r"(head), "r"(row), "r"(batch)
      : "memory");
}

// For data that is read or written once, and should not evict data that is read again from L2.
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

// Loads a box to the same address in each CTA of the cluster whose bit is set in `ranks`.
__device__ __forceinline__ void LoadBoxForRanks(const CUtensorMap* map, uint64_t* barrier,
                                                void* dst, uint16_t ranks, int dim, int head,
                                                int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(SharedAddress(dst)),
      "l"(map), "r"(SharedAddress(barrier)), "h"(ranks), "r"(dim), "r"(head), "r"(row), "r"(batch)
      : "memory");
}

// Adds `num_bytes` of float32 from shared memory to global memory.
__device__ __forceinline__ void ReduceAdd(float* dst, const float* src, uint32_t num_bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
      "r"(SharedAddress(src)), "r"(num_bytes)
      : "memory");
}
// Writes a box from shared memory to such a tensor. It is committed and waited for like an
// addition.
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
// Waits until shared memory has been read by everything that this thread has committed.
__device__ __forceinline__ void WaitReduceRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// Waits until everything that this thread has committed is complete in global memory.
__device__ __forceinline__ void WaitReduce() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes this thread's writes to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- Matrices ---

// Stores four 8 x 8 matrices of 16-bit elements, transposed: lane l gives the address of column l %
// 8 of matrix l / 8.
__device__ __forceinline__ void StoreMatricesTransposed(void* address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   SharedAddress(address)),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
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

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_HOPPER_CUH_
