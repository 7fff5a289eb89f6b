// Attention on tiles (AMX): for up to 16 queries, and those of a row's branches together with the row's.

// For the queries from `begin` to `end`, which lie one after the other. Sums of one SPAN are taken on tiles, those of all
// in float32.
static inline void tiled_scores(Queries *q, const bf16 *query, const bf16 *const *keys, int64_t from, float scale,
                                int64_t dim, int begin, int end) {
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
    _tile_stored(0, q->score[0], sizeof *q->score);
    _tile_stored(1, q->score[0] + 16, sizeof *q->score);
    _tile_stored(2, q->score[0] + 32, sizeof *q->score);
    _tile_stored(3, q->score[0] + 48, sizeof *q->score);
    for (int r = begin; r < end; r++) weigh(q, r, from, scale, dim);
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
            q->sum[r][first / 16 + z] = v_add(q->sum[r][first / 16 + z], v_load(found[r] + 16 * z));
}

static void gather_tiles(Queries *q, const bf16 *const *values, int64_t dim, int begin, int end) {
    written();
    for (int64_t first = 0; first < dim; first += 2 * TILE) tiled_gather(q, values, first, dim, begin, end);
}

// Whether any value of a SPAN is infinite or no number, from position `seen` on or in the pair it belongs to.
static int spoiled(const bf16 *const *values, int64_t seen, int64_t dim) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    for (int64_t z = seen / TILE; z < SPAN / TILE; z++) {
        // Past the end the last tile stands for all: see find.
        if (z > seen / TILE && values[z] == values[z - 1]) break;
        const int64_t pair = z == seen / TILE ? seen % TILE / 2 : 0;
        for (int64_t i = pair * 2 * dim; i < TILE * dim; i += 32) {
            const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(values[z] + i), exponent);
            if (_mm512_cmpeq_epi16_mask(bits, exponent)) return 1;
        }
    }
    return 0;
}

// The values of a SPAN, with zeros for those that a query does not see.
static void copy_seen(const bf16 *const *values, int64_t seen, int64_t dim, bf16 *copy) {
    for (int64_t at = 0; at < SPAN; at++)
        for (int64_t i = 0; i < dim; i++) {
            const int64_t place = at % TILE / 2 * 2 * dim + 2 * i + at % 2;
            copy[at / TILE * TILE * dim + place] = at < seen ? values[at / TILE][place] : 0;
        }
}

// Query by query, each with the values that it sees: the same sums as together, in which those of others were
// multiplied by 0. That gives no 0 where they are infinite or no numbers.
static void gather_apart(Queries *q, const bf16 *const *values, int64_t from, int64_t dim, int begin, int end) {
    _Alignas(LINE) bf16 copy[SPAN * MAX_HEAD_DIM];
    const bf16 *copies[SPAN / TILE];
    for (int z = 0; z < SPAN / TILE; z++) copies[z] = copy + z * TILE * dim;
    for (int r = begin; r < end; r++) {
        copy_seen(values, visible(q, r, from), dim, copy);
        gather_tiles(q, copies, dim, r, r + 1);
    }
}

// Queries of a strip that belong to one row.
typedef struct {
    const Row *row;
    int begin, end;
} Part;

static void attend_span(const Model *m, const Layer *layer, const Step *s, const Part *part, int64_t kv_head, Queries *q,
                        const bf16 *query, int64_t from, int64_t seen) {
    Found found;
    int64_t common = SPAN;
    find(m, layer, s, part->row, kv_head, from, seen, &found);
    tiled_scores(q, query, found.keys, from, (float)m->scale, m->head_dim, part->begin, part->end);
    for (int r = part->begin; r < part->end; r++) common = visible(q, r, from) < common ? visible(q, r, from) : common;
    if (common < SPAN && spoiled(found.values, common, m->head_dim))
        gather_apart(q, found.values, from, m->head_dim, part->begin, part->end);
    else
        gather_tiles(q, found.values, m->head_dim, part->begin, part->end);
}

// All parts see the same keys first, which are read once for them, and then each its own.
static void attend_tiled(const Model *m, const Layer *layer, const Step *s, int64_t kv_head, Queries *q, const Part *part,
                         int parts) {
    const int64_t dim = m->head_dim;
    const Part all = {part->row, 0, part[parts - 1].end};
    _Alignas(LINE) bf16 query[TILED_ROWS * MAX_HEAD_DIM];
    int64_t shared = INT64_MAX, longest = 0, from = INT64_MAX;
    for (int n = 0; n < parts; n++) {
        const int64_t first = first_seen(q, part[n].begin) / SPAN * SPAN;
        from = first < from ? first : from;
        const int64_t fork = part[n].row->fork, end = q->position[part[n].end - 1] + 1;
        if (fork < end) shared = fork < shared ? fork : shared;
        longest = end > longest ? end : longest;
    }
    shared = shared < longest ? shared / SPAN * SPAN : longest;
    begin_sums(q, all.end, dim);
    for (int r = 0; r < all.end; r++) memcpy(query + r * dim, q->query[r], dim * sizeof *query);
    // That these were written is seen to there.
    shape_tiles(all.end, LINE, 1);
    for (; from < shared; from += SPAN) attend_span(m, layer, s, &all, kv_head, q, query, from, longest);
    const int64_t rest = from;
    for (int n = 0; n < parts; n++) {
        const int64_t end = q->position[part[n].end - 1] + 1;
        for (from = rest; from < end; from += SPAN) attend_span(m, layer, s, part + n, kv_head, q, query, from, end);
    }
    _tile_release();
    end_sums(q, all.end, dim);
}

// As attend_row; the queries of a row's branches follow its last.
static void attend_row_tiled(const Model *m, const Layer *layer, const Step *s, const Row *row, int64_t kv_head,
                             int64_t begin, int64_t end, const act *query, float *out, int64_t stride) {
    const int64_t share = m->heads / m->kv_heads;
    if (row->branch_tokens < 0) return;
    if (end == row->num_tokens) end += row->branch_tokens;
    const Row *of = row;
    for (int64_t first = begin * share; first < end * share; first += TILED_ROWS) {
        Queries q;
        q.window = layer->window;
        Part part[TILED_ROWS];
        int parts = 0;
        const int rows = (int)(end * share - first < TILED_ROWS ? end * share - first : TILED_ROWS);
        for (int r = 0; r < rows; r++) {
            const int64_t token = row->start + (first + r) / share, head = kv_head * share + (first + r) % share;
            while (token >= of->start + of->num_tokens) of++;
            set_query(m, &q, r, token, head, of->kv_len - of->num_tokens + token - of->start, query, out, stride);
            if (r == 0 || part[parts - 1].row != of) part[parts++] = (Part){of, r, r};
            part[parts - 1].end = r + 1;
        }
        attend_tiled(m, layer, s, kv_head, &q, part, parts);
    }
}
