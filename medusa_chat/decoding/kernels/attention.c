/* Lanes are (row, head) pairs; scores are summed along head_dim, values along the text. */

#include "attention.h"

#include <stddef.h>

#include "vectors.h"

int free_columns(const Pass *pass) {
    int free = (int)(pass->start + pass->rows);
    for (int i = 0; i < pass->rows; i++) {
        const float *row = pass->mask + i * pass->stride;
        int j = (int)pass->free;
        while (j < free && row[j - pass->free] == 0.0f) j++;
        free = j;
    }
    return free;
}

/* Scores [keys, BLOCK] of queries [head_dim, BLOCK]: lanes are rows, a sum goes along head_dim. */
#define SCORE(KEYS, VECTORS)                                                                   \
    INLINE void score_##KEYS##_##VECTORS(const float *q, const float *k, float *s, int size) { \
        vec sums[KEYS * VECTORS] = {0};                                                        \
        for (int d = 0; d < size; d++)                                                         \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++) {                        \
                vec ours = load(q + d * BLOCK + v * LANES);                                    \
                _Pragma("GCC unroll 8") for (int j = 0; j < KEYS; j++)                         \
                    sums[j * VECTORS + v] =                                                    \
                        fused(ours, all(k[(ptrdiff_t)j * size + d]), sums[j * VECTORS + v]);   \
            }                                                                                  \
        _Pragma("GCC unroll 8") for (int j = 0; j < KEYS; j++)                                 \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++)                          \
                store(s + j * BLOCK + v * LANES, sums[j * VECTORS + v]);                       \
    }

SCORE(1, 1)
SCORE(8, 1)
SCORE(1, 2)
SCORE(6, 2)

/* Values of DIMS dimensions, mixed by shares [keys, BLOCK]: a sum goes along the text. */
#define MIX(DIMS, VECTORS)                                                                         \
    INLINE void mix_##DIMS##_##VECTORS(const float *s, const float *values, int keys, int size,    \
                                       float *out) {                                               \
        vec sums[DIMS * VECTORS] = {0};                                                            \
        for (int j = 0; j < keys; j++)                                                             \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++) {                            \
                vec share = load(s + (ptrdiff_t)j * BLOCK + v * LANES);                            \
                _Pragma("GCC unroll 8") for (int d = 0; d < DIMS; d++)                             \
                    sums[d * VECTORS + v] =                                                        \
                        fused(share, all(values[(ptrdiff_t)j * size + d]), sums[d * VECTORS + v]); \
            }                                                                                      \
        _Pragma("GCC unroll 8") for (int d = 0; d < DIMS; d++)                                     \
            _Pragma("GCC unroll 8") for (int v = 0; v < VECTORS; v++)                              \
                store(out + d * BLOCK + v * LANES, sums[d * VECTORS + v]);                         \
    }

MIX(1, 1)
MIX(8, 1)
MIX(1, 2)
MIX(4, 2)

/* One block of pairs; lanes beyond the last pair repeat it. */
typedef struct {
    int row[BLOCK], head[BLOCK], pairs;
    int is_wide; /* whether the second vector holds any pair */
    int size, keys;
    float *q, *out, *s; /* [head_dim, BLOCK], [head_dim, BLOCK], [keys, BLOCK] */
} Block;

static Block block_at(const Pass *pass, int kv, int first, float *scratch) {
    const Decoder *m = pass->decoder;
    const int groups = (int)(m->heads / m->kv_heads), size = (int)m->head_dim;
    const int pairs = least(BLOCK, (int)pass->rows * groups - first);
    float *out = scratch + size * BLOCK;
    Block b = {.pairs = pairs,
               .is_wide = pairs > LANES,
               .size = size,
               .keys = (int)(pass->start + pass->rows),
               .q = scratch,
               .out = out,
               .s = out + size * BLOCK};
    for (int l = 0; l < BLOCK; l++) {
        const int pair = first + least(l, pairs - 1);
        b.row[l] = pair / groups;
        b.head[l] = kv * groups + pair % groups;
    }
    return b;
}

static void gather(const Block *b, const Decoder *m, const float *qkv) {
    const int size = b->size, width = qkv_width(m);
    float *q = b->q;
    for (int l = 0; l < BLOCK; l++) {
        const float *from = qkv + (ptrdiff_t)b->row[l] * width + b->head[l] * size;
        for (int d = 0; d < size; d++) q[d * BLOCK + l] = from[d] * m->scaling;
    }
}

static void score(const Block *b, const float *k) {
    const int size = b->size, keys = b->keys;
    const float *q = b->q;
    float *s = b->s;
    int j = 0;
    if (b->is_wide) {
        for (; j + 6 <= keys; j += 6) score_6_2(q, k + (ptrdiff_t)j * size, s + j * BLOCK, size);
        for (; j < keys; j++) score_1_2(q, k + (ptrdiff_t)j * size, s + j * BLOCK, size);
    } else {
        for (; j + 8 <= keys; j += 8) score_8_1(q, k + (ptrdiff_t)j * size, s + j * BLOCK, size);
        for (; j < keys; j++) score_1_1(q, k + (ptrdiff_t)j * size, s + j * BLOCK, size);
    }
}

/* From column `free` on. */
static void hide(const Block *b, const Pass *pass, int free) {
    float *s = b->s;
    for (int j = free; j < b->keys; j++)
        for (int l = 0; l < BLOCK; l++)
            s[j * BLOCK + l] += pass->mask[b->row[l] * pass->stride + j - pass->free];
}

/* Scores to shares, not yet divided; what divides a lane goes where its queries were. */
static void soften(const Block *b) {
    const int keys = b->keys;
    for (int part = 0; part < (b->is_wide ? BLOCK : LANES); part += LANES) {
        float *s = b->s + part;
        vec most = load(s), sum = all(0.0f);
        for (int j = 1; j < keys; j++) {
            vec x = load(s + j * BLOCK);
            most = pick(x > most, x, most);
        }
        for (int j = 0; j < keys; j++) {
            vec share = exponential(load(s + j * BLOCK) - most);
            sum += share;
            store(s + j * BLOCK, share);
        }
        store(b->q + part, 1.0f / sum);
    }
}

static void mix(const Block *b, const float *v) {
    const int size = b->size, keys = b->keys;
    const float *s = b->s;
    float *out = b->out;
    int d = 0;
    if (b->is_wide) {
        for (; d + 4 <= size; d += 4) mix_4_2(s, v + d, keys, size, out + d * BLOCK);
        for (; d < size; d++) mix_1_2(s, v + d, keys, size, out + d * BLOCK);
    } else {
        for (; d + 8 <= size; d += 8) mix_8_1(s, v + d, keys, size, out + d * BLOCK);
        for (; d < size; d++) mix_1_1(s, v + d, keys, size, out + d * BLOCK);
    }
}

static void scatter(const Block *b, int heads, float *mixed) {
    const int size = b->size;
    for (int l = 0; l < b->pairs; l++) {
        float *to = mixed + ((ptrdiff_t)b->row[l] * heads + b->head[l]) * size;
        for (int d = 0; d < size; d++) to[d] = b->out[d * BLOCK + l] * b->q[l];
    }
}

void attend(const Pass *pass, const Layer *layer, const float *qkv, int kv, int first, int free,
            float *scratch, float *mixed) {
    const Decoder *m = pass->decoder;
    const ptrdiff_t at = kv * m->capacity * m->head_dim;
    const Block b = block_at(pass, kv, first, scratch);
    gather(&b, m, qkv);
    score(&b, layer->keys + at);
    hide(&b, pass, free);
    soften(&b);
    mix(&b, layer->values + at);
    scatter(&b, (int)m->heads, mixed);
}
