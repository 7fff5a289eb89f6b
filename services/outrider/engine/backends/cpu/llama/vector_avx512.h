// AVX-512 (F, BW, DQ, VL): 16 lanes. Where the compiler may use BF16 and VNNI too, they multiply.
//
// A vector header names what the algorithms are written in, and how weights are multiplied:
//   LANES    floats in a vector; COLUMNS: vectors of outputs that are computed together
//   act      what weights are multiplied with: bf16 where the CPU multiplies it, else float
//   STEP     inputs that one turn of a loop takes, in PARTS products
//   *_GROUP  inputs of an output that lie side by side in weights of a kind
//   code     what inputs are rounded to; CODE_ZERO stands for 0
//   fours    weights of 4 bits, four in each lane, to be multiplied with four inputs that were rounded to int8

#include <immintrin.h>

#define LANES 16
#define COLUMNS 4

typedef __m512 vec;
typedef __m512i ivec;

static inline vec v_zero(void) { return _mm512_setzero_ps(); }
static inline vec v_splat(float x) { return _mm512_set1_ps(x); }
static inline vec v_load(const float *from) { return _mm512_loadu_ps(from); }
static inline ivec i_load(const int32_t *from) { return _mm512_loadu_si512(from); }
static inline void v_store(float *to, vec v) { _mm512_storeu_ps(to, v); }
static inline vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
static inline vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
static inline vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
static inline vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
static inline vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
// b where either is no number.
static inline vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
static inline vec v_abs(vec v) { return _mm512_abs_ps(v); }
static inline vec v_round(vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// v * 2^n, n whole and from -126 on.
static inline vec v_ldexp(vec v, vec n) { return _mm512_scalef_ps(v, n); }
static inline float v_sum(vec v) { return _mm512_reduce_add_ps(v); }
static inline float v_most(vec v) { return _mm512_reduce_max_ps(v); }

// a in the first `count` lanes (or all, or none), b in the others.
static inline vec v_first(int64_t count, vec a, vec b) {
    const __mmask16 mask = count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
    return _mm512_mask_mov_ps(b, mask, a);
}

// a where `test` is below 0, else b.
static inline vec v_negative(vec test, vec a, vec b) {
    return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(test, _mm512_setzero_ps(), _CMP_LT_OQ), a);
}

static inline vec v_load_bf16(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16));
}

static inline vec v_load_half(const half *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)from)); }

static inline vec v_from_integers(ivec v) { return _mm512_cvtepi32_ps(v); }

// ---- Products of float32 or bfloat16 inputs

#ifdef __AVX512BF16__

typedef bf16 act;
typedef __m512bh weights;
typedef __m512bh inputs;
#define STEP 2
#define PARTS 1
#define EIGHT_GROUP 2

static inline void v_store_bf16(bf16 *to, vec v) { _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh(v)); }
static inline void store_act(act *to, vec v) { v_store_bf16(to, v); }
static inline vec load_act(const act *from) { return v_load_bf16(from); }

static inline weights pairs(const bf16 *from, int part) {
    (void)part;
    return (__m512bh)_mm512_loadu_si512(from);
}

// The first input of each pair; 0 stands for the second, whatever it was.
static inline weights first_of_pairs(weights w) {
    return (__m512bh)_mm512_and_si512((__m512i)w, _mm512_set1_epi32(0xffff));
}

// Integers up to 127 are bfloat16 numbers too: nothing is lost.
static inline weights eights(const int8_t *from, int part) {
    (void)part;
    const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from));
    const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(from + 16)));
    return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}

// Two neighbouring inputs, in every lane.
static inline inputs spread(const act *from) {
    int32_t both;
    memcpy(&both, from, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

static inline vec multiply(vec sum, inputs x, weights w) { return _mm512_dpbf16_ps(sum, x, w); }

// A panel once widened: bfloat16 stays as it is.
typedef bf16 wide;
#define WIDE_GROUP 2
static inline weights wides(const wide *from, int part) { return pairs(from, part); }
static inline void store_wide(wide *to, weights w) { _mm512_storeu_si512(to, (__m512i)w); }

#else

typedef float act;
typedef vec weights;
typedef vec inputs;
#define STEP 2
#define PARTS 2
#define EIGHT_GROUP 1

static inline void v_store_bf16(bf16 *to, vec v) {
    // To nearest, ties to even, as the instruction does. What is no number stays none: rounding could carry it to 0.
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 none = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i kept = _mm512_mask_mov_epi32(rounded, none, quiet);
    _mm256_storeu_si256((void *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}

static inline void store_act(act *to, vec v) { v_store(to, v); }
static inline vec load_act(const act *from) { return v_load(from); }

static inline weights pairs(const bf16 *from, int part) {
    const __m512i both = _mm512_loadu_si512(from);
    return _mm512_castsi512_ps(part ? _mm512_and_si512(both, _mm512_set1_epi32(-0x10000)) : _mm512_slli_epi32(both, 16));
}

static inline weights eights(const int8_t *from, int part) {
    (void)part;
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
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

#endif

// ---- Products of rounded inputs, in integers

#ifdef __AVX512VNNI__

typedef uint8_t code;
#define CODE_ZERO 128
#define CODE_GROUP 4
#define CODE_STEP 4
#define CODE_PARTS 1

static inline void store_codes(code *to, vec rounded) {
    const ivec number = _mm512_add_epi32(_mm512_cvtps_epi32(rounded), _mm512_set1_epi32(CODE_ZERO));
    _mm_storeu_si128((void *)to, _mm512_cvtepi32_epi8(number));
}

static inline ivec code_weights(const int8_t *from, int part) {
    (void)part;
    return _mm512_loadu_si512(from);
}

static inline ivec spread_codes(const code *from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    return _mm512_set1_epi32(four);
}

// For the intrinsic gcc copies every sum to another register and back, and with six rows through memory.
static inline ivec count(ivec sum, ivec x, ivec w) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    return sum;
}

static inline ivec count_fours(ivec sum, ivec w, const int8_t *x) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const char(*)[4])x));
    return sum;
}

static inline ivec counted(ivec sum) { return sum; }

#else

typedef int16_t code;
#define CODE_ZERO 0
#define CODE_GROUP 2
#define CODE_STEP 2
#define CODE_PARTS 1

static inline void store_codes(code *to, vec rounded) {
    _mm256_storeu_si256((void *)to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(rounded)));
}

static inline ivec code_weights(const int8_t *from, int part) {
    (void)part;
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)from));
}

static inline ivec spread_codes(const code *from) {
    int32_t both;
    memcpy(&both, from, sizeof both);
    return _mm512_set1_epi32(both);
}

static inline ivec count(ivec sum, ivec x, ivec w) { return _mm512_add_epi32(sum, _mm512_madd_epi16(x, w)); }

// In 16 bits: 16 times 15 * 127 is below 2^15.
static inline ivec count_fours(ivec sum, ivec w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, _mm512_set1_epi32(four)));
}

static inline ivec counted(ivec sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }

#endif

// Of 8 numbers in each lane, two in a byte, the lower or the upper four.
static inline ivec fours(const void *from, int upper) {
    const ivec both = i_load(from);
    return _mm512_and_si512(upper ? _mm512_srli_epi32(both, 4) : both, _mm512_set1_epi8(15));
}

static inline void store_bytes(int8_t *to, vec whole) {
    _mm_storeu_si128((void *)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole)));
}

static inline ivec i_zero(void) { return _mm512_setzero_si512(); }
static inline ivec i_sub(ivec a, ivec b) { return _mm512_sub_epi32(a, b); }
static inline ivec i_times_code_zero(ivec v) { return CODE_ZERO ? _mm512_slli_epi32(v, 7) : i_zero(); }
