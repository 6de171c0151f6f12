// Two warps that share 32 rows in the forward kernel: each has the scores of half of a block's
// keys, and half of the output's dims. What a warp loads of keys and values from shared memory
// serves 32 rows, although a thread has as many registers of the output as for 16 rows and all
// dims. The warps exchange their probabilities through shared memory, and move the references of
// the rows at the same time.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_PAIR_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_PAIR_CUH_

#include "cc/cuda/attention/online_softmax.cuh"
#include "cc/cuda/attention/sm80/forward_tile.cuh"
#include "cc/cuda/attention/sm80/mma.cuh"
#include "cc/cuda/attention/sm80/shared_tile.cuh"

namespace jax_magi::cuda::sm80 {

// The first of one named barrier per pair; those before are of groups of 64 rows: see
// ForwardBarrier.
constexpr int kPairBarrier = 8;

template <typename Config, typename Forward>
struct ForwardPair {
  using Element = typename Config::Element;
  static constexpr int kValueDim = Config::kValueDim, kBlockN = Config::kBlockN;
  static constexpr int kKeys = kBlockN / 2, kDims = kValueDim / 2;
  using PTile = SharedTile<kBlockN>;  // Of a pair's rows.
  static_assert(Config::kRowGroups == 1 && !Config::kHasTerms);
  static_assert(kKeys % 16 == 0 && kDims % 64 == 0, "whole pieces, and whole groups of chunks");

  Forward& forward;

  __device__ __forceinline__ static int Lane() { return Forward::Lane(); }
  __device__ __forceinline__ static int Half() { return Forward::Share(); }
  __device__ __forceinline__ static int Number() { return Forward::Warp() / 2; }
  __device__ __forceinline__ static void Sync() { NamedSync(kPairBarrier + Number(), 64); }

  // As OnlineSoftmax, for both pieces.
  __device__ __forceinline__ void Exponentiate() {
    const SoftmaxScale& scale = forward.scale;
    float max[2][2];
    bool is_far = false;
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      auto& scores = forward.scores[g];
      RowState& state = forward.state[g];
      ThreadMax(scores, max[g]);
#pragma unroll
      for (int r = 0; r < 2; ++r) state.max[r] = MaxOrNan(state.max[r], max[g][r]);
      if constexpr (Config::kHasSoftcap) {
#pragma unroll
        for (float& score : scores) score = Cap(score, scale);
        ThreadMax(scores, max[g]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r)
        is_far |= !(max[g][r] * scale.log2 - state.reference[r] <= kSlack);
    }
    if (NamedAny(kPairBarrier + Number(), 64, is_far)) MoveReferences(max);
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      RowState& state = forward.state[g];
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        float& x = forward.scores[g][i];
        x = Exp2(x * scale.log2 - state.reference[i / 2 % 2]);
        state.sum[i / 2 % 2] += x;
      }
      PackProbabilities<Element>(forward.scores[g], forward.p[g]);
    }
  }

  // The other warp reads them after the next barrier of all warps.
  __device__ __forceinline__ void WriteProbabilities() const {
    const uint32_t address = P().PairAt(Lane() / 4, Half() * kKeys + 2 * (Lane() % 4));
#pragma unroll
    for (int g = 0; g < 2; ++g) {
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          StoreShared((address ^ i * 16) + (16 * g + 8 * r) * PTile::kRowBytes,
                      forward.p[g][2 * i + r]);
        }
      }
    }
  }

  // Adds the products with the warp's own probabilities, which own(g, n) returns, and with the
  // other warp's.
  template <typename Own>
  __device__ __forceinline__ void MultiplyValues(RightColumns<kValueDim> values, Own own) {
    constexpr int kHalfBytes = SharedTile<kValueDim>::Bytes(kKeys);
    values.lane_address += Half() * (kHalfBytes + kDims * 2);
    forward.AddProduct(values, own);
    values.lane_address += (1 - 2 * Half()) * kHalfBytes;
    LeftRows<kBlockN> others(P(), Lane());
    others.lane_address ^= (1 - Half()) * kKeys * 2;
    uint32_t a[2][4];
    forward.AddProduct(values, [&](int g, int n) {
      others.Load(16 * g, n, a[g]);
      return a[g];
    });
  }

  // At the end of a tile: afterwards, each warp has all dims of 16 rows, whose state is state[0].
  // The ring must be free.
  __device__ __forceinline__ void Exchange() {
    if (Half() == 0) {
      ExchangePiece</*kOwn=*/0>();
    } else {
      ExchangePiece</*kOwn=*/1>();
    }
  }

 private:
  __device__ __forceinline__ PTile P() const {
    return {SharedAddress(forward.shared.pairs.p) + Number() * PTile::Bytes(32)};
  }

  // `max` is that of the thread's own columns.
  __device__ __forceinline__ void MoveReferences(const float (&max)[2][2]) {
    auto& exchanged = forward.shared.pairs.max;
    const int warp = Forward::Warp(), first_row = Lane() / 4;
    float all[2][2];
#pragma unroll
    for (int g = 0; g < 2; ++g) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        all[g][r] = QuadMax(max[g][r]);
        if (Lane() % 4 == 0) exchanged[warp][16 * g + 8 * r + first_row] = all[g][r];
      }
    }
    Sync();
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      RowState& state = forward.state[g];
      float correction[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float others = exchanged[warp ^ 1][16 * g + 8 * r + first_row];
        const float old = state.reference[r];
        state.reference[r] = MaxOrNan(old, MaxOrNan(all[g][r], others) * forward.scale.log2);
        correction[r] = Exp2(old - state.reference[r]);
        state.sum[r] *= correction[r];
      }
#pragma unroll
      for (int i = 0; i < kDims / 2; ++i) forward.Sums(g)[i] *= correction[i / 2 % 2];
    }
  }

  // The warp keeps piece kOwn, and gives the other one away for the missing dims of its own.
  template <int kOwn>
  __device__ __forceinline__ void ExchangePiece() {
    constexpr int kOther = 1 - kOwn, kVectors = kDims / 8;
    static_assert(sizeof(forward.shared.stages) >= Config::kNumWarps * kVectors * 32 * 16);
    auto& sums = forward.shared.pairs.sums;
    auto* ring = reinterpret_cast<float4(*)[kVectors][32]>(forward.shared.stages);
    float* given = forward.Sums(kOther);
    const int warp = Forward::Warp(), lane = Lane();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float* x = given + 4 * i;
      ring[warp][i][lane] = make_float4(x[0], x[1], x[2], x[3]);
    }
    const RowState& other = forward.state[kOther];
    sums[warp][lane] = make_float4(other.sum[0], other.sum[1], other.max[0], other.max[1]);
    Sync();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 x = ring[warp ^ 1][i][lane];
      given[4 * i] = x.x;
      given[4 * i + 1] = x.y;
      given[4 * i + 2] = x.z;
      given[4 * i + 3] = x.w;
    }
    const float4 x = sums[warp ^ 1][lane];
    RowState own = forward.state[kOwn];
    own.sum[0] += x.x;
    own.sum[1] += x.y;
    own.max[0] = MaxOrNan(own.max[0], x.z);
    own.max[1] = MaxOrNan(own.max[1], x.w);
    forward.state[0] = own;
  }
};

}  // namespace jax_magi::cuda::sm80

#endif  // JAX_MAGI_CUDA_ATTENTION_SM80_FORWARD_PAIR_CUH_
