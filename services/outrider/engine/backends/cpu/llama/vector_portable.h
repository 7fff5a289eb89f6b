// Any CPU, in vector extensions of gcc and clang: 4 lanes, as NEON has. See vector_avx512.h for what is defined.
//
// Only 32-bit lanes are computed in: narrower ones are widened by shifts, which every CPU has.

#define LANES 4
#if defined(__aarch64__)
#define COLUMNS 4  // of 32 registers
#else
#define COLUMNS 2  // of 16
#endif

typedef float vec __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(16)));
typedef uint32_t uvec __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(8)));

static inline vec v_zero(void) { return (vec){0}; }
static inline vec v_splat(float x) { return (vec){x, x, x, x}; }
static inline ivec i_splat(int32_t x) { return (ivec){x, x, x, x}; }
static inline vec v_load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}
static inline ivec i_load(const int32_t *from) {
    ivec v;
    memcpy(&v, from, sizeof v);
    return v;
}
static inline void v_store(float *to, vec v) { memcpy(to, &v, sizeof v); }
static inline vec v_add(vec a, vec b) { return a + b; }
static inline vec v_sub(vec a, vec b) { return a - b; }
static inline vec v_mul(vec a, vec b) { return a * b; }
static inline vec v_div(vec a, vec b) { return a / b; }
// In one rounding or two, as the compiler finds quicker on the CPU; everywhere alike.
static inline vec v_fma(vec a, vec b, vec c) { return a * b + c; }
static inline vec v_select(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }
static inline vec v_max(vec a, vec b) { return v_select(a > b, a, b); }
static inline vec v_abs(vec v) { return (vec)((ivec)v & i_splat(0x7fffffff)); }

// Of numbers up to 2^22: float32 has no fractions at 1.5 * 2^23.
static inline vec v_round(vec v) { return (v + v_splat(12582912.f)) - v_splat(12582912.f); }

static inline ivec whole(vec v) { return __builtin_convertvector(v, ivec); }

static inline vec v_ldexp(vec v, vec n) { return v * (vec)((whole(n) + i_splat(127)) << 23); }
static inline float v_sum(vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }

static inline float v_most(vec v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}

static inline vec v_first(int64_t count, vec a, vec b) {
    const int32_t below = count > LANES ? LANES : (int32_t)count;
    return v_select((ivec){0, 1, 2, 3} < i_splat(below), a, b);
}

static inline vec v_negative(vec test, vec a, vec b) { return v_select(test < v_zero(), a, b); }

static inline vec v_load_bf16(const bf16 *from) {
    halves v;
    memcpy(&v, from, sizeof v);
    return (vec)(__builtin_convertvector(v, uvec) << 16);
}

static inline void v_store_bf16(bf16 *to, vec v) {
    // To nearest, ties to even. What is no number stays none: rounding could carry it to 0.
    const uvec bits = (uvec)v, rounded = bits + ((bits >> 16 & 1) + 0x7fff), quiet = bits | 0x400000;
    const halves high = __builtin_convertvector((uvec)v_select(v == v, (vec)rounded, (vec)quiet) >> 16, halves);
    memcpy(to, &high, sizeof high);
}

// Its exponent's bias is smaller by 112.
static inline vec v_load_half(const half *from) {
    halves v;
    memcpy(&v, from, sizeof v);
    const uvec bits = __builtin_convertvector(v, uvec);
    return (vec)((uvec)((vec)((bits & 0x7fff) << 13) * v_splat(0x1p112f)) | (bits & 0x8000) << 16);
}

static inline vec v_from_integers(ivec v) { return __builtin_convertvector(v, vec); }

typedef float act;
typedef vec weights;
typedef vec inputs;
#define STEP 4
#define PARTS 4
#define EIGHT_GROUP 4

static inline void store_act(act *to, vec v) { v_store(to, v); }
static inline vec load_act(const act *from) { return v_load(from); }

static inline weights pairs(const bf16 *from, int part) {
    uvec both;
    memcpy(&both, from, sizeof both);
    return (vec)(part ? both & 0xffff0000 : both << 16);
}

// The part-th of four int8 in each lane.
static inline ivec eighth(const int8_t *from, int part) {
    ivec four;
    memcpy(&four, from, sizeof four);
    return four << (24 - 8 * part) >> 24;
}

static inline weights eights(const int8_t *from, int part) { return v_from_integers(eighth(from, part)); }
static inline inputs spread(const act *from) { return v_splat(*from); }
static inline vec multiply(vec sum, inputs x, weights w) { return v_fma(x, w, sum); }

typedef float wide;
#define WIDE_GROUP 1
static inline weights wides(const wide *from, int part) {
    (void)part;
    return v_load(from);
}
static inline void store_wide(wide *to, weights w) { v_store(to, w); }

typedef int32_t code;
#define CODE_ZERO 0
#define CODE_GROUP 4
#define CODE_STEP 4
#define CODE_PARTS 4

static inline void store_codes(code *to, vec rounded) {
    const ivec number = whole(v_round(rounded));
    memcpy(to, &number, sizeof number);
}

static inline ivec code_weights(const int8_t *from, int part) { return eighth(from, part); }
static inline ivec spread_codes(const code *from) { return i_splat(*from); }
static inline ivec count(ivec sum, ivec x, ivec w) { return sum + x * w; }
static inline ivec fours(const void *from, int upper) { return i_load(from) >> 4 * upper & i_splat(0x0f0f0f0f); }

static inline ivec count_fours(ivec sum, ivec w, const int8_t *x) {
    for (int i = 0; i < 4; i++) sum += (w >> 8 * i & i_splat(15)) * i_splat(x[i]);
    return sum;
}

static inline ivec counted(ivec sum) { return sum; }

static inline void store_bytes(int8_t *to, vec number) {
    for (int i = 0; i < LANES; i++) to[i] = (int8_t)number[i];
}

static inline ivec i_zero(void) { return (ivec){0}; }
static inline ivec i_sub(ivec a, ivec b) { return a - b; }
static inline ivec i_times_code_zero(ivec v) { return (void)v, i_zero(); }
