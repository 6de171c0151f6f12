// The backward kernel's loop over blocks when warps have one of two roles.
//
// Warps of the first role compute S, P and dV; those of the second compute dP, dS and dK. All of
// them compute dQ. P and dS go through shared memory.
//
// With 256 dims, loads from shared memory limit the products. A warp that computes larger parts of
// fewer products loads less: an operand serves 32 keys and 32 queries of the scores, and all keys
// of the gradients.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_ROLES_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_ROLES_CUH_

#include "cc/cuda/attention/online_softmax.cuh"
#include "cc/cuda/attention/sm80/backward_dq.cuh"
#include "cc/cuda/attention/sm80/backward_loads.cuh"
#include "cc/cuda/attention/sm80/backward_products.cuh"
#include "cc/cuda/attention/sm80/backward_shared.cuh"

namespace jax_magi::cuda::sm80 {

// The part of a warp: scores, or dP, of 16 * kPieces keys and kChunk queries; dV, or dK, of all
// keys of the tile and kDims dims.
template <typename Config>
struct RoleBlock {
  using Element = typename Config::Element;
  using Shared = BackwardShared<Config>;
  static constexpr int kRoleWarps = Config::kGroups * Config::kSplit;
  static constexpr int kRoleThreads = 32 * kRoleWarps;
  static constexpr int kPieces = Config::kPieces, kGroupKeys = 16 * kPieces;
  static constexpr int kQueries = Config::kQueries, kChunk = Config::kChunk;
  static constexpr int kRows = Config::kKeys / 16, kDims = Config::kHeadDim / kRoleWarps;
  static constexpr int kRegisterDims = Config::kRegisterDims;
  static constexpr int kP = 0, kDs = 1;  // Their stages in shared memory.
  using KTile = SharedTile<Config::kHeadDim>;
  using VTile = SharedTile<Config::kSharedValueDim>;
  using LastVTile = SharedTile<(kRegisterDims > 0 ? kRegisterDims : 64)>;
  using QueryTile = SharedTile<Config::kHeadDim>;  // Also of dO.
  using DsTile = SharedTile<kQueries>;
  static_assert(Config::kHeadDim == Config::kValueDim, "both roles do the same work");
  static_assert(!Config::kHasTerms && Config::kDsStages == 2);
  static_assert(Config::kQStages == 1 && Config::kDoStages == 1);

  const BackwardParams& params;
  Shared& shared;

  float gradients[kRows][kDims / 2];  // dV, or dK.
  // Left operands of the second role: the last dims of values.
  uint32_t values[kPieces][kRegisterDims > 0 ? kRegisterDims / 16 : 1][4];

  // Determined again at each use, so that addresses derived from them do not stay in registers.
  __device__ __forceinline__ static bool IsFirstRole() { return ThreadAnew() < kRoleThreads; }
  __device__ __forceinline__ static int Lane() { return ThreadAnew() % 32; }
  __device__ __forceinline__ static int Warp() { return ThreadAnew() / 32 % kRoleWarps; }
  // Which keys and which queries of the scores.
  __device__ __forceinline__ static int Group() { return Warp() / Config::kSplit; }
  __device__ __forceinline__ static int Part() { return Warp() % Config::kSplit; }

  __device__ __forceinline__ void ClearGradients() {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (float& x : gradients[m]) x = 0.0f;
    }
  }

  __device__ __forceinline__ QueryTile Q() const { return {SharedAddress(shared.q[0])}; }
  __device__ __forceinline__ QueryTile Do() const { return {SharedAddress(shared.dout[0])}; }

  // --- Products ---

  // Loads the values that stay in registers.
  __device__ __forceinline__ void LoadValues(LastVTile tile) {
    tile.address += Group() * tile.Bytes(kGroupKeys);
    const LeftRows<LastVTile::kDim> left(tile, Lane());
#pragma unroll
    for (int m = 0; m < kPieces; ++m) {
#pragma unroll
      for (int d = 0; d < kRegisterDims; d += 16) left.Load(16 * m, d, values[m][d / 16]);
    }
  }

  // c[the group's keys, queries of the part] += keys * queries^T, over all dims.
  template <int kKeyDim>
  __device__ __forceinline__ void MultiplyQueries(SharedTile<kKeyDim> keys, QueryTile queries,
                                                  float (&c)[kPieces][kChunk / 2]) const {
    keys.address += Group() * keys.Bytes(kGroupKeys);
    queries.address += Part() * queries.Bytes(kChunk);
    MultiplyDimsOfKeys<Element>(Lane(), keys, queries, values, c);
  }

  // gradients += x[all keys, queries] * columns[queries, the warp's dims], where x is P or dS.
  __device__ __forceinline__ void AddGradients(int x_stage, QueryTile columns) {
    const int lane = Lane();
    const LeftRows<kQueries> left(DsTile{SharedAddress(shared.ds[x_stage])}, lane);
    RightColumns<QueryTile::kDim> right(columns, lane);
    static_assert(kDims % 64 == 0, "whole groups of chunks");
    right.lane_address += Warp() * kDims * 2;
#pragma unroll
    for (int i = 0; i < kQueries; i += 16) {
      uint32_t a[kRows][4];
#pragma unroll
      for (int m = 0; m < kRows; ++m) left.Load(16 * m, i, a[m]);
#pragma unroll
      for (int d = 0; d < kDims; d += 16) {
        uint32_t b[4];
        right.Load(i, d, b);
        MultiplyPieces<Element>(a, b, [&](int m) { return gradients[m] + d / 2; });
      }
    }
  }

  // --- Scores ---

  // Calls fun(m, e, address, statistic) for elements 2 * e and 2 * e + 1 of 16 keys: where the pair
  // is in the first stage of shared.ds, and in the statistics read() of their queries.
  template <typename Read, typename Fun>
  __device__ __forceinline__ void ForEachPair(Read read, Fun fun) const {
    const int lane = Lane();
    const DsTile tile{SharedAddress(shared.ds[kP]) + Group() * DsTile::Bytes(kGroupKeys)};
    const uint32_t first = tile.PairAt(lane / 4, Part() * kChunk + 2 * (lane % 4));
    const QueryStatistic* statistics = shared.statistics[0] + Part() * (kChunk / 8);
#pragma unroll
    for (int i = 0; i < kChunk / 8; ++i) {
      const float* source = read(statistics[i]);
      const float2 statistic = *reinterpret_cast<const float2*>(source + 2 * (lane % 4));
#pragma unroll
      for (int m = 0; m < kPieces; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          fun(m, 2 * i + r, (first ^ i * 16) + (16 * m + 8 * r) * DsTile::kRowBytes, statistic);
        }
      }
    }
  }
  static constexpr uint32_t kToDs = DsTile::Bytes(Config::kKeys);  // From P to dS.

  // Writes probabilities, and with a cap also the factors of dP, where dS will be. Calls wait()
  // before that.
  template <typename Wait>
  __device__ __forceinline__ void WriteProbabilities(const BlockInfo& info, Wait wait) const {
    float scores[kPieces][kChunk / 2] = {};
    MultiplyQueries(KTile{SharedAddress(shared.k)}, Q(), scores);
    const SoftmaxScale& scale = params.scale;
    if constexpr (Config::kHasSoftcap) {
      // Before hidden scores become -inf, which is no tanh.
#pragma unroll
      for (int m = 0; m < kPieces; ++m) {
#pragma unroll
        for (float& x : scores[m]) x = Tanh(x * scale.inverse_cap);
      }
    }
    if (info.is_masked) {
      const int lane = Lane();
#pragma unroll
      for (int m = 0; m < kPieces; ++m) {
        const int row = shared.walk.tile.begin + kGroupKeys * Group() + 16 * m + lane / 4;
        const int rows[2] = {row, row + 8};
        HideScores(info.slice, rows, info.begin + Part() * kChunk + 2 * (lane % 4), scores[m]);
      }
    }
    wait();
    ForEachPair([](const QueryStatistic& statistic) { return statistic.start; },
                [&](int m, int e, uint32_t address, float2 start) {
                  const float x = scores[m][2 * e], y = scores[m][2 * e + 1];
                  const float first = Exp2(x * scale.log2 + start.x);
                  const float second = Exp2(y * scale.log2 + start.y);
                  StoreShared(address, PackPair<Element>(first, second));
                  if constexpr (Config::kHasSoftcap) {
                    StoreShared(address + kToDs,
                                PackPair<Element>(first * CapSlope(x), second * CapSlope(y)));
                  }
                });
  }

  // Computes dP, calls wait(), and writes dS.
  template <typename Wait>
  __device__ __forceinline__ void WriteScoreGradients(Wait wait) const {
    float dp[kPieces][kChunk / 2] = {};
    MultiplyQueries(VTile{SharedAddress(shared.v)}, Do(), dp);
    wait();
    ForEachPair(
        [](const QueryStatistic& statistic) { return statistic.delta; },
        [&](int m, int e, uint32_t address, float2 delta) {
          const float2 factor =
              UnpackPair<Element>(LoadShared(Config::kHasSoftcap ? address + kToDs : address));
          StoreShared(address + kToDs, PackPair<Element>(factor.x * (dp[m][2 * e] - delta.x),
                                                         factor.y * (dp[m][2 * e + 1] - delta.y)));
        });
  }

  // --- Epilogue ---

  __device__ __forceinline__ void StoreGradients() const {
    const KeyGradients<Config> of_values{params, shared, params.dv, params.value_dim, 1.0f};
    const KeyGradients<Config> of_keys{params, shared, params.dk, params.head_dim,
                                       params.softmax_scale};
    (IsFirstRole() ? of_values : of_keys)
        .template Store<kDims>(gradients, /*first_key=*/0, Warp() * kDims, Lane());
  }
};

// All blocks of a tile.
template <typename Config>
struct RoleLoop {
  using Block = RoleBlock<Config>;
  static constexpr int kThreads = Config::kThreads, kRoleThreads = Block::kRoleThreads;
  const BackwardParams& params;
  BackwardShared<Config>& shared;
  Block& block;
  BackwardLoads<Config, kRoleThreads> loads;

  __device__ __forceinline__ const BlockInfo& Info(uint32_t n) const { return shared.block[n % 4]; }

  // advance(info) sets the block after the next one; one warp does so.
  template <typename Advance>
  __device__ __forceinline__ void Run(Advance advance) {
    if (Info(0).head < 0) return;
    if (Block::IsFirstRole()) {
      loads.K();
    } else {
      if constexpr (Config::kRegisterDims > 0) {
        loads.LastValues();
        CommitCopies();
        WaitForGroups<0>();
        NamedSync(kSecondRole, kRoleThreads);
        block.LoadValues({SharedAddress(shared.dout[0])});
      }
      loads.V();
    }
    // The dQ of a block comes an iteration later, while Q and dO of the next are being copied.
    for (uint32_t n = 0;; ++n) {
      // dS of the block before is complete, and its Q and dO are no longer needed.
      __syncthreads();
      const bool has_block = Info(n).head >= 0;
      if (has_block) {
        if (Block::IsFirstRole()) {
          loads.Q(Info(n), 0);
        } else {
          loads.Do(Info(n), 0);
        }
        CommitCopies();
        advance(shared.block[(n + 2) % 4]);
      }
      if (n > 0) BackwardDq<Config>{params, shared}.Add(Info(n - 1), Block::kDs);
      if (!has_block) break;
      WaitForGroups<0>();
      if (Block::IsFirstRole()) {
        NamedSync(kFirstRole, kRoleThreads);  // Q is complete.
        // The second role is also done with dS of the block before.
        block.WriteProbabilities(Info(n), [] { NamedSync(kDoIsReady, kThreads); });
        // Each thread has waited for its copies before it arrives, so Q is complete for the second
        // role, too: an arrival at a barrier is ordered before the end of a wait at the same one.
        // compute-sanitizer's racecheck reports a race here. It does so, too, if all threads wait
        // at this barrier (bar.sync), and if another one is for Q alone.
        NamedArrive(kPIsReady, kThreads);
        NamedSync(kFirstRole, kRoleThreads);
        block.AddGradients(Block::kP, block.Do());
      } else {
        NamedArrive(kDoIsReady, kThreads);
        NamedSync(kSecondRole, kRoleThreads);  // dO is complete.
        block.WriteScoreGradients([] { NamedSync(kPIsReady, kThreads); });
        NamedSync(kSecondRole, kRoleThreads);  // dS is complete.
        block.AddGradients(Block::kDs, block.Q());
      }
    }
  }
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_BACKWARD_ROLES_CUH_
