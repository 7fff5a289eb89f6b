// Linear layers: a panel of outputs for a strip of rows at a time.
//
// A sum has one accumulator, and takes its inputs in their order: its bits are the same in every strip, and whether its
// weights were widened where they are used or before.

enum { STORE, ADD, GATE };  // what becomes of a product: written, added to what is there, activation(gate) * up

typedef struct {
    const act *in;  // [rows][inputs]
    Weights weights;
    void *out;  // float, or act for GATE
    int64_t rows, inputs, outputs, stride;  // outputs: those that are written; stride: of a row of out
    int kind;
    float times;  // before it is written or added
    int gelu;     // the activation: see Model
    // [rows][inputs] of numbers up to 127 either way, CODE_ZERO being 0, and what one of them is worth in each row
    const code *codes;
    const float *units;
    const Block *blocks;  // [rows][inputs / FOUR_INPUTS]
    // What is added to each row's outputs, or none: [rows][more_stride]. For GATE all of gate's, then all of up's.
    const float *more;
    int64_t more_stride;
} Linear;

// Weights in bfloat16; in int8; in int8 with inputs rounded too; in 4 bits with inputs rounded too; of a panel that was
// widened once for many rows.
enum { PAIRS, EIGHT, ROUNDED, FOUR, WIDENED };

static int64_t panels_of(const Linear *l) { return (l->outputs * (l->kind == GATE ? 2 : 1) + PANEL - 1) / PANEL; }

static int64_t panel_bytes(const Linear *l) {
    return PANEL * l->inputs * (l->weights.grids ? 1 : l->weights.scales ? 2 : 4) / 2;
}

INLINE vec gated(vec gate, vec up, int gelu) {
    // SiLU is g / (1 + e^-g). GELU by tanh is g / (1 + e^-x) for this cubic x: 1 + tanh(y) = 2 / (1 + e^-2y).
    const vec cubic = v_mul(gate, v_fma(v_mul(gate, gate), v_splat(0.0713548163f), v_splat(1.5957691216f)));
    const vec x = gelu ? cubic : gate;
    // Where e^-|x| is taken, so that it never overflows: g / (1 + e^-x) = g e^x / (1 + e^x) for negative x.
    const vec e = exponential(v_sub(v_zero(), v_abs(x)));
    return v_mul(v_div(v_negative(x, v_mul(gate, e), gate), v_add(v_splat(1.f), e)), up);
}

INLINE void finish_row(const Linear *l, const vec found[COLUMNS], int64_t panel, int64_t row) {
    const float *bias = l->weights.bias ? l->weights.bias + panel * PANEL : 0;
    vec sum[COLUMNS];
    for (int z = 0; z < COLUMNS; z++) sum[z] = bias ? v_add(found[z], v_load(bias + LANES * z)) : found[z];
    if (l->more) {
        // Gate's and up's lie apart.
        const int half = l->kind == GATE ? COLUMNS / 2 : COLUMNS;
        const float *more = l->more + row * l->more_stride + panel * half * LANES, *up = more + l->outputs - half * LANES;
        for (int z = 0; z < COLUMNS; z++) sum[z] = v_add(sum[z], v_load((z < half ? more : up) + LANES * z));
    }
    if (l->kind == GATE) {
        act *out = (act *)l->out + row * l->stride + panel * (PANEL / 2);
        for (int z = 0; z < COLUMNS / 2; z++) store_act(out + LANES * z, gated(sum[z], sum[z + COLUMNS / 2], l->gelu));
        return;
    }
    const vec times = v_splat(l->times);
    float *out = (float *)l->out + row * l->stride + panel * PANEL;
    for (int z = 0; z < COLUMNS && panel * PANEL + LANES * z < l->outputs; z++)
        v_store(out + LANES * z, v_fma(sum[z], times, l->kind == ADD ? v_load(out + LANES * z) : v_zero()));
}

INLINE void finish_strip(const Linear *l, vec sum[STRIP][COLUMNS], int64_t panel, int64_t first, int rows) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) finish_row(l, sum[r], panel, first + r);
}

// Asks memory for lines of the eight pages after the one that is read: while it is read, of the nearest the last eighth is
// asked for, of the farthest the first. For a core that asks for one page after the other waits for each; of several
// at once it gets half as much again. Into the second-level cache: the first has no room for so many.
// `now`: so many bytes are read next, and lie within a page.
INLINE void ask(const void *now, int64_t bytes) {
    const uintptr_t line = (uintptr_t)now % 4096 / LINE, page = (uintptr_t)now - (uintptr_t)now % 4096;
    const uintptr_t first = page + 4096 + 7 * 512 + line % 8 * (4096 - 512) + line / 8 * LINE;
    for (int64_t i = 0; i * LINE < bytes; i++) __builtin_prefetch((const void *)(first + i * (4096 - 512)), 0, 2);
}

// Where the inputs from k + part on lie in a panel, when so many of an output lie side by side: the one in question is
// the (part % group)th of them.
#define AT(k, part, column, group) (((k) + (part) / (group) * (group)) * PANEL + (column) * LANES * (group))

INLINE weights weights_at(const void *panel, int how, int64_t k, int part, int column) {
    if (how == PAIRS) return pairs((const bf16 *)panel + AT(k, part, column, 2), part % 2);
    if (how == EIGHT) return eights((const int8_t *)panel + AT(k, part, column, EIGHT_GROUP), part % EIGHT_GROUP);
    return wides((const wide *)panel + AT(k, part, column, WIDE_GROUP), part % WIDE_GROUP);
}

INLINE void linear_strip(const Linear *l, const void *values, int how, int64_t panel, int64_t first, int rows) {
    const act *in = l->in + first * l->inputs;
    vec sum[STRIP][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int z = 0; z < COLUMNS; z++) sum[r][z] = v_zero();
    for (int64_t k = 0; k < l->inputs; k += STEP) {
        if (how == PAIRS) ask((const bf16 *)values + k * PANEL, STEP * PANEL * 2);
        if (how == EIGHT) ask((const int8_t *)values + k * PANEL, STEP * PANEL);
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            weights w[COLUMNS];
            for (int z = 0; z < COLUMNS; z++) w[z] = weights_at(values, how, k, part, z);
            for (int r = 0; r < rows; r++) {
                const inputs x = spread(in + r * l->inputs + k + part);
                for (int z = 0; z < COLUMNS; z++) sum[r][z] = multiply(sum[r][z], x, w[z]);
            }
        }
    }
    if (l->weights.scales)
        for (int z = 0; z < COLUMNS; z++) {
            const vec scale = v_load(l->weights.scales + panel * PANEL + LANES * z);
            for (int r = 0; r < rows; r++) sum[r][z] = v_mul(sum[r][z], scale);
        }
    finish_strip(l, sum, panel, first, rows);
}

// In integers: exact in any order.
INLINE void rounded_strip(const Linear *l, const int8_t *values, int64_t panel, int64_t first, int rows) {
    const code *codes = l->codes + first * l->inputs;
    ivec found[STRIP][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int z = 0; z < COLUMNS; z++) found[r][z] = i_zero();
    for (int64_t k = 0; k < l->inputs; k += CODE_STEP) {
        ask(values + k * PANEL, CODE_STEP * PANEL);
#pragma GCC unroll 4
        for (int part = 0; part < CODE_PARTS; part++) {
            ivec w[COLUMNS];
            for (int z = 0; z < COLUMNS; z++)
                w[z] = code_weights(values + AT(k, part, z, CODE_GROUP), part % CODE_GROUP);
            for (int r = 0; r < rows; r++) {
                const ivec x = spread_codes(codes + r * l->inputs + k + part);
                for (int z = 0; z < COLUMNS; z++) found[r][z] = count(found[r][z], x, w[z]);
            }
        }
    }
    vec sum[STRIP][COLUMNS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
        const vec unit = v_splat(l->units[first + r]);
        for (int z = 0; z < COLUMNS; z++) {
            const int64_t at = panel * PANEL + LANES * z;
            // CODE_ZERO too many for each weight.
            const vec exact = v_from_integers(i_sub(found[r][z], i_times_code_zero(i_load(l->weights.sums + at))));
            sum[r][z] = v_mul(exact, v_mul(v_load(l->weights.scales + at), unit));
        }
    }
    finish_strip(l, sum, panel, first, rows);
}

#define FOUR_BYTES (FOUR_INPUTS * PANEL / 2)  // of a panel's block

// Scales and zeros of the nth block of a panel.
INLINE const half *grid_of(const Linear *l, int64_t panel, int64_t n) {
    const int64_t group = l->weights.group, k = n * FOUR_INPUTS;
    const half *grid = l->weights.grids + (panel * (l->inputs / group) + k / group) * 2 * PANEL;
    if (k % group == 0) ask(grid, 2 * PANEL * sizeof *grid);
    return grid;
}

// Four inputs of a block of a column, from k on.
INLINE ivec fours_at(const char *block, int k, int z) { return fours(block + AT(0, k, z, FOUR_GROUP) / 2, k % FOUR_GROUP / 4); }

// A block's sum in integers is exact, so that only the order of blocks decides about bits.
INLINE vec add_block(vec sum, ivec exact, const Block *x, vec scale, vec zero) {
    return v_fma(v_fma(zero, v_splat(x->less), v_from_integers(exact)), v_mul(scale, v_splat(x->unit)), sum);
}

INLINE void four_strip(const Linear *l, const char *values, int64_t panel, int64_t first, int rows) {
    const int64_t blocks = l->inputs / FOUR_INPUTS;
    const Block *in = l->blocks + first * blocks;
    vec sum[STRIP][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int z = 0; z < COLUMNS; z++) sum[r][z] = v_zero();
    for (int64_t n = 0; n < blocks; n++, in++, values += FOUR_BYTES) {
        const half *grid = grid_of(l, panel, n);
        for (int z = 0; z < COLUMNS; z++) {
            ask(values + z * FOUR_BYTES / COLUMNS, FOUR_BYTES / COLUMNS);
            ivec found[STRIP];
            for (int r = 0; r < rows; r++) found[r] = i_zero();
#pragma GCC unroll 8
            for (int k = 0; k < FOUR_INPUTS; k += 4) {
                const ivec w = fours_at(values, k, z);
                for (int r = 0; r < rows; r++) found[r] = count_fours(found[r], w, in[r * blocks].codes + k);
            }
            const vec scale = v_load_half(grid + LANES * z), zero = v_load_half(grid + PANEL + LANES * z);
            for (int r = 0; r < rows; r++) sum[r][z] = add_block(sum[r][z], counted(found[r]), in + r * blocks, scale, zero);
        }
    }
    finish_strip(l, sum, panel, first, rows);
}

// Each row by its own largest number: what a row is rounded to does not depend on the others.
static void round_row(const act *in, int64_t inputs, code *codes, float *unit) {
    vec largest = v_zero();
    for (int64_t i = 0; i < inputs; i += LANES) largest = v_max(largest, v_abs(load_act(in + i)));
    const float most = v_most(largest);
    const vec times = v_splat(most > 0 ? 127.f / most : 0.f);
    for (int64_t i = 0; i < inputs; i += LANES) store_codes(codes + i, v_mul(load_act(in + i), times));
    *unit = most / 127.f;
}

// By its own largest number. What is no number stays none.
static void round_block(const act *in, Block *to) {
    vec largest = v_zero(), total = v_zero(), none = v_zero();
    for (int i = 0; i < FOUR_INPUTS; i += LANES) {
        const vec x = load_act(in + i);
        largest = v_max(largest, v_abs(x));
        none = v_fma(x, v_zero(), none);
    }
    const float most = v_most(largest);
    const vec times = v_splat(most > 1e-30f ? 127.f / most : 0.f);
    for (int i = 0; i < FOUR_INPUTS; i += LANES) {
        const vec whole = v_round(v_mul(load_act(in + i), times));
        store_bytes(to->codes + i, whole);
        total = v_add(total, whole);
    }
    to->unit = most / 127.f + v_sum(none);
    to->less = -v_sum(total);
}

#ifdef __AMX_BF16__
#include "tiles.h"
#endif

static void linear_rows(const Linear *l, const void *values, int how, int64_t panel, int64_t first, int64_t end) {
#ifdef __AMX_BF16__
    if (how != ROUNDED && (how != FOUR || end - first > STRIP) && l->inputs % TILED_INPUTS == 0) {
        tiled_rows(l, values, how, panel, first, end);
        return;
    }
#endif
    for (; first < end; first += STRIP) {
#define AS_PAIRS(n) linear_strip(l, values, PAIRS, panel, first, n)
#define AS_EIGHT(n) linear_strip(l, values, EIGHT, panel, first, n)
#define AS_ROUNDED(n) rounded_strip(l, values, panel, first, n)
#define AS_FOUR(n) four_strip(l, values, panel, first, n)
#define AS_WIDENED(n) linear_strip(l, values, WIDENED, panel, first, n)
        if (how == ROUNDED)
            WITH_ROWS(end - first, AS_ROUNDED)
        else if (how == EIGHT)
            WITH_ROWS(end - first, AS_EIGHT)
        else if (how == FOUR)
            WITH_ROWS(end - first, AS_FOUR)
        else if (how == WIDENED)
            WITH_ROWS(end - first, AS_WIDENED)
        else
            WITH_ROWS(end - first, AS_PAIRS)
#undef AS_PAIRS
#undef AS_EIGHT
#undef AS_ROUNDED
#undef AS_FOUR
#undef AS_WIDENED
    }
}

INLINE void widen_panel(const Linear *l, const void *values, int how, wide *to) {
    for (int64_t k = 0; k < l->inputs; k += STEP) {
        if (how == PAIRS) ask((const bf16 *)values + k * PANEL, STEP * PANEL * 2);
        if (how == EIGHT) ask((const int8_t *)values + k * PANEL, STEP * PANEL);
        for (int part = 0; part < PARTS; part++)
            for (int z = 0; z < COLUMNS; z++)
                store_wide(to + AT(k, part, z, WIDE_GROUP), weights_at(values, how, k, part, z));
    }
}

typedef struct {
    const Linear *linear;
    wide *panels;  // for each thread
    code *codes;   // as in Linear, to be written
    float *units;
    Block *blocks;
} Product;

static void round_part(const void *context, int64_t piece, int thread) {
    (void)thread;
    const Product *p = context;
    const Linear *l = p->linear;
    for (int64_t r = piece * PART; r < l->rows && r < (piece + 1) * PART; r++)
        round_row(l->in + r * l->inputs, l->inputs, p->codes + r * l->inputs, p->units + r);
}

static void round_blocks_part(const void *context, int64_t piece, int thread) {
    (void)thread;
    const Product *p = context;
    const Linear *l = p->linear;
    const int64_t end = (piece + 1) * PART < l->rows ? (piece + 1) * PART : l->rows;
    for (int64_t i = piece * PART * l->inputs; i < end * l->inputs; i += FOUR_INPUTS)
        round_block(l->in + i, p->blocks + i / FOUR_INPUTS);
}

// A panel stays in the second-level cache while all rows of a chunk pass over it: whole strips, and whole pairs of tiles.
#define CHUNK (16 * STRIP)
#define GROUP (64 / PANEL)  // panels in a piece

static void linear_panel(const Product *p, int64_t panel, int64_t first, int64_t end, int thread) {
    const Linear *l = p->linear;
    const int how = l->weights.grids ? FOUR : l->weights.sums ? ROUNDED : l->weights.scales ? EIGHT : PAIRS;
    const char *values = (const char *)l->weights.values + panel * panel_bytes(l);
    // Once for all strips where multiplying takes the time. What is summed, and in which order, is the same.
    if (end - first <= 2 * STRIP || how == ROUNDED || how == FOUR || (how == PAIRS && PARTS == 1)) {
        linear_rows(l, values, how, panel, first, end);
        return;
    }
    wide *widened = p->panels + thread * PANEL * l->inputs;
    if (how == EIGHT)
        widen_panel(l, values, EIGHT, widened);
    else
        widen_panel(l, values, PAIRS, widened);
    linear_rows(l, widened, WIDENED, panel, first, end);
}

static void linear_piece(const void *context, int64_t piece, int thread) {
    const Product *p = context;
    const Linear *l = p->linear;
    const int64_t chunks = (l->rows + CHUNK - 1) / CHUNK, panels = panels_of(l);
    const int64_t first = piece % chunks * CHUNK, end = first + CHUNK < l->rows ? first + CHUNK : l->rows;
    for (int64_t panel = piece / chunks * GROUP; panel < panels && panel < (piece / chunks + 1) * GROUP; panel++)
        linear_panel(p, panel, first, end, thread);
}

static void linear(Linear *l, const Buffers *b, int threads) {
    const Product product = {l, b->panels, b->codes, b->units, b->blocks};
    const int64_t parts = (l->rows + PART - 1) / PART;
    if (l->weights.sums) {
        share(round_part, &product, parts, threads);
        l->codes = b->codes;
        l->units = b->units;
    }
    if (l->weights.grids) {
        share(round_blocks_part, &product, parts, threads);
        l->blocks = b->blocks;
    }
    const int64_t groups = (panels_of(l) + GROUP - 1) / GROUP, chunks = (l->rows + CHUNK - 1) / CHUNK;
    share(linear_piece, &product, groups * chunks, threads);
}
