// Instructions of all GPUs from Ampere on, unless stated otherwise.

#ifndef JAX_MAGI_CUDA_ATTENTION_INSTRUCTIONS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_INSTRUCTIONS_CUH_

#include <cstdint>

namespace jax_magi::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- Copies to shared memory ---

// Copies 4 bytes, or zero where `is_inside` is false.
__device__ __forceinline__ void CopyWord(void* dst, const void* src, bool is_inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(SharedAddress(dst)), "l"(src),
               "r"(is_inside ? 4 : 0)
               : "memory");
}
// Waits until this thread's copies have completed.
__device__ __forceinline__ void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Prefetches a 128-byte line that will be written later.
__device__ __forceinline__ void PrefetchL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

// --- Indices that are read again at each use ---

// Kept in registers, an index and the values derived from it would be live through a kernel's whole
// loop. A kernel that has no registers to spare reads the index from its special register instead.
__device__ __forceinline__ int RereadThreadIndex() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ int RereadLane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// --- Lanes of a warp ---

// The sum over this lane and those before it.
__device__ __forceinline__ int SumUpToLane(int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}

// --- Counters that CTAs share ---

// Reads in L2, which all CTAs share. Orders no other memory access.
__device__ __forceinline__ int32_t LoadCounter(const int32_t* counter) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
__device__ __forceinline__ void AddToCounter(int32_t* counter, int32_t x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

// Returns the previous value. The addition has acquire and release semantics: with __threadfence
// instead, nvcc would make other atomics of the kernel wait for a reply.
__device__ __forceinline__ int32_t AddInOrder(int32_t* counter, int32_t x) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(x)
               : "memory");
  return before;
}

// --- Named barriers ---

__device__ __forceinline__ void NamedSync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Arrives at the barrier without waiting.
__device__ __forceinline__ void NamedArrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// NamedSync that also returns whether `mine` is true in any thread.
__device__ __forceinline__ bool NamedAny(int id, int num_threads, bool mine) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.s32 mine, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, mine;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(num_threads), "r"(static_cast<int>(mine))
      : "memory");
  return any;
}

// --- Clusters, on Hopper and later ---

// The CTA's rank in its cluster.
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// --- Matrices ---

// Loads four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l /
// 8.
__device__ __forceinline__ void LoadMatrices(uint32_t shared_address, uint32_t* x) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address)
               : "memory");
}
__device__ __forceinline__ void LoadMatrices(const void* address, uint32_t* x) {
  LoadMatrices(SharedAddress(address), x);
}

// The same, transposed.
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t shared_address, uint32_t* x) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address)
               : "memory");
}
__device__ __forceinline__ void LoadMatricesTransposed(const void* address, uint32_t* x) {
  LoadMatricesTransposed(SharedAddress(address), x);
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_ATTENTION_INSTRUCTIONS_CUH_
