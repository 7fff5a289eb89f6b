// The kernels of one variant against plain loops in double precision, and against themselves: a row's bits must not depend
// on the rows beside it. Also run where Python is not, as for ARM under qemu. Prints what is wrong; exits with 1 then.
//
// Compiled with the sources' directory in the include path.

#include "step.c"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_ROWS = 40, INPUTS = 96, OUTPUTS = 160, TOKENS = 150, HEADS = 6, KV_HEADS = 2 };

static int failures;

#define CHECK(good, ...) \
    do { \
        if (!(good)) { \
            failures++; \
            printf(__VA_ARGS__); \
            printf("\n"); \
        } \
    } while (0)

// From -1 to 1, the same in every run.
static float drawn(void) {
    static uint32_t state = 1;
    state = state * 1664525 + 1013904223;
    return (float)(int32_t)state / 2147483648.f;
}

static float from_bf16(bf16 v) {
    const uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static bf16 to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Of numbers that are not too small.
static float from_half(half v) { return ldexpf((float)(0x400 + (v & 0x3ff)), (v >> 10 & 31) - 25) * (v >> 15 ? -1.f : 1.f); }

static float value_of(act v) {
#if PARTS == 1
    return from_bf16(v);
#else
    return v;
#endif
}

static void set(act *to, float v) {
#if PARTS == 1
    *to = to_bf16(v);
#else
    *to = v;
#endif
}

static void *room(size_t size) {
    void *found = aligned_alloc(4096, (size + 8191) / 4096 * 4096);
    memset(found, 0, (size + 8191) / 4096 * 4096);
    return found;
}

static double silu(double x) { return x / (1 + exp(-x)); }

// ---- Linear layers

typedef struct {
    Weights packed;
    double plain[2 * OUTPUTS][INPUTS];  // as the kernels should see them, without scales
    double scale[2 * OUTPUTS];
} Matrix;

// Weights of 4 bits in groups of 32 or of 96 inputs, in the order that model.h says.
static void fill_fours(Matrix *m, int count, int group) {
    const int filled = (count + PANEL - 1) / PANEL * PANEL;
    uint8_t *bytes = room((size_t)filled * INPUTS / 2);
    half *grids = room((size_t)filled * (INPUTS / group) * 2 * sizeof *grids);
    for (int o = 0; o < count; o++)
        for (int k = 0; k < INPUTS; k++) {
            const int panel = o / PANEL, q = (int)(8 + 8 * drawn()) & 15;
            half *grid = grids + (size_t)(panel * (INPUTS / group) + k / group) * 2 * PANEL + o % PANEL;
            if (k % group == 0) {
                grid[0] = (half)(0x2400 + 0x100 * (int)(4 * drawn()));
                grid[PANEL] = (half)(0x4600 + 0x80 * (int)(4 * drawn()));
            }
            m->plain[o][k] = (q - from_half(grid[PANEL])) * from_half(grid[0]);
            m->scale[o] = 1;
            bytes[((panel * (INPUTS / 8) + k / 8) * PANEL + o % PANEL) * 4 + k % 4] |= (uint8_t)(q << k % 8 / 4 * 4);
        }
    m->packed = (Weights){.values = bytes, .grids = grids, .group = group};
}

// Outputs `count`, packed for a product of that kind; `how` as in linear.h.
static void fill(Matrix *m, int count, int how) {
    const int group = how == PAIRS ? 2 : how == EIGHT ? EIGHT_GROUP : CODE_GROUP, filled = (count + PANEL - 1) / PANEL * PANEL;
    bf16 *pairs_room = room((size_t)filled * INPUTS * 2);
    int8_t *eights_room = (int8_t *)pairs_room;
    float *scales = room(filled * sizeof *scales);
    int32_t *sums = room(filled * sizeof *sums);
    for (int o = 0; o < count; o++) {
        scales[o] = 0.01f + 0.005f * drawn();
        m->scale[o] = how == PAIRS ? 1 : scales[o];
        for (int k = 0; k < INPUTS; k++) {
            const int64_t at = (((int64_t)(o / PANEL) * (INPUTS / group) + k / group) * PANEL + o % PANEL) * group + k % group;
            if (how == PAIRS) {
                pairs_room[at] = to_bf16(drawn());
                m->plain[o][k] = from_bf16(pairs_room[at]);
            } else {
                eights_room[at] = (int8_t)(127 * drawn());
                m->plain[o][k] = eights_room[at];
                sums[o] += eights_room[at];
            }
        }
    }
    m->packed = (Weights){pairs_room, how == PAIRS ? 0 : scales, how == ROUNDED ? sums : 0};
}

static void run_linear(const Matrix *m, const act *in, int rows, void *out, int kind) {
    Buffers b = {.panels = room((size_t)PANEL * INPUTS * sizeof(wide)),
                 .codes = room((size_t)MAX_ROWS * 4 * INPUTS * sizeof(code)),
                 .units = room(MAX_ROWS * 4 * sizeof(float)),
                 .blocks = room(MAX_ROWS * INPUTS / FOUR_INPUTS * sizeof(Block))};
    Linear l = {.in = in, .weights = m->packed, .out = out, .rows = rows, .inputs = INPUTS, .outputs = OUTPUTS,
                .stride = OUTPUTS, .kind = kind, .times = 1};
    linear(&l, &b, 1);
    free(b.panels);
    free(b.codes);
    free(b.units);
    free(b.blocks);
}

// Where gate's and up's outputs stand among the packed ones.
static int gate_at(int o) { return o / (PANEL / 2) * PANEL + o % (PANEL / 2); }

static double sum_of(const Matrix *m, const act *in, int o) {
    const int rounded = m->packed.sums || m->packed.grids, together = m->packed.grids ? FOUR_INPUTS : INPUTS;
    double sum = 0;
    for (int k = 0; k < INPUTS; k++) {
        float most = 0;
        for (int i = 0; i < together; i++) most = fmaxf(most, fabsf(value_of(in[k / together * together + i])));
        const float x = value_of(in[k]);
        sum += (rounded ? rintf(x * (127.f / most)) * (double)most / 127 : x) * m->plain[o][k];
    }
    return sum * m->scale[o];
}

static void check_linear(int how, int group, int kind, const char *name) {
    static Matrix m;
    act *in = room(MAX_ROWS * INPUTS * sizeof *in);
    const size_t each = kind == GATE ? sizeof(act) : sizeof(float), size = OUTPUTS * each;
    char *alone = room(MAX_ROWS * size), *among = room(MAX_ROWS * size);
    if (how == FOUR)
        fill_fours(&m, kind == GATE ? 2 * OUTPUTS : OUTPUTS, group);
    else
        fill(&m, kind == GATE ? 2 * OUTPUTS : OUTPUTS, how);
    for (int i = 0; i < MAX_ROWS * INPUTS; i++) set(in + i, drawn());
    for (int r = 0; r < MAX_ROWS; r++) run_linear(&m, in + r * INPUTS, 1, alone + r * size, kind);
    for (int rows = 1; rows <= MAX_ROWS; rows++) {
        memset(among, 0, MAX_ROWS * size);
        run_linear(&m, in, rows, among, kind);
        CHECK(memcmp(alone, among, rows * size) == 0, "%s: %d rows together are not the bits of each alone", name, rows);
    }
    // Sums are float32; what is gated is rounded to bfloat16 where that is multiplied.
    const double most = kind == GATE && sizeof(act) == 2 ? 0.01 : 1e-4;
    for (int r = 0; r < MAX_ROWS; r++)
        for (int o = 0; o < OUTPUTS; o++) {
            const act *x = in + r * INPUTS;
            const double want = kind == GATE ? silu(sum_of(&m, x, gate_at(o))) * sum_of(&m, x, gate_at(o) + PANEL / 2)
                                             : sum_of(&m, x, o);
            const double got = kind == GATE ? value_of(((act *)alone)[r * OUTPUTS + o]) : ((float *)alone)[r * OUTPUTS + o];
            CHECK(fabs(got - want) <= most * (1 + fabs(want)), "%s: row %d output %d is %g, not %g", name, r, o, got, want);
        }
    run_linear(&m, in, MAX_ROWS, among, kind);
    if (kind == STORE) {
        run_linear(&m, in, MAX_ROWS, among, ADD);
        for (int i = 0; i < MAX_ROWS * OUTPUTS; i++)
            CHECK(((float *)among)[i] == 2 * ((float *)alone)[i], "%s: nothing was added to %d", name, i);
    }
    // Inputs that are rounded for a draft may lose it.
    set(in + 7, NAN);
    run_linear(&m, in, 1, alone, kind);
    if (kind == STORE && how != ROUNDED) CHECK(isnan(((float *)alone)[5]), "%s: what is no number became one", name);
}

// ---- Attention

typedef struct {
    Model model;
    Layer layer;
    int32_t *tiles;
    act *query;
    int dim;
} Cache;

static float *key_of(const Cache *c, float *to, int head, int position, int values) {
    const bf16 *base = values ? c->layer.values : c->layer.keys;
    const bf16 *tile = base + (head * c->model.tiles + c->tiles[position / TILE]) * TILE * c->dim;
    const int lane = position % TILE;
    for (int i = 0; i < c->dim; i++)
        to[i] = from_bf16(values ? tile[lane / 2 * 2 * c->dim + 2 * i + lane % 2] : tile[i / 2 * 2 * TILE + 2 * lane + i % 2]);
    return to;
}

static Cache make_cache(int dim) {
    const int tiles = TOKENS / TILE + 3;
    Cache c = {.dim = dim, .tiles = room(tiles * sizeof(int32_t)), .query = room((size_t)TOKENS * HEADS * dim * sizeof(act))};
    c.model = (Model){.heads = HEADS, .kv_heads = KV_HEADS, .head_dim = dim, .tiles = tiles, .scale = 1 / sqrt(dim)};
    bf16 *keys = room((size_t)KV_HEADS * tiles * TILE * dim * 2), *values = room((size_t)KV_HEADS * tiles * TILE * dim * 2);
    for (int64_t i = 0; i < (int64_t)KV_HEADS * tiles * TILE * dim; i++) {
        keys[i] = to_bf16(2 * drawn());
        values[i] = to_bf16(drawn());
    }
    c.layer = (Layer){.keys = keys, .values = values};
    // Not in order, and not from 0 on.
    for (int t = 0; t < tiles; t++) c.tiles[t] = (t * 5 + 1) % tiles;
    for (int i = 0; i < TOKENS * HEADS * dim; i++) set(c.query + i, 2 * drawn());
    return c;
}

static void run_attention(const Cache *c, int begin, int count, float *out) {
    const int64_t stride = HEADS * c->dim;
    const Row row = {.num_tokens = count, .kv_len = begin + count, .fork = begin + count};
    const Step step = {.row = &row, .rows = 1, .tokens = count, .tiles = c->tiles};
    for (int head = 0; head < KV_HEADS; head++)
        attend_row(&c->model, &c->layer, &step, &row, head, 0, count, c->query + begin * stride, out + begin * stride, stride);
}

static double attended(const Cache *c, int token, int head, double *out) {
    float found[MAX_HEAD_DIM];
    double weight[TOKENS], most = -INFINITY, total = 0;
    for (int p = 0; p <= token; p++) {
        key_of(c, found, head / (HEADS / KV_HEADS), p, 0);
        weight[p] = 0;
        for (int i = 0; i < c->dim; i++) weight[p] += found[i] * value_of(c->query[(token * HEADS + head) * c->dim + i]);
        weight[p] *= c->model.scale;
        most = weight[p] > most ? weight[p] : most;
    }
    for (int i = 0; i < c->dim; i++) out[i] = 0;
    for (int p = 0; p <= token; p++) {
        total += weight[p] = exp(weight[p] - most);
        key_of(c, found, head / (HEADS / KV_HEADS), p, 1);
        for (int i = 0; i < c->dim; i++) out[i] += weight[p] * found[i];
    }
    for (int i = 0; i < c->dim; i++) out[i] /= total;
    return total;
}

static void poison(const Cache *c, int position) {
    const int64_t lane = position % TILE;
    for (int head = 0; head < KV_HEADS; head++)
        for (int i = 0; i < c->dim; i++) {
            const int64_t tile = (head * c->model.tiles + c->tiles[position / TILE]) * TILE * c->dim;
            c->layer.keys[tile + i / 2 * 2 * TILE + 2 * lane + i % 2] = 0x7fc0;
            c->layer.values[tile + lane / 2 * 2 * c->dim + 2 * i + lane % 2] = 0x7fc0;
        }
}

static void check_attention(int dim) {
    const Cache c = make_cache(dim);
    const size_t size = (size_t)TOKENS * HEADS * dim * sizeof(float);
    float *alone = room(size), *among = room(size);
    double want[MAX_HEAD_DIM];
    for (int t = 0; t < TOKENS; t++) run_attention(&c, t, 1, alone);
    for (int t = 0; t < TOKENS; t += 7)
        for (int head = 0; head < HEADS; head++) {
            attended(&c, t, head, want);
            for (int i = 0; i < dim; i++) {
                const float got = alone[(t * HEADS + head) * dim + i];
                CHECK(fabs(got - want[i]) <= (sizeof(act) == 2 ? 0.01 : 1e-4), "attention of %d: token %d head %d [%d] is %g, not %g",
                      dim, t, head, i, got, want[i]);
            }
        }
    for (int rows = 2; rows <= 17; rows += 5) {
        memset(among, 0, size);
        for (int t = 0; t < TOKENS; t += rows) run_attention(&c, t, t + rows <= TOKENS ? rows : TOKENS - t, among);
        CHECK(memcmp(alone, among, size) == 0, "attention of %d: chunks of %d are not the bits of one", dim, rows);
    }
    // Each token is asked while all that it does not see is no number: alone, and before four that are none themselves.
    for (int t = TOKENS - 1; t >= 0; t--) {
        const size_t at = (size_t)t * HEADS * dim;
        for (int rows = 1; rows <= 5 && t + rows <= TOKENS; rows += 4) {
            memset(among, 0, size);
            run_attention(&c, t, rows, among);
            CHECK(memcmp(alone + at, among + at, HEADS * dim * sizeof(float)) == 0,
                  "attention of %d: token %d of %d sees what follows", dim, t, rows);
        }
        poison(&c, t);
    }
}

static int64_t place_of(const Cache *c, int head, int64_t slot, int i, int values) {
    const int64_t tile = (head * c->model.tiles + slot / TILE) * TILE * c->dim, lane = slot % TILE;
    return tile + (values ? lane / 2 * 2 * c->dim + 2 * i + lane % 2 : i / 2 * 2 * TILE + 2 * lane + i % 2);
}

static int32_t slot_of(const Cache *c, int position) { return c->tiles[position / TILE] * TILE + position % TILE; }

static void copy_to(const Cache *c, int position, int64_t slot) {
    for (int head = 0; head < KV_HEADS; head++)
        for (int i = 0; i < c->dim; i++)
            for (int values = 0; values < 2; values++) {
                bf16 *cached = values ? c->layer.values : c->layer.keys;
                cached[place_of(c, head, slot, i, values)] = cached[place_of(c, head, slot_of(c, position), i, values)];
            }
}

// Two tokens, and a branch of three after the first of them, whose keys lie in other slots: where a chain's would lie is no
// number.
static void check_branches(int dim) {
    enum { TRUNK = 2, BRANCH = 3, ALL = TRUNK + BRANCH };
    const Cache c = make_cache(dim);
    const size_t each = (size_t)HEADS * dim;
    float *alone = room(TOKENS * each * sizeof(float)), *got = room(ALL * each * sizeof(float));
    act *query = room(ALL * each * sizeof(act));
    for (int t = 0; t < TOKENS; t++) run_attention(&c, t, 1, alone);
    for (int t = TOKENS - BRANCH - 1; t >= 0; t -= 5) {
        const int of[ALL] = {t, t + 1, t + 1, t + 2, t + 3};
        // The slots of the last tile, in turn: no position lies there.
        int32_t path[BRANCH];
        for (int n = 0; n < BRANCH; n++) {
            path[n] = c.tiles[TOKENS / TILE + 2] * TILE + (t + 7 * n) % TILE;
            copy_to(&c, t + 1 + n, path[n]);
        }
        poison(&c, t + 2);
        poison(&c, t + 3);
        const Row row[] = {{0, TRUNK, t + TRUNK, 0, t + TRUNK, 0, BRANCH},
                           {TRUNK, BRANCH, t + 1 + BRANCH, 0, t + 1, 0, -1}};
        const Step step = {.row = row, .rows = 2, .tokens = ALL, .tiles = c.tiles, .path = path};
        for (int n = 0; n < ALL; n++) memcpy(query + n * each, c.query + of[n] * each, each * sizeof *query);
        for (int r = 0; r < 2; r++)
            for (int head = 0; head < KV_HEADS; head++)
                attend_row(&c.model, &c.layer, &step, row + r, head, 0, row[r].num_tokens, query, got, each);
        for (int n = 0; n < ALL; n++)
            CHECK(memcmp(got + n * each, alone + of[n] * each, each * sizeof(float)) == 0,
                  "attention of %d: token %d of a tree at %d is not the bits of a chain", dim, n, t);
    }
}

// ---- Rounding

static void check_numbers(void) {
    float from[LANES], to[LANES];
    bf16 slim[LANES];
    for (int n = 0; n < 20000; n++) {
        for (int i = 0; i < LANES; i++) from[i] = drawn() * powf(2, (float)(n % 60 - 30));
        v_store_bf16(slim, v_load(from));
        for (int i = 0; i < LANES; i++)
            CHECK(slim[i] == to_bf16(from[i]), "%a becomes %x in bfloat16, not %x", from[i], slim[i], to_bf16(from[i]));
        for (int i = 0; i < LANES; i++) from[i] = -fabsf(drawn()) * (float)(n % 80);
        v_store(to, exponential(v_load(from)));
        for (int i = 0; i < LANES; i++)
            CHECK(fabs(to[i] / exp(from[i]) - 1) <= 3e-7 - 1e-7 * from[i], "e^%g is %g, not %g", from[i], to[i], exp(from[i]));
    }
    for (int i = 0; i < LANES; i++) from[i] = NAN;
    v_store_bf16(slim, v_load(from));
    CHECK((slim[0] & 0x7fff) > 0x7f80, "NaN becomes %x in bfloat16", slim[0]);
}

int main(void) {
    if (!outrider_granted()) {
        printf("not granted\n");
        return 2;
    }
    check_numbers();
    check_linear(PAIRS, 0, STORE, "bfloat16");
    check_linear(PAIRS, 0, GATE, "gated bfloat16");
    check_linear(EIGHT, 0, STORE, "int8");
    check_linear(EIGHT, 0, GATE, "gated int8");
    check_linear(ROUNDED, 0, STORE, "int8 of rounded inputs");
    check_linear(ROUNDED, 0, GATE, "gated int8 of rounded inputs");
    check_linear(FOUR, 32, STORE, "4 bits");
    check_linear(FOUR, 96, GATE, "gated 4 bits");
    check_attention(64);
    check_attention(80);
    check_branches(64);
    check_branches(80);
    if (failures) printf("%d failures\n", failures);
    return failures > 0;
}
