// Numbers and small matrix products, in vectors as wide as the target of this compilation.
// Everything has internal linkage: the file is compiled once per target, and the linker must not
// replace one target's code with another's.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// Lanes of a vector, and vectors side by side in one step of a product: as many accumulators as
// there are registers for.
#if defined(__AVX512F__)
constexpr int W = 16, PANEL = 4;
#elif defined(__AVX2__)
constexpr int W = 8, PANEL = 2;
#elif defined(__aarch64__)
constexpr int W = 4, PANEL = 4;
#else
constexpr int W = 4, PANEL = 2;
#endif
constexpr int LANES = 16;  // columns are padded to this, whatever the target
constexpr int STRIP = 6;   // rows of one step of a product

typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ivec __attribute__((vector_size(4 * W)));
typedef uint32_t uvec __attribute__((vector_size(4 * W)));

template <class V, class S>
inline V load(const S* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V, class S>
inline void store(S* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

// 0, 1, 2, ...
inline ivec count_up() {
    ivec v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

inline long least(long a, long b) { return a < b ? a : b; }
inline long most(long a, long b) { return a > b ? a : b; }
inline long ceil_div(long a, long b) { return a >= 0 ? (a + b - 1) / b : -(-a / b); }
inline long floor_div(long a, long b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
inline long round_up(long a, long b) { return ceil_div(a, b) * b; }

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t as_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float widen(f16 x) {
    uint32_t rest = uint32_t(x.bits & 0x7fff) << 13;
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
    uint32_t special = rest >= 0x0f800000 ? 0x7f800000 : 0;  // infinity, or not a number
    return as_float(as_bits(as_float(rest) * 0x1p112f) | special | sign);
}

inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, bf16& to) {
    uint32_t bits = as_bits(x);
    uint32_t even = bits + 0x7fff + (bits >> 16 & 1);
    to.bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 0x40) : even >> 16);
}
inline void narrow(float x, f16& to) {
    uint32_t bits = as_bits(x), size = bits & 0x7fffffff;
    // Below the smallest normal number the addition itself rounds to the grid of the others.
    uint32_t tiny = as_bits(as_float(size) + 0.5f) - as_bits(0.5f);
    uint32_t normal = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
    uint32_t value = size < 0x38800000 ? tiny : normal;
    value = size >= 0x477ff000 ? 0x7c00 : value;
    value = size > 0x7f800000 ? 0x7e00 : value;
    to.bits = uint16_t(value | (bits >> 16 & 0x8000));
}

// What a product multiplies: single numbers, or (bf16) pairs of numbers along the sum.
template <class E>
struct Unit {
    using type = float;
    static constexpr int per = 1;
};

inline vec multiply_add(vec sum, float a, vec b) { return sum + a * b; }
inline vec unit_vector(const float* from) { return load<vec>(from); }

#if defined(__AVX512BF16__)
template <>
struct Unit<bf16> {
    using type = uint32_t;
    static constexpr int per = 2;
};

inline vec multiply_add(vec sum, uint32_t a, uvec b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)b);
}
inline uvec unit_vector(const uint32_t* from) { return load<uvec>(from); }
#endif

inline void narrow_vector(vec x, float* to) { store(to, x); }
inline void narrow_vector(vec x, bf16* to) {
#if defined(__AVX512BF16__)
    auto half = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &half, sizeof half);
#else
    for (int i = 0; i < W; i++) narrow(x[i], to[i]);
#endif
}
inline void narrow_vector(vec x, f16* to) {
    for (int i = 0; i < W; i++) narrow(x[i], to[i]);
}

// c[M][N vectors] = (or +=) a[M][depth] b[depth][N vectors]; a in any layout.
template <bool ADD, int M, int N, class U>
inline void micro(const U* a, long row, long col, const U* b, long ldb, long depth, float* c,
                  long ldc) {
    vec sum[M][N];
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) sum[i][j] = ADD ? load<vec>(c + i * ldc + j * W) : vec{};
    for (long k = 0; k < depth; k++) {
        decltype(unit_vector(b)) right[N];
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) right[j] = unit_vector(b + k * ldb + j * W);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) {
            U left = a[i * row + k * col];
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) sum[i][j] = multiply_add(sum[i][j], left, right[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) store(c + i * ldc + j * W, sum[i][j]);
}

template <bool ADD, int N, class U>
inline void strip(const U* a, long row, long col, const U* b, long ldb, long depth, float* c,
                  long ldc, long rows) {
    long i = 0;
    for (; i + STRIP <= rows; i += STRIP)
        micro<ADD, STRIP, N>(a + i * row, row, col, b, ldb, depth, c + i * ldc, ldc);
    for (; i + 4 <= rows; i += 4)
        micro<ADD, 4, N>(a + i * row, row, col, b, ldb, depth, c + i * ldc, ldc);
    for (; i + 2 <= rows; i += 2)
        micro<ADD, 2, N>(a + i * row, row, col, b, ldb, depth, c + i * ldc, ldc);
}

// The same for an even number of rows and columns in whole vectors.
template <bool ADD, class U>
void product(const U* a, long row, long col, const U* b, long ldb, long depth, float* c, long ldc,
             long rows, long columns) {
    long j = 0;
    for (; j + PANEL * W <= columns; j += PANEL * W)
        strip<ADD, PANEL>(a, row, col, b + j, ldb, depth, c + j, ldc, rows);
    if constexpr (PANEL > 2)
        for (; j + 2 * W <= columns; j += 2 * W)
            strip<ADD, 2>(a, row, col, b + j, ldb, depth, c + j, ldc, rows);
    for (; j + W <= columns; j += W)
        strip<ADD, 1>(a, row, col, b + j, ldb, depth, c + j, ldc, rows);
}

// 2^x for x up to about 100; exactly 0 far below, which is what hidden entries rely on. Of what is
// rounded to bf16 anyway (two to a unit), half of float32's digits are enough.
template <int PER>
inline vec exp2(vec x) {
    // What is not a number stays so.
#if defined(__AVX512F__)
    // Left out rather than computed: each result too small for a float32 costs 100 cycles or more.
    __mmask16 there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    vec safe = x;
    vec whole = (vec)_mm512_roundscale_ps((__m512)safe, _MM_FROUND_TO_NEAREST_INT);
#else
    const float magic = 0x1.8p23f;  // adding it rounds to whole numbers
    ivec there = ~(x < -126.0f);
    vec safe = (vec)((ivec)x & there);
    vec whole = (safe + magic) - magic;
#endif
    vec f = safe - whole, p;
    if constexpr (PER == 2) {
        p = f * 9.5701e-3f + 5.591786e-2f;
        p = p * f + 2.4024745e-1f;
        p = p * f + 6.9312181e-1f;
        p = p * f + 9.9999926e-1f;
    } else {
        p = f * 1.5403530e-4f + 1.33335581e-3f;
        p = p * f + 9.61812910e-3f;
        p = p * f + 5.55041087e-2f;
        p = p * f + 2.40226507e-1f;
        p = p * f + 6.93147181e-1f;
        p = p * f + 1.0f;
    }
#if defined(__AVX512F__)
    return (vec)_mm512_maskz_scalef_ps(there, (__m512)p, (__m512)whole);
#else
    ivec power = (__builtin_convertvector(whole, ivec) + 127) << 23;
    return (vec)((ivec)(p * (vec)power) & there);
#endif
}

// Halves onto each other: a chain of four steps, not of sixteen.
template <class F>
inline float fold(vec x, F join) {
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] = join(x[i], x[i + half]);
    return x[0];
}
inline float sum_of(vec x) {
    return fold(x, [](float a, float b) { return a + b; });
}
inline float largest_of(vec x) {
    return fold(x, [](float a, float b) { return a > b ? a : b; });
}

// Dropout draws: the same mixing as dropout.py.
template <class N>
inline N mix(N x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}
constexpr uint32_t GOLDEN = 0x9E3779B9u;

}  // namespace
