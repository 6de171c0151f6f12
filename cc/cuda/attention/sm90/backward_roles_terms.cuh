// The terms of a block's scores in the backward kernel if warpgroups have roles, and the gradient
// of a bias that is not shared. Threads read the bias from global memory during the product for
// scores: shared memory is full, and this way all kinds of bias are handled alike.

#ifndef JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_ROLES_TERMS_CUH_
#define JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_ROLES_TERMS_CUH_

#include "cc/cuda/attention/sm90/backward_block_terms.cuh"

namespace jax_magi::cuda::sm90 {

// Loads a word, or 16 zero-extended bits, that the kernel does not write.
template <bool kIsWord>
__device__ __forceinline__ uint32_t LoadConstant(const char* address) {
  uint32_t x;
  if constexpr (kIsWord) {
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(address));
  } else {
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(x) : "l"(address));
  }
  return x;
}

template <typename Config>
struct BackwardRolesTerms {
  using Element = typename Config::Element;
  static constexpr int kColumns = Config::kBlockColumns;
  BackwardBlock<Config>& block;

  float slope;
  float by_key[2];                  // The terms of the thread's keys.
  uint32_t by_query[kColumns / 2];  // The bias of the thread's scores, in the layout of memory.

  __device__ __forceinline__ const BackwardTermsParams& params() const { return block.params; }
  __device__ __forceinline__ BackwardShared<Config>& shared() const { return block.shared; }

  __device__ __forceinline__ bool IsByQuery() const {
    const BiasKind kind = params().terms.kind;
    return kind == BiasKind::kTiles || kind == BiasKind::kFloat;
  }

  // Loads what Add() adds.
  __device__ __forceinline__ void Read(int stage) {
    const ScoreTerms& terms = params().terms;
    const int batch = block.Tile().batch, head = shared().target[stage].head;
    slope = BackwardBlockTerms<Config>{block}.Slope(batch, head);
    by_key[0] = by_key[1] = 0.0f;
    if (terms.kind == BiasKind::kNone) return;
    const int64_t first = terms.Offset(batch, head);
    // Pairs outside the arrays are hidden. For these, an arbitrary element inside the array is
    // read.
    const int key = block.Tile().begin + block.RowAnew(), last_key = params().work.num_rows - 1;
    const int keys[2] = {Min(key, last_key), Min(key + 8, last_key)};
    if (terms.kind == BiasKind::kByKey) {
#pragma unroll
      for (int r = 0; r < 2; ++r) by_key[r] = terms.template Load<Element>(first + keys[r]);
    } else if (terms.is_float) {
      ReadByQuery</*kIsFloat=*/true>(stage, first, keys);
    } else {
      ReadByQuery</*kIsFloat=*/false>(stage, first, keys);
    }
  }

  template <bool kIsFloat>
  __device__ __forceinline__ void ReadByQuery(int stage, int64_t first, const int (&keys)[2]) {
    constexpr int kBytes = kIsFloat ? sizeof(float) : sizeof(Element);
    const ScoreTerms& terms = params().terms;
    const auto* bias = static_cast<const char*>(terms.bias) + first * kBytes;
    const int stride = static_cast<int>(terms.q_stride);  // At most the number of keys.
    const int begin = shared().block[stage].begin + 2 * (block.thread % 4);
    const int last_query = params().q_len - 1;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int64_t query = Min(begin + 8 * i + c, last_query);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          by_query[4 * i + 2 * r + c] =
              LoadConstant<kIsFloat>(bias + (query * stride + keys[r]) * kBytes);
        }
      }
    }
  }

  // Turns products into scores in natural units, with their terms.
  __device__ __forceinline__ void Add(int stage) {
    float factor = params().softmax_scale;
    if (IsByQuery()) {
      if (params().terms.is_float) {
        AddByQuery(factor, [](uint32_t x) { return __uint_as_float(x); });
      } else {
        AddByQuery(factor, [](uint32_t x) { return UnpackPair<Element>(x).x; });
      }
      if (params().terms.slopes == nullptr) return;
      factor = 1.0f;
    }
    const int key = block.Tile().begin + block.RowAnew();
    const int distance = key - (shared().block[stage].begin + 2 * (block.thread % 4));
    const float base[2] = {slope * distance + by_key[0], slope * (distance + 8) + by_key[1]};
    AddSlopes(factor, -slope, base, block.scores);
  }

  template <typename Unpack>
  __device__ __forceinline__ void AddByQuery(float factor, Unpack unpack) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      block.scores[i] = block.scores[i] * factor + unpack(by_query[i]);
    }
  }

  // Stores the visible pairs of dS, which the warp has written to `ds`, in the gradient of a bias
  // that is not shared. Each lane stores eight of the warp's 16 keys of every sixteenth query. Keys
  // of a tile, and rows of the bias, begin at multiples of 16 bytes.
  __device__ __forceinline__ void StoreDs(int stage, const Element* ds) const {
    auto* dbias = static_cast<uint16_t*>(params().gradients.dbias);
    if (dbias == nullptr) return;
    __syncwarp();
    const BlockInfo& info = shared().block[stage];
    const ScoreTerms& terms = params().terms;
    const unsigned thread = RereadThreadIndex() % unsigned{kWarpgroup}, lane = thread % 32;
    const int chunk = 2 * (thread / 32) + lane % 2, first_query = lane / 2;
    const int key = block.Tile().begin + 8 * chunk;
    uint16_t* row = dbias + terms.Offset(block.Tile().batch, shared().target[stage].head) + key;
#pragma unroll 1
    for (int i = first_query; i < kColumns; i += 16) {
      const int query = info.begin + i;
      Range keys{0, 8};  // The visible ones of eight keys.
      if (info.flags & kMasked) {
        if (query < info.slice.k_begin || query >= info.slice.k_end) continue;
        const Range visible = VisibleRows(info.slice, query);
        keys = {Max(visible.begin - key, 0), Min(visible.end - key, 8)};
      }
      const auto* source = reinterpret_cast<const uint16_t*>(ds + i * 64 + (chunk ^ (i % 8)) * 8);
      uint16_t* to = row + query * terms.q_stride;
      if (keys.begin == 0 && keys.end == 8) {
        __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(source));
        continue;
      }
#pragma unroll 1
      for (int e = keys.begin; e < keys.end; ++e) to[e] = source[e];
    }
    __syncwarp();  // All lanes have read what is overwritten two blocks later.
  }
};

}  // namespace jax_magi::cuda::sm90

#endif  // JAX_MAGI_CUDA_ATTENTION_SM90_BACKWARD_ROLES_TERMS_CUH_
