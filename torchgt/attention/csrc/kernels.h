// What the operators (ops.cpp) and the kernels (one translation unit for each storage type) share.
#pragma once

#include <cstdint>

namespace torchgt {

// One call's tensors, type-erased. S: storage type of query, key, value, out, pair_bias and their gradients;
// A: arithmetic type (float, or double for double). N tokens, H heads, D head dimension, E pairs, T pair types.
struct Params {
  int64_t num_tokens, num_heads, head_dim, num_global, num_types, num_pairs;
  const void *q, *k, *v;                  // S [N, H, D], the last two dimensions contiguous
  int64_t q_stride, k_stride, v_stride;   // elements from token to token
  const int64_t* rowptr;                  // [N + 1]
  const void* col;                        // [E]
  const int64_t *rowptr_t, *index_t;      // the transposed pattern, and where each of its pairs is stored
  const void* col_t;                      // [E]
  bool wide;                              // col and col_t are int64, else int32
  const uint8_t* pair_type;               // [E]
  const void* pair_bias;                  // S [E, H] or null
  const void* type_bias;                  // A [T, H] or null
  double scale;
  bool dropout;
  uint64_t seed_key;
  uint32_t threshold;
  double keep_scale;
  int64_t head_offset;
  const int64_t* token_ids;               // [N] or null
  void* out;                              // S [N, H, D]
  void* sums;                             // A [N, 2, H]: largest score of each row, 1 / sum of exp(score - largest)
  // Backward only.
  const void* grad_out;                   // S [N, H, D], contiguous
  const void* grad_sums;                  // A [N, 2, H] or null; the first half is not read
  void* delta;                            // A [N, H]
  void *grad_q, *grad_k, *grad_v;         // S [N, H, D]
  void* grad_pair_bias;                   // S [E, H] or null
  bool want_type_bias;
  int64_t long_row, long_column;          // rows and columns of more pairs than this are computed in parts
};

// A range of work by one thread. Most rows and columns are owned by one call each. A long one (a global token's, a
// hub's) is computed in parts of its pairs, whose partial sums `*_merge` adds up in order; `partial` has
// partial_size() elements of A. The functions over ranges leave the long ones out.
struct Kernels {
  void (*forward_rows)(const Params&, int64_t begin, int64_t end);
  void (*forward_part)(const Params&, int64_t row, int64_t begin, int64_t end, void* partial);
  void (*forward_merge)(const Params&, int64_t row, int64_t parts, const void* partials);
  void (*row_delta)(const Params&, int64_t row);
  void (*backward_rows)(const Params&, int64_t begin, int64_t end, double* grad_type);
  void (*backward_row_part)(const Params&, int64_t row, int64_t begin, int64_t end, void* partial, double* grad_type);
  void (*backward_row_merge)(const Params&, int64_t row, int64_t parts, const void* partials);
  void (*backward_columns)(const Params&, int64_t begin, int64_t end);
  void (*backward_column_part)(const Params&, int64_t column, int64_t begin, int64_t end, void* partial);
  void (*backward_column_merge)(const Params&, int64_t column, int64_t parts, const void* partials);
  void (*token_dropout)(const void* x, void* y, int64_t rows, int64_t channels, int64_t first_row, uint64_t seed_key,
                        uint32_t threshold, double keep_scale);
};

// Pairs of a row, those with global tokens included; so of a column.
inline int64_t row_size(const Params& p, int64_t i) {
  return i < p.num_global ? p.num_tokens : p.num_global + p.rowptr[i + 1] - p.rowptr[i];
}
inline int64_t column_size(const Params& p, int64_t j) {
  return j < p.num_global ? p.num_tokens : p.num_global + p.rowptr_t[j + 1] - p.rowptr_t[j];
}

inline int64_t partial_size(const Params& p) { return p.num_heads * (2 * p.head_dim + 2); }

extern const Kernels kernels_f32;
extern const Kernels kernels_bf16;
extern const Kernels kernels_f64;

}  // namespace torchgt
