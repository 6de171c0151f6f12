// Access to rows of an array in memory as 16-byte vectors, at any alignment.
//
// Rows follow each other without padding, so a row may begin and end inside a vector. Reads use the
// aligned vectors that cover the row, and ignore what lies outside it. Writes use whole vectors
// inside the row, and single elements at its two edges.

#ifndef JAX_MAGI_CUDA_SOFTMAX_ROW_VECTORS_CUH_
#define JAX_MAGI_CUDA_SOFTMAX_ROW_VECTORS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cc/mask.h"

namespace jax_magi::cuda {

template <typename Element>
constexpr int kVectorSize = 16 / sizeof(Element);

// --- Elements in 32-bit words; all indices are known when loops are unrolled ---

template <typename Element, int kWords>
__device__ __forceinline__ float GetElement(const uint32_t (&words)[kWords], int i) {
  if constexpr (sizeof(Element) == 4) {
    return __uint_as_float(words[i]);
  } else if constexpr (sizeof(Element) == 1) {  // A boolean.
    return (words[i / 4] >> (8 * (i % 4))) & 0xff ? 1.0f : 0.0f;
  } else {
    const uint32_t pair = words[i / 2];
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
    } else {
      const float2 floats = __half22float2(reinterpret_cast<const __half2&>(pair));
      return i % 2 ? floats.y : floats.x;
    }
  }
}

// Sets element i, whose bits must be zero.
template <typename Element, int kWords>
__device__ __forceinline__ void PutElement(Element value, int i, uint32_t (&words)[kWords]) {
  constexpr int kPerWord = 4 / sizeof(Element);
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof(Element));
  words[i / kPerWord] |= bits << (8 * sizeof(Element) * (i % kPerWord));
}

template <typename Element>
__device__ __forceinline__ uint4 PackVector(const float (&x)[kVectorSize<Element>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(Element) == 4) {
      words[i] = __float_as_uint(x[i]);
    } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(pair);
    } else {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(pair);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The L2 policy of reads and writes. kFirstOut evicts the data first, so that other data may stay;
// if no other data is worth keeping, this costs time. Loads never use the read-only path, because a
// kernel may write its result over its input.
enum class Caching { kPlain, kFirstOut };

template <Caching kCaching, typename Words>
__device__ __forceinline__ Words Load(const Words* p) {
  return kCaching == Caching::kFirstOut ? __ldcs(p) : *p;
}
template <Caching kCaching>
__device__ __forceinline__ void Store(void* p, uint4 words) {
  if constexpr (kCaching == Caching::kFirstOut) {
    __stcs(static_cast<uint4*>(p), words);
  } else {
    *static_cast<uint4*>(p) = words;
  }
}

template <Caching kCaching, int kWords>
__device__ __forceinline__ void LoadWords(const void* p, uint32_t (&words)[kWords]) {
  if constexpr (kWords == 1) {
    words[0] = Load<kCaching>(static_cast<const uint32_t*>(p));
  } else if constexpr (kWords == 2) {
    const uint2 x = Load<kCaching>(static_cast<const uint2*>(p));
    words[0] = x.x, words[1] = x.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 x = Load<kCaching>(static_cast<const uint4*>(p) + i);
      words[4 * i] = x.x, words[4 * i + 1] = x.y, words[4 * i + 2] = x.z, words[4 * i + 3] = x.w;
    }
  }
}

// --- Rows ---

__device__ __forceinline__ bool Contains(Range range, int i) {
  // One unsigned comparison tests both ends.
  return static_cast<unsigned>(i - range.begin) < static_cast<unsigned>(range.end - range.begin);
}

// The vectors that cover one row, and which of its columns are visible. Vector v holds the columns
// from Column(v) on; columns before 0 and from `length` on belong to other rows.
template <int kSize>
struct Row {
  int64_t begin = 0;  // Index of vector 0 in the array, a multiple of kSize.
  int shift = 0;      // Elements of vector 0 that precede the row.
  int length = 0;
  int count = 0;           // Number of vectors.
  int num_in_array = 0;    // Number of leading vectors that lie entirely in the array.
  Range visible = {0, 0};  // Range of columns.
  // Ranges of vectors. A range's end is not before its begin.
  Range inside = {0, 0};   // Vectors that belong entirely to this row.
  Range touched = {0, 0};  // Vectors with some visible column.
  Range clean = {0, 0};    // Vectors with only visible columns.

  // Makes the row empty. The other fields then need no registers.
  __device__ __forceinline__ void Clear() {
    count = num_in_array = 0;
    visible = inside = touched = clean = {0, 0};
  }
  __device__ __forceinline__ int Column(int v) const { return v * kSize - shift; }
  __device__ __forceinline__ bool IsAligned() const { return inside.end == count && shift == 0; }
};

// If rows are whole vectors, much of the result is known at compile time.
template <int kSize, bool kIsWhole>
__device__ __forceinline__ Row<kSize> MakeRow(uint32_t row, int length, int64_t num_elements,
                                              Range visible) {
  // Convert a number of elements, counted from vector 0, to a number of vectors.
  const auto down = [](int end) { return static_cast<int>(static_cast<unsigned>(end) / kSize); };
  const auto up = [&](int end) { return down(end + kSize - 1); };
  Row<kSize> r;
  const uint64_t first = uint64_t{row} * static_cast<unsigned>(length);
  r.shift = kIsWhole ? 0 : static_cast<int>(first % kSize);
  r.begin = first - r.shift;
  r.length = length;
  if constexpr (kIsWhole) {
    r.count = r.num_in_array = down(length);
    r.inside = {0, r.count};
  } else {
    r.count = up(r.shift + length);
    const int64_t num_left = (num_elements - r.begin) / kSize;
    r.num_in_array = num_left < r.count ? static_cast<int>(num_left) : r.count;
    r.inside.begin = up(r.shift);
    r.inside.end = Max(down(r.shift + length), r.inside.begin);
  }
  if (visible.begin < visible.end) {
    r.visible = visible;
    const Range ends = {r.shift + visible.begin, r.shift + visible.end};
    r.touched = {down(ends.begin), up(ends.end)};
    r.clean.begin = up(ends.begin);
    r.clean.end = Max(down(ends.end), r.clean.begin);
  }
  return r;
}

// Loads the touched ones of vectors first, first + kThreads, ... of an array of Element. Other
// words stay unchanged.
template <typename Element, int kThreads, Caching kCaching, int kVectors>
__device__ __forceinline__ void LoadVectors(const Element* array,
                                            const Row<kVectorSize<Element>>& row, int first,
                                            uint32_t (&words)[kVectors][4]) {
  constexpr int kSize = kVectorSize<Element>;
  const Element* vectors = array + row.begin;
  const Element* own = vectors + first * int64_t{kSize};
  const Range loaded = {row.touched.begin,
                        Max(row.touched.begin, Min(row.touched.end, row.num_in_array))};
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (Contains(loaded, first + i * kThreads)) {
      LoadWords<kCaching>(own + i * kThreads * kSize, words[i]);
    }
  }
  if (row.num_in_array == row.count) return;
  // The array's last elements do not fill a vector.
  const int last = row.num_in_array;
  uint32_t rest[4] = {};
#pragma unroll
  for (int e = 0; e < kSize; ++e) {
    if (row.Column(last) + e < row.length) {
      PutElement(vectors[last * int64_t{kSize} + e], e, rest);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first + i * kThreads != last) continue;
#pragma unroll
    for (int w = 0; w < 4; ++w) words[i][w] = rest[w];
  }
}

// Writes zeros to those vectors of a row that have no visible column, with kThreads threads.
// Vectors that belong only partly to the row are written element by element.
template <typename Element, int kThreads, Caching kCaching>
__device__ __forceinline__ void StoreHidden(Element* array, const Row<kVectorSize<Element>>& row,
                                            int thread) {
  constexpr int kSize = kVectorSize<Element>;
  const auto store = [&](Range vectors) {
    for (int v = vectors.begin + thread; v < vectors.end; v += kThreads) {
      Element* vector = array + row.begin + v * int64_t{kSize};
      if (Contains(row.inside, v)) {
        Store<kCaching>(vector, make_uint4(0, 0, 0, 0));
        continue;
      }
      for (int e = 0; e < kSize; ++e) {
        if (Contains({0, row.length}, row.Column(v) + e)) vector[e] = static_cast<Element>(0.0f);
      }
    }
  };
  store({0, row.touched.begin});
  store({row.touched.end, row.count});
}

// Writes the touched vectors: `value(i, e)` is element e of this thread's vector i. Hidden columns
// become zero.
template <typename Element, int kThreads, Caching kCaching, int kVectors, typename Value>
__device__ __forceinline__ void StoreVectors(Element* array, const Row<kVectorSize<Element>>& row,
                                             int first, const Value& value) {
  constexpr int kSize = kVectorSize<Element>;
  Element* own = array + row.begin + first * int64_t{kSize};
  const auto get = [&](int i, int v, float (&x)[kSize]) {
    if (Contains(row.clean, v)) {
#pragma unroll
      for (int e = 0; e < kSize; ++e) x[e] = value(i, e);
    } else {
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        x[e] = Contains(row.visible, row.Column(v) + e) ? value(i, e) : 0.0f;
      }
    }
  };
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = first + i * kThreads;
    if (Contains(row.inside, v) && Contains(row.touched, v)) {
      float x[kSize];
      get(i, v, x);
      Store<kCaching>(own + i * kThreads * kSize, PackVector<Element>(x));
    }
  }
  if (row.IsAligned()) return;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int v = first + i * kThreads;
    if (v < row.count && !Contains(row.inside, v)) {
      float x[kSize];
      get(i, v, x);
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        if (Contains({0, row.length}, row.Column(v) + e)) {
          own[i * kThreads * kSize + e] = static_cast<Element>(x[e]);
        }
      }
    }
  }
}

}  // namespace jax_magi::cuda

#endif  // JAX_MAGI_CUDA_SOFTMAX_ROW_VECTORS_CUH_
