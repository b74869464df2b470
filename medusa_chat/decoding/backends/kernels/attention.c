/* Lanes of scores are keys, of what is mixed dimensions: one row's few heads fill them, too. */

#include "attention.h"

#include <math.h>
#include <string.h>

#include "attention_tiles.h"
#include "half.h"
#include "team.h"
#include "vectors.h"

#define MOST_SIZE 512 /* of a head */
#define MOST_SCORED 4 /* pairs of a tile of scores */
#define NEAR 32768    /* numbers that stay in a near cache until all pairs had them */
#define NEARER 8192   /* the same of bf16, once they are floats */
#if defined(__AVX512VL__)
#define MOST_MIXED 4 /* pairs of a tile of what is mixed, whose sums are to stay in registers */
#else
#define MOST_MIXED 2
#endif

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

ptrdiff_t attention_size(const Decoder *m, ptrdiff_t keys) {
    const ptrdiff_t width = keys + GROUP;
    return (2 * m->head_dim + width) * BLOCK + (m->is_half ? NEARER + width * BLOCK / 2 : 0);
}

static Block block_at(const Pass *pass, int kv, int first, float *scratch, float *mixed,
                      float *whole) {
    const Decoder *m = pass->decoder;
    const int groups = (int)(m->heads / m->kv_heads), size = (int)m->head_dim;
    const int keys = (int)(pass->start + pass->rows);
    Block b = {.pairs = least(BLOCK, (int)pass->rows * groups - first),
               .size = size,
               .words = m->is_half ? size / 2 : size,
               .keys = keys,
               .width = (keys + WIDE - 1) / WIDE * WIDE,
               .is_half = (int)m->is_half,
               .whole = whole,
               .q = scratch,
               .turned = scratch + size * BLOCK};
    b.s = b.turned + size * WIDE;
    b.near_by = b.s + (ptrdiff_t)b.width * BLOCK;
    b.shares = (uint16_t *)(b.near_by + NEARER);
    for (int l = 0; l < b.pairs; l++) {
        b.row[l] = (first + l) / groups;
        b.head[l] = kv * groups + (first + l) % groups;
        b.to[l] = mixed + ((ptrdiff_t)b.row[l] * m->heads + b.head[l]) * size;
    }
    return b;
}

static void scale(const Block *b, const Decoder *m, const float *qkv) {
    const int size = b->size, width = qkv_width(m);
    for (int l = 0; l < b->pairs; l++) {
        const float *from = qkv + (ptrdiff_t)b->row[l] * width + b->head[l] * size;
        float scaled_up[MOST_SIZE];
        for (int d = 0; d < size; d++) scaled_up[d] = from[d] * m->scaling;
        if (b->is_half) narrow_all(scaled_up, (uint16_t *)(b->q + l * b->words), size);
        else memcpy(b->q + l * size, scaled_up, sizeof(float) * (size_t)size);
    }
}

/* Keys from `at` on with their words one behind the other; those beyond the last repeat it. */
static void turn_all(const Block *b, const float *keys, int at) {
    const float *k[WIDE];
    for (int j = 0; j < WIDE; j++) k[j] = keys + (ptrdiff_t)least(at + j, b->keys - 1) * b->words;
    int d = 0;
    for (; d + LANES <= b->words; d += LANES)
        for (int j = 0; j < WIDE; j += LANES) turn(k + j, d, b->turned + d * WIDE + j, WIDE);
    for (; d < b->words; d++)
        for (int j = 0; j < WIDE; j++) b->turned[d * WIDE + j] = k[j][d];
}

/* Scores of PAIRS pairs from `lane` on with the WIDE keys that were turned: a sum goes along the
   dimensions. */
#define SCORE(MULTIPLY, PAIRS)                                                            \
    static void MULTIPLY##_##PAIRS(const Block *b, int lane, int at) {                    \
        const float *q = b->q + (ptrdiff_t)lane * b->words;                               \
        const float *k = b->turned;                                                       \
        vec sums[PAIRS * 2] = {0};                                                        \
        for (int d = 0; d < b->words; d++, k += WIDE) {                                   \
            vec low = load(k), high = load(k + LANES);                                    \
            HOLD(low);                                                                    \
            HOLD(high);                                                                   \
            _Pragma("GCC unroll 8") for (int p = 0; p < PAIRS; p++) {                     \
                const vec ours = all(q[(ptrdiff_t)p * b->words + d]);                     \
                sums[2 * p] = MULTIPLY(ours, low, sums[2 * p]);                           \
                sums[2 * p + 1] = MULTIPLY(ours, high, sums[2 * p + 1]);                  \
            }                                                                             \
        }                                                                                 \
        _Pragma("GCC unroll 8") for (int p = 0; p < PAIRS; p++) {                         \
            store(b->s + (ptrdiff_t)(lane + p) * b->width + at, sums[2 * p]);             \
            store(b->s + (ptrdiff_t)(lane + p) * b->width + at + LANES, sums[2 * p + 1]); \
        }                                                                                 \
    }
#define SCORES(MULTIPLY) SCORE(MULTIPLY, 1) SCORE(MULTIPLY, 2) SCORE(MULTIPLY, 3) SCORE(MULTIPLY, 4)
SCORES(fused)
SCORES(paired)

static void score(const Block *b, const float *keys) {
    static void (*const scores[2][MOST_SCORED])(const Block *, int, int) = {
        {fused_1, fused_2, fused_3, fused_4}, {paired_1, paired_2, paired_3, paired_4}};
    const int tiles = (b->pairs + MOST_SCORED - 1) / MOST_SCORED;
    for (int at = 0; at < b->keys; at += WIDE) {
        turn_all(b, keys, at);
        for (int t = 0; t < tiles; t++) {
            const int lane = first(b->pairs, t, tiles), end = first(b->pairs, t + 1, tiles);
            scores[b->is_half][end - lane - 1](b, lane, at);
        }
    }
}

/* From column `free` on, and what lies beyond the last key. */
static void hide(const Block *b, const Pass *pass, int free) {
    for (int l = 0; l < b->pairs; l++) {
        float *s = b->s + (ptrdiff_t)l * b->width;
        const float *mask = pass->mask + b->row[l] * pass->stride - pass->free;
        int j = free;
        for (; j + LANES <= b->keys; j += LANES) store(s + j, load(s + j) + load(mask + j));
        for (; j < b->keys; j++) s[j] += mask[j];
        for (; j < b->width; j++) s[j] = -INFINITY;
    }
}

/* Scores to shares, not yet divided by their sum. */
static void soften(const Block *b) {
    for (int l = 0; l < b->pairs; l++) {
        float *s = b->s + (ptrdiff_t)l * b->width;
        vec most = load(s);
        for (int j = LANES; j < b->width; j += LANES) most = larger(load(s + j), most);
        float high = most[0];
        for (int i = 1; i < LANES; i++) high = most[i] > high ? most[i] : high;
        for (int j = 0; j < b->width; j += LANES) store(s + j, exponential(load(s + j) - high));
    }
}

/* The sums of PAIRS pairs from `lane` on, of VECTORS vectors of values from dimension `dim` on, go
   on from key `from` to `end`; with ADDS those of the shares too. All go along the text: what a row
   does not see between adds nothing. */
#define MIX(NAME, PAIRS, VECTORS, ADDS)                                                            \
    static void NAME##_##PAIRS##_##VECTORS(const Block *b, const float *values, int lane, int dim, \
                                           int from, int end) {                                    \
        const float *shares = b->s + (ptrdiff_t)lane * b->width;                                   \
        vec sums[PAIRS * VECTORS], whole[PAIRS];                                                   \
        _Pragma("GCC unroll 8") for (int p = 0; p < PAIRS; p++) {                                  \
            whole[p] = all(b->whole[lane + p]);                                                    \
            _Pragma("GCC unroll 8") for (int i = 0; i < VECTORS; i++)                              \
                sums[p * VECTORS + i] = load(b->to[lane + p] + dim + i * LANES);                   \
        }                                                                                          \
        for (int j = from; j < end; j++) {                                                         \
            const float *v = values + (ptrdiff_t)(j - from) * b->size + dim;                       \
            vec ours[VECTORS];                                                                     \
            _Pragma("GCC unroll 8") for (int i = 0; i < VECTORS; i++) {                            \
                ours[i] = load(v + i * LANES);                                                     \
                HOLD(ours[i]);                                                                     \
            }                                                                                      \
            _Pragma("GCC unroll 8") for (int p = 0; p < PAIRS; p++) {                              \
                vec share = all(shares[(ptrdiff_t)p * b->width + j]);                              \
                HOLD(share);                                                                       \
                if (ADDS) whole[p] += share;                                                       \
                _Pragma("GCC unroll 8") for (int i = 0; i < VECTORS; i++)                          \
                    sums[p * VECTORS + i] = fused(share, ours[i], sums[p * VECTORS + i]);          \
            }                                                                                      \
        }                                                                                          \
        _Pragma("GCC unroll 8") for (int p = 0; p < PAIRS; p++) {                                  \
            if (ADDS) b->whole[lane + p] = whole[p][0];                                            \
            _Pragma("GCC unroll 8") for (int i = 0; i < VECTORS; i++)                              \
                store(b->to[lane + p] + dim + i * LANES, sums[p * VECTORS + i]);                   \
        }                                                                                          \
    }
#define MIXES(PAIRS)        \
    MIX(begin, PAIRS, 4, 1) \
    MIX(begin, PAIRS, 1, 1) \
    MIX(mix, PAIRS, 4, 0)   \
    MIX(mix, PAIRS, 1, 0)
MIXES(1)
MIXES(2)
#if MOST_MIXED == 4
MIXES(3)
MIXES(4)
#define EACH(NAME, VECTORS) \
    {NAME##_1_##VECTORS, NAME##_2_##VECTORS, NAME##_3_##VECTORS, NAME##_4_##VECTORS}
#else
#define EACH(NAME, VECTORS) {NAME##_1_##VECTORS, NAME##_2_##VECTORS}
#endif

/* By whether dimensions are the first ones, whether there are four vectors of them, and pairs. */
static void (*const mixes[2][2][MOST_MIXED])(const Block *, const float *, int, int, int, int) = {
    {EACH(mix, 1), EACH(mix, 4)},
    {EACH(begin, 1), EACH(begin, 4)},
};

/* One dimension of one pair, where no whole vector is left. */
static void mix_tail(const Block *b, const float *values, int lane, int dim, int from, int end) {
    vec sum = all(b->to[lane][dim]), whole = all(b->whole[lane]);
    for (int j = from; j < end; j++) {
        const vec share = all(b->s[(ptrdiff_t)lane * b->width + j]);
        whole += share;
        sum = fused(share, all(values[(ptrdiff_t)(j - from) * b->size + dim]), sum);
    }
    b->to[lane][dim] = sum[0];
    if (dim == 0) b->whole[lane] = whole[0];
}

/* Values from key `from` to `end` as floats. */
static const float *values_at(const Block *b, const void *values, int from, int end) {
    const ptrdiff_t at = (ptrdiff_t)from * b->size, count = (ptrdiff_t)(end - from) * b->size;
    if (!b->is_half) return (const float *)values + at;
    const uint16_t *v = (const uint16_t *)values + at;
    ptrdiff_t i = 0;
    for (; i + LANES <= count; i += LANES) store(b->near_by + i, widen(*(const halves *)(v + i)));
    for (; i < count; i++) b->near_by[i] = widen_one(v[i]);
    return b->near_by;
}

/* What the keys from `begin` on add. */
static void mix(const Block *b, const void *values, int begin) {
    const int tiles = (b->pairs + MOST_MIXED - 1) / MOST_MIXED;
    const int stretch = b->is_half ? NEARER / b->size : NEAR / b->size + 1;
    for (int from = begin; from < b->keys; from += stretch) {
        const int end = least(from + stretch, b->keys);
        const float *v = values_at(b, values, from, end);
        for (int t = 0; t < tiles; t++) {
            const int lane = first(b->pairs, t, tiles), stop = first(b->pairs, t + 1, tiles);
            int dim = 0, many;
            for (; dim + LANES <= b->size; dim += many ? 4 * LANES : LANES) {
                many = dim + 4 * LANES <= b->size;
                mixes[dim == 0][many][stop - lane - 1](b, v, lane, dim, from, end);
            }
            for (; dim < b->size; dim++)
                for (int l = lane; l < stop; l++) mix_tail(b, v, l, dim, from, end);
        }
    }
    for (int l = 0; l < b->pairs; l++) {
        const float scale = 1.0f / b->whole[l];
        float *to = b->to[l];
        int d = 0;
        for (; d + LANES <= b->size; d += LANES) store(to + d, load(to + d) * scale);
        for (; d < b->size; d++) to[d] *= scale;
    }
}

void attend(const Pass *pass, const Layer *layer, const float *qkv, int kv, int first, int free,
            float *scratch, float *mixed) {
    const Decoder *m = pass->decoder;
    const ptrdiff_t at = kv * m->capacity * m->head_dim * (m->is_half ? 2 : 4);
    const char *keys = (const char *)layer->keys + at, *values = (const char *)layer->values + at;
    float whole[BLOCK] = {0};
    const Block b = block_at(pass, kv, first, scratch, mixed, whole);
    const int is_tiled = takes_tiles(&b);
    scale(&b, m, qkv);
    if (is_tiled) score_by_tiles(&b, keys);
    else score(&b, (const float *)keys);
    hide(&b, pass, free);
    soften(&b);
    for (int l = 0; l < b.pairs; l++) memset(b.to[l], 0, sizeof(float) * (size_t)b.size);
    mix(&b, values, is_tiled ? mix_by_tiles(&b, pass, values) : 0);
}
