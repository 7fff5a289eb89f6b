// Attention: queries that share a key head look at a SPAN of positions together, with a running maximum.
//
// What a query may not see is never part of a product, not even by a weight of 0: it may be what an earlier
// sequence left, or a token that is only guessed, and 0 x NaN is NaN.

#define MAX_QUERIES 16

// Token t's g-th head of the group is number t * share + g. Positions do not fall.
typedef struct {
    const act *query[MAX_QUERIES];
    float *out[MAX_QUERIES];
    int64_t position[MAX_QUERIES];
    int64_t window;  // as the layer's
    vec sum[MAX_QUERIES][MAX_HEAD_DIM / LANES];
    float highest[MAX_QUERIES], total[MAX_QUERIES];
    _Alignas(LINE) float score[MAX_QUERIES][SPAN];
    _Alignas(LINE) act weight[MAX_QUERIES][SPAN];
} Queries;

// How many positions of the SPAN at `from` a query sees.
static inline int64_t visible(const Queries *q, int r, int64_t from) {
    const int64_t count = q->position[r] + 1 - from;
    return count < 0 ? 0 : count > SPAN ? SPAN : count;
}

// The first position that a query sees.
static inline int64_t first_seen(const Queries *q, int r) {
    const int64_t first = q->position[r] + 1 - q->window;
    return q->window && first > 0 ? first : 0;
}

// Scores of SPAN positions → weights, and what was summed before brought to the same scale.
INLINE void weigh(Queries *q, int r, int64_t from, float scale, int64_t dim) {
    const int64_t seen = visible(q, r, from), passed = first_seen(q, r) - from;
    float *score = q->score[r];
    vec high = v_splat(q->highest[r]);
    for (int at = 0; at < SPAN; at += LANES) {
        vec scaled = v_first(seen - at, v_mul(v_load(score + at), v_splat(scale)), v_splat(-INFINITY));
        if (passed > at) scaled = v_first(passed - at, v_splat(-INFINITY), scaled);
        v_store(score + at, scaled);
        high = v_max(high, scaled);
    }
    const float highest = v_most(high);
    vec total = v_zero();
    for (int at = 0; at < SPAN; at += LANES) {
        vec w = v_first(seen - at, exponential(v_sub(v_load(score + at), v_splat(highest))), v_zero());
        if (passed > at) w = v_first(passed - at, v_zero(), w);
        total = v_add(total, w);
        store_act(q->weight[r] + at, w);
    }
    if (highest != q->highest[r]) {
        float less[LANES];
        v_store(less, exponential(v_splat(q->highest[r] - highest)));
        q->total[r] *= less[0];
        for (int64_t z = 0; z < dim / LANES; z++) q->sum[r][z] = v_mul(q->sum[r][z], v_splat(less[0]));
        q->highest[r] = highest;
    }
    q->total[r] += v_sum(total);
}

INLINE void scores(Queries *q, const bf16 *const *keys, int64_t from, float scale, int64_t dim, int rows) {
    for (int at = 0; at < SPAN; at += PANEL) {
        vec score[STRIP][COLUMNS];
        for (int r = 0; r < rows; r++)
            for (int z = 0; z < COLUMNS; z++) score[r][z] = v_zero();
        for (int64_t i = 0; i < dim; i += STEP) {
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                weights k[COLUMNS];
                for (int z = 0; z < COLUMNS; z++) {
                    const int position = at + z * LANES;
                    k[z] = pairs(keys[position / TILE] + (i + part / 2 * 2) * TILE + position % TILE * 2, part % 2);
                }
                for (int r = 0; r < rows; r++) {
                    const inputs x = spread(q->query[r] + i + part);
                    for (int z = 0; z < COLUMNS; z++) score[r][z] = multiply(score[r][z], x, k[z]);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int z = 0; z < COLUMNS; z++) v_store(q->score[r] + at + z * LANES, score[r][z]);
    }
    for (int r = 0; r < rows; r++) weigh(q, r, from, scale, dim);
}

// Adds the values of the positions from `begin` to `end` of a SPAN, by the weights of `rows` queries from `first` on,
// for `columns` * LANES of the dimensions from `lowest` on. All of them see all of these. `whole`: so many are turns of STEP.
INLINE void gather(Queries *q, const bf16 *const *values, int64_t begin, int64_t end, int first, int rows, int64_t lowest,
                   int64_t dim, int columns, int whole) {
    vec sum[STRIP][COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int z = 0; z < columns; z++) sum[r][z] = q->sum[first + r][lowest / LANES + z];
    for (int64_t at = begin; at < end; at += STEP) {
        const bf16 *value = values[at / TILE] + at % TILE * dim + 2 * lowest;
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            if (!whole && at + part >= end) break;
            weights v[COLUMNS];
            for (int z = 0; z < columns; z++) {
                v[z] = pairs(value + part / 2 * 2 * dim + 2 * LANES * z, part % 2);
#if PARTS == 1
                if (!whole && at + 1 == end) v[z] = first_of_pairs(v[z]);
#endif
            }
            for (int r = 0; r < rows; r++) {
                const inputs w = spread(q->weight[first + r] + at + part);
                for (int z = 0; z < columns; z++) sum[r][z] = multiply(sum[r][z], w, v[z]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int z = 0; z < columns; z++) q->sum[first + r][lowest / LANES + z] = sum[r][z];
}

INLINE void gather_common(Queries *q, const bf16 *const *values, int64_t end, int rows, int64_t dim) {
    int64_t lowest = 0;
    for (; lowest + PANEL <= dim; lowest += PANEL) gather(q, values, 0, end, 0, rows, lowest, dim, COLUMNS, 1);
    for (; lowest < dim; lowest += LANES) gather(q, values, 0, end, 0, rows, lowest, dim, 1, 1);
}

static void gather_rest(Queries *q, const bf16 *const *values, int64_t begin, int64_t end, int row, int64_t dim) {
    int64_t lowest = 0;
    for (; lowest + PANEL <= dim; lowest += PANEL) gather(q, values, begin, end, row, 1, lowest, dim, COLUMNS, 0);
    for (; lowest < dim; lowest += LANES) gather(q, values, begin, end, row, 1, lowest, dim, 1, 0);
}

static void begin_sums(Queries *q, int rows, int64_t dim) {
    for (int r = 0; r < rows; r++) {
        q->highest[r] = -INFINITY;
        q->total[r] = 0;
        for (int64_t z = 0; z < dim / LANES; z++) q->sum[r][z] = v_zero();
    }
}

static void end_sums(Queries *q, int rows, int64_t dim) {
    for (int r = 0; r < rows; r++)
        for (int64_t z = 0; z < dim / LANES; z++)
            v_store(q->out[r] + LANES * z, v_div(q->sum[r][z], v_splat(q->total[r])));
}

// Where the keys and values of a SPAN lie. A branch's own are brought into the order of a chain, so that they are summed
// as a chain's.
typedef struct {
    const bf16 *keys[SPAN / TILE], *values[SPAN / TILE];
    _Alignas(LINE) bf16 own_keys[SPAN * MAX_HEAD_DIM], own_values[SPAN * MAX_HEAD_DIM];
} Found;

static inline void copy_slot(const Layer *layer, int64_t dim, int64_t slot, int64_t lane, bf16 *keys, bf16 *values) {
    const int64_t tile = slot / TILE * TILE * dim, place = slot % TILE;
    const bf16 *key = layer->keys + tile + 2 * place, *value = layer->values + tile + place / 2 * 2 * dim + place % 2;
    values += lane / 2 * 2 * dim + lane % 2;
    for (int64_t i = 0; i < dim; i += 2) memcpy(keys + i * TILE + 2 * lane, key + i * TILE, 2 * sizeof *key);
    for (int64_t i = 0; i < dim; i++) values[2 * i] = value[2 * i];
}

// The tiles of a SPAN in which a branch has positions of its own, up to `end`.
static void follow_path(const Model *m, const Layer *layer, const Step *s, const Row *row, int64_t kv_head, int64_t from,
                        int64_t end, Found *found) {
    const int64_t dim = m->head_dim, size = TILE * dim, head = kv_head * m->tiles * TILE;
    for (int z = 0; z < SPAN / TILE; z++) {
        const int64_t begin = from + z * TILE;
        if (begin + TILE <= row->fork) continue;
        bf16 *keys = found->own_keys + z * size, *values = found->own_values + z * size;
        if (begin < end) {
            // What lies before the fork, and numbers for what is not seen.
            memcpy(keys, found->keys[z], size * sizeof *keys);
            memcpy(values, found->values[z], size * sizeof *values);
            found->keys[z] = keys;
            found->values[z] = values;
        } else if (z > 0) {
            found->keys[z] = found->keys[z - 1];
            found->values[z] = found->values[z - 1];
        }
        for (int64_t at = begin < row->fork ? row->fork : begin; at < end && at < begin + TILE; at++)
            copy_slot(layer, dim, head + s->path[row->path + at - row->fork], at - begin, keys, values);
    }
}

// Of a row that sees `end` positions.
static inline void find(const Model *m, const Layer *layer, const Step *s, const Row *row, int64_t kv_head, int64_t from,
                        int64_t end, Found *found) {
    const int64_t size = TILE * m->head_dim, head = kv_head * m->tiles, last = (end - 1) / TILE;
    const int32_t *tiles = s->tiles + row->first_tile;
    for (int z = 0; z < SPAN / TILE; z++) {
        // Past the end any tile does: its scores are masked.
        const int64_t tile = from / TILE + z < last ? from / TILE + z : last;
        found->keys[z] = layer->keys + (head + tiles[tile]) * size;
        found->values[z] = layer->values + (head + tiles[tile]) * size;
    }
    if (row->fork < end && row->fork < from + SPAN) follow_path(m, layer, s, row, kv_head, from, end, found);
}

INLINE void attend_strip(const Model *m, const Layer *layer, const Step *s, const Row *row, int64_t kv_head, Queries *q,
                         int rows) {
    const int64_t dim = m->head_dim, end = q->position[rows - 1] + 1;
    begin_sums(q, rows, dim);
    for (int64_t from = first_seen(q, 0) / SPAN * SPAN; from < end; from += SPAN) {
        Found found;
        find(m, layer, s, row, kv_head, from, end, &found);
        scores(q, found.keys, from, (float)m->scale, dim, rows);
        // What the first query sees is seen by all; the others see a few positions more, each its own number.
        const int64_t common = visible(q, 0, from) / STEP * STEP;
        gather_common(q, found.values, common, rows, dim);
        for (int r = 0; r < rows; r++)
            if (visible(q, r, from) > common) gather_rest(q, found.values, common, visible(q, r, from), r, dim);
    }
    end_sums(q, rows, dim);
}

// One of a strip's queries: of the row's `number`th token and the `head`th of all heads.
static inline void set_query(const Model *m, Queries *q, int r, int64_t token, int64_t head, int64_t position,
                             const act *query, float *out, int64_t stride) {
    q->query[r] = query + (token * m->heads + head) * m->head_dim;
    q->out[r] = out + token * stride + head * m->head_dim;
    q->position[r] = position;
}

#ifdef __AMX_BF16__
#include "tiled_attention.h"
#endif

// A row's queries that look at one key head, of the tokens from `begin` to `end`. In and out: [tokens][heads * head_dim].
static void attend_row(const Model *m, const Layer *layer, const Step *s, const Row *row, int64_t kv_head,
                       int64_t begin, int64_t end, const act *query, float *out, int64_t stride) {
#ifdef __AMX_BF16__
    if (m->head_dim % TILED_INPUTS == 0) {
        attend_row_tiled(m, layer, s, row, kv_head, begin, end, query, out, stride);
        return;
    }
#endif
    const int64_t share = m->heads / m->kv_heads;
    for (int64_t first = begin * share; first < end * share; first += STRIP) {
        Queries q;
        q.window = layer->window;
        const int rows = (int)(end * share - first < STRIP ? end * share - first : STRIP);
        for (int r = 0; r < rows; r++) {
            const int64_t token = (first + r) / share, head = kv_head * share + (first + r) % share;
            set_query(m, &q, r, row->start + token, head, row->kv_len - row->num_tokens + token, query, out, stride);
        }
#define CALL(n) attend_strip(m, layer, s, row, kv_head, &q, n)
        WITH_ROWS(rows, CALL)
#undef CALL
    }
}
