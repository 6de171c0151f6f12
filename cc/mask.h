// The definition of the mask: what a slice is and which pairs it makes visible.
//
// A slice is a rectangle of the score matrix with a diagonal band. Pair (i, j) is visible iff
//
//   q_begin <= i < q_end,   k_begin <= j < k_end,   lo <= j - i <= hi
//
// Both ends of a row's key range, and of a key's row range, are non-decreasing. A tile's bounds
// therefore come from its first and last row (or key) alone; every function below relies on it.

#ifndef JAX_MAGI_MASK_H_
#define JAX_MAGI_MASK_H_

#include <cstdint>

#if defined(__CUDACC__)
#define JAX_MAGI_INLINE __host__ __device__ __forceinline__
#else
// Forced: these functions are compiled for several instruction sets, and an out-of-line copy made
// for the widest of them could be the one the linker keeps for all.
#define JAX_MAGI_INLINE inline __attribute__((always_inline))
#endif

namespace jax_magi {

// An edge at this distance does not bound the band. Lengths stay below it, so `row + kUnbounded`
// still fits in 32 bits.
constexpr int32_t kUnbounded = 1 << 30;

struct Slice {
  int32_t q_begin, q_end, k_begin, k_end, lo, hi;
};

// Half open; empty when end <= begin.
struct Range {
  int32_t begin, end;
};

JAX_MAGI_INLINE int32_t Min(int32_t a, int32_t b) { return a < b ? a : b; }
JAX_MAGI_INLINE int32_t Max(int32_t a, int32_t b) { return a > b ? a : b; }

JAX_MAGI_INLINE Range Intersect(Range a, Range b) {
  return {Max(a.begin, b.begin), Min(a.end, b.end)};
}

JAX_MAGI_INLINE int32_t Clamp(int32_t x, int32_t low, int32_t high) {
  return Max(low, Min(x, high));
}

// A traced mask has not been validated before it gets here: keep every index inside the arrays, and
// every sum inside 32 bits.
JAX_MAGI_INLINE Slice ClampSlice(const Slice& s, int32_t q_len, int32_t k_len) {
  return {Clamp(s.q_begin, 0, q_len),           Clamp(s.q_end, 0, q_len),
          Clamp(s.k_begin, 0, k_len),           Clamp(s.k_end, 0, k_len),
          Clamp(s.lo, -kUnbounded, kUnbounded), Clamp(s.hi, -kUnbounded, kUnbounded)};
}

// The same pairs with queries and keys exchanged.
JAX_MAGI_INLINE Slice Transpose(const Slice& s) {
  const int32_t lo = Clamp(s.lo, -kUnbounded, kUnbounded);
  const int32_t hi = Clamp(s.hi, -kUnbounded, kUnbounded);
  return {s.k_begin, s.k_end, s.q_begin, s.q_end, -hi, -lo};
}

// Keys that `row` sees. The row must lie in the slice.
JAX_MAGI_INLINE Range VisibleKeys(const Slice& s, int32_t row) {
  return {Max(s.k_begin, row + s.lo), Min(s.k_end - 1, row + s.hi) + 1};
}

// Rows that see `key`. The key must lie in the slice.
JAX_MAGI_INLINE Range VisibleRows(const Slice& s, int32_t key) {
  return {Max(s.q_begin, key - s.hi), Min(s.q_end - 1, key - s.lo) + 1};
}

// Keys that some row of `rows` sees. `rows` is not empty and lies in the slice.
JAX_MAGI_INLINE Range TouchedKeys(const Slice& s, Range rows) {
  return {VisibleKeys(s, rows.begin).begin, VisibleKeys(s, rows.end - 1).end};
}

// Keys that every row of `rows` sees: a tile inside them needs no masking.
JAX_MAGI_INLINE Range CleanKeys(const Slice& s, Range rows) {
  return {VisibleKeys(s, rows.end - 1).begin, VisibleKeys(s, rows.begin).end};
}

// Rows that see some key of `keys`. `keys` is not empty and lies in the slice.
JAX_MAGI_INLINE Range TouchedRows(const Slice& s, Range keys) {
  return {VisibleRows(s, keys.begin).begin, VisibleRows(s, keys.end - 1).end};
}

// Rows that see every key of `keys`.
JAX_MAGI_INLINE Range CleanRows(const Slice& s, Range keys) {
  return {VisibleRows(s, keys.end - 1).begin, VisibleRows(s, keys.begin).end};
}

}  // namespace jax_magi

#endif  // JAX_MAGI_MASK_H_
