// The registers in which a consumer warpgroup of the backward kernel holds its part of a row tile
// and a column block, the products it issues, and its elementwise computations.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_BLOCK_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_BLOCK_CUH_

#include "cc/cuda/attention/online_softmax.cuh"
#include "cc/cuda/attention/sm90/add_rows.cuh"
#include "cc/cuda/attention/sm90/backward_tile.cuh"
#include "cc/cuda/attention/sm90/hopper.cuh"
#include "cc/cuda/attention/sm90/wgmma.cuh"
#include "cc/cuda/attention/store.cuh"

namespace jax_magi::cuda::sm90 {

// A warpgroup has 64 rows, or one of two roles for the same 64. Products are issued here, but not
// waited for.
template <typename Config>
struct BackwardBlock {
  using Element = typename Config::Element;
  static constexpr int kColumns = Config::kBlockColumns, kClusterSize = Config::kClusterSize;
  // Sizes in bytes.
  static constexpr uint32_t kRowXPanel = Config::kBlockRows * Config::kRowPanelDims * 2;
  static constexpr uint32_t kRowYPanel = Config::kBlockRows * 128;
  static constexpr uint32_t kColumnPanel = kColumns * 128;
  static constexpr int kXDims = Config::kHeadDim, kYDims = Config::kValueDim;

  const BackwardParamsOf<Config>& params;
  BackwardShared<Config>& shared;
  int warpgroup;  // Index of the consumer warpgroup.
  int thread;     // Index in the warpgroup.
  int row_stage;  // The tile's stage. RowStage() tells ptxas that a single stage is 0.
  SoftmaxScale scale;

  float scores[kColumns / 2];  // Later tanh of scores, if there is a cap, or probabilities.
  float dp[kColumns / 2];      // delta - dP.
  uint32_t p[kColumns / 4], ds[kColumns / 4];
  float dx[kXDims / 2], dy[kYDims / 2];
  float dq[Config::kDqRegisters];
  uint32_t row_y[Config::kRowYInRegisters ? Config::kValueDim / 4 : 1];
  // Read before their use, as products keep shared memory busy.
  float2 start[Config::kReadAhead ? kColumns / 8 : 1];

  __device__ __forceinline__ int RowStage() const {
    return Config::kRowStages == 1 ? 0 : row_stage;
  }
  __device__ __forceinline__ const RowTileInfo& Tile() const { return shared.tile[RowStage()]; }
  __device__ __forceinline__ const Element* RowX() const { return shared.row_x[RowStage()]; }
  __device__ __forceinline__ int RowPart() const { return Config::kHasRoles ? 0 : warpgroup; }
  // This thread's row `r`, 0 or 1, in the tile.
  __device__ __forceinline__ int Row(int r) const {
    if constexpr (Config::kHasTerms || Config::kHeadDim > 128) return RowAnew() + 8 * r;
    return RowPart() * 64 + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
  }
  // Row 0 above, computed again at each use. Without terms, the index is signed: the schedules that
  // were tuned have the instructions that this takes.
  __device__ __forceinline__ int RowAnew() const {
    using Index = std::conditional_t<Config::kHasTerms, unsigned, int>;
    const Index thread = RereadThreadIndex();
    return RowPart() * 64 + thread % kWarpgroup / 32 * 16 + thread % 32 / 4;
  }

  // --- Statistics ---

  // Calls fun(e, i, r) for elements 2 * e and 2 * e + 1 of the block, which a thread holds in
  // pairs: pair `i` of columns, row `r`.
  template <typename Fun>
  __device__ __forceinline__ void ForEachPair(Fun fun) {
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) fun(2 * i + r, i, r);
    }
  }

  // The statistics of columns 8 * i + 2 * (thread % 4) and the one after it.
  __device__ __forceinline__ float2 ReadPair(const float (&source)[8]) const {
    return *reinterpret_cast<const float2*>(source + 2 * (thread % 4));
  }

  __device__ __forceinline__ void ReadStatistics(int stage) {
    ReadStarts(stage);
    ReadDeltas(stage);
  }
  __device__ __forceinline__ void ReadStarts(int stage) {
    if constexpr (Config::kReadAhead) {
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) start[i] = ReadPair(shared.statistics[stage][i].start);
    }
  }
  // The product for dP is subtracted from delta.
  __device__ __forceinline__ void ReadDeltas(int stage) {
    ForEachPair([&](int e, int i, int) {
      const float2 delta = ReadPair(shared.statistics[stage][i].delta);
      dp[2 * e] = delta.x;
      dp[2 * e + 1] = delta.y;
    });
  }

  // Loads values in wgmma's operand layout: 16 rows of the warp, 16 dims per step.
  __device__ __forceinline__ void LoadRowY() {
    const int row = RowPart() * 64 + thread / 32 * 16 + thread % 16;
#pragma unroll
    for (int step = 0; step < Config::kValueDim / 16; ++step) {
      const int chunk = 2 * (step % 4) + thread % 32 / 16;
      const Element* panel = shared.row_y + step / 4 * Config::kBlockRows * 64;
      LoadMatrices(panel + row * 64 + (chunk ^ (row % 8)) * 8, row_y + 4 * step);
    }
  }

  // --- Products ---

  __device__ __forceinline__ void IssueScores(int x_stage) {
    const int stage = __shfl_sync(~0u, x_stage, 0);  // Tells the compiler that it is uniform.
    FenceRegisters(scores);
    FenceWgmma();
    constexpr int kPanelDims = Config::kRowPanelDims;
    const AlongOperand<kClusterSize, kPanelDims> rows(RowX() + RowPart() * 64 * kPanelDims,
                                                      kRowXPanel);
    const AlongOperand<kClusterSize> columns(shared.column_x[stage], kColumnPanel);
    Multiply<Element, kColumns, Config::kHeadDim>(rows, columns, scores);
    CommitWgmma();
  }

  __device__ __forceinline__ void IssueDp(int stage) {
    FenceRegisters(dp);
    FenceWgmma();
    const AlongOperand<kClusterSize> columns(shared.column_y[stage], kColumnPanel);
    if constexpr (Config::kRowYInRegisters) {
      Multiply<Element, kColumns, Config::kValueDim, Product::kIsSubtracted>(row_y, columns, dp);
    } else {
      const AlongOperand<kClusterSize> rows(shared.row_y + RowPart() * 64 * 64, kRowYPanel);
      Multiply<Element, kColumns, Config::kValueDim, Product::kIsSubtracted>(rows, columns, dp);
    }
    CommitWgmma();
  }

  __device__ __forceinline__ void IssueDy(int stage) {
    FenceRegisters(dy);
    FenceWgmma();
    const AcrossOperand<kClusterSize> columns(shared.column_y[stage], kColumnPanel);
    Multiply<Element, kYDims, kColumns, Product::kIsAdded>(p, columns, dy);
    CommitWgmma();
  }

  __device__ __forceinline__ void IssueDx(int stage) {
    FenceRegisters(dx);
    FenceWgmma();
    const AcrossOperand<kClusterSize> columns(shared.column_x[stage], kColumnPanel);
    Multiply<Element, kXDims, kColumns, Product::kIsAdded>(ds, columns, dx);
    CommitWgmma();
  }

  // dQ^T[64 dims, queries] = K^T dS^T.
  __device__ __forceinline__ void IssueDq(const Element* source) {
    FenceRegisters(dq);
    FenceWgmma();
    const AcrossOperand<kClusterSize> rows(
        RowX() + DqPanel<Config>(warpgroup, 0) * 64 * Config::kBlockRows, kRowXPanel);
    const AlongOperand<kClusterSize> gradients(source + DqFirstQuery<Config>(warpgroup) * 64,
                                               kColumnPanel);
    Multiply<Element, Config::kDqQueries, Config::kBlockRows>(rows, gradients, dq);
    CommitWgmma();
  }

  // dQ[queries, half of the dims] = dS K.
  __device__ __forceinline__ void IssueDqByQuery(const Element* source) {
    constexpr int kPanelDims = Config::kRowPanelDims;
    constexpr int kDims = Config::kHeadDim / Config::kNumConsumers;
    FenceRegisters(dq);
    FenceWgmma();
    const AlongOperand<kClusterSize> gradients(source, kColumnPanel);
    const AcrossOperand<kClusterSize, kPanelDims> rows(
        RowX() + warpgroup * kDims * Config::kBlockRows, kRowXPanel);
    Multiply<Element, kDims, Config::kBlockRows>(gradients, rows, dq);
    CommitWgmma();
  }

  // --- Element by element ---

  __device__ __forceinline__ void Hide(const BlockInfo& info) {
    const int row = Tile().begin + RowAnew();
    const int rows[2] = {row, row + 8};
    HideScores(info.slice, rows, info.begin + 2 * (thread % 4), scores);
  }

  // The offset of the exponents of pair `i` of columns.
  __device__ __forceinline__ float2 Start(int stage, int i) const {
    return Config::kReadAhead ? start[i] : ReadPair(shared.statistics[stage][i].start);
  }

  __device__ __forceinline__ void Probabilities(int stage) {
    ForEachPair([&](int e, int i, int) {
      const float2 start = Start(stage, i);
      scores[2 * e] = Exp2(scores[2 * e] * scale.log2 + start.x);
      scores[2 * e + 1] = Exp2(scores[2 * e + 1] * scale.log2 + start.y);
      p[e] = PackPair<Element>(scores[2 * e], scores[2 * e + 1]);
    });
  }

  __device__ __forceinline__ void ScoreGradients() {
#pragma unroll
    for (int e = 0; e < kColumns / 4; ++e) {
      // Packed probabilities are rounded, and take half the registers.
      const float2 probability = Config::kKeepsProbabilities
                                     ? make_float2(scores[2 * e], scores[2 * e + 1])
                                     : UnpackPair<Element>(p[e]);
      SetGradients(e, probability.x * -dp[2 * e], probability.y * -dp[2 * e + 1]);
    }
  }

  // With a cap, scores are replaced by their tanh, from which the cap's gradient is computed.
  __device__ __forceinline__ void CapScores() {
#pragma unroll
    for (float& score : scores) score = Cap(score, scale);
  }

  __device__ __forceinline__ void CappedGradients(int stage) {
    ForEachPair([&](int e, int i, int) {
      const float2 start = Start(stage, i);
      const float tanh[2] = {scores[2 * e], scores[2 * e + 1]};
      const float probability[2] = {Exp2(tanh[0] * scale.log2 + start.x),
                                    Exp2(tanh[1] * scale.log2 + start.y)};
      p[e] = PackPair<Element>(probability[0], probability[1]);
      const float slope[2] = {CapSlope(tanh[0]), CapSlope(tanh[1])};
      SetGradients(e, probability[0] * -dp[2 * e] * slope[0],
                   probability[1] * -dp[2 * e + 1] * slope[1]);
    });
  }

  // Computes the probabilities of 16 columns, and the factors of their dP.
  __device__ __forceinline__ void CappedFactors(int stage, int i, uint32_t (&factor)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 start = Start(stage, 2 * i + e / 2);
      const float* pair = scores + 2 * (4 * i + e);
      const float tanh[2] = {Cap(pair[0], scale), Cap(pair[1], scale)};
      const float probability[2] = {Exp2(tanh[0] * scale.log2 + start.x),
                                    Exp2(tanh[1] * scale.log2 + start.y)};
      p[4 * i + e] = PackPair<Element>(probability[0], probability[1]);
      factor[e] =
          PackPair<Element>(probability[0] * CapSlope(tanh[0]), probability[1] * CapSlope(tanh[1]));
    }
  }

  // The same in two steps. In between, the factors of dP are stored where dS will be: each warp
  // reads there only what it wrote.
  __device__ __forceinline__ void CappedProbabilities(int stage, Element* destination) {
    Element* address = DsMatrices(destination);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      uint32_t factor[4];
      CappedFactors(stage, i, factor);
      StoreMatricesTransposed(address + i * 16 * 64, factor);
    }
    __syncwarp();
  }
  // Computes the factors, and stores those of 16 columns contiguously in the thread's place.
  __device__ __forceinline__ void CappedFactors(int stage, uint4* factors) {
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      uint32_t factor[4];
      CappedFactors(stage, i, factor);
      factors[i * kWarpgroup] = make_uint4(factor[0], factor[1], factor[2], factor[3]);
    }
  }
  __device__ __forceinline__ void CappedScoreGradients(Element* source) {
    const Element* address = DsMatrices(source);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      uint32_t factor[4];
      LoadMatricesTransposed(address + i * 16 * 64, factor);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 pair = UnpackPair<Element>(factor[e]);
        const float* dp_pair = dp + 2 * (4 * i + e);
        SetGradients(4 * i + e, pair.x * -dp_pair[0], pair.y * -dp_pair[1]);
      }
    }
    __syncwarp();  // All lanes have read what they overwrite next.
  }

  // With terms, dS is also kept unrounded, in place of dP: it is the gradient of the terms.
  __device__ __forceinline__ void SetGradients(int e, float first, float second) {
    ds[e] = PackPair<Element>(first, second);
    if constexpr (Config::kHasAnyTerms) {
      dp[2 * e] = first;
      dp[2 * e + 1] = second;
    }
  }

  __device__ __forceinline__ static float CapSlope(float tanh) {
    return tanh == -INFINITY ? 0.0f : 1.0f - tanh * tanh;
  }

  // The address of this lane's row in four 8 x 8 matrices of keys by queries: two groups of keys by
  // two groups of queries. The next two groups of queries are 16 rows further on.
  __device__ __forceinline__ Element* DsMatrices(Element* ds) const {
    const int lane = thread % 32, warp = thread / 32;
    Element* panel = ds + RowPart() * 64 * kColumns;
    const int chunk = 2 * warp + lane / 8 % 2;
    const int query = 8 * (lane / 16) + lane % 8;
    return panel + query * 64 + (chunk ^ (lane % 8)) * 8;
  }

  __device__ __forceinline__ void WriteDs(Element* destination) {
    Element* address = DsMatrices(destination);
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      StoreMatricesTransposed(address + i * 16 * 64,
                              {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]});
    }
  }

  // Copies a panel of dQ whose rows are queries from registers to shared memory.
  __device__ __forceinline__ void StoreDqByQuery(const float* dq) {
    constexpr int kDims = Config::kDqPanelDims;
    const int lane = thread % 32;
    // In the first of two groups of eight queries.
    float* place = shared.dq + (warpgroup * Config::kDqQueries + thread / 32 * 16) * kDims +
                   DqSumPlaceByQuery(lane / 4, 2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < kDims / 8; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        *reinterpret_cast<float2*>(place + r * 8 * kDims + DqSumPlaceByQuery(0, 8 * i)) =
            make_float2(dq[4 * i + 2 * r], dq[4 * i + 2 * r + 1]);
      }
    }
  }

  // --- Epilogue ---

  __device__ __forceinline__ void StoreDx(const RowTileInfo& tile) {
    StoreGradient<kXDims>(tile, dx, params.softmax_scale, params.dx, params.head_dim);
  }
  __device__ __forceinline__ void StoreDy(const RowTileInfo& tile) {
    StoreGradient<kYDims>(tile, dy, 1.0f, params.dy, params.value_dim);
  }

  template <int kDims>
  __device__ __forceinline__ void StoreGradient(const RowTileInfo& tile, float (&acc)[kDims / 2],
                                                float factor, void* out, int dim) {
    const float factors[2] = {factor, factor};
    bool is_own[2];
    int64_t offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      is_own[r] = Row(r) < tile.num_rows;
      const int part = Config::kCutsHeads ? 0 : tile.pack_in_head;
      const int64_t batch = int64_t{part} * params.batch + tile.batch;
      const int64_t row = batch * params.work.num_rows + (tile.begin + Row(r));
      offset[r] = (row * params.num_kv_heads + tile.kv_head) * dim;
    }
    // Always true if heads are split. But without this branch, ptxas moves the test whether a block
    // is masked behind a wait in the main loop.
    if (params.is_float) {
      float* base = static_cast<float*>(out);
      float* const rows[2] = {base + offset[0], base + offset[1]};
      if (Config::kCutsHeads && tile.pack_in_head) {
        AddFloatRows<kDims>(acc, factors, rows, is_own, dim, thread);
      } else {
        StoreFloatRows<kDims>(acc, factors, rows, is_own, dim, thread);
      }
    } else {
      Element* base = static_cast<Element*>(out);
      Element* const rows[2] = {base + offset[0], base + offset[1]};
      StoreRows<Element, kDims>(acc, factors, rows, is_own, dim, thread);
    }
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_BLOCK_CUH_
