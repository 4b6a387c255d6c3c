// The operators: tensors to raw pointers, and fixed pieces of work to threads.
//
// Every piece (a range of rows or columns of about equal work, or a part of a long one) depends on the pattern alone, and so does the order in which partial sums are added. Threads only decide who does which piece, so
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
constexpr int64_t kParts = 64;         // of one long row, at most
constexpr int64_t kPart = 1024;        // pairs, at least
constexpr int64_t kLongRow = 8192;     // pairs; shorter rows are never split

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

// A row longer than this would hold up the others, so it is computed in parts. Relative to all pairs, which bounds the
// number of such rows.
int64_t long_row(const Params& p) {
  const int64_t pairs = p.num_pairs + 2 * p.num_global * p.num_tokens;
  return std::max(kLongRow, pairs / kParts);
}

struct Part {
  int64_t row, begin, end;
};

// The parts of all long rows (or columns), row by row. A global token's row is split, however short: the ranges of
// `balanced` begin behind those rows.
template <class Size>
std::vector<Part> long_parts(int64_t num_tokens, int64_t num_global, int64_t longest, const Size& size) {
  std::vector<Part> parts;
  for (int64_t i = 0; i < num_tokens; ++i) {
    const int64_t pairs = size(i);
    if (pairs <= longest && i >= num_global) continue;
    const int64_t count = std::clamp<int64_t>(pairs / kPart, 1, kParts);
    for (int64_t n = 0; n < count; ++n) {
      parts.push_back({i, pairs / count * n + pairs % count * n / count,
                       pairs / count * (n + 1) + pairs % count * (n + 1) / count});
    }
  }
  return parts;
}

// Calls f(row, first part, number of parts) for each long row.
template <class Fn>
void each_long(const std::vector<Part>& parts, const Fn& f) {
  for (size_t first = 0, last; first < parts.size(); first = last) {
    for (last = first + 1; last < parts.size() && parts[last].row == parts[first].row;) ++last;
    f(parts[first].row, static_cast<int64_t>(first), static_cast<int64_t>(last - first));
  }
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

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rowptr,
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
  Tensor sums = allocate({p.num_tokens, 2, p.num_heads}, accumulate);
  if (q.numel() == 0) {
    sums.zero_();
    return {out, sums};
  }
  p.out = out.mutable_data_ptr();
  p.sums = sums.mutable_data_ptr();
  p.long_row = long_row(p);

  const auto size = [&](int64_t i) { return row_size(p, i); };
  const std::vector<Part> parts = long_parts(p.num_tokens, num_global, p.long_row, size);
  const int64_t num_parts = static_cast<int64_t>(parts.size());
  const std::vector<int64_t> bounds = balanced(p.rowptr, num_global, p.num_tokens, num_global);
  const int64_t pieces = static_cast<int64_t>(bounds.size()) - 1;
  Tensor partials = at::empty({num_parts, partial_size(p)}, accumulate);
  char* const partial = static_cast<char*>(partials.mutable_data_ptr());
  const int64_t part_bytes = partial_size(p) * accumulate.dtype().itemsize();
  // The long rows' parts are the largest pieces, so they go first.
  in_parallel(num_parts + pieces, [&](int64_t n) {
    if (n < num_parts) {
      kernels.forward_part(p, parts[n].row, parts[n].begin, parts[n].end, partial + n * part_bytes);
    } else {
      n -= num_parts;
      kernels.forward_rows(p, bounds[n], bounds[n + 1]);
    }
  });
  each_long(parts, [&](int64_t row, int64_t first, int64_t count) {
    kernels.forward_merge(p, row, count, partial + first * part_bytes);
  });
  return {out, sums};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_out, const OptTensor& grad_sums, const Tensor& out, const Tensor& sums, const Tensor& q,
    const Tensor& k, const Tensor& v, const Tensor& rowptr, const Tensor& col, const Tensor& rowptr_t,
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
  TORCH_CHECK_VALUE(grad_out.is_contiguous() && out.is_contiguous() && sums.is_contiguous(),
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
  Tensor delta = allocate({p.num_tokens, p.num_heads}, accumulate);
  p.grad_out = grad_out.const_data_ptr();
  p.out = const_cast<void*>(out.const_data_ptr());
  p.sums = const_cast<void*>(sums.const_data_ptr());
  p.grad_sums = data(grad_sums);
  p.delta = delta.mutable_data_ptr();
  p.grad_q = grad_q.mutable_data_ptr();
  p.grad_k = grad_k.mutable_data_ptr();
  p.grad_v = grad_v.mutable_data_ptr();
  p.grad_pair_bias = want_pair_bias ? grad_pair_bias.mutable_data_ptr() : nullptr;
  p.long_row = p.long_column = long_row(p);
  const int64_t part_bytes = partial_size(p) * accumulate.dtype().itemsize();

  // Rows: the gradient of the query and of the biases, and what the columns need of each row.
  {
    const auto size = [&](int64_t i) { return row_size(p, i); };
    const std::vector<Part> parts = long_parts(p.num_tokens, num_global, p.long_row, size);
    const int64_t num_parts = static_cast<int64_t>(parts.size());
    const std::vector<int64_t> bounds = balanced(p.rowptr, num_global, p.num_tokens, num_global);
    const int64_t pieces = static_cast<int64_t>(bounds.size()) - 1;
    Tensor partials = at::empty({num_parts, partial_size(p)}, accumulate);
    char* const partial = static_cast<char*>(partials.mutable_data_ptr());
    Tensor by_piece =
        at::zeros({want_type_bias ? num_parts + pieces : 0, num_types, p.num_heads}, q.options().dtype(at::kDouble));
    double* const types = want_type_bias ? by_piece.mutable_data_ptr<double>() : nullptr;
    const auto types_of = [&](int64_t n) { return types ? types + n * num_types * p.num_heads : nullptr; };
    each_long(parts, [&](int64_t row, int64_t, int64_t) { kernels.row_delta(p, row); });
    in_parallel(num_parts + pieces, [&](int64_t n) {
      if (n < num_parts) {
        kernels.backward_row_part(p, parts[n].row, parts[n].begin, parts[n].end, partial + n * part_bytes, types_of(n));
      } else {
        kernels.backward_rows(p, bounds[n - num_parts], bounds[n - num_parts + 1], types_of(n));
      }
    });
    each_long(parts, [&](int64_t row, int64_t first, int64_t count) {
      kernels.backward_row_merge(p, row, count, partial + first * part_bytes);
    });
    if (want_type_bias) {  // in order: a library's sum may split by threads
      Tensor total = at::zeros({num_types, p.num_heads}, by_piece.options());
      for (int64_t n = 0; n < num_parts + pieces; ++n) total.add_(by_piece.select(0, n));
      grad_type_bias.copy_(total);
    }
  }

  // Columns: the gradients of key and value.
  const auto size = [&](int64_t j) { return column_size(p, j); };
  const std::vector<Part> parts = long_parts(p.num_tokens, num_global, p.long_column, size);
  const int64_t num_parts = static_cast<int64_t>(parts.size());
  const std::vector<int64_t> bounds = balanced(p.rowptr_t, num_global, p.num_tokens, num_global);
  const int64_t pieces = static_cast<int64_t>(bounds.size()) - 1;
  Tensor partials = at::empty({num_parts, partial_size(p)}, accumulate);
  char* const partial = static_cast<char*>(partials.mutable_data_ptr());
  in_parallel(num_parts + pieces, [&](int64_t n) {
    if (n < num_parts) {
      kernels.backward_column_part(p, parts[n].row, parts[n].begin, parts[n].end, partial + n * part_bytes);
    } else {
      kernels.backward_columns(p, bounds[n - num_parts], bounds[n - num_parts + 1]);
    }
  });
  each_long(parts, [&](int64_t column, int64_t first, int64_t count) {
    kernels.backward_column_merge(p, column, count, partial + first * part_bytes);
  });
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
      "float keep_scale, int head_offset) -> (Tensor, Tensor)");
  m.def(
      "backward(Tensor grad_out, Tensor? grad_sums, Tensor out, Tensor sums, Tensor q, Tensor k, Tensor v, "
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
