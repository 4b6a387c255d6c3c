// The operators: tensors to raw pointers, and fixed pieces of work to threads.
//
// Every piece (a range of rows or columns of about equal work, or a part of a global token's row) depends on the
// pattern alone, and so does the order in which partial sums are added. Threads only decide who does which piece, so
// the results are the same bits at any thread count.
#include <sys/mman.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "hash.h"
#include "kernels.h"

namespace torchgt {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

constexpr int64_t kPieces = 512;       // at most, so that partial sums of the type bias stay small
constexpr int64_t kPieceWork = 4096;   // at least this many pairs
constexpr int64_t kGlobalParts = 64;   // of one global token's row, at most
constexpr int64_t kGlobalPart = 1024;  // tokens, at least

const Kernels& kernels_for(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return kernels_f32;
    case at::kBFloat16: return kernels_bf16;
    case at::kDouble: return kernels_f64;
    default: TORCH_CHECK_VALUE(false, "the compiled kernels take float32, bfloat16 and float64, not ", type);
  }
}

at::ScalarType arithmetic(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// Runs piece(0..count-1), each once. Threads fetch the next piece as they get free: graphs are uneven.
template <class Fn>
void in_parallel(int64_t count, const Fn& piece) {
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(count, at::get_num_threads());
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (int64_t n; (n = next.fetch_add(1)) < count;) piece(n);
  });
}

// Bounds of consecutive ranges of rows of about equal work, from row `first`. Work: pairs, and a little for each row.
std::vector<int64_t> balanced(const int64_t* rowptr, int64_t first, int64_t rows, int64_t num_global) {
  const int64_t per_row = num_global + 2;
  const auto work = [&](int64_t row) { return rowptr[row] - rowptr[first] + (row - first) * per_row; };
  const int64_t total = work(rows);
  const int64_t pieces = std::clamp<int64_t>(total / kPieceWork, 1, kPieces);
  std::vector<int64_t> bounds{first};
  for (int64_t n = 1; n < pieces; ++n) {
    // total / pieces * n would round, total * n could overflow only beyond 2^54 pairs
    const int64_t target = total / pieces * n + total % pieces * n / pieces;
    int64_t low = bounds.back(), high = rows;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (work(middle) < target) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low > bounds.back()) bounds.push_back(low);
  }
  if (rows > bounds.back()) bounds.push_back(rows);
  return bounds;
}

int64_t global_parts(int64_t num_tokens) { return std::clamp<int64_t>(num_tokens / kGlobalPart, 1, kGlobalParts); }

// An uninitialised tensor for results. Large ones ask for huge pages: faulting in 4 KiB pages one by one would take
// about as long as computing what goes into them.
Tensor allocate(at::IntArrayRef shape, const at::TensorOptions& options) {
  Tensor t = at::empty(shape, options);
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t page = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(t.data_ptr()) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(t.data_ptr()) + t.nbytes()) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a hint: may fail
#endif
  return t;
}

const void* data(const OptTensor& t) { return t.has_value() ? t->const_data_ptr() : nullptr; }

void check_qkv(const Tensor& t, const Tensor& q, const char* name) {
  TORCH_CHECK_VALUE(t.device().is_cpu() && t.sizes() == q.sizes() && t.scalar_type() == q.scalar_type(), name,
                    " differs from query in shape, dtype or device");
  TORCH_CHECK_VALUE(t.dim() == 3 && t.stride(2) == 1 && t.stride(1) == t.size(2), name,
                    ": heads and their dimensions must be contiguous");
}

void check_index(const Tensor& t, int64_t size, const char* name) {
  TORCH_CHECK_VALUE(t.device().is_cpu() && t.is_contiguous() && t.numel() == size, name, " must be contiguous, with ",
                    size, " elements, on the CPU");
}

struct Call {
  Params p{};
  const Kernels* kernels;
  Tensor type_bias;  // in arithmetic precision
};

Call prepare(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rowptr, const Tensor& col,
             const OptTensor& pair_type, const OptTensor& pair_bias, const OptTensor& type_bias, const OptTensor& seed,
             const OptTensor& token_ids, int64_t num_global, int64_t num_types, double scale, int64_t threshold,
             double keep_scale, int64_t head_offset) {
  check_qkv(q, q, "query");
  check_qkv(k, q, "key");
  check_qkv(v, q, "value");
  const int64_t num_tokens = q.size(0), num_heads = q.size(1), num_pairs = col.numel();
  TORCH_CHECK_VALUE(rowptr.scalar_type() == at::kLong, "rowptr must be int64");
  TORCH_CHECK_VALUE(col.scalar_type() == at::kLong || col.scalar_type() == at::kInt, "col must be int32 or int64");
  check_index(rowptr, num_tokens + 1, "rowptr");
  check_index(col, num_pairs, "col");
  Call call;
  call.kernels = &kernels_for(q.scalar_type());
  Params& p = call.p;
  p.num_tokens = num_tokens;
  p.num_heads = num_heads;
  p.head_dim = q.size(2);
  p.num_global = num_global;
  p.num_types = num_types;
  p.num_pairs = num_pairs;
  p.q = q.const_data_ptr();
  p.k = k.const_data_ptr();
  p.v = v.const_data_ptr();
  p.q_stride = q.stride(0);
  p.k_stride = k.stride(0);
  p.v_stride = v.stride(0);
  p.rowptr = rowptr.const_data_ptr<int64_t>();
  p.col = col.const_data_ptr();
  p.wide = col.scalar_type() == at::kLong;
  p.scale = scale;
  p.head_offset = head_offset;
  if (type_bias.has_value()) {
    TORCH_CHECK_VALUE(type_bias->dim() == 2 && type_bias->size(0) == num_types && type_bias->size(1) == num_heads,
                      "type_bias has a wrong shape");
    call.type_bias = type_bias->to(arithmetic(q.scalar_type())).contiguous();
    p.type_bias = call.type_bias.const_data_ptr();
    TORCH_CHECK_VALUE(pair_type.has_value() && pair_type->scalar_type() == at::kByte, "type_bias needs a uint8 pair_type");
    check_index(*pair_type, num_pairs, "pair_type");
    p.pair_type = pair_type->const_data_ptr<uint8_t>();
  }
  if (pair_bias.has_value()) {
    TORCH_CHECK_VALUE(pair_bias->scalar_type() == q.scalar_type(), "pair_bias must have the dtype of query");
    check_index(*pair_bias, num_pairs * num_heads, "pair_bias");
    p.pair_bias = pair_bias->const_data_ptr();
  }
  if (seed.has_value()) {
    p.dropout = true;
    p.seed_key = seed_key(seed->item<int64_t>());
    p.threshold = static_cast<uint32_t>(threshold);
    p.keep_scale = keep_scale;
  }
  if (token_ids.has_value()) {
    check_index(*token_ids, num_tokens, "token_ids");
    p.token_ids = token_ids->const_data_ptr<int64_t>();
  }
  return call;
}

std::tuple<Tensor, Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rowptr,
                                   const Tensor& col, const OptTensor& pair_type, const OptTensor& pair_bias,
                                   const OptTensor& type_bias, const OptTensor& seed, const OptTensor& token_ids,
                                   int64_t num_global, int64_t num_types, double scale, int64_t threshold,
                                   double keep_scale, int64_t head_offset) {
  Call call = prepare(q, k, v, rowptr, col, pair_type, pair_bias, type_bias, seed, token_ids, num_global, num_types,
                      scale, threshold, keep_scale, head_offset);
  Params& p = call.p;
  const Kernels& kernels = *call.kernels;
  const auto accumulate = q.options().dtype(arithmetic(q.scalar_type()));
  Tensor out = allocate(q.sizes(), q.options());
  Tensor top = allocate({p.num_tokens, p.num_heads}, accumulate);
  Tensor total = allocate({p.num_tokens, p.num_heads}, accumulate);
  if (q.numel() == 0) return {out, top.fill_(-std::numeric_limits<double>::infinity()), total.zero_()};
  p.out = out.mutable_data_ptr();
  p.top = top.mutable_data_ptr();
  p.total = total.mutable_data_ptr();

  const std::vector<int64_t> bounds = balanced(p.rowptr, num_global, p.num_tokens, num_global);
  const int64_t pieces = static_cast<int64_t>(bounds.size()) - 1;
  const int64_t parts = global_parts(p.num_tokens);
  Tensor partials = at::empty({num_global, parts, partial_size(p)}, accumulate);
  char* const partial = static_cast<char*>(partials.mutable_data_ptr());
  const int64_t part_bytes = partial_size(p) * accumulate.dtype().itemsize();
  // The global rows' parts are the largest pieces, so they go first.
  in_parallel(num_global * parts + pieces, [&](int64_t n) {
    if (n < num_global * parts) {
      const int64_t row = n / parts, part = n % parts;
      kernels.forward_global(p, row, p.num_tokens * part / parts, p.num_tokens * (part + 1) / parts,
                             partial + n * part_bytes);
    } else {
      n -= num_global * parts;
      kernels.forward_rows(p, bounds[n], bounds[n + 1]);
    }
  });
  for (int64_t row = 0; row < num_global; ++row) kernels.forward_merge(p, row, parts, partial + row * parts * part_bytes);
  return {out, top, total};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_out, const OptTensor& grad_total, const Tensor& out, const Tensor& top,
    const Tensor& total, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rowptr, const Tensor& col, const Tensor& rowptr_t,
    const Tensor& col_t, const Tensor& index_t, const OptTensor& pair_type, const OptTensor& pair_bias,
    const OptTensor& type_bias, const OptTensor& seed, const OptTensor& token_ids, int64_t num_global,
    int64_t num_types, double scale, int64_t threshold, double keep_scale, int64_t head_offset, bool want_pair_bias,
    bool want_type_bias) {
  Call call = prepare(q, k, v, rowptr, col, pair_type, pair_bias, type_bias, seed, token_ids, num_global, num_types,
                      scale, threshold, keep_scale, head_offset);
  Params& p = call.p;
  const Kernels& kernels = *call.kernels;
  const auto accumulate = q.options().dtype(arithmetic(q.scalar_type()));
  check_qkv(grad_out, q, "grad_out");
  TORCH_CHECK_VALUE(grad_out.is_contiguous() && out.is_contiguous() && top.is_contiguous() && total.is_contiguous(),
                    "grad_out and what the forward pass kept must be contiguous");
  TORCH_CHECK_VALUE(rowptr_t.scalar_type() == at::kLong && index_t.scalar_type() == at::kLong &&
                        col_t.scalar_type() == col.scalar_type(),
                    "the transposed pattern has wrong dtypes");
  check_index(rowptr_t, p.num_tokens + 1, "rowptr_t");
  check_index(col_t, p.num_pairs, "col_t");
  check_index(index_t, p.num_pairs, "index_t");
  p.rowptr_t = rowptr_t.const_data_ptr<int64_t>();
  p.col_t = col_t.const_data_ptr();
  p.index_t = index_t.const_data_ptr<int64_t>();

  Tensor grad_q = allocate(q.sizes(), q.options());
  Tensor grad_k = allocate(q.sizes(), q.options());
  Tensor grad_v = allocate(q.sizes(), q.options());
  Tensor grad_pair_bias = allocate({want_pair_bias ? p.num_pairs : 0, p.num_heads}, q.options());
  Tensor grad_type_bias = at::zeros({want_type_bias ? num_types : 0, p.num_heads}, accumulate);
  if (q.numel() == 0) return {grad_q, grad_k, grad_v, grad_pair_bias.zero_(), grad_type_bias};
  Tensor stats = allocate({p.num_tokens, 3 * p.num_heads}, accumulate);
  p.grad_out = grad_out.const_data_ptr();
  p.out = const_cast<void*>(out.const_data_ptr());
  p.top = const_cast<void*>(top.const_data_ptr());
  p.total = const_cast<void*>(total.const_data_ptr());
  p.grad_total = data(grad_total);
  p.stats = stats.mutable_data_ptr();
  p.grad_q = grad_q.mutable_data_ptr();
  p.grad_k = grad_k.mutable_data_ptr();
  p.grad_v = grad_v.mutable_data_ptr();
  p.grad_pair_bias = want_pair_bias ? grad_pair_bias.mutable_data_ptr() : nullptr;

  const int64_t parts = global_parts(p.num_tokens);
  const int64_t num_parts = num_global * parts;
  Tensor partials = at::empty({num_parts, partial_size(p)}, accumulate);
  char* const partial = static_cast<char*>(partials.mutable_data_ptr());
  const int64_t part_bytes = partial_size(p) * accumulate.dtype().itemsize();
  const auto part_of = [&](int64_t n) { return partial + n * part_bytes; };

  // Rows: the gradient of the query and of the biases, and what the columns need of each row.
  const std::vector<int64_t> rows = balanced(p.rowptr, num_global, p.num_tokens, num_global);
  const int64_t row_pieces = static_cast<int64_t>(rows.size()) - 1;
  Tensor by_piece =
      at::zeros({want_type_bias ? num_parts + row_pieces : 0, num_types, p.num_heads}, q.options().dtype(at::kDouble));
  double* const types = want_type_bias ? by_piece.mutable_data_ptr<double>() : nullptr;
  const auto types_of = [&](int64_t n) { return types ? types + n * num_types * p.num_heads : nullptr; };
  for (int64_t row = 0; row < num_global; ++row) kernels.row_stats(p, row);
  in_parallel(num_parts + row_pieces, [&](int64_t n) {
    if (n < num_parts) {
      const int64_t part = n % parts;
      kernels.backward_global_row(p, n / parts, p.num_tokens * part / parts, p.num_tokens * (part + 1) / parts,
                                  part_of(n), types_of(n));
    } else {
      const int64_t piece = n - num_parts;
      kernels.backward_rows(p, rows[piece], rows[piece + 1], types_of(n));
    }
  });
  for (int64_t row = 0; row < num_global; ++row) kernels.backward_row_merge(p, row, parts, part_of(row * parts));
  if (want_type_bias) {
    std::vector<double> sums(num_types * p.num_heads, 0.0);
    for (int64_t n = 0; n < num_parts + row_pieces; ++n) {
      for (size_t t = 0; t < sums.size(); ++t) sums[t] += types_of(n)[t];
    }
    for (size_t t = 0; t < sums.size(); ++t) {
      if (accumulate.dtype() == at::kDouble) {
        grad_type_bias.mutable_data_ptr<double>()[t] = sums[t];
      } else {
        grad_type_bias.mutable_data_ptr<float>()[t] = static_cast<float>(sums[t]);
      }
    }
  }

  // Columns: the gradients of key and value.
  const std::vector<int64_t> columns = balanced(p.rowptr_t, num_global, p.num_tokens, num_global);
  const int64_t column_pieces = static_cast<int64_t>(columns.size()) - 1;
  in_parallel(num_parts + column_pieces, [&](int64_t n) {
    if (n < num_parts) {
      const int64_t part = n % parts;
      kernels.backward_global_column(p, n / parts, p.num_tokens * part / parts, p.num_tokens * (part + 1) / parts,
                                     part_of(n));
    } else {
      const int64_t piece = n - num_parts;
      kernels.backward_columns(p, columns[piece], columns[piece + 1]);
    }
  });
  for (int64_t column = 0; column < num_global; ++column) {
    kernels.backward_column_merge(p, column, parts, part_of(column * parts));
  }
  return {grad_q, grad_k, grad_v, grad_pair_bias, grad_type_bias};
}

Tensor token_dropout(const Tensor& x, const Tensor& seed, int64_t threshold, double keep_scale, int64_t first_row) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.is_contiguous() && x.device().is_cpu(), "x must be [N, C], contiguous, on the CPU");
  Tensor y = allocate(x.sizes(), x.options());
  const Kernels& kernels = kernels_for(x.scalar_type());
  const uint64_t key = seed_key(seed.item<int64_t>());
  const int64_t channels = x.size(1), row_bytes = channels * x.itemsize();
  const char* const from = static_cast<const char*>(x.const_data_ptr());
  char* const to = static_cast<char*>(y.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 15) / std::max<int64_t>(1, channels));
  at::parallel_for(0, x.size(0), grain, [&](int64_t begin, int64_t end) {
    kernels.token_dropout(from + begin * row_bytes, to + begin * row_bytes, end - begin, channels, first_row + begin, key,
                          static_cast<uint32_t>(threshold), keep_scale);
  });
  return y;
}

TORCH_LIBRARY(torchgt_cpu, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor rowptr, Tensor col, Tensor? pair_type, Tensor? pair_bias, "
      "Tensor? type_bias, Tensor? seed, Tensor? token_ids, int num_global, int num_types, float scale, int threshold, "
      "float keep_scale, int head_offset) -> (Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor grad_out, Tensor? grad_total, Tensor out, Tensor top, Tensor total, Tensor q, Tensor k, Tensor v, "
      "Tensor rowptr, Tensor col, Tensor rowptr_t, Tensor col_t, Tensor index_t, Tensor? pair_type, Tensor? pair_bias, "
      "Tensor? type_bias, Tensor? seed, Tensor? token_ids, int num_global, int num_types, float scale, int threshold, "
      "float keep_scale, int head_offset, bool want_pair_bias, bool want_type_bias) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("token_dropout(Tensor x, Tensor seed, int threshold, float keep_scale, int first_row) -> Tensor");
}

TORCH_LIBRARY_IMPL(torchgt_cpu, CPU, m) {
  m.impl("forward", forward);
  m.impl("backward", backward);
  m.impl("token_dropout", token_dropout);
}

}  // namespace
}  // namespace torchgt
