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
#define AHEAD 2048    /* bytes of keys and of values */
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

ptrdiff_t scores_size(ptrdiff_t keys) { return (keys + GROUP) * BLOCK; }

ptrdiff_t attention_size(const Decoder *m, ptrdiff_t keys) {
    const ptrdiff_t scores = scores_size(keys);
    return 2 * m->head_dim * BLOCK + scores + (m->is_half ? NEARER + scores / 2 : 0);
}

static Block block_at(const Attention *a, float *scores, float *scratch, float *whole) {
    const Decoder *m = a->pass.decoder;
    const int groups = (int)(m->heads / m->kv_heads), size = (int)m->head_dim;
    const int keys = (int)(a->pass.start + a->pass.rows);
    Block b = {.pairs = least(BLOCK, (int)a->pass.rows * groups - a->first),
               .size = size,
               .words = m->is_half ? size / 2 : size,
               .keys = keys,
               .width = (keys + WIDE - 1) / WIDE * WIDE,
               .is_half = (int)m->is_half,
               .whole = whole,
               .q = scratch,
               .turned = scratch + size * BLOCK,
               .s = scores,
               .dims = size,
               .stride = size};
    b.near_by = b.turned + size * WIDE;
    b.shares = (uint16_t *)(b.near_by + NEARER);
    for (int l = 0; l < b.pairs; l++) {
        b.row[l] = (a->first + l) / groups;
        b.head[l] = a->kv * groups + (a->first + l) % groups;
        b.to[l] = a->mixed + ((ptrdiff_t)b.row[l] * m->heads + b.head[l]) * size;
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
    const char *next = (const char *)k[0] + AHEAD;
    for (int i = 0; i < WIDE * b->words * 4; i += 64) __builtin_prefetch(next + i);
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

/* Scores of one part's keys. */
static void score(const Block *b, const float *keys, int part, int parts) {
    static void (*const scores[2][MOST_SCORED])(const Block *, int, int) = {
        {fused_1, fused_2, fused_3, fused_4}, {paired_1, paired_2, paired_3, paired_4}};
    const int tiles = (b->pairs + MOST_SCORED - 1) / MOST_SCORED;
    const int all_keys = b->width / WIDE, end_key = first(all_keys, part + 1, parts) * WIDE;
    for (int at = first(all_keys, part, parts) * WIDE; at < end_key; at += WIDE) {
        turn_all(b, keys, at);
        for (int t = 0; t < tiles; t++) {
            const int lane = first(b->pairs, t, tiles), end = first(b->pairs, t + 1, tiles);
            scores[b->is_half][end - lane - 1](b, lane, at);
        }
    }
}

/* A row of scores from column `free` on, and what lies beyond the last key. */
static void hide(const Block *b, const Pass *pass, float *s, int row, int free) {
    const float *mask = pass->mask + row * pass->stride - pass->free;
    int j = free;
    for (; j + LANES <= b->keys; j += LANES) store(s + j, load(s + j) + load(mask + j));
    for (; j < b->keys; j++) s[j] += mask[j];
    for (; j < b->width; j++) s[j] = -INFINITY;
}

/* Scores of one part's pairs to shares, not yet divided by their sum. */
static void soften(const Block *b, const Attention *a, int part, int parts) {
    for (int l = first(b->pairs, part, parts); l < first(b->pairs, part + 1, parts); l++) {
        float *s = b->s + (ptrdiff_t)l * b->width;
        hide(b, &a->pass, s, b->row[l], a->free);
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
            const float *v = values + (ptrdiff_t)(j - from) * b->stride + dim;                     \
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
        sum = fused(share, all(values[(ptrdiff_t)(j - from) * b->stride + dim]), sum);
    }
    b->to[lane][dim] = sum[0];
    if (dim == 0) b->whole[lane] = whole[0];
}

/* Values from key `from` to `end` as floats. */
static const float *values_at(const Block *b, const void *values, int from, int end) {
    const ptrdiff_t at = (ptrdiff_t)from * b->size;
    if (!b->is_half) return (const float *)values + at;
    const uint16_t *v = (const uint16_t *)values + at;
    const int size = b->size, dims = b->dims;
    float *to = b->near_by;
    for (int j = from; j < end; j++, v += size, to += dims) {
        int d = 0;
        for (int i = 0; i < dims; i += 32) __builtin_prefetch((const char *)(v + i) + AHEAD);
        for (; d + LANES <= dims; d += LANES) store(to + d, widen(*(const halves *)(v + d)));
        for (; d < dims; d++) to[d] = widen_one(v[d]);
    }
    return b->near_by;
}

/* What the keys from `begin` on add, divided by the shares' sums. */
static void mix(const Block *b, const void *values, int begin) {
    const int tiles = (b->pairs + MOST_MIXED - 1) / MOST_MIXED;
    const int stretch = b->is_half ? NEARER / b->dims : NEAR / b->size + 1;
    for (int from = begin; from < b->keys; from += stretch) {
        const int end = least(from + stretch, b->keys);
        const float *v = values_at(b, values, from, end);
        for (int t = 0; t < tiles; t++) {
            const int lane = first(b->pairs, t, tiles), stop = first(b->pairs, t + 1, tiles);
            int dim = 0, many;
            for (; dim + LANES <= b->dims; dim += many ? 4 * LANES : LANES) {
                many = dim + 4 * LANES <= b->dims;
                mixes[dim == 0][many][stop - lane - 1](b, v, lane, dim, from, end);
            }
            for (; dim < b->dims; dim++)
                for (int l = lane; l < stop; l++) mix_tail(b, v, l, dim, from, end);
        }
    }
    for (int l = 0; l < b->pairs; l++) {
        const float scale = 1.0f / b->whole[l];
        float *to = b->to[l];
        int d = 0;
        for (; d + LANES <= b->dims; d += LANES) store(to + d, load(to + d) * scale);
        for (; d < b->dims; d++) to[d] *= scale;
    }
}

/* The keys or the values of a block's head. */
static const char *head_at(const Attention *a, const void *kept) {
    const Decoder *m = a->pass.decoder;
    return (const char *)kept + a->kv * m->capacity * m->head_dim * (m->is_half ? 2 : 4);
}

void attend_step(const Attention *a, int step, float *scores, float *scratch, int part, int parts) {
    float whole[BLOCK] = {0};
    Block b = block_at(a, scores, scratch, whole);
    if (step == TO_SCORES) {
        scale(&b, a->pass.decoder, a->qkv);
        score(&b, (const float *)head_at(a, a->layer.keys), part, parts);
    } else if (step == TO_SHARES) {
        soften(&b, a, part, parts);
    } else {
        const int vectors = b.size / LANES, at = first(vectors, part, parts) * LANES;
        b.dims = (part + 1 < parts ? first(vectors, part + 1, parts) * LANES : b.size) - at;
        if (!b.dims) return;
        b.stride = b.is_half ? b.dims : b.size;
        for (int l = 0; l < b.pairs; l++) {
            b.to[l] += at;
            memset(b.to[l], 0, sizeof(float) * (size_t)b.dims);
        }
        mix(&b, head_at(a, a->layer.values) + at * (b.is_half ? 2 : 4), 0);
    }
}

void attend(const Attention *a, float *scratch) {
    float *scores = scratch, *own = scratch + scores_size(a->pass.start + a->pass.rows);
    if (!takes_tiles(a->pass.decoder)) {
        for (int step = 0; step < STEPS; step++) attend_step(a, step, scores, own, 0, 1);
        return;
    }
    float whole[BLOCK] = {0};
    const Block b = block_at(a, scores, own, whole);
    const char *values = head_at(a, a->layer.values);
    scale(&b, a->pass.decoder, a->qkv);
    score_by_tiles(&b, head_at(a, a->layer.keys));
    soften(&b, a, 0, 1);
    for (int l = 0; l < b.pairs; l++) memset(b.to[l], 0, sizeof(float) * (size_t)b.size);
    mix(&b, values, mix_by_tiles(&b, &a->pass, values));
}
