// Linear layers whose weights have eight or four bits, and decoder layers made of them. Every output bit is a function of a
// row and of the weights: not of how many rows there are, nor of threads.
//
//   numbers   of a row, in groups of 32: q = round(x / s) with s = (the group's largest |x|) / 127
//   weights   of an output and a group: w = d * (u - 128) with eight bits, w = d * u + m with four; d and m are half precision
//   sums      of a group: whole numbers, exact in any order
//   output    for groups ascending: y = fma((float)(sum of u * q), s * d, y), and y = fma(s * (sum of q), m, y) with four bits
//
// A weight lies as the instruction reads it (`packed`, made in `packed_weights.py`): of each panel of 64 outputs and each group
// four inputs of 64 outputs, then the next four; with four bits these in the low halves of the bytes, the next in the high.
// Behind them the d of the outputs, then their m. `quantise_weight` writes it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {
using torch::stable::Tensor;
using torch::headeronly::ScalarType;

constexpr int W = 16, VECTORS = 4, PANEL = VECTORS * W, GROUP = 32;  // outputs of a vector and of a panel, inputs of a group
constexpr int STEP = 4, MOST = 6, LINE = 64;  // inputs and rows that are multiplied at once, bytes that memory brings at once
typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(64), aligned(1), may_alias));

template <class To, class From>
inline To as(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline Vec all(float x) {
#ifdef __AVX512F__
    return (Vec)_mm512_set1_ps(x);
#else
    return Vec{} + x;
#endif
}

inline Vec fma(Vec a, Vec b, Vec c) {
#ifdef __AVX512F__
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    for (int i = 0; i < W; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// In each lane: sum + the four products of an unsigned byte and a signed one.
inline Ints dot(Ints sum, Bytes weights, int32_t four) {
#ifdef __AVX512VNNI__
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
#else
    int8_t q[STEP];
    std::memcpy(q, &four, STEP);
    const Ints w = as<Ints>(weights);
    for (int j = 0; j < STEP; ++j) sum += (w >> (8 * j) & 255) * q[j];
    return sum;
#endif
}

inline Vec halves(const uint16_t* from) {
#ifdef __AVX512F__
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    Vec v;
    for (int i = 0; i < W; ++i) {
        _Float16 half;
        std::memcpy(&half, from + i, 2);
        v[i] = (float)half;
    }
    return v;
#endif
}

struct Half {  // bfloat16
    uint16_t bits;
};
inline float wide(float x) { return x; }
inline float wide(Half x) { return as<float>(uint32_t(x.bits) << 16); }
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, Half& to) {  // to the nearest, ties to even
    const uint32_t bits = as<uint32_t>(x);
    to.bits = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

constexpr int64_t group_bytes(int bits) { return PANEL * GROUP * bits / 8 + PANEL * (bits == 4 ? 4 : 2); }

// Eight numbers at a time: GCC computes vectors of sixteen one by one where the processor has none.
constexpr int FEW = 8;
typedef float Few __attribute__((vector_size(FEW * 4)));
typedef int32_t FewInts __attribute__((vector_size(FEW * 4)));
typedef uint8_t FewBytes __attribute__((vector_size(FEW)));

inline Few eight(const float* from) {
    Few x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline Few eight(const Half* from) {
    typedef uint16_t Halves __attribute__((vector_size(FEW * 2)));
    Halves x;
    std::memcpy(&x, from, sizeof x);
    return as<Few>(__builtin_convertvector(x, FewInts) << 16);
}

// Numbers of eight bits.
inline void narrow(const FewInts (&x)[GROUP / FEW], int8_t* to) {
#ifdef __AVX2__
    const __m256i one = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]), two = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), all = _mm256_packs_epi16(one, two);
    _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(all, order));
#else
    for (int i = 0; i < GROUP; ++i) to[i] = int8_t(x[i / FEW][i % FEW]);
#endif
}

// One number of eight: their sum, or the largest.
template <class Eight, class Both>
inline auto folded(Eight x, Both both) {
    x = both(x, __builtin_shuffle(x, FewInts{4, 5, 6, 7}));
    x = both(x, __builtin_shuffle(x, FewInts{2, 3}));
    return both(x, __builtin_shuffle(x, FewInts{1}))[0];
}

// Some rows, quantised. Those that are multiplied at once (a block) lie side by side: of each group four numbers of the first
// row, of the next, and so on, then the next four; so all of a block is found from one address.
struct Rows {
    int64_t count, groups, blocks;
    std::vector<int8_t> numbers;
    std::vector<float> scales, shares;  // shares: scale times sum
    std::vector<int32_t> sums;

    Rows(int64_t count, int64_t groups)
        : count(count),
          groups(groups),
          blocks((count + MOST - 1) / MOST),
          numbers(count * groups * GROUP),
          scales(count * groups),
          shares(count * groups),
          sums(count * groups) {}

    int64_t begin(int64_t block) const { return count * block / blocks; }

    template <class Real>
    void take(int64_t row, const Real* from, int64_t inputs) {
        const int64_t block = ((row + 1) * blocks - 1) / count, first = begin(block), size = begin(block + 1) - first;
        for (int64_t group = 0; group < groups; ++group, from += GROUP, inputs -= GROUP) {
            Few x[GROUP / FEW];
            if (inputs >= GROUP)
                for (int i = 0; i < GROUP / FEW; ++i) x[i] = eight(from + i * FEW);
            else {
                Real some[GROUP] = {};
                std::copy_n(from, inputs, some);
                for (int i = 0; i < GROUP / FEW; ++i) x[i] = eight(some + i * FEW);
            }
            quantise(x, first * groups + group * size, row - first, size);
        }
    }

    // `at`: where this group of the block begins; `row`: of the block, which has `size` of them.
    void quantise(const Few (&x)[GROUP / FEW], int64_t at, int64_t row, int64_t size) {
        // Magnitudes as bits: infinity and what is no number are above all others.
        const auto larger = [](FewInts a, FewInts b) { return a > b ? a : b; };
        FewInts bits{}, sum{};
        for (const Few& some : x) {
            const FewInts magnitude = as<FewInts>(some) & 0x7fffffff;
            bits = larger(magnitude, bits);
        }
        const float most = as<float>(folded(bits, larger));
        const bool finite = most < INFINITY;
        const float inverse = most > 0 && finite ? 127.f / most : 0.f;
        FewInts q[GROUP / FEW];
        for (int i = 0; i < GROUP / FEW; ++i) {
            // A sum with 1.5 * 2^23 is rounded to whole numbers.
            q[i] = as<FewInts>(x[i] * inverse + 12582912.f) - 0x4b400000;
            sum += q[i];
        }
        int8_t bytes[GROUP];
        narrow(q, bytes);
        int8_t* to = numbers.data() + at * GROUP + row * STEP;
        for (int k = 0; k < GROUP / STEP; ++k) std::memcpy(to + k * size * STEP, bytes + k * STEP, STEP);
        const int32_t total = folded(sum, [](FewInts a, FewInts b) { return a + b; });
        scales[at + row] = finite ? most / 127.f : NAN;
        sums[at + row] = finite ? total : 0;
        shares[at + row] = scales[at + row] * float(sums[at + row]);
    }
};

// The products of R rows and the outputs of a panel. Of what lies `ahead` a share is fetched meanwhile, `lines` of each group.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__)
// With 16 short registers: a few outputs after the other, so that the sums of all rows stay in registers. All products are of
// weights of four bits, so that a group's fit 16 bits (16 times 15 * 127): u of eight bits is its low half and 16 its high one.
template <int BITS, int R>
void block(const uint8_t* panel, const Rows& rows, int64_t first, Vec (*out)[VECTORS], const uint8_t* ahead, int lines) {
    constexpr int L = 8, PARTS = PANEL / L, HALVES = 8 / BITS;  // of a register's bytes, those that are other inputs' weights
    const int64_t groups = rows.groups, bytes = group_bytes(BITS);
    const int8_t* numbers = rows.numbers.data() + first * groups * GROUP;
    const float *scales = rows.scales.data() + first * groups, *shares = rows.shares.data() + first * groups;
    const int32_t* sums = rows.sums.data() + first * groups;
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15), high = _mm256_set1_epi16(16);
    __m256 total[R][PARTS] = {};
    for (int64_t g = 0; g < groups; ++g) {
        for (int line = 0; line < lines; ++line) __builtin_prefetch(ahead + line * LINE, 0, 2);
        const uint16_t* d = (const uint16_t*)(panel + PANEL * GROUP * BITS / 8);
        const auto halves = [](const uint16_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); };
        for (int p = 0; p < PARTS; p += HALVES) {
            __m256i sum[R][2] = {};  // of two times eight outputs, or of the low and the high halves of eight
#pragma GCC unroll 8
            for (int k = 0; k < GROUP / STEP; ++k) {
                const auto* u = (const __m256i*)(panel + (k / HALVES * PANEL + p * L) * STEP);
                __m256i w[2] = {_mm256_loadu_si256(u), _mm256_loadu_si256(u + HALVES - 1)};
                if (BITS == 8 || k % 2) w[1] = _mm256_srli_epi16(w[1], 4);
                if (BITS == 4 && k % 2) w[0] = _mm256_srli_epi16(w[0], 4);
                w[0] = _mm256_and_si256(w[0], low);
                w[1] = _mm256_and_si256(w[1], low);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    int32_t four;
                    std::memcpy(&four, numbers + (k * R + r) * STEP, STEP);
                    const __m256i q = _mm256_set1_epi32(four);
                    for (int i = 0; i < 2; ++i) {
                        sum[r][i] = _mm256_add_epi16(sum[r][i], _mm256_maddubs_epi16(w[i], q));
                        // Else GCC computes all products first, and keeps them in memory. One row's fit in registers.
                        if (R > 1 || BITS == 8) asm("" : "+x"(sum[r][i]));
                    }
                }
            }
            const auto add = [&](int r, int part, __m256i found, __m256 scale, __m256 least) {
                __m256& y = total[r][part];
                y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(found), _mm256_mul_ps(_mm256_set1_ps(scales[r]), scale), y);
                if (BITS == 4) y = _mm256_fmadd_ps(_mm256_set1_ps(shares[r]), least, y);
            };
            if constexpr (BITS == 4) {
                const __m256 scale[2] = {halves(d + p * L), halves(d + (p + 1) * L)};
                const __m256 least[2] = {halves(d + PANEL + p * L), halves(d + PANEL + (p + 1) * L)};
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    for (int i = 0; i < 2; ++i) add(r, p + i, _mm256_madd_epi16(sum[r][i], ones), scale[i], least[i]);
            } else {
                const __m256 scale = halves(d + p * L);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const __m256i both = _mm256_add_epi32(_mm256_madd_epi16(sum[r][0], ones), _mm256_madd_epi16(sum[r][1], high));
                    add(r, p, _mm256_sub_epi32(both, _mm256_set1_epi32(128 * sums[r])), scale, __m256{});
                }
            }
        }
        panel += bytes, ahead += bytes, numbers += R * GROUP, scales += R, shares += R, sums += R;
    }
    for (int r = 0; r < R; ++r) std::memcpy(out[r], total[r], sizeof total[r]);
}
#else
template <int BITS, int R>
void block(const uint8_t* panel, const Rows& rows, int64_t first, Vec (*out)[VECTORS], const uint8_t* ahead, int lines) {
    const int64_t groups = rows.groups, bytes = group_bytes(BITS);
    const int8_t* numbers = rows.numbers.data() + first * groups * GROUP;
    const float *scales = rows.scales.data() + first * groups, *shares = rows.shares.data() + first * groups;
    const int32_t* sums = rows.sums.data() + first * groups;
    Vec total[R][VECTORS] = {};
    for (int64_t g = 0; g < groups; ++g) {
        for (int line = 0; line < lines; ++line) __builtin_prefetch(ahead + line * LINE, 0, 2);
        Ints sum[R][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < VECTORS; ++c) sum[r][c] = BITS == 8 ? Ints{} - 128 * sums[r] : Ints{};
        for (int k = 0; k < GROUP / STEP; k += 8 / BITS) {
            Bytes packed[VECTORS];
#pragma GCC unroll 4
            for (int c = 0; c < VECTORS; ++c)
                packed[c] = *(const Bytes*)(panel + (k * BITS / 8 * PANEL + c * W) * STEP);
#pragma GCC unroll 2
            for (int half = 0; half < 8 / BITS; ++half) {
                Bytes u[VECTORS];
#pragma GCC unroll 4
                for (int c = 0; c < VECTORS; ++c)
                    u[c] = BITS == 8 ? packed[c] : as<Bytes>(as<Ints>(packed[c]) >> (4 * half) & 0x0f0f0f0f);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    int32_t four;
                    std::memcpy(&four, numbers + ((k + half) * R + r) * STEP, STEP);
#pragma GCC unroll 4
                    for (int c = 0; c < VECTORS; ++c) sum[r][c] = dot(sum[r][c], u[c], four);
                }
            }
        }
        const uint16_t* d = (const uint16_t*)(panel + PANEL * GROUP * BITS / 8);
#pragma GCC unroll 4
        for (int c = 0; c < VECTORS; ++c) {
            const Vec scale = halves(d + c * W), least = BITS == 4 ? halves(d + PANEL + c * W) : Vec{};
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Vec found = __builtin_convertvector(sum[r][c], Vec);
                total[r][c] = fma(found, all(scales[r]) * scale, total[r][c]);
                if (BITS == 4) total[r][c] = fma(all(shares[r]), least, total[r][c]);
            }
        }
        panel += bytes, ahead += bytes, numbers += R * GROUP, scales += R, shares += R, sums += R;
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < VECTORS; ++c) out[r][c] = total[r][c];
}
#endif

template <class Bias, class Out>
struct Product {
    const Rows& rows;
    const uint8_t* packed;
    const Bias* bias;
    Out* out;
    int64_t outputs, panels;

    // All rows' outputs of a panel. While its blocks of rows are computed the next panel comes from memory, a part with
    // each block: else the first block would wait for memory, and the others would leave it idle.
    template <int BITS>
    void panel(int64_t p) const {
        const int64_t blocks = rows.blocks, lines = group_bytes(BITS) / LINE;
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t begin = rows.begin(b), from = lines * b / blocks, until = lines * (b + 1) / blocks;
            some<BITS, 1>(p, begin, rows.begin(b + 1) - begin, from, p + 1 < panels ? until - from : 0);
        }
    }

    template <int BITS, int R>
    void some(int64_t p, int64_t first, int64_t number, int64_t line, int64_t lines) const {
        if constexpr (R < MOST)
            if (number > R) return some<BITS, R + 1>(p, first, number, line, lines);
        const int64_t size = rows.groups * group_bytes(BITS), column = p * PANEL;
        const uint8_t* from = packed + p * size;
        Vec found[R][VECTORS];
        block<BITS, R>(from, rows, first, found, from + size + line * LINE, int(lines));
        const int64_t n = std::min<int64_t>(PANEL, outputs - column);
        for (int r = 0; r < R; ++r) {
            const float* y = (const float*)found[r];
            Out* to = out + (first + r) * outputs + column;
            for (int64_t i = 0; i < n; ++i) narrow(bias ? y[i] + wide(bias[column + i]) : y[i], to[i]);
        }
    }
};

// The weight of a linear layer as it is packed, with its bias, for rows of so many inputs.
struct Linear {
    const Tensor packed;
    const std::optional<Tensor> bias;
    int64_t outputs;

    Linear(const Tensor& packed, const std::optional<Tensor>& bias, int64_t inputs, int64_t outputs, ScalarType dtype)
        : packed(packed), bias(bias), outputs(outputs) {
        STD_TORCH_CHECK(outputs > 0 && packed.dim() == 3 && packed.is_contiguous() && packed.scalar_type() == ScalarType::Byte &&
                            (packed.size(2) == group_bytes(8) || packed.size(2) == group_bytes(4)) &&
                            packed.size(0) == (outputs - 1) / PANEL + 1 && packed.size(1) == (inputs + GROUP - 1) / GROUP,
                        "quantised linear layer: the packed weight does not fit rows and outputs");
        STD_TORCH_CHECK(!bias || (bias->scalar_type() == dtype && bias->is_contiguous() && bias->dim() == 1 &&
                                  bias->numel() == outputs),
                        "quantised linear layer: the bias does not fit");
    }

    template <class Bias, class Out>
    void multiply(const Rows& rows, Out* out) const {
        const Product<Bias, Out> product{rows,
                                         (const uint8_t*)packed.const_data_ptr(),
                                         bias ? (const Bias*)bias->const_data_ptr() : nullptr,
                                         out,
                                         outputs,
                                         packed.size(0)};
        const bool eight = packed.size(2) == group_bytes(8);
        torch::stable::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
            for (int64_t p = begin; p < end; ++p) eight ? product.template panel<8>(p) : product.template panel<4>(p);
        });
    }

    // The same into memory of its own.
    template <class Bias>
    std::vector<float> operator()(const Rows& rows) const {
        std::vector<float> out(rows.count * outputs);
        multiply<Bias>(rows, out.data());
        return out;
    }
};

void each(int64_t rows, const auto& action) {
    torch::stable::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) action(row);
    });
}

template <class Real>
Rows quantised(const Real* x, int64_t count, int64_t inputs) {
    Rows rows(count, (inputs + GROUP - 1) / GROUP);
    each(count, [&](int64_t row) { rows.take(row, x + row * inputs, inputs); });
    return rows;
}

void check_dtype(ScalarType dtype) {
    STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Float,
                    "quantised linear layers are for bfloat16 and float32");
}

// x [..., inputs], bfloat16 or float32; packed [panels, groups, bytes]; bias [outputs] of x's dtype. Returns [..., outputs].
Tensor quantised_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t outputs) {
    const auto dtype = x.scalar_type();
    check_dtype(dtype);
    STD_TORCH_CHECK(x.dim() > 0, "quantised linear layer: the packed weight does not fit rows and outputs");
    const Linear linear(packed, bias, x.size(-1), outputs, dtype);
    if (!x.is_contiguous()) x = torch::stable::contiguous(x);
    std::vector<int64_t> sizes;
    for (int64_t d = 0; d + 1 < x.dim(); ++d) sizes.push_back(x.size(d));
    sizes.push_back(outputs);
    Tensor out = torch::stable::new_empty(x, sizes);
    const auto compute = [&]<class Real>(const Real* from) {
        linear.multiply<Real>(quantised(from, out.numel() / outputs, x.size(-1)), (Real*)out.mutable_data_ptr());
    };
    dtype == ScalarType::Float ? compute((const float*)x.const_data_ptr()) : compute((const Half*)x.const_data_ptr());
    return out;
}

// A decoder layer but for its attention, in two parts. Between its products all is float32, and of a row alone.

// Behind its root mean square, times a weight: eight sums of every eighth number, added in halves.
template <class From, class Real>
void norm(const From* x, const Real* weight, int64_t size, double eps, float* to) {
    Few sum{};
    for (int64_t i = 0; i < size; i += FEW) sum += eight(x + i) * eight(x + i);
    const float total = folded(sum, [](Few a, Few b) { return a + b; });
    const float scale = 1 / std::sqrt(total / float(size) + float(eps));
    for (int64_t i = 0; i < size; i += FEW) {
        const Few y = eight(x + i) * scale * eight(weight + i);
        std::memcpy(to + i, &y, sizeof y);
    }
}

// e^x: Cephes' polynomial. Of what is no number, that.
inline Few exponential(Few x) {
    const Few low = Few{} - 87, high = Few{} + 88, magic = Few{} + 12582912.f;
    const Few within = x < low ? low : x > high ? high : x, t = within * 1.44269504088896341f + magic, n = t - magic;
    const Few r = within - n * 0.693359375f + n * 2.12194440e-4f;
    Few y = Few{} + 1.9875691500e-4f;
    for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) y = y * r + next;
    y = y * r * r + r + 1;
    return x != x ? x : as<Few>(as<FewInts>(y) + (as<FewInts>(t) << 23));
}

// A row's heads, of `size` numbers each: behind their own norm, if there is one, turned by a place's angles and put where
// the heads of its text lie.
template <class Real>
struct Turned {
    const Real *cos, *sin, *weight;
    int64_t texts, rows, heads, size;
    double eps;

    Tensor operator()(const std::vector<float>& from, const Tensor& like, int64_t angles) const {
        Tensor out = torch::stable::new_empty(like, {texts, heads, rows, size});
        each(texts * rows, [&](int64_t row) {
            const int64_t text = row / rows, place = row % rows;
            const int64_t angle = (angles == 1 ? place : row) * size;
            std::vector<float> normed(size);
            for (int64_t head = 0; head < heads; ++head) {
                const float* x = from.data() + (row * heads + head) * size;
                if (weight) norm(x, weight, size, eps, normed.data()), x = normed.data();
                Real* to = (Real*)out.mutable_data_ptr() + ((text * heads + head) * rows + place) * size;
                for (int64_t i = 0, j = size / 2; j < size; ++i, ++j) {
                    narrow(cos ? x[i] * wide(cos[angle + i]) - x[j] * wide(sin[angle + i]) : x[i], to[i]);
                    narrow(cos ? x[j] * wide(cos[angle + j]) + x[i] * wide(sin[angle + j]) : x[j], to[j]);
                }
            }
        });
        return out;
    }
};

// Before attention. x [texts, rows, hidden]; cos and sin [texts or 1, rows, size of a head]; the norms of queries and keys
// [size of a head], if any. Returns queries, keys and values, [texts, heads, rows, size of a head].
std::tuple<Tensor, Tensor, Tensor> quantised_queries(
    Tensor x, Tensor weight, double eps, Tensor q, std::optional<Tensor> q_bias, Tensor k, std::optional<Tensor> k_bias, Tensor v,
    std::optional<Tensor> v_bias, std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, Tensor cos, Tensor sin, int64_t heads,
    int64_t kv_heads) {
    const auto dtype = x.scalar_type();
    check_dtype(dtype);
    STD_TORCH_CHECK(x.dim() == 3 && cos.dim() == 3 && sin.dim() == 3, "queries: rows and angles have three dimensions");
    const int64_t texts = x.size(0), rows = x.size(1), hidden = x.size(2), size = cos.size(2), angles = cos.size(0);
    const auto fits = [&](const Tensor& one, int64_t numbers) {
        return one.scalar_type() == dtype && one.is_contiguous() && one.numel() == numbers;
    };
    STD_TORCH_CHECK(hidden % FEW == 0 && size % FEW == 0 && (angles == texts || angles == 1) && fits(weight, hidden) &&
                        fits(cos, angles * rows * size) && fits(sin, angles * rows * size) && (!q_norm || fits(*q_norm, size)) &&
                        (!k_norm || fits(*k_norm, size)),
                    "queries: norms or angles do not fit the rows");
    if (!x.is_contiguous()) x = torch::stable::contiguous(x);
    const Linear queries(q, q_bias, hidden, heads * size, dtype), keys(k, k_bias, hidden, kv_heads * size, dtype),
        values(v, v_bias, hidden, kv_heads * size, dtype);
    const auto compute = [&]<class Real>(const Real* from) -> std::tuple<Tensor, Tensor, Tensor> {
        std::vector<float> normed(texts * rows * hidden);
        const Real* by = (const Real*)weight.const_data_ptr();
        each(texts * rows, [&](int64_t row) { norm(from + row * hidden, by, hidden, eps, normed.data() + row * hidden); });
        const Rows taken = quantised(normed.data(), texts * rows, hidden);
        const auto pointer = [](const std::optional<Tensor>& one) { return one ? (const Real*)one->const_data_ptr() : nullptr; };
        const Real *c = pointer(cos), *s = pointer(sin);
        return {Turned<Real>{c, s, pointer(q_norm), texts, rows, heads, size, eps}(queries.operator()<Real>(taken), x, angles),
                Turned<Real>{c, s, pointer(k_norm), texts, rows, kv_heads, size, eps}(keys.operator()<Real>(taken), x, angles),
                Turned<Real>{nullptr, nullptr, nullptr, texts, rows, kv_heads, size, eps}(values.operator()<Real>(taken), x, angles)};
    };
    return dtype == ScalarType::Float ? compute((const float*)x.const_data_ptr()) : compute((const Half*)x.const_data_ptr());
}

// Behind attention: its output projected and added to x, the norm, the gated layer, added again. attended [..., inputs], x
// [..., hidden], both of the same rows. Returns the layer's rows, as x.
Tensor quantised_rest(Tensor attended, Tensor x, Tensor o, std::optional<Tensor> o_bias, Tensor weight, double eps, Tensor gate,
                      std::optional<Tensor> gate_bias, Tensor up, std::optional<Tensor> up_bias, Tensor down,
                      std::optional<Tensor> down_bias, int64_t width) {
    const auto dtype = x.scalar_type();
    check_dtype(dtype);
    const int64_t hidden = x.size(-1), inputs = attended.size(-1), rows = x.numel() / hidden;
    STD_TORCH_CHECK(attended.scalar_type() == dtype && attended.numel() == rows * inputs && weight.scalar_type() == dtype &&
                        weight.is_contiguous() && weight.numel() == hidden && hidden % FEW == 0 && width % FEW == 0,
                    "a layer's rest: rows or norm do not fit");
    if (!x.is_contiguous()) x = torch::stable::contiguous(x);
    if (!attended.is_contiguous()) attended = torch::stable::contiguous(attended);
    const Linear out(o, o_bias, inputs, hidden, dtype), gates(gate, gate_bias, hidden, width, dtype),
        ups(up, up_bias, hidden, width, dtype), downs(down, down_bias, width, hidden, dtype);
    std::vector<int64_t> sizes;
    for (int64_t d = 0; d < x.dim(); ++d) sizes.push_back(x.size(d));
    Tensor found = torch::stable::new_empty(x, sizes);
    const auto compute = [&]<class Real>(const Real* residual) {
        std::vector<float> sum = out.operator()<Real>(quantised((const Real*)attended.const_data_ptr(), rows, inputs));
        std::vector<float> normed(rows * hidden);
        each(rows, [&](int64_t row) {
            float* own = sum.data() + row * hidden;
            for (int64_t i = 0; i < hidden; ++i) own[i] += wide(residual[row * hidden + i]);
            norm(own, (const Real*)weight.const_data_ptr(), hidden, eps, normed.data() + row * hidden);
        });
        const Rows taken = quantised(normed.data(), rows, hidden);
        std::vector<float> gated = gates.operator()<Real>(taken);
        const std::vector<float> upper = ups.operator()<Real>(taken);
        each(rows, [&](int64_t row) {
            for (int64_t i = row * width; i < (row + 1) * width; i += FEW) {
                const Few x = eight(gated.data() + i), y = x / (exponential(-x) + 1) * eight(upper.data() + i);
                std::memcpy(gated.data() + i, &y, sizeof y);
            }
        });
        const std::vector<float> added = downs.operator()<Real>(quantised(gated.data(), rows, width));
        Real* to = (Real*)found.mutable_data_ptr();
        for (int64_t i = 0; i < rows * hidden; ++i) narrow(sum[i] + added[i], to[i]);
    };
    dtype == ScalarType::Float ? compute((const float*)x.const_data_ptr()) : compute((const Half*)x.const_data_ptr());
    return found;
}

// How far the numbers of a weight are from what is packed at most, and the largest of them.
struct Worst {
    Few error{}, wrong{};  // of every eighth number; wrong: no number, where one is not finite
    float largest = 0;

    float most() const {
        float most = 0, any = 0;
        for (int i = 0; i < FEW; ++i) most = std::max(most, error[i]), any += wrong[i];
        return most + any;
    }
};

// An output's group: w = d * (u - 128), where the largest |u - 128| is 127, or w = d * u + m, where m is the least w and the
// largest u is 15.
template <int BITS>
void levels(const Few (&w)[GROUP / FEW], uint8_t* u, _Float16& d, _Float16& m, Worst& worst) {
    constexpr int LEAST = BITS == 8 ? -127 : 0, MOST_LEVEL = BITS == 8 ? 127 : 15;
    Few least = w[0], most = w[0];
    for (const Few& some : w) {
        least = some < least ? some : least;
        most = some > most ? some : most;
        worst.wrong += some * 0;
    }
    float low = least[0], high = most[0];
    for (int i = 1; i < FEW; ++i) low = std::min(low, least[i]), high = std::max(high, most[i]);
    const float largest = std::max(high, 0 - low);
    d = (_Float16)(BITS == 8 ? largest / 127 : (high - low) / 15);
    m = (_Float16)(BITS == 8 ? 0 : low);
    const float scale = d, begin = m, divisor = scale > 0 ? scale : 1;
    if (!(scale < INFINITY && std::fabs(begin) < INFINITY)) worst.error += INFINITY;
    for (int part = 0; part < GROUP / FEW; ++part) {
        // A sum with 1.5 * 2^23 is rounded to whole numbers.
        FewInts q = as<FewInts>((w[part] - begin) / divisor + 12582912.f) - 0x4b400000;
        q = q < LEAST ? FewInts{} + LEAST : q;
        q = q > MOST_LEVEL ? FewInts{} + MOST_LEVEL : q;
        const Few off = __builtin_convertvector(q, Few) * scale + begin - w[part];
        worst.error = off > worst.error ? off : worst.error;
        worst.error = -off > worst.error ? -off : worst.error;
        const FewBytes bytes = __builtin_convertvector(BITS == 8 ? q + 128 : q, FewBytes);
        std::memcpy(u + part * FEW, &bytes, FEW);
    }
    worst.largest = std::max(worst.largest, largest);
}

// Pack a panel; outputs and inputs that there are none of are 0. Output by output: so memory is read in order, and what is
// written apart lies in the cache.
template <int BITS, class Real>
Worst pack(const Real* weight, int64_t outputs, int64_t inputs, uint8_t* panel) {
    Worst worst;
    for (int64_t o = 0; o < PANEL; ++o) {
        uint8_t* to = panel;
        for (int64_t begin = 0; begin < inputs; begin += GROUP, to += group_bytes(BITS)) {
            const int64_t count = o < outputs ? std::min<int64_t>(inputs - begin, GROUP) : 0;
            float numbers[GROUP] = {};
            if (count == GROUP)
                for (int i = 0; i < GROUP; ++i) numbers[i] = wide(weight[o * inputs + begin + i]);
            else
                for (int i = 0; i < count; ++i) numbers[i] = wide(weight[o * inputs + begin + i]);
            Few w[GROUP / FEW];
            std::memcpy(w, numbers, sizeof w);
            uint8_t u[GROUP];
            _Float16 d, m;
            levels<BITS>(w, u, d, m, worst);
            for (int k = 0; k < GROUP / STEP; k += 8 / BITS) {
                uint32_t four, next;
                std::memcpy(&four, u + k * STEP, STEP);
                if (BITS == 4) std::memcpy(&next, u + (k + 1) * STEP, STEP), four |= next << 4;
                std::memcpy(to + (k * BITS / 8 * PANEL + o) * STEP, &four, STEP);
            }
            _Float16* ends = (_Float16*)(to + PANEL * GROUP * BITS / 8) + o;
            std::memcpy(ends, &d, sizeof d);
            if (BITS == 4) std::memcpy(ends + PANEL, &m, sizeof m);
        }
    }
    return worst;
}

// weight [outputs, inputs], bfloat16 or float32; packed [panels, groups, bytes] is written, in as many bits as it has room
// for. Returns the largest error and the largest weight of each panel, [panels, 2].
Tensor quantise_weight(Tensor weight, Tensor packed) {
    const auto dtype = weight.scalar_type();
    STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Float, "weights are quantised from bfloat16 and float32");
    STD_TORCH_CHECK(weight.dim() == 2 && packed.dim() == 3 && packed.is_contiguous() && packed.scalar_type() == ScalarType::Byte &&
                        (packed.size(2) == group_bytes(8) || packed.size(2) == group_bytes(4)) &&
                        packed.size(0) == (weight.size(0) + PANEL - 1) / PANEL &&
                        packed.size(1) == (weight.size(1) + GROUP - 1) / GROUP,
                    "the place for a packed weight does not fit it");
    if (!weight.is_contiguous()) weight = torch::stable::contiguous(weight);
    Tensor found = torch::stable::new_empty(weight, {packed.size(0), 2}, ScalarType::Float);
    const auto some = [&]<class Real>(const Real* from) {
        const int64_t inputs = weight.size(1), outputs = weight.size(0), size = packed.size(1) * packed.size(2);
        torch::stable::parallel_for(0, packed.size(0), 1, [&](int64_t begin, int64_t end) {
            for (int64_t p = begin; p < end; ++p) {
                const Real* own = from + p * PANEL * inputs;
                uint8_t* to = (uint8_t*)packed.mutable_data_ptr() + p * size;
                const int64_t count = std::min<int64_t>(PANEL, outputs - p * PANEL);
                const Worst worst = packed.size(2) == group_bytes(8) ? pack<8>(own, count, inputs, to) : pack<4>(own, count, inputs, to);
                float* told = (float*)found.mutable_data_ptr() + 2 * p;
                told[0] = worst.most(), told[1] = worst.largest;
            }
        });
    };
    dtype == ScalarType::Float ? some((const float*)weight.const_data_ptr()) : some((const Half*)weight.const_data_ptr());
    return found;
}
}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(opt_tree, library) {
    library.def("quantise_weight(Tensor weight, Tensor(a!) packed) -> Tensor");
    library.def("quantised_linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
    library.def(
        "quantised_queries(Tensor x, Tensor weight, float eps, Tensor q, Tensor? q_bias, Tensor k, Tensor? k_bias, Tensor v, "
        "Tensor? v_bias, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor sin, int heads, int kv_heads) -> "
        "(Tensor, Tensor, Tensor)");
    library.def(
        "quantised_rest(Tensor attended, Tensor x, Tensor o, Tensor? o_bias, Tensor weight, float eps, Tensor gate, "
        "Tensor? gate_bias, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, int width) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(opt_tree, CPU, library) {
    library.impl("quantise_weight", TORCH_BOX(&quantise_weight));
    library.impl("quantised_linear", TORCH_BOX(&quantised_linear));
    library.impl("quantised_queries", TORCH_BOX(&quantised_queries));
    library.impl("quantised_rest", TORCH_BOX(&quantised_rest));
}
