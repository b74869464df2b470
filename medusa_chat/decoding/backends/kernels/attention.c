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
#define AHEAD (WIDTH > LANES ? 8192 : 2048) /* bytes of keys and of values */
#if defined(__AVX512VL__)
#define MOST_MIXED 4 /* pairs of a tile of what is mixed, whose sums are to stay in registers */
#else
#define MOST_MIXED 2
#endif

ptrdiff_t scores_size(ptrdiff_t keys) { return (keys + GROUP) * BLOCK; }

ptrdiff_t attention_size(const Decoder *m, const Layer *layer, ptrdiff_t keys) {
    const ptrdiff_t scores = scores_size(keys);
    return layer->head_dim * (BLOCK + KEYS) + scores + (m->is_half ? NEARER + scores / 2 : 0);
}

/* The first place that a row sees of the text. */
static int first_seen(const Attention *a, int row) {
    const int64_t seen = a->pass.positions[row] + 1 - a->layer.window;
    return a->layer.window && seen > 0 ? (int)seen : 0;
}

static Block block_at(const Attention *a, float *scores, float *scratch, float *whole) {
    const Decoder *m = a->pass.decoder;
    const int groups = (int)(a->layer.heads / a->layer.kv_heads), size = (int)a->layer.head_dim;
    Block b = {.pairs = least(BLOCK, (int)a->pass.rows * groups - a->first),
               .size = size,
               .words = m->is_half ? size / 2 : size,
               .is_half = (int)m->is_half,
               .whole = whole,
               .q = scratch,
               .turned = scratch + size * BLOCK,
               .s = scores,
               .dims = size,
               .stride = size};
    b.near_by = b.turned + size * KEYS;
    b.shares = (uint16_t *)(b.near_by + NEARER);
    for (int l = 0; l < b.pairs; l++) {
        b.row[l] = (a->first + l) / groups;
        b.head[l] = a->kv * groups + (a->first + l) % groups;
        b.to[l] = a->mixed + ((ptrdiff_t)b.row[l] * a->layer.heads + b.head[l]) * size;
    }
    b.from = first_seen(a, b.row[0]);
    for (int l = 1; l < b.pairs; l++) b.from = least(b.from, first_seen(a, b.row[l]));
    b.from = b.from / GROUP * GROUP;
    b.keys = (int)a->pass.start + b.row[b.pairs - 1] + 1 - b.from;
    b.width = (b.keys + KEYS - 1) / KEYS * KEYS;
    return b;
}

static void scale(const Block *b, const Attention *a) {
    const int size = b->size, width = query_width(&a->layer);
    for (int l = 0; l < b->pairs; l++) {
        const float *from = a->queries + (ptrdiff_t)b->row[l] * width + b->head[l] * size;
        float scaled_up[MOST_SIZE];
        for (int d = 0; d < size; d++) scaled_up[d] = from[d] * a->layer.scaling;
        if (b->is_half) narrow_all(scaled_up, (uint16_t *)(b->q + l * b->words), size);
        else memcpy(b->q + l * size, scaled_up, sizeof(float) * (size_t)size);
    }
}

/* Keys from `at` on with their words one behind the other; those beyond the last repeat it. */
static void turn_all(const Block *b, const float *keys, int at) {
    const float *k[KEYS];
    for (int j = 0; j < KEYS; j++) k[j] = keys + (ptrdiff_t)least(at + j, b->keys - 1) * b->words;
    const char *next = (const char *)k[0] + AHEAD;
    for (int i = 0; i < KEYS * b->words * 4; i += 64) __builtin_prefetch(next + i);
    int d = 0;
    for (; d + LANES <= b->words; d += LANES)
        for (int j = 0; j < KEYS; j += LANES) turn(k + j, d, b->turned + d * KEYS + j, KEYS);
    for (; d < b->words; d++)
        for (int j = 0; j < KEYS; j++) b->turned[d * KEYS + j] = k[j][d];
}

/* Scores of PAIRS pairs from `lane` on with the KEYS keys that were turned: a sum goes along the
   dimensions. */
#define SCORE(MULTIPLY, PAIRS)                                              \
    static void MULTIPLY##_##PAIRS(const Block *b, int lane, int at) {      \
        const float *q = b->q + (ptrdiff_t)lane * b->words;                 \
        const float *k = b->turned;                                         \
        wide sums[PAIRS * 2] = {0};                                         \
        for (int d = 0; d < b->words; d++, k += KEYS) {                     \
            wide low = load_wide(k), high = load_wide(k + WIDTH);           \
            HOLD(low);                                                      \
            HOLD(high);                                                     \
            _Pragma("GCC unroll 8") for (int p = 0; p < PAIRS; p++) {       \
                const wide ours = all_wide(q[(ptrdiff_t)p * b->words + d]); \
                sums[2 * p] = MULTIPLY(ours, low, sums[2 * p]);             \
                sums[2 * p + 1] = MULTIPLY(ours, high, sums[2 * p + 1]);    \
            }                                                               \
        }                                                                   \
        _Pragma("GCC unroll 8") for (int p = 0; p < PAIRS; p++) {           \
            float *s = b->s + (ptrdiff_t)(lane + p) * b->width + at;        \
            store_wide(s, sums[2 * p]);                                     \
            store_wide(s + WIDTH, sums[2 * p + 1]);                         \
        }                                                                   \
    }
#define SCORES(MULTIPLY) SCORE(MULTIPLY, 1) SCORE(MULTIPLY, 2) SCORE(MULTIPLY, 3) SCORE(MULTIPLY, 4)
SCORES(fused_wide)
SCORES(paired_wide)

/* Scores of one part's keys. */
static void score(const Block *b, const float *keys, int part, int parts) {
    static void (*const scores[2][MOST_SCORED])(const Block *, int, int) = {
        {fused_wide_1, fused_wide_2, fused_wide_3, fused_wide_4},
        {paired_wide_1, paired_wide_2, paired_wide_3, paired_wide_4}};
    const int tiles = (b->pairs + MOST_SCORED - 1) / MOST_SCORED;
    const int all_keys = b->width / KEYS, end_key = first(all_keys, part + 1, parts) * KEYS;
    for (int at = first(all_keys, part, parts) * KEYS; at < end_key; at += KEYS) {
        turn_all(b, keys, at);
        for (int t = 0; t < tiles; t++) {
            const int lane = first(b->pairs, t, tiles), end = first(b->pairs, t + 1, tiles);
            scores[b->is_half][end - lane - 1](b, lane, at);
        }
    }
}

/* What a row of scores may not see, and what lies beyond the last key. */
static void hide(const Block *b, const Attention *a, float *s, int row) {
    const Pass *pass = &a->pass;
    const int start = (int)pass->start, own = start > b->from ? start - b->from : 0;
    const int seen = least(first_seen(a, row) - b->from, own);
    for (int j = 0; j < seen; j++) s[j] = -INFINITY;
    if (pass->mask) {
        const float *mask = pass->mask + row * pass->stride + (b->from + own - start) - own;
        int j = own;
        for (; j + LANES <= b->keys; j += LANES) store(s + j, load(s + j) + load(mask + j));
        for (; j < b->keys; j++) s[j] += mask[j];
    }
    const int64_t position = pass->positions[row], window = a->layer.window;
    for (int j = own; window && position - start >= window && j < b->keys; j++)
        if (position - pass->positions[b->from + j - start] >= window) s[j] = -INFINITY;
    for (int j = b->keys; j < b->width; j++) s[j] = -INFINITY;
}

/* tanh(x), to a few units of the last place of 1. */
INLINE vec hyperbolic(vec x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

/* The shares of a block's sinks [pairs], behind its scores, which leave that room. */
static float *sinks_of(const Block *b) { return b->s + (ptrdiff_t)b->pairs * b->width; }

/* Scores of one part's pairs to shares, not yet divided by their sum. */
static void soften(const Block *b, const Attention *a, int part, int parts) {
    const float cap = a->layer.cap;
    for (int l = first(b->pairs, part, parts); l < first(b->pairs, part + 1, parts); l++) {
        float *s = b->s + (ptrdiff_t)l * b->width;
        for (int j = 0; cap > 0 && j < b->width; j += LANES)
            store(s + j, hyperbolic(load(s + j) / cap) * cap);
        hide(b, a, s, b->row[l]);
        vec most = load(s);
        for (int j = LANES; j < b->width; j += LANES) most = larger(load(s + j), most);
        const float *sink = a->layer.sinks ? a->layer.sinks + b->head[l] : NULL;
        const float own = highest(most), high = sink && *sink > own ? *sink : own;
        sinks_of(b)[l] = sink ? exponential(all(*sink - high))[0] : 0.0f;
        for (int j = 0; j < b->width; j += LANES) store(s + j, exponential(load(s + j) - high));
    }
}

/* The sums of PAIRS pairs from `lane` on, of COUNT vectors of values from dimension `dim` on, go on
   from key `from` to `end`; with ADDS those of the shares too. All go along the text: what a row
   does not see between adds nothing. VEC: its vectors; KIND: what their functions' names end in. */
#define MIX(NAME, PAIRS, COUNT, ADDS, VEC, KIND)                                                 \
    static void NAME##_##PAIRS(const Block *b, const float *values, int lane, int dim, int from, \
                               int end) {                                                        \
        const float *shares = b->s + (ptrdiff_t)lane * b->width;                                 \
        const int lanes = (int)(sizeof(VEC) / sizeof(float));                                    \
        VEC sums[PAIRS * COUNT], whole[PAIRS];                                                   \
        _Pragma("GCC unroll 8") for (int p = 0; p < PAIRS; p++) {                                \
            whole[p] = all##KIND(b->whole[lane + p]);                                            \
            _Pragma("GCC unroll 8") for (int i = 0; i < COUNT; i++)                              \
                sums[p * COUNT + i] = load##KIND(b->to[lane + p] + dim + i * lanes);             \
        }                                                                                        \
        for (int j = from; j < end; j++) {                                                       \
            const float *v = values + (ptrdiff_t)(j - from) * b->stride + dim;                   \
            VEC ours[COUNT];                                                                     \
            _Pragma("GCC unroll 8") for (int i = 0; i < COUNT; i++) {                            \
                ours[i] = load##KIND(v + i * lanes);                                             \
                HOLD(ours[i]);                                                                   \
            }                                                                                    \
            _Pragma("GCC unroll 8") for (int p = 0; p < PAIRS; p++) {                            \
                VEC share = all##KIND(shares[(ptrdiff_t)p * b->width + j]);                      \
                HOLD(share);                                                                     \
                if (ADDS) whole[p] += share;                                                     \
                _Pragma("GCC unroll 8") for (int i = 0; i < COUNT; i++)                          \
                    sums[p * COUNT + i] = fused##KIND(share, ours[i], sums[p * COUNT + i]);      \
            }                                                                                    \
        }                                                                                        \
        _Pragma("GCC unroll 8") for (int p = 0; p < PAIRS; p++) {                                \
            if (ADDS) b->whole[lane + p] = whole[p][0];                                          \
            _Pragma("GCC unroll 8") for (int i = 0; i < COUNT; i++)                              \
                store##KIND(b->to[lane + p] + dim + i * lanes, sums[p * COUNT + i]);             \
        }                                                                                        \
    }
#define MANY 32 /* dimensions that go together, where there are so many; else LANES */
#define MIXES(PAIRS)                                       \
    MIX(begin_many, PAIRS, (MANY / WIDTH), 1, wide, _wide) \
    MIX(begin_some, PAIRS, 1, 1, vec, )                    \
    MIX(mix_many, PAIRS, (MANY / WIDTH), 0, wide, _wide)   \
    MIX(mix_some, PAIRS, 1, 0, vec, )
MIXES(1)
MIXES(2)
#if MOST_MIXED == 4
MIXES(3)
MIXES(4)
#define EACH(NAME) {NAME##_1, NAME##_2, NAME##_3, NAME##_4}
#else
#define EACH(NAME) {NAME##_1, NAME##_2}
#endif

/* By whether dimensions are the first ones, whether there are many, and pairs. */
static void (*const mixes[2][2][MOST_MIXED])(const Block *, const float *, int, int, int, int) = {
    {EACH(mix_some), EACH(mix_many)},
    {EACH(begin_some), EACH(begin_many)},
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
            for (; dim + LANES <= b->dims; dim += many ? MANY : LANES) {
                many = dim + MANY <= b->dims;
                mixes[dim == 0][many][stop - lane - 1](b, v, lane, dim, from, end);
            }
            for (; dim < b->dims; dim++)
                for (int l = lane; l < stop; l++) mix_tail(b, v, l, dim, from, end);
        }
    }
    for (int l = 0; l < b->pairs; l++) {
        const float scale = 1.0f / (b->whole[l] + sinks_of(b)[l]);
        float *to = b->to[l];
        int d = 0;
        for (; d + LANES <= b->dims; d += LANES) store(to + d, load(to + d) * scale);
        for (; d < b->dims; d++) to[d] *= scale;
    }
}

/* The keys or the values of a block's head that it reads. */
static const char *head_at(const Attention *a, const Block *b, const void *kept) {
    const Decoder *m = a->pass.decoder;
    const ptrdiff_t place = a->kv * m->capacity + b->from;
    return (const char *)kept + place * b->size * (m->is_half ? 2 : 4);
}

void attend_step(const Attention *a, int step, float *scores, float *scratch, int part, int parts) {
    float whole[BLOCK] = {0};
    Block b = block_at(a, scores, scratch, whole);
    if (step == TO_SCORES) {
        scale(&b, a);
        score(&b, (const float *)head_at(a, &b, a->layer.keys), part, parts);
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
        mix(&b, head_at(a, &b, a->layer.values) + at * (b.is_half ? 2 : 4), 0);
    }
}

void attend(const Attention *a, float *scratch) {
    float *scores = scratch, *own = scratch + scores_size(a->pass.start + a->pass.rows);
    if (!takes_tiles(a->pass.decoder, &a->layer)) {
        for (int step = 0; step < STEPS; step++) attend_step(a, step, scores, own, 0, 1);
        return;
    }
    float whole[BLOCK] = {0};
    const Block b = block_at(a, scores, own, whole);
    const char *values = head_at(a, &b, a->layer.values);
    scale(&b, a);
    score_by_tiles(&b, head_at(a, &b, a->layer.keys));
    soften(&b, a, 0, 1);
    for (int l = 0; l < b.pairs; l++) memset(b.to[l], 0, sizeof(float) * (size_t)b.size);
    mix(&b, values, mix_by_tiles(&b, &a->pass, values));
}
