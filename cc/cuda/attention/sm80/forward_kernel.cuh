// The forward kernel for sm_80 and later: one CTA finishes one (query tile, head) at a time, over
// all slices that touch it; in the last round, it may process a part of the tile's keys
// (key_parts.h).
//
// Keys and values pass through a ring in shared memory, block by block and in turn: while a warp
// multiplies with one of them, cp.async copies the next. All threads copy. The first warp also
// fetches tiles and walks their slices. CTAs share only a work counter, and parts, which are
// reduced in a fixed order: the result is deterministic.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_KERNEL_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_KERNEL_CUH_

#include "cc/cuda/attention/forward_epilogue.cuh"
#include "cc/cuda/attention/online_softmax.cuh"
#include "cc/cuda/attention/sm80/forward_block_terms.cuh"
#include "cc/cuda/attention/sm80/forward_pair.cuh"
#include "cc/cuda/attention/sm80/forward_tile.cuh"
#include "cc/cuda/attention/sm80/mma.cuh"
#include "cc/cuda/attention/sm80/shared_tile.cuh"

namespace jax_magi::cuda::sm80 {

// A warp's rows of one group of 64, as the epilogue sees them.
template <typename Config>
struct GroupRows {
  const ForwardParamsOf<Config>& params;
  RowState& state;
  float (&acc)[Config::kValueDim / 2];
  // The sinks of the rows' heads, or the rows' lse of earlier calls.
  float (&sinks)[2];
  int group, thread;  // `thread` is the index among those that have the group's rows.

  __device__ __forceinline__ int PackedRow(int r) const {
    return group * 64 + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
  }
  __device__ __forceinline__ static int Log2PackOf(const TileInfo&) { return 0; }
};

template <typename Config>
struct Forward {
  using Element = typename Config::Element;
  using Shared = ForwardShared<Config>;
  using Rows = GroupRows<Config>;
  using Epilogue = ForwardEpilogue<Config, Rows>;
  static constexpr int kHeadDim = Config::kHeadDim, kValueDim = Config::kValueDim;
  static constexpr int kBlockN = Config::kBlockN, kStages = Config::kStages;
  static constexpr int kNumThreads = Config::kNumThreads, kRowGroups = Config::kRowGroups;

  const ForwardParamsOf<Config>& params;
  Shared& shared;
  SoftmaxScale scale;

  static constexpr bool kHasPairs = Config::kHasPairs;
  // Pieces of 16 rows of a warp, and its share of a block's keys and of the output's dims.
  static constexpr int kPieces = kHasPairs ? 2 : kRowGroups;
  static constexpr int kShares = kHasPairs ? 2 : 1;
  static constexpr int kKeys = kBlockN / kShares, kDims = kValueDim / kShares;

  float scores[kPieces][kKeys / 2];
  uint32_t p[kPieces][kKeys / 4];
  float acc[kRowGroups][kValueDim / 2];
  RowState state[kPieces];
  float sinks[2];
  uint32_t bias[Config::kHasTerms ? kBlockN / 4 : 1];  // Of a block, if it is in tiles.

  // Read again at each use. In registers, the index and all that is derived from it would be live
  // through the whole loop.
  __device__ __forceinline__ static int Thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
  }
  __device__ __forceinline__ static int Warp() { return Thread() / 32; }
  __device__ __forceinline__ static int Lane() { return Thread() % 32; }

  __device__ __forceinline__ void Run() {
    if (Warp() == 0) {
      shared.parts.Start(params.work, params.parts.parts != nullptr, Lane());
      if (Lane() == 0) shared.item.number = blockIdx.x;
    }
    while (true) {
      if (Warp() == 0) FindTile();
      __syncthreads();
      if (shared.tile.num_blocks < 0) return;
      Compute();
      uint32_t next = 0;
      if (Thread() == 0) next = gridDim.x + atomicAdd(&params.work.counter->next_work, 1);
#pragma unroll
      for (int g = 0; g < kRowGroups; ++g) Finish(g);
      if (Thread() == 0) shared.item.number = next;
      __syncthreads();  // All warps are done with the tile.
    }
  }

  // Called by the first warp.
  __device__ __forceinline__ void FindTile() {
    __syncwarp();
    const uint32_t number = shared.item.number;
    if (!shared.parts.Has(number, params.work, Lane())) {
      if (Lane() == 0) shared.tile.num_blocks = -1;
      return;
    }
    FindWork(params.work, shared.parts, number, Lane(), shared.item);
    const Tile& tile = shared.item.tile;
    if (Lane() == 0) {
      const int head = static_cast<int>(shared.item.pack), kv_head = head / params.group;
      shared.tile = {tile.batch, head,          /*num_heads=*/1, /*log2_pack=*/0,
                     tile.begin, tile.num_rows, tile.num_blocks, shared.item.part};
      const int64_t batch = tile.batch;
      const int64_t queries = batch * params.q_len * params.num_q_heads + head;
      const int64_t keys = batch * params.k_len * params.num_kv_heads + kv_head;
      shared.q = static_cast<const Element*>(params.q) + queries * params.head_dim;
      shared.k = static_cast<const Element*>(params.k) + keys * params.head_dim;
      shared.v = static_cast<const Element*>(params.v) + keys * params.value_dim;
      if constexpr (Config::kHasTerms) {
        const float* slopes = params.terms.slopes;
        shared.slope =
            slopes == nullptr ? 0.0f : slopes[int64_t{tile.batch} * params.num_q_heads + head];
      }
      shared.walk.Start(tile, shared.item.skipped);
    }
    __syncwarp();
    shared.walk.Fill(params.work, tile, /*number=*/0, Lane());
  }

  // --- Copies to shared memory ---

  // Read at each use, to save a register.
  __device__ __forceinline__ int NumBlocks() const { return shared.tile.num_blocks; }

  __device__ __forceinline__ SharedTile<kHeadDim> Queries() const {
    return {SharedAddress(shared.queries)};
  }
  template <int kDim>
  __device__ __forceinline__ SharedTile<kDim> Stage(int stage) const {
    return {SharedAddress(shared.stages) + stage * Config::kStageBytes};
  }
  // The stage of the ring's piece `i`: keys of block 0, values of block 0, keys of block 1 and so
  // on.
  __device__ __forceinline__ static int StageOf(int i) {
    return static_cast<unsigned>(i) % kStages;
  }

  __device__ __forceinline__ void CopyQueries() {
    CopyRows<kNumThreads, Config::kBlockM>(
        Queries(), shared.q, int64_t{params.num_q_heads} * params.head_dim, shared.tile.begin,
        params.q_len, params.head_dim, Thread());
  }

  // Copies keys or values of a block to a stage of the ring, if there is such a block, as a group
  // of copies.
  template <bool kIsKeys>
  __device__ __forceinline__ void CopyBlock(int number, int stage) {
    if (number < NumBlocks()) {
      const int begin = shared.walk.Block(number).begin;
      if constexpr (kIsKeys) {
        CopyRows<kNumThreads, kBlockN>(Stage<kHeadDim>(stage), shared.k,
                                       int64_t{params.num_kv_heads} * params.head_dim, begin,
                                       params.k_len, params.head_dim, Thread());
      } else {
        CopyRows<kNumThreads, kBlockN>(Stage<kValueDim>(stage), shared.v,
                                       int64_t{params.num_kv_heads} * params.value_dim, begin,
                                       params.k_len, params.value_dim, Thread());
      }
    }
    CommitCopies();
  }

  // --- A tile ---

  __device__ __forceinline__ void Compute() {
    if constexpr (Config::kHasTerms) {
      scale = params.terms.scale;
    } else if constexpr (Config::kHasSoftcap) {
      scale = {params.softcap * kLog2E, params.softmax_scale / params.softcap};
    } else {
      scale = {params.softmax_scale * kLog2E, 0.0f};
    }
#pragma unroll
    for (int g = 0; g < kPieces; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        state[g].reference[r] = kNoReference;
        state[g].max[r] = -INFINITY;
        state[g].sum[r] = 0.0f;
      }
    }
#pragma unroll
    for (int g = 0; g < kRowGroups; ++g) {
#pragma unroll
      for (float& x : acc[g]) x = 0.0f;
    }
    if (NumBlocks() == 0) return;
    // When piece i of the ring is used, those up to i + kStages - 1 are being copied.
    CopyQueries();  // In the first group.
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      i % 2 == 0 ? CopyBlock<true>(i / 2, i) : CopyBlock<false>(i / 2, i);
    }
    constexpr bool kIsOdd = kStages % 2 != 0;
#pragma unroll 1
    for (int number = 0; number < NumBlocks(); ++number) {
      // Otherwise what is derived from the number stays in registers.
      asm volatile("" : "+r"(number));
      // The keys are there, and all warps are done with the values of the previous block, whose
      // stage is free.
      WaitForGroups<kStages - 2>();
      __syncthreads();
      CopyBlock<kIsOdd>(number + (kStages - 1) / 2, StageOf(2 * number + kStages - 1));
      if constexpr (Config::kHasTerms) Terms(number).Read(bias);
      MultiplyKeys(StageOf(2 * number));
      Softmax(number);
      // The values are there, and all warps are done with the keys.
      WaitForGroups<kStages - 2>();
      __syncthreads();
      CopyBlock<!kIsOdd>(number + kStages / 2, StageOf(2 * number));
      MultiplyValues(StageOf(2 * number + 1));
      FillWalk(number);
    }
    if constexpr (kHasPairs) {
      __syncthreads();  // The ring is free.
      Pair().Exchange();
    }
  }

  // Describes blocks for later, which the next block's first barrier makes visible.
  __device__ __forceinline__ void FillWalk(int number) {
    constexpr int kPerFill = decltype(shared.walk)::kPerFill;
    if (Warp() == 0 && number % kPerFill == 0 && number + kPerFill < NumBlocks()) {
      shared.walk.Fill(params.work, shared.item.tile, number + kPerFill, Lane());
    }
  }

  // The index among groups of 64 rows.
  __device__ __forceinline__ int Group(int g) const {
    return Config::kNumWarps == 4 ? g : Warp() / 4;
  }
  // The first row of the warp's pieces, and from one of them to the next.
  static constexpr int kRowStep = kHasPairs ? 16 : 64;
  __device__ __forceinline__ static int FirstRow() {
    return kHasPairs ? Warp() / 2 * 32 : Warp() * 16;
  }
  // The position of the thread's first row of a piece; its second is 8 rows below.
  __device__ __forceinline__ int Row(int g) const {
    return shared.tile.begin + FirstRow() + g * kRowStep + Lane() / 4;
  }
  // The share of the keys and of the dims.
  __device__ __forceinline__ static int Share() { return kHasPairs ? Warp() % 2 : 0; }
  // The output of a piece.
  __device__ __forceinline__ float* Sums(int g) {
    return kHasPairs ? acc[0] + g * (kDims / 2) : acc[g];
  }
  __device__ __forceinline__ ForwardPair<Config, Forward> Pair() { return {*this}; }

  __device__ __forceinline__ void MultiplyKeys(int stage) {
    SharedTile<kHeadDim> own = Queries(), own_keys = Stage<kHeadDim>(stage);
    own.address += FirstRow() * own.kRowBytes;
    own_keys.address += Share() * own_keys.Bytes(kKeys);
    const LeftRows<kHeadDim> queries(own, Lane());
    const RightRows<kHeadDim> keys(own_keys, Lane());
#pragma unroll
    for (int g = 0; g < kPieces; ++g) {
#pragma unroll
      for (float& x : scores[g]) x = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      uint32_t a[kPieces][4];
#pragma unroll
      for (int g = 0; g < kPieces; ++g) queries.Load(g * kRowStep, d, a[g]);
#pragma unroll
      for (int n = 0; n < kKeys; n += 16) {
        uint32_t b[4];
        keys.Load(n, d, b);
        MultiplyPieces<Element>(a, b, [&](int g) { return scores[g] + n / 2; });
      }
    }
  }

  __device__ __forceinline__ void MultiplyValues(int stage) {
    const RightColumns<kValueDim> values(Stage<kValueDim>(stage), Lane());
    const auto own = [&](int g, int n) { return p[g] + n / 4; };
    if constexpr (kHasPairs) {
      Pair().MultiplyValues(values, own);
    } else {
      AddProduct(values, own);
    }
  }

  // Adds the product of load(g, n), left operands of keys from `n` on, and `values`, over the keys
  // of a share.
  template <typename Load>
  __device__ __forceinline__ void AddProduct(const RightColumns<kValueDim>& values, Load load) {
#pragma unroll
    for (int n = 0; n < kKeys; n += 16) {
      const uint32_t* a[kPieces];
#pragma unroll
      for (int g = 0; g < kPieces; ++g) a[g] = load(g, n);
#pragma unroll
      for (int d = 0; d < kDims; d += 16) {
        uint32_t b[4];
        values.Load(n, d, b);
        MultiplyPieces<Element>(a, b, [&](int g) { return Sums(g) + d / 2; });
      }
    }
  }

  // Hides masked scores of a piece.
  __device__ __forceinline__ void Hide(const BlockInfo& info, int g) {
    if (info.flags & kMasked) {
      const int row = Row(g), rows[2] = {row, row + 8};
      HideScores(info.slice, rows, info.begin + Share() * kKeys + 2 * (Lane() % 4), scores[g]);
    }
  }

  __device__ __forceinline__ void Softmax(int number) {
    const BlockInfo& info = shared.walk.Block(number);
    if constexpr (kHasPairs) {
#pragma unroll
      for (int g = 0; g < kPieces; ++g) Hide(info, g);
      Pair().Exponentiate();
      Pair().WriteProbabilities();
    } else {
      LogitScale logit;
      if constexpr (Config::kHasTerms) Terms(number).Add(bias, shared.slope, logit, scores[0]);
      // One group after the other: both need more registers than their probabilities, once packed.
#pragma unroll
      for (int g = 0; g < kRowGroups; ++g) {
        Hide(info, g);
        float correction[2];
        if (Exponentiate(logit, state[g], scores[g], correction)) {
#pragma unroll
          for (int i = 0; i < kValueDim / 2; ++i) acc[g][i] *= correction[i / 2 % 2];
        }
        PackProbabilities<Element>(scores[g], p[g]);
      }
    }
  }

  __device__ __forceinline__ bool Exponentiate(const LogitScale& logit, RowState& row_state,
                                               float (&x)[kKeys / 2], float (&correction)[2]) {
    if constexpr (Config::kHasTerms) {
      return OnlineSoftmaxOfLogits</*kMayHaveCap=*/true>(scale, logit, row_state, x, correction);
    } else {
      return OnlineSoftmax<Config::kHasSoftcap>(scale, row_state, x, correction);
    }
  }

  // The terms of a block's scores.
  __device__ __forceinline__ ForwardBlockTerms<Config> Terms(int number) const {
    static_assert(kRowGroups == 1, "there are registers for one");
    return {params, shared.tile, Row(0), shared.walk.Block(number).begin + 2 * (Lane() % 4)};
  }

  // --- A tile's end ---

  __device__ __forceinline__ Rows RowsOf(int g) {
    return {params, state[g], acc[g], sinks, Group(g), Thread() % kPartThreads};
  }

  __device__ __forceinline__ PartJoiner<Config> Joiner(int g) const {
    return {params.parts, shared.tile.part, Group(g), Thread() % kPartThreads};
  }

  // Stores the rows of a group, if this CTA has all of their sums.
  __device__ __forceinline__ void Finish(int g) {
    const TileInfo& tile = shared.tile;
    if (tile.part != 0) {
      // Two joiners, so that no addresses are kept from one to the other.
      if (!Joiner(g).Leave(acc[g], state[g])) return;
      Joiner(g).Join(acc[g], state[g]);
    }
    if (tile.num_rows == 0 || IsKept(tile)) return;
    Rows rows = RowsOf(g);
    Epilogue{rows}.LoadSinks(tile);
    Epilogue{rows}.Store(tile);
  }

  // Whether earlier results stay unchanged, because no row sees a key of this call.
  __device__ __forceinline__ bool IsKept(const TileInfo& tile) const {
    const bool keeps = params.keeps_rows || (params.running_out != nullptr && !params.is_rounded);
    return keeps && tile.num_blocks == 0 && tile.part == 0;
  }
};

template <typename Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinCtas)
    ForwardKernel(const __grid_constant__ ForwardParamsOf<Config> params) {
  extern __shared__ __align__(128) char memory[];
  Forward<Config> forward{params, *reinterpret_cast<ForwardShared<Config>*>(memory)};
  forward.Run();
}

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_KERNEL_CUH_
