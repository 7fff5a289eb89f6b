// One step of a bfloat16 Llama on a CPU with AVX512-BF16, on its tiles (AMX) where it has any: ragged rows over a paged
// KV cache.
//
// Written because a decode step is the reading of its weights: one loop over them, at the speed of memory, is half
// the time of a call per matrix. Every sum runs in one order, whatever shares the step: a row's logits are the
// same bits alone, in a batch, in a chunk, or among verified positions.
//
// Activations between operations are float32; what is multiplied is bfloat16, accumulated in float32.
//
// Layouts
//   weights  [outputs / 64][inputs / 2][64][2]: a "panel" of 64 outputs, two inputs side by side for vdpbf16ps.
//            Panels of gate and up alternate by 32 outputs, so that their product is taken in registers.
//            bfloat16; or int8 with a scale for each output, widened where it is used: half the memory to read.
//            Where inputs are rounded to 8 bits as well, [outputs / 64][inputs / 4][64][4] for vpdpbusd, in integers.
//   keys     [kv_heads][tiles][head_dim / 2][16][2], a tile being 16 positions
//   values   [kv_heads][tiles][8][head_dim][2]

#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PANEL 64  // outputs computed together
#define STRIP 6   // rows computed together: 6 x 4 accumulators, 4 weights and an input fill the registers
#define TILE 16   // positions in a tile of the cache
#define SPAN 64   // positions attended together
#define MAX_HEAD_DIM 256
#define PART 16   // tokens that a thread takes at a time, in what is done token by token
// How far ahead of its use a panel in int8 is asked for where it is widened, in bytes.
#define AHEAD (4 * PANEL * 16)
#define LINE 64  // bytes
#define BLOCKS 8  // asked for at the same time, by `ask`

typedef uint16_t bf16;
typedef __m512 vec;

typedef struct {
    const void *values;   // bfloat16, or int8 when there are scales
    const float *scales;  // [outputs rounded up to 64]
    const int32_t *sums;  // [outputs rounded up to 64] of each output's int8 weights, where inputs are rounded too
} Weights;

typedef struct {
    const bf16 *attention_norm, *mlp_norm;
    Weights qkv, output, gate_up, down;
    bf16 *keys, *values;
} Layer;

typedef struct {
    int64_t layers, width, inner, heads, kv_heads, head_dim, vocab, tiles;
    double norm_eps, scale;
    const bf16 *embedding, *final_norm;
    Weights head;
    const float *cos, *sin;  // [positions][head_dim / 2]
    const Layer *layer;
} Model;

typedef struct {
    int32_t start, num_tokens, kv_len, first_tile;  // first_tile: where its tiles begin in the step's list
    // Of a token beside a row: so many tiles, the last of which is its own, begin as copies of those from this one on.
    int32_t num_copied, copied_tile;
    int32_t num_beside;  // rows of a token each that follow this one and stand beside it; below 0 for such a row
} Row;

typedef struct {
    int64_t tokens, rows, wanted, threads, copies;  // copies: rows that have any
    const int64_t *token_ids, *positions, *logit_rows;
    const Row *row;
    const int32_t *tiles, *row_of;  // row_of: each token's row
} Step;

typedef struct {
    float *x, *wide;       // [tokens][width], [tokens][(heads + 2 kv_heads) * head_dim]
    bf16 *narrow, *inner;  // [tokens][max(width, heads * head_dim)], [tokens][inner]
    bf16 *hidden;          // [wanted][width]
    float *logits;         // [wanted][vocab rounded up to 64]
    bf16 *panels;          // [threads][64 * most inputs of a layer], for int8 weights
    uint8_t *codes;        // [tokens][most inputs of a layer], for inputs that are rounded
    float *units;          // [tokens]
} Buffers;

static inline vec load(const bf16 *from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from)), 16));
}

static inline void store(bf16 *to, vec v) { _mm256_storeu_si256((void *)to, (__m256i)_mm512_cvtneps_pbh(v)); }

// Two neighbouring inputs, in every lane.
static inline __m512bh pair(const bf16 *from) {
    int32_t both;
    memcpy(&both, from, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

static inline __m512bh packed(const bf16 *from) { return (__m512bh)_mm512_loadu_si512(from); }

// Integers up to 127 are bfloat16 numbers too: nothing is lost.
static inline __m512bh widened(const int8_t *from) {
    const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from));
    const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(from + 16)));
    return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}

// e^x for x <= 0 within 2 ulp, exactly 1 at 0. Below -87 the result is not to be used.
static inline vec exponential(vec x) {
    const vec t = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.f)), _mm512_set1_ps(1.44269504f));
    const vec n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vec r = _mm512_sub_ps(t, n);
    vec p = _mm512_set1_ps(1.53533e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.33989e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.61844e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550332e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(p, n);
}

// ---- Threads
//
// A step hands out its work in pieces: whoever is free takes the next one. Nobody is waited for but those at work on a
// piece, so a thread whose core is taken by another process costs what it would have done, not the step. (With OpenMP
// every loop waits for every thread: beside a draft at work on the same core, a second one gained nothing.)

typedef void Work(const void *context, int64_t piece, int thread);

typedef struct {
    Work *_Atomic work;
    const void *_Atomic context;
    _Atomic int64_t pieces;
    _Atomic int threads;  // those with a lower number may take part
} Job;

static struct {
    pthread_mutex_t busy, lock;  // busy: held for a step
    pthread_cond_t begun;
    int started;          // threads besides the callers'
    _Atomic int helpers;  // that take part in the step under way; 0 between steps
    // Of this job and the one before: whoever still looks at that one finds its number in `next` gone.
    Job job[2];
    _Atomic uint64_t next;  // the job's number in the upper half, the next piece of it in the lower
    _Atomic int64_t done;   // pieces of the job
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER};

// Takes a piece and does it; 0 when there was none.
static int help(int thread) {
    uint64_t next = atomic_load_explicit(&pool.next, memory_order_acquire);
    Job *job = &pool.job[next >> 32 & 1];
    Work *const work = atomic_load_explicit(&job->work, memory_order_relaxed);
    const void *const context = atomic_load_explicit(&job->context, memory_order_relaxed);
    const int64_t piece = (uint32_t)next;
    if (thread >= atomic_load_explicit(&job->threads, memory_order_relaxed)) return 0;
    if (piece >= atomic_load_explicit(&job->pieces, memory_order_relaxed)) return 0;
    if (!atomic_compare_exchange_strong(&pool.next, &next, next + 1)) return 1;
    work(context, piece, thread);
    atomic_fetch_add_explicit(&pool.done, 1, memory_order_release);
    return 1;
}

// Between two looks. Now and then the core is offered to others: there may be more threads than cores.
static void rest(int idle) {
    if (idle % 256) {
        _mm_pause();
    } else {
        sched_yield();
    }
}

static void *helper(void *argument) {
    const int thread = (int)(intptr_t)argument;
    for (;;) {
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.helpers) < thread) pthread_cond_wait(&pool.begun, &pool.lock);
        pthread_mutex_unlock(&pool.lock);
        for (int idle = 0; atomic_load_explicit(&pool.helpers, memory_order_relaxed) >= thread;) {
            if (help(thread)) {
                idle = 0;
            } else {
                rest(++idle);
            }
        }
    }
    return 0;
}

// With the lock held: brings the helpers up to `wanted`, on the cores that the calling thread may use.
static void start(int64_t wanted) {
    while (pool.started < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, 0, helper, (void *)(intptr_t)(pool.started + 1))) return;
        pthread_detach(thread);
        pool.started++;
    }
}

// Before the first step, by who wants them elsewhere than the steps' own thread.
void outrider_start_helpers(int64_t wanted) {
    pthread_mutex_lock(&pool.lock);
    start(wanted);
    pthread_mutex_unlock(&pool.lock);
}

// Returns how many threads the step may use: one while another step has the helpers.
static int begin(int64_t threads) {
    if (threads <= 1 || pthread_mutex_trylock(&pool.busy)) return 1;
    pthread_mutex_lock(&pool.lock);
    start(threads - 1);
    // None could be started: then `share` does all itself, as it does where they come too late.
    if (threads > pool.started + 1) threads = pool.started + 1;
    atomic_store(&pool.helpers, (int)threads - 1);
    pthread_cond_broadcast(&pool.begun);
    pthread_mutex_unlock(&pool.lock);
    if (threads == 1) pthread_mutex_unlock(&pool.busy);
    return (int)threads;
}

static void end(int threads) {
    if (threads <= 1) return;
    atomic_store(&pool.helpers, 0);
    pthread_mutex_unlock(&pool.busy);
}

// Does all pieces, and returns when all are done.
static void share(Work *work, const void *context, int64_t pieces, int threads) {
    if (threads <= 1 || pieces <= 1) {
        for (int64_t piece = 0; piece < pieces; piece++) work(context, piece, 0);
        return;
    }
    const uint64_t number = (atomic_load(&pool.next) >> 32) + 1;
    Job *job = &pool.job[number & 1];
    atomic_store_explicit(&job->work, work, memory_order_relaxed);
    atomic_store_explicit(&job->context, context, memory_order_relaxed);
    atomic_store_explicit(&job->pieces, pieces, memory_order_relaxed);
    atomic_store_explicit(&job->threads, threads, memory_order_relaxed);
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.next, number << 32, memory_order_release);
    while (help(0)) continue;
    for (int idle = 0; atomic_load_explicit(&pool.done, memory_order_acquire) < pieces;) rest(++idle);
}

// ---- Linear layers

enum { STORE, ADD, GATE };  // what becomes of a product: written, added to what is there, silu(gate) * up

typedef struct {
    const bf16 *in;  // [rows][inputs]
    Weights weights;
    void *out;  // float32, or bfloat16 for GATE
    int64_t rows, inputs, outputs, stride;  // outputs: those that are written; stride: of a row of out
    int kind;
    // [rows][inputs] of numbers from 1 to 255, 128 being 0, and what one of them is worth in each row
    const uint8_t *codes;
    const float *units;
} Linear;

static int64_t panels_of(const Linear *l) { return (l->outputs * (l->kind == GATE ? 2 : 1) + PANEL - 1) / PANEL; }

static inline vec gated(vec gate, vec up) {
    // Where e^-|g| is taken, so that it never overflows: g / (1 + e^-g) = g e^g / (1 + e^g) for negative g.
    const vec e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(gate)));
    const __mmask16 negative = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ);
    const vec top = _mm512_mask_mul_ps(gate, negative, gate, e);
    return _mm512_mul_ps(_mm512_div_ps(top, _mm512_add_ps(_mm512_set1_ps(1.f), e)), up);
}

static inline __attribute__((always_inline)) void
finish_row(const Linear *l, vec sum[4], int64_t panel, int64_t row) {
    if (l->kind == GATE) {
        bf16 *out = (bf16 *)l->out + row * l->stride + panel * (PANEL / 2);
        for (int z = 0; z < 2; z++) store(out + TILE * z, gated(sum[z], sum[z + 2]));
        return;
    }
    float *out = (float *)l->out + row * l->stride + panel * PANEL;
    for (int z = 0; z < 4 && panel * PANEL + 16 * z < l->outputs; z++)
        _mm512_storeu_ps(out + 16 * z, l->kind == ADD ? _mm512_add_ps(_mm512_loadu_ps(out + 16 * z), sum[z]) : sum[z]);
}

static inline __attribute__((always_inline)) void
finish_strip(const Linear *l, vec sum[STRIP][4], int64_t panel, int64_t first, int rows) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) finish_row(l, sum[r], panel, first + r);
}

// Weights are used a block of `lines` lines after the other; `block` is in use. Asks for one line of the `n`th block after
// it, from 1 to BLOCKS: while this one is used the nearest is asked for its last lines, the farthest for its first, each
// for an eighth. For a core that asks for one page after the other waits for each; of several at once it gets half as much
// again. Into the second-level cache: the first has no room for so many.
static inline __attribute__((always_inline)) void ask(const char *block, int64_t lines, int64_t n, int64_t at) {
    _mm_prefetch(block + (n * lines + (BLOCKS - n) * (lines / BLOCKS) + at) * LINE, _MM_HINT_T1);
}

// For the intrinsic gcc copies every sum to another register and back, and with six rows through memory.
static inline void add_products(__m512i *sum, __m512i codes, __m512i weights) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(codes), "v"(weights));
}

// Four neighbouring inputs in one instruction: a quarter of the arithmetic, and nothing to widen.
static inline __attribute__((always_inline)) void
rounded_strip(const Linear *l, const int8_t *weights, int64_t panel, int64_t first, int rows) {
    const uint8_t *codes = l->codes + first * l->inputs;
    __m512i count[STRIP][4];
    for (int r = 0; r < rows; r++)
        for (int z = 0; z < 4; z++) count[r][z] = _mm512_setzero_si512();
    for (int64_t k = 0; k < l->inputs; k += 4) {
        const int64_t turn = k / 4 % (2 * BLOCKS);
        __m512i w[4];
        for (int z = 0; z < 4; z++) {
            w[z] = _mm512_loadu_si512(weights + k * PANEL + 64 * z);
            ask((const char *)weights + (k - 4 * turn) * PANEL, 8 * BLOCKS, turn % 2 * 4 + z + 1, turn / 2);
        }
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, codes + r * l->inputs + k, sizeof four);
            const __m512i x = _mm512_set1_epi32(four);
            for (int z = 0; z < 4; z++) add_products(&count[r][z], x, w[z]);
        }
    }
    vec sum[STRIP][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const vec unit = _mm512_set1_ps(l->units[first + r]);
        for (int z = 0; z < 4; z++) {
            const int64_t at = panel * PANEL + 16 * z;
            // 128 too many for each weight.
            const __m512i excess = _mm512_slli_epi32(_mm512_loadu_si512(l->weights.sums + at), 7);
            const vec exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(count[r][z], excess));
            sum[r][z] = _mm512_mul_ps(exact, _mm512_mul_ps(_mm512_loadu_ps(l->weights.scales + at), unit));
        }
    }
    finish_strip(l, sum, panel, first, rows);
}

// Each row by its own largest number: what a row is rounded to does not depend on the others.
static void round_row(const bf16 *in, int64_t inputs, uint8_t *codes, float *unit) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < inputs; i += 16) {
        const __m512i magnitude = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(in + i)));
        largest = _mm512_max_epi32(largest, _mm512_and_si512(magnitude, _mm512_set1_epi32(0x7fff)));
    }
    const float most = _mm512_reduce_max_ps(_mm512_castsi512_ps(_mm512_slli_epi32(largest, 16)));
    const vec times = _mm512_set1_ps(most > 0 ? 127.f / most : 0.f);
    for (int64_t i = 0; i < inputs; i += 16) {
        const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(load(in + i), times));
        _mm_storeu_si128((void *)(codes + i), _mm512_cvtepi32_epi8(_mm512_add_epi32(code, _mm512_set1_epi32(128))));
    }
    *unit = most / 127.f;
}

// `weights`: the panel's, int8 if `eight`.
static inline __attribute__((always_inline)) void
linear_strip(const Linear *l, const void *weights, int eight, int64_t panel, int64_t first, int rows) {
    const bf16 *in = l->in + first * l->inputs, *wide = weights;
    const int8_t *slim = weights;
    vec sum[STRIP][4];
    for (int r = 0; r < rows; r++)
        for (int z = 0; z < 4; z++) sum[r][z] = _mm512_setzero_ps();
    for (int64_t k = 0; k < l->inputs; k += 2) {
        const int64_t turn = k / 2 % (2 * BLOCKS);
        __m512bh w[4];
        for (int z = 0; z < 4; z++) {
            const int64_t at = k * PANEL + 32 * z;
            w[z] = eight ? widened(slim + at) : packed(wide + at);
            if (!eight) ask((const char *)(wide + (k - 2 * turn) * PANEL), 8 * BLOCKS, turn % 2 * 4 + z + 1, turn / 2);
            // Widening takes longer than reading half as much: one page at a time is enough.
            if (eight && z % 2 == 0) _mm_prefetch((const void *)(slim + at + AHEAD), _MM_HINT_T0);
        }
        for (int r = 0; r < rows; r++) {
            const __m512bh x = pair(in + r * l->inputs + k);
            for (int z = 0; z < 4; z++) sum[r][z] = _mm512_dpbf16_ps(sum[r][z], x, w[z]);
        }
    }
    if (l->weights.scales)
        for (int z = 0; z < 4; z++) {
            const vec scale = _mm512_loadu_ps(l->weights.scales + panel * PANEL + 16 * z);
            for (int r = 0; r < rows; r++) sum[r][z] = _mm512_mul_ps(sum[r][z], scale);
        }
    finish_strip(l, sum, panel, first, rows);
}

// ---- Tiles: the same products where the CPU has AMX, 16 rows x 32 inputs x 16 outputs in an instruction
//
// All of them or none: AMX adds even and odd inputs apart, so its sums are not vdpbf16ps's bits. Of its eight registers
// four hold sums, one the inputs, and three take turns with the weights, which lie as it wants them: a pair of inputs
// is a line of 16 outputs.

#define TILED_ROWS 16
#define TILED_INPUTS 32

static int tiled;  // whether they are used

// Returns whether they are: with `wanted` wherever the CPU has them and the system grants them, for it has to keep
// 8 kB more of each thread that was put aside. Not while a step runs, for it changes the bits of every sum.
int outrider_use_tiles(int wanted) {
    const int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA
    tiled = wanted && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
            syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return tiled;
}

int outrider_tiled(void) { return tiled; }

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileShape;

// 0 to 3 hold sums and 4 inputs, of `rows`; the others weights, or 5 as 4. While attending 6 holds weights of TILE positions, for
// `rows`, and 7 their values.
static void shape_tiles(int64_t rows, int attending) {
    TileShape shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.bytes[i] = LINE;
        shape.rows[i] = i < 5 ? (uint8_t)rows : TILED_INPUTS / 2;
    }
    if (attending) {
        shape.bytes[6] = LINE / 2;
        shape.rows[6] = (uint8_t)rows;
        shape.rows[7] = TILE / 2;
    }
    _tile_loadconfig(&shape);
}

static inline void
finish_tiled(const Linear *l, float (*sum)[PANEL], int64_t panel, int64_t first, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        vec row[4];
        for (int z = 0; z < 4; z++) {
            row[z] = _mm512_load_ps(sum[r] + 16 * z);
            if (l->weights.scales) row[z] = _mm512_mul_ps(row[z], _mm512_loadu_ps(l->weights.scales + panel * PANEL + 16 * z));
        }
        finish_row(l, row, panel, first + r);
    }
}

static inline __attribute__((always_inline)) void
tiled_strip(const Linear *l, const void *weights, int eight, int64_t panel, int64_t first, int64_t rows) {
    const bf16 *in = l->in + first * l->inputs;
    _Alignas(LINE) bf16 block[TILED_INPUTS * PANEL];
    _Alignas(LINE) float sum[TILED_ROWS][PANEL];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < l->inputs; k += TILED_INPUTS) {
        const bf16 *w = (const bf16 *)weights + k * PANEL;
        const char *now = (const char *)w;
        if (eight) {
            w = block;
            now = (const char *)weights + k * PANEL;
            for (int64_t i = 0; i < TILED_INPUTS * PANEL; i += 32)
                _mm512_store_si512(block + i, (__m512i)widened((const int8_t *)now + i));
        }
        // A quarter of what is asked for between two products: all at once would leave memory idle while tiles are
        // multiplied.
#define FETCH(quarter) \
    for (int64_t at = (quarter) * (eight ? 1 : 2); at < ((quarter) + 1) * (eight ? 1 : 2); at++) \
        for (int64_t n = 1; n <= BLOCKS; n++) ask(now, eight ? 32 : 64, n, at)
        _tile_loadd(4, in + k, l->inputs * sizeof *in);
        FETCH(0);
        _tile_loadd(5, w, 4 * LINE);
        _tile_dpbf16ps(0, 4, 5);
        FETCH(1);
        _tile_loadd(6, w + 32, 4 * LINE);
        _tile_dpbf16ps(1, 4, 6);
        FETCH(2);
        _tile_loadd(7, w + 64, 4 * LINE);
        _tile_dpbf16ps(2, 4, 7);
        FETCH(3);
        _tile_loadd(5, w + 96, 4 * LINE);
        _tile_dpbf16ps(3, 4, 5);
#undef FETCH
    }
    _tile_stored(0, sum[0], sizeof *sum);
    _tile_stored(1, sum[0] + 16, sizeof *sum);
    _tile_stored(2, sum[0] + 32, sizeof *sum);
    _tile_stored(3, sum[0] + 48, sizeof *sum);
    finish_tiled(l, sum, panel, first, rows);
}

// What is asked for while rows pass over a panel: a share of the next one's lines, so many in each turn.
typedef struct {
    const char *from, *end;
    int64_t each;
} Coming;

static Coming coming(const Linear *l, int64_t panel, int64_t first, int64_t end) {
    const int64_t lines = PANEL * l->inputs * (l->weights.scales ? 1 : 2) / LINE;
    const int64_t from = lines * first / l->rows, to = lines * end / l->rows;
    const int64_t turns = (end - first) / (2 * TILED_ROWS) * 2 * (l->inputs / TILED_INPUTS);
    if (panel + 1 == panels_of(l) || turns == 0) return (Coming){0};
    const char *next = (const char *)l->weights.values + (panel + 1) * lines * LINE;
    return (Coming){next + from * LINE, next + to * LINE, (to - from + turns - 1) / turns};
}

// Two full strips: each tile of weights serves both, half of the outputs at a time. Memory is read meanwhile: the panel in
// use was asked for by the one before.
static void tiled_pair(const Linear *l, const bf16 *weights, int64_t panel, int64_t first, Coming *next) {
    const int64_t stride = l->inputs * sizeof *l->in;
    const bf16 *in = l->in + first * l->inputs, *more = in + TILED_ROWS * l->inputs;
    _Alignas(LINE) float sum[2 * TILED_ROWS][PANEL];
    for (int64_t half = 0; half < PANEL; half += PANEL / 2) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < l->inputs; k += TILED_INPUTS) {
            const bf16 *w = weights + k * PANEL + 2 * half;
            _tile_loadd(4, in + k, stride);
            _tile_loadd(6, w, 4 * LINE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, more + k, stride);
            _tile_dpbf16ps(1, 5, 6);
            for (int64_t i = 0; i < next->each && next->from < next->end; i++, next->from += LINE)
                _mm_prefetch(next->from, _MM_HINT_T1);
            _tile_loadd(7, w + 32, 4 * LINE);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sum[0] + half, sizeof *sum);
        _tile_stored(1, sum[TILED_ROWS] + half, sizeof *sum);
        _tile_stored(2, sum[0] + half + 16, sizeof *sum);
        _tile_stored(3, sum[TILED_ROWS] + half + 16, sizeof *sum);
    }
    finish_tiled(l, sum, panel, first, 2 * TILED_ROWS);
}

static void tiled_rows(const Linear *l, const void *weights, int eight, int64_t panel, int64_t first, int64_t end,
                       Coming next) {
    int64_t shaped = 0;
    for (; first < end; first += TILED_ROWS) {
        const int64_t rows = end - first < TILED_ROWS ? end - first : TILED_ROWS;
        if (rows != shaped) shape_tiles(shaped = rows, 0);
        // The first panel was asked for by nobody: its first strip does that, as a single one.
        if (!eight && (panel || first) && end - first >= 2 * TILED_ROWS) {
            tiled_pair(l, weights, panel, first, &next);
            first += TILED_ROWS;
            continue;
        }
        if (eight)
            tiled_strip(l, weights, 1, panel, first, rows);
        else
            tiled_strip(l, weights, 0, panel, first, rows);
    }
    _tile_release();
}

// ---- A panel's rows, by either

// A constant number of rows lets the compiler keep every sum in a register.
#define WITH_ROWS(rows, call) \
    switch (rows) { \
        case 1: call(1); break; \
        case 2: call(2); break; \
        case 3: call(3); break; \
        case 4: call(4); break; \
        case 5: call(5); break; \
        default: call(6); \
    }

enum { WIDE, EIGHT, ROUNDED };  // weights in bfloat16; in int8; in int8 with inputs rounded too

static void linear_rows(const Linear *l, const void *weights, int how, int64_t panel, int64_t first, int64_t end) {
    if (tiled && how != ROUNDED && l->inputs % TILED_INPUTS == 0) {
        tiled_rows(l, weights, how == EIGHT, panel, first, end, coming(l, panel, first, end));
        return;
    }
    for (; first < end; first += STRIP) {
#define AS_WIDE(n) linear_strip(l, weights, 0, panel, first, n)
#define AS_EIGHT(n) linear_strip(l, weights, 1, panel, first, n)
#define AS_ROUNDED(n) rounded_strip(l, weights, panel, first, n)
        if (how == ROUNDED)
            WITH_ROWS(end - first, AS_ROUNDED)
        else if (how == EIGHT)
            WITH_ROWS(end - first, AS_EIGHT)
        else
            WITH_ROWS(end - first, AS_WIDE)
#undef AS_WIDE
#undef AS_EIGHT
#undef AS_ROUNDED
    }
}

typedef struct {
    const Linear *linear;
    bf16 *panels;    // for each thread
    uint8_t *codes;  // as in Linear, to be written
    float *units;
} Product;

static void round_part(const void *context, int64_t piece, int thread) {
    (void)thread;
    const Product *p = context;
    const Linear *l = p->linear;
    for (int64_t r = piece * PART; r < l->rows && r < (piece + 1) * PART; r++)
        round_row(l->in + r * l->inputs, l->inputs, p->codes + r * l->inputs, p->units + r);
}

// A panel stays in the second-level cache while all rows of a chunk pass over it: whole strips, and whole pairs of tiled ones.
#define CHUNK (16 * STRIP)

static void linear_piece(const void *context, int64_t piece, int thread) {
    const Product *p = context;
    const Linear *l = p->linear;
    const int64_t chunks = (l->rows + CHUNK - 1) / CHUNK, panel = piece / chunks, size = PANEL * l->inputs;
    const int64_t first = piece % chunks * CHUNK, end = first + CHUNK < l->rows ? first + CHUNK : l->rows;
    if (!l->weights.scales) {
        linear_rows(l, (const bf16 *)l->weights.values + panel * size, WIDE, panel, first, end);
        return;
    }
    const int8_t *slim = (const int8_t *)l->weights.values + panel * size;
    if (l->weights.sums || end - first <= 2 * STRIP) {
        linear_rows(l, slim, l->weights.sums ? ROUNDED : EIGHT, panel, first, end);
        return;
    }
    // Once for all strips. What is summed, and in which order, is the same.
    bf16 *wide = p->panels + thread * size;
    for (int64_t i = 0; i < size; i += 32) _mm512_storeu_si512(wide + i, (__m512i)widened(slim + i));
    linear_rows(l, wide, WIDE, panel, first, end);
}

static void linear(Linear *l, const Buffers *b, int threads) {
    const Product product = {l, b->panels, b->codes, b->units};
    if (l->weights.sums) {
        share(round_part, &product, (l->rows + PART - 1) / PART, threads);
        l->codes = b->codes;
        l->units = b->units;
    }
    share(linear_piece, &product, panels_of(l) * ((l->rows + CHUNK - 1) / CHUNK), threads);
}

// ---- Norms and rotation

static void rms_norm(const float *x, const bf16 *weight, int64_t width, float eps, bf16 *out) {
    vec squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += 16) {
        const vec v = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const vec factor = _mm512_set1_ps(1.f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + eps));
    for (int64_t i = 0; i < width; i += 16)
        store(out + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor), load(weight + i)));
}

// Rotates a head in place.
static void rotate(float *restrict head, const float *restrict cos, const float *restrict sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

// One token: queries to `query` [heads * head_dim], its key and value to their place in the cache.
static void place(const Model *m, const Layer *layer, float *qkv, int64_t position, int64_t tile, bf16 *query) {
    const int64_t dim = m->head_dim, half = dim / 2, lane = position % TILE;
    for (int64_t h = 0; h < m->heads + m->kv_heads; h++)
        rotate(qkv + h * dim, m->cos + position * half, m->sin + position * half, half);
    for (int64_t i = 0; i < m->heads * dim; i += 16) store(query + i, _mm512_loadu_ps(qkv + i));
    for (int64_t h = 0; h < m->kv_heads; h++) {
        const float *key = qkv + (m->heads + h) * dim, *value = key + m->kv_heads * dim;
        bf16 *keys = layer->keys + (h * m->tiles + tile) * TILE * dim + 2 * lane;
        bf16 *values = layer->values + (h * m->tiles + tile) * TILE * dim + lane / 2 * 2 * dim + lane % 2;
        bf16 slim[MAX_HEAD_DIM];
        for (int64_t i = 0; i < dim; i += 16) store(slim + i, _mm512_loadu_ps(key + i));
        for (int64_t i = 0; i < dim; i += 2) memcpy(keys + i * TILE, slim + i, 2 * sizeof *slim);
        for (int64_t i = 0; i < dim; i += 16) store(slim + i, _mm512_loadu_ps(value + i));
        for (int64_t i = 0; i < dim; i++) values[2 * i] = slim[i];
    }
}

// ---- Attention

// Queries that share a key head: token t's g-th head of the group is number t * share + g.
typedef struct {
    const bf16 *query[TILED_ROWS];
    float *out[TILED_ROWS];
    int64_t position[TILED_ROWS];
    vec sum[TILED_ROWS][MAX_HEAD_DIM / 16];
    float highest[TILED_ROWS], total[TILED_ROWS];
    bf16 weight[TILED_ROWS][SPAN];
} Queries;

// Scores of SPAN positions → weights, and what was summed before brought to the same scale.
static inline __attribute__((always_inline)) void
weigh(Queries *q, int r, vec score[4], int64_t from, float scale, int64_t dim) {
    const int64_t visible = q->position[r] + 1 - from;
    const uint64_t seen = visible >= SPAN ? ~0ull : visible <= 0 ? 0 : (1ull << visible) - 1;
    vec high = _mm512_set1_ps(q->highest[r]);
    for (int z = 0; z < 4; z++) {
        score[z] = _mm512_mul_ps(score[z], _mm512_set1_ps(scale));
        high = _mm512_mask_max_ps(high, (__mmask16)(seen >> 16 * z), high, score[z]);
    }
    const float highest = _mm512_reduce_max_ps(high);
    vec total = _mm512_setzero_ps();
    for (int z = 0; z < 4; z++) {
        const vec w = _mm512_maskz_mov_ps((__mmask16)(seen >> 16 * z),
                                          exponential(_mm512_sub_ps(score[z], _mm512_set1_ps(highest))));
        total = _mm512_add_ps(total, w);
        store(q->weight[r] + 16 * z, w);
    }
    if (highest != q->highest[r]) {
        const float less = _mm512_cvtss_f32(exponential(_mm512_set1_ps(q->highest[r] - highest)));
        q->total[r] *= less;
        for (int64_t z = 0; z < dim / 16; z++) q->sum[r][z] = _mm512_mul_ps(q->sum[r][z], _mm512_set1_ps(less));
        q->highest[r] = highest;
    }
    q->total[r] += _mm512_reduce_add_ps(total);
}

static inline __attribute__((always_inline)) void
scores(Queries *q, const bf16 *const *keys, int64_t from, float scale, int64_t dim, int rows) {
    vec score[STRIP][4];
    for (int r = 0; r < rows; r++)
        for (int z = 0; z < 4; z++) score[r][z] = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += 2) {
        __m512bh k[4];
        for (int z = 0; z < 4; z++) k[z] = packed(keys[z] + i * TILE);
        for (int r = 0; r < rows; r++) {
            const __m512bh x = pair(q->query[r] + i);
            for (int z = 0; z < 4; z++) score[r][z] = _mm512_dpbf16_ps(score[r][z], x, k[z]);
        }
    }
    for (int r = 0; r < rows; r++) weigh(q, r, score[r], from, scale, dim);
}

// Adds SPAN positions' values, by their weights, for `parts` * 16 of the dimensions from `first` on.
static inline __attribute__((always_inline)) void
gather(Queries *q, const bf16 *const *values, int64_t first, int64_t dim, int rows, int parts) {
    vec sum[STRIP][4];
    for (int r = 0; r < rows; r++)
        for (int z = 0; z < parts; z++) sum[r][z] = q->sum[r][first / 16 + z];
    for (int at = 0; at < SPAN; at += 2) {
        const bf16 *value = values[at / TILE] + at % TILE * dim + 2 * first;
        __m512bh v[4];
        for (int z = 0; z < parts; z++) v[z] = packed(value + 32 * z);
        for (int r = 0; r < rows; r++) {
            const __m512bh w = pair(q->weight[r] + at);
            for (int z = 0; z < parts; z++) sum[r][z] = _mm512_dpbf16_ps(sum[r][z], w, v[z]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int z = 0; z < parts; z++) q->sum[r][first / 16 + z] = sum[r][z];
}

// The same on tiles, for the queries from `begin` to `end`. They lie one after the other. Sums of one SPAN are taken on
// tiles, those of all in float32.
static inline void tiled_scores(Queries *q, const bf16 *query, const bf16 *const *keys, int64_t from, float scale,
                               int64_t dim, int begin, int end) {
    _Alignas(LINE) float found[TILED_ROWS][SPAN];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < dim; i += TILED_INPUTS) {
        _tile_loadd(4, query + i, dim * sizeof *query);
        _tile_loadd(5, keys[0] + i * TILE, LINE);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, keys[1] + i * TILE, LINE);
        _tile_dpbf16ps(1, 4, 5);
        _tile_loadd(5, keys[2] + i * TILE, LINE);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(5, keys[3] + i * TILE, LINE);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, found[0], sizeof *found);
    _tile_stored(1, found[0] + 16, sizeof *found);
    _tile_stored(2, found[0] + 32, sizeof *found);
    _tile_stored(3, found[0] + 48, sizeof *found);
    for (int r = begin; r < end; r++) {
        vec score[4];
        for (int z = 0; z < 4; z++) score[z] = _mm512_load_ps(found[r] + 16 * z);
        weigh(q, r, score, from, scale, dim);
    }
}

static inline void tiled_gather(Queries *q, const bf16 *const *values, int64_t first, int64_t dim, int begin, int end) {
    _Alignas(LINE) float found[TILED_ROWS][2 * TILE];
    _tile_zero(0);
    _tile_zero(1);
    for (int z = 0; z < SPAN / TILE; z++) {
        const bf16 *value = values[z] + 2 * first;
        _tile_loadd(6, q->weight[0] + TILE * z, sizeof *q->weight);
        _tile_loadd(7, value, 4 * dim);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, value + 2 * TILE, 4 * dim);
        _tile_dpbf16ps(1, 6, 7);
    }
    _tile_stored(0, found[0], sizeof *found);
    _tile_stored(1, found[0] + TILE, sizeof *found);
    for (int r = begin; r < end; r++)
        for (int z = 0; z < 2; z++)
            q->sum[r][first / 16 + z] = _mm512_add_ps(q->sum[r][first / 16 + z], _mm512_load_ps(found[r] + 16 * z));
}

static void begin_sums(Queries *q, int rows, int64_t dim) {
    for (int r = 0; r < rows; r++) {
        q->highest[r] = -INFINITY;
        q->total[r] = 0;
        for (int64_t z = 0; z < dim / 16; z++) q->sum[r][z] = _mm512_setzero_ps();
    }
}

static void end_sums(Queries *q, int rows, int64_t dim) {
    for (int r = 0; r < rows; r++)
        for (int64_t z = 0; z < dim / 16; z++)
            _mm512_storeu_ps(q->out[r] + 16 * z, _mm512_div_ps(q->sum[r][z], _mm512_set1_ps(q->total[r])));
}

// Where the keys and values of a SPAN lie, of a row that sees `end` positions.
static inline void find(const Model *m, const Layer *layer, const int32_t *tiles, int64_t kv_head, int64_t from,
                        int64_t end, const bf16 **keys, const bf16 **values) {
    const int64_t size = TILE * m->head_dim, head = kv_head * m->tiles, last = (end - 1) / TILE;
    for (int z = 0; z < SPAN / TILE; z++) {
        // Past the end any tile does: its scores are masked.
        const int64_t tile = from / TILE + z < last ? from / TILE + z : last;
        keys[z] = layer->keys + (head + tiles[tile]) * size;
        values[z] = layer->values + (head + tiles[tile]) * size;
    }
}

static inline __attribute__((always_inline)) void
attend_strip(const Model *m, const Layer *layer, const int32_t *tiles, int64_t kv_head, Queries *q, int rows) {
    const int64_t dim = m->head_dim, end = q->position[rows - 1] + 1;
    begin_sums(q, rows, dim);
    for (int64_t from = 0; from < end; from += SPAN) {
        const bf16 *keys[4], *values[4];
        find(m, layer, tiles, kv_head, from, end, keys, values);
        scores(q, keys, from, (float)m->scale, dim, rows);
        int64_t first = 0;
        for (; first + PANEL <= dim; first += PANEL) gather(q, values, first, dim, rows, 4);
        for (; first < dim; first += 16) gather(q, values, first, dim, rows, 1);
    }
    end_sums(q, rows, dim);
}

// Queries of a strip that belong to one row.
typedef struct {
    const Row *row;
    int begin, end;
} Part;

// Where what a row sees begins to be its own, and not that of the row it stands beside.
static int64_t shared_positions(const Row *row) {
    const int64_t own = row->num_copied > 0 ? row->num_copied : 1;
    return row->num_beside < 0 ? ((row->kv_len - 1) / TILE + 1 - own) * TILE : INT64_MAX;
}

static void attend_span(const Model *m, const Layer *layer, const int32_t *tiles, int64_t kv_head, Queries *q,
                        const bf16 *query, int64_t from, int64_t seen, int begin, int end) {
    const bf16 *keys[4], *values[4];
    find(m, layer, tiles, kv_head, from, seen, keys, values);
    tiled_scores(q, query, keys, from, (float)m->scale, m->head_dim, begin, end);
    for (int64_t first = 0; first < m->head_dim; first += 2 * TILE)
        tiled_gather(q, values, first, m->head_dim, begin, end);
}

// All parts see the same keys first, which are read once for them, and then each its own.
static void attend_tiled(const Model *m, const Layer *layer, const int32_t *tiles, int64_t kv_head, Queries *q,
                         const Part *part, int parts) {
    const int64_t dim = m->head_dim;
    const int rows = part[parts - 1].end;
    _Alignas(LINE) bf16 query[TILED_ROWS * MAX_HEAD_DIM];
    int64_t shared = INT64_MAX, longest = 0;
    for (int n = 0; n < parts; n++) {
        const int64_t own = shared_positions(part[n].row), end = q->position[part[n].end - 1] + 1;
        shared = own < shared ? own : shared;
        longest = end > longest ? end : longest;
    }
    shared = shared < longest ? shared / SPAN * SPAN : longest;
    begin_sums(q, rows, dim);
    for (int r = 0; r < rows; r++) memcpy(query + r * dim, q->query[r], dim * sizeof *query);
    shape_tiles(rows, 1);
    int64_t from = 0;
    for (; from < shared; from += SPAN)
        attend_span(m, layer, tiles + part->row->first_tile, kv_head, q, query, from, longest, 0, rows);
    const int64_t rest = from;
    for (int n = 0; n < parts; n++) {
        const int64_t end = q->position[part[n].end - 1] + 1;
        for (from = rest; from < end; from += SPAN)
            attend_span(m, layer, tiles + part[n].row->first_tile, kv_head, q, query, from, end, part[n].begin, part[n].end);
    }
    _tile_release();
    end_sums(q, rows, dim);
}

// A row's queries that look at one key head, of the tokens from `begin` to `end`; on tiles, those of rows beside it follow
// its last. In and out: [tokens][heads * head_dim].
static void attend_row(const Model *m, const Layer *layer, const Step *s, const Row *row, int64_t kv_head,
                       int64_t begin, int64_t end, const bf16 *query, float *out, int64_t stride) {
    const int64_t share = m->heads / m->kv_heads;
    const int on_tiles = tiled && m->head_dim % TILED_INPUTS == 0, most = on_tiles ? TILED_ROWS : STRIP;
    if (on_tiles && row->num_beside < 0) return;
    if (on_tiles && end == row->num_tokens) end += row->num_beside;
    for (int64_t first = begin * share; first < end * share; first += most) {
        Queries q;
        Part part[TILED_ROWS];
        int parts = 0;
        const int rows = (int)(end * share - first < most ? end * share - first : most);
        for (int r = 0; r < rows; r++) {
            const int64_t token = (first + r) / share, head = kv_head * share + (first + r) % share;
            const int64_t beside = token - row->num_tokens;
            const Row *of = beside < 0 ? row : row + 1 + beside;
            q.query[r] = query + (row->start + token) * m->heads * m->head_dim + head * m->head_dim;
            q.out[r] = out + (row->start + token) * stride + head * m->head_dim;
            q.position[r] = beside < 0 ? row->kv_len + beside : of->kv_len - 1;
            if (r == 0 || part[parts - 1].row != of) part[parts++] = (Part){of, r, r};
            part[parts - 1].end = r + 1;
        }
#define CALL(n) attend_strip(m, layer, s->tiles + row->first_tile, kv_head, &q, n)
        if (on_tiles)
            attend_tiled(m, layer, s->tiles, kv_head, &q, part, parts);
        else
            WITH_ROWS(rows, CALL)
#undef CALL
    }
}

// ---- The step

int outrider_supported(void) {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vnni");
}

typedef struct {
    const Model *m;
    const Layer *layer;
    const Step *s;
    const Buffers *b;
    const bf16 *norm;
    int64_t parts;  // of the row with most tokens
    int copying;    // whether rows that copy what others have written are being placed, or those others
    int threads;
} Pass;

static int64_t joined(const Model *m) { return (m->heads + 2 * m->kv_heads) * m->head_dim; }

// The tokens of a part.
#define EACH_TOKEN(t, pass, piece) \
    for (int64_t t = (piece) * PART; t < (pass)->s->tokens && t < ((piece) + 1) * PART; t++)

static void norm_part(const void *context, int64_t piece, int thread) {
    (void)thread;
    const Pass *p = context;
    const Model *m = p->m;
    EACH_TOKEN(t, p, piece)
        rms_norm(p->b->x + t * m->width, p->norm, m->width, (float)m->norm_eps, p->b->narrow + t * m->width);
}

static void copy_tiles(const Model *m, const Layer *layer, int64_t from, int64_t to, int64_t count) {
    const int64_t size = TILE * m->head_dim;
    for (int64_t head = 0; head < m->kv_heads * m->tiles; head += m->tiles) {
        memcpy(layer->keys + (head + to) * size, layer->keys + (head + from) * size, count * size * sizeof(bf16));
        memcpy(layer->values + (head + to) * size, layer->values + (head + from) * size, count * size * sizeof(bf16));
    }
}

static void place_part(const void *context, int64_t piece, int thread) {
    (void)thread;
    const Pass *p = context;
    const Model *m = p->m;
    const Step *s = p->s;
    EACH_TOKEN(t, p, piece) {
        const Row *row = s->row + s->row_of[t];
        if ((row->num_copied > 0) != p->copying) continue;
        const int32_t *last = s->tiles + row->first_tile + s->positions[t] / TILE;
        const int64_t tile = *last;
        if (p->copying) copy_tiles(m, p->layer, row->copied_tile, last[1 - row->num_copied], row->num_copied);
        bf16 *query = p->b->narrow + t * m->heads * m->head_dim;
        place(m, p->layer, p->b->wide + t * joined(m), s->positions[t], tile, query);
    }
}

static void attend_part(const void *context, int64_t piece, int thread) {
    (void)thread;
    const Pass *p = context;
    const Model *m = p->m;
    const Row *row = p->s->row + piece / p->parts / m->kv_heads;
    const int64_t head = piece / p->parts % m->kv_heads, begin = piece % p->parts * PART;
    if (begin >= row->num_tokens) return;
    const int64_t end = begin + PART < row->num_tokens ? begin + PART : row->num_tokens;
    // The queries were read: their place in `wide` takes the answers.
    attend_row(m, p->layer, p->s, row, head, begin, end, p->b->narrow, p->b->wide, joined(m));
}

static void narrow_part(const void *context, int64_t piece, int thread) {
    (void)thread;
    const Pass *p = context;
    const int64_t out = p->m->heads * p->m->head_dim;
    EACH_TOKEN(t, p, piece)
        for (int64_t i = 0; i < out; i += 16)
            store(p->b->narrow + t * out + i, _mm512_loadu_ps(p->b->wide + t * joined(p->m) + i));
}

static void share_tokens(Work *work, const Pass *p) { share(work, p, (p->s->tokens + PART - 1) / PART, p->threads); }

static void attention(const Pass *pass) {
    const Model *m = pass->m;
    const Buffers *b = pass->b;
    const int64_t tokens = pass->s->tokens, out = m->heads * m->head_dim;
    Pass p = *pass;
    p.norm = p.layer->attention_norm;
    share_tokens(norm_part, &p);
    linear(&(Linear){b->narrow, p.layer->qkv, b->wide, tokens, m->width, joined(m), joined(m), STORE}, b, p.threads);
    share_tokens(place_part, &p);
    if (p.s->copies) {
        p.copying = 1;
        share_tokens(place_part, &p);
    }
    share(attend_part, &p, p.s->rows * m->kv_heads * p.parts, p.threads);
    share_tokens(narrow_part, &p);
    linear(&(Linear){b->narrow, p.layer->output, b->x, tokens, out, m->width, m->width, ADD}, b, p.threads);
}

static void mlp(const Pass *pass) {
    const Model *m = pass->m;
    const Buffers *b = pass->b;
    const int64_t tokens = pass->s->tokens;
    Pass p = *pass;
    p.norm = p.layer->mlp_norm;
    share_tokens(norm_part, &p);
    linear(&(Linear){b->narrow, p.layer->gate_up, b->inner, tokens, m->width, m->inner, m->inner, GATE}, b, p.threads);
    linear(&(Linear){b->inner, p.layer->down, b->x, tokens, m->inner, m->width, m->width, ADD}, b, p.threads);
}

void outrider_forward(const Model *m, const Step *s, const Buffers *b) {
    int64_t most = 0;
    for (int64_t r = 0; r < s->rows; r++) most = s->row[r].num_tokens > most ? s->row[r].num_tokens : most;
    Pass pass = {.m = m, .s = s, .b = b, .parts = (most + PART - 1) / PART, .threads = begin(s->threads)};
    for (int64_t t = 0; t < s->tokens; t++)
        for (int64_t i = 0; i < m->width; i += 16)
            _mm512_storeu_ps(b->x + t * m->width + i, load(m->embedding + s->token_ids[t] * m->width + i));
    for (int64_t n = 0; n < m->layers; n++) {
        pass.layer = m->layer + n;
        attention(&pass);
        mlp(&pass);
    }
    for (int64_t i = 0; i < s->wanted; i++)
        rms_norm(b->x + s->logit_rows[i] * m->width, m->final_norm, m->width, (float)m->norm_eps, b->hidden + i * m->width);
    const int64_t padded = (m->vocab + PANEL - 1) / PANEL * PANEL;
    linear(&(Linear){b->hidden, m->head, b->logits, s->wanted, m->width, padded, padded, STORE}, b, pass.threads);
    end(pass.threads);
}
