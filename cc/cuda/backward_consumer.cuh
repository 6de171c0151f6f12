// The backward kernel's consumers: warpgroups with 64 rows each, or with half the dims of all 64.

#ifndef JAX_MAGI_CUDA_BACKWARD_CONSUMER_CUH_
#define JAX_MAGI_CUDA_BACKWARD_CONSUMER_CUH_

#include "cc/cuda/backward_producer.cuh"
#include "cc/cuda/hopper.cuh"
#include "cc/cuda/softmax.cuh"
#include "cc/cuda/store.cuh"

namespace jax_magi::cuda {

// Named barriers.
constexpr int kDsWritten = 1;
constexpr int kFirstTurn = 2;  // Of a warpgroup; the others' follow.

template <typename Config>
struct BackwardConsumer {
  using Element = typename Config::Element;
  static constexpr int kColumns = Config::kBlockColumns;
  static constexpr uint32_t kRowPanel = Config::kBlockRows * 128;  // Bytes.
  static constexpr uint32_t kColumnPanel = kColumns * 128;
  // Columns of dx and dy that this warpgroup holds.
  static constexpr int kXDims = Config::kHeadDim / Config::kDimGroups;
  static constexpr int kYDims = Config::kValueDim / Config::kDimGroups;

  const BackwardParams& params;
  BackwardShared<Config>& shared;
  int group;   // Which consumer warpgroup.
  int thread;  // In the warpgroup.
  SoftmaxScale scale;
  RingPosition<Config::kXStages> x_ring;
  uint32_t num_done = 0;  // Blocks: the position in the other rings.

  float scores[kColumns / 2];  // Then tanh of them, with a cap, or probabilities.
  float dp[kColumns / 2];      // delta - dP.
  uint32_t p[kColumns / 4], ds[kColumns / 4];
  float dx[kXDims / 2], dy[Config::kByKeys ? kYDims / 2 : 1];
  float dq[Config::kDqQueries / 2];
  float row_start[2], row_delta[2];  // Where rows are queries.
  // Where columns are: read ahead of their use, as shared memory is busy with products.
  float2 start[Config::kReadAhead ? kColumns / 8 : 1];

  __device__ __forceinline__ int RowGroup() const { return Config::kDimGroups == 1 ? group : 0; }
  __device__ __forceinline__ int DimGroup() const { return Config::kDimGroups == 1 ? 0 : group; }
  // This thread's row `r`, 0 or 1, in the tile.
  __device__ __forceinline__ int Row(int r) const {
    return RowGroup() * 64 + thread / 32 * 16 + thread % 32 / 4 + 8 * r;
  }
  // The same of row 0, found anew each time: it would last for the whole loop, and registers do
  // not.
  __device__ __forceinline__ int RowAnew() const {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return RowGroup() * 64 + thread % kWarpgroup / 32 * 16 + thread % 32 / 4;
  }

  __device__ __forceinline__ void Run() {
    if constexpr (Config::kHasSoftcap) {
      scale = {params.softcap * kLog2E, params.softmax_scale / params.softcap};
    } else {
      scale = {params.softmax_scale * kLog2E, 0.0f};
    }
    if (Config::kTakesTurns && group == Config::kNumConsumers - 1) PassTurn();
    for (uint32_t phase = 0;;) {
      Wait(&shared.row_full, phase);
      // The same in a warp, for the compiler: else it would compute descriptors in each thread.
      const int num_blocks = LoadByWarp(shared.tile.num_blocks);
      if (num_blocks < 0) break;
#pragma unroll
      for (float& x : dx) x = 0.0f;
#pragma unroll
      for (float& y : dy) y = 0.0f;
      if constexpr (!Config::kByKeys) LoadRowStatistics();
      if (num_blocks > 0) {
        if constexpr (Config::kTakesTurns) {
          ComputeInTurns();
        } else {
          Compute();
        }
      }
      const RowTileInfo tile = shared.tile;
      // From there, as no register lasts through Compute().
      phase = LoadByWarp(shared.tile.next_phase);
      Arrive(&shared.row_empty);
      Store(tile);
    }
    if (Config::kTakesTurns && group == 0) TakeTurn();  // That nobody will take.
    if constexpr (Config::kHasDq) {
      Wait(&shared.dq_empty[group], DqPhase(num_done % 2, 0) ^ 1);
      if (thread == 0) shared.dq_target[group].dim = -1;
      ArriveByWarp(&shared.dq_full[group], thread);
    }
  }

  __device__ __forceinline__ void LoadRowStatistics() {
    const RowTileInfo& tile = shared.tile;
    const int64_t first =
        (int64_t{tile.batch} * params.num_q_heads + tile.row_head) * params.q_len + tile.begin;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool is_own = Row(r) < tile.num_rows;
      row_start[r] = is_own ? params.start[first + Row(r)] : -INFINITY;
      if constexpr (Config::kStartIsScore) row_start[r] *= scale.log2;
      row_delta[r] = is_own ? params.delta[first + Row(r)] : 0.0f;
    }
  }

  __device__ __forceinline__ void Compute() {
    WaitForX();
    StartScores();
    IssueScores();
    ReadStatistics();
    WaitWgmma<0>();
    // No product is in flight from one turn of the loop to the next, or ptxas would run all
    // products one by one.
    for (bool is_last = false; !is_last;) {
      const RingPosition<Config::kXStages> x_before = x_ring;
      const int x_stage = x_ring.stage, y_stage = YStage();
      const int ds_stage = num_done % 2;
      const int flags = BlockFlags();
      is_last = flags & kLast;
      WaitForY();
      IssueDp(y_stage);
      FenceRegisters(scores);
      if (flags & kMasked) Hide(shared.block[x_stage]);
      if constexpr (Config::kHasSoftcap) {
        CapScores();
        WaitWgmma<0>();
        FenceRegisters(dp);
        CappedGradients(x_stage);
        if constexpr (Config::kByKeys) IssueDy(y_stage);
      } else {
        Probabilities(x_stage);
        if constexpr (Config::kByKeys) {
          IssueDy(y_stage);
          WaitWgmma<1>();
        } else {
          HoldProbabilities();
          WaitWgmma<0>();
        }
        FenceRegisters(dp);
        ScoreGradients();
      }
      if constexpr (Config::kHasDq) WriteDs(Ds(ds_stage));
      IssueDx(x_stage);
      if constexpr (Config::kByKeys) {
        WaitWgmma<1>();
        FenceRegisters(dy);
      }
      ArriveByWarp(&shared.y_empty[y_stage], thread);
      ++num_done;
      x_ring.Advance();
      if constexpr (Config::kHasDq) {
        FenceAsyncProxy();
        NamedSync(kDsWritten, Config::kNumConsumers * kWarpgroup);
#pragma unroll
        for (int step = 0; step < Config::kDqSteps; ++step) {
          IssueDq(Ds(ds_stage), step);
          if (step < Config::kDqSteps - 1) {
            WaitWgmma<0>();
          } else {
            if constexpr (Config::kWaitsForDx) {
              WaitWgmma<1>();
              FenceRegisters(dx);
            }
            IssueNextScores(is_last ? x_before : x_ring);
            WaitWgmma<1>();
          }
          FenceRegisters(dq);
          FenceRegisters(dx);
          AddDq(x_stage, ds_stage, step);
        }
      } else {
        IssueNextScores(is_last ? x_before : x_ring);
        WaitWgmma<1>();
        FenceRegisters(dx);
      }
      Arrive(&shared.x_empty[x_stage]);
      ReadStatistics();
      WaitWgmma<0>();
    }
  }

  // All products at once, then all that is done element by element: while one warpgroup has the
  // tensor cores, another computes. Left alone, they would all do the same at the same time.
  __device__ __forceinline__ void ComputeInTurns() {
    int flags = PrepareTurn();
    TakeTurn();
    IssueScores();
    IssueDp(YStage());
    PassTurn();
    FinishInTurn(flags);
    while (!(flags & kLast)) {
      const int x_stage = x_ring.stage, y_stage = YStage();
      x_ring.Advance();
      ++num_done;
      flags = PrepareTurn();
      TakeTurn();
      if constexpr (Config::kByKeys) IssueDy(y_stage);
      IssueDx(x_stage);
      IssueScores();
      IssueDp(YStage());
      PassTurn();
      WaitWgmma<2>();
      FenceRegisters(dx);
      FenceRegisters(dy);
      Arrive(&shared.x_empty[x_stage]);
      ArriveByWarp(&shared.y_empty[y_stage], thread);
      FinishInTurn(flags);
    }
    TakeTurn();
    if constexpr (Config::kByKeys) IssueDy(YStage());
    IssueDx(x_ring.stage);
    PassTurn();
    WaitWgmma<0>();
    FenceRegisters(dx);
    FenceRegisters(dy);
    Arrive(&shared.x_empty[x_ring.stage]);
    ArriveByWarp(&shared.y_empty[YStage()], thread);
    x_ring.Advance();
    ++num_done;
  }

  // Returns the block's flags.
  __device__ __forceinline__ int PrepareTurn() {
    WaitForX();
    WaitForY();
    ReadStatistics();
    FenceRegisters(dp);  // Else ptxas copies them after the first product, and waits for it.
    StartScores();
    return BlockFlags();
  }

  // From scores, and dP a little later, to dS.
  __device__ __forceinline__ void FinishInTurn(int flags) {
    WaitWgmma<1>();
    FenceRegisters(scores);
    if (flags & kMasked) Hide(shared.block[x_ring.stage]);
    Probabilities(x_ring.stage);
    HoldProbabilities();
    WaitWgmma<0>();
    FenceRegisters(dp);
    ScoreGradients();
  }

  __device__ __forceinline__ void TakeTurn() { NamedSync(kFirstTurn + group, 2 * kWarpgroup); }
  __device__ __forceinline__ void PassTurn() {
    NamedArrive(kFirstTurn + (group + 1) % Config::kNumConsumers, 2 * kWarpgroup);
  }

  __device__ __forceinline__ int BlockFlags() const {
    return LoadByWarp(shared.block[x_ring.stage].flags);
  }
  __device__ __forceinline__ int YStage() const { return num_done % Config::kYStages; }

  __device__ __forceinline__ void WaitForY() {
    Wait(&shared.y_full[YStage()], num_done / Config::kYStages % 2);
  }
  __device__ __forceinline__ void WaitForX() { Wait(&shared.x_full[x_ring.stage], x_ring.phase); }

  // dP is subtracted from delta by its product.
  __device__ __forceinline__ void ReadStatistics() {
    const int stage = x_ring.stage;
    if constexpr (Config::kReadAhead) {
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) start[i] = ReadPair(shared.start[stage], i);
    }
    ForEachPair([&](int e, int i, int r) {
      const float2 delta = Config::kByKeys ? ReadPair(shared.delta[stage], i)
                                           : make_float2(row_delta[r], row_delta[r]);
      dp[2 * e] = delta.x;
      dp[2 * e + 1] = delta.y;
    });
  }

  // Calls fun(e, i, r) for elements 2 * e and 2 * e + 1 of the block, in which a thread has them in
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
  __device__ __forceinline__ float2 ReadPair(const float* source, int i) const {
    return *reinterpret_cast<const float2*>(source + 8 * i + 2 * (thread % 4));
  }

  // After the last block these are of no use, but they must not depend on a condition, and neither
  // must the wait for `position`: then it is the last block's own.
  __device__ __forceinline__ void IssueNextScores(RingPosition<Config::kXStages> position) {
    Wait(&shared.x_full[position.stage], position.phase);
    StartScores();
    IssueScores();
  }

  // With -lse: read for the exponents, it would come late, and there are no registers to read it
  // ahead.
  __device__ __forceinline__ void StartScores() {
    if constexpr (Config::kStartsScores) {
      ForEachPair([&](int e, int i, int) {
        const float2 start = ReadPair(shared.start[x_ring.stage], i);
        scores[2 * e] = start.x;
        scores[2 * e + 1] = start.y;
      });
      FenceRegisters(scores);
    }
  }

  // --- Products ---

  __device__ __forceinline__ void IssueScores() {
    const int stage = __shfl_sync(~0u, x_ring.stage, 0);  // The same in a warp, for the compiler.
    constexpr Product kProduct = Config::kStartsScores ? Product::kIsAdded : Product::kIsResult;
    FenceRegisters(scores);
    FenceWgmma();
    MultiplyRowsKeys<Element, kColumns, Config::kHeadDim, kProduct>(
        RowDescriptor(shared.row_x + RowGroup() * 64 * 64), kRowPanel,
        RowDescriptor(shared.column_x[stage]), kColumnPanel, scores);
    CommitWgmma();
  }

  __device__ __forceinline__ void IssueDp(int stage) {
    FenceRegisters(dp);
    FenceWgmma();
    MultiplyRowsKeys<Element, kColumns, Config::kValueDim, Product::kIsSubtracted>(
        RowDescriptor(shared.row_y + RowGroup() * 64 * 64), kRowPanel,
        RowDescriptor(shared.column_y[stage]), kColumnPanel, dp);
    CommitWgmma();
  }

  __device__ __forceinline__ void IssueDy(int stage) {
    FenceRegisters(dy);
    FenceWgmma();
    MultiplyProbabilitiesValues<Element, kColumns, kYDims>(
        p, ColumnDescriptor(shared.column_y[stage] + DimGroup() * kYDims * kColumns, kColumnPanel),
        dy);
    CommitWgmma();
  }

  __device__ __forceinline__ void IssueDx(int stage) {
    FenceRegisters(dx);
    FenceWgmma();
    MultiplyProbabilitiesValues<Element, kColumns, kXDims>(
        ds, ColumnDescriptor(shared.column_x[stage] + DimGroup() * kXDims * kColumns, kColumnPanel),
        dx);
    CommitWgmma();
  }

  // dQ^T[64 dims, queries] = K^T dS^T.
  __device__ __forceinline__ int DqPanel(int step) const {
    return Config::kSplitQueries ? 0 : group * Config::kDqSteps + step;
  }
  __device__ __forceinline__ int DqFirstQuery() const {
    return Config::kSplitQueries ? group * Config::kDqQueries : 0;
  }

  __device__ __forceinline__ void IssueDq(const Element* source, int step) {
    FenceRegisters(dq);
    FenceWgmma();
    MultiplyColumnsRows<Element, Config::kDqQueries, Config::kBlockRows>(
        ColumnDescriptor(shared.row_x + DqPanel(step) * 64 * Config::kBlockRows, kRowPanel),
        RowDescriptor(source + DqFirstQuery() * 64), kColumnPanel, dq);
    CommitWgmma();
  }

  // --- Element by element ---

  __device__ __forceinline__ void Hide(const BlockInfo& info) {
    const int row = shared.tile.begin + RowAnew();
    const int rows[2] = {row, row + 8};
    HideScores(info.slice, rows, info.begin + 2 * (thread % 4), scores);
  }

  // What is to be added to exponents, of pair `i` of columns and row `r`.
  __device__ __forceinline__ float2 Start(int stage, int i, int r) const {
    if constexpr (!Config::kByKeys) return make_float2(row_start[r], row_start[r]);
    if constexpr (Config::kStartsScores) return make_float2(0.0f, 0.0f);  // The scores have it.
    return Config::kReadAhead ? start[i] : ReadPair(shared.start[stage], i);
  }

  __device__ __forceinline__ void Probabilities(int stage) {
    ForEachPair([&](int e, int i, int r) {
      const float2 start = Start(stage, i, r);
      scores[2 * e] = Exp2(scores[2 * e] * scale.log2 + start.x);
      scores[2 * e + 1] = Exp2(scores[2 * e + 1] * scale.log2 + start.y);
      p[e] = PackPair<Element>(scores[2 * e], scores[2 * e + 1]);
    });
  }

  // They are never negative: this keeps ptxas from moving them behind the next wait.
  __device__ __forceinline__ void HoldProbabilities() {
    if (IsAnyNegative(scores)) WaitForX();
  }

  __device__ __forceinline__ void ScoreGradients() {
#pragma unroll
    for (int e = 0; e < kColumns / 4; ++e) {
      // Packed ones are rounded, and take half the registers.
      const float2 probability = Config::kKeepsProbabilities
                                     ? make_float2(scores[2 * e], scores[2 * e + 1])
                                     : UnpackPair<Element>(p[e]);
      ds[e] = PackPair<Element>(probability.x * -dp[2 * e], probability.y * -dp[2 * e + 1]);
    }
  }

  // With a cap, scores are tanh first: its gradient needs them.
  __device__ __forceinline__ void CapScores() {
#pragma unroll
    for (float& score : scores) score = Cap(score, scale);
  }

  __device__ __forceinline__ void CappedGradients(int stage) {
    ForEachPair([&](int e, int i, int r) {
      const float2 start = Start(stage, i, r);
      const float tanh[2] = {scores[2 * e], scores[2 * e + 1]};
      const float probability[2] = {Exp2(tanh[0] * scale.log2 + start.x),
                                    Exp2(tanh[1] * scale.log2 + start.y)};
      p[e] = PackPair<Element>(probability[0], probability[1]);
      const float slope[2] = {CapSlope(tanh[0]), CapSlope(tanh[1])};
      ds[e] = PackPair<Element>(probability[0] * -dp[2 * e] * slope[0],
                                probability[1] * -dp[2 * e + 1] * slope[1]);
    });
  }

  __device__ __forceinline__ static float CapSlope(float tanh) {
    return tanh == -INFINITY ? 0.0f : 1.0f - tanh * tanh;
  }

  // --- dQ: dS to shared memory, the product's result to memory ---

  __device__ __forceinline__ Element* Ds(int ds_stage) const {
    return shared.ds + ds_stage * Config::kBlockRows * kColumns;
  }

  __device__ __forceinline__ void WriteDs(Element* destination) {
    if (DimGroup() > 0) return;  // Both warpgroups have the same.
    const int lane = thread % 32, warp = thread / 32;
    Element* panel = destination + RowGroup() * 64 * kColumns;
    // Matrices of 8 keys x 8 queries, two of keys by two of queries.
    const int chunk = 2 * warp + lane / 8 % 2;
    const int query = 8 * (lane / 16) + lane % 8;
    Element* address = panel + query * 64 + (chunk ^ (lane % 8)) * 8;
#pragma unroll
    for (int i = 0; i < kColumns / 16; ++i) {
      StoreMatricesTransposed(address + i * 16 * 64,
                              {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]});
    }
  }

  // Of the barriers: their turns are counted by other things that alternate.
  __device__ __forceinline__ uint32_t DqPhase(int ds_stage, int step) const {
    static_assert(Config::kDqSteps <= 2, "phases alternate");
    return Config::kDqSteps == 1 ? ds_stage : step % 2;
  }

  __device__ __forceinline__ void AddDq(int stage, int ds_stage, int step) {
    const int lane = thread % 32, warp = thread / 32;
    constexpr int kHalf = Config::kDqQueries * 32;
    float* box = shared.dq + group * 2 * kHalf;
    Wait(&shared.dq_empty[group], DqPhase(ds_stage, step) ^ 1);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int query = 2 * (lane % 4) + e % 2;                // Of 8.
      const int dim = warp % 2 * 16 + lane / 4 + 8 * (e / 2);  // Of the half's 32.
      float* column = box + warp / 2 * kHalf + query * 32 + ((dim / 4) ^ query) * 4 + dim % 4;
#pragma unroll
      for (int i = 0; i < Config::kDqQueries / 8; ++i) column[i * 8 * 32] = dq[4 * i + e];
    }
    if (thread == 0) {
      shared.dq_target[group] = {DqPanel(step) * 64, shared.head[stage],
                                 shared.block[stage].begin + DqFirstQuery(), shared.tile.batch};
    }
    FenceAsyncProxy();
    ArriveByWarp(&shared.dq_full[group], thread);
  }

  // --- Epilogue ---

  __device__ __forceinline__ void Store(const RowTileInfo& tile) {
    StoreGradient<kXDims>(tile, dx, params.softmax_scale, params.dx, params.head_dim);
    if constexpr (Config::kByKeys) {
      StoreGradient<kYDims>(tile, dy, 1.0f, params.dy, params.value_dim);
    }
  }

  template <int kDims>
  __device__ __forceinline__ void StoreGradient(const RowTileInfo& tile, float (&acc)[kDims / 2],
                                                float factor, void* out, int dim) {
    const float factors[2] = {factor, factor};
    const int first_column = DimGroup() * kDims;
    bool is_own[2];
    int64_t offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      is_own[r] = Row(r) < tile.num_rows;
      const int64_t batch = int64_t{tile.pack_in_head} * params.batch + tile.batch;
      const int64_t row = batch * params.work.num_rows + (tile.begin + Row(r));
      offset[r] = (row * params.num_row_heads + tile.row_head) * dim + first_column;
    }
    if (params.is_float) {
      float* base = static_cast<float*>(out);
      float* const rows[2] = {base + offset[0], base + offset[1]};
      StoreFloatRows<kDims>(acc, factors, rows, is_own, dim - first_column, thread);
    } else {
      Element* base = static_cast<Element*>(out);
      Element* const rows[2] = {base + offset[0], base + offset[1]};
      StoreRows<Element, kDims>(acc, factors, rows, is_own, dim - first_column, thread);
    }
  }
};

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_BACKWARD_CONSUMER_CUH_
