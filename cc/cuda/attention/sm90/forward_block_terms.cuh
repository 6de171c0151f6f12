// The terms of a block's scores in the forward kernel.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_BLOCK_TERMS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_BLOCK_TERMS_CUH_

#include "cc/cuda/attention/sm90/forward_tile.cuh"

namespace jax_magi::cuda::sm90 {

// Operates on the scores of a consumer.
template <typename Config, typename Consumer>
struct ForwardBlockTerms {
  using Element = typename Config::Element;
  static constexpr int kBlockN = Config::kBlockN;
  Consumer& consumer;

  __device__ __forceinline__ const ForwardTermsParams& params() const { return consumer.params; }
  __device__ __forceinline__ ForwardShared<Config>& shared() const { return consumer.shared; }
  __device__ __forceinline__ unsigned Thread() const { return int(consumer.thread); }
  __device__ __forceinline__ int Stage() const { return consumer.k_ring.stage; }

  // Turns products into scores with their terms, up to the factor and offset in `logit`.
  __device__ __forceinline__ void Add(const TermsTileInfo& tile) const {
    if constexpr (Config::kIsBiasAlone) {
      AddTiles();
    } else if constexpr (Config::kAreSlopesAlone) {
      consumer.logit.factor = params().softmax_scale;
      AddSlope(tile, LoadByWarp(shared().block[Stage()].begin),
               tile.slope * params().terms.inverse_scale);
    } else {
      AddAny(tile);
    }
  }

  // Whether the block's first key is needed for anything but the mask.
  __device__ __forceinline__ bool NeedsBegin() const {
    if constexpr (Config::kIsBiasAlone) return false;
    return params().terms.kind == BiasKind::kFloat || params().terms.slopes != nullptr;
  }

  // Reads the first part of a bias during the product for scores.
  __device__ __forceinline__ void ReadAhead() const {
    static_assert(Config::kIsBiasAlone, "there is always a bias to wait for");
    WaitForBias();
    const Element* block = shared().bias[BiasStage()];
#pragma unroll
    for (int i = 0; i < Config::kBiasAhead; ++i) ReadTiles(block, i, consumer.bias[i]);
  }

  __device__ __forceinline__ void AddAny(const TermsTileInfo& tile) const {
    const ScoreTerms& terms = params().terms;
    // If it is not needed, the keys may have been released.
    const int begin =
        Config::kHasBiasBlocks && !NeedsBegin() ? 0 : LoadByWarp(shared().block[Stage()].begin);
    LogitScale& logit = consumer.logit;
    float step = tile.slope;
    if constexpr (Config::kHasBiasBlocks) {
      logit.factor = 1.0f;
      if (terms.kind == BiasKind::kTiles) {
        AddTiles();
      } else {
        AddFloats(tile, begin);
      }
    } else if (terms.kind == BiasKind::kByKey) {
      logit.factor = 1.0f;
      AddKeyBias();
    } else {
      logit.factor = params().softmax_scale;
      step *= terms.inverse_scale;
    }
    logit.offset[0] = logit.offset[1] = 0.0f;
    if (terms.slopes != nullptr) AddSlope(tile, begin, step);
  }

  // `begin` is the block's first key, and `step` the slope in units of scores.
  __device__ __forceinline__ void AddSlope(const TermsTileInfo& tile, int begin, float step) const {
    const int thread = Thread();
    const int row = tile.begin + consumer.warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int distance = begin + 2 * (thread % 4) - row;
    AddSteps(step, consumer.scores);
    consumer.logit.offset[0] = tile.slope * distance;
    consumer.logit.offset[1] = tile.slope * (distance - 8);
  }

  // --- A bias that differs from query to query ---

  __device__ __forceinline__ int BiasStage() const { return consumer.bias_ring.stage; }
  __device__ __forceinline__ void WaitForBias() const {
    Wait(&shared().bias_full[BiasStage()], consumer.bias_ring.phase);
  }

  // Reads packed pairs of the 16 columns from 16 * step on.
  __device__ __forceinline__ void ReadTiles(const Element* block, int step, uint32_t* x) const {
    const unsigned thread = Thread();
    const unsigned row = consumer.warpgroup * 64 + thread / 32 * 16 + thread % 16;
    const unsigned chunk = (2 * (step % 4) + thread % 32 / 16) ^ (thread % 8);
    LoadMatrices(block + step / 4 * Config::kBlockM * 64 + row * 64 + chunk * 8, x);
  }

  // Adds a bias that was loaded by TMA.
  __device__ __forceinline__ void AddTiles() const {
    constexpr int kAhead = Config::kBiasAhead;
    if constexpr (kAhead == 0) WaitForBias();
    const Element* block = shared().bias[BiasStage()];
    AddPackedBias<Element>(params().softmax_scale, consumer.scores, [&](int step, uint32_t* x) {
      if constexpr (kAhead == 0) {
        ReadTiles(block, step, x);
      } else {
        uint32_t (&next)[4] = consumer.bias[step % kAhead];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = next[i];
        if (step + kAhead < kBlockN / 16) ReadTiles(block, step + kAhead, next);
      }
    });
    ArriveByWarp(&shared().bias_empty[BiasStage()], Thread());
    consumer.bias_ring.Advance();
  }

  // Adds a float32 bias.
  __device__ __forceinline__ void AddFloats(const TileInfo& tile, int begin) const {
    const ScoreTerms& terms = params().terms;
    const int thread = Thread();
    const int warp_row = consumer.warpgroup * 64 + thread / 32 * 16;
    const int first_row = tile.begin + warp_row;
    static_assert(Config::kBiasStages * sizeof(Element) >= sizeof(float), "the stages are enough");
    const StagedRows<kBlockN> staged{reinterpret_cast<float*>(shared().bias[0]) +
                                     warp_row * kBlockN};
    staged.Copy(static_cast<const float*>(terms.bias) + terms.Offset(tile.batch, tile.head) +
                    first_row * terms.q_stride,
                terms.q_stride, params().q_len - first_row, begin, params().work.num_columns,
                thread % 32);
    staged.Add(params().softmax_scale, thread % 32, consumer.scores);
  }

  // --- A bias that is the same for all queries ---

  __device__ __forceinline__ void AddKeyBias() const {
    const int stage = Stage(), pair = Thread() % 4;
    const float factor = params().softmax_scale;
    Wait(&shared().bias_full[stage], consumer.k_ring.phase);
    if (params().terms.is_float || !KeyBiasIsCopied(params())) {
      const auto* pairs = reinterpret_cast<const float2*>(shared().key_bias[stage]) + pair;
      AddBias(factor, consumer.scores, [&](int i, int, float (&x)[2]) {
        const float2 bias = pairs[4 * i];
        x[0] = bias.x;
        x[1] = bias.y;
      });
    } else {
      const auto* pairs = reinterpret_cast<const uint32_t*>(shared().key_bias[stage]) + pair;
      AddBias(factor, consumer.scores, [&](int i, int, float (&x)[2]) {
        const float2 bias = UnpackPair<Element>(pairs[4 * i]);
        x[0] = bias.x;
        x[1] = bias.y;
      });
    }
    Arrive(&shared().bias_empty[stage]);
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_FORWARD_BLOCK_TERMS_CUH_
