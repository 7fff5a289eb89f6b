// Tiles (AMX): the products of linear.h and attention.h, 16 rows x 32 inputs x 16 outputs in an instruction.
//
// In floats all of them or none: AMX adds even and odd inputs apart, so its sums are not vdpbf16ps's bits. Of its eight registers
// four hold sums, one the inputs, and three take turns with the weights, which lie as it wants them: a pair of inputs
// is a line of 16 outputs.

#include <sys/syscall.h>
#include <unistd.h>

#define TILED_ROWS 16
#define TILED_INPUTS 32
#define BLOCKS 8  // asked for at the same time

// Whether the system lets this process use them: it has to keep 8 kB more of each thread that is put aside.
static int tiles_granted(void) {
    const int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

// As ask in linear.h, where `block` of so many lines is in use: one line of the `n`th after it, from 1 to BLOCKS.
INLINE void ask_block(const char *block, int64_t lines, int64_t n, int64_t at) {
    _mm_prefetch(block + (n * lines + (BLOCKS - n) * (lines / BLOCKS) + at) * LINE, _MM_HINT_T1);
}

// Between memory that is written and its use by a tile. gcc does not know that tiles are loaded from memory: it would
// write it later, or leave that out.
INLINE void written(void) { __asm__ volatile("" ::: "memory"); }

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileShape;

// 0 to 3 hold sums and 4 inputs, of `rows`, of which a product takes so many bytes each; the others weights, or 5 as 4.
// While attending 6 holds weights of TILE positions, for `rows`, and 7 their values.
static void shape_tiles(int64_t rows, int bytes, int attending) {
    TileShape shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.bytes[i] = LINE;
        shape.rows[i] = i < 5 ? (uint8_t)rows : (uint8_t)(bytes / 4);
    }
    shape.bytes[4] = (uint16_t)bytes;
    if (attending) {
        shape.bytes[6] = LINE / 2;
        shape.rows[6] = (uint8_t)rows;
        shape.rows[7] = TILE / 2;
    }
    // All of it is read, and not only its first bytes.
    __asm__ volatile("" ::"m"(shape) : "memory");
    _tile_loadconfig(&shape);
}

static inline void finish_tiled(const Linear *l, float (*sum)[PANEL], int64_t panel, int64_t first, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        vec row[4];
        for (int z = 0; z < 4; z++) {
            row[z] = _mm512_load_ps(sum[r] + 16 * z);
            if (l->weights.scales) row[z] = _mm512_mul_ps(row[z], _mm512_loadu_ps(l->weights.scales + panel * PANEL + 16 * z));
        }
        finish_row(l, row, panel, first + r);
    }
}

INLINE void tiled_strip(const Linear *l, const void *values, int how, int64_t panel, int64_t first, int64_t rows) {
    const bf16 *in = l->in + first * l->inputs;
    const int64_t lines = how == EIGHT ? 1 : 2;  // to ask for between two products
    _Alignas(LINE) bf16 block[TILED_INPUTS * PANEL];
    _Alignas(LINE) float sum[TILED_ROWS][PANEL];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < l->inputs; k += TILED_INPUTS) {
        const bf16 *w = (const bf16 *)values + k * PANEL;
        const char *now = (const char *)w;
        if (how == EIGHT) {
            w = block;
            now = (const char *)values + k * PANEL;
            for (int64_t i = 0; i < TILED_INPUTS * PANEL; i += 32)
                _mm512_store_si512(block + i, (__m512i)eights((const int8_t *)now + i, 0));
            written();
        }
        // A quarter of what is asked for between two products: all at once would leave memory idle while tiles are
        // multiplied.
#define FETCH(quarter) \
    for (int64_t at = (quarter) * lines; at < ((quarter) + 1) * lines; at++) \
        for (int64_t n = 1; n <= BLOCKS; n++) ask_block(now, 32 * lines, n, at)
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
    const int64_t lines = panel_bytes(l) / LINE;
    const int64_t from = lines * first / l->rows, to = lines * end / l->rows;
    const int64_t turns = (end - first) / (2 * TILED_ROWS) * 2 * (l->inputs / TILED_INPUTS);
    if (panel + 1 == panels_of(l) || turns == 0) return (Coming){0};
    const char *next = (const char *)l->weights.values + (panel + 1) * lines * LINE;
    return (Coming){next + from * LINE, next + to * LINE, (to - from + turns - 1) / turns};
}

// Two full strips: each tile of weights serves both, half of the outputs at a time. Memory is read meanwhile: the panel in
// use was asked for by the one before.
static void tiled_pair(const Linear *l, const bf16 *values, int64_t panel, int64_t first, Coming *next) {
    const int64_t stride = l->inputs * sizeof *l->in;
    const bf16 *in = l->in + first * l->inputs, *more = in + TILED_ROWS * l->inputs;
    _Alignas(LINE) float sum[2 * TILED_ROWS][PANEL];
    for (int64_t half = 0; half < PANEL; half += PANEL / 2) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < l->inputs; k += TILED_INPUTS) {
            const bf16 *w = values + k * PANEL + 2 * half;
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

// As four_strip, and its bits.
static void tiled_fours(const Linear *l, const char *values, int64_t panel, int64_t first, int64_t rows) {
    const int64_t blocks = l->inputs / FOUR_INPUTS;
    const Block *in = l->blocks + first * blocks;
    _Alignas(LINE) int8_t w[COLUMNS][FOUR_INPUTS * LANES];
    _Alignas(LINE) int32_t found[COLUMNS][TILED_ROWS][LANES];
    _Alignas(LINE) float sum[TILED_ROWS][PANEL] = {0};
    for (int64_t n = 0; n < blocks; n++, in++, values += FOUR_BYTES) {
        const half *grid = grid_of(l, panel, n);
        ask(values, FOUR_BYTES);
        for (int z = 0; z < COLUMNS; z++)
            for (int k = 0; k < FOUR_INPUTS; k += 4) _mm512_store_si512(w[z] + k * LANES, fours_at(values, k, z));
        written();
        _tile_loadd(4, in->codes, blocks * sizeof *in);
#define COUNT(z, weights) \
    _tile_zero(z); \
    _tile_loadd(weights, w[z], LINE); \
    _tile_dpbsud(z, 4, weights); \
    _tile_stored(z, found[z], LINE)
        COUNT(0, 5);
        COUNT(1, 6);
        COUNT(2, 7);
        COUNT(3, 5);
#undef COUNT
        written();
        for (int z = 0; z < COLUMNS; z++) {
            const vec scale = v_load_half(grid + LANES * z), zero = v_load_half(grid + PANEL + LANES * z);
            for (int64_t r = 0; r < rows; r++) {
                float *at = sum[r] + LANES * z;
                v_store(at, add_block(v_load(at), i_load(found[z][r]), in + r * blocks, scale, zero));
            }
        }
    }
    finish_tiled(l, sum, panel, first, rows);
}

static void tiled_rows(const Linear *l, const void *values, int how, int64_t panel, int64_t first, int64_t end) {
    Coming next = coming(l, panel, first, end);
    int64_t shaped = 0;
    for (; first < end; first += TILED_ROWS) {
        const int64_t rows = end - first < TILED_ROWS ? end - first : TILED_ROWS;
        if (rows != shaped) shape_tiles(shaped = rows, how == FOUR ? FOUR_INPUTS : LINE, 0);
        // The first panel was asked for by nobody: its first strip does that, as a single one.
        if (how != EIGHT && how != FOUR && (panel || first) && end - first >= 2 * TILED_ROWS) {
            tiled_pair(l, values, panel, first, &next);
            first += TILED_ROWS;
            continue;
        }
        if (how == FOUR)
            tiled_fours(l, values, panel, first, rows);
        else if (how == EIGHT)
            tiled_strip(l, values, EIGHT, panel, first, rows);
        else
            tiled_strip(l, values, PAIRS, panel, first, rows);
    }
    _tile_release();
}

