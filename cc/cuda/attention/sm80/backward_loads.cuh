// The copies of the backward kernel from memory to shared memory.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_LOADS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_LOADS_CUH_

#include "cc/cuda/attention/sm80/backward_shared.cuh"

namespace jax_magi::cuda::sm80 {

// Called by kThreads threads, the first of which has an index that is a multiple of kThreads.
template <typename Config, int kThreads = Config::kThreads>
struct BackwardLoads {
  using Element = typename Config::Element;
  const BackwardParamsOf<Config>& params;
  BackwardShared<Config>& shared;

  __device__ __forceinline__ void K() const {
    const Tile& tile = shared.walk.tile;
    CopyTile<Config::kKeys, Config::kHeadDim>(shared.k, params.k, tile.batch, params.k_len,
                                              params.num_kv_heads, shared.walk.KvHead(params.walk),
                                              tile.begin, params.head_dim);
  }
  __device__ __forceinline__ void V() const {
    const Tile& tile = shared.walk.tile;
    CopyTile<Config::kKeys, Config::kSharedValueDim>(
        shared.v, params.v, tile.batch, params.k_len, params.num_kv_heads,
        shared.walk.KvHead(params.walk), tile.begin, params.value_dim);
  }

  // The values that stay in registers, by way of the memory for dO.
  __device__ __forceinline__ void LastValues() const {
    const Tile& tile = shared.walk.tile;
    static_assert(sizeof(shared.dout[0]) >=
                  Config::kKeys * Config::kRegisterDims * sizeof(Element));
    CopyTile<Config::kKeys, Config::kRegisterDims>(
        shared.dout[0], params.v, tile.batch, params.k_len, params.num_kv_heads,
        shared.walk.KvHead(params.walk), tile.begin, params.value_dim, Config::kSharedValueDim);
  }

  __device__ __forceinline__ void Q(const BlockInfo& info, int stage) const {
    const int batch = shared.walk.tile.batch;
    CopyTile<Config::kQueries, Config::kHeadDim>(shared.q[stage], params.q, batch, params.q_len,
                                                 params.num_q_heads, info.head, info.begin,
                                                 params.head_dim);
    constexpr int kBytes = sizeof(shared.statistics[stage]);
    static_assert(kBytes / 16 <= kThreads, "a chunk per thread");
    const int thread = ThreadAnew() % kThreads;
    if (thread < kBytes / 16) {
      const int64_t head = int64_t{batch} * params.num_q_heads + info.head;
      const auto* from = reinterpret_cast<const char*>(
          params.statistics + (head * params.padded_queries + info.begin) / 8);
      CopyChunk(SharedAddress(shared.statistics[stage]) + 16 * thread, from + 16 * thread,
                /*is_inside=*/true);
    }
  }

  __device__ __forceinline__ void Do(const BlockInfo& info, int stage) const {
    CopyTile<Config::kQueries, Config::kValueDim>(
        shared.dout[stage], params.dout, shared.walk.tile.batch, params.q_len, params.num_q_heads,
        info.head, info.begin, params.value_dim);
  }

 private:
  // Rows from `begin` on of a head of a tensor [batch, length, num_heads, dim], dims from
  // `first_dim` on.
  template <int kRows, int kDim>
  __device__ __forceinline__ void CopyTile(Element* to, const void* from, int batch, int length,
                                           int num_heads, int head, int begin, int dim,
                                           int first_dim = 0) const {
    const int64_t stride = int64_t{num_heads} * dim;
    const auto* row0 = static_cast<const Element*>(from) + batch * length * stride +
                       int64_t{head} * dim + first_dim;
    CopyRows<kThreads, kRows>(SharedTile<kDim>{SharedAddress(to)}, row0, stride, begin, length,
                              dim - first_dim, ThreadAnew() % kThreads);
  }
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_LOADS_CUH_
