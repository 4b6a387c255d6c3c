// The kernels, for one storage type S. Include once in each translation unit, then TORCHGT_KERNELS(name, S).
//
// Layout: heads are taken in groups of 8, 4, 2 or 1 whose scores of one pair are the lanes of one vector; a head's
// dimension is taken in chunks of 8. So nothing is transposed and one exponential serves 8 heads. NH is the number of
// heads of a group, DT the head dimension where it is known at compile time, else 0.
//
// A row's pairs are taken in blocks: scores of a block, then its maximum, then exponentials, then the weighted sum.
// The running sums are rescaled only where the running maximum grows. Order of every sum depends on the pattern alone,
// never on threads.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "hash.h"
#include "kernels.h"
#include "simd.h"

namespace torchgt {
namespace {

constexpr int kBlock = 48;  // pairs whose scores are held at once
constexpr int kRow = 512;   // in the backward pass, so that most rows are held whole
constexpr int kAhead = 10;  // pairs between a prefetch and its use: one memory latency, with others using the memory
constexpr int kRowsAhead = 3;  // rows, for a row's own slices: too short a visit for the hardware to see a stream

// Fixed-size where the compiler knows the size, so that sums stay in registers.
template <class A, int N>
struct Buffer {
  alignas(64) A data[N];
  explicit Buffer(int64_t) {}
};
template <class A>
struct Buffer<A, 0> {
  std::vector<A> storage;
  A* data;
  explicit Buffer(int64_t n) : storage(n), data(storage.data()) {}
};

// The pairs of one row (or column): `lead` consecutive tokens from `lead_begin`, all of type `lead_type` (pairs with
// global tokens), then `stored` pairs from position `first` of col.
struct Pairs {
  int64_t lead_begin, lead, lead_type;
  const void* col;
  bool wide;
  const int64_t* index;  // where a pair is stored, null: at its position
  int64_t first, stored;
  int64_t limit;         // end of col, for prefetching

  TORCHGT_INLINE int64_t count() const { return lead + stored; }
  // Pairs begin .. end of these.
  Pairs part(int64_t begin, int64_t end) const {
    Pairs cut = *this;
    cut.lead_begin = lead_begin + std::min(begin, lead);
    cut.lead = std::clamp(end, int64_t{0}, lead) - std::min(begin, lead);
    cut.first = first + std::max<int64_t>(begin - lead, 0);
    cut.stored = std::max<int64_t>(end - lead, 0) - std::max<int64_t>(begin - lead, 0);
    return cut;
  }
  TORCHGT_INLINE int64_t at(int64_t e) const {
    return wide ? static_cast<const int64_t*>(col)[e] : static_cast<const int32_t*>(col)[e];
  }
  TORCHGT_INLINE int64_t token(int64_t t) const { return t < lead ? lead_begin + t : at(first + t - lead); }
  // Where pair t is stored, -1 if it is not.
  TORCHGT_INLINE int64_t position(int64_t t) const {
    if (t < lead) return -1;
    return index ? index[first + t - lead] : first + t - lead;
  }
};

inline Pairs row_pairs(const Params& p, int64_t i) {
  if (i < p.num_global) return {0, p.num_tokens, p.num_types - 2, nullptr, false, nullptr, 0, 0, 0};
  return {0,      p.num_global, p.num_types - 1, p.col, p.wide, nullptr, p.rowptr[i], p.rowptr[i + 1] - p.rowptr[i],
          p.num_pairs};
}
inline Pairs column_pairs(const Params& p, int64_t j) {
  return {0,           p.num_global, p.num_types - 2, p.col_t, p.wide, p.index_t, p.rowptr_t[j],
          p.rowptr_t[j + 1] - p.rowptr_t[j], p.num_pairs};
}
inline Pairs range(int64_t begin, int64_t end, int64_t type) {
  return {begin, end - begin, type, nullptr, false, nullptr, 0, 0, 0};
}

template <class S, int NH, int DT>
struct Group {
  using A = typename ArithmeticOf<S>::type;
  using V = typename Lanes<A>::V;
  using Sums = Buffer<A, NH * DT>;
  static constexpr int kChunks = DT / 8;
  // Heads whose sums are kept in registers together.
  static constexpr int kTogether = DT == 0 ? 1 : (8 / kChunks < 1 ? 1 : (8 / kChunks > NH ? NH : 8 / kChunks));

  const Params& p;
  const int64_t head0;
  const int64_t runtime_dim;
  const A scale;

  Group(const Params& params, int64_t first_head)
      : p(params), head0(first_head), runtime_dim(params.head_dim), scale(static_cast<A>(params.scale)) {}

  TORCHGT_INLINE int64_t dim() const { return DT ? DT : runtime_dim; }
  TORCHGT_INLINE int64_t padded() const { return DT ? DT : (runtime_dim + 7) / 8 * 8; }
  TORCHGT_INLINE int64_t slice_size() const { return NH * padded(); }
  TORCHGT_INLINE const S* slice(const void* tensor, int64_t stride, int64_t token) const {
    return static_cast<const S*>(tensor) + token * stride + head0 * dim();
  }
  TORCHGT_INLINE int64_t packed() const { return p.num_heads * dim(); }
  TORCHGT_INLINE V zero() const { return splat<V>(A(0)); }

  // Slices: this group's heads of one token, padded to whole chunks in a buffer.

  TORCHGT_INLINE void read(const S* from, A* to) const {
    if constexpr (DT) {
      for (int c = 0; c < NH * kChunks; ++c) store(to + 8 * c, load(from + 8 * c));
    } else {
      const int64_t whole = dim() / 8 * 8;
      const int rest = static_cast<int>(dim() - whole);
      for (int h = 0; h < NH; ++h, from += dim(), to += padded()) {
        for (int64_t c = 0; c < whole; c += 8) store(to + c, load(from + c));
        if (rest) store(to + whole, load_some(from + whole, rest));
      }
    }
  }
  // factor: one lane a head.
  TORCHGT_INLINE void write(const A* from, S* to, V factor) const {
    if constexpr (DT) {
      for (int h = 0; h < NH; ++h) {
        for (int c = 0; c < kChunks; ++c) store(to + h * DT + 8 * c, load(from + h * DT + 8 * c) * factor[h]);
      }
    } else {
      const int64_t whole = dim() / 8 * 8;
      const int rest = static_cast<int>(dim() - whole);
      for (int h = 0; h < NH; ++h, to += dim(), from += padded()) {
        for (int64_t c = 0; c < whole; c += 8) store(to + c, load(from + c) * factor[h]);
        if (rest) store_some(to + whole, load(from + whole) * factor[h], rest);
      }
    }
  }
  TORCHGT_INLINE void clear(A* sums) const {
    for (int64_t c = 0; c < slice_size(); c += 8) store(sums + c, zero());
  }
  TORCHGT_INLINE void prefetch(const S* at) const {
    const int64_t bytes = NH * dim() * static_cast<int64_t>(sizeof(S));
    const char* line = reinterpret_cast<const char*>(at);
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(line + b);
  }

  TORCHGT_INLINE void prefetch_row(const void* tensor, int64_t stride, int64_t row) const {
    if (row + kRowsAhead < p.num_tokens) prefetch(slice(tensor, stride, row + kRowsAhead));
  }

  // Dot products of the group's heads: fixed is a padded buffer, stream a slice in memory.
  TORCHGT_INLINE V dot(const A* fixed, const S* stream) const {
    V t[NH];
    if constexpr (DT) {
      for (int h = 0; h < NH; ++h) {
        V x = load(fixed + h * DT) * load(stream + h * DT);
        for (int c = 1; c < kChunks; ++c) x += load(fixed + h * DT + 8 * c) * load(stream + h * DT + 8 * c);
        t[h] = x;
      }
    } else {
      const int64_t whole = dim() / 8 * 8;
      const int rest = static_cast<int>(dim() - whole);
      for (int h = 0; h < NH; ++h, stream += dim(), fixed += padded()) {
        V x = zero();
        for (int64_t c = 0; c < whole; c += 8) x += load(fixed + c) * load(stream + c);
        if (rest) x += load(fixed + whole) * load_some(stream + whole, rest);
        t[h] = x;
      }
    }
    return sum_each<NH>(t);
  }

  // sums[h] += sum over t of weight[t][h] * tensor[token[t]][h].
  TORCHGT_INLINE void accumulate(A* sums, const void* tensor, int64_t stride, const int64_t* token, const V* weight,
                                 int n) const {
    if constexpr (DT) {
      for (int h0 = 0; h0 < NH; h0 += kTogether) {
        V s[kTogether * kChunks];
        for (int c = 0; c < kTogether * kChunks; ++c) s[c] = load(sums + h0 * DT + 8 * c);
        for (int t = 0; t < n; ++t) {
          const S* from = slice(tensor, stride, token[t]) + h0 * DT;
          for (int h = 0; h < kTogether; ++h) {
            const A w = weight[t][h0 + h];
            for (int c = 0; c < kChunks; ++c) s[h * kChunks + c] += load(from + h * DT + 8 * c) * w;
          }
        }
        for (int c = 0; c < kTogether * kChunks; ++c) store(sums + h0 * DT + 8 * c, s[c]);
      }
    } else {
      const int64_t whole = dim() / 8 * 8;
      const int rest = static_cast<int>(dim() - whole);
      for (int h = 0; h < NH; ++h, sums += padded()) {
        for (int64_t c = 0; c < dim(); c += 8) {
          V s = load(sums + c);
          for (int t = 0; t < n; ++t) {
            const S* from = slice(tensor, stride, token[t]) + h * dim() + c;
            s += (c < whole ? load(from) : load_some(from, rest)) * weight[t][h];
          }
          store(sums + c, s);
        }
      }
    }
  }

  TORCHGT_INLINE int64_t type_of(const Pairs& pairs, int64_t position) const {
    return position < 0 ? pairs.lead_type : p.pair_type[position];
  }
  TORCHGT_INLINE V score(V dots, const Pairs& pairs, int64_t t) const {
    V s = dots * scale;
    if (p.type_bias || p.pair_bias) {
      const int64_t position = pairs.position(t);
      if (p.type_bias) {
        s += load_first<NH>(static_cast<const A*>(p.type_bias) + type_of(pairs, position) * p.num_heads + head0);
      }
      if (p.pair_bias && position >= 0) {
        s += load_first<NH>(static_cast<const S*>(p.pair_bias) + position * p.num_heads + head0);
      }
    }
    return s;
  }

  TORCHGT_INLINE int64_t global_id(int64_t token) const { return p.token_ids ? p.token_ids[token] : token; }
  // keep_scale where the weight of (i, j) is kept, else 0.
  TORCHGT_INLINE V kept(uint64_t row, int64_t j) const {
    const U32x8 bits = hash32(pair_key(row, global_id(j)), static_cast<uint32_t>(p.head_offset + head0));
    const FI mask = (FI)(bits >= p.threshold);
    if constexpr (std::is_same_v<A, float>) {
      return mask ? splat<V>(A(p.keep_scale)) : zero();
    } else {
      return __builtin_convertvector(mask, GI) ? splat<V>(A(p.keep_scale)) : zero();
    }
  }
  TORCHGT_INLINE uint64_t key_of_row(int64_t i) const { return p.dropout ? row_key(p.seed_key, global_id(i)) : 0; }

  // Forward.

  struct Softmax {
    V top, total;
    bool started;
  };
  TORCHGT_INLINE Softmax start(A* sums) const {
    clear(sums);
    return {lowest(), zero(), false};
  }
  TORCHGT_INLINE V lowest() const { return splat<V>(-std::numeric_limits<A>::infinity()); }

  TORCHGT_INLINE void prefetch_keys(const Pairs& pairs, int64_t t) const {
    const int64_t e = pairs.first + t + kAhead - pairs.lead;
    if (e >= 0 && e < pairs.limit) {
      const int64_t soon = pairs.at(e);
      prefetch(slice(p.k, p.k_stride, soon));
      prefetch(slice(p.v, p.v_stride, soon));
    }
  }

  TORCHGT_NOINLINE void forward_pairs(const Pairs& pairs, int64_t i, const A* q, Softmax& state, A* sums) const {
    const uint64_t row = key_of_row(i);
    V weight[kBlock];
    int64_t token[kBlock];
    for (int64_t first = 0; first < pairs.count(); first += kBlock) {
      const int n = static_cast<int>(std::min<int64_t>(pairs.count() - first, kBlock));
      V grown = state.top;
      for (int t = 0; t < n; ++t) {
        prefetch_keys(pairs, first + t);
        token[t] = pairs.token(first + t);
        weight[t] = score(dot(q, slice(p.k, p.k_stride, token[t])), pairs, first + t);
        grown = maximum(grown, weight[t]);
      }
      // A row whose scores are all -inf so far keeps a shift of 0: no inf - inf.
      const V shift = grown == lowest() ? zero() : grown;
      if (state.started && any(grown > state.top)) {
        const V shrink = exponential(state.top - shift);
        state.total *= shrink;
        for (int h = 0; h < NH; ++h) {
          A* const sum = sums + h * padded();
          for (int64_t c = 0; c < padded(); c += 8) store(sum + c, load(sum + c) * shrink[h]);
        }
      }
      state.started = true;
      state.top = grown;
      for (int t = 0; t < n; ++t) {
        weight[t] = exponential(weight[t] - shift);
        state.total += weight[t];
        if (p.dropout) weight[t] *= kept(row, token[t]);
      }
      accumulate(sums, p.v, p.v_stride, token, weight, n);
    }
  }

  TORCHGT_INLINE void finish(int64_t i, const Softmax& state, const A* sums) const {
    const V factor = state.total == zero() ? zero() : splat<V>(A(1)) / state.total;
    write(sums, static_cast<S*>(p.out) + i * packed() + head0 * dim(), factor);
    store_first<NH>(sums_at(i), state.top);
    store_first<NH>(sums_at(i) + p.num_heads, factor);
  }

  void forward_rows(int64_t begin, int64_t end) const {
    Sums q(slice_size()), sums(slice_size());
    for (int64_t i = begin; i < end; ++i) {
      if (row_size(p, i) > p.long_row) continue;
      prefetch_row(p.q, p.q_stride, i);
      read(slice(p.q, p.q_stride, i), q.data);
      Softmax state = start(sums.data);
      forward_pairs(row_pairs(p, i), i, q.data, state, sums.data);
      finish(i, state, sums.data);
    }
  }

  void forward_part(int64_t i, int64_t begin, int64_t end, A* partial) const {
    Sums q(slice_size()), sums(slice_size());
    read(slice(p.q, p.q_stride, i), q.data);
    Softmax state = start(sums.data);
    forward_pairs(row_pairs(p, i).part(begin, end), i, q.data, state, sums.data);
    for (int h = 0; h < NH; ++h) {
      A* to = partial + (head0 + h) * (2 * dim() + 2);
      to[0] = state.top[h];
      to[1] = state.total[h];
      for (int64_t d = 0; d < dim(); ++d) to[2 + d] = sums.data[h * padded() + d];
    }
  }

  // Backward. With P the softmax weights, M the dropout factors and dO the gradient of the output:
  // dV = (P M)^T dO, dP = M (dO V^T), dS = P (dP - delta), dQ = scale dS K, dK = scale dS^T Q, where
  // delta = sum_j P dP = sum_d dO O, less the gradient of the log-sum-exp. Rows that fit into the buffer sum over their
  // pairs, which loses nothing where one weight is nearly 1 and dP - delta nearly 0; the others sum over d.

  struct Stats {
    V top, inverse, delta;
  };
  TORCHGT_INLINE A* sums_at(int64_t i) const { return static_cast<A*>(p.sums) + 2 * i * p.num_heads + head0; }
  TORCHGT_INLINE A* delta_at(int64_t i) const { return static_cast<A*>(p.delta) + i * p.num_heads + head0; }
  TORCHGT_INLINE void prefetch_stats(int64_t i) const {
    __builtin_prefetch(sums_at(i));
    __builtin_prefetch(sums_at(i) + p.num_heads);
    __builtin_prefetch(delta_at(i));
  }
  // Without the delta. A row without weights gets factor 0, and no infinity that could make a NaN.
  TORCHGT_INLINE Stats softmax_stats(int64_t i) const {
    const V top = load_first<NH>(sums_at(i));
    return {top == lowest() ? zero() : top, load_first<NH>(sums_at(i) + p.num_heads), zero()};
  }
  TORCHGT_INLINE Stats read_stats(int64_t i) const {
    Stats stats = softmax_stats(i);
    stats.delta = load_first<NH>(delta_at(i));
    return stats;
  }
  // What the gradient of the log-sum-exp, which arrives through 1 / total, takes from delta.
  TORCHGT_INLINE V delta_of_sums(int64_t i, const Stats& stats) const {
    if (!p.grad_sums) return zero();
    return stats.inverse * load_first<NH>(static_cast<const A*>(p.grad_sums) + (2 * i + 1) * p.num_heads + head0);
  }
  // With the delta by the output, which is stored.
  TORCHGT_INLINE Stats all_stats(int64_t i, const A* grad_out) const {
    Stats stats = softmax_stats(i);
    stats.delta = delta_of_sums(i, stats) + dot(grad_out, slice(p.out, packed(), i));
    store_first<NH>(delta_at(i), stats.delta);
    return stats;
  }

  // Attention weights and their gradients for pairs first .. first + n of row i.
  TORCHGT_INLINE void weigh(const Pairs& pairs, int64_t first, int n, uint64_t row, const A* q, const A* grad_out,
                            const Stats& stats, int64_t* token, V* attention, V* grad) const {
    for (int t = 0; t < n; ++t) {
      prefetch_keys(pairs, first + t);
      const int64_t j = token[t] = pairs.token(first + t);
      const V s = score(dot(q, slice(p.k, p.k_stride, j)), pairs, first + t);
      V grad_p = dot(grad_out, slice(p.v, p.v_stride, j));
      if (p.dropout) grad_p *= kept(row, j);
      attention[t] = exponential(s - stats.top) * stats.inverse;
      grad[t] = grad_p;
    }
  }

  // The rest for these pairs: gradients of their scores and biases, and their part of the gradient of the query.
  TORCHGT_INLINE void spread(const Pairs& pairs, int64_t first, int n, V delta, const int64_t* token, const V* attention,
                             V* grad, A* grad_q, double* grad_type) const {
    for (int t = 0; t < n; ++t) {
      const V grad_s = attention[t] * (grad[t] - delta);
      grad[t] = grad_s * scale;
      if (!grad_type && !p.grad_pair_bias) continue;
      const int64_t position = pairs.position(first + t);
      if (p.grad_pair_bias && position >= 0) {
        store_first<NH>(static_cast<S*>(p.grad_pair_bias) + position * p.num_heads + head0, grad_s);
      }
      if (grad_type) {
        double* to = grad_type + type_of(pairs, position) * p.num_heads + head0;
        for (int h = 0; h < NH; ++h) to[h] += static_cast<double>(grad_s[h]);
      }
    }
    accumulate(grad_q, p.k, p.k_stride, token, grad, n);
  }

  TORCHGT_NOINLINE void backward_row(const Pairs& pairs, int64_t i, const A* q, const A* grad_out, bool have_stats,
                                     A* grad_q, double* grad_type) const {
    const uint64_t row = key_of_row(i);
    V attention[kRow], grad[kRow];
    int64_t token[kRow];
    Stats stats;
    if (have_stats) {
      stats = read_stats(i);
    } else if (pairs.count() > kRow) {
      stats = all_stats(i, grad_out);
    } else {
      const int n = static_cast<int>(pairs.count());
      stats = softmax_stats(i);
      stats.delta = delta_of_sums(i, stats);
      weigh(pairs, 0, n, row, q, grad_out, stats, token, attention, grad);
      for (int t = 0; t < n; ++t) stats.delta += attention[t] * grad[t];
      store_first<NH>(delta_at(i), stats.delta);
      for (int t = 0; t < n; t += kBlock) {
        const int m = std::min(n - t, kBlock);
        spread(pairs, t, m, stats.delta, token + t, attention + t, grad + t, grad_q, grad_type);
      }
      return;
    }
    for (int64_t first = 0; first < pairs.count(); first += kBlock) {
      const int n = static_cast<int>(std::min<int64_t>(pairs.count() - first, kBlock));
      weigh(pairs, first, n, row, q, grad_out, stats, token, attention, grad);
      spread(pairs, first, n, stats.delta, token, attention, grad, grad_q, grad_type);
    }
  }

  void backward_rows(int64_t begin, int64_t end, double* grad_type) const {
    Sums q(slice_size()), grad_out(slice_size()), grad_q(slice_size());
    for (int64_t i = begin; i < end; ++i) {
      if (row_size(p, i) > p.long_row) continue;
      prefetch_row(p.q, p.q_stride, i);
      prefetch_row(p.grad_out, packed(), i);
      read(slice(p.q, p.q_stride, i), q.data);
      read(slice(p.grad_out, packed(), i), grad_out.data);
      clear(grad_q.data);
      backward_row(row_pairs(p, i), i, q.data, grad_out.data, false, grad_q.data, grad_type);
      write(grad_q.data, static_cast<S*>(p.grad_q) + i * packed() + head0 * dim(), splat<V>(A(1)));
    }
  }

  void backward_row_part(int64_t i, int64_t begin, int64_t end, A* partial, double* grad_type) const {
    Sums q(slice_size()), grad_out(slice_size()), grad_q(slice_size());
    read(slice(p.q, p.q_stride, i), q.data);
    read(slice(p.grad_out, packed(), i), grad_out.data);
    clear(grad_q.data);
    backward_row(row_pairs(p, i).part(begin, end), i, q.data, grad_out.data, true, grad_q.data, grad_type);
    copy_partial(grad_q.data, partial, 0);
  }

  void row_delta(int64_t i) const {
    Sums grad_out(slice_size());
    read(slice(p.grad_out, packed(), i), grad_out.data);
    all_stats(i, grad_out.data);
  }

  // One head's partial: sums of the first tensor, then of the second.
  TORCHGT_INLINE void copy_partial(const A* sums, A* partial, int second) const {
    for (int h = 0; h < NH; ++h) {
      A* to = partial + (head0 + h) * (2 * dim() + 2) + second * dim();
      for (int64_t d = 0; d < dim(); ++d) to[d] = sums[h * padded() + d];
    }
  }

  TORCHGT_NOINLINE void backward_column(const Pairs& pairs, int64_t j, const A* k, const A* v, A* grad_k,
                                        A* grad_v) const {
    V weight_q[kBlock], weight_g[kBlock];
    int64_t token[kBlock];
    for (int64_t first = 0; first < pairs.count(); first += kBlock) {
      const int n = static_cast<int>(std::min<int64_t>(pairs.count() - first, kBlock));
      for (int t = 0; t < n; ++t) {
        const int64_t e = pairs.first + first + t + kAhead - pairs.lead;
        if (e >= 0 && e < pairs.limit) {
          const int64_t soon = pairs.at(e);
          prefetch(slice(p.q, p.q_stride, soon));
          prefetch(slice(p.grad_out, packed(), soon));
          prefetch_stats(soon);
        }
        const int64_t i = token[t] = pairs.token(first + t);
        const V s = score(dot(k, slice(p.q, p.q_stride, i)), pairs, first + t);
        V grad_p = dot(v, slice(p.grad_out, packed(), i));
        const Stats stats = read_stats(i);
        const V attention = exponential(s - stats.top) * stats.inverse;
        weight_g[t] = attention;
        if (p.dropout) {
          const V keep = kept(key_of_row(i), j);
          grad_p *= keep;
          weight_g[t] *= keep;
        }
        weight_q[t] = attention * (grad_p - stats.delta) * scale;
      }
      accumulate(grad_k, p.q, p.q_stride, token, weight_q, n);
      accumulate(grad_v, p.grad_out, packed(), token, weight_g, n);
    }
  }

  void backward_columns(int64_t begin, int64_t end) const {
    Sums k(slice_size()), v(slice_size()), grad_k(slice_size()), grad_v(slice_size());
    for (int64_t j = begin; j < end; ++j) {
      if (column_size(p, j) > p.long_column) continue;
      prefetch_row(p.k, p.k_stride, j);
      prefetch_row(p.v, p.v_stride, j);
      read(slice(p.k, p.k_stride, j), k.data);
      read(slice(p.v, p.v_stride, j), v.data);
      clear(grad_k.data);
      clear(grad_v.data);
      backward_column(column_pairs(p, j), j, k.data, v.data, grad_k.data, grad_v.data);
      write(grad_k.data, static_cast<S*>(p.grad_k) + j * packed() + head0 * dim(), splat<V>(A(1)));
      write(grad_v.data, static_cast<S*>(p.grad_v) + j * packed() + head0 * dim(), splat<V>(A(1)));
    }
  }

  void backward_column_part(int64_t j, int64_t begin, int64_t end, A* partial) const {
    Sums k(slice_size()), v(slice_size()), grad_k(slice_size()), grad_v(slice_size());
    read(slice(p.k, p.k_stride, j), k.data);
    read(slice(p.v, p.v_stride, j), v.data);
    clear(grad_k.data);
    clear(grad_v.data);
    if (j < p.num_global) {
      // A pair of two global tokens counts as "from" one.
      const int64_t middle = std::clamp(p.num_global, begin, end);
      backward_column(range(begin, middle, p.num_types - 2), j, k.data, v.data, grad_k.data, grad_v.data);
      backward_column(range(middle, end, p.num_types - 1), j, k.data, v.data, grad_k.data, grad_v.data);
    } else {
      backward_column(column_pairs(p, j).part(begin, end), j, k.data, v.data, grad_k.data, grad_v.data);
    }
    copy_partial(grad_k.data, partial, 0);
    copy_partial(grad_v.data, partial, 1);
  }
};

// Calls f(Group) for every group of heads.
template <class S, int NH, class Fn>
void with_dim(const Params& p, int64_t head0, const Fn& f) {
  // Double is for checking gradients, and a single head leaves 7 lanes idle whatever its dimension: one version each.
  if constexpr (!std::is_same_v<S, double> && NH > 1) {
    switch (p.head_dim) {
      case 8: return f(Group<S, NH, 8>(p, head0));
      case 16: return f(Group<S, NH, 16>(p, head0));
      case 24: return f(Group<S, NH, 24>(p, head0));
      case 32: return f(Group<S, NH, 32>(p, head0));
      default: break;
    }
  }
  f(Group<S, NH, 0>(p, head0));
}

template <class S, class Fn>
void each_group(const Params& p, const Fn& f) {
  for (int64_t head = 0; head < p.num_heads;) {
    const int64_t left = p.num_heads - head;
    if (left >= 8) {
      with_dim<S, 8>(p, head, f);
      head += 8;
    } else if (left >= 4) {
      with_dim<S, 4>(p, head, f);
      head += 4;
    } else if (left >= 2) {
      with_dim<S, 2>(p, head, f);
      head += 2;
    } else {
      with_dim<S, 1>(p, head, f);
      head += 1;
    }
  }
}

template <class S>
struct Entry {
  using A = typename ArithmeticOf<S>::type;

  static void forward_rows(const Params& p, int64_t begin, int64_t end) {
    each_group<S>(p, [&](auto group) { group.forward_rows(begin, end); });
  }
  static void forward_part(const Params& p, int64_t row, int64_t begin, int64_t end, void* partial) {
    each_group<S>(p, [&](auto group) { group.forward_part(row, begin, end, static_cast<A*>(partial)); });
  }
  static void row_delta(const Params& p, int64_t row) {
    each_group<S>(p, [&](auto group) { group.row_delta(row); });
  }
  static void backward_rows(const Params& p, int64_t begin, int64_t end, double* grad_type) {
    each_group<S>(p, [&](auto group) { group.backward_rows(begin, end, grad_type); });
  }
  static void backward_row_part(const Params& p, int64_t row, int64_t begin, int64_t end, void* partial,
                                double* grad_type) {
    each_group<S>(p, [&](auto group) {
      group.backward_row_part(row, begin, end, static_cast<A*>(partial), grad_type);
    });
  }
  static void backward_columns(const Params& p, int64_t begin, int64_t end) {
    each_group<S>(p, [&](auto group) { group.backward_columns(begin, end); });
  }
  static void backward_column_part(const Params& p, int64_t column, int64_t begin, int64_t end, void* partial) {
    each_group<S>(p, [&](auto group) { group.backward_column_part(column, begin, end, static_cast<A*>(partial)); });
  }

  // Rounded once, by the same path as every other store.
  static void store_element(S* to, A value) {
    if constexpr (std::is_same_v<S, BFloat16>) {
      store_some(to, splat<F>(value), 1);
    } else {
      *to = value;
    }
  }

  static void forward_merge(const Params& p, int64_t row, int64_t parts, const void* partials) {
    const int64_t dim = p.head_dim, stride = 2 * dim + 2;
    std::vector<A> sums(dim);
    for (int64_t h = 0; h < p.num_heads; ++h) {
      const A* from = static_cast<const A*>(partials) + h * stride;
      A top = -std::numeric_limits<A>::infinity(), total = 0;
      for (int64_t part = 0; part < parts; ++part) top = std::fmax(top, from[part * partial_size(p)]);
      const A shift = top == -std::numeric_limits<A>::infinity() ? A(0) : top;
      sums.assign(dim, A(0));
      for (int64_t part = 0; part < parts; ++part) {
        const A* one = from + part * partial_size(p);
        const A factor = std::exp(one[0] - shift);
        total += factor * one[1];
        for (int64_t d = 0; d < dim; ++d) sums[d] += factor * one[2 + d];
      }
      S* out = static_cast<S*>(p.out) + (row * p.num_heads + h) * dim;
      for (int64_t d = 0; d < dim; ++d) store_element(out + d, total == 0 ? A(0) : sums[d] / total);
      static_cast<A*>(p.sums)[2 * row * p.num_heads + h] = top;
      static_cast<A*>(p.sums)[(2 * row + 1) * p.num_heads + h] = total == 0 ? A(0) : A(1) / total;
    }
  }

  static void merge(const Params& p, int64_t token, int64_t parts, const void* partials, int second, void* to) {
    const int64_t dim = p.head_dim;
    for (int64_t h = 0; h < p.num_heads; ++h) {
      const A* from = static_cast<const A*>(partials) + h * (2 * dim + 2) + second * dim;
      for (int64_t d = 0; d < dim; ++d) {
        A sum = 0;
        for (int64_t part = 0; part < parts; ++part) sum += from[part * partial_size(p) + d];
        store_element(static_cast<S*>(to) + (token * p.num_heads + h) * dim + d, sum);
      }
    }
  }
  static void backward_row_merge(const Params& p, int64_t row, int64_t parts, const void* partials) {
    merge(p, row, parts, partials, 0, p.grad_q);
  }
  static void backward_column_merge(const Params& p, int64_t column, int64_t parts, const void* partials) {
    merge(p, column, parts, partials, 0, p.grad_k);
    merge(p, column, parts, partials, 1, p.grad_v);
  }

  static void token_dropout(const void* x, void* y, int64_t rows, int64_t channels, int64_t first_row, uint64_t seed_key,
                            uint32_t threshold, double keep_scale) {
    using V = typename Lanes<A>::V;
    const V zero = splat<V>(A(0));
    const S* from = static_cast<const S*>(x);
    S* to = static_cast<S*>(y);
    for (int64_t r = 0; r < rows; ++r, from += channels, to += channels) {
      const uint64_t key = row_key(seed_key, first_row + r);
      for (int64_t c = 0; c < channels; c += 8) {
        const FI mask = (FI)(hash32(key, static_cast<uint32_t>(c)) >= threshold);
        const int n = static_cast<int>(channels - c < 8 ? channels - c : 8);
        const V scaled = (n == 8 ? load(from + c) : load_some(from + c, n)) * A(keep_scale);
        V kept;
        if constexpr (std::is_same_v<A, float>) {
          kept = mask ? scaled : zero;
        } else {
          kept = __builtin_convertvector(mask, GI) ? scaled : zero;
        }
        if (n == 8) {
          store(to + c, kept);
        } else {
          store_some(to + c, kept, n);
        }
      }
    }
  }

  static constexpr Kernels table() {
    return {forward_rows,  forward_part,      forward_merge,      row_delta,
            backward_rows, backward_row_part, backward_row_merge, backward_columns,
            backward_column_part, backward_column_merge, token_dropout};
  }
};

}  // namespace
}  // namespace torchgt

#define TORCHGT_KERNELS(name, storage) \
  namespace torchgt {                  \
  extern const Kernels name;           \
  const Kernels name = Entry<storage>::table(); \
  }
