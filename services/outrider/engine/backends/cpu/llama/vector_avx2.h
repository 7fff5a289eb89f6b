// AVX2 and FMA: 8 lanes, 16 registers. See vector_avx512.h for what is defined.

#include <immintrin.h>

#define LANES 8
#define COLUMNS 2

typedef __m256 vec;
typedef __m256i ivec;

static inline vec v_zero(void) { return _mm256_setzero_ps(); }
static inline vec v_splat(float x) { return _mm256_set1_ps(x); }
static inline vec v_load(const float *from) { return _mm256_loadu_ps(from); }
static inline ivec i_load(const int32_t *from) { return _mm256_loadu_si256((const void *)from); }
static inline void v_store(float *to, vec v) { _mm256_storeu_ps(to, v); }
static inline vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }
static inline vec v_abs(vec v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), v); }
static inline vec v_round(vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

static inline vec v_ldexp(vec v, vec n) {
    const ivec exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return v_mul(v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

static inline float v_sum(vec v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

static inline float v_most(vec v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

static inline vec v_first(int64_t count, vec a, vec b) {
    const int32_t below = count > LANES ? LANES : (int32_t)count;
    const ivec lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(below), lane)));
}

static inline vec v_negative(vec test, vec a, vec b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(test, _mm256_setzero_ps(), _CMP_LT_OQ));
}

static inline vec v_load_bf16(const bf16 *from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from)), 16));
}

static inline void v_store_bf16(bf16 *to, vec v) {
    // To nearest, ties to even. What is no number stays none: rounding could carry it to 0.
    const ivec bits = _mm256_castps_si256(v);
    const ivec odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const ivec rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const ivec quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const ivec kept = _mm256_castps_si256(_mm256_blendv_ps(
        _mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), _mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
    const ivec high = _mm256_srli_epi32(kept, 16);
    _mm_storeu_si128((void *)to, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}

// Its exponent's bias is smaller by 112.
static inline vec v_load_half(const half *from) {
    const ivec bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)from));
    const ivec size = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fff)), 13);
    const ivec sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)), 16);
    return _mm256_or_ps(v_mul(_mm256_castsi256_ps(size), v_splat(0x1p112f)), _mm256_castsi256_ps(sign));
}

static inline vec v_from_integers(ivec v) { return _mm256_cvtepi32_ps(v); }

typedef float act;
typedef vec weights;
typedef vec inputs;
#define STEP 2
#define PARTS 2
#define EIGHT_GROUP 1

static inline void store_act(act *to, vec v) { v_store(to, v); }
static inline vec load_act(const act *from) { return v_load(from); }

static inline weights pairs(const bf16 *from, int part) {
    const ivec both = _mm256_loadu_si256((const void *)from);
    return _mm256_castsi256_ps(part ? _mm256_and_si256(both, _mm256_set1_epi32(-0x10000)) : _mm256_slli_epi32(both, 16));
}

static inline weights eights(const int8_t *from, int part) {
    (void)part;
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)));
}

static inline inputs spread(const act *from) { return v_splat(*from); }
static inline vec multiply(vec sum, inputs x, weights w) { return v_fma(x, w, sum); }

typedef float wide;
#define WIDE_GROUP 1
static inline weights wides(const wide *from, int part) {
    (void)part;
    return v_load(from);
}
static inline void store_wide(wide *to, weights w) { v_store(to, w); }

typedef int16_t code;
#define CODE_ZERO 0
#define CODE_GROUP 2
#define CODE_STEP 2
#define CODE_PARTS 1

static inline void store_codes(code *to, vec rounded) {
    const ivec number = _mm256_cvtps_epi32(rounded);
    _mm_storeu_si128((void *)to, _mm_packs_epi32(_mm256_castsi256_si128(number), _mm256_extracti128_si256(number, 1)));
}

static inline ivec code_weights(const int8_t *from, int part) {
    (void)part;
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)from));
}

static inline ivec spread_codes(const code *from) {
    int32_t both;
    memcpy(&both, from, sizeof both);
    return _mm256_set1_epi32(both);
}

static inline ivec count(ivec sum, ivec x, ivec w) { return _mm256_add_epi32(sum, _mm256_madd_epi16(x, w)); }

static inline ivec fours(const void *from, int upper) {
    const ivec both = i_load(from);
    return _mm256_and_si256(upper ? _mm256_srli_epi32(both, 4) : both, _mm256_set1_epi8(15));
}

// In 16 bits: 16 times 15 * 127 is below 2^15.
static inline ivec count_fours(ivec sum, ivec w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, _mm256_set1_epi32(four)));
}

static inline ivec counted(ivec sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }

static inline void store_bytes(int8_t *to, vec whole) {
    const ivec number = _mm256_cvtps_epi32(whole);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(number), _mm256_extracti128_si256(number, 1));
    _mm_storel_epi64((void *)to, _mm_packs_epi16(words, words));
}

static inline ivec i_zero(void) { return _mm256_setzero_si256(); }
static inline ivec i_sub(ivec a, ivec b) { return _mm256_sub_epi32(a, b); }
static inline ivec i_times_code_zero(ivec v) { return (void)v, i_zero(); }
