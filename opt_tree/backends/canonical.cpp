// Attention whose every output bit is a function of a query and of the keys that it sees, in the order of their slots:
// not of how many rows and keys there are, of which slots these lie in, of what lies between them, nor of threads.
//
//   score   s[k] = scale * (one chain of fused multiply-adds over the dimensions of the head)
//   top     the largest s[k], which is the same in any order
//   weight  p[k] = exp(s[k] - top), one polynomial for every key
//   sums    for k ascending: total = total + p[k]; sum[c] = fma(p[k], v[k][c], sum[c]); a key of weight 0 is skipped
//   output  sum[c] / total, rounded once to the dtype
//
// A hidden key has weight 0, whatever lies in its slot. There is one accumulator for each output number, so that
// nothing depends on blocks. All is float32, and a fused multiply-add is exact until it rounds: the width of vectors
// decides nothing either.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {
using torch::stable::Tensor;

#ifdef __AVX512F__
constexpr int W = 16, COLUMNS = 4;  // numbers of a vector; vectors of a query's sums that stay in registers
#else
constexpr int W = 8, COLUMNS = 2;
#endif
constexpr int QUERIES = 4;  // that are computed at once
constexpr float HIDDEN = -1e30f;  // what the mask adds where a key is hidden is below
typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));

inline Vec all(float x) { return Vec{} + x; }

// Fused in every build: left to the compiler, a loop may round twice where its remainder rounds once.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < W; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// e^x of x <= 0: Cephes' polynomial, 2 units in the last place off. 0 below -87; of what is no number, that.
inline Vec exp(Vec x) {
    const Vec magic = all(12582912.f);  // 1.5 * 2^23: a sum with it is rounded to whole numbers
    const Vec t = fma(x, all(1.44269504088896341f), magic), n = t - magic;
    Vec r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Vec y = all(1.9875691500e-4f);
    y = fma(y, r, all(1.3981999507e-3f));
    y = fma(y, r, all(8.3334519073e-3f));
    y = fma(y, r, all(4.1665795894e-2f));
    y = fma(y, r, all(1.6666665459e-1f));
    y = fma(y, r, all(5.0000001201e-1f));
    y = fma(y, r * r, r) + 1.f;
    const Vec found = (Vec)((Ints)y + ((Ints)t << 23));
    return x >= all(-87.f) ? found : x != x ? x : Vec{};
}

struct Half {  // bfloat16
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(Half x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline Vec load(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline Vec load(const Half* from) {
    Halves h;
    std::memcpy(&h, from, sizeof h);
    return (Vec)(__builtin_convertvector(h, Words) << 16);
}
template <class Real>
inline Vec load(const Real* from, int64_t count) {  // the first of W, the others 0
    if (count >= W) return load(from);
    Real few[W] = {};
    std::copy(from, from + count, few);
    return load(few);
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
inline void store(Half* to, Vec v) {  // to the nearest, ties to even
    const Words bits = (Words)v;
    const Words near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Halves h = __builtin_convertvector(v == v ? near : Words{} + 0x7fc0, Halves);
    std::memcpy(to, &h, sizeof h);
}

// Scores of N queries and the W keys of a tile, whose dimensions lie one after the other.
template <int N>
void score(const Vec* keys, const float* const* queries, int64_t dim, float scale, Vec* const* scores, int64_t tile) {
    Vec sum[N] = {};
    for (int64_t d = 0; d < dim; ++d)
        for (int i = 0; i < N; ++i) sum[i] = fma(all(queries[i][d]), keys[d], sum[i]);
    for (int i = 0; i < N; ++i) scores[i][tile] = sum[i] * scale;
}

// Outputs of N queries, C vectors of each, from the weights of the keys begin ... end.
template <int N, int C, class Real>
void weigh(const float* const* weights, const Real* values, int64_t stride, int64_t begin, int64_t end, Real* const* out) {
    Vec sum[N][C] = {};
    float total[N] = {};
    for (int64_t k = begin; k < end; ++k) {
        Vec value[C];
        for (int c = 0; c < C; ++c) value[c] = load(values + k * stride + c * W);
        for (int i = 0; i < N; ++i) {
            const float weight = weights[i][k];
            if (weight == 0) continue;
            total[i] += weight;
            for (int c = 0; c < C; ++c) sum[i][c] = fma(all(weight), value[c], sum[i][c]);
        }
    }
    for (int i = 0; i < N; ++i)
        for (int c = 0; c < C; ++c) store(out[i] + c * W, total[i] == 0 ? Vec{} : sum[i][c] / total[i]);
}

struct Sizes {
    int64_t lanes, heads, kv_heads, rows, keys, dim, value_dim;
};

struct Strides {
    int64_t lane, head, row;
    explicit Strides(const Tensor& tensor) : lane(tensor.stride(0)), head(tensor.stride(1)), row(tensor.stride(2)) {}
};

template <class Real>
struct Attention {
    Sizes is;
    const Real *query, *key, *value, *mask;
    Real* out;
    Strides q, k, v, m;
    float scale;
    std::atomic<bool> understood{true};

    struct Scratch {
        std::vector<Vec> keys, queries, weights;
        std::vector<Real> tail, last;
    };

    // All queries of a lane that share a head of keys.
    void run(int64_t lane, int64_t head) {
        static thread_local Scratch kept;
        const int64_t tiles = (is.keys + W - 1) / W, group = is.heads / is.kv_heads, whole = is.value_dim / W * W;
        const Real* values = value + lane * v.lane + head * v.head;
        turn(key + lane * k.lane + head * k.head, tiles, kept.keys);
        if (whole < is.value_dim) {  // the columns that fill no vector, with zeros behind them
            kept.tail.resize(is.keys * W);
            kept.last.resize(QUERIES * W);
            for (int64_t at = 0; at < is.keys; ++at)
                std::copy_n(values + at * v.row + whole, is.value_dim - whole, kept.tail.data() + at * W);
        }
        kept.queries.resize((QUERIES * is.dim + W - 1) / W);
        kept.weights.resize(QUERIES * tiles);
        for (int64_t first = 0; first < group * is.rows; first += QUERIES) {
            switch (std::min<int64_t>(QUERIES, group * is.rows - first)) {
                case 1: block<1>(lane, head, first, values, kept); break;
                case 2: block<2>(lane, head, first, values, kept); break;
                case 3: block<3>(lane, head, first, values, kept); break;
                default: block<QUERIES>(lane, head, first, values, kept);
            }
        }
    }

    // Lay a tile's keys side by side, dimension after dimension. Behind the last key comes that one again.
    void turn(const Real* keys, int64_t tiles, std::vector<Vec>& to) {
        to.resize(tiles * is.dim);
        for (int64_t tile = 0; tile < tiles; ++tile)
            for (int64_t d = 0; d < is.dim; d += W) {
                float square[W][W];
                for (int64_t j = 0; j < W; ++j)
                    store(square[j], load(keys + std::min(tile * W + j, is.keys - 1) * k.row + d, is.dim - d));
                float* turned = (float*)(to.data() + tile * is.dim + d);
                for (int64_t i = 0; i < std::min<int64_t>(W, is.dim - d); ++i)
                    for (int64_t j = 0; j < W; ++j) turned[i * W + j] = square[j][i];
            }
    }

    // N queries from `first` on; neighbours are the heads of a row, then the rows, which see nearly the same keys.
    template <int N>
    void block(int64_t lane, int64_t head, int64_t first, const Real* values, Scratch& kept) {
        const int64_t tiles = (is.keys + W - 1) / W, group = is.heads / is.kv_heads;
        const float *queries[N], *weights[N];
        const Real* seen[N];
        Real* to[N];
        Vec* scores[N];
        int64_t begin = is.keys, end = 0;
        for (int i = 0; i < N; ++i) {
            const int64_t row = (first + i) / group, own = head * group + (first + i) % group;
            const Real* from = query + lane * q.lane + own * q.head + row * q.row;
            float* wider = (float*)kept.queries.data() + i * is.dim;
            for (int64_t d = 0; d < is.dim; ++d) wider[d] = wide(from[d]);
            queries[i] = wider;
            scores[i] = kept.weights.data() + i * tiles;
            weights[i] = (const float*)scores[i];
            seen[i] = mask + lane * m.lane + row * m.row;
            to[i] = out + ((lane * is.rows + row) * is.heads + own) * is.value_dim;
            int64_t least = 0, most = is.keys;
            while (least < begin && wide(seen[i][least]) < HIDDEN) ++least;
            while (most > end && wide(seen[i][most - 1]) < HIDDEN) --most;
            begin = std::min(begin, least);
            end = std::max(end, most);
        }
        begin = std::min(begin, end);
        const int64_t from = begin / W, until = (end + W - 1) / W;
        for (int64_t tile = from; tile < until; ++tile)
            score<N>(kept.keys.data() + tile * is.dim, queries, is.dim, scale, scores, tile);
        for (int i = 0; i < N; ++i) soften(scores[i], seen[i], from, until);
        int64_t c = 0;
        for (; c + COLUMNS * W <= is.value_dim; c += COLUMNS * W) {
            weigh<N, COLUMNS>(weights, values + c, v.row, begin, end, to);
            for (int i = 0; i < N; ++i) to[i] += COLUMNS * W;
        }
        for (; c + W <= is.value_dim; c += W) {
            weigh<N, 1>(weights, values + c, v.row, begin, end, to);
            for (int i = 0; i < N; ++i) to[i] += W;
        }
        if (c < is.value_dim) {
            Real* last[N];
            for (int i = 0; i < N; ++i) last[i] = kept.last.data() + i * W;
            weigh<N, 1>(weights, (const Real*)kept.tail.data(), W, begin, end, last);
            for (int i = 0; i < N; ++i) std::copy_n(last[i], is.value_dim - c, to[i]);
        }
    }

    // From the scores of a query in some tiles to its weights.
    void soften(Vec* scores, const Real* seen, int64_t from, int64_t until) {
        Vec top = all(-INFINITY);
        Ints strange = {};
        for (int64_t tile = from; tile < until; ++tile) {
            Vec added = load(seen + tile * W, is.keys - tile * W);
            for (int64_t j = is.keys - tile * W; j < W; ++j) added[j] = -INFINITY;
            strange |= (added != 0.f) & ~(added < HIDDEN);
            scores[tile] = added == 0.f ? scores[tile] : all(-INFINITY);
            top = top > scores[tile] ? top : scores[tile];
        }
        float most = -INFINITY;
        for (int j = 0; j < W; ++j) {
            most = std::max(most, top[j]);
            if (strange[j]) understood = false;
        }
        for (int64_t tile = from; tile < until; ++tile) {
            const Vec x = scores[tile];
            scores[tile] = x == all(-INFINITY) ? Vec{} : exp(x - most);
        }
    }
};

template <class Real>
bool attended(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, Tensor& out, double scale) {
    const Sizes sizes{query.size(0), query.size(1), key.size(1), query.size(2), key.size(2), query.size(3), value.size(3)};
    Attention<Real> attention{sizes,
                              (const Real*)query.const_data_ptr(),
                              (const Real*)key.const_data_ptr(),
                              (const Real*)value.const_data_ptr(),
                              (const Real*)mask.const_data_ptr(),
                              (Real*)out.mutable_data_ptr(),
                              Strides(query),
                              Strides(key),
                              Strides(value),
                              Strides(mask),
                              float(scale)};
    if (mask.size(0) == 1) attention.m.lane = 0;
    torch::stable::parallel_for(0, sizes.lanes * sizes.kv_heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) attention.run(i / sizes.kv_heads, i % sizes.kv_heads);
    });
    return attention.understood;
}

// query [lanes, heads, rows, dim], key [lanes, kv_heads, keys, dim], value [lanes, kv_heads, keys, value_dim]; mask
// [lanes or 1, 1, rows, keys] of the same dtype: 0 where a row sees a key, less than -1e30 where not.
// Returns [lanes, rows, heads, value_dim]. A row that sees no key is 0.
Tensor canonical_attention(Tensor query, Tensor key, Tensor value, Tensor mask, double scale) {
    using torch::headeronly::ScalarType;
    const auto dtype = query.scalar_type();
    for (const Tensor* given : {&query, &key, &value, &mask})
        STD_TORCH_CHECK(given->dim() == 4, "canonical attention: queries, keys, values and mask have four dimensions");
    const int64_t lanes = query.size(0), heads = query.size(1), kv_heads = key.size(1), rows = query.size(2);
    STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Float,
                    "canonical attention is for bfloat16 and float32");
    STD_TORCH_CHECK(key.scalar_type() == dtype && value.scalar_type() == dtype && mask.scalar_type() == dtype,
                    "canonical attention: queries, keys, values and mask are of different dtypes");
    for (const Tensor* given : {&query, &key, &value, &mask})
        STD_TORCH_CHECK(given->size(3) == 1 || given->stride(3) == 1,
                        "canonical attention: the numbers of a row do not lie one after the other");
    STD_TORCH_CHECK(key.size(0) == lanes && value.size(0) == lanes && value.size(1) == kv_heads && kv_heads > 0 &&
                        heads % kv_heads == 0 && key.size(3) == query.size(3) && value.size(2) == key.size(2) &&
                        mask.size(1) == 1 && (mask.size(0) == lanes || mask.size(0) == 1) && mask.size(2) == rows &&
                        mask.size(3) == key.size(2) && key.size(2) > 0,
                    "canonical attention: the shapes of queries, keys, values and mask do not fit");
    Tensor out = torch::stable::new_empty(query, {lanes, rows, heads, value.size(3)});
    const bool understood = dtype == ScalarType::Float ? attended<float>(query, key, value, mask, out, scale)
                                                       : attended<Half>(query, key, value, mask, out, scale);
    STD_TORCH_CHECK(understood, "canonical attention: a mask may hide keys, this one adds other numbers to scores");
    return out;
}
}  // namespace

STABLE_TORCH_LIBRARY(opt_tree, library) {
    library.def("canonical_attention(Tensor query, Tensor key, Tensor value, Tensor mask, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(opt_tree, CPU, library) {
    library.impl("canonical_attention", TORCH_BOX(&canonical_attention));
}
