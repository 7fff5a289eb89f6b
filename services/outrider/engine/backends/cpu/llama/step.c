// One step of a bfloat16 Llama, or of a relative (../../../families.py), on a CPU: ragged rows over a paged KV cache. Or a
// part of its layers, for heads, which join more to the states on the way.
// Compiled once for each kind of CPU ("variant").
//
// Written because a decode step is the reading of its weights: one loop over them, at the speed of memory, is half
// the time of a call per matrix. Every sum runs in one order, whatever shares the step: a row's logits are the
// same bits alone, in a batch, in a chunk, or among verified positions. Variants differ from one another in their bits.
//
// Activations between operations are float32. Keys and values are bfloat16, weights bfloat16, int8 or of 4 bits; where the
// CPU multiplies bfloat16, both sides of a product are rounded to it, elsewhere they are widened. Sums are float32. What is
// multiplied with 4 bits is rounded to 8, and blocks of these products are summed in integers.

#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;
typedef uint16_t half;  // float16

#if defined(__AVX512F__)
#include "vector_avx512.h"
#elif defined(__AVX2__)
#include "vector_avx2.h"
#else
#include "vector_portable.h"
#endif

#include "model.h"
#include "threads.h"
#include "linear.h"
#include "attention.h"

// ---- Norms and rotation

// What brings so many numbers to a mean square of 1.
static vec norm_factor(const float *x, int64_t width, float eps) {
    vec squares = v_zero();
    for (int64_t i = 0; i < width; i += LANES) squares = v_fma(v_load(x + i), v_load(x + i), squares);
    return v_splat(1.f / sqrtf(v_sum(squares) / (float)width + eps));
}

INLINE vec normed(const float *x, const float *weight, vec factor) {
    return v_mul(v_mul(v_load(x), factor), v_load(weight));
}

static void rms_norm(const float *x, const float *weight, int64_t width, float eps, act *out) {
    const vec factor = norm_factor(x, width, eps);
    for (int64_t i = 0; i < width; i += LANES) store_act(out + i, normed(x + i, weight + i, factor));
}

// Each `group` of a token's numbers by itself, in place.
static void norm_groups(float *x, const float *weight, int64_t width, int64_t group, float eps) {
    for (int64_t at = 0; at < width; at += group) {
        const vec factor = norm_factor(x + at, group, eps);
        for (int64_t i = at; i < at + group; i += LANES) v_store(x + i, normed(x + i, weight + i, factor));
    }
}

static void narrow(const float *x, int64_t count, act *out) {
    for (int64_t i = 0; i < count; i += LANES) store_act(out + i, v_load(x + i));
}

// Rotates the first 2 * half numbers of a head in place.
static void rotate(float *restrict head, const float *restrict cos, const float *restrict sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

// One token: queries to `query` [heads * head_dim], its key and value to their slot in the cache.
static void place(const Model *m, const Layer *layer, float *qkv, int64_t position, int64_t slot, act *query) {
    const int64_t dim = m->head_dim, half = m->rotary / 2, tile = slot / TILE, lane = slot % TILE;
    const int64_t queries = m->heads * dim;
    const float *norm = layer->query_key_norm;
    if (norm) {
        norm_groups(qkv, norm, queries, m->query_normed, (float)m->norm_eps);
        norm_groups(qkv + queries, norm + queries, m->kv_heads * dim, m->key_normed, (float)m->norm_eps);
    }
    for (int64_t h = 0; layer->cos && h < m->heads + m->kv_heads; h++)
        rotate(qkv + h * dim, layer->cos + position * half, layer->sin + position * half, half);
    narrow(qkv, queries, query);
    for (int64_t h = 0; h < m->kv_heads; h++) {
        const float *key = qkv + (m->heads + h) * dim, *value = key + m->kv_heads * dim;
        bf16 *keys = layer->keys + (h * m->tiles + tile) * TILE * dim + 2 * lane;
        bf16 *values = layer->values + (h * m->tiles + tile) * TILE * dim + lane / 2 * 2 * dim + lane % 2;
        bf16 slim[MAX_HEAD_DIM];
        for (int64_t i = 0; i < dim; i += LANES) v_store_bf16(slim + i, v_load(key + i));
        for (int64_t i = 0; i < dim; i += 2) memcpy(keys + i * TILE, slim + i, 2 * sizeof *slim);
        for (int64_t i = 0; i < dim; i += LANES) v_store_bf16(slim + i, v_load(value + i));
        for (int64_t i = 0; i < dim; i++) values[2 * i] = slim[i];
    }
}

// ---- The step

// Whether the system lets this process run what was compiled; whether the CPU can is asked before: see ../build.py.
int outrider_granted(void) {
#ifdef __AMX_BF16__
    return tiles_granted();
#else
    return 1;
#endif
}

Layout outrider_layout(void) {
    return (Layout){PANEL, EIGHT_GROUP, CODE_GROUP, sizeof(act), sizeof(wide), sizeof(code), sizeof(Block)};
}

typedef struct {
    const Model *m;
    const Layer *layer;
    const Step *s;
    const Buffers *b;
    const float *norm;  // or none
    int64_t parts;  // of the row with most tokens
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
    EACH_TOKEN(t, p, piece) {
        const float *x = p->b->x + t * m->width;
        act *out = p->b->narrow + t * m->width;
        if (p->norm)
            rms_norm(x, p->norm, m->width, (float)m->norm_eps, out);
        else
            narrow(x, m->width, out);
    }
}

// What was produced in `wide` is normed, and added to the states.
static void add_normed_part(const void *context, int64_t piece, int thread) {
    (void)thread;
    const Pass *p = context;
    const Model *m = p->m;
    EACH_TOKEN(t, p, piece) {
        float *x = p->b->x + t * m->width, *more = p->b->wide + t * m->width;
        norm_groups(more, p->norm, m->width, m->width, (float)m->norm_eps);
        for (int64_t i = 0; i < m->width; i += LANES) v_store(x + i, v_add(v_load(x + i), v_load(more + i)));
    }
}

static void place_part(const void *context, int64_t piece, int thread) {
    (void)thread;
    const Pass *p = context;
    const Model *m = p->m;
    const Step *s = p->s;
    EACH_TOKEN(t, p, piece) {
        act *query = p->b->narrow + t * m->heads * m->head_dim;
        place(m, p->layer, p->b->wide + t * joined(m), s->positions[t], s->slots[t], query);
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
    EACH_TOKEN(t, p, piece) narrow(p->b->wide + t * joined(p->m), out, p->b->narrow + t * out);
}

typedef struct {
    const Linear *linear;
    const Step *s;
    const Low *low;  // of the first adapter
    int64_t each;    // from one adapter to the next
    float *more;
} Adapting;

static void add_low(const Low *low, const act *x, int64_t inputs, float *more) {
    float between[MAX_RANK];
    for (int64_t j = 0; j < low->rank; j += 4) {
        vec sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
        for (int64_t i = 0; i < inputs; i += LANES) {
            const vec in = load_act(x + i);
            for (int n = 0; n < 4; n++) sum[n] = v_fma(in, v_load_bf16(low->a + (j + n) * inputs + i), sum[n]);
        }
        for (int n = 0; n < 4; n++) between[j + n] = v_sum(sum[n]);
    }
    for (int64_t o = 0; o < low->outputs; o += LANES) {
        const bf16 *b = low->b + o / LOW_OUTPUTS * LOW_OUTPUTS * low->rank + o % LOW_OUTPUTS;
        vec sum = v_zero();
        for (int64_t j = 0; j < low->rank; j++)
            sum = v_fma(v_splat(between[j]), v_load_bf16(b + j * LOW_OUTPUTS), sum);
        v_store(more + low->first + o, sum);
    }
}

// One token.
static void adapt_part(const void *context, int64_t t, int thread) {
    (void)thread;
    const Adapting *p = context;
    const Linear *l = p->linear;
    float *more = p->more + t * l->more_stride;
    memset(more, 0, (size_t)l->more_stride * sizeof *more);
    if (p->s->adapter[t] < 0) return;
    for (int n = 0; n < LOWS / MATRICES; n++)
        add_low(p->low + p->s->adapter[t] * p->each + n, l->in + t * l->inputs, l->inputs, more);
}

// A product of a layer, and what the tokens' adapters add to it.
static void adapted(const Pass *p, Linear *l, int matrix) {
    if (p->s->adapter) {
        const int64_t at = (p->layer - p->m->layer) * LOWS + matrix * (LOWS / MATRICES);
        const Adapting work = {l, p->s, p->s->low + at, p->m->layers * LOWS, p->b->more};
        l->more = p->b->more;
        l->more_stride = panels_of(l) * PANEL;
        share(adapt_part, &work, l->rows, p->threads);
    }
    linear(l, p->b, p->threads);
}

static void share_tokens(Work *work, const Pass *p) { share(work, p, (p->s->tokens + PART - 1) / PART, p->threads); }

// Adds a product, or its norm if there is one, to the states.
static void add_product(Pass *p, int matrix, Weights weights, const act *in, int64_t inputs, const float *norm) {
    const int64_t width = p->m->width;
    float *out = norm ? p->b->wide : p->b->x;
    const float times = (float)p->m->residual_scale;
    adapted(p, &(Linear){in, weights, out, p->s->tokens, inputs, width, width, norm ? STORE : ADD, times}, matrix);
    p->norm = norm;
    if (norm) share_tokens(add_normed_part, p);
}

static void attention(const Pass *pass) {
    const Model *m = pass->m;
    const Buffers *b = pass->b;
    const int64_t tokens = pass->s->tokens;
    Pass p = *pass;
    const act *in = p.layer == m->layer ? p.s->attended : 0;
    const int64_t inputs = in ? p.s->attended_width : m->width;
    p.norm = p.layer->attention_norm;
    if (!in) share_tokens(norm_part, &p);
    Linear qkv = {in ? in : b->narrow, p.layer->qkv, b->wide, tokens, inputs, joined(m), joined(m), STORE, 1};
    adapted(&p, &qkv, QKV);
    share_tokens(place_part, &p);
    share(attend_part, &p, p.s->rows * m->kv_heads * p.parts, p.threads);
    share_tokens(narrow_part, &p);
    add_product(&p, OUTPUT, p.layer->output, b->narrow, m->heads * m->head_dim, p.layer->attention_post_norm);
}

static void mlp(const Pass *pass) {
    const Model *m = pass->m;
    const Buffers *b = pass->b;
    Pass p = *pass;
    p.norm = p.layer->mlp_norm;
    share_tokens(norm_part, &p);
    Linear gate_up = {b->narrow, p.layer->gate_up, b->inner, p.s->tokens, m->width, m->inner, m->inner, GATE};
    gate_up.gelu = (int)m->gelu;
    adapted(&p, &gate_up, GATE_UP);
    add_product(&p, DOWN, p.layer->down, b->inner, m->inner, p.layer->mlp_post_norm);
}

// Keys and values of some slots, from and to, in a cache of so many heads in all layers.
void outrider_move(bf16 *keys, bf16 *values, const int64_t *moves, int64_t count, int64_t heads, int64_t tiles, int64_t dim) {
    for (int64_t h = 0; h < heads; h++) {
        const int64_t head = h * tiles * TILE * dim;
        const Layer of = {.keys = keys + head, .values = values + head};
        for (int64_t n = 0; n < count; n++) {
            const int64_t from = moves[2 * n], to = moves[2 * n + 1], tile = to / TILE * TILE * dim;
            copy_slot(&of, dim, from, to % TILE, of.keys + tile, of.values + tile);
        }
    }
}

// The states that enter layer `number`; of no layer, -1, those that the vocabulary's head reads.
static void take_states(const Model *m, const Step *s, const Buffers *b, int64_t number) {
    for (int64_t i = 0; i < s->taps; i++)
        for (int64_t r = 0; s->tap[i] == number && r < s->tapped; r++) {
            const float *x = b->x + s->tapped_rows[r] * m->width;
            act *out = s->states + (i * s->tapped + r) * m->width;
            if (number < 0)
                rms_norm(x, m->final_norm, m->width, (float)m->norm_eps, out);
            else
                narrow(x, m->width, out);
        }
}

// What enters the first layer.
static void enter(const Model *m, const Step *s, const Buffers *b) {
    const vec scale = v_splat((float)m->embedding_scale);
    if (s->entering) {
        memcpy(b->x, s->entering, (size_t)(s->tokens * m->width) * sizeof *b->x);
        return;
    }
    for (int64_t t = 0; t < s->tokens; t++)
        for (int64_t i = 0; i < m->width; i += LANES)
            v_store(b->x + t * m->width + i, v_mul(scale, v_load_bf16(m->embedding + s->token_ids[t] * m->width + i)));
}

static void join_part(const void *context, int64_t piece, int thread) {
    (void)thread;
    const Pass *p = context;
    const Model *m = p->m;
    EACH_TOKEN(t, p, piece) {
        const float *x = p->b->x + t * m->width;
        act *out = p->b->narrow + t * 2 * m->width;
        if (m->state_norm)
            rms_norm(x, m->state_norm, m->width, (float)m->norm_eps, out);
        else
            narrow(x, m->width, out);
        rms_norm(p->s->features + t * m->width, m->feature_norm, m->width, (float)m->norm_eps, out + m->width);
    }
}

static void join(const Pass *p) {
    const Model *m = p->m;
    share_tokens(join_part, p);
    linear(&(Linear){p->b->narrow, m->join, p->b->x, p->s->tokens, 2 * m->width, m->width, m->width, STORE, 1}, p->b, p->threads);
}

typedef struct {
    const Projection *p;
    act *narrow;  // [tokens][states][width]
} Projecting;

static void norm_states_part(const void *context, int64_t piece, int thread) {
    (void)thread;
    const Projecting *work = context;
    const Projection *p = work->p;
    const int64_t end = (piece + 1) * PART < p->tokens ? (piece + 1) * PART : p->tokens;
    for (int64_t n = piece * PART * p->states; n < end * p->states; n++) {
        const float *x = p->in + n * p->width;
        act *out = work->narrow + n * p->width;
        if (p->norms)
            rms_norm(x, p->norms + n % p->states * p->width, p->width, (float)p->norm_eps, out);
        else
            narrow(x, p->width, out);
    }
}

void outrider_project(const Projection *p, const Buffers *b) {
    const int threads = begin(p->threads);
    const Projecting work = {p, b->narrow};
    share(norm_states_part, &work, (p->tokens + PART - 1) / PART, threads);
    const int64_t inputs = p->states * p->width;
    linear(&(Linear){b->narrow, p->weights, p->out, p->tokens, inputs, p->outputs, p->outputs, STORE, 1}, b, threads);
    end(threads);
}

void outrider_forward(const Model *m, const Step *s, const Buffers *b) {
    int64_t most = 0;
    for (int64_t r = 0; r < s->rows; r++) most = s->row[r].num_tokens > most ? s->row[r].num_tokens : most;
    Pass pass = {.m = m, .s = s, .b = b, .parts = (most + PART - 1) / PART, .threads = begin(s->threads)};
    enter(m, s, b);
    for (int64_t n = 0; n < m->layers; n++) {
        if (s->features && n == m->joined) join(&pass);
        take_states(m, s, b, n);
        pass.layer = m->layer + n;
        attention(&pass);
        mlp(&pass);
    }
    take_states(m, s, b, m->layers);
    take_states(m, s, b, -1);
    for (int64_t i = 0; i < s->wanted; i++)
        rms_norm(b->x + s->logit_rows[i] * m->width, m->final_norm, m->width, (float)m->norm_eps, b->hidden + i * m->width);
    const int64_t padded = (m->vocab + PANEL - 1) / PANEL * PANEL;
    const float times = (float)m->logit_scale;
    linear(&(Linear){b->hidden, m->head, b->logits, s->wanted, m->width, padded, padded, STORE, times}, b, pass.threads);
    end(pass.threads);
}
