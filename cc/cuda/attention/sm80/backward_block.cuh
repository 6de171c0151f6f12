// The registers in which a warp of the backward kernel holds its part of a key tile and of a query
// block, its products, and its elementwise computations.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_BLOCK_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_BLOCK_CUH_

#include "cc/cuda/attention/online_softmax.cuh"
#include "cc/cuda/attention/sm80/backward_block_terms.cuh"
#include "cc/cuda/attention/sm80/backward_config.h"
#include "cc/cuda/attention/sm80/backward_params.cuh"
#include "cc/cuda/attention/sm80/backward_products.cuh"
#include "cc/cuda/attention/sm80/backward_shared.cuh"

namespace jax_magi::cuda::sm80 {

template <typename Config>
struct BackwardBlock {
  using Element = typename Config::Element;
  using Shared = BackwardShared<Config>;
  static constexpr int kChunk = Config::kChunk, kQueries = Config::kQueries;
  static constexpr int kSplit = Config::kSplit;
  // The keys of a group of warps, in pieces of 16.
  static constexpr int kPieces = Config::kPieces, kGroupKeys = 16 * kPieces;
  using KTile = SharedTile<Config::kHeadDim>;
  using VTile = SharedTile<Config::kSharedValueDim>;
  using LastVTile = SharedTile<(Config::kRegisterDims > 0 ? Config::kRegisterDims : 64)>;
  using DoTileOf = SharedTile<Config::kValueDim>;
  using DsTile = SharedTile<kQueries>;

  const BackwardParamsOf<Config>& params;
  Shared& shared;
  int lane;
  int group;  // Which kGroupKeys keys of the tile the warp has.
  int part;   // Which share of their queries, and of their dims.

  // Gradients of the group's keys.
  float dk[kPieces][Config::kKDims / 2], dv[kPieces][Config::kVDims / 2];
  // Left operands: the last dims of the values of the group's keys.
  uint32_t values[kPieces][Config::kRegisterDims > 0 ? Config::kRegisterDims / 16 : 1][4];

  // Determines the thread's place again, so that addresses derived from it do not stay in
  // registers.
  __device__ __forceinline__ void Renew() {
    const int thread = ThreadAnew();
    lane = thread % 32;
    group = thread / 32 / kSplit;
    part = thread / 32 % kSplit;
  }

  __device__ __forceinline__ void ClearGradients() {
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
#pragma unroll
      for (float& x : dk[m]) x = 0.0f;
#pragma unroll
      for (float& x : dv[m]) x = 0.0f;
    }
  }

  // --- Shared memory ---

  __device__ __forceinline__ KTile QTile(int stage) const {
    return {SharedAddress(shared.q[stage])};
  }
  __device__ __forceinline__ DoTileOf DoTile(int stage) const {
    return {SharedAddress(shared.dout[stage])};
  }
  // The queries of the warp's own chunk `own`, of all chunks of a block.
  __device__ __forceinline__ int Chunk(int own) const { return kSplit == 1 ? own : part; }

  __device__ __forceinline__ DsTile GroupDs(int stage) const {
    return {SharedAddress(shared.ds[stage]) + group * DsTile::Bytes(kGroupKeys)};
  }
  // The statistics of queries 8 * i + 2 * (lane % 4), from `first` on, and of the one after it.
  __device__ __forceinline__ float2 ReadPair(const float (&source)[8]) const {
    return *reinterpret_cast<const float2*>(source + 2 * (lane % 4));
  }

  // --- Products ---

  // Loads the values that stay in registers.
  __device__ __forceinline__ void LoadValues(LastVTile tile) {
    Renew();
    const LeftRows<LastVTile::kDim> left({tile.address + group * tile.Bytes(kGroupKeys)}, lane);
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
#pragma unroll
      for (int d = 0; d < Config::kRegisterDims; d += 16) left.Load(16 * m, d, values[m][d / 16]);
    }
  }

  // c[the group's keys, queries of a chunk] += keys * queries^T, over all dims.
  template <int kKeyDim, int kDim>
  __device__ __forceinline__ void MultiplyQueries(SharedTile<kKeyDim> keys,
                                                  SharedTile<kDim> queries, int chunk,
                                                  float (&c)[kPieces][kChunk / 2]) const {
    keys.address += group * keys.Bytes(kGroupKeys);
    queries.address += chunk * queries.Bytes(kChunk);
    // With `lane` instead, the kernels of 128 dims spill a register on sm_120.
    MultiplyDimsOfKeys<Element>(ThreadAnew() % 32, keys, queries, values, c);
  }

  // Calls load(i, a) for 16 queries of a chunk at a time, from query `i` on, and computes
  //   acc[the group's keys, this warp's dims] += a[the group's keys, 16 queries] * columns.
  template <int kDim, int kCount, typename Load>
  __device__ __forceinline__ void MultiplyDims(SharedTile<kDim> columns, int chunk,
                                               float (&acc)[kPieces][kCount], Load load) const {
    constexpr int kDims = 2 * kCount;
    // Otherwise a share may lie in two groups of chunks.
    constexpr bool kIsWhole = kDims % 64 == 0 || 64 % kDims == 0;
    RightColumns<kDim> right({columns.address + chunk * columns.Bytes(kChunk)}, lane);
    const int first = part * kDims;
    if constexpr (kIsWhole) {
      right.lane_address = (right.lane_address ^ (first % 64 * 2)) + first / 64 * 128;
    }
#pragma unroll
    for (int i = 0; i < kChunk; i += 16) {
      uint32_t a[kPieces][4];
      load(i, a);
#pragma unroll
      for (int d = 0; d < kDims; d += 16) {
        uint32_t b[4];
        right.Load(i, kIsWhole ? d : first + d, b);
        MultiplyPieces<Element>(a, b, [&](int m) { return acc[m] + d / 2; });
      }
    }
  }

  // The same with P or dS of own chunk `own`, which is in registers.
  template <int kDim, int kCount>
  __device__ __forceinline__ void MultiplyOwn(const uint32_t (&x)[kPieces][kChunk / 4],
                                              SharedTile<kDim> columns,
                                              float (&acc)[kPieces][kCount], int own = 0) const {
    MultiplyDims(columns, Chunk(own), acc, [&](int i, uint32_t (&a)[kPieces][4]) {
#pragma unroll
      for (int m = 0; m < kPieces; ++m) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[m][j] = x[m][i / 4 + j];
      }
    });
  }

  // The same for the chunks of the other warps that share the keys, from shared memory.
  template <int kDim, int kCount>
  __device__ __forceinline__ void MultiplyOthers(int ds_stage, SharedTile<kDim> columns,
                                                 float (&acc)[kPieces][kCount]) const {
    const LeftRows<kQueries> left(GroupDs(ds_stage), lane);
#pragma unroll
    for (int c = 1; c < kSplit; ++c) {
      const int chunk = (part + c) % kSplit;
      MultiplyDims(columns, chunk, acc, [&](int i, uint32_t (&a)[kPieces][4]) {
#pragma unroll
        for (int m = 0; m < kPieces; ++m) left.Load(16 * m, chunk * kChunk + i, a[m]);
      });
    }
  }

  // Writes a result of own chunk `i`, packed, where dS is.
  __device__ __forceinline__ void Write(int ds_stage, const uint32_t (&x)[kPieces][kChunk / 4],
                                        int own = 0) const {
    const int first_query = Chunk(own) * kChunk;
    const uint32_t address = GroupDs(ds_stage).PairAt(lane / 4, first_query + 2 * (lane % 4));
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
#pragma unroll
      for (int i = 0; i < kChunk / 8; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          StoreShared((address ^ i * 16) + (16 * m + 8 * r) * DsTile::kRowBytes, x[m][2 * i + r]);
        }
      }
    }
  }

  __device__ __forceinline__ void SyncGroup() const {
    NamedSync(kGroupBarrier + group, 32 * kSplit);
  }

  // --- A block ---

  // Of the group's keys and a chunk of queries. Packed factors take half the registers of unpacked
  // ones.
  uint32_t p[kPieces][kChunk / 4];  // Probabilities.
  // Of dP, if they are others. Gradients of terms are sums of dS in float32, so that the factors of
  // calls with terms are not rounded.
  static constexpr bool kHasFactors = Config::kHasSoftcap && !Config::kHasTerms;
  uint32_t factor[kPieces][kHasFactors ? kChunk / 4 : 1];
  float exact_factor[kPieces][Config::kHasTerms ? kChunk / 2 : 1];
  uint32_t ds[kPieces][kChunk / 4];

  // Calls fun(m, e, i) for elements 2 * e and 2 * e + 1 of 16 keys: pair `i` of queries.
  template <typename Fun>
  __device__ __forceinline__ static void ForEachPair(Fun fun) {
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
#pragma unroll
      for (int i = 0; i < kChunk / 8; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) fun(m, 2 * i + r, i);
      }
    }
  }

  // Computes probabilities, and the factors of dP.
  __device__ __forceinline__ void Probabilities(const BlockInfo& info, int stage, int own = 0) {
    Renew();
    const int chunk = Chunk(own);
    const SoftmaxScale& scale = params.scale;
    float scores[kPieces][kChunk / 2] = {};
    MultiplyQueries(KTile{SharedAddress(shared.k)}, QTile(stage), chunk, scores);
    const bool has_cap = !Config::kHasTerms || scale.inverse_cap != 0.0f;
    // Before hidden scores become -inf, which is no tanh.
    if constexpr (Config::kHasTerms) {
      Terms(info, chunk).Add(scores);
      if (has_cap) {
#pragma unroll
        for (int m = 0; m < kPieces; ++m) {
#pragma unroll
          for (float& x : scores[m]) x = Cap(x, scale);
        }
      }
    } else if constexpr (Config::kHasSoftcap) {
#pragma unroll
      for (int m = 0; m < kPieces; ++m) {
#pragma unroll
        for (float& x : scores[m]) x = Tanh(x * scale.inverse_cap);
      }
    }
    if (info.is_masked) {
#pragma unroll
      for (int m = 0; m < kPieces; ++m) {
        const int row = shared.walk.tile.begin + kGroupKeys * group + 16 * m + lane / 4;
        const int rows[2] = {row, row + 8};
        HideScores(info.slice, rows, info.begin + chunk * kChunk + 2 * (lane % 4), scores[m]);
      }
    }
    const QueryStatistic* statistics = shared.statistics[stage] + chunk * (kChunk / 8);
    ForEachPair([&](int m, int e, int i) {
      const float2 start = ReadPair(statistics[i].start);
      const float x = scores[m][2 * e], y = scores[m][2 * e + 1];
      const float first = Exp2(x * scale.log2 + start.x);
      const float second = Exp2(y * scale.log2 + start.y);
      p[m][e] = PackPair<Element>(first, second);
      if constexpr (Config::kHasTerms) {
        exact_factor[m][2 * e] = has_cap ? first * CapSlope(x) : first;
        exact_factor[m][2 * e + 1] = has_cap ? second * CapSlope(y) : second;
      } else if constexpr (Config::kHasSoftcap) {
        factor[m][e] = PackPair<Element>(first * CapSlope(x), second * CapSlope(y));
      }
    });
  }

  // Computes dS from probabilities and dP.
  __device__ __forceinline__ void ScoreGradients(const BlockInfo& info, int q_stage, int do_stage,
                                                 int own = 0) {
    Renew();
    const int chunk = Chunk(own);
    float dp[kPieces][kChunk / 2];  // dP - delta.
    const QueryStatistic* statistics = shared.statistics[q_stage] + chunk * (kChunk / 8);
    ForEachPair([&](int m, int e, int i) {
      const float2 delta = ReadPair(statistics[i].delta);
      dp[m][2 * e] = -delta.x;
      dp[m][2 * e + 1] = -delta.y;
    });
    MultiplyQueries(VTile{SharedAddress(shared.v)}, DoTile(do_stage), chunk, dp);
    ForEachPair([&](int m, int e, int) {
      float2 of_dp;
      if constexpr (Config::kHasTerms) {
        of_dp = make_float2(exact_factor[m][2 * e], exact_factor[m][2 * e + 1]);
      } else if constexpr (Config::kHasSoftcap) {
        of_dp = UnpackPair<Element>(factor[m][e]);
      } else {
        of_dp = UnpackPair<Element>(p[m][e]);
      }
      float* pair = dp[m] + 2 * e;
      pair[0] *= of_dp.x;
      pair[1] *= of_dp.y;
      ds[m][e] = PackPair<Element>(pair[0], pair[1]);
    });
    if constexpr (Config::kHasTerms) Terms(info, chunk).AddGradients(dp, shared.key_sums, part);
  }

  // --- Terms ---

  __device__ __forceinline__ BackwardBlockTerms<Config> Terms(const BlockInfo& info,
                                                              int chunk) const {
    const int first_key = kGroupKeys * group;
    return {params, shared.walk.tile, info, lane, first_key, chunk * kChunk};
  }

  // Adds the sums by key of all warps that share keys to memory, once they are complete.
  __device__ __forceinline__ void AddKeySums(const BlockInfo& info) {
    Renew();
    if (part == 0) Terms(info, 0).AddKeySums(shared.key_sums);
  }

  // Stores what the warp has written of dS in the gradient of a bias.
  __device__ __forceinline__ void StoreBiasGradient(const BlockInfo& info, int ds_stage) {
    if (params.gradients.dbias == nullptr) return;
    __syncwarp();
    Renew();
    Terms(info, part).StoreDs(GroupDs(ds_stage));
  }

  // --- Epilogue ---

  __device__ __forceinline__ void StoreGradients() {
    Renew();
    Store<Config::kKDims>(dk, params.softmax_scale, params.dk, params.head_dim);
    Store<Config::kVDims>(dv, 1.0f, params.dv, params.value_dim);
  }

  template <int kDims>
  __device__ __forceinline__ void Store(const float (&acc)[kPieces][kDims / 2], float factor,
                                        void* out, int dim) const {
    const KeyGradients<Config> gradients{params, shared, out, dim, factor};
    gradients.template Store<kDims>(acc, kGroupKeys * group, part * kDims, lane);
  }
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_BLOCK_CUH_
