#include <mutex>

#include "cc/cuda/launch.h"
#include "cc/cuda/overlap/overlap.h"

namespace jax_magi::cuda {
namespace {

// With this much shared memory, a CTA is alone on its SM.
constexpr int kAloneBytes = 200 * 1024;
// Two such CTAs occupy all threads of an SM, and leave no room for a third CTA of any size.
constexpr int kHalfThreads = 1024, kHalfBytes = 100 * 1024;

// --- The barrier ---

constexpr int kNumProbes = 32;
// The time in nanoseconds in which all CTAs of a probe start if nothing is in their way; and the
// time after which the barrier ends in any case, except for the start of the last CTAs.
constexpr uint64_t kPatience = 4000, kLongest = 100000;

struct BarrierState {
  unsigned long long begin;  // When the first CTA started; 0 before.
  int num_arrived[kNumProbes];
  int is_over;
};

__device__ __forceinline__ uint64_t Nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__device__ __forceinline__ void Probe(BarrierState* state, int num_blocks) {
  auto* is_over = const_cast<volatile int*>(&state->is_over);
  if (*is_over != 0) return;
  uint64_t last_change = Nanoseconds();
  const uint64_t first = atomicCAS(&state->begin, 0ull, last_change);
  const uint64_t begin = first == 0 ? last_change : first;
  int* const num_arrived = &state->num_arrived[blockIdx.x / num_blocks];
  atomicAdd(num_arrived, 1);
  for (int count = 0; *is_over == 0;) {
    const int now = *const_cast<volatile int*>(num_arrived);
    const uint64_t time = Nanoseconds();
    if (now == num_blocks) return;
    if (now != count) {
      count = now;
      last_change = time;
    }
    if (time - last_change > kPatience || time - begin > kLongest) *is_over = 1;
  }
}

// The grid consists of kNumProbes probes, each of which would occupy the whole GPU. If all CTAs of
// a probe run at once, nothing else is running: they exit, and waiting communication may start
// before the next probe, because its stream has the higher priority. If some CTAs do not start for
// a long time, something else occupies their place.
__global__ void __launch_bounds__(kHalfThreads)
    KernelBarrierKernel(BarrierState* state, int num_blocks) {
  if (threadIdx.x == 0) Probe(state, num_blocks);
  __syncthreads();
}

// --- The stand-in ---

constexpr int kCopyThreads = 512;

__global__ void DelayKernel(uint64_t nanoseconds) {
  for (const uint64_t begin = Nanoseconds(); Nanoseconds() - begin < nanoseconds;) {
  }
}

__global__ void __launch_bounds__(kCopyThreads)
    StandInCommunicationKernel(const uint4* src, uint4* dst, int64_t count, int num_rounds) {
  const int64_t step = int64_t{gridDim.x} * kCopyThreads;
  for (int round = 0; round < num_rounds; ++round) {
    for (int64_t i = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x; i < count; i += step) {
      uint4 x;
      // Volatile, and past L1: each round must move the bytes again.
      asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "l"(src + i)
                   : "memory");
      asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(dst + i), "r"(x.x),
                   "r"(x.y), "r"(x.z), "r"(x.w)
                   : "memory");
    }
  }
}

// One per device, never destroyed: it is for experiments.
struct SideStream {
  cudaStream_t stream = nullptr;
  cudaEvent_t begin, end;
};

cudaError_t SideStreamOfDevice(SideStream** side) {
  constexpr int kMaxDevices = 64;
  static std::mutex mutex;
  static SideStream sides[kMaxDevices];
  const std::lock_guard<std::mutex> lock(mutex);
  int device, least, greatest;
  cudaError_t code = cudaGetDevice(&device);
  if (code == cudaSuccess && device >= kMaxDevices) code = cudaErrorInvalidDevice;
  if (code != cudaSuccess) return code;
  *side = &sides[device];
  if ((*side)->stream != nullptr) return cudaSuccess;
  code = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  for (cudaEvent_t* event : {&(*side)->begin, &(*side)->end}) {
    if (code == cudaSuccess) code = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
  }
  if (code != cudaSuccess) return code;
  return cudaStreamCreateWithPriority(&(*side)->stream, cudaStreamNonBlocking, greatest);
}

template <typename... Params, typename... Args>
Status Launch(void (*kernel)(Params...), int num_blocks, int num_threads, int shared_bytes,
              int cluster_size, cudaStream_t stream, const Args&... args) {
  JAX_MAGI_CUDA_RETURN_IF_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  if (cluster_size > 8) {
    JAX_MAGI_CUDA_RETURN_IF_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_blocks);
  config.blockDim = dim3(num_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster_size > 1 ? 1 : 0;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaLaunchKernelEx(&config, kernel, args...));
  return {};
}

}  // namespace

int64_t KernelBarrierWorkspace() { return sizeof(BarrierState); }

Status KernelBarrier(void* workspace, cudaStream_t stream) {
  int num_sms;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(GetNumSms(&num_sms));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(workspace, 0, sizeof(BarrierState), stream));
  const int num_blocks = 2 * num_sms;
  return Launch(KernelBarrierKernel, kNumProbes * num_blocks, kHalfThreads, kHalfBytes,
                /*cluster_size=*/1, stream, static_cast<BarrierState*>(workspace), num_blocks);
}

Status StartStandIn(const StandIn& stand_in, cudaStream_t stream) {
  SideStream* side;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(SideStreamOfDevice(&side));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaEventRecord(side->begin, stream));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(side->stream, side->begin));
  if (stand_in.delay_us > 0) {
    JAX_MAGI_CUDA_RETURN_IF_ERROR(
        LaunchKernel(DelayKernel, 1, 32, side->stream, uint64_t{1000} * stand_in.delay_us));
  }
  JAX_MAGI_RETURN_IF_BAD(
      Launch(StandInCommunicationKernel, stand_in.num_sms, kCopyThreads, kAloneBytes,
             stand_in.cluster_size, side->stream, static_cast<const uint4*>(stand_in.src),
             static_cast<uint4*>(stand_in.dst),
             stand_in.num_bytes / static_cast<int64_t>(sizeof(uint4)), stand_in.num_rounds));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaEventRecord(side->end, side->stream));
  return {};
}

Status WaitForStandIn(cudaStream_t stream) {
  SideStream* side;
  JAX_MAGI_CUDA_RETURN_IF_ERROR(SideStreamOfDevice(&side));
  JAX_MAGI_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(stream, side->end));
  return {};
}

}  // namespace jax_magi::cuda
