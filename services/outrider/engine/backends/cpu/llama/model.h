// What the caller hands over: the model, the step, and room for what lies between two products. As in ../llama.py.
//
// Layouts
//   weights  [outputs / PANEL][inputs / group][PANEL][group]: a panel of outputs that are computed together, and of each
//            so many neighbouring inputs as one load takes. Panels of gate and up alternate by PANEL / 2 outputs, so that
//            their product is taken in registers. bfloat16, in pairs; or int8 with a scale for each output, in
//            groups of EIGHT_GROUP, of CODE_GROUP where inputs are rounded to 8 bits as well; or 4 bits with a grid,
//            in groups of FOUR_GROUP: of four bytes each has an input in its lower bits, and the fourth after it above.
//   grids    [outputs / PANEL][inputs / group][2][PANEL]: scales and zeros, w = (q - zero) * scale, in float16. A group
//            has whole blocks of FOUR_INPUTS.
//   keys     [kv_heads][tiles][head_dim / 2][16][2], bfloat16, a tile being 16 positions
//   values   [kv_heads][tiles][8][head_dim][2]

#define PANEL (COLUMNS * LANES)
#define STRIP 6   // rows computed together: 6 x COLUMNS sums, the weights and an input fill the registers
#define TILE 16   // positions in a tile of the cache
#define SPAN 64   // positions attended together
#define MAX_HEAD_DIM 256
#define PART 16   // tokens that a thread takes at a time, in what is done token by token
#define LINE 64   // bytes
#define FOUR_INPUTS 32  // that are rounded together, where weights have 4 bits
#define FOUR_GROUP 8

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const void *values;   // bfloat16, or int8 when there are scales, or 4 bits when there are grids
    const float *scales;  // [outputs, filled up to whole panels]
    const int32_t *sums;  // [outputs, filled up] of each output's int8 weights, where inputs are rounded too
    const float *bias;    // [outputs, filled up], or none
    const half *grids;    // or none
    int64_t group;        // inputs that share a grid
} Weights;

// Inputs of weights of 4 bits, as int8.
typedef struct {
    float unit, less;  // what 1 is worth; the sum of all codes, negative: how much a weight's zero of 1 takes away
    int8_t codes[FOUR_INPUTS];
} Block;

// What an adapter adds to some outputs of a product: b (a x). rank, a multiple of 4; 0: nothing.
typedef struct {
    const bf16 *a, *b;  // [rank][inputs], [outputs / LOW_OUTPUTS][rank][LOW_OUTPUTS]
    int64_t rank, first, outputs;
} Low;

#define LOW_OUTPUTS 16
#define MAX_RANK 256
enum { QKV, OUTPUT, GATE_UP, DOWN, MATRICES };
#define LOWS (3 * MATRICES)  // of a layer: as many for each product as it may be joined of

typedef struct {
    // Of what attention and the MLP take, and of what they add to a token's state: [width], or none.
    const float *attention_norm, *mlp_norm, *attention_post_norm, *mlp_post_norm;
    const float *query_key_norm;  // [(heads + kv_heads) * head_dim], or none
    const float *cos, *sin;       // [positions][rotary / 2], or none: not rotated
    Weights qkv, output, gate_up, down;
    bf16 *keys, *values;
    int64_t window;  // how many positions a token sees at most, its own included; 0: all
} Layer;

typedef struct {
    int64_t layers, width, inner, heads, kv_heads, head_dim, vocab, tiles;
    // Of each head the first `rotary` numbers are rotated. So many of a token's queries and keys are normed together.
    int64_t rotary, query_normed, key_normed;
    int64_t gelu;  // whether the gate is GELU, by its tanh, instead of SiLU
    double norm_eps, scale, embedding_scale, residual_scale, logit_scale;
    const bf16 *embedding;
    const float *final_norm;
    Weights head;
    const Layer *layer;
    // Before layer `joined` a head joins each token's state, which is normed if there is a norm, with a feature.
    Weights join;
    const float *state_norm, *feature_norm;
    int64_t joined;
} Model;

// Tokens that follow one another: a sequence's, or a branch of its drafted tree. Keys and values of a branch lie behind
// those of the whole row, in slots of their own.
typedef struct {
    int32_t start, num_tokens, kv_len, first_tile;  // first_tile: where its sequence's tiles begin in the step's list
    int32_t fork, path;     // from position `fork` on it sees what lies in the slots from path[path] on; kv_len: nowhere
    int32_t branch_tokens;  // of the branches that follow this row; below 0 for a branch
} Row;

typedef struct {
    int64_t tokens, rows, wanted, threads, tapped, taps;
    int64_t attended_width;
    const int64_t *token_ids, *positions, *logit_rows;
    const Row *row;
    // slots: where each token is placed, as tile * TILE + the place in it; path: the slots that branches see
    const int32_t *tiles, *slots, *path;
    // Hidden states are wanted of these tokens, as they enter these layers: see ../../../taps.py.
    const int64_t *tapped_rows, *tap;
    act *states;  // [taps][tapped][width]
    // What enters the first layer, [tokens][width], or none: the embeddings of token_ids. What its attention takes instead
    // of the norm of that, [tokens][attended_width], or none.
    const float *entering;
    const act *attended;
    const float *features;  // [tokens][width], or none: nothing is joined
    const int64_t *adapter;  // of each token, or -1; none: no token has one
    const Low *low;          // [adapters][layers][MATRICES][3]
} Step;

typedef struct {
    float *x, *wide;      // [tokens][width], [tokens][max(width, (heads + 2 kv_heads) * head_dim)]
    act *narrow, *inner;  // [tokens][max(width, heads * head_dim, 2 * width to join)], [tokens][inner]
    act *hidden;          // [wanted][width]
    float *logits;        // [wanted][vocab, filled up to whole panels]
    wide *panels;         // [threads][PANEL * most inputs of a layer], for weights that are widened once for many rows
    code *codes;          // [tokens][most inputs of a layer], for inputs that are rounded
    float *units;         // [tokens]
    Block *blocks;        // [tokens][most inputs of a layer / FOUR_INPUTS]
    float *more;          // [tokens][most outputs of a product, filled up to whole panels], where tokens have adapters
} Buffers;

// What a head reads: of each token's states, each normed by itself if there are norms, one product.
typedef struct {
    int64_t tokens, states, width, outputs, threads;  // width: of one of the states
    double norm_eps;
    const float *norms;   // [states][width], or none
    const float *in;      // [tokens][states][width]
    float *out;           // [tokens][outputs]
    Weights weights;
} Projection;

// What ../llama.py has to know of a variant.
typedef struct {
    int64_t panel, eight_group, code_group, act_bytes, wide_bytes, code_bytes, block_bytes;
} Layout;

// e^x for x <= 0 within 2 - x ulp, exactly 1 at 0. Below -87 the result is not to be used.
INLINE vec exponential(vec x) {
    const vec t = v_mul(v_max(v_splat(-87.f), x), v_splat(1.44269504f)), n = v_round(t), r = v_sub(t, n);
    vec p = v_splat(1.53533e-4f);
    p = v_fma(p, r, v_splat(1.33989e-3f));
    p = v_fma(p, r, v_splat(9.61844e-3f));
    p = v_fma(p, r, v_splat(5.550332e-2f));
    p = v_fma(p, r, v_splat(2.4022651e-1f));
    p = v_fma(p, r, v_splat(6.9314718e-1f));
    p = v_fma(p, r, v_splat(1.f));
    return v_ldexp(p, n);
}

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
